// The four ops closed under differentiation.
//
// Nodes are those of autograd_node.h. Each backward is made of the four ops, so gradients of every order follow; each
// gradient is computed only where it is wanted, and a tensor is saved only for a gradient that uses it. What autocast
// was to cast, it has cast before a node exists: a backward computes in the dtypes of its tensors, whatever autocast is
// when it runs.
//
// See library.cpp for the conjugations, which make this closed for complex types too:
//
//   y  = conv2d(x, w)                 gx = conv2d_grad_input(gy, w)    gw = conv2d_grad_weight(gy, x)
//   gx = conv2d_grad_input(gy, w)     for cotangent v of gx:  conv2d(v, w)  and  conv2d_grad_weight(gy, v)
//   gw = conv2d_grad_weight(gy, x)    for cotangent u of gw:  conv2d(x, u)  and  conv2d_grad_input(gy, u)
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <utility>

#include "autograd_node.h"
#include "conv2d_checks.h"
#include "conv2d_format.h"
#include "conv2d_ops.h"

namespace conv2d_ext {
namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
using torch::autograd::compute_requires_grad;
using torch::autograd::isFwGradDefined;
using torch::autograd::variable_list;

// ---- the rules (autograd_node.h says what each member is)

// What a backward needs beside tensors; each rule uses its part.
struct Geometry {
  SymSizes input_size, weight_size, weight_stride;
  SymConv2dParams params;
  bool channels_last = false;  // the format of activations' gradients
  bool allow_winograd = false;

  template <class Self, class Visit>
  static void visit(Self& self, Visit visit) {
    visit(self.input_size);
    visit(self.weight_size);
    visit(self.weight_stride);
    visit(self.params.stride);
    visit(self.params.padding);
    visit(self.params.dilation);
    visit(self.params.groups);
    visit(self.channels_last);
    visit(self.allow_winograd);
  }
};

struct Conv2dBackward {  // of (input, weight, bias)
  static constexpr const char* kName = "Conv2dBackward";
  using State = Geometry;
  static constexpr size_t kArguments = 3;
  static constexpr size_t kCoupled = 2;  // a bias takes part in no gradient

  static void apply(const Tensor& grad_output, const Tensor& input, const Tensor& weight, const Geometry& geometry,
                    const Wanted& wanted, variable_list& result) {
    if (wanted[0]) {
      result[0] = conv2d_grad_input(grad_output, weight, geometry.input_size, geometry.params, geometry.channels_last,
                                    geometry.allow_winograd);
    }
    if (wanted[1]) {
      result[1] = conv2d_grad_weight(grad_output, input, geometry.weight_size, geometry.weight_stride, geometry.params);
    }
    if (wanted[2]) {
      // An input without channels has an output without channels, but not a bias without elements.
      const bool no_channels = has_no_elements(grad_output) && grad_output.sym_size(-3) != geometry.weight_size[0];
      result[2] = no_channels ? at::zeros_symint({geometry.weight_size[0]}, grad_output.options())
                              : conv2d_grad_bias(grad_output);
    }
  }
};

struct Conv2dGradInputBackward {  // of (grad_output, weight), a transposed convolution's input and weight
  static constexpr const char* kName = "Conv2dGradInputBackward";
  using State = Geometry;
  static constexpr size_t kArguments = 2, kCoupled = 2;

  static void apply(const Tensor& grad, const Tensor& grad_output, const Tensor& weight, const Geometry& geometry,
                    const Wanted& wanted, variable_list& result) {
    if (wanted[0]) {
      result[0] = conv2d(grad, weight, std::nullopt, geometry.params, geometry.allow_winograd);
      if (result[0].dim() == 4 && output_is_channels_last(grad, weight) != geometry.channels_last) {
        result[0] = result[0].contiguous(geometry.channels_last ? at::MemoryFormat::ChannelsLast
                                                                : at::MemoryFormat::Contiguous);
      }
    }
    if (wanted[1]) {
      result[1] = conv2d_grad_weight(grad_output, grad, geometry.weight_size, geometry.weight_stride, geometry.params);
    }
  }
};

struct Conv2dGradWeightBackward {  // of (grad_output, input)
  static constexpr const char* kName = "Conv2dGradWeightBackward";
  using State = Geometry;
  static constexpr size_t kArguments = 2;

  static void apply(const Tensor& grad, const Tensor& grad_output, const Tensor& input, const Geometry& geometry,
                    const Wanted& wanted, variable_list& result) {
    if (wanted[0]) {
      result[0] = conv2d(input, grad, std::nullopt, geometry.params);
    }
    if (wanted[1]) {
      result[1] = conv2d_grad_input(grad_output, grad, geometry.input_size, geometry.params, geometry.channels_last);
    }
  }
};

struct Conv2dGradBiasBackward {  // of (grad_output), whose size is in geometry.input_size
  static constexpr const char* kName = "Conv2dGradBiasBackward";
  using State = Geometry;
  static constexpr size_t kArguments = 1;

