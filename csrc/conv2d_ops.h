// The dispatcher ops as C++ functions: what the rest of the library calls, so that autograd, autocast,
// tracing and torch.func see every call. The schemas are in library.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "conv2d_checks.h"
#include "find_op.h"

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
namespace op_names {
inline constexpr char conv2d[] = "conv2d", conv2d_grad_input[] = "conv2d_grad_input",
                      conv2d_grad_weight[] = "conv2d_grad_weight", conv2d_grad_bias[] = "conv2d_grad_bias",
                      conv2d_add_bias[] = "conv2d_add_bias", conv1d[] = "conv1d",
                      conv_transpose1d[] = "conv_transpose1d", conv_transpose2d[] = "conv_transpose2d";
}
inline const auto& conv2d_op() { return op_named<Conv2dSignature, op_names::conv2d>(); }
inline const auto& conv2d_grad_input_op() { return op_named<Conv2dGradInputSignature, op_names::conv2d_grad_input>(); }
inline const auto& conv2d_grad_weight_op() {
  return op_named<Conv2dGradWeightSignature, op_names::conv2d_grad_weight>();
}
inline const auto& conv2d_grad_bias_op() { return op_named<Conv2dGradBiasSignature, op_names::conv2d_grad_bias>(); }
inline const auto& conv2d_add_bias_op() { return op_named<Conv2dAddBiasSignature, op_names::conv2d_add_bias>(); }
inline const auto& conv1d_op() { return op_named<Conv1dSignature, op_names::conv1d>(); }
inline const auto& conv_transpose1d_op() { return op_named<ConvTransposeSignature, op_names::conv_transpose1d>(); }
inline const auto& conv_transpose2d_op() { return op_named<ConvTransposeSignature, op_names::conv_transpose2d>(); }

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
