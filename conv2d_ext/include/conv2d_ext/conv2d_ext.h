// conv2d_ext for C++ programs: convolutions for libtorch whose bits do not depend on the batch, the number of threads
// or the memory format. Link with conv2d_ext::conv2d_ext, of the CMake package beside this header.
//
// Tensors may have any strides, on the CPU, and on CUDA in builds with it. Functions are differentiable to any order
// and have the semantics of torch::nn::functional's. They raise c10::Error (and c10::NotImplementedError for dtypes
// that are not supported) with F.conv2d's phrases.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <string>

#define CONV2D_EXT_PUBLIC __attribute__((visibility("default")))

namespace conv2d_ext {

// input: (N, C, H, W) or (C, H, W). weight: (OC, C/groups, KH, KW). bias: (OC,) or none. stride and dilation: one
// value, or (height, width). padding: one value, (height, width), or (top, bottom, left, right). Returns (N, OC, H',
// W') or (OC, H', W').
CONV2D_EXT_PUBLIC at::Tensor conv2d(const at::Tensor& input, const at::Tensor& weight,
                                    const std::optional<at::Tensor>& bias = std::nullopt, at::IntArrayRef stride = 1,
                                    at::IntArrayRef padding = 0, at::IntArrayRef dilation = 1, int64_t groups = 1);

// input: (N, C, L) or (C, L). weight: (OC, C/groups, K). padding: one value, or (left, right).
CONV2D_EXT_PUBLIC at::Tensor conv1d(const at::Tensor& input, const at::Tensor& weight,
                                    const std::optional<at::Tensor>& bias = std::nullopt, at::IntArrayRef stride = 1,
                                    at::IntArrayRef padding = 0, at::IntArrayRef dilation = 1, int64_t groups = 1);

// input: (N, C, L) or (C, L). weight: (C, OC/groups, K).
CONV2D_EXT_PUBLIC at::Tensor conv_transpose1d(const at::Tensor& input, const at::Tensor& weight,
                                              const std::optional<at::Tensor>& bias = std::nullopt,
                                              at::IntArrayRef stride = 1, at::IntArrayRef padding = 0,
                                              at::IntArrayRef output_padding = 0, int64_t groups = 1,
                                              at::IntArrayRef dilation = 1);

// input: (N, C, H, W) or (C, H, W). weight: (C, OC/groups, KH, KW).
CONV2D_EXT_PUBLIC at::Tensor conv_transpose2d(const at::Tensor& input, const at::Tensor& weight,
                                              const std::optional<at::Tensor>& bias = std::nullopt,
                                              at::IntArrayRef stride = 1, at::IntArrayRef padding = 0,
                                              at::IntArrayRef output_padding = 0, int64_t groups = 1,
                                              at::IntArrayRef dilation = 1);

// input: (*, K). weight: (N, K) or (K,). Returns (*, N) or (*).
CONV2D_EXT_PUBLIC at::Tensor linear(const at::Tensor& input, const at::Tensor& weight,
                                    const std::optional<at::Tensor>& bias = std::nullopt);

// While one lives, torch's convolutions, matrix products and other calls that the library covers give an example the
// same bits in every batch, in this thread. They nest. To be destroyed in the thread that made it.
class CONV2D_EXT_PUBLIC BatchInvariant {
 public:
  BatchInvariant();
  ~BatchInvariant();
  BatchInvariant(const BatchInvariant&) = delete;
  BatchInvariant& operator=(const BatchInvariant&) = delete;
};

// The CPU's instruction set in use, such as "avx2".
CONV2D_EXT_PUBLIC std::string isa();
// Builds of one number give the same bits on one instruction set.
CONV2D_EXT_PUBLIC int64_t numerics();

}  // namespace conv2d_ext
