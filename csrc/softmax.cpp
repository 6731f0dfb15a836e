// conv2d_ext::softmax and softmax_grad: shapes and derivatives of every order.
#include <ATen/Functions.h>
#include <ATen/WrapDimUtils.h>
#include <torch/library.h>

#include "autograd_node.h"
#include "op_checks.h"
#include "reductions.h"

namespace conv2d_ext {

void check_softmax(const at::Tensor& input, int64_t dim) {
  check_real("conv2d_ext::softmax", "input", input);
  at::maybe_wrap_dim(dim, input.dim());
}

void check_softmax_grad(const at::Tensor& grad_output, const at::Tensor& output, int64_t dim) {
  constexpr const char* kOp = "conv2d_ext::softmax_grad";
  check_real(kOp, "output", output);
  at::maybe_wrap_dim(dim, output.dim());
  check_like(kOp, "grad_output", grad_output, "output", output);
}

namespace {

using at::Tensor;
using torch::autograd::compute_requires_grad;
using torch::autograd::isFwGradDefined;
using torch::autograd::variable_list;

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
  int64_t dim = 0;
  bool log = false;
  template <class Self, class Visit>
  static void visit(Self& self, Visit visit) {
    visit(self.dim);
    visit(self.log);
  }
};

struct SoftmaxBackward {
  static constexpr const char* kName = "Conv2dExtSoftmaxBackward";
  static constexpr size_t kArguments = 1;
  static constexpr bool kNeedsSecond = true, kSavesOutput = true;
  using State = SoftmaxState;
  static void apply(const Tensor& grad, const Tensor&, const Tensor& output, const State& state, const Wanted& wanted,
                    variable_list& result) {
    if (wanted[0]) {
      result[0] = softmax_grad(grad, output, state.dim, state.log);
    }
  }
};

// How gx = y * (gy - sum of gy * y), or with log gy - e^y * (sum of gy), depends on y: the gradient of y for a
// cotangent `with` of gx, or the tangent of gx for a tangent `with` of y.
Tensor softmax_grad_by_output(const Tensor& with, const Tensor& gy, const Tensor& y, bool is_tangent, int64_t dim,
                              bool log) {
  if (log) {
    return at::neg(at::mul(at::mul(with, at::exp(y)), sum_over(gy, dim, /*keepdim=*/true)));
  }
  const Tensor by_factor = at::mul(with, at::sub(gy, sum_over(at::mul(gy, y), dim, /*keepdim=*/true)));
  const Tensor &factor = is_tangent ? y : gy, &summed = is_tangent ? gy : y;
  return at::sub(by_factor, at::mul(factor, sum_over(at::mul(with, summed), dim, /*keepdim=*/true)));
}

struct SoftmaxGradBackward {  // of (grad_output, output)
  static constexpr const char* kName = "Conv2dExtSoftmaxGradBackward";
  static constexpr size_t kArguments = 2;
  static constexpr bool kNeedsSecond = true;
  using State = SoftmaxState;
  static void apply(const Tensor& grad, const Tensor& gy, const Tensor& y, const State& state, const Wanted& wanted,
                    variable_list& result) {
    if (wanted[0]) {
      result[0] = state.log ? at::sub(grad, sum_over(at::mul(grad, at::exp(y)), state.dim, /*keepdim=*/true))
                            : softmax_grad(grad, y, state.dim, /*log=*/false);
    }
    if (wanted[1]) {
      result[1] = softmax_grad_by_output(grad, gy, y, /*is_tangent=*/false, state.dim, state.log);
    }
  }
};

Tensor softmax_autograd(c10::DispatchKeySet keys, const Tensor& input, int64_t dim, bool log) {
  const Tensor output = below_autograd(softmax_op(), keys, input, dim, log);
  decltype(make_node<SoftmaxBackward>(input)) node;
  if (compute_requires_grad(input)) {
    node = make_node<SoftmaxBackward>(input);
    node->state = {at::maybe_wrap_dim(dim, input.dim()), log};
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
  const Tensor result = below_autograd(softmax_grad_op(), keys, grad_output, output, dim, log);
  if (compute_requires_grad(grad_output, output)) {
    auto node = make_node<SoftmaxGradBackward>(grad_output, output);
    node->state = {at::maybe_wrap_dim(dim, output.dim()), log};
    node->save(grad_output, output);
    torch::autograd::set_history(result, node);
  }
  set_tangent_of_two(
      result, grad_output, output, [&] { return softmax_grad(tangent(grad_output), primal(output), dim, log); },
      [&] {
        return softmax_grad_by_output(tangent(output), primal(grad_output), primal(output), /*is_tangent=*/true, dim,
                                      log);
      });
  return result;
}

TORCH_LIBRARY_IMPL(conv2d_ext, Autograd, m) {
  m.impl("softmax", softmax_autograd);
  m.impl("softmax_grad", softmax_grad_autograd);
}

}  // namespace
}  // namespace conv2d_ext
