// The mode's pointwise functions: those of PyTorch's whose bits follow an element's position, as this library's
// (pointwise_ops.h).
#include <ATen/Dispatch.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>

#include <cmath>

#include "invariance_kernels.h"
#include "pointwise_ops.h"
#include "tracing.h"

namespace conv2d_ext {
namespace {

using namespace invariance;
using cpu::pointwise::PairFunction;
using Parameters = c10::SmallVector<double, 3>;

// The functions, each with the arguments that PyTorch's op has beside its input.
struct Plain {
  template <class... Arguments>
  static bool takes(const Tensor&, const Arguments&...) {
    return true;
  }
  // Whether an integer tensor gives a floating-point one.
  template <class... Arguments>
  static bool promotes(const Arguments&...) {
    return false;
  }
  static Parameters parameters() { return {}; }
};
struct Promoting : Plain {
  template <class... Arguments>
  static bool promotes(const Arguments&...) {
    return true;
  }
};
template <cpu::pointwise::Function function, class Base = Plain>
struct Named : Base {
  template <class... Arguments>
  static std::string_view name(const Arguments&...) {
    return cpu::pointwise::kInfo[int(function)].name;
  }
};
using Sigmoid = Named<cpu::pointwise::Function::kSigmoid, Promoting>;
using Silu = Named<cpu::pointwise::Function::kSilu>;
using Mish = Named<cpu::pointwise::Function::kMish>;
using Sinh = Named<cpu::pointwise::Function::kSinh, Promoting>;
using Cosh = Named<cpu::pointwise::Function::kCosh, Promoting>;
using Atanh = Named<cpu::pointwise::Function::kAtanh, Promoting>;
struct Exp2 : Named<cpu::pointwise::Function::kExpBase, Promoting> {
  static Parameters parameters() { return {2}; }
};
// PyTorch's holds but in 16 bits.
struct Rsqrt : Named<cpu::pointwise::Function::kRsqrt> {
  static bool takes(const Tensor& input) { return input.element_size() == 2; }
};
struct Gelu : Plain {
  static bool takes(const Tensor&, std::string_view approximate) {
    return approximate == "none" || approximate == "tanh";
  }
  static std::string_view name(std::string_view approximate) { return approximate == "tanh" ? "gelu_tanh" : "gelu"; }
  static Parameters parameters(std::string_view) { return {}; }
};
struct Softplus : Named<cpu::pointwise::Function::kSoftplus> {
  static Parameters parameters(const Scalar& beta, const Scalar& threshold) {
    return {beta.toDouble(), threshold.toDouble()};
  }
};
struct Elu : Named<cpu::pointwise::Function::kElu> {
  static Parameters parameters(const Scalar& alpha, const Scalar& scale, const Scalar& input_scale) {
    return {alpha.toDouble(), scale.toDouble(), input_scale.toDouble()};
  }
};
struct Celu : Named<cpu::pointwise::Function::kElu> {
  static bool takes(const Tensor&, const Scalar& alpha) { return !alpha.isComplex() && alpha.toDouble() != 0; }
  static Parameters parameters(const Scalar& alpha) { return {alpha.toDouble(), 1, 1 / alpha.toDouble()}; }
};
struct Softshrink : Named<cpu::pointwise::Function::kSoftshrink> {
  static bool takes(const Tensor&, const Scalar& lambd) {
    return lambd.toDouble() >= 0 && std::isfinite(lambd.toDouble());
  }
  static Parameters parameters(const Scalar& lambd) { return {lambd.toDouble()}; }
};
struct Logit : Named<cpu::pointwise::Function::kLogit, Promoting> {
  static Parameters parameters(std::optional<double> eps) { return {eps.value_or(-1)}; }
};
// What PyTorch multiplies out, and the square root, hold.
struct Power : Plain {
  // (A power with an integer exponent is an integer.)
  static bool promotes(const Scalar& exponent) { return exponent.isFloatingPoint(); }
  static bool takes(const Tensor& input, const Scalar& exponent) {
    if (exponent.isComplex()) return false;
    const double e = exponent.toDouble();
    // Larger ones PyTorch rounds to the tensor's type.
    if (!(std::abs(e) < 16777216.0)) return false;
    const bool is_product = e == 0 || e == 1 || e == 2 || e == 3 || e == -1;
    return !is_product && (e != 0.5 || input.element_size() == 2);
  }
  static std::string_view name(const Scalar& exponent) {
    const double e = exponent.toDouble();
    return e == 0.5 ? "sqrt" : e == -0.5 ? "rsqrt" : "pow";
  }
  static Parameters parameters(const Scalar& exponent) {
    const double e = exponent.toDouble();
    return e == 0.5 || e == -0.5 ? Parameters{} : Parameters{e};
  }
};

// Whether the sizes of two tensors expand to common ones.
bool broadcast(const Tensor& first, const Tensor& second) {
  for (int64_t i = 1; i <= std::min(first.dim(), second.dim()); ++i) {
    const SymInt a = first.sym_size(-i), b = second.sym_size(-i);
    if (a != b && a != 1 && b != 1) return false;
  }
  return true;
}

bool has_integers(const Tensor& tensor) { return c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true); }

// The input as the function takes it; undefined where it doesn't.
template <class Function, class... Arguments>
Tensor operand(const Tensor& input, const Arguments&... arguments) {
  if (!is_on_cpu(input)) return {};
  if (is_real(input.scalar_type())) return Function::takes(input, arguments...) ? input : Tensor();
  // (A trace is used with tensors of other types, too.)
  if (!Function::promotes(arguments...) || !has_integers(input) || is_jit_tracing()) return {};
  const Tensor promoted = input.to(c10::typeMetaToScalarType(at::get_default_dtype()));
  return is_real(promoted.scalar_type()) && Function::takes(promoted, arguments...) ? promoted : Tensor();
}

template <class Function, class... Arguments>
Tensor compute(const Tensor& input, const Arguments&... arguments) {
  return pointwise(input, Function::name(arguments...), Function::parameters(arguments...));
}

// Refuses a result that shares elements with itself, or some with an input.
template <class... Inputs>
void refuse_overlap(const Tensor& out, const Inputs&... inputs) {
  if (is_tracing()) return;
  at::assert_no_internal_overlap(out);
  (at::assert_no_partial_overlap(out, inputs), ...);
}

// Writes a result as PyTorch's pointwise functions do: an output that is resized gets the result's strides, and one
// that shares some elements with an input is refused.
template <class... Inputs>
Tensor& write_elements(Tensor& out, const Tensor& result, const Inputs&... inputs) {
  const bool fits = out.sym_sizes() == result.sym_sizes();
  TORCH_CHECK(fits || !(out.is_same(inputs) || ...), "output with shape ", out.sym_sizes(),
              " doesn't match the broadcast shape ", result.sym_sizes());
  fits ? refuse_overlap(out, inputs...) : refuse_overlap(out);
  if (at::native::resize_output_symint(out, result.sym_sizes())) {
    out.as_strided__symint(result.sym_sizes(), result.sym_strides());
  }
  return out.copy_(result);
}

template <class AtOp, class Function, class... Arguments>
struct Unary {
  using Op = AtOp;
  static Tensor call(DispatchKeySet keys, const Tensor& self, Arguments... arguments) {
    if (!leaves<Op>(keys)) {
      const Tensor input = operand<Function>(self, arguments...);
      if (input.defined()) return compute<Function>(input, arguments...);
    }
    return Op::redispatch(keys & kBelow, self, arguments...);
  }
};

template <class AtOp, class Function, class... Arguments>
struct UnaryInPlace {
  using Op = AtOp;
  static Tensor& call(DispatchKeySet keys, Tensor& self, Arguments... arguments) {
    if (!leaves<Op>(keys) && !has_integers(self)) {
      const Tensor input = operand<Function>(self, arguments...);
      // Where it is differentiated it needs the values that are overwritten here.
      if (input.defined())
        return self.copy_(compute<Function>(may_record(input) ? input.clone() : input, arguments...));
    }
    return Op::redispatch(keys & kBelow, self, arguments...);
  }
};

template <class AtOp, class Function, class... Arguments>
struct UnaryOut {
  using Op = AtOp;
  static Tensor& call(DispatchKeySet keys, const Tensor& self, Arguments... arguments, Tensor& out) {
    if (!leaves<Op>(keys) && is_on_cpu(out) && !records_gradients(out, self)) {
      const Tensor input = operand<Function>(self, arguments...);
      if (input.defined() && input.scalar_type() == out.scalar_type()) {
        return write_elements(out, compute<Function>(input, arguments...), self);
      }
    }
    return Op::redispatch(keys & kBelow, self, arguments..., out);
  }
};

// ---- the others

struct Glu {
  using Op = at::_ops::glu;
  static Tensor call(DispatchKeySet keys, const Tensor& self, int64_t dim) {
    if (!leaves<Op>(keys) && takes_on_cpu(self) && self.dim() > 0 && dim >= -self.dim() && dim < self.dim()) {
      const SymInt size = self.sym_size(dim);
      if (size % 2 == 0) {
        if (is_jit_tracing()) {
          const std::vector<Tensor> halves = self.chunk(2, dim);
          return halves[0].mul(pointwise(halves[1], "sigmoid"));
        }
        const SymInt half = size / 2;
        const Tensor gate = self.narrow_symint(dim, half, half);
        return self.narrow_symint(dim, 0, half).mul(pointwise(gate, "sigmoid"));
      }
    }
    return Op::redispatch(keys & kBelow, self, dim);
  }
};

// base ** exponent, of a number and a tensor.
struct PowerOfNumber {
  using Op = at::_ops::pow_Scalar;
  static Tensor call(DispatchKeySet keys, const Scalar& self, const Tensor& exponent) {
    const bool fits = takes_on_cpu(exponent) && !self.isComplex() && self.toDouble() > 1e-30 &&
                      self.toDouble() < 1e30 && self.toDouble() != 1;
    if (leaves<Op>(keys) || !fits) return Op::redispatch(keys & kBelow, self, exponent);
    return pointwise(exponent, "exp_base", {self.toDouble()});
  }
};

// ---- functions of two tensors

// Both as PyTorch expands and promotes them; none where it isn't taken.
std::optional<std::pair<Tensor, Tensor>> operands(const Tensor& first, const Tensor& second, PairFunction function) {
  const auto takes = [](const Tensor& t) { return is_on_cpu(t) && (is_real(t.scalar_type()) || has_integers(t)); };
  if (!takes(first) || !takes(second)) return std::nullopt;
  at::ScalarType dtype = at::result_type(first, second);
  // Of two integers atan2 alone is a floating-point number.
  if (function == PairFunction::kAtan2 && at::isIntegralType(dtype, /*includeBool=*/true))
    dtype = at::typeMetaToScalarType(at::get_default_dtype());
  if (!is_real(dtype) || !broadcast(first, second)) return std::nullopt;
  const bool is_cast = first.scalar_type() != dtype || second.scalar_type() != dtype;
  // (A trace is used with tensors of other types, too.)
  if (is_cast && is_jit_tracing()) return std::nullopt;
  const std::vector<Tensor> both = at::broadcast_tensors({first, second});
  return is_cast ? std::pair(both[0].to(dtype), both[1].to(dtype)) : std::pair(both[0], both[1]);
}

Tensor compute_pair(PairFunction function, const Tensor& first, const Tensor& second) {
  return pointwise_pair(first, second, cpu::pointwise::kPairNames[int(function)]);
}

template <class AtOp, PairFunction function>
struct Binary {
  using Op = AtOp;
  static Tensor call(DispatchKeySet keys, const Tensor& self, const Tensor& other) {
    if (!leaves<Op>(keys)) {
      if (const auto both = operands(self, other, function)) return compute_pair(function, both->first, both->second);
    }
    return Op::redispatch(keys & kBelow, self, other);
  }
};

template <class AtOp, PairFunction function>
struct BinaryInPlace {
  using Op = AtOp;
  static Tensor& call(DispatchKeySet keys, Tensor& self, const Tensor& other) {
    if (!leaves<Op>(keys) && at::result_type(self, other) == self.scalar_type()) {
      const auto both = operands(self, other, function);
      if (both && both->first.scalar_type() == self.scalar_type() && both->first.sym_sizes() == self.sym_sizes()) {
        refuse_overlap(self, other);
        // Where it is differentiated it needs the values that are overwritten here.
        const bool is_saved = may_record(self, other);
        return self.copy_(compute_pair(function, is_saved ? both->first.clone() : both->first, both->second));
      }
    }
    return Op::redispatch(keys & kBelow, self, other);
  }
};

template <class AtOp, PairFunction function>
struct BinaryOut {
  using Op = AtOp;
  static Tensor& call(DispatchKeySet keys, const Tensor& self, const Tensor& other, Tensor& out) {
    if (!leaves<Op>(keys) && is_on_cpu(out) && !records_gradients(out, self, other)) {
      const auto both = operands(self, other, function);
      if (both && both->first.scalar_type() == out.scalar_type()) {
        return write_elements(out, compute_pair(function, both->first, both->second), self, other);
      }
    }
    return Op::redispatch(keys & kBelow, self, other, out);
  }
};

// ---- functions of two tensors that PyTorch computes with another one in place of the second: `with` calls f with that
// and what other arguments become

// Products and quotients of 16 bits and integers: of an integer tensor of one element PyTorch multiplies by the number,
// of others by what it is in 16 bits, as here.
struct RoundedIntegers {
  template <class Op>
  static bool takes(const Tensor& self, const Tensor& other) {
    return (self.scalar_type() == at::kBFloat16 || self.scalar_type() == at::kHalf) &&
           at::isIntegralType(other.scalar_type(), /*includeBool=*/false) && other.dim() > 0;
  }
  template <class F>
  static decltype(auto) with(const F& f, const Tensor& self, const Tensor& other) {
    return f(other.to(self.scalar_type()));
  }
};

// In the rules below 16-bit results are rounded once, since the second is float32 then. Without dimensions it would be
// cast to the type of a self that has some.
Tensor as_second(const Tensor& self, const Tensor& other) {
  return other.dim() == 0 && self.dim() > 0 ? other.unsqueeze(0) : other;
}

// self + alpha * other: PyTorch's vector code and scalar code round the product, or only the sum. Here both are
// rounded.
struct Scaled {
  template <class Op>
  static bool takes(const Tensor& self, const Tensor& other, const Scalar& alpha) {
    if (alpha.isComplex() || alpha.isBoolean() || std::abs(alpha.toDouble()) == 1) return false;
    // (Differences with bool tensors are refused.)
    const bool is_sum = std::string_view(Op::name).substr(0, 9) == "aten::add",
               has_bool = self.scalar_type() == at::kBool || other.scalar_type() == at::kBool;
    return is_real(at::result_type(self, other)) && (is_sum || !has_bool);
  }
  // Raises as PyTorch does where the type has no such number.
  static void check_range(const Scalar& alpha, at::ScalarType dtype) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "alpha", [&] { (void)alpha.to<scalar_t>(); });
  }
  template <class F>
  static decltype(auto) with(const F& f, const Tensor& self, const Tensor& other, const Scalar& alpha) {
    const at::ScalarType dtype = at::result_type(self, other);
    check_range(alpha, dtype);
    return f(as_second(self, other.to(c10::elementSize(dtype) == 2 ? at::kFloat : dtype).mul(alpha)), Scalar(1));
  }
};

