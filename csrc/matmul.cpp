// conv2d_ext::matmul closed under differentiation, and linear.
//
//   y  = matmul(a, b, bias)     ga = matmul(gy, b^H)     gb = matmul(a^H, gy)     gbias = conv2d_grad_bias(gy)
#include "matmul.h"

#include <ATen/TensorUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "autograd_node.h"
#include "conv2d_checks.h"
#include "conv2d_format.h"
#include "conv2d_ops.h"
#include "find_op.h"
#include "op_checks.h"
#include "result_sizes.h"
#include "tracing.h"

namespace conv2d_ext {

namespace {

void check_dense(const char* function, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == c10::kStrided, function, ": expected a dense tensor for ", name, ", but got layout ",
              tensor.layout());
}

}  // namespace

void check_matmul(const at::Tensor& mat1, const at::Tensor& mat2, const std::optional<at::Tensor>& bias) {
  check_dense("matmul", "mat1", mat1);
  check_dense("matmul", "mat2", mat2);
  TORCH_CHECK((mat1.dim() == 2 && mat2.dim() == 2) || (mat1.dim() == 3 && (mat2.dim() == 2 || mat2.dim() == 3)),
              "matmul: expected mat1 of size (M, K) with mat2 of size (K, N), or mat1 of size (B, M, K) with mat2 of "
              "size (K, N) or (B, K, N), but got mat1 of size ",
              mat1.sym_sizes(), " and mat2 of size ", mat2.sym_sizes());
  TORCH_CHECK(mat1.scalar_type() == mat2.scalar_type(), "mat1 and mat2 must have the same dtype, but got ",
              mat1.scalar_type(), " and ", mat2.scalar_type());
  const auto dtype = mat1.scalar_type();
  const bool is_integer =
      dtype == at::kChar || dtype == at::kByte || dtype == at::kShort || dtype == at::kInt || dtype == at::kLong;
  const bool is_complex = dtype == at::kComplexFloat || dtype == at::kComplexDouble;
  TORCH_CHECK_NOT_IMPLEMENTED(is_integer || is_complex || is_real(dtype), "\"matmul\" not implemented for '", dtype,
                              "'");
  // Not a "not implemented" error: fake tensors replace those by their own, without this message.
  TORCH_CHECK(!is_integer || !is_cuda_or_fake(mat1), "\"addmm_cuda\" not implemented for '", dtype, "'");
  TORCH_CHECK(mat1.sym_size(-1) == mat2.sym_size(-2), "mat1 and mat2 shapes cannot be multiplied (", mat1.sym_size(-2),
              "x", mat1.sym_size(-1), " and ", mat2.sym_size(-2), "x", mat2.sym_size(-1), ")");
  if (mat2.dim() == 3) {
    TORCH_CHECK(mat1.sym_size(0) == mat2.sym_size(0),
                "Expected size for first two dimensions of batch2 tensor to be: [", mat1.sym_size(0), ", ",
                mat1.sym_size(2), "] but got: [", mat2.sym_size(0), ", ", mat2.sym_size(1), "].");
  }
  TORCH_CHECK(mat1.device() == mat2.device(), "Expected all tensors to be on the same device, but found at least two ",
              "devices, ", mat1.device(), " and ", mat2.device(), "!");
  if (!bias.has_value() || !bias->defined()) {
    return;
  }
  TORCH_CHECK(mat2.dim() == 2, "matmul: expected no bias with a mat2 of size (B, K, N), but got mat2 of size ",
              mat2.sym_sizes(), " and bias of size ", bias->sym_sizes());
  TORCH_CHECK(bias->dim() == 1 && bias->sym_size(0) == mat2.sym_size(-1), "matmul: expected bias of size [",
              mat2.sym_size(-1), "], but got bias of size ", bias->sym_sizes());
  TORCH_CHECK(bias->scalar_type() == mat1.scalar_type(), "self and mat2 must have the same dtype, but got ",
              bias->scalar_type(), " and ", mat2.scalar_type());
  TORCH_CHECK(bias->device() == mat1.device(), "Expected all tensors to be on the same device, but found at least two ",
              "devices, ", mat1.device(), " and ", bias->device(), "!");
}

