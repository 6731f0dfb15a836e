// The mode's kernels of products over a dimension: halves are multiplied until one number is left, in an order that
// positions fix. (PyTorch shares a single product out among threads.)
#include <ATen/WrapDimUtils.h>

#include <algorithm>
#include <numeric>

#include "invariance_kernels.h"

namespace conv2d_ext {
namespace {

using namespace invariance;

using MaybeDtype = std::optional<at::ScalarType>;

bool takes_product(const Tensor& self, MaybeDtype dtype) {
  return is_on_cpu(self) && !self.is_complex() && is_real(dtype.value_or(self.scalar_type())) && self.sym_numel() != 0;
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
  Tensor factors = self.permute(order).to(dtype == at::kDouble ? at::kDouble : at::kFloat);
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
    if (leaves<Op>(keys) || !takes_product(self, dtype)) return Op::redispatch(keys & kBelow, self, dtype);
    std::vector<int64_t> last_first(size_t(self.dim()));
    std::iota(last_first.rbegin(), last_first.rend(), 0);
    return product_over(self, last_first, /*keepdim=*/false, dtype.value_or(self.scalar_type()));
  }
};

struct ProdDim {
  using Op = at::_ops::prod_dim_int;
  static Tensor call(DispatchKeySet keys, const Tensor& self, int64_t dim, bool keepdim, MaybeDtype dtype) {
    if (leaves<Op>(keys) || !takes_product(self, dtype) || dim < -self.dim() || dim >= self.dim()) {
      return Op::redispatch(keys & kBelow, self, dim, keepdim, dtype);
    }
    return product_over(self, at::maybe_wrap_dim(dim, self.dim()), keepdim, dtype.value_or(self.scalar_type()));
  }
};

struct ProdOut {
  using Op = at::_ops::prod_int_out;
  static Tensor& call(DispatchKeySet keys, const Tensor& self, int64_t dim, bool keepdim, MaybeDtype dtype,
                      Tensor& out) {
    const bool takes = !leaves<Op>(keys) && takes_product(self, dtype) && is_on_cpu(out) &&
                       out.scalar_type() == dtype.value_or(self.scalar_type()) && !records_gradients(out, self);
    if (!takes) return Op::redispatch(keys & kBelow, self, dim, keepdim, dtype, out);
    return write(out, at::prod(self, dim, keepdim, dtype));
  }
};

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) { cover_all<Prod, ProdDim, ProdOut>(m); }

}  // namespace
}  // namespace conv2d_ext
