// conv2d_ext::rounded: a copy, by which a graph says that an element of 16 bits is what would be stored, and not what a
// compiler knows more of (conv2d_ext/_rounded.py). It names the type: a compiler that writes a graph anew may have made
// the input another one's.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <algorithm>

#include "autograd_node.h"
#include "find_op.h"

namespace conv2d_ext {

using RoundedSignature = at::Tensor(const at::Tensor&, at::ScalarType);
namespace op_names {
inline constexpr char rounded[] = "rounded";
}
inline const auto& rounded_op() { return op_named<RoundedSignature, op_names::rounded>(); }

namespace {

// With the input's strides, without a question to sizes that are symbols; row by row where elements are expanded.
at::Tensor rounded_meta(const at::Tensor& input, at::ScalarType dtype) {
  const auto strides = input.sym_strides();
  const bool is_expanded =
      std::any_of(strides.begin(), strides.end(), [](const c10::SymInt& stride) { return stride.maybe_as_int() == 0; });
  const auto options = input.options().dtype(dtype);
  return is_expanded ? at::empty_symint(input.sym_sizes(), options)
                     : at::empty_strided_symint(input.sym_sizes(), strides, options);
}

at::Tensor rounded_anywhere(const at::Tensor& input, at::ScalarType dtype) {
  return rounded_meta(input, dtype).copy_(input);
}

struct RoundedBackward {
  static constexpr const char* kName = "Conv2dExtRoundedBackward";
  static constexpr size_t kArguments = 1;
  struct State {
    template <class Self, class Visit>
    static void visit(Self&, Visit) {}
  };
  static void apply(const at::Tensor& grad, const at::Tensor&, const at::Tensor&, const State&, const Wanted& wanted,
                    torch::autograd::variable_list& result) {
    if (wanted[0]) result[0] = grad;  // PyTorch gives it the input's type
  }
};

at::Tensor rounded_autograd(c10::DispatchKeySet keys, const at::Tensor& input, at::ScalarType dtype) {
  const at::Tensor result = below_autograd(rounded_op(), keys, input, dtype);
  if (torch::autograd::compute_requires_grad(input)) {
    torch::autograd::set_history(result, make_node<RoundedBackward>(input));
  }
  if (torch::autograd::isFwGradDefined(input)) {
    result._set_fw_grad(tangent(input).to(dtype), /*level=*/0, /*is_inplace_op=*/false);
  }
  return result;
}

TORCH_LIBRARY_IMPL(conv2d_ext, CompositeExplicitAutograd, m) { m.impl("rounded", rounded_anywhere); }
TORCH_LIBRARY_IMPL(conv2d_ext, Meta, m) { m.impl("rounded", rounded_meta); }
TORCH_LIBRARY_IMPL(conv2d_ext, Autograd, m) { m.impl("rounded", rounded_autograd); }

}  // namespace
}  // namespace conv2d_ext
