// conv2d_ext::sum, mean and var: shapes and derivatives.
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "autograd_node.h"
#include "op_checks.h"
#include "reductions.h"

namespace conv2d_ext {

std::vector<bool> reduced_dims(const char* op, const at::Tensor& input, c10::IntArrayRef dim) {
  check_real(op, "input", input);
  std::vector<bool> reduced(size_t(input.dim()));
  for (const int64_t named : dim) {
    const int64_t d = at::maybe_wrap_dim(named, input.dim());
    if (input.dim() == 0) continue;
    TORCH_CHECK(!reduced[size_t(d)], "dim ", d, " appears multiple times in the list of dims");
    reduced[size_t(d)] = true;
  }
  return reduced;
}

std::vector<c10::SymInt> sum_sizes(const at::Tensor& input, const std::vector<bool>& reduced, bool keepdim) {
  std::vector<c10::SymInt> sizes;
  for (int64_t d = 0; d < input.dim(); ++d) {
    if (!reduced[size_t(d)]) {
      sizes.push_back(input.sym_size(d));
    } else if (keepdim) {
      sizes.emplace_back(1);
    }
  }
  return sizes;
}

namespace {

using at::Tensor;
using torch::autograd::compute_requires_grad;
using torch::autograd::isFwGradDefined;
using torch::autograd::variable_list;

constexpr const char *kSum = "conv2d_ext::sum", *kMean = "conv2d_ext::mean", *kVar = "conv2d_ext::var";

Tensor sum_meta(const Tensor& input, c10::IntArrayRef dim, bool keepdim) {
  return at::empty_symint(sum_sizes(input, reduced_dims(kSum, input, dim), keepdim), input.options());
}

TORCH_LIBRARY_IMPL(conv2d_ext, Meta, m) { m.impl("sum", sum_meta); }

// How many elements a mean is of.
c10::SymInt count_of(const Tensor& input, c10::IntArrayRef dim) {
  const std::vector<bool> reduced = reduced_dims(kMean, input, dim);
  c10::SymInt count = 1;
  for (int64_t d = 0; d < input.dim(); ++d) {
    if (reduced[size_t(d)]) count = count * input.sym_size(d);
  }
  return count;
}

Tensor mean_anywhere(const Tensor& input, c10::IntArrayRef dim, bool keepdim) {
  const at::Scalar count = count_of(input, dim);
  return at::div(sum_over(input, dim, keepdim), count);
}

TORCH_LIBRARY_IMPL(conv2d_ext, CompositeExplicitAutograd, m) { m.impl("mean", mean_anywhere); }

struct SumBackward {
  static constexpr const char* kName = "Conv2dExtSumBackward";
  static constexpr size_t kArguments = 1;
  struct State {
    SymSizes size, kept;  // the input's; the same with reduced dimensions of size 1
    SymSizes divisor;     // of a mean
    template <class Self, class Visit>
    static void visit(Self& self, Visit visit) {
      visit(self.size);
      visit(self.kept);
      visit(self.divisor);
    }
  };
  static void apply(const Tensor& grad, const Tensor&, const Tensor&, const State& state, const Wanted& wanted,
                    variable_list& result) {
    if (!wanted[0]) return;
    result[0] = grad.reshape_symint(state.kept).expand_symint(state.size);
    // Once it has the input's size: as PyTorch's it can be written to.
    if (!state.divisor.empty()) result[0] = at::div(result[0], at::Scalar(state.divisor[0]));
  }
};

template <auto op, bool is_mean>
Tensor sum_autograd(c10::DispatchKeySet keys, const Tensor& input, c10::IntArrayRef dim, bool keepdim) {
  const Tensor result = below_autograd(op(), keys, input, dim, keepdim);
  if (compute_requires_grad(input)) {
    auto node = make_node<SumBackward>(input);
    node->state.size = copy_sizes(input.sym_sizes());
    node->state.kept = copy_sizes(sum_sizes(input, reduced_dims(is_mean ? kMean : kSum, input, dim), /*keepdim=*/true));
    if (is_mean) node->state.divisor = {count_of(input, dim)};
    torch::autograd::set_history(result, node);
  }
  if (isFwGradDefined(input)) {
    result._set_fw_grad(op().call(tangent(input), dim, keepdim), /*level=*/0, /*is_inplace_op=*/false);
  }
  return result;
}

// ---- variances

Tensor from_mean(const Tensor& input, c10::IntArrayRef dim) {
  return at::sub(input, mean_over(input, dim, /*keepdim=*/true));
}

Tensor var_anywhere(const Tensor& input, c10::IntArrayRef dim, double divisor, bool keepdim) {
  reduced_dims(kVar, input, dim);  // checks
  const Tensor apart = from_mean(input, dim);
  return at::div(sum_over(at::mul(apart, apart), dim, keepdim), divisor);
}

TORCH_LIBRARY_IMPL(conv2d_ext, CompositeExplicitAutograd, m) { m.impl("var", var_anywhere); }

struct VarBackward {
  static constexpr const char* kName = "Conv2dExtVarBackward";
  static constexpr size_t kArguments = 1;
  static constexpr bool kNeedsSecond = true;
  struct State {
    SymSizes kept, dim;  // the input's size with reduced dimensions of size 1; those dimensions
    double divisor = 1;
    template <class Self, class Visit>
    static void visit(Self& self, Visit visit) {
      visit(self.kept);
      visit(self.dim);
      visit(self.divisor);
    }
  };
  // The mean's own share is 0, as distances from it sum to 0.
  static void apply(const Tensor& grad, const Tensor&, const Tensor& input, const State& state, const Wanted& wanted,
                    variable_list& result) {
    if (!wanted[0]) return;
    std::vector<int64_t> dim;
    for (const c10::SymInt& d : state.dim) dim.push_back(d.guard_int(__FILE__, __LINE__));
    const Tensor factor = at::mul(grad.reshape_symint(state.kept), 2 / state.divisor);
    result[0] = at::mul(factor, from_mean(input, dim));
  }
};

Tensor var_autograd(c10::DispatchKeySet keys, const Tensor& input, c10::IntArrayRef dim, double divisor, bool keepdim) {
  const Tensor result = below_autograd(var_op(), keys, input, dim, divisor, keepdim);
  if (compute_requires_grad(input)) {
    auto node = make_node<VarBackward>(input);
    node->state.kept = copy_sizes(sum_sizes(input, reduced_dims(kVar, input, dim), /*keepdim=*/true));
    node->state.dim.append(dim.begin(), dim.end());
    node->state.divisor = divisor;
    node->save(Tensor(), input);
    torch::autograd::set_history(result, node);
  }
  if (isFwGradDefined(input)) {
    const Tensor moved = at::mul(from_mean(primal(input), dim), tangent(input));
    result._set_fw_grad(at::mul(sum_over(moved, dim, keepdim), 2 / divisor), /*level=*/0, /*is_inplace_op=*/false);
  }
  return result;
}

TORCH_LIBRARY_IMPL(conv2d_ext, Autograd, m) {
  m.impl("var", var_autograd);
  m.impl("sum", sum_autograd<sum_op, false>);
  m.impl("mean", sum_autograd<mean_op, true>);
}

}  // namespace
}  // namespace conv2d_ext
