// Tensors and hyper-parameters -> a validated problem, or one clear error: the checks of conv2d's ops, which nothing
// below repeats.
//
// Those of sizes are templates over Int, int64_t for the kernels and c10::SymInt for tracing, so that both accept and
// refuse the same calls with the same words. Errors have F.conv2d's exception types, keep its phrases, and name the
// argument, what was wanted and what came.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <type_traits>

#include "export.h"
#include "conv2d_problem.h"

namespace conv2d_ext {

// Conv2dProblem with symbolic sizes; same fields, same meaning.
struct SymConv2dProblem {
  c10::SymInt batch, in_channels, in_h, in_w;
  c10::SymInt out_channels, out_h, out_w;
  c10::SymInt kernel_h, kernel_w;
  c10::SymInt stride_h, stride_w;
  c10::SymInt pad_top, pad_bottom, pad_left, pad_right;
  c10::SymInt dilation_h, dilation_w;
  c10::SymInt groups;
};

template <class Int>
using ProblemOf = std::conditional_t<std::is_same_v<Int, int64_t>, Conv2dProblem, SymConv2dProblem>;

// Whether the tensor is, or pretends to be, on a GPU: inside a fake kernel a fake tensor's device is meta, but its
// dispatch keys still say what it stands for.
inline bool is_cuda_or_fake(const at::Tensor& tensor) {
  return tensor.is_cuda() || tensor.key_set().has_backend(c10::BackendComponent::CUDABit);
}

// The hyper-parameters as the schemas pass them, stored inline.
template <class Int>
struct Conv2dParams {
  Int stride[2];   // height, width
  Int padding[4];  // top, bottom, left, right
  Int dilation[2];
  Int groups;
};
using SymConv2dParams = Conv2dParams<c10::SymInt>;

// Raises unless the lists have 2, 4 and 2 elements.
template <class Int>
CONV2D_EXT_EXPORT Conv2dParams<Int> make_params(c10::ArrayRef<Int> stride, c10::ArrayRef<Int> padding,
                                                c10::ArrayRef<Int> dilation, const Int& groups);

// F.conv2d's hyper-parameters: each list has one element for both dimensions, or one for each.
CONV2D_EXT_EXPORT SymConv2dParams params_from_pairs(c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                                                    c10::SymIntArrayRef dilation, const c10::SymInt& groups);

// Raises unless there is one value for all `dims` dimensions of an image, or one for each.
CONV2D_EXT_EXPORT void check_length(const char* name, c10::SymIntArrayRef values, size_t dims);

// padding='same': the output has the input's size; where the padding is odd, the larger half is at the bottom and
// on the right.
CONV2D_EXT_EXPORT SymConv2dParams params_for_same_padding(const at::Tensor& weight, c10::SymIntArrayRef stride,
                                                          c10::SymIntArrayRef dilation, const c10::SymInt& groups);

// The post's arguments: im (N, DI, H, W) or (DI, H, W), kernel (DI, DO, KH, KW), bias (DO,), (DO, 1) or none.
CONV2D_EXT_EXPORT void check_forward(const at::Tensor& im, const at::Tensor& kernel,
                                     const std::optional<at::Tensor>& bias);

// The sizes alone, of tensors with elements of itemsize bytes. input: (N, C, H, W) or (C, H, W). weight: (OC, C/groups,
// KH, KW). bias: (OC,) or none.
template <class Int>
CONV2D_EXT_EXPORT ProblemOf<Int> check_conv2d_sizes(c10::ArrayRef<Int> input, c10::ArrayRef<Int> weight,
                                                    std::optional<c10::ArrayRef<Int>> bias,
                                                    const Conv2dParams<Int>& params, int64_t itemsize);

// The same for a 1-D convolution, whose tensors are seen as images of one row: input (N, C, 1, L) or (C, 1, L), weight
// (OC, C/groups, 1, K). Messages leave the row out.
void check_conv1d_sizes(c10::SymIntArrayRef input, c10::SymIntArrayRef weight, std::optional<c10::SymIntArrayRef> bias,
                        const SymConv2dParams& params, int64_t itemsize);

// Before sizes are read, which nested tensors don't have. function: the name to complain by.
CONV2D_EXT_EXPORT void check_not_nested(const char* function, const at::Tensor& input, const at::Tensor& weight,
                                        const std::optional<at::Tensor>& bias);

// Dense tensors of one supported dtype, on one device. function: the name to complain by.
void check_kinds(const char* function, const at::Tensor& input, const at::Tensor& weight,
                 const std::optional<at::Tensor>& bias);

// Whether the tensor's dtype is supported on its device.
bool is_supported_on(const at::Tensor& tensor);

template <class Int>
CONV2D_EXT_EXPORT ProblemOf<Int> check_conv2d(const at::Tensor& input, const at::Tensor& weight,
                                              const std::optional<at::Tensor>& bias, const Conv2dParams<Int>& params);

// grad_output: (N, OC, OH, OW) or (OC, OH, OW); input_size has as many elements as grad_output dimensions.
template <class Int>
ProblemOf<Int> check_conv2d_grad_input(const at::Tensor& grad_output, const at::Tensor& weight,
                                       c10::ArrayRef<Int> input_size, const Conv2dParams<Int>& params);

template <class Int>
ProblemOf<Int> check_conv2d_grad_weight(const at::Tensor& grad_output, const at::Tensor& input,
                                        c10::ArrayRef<Int> weight_size, const Conv2dParams<Int>& params);

void check_conv2d_grad_bias(const at::Tensor& grad_output);

// Raises where an element of the tensor lies in no memory: its storage was freed (as sharding does between forward and
// backward) or made smaller. For kernels, which read; tracing and explaining need no data. The tensor has passed the
// checks above.
void check_data(const char* name, const at::Tensor& tensor);

// F.conv2d gives an output without channels to an input without channels, whatever the weight says.
template <class Int>
CONV2D_EXT_EXPORT Int result_channels(const ProblemOf<Int>& problem);

}  // namespace conv2d_ext
