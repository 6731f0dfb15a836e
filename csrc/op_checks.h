// Dtypes and checks that the ops beside the convolutions share. op: the name to complain by.
#pragma once

#include <ATen/core/Tensor.h>

namespace conv2d_ext {

inline bool is_real(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
}

// 16-bit types are computed in float32.
inline at::ScalarType compute_type(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

inline void check_real(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_real(tensor.scalar_type()), op, ": expected ", name,
                              " to be float32, float64, bfloat16 or float16, but got ", tensor.scalar_type());
}

inline void check_device(const char* op, const char* name, const at::Tensor& tensor, const char* like_name,
                         const at::Tensor& like) {
  TORCH_CHECK(tensor.device() == like.device(), op, ": expected ", name, " on ", like_name, "'s device ", like.device(),
              ", but got ", tensor.device());
}

// A tensor of the dtype and on the device of another one.
inline void check_kind(const char* op, const char* name, const at::Tensor& tensor, const char* like_name,
                       const at::Tensor& like) {
  TORCH_CHECK(tensor.scalar_type() == like.scalar_type(), op, ": expected ", name, " of ", like_name, "'s dtype ",
              like.scalar_type(), ", but got ", tensor.scalar_type());
  check_device(op, name, tensor, like_name, like);
}

// The same, of its size as well.
inline void check_like(const char* op, const char* name, const at::Tensor& tensor, const char* like_name,
                       const at::Tensor& like) {
  check_kind(op, name, tensor, like_name, like);
  TORCH_CHECK(tensor.sym_sizes() == like.sym_sizes(), op, ": expected ", name, " of ", like_name, "'s size ",
              like.sym_sizes(), ", but got ", tensor.sym_sizes());
}

}  // namespace conv2d_ext
