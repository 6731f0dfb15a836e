// conv2d_ext::softmax and softmax_grad: shapes and derivatives of every order.
#include <ATen/Functions.h>
#include <ATen/WrapDimUtils.h>
#include <torch/library.h>

#include "autograd_node.h"
#include "reductions.h"

namespace conv2d_ext {

const c10::TypedOperatorHandle<SoftmaxSignature>& softmax_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("conv2d_ext::softmax", "").typed<SoftmaxSignature>();
  return op;
}

const c10::TypedOperatorHandle<SoftmaxGradSignature>& softmax_grad_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("conv2d_ext::softmax_grad", "").typed<SoftmaxGradSignature>();
  return op;
}

void check_softmax(const at::Tensor& input, int64_t dim) {
  const auto dtype = input.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
      "conv2d_ext::softmax: expected float32, float64, bfloat16 or float16, but got ", dtype);
  at::maybe_wrap_dim(dim, input.dim());
}

void check_softmax_grad(const at::Tensor& grad_output, const at::Tensor& output, int64_t dim) {
  check_softmax(output, dim);
  TORCH_CHECK(grad_output.scalar_type() == output.scalar_type(), "softmax_grad: expected grad_output of dtype ",
              output.scalar_type(), ", but got ", grad_output.scalar_type());
  TORCH_CHECK(grad_output.sym_sizes() == output.sym_sizes(), "softmax_grad: expected grad_output of size ",
              output.sym_sizes(), ", but got ", grad_output.sym_sizes());
}