  static void apply(const Tensor& grad, const Tensor&, const Tensor&, const Geometry& geometry, const Wanted& wanted,
                    variable_list& result) {
    if (wanted[0]) {
      result[0] = grad.unsqueeze(-1).unsqueeze(-1).expand_symint(geometry.input_size);
    }
  }
};

// The bias's tangent rides along with the first convolution that is needed anyway.
void set_conv2d_tangent(const Tensor& output, const Tensor& input, const Tensor& weight,
                        const std::optional<Tensor>& bias, const SymConv2dParams& params, bool allow_winograd) {
  std::optional<Tensor> bias_tangent;
  if (isFwGradDefined(bias)) {
    bias_tangent = tangent(*bias);
  }
  if (isFwGradDefined(input) || isFwGradDefined(weight)) {
    set_bilinear_tangent(output, input, weight, [&](const Tensor& x, const Tensor& w) {
      return conv2d(x, w, std::exchange(bias_tangent, std::nullopt), params, allow_winograd);
    });
  } else if (bias_tangent.has_value()) {
    output._set_fw_grad(has_no_elements(output)
                            ? at::zeros_like(output)
                            : bias_tangent->unsqueeze(-1).unsqueeze(-1).expand_symint(output.sym_sizes()),
                        /*level=*/0, /*is_inplace_op=*/false);
  }
}

// ---- the autograd kernels

Tensor conv2d_autograd(c10::DispatchKeySet keys, const Tensor& input, const Tensor& weight,
                       const std::optional<Tensor>& bias, SymIntArrayRef stride, SymIntArrayRef padding,
                       SymIntArrayRef dilation, SymInt groups, bool allow_winograd) {
  const Tensor output =
      below_autograd(conv2d_op(), keys, input, weight, bias, stride, padding, dilation, groups, allow_winograd);
  const bool has_tangent = isFwGradDefined(input) || isFwGradDefined(weight) || isFwGradDefined(bias);
  if (compute_requires_grad(input, weight, bias)) {
    auto node = make_node<Conv2dBackward>(input, weight, bias);
    node->state.input_size = copy_sizes(input.sym_sizes());
    node->state.weight_size = copy_sizes(weight.sym_sizes());
    node->state.weight_stride = grad_weight_strides(weight);
    node->state.params = make_params<SymInt>(stride, padding, dilation, groups);
    node->state.channels_last = grad_input_is_channels_last(input, weight);
    node->state.allow_winograd = allow_winograd;
    node->in_transform = is_wrapped(input) || is_wrapped(weight) || (bias.has_value() && is_wrapped(*bias));
    node->save(input, weight);
    torch::autograd::set_history(output, node);
  }
  if (has_tangent) {
    set_conv2d_tangent(output, input, weight, bias, make_params<SymInt>(stride, padding, dilation, groups),
                       allow_winograd);
  }
  return output;
}

Tensor conv2d_grad_input_autograd(c10::DispatchKeySet keys, const Tensor& grad_output, const Tensor& weight,
                                  SymIntArrayRef input_size, SymIntArrayRef stride, SymIntArrayRef padding,
                                  SymIntArrayRef dilation, SymInt groups, bool channels_last, bool allow_winograd) {
  const Tensor result = below_autograd(conv2d_grad_input_op(), keys, grad_output, weight, input_size, stride, padding,
                                       dilation, groups, channels_last, allow_winograd);
  const auto params = make_params<SymInt>(stride, padding, dilation, groups);
  if (compute_requires_grad(grad_output, weight)) {
    auto node = make_node<Conv2dGradInputBackward>(grad_output, weight);
    node->state.allow_winograd = allow_winograd;
    node->state.channels_last = grad_input_is_channels_last(grad_output, weight);
    node->in_transform = is_wrapped(grad_output) || is_wrapped(weight);
    node->state.weight_size = copy_sizes(weight.sym_sizes());
    node->state.weight_stride = grad_weight_strides(weight);
    node->state.params = params;
    node->save(grad_output, weight);
    torch::autograd::set_history(result, node);
  }
  set_bilinear_tangent(result, grad_output, weight, [&](const Tensor& gy, const Tensor& w) {
    return conv2d_grad_input(gy, w, input_size, params, channels_last, allow_winograd);
  });
  return result;
}

Tensor conv2d_grad_weight_autograd(c10::DispatchKeySet keys, const Tensor& grad_output, const Tensor& input,
                                   SymIntArrayRef weight_size, SymIntArrayRef weight_stride, SymIntArrayRef stride,
                                   SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups) {
  const Tensor result = below_autograd(conv2d_grad_weight_op(), keys, grad_output, input, weight_size, weight_stride,
                                       stride, padding, dilation, groups);
  const auto params = make_params<SymInt>(stride, padding, dilation, groups);
  if (compute_requires_grad(grad_output, input)) {
    auto node = make_node<Conv2dGradWeightBackward>(grad_output, input);
    node->state.input_size = copy_sizes(input.sym_sizes());
    node->state.params = params;
    node->state.channels_last = grad_input_is_channels_last(input, result);
    node->save(grad_output, input);
    torch::autograd::set_history(result, node);
  }
  set_bilinear_tangent(result, grad_output, input, [&](const Tensor& gy, const Tensor& x) {
    return conv2d_grad_weight(gy, x, weight_size, weight_stride, params);
  });
  return result;
}

Tensor conv2d_grad_bias_autograd(c10::DispatchKeySet keys, const Tensor& grad_output) {
  const Tensor result = below_autograd(conv2d_grad_bias_op(), keys, grad_output);
  if (compute_requires_grad(grad_output)) {
    auto node = make_node<Conv2dGradBiasBackward>(grad_output);
    node->state.input_size = copy_sizes(grad_output.sym_sizes());
    torch::autograd::set_history(result, node);
  }
  if (isFwGradDefined(grad_output)) {
    result._set_fw_grad(conv2d_grad_bias(tangent(grad_output)), /*level=*/0, /*is_inplace_op=*/false);
  }
  return result;
}

TORCH_LIBRARY_IMPL(conv2d_ext, Autograd, m) {
  m.impl("conv2d", conv2d_autograd);
  m.impl("conv2d_grad_input", conv2d_grad_input_autograd);
  m.impl("conv2d_grad_weight", conv2d_grad_weight_autograd);
  m.impl("conv2d_grad_bias", conv2d_grad_bias_autograd);
}

}  // namespace
}  // namespace conv2d_ext
