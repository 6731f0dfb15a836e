// Derivatives of the pointwise ops.
//
//   y = pointwise(x)            for cotangent v of y:  pointwise_grad(v, x)
//   g = pointwise_grad(v, x)    for cotangent u of g:  pointwise_grad(u, x)  and  u v f''(x)
//
// f'' is written below in terms of the pointwise ops and of PyTorch's + - *, which are exact at every place. So it can
// be differentiated again, and gradients of every order follow.
#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <cmath>
#include <string>
#include <vector>

#include "autograd_node.h"
#include "pointwise_ops.h"

namespace conv2d_ext {
namespace {

using at::Tensor;
using torch::autograd::compute_requires_grad;
using torch::autograd::isFwGradDefined;
using torch::autograd::variable_list;
using Numbers = c10::ArrayRef<double>;

// ---- second derivatives

Tensor sigmoid_second(const Tensor& x) {
  const Tensor s = pointwise(x, "sigmoid");
  return s * (1 - s) * (1 - 2 * s);
}

Tensor silu_second(const Tensor& x) {
  const Tensor s = pointwise(x, "sigmoid");
  return s * (1 - s) * (2 + x * (1 - 2 * s));
}

Tensor gelu_second(const Tensor& x) {
  constexpr double kDensity = 0.3989422804014327;  // 1 / sqrt(2 pi)
  return kDensity * pointwise(-0.5 * x * x, "exp") * (2 - x * x);
}

// f = x (1 + t) / 2, t = tanh(u): with t' = (1 - t^2) u' and t'' = (1 - t^2) (u'' - 2 t u'^2)
Tensor gelu_tanh_second(const Tensor& x) {
  constexpr double kBeta = 0.7978845608028654, kCubic = 0.044715;
  const Tensor square = x * x;
  const Tensor t = pointwise(kBeta * (x + kCubic * (square * x)), "tanh");
  const Tensor first = kBeta * (1 + 3 * kCubic * square), second = 6 * kBeta * kCubic * x;
  return (1 - t * t) * (first + 0.5 * x * (second - 2 * t * first * first));
}

Tensor tanh_second(const Tensor& x) {
  const Tensor t = pointwise(x, "tanh");
  return -2 * t * (1 - t * t);
}

Tensor erf_second(const Tensor& x) {
  constexpr double kSlope = 1.1283791670955126;  // 2 / sqrt(pi)
  return -2 * kSlope * x * pointwise(-(x * x), "exp");
}

Tensor softplus_second(const Tensor& x, double beta, double threshold) {
  const Tensor z = x * beta, s = pointwise(z, "sigmoid");
  return at::where(z.gt(threshold), at::zeros_like(x), beta * s * (1 - s));
}

// f = x t, t = tanh(softplus(x)): t' = (1 - t^2) s
Tensor mish_second(const Tensor& x) {
  const Tensor t = pointwise(pointwise(x, "softplus", {1.0, 20.0}), "tanh"), s = pointwise(x, "sigmoid");
  const Tensor rest = (1 - t * t) * s;
  return rest * (2 + x * (1 - s - 2 * t * s));
}

Tensor elu_second(const Tensor& x, double alpha, double scale, double input_scale) {
  // Zeros in place of what is positive, so that nothing overflows.
  const Tensor below = x.le(0), zeros = at::zeros_like(x);
  const Tensor power = pointwise(at::where(below, x, zeros) * input_scale, "exp");
  return at::where(below, alpha * scale * input_scale * input_scale * power, zeros);
}

Tensor rsqrt_second(const Tensor& x) {
  const Tensor r = pointwise(x, "rsqrt"), square = r * r;
  return 0.75 * square * square * r;
}

Tensor sqrt_second(const Tensor& x) {
  const Tensor r = pointwise(x, "rsqrt");
  return -0.25 * r * r * r;
}

Tensor pow_second(const Tensor& x, double exponent) {
  const double factor = exponent * (exponent - 1);
  return factor == 0 ? at::zeros_like(x) : factor * pointwise(x, "pow", {exponent - 2});
}

Tensor exp_base_second(const Tensor& x, double base) {
  const double logarithm = std::log(base);
  return logarithm * logarithm * pointwise(x, "exp_base", {base});
}

Tensor atanh_second(const Tensor& x) {
  const Tensor r = (1 - x * x).reciprocal();
  return 2 * x * r * r;
}

Tensor logit_second(const Tensor& x, double eps) {
  const Tensor square = (x * (1 - x)).square(), inside = (2 * x - 1) / square;
  if (eps < 0) return inside;
  return at::where(x.lt(eps).logical_or(x.gt(1 - eps)), at::zeros_like(x), inside);
}

Tensor second_derivative(const Tensor& x, std::string_view name, Numbers p) {
  using cpu::pointwise::Function;
  switch (find_function(name).value()) {  // the op has checked the name
    case Function::kSigmoid:
      return sigmoid_second(x);
    case Function::kSilu:
      return silu_second(x);
    case Function::kGelu:
      return gelu_second(x);
    case Function::kGeluTanh:
      return gelu_tanh_second(x);
    case Function::kTanh:
      return tanh_second(x);
    case Function::kExp:
    case Function::kSinh:
    case Function::kCosh:
      return pointwise(x, name);
    case Function::kErf:
      return erf_second(x);
    case Function::kSoftplus:
      return softplus_second(x, p[0], p[1]);
    case Function::kMish:
      return mish_second(x);
    case Function::kElu:
      return elu_second(x, p[0], p[1], p[2]);
    case Function::kSqrt:
      return sqrt_second(x);
    case Function::kRsqrt:
      return rsqrt_second(x);
    case Function::kExpBase:
      return exp_base_second(x, p[0]);
    case Function::kPow:
      return pow_second(x, p[0]);
    case Function::kAtanh:
      return atanh_second(x);
    case Function::kLogit:
      return logit_second(x, p[0]);
    case Function::kSoftshrink:
    case Function::kCount:
      break;
  }
  return at::zeros_like(x);
}

// ---- nodes

struct PointwiseState {
  std::string function;
  std::vector<double> parameters;