// Quotients of 16 bits, rounded to integers: PyTorch rounds those of float32 where the second tensor has one element,
// and what they are in 16 bits elsewhere.
struct RoundedQuotient {
  template <class Op>
  static bool takes(const Tensor& self, const Tensor& other, const std::optional<std::string_view>& mode) {
    return mode.has_value() && takes<Op>(self, other);
  }
  template <class Op>
  static bool takes(const Tensor& self, const Tensor& other) {
    const at::ScalarType dtype = at::result_type(self, other);
    return is_real(dtype) && c10::elementSize(dtype) == 2;
  }
  template <class F, class... Mode>
  static decltype(auto) with(const F& f, const Tensor& self, const Tensor& other, const Mode&... mode) {
    return f(as_second(self, other.to(at::kFloat)), mode...);
  }
};

template <class Rule, class Op, class... Arguments>
bool changes_second(DispatchKeySet keys, const Tensor& self, const Tensor& other, const Arguments&... arguments) {
  // (A trace is used with tensors of other types, too.)
  return !leaves<Op>(keys) && !is_jit_tracing() && is_on_cpu(self) && is_on_cpu(other) &&
         Rule::template takes<Op>(self, other, arguments...);
}
// Whether PyTorch would write the result here.
bool can_hold_result(const Tensor& out, const Tensor& self, const Tensor& other) {
  return is_on_cpu(out) && c10::canCast(at::result_type(self, other), out.scalar_type());
}