namespace {

using at::Tensor;
using torch::autograd::compute_requires_grad;
using torch::autograd::isFwGradDefined;
using torch::autograd::variable_list;

Tensor matmul_meta(const Tensor& mat1, const Tensor& mat2, const std::optional<Tensor>& bias) {
  check_matmul(mat1, mat2, bias);
  SymSizes size = copy_sizes(mat1.sym_sizes());
  size.back() = mat2.sym_size(-1);
  return at::empty_symint(size, mat1.options());
}

TORCH_LIBRARY_IMPL(conv2d_ext, Meta, m) { m.impl("matmul", matmul_meta); }

// ---- autograd

// All rows of a batch as rows of one matrix.
Tensor joined_rows(const Tensor& batch) {
  return batch.dim() == 2 ? batch : batch.reshape_symint({batch.sym_size(0) * batch.sym_size(1), batch.sym_size(2)});
}

Tensor conjugate_transpose(const Tensor& matrix) { return matrix.transpose(-2, -1).conj(); }

bool lies_by_columns(const Tensor& matrix) {
  return matrix.dim() == 2 && matrix.sym_stride(0).sym_eq(1).guard_bool(__FILE__, __LINE__) &&
         matrix.sym_stride(1).sym_eq(matrix.sym_size(0)).guard_bool(__FILE__, __LINE__);
}

// Whether a batch of one is taken for a matrix that lies by columns: by F.linear of torch 2.15 always, by that of
// earlier ones where mat2 needs a gradient, or the batch's stride lets it. (Sizes that are not known yet are not asked:
// layouts alone depend on it.)
bool one_lies_by_columns(const Tensor& mat1, const Tensor& mat2) {
  if (mat1.dim() != 3 || mat2.dim() != 2 || mat1.sym_size(0).maybe_as_int() != 1) return false;
  if (mat1.sym_stride(1).maybe_as_int() != 1) return false;
  const auto rows = mat1.sym_size(1).maybe_as_int();
  const bool by_columns = rows.has_value() && *rows != 1 && mat1.sym_stride(2).maybe_as_int() == rows;
  return by_columns && (kLieAsOfTorch215 || mat2.requires_grad() || mat1.sym_stride(0).maybe_as_int() == rows);
}

// A product that lies by rows or by columns. Factors that change their roles change no bit of real numbers; of complex
// ones they would: the order of an imaginary part's two products follows the roles.
Tensor product_by(bool columns, const Tensor& mat1, const Tensor& mat2) {
  if (!columns) return matrix_product(mat1, mat2);
  if (mat1.dim() == 3) return product_by(true, mat1.squeeze(0), mat2).unsqueeze(0);
  if (mat1.is_complex()) return matrix_product(mat1, mat2).transpose(0, 1).contiguous().transpose(0, 1);
  return matrix_product(mat2.transpose(0, 1), mat1.transpose(0, 1)).transpose(0, 1);
}

struct MatmulBackward {  // of (mat1, mat2, bias)
  static constexpr const char* kName = "Conv2dExtMatmulBackward";
  static constexpr size_t kArguments = 3;
  struct State {
    bool one_mat2 = true;                                   // mat2 has no batch
    bool mat1_by_columns = false, mat2_by_columns = false;  // as they lie in memory, and so their gradients
    template <class Self, class Visit>
    static void visit(Self& self, Visit visit) {
      visit(self.one_mat2);
      visit(self.mat1_by_columns);
      visit(self.mat2_by_columns);
    }
  };