  template <class Self, class Visit>
  static void visit(Self& self, Visit visit) {
    visit(self.function);
    visit(self.parameters);
  }
};

struct PointwiseBackward {  // of (input)
  static constexpr const char* kName = "Conv2dExtPointwiseBackward";
  static constexpr size_t kArguments = 1;
  static constexpr bool kNeedsSecond = true;
  using State = PointwiseState;

  static void apply(const Tensor& grad_output, const Tensor&, const Tensor& input, const State& state,
                    const Wanted& wanted, variable_list& result) {
    if (wanted[0]) {
      result[0] = pointwise_grad(grad_output, input, state.function, state.parameters);
    }
  }
};

struct PointwiseGradBackward {  // of (grad_output, input)
  static constexpr const char* kName = "Conv2dExtPointwiseGradBackward";
  static constexpr size_t kArguments = 2;
  static constexpr bool kNeedsSecond = true;
  using State = PointwiseState;

  static void apply(const Tensor& grad, const Tensor& grad_output, const Tensor& input, const State& state,
                    const Wanted& wanted, variable_list& result) {
    if (wanted[0]) {
      result[0] = pointwise_grad(grad, input, state.function, state.parameters);
    }
    if (wanted[1]) {
      result[1] = grad * grad_output * second_derivative(input, state.function, state.parameters);
    }
  }
};

PointwiseState make_state(std::string_view function, Numbers parameters) {
  return {std::string(function), parameters.vec()};
}

// ---- the autograd kernels

Tensor pointwise_autograd(c10::DispatchKeySet keys, const Tensor& input, std::string_view function,
                          Numbers parameters) {
  const Tensor result = below_autograd(pointwise_op(), keys, input, function, parameters);
  if (compute_requires_grad(input)) {
    auto node = make_node<PointwiseBackward>(input);
    node->state = make_state(function, parameters);
    node->save(Tensor(), input);
    torch::autograd::set_history(result, node);
  }
  if (isFwGradDefined(input)) {
    result._set_fw_grad(pointwise_grad(tangent(input), primal(input), function, parameters), /*level=*/0,
                        /*is_inplace_op=*/false);
  }
  return result;
}

Tensor pointwise_grad_autograd(c10::DispatchKeySet keys, const Tensor& grad_output, const Tensor& input,
                               std::string_view function, Numbers parameters) {
  const Tensor result = below_autograd(pointwise_grad_op(), keys, grad_output, input, function, parameters);
  if (compute_requires_grad(grad_output, input)) {
    auto node = make_node<PointwiseGradBackward>(grad_output, input);
    node->state = make_state(function, parameters);
    node->save(grad_output, input);
    torch::autograd::set_history(result, node);
  }
  set_tangent_of_two(
      result, grad_output, input,
      [&] { return pointwise_grad(tangent(grad_output), primal(input), function, parameters); },
      [&] { return tangent(input) * primal(grad_output) * second_derivative(primal(input), function, parameters); });
  return result;
}

// ---- functions of two numbers

// What a function changes by with its first or its second argument.
Tensor partial(std::string_view name, const Tensor& x, const Tensor& y, bool with_second) {
  using cpu::pointwise::PairFunction;
  constexpr double kLn2 = 0.6931471805599453;
  const auto apart = [&] { return with_second ? y - x : x - y; };
  switch (find_pair_function(name).value()) {  // the op has checked the name
    case PairFunction::kPower: {
      if (!with_second) return at::where(y.eq(0), at::zeros_like(x), y * pointwise_pair(x, y - 1, name));
      const Tensor constant = x.eq(0).logical_and(y.ge(0));
      return at::where(constant, at::zeros_like(x), pointwise_pair(x, y, name) * at::log(x));
    }
    case PairFunction::kAtan2: {
      const Tensor square = x * x + y * y;
      const Tensor reciprocal = at::masked_fill(square.reciprocal(), square.eq(0), 0);  // as PyTorch has it
      return with_second ? -x * reciprocal : y * reciprocal;
    }
    case PairFunction::kLogAddExp:
      return pointwise(apart(), "sigmoid");
    case PairFunction::kLogAddExp2:
      return pointwise(apart() * kLn2, "sigmoid");
    case PairFunction::kCount:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, name);
}

struct PointwisePairBackward {  // of (first, second)
  static constexpr const char* kName = "Conv2dExtPointwisePairBackward";
  static constexpr size_t kArguments = 2;
  static constexpr bool kNeedsSecond = true, kNeedsFirst = true;
  struct State {
    std::string function;
    template <class Self, class Visit>
    static void visit(Self& self, Visit visit) {
      visit(self.function);
    }
  };

