// The four ops closed under differentiation.
//
// Nodes are written as PyTorch's own generated ones are (torch::autograd::Function refuses torch.func and
// forward mode). Each backward is made of the four ops, so gradients of every order follow; each gradient is
// computed only where it is wanted, and a tensor is saved only for a gradient that uses it.
//
// See library.cpp for the conjugations, which make this closed for complex types too:
//
//   y  = conv2d(x, w)                 gx = conv2d_grad_input(gy, w)    gw = conv2d_grad_weight(gy, x)
//   gx = conv2d_grad_input(gy, w)     for cotangent v of gx:  conv2d(v, w)  and  conv2d_grad_weight(gy, v)
//   gw = conv2d_grad_weight(gy, x)    for cotangent u of gw:  conv2d(x, u)  and  conv2d_grad_input(gy, u)
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "conv2d_checks.h"
#include "conv2d_format.h"
#include "conv2d_ops.h"

namespace conv2d_ext {
namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
using torch::autograd::collect_next_edges;
using torch::autograd::compute_requires_grad;
using torch::autograd::isFwGradDefined;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using SymSizes = c10::SmallVector<SymInt, 4>;

SymSizes copy_sizes(SymIntArrayRef sizes) { return SymSizes(sizes.begin(), sizes.end()); }

// What the gradient of a weight should have: the weight's own strides where they are non-overlapping and dense,
// so that DistributedDataParallel needs no copy; contiguous ones otherwise.
SymSizes grad_weight_strides(const Tensor& weight) {
  if (weight.is_non_overlapping_and_dense()) {
    return copy_sizes(weight.sym_strides());
  }
  SymSizes strides = copy_sizes(weight.sym_sizes());
  SymInt running = 1;
  for (size_t i = strides.size(); i-- > 0;) {
    SymInt size = strides[i];
    strides[i] = running;
    running *= size;
  }
  return strides;
}

// ---- nodes

// What the backward of a bilinear op keeps: its two tensor arguments, each only for the other's gradient, and the
// geometry.
struct BilinearNode : torch::autograd::TraceableFunction {
  SavedVariable first_saved, second_saved;
  SymSizes input_size, weight_size, weight_stride;
  SymConv2dParams params;
  bool channels_last = false;  // the format of activations' gradients

  // Edges are set by now: the gradients that will be wanted are known.
  void save(const Tensor& first, const Tensor& second) {
    if (should_compute_output(1)) {
      first_saved = SavedVariable(first, /*is_output=*/false);
    }
    if (should_compute_output(0)) {
      second_saved = SavedVariable(second, /*is_output=*/false);
    }
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    first_saved.reset_data();
    second_saved.reset_data();
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(first_saved, /*is_output=*/false);
    args.collect(second_saved, /*is_output=*/false);
    args.collect(channels_last);
    visit_sizes(*this, [&](const SymInt& size) { args.collect(size); });
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override {
    saved.before(first_saved);
    saved.before(second_saved);
    visit_sizes(*this, [&](SymInt& size) { saved.before(size); });
    variable_list result = apply(variable_list(grads));
    saved.after(first_saved);
    saved.after(second_saved);
    visit_sizes(*this, [&](SymInt& size) { saved.after(size); });
    return result;
  }

 private:
  template <class Self, class Visit>
  static void visit_sizes(Self& self, Visit visit) {
    const auto visit_all = [&](auto& sizes) {
      for (auto& size : sizes) {
        visit(size);
      }
    };
    visit_all(self.input_size);
    visit_all(self.weight_size);
    visit_all(self.weight_stride);
    visit_all(self.params.stride);
    visit_all(self.params.padding);
    visit_all(self.params.dilation);
    visit(self.params.groups);
  }
};

struct Conv2dBackward final : BilinearNode {  // of (input, weight, bias)
  std::string name() const override { return "Conv2dBackward"; }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list result(3);
    const Tensor& grad_output = grads[0];
    if (!grad_output.defined()) {
      return result;
    }
    if (task_should_compute_output(0)) {
      result[0] = conv2d_grad_input(grad_output, second_saved.unpack(), input_size, params, channels_last);
    }
    if (task_should_compute_output(1)) {
      result[1] = conv2d_grad_weight(grad_output, first_saved.unpack(), weight_size, weight_stride, params);
    }
    if (task_should_compute_output(2)) {
      // An input without channels has an output without channels, but not a bias without elements.
      result[2] = has_no_elements(grad_output) ? at::zeros_symint({weight_size[0]}, grad_output.options())
                                               : conv2d_grad_bias(grad_output);
    }
    return result;
  }
};

struct Conv2dGradInputBackward final : BilinearNode {  // of (grad_output, weight)
  std::string name() const override { return "Conv2dGradInputBackward"; }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list result(2);
    const Tensor& grad = grads[0];
    if (!grad.defined()) {
      return result;
    }
    if (task_should_compute_output(0)) {
      result[0] = conv2d(grad, second_saved.unpack(), std::nullopt, params);
    }
    if (task_should_compute_output(1)) {
      result[1] = conv2d_grad_weight(first_saved.unpack(), grad, weight_size, weight_stride, params);
    }
    return result;
  }
};

