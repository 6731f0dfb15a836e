// Products of matrices over the convolutions' engines: the op conv2d_ext::matmul, and linear, which is made of it.
//
//   result[b, i, j] = bias[j] + sum over k of mat1[b, i, k] * mat2[b, k, j]
//
// No call can know which of its dimensions is a batch, so the order of a sum follows from k, the dtype and the
// instruction set alone: a row of the result has the same bits whichever rows lie beside it, in whichever of the forms
// below.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "export.h"
#include "find_op.h"

namespace conv2d_ext {

using MatmulSignature = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&);
namespace op_names {
inline constexpr char matmul[] = "matmul";
}
inline const auto& matmul_op() { return op_named<MatmulSignature, op_names::matmul>(); }

// mat1 (M, K) or (B, M, K); mat2 (K, N), or (B, K, N) where mat1 has a batch; bias (N,) or none, and none with a batch
// of mat2. All of one dtype and device, with any strides. The result: (M, N) or (B, M, N), contiguous.
inline at::Tensor matrix_product(const at::Tensor& mat1, const at::Tensor& mat2,
                                 const std::optional<at::Tensor>& bias = std::nullopt) {
  return matmul_op().call(mat1, mat2, bias);
}

// torch.nn.functional.linear: input (*, K), weight (N, K) or (K,), bias or none.
CONV2D_EXT_EXPORT at::Tensor linear_layer(const at::Tensor& input, const at::Tensor& weight,
                                          const std::optional<at::Tensor>& bias);

// Sizes, dtypes and devices; raises with torch.mm's words. For kernels and tracing alike.
CONV2D_EXT_EXPORT void check_matmul(const at::Tensor& mat1, const at::Tensor& mat2,
                                    const std::optional<at::Tensor>& bias);

}  // namespace conv2d_ext
