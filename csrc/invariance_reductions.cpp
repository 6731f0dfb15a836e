// The mode's kernels of sums, means, variances, norms, products over dimensions and softmax.
//
// PyTorch's sum over all dimensions is shared out among threads where it is one number, and where it is several the
// order of a column's sum follows the column's place in a thread's share. So every sum is taken, whatever its size.
#include <ATen/WrapDimUtils.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "invariance_kernels.h"
#include "pointwise_ops.h"
#include "reductions.h"

namespace conv2d_ext {
namespace {

using namespace invariance;

// ---- softmax

bool has_dim(const Tensor& tensor, int64_t dim) {
  const int64_t dims = std::max<int64_t>(tensor.dim(), 1);
  return -dims <= dim && dim < dims;
}

template <class AtOp, bool log>
struct Softmax {
  using Op = AtOp;
  static Tensor call(DispatchKeySet keys, const Tensor& self, int64_t dim, bool half_to_float) {
    if (leaves<Op>(keys) || half_to_float || !takes_on_cpu(self) || !has_dim(self, dim)) {
      return Op::redispatch(keys & kBelow, self, dim, half_to_float);
    }
    return softmax_over(self, dim, log);
  }
};

template <class AtOp, bool log>
struct SoftmaxOut {
  using Op = AtOp;
  static Tensor& call(DispatchKeySet keys, const Tensor& self, int64_t dim, bool half_to_float, Tensor& out) {
    if (leaves<Op>(keys) || half_to_float || !takes_on_cpu(self) || !has_dim(self, dim) || !can_write(out, self) ||
        records_gradients(out, self)) {
      return Op::redispatch(keys & kBelow, self, dim, half_to_float, out);
    }
    return write(out, softmax_over(self, dim, log));
  }
};

bool takes_softmax_grad(const Tensor& grad_output, const Tensor& output, int64_t dim, at::ScalarType input_dtype) {
  return takes_on_cpu(grad_output, output) && input_dtype == output.scalar_type() && has_dim(output, dim) &&
         grad_output.sym_sizes() == output.sym_sizes();
}

template <class AtOp, bool log>
struct SoftmaxGrad {
  using Op = AtOp;
  static Tensor call(DispatchKeySet keys, const Tensor& grad_output, const Tensor& output, int64_t dim,
                     at::ScalarType input_dtype) {
    if (leaves<Op>(keys) || !takes_softmax_grad(grad_output, output, dim, input_dtype)) {
      return Op::redispatch(keys & kBelow, grad_output, output, dim, input_dtype);
    }
    return softmax_grad(grad_output, output, dim, log);
  }
};

template <class AtOp, bool log>
struct SoftmaxGradOut {
  using Op = AtOp;
  static Tensor& call(DispatchKeySet keys, const Tensor& grad_output, const Tensor& output, int64_t dim,
                      at::ScalarType input_dtype, Tensor& out) {
    if (leaves<Op>(keys) || !takes_softmax_grad(grad_output, output, dim, input_dtype) || !can_write(out, output) ||
        records_gradients(out, grad_output, output)) {
      return Op::redispatch(keys & kBelow, grad_output, output, dim, input_dtype, out);
    }
    return write(out, softmax_grad(grad_output, output, dim, log));
  }
};

// ---- sums and means

using MaybeDims = at::OptionalIntArrayRef;
using MaybeDtype = std::optional<at::ScalarType>;

// A sum or mean that this library computes.
struct Reduced {
  std::vector<int64_t> dim;
  at::ScalarType dtype;  // of the result
};

// None: PyTorch's, or an error that it has to name.
std::optional<Reduced> reduced(const Tensor& self, MaybeDims dim, MaybeDtype dtype) {
  if (!is_on_cpu(self) || self.is_complex()) return std::nullopt;
  Reduced call{{}, dtype.value_or(self.scalar_type())};
  if (!is_real(call.dtype)) return std::nullopt;
  if (!dim.has_value() || dim->empty()) {
    call.dim.resize(size_t(self.dim()));
    std::iota(call.dim.begin(), call.dim.end(), 0);
    return call;
  }
  std::vector<bool> named(size_t(std::max<int64_t>(self.dim(), 1)));
  for (const int64_t d : *dim) {
    if (!has_dim(self, d)) return std::nullopt;
    const int64_t wrapped = at::maybe_wrap_dim(d, self.dim());
    if (named[size_t(wrapped)]) return std::nullopt;
    named[size_t(wrapped)] = true;
  }
  if (self.dim() > 0) call.dim = dim->vec();
  return call;
}

Tensor sum_of(const Tensor& self, const Reduced& call, bool keepdim) {
  return sum_over(self.to(call.dtype), call.dim, keepdim);
}

// 16-bit types are rounded once.
Tensor mean_of(const Tensor& self, const Reduced& call, bool keepdim) {
  const bool is_short = call.dtype == at::kBFloat16 || call.dtype == at::kHalf;
  const Tensor mean = mean_over(self.to(is_short ? at::kFloat : call.dtype), call.dim, keepdim);
  return is_short ? mean.to(call.dtype) : mean;
}

using Reduce = Tensor (*)(const Tensor&, const Reduced&, bool);

// Over all dimensions.
template <class AtOp, Reduce reduce>
struct ReduceAll {
  using Op = AtOp;
  static Tensor call(DispatchKeySet keys, const Tensor& self, MaybeDtype dtype) {
    if (!leaves<Op>(keys)) {
      if (const auto call = reduced(self, std::nullopt, dtype)) return reduce(self, *call, /*keepdim=*/false);
    }
    return Op::redispatch(keys & kBelow, self, dtype);
  }
};

template <class AtOp, Reduce reduce>
struct ReduceDims {
  using Op = AtOp;
  static Tensor call(DispatchKeySet keys, const Tensor& self, MaybeDims dim, bool keepdim, MaybeDtype dtype) {
    if (!leaves<Op>(keys)) {
      if (const auto call = reduced(self, dim, dtype)) return reduce(self, *call, keepdim);
    }
    return Op::redispatch(keys & kBelow, self, dim, keepdim, dtype);
  }
};

template <class AtOp, Reduce reduce>
struct ReduceDimsOut {
  using Op = AtOp;
  static Tensor& call(DispatchKeySet keys, const Tensor& self, MaybeDims dim, bool keepdim, MaybeDtype dtype,
                      Tensor& out) {
    // PyTorch takes no mean of integers whose result alone says what it is to be.
    const bool has_dtype = reduce != mean_of || dtype.has_value() || self.is_floating_point();
    if (!leaves<Op>(keys) && has_dtype && is_on_cpu(out) && !records_gradients(out, self)) {
      // Without a dtype the result's is what is asked for.
      const auto call = reduced(self, dim, dtype.value_or(out.scalar_type()));
      if (call && call->dtype == out.scalar_type()) return write(out, reduce(self, *call, keepdim));
    }
    return Op::redispatch(keys & kBelow, self, dim, keepdim, dtype, out);
  }
};

// The p-th root of a sum of powers, or of a variance; its gradient at 0 is 0.
Tensor root_of_sum(const Tensor& sum, double p) {
  const Tensor zero = at::eq(sum, 0);
  const Tensor filled = at::masked_fill(sum, zero, 1);
  const Tensor root = p == 2 ? at::sqrt(filled) : pointwise(filled, "pow", {1 / p});
  return at::masked_fill(root, zero, 0);
}

// ---- variances and norms: PyTorch's forward holds, but not its backward, whose mean or power does not

using MaybeScalar = std::optional<Scalar>;
struct Variance {
  Tensor input;  // in float64, in which no square of the others overflows or underflows; results are rounded once
  std::vector<int64_t> dim;
  double divisor;

