#include "convolution_family.h"

#include <ATen/ops/add.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "autograd_node.h"
#include "conv2d_format.h"
#include "conv2d_ops.h"
#include "conv_transpose_checks.h"
#include "result_sizes.h"
#include "sym_arithmetic.h"

namespace conv2d_ext {
namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;

std::optional<SymIntArrayRef> bias_size(const std::optional<Tensor>& bias) {
  if (bias.has_value() && bias->defined()) {
    return bias->sym_sizes();
  }
  return std::nullopt;
}

// The sizes of (..., L) as (..., 1, L).
c10::SmallVector<SymInt, 4> row_sizes(const Tensor& tensor) {
  const auto sizes = tensor.sym_sizes();
  c10::SmallVector<SymInt, 4> result(sizes.begin(), sizes.end());
  result.insert(result.end() - 1, SymInt(1));
  return result;
}

// (..., L) as (..., 1, L). The output's format is PyTorch's: it makes a 1-D input contiguous first, reads complex ones
// through real views, and pads a copy where the sides differ, after which nothing but a weight suggests channels_last.
// A row's stride of 1 says the same, and nothing is copied.
Tensor as_row(const Tensor& input, bool same_sides = true) {
  const bool may_suggest = same_sides && !input.is_complex() && input.is_contiguous();
  return may_suggest ? input.unsqueeze(-2) : input.unsqueeze(-1).transpose(-1, -2);
}

// ---- the bias of a transposed convolution: a pass of its own over the output, since conv2d_grad_input, a gradient
// elsewhere, has none. Each element is rounded once more, in no order that anything could change. It is an op so that
// the bias's gradient is conv2d_grad_bias: the sum of a broadcast addition follows the number of threads.

Tensor per_channel(const Tensor& bias) {
  // Autograd's zeros have no data, and add nothing.
  if (bias.device().is_cpu() && !bias._is_zerotensor()) {
    check_data("bias", bias);
  }
  return bias.unsqueeze(-1).unsqueeze(-1);
}

Tensor add_bias_anywhere(const Tensor& output, const Tensor& bias) {
  TORCH_CHECK((output.dim() == 3 || output.dim() == 4) && bias.dim() == 1 &&
                  bias.sym_size(0).sym_eq(output.sym_size(-3)).expect_true(__FILE__, __LINE__) &&
                  bias.scalar_type() == output.scalar_type(),
              "conv2d_add_bias: expected bias to be 1-dimensional, with an element for each channel of output and of "
              "its dtype, but got bias of size ",
              bias.sym_sizes(), " and dtype ", bias.scalar_type(), ", output of size ", output.sym_sizes(),
              " and dtype ", output.scalar_type());
  if (output.device().is_cpu() && !output._is_zerotensor()) check_data("output", output);
  Tensor result = output.is_non_overlapping_and_dense()
                      ? at::empty_strided_symint(output.sym_sizes(), output.sym_strides(), output.options())
                      : at::empty_symint(output.sym_sizes(), output.options());
  return at::add_out(result, output, per_channel(bias));
}

struct Conv2dAddBiasBackward {  // of (output, bias)
  static constexpr const char* kName = "Conv2dExtAddBiasBackward";
  struct State {
    template <class Self, class Visit>
    static void visit(Self&, Visit) {}
  };
  static constexpr size_t kArguments = 2, kCoupled = 1;