template <class Op, class Rule, class... Arguments>
Tensor compute_with_second(const Tensor& self, const Tensor& other, const Arguments&... arguments) {
  const auto compute = [&](const Tensor& second, const auto&... rest) { return Op::call(self, second, rest...); };
  return Rule::with(compute, self, other, arguments...).to(at::result_type(self, other));
}

template <class AtOp, class Rule, class... Arguments>
struct WithSecond {
  using Op = AtOp;
  static Tensor call(DispatchKeySet keys, const Tensor& self, const Tensor& other, Arguments... arguments) {
    if (!changes_second<Rule, Op>(keys, self, other, arguments...)) {
      return Op::redispatch(keys & kBelow, self, other, arguments...);
    }
    return compute_with_second<Op, Rule>(self, other, arguments...);
  }
};

template <class AtOp, class Rule, class... Arguments>
struct WithSecondInPlace {
  using Op = AtOp;
  static Tensor& call(DispatchKeySet keys, Tensor& self, const Tensor& other, Arguments... arguments) {
    if (!changes_second<Rule, Op>(keys, self, other, arguments...) || !can_hold_result(self, self, other)) {
      return Op::redispatch(keys & kBelow, self, other, arguments...);
    }
    refuse_overlap(self, other);
    const auto compute = [&](const Tensor& second, const auto&... rest) -> Tensor& {
      return Op::redispatch(keys & kBelow, self, second, rest...);
    };
    return Rule::with(compute, self, other, arguments...);
  }
};

