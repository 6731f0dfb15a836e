// The mode's kernels of the matmul family: products of matrices and vectors, and linear layers.
#include <ATen/Functions.h>

#include <algorithm>
#include <string_view>

#include "copy_as.h"
#include "invariance_kernels.h"
#include "matmul.h"
#include "result_sizes.h"

namespace conv2d_ext {
namespace {

using namespace invariance;

// PyTorch has cast what autocast is to cast (leaves): an op that it does not know keeps its dtypes.
Tensor uncast_product(const Tensor& mat1, const Tensor& mat2, const std::optional<Tensor>& bias = std::nullopt) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return matrix_product(mat1, mat2, bias);
}

bool multiplies(const Tensor& mat1, const Tensor& mat2, int64_t dims) {
  return takes(mat1, mat2) && mat1.dim() == dims && mat2.dim() == dims && mat1.sym_size(-1) == mat2.sym_size(-2) &&
         (dims == 2 || mat1.sym_size(0) == mat2.sym_size(0));
}

bool is_one(const Scalar& scalar) { return scalar.equal(1); }
bool is_zero(const Scalar& scalar) { return scalar.equal(0); }

// beta * self + alpha * product, each operation rounded by itself: a fused one is not fused everywhere in PyTorch.
Tensor combine(const Tensor& self, const Tensor& product, const Scalar& beta, const Scalar& alpha) {
  const Tensor scaled = is_one(alpha) ? product : at::mul(product, alpha);
  if (is_zero(beta)) {  // whatever self holds
    if (!may_record(self)) return scaled;
    // Its gradient is zeros nonetheless. (-0 changes no number that it is added to.)
    const Tensor never = at::zeros({1}, self.options().dtype(at::kBool));
    return at::add(scaled, at::where(never, self, Scalar(-0.0)));
  }
  return at::add(scaled, is_one(beta) ? self : at::mul(self, beta));
}

// What PyTorch refuses, and what it computes without the product.
bool are_factors(const Tensor& self, const Scalar& beta, const Scalar& alpha) {
  return !is_zero(alpha) && (self.is_complex() || (!beta.isComplex() && !alpha.isComplex()));
}

bool expands_to(const Tensor& self, SymIntArrayRef size) {
  if (self.dim() > static_cast<int64_t>(size.size())) {
    return false;
  }
  for (int64_t i = 1; i <= self.dim(); ++i) {
    if (self.sym_size(-i) != 1 && self.sym_size(-i) != size[size.size() - i]) {
      return false;
    }
  }
  return true;
}

// ---- products of two

struct Mm {
  using Op = at::_ops::mm;
  static Tensor call(DispatchKeySet keys, const Tensor& self, const Tensor& mat2) {
    if (leaves<Op>(keys) || !multiplies(self, mat2, 2)) return Op::redispatch(keys & kBelow, self, mat2);
    return uncast_product(self, mat2);
  }
};

struct MmOut {
  using Op = at::_ops::mm_out;
  static Tensor& call(DispatchKeySet keys, const Tensor& self, const Tensor& mat2, Tensor& out) {
    if (leaves<Op>(keys) || !multiplies(self, mat2, 2) || !can_write(out, self) || records_gradients(out, self, mat2)) {
      return Op::redispatch(keys & kBelow, self, mat2, out);
    }
    return write(out, uncast_product(self, mat2));
  }
};

struct Bmm {
  using Op = at::_ops::bmm;
  static Tensor call(DispatchKeySet keys, const Tensor& self, const Tensor& mat2) {
    if (leaves<Op>(keys) || !multiplies(self, mat2, 3)) return Op::redispatch(keys & kBelow, self, mat2);
    return uncast_product(self, mat2);
  }
};

struct BmmOut {
  using Op = at::_ops::bmm_out;
  static Tensor& call(DispatchKeySet keys, const Tensor& self, const Tensor& mat2, Tensor& out) {
    if (leaves<Op>(keys) || !multiplies(self, mat2, 3) || !can_write(out, self) || records_gradients(out, self, mat2)) {
      return Op::redispatch(keys & kBelow, self, mat2, out);
    }
    return write(out, uncast_product(self, mat2));
  }
};

// addmm, baddbmm, addmv and addbmm: a product to which beta * self is added.
struct Product {
  Tensor mat1, mat2;
  bool as_vector = false;  // the product's only column is the result
};

bool takes_sum(const Tensor& self, const Product& product, int64_t dims) {
  if (!multiplies(product.mat1, product.mat2, dims) || !takes(self, product.mat1)) return false;
  SymInt size[3];
  for (int64_t i = 0; i < dims; ++i) size[i] = product.mat1.sym_size(i);
  size[dims - 1] = product.mat2.sym_size(-1);
  return expands_to(self, SymIntArrayRef(size, dims - (product.as_vector ? 1 : 0)));
}

Tensor sum(const Tensor& self, const Product& product, const Scalar& beta, const Scalar& alpha) {
  const bool is_bias = !product.as_vector && product.mat2.dim() == 2 && is_one(beta) && is_one(alpha) &&
                       self.dim() == 1 && self.sym_size(0) == product.mat2.sym_size(-1);
  if (is_bias) return uncast_product(product.mat1, product.mat2, self);
  const Tensor result = uncast_product(product.mat1, product.mat2);
  return combine(self, product.as_vector ? without_dim(result, -1) : result, beta, alpha);
}

// How each op's arguments make a product.
Product of_matrices(const Tensor& mat1, const Tensor& mat2) { return {mat1, mat2}; }
Product of_vector(const Tensor& mat, const Tensor& vec) {
  if (!is_dense(vec)) return {mat, vec};
  // No matrix, so that it is not taken, where it is no vector.
  return {mat, vec.dim() == 1 ? vec.unsqueeze(-1) : vec.unsqueeze(0).unsqueeze(0).unsqueeze(0), /*as_vector=*/true};
}
// The sum over a batch is one product whose k runs over it.
Product of_batch(const Tensor& batch1, const Tensor& batch2) {
  if (is_jit_tracing() || !is_dense(batch1) || !is_dense(batch2) || batch1.dim() != 3 || batch2.dim() != 3 ||
      batch1.sym_size(0) != batch2.sym_size(0) || batch1.sym_size(2) != batch2.sym_size(1)) {
    return {batch1, batch2};
  }
  // (Copied, where a gradient is wanted, so that it is contiguous.)
  const Tensor first =
      may_record(batch1) ? copy_as(batch1, /*channels_last=*/false, /*grad_channels_last=*/false) : batch1;
  const Tensor rows = first.transpose(0, 1);
  return {rows.reshape_symint({rows.sym_size(0), rows.sym_size(1) * rows.sym_size(2)}),
          batch2.reshape_symint({batch2.sym_size(0) * batch2.sym_size(1), batch2.sym_size(2)})};
}

template <class AtOp, auto* product_of, int64_t dims>
struct Sum {
  using Op = AtOp;
  static Tensor call(DispatchKeySet keys, const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta,
                     const Scalar& alpha) {
    if (!leaves<Op>(keys) && are_factors(self, beta, alpha)) {
      const Product product = product_of(a, b);
      if (takes_sum(self, product, dims)) return sum(self, product, beta, alpha);
    }
    return Op::redispatch(keys & kBelow, self, a, b, beta, alpha);
  }
};

template <class AtOp, auto* product_of, int64_t dims>
struct SumInPlace {
  using Op = AtOp;
  static Tensor& call(DispatchKeySet keys, Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta,
                      const Scalar& alpha) {
    if (!leaves<Op>(keys) && are_factors(self, beta, alpha)) {
      const Product product = product_of(a, b);
      if (takes_sum(self, product, dims)) {
        const Tensor result = sum(self, product, beta, alpha);
        if (result.sym_sizes() == self.sym_sizes()) return self.copy_(result);
      }
    }
    return Op::redispatch(keys & kBelow, self, a, b, beta, alpha);
  }
};

template <class AtOp, auto* product_of, int64_t dims>
struct SumOut {
  using Op = AtOp;
  static Tensor& call(DispatchKeySet keys, const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta,
                      const Scalar& alpha, Tensor& out) {
    if (!leaves<Op>(keys) && are_factors(self, beta, alpha) && can_write(out, self) &&
        !records_gradients(out, self, a, b)) {
      const Product product = product_of(a, b);
      if (takes_sum(self, product, dims)) return write(out, sum(self, product, beta, alpha));
    }
    return Op::redispatch(keys & kBelow, self, a, b, beta, alpha, out);
  }
};

bool takes_vector(const Tensor& self, const Tensor& vec) {
  return takes(self, vec) && self.dim() == 2 && vec.dim() == 1 && self.sym_size(1) == vec.sym_size(0);
}

struct Mv {
  using Op = at::_ops::mv;
  static Tensor call(DispatchKeySet keys, const Tensor& self, const Tensor& vec) {
    if (leaves<Op>(keys) || !takes_vector(self, vec)) return Op::redispatch(keys & kBelow, self, vec);
    return without_dim(uncast_product(self, vec.unsqueeze(-1)), -1);
  }
};

struct MvOut {
  using Op = at::_ops::mv_out;
  static Tensor& call(DispatchKeySet keys, const Tensor& self, const Tensor& vec, Tensor& out) {
    if (leaves<Op>(keys) || !takes_vector(self, vec) || !can_write(out, self) || records_gradients(out, self, vec)) {
      return Op::redispatch(keys & kBelow, self, vec, out);
    }
    return write(out, uncast_product(self, vec.unsqueeze(-1)).squeeze(-1));
  }
};

bool takes_dot(const Tensor& self, const Tensor& other) {
  return takes(self, other) && self.dim() == 1 && other.dim() == 1 && self.sym_size(0) == other.sym_size(0);
}
Tensor dot_of(const Tensor& self, const Tensor& other) {
  // Views of conjugates have no tangents under vmap (an assertion of PyTorch's).
  const Tensor row = self.resolve_conj().resolve_neg(), column = other.resolve_conj().resolve_neg();
  return in_sizes(uncast_product(row.unsqueeze(0), column.unsqueeze(-1)), {});
}

struct Dot {
  using Op = at::_ops::dot;
  static Tensor call(DispatchKeySet keys, const Tensor& self, const Tensor& other) {
    if (leaves<Op>(keys) || !takes_dot(self, other)) return Op::redispatch(keys & kBelow, self, other);
    return dot_of(self, other);
  }
};

struct Vdot {
  using Op = at::_ops::vdot;
  static Tensor call(DispatchKeySet keys, const Tensor& self, const Tensor& other) {
    if (leaves<Op>(keys) || !takes_dot(self, other)) return Op::redispatch(keys & kBelow, self, other);
    return dot_of(self.conj(), other);
  }
};

struct Linear {
  using Op = at::_ops::linear;
  static Tensor call(DispatchKeySet keys, const Tensor& input, const Tensor& weight,
                     const std::optional<Tensor>& bias) {
    const bool has_bias = bias.has_value() && bias->defined();
    const bool fits = takes(input, weight) && input.dim() >= 1 && (weight.dim() == 1 || weight.dim() == 2) &&
                      input.sym_size(-1) == weight.sym_size(-1) &&
                      (!has_bias || (takes(input, *bias) && bias->dim() == 1 && weight.dim() == 2));
    if (leaves<Op>(keys) || !fits) return Op::redispatch(keys & kBelow, input, weight, bias);
    return linear_layer(input, weight, bias);
  }
};

// A chain of products, from the left. PyTorch's order follows from the sizes, one of which is the batch.
template <class AtOp>
struct Chain {
  using Op = AtOp;
  static Tensor call(DispatchKeySet keys, at::TensorList factors) {
    bool takes_all = !leaves<Op>(keys) && factors.size() > 2;
    for (size_t i = 0; takes_all && i < factors.size(); ++i) {
      const bool may_be_vector =
          Op::name == std::string_view("aten::linalg_multi_dot") && (i == 0 || i + 1 == factors.size());
      takes_all = takes(factors[0], factors[i]) && (factors[i].dim() == 2 || (may_be_vector && factors[i].dim() == 1));
    }
    if (!takes_all) return redispatch_composite<Op>(keys, factors);
    Tensor product = factors[0];
    for (const Tensor& factor : factors.slice(1)) product = at::matmul(product, factor);
    return product;
  }
};

// As a product of matrices, whatever the sizes: PyTorch sums products where the result has one element.
struct Tensordot {
  using Op = at::_ops::tensordot;
  static Tensor call(DispatchKeySet keys, const Tensor& self, const Tensor& other, at::IntArrayRef dims_self,
                     at::IntArrayRef dims_other) {
    const bool takes_both =
        !leaves<Op>(keys) && !is_jit_tracing() && takes(self, other) && dims_self.size() == dims_other.size();
    const auto left = takes_both ? wrapped(dims_self, self.dim()) : std::nullopt;
    const auto right = takes_both ? wrapped(dims_other, other.dim()) : std::nullopt;
    if (!left || !right || !meet(self, *left, other, *right)) {
      return redispatch_composite<Op>(keys, self, other, dims_self, dims_other);
    }
    const std::vector<int64_t> rows = all_but(*left, self.dim()), columns = all_but(*right, other.dim());
    const auto joined = [](std::vector<int64_t> first, const std::vector<int64_t>& second) {
      first.insert(first.end(), second.begin(), second.end());
      return first;
    };
    const auto numel = [](const Tensor& tensor, const std::vector<int64_t>& dims) {
      SymInt count = 1;
      for (const int64_t dim : dims) count *= tensor.sym_size(dim);
      return count;
    };
    const SymInt k = numel(self, *left);
    const Tensor mat1 = self.permute(joined(rows, *left)).reshape_symint({numel(self, rows), k});
    const Tensor mat2 = other.permute(joined(*right, columns)).reshape_symint({k, numel(other, columns)});
    std::vector<SymInt> size;
    for (const int64_t dim : rows) size.push_back(self.sym_size(dim));
    for (const int64_t dim : columns) size.push_back(other.sym_size(dim));
    // Autocast casts no sum of products, and so no single one; of rows it casts each, as of a batch of them.
    return (size.empty() ? uncast_product(mat1, mat2) : at::mm(mat1, mat2)).reshape_symint(size);
  }