  static void apply(const Tensor& grad, const Tensor&, const Tensor&, const State&, const Wanted& wanted,
                    torch::autograd::variable_list& result) {
    if (wanted[0]) {
      result[0] = grad;
    }
    if (wanted[1]) {
      result[1] = conv2d_grad_bias(grad);
    }
  }
};

Tensor add_bias_autograd(c10::DispatchKeySet keys, const Tensor& output, const Tensor& bias) {
  using torch::autograd::isFwGradDefined;
  const Tensor result = below_autograd(conv2d_add_bias_op(), keys, output, bias);
  if (torch::autograd::compute_requires_grad(output, bias)) {
    auto node = make_node<Conv2dAddBiasBackward>(output, bias);
    node->in_transform = is_wrapped(output) || is_wrapped(bias);
    torch::autograd::set_history(result, node);
  }
  if (isFwGradDefined(output) || isFwGradDefined(bias)) {
    const Tensor moved = isFwGradDefined(output) ? tangent(output) : at::zeros_like(result);
    result._set_fw_grad(isFwGradDefined(bias) ? conv2d_add_bias(moved, tangent(bias)) : moved, /*level=*/0,
                        /*is_inplace_op=*/false);
  }
  return result;
}

TORCH_LIBRARY_IMPL(conv2d_ext, CompositeExplicitAutograd, m) { m.impl("conv2d_add_bias", add_bias_anywhere); }
TORCH_LIBRARY_IMPL(conv2d_ext, Autograd, m) { m.impl("conv2d_add_bias", add_bias_autograd); }

// In place where nothing can tell: the output is new, and neither of them is more than its data.
Tensor add_bias(Tensor output, const Tensor& bias) {
  constexpr c10::DispatchKeySet wrappers({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                          c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize});
  const bool is_tracked =
      (bias.requires_grad() && c10::GradMode::is_enabled()) || torch::autograd::isFwGradDefined(bias);
  if (is_tracked || (output.key_set() | bias.key_set()).has_any(wrappers)) {
    return conv2d_add_bias(output, bias);
  }
  return output.add_(per_channel(bias));
}

// ---- transposed convolutions

// A copy: PyTorch would resolve a lazy conj before an op too, each time it is read.
Tensor conjugate(const Tensor& tensor) { return tensor.is_complex() ? tensor.conj_physical() : tensor; }

// With (height, width) of zeros below it and on its right; a copy where there are any.
Tensor append_zeros(const Tensor& image, const SymInt (&by)[2]) {
  return known_zero(by[0]) && known_zero(by[1])
             ? image
             : at::constant_pad_nd_symint(image, {SymInt(0), by[1], SymInt(0), by[0]});
}

// input and weight: images. conv2d_grad_input conjugates the weight, a transposed convolution does not, so it gets the
// conjugate.
Tensor run_conv_transpose(const ConvTransposeCall& call, const Tensor& input, const Tensor& weight,
                          const std::optional<Tensor>& bias) {
  const bool channels_last = output_is_channels_last(input, weight);
  Tensor output = conv2d_grad_input(
      // Which only an output_padding of a stride and more needs.
      append_zeros(input, call.append), conjugate(weight), call.output_size, call.params, channels_last);
  for (int64_t i = 0; i < 2; ++i) {
    if (!known_zero(call.cut[i])) {  // there are no elements
      const Tensor part = output.narrow_symint(i - 2, 0, output.sym_size(i - 2) - call.cut[i]);
      output = in_sizes(part, part.sym_sizes());
    }
  }
  return bias.has_value() && bias->defined() ? add_bias(std::move(output), *bias) : output;
}

}  // namespace

Tensor conv1d(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, SymIntArrayRef stride,
              SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups) {
  check_not_nested("conv1d", input, weight, bias);
  const int64_t dim = input.dim();
  TORCH_CHECK(dim == 2 || dim == 3,
              "Expected 2D (unbatched) or 3D (batched) input to conv1d, but got input of size: ", input.sym_sizes());
  const int64_t weight_dim = weight.dim();
  TORCH_CHECK(weight_dim >= 3,
              "weight should have at least three dimensions: expected weight of size (out_channels, "
              "in_channels/groups, kernel), but got weight of size ",
              weight.sym_sizes());
  TORCH_CHECK(weight_dim == 3, "Expected ", weight_dim, "-dimensional input for ", weight_dim, "-dimensional weight ",
              weight.sym_sizes(), ", but got ", dim, "-dimensional input of size ", input.sym_sizes(),
              " instead: conv1d takes weight of size (out_channels, in_channels/groups, kernel)");
  check_length("stride", stride, 1);
  check_length("dilation", dilation, 1);
  TORCH_CHECK(padding.size() == 2,
              "expected padding to be a list of 2 values (left, right), but got padding=", padding);
  const SymConv2dParams params{{1, stride[0]}, {0, 0, padding[0], padding[1]}, {1, dilation[0]}, std::move(groups)};
  check_conv1d_sizes(row_sizes(input), row_sizes(weight), bias_size(bias), params, input.element_size());
  check_kinds("conv1d", input, weight, bias);  // before views are taken, which not every layout has
  const Tensor row = as_row(input, padding[0].sym_eq(padding[1]).guard_bool(__FILE__, __LINE__));
  return without_dim(conv2d(row, weight.unsqueeze(2), bias, params), -2);
}

