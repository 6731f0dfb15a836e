// How engines name element types and see tensors; torch-free.
#pragma once

#include <cstdint>

namespace conv2d_ext {

enum class DType : int {
  kFloat32,
  kFloat64,
  kBFloat16,
  kFloat16,
  kComplex64,
  kComplex128,
  kInt8,
  kUInt8,
  kInt16,
  kInt32,
  kInt64,
};

// Bytes of an element.
constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
    case DType::kUInt8:
      return 1;
    case DType::kBFloat16:
    case DType::kFloat16:
    case DType::kInt16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kComplex128:
      return 16;
    default:
      return 8;
  }
}

// Whether a dtype is a real floating-point type; its numbers are summed in float32 or float64.
constexpr bool is_floating(DType dtype) { return dtype <= DType::kFloat16; }
constexpr int kFloatingDTypes = int(DType::kFloat16) + 1;
constexpr bool is_integer(DType dtype) { return dtype >= DType::kInt8; }

// A 4-D tensor: data points at element (0, 0, 0, 0); strides are in elements, in the order of the
// dimensions ((N, C, H, W), or (OC, IC/groups, KH, KW) for weights), and may be zero or negative.
struct ConstTensorView {
  const void* data;
  int64_t stride[4];
};
struct TensorView {
  void* data;
  int64_t stride[4];
  // NOLINTNEXTLINE(google-explicit-constructor): what was written may be read
  operator ConstTensorView() const { return {data, {stride[0], stride[1], stride[2], stride[3]}}; }
};
struct TensorSizes {
  int64_t batch, channels, height, width;
};

// Without data, in one of the two formats that results have.
inline TensorView dense_view(const TensorSizes& size, bool channels_last) {
  const int64_t c = size.channels, plane = size.height * size.width;
  if (channels_last) return {nullptr, {c * plane, 1, size.width * c, c}};
  return {nullptr, {c * plane, plane, size.width, 1}};
}

// result[b, i, j] = bias[j] + sum over k of mat1[b, i, k] * mat2[b, k, j]. A mat2 without a batch has a batch stride of
// zero. Strides are in elements and may be zero or negative.
struct MatmulSizes {
  int64_t batch, m, n, k;
};
struct ConstMatrixView {
  const void* data;
  int64_t batch_stride, row_stride, col_stride;
};
struct MatrixView {
  void* data;
  int64_t batch_stride, row_stride, col_stride;
};

}  // namespace conv2d_ext