 private:
  // None: an error that is PyTorch's to name.
  static std::optional<std::vector<int64_t>> wrapped(at::IntArrayRef dims, int64_t rank) {
    std::vector<int64_t> result;
    for (const int64_t dim : dims) {
      const int64_t of_rank = dim < 0 ? dim + rank : dim;
      const bool is_new = std::find(result.begin(), result.end(), of_rank) == result.end();
      if (of_rank < 0 || of_rank >= rank || !is_new) return std::nullopt;
      result.push_back(of_rank);
    }
    return result;
  }
  // (PyTorch also sums one factor over a dimension that has size 1 in the other.)
  static bool meet(const Tensor& self, const std::vector<int64_t>& left, const Tensor& other,
                   const std::vector<int64_t>& right) {
    for (size_t i = 0; i < left.size(); ++i) {
      if (self.sym_size(left[i]) != other.sym_size(right[i])) return false;
    }
    return true;
  }
  static std::vector<int64_t> all_but(const std::vector<int64_t>& dims, int64_t rank) {
    std::vector<int64_t> others;
    for (int64_t dim = 0; dim < rank; ++dim) {
      if (std::find(dims.begin(), dims.end(), dim) == dims.end()) others.push_back(dim);
    }
    return others;
  }
};

// Of a linear layer and its activation, in PyTorch's own transformer layers.
struct AddmmActivation {
  using Op = at::_ops::_addmm_activation;
  static Tensor call(DispatchKeySet keys, const Tensor& self, const Tensor& mat1, const Tensor& mat2,
                     const Scalar& beta, const Scalar& alpha, bool use_gelu) {
    if (leaves<Op>(keys) || !are_factors(self, beta, alpha) || !takes_sum(self, {mat1, mat2}, 2)) {
      return Op::redispatch(keys & kBelow, self, mat1, mat2, beta, alpha, use_gelu);
    }
    const Tensor result = sum(self, {mat1, mat2}, beta, alpha);
    return use_gelu ? at::gelu(result) : at::relu(result);
  }
};

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) {
  cover_all<Mm, MmOut, Bmm, BmmOut, Mv, MvOut, Dot, Vdot, Linear, AddmmActivation>(m);
  cover_all<Tensordot, Chain<at::_ops::linalg_multi_dot>, Chain<at::_ops::chain_matmul>>(m);
  cover_all<Sum<at::_ops::addmm, of_matrices, 2>, SumInPlace<at::_ops::addmm_, of_matrices, 2>,
            SumOut<at::_ops::addmm_out, of_matrices, 2>>(m);
  cover_all<Sum<at::_ops::baddbmm, of_matrices, 3>, SumInPlace<at::_ops::baddbmm_, of_matrices, 3>,
            SumOut<at::_ops::baddbmm_out, of_matrices, 3>>(m);
  cover_all<Sum<at::_ops::addmv, of_vector, 2>, SumInPlace<at::_ops::addmv_, of_vector, 2>,
            SumOut<at::_ops::addmv_out, of_vector, 2>>(m);
  cover_all<Sum<at::_ops::addbmm, of_batch, 2>, SumInPlace<at::_ops::addbmm_, of_batch, 2>,
            SumOut<at::_ops::addbmm_out, of_batch, 2>>(m);
}

}  // namespace
}  // namespace conv2d_ext