c10::SmallVector<SymInt, 2> conv1d_same_padding(const Tensor& weight, SymIntArrayRef stride, SymIntArrayRef dilation) {
  check_length("stride", stride, 1);
  check_length("dilation", dilation, 1);
  if (weight.dim() != 3) {  // conv1d refuses it
    return {0, 0};
  }
  const auto params = params_for_same_padding(weight.unsqueeze(2), stride, dilation, 1);
  return {params.padding[2], params.padding[3]};
}

Tensor conv_transpose1d(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                        SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef output_padding, SymInt groups,
                        SymIntArrayRef dilation) {
  check_not_nested("conv_transpose1d", input, weight, bias);
  const auto call = check_conv_transpose(1, input.sym_sizes(), weight.sym_sizes(), bias_size(bias),
                                         {stride, padding, output_padding, dilation, std::move(groups)});
  check_kinds("conv_transpose1d", input, weight, bias);
  return without_dim(run_conv_transpose(call, as_row(input), weight.unsqueeze(2), bias), -2);
}

Tensor conv_transpose2d(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                        SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef output_padding, SymInt groups,
                        SymIntArrayRef dilation) {
  check_not_nested("conv_transpose2d", input, weight, bias);
  const auto call = check_conv_transpose(2, input.sym_sizes(), weight.sym_sizes(), bias_size(bias),
                                         {stride, padding, output_padding, dilation, std::move(groups)});
  check_kinds("conv_transpose2d", input, weight, bias);
  return run_conv_transpose(call, input, weight, bias);
}

// ---- aten::convolution

bool takes_convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                       SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed,
                       const SymInt& groups) {
  const auto is_taken = [&](const Tensor& tensor) {
    return tensor.layout() == c10::kStrided && !tensor.is_quantized() && tensor.scalar_type() == input.scalar_type() &&
           tensor.device() == input.device();
  };
  const auto device = input.device();
  const bool has_kernels = device.is_cpu() || device.is_meta()
#if defined(CONV2D_EXT_WITH_CUDA)
                           || device.is_cuda()
#endif
      ;
  if (!has_kernels || !is_taken(input) || !is_taken(weight) || !is_supported_on(input) ||
      (bias.has_value() && bias->defined() && !is_taken(*bias)) || input.dim() != weight.dim()) {
    return false;
  }
  switch (input.dim()) {
    case 3:
    case 4:
      return true;
    case 5:
      return takes_conv3d(input, weight, bias, stride, padding, dilation, transposed, groups);
    default:
      return false;
  }
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, SymIntArrayRef stride,
                   SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding,
                   SymInt groups) {
  const int64_t dim = weight.dim();
  if (transposed && (dim == 3 || dim == 4)) {
    // The op, not its function: a trace of torch.jit keeps an op's arguments, but numbers of what is in it, as sizes.
    const auto& op = dim == 3 ? conv_transpose1d_op() : conv_transpose2d_op();
    return op.call(input, weight, bias, stride, padding, output_padding, std::move(groups), dilation);
  }
  if (dim == 4) {
    return conv2d(input, weight, bias, params_from_pairs(stride, padding, dilation, groups));
  }
  if (dim == 3) {
    check_length("padding", padding, 1);
    return conv1d(input, weight, bias, stride, {padding[0], padding[0]}, dilation, std::move(groups));
  }
  if (transposed) {
    return conv_transpose3d(input, weight, bias, stride, padding, output_padding, groups, dilation);
  }
  return conv3d(input, weight, bias, stride, padding, dilation, groups);
}

