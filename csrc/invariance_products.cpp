// The mode's kernels of products over a dimension: halves are multiplied until one number is left, in an order that
// positions fix. (PyTorch shares a single product out among threads.)
#include <ATen/WrapDimUtils.h>

#include "invariance_kernels.h"

namespace conv2d_ext {
namespace {

using namespace invariance;

using MaybeDtype = std::optional<at::ScalarType>;

bool takes_product(const Tensor& self, MaybeDtype dtype) {
  return is_on_cpu(self) && !self.is_complex() && is_real(dtype.value_or(self.scalar_type())) && self.sym_numel() != 0;
}

// Over the last dimension, which goes.
Tensor product_of_last(const Tensor& self, at::ScalarType dtype) {
  // 16-bit types are rounded once.
  Tensor factors = self.to(dtype == at::kDouble ? at::kDouble : at::kFloat);
  for (int64_t n = factors.sym_size(-1).guard_int(__FILE__, __LINE__); n > 1; n = n / 2 + n % 2) {
    const Tensor product = at::mul(factors.narrow(-1, 0, n / 2), factors.narrow(-1, n / 2, n / 2));
    factors = n % 2 == 0 ? product : at::cat({product, factors.narrow(-1, n - 1, 1)}, -1);
  }
  // A copy: of one factor it would be the input itself.
  return factors.select(-1, 0).to(dtype, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous);
}

struct Prod {
  using Op = at::_ops::prod;
  static Tensor call(DispatchKeySet keys, const Tensor& self, MaybeDtype dtype) {
    if (leaves<Op>(keys) || !takes_product(self, dtype)) return Op::redispatch(keys & kBelow, self, dtype);
    return product_of_last(self.reshape({-1}), dtype.value_or(self.scalar_type()));
  }
};

struct ProdDim {
  using Op = at::_ops::prod_dim_int;
  static Tensor call(DispatchKeySet keys, const Tensor& self, int64_t dim, bool keepdim, MaybeDtype dtype) {
    if (leaves<Op>(keys) || !takes_product(self, dtype) || dim < -self.dim() || dim >= self.dim()) {
      return Op::redispatch(keys & kBelow, self, dim, keepdim, dtype);
    }
    const Tensor result = product_of_last(self.movedim(dim, -1), dtype.value_or(self.scalar_type()));
    return keepdim ? result.unsqueeze(at::maybe_wrap_dim(dim, self.dim())) : result;
  }
};

TORCH_LIBRARY_IMPL(aten, DeferredInit, m) { cover_all<Prod, ProdDim>(m); }

}  // namespace
}  // namespace conv2d_ext
