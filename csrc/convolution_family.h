// The other convolutions over the ops of conv2d: each is a view, in three dimensions a copy, and a call or two of an
// op, so that derivatives, vmap, autocast, tracing and the meta device are the ops'. The arguments are those of
// torch.nn.functional, sizes symbolic.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <array>
#include <optional>
#include <tuple>

#include "export.h"
#include "conv2d_checks.h"

namespace conv2d_ext {

// input: (N, C, L) or (C, L). weight: (OC, C/groups, K). bias: (OC,) or none. padding: (left, right).
at::Tensor conv1d(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                  c10::SymInt groups);

// padding='same' as (left, right): where it is odd, the larger half is on the right.
CONV2D_EXT_EXPORT c10::SmallVector<c10::SymInt, 2> conv1d_same_padding(const at::Tensor& weight,
                                                                       c10::SymIntArrayRef stride,
                                                                       c10::SymIntArrayRef dilation);

// input: (N, I, L) or (I, L). weight: (I, O/groups, K). bias: (O,) or none.
at::Tensor conv_transpose1d(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef output_padding,
                            c10::SymInt groups, c10::SymIntArrayRef dilation);

// input: (N, I, H, W) or (I, H, W). weight: (I, O/groups, KH, KW). bias: (O,) or none.
at::Tensor conv_transpose2d(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef output_padding,
                            c10::SymInt groups, c10::SymIntArrayRef dilation);

// ---- three dimensions (convolution_3d.cpp): input (N, C, D, H, W), lists of one element or three

// Whether the two below compute such a call: sizes fit together, and none but the batch is 0. A transposed output may
// need an output_padding not to be empty: conv_transpose3d raises without one.
bool takes_conv3d(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                  bool transposed, const c10::SymInt& groups);

// weight: (OC, C/groups, KD, KH, KW). Raises RuntimeError where takes_conv3d does not hold.
at::Tensor conv3d(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                  const c10::SymInt& groups);

// weight: (C, OC/groups, KD, KH, KW). Raises RuntimeError where takes_conv3d does not hold, and for an output_padding
// that no stride or dilation is larger than.
at::Tensor conv_transpose3d(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef output_padding,
                            const c10::SymInt& groups, c10::SymIntArrayRef dilation);

// ---- aten::convolution: all of them by one signature, which gives no unbatched inputs

// Whether `convolution` computes such a call. It says nothing about sizes that don't fit together, which raise there.
CONV2D_EXT_EXPORT bool takes_convolution(const at::Tensor& input, const at::Tensor& weight,
                                         const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                                         c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                                         const c10::SymInt& groups);

CONV2D_EXT_EXPORT at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                                         const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                                         c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                                         c10::SymIntArrayRef output_padding, c10::SymInt groups);

// aten::convolution_backward of one and two dimensions: the gradients of a call that `convolution` computes, with the
// bits that its backward gives them; undefined where they are not wanted.
CONV2D_EXT_EXPORT bool takes_convolution_backward(const at::Tensor& grad_output, const at::Tensor& input,
                                                  const at::Tensor& weight, c10::SymIntArrayRef stride,
                                                  c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                                                  bool transposed, const c10::SymInt& groups);

CONV2D_EXT_EXPORT std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> wanted);

}  // namespace conv2d_ext