// ---- aten::convolution_backward

namespace {

// What a backward is of: images, and the call of an op on them.
struct Gradients {
  const Tensor& grad_output;
  const Tensor& input;
  const Tensor& weight;
  std::array<bool, 3> wanted;
  Tensor of_input, of_weight;

  void of_convolution(const SymConv2dParams& params) {
    if (wanted[0]) {
      of_input =
          conv2d_grad_input(grad_output, weight, input.sym_sizes(), params, grad_input_is_channels_last(input, weight));
    }
    if (wanted[1]) {
      of_weight = conv2d_grad_weight(grad_output, input, weight.sym_sizes(), grad_weight_strides(weight), params);
    }
  }

  // The output is conv2d_grad_input(appended input, conj(weight)), cut: see run_conv_transpose.
  void of_transposed(const ConvTransposeCall& call) {
    const Tensor whole = append_zeros(grad_output, call.cut);
    TORCH_CHECK(whole.sym_sizes().equals(call.output_size), "expected grad_output to have the output's size ",
                SymIntArrayRef(call.output_size), ", but got grad_output of size ", whole.sym_sizes(),
                " (both without what output_padding cuts)");
    if (wanted[0]) {
      const Tensor appended = conv2d(whole, conjugate(weight), std::nullopt, call.params);
      of_input = appended.narrow_symint(-2, 0, input.sym_size(-2)).narrow_symint(-1, 0, input.sym_size(-1));
    }
    if (wanted[1]) {
      const Tensor appended = append_zeros(input, call.append);
      of_weight =
          conjugate(conv2d_grad_weight(appended, whole, weight.sym_sizes(), grad_weight_strides(weight), call.params));
    }
  }
};

}  // namespace

bool takes_convolution_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                                SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed,
                                const SymInt& groups) {
  // (grad_output stands where a bias does: it is to be of the same kind.)
  return (weight.dim() == 3 || weight.dim() == 4) && grad_output.dim() == weight.dim() &&
         takes_convolution(input, weight, grad_output, stride, padding, dilation, transposed, groups);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad_output, const Tensor& input,
                                                        const Tensor& weight, SymIntArrayRef stride,
                                                        SymIntArrayRef padding, SymIntArrayRef dilation,
                                                        bool transposed, SymIntArrayRef output_padding, SymInt groups,
                                                        std::array<bool, 3> wanted) {
  const int64_t dims = weight.dim() - 2;
  const auto image = [&](const Tensor& tensor) { return dims == 1 ? tensor.unsqueeze(-2) : tensor; };
  const Tensor grad_image = image(grad_output), input_image = image(input), weight_image = image(weight);
  Gradients gradients{grad_image, input_image, weight_image, wanted, {}, {}};
  if (transposed) {
    gradients.of_transposed(check_conv_transpose(dims, input.sym_sizes(), weight.sym_sizes(), std::nullopt,
                                                 {stride, padding, output_padding, dilation, groups}));
  } else if (dims == 2) {
    gradients.of_convolution(params_from_pairs(stride, padding, dilation, groups));
  } else {
    check_length("stride", stride, 1);
    check_length("padding", padding, 1);
    check_length("dilation", dilation, 1);
    gradients.of_convolution({{1, stride[0]}, {0, 0, padding[0], padding[0]}, {1, dilation[0]}, groups});
  }
  const auto as_given = [&](const Tensor& gradient) {
    return dims == 1 && gradient.defined() ? gradient.squeeze(-2) : gradient;
  };
  return {as_given(gradients.of_input), as_given(gradients.of_weight),
          wanted[2] ? conv2d_grad_bias(grad_image) : Tensor()};
}

}  // namespace conv2d_ext