  template <bool root>
  Tensor value(bool keepdim, at::ScalarType dtype) const {
    const Tensor variance = var_over(input, dim, divisor, keepdim);
    return (root ? root_of_sum(variance, 2) : variance).to(dtype);
  }
};

// None: PyTorch's.
std::optional<Variance> variance_of(const Tensor& self, MaybeDims dim, const MaybeScalar& correction) {
  const auto call = reduced(self, dim, std::nullopt);
  if (!call || is_jit_tracing() || self.sym_numel() == 0 || (correction && correction->isComplex())) {
    return std::nullopt;
  }
  double count = 1;
  for (const int64_t d : call->dim) count *= double(self.sym_size(d).guard_int(__FILE__, __LINE__));
  const double divisor = count - (correction ? correction->toDouble() : 1.0);
  if (divisor <= 0) return std::nullopt;  // PyTorch warns
  return Variance{self.to(at::kDouble), call->dim, divisor};
}

template <class AtOp, bool root>
struct Var {
  using Op = AtOp;
  static Tensor call(DispatchKeySet keys, const Tensor& self, MaybeDims dim, const MaybeScalar& correction,
                     bool keepdim) {
    if (!leaves<Op>(keys)) {
      if (const auto found = variance_of(self, dim, correction)) {
        return found->template value<root>(keepdim, self.scalar_type());
      }
    }
    return Op::redispatch(keys & kBelow, self, dim, correction, keepdim);
  }
};

template <class AtOp, bool root>
struct VarMean {
  using Op = AtOp;
  static std::tuple<Tensor, Tensor> call(DispatchKeySet keys, const Tensor& self, MaybeDims dim,
                                         const MaybeScalar& correction, bool keepdim) {
    if (!leaves<Op>(keys)) {
      if (const auto found = variance_of(self, dim, correction)) {
        const auto dtype = self.scalar_type();
        const Tensor mean = mean_over(found->input, found->dim, keepdim);
        return {found->template value<root>(keepdim, dtype), mean.to(dtype)};
      }
    }
    return Op::redispatch(keys & kBelow, self, dim, correction, keepdim);
  }
};

// Of magnitudes. A square is one of the number itself: by its magnitude the second derivative at 0 would be 0. Below 1
// the slope at 0 is infinite; PyTorch's gradient there is 0.
Tensor powers(const Tensor& number, double p) {
  if (p == 2) return at::mul(number, number);
  const Tensor size = at::abs(number);
  if (p >= 1) return pointwise(size, "pow", {p});
  const Tensor zero = at::eq(size, 0);
  return at::masked_fill(pointwise(at::masked_fill(size, zero, 1), "pow", {p}), zero, p > 0 ? 0.0 : INFINITY);
}

struct VectorNorm {
  using Op = at::_ops::linalg_vector_norm;
  static Tensor call(DispatchKeySet keys, const Tensor& self, const Scalar& ord, MaybeDims dim, bool keepdim,
                     MaybeDtype dtype) {
    const bool takes = !leaves<Op>(keys) && is_real(self.scalar_type()) && !ord.isComplex() && self.sym_numel() != 0 &&
                       (!dtype || at::promote_types(self.scalar_type(), *dtype) == *dtype);
    const double p = takes ? ord.toDouble() : 0;
    const auto call = takes && p != 0 && std::abs(p) < 1e6 ? reduced(self, dim, dtype) : std::nullopt;
    if (!call) return Op::redispatch(keys & kBelow, self, ord, dim, keepdim, dtype);
    const bool is_short = call->dtype == at::kBFloat16 || call->dtype == at::kHalf;
    // Powers are float64's, as in a variance.
    const Tensor number = self.to(p != 1 ? at::kDouble : is_short ? at::kFloat : call->dtype);
    if (p == 1) return sum_over(at::abs(number), call->dim, keepdim).to(call->dtype);
    const Tensor sum = sum_over(powers(number, p), call->dim, keepdim);
    return (p > 0 ? root_of_sum(sum, p) : pointwise(sum, "pow", {1 / p})).to(call->dtype);
  }
};

// PyTorch's older norm, which pairwise_distance and dist call, comes here from below autograd.
struct VectorNormOut {
  using Op = at::_ops::linalg_vector_norm_out;
  static Tensor& call(DispatchKeySet keys, const Tensor& self, const Scalar& ord, MaybeDims dim, bool keepdim,
                      MaybeDtype dtype, Tensor& out) {
    const bool takes = !leaves<Op>(keys) && takes_on_cpu(self) && is_on_cpu(out) && !ord.isComplex() &&
                       out.scalar_type() == dtype.value_or(self.scalar_type()) && !records_gradients(out, self);
    if (!takes) return Op::redispatch(keys & kBelow, self, ord, dim, keepdim, dtype, out);
    return write(out, at::linalg_vector_norm(self, ord, dim, keepdim, dtype));
  }
};

// ---- products: halves are multiplied until one number is left, in an order that positions fix. (PyTorch shares a
// single product out among threads.)

// factors: how many are multiplied. (A single one is PyTorch's, whose gradient knows that it is a product's.)
bool takes_product(const Tensor& self, const SymInt& factors, MaybeDtype dtype) {
  return is_on_cpu(self) && !self.is_complex() && is_real(dtype.value_or(self.scalar_type())) &&
         self.sym_numel() != 0 && factors != 1 && !is_jit_tracing();
}
bool takes_product_over(const Tensor& self, int64_t dim, MaybeDtype dtype) {
  return self.dim() > 0 && has_dim(self, dim) && takes_product(self, self.sym_size(dim), dtype);
}

// The dimensions as they lie in memory, so that a gradient gets the input's strides.
std::vector<int64_t> memory_order(const Tensor& self) {
  std::vector<int64_t> order(size_t(self.dim()));
  std::iota(order.begin(), order.end(), 0);
  const bool is_permuted = !self.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && !self.is_contiguous() &&
                           self.is_non_overlapping_and_dense();
  if (is_permuted) {
    const auto strides = self.strides();
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return strides[size_t(a)] > strides[size_t(b)]; });
  }
  return order;
}

