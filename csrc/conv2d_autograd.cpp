// The four ops closed under differentiation.
//
// Nodes are written as PyTorch's own generated ones are (torch::autograd::Function refuses torch.func and
// forward mode). Each backward is made of the four ops, so gradients of every order follow; each gradient is
// computed only where it is wanted, and a tensor is saved only for a gradient that uses it. What autocast was to cast,
// it has cast before a node exists: a backward computes in the dtypes of its tensors, whatever autocast is when it
// runs.
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
// GCC 12 takes an optional in it, once inlined, for uninitialised.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <torch/csrc/dynamo/compiled_autograd.h>
#pragma GCC diagnostic pop
#include <torch/library.h>

#include <array>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

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

// ---- nodes

// What a backward needs beside tensors; each rule uses its part.
struct Geometry {
  SymSizes input_size, weight_size, weight_stride;
  SymConv2dParams params;
  bool channels_last = false;  // the format of activations' gradients

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

using Wanted = std::array<bool, 3>;  // by argument of the op: is its gradient wanted?

// The backward of an op as a function: the gradients, for the cotangent grad of its result and its first two tensor
// arguments, of which each is defined if the other's gradient is wanted.

struct Conv2dBackward {  // of (input, weight, bias)
  static constexpr const char* kName = "Conv2dBackward";
  static constexpr size_t kArguments = 3;

