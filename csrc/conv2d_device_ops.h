// The ops as every device computes them: check, allocate the result, settle what needs no engine, and hand the
// rest to the device.
//
// Device has static functions forward, grad_input, grad_weight, grad_bias and matmul, which write every element of a
// result that has some; all their tensors have passed the checks. Data that nobody reads need not be there: for an
// empty batch there is a result even where sharding has freed the weight.
#pragma once

#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "conv2d_checks.h"
#include "conv2d_format.h"
#include "matmul.h"

namespace conv2d_ext {

template <class Device>
struct DeviceOps {
  using Tensor = at::Tensor;
  using IntArrayRef = c10::IntArrayRef;

  static Tensor conv2d(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
                       IntArrayRef padding, IntArrayRef dilation, int64_t groups, bool allow_winograd) {
    const auto problem =
        check_conv2d<int64_t>(input, weight, bias, make_params<int64_t>(stride, padding, dilation, groups));
    const auto output = empty_output<int64_t>(problem, input, weight);
    if (output.numel() != 0) {
      check_data("input", input);
      check_data("weight", weight);
      if (bias.has_value() && bias->defined()) {
        check_data("bias", *bias);
      }
      const Tensor none;
      Device::forward(problem, input, weight, bias.has_value() ? *bias : none, output, allow_winograd);
    }
    return output;
  }

  static Tensor conv2d_grad_input(const Tensor& grad_output, const Tensor& weight, IntArrayRef input_size,
                                  IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups,
                                  bool channels_last, bool allow_winograd) {
    const auto problem = check_conv2d_grad_input<int64_t>(grad_output, weight, input_size,
                                                          make_params<int64_t>(stride, padding, dilation, groups));
    const auto result = empty_activation<int64_t>(problem.batch, problem.in_channels, problem.in_h, problem.in_w,
                                                  input_size.size() == 3, channels_last, grad_output.options());
    if (result.numel() != 0) {
      check_data("grad_output", grad_output);
      check_data("weight", weight);
      Device::grad_input(problem, grad_output, weight, result, allow_winograd);
    }
    return result;
  }

  static Tensor conv2d_grad_weight(const Tensor& grad_output, const Tensor& input, IntArrayRef weight_size,
                                   IntArrayRef weight_stride, IntArrayRef stride, IntArrayRef padding,
                                   IntArrayRef dilation, int64_t groups) {
    const auto problem = check_conv2d_grad_weight<int64_t>(grad_output, input, weight_size,
                                                           make_params<int64_t>(stride, padding, dilation, groups));
    const auto result = checked_weight_strides(empty_strided_here(weight_size, weight_stride, grad_output.options()));
    if (input.numel() == 0) {
      result.zero_();
    } else {
      check_data("grad_output", grad_output);
      check_data("input", input);
      Device::grad_weight(problem, grad_output, input, result);
    }
    return result;
  }

  static Tensor conv2d_grad_bias(const Tensor& grad_output) {
    check_conv2d_grad_bias(grad_output);
    const auto channels = grad_output.size(-3);
    if (grad_output.numel() == 0) {
      return at::zeros({channels}, grad_output.options());
    }
    check_data("grad_output", grad_output);
    const auto result = empty_here({channels}, grad_output.options());
    Device::grad_bias(grad_output, result);
    return result;
  }

  static Tensor matmul(const Tensor& mat1, const Tensor& mat2, const std::optional<Tensor>& bias) {
    check_matmul(mat1, mat2, bias);
    const int64_t columns = mat2.size(-1);
    const Tensor result = mat1.dim() == 2 ? empty_here({mat1.size(0), columns}, mat1.options())
                                          : empty_here({mat1.size(0), mat1.size(1), columns}, mat1.options());
    const bool has_bias = bias.has_value() && bias->defined();
    if (mat1.size(-1) == 0) {
      has_bias ? result.copy_(bias->expand(result.sizes())) : result.zero_();
    } else if (result.numel() != 0) {
      check_data("mat1", mat1);
      check_data("mat2", mat2);
      if (has_bias) {
        check_data("bias", *bias);
      }
      const Tensor none;
      Device::matmul(mat1, mat2, has_bias ? *bias : none, result);
    }
    return result;
  }

  static void register_ops(torch::Library& m) {
    m.impl("conv2d", conv2d);
    m.impl("conv2d_grad_input", conv2d_grad_input);
    m.impl("conv2d_grad_weight", conv2d_grad_weight);
    m.impl("conv2d_grad_bias", conv2d_grad_bias);
    m.impl("matmul", matmul);
  }
};

}  // namespace conv2d_ext