// Over a dimension, whose size is 1 then.
Tensor halved(Tensor factors, int64_t dim) {
  for (int64_t n = factors.sym_size(dim).guard_int(__FILE__, __LINE__); n > 1; n = n / 2 + n % 2) {
    const Tensor product = at::mul(factors.narrow(dim, 0, n / 2), factors.narrow(dim, n / 2, n / 2));
    factors = n % 2 == 0 ? product : at::cat({product, factors.narrow(dim, n - 1, 1)}, dim);
  }
  return factors;
}

// Over dimensions, one after the other. 16-bit types are rounded once.
Tensor product_over(const Tensor& self, at::IntArrayRef dims, bool keepdim, at::ScalarType dtype) {
  const std::vector<int64_t> order = memory_order(self);
  std::vector<int64_t> back(order.size());
  for (size_t i = 0; i < order.size(); ++i) back[size_t(order[i])] = int64_t(i);
  Tensor factors = self.permute(order).to(compute_type(dtype));
  for (const int64_t dim : dims) factors = halved(factors, back[size_t(dim)]);
  factors = factors.permute(back);
  if (!keepdim) {
    for (const int64_t dim : dims) factors = factors.select(dim, 0);
  }
  // A copy: of one factor it would be the input itself.
  return factors.to(dtype, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous);
}