  static void apply(const Tensor& grad_output, const Tensor& input, const Tensor& weight, const Geometry& geometry,
                    const Wanted& wanted, variable_list& result) {
    if (wanted[0]) {
      result[0] = conv2d_grad_input(grad_output, weight, geometry.input_size, geometry.params, geometry.channels_last);
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

struct Conv2dGradInputBackward {  // of (grad_output, weight)
  static constexpr const char* kName = "Conv2dGradInputBackward";
  static constexpr size_t kArguments = 2;

  static void apply(const Tensor& grad, const Tensor& grad_output, const Tensor& weight, const Geometry& geometry,
                    const Wanted& wanted, variable_list& result) {
    if (wanted[0]) {
      result[0] = conv2d(grad, weight, std::nullopt, geometry.params);
    }
    if (wanted[1]) {
      result[1] = conv2d_grad_weight(grad_output, grad, geometry.weight_size, geometry.weight_stride, geometry.params);
    }
  }
};

struct Conv2dGradWeightBackward {  // of (grad_output, input)
  static constexpr const char* kName = "Conv2dGradWeightBackward";
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
  static constexpr size_t kArguments = 1;

  static void apply(const Tensor& grad, const Tensor&, const Tensor&, const Geometry& geometry, const Wanted& wanted,
                    variable_list& result) {
    if (wanted[0]) {
      result[0] = grad.unsqueeze(-1).unsqueeze(-1).expand_symint(geometry.input_size);
    }
  }
};

// The history of a gradient that depends on none of its op's arguments. F.conv2d's backward is one function of all of
// them, so its gradients require a gradient wherever an argument does, and a penalty on a constant one gives None
// instead of an error.
struct ConstantGradientBackward final : torch::autograd::TraceableFunction {
  std::string name() const override { return "Conv2dConstantGradientBackward"; }

  variable_list apply(variable_list&&) override { return variable_list(num_outputs()); }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

  variable_list apply_with_saved(const variable_list&, torch::dynamo::autograd::SwapSavedVariables&) override {
    return variable_list(num_outputs());
  }
};

// PyTorch moved its nodes from shared_ptr to intrusive_ptr; both are in the range of versions supported.
template <class NodeType>
auto new_node() {
  using Node = torch::autograd::Node;
  if constexpr (std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<Node>>) {
    // Found by argument alone, since newer versions don't declare it: deletes long graphs without recursion.
    const auto destroy = [](auto* node) { deleteNode(node); };
    return std::shared_ptr<NodeType>(new NodeType(), destroy);
  } else {
    return c10::make_intrusive<NodeType>();
  }
}

template <class Backward>
struct OpNode final : torch::autograd::TraceableFunction {
  SavedVariable first_saved, second_saved;
  Geometry geometry;
  // Recorded for a transform of torch.func, whose levels decide what requires a gradient; they may have ended by the
  // time that gradients are computed.
  bool in_transform = false;

  // Edges are set by now: the gradients that will be wanted are known.
  void save(const Tensor& first, const Tensor& second) {
    if (should_compute_output(1)) {
      first_saved = SavedVariable(first, /*is_output=*/false);
    }
    if (should_compute_output(0)) {
      second_saved = SavedVariable(second, /*is_output=*/false);
    }
  }

  std::string name() const override { return Backward::kName; }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Wanted wanted = wanted_now();
    variable_list result = run(grads, wanted[1] ? first_saved.unpack() : Tensor(),
                               wanted[0] ? second_saved.unpack() : Tensor(), geometry, wanted);
    if (std::is_same_v<Backward, Conv2dBackward> && !in_transform && c10::GradMode::is_enabled()) {
      require_grad(result);
    }
    return result;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    first_saved.reset_data();
    second_saved.reset_data();
  }

  // ---- compiled autograd: which values the compiled graph depends on, and the backward as one call in that graph

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(first_saved, /*is_output=*/false);
    args.collect(second_saved, /*is_output=*/false);
    args.collect(geometry.channels_last);
    Geometry::visit_sizes(geometry, [&](const SymInt& size) { args.collect(size); });
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override {
    const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
    static const std::string function =
        compiler->bind_function(saved.get_py_compiler(), Backward::kName, run_packed, packed_types());
    saved.before(first_saved);
    saved.before(second_saved);
    Geometry::visit_sizes(geometry, [&](SymInt& size) { saved.before(size); });
    variable_list result = compiler->call_function(
        saved.get_py_compiler(), "apply_functional", function, grads, packed(),
        torch::dynamo::autograd::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            torch::dynamo::autograd::get_input_metadata(next_edges())));
    saved.after(first_saved);
    saved.after(second_saved);
    Geometry::visit_sizes(geometry, [&](SymInt& size) { saved.after(size); });
    return result;
  }

 private:
  using Sizes = std::vector<SymInt>;

  Wanted wanted_now() const {
    Wanted wanted{};
    for (size_t i = 0; i < Backward::kArguments; ++i) {
      wanted[i] = task_should_compute_output(i);
    }
    return wanted;
  }

  // The bias takes part in no gradient, not even in F.conv2d's.
  void require_grad(const variable_list& gradients) const {
    torch::autograd::edge_list edges;
    for (size_t i = 0; i < 2; ++i) {
      if (should_compute_output(i)) {
        edges.push_back(next_edge(i));
      }
    }
    for (const Tensor& gradient : gradients) {
      if (!edges.empty() && gradient.defined() && !gradient.requires_grad()) {
        auto node = new_node<ConstantGradientBackward>();
        node->set_next_edges(torch::autograd::edge_list(edges));
        torch::autograd::set_history(gradient, node);
      }
    }
  }

  static variable_list run(const variable_list& grads, const Tensor& first, const Tensor& second,
                           const Geometry& geometry, const Wanted& wanted) {
    variable_list result(Backward::kArguments);
    if (grads[0].defined()) {
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      Backward::apply(grads[0], first, second, geometry, wanted, result);
    }
    return result;
  }

  // The order is that of packed_types and of run_packed.
  std::vector<at::IValue> packed() const {
    const auto& params = geometry.params;
    Sizes hyper_parameters(std::begin(params.stride), std::end(params.stride));
    hyper_parameters.insert(hyper_parameters.end(), std::begin(params.padding), std::end(params.padding));
    hyper_parameters.insert(hyper_parameters.end(), std::begin(params.dilation), std::end(params.dilation));
    hyper_parameters.push_back(params.groups);
    torch::dynamo::autograd::PackedArgs args;
    args.pack(Tensor(first_saved.unpack()));
    args.pack(Tensor(second_saved.unpack()));
    args.pack(Sizes(geometry.input_size.begin(), geometry.input_size.end()));
    args.pack(Sizes(geometry.weight_size.begin(), geometry.weight_size.end()));
    args.pack(Sizes(geometry.weight_stride.begin(), geometry.weight_stride.end()));
    args.pack(hyper_parameters);
    args.pack(geometry.channels_last);
    args.pack(wanted_now());
    return args.vec();
  }

  static std::vector<at::TypePtr> packed_types() {
    const auto tensor = torch::dynamo::autograd::IValuePacker<Tensor>::packed_type();
    const auto sizes = torch::dynamo::autograd::IValuePacker<Sizes>::packed_type();
    return {tensor,
            tensor,
            sizes,
            sizes,
            sizes,
            sizes,
            torch::dynamo::autograd::IValuePacker<bool>::packed_type(),
            torch::dynamo::autograd::IValuePacker<Wanted>::packed_type()};
  }

  static variable_list run_packed(const variable_list& grads, const std::vector<at::IValue>& values) {
    torch::dynamo::autograd::PackedArgs args(values);
    const auto first = args.unpack<Tensor>();
    const auto second = args.unpack<Tensor>();
    Geometry geometry;
    geometry.input_size = copy_sizes(args.unpack<Sizes>());
    geometry.weight_size = copy_sizes(args.unpack<Sizes>());
    geometry.weight_stride = copy_sizes(args.unpack<Sizes>());
    const auto hyper_parameters = args.unpack<Sizes>();
    const SymIntArrayRef list(hyper_parameters);
    geometry.params = make_params<SymInt>(list.slice(0, 2), list.slice(2, 4), list.slice(6, 2), list[8]);
    geometry.channels_last = args.unpack<bool>();
    const auto wanted = args.unpack<Wanted>();
    return run(grads, first, second, geometry, wanted);
  }
};

template <class Backward, class... Tensors>
auto make_node(const Tensors&... differentiable) {
  auto node = new_node<OpNode<Backward>>();
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

bool is_transformed(const Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(c10::DispatchKey::FuncTorchGradWrapper);
}

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
    node->geometry.input_size = copy_sizes(input.sym_sizes());
    node->geometry.weight_size = copy_sizes(weight.sym_sizes());
    node->geometry.weight_stride = grad_weight_strides(weight);
    node->geometry.params = make_params<SymInt>(stride, padding, dilation, groups);
    node->geometry.channels_last = grad_input_is_channels_last(input, weight);
    node->in_transform = is_transformed(input) || is_transformed(weight) || (bias.has_value() && is_transformed(*bias));
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
    node->geometry.weight_size = copy_sizes(weight.sym_sizes());
    node->geometry.weight_stride = grad_weight_strides(weight);
    node->geometry.params = params;
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
    node->geometry.input_size = copy_sizes(input.sym_sizes());
    node->geometry.params = params;
    node->geometry.channels_last = grad_input_is_channels_last(input, result);
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
    node->geometry.input_size = copy_sizes(grad_output.sym_sizes());
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