struct Conv2dGradWeightBackward final : BilinearNode {  // of (grad_output, input)
  std::string name() const override { return "Conv2dGradWeightBackward"; }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list result(2);
    const Tensor& grad = grads[0];
    if (!grad.defined()) {
      return result;
    }
    if (task_should_compute_output(0)) {
      result[0] = conv2d(second_saved.unpack(), grad, std::nullopt, params);
    }
    if (task_should_compute_output(1)) {
      result[1] = conv2d_grad_input(first_saved.unpack(), grad, input_size, params, channels_last);
    }
    return result;
  }
};

struct Conv2dGradBiasBackward final : torch::autograd::TraceableFunction {
  SymSizes grad_output_size;

  std::string name() const override { return "Conv2dGradBiasBackward"; }

  variable_list apply(variable_list&& grads) override {
    variable_list result(1);
    if (grads[0].defined() && task_should_compute_output(0)) {
      result[0] = grads[0].unsqueeze(-1).unsqueeze(-1).expand_symint(grad_output_size);
    }
    return result;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (const SymInt& size : grad_output_size) {
      args.collect(size);
    }
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override {
    for (SymInt& size : grad_output_size) {
      saved.before(size);
    }
    variable_list result = apply(variable_list(grads));
    for (SymInt& size : grad_output_size) {
      saved.after(size);
    }
    return result;
  }
};

template <class Node, class... Tensors>
std::shared_ptr<Node> make_node(const Tensors&... differentiable) {
  std::shared_ptr<Node> node(new Node(), torch::autograd::deleteNode);
  node->set_next_edges(collect_next_edges(differentiable...));
  return node;
}

// ---- forward mode: the tangent of a bilinear op is the sum of the op at (tangent, primal) and (primal, tangent)

const Tensor& tangent(const Tensor& tensor) { return tensor._fw_grad(/*level=*/0); }
Tensor primal(const Tensor& tensor) { return tensor._fw_primal(/*level=*/0); }

template <class Op>
void set_bilinear_tangent(const Tensor& result, const Tensor& first, const Tensor& second, Op op) {
  const bool first_moves = isFwGradDefined(first);
  const bool second_moves = isFwGradDefined(second);
  if (!first_moves && !second_moves) {
    return;
  }
  Tensor sum;
  if (first_moves) {
    sum = op(tangent(first), primal(second));
  }
  if (second_moves) {
    const Tensor term = op(primal(first), tangent(second));
    sum = sum.defined() ? sum.add(term) : term;
  }
  result._set_fw_grad(sum, /*level=*/0, /*is_inplace_op=*/false);
}

// The bias's tangent rides along with the first convolution that is needed anyway.
void set_conv2d_tangent(const Tensor& output, const Tensor& input, const Tensor& weight,
                        const std::optional<Tensor>& bias, const SymConv2dParams& params) {
  std::optional<Tensor> bias_tangent;
  if (isFwGradDefined(bias)) {
    bias_tangent = tangent(*bias);
  }
  if (isFwGradDefined(input) || isFwGradDefined(weight)) {
    set_bilinear_tangent(output, input, weight, [&](const Tensor& x, const Tensor& w) {
      return conv2d(x, w, std::exchange(bias_tangent, std::nullopt), params);
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
                       SymIntArrayRef dilation, SymInt groups) {
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    output = conv2d_op().redispatch(keys & c10::after_autograd_keyset, input, weight, bias, stride, padding, dilation,
                                    groups);
  }
  const bool has_tangent = isFwGradDefined(input) || isFwGradDefined(weight) || isFwGradDefined(bias);
  if (compute_requires_grad(input, weight, bias)) {
    auto node = make_node<Conv2dBackward>(input, weight, bias);
    node->input_size = copy_sizes(input.sym_sizes());
    node->weight_size = copy_sizes(weight.sym_sizes());
    node->weight_stride = grad_weight_strides(weight);
    node->params = make_params<SymInt>(stride, padding, dilation, groups);
    node->channels_last = grad_input_is_channels_last(input, weight);
    node->save(input, weight);
    torch::autograd::set_history(output, node);
  }
  if (has_tangent) {
    set_conv2d_tangent(output, input, weight, bias, make_params<SymInt>(stride, padding, dilation, groups));
  }
  return output;
}

Tensor conv2d_grad_input_autograd(c10::DispatchKeySet keys, const Tensor& grad_output, const Tensor& weight,
                                  SymIntArrayRef input_size, SymIntArrayRef stride, SymIntArrayRef padding,
                                  SymIntArrayRef dilation, SymInt groups, bool channels_last) {
  Tensor result;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    result = conv2d_grad_input_op().redispatch(keys & c10::after_autograd_keyset, grad_output, weight, input_size,
                                               stride, padding, dilation, groups, channels_last);
  }
  const auto params = make_params<SymInt>(stride, padding, dilation, groups);
  if (compute_requires_grad(grad_output, weight)) {
    auto node = make_node<Conv2dGradInputBackward>(grad_output, weight);
    node->weight_size = copy_sizes(weight.sym_sizes());
    node->weight_stride = grad_weight_strides(weight);
    node->params = params;
    node->save(grad_output, weight);
    torch::autograd::set_history(result, node);
  }
  set_bilinear_tangent(result, grad_output, weight, [&](const Tensor& gy, const Tensor& w) {
    return conv2d_grad_input(gy, w, input_size, params, channels_last);
  });
  return result;
}

Tensor conv2d_grad_weight_autograd(c10::DispatchKeySet keys, const Tensor& grad_output, const Tensor& input,
                                   SymIntArrayRef weight_size, SymIntArrayRef weight_stride, SymIntArrayRef stride,
                                   SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups) {
  Tensor result;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    result = conv2d_grad_weight_op().redispatch(keys & c10::after_autograd_keyset, grad_output, input, weight_size,
                                                weight_stride, stride, padding, dilation, groups);
  }
  const auto params = make_params<SymInt>(stride, padding, dilation, groups);
  if (compute_requires_grad(grad_output, input)) {
    auto node = make_node<Conv2dGradWeightBackward>(grad_output, input);
    node->input_size = copy_sizes(input.sym_sizes());
    node->params = params;
    node->channels_last = grad_input_is_channels_last(input, result);
    node->save(grad_output, input);
    torch::autograd::set_history(result, node);
  }
  set_bilinear_tangent(result, grad_output, input, [&](const Tensor& gy, const Tensor& x) {
    return conv2d_grad_weight(gy, x, weight_size, weight_stride, params);
  });
  return result;
}

Tensor conv2d_grad_bias_autograd(c10::DispatchKeySet keys, const Tensor& grad_output) {
  Tensor result;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    result = conv2d_grad_bias_op().redispatch(keys & c10::after_autograd_keyset, grad_output);
  }
  if (compute_requires_grad(grad_output)) {
    auto node = make_node<Conv2dGradBiasBackward>(grad_output);
    node->grad_output_size = copy_sizes(grad_output.sym_sizes());
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