// other - alpha * self, of which PyTorch makes a difference itself, but below the place where graphs are traced.
struct ReversedDifference {
  using Op = at::_ops::rsub_Tensor;
  static Tensor call(DispatchKeySet keys, const Tensor& self, const Tensor& other, const Scalar& alpha) {
    if (changes_second<Scaled, at::_ops::sub_Tensor>(keys, other, self, alpha)) return at::sub(other, self, alpha);
    return Op::redispatch(keys & kBelow, self, other, alpha);
  }
};

template <class AtOp, class FunctionalOp, class Rule, class... Arguments>
struct WithSecondOut {
  using Op = AtOp;
  static Tensor& call(DispatchKeySet keys, const Tensor& self, const Tensor& other, Arguments... arguments,
                      Tensor& out) {
    if (!changes_second<Rule, Op>(keys, self, other, arguments...) || !can_hold_result(out, self, other) ||
        !broadcast(self, other) || records_gradients(out, self, other)) {
      return Op::redispatch(keys & kBelow, self, other, arguments..., out);
    }
    return write_elements(out, compute_with_second<FunctionalOp, Rule>(self, other, arguments...), self, other);
  }
};

// ---- gradients of losses: the vector code of PyTorch's rounds otherwise than its scalar code

// -outer where the difference is below -edge, outer above edge, and between them difference * inner; 16-bit types are
// rounded once.
Tensor grad_of_loss(const Tensor& grad_output, const Tensor& self, const Tensor& target, int64_t reduction, double edge,
                    double outer, double inner) {
  const auto dtype = compute_type(self.scalar_type());
  const Tensor difference = self.to(dtype).sub(target.to(dtype));
  Tensor grad = grad_output.to(dtype);
  if (reduction == at::Reduction::Mean) grad = grad.div(Scalar(difference.sym_numel()));
  const Tensor beyond = grad.mul(outer);
  const Tensor within = difference.mul(grad).mul(inner);
  return at::where(difference.le(-edge), beyond.neg(), at::where(difference.ge(edge), beyond, within))
      .to(self.scalar_type());
}