  static void apply(const Tensor& grad, const Tensor& mat1, const Tensor& mat2, const State& state,
                    const Wanted& wanted, variable_list& result) {
    if (wanted[0]) {
      result[0] = product_by(state.mat1_by_columns, grad, conjugate_transpose(mat2));
    }
    if (wanted[1]) {
      const Tensor rows = state.one_mat2 ? joined_rows(mat1) : mat1;
      result[1] =
          product_by(state.mat2_by_columns, conjugate_transpose(rows), state.one_mat2 ? joined_rows(grad) : grad);
    }
    if (wanted[2]) {
      result[2] = conv2d_grad_bias(joined_rows(grad).unsqueeze(-1).unsqueeze(-1));
    }
  }
};

Tensor matmul_autograd(c10::DispatchKeySet keys, const Tensor& mat1, const Tensor& mat2,
                       const std::optional<Tensor>& bias) {
  const Tensor output = below_autograd(matmul_op(), keys, mat1, mat2, bias);
  if (compute_requires_grad(mat1, mat2, bias)) {
    auto node = make_node<MatmulBackward>(mat1, mat2, bias);
    node->state = {mat2.dim() == 2, lies_by_columns(mat1) || one_lies_by_columns(mat1, mat2), lies_by_columns(mat2)};
    node->save(mat1, mat2);
    torch::autograd::set_history(output, node);
  }
  const bool bias_moves = isFwGradDefined(bias);
  if (isFwGradDefined(mat1) || isFwGradDefined(mat2)) {
    // The bias's tangent rides along with the first product.
    std::optional<Tensor> bias_tangent;
    if (bias_moves) {
      bias_tangent = tangent(*bias);
    }
    set_bilinear_tangent(output, mat1, mat2, [&](const Tensor& a, const Tensor& b) {
      return matrix_product(a, b, std::exchange(bias_tangent, std::nullopt));
    });
  } else if (bias_moves) {
    output._set_fw_grad(tangent(*bias).expand_symint(output.sym_sizes()), /*level=*/0, /*is_inplace_op=*/false);
  }
  return output;
}

TORCH_LIBRARY_IMPL(conv2d_ext, Autograd, m) { m.impl("matmul", matmul_autograd); }

// (..., K) as one matrix where that is a view, else as a batch of matrices where that is one (permuted images), else as
// a copied matrix. By reshape, which a trace records for inputs of any strides.
Tensor as_matrices(const Tensor& input) {
  const auto sizes = input.sym_sizes();
  const auto above = sizes.slice(0, sizes.size() - 1);
  const c10::SymDimVector rows{c10::multiply_integers(above), sizes.back()};
  const auto is_view = [&](const c10::SymDimVector& wanted) {
    return at::detail::computeStride(sizes, input.sym_strides(), wanted).has_value();
  };
  for (size_t batch = 1; batch < above.size() && !is_view(rows); ++batch) {
    const c10::SymDimVector matrices{c10::multiply_integers(above.slice(0, batch)),
                                     c10::multiply_integers(above.slice(batch)), sizes.back()};
    if (is_view(matrices)) {
      return input.reshape_symint(matrices);
    }
  }
  return input.reshape_symint(rows);
}

// A bias that no product takes: of one element, or of several dimensions. PyTorch adds it to the output in place, so
// the dtype stays; same_dtype: where it would have a product take it, of the operands' dtype alone.
Tensor add_expanded_bias(const Tensor& output, Tensor bias, bool same_dtype) {
  // PyTorch takes a vector's output as a matrix of one row.
  if (output.dim() == 1 && bias.dim() == 2 && bias.sym_sizes() == output.unsqueeze(0).sym_sizes()) {
    bias = bias.squeeze(0);
  }
  const auto dtype = output.scalar_type();
  const bool is_cast = at::autocast::is_autocast_enabled(output.device().type());
  TORCH_CHECK(!same_dtype || is_cast || bias.scalar_type() == dtype, "self and mat2 must have the same dtype, but got ",
              bias.scalar_type(), " and ", dtype);
  const Tensor sum = output.add(bias.expand_symint(output.sym_sizes()));
  TORCH_CHECK(at::canCast(sum.scalar_type(), dtype), "result type ", sum.scalar_type(),
              " can't be cast to the desired output type ", dtype);
  return sum.to(dtype);
}

}  // namespace

Tensor linear_layer(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  if (is_jit_tracing()) {
    static const auto op = find_op<MatmulSignature>("linear");
    return op.call(input, weight, bias);
  }
  TORCH_CHECK(input.dim() >= 1 && weight.dim() >= 1, "both arguments to linear need to be at least 1D, but they are ",
              input.dim(), "D and ", weight.dim(), "D");
  TORCH_CHECK(weight.dim() == 1 || weight.dim() == 2,
              "linear(): argument 'weight' must be of size (out_features, in_features) or (in_features,), but got ",
              weight.sym_sizes());
  const bool has_bias = bias.has_value() && bias->defined();
  check_dense("linear", "input", input);
  check_dense("linear", "weight", weight);
  if (has_bias) {
    check_dense("linear", "bias", *bias);
  }
  if (weight.dim() == 1) {
    TORCH_CHECK(!has_bias || (bias->dim() != 1 && input.dim() != 2), "mat2 must be a matrix, got 1-D tensor");
    const Tensor output = without_dim(linear_layer(input, weight.unsqueeze(0), std::nullopt), -1);
    return has_bias ? add_expanded_bias(output, *bias, false) : output;
  }
  // A bias of another shape is added to the product, as PyTorch expands it.
  const bool fused = has_bias && bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0);
  const std::optional<Tensor> fused_bias = fused ? bias : std::nullopt;
  Tensor output;
  if (input.dim() == 2 || input.dim() == 3) {
    output = matrix_product(input, weight.t(), fused_bias);
  } else {
    const Tensor product = matrix_product(as_matrices(input), weight.t(), fused_bias);
    SymSizes size = copy_sizes(input.sym_sizes());
    size.back() = weight.sym_size(0);
    output = in_sizes(product, size);
  }
  return has_bias && !fused ? add_expanded_bias(output, *bias, input.dim() == 2 || bias->dim() == 1) : output;
}

}  // namespace conv2d_ext
