// The engines' names of torch's dtypes, and their views of tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "tensor_view.h"

namespace conv2d_ext {

inline DType to_dtype(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
      return DType::kFloat32;
    case c10::kDouble:
      return DType::kFloat64;
    case c10::kBFloat16:
      return DType::kBFloat16;
    case c10::kHalf:
      return DType::kFloat16;
    case c10::kComplexFloat:
      return DType::kComplex64;
    case c10::kComplexDouble:
      return DType::kComplex128;
    case c10::kChar:
      return DType::kInt8;
    case c10::kByte:
      return DType::kUInt8;
    case c10::kShort:
      return DType::kInt16;
    case c10::kInt:
      return DType::kInt32;
    case c10::kLong:
      return DType::kInt64;
    default:
      TORCH_INTERNAL_ASSERT(false, "conv2d_checks let pass ", dtype);
  }
}

// A 3-D tensor is a batch of one.
inline void copy_strides(const at::Tensor& tensor, int64_t (&stride)[4]) {
  const auto strides = tensor.strides();
  stride[0] = 0;
  std::copy(strides.begin(), strides.end(), stride + (4 - strides.size()));
}

inline ConstTensorView view(const at::Tensor& tensor) {
  ConstTensorView view;
  view.data = tensor.const_data_ptr();
  copy_strides(tensor, view.stride);
  return view;
}

inline TensorView mutable_view(const at::Tensor& tensor) {
  TensorView view;
  view.data = tensor.mutable_data_ptr();
  copy_strides(tensor, view.stride);
  return view;
}

// Of (M, K) and (K, N), or batches of them (matmul.h).
inline MatmulSizes matmul_sizes(const at::Tensor& mat1, const at::Tensor& mat2) {
  return {mat1.dim() == 3 ? mat1.size(0) : 1, mat1.size(-2), mat2.size(-1), mat1.size(-1)};
}
inline ConstMatrixView matrix_view(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.dim() == 3 ? tensor.stride(0) : 0, tensor.stride(-2), tensor.stride(-1)};
}
inline MatrixView mutable_matrix_view(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr(), tensor.dim() == 3 ? tensor.stride(0) : 0, tensor.stride(-2), tensor.stride(-1)};
}

}  // namespace conv2d_ext