namespace {

using at::Tensor;

Tensor softmax_meta(const Tensor& input, int64_t dim, bool) {
  check_softmax(input, dim);
  return at::empty_symint(input.sym_sizes(), input.options());
}

Tensor softmax_grad_meta(const Tensor& grad_output, const Tensor& output, int64_t dim, bool) {
  check_softmax_grad(grad_output, output, dim);
  return at::empty_symint(output.sym_sizes(), output.options());
}

TORCH_LIBRARY_IMPL(conv2d_ext, Meta, m) {
  m.impl("softmax", softmax_meta);
  m.impl("softmax_grad", softmax_grad_meta);
}

// ---- autograd

struct SoftmaxState {
  SymSizes dim = {0};
  bool log = false;
  template <class Self, class Visit>
  static void visit(Self& self, Visit visit) {
    visit(self.dim);
    visit(self.log);
  }
  int64_t along() const { return dim[0].guard_int(__FILE__, __LINE__); }
};

struct SoftmaxBackward {
  static constexpr const char* kName = "Conv2dExtSoftmaxBackward";
  static constexpr size_t kArguments = 1;
  static constexpr bool kMayBeConstant = false, kNeedsSecond = true, kSavesOutput = true;
  using State = SoftmaxState;
  static void apply(const Tensor& grad, const Tensor&, const Tensor& output, const State& state, const Wanted& wanted,
                    variable_list& result) {
    if (wanted[0]) {
      result[0] = softmax_grad(grad, output, state.along(), state.log);
    }
  }
};

// gx = y * (gy - sum of gy * y), or with log gy - e^y * (sum of gy): what multiplies a change of y, summed with `with`.
Tensor softmax_grad_by_output(const Tensor& with, const Tensor& gy, const Tensor& y, int64_t dim, bool log) {
  if (log) {
    return at::neg(at::mul(at::mul(with, at::exp(y)), sum_over(gy, dim, /*keepdim=*/true)));
  }
  const Tensor by_factor = at::mul(with, at::sub(gy, sum_over(at::mul(gy, y), dim, /*keepdim=*/true)));
  return at::sub(by_factor, at::mul(gy, sum_over(at::mul(with, y), dim, /*keepdim=*/true)));
}

struct SoftmaxGradBackward {  // of (grad_output, output)
  static constexpr const char* kName = "Conv2dExtSoftmaxGradBackward";
  static constexpr size_t kArguments = 2;
  static constexpr bool kMayBeConstant = false, kNeedsSecond = true;
  using State = SoftmaxState;
  static void apply(const Tensor& grad, const Tensor& gy, const Tensor& y, const State& state, const Wanted& wanted,
                    variable_list& result) {
    if (wanted[0]) {
      result[0] = state.log ? at::sub(grad, sum_over(at::mul(grad, at::exp(y)), state.along(), /*keepdim=*/true))
                            : softmax_grad(grad, y, state.along(), /*log=*/false);
    }
    if (wanted[1]) {
      result[1] = softmax_grad_by_output(grad, gy, y, state.along(), state.log);
    }
  }
};

// The change of softmax_grad with its output y.
Tensor softmax_grad_tangent_by_output(const Tensor& ty, const Tensor& gy, const Tensor& y, int64_t dim, bool log) {
  if (log) {
    return at::neg(at::mul(at::mul(ty, at::exp(y)), sum_over(gy, dim, /*keepdim=*/true)));
  }
  const Tensor by_factor = at::mul(ty, at::sub(gy, sum_over(at::mul(gy, y), dim, /*keepdim=*/true)));
  return at::sub(by_factor, at::mul(y, sum_over(at::mul(gy, ty), dim, /*keepdim=*/true)));
}

Tensor softmax_autograd(c10::DispatchKeySet keys, const Tensor& input, int64_t dim, bool log) {
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    output = softmax_op().redispatch(keys & c10::after_autograd_keyset, input, dim, log);
  }
  decltype(make_node<SoftmaxBackward>(input)) node;
  if (compute_requires_grad(input)) {
    node = make_node<SoftmaxBackward>(input);
    node->state.dim = {at::maybe_wrap_dim(dim, input.dim())};
    node->state.log = log;
    torch::autograd::set_history(output, node);
  }
  if (isFwGradDefined(input)) {
    const Tensor& moves = tangent(input);
    const Tensor y = primal(output);
    const Tensor change = log ? at::sub(moves, sum_over(at::mul(moves, at::exp(y)), dim, /*keepdim=*/true))
                              : softmax_grad(moves, y, dim, /*log=*/false);
    output._set_fw_grad(change, /*level=*/0, /*is_inplace_op=*/false);
  }
  if (node) {
    node->save_output(output);  // with its tangent
  }
  return output;
}

Tensor softmax_grad_autograd(c10::DispatchKeySet keys, const Tensor& grad_output, const Tensor& output, int64_t dim,
                             bool log) {
  Tensor result;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    result = softmax_grad_op().redispatch(keys & c10::after_autograd_keyset, grad_output, output, dim, log);
  }
  if (compute_requires_grad(grad_output, output)) {
    auto node = make_node<SoftmaxGradBackward>(grad_output, output);
    node->state.dim = {at::maybe_wrap_dim(dim, output.dim())};
    node->state.log = log;
    node->save(grad_output, output);
    torch::autograd::set_history(result, node);
  }
  const bool grad_moves = isFwGradDefined(grad_output), output_moves = isFwGradDefined(output);
  if (grad_moves || output_moves) {
    Tensor change;
    if (grad_moves) {
      change = softmax_grad(tangent(grad_output), primal(output), dim, log);
    }
    if (output_moves) {
      const Tensor by_output =
          softmax_grad_tangent_by_output(tangent(output), primal(grad_output), primal(output), dim, log);
      change = change.defined() ? at::add(change, by_output) : by_output;
    }
    result._set_fw_grad(change, /*level=*/0, /*is_inplace_op=*/false);
  }
  return result;
}

TORCH_LIBRARY_IMPL(conv2d_ext, Autograd, m) {
  m.impl("softmax", softmax_autograd);
  m.impl("softmax_grad", softmax_grad_autograd);
}

}  // namespace
}  // namespace conv2d_ext