  static void apply(const Tensor& grad, const Tensor& first, const Tensor& second, const State& state,
                    const Wanted& wanted, variable_list& result) {
    for (size_t i = 0; i < kArguments; ++i) {
      if (wanted[i]) result[i] = grad * partial(state.function, first, second, i == 1);
    }
  }
};

Tensor pointwise_pair_autograd(c10::DispatchKeySet keys, const Tensor& first, const Tensor& second,
                               std::string_view function) {
  const Tensor result = below_autograd(pointwise_pair_op(), keys, first, second, function);
  if (compute_requires_grad(first, second)) {
    auto node = make_node<PointwisePairBackward>(first, second);
    node->state.function = std::string(function);
    node->save(first, second);
    torch::autograd::set_history(result, node);
  }
  const auto slope = [&](bool with_second) { return partial(function, primal(first), primal(second), with_second); };
  set_tangent_of_two(
      result, first, second, [&] { return tangent(first) * slope(false); },
      [&] { return tangent(second) * slope(true); });
  return result;
}

TORCH_LIBRARY_IMPL(conv2d_ext, Autograd, m) {
  m.impl("pointwise_pair", pointwise_pair_autograd);
  m.impl("pointwise", pointwise_autograd);
  m.impl("pointwise_grad", pointwise_grad_autograd);
}

}  // namespace
}  // namespace conv2d_ext
