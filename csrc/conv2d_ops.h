// The dispatcher ops as C++ functions: what the rest of the library calls, so that autograd, autocast,
// tracing and torch.func see every call. The schemas are in library.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

#include "export.h"
#include "conv2d_checks.h"

namespace conv2d_ext {

using Conv2dSignature = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                   c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymInt, bool);
using Conv2dGradInputSignature = at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymIntArrayRef,
                                            c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymInt,
                                            bool, bool);
using Conv2dGradWeightSignature = at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymIntArrayRef,
                                             c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymIntArrayRef,
                                             c10::SymIntArrayRef, c10::SymInt);
using Conv2dGradBiasSignature = at::Tensor(const at::Tensor&);
using Conv2dAddBiasSignature = at::Tensor(const at::Tensor&, const at::Tensor&);
using Conv1dSignature = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                   c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymInt);
using ConvTransposeSignature = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                          c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymInt,
                                          c10::SymIntArrayRef);

// Handles for call() and redispatch(), looked up once.
CONV2D_EXT_EXPORT const c10::TypedOperatorHandle<Conv2dSignature>& conv2d_op();
const c10::TypedOperatorHandle<Conv2dGradInputSignature>& conv2d_grad_input_op();
const c10::TypedOperatorHandle<Conv2dGradWeightSignature>& conv2d_grad_weight_op();
const c10::TypedOperatorHandle<Conv2dGradBiasSignature>& conv2d_grad_bias_op();
const c10::TypedOperatorHandle<Conv2dAddBiasSignature>& conv2d_add_bias_op();
CONV2D_EXT_EXPORT const c10::TypedOperatorHandle<Conv1dSignature>& conv1d_op();
CONV2D_EXT_EXPORT const c10::TypedOperatorHandle<ConvTransposeSignature>& conv_transpose1d_op();
CONV2D_EXT_EXPORT const c10::TypedOperatorHandle<ConvTransposeSignature>& conv_transpose2d_op();

inline at::Tensor conv2d(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         const SymConv2dParams& params, bool allow_winograd = false) {
  return conv2d_op().call(input, weight, bias, params.stride, params.padding, params.dilation, params.groups,
                          allow_winograd);
}

inline at::Tensor conv2d_grad_input(const at::Tensor& grad_output, const at::Tensor& weight,
                                    c10::SymIntArrayRef input_size, const SymConv2dParams& params, bool channels_last,
                                    bool allow_winograd = false) {
  return conv2d_grad_input_op().call(grad_output, weight, input_size, params.stride, params.padding, params.dilation,
                                     params.groups, channels_last, allow_winograd);
}

inline at::Tensor conv2d_grad_weight(const at::Tensor& grad_output, const at::Tensor& input,
                                     c10::SymIntArrayRef weight_size, c10::SymIntArrayRef weight_stride,
                                     const SymConv2dParams& params) {
  return conv2d_grad_weight_op().call(grad_output, input, weight_size, weight_stride, params.stride, params.padding,
                                      params.dilation, params.groups);
}

inline at::Tensor conv2d_grad_bias(const at::Tensor& grad_output) { return conv2d_grad_bias_op().call(grad_output); }

inline at::Tensor conv2d_add_bias(const at::Tensor& output, const at::Tensor& bias) {
  return conv2d_add_bias_op().call(output, bias);
}

}  // namespace conv2d_ext