struct Prod {
  using Op = at::_ops::prod;
  static Tensor call(DispatchKeySet keys, const Tensor& self, MaybeDtype dtype) {
    if (leaves<Op>(keys) || !takes_product(self, self.sym_numel(), dtype)) {
      return Op::redispatch(keys & kBelow, self, dtype);
    }
    std::vector<int64_t> last_first(size_t(self.dim()));
    std::iota(last_first.rbegin(), last_first.rend(), 0);
    return product_over(self, last_first, /*keepdim=*/false, dtype.value_or(self.scalar_type()));
  }
};

struct ProdDim {
  using Op = at::_ops::prod_dim_int;
  static Tensor call(DispatchKeySet keys, const Tensor& self, int64_t dim, bool keepdim, MaybeDtype dtype) {
    if (leaves<Op>(keys) || !takes_product_over(self, dim, dtype)) {
      return Op::redispatch(keys & kBelow, self, dim, keepdim, dtype);
    }
    return product_over(self, at::maybe_wrap_dim(dim, self.dim()), keepdim, dtype.value_or(self.scalar_type()));
  }
};

struct ProdOut {
  using Op = at::_ops::prod_int_out;
  static Tensor& call(DispatchKeySet keys, const Tensor& self, int64_t dim, bool keepdim, MaybeDtype dtype,
                      Tensor& out) {
    const bool takes = !leaves<Op>(keys) && takes_product_over(self, dim, dtype) && is_on_cpu(out) &&
                       out.scalar_type() == dtype.value_or(self.scalar_type()) && !records_gradients(out, self);
    if (!takes) return Op::redispatch(keys & kBelow, self, dim, keepdim, dtype, out);
    return write(out, at::prod(self, dim, keepdim, dtype));
  }
};

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) {
  namespace ops = at::_ops;
  cover_all<Softmax<ops::_softmax, false>, Softmax<ops::_log_softmax, true>, SoftmaxOut<ops::_softmax_out, false>,
            SoftmaxOut<ops::_log_softmax_out, true>>(m);
  cover_all<SoftmaxGrad<ops::_softmax_backward_data, false>, SoftmaxGrad<ops::_log_softmax_backward_data, true>,
            SoftmaxGradOut<ops::_softmax_backward_data_out, false>,
            SoftmaxGradOut<ops::_log_softmax_backward_data_out, true>>(m);
  cover_all<ReduceAll<ops::sum, sum_of>, ReduceDims<ops::sum_dim_IntList, sum_of>,
            ReduceDimsOut<ops::sum_IntList_out, sum_of>>(m);
  cover_all<Var<ops::var_correction, false>, Var<ops::std_correction, true>, VarMean<ops::var_mean_correction, false>,
            VarMean<ops::std_mean_correction, true>, VectorNorm, VectorNormOut>(m);
  cover_all<ReduceAll<ops::mean, mean_of>, ReduceDims<ops::mean_dim, mean_of>, ReduceDimsOut<ops::mean_out, mean_of>>(
      m);
  cover_all<Prod, ProdDim, ProdOut>(m);
}

}  // namespace
}  // namespace conv2d_ext