bool takes_loss(const Tensor& grad_output, const Tensor& self, const Tensor& target) {
  return takes_on_cpu(self, target, grad_output) && self.sym_sizes() == target.sym_sizes() && self.sym_numel() != 0;
}

template <class AtOp, bool huber>
struct LossBackward {
  using Op = AtOp;
  static Tensor call(DispatchKeySet keys, const Tensor& grad_output, const Tensor& self, const Tensor& target,
                     int64_t reduction, double edge) {
    if (leaves<Op>(keys) || edge == 1 || !(edge > 0) || !takes_loss(grad_output, self, target)) {
      return Op::redispatch(keys & kBelow, grad_output, self, target, reduction, edge);
    }
    return grad_of_loss(grad_output, self, target, reduction, edge, huber ? edge : 1, huber ? 1 : 1 / edge);
  }
};

template <class Function, class F, class InPlace, class Out, class... Arguments>
void cover_forms(torch::Library& m) {
  cover_all<Unary<F, Function, Arguments...>, UnaryInPlace<InPlace, Function, Arguments...>,
            UnaryOut<Out, Function, Arguments...>>(m);
}

template <class Rule, class F, class InPlace, class Out, class... Arguments>
void adjust_second(torch::Library& m) {
  adjust_all<WithSecond<F, Rule, Arguments...>, WithSecondInPlace<InPlace, Rule, Arguments...>,
             WithSecondOut<Out, F, Rule, Arguments...>>(m);
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) {
  namespace ops = at::_ops;
  cover_forms<Sigmoid, ops::sigmoid, ops::sigmoid_, ops::sigmoid_out>(m);
  cover_forms<Silu, ops::silu, ops::silu_, ops::silu_out>(m);
  cover_forms<Mish, ops::mish, ops::mish_, ops::mish_out>(m);
  cover_forms<Sinh, ops::sinh, ops::sinh_, ops::sinh_out>(m);
  cover_forms<Cosh, ops::cosh, ops::cosh_, ops::cosh_out>(m);
  cover_forms<Atanh, ops::atanh, ops::atanh_, ops::atanh_out>(m);
  cover_forms<Exp2, ops::exp2, ops::exp2_, ops::exp2_out>(m);
  cover_forms<Rsqrt, ops::rsqrt, ops::rsqrt_, ops::rsqrt_out>(m);
  cover_forms<Gelu, ops::gelu, ops::gelu_, ops::gelu_out, std::string_view>(m);
  cover_forms<Elu, ops::elu, ops::elu_, ops::elu_out, const Scalar&, const Scalar&, const Scalar&>(m);
  cover_forms<Power, ops::pow_Tensor_Scalar, ops::pow__Scalar, ops::pow_Tensor_Scalar_out, const Scalar&>(m);
  cover_forms<Logit, ops::logit, ops::logit_, ops::logit_out, std::optional<double>>(m);
  cover_all<Binary<ops::pow_Tensor_Tensor, PairFunction::kPower>, BinaryInPlace<ops::pow__Tensor, PairFunction::kPower>,
            BinaryOut<ops::pow_Tensor_Tensor_out, PairFunction::kPower>>(m);
  cover_all<Binary<ops::atan2, PairFunction::kAtan2>, BinaryInPlace<ops::atan2_, PairFunction::kAtan2>,
            BinaryOut<ops::atan2_out, PairFunction::kAtan2>>(m);
  cover_all<Binary<ops::logaddexp, PairFunction::kLogAddExp>, BinaryOut<ops::logaddexp_out, PairFunction::kLogAddExp>,
            Binary<ops::logaddexp2, PairFunction::kLogAddExp2>,
            BinaryOut<ops::logaddexp2_out, PairFunction::kLogAddExp2>>(m);
  cover_all<Unary<ops::softplus, Softplus, const Scalar&, const Scalar&>,
            UnaryOut<ops::softplus_out, Softplus, const Scalar&, const Scalar&>, Unary<ops::celu, Celu, const Scalar&>,
            UnaryInPlace<ops::celu_, Celu, const Scalar&>, Unary<ops::softshrink, Softshrink, const Scalar&>,
            UnaryOut<ops::softshrink_out, Softshrink, const Scalar&>, Glu, PowerOfNumber>(m);
  cover_all<LossBackward<ops::smooth_l1_loss_backward, false>, LossBackward<ops::huber_loss_backward, true>>(m);
  adjust_second<RoundedIntegers, ops::mul_Tensor, ops::mul__Tensor, ops::mul_out>(m);
  adjust_second<RoundedIntegers, ops::div_Tensor, ops::div__Tensor, ops::div_out>(m);
  adjust_second<Scaled, ops::add_Tensor, ops::add__Tensor, ops::add_out, const Scalar&>(m);
  adjust_second<Scaled, ops::sub_Tensor, ops::sub__Tensor, ops::sub_out, const Scalar&>(m);
  adjust_all<ReversedDifference>(m);
  adjust_second<RoundedQuotient, ops::div_Tensor_mode, ops::div__Tensor_mode, ops::div_out_mode,
                std::optional<std::string_view>>(m);
  adjust_second<RoundedQuotient, ops::floor_divide, ops::floor_divide__Tensor, ops::floor_divide_out>(m);
}

}  // namespace
}  // namespace conv2d_ext
