// Fake kernels: the results' sizes, dtypes and real strides, for tracing and the meta device.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include "conv2d_checks.h"
#include "conv2d_format.h"

namespace conv2d_ext {
namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;

Tensor conv2d_meta(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, SymIntArrayRef stride,
                   SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups) {
  const auto problem =
      check_conv2d<SymInt>(input, weight, bias, make_params<SymInt>(stride, padding, dilation, groups));
  return empty_activation<SymInt>(problem.batch, result_channels<SymInt>(problem), problem.out_h, problem.out_w,
                                  input.dim() == 3, output_is_channels_last(input, weight), input.options());
}

Tensor conv2d_grad_input_meta(const Tensor& grad_output, const Tensor& weight, SymIntArrayRef input_size,
                              SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups,
                              bool channels_last) {
  const auto problem = check_conv2d_grad_input<SymInt>(grad_output, weight, input_size,
                                                       make_params<SymInt>(stride, padding, dilation, groups));
  return empty_activation<SymInt>(problem.batch, problem.in_channels, problem.in_h, problem.in_w,
                                  input_size.size() == 3, channels_last, grad_output.options());
}

Tensor conv2d_grad_weight_meta(const Tensor& grad_output, const Tensor& input, SymIntArrayRef weight_size,
                               SymIntArrayRef weight_stride, SymIntArrayRef stride, SymIntArrayRef padding,
                               SymIntArrayRef dilation, SymInt groups) {
  check_conv2d_grad_weight<SymInt>(grad_output, input, weight_size,
                                   make_params<SymInt>(stride, padding, dilation, groups));
  return checked_weight_strides(at::empty_strided_symint(weight_size, weight_stride, grad_output.options()));
}

Tensor conv2d_grad_bias_meta(const Tensor& grad_output) {
  check_conv2d_grad_bias(grad_output);
  return at::empty_symint({grad_output.sym_size(-3)}, grad_output.options());
}

TORCH_LIBRARY_IMPL(conv2d_ext, Meta, m) {
  m.impl("conv2d", conv2d_meta);
  m.impl("conv2d_grad_input", conv2d_grad_input_meta);
  m.impl("conv2d_grad_weight", conv2d_grad_weight_meta);
  m.impl("conv2d_grad_bias", conv2d_grad_bias_meta);
}

}  // namespace
}  // namespace conv2d_ext
