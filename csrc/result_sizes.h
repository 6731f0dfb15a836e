// Results in other sizes, without a copy and without being views: what they would be views of is known to nobody else,
// and PyTorch's results can be detached, resized and written to in place.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_unsafe_view.h>
#include <c10/util/SmallVector.h>
#include <torch/version.h>

#include "tracing.h"

namespace conv2d_ext {

inline at::Tensor in_sizes(const at::Tensor& result, c10::SymIntArrayRef size) {
  return at::_unsafe_view_symint(result, size);
}

// Whether PyTorch's results lie as those of torch 2.15, for results that are to lie as they do.
constexpr bool kLieAsOfTorch215 = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15;

// Whether a result's dimensions may change in place: tangents and batches of torch.func would not follow, nor do the
// DTensors of some torch versions.
inline bool is_plain_result(const at::Tensor& result) {
  return !result.key_set().has(c10::DispatchKey::FuncTorchBatched) && !result._fw_grad(/*level=*/0).defined() &&
         (!result.key_set().has(c10::DispatchKey::Python) || is_tracing());
}

// Without a dimension of size 1, of a result that nobody else has: in place, which keeps the strides, also those of
// other dimensions of size 1, and asks nothing of sizes that are symbolic.
inline at::Tensor without_dim(const at::Tensor& result, int64_t dim) {
  if (is_plain_result(result)) return result.squeeze_(dim);
  const auto from = result.sym_sizes();
  c10::SmallVector<c10::SymInt, 5> size(from.begin(), from.end());
  size.erase(size.begin() + (dim < 0 ? dim + result.dim() : dim));
  return in_sizes(result, size);
}

}  // namespace conv2d_ext
