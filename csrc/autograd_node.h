// The history of an op's result: autograd nodes as PyTorch's own generated code writes them (torch::autograd::Function
// refuses torch.func and forward mode), with compiled autograd.
//
// A Backward describes one op:
//   kName, kArguments        the node's name; how many of the op's arguments are differentiable
//   State                    what its rule needs beside tensors, with a member
//                            template <class Self, class Visit> static void visit(Self&, Visit) that names the fields:
//                            SymInt and ranges of it, bool, int64_t, double, std::string, std::vector<double>
//   apply(grad, first, second, state, wanted, result)
//                            the gradients, for the cotangent grad of the result and the op's first two tensor
//                            arguments, of which each is defined if the other's gradient is wanted
//   kNeedsSecond             optional: every gradient needs the second tensor, which may be the op's only one
//   kNeedsFirst              optional: every gradient needs the first one
//   kSaved                   optional: so many tensors are saved in place of two, and every gradient needs them all;
//                            apply takes them as an array
//   kSavesOutput             optional, with kNeedsSecond: that tensor is the op's result, saved by save_output
//   kCoupled                 optional: of so many first arguments PyTorch's backward is one function. Gradients that
//                            depend on none of them then get a history nonetheless
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
// GCC 12 takes an optional in it, once inlined, for uninitialised.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <torch/csrc/dynamo/compiled_autograd.h>
#pragma GCC diagnostic pop

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace conv2d_ext {

using SymSizes = c10::SmallVector<c10::SymInt, 4>;

inline SymSizes copy_sizes(c10::SymIntArrayRef sizes) { return SymSizes(sizes.begin(), sizes.end()); }

using Wanted = std::array<bool, 4>;  // by argument of the op: is its gradient wanted?

// The history of a gradient that depends on none of its op's arguments. F.conv2d's backward is one function of all of
// them, so its gradients require a gradient wherever an argument does, and a penalty on a constant one gives None
// instead of an error.
struct ConstantGradientBackward final : torch::autograd::TraceableFunction {
  std::string name() const override { return "Conv2dConstantGradientBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    return torch::autograd::variable_list(num_outputs());
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

  torch::autograd::variable_list apply_with_saved(const torch::autograd::variable_list&,
                                                  torch::dynamo::autograd::SwapSavedVariables&) override {
    return torch::autograd::variable_list(num_outputs());
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

// Compiled autograd takes a node apart into values and puts it together again: a State's fields, one by one.
namespace node_fields {

using Sizes = std::vector<c10::SymInt>;

template <class Field>
constexpr bool kIsSizes =
    !std::is_arithmetic_v<Field> && !std::is_same_v<Field, std::string> && !std::is_same_v<Field, std::vector<double>>;

template <class Field>
auto sizes_of(Field& field) {
  if constexpr (std::is_same_v<std::remove_cv_t<Field>, c10::SymInt>) {
    return std::pair(&field, &field + 1);
  } else {
    return std::pair(std::begin(field), std::end(field));
  }
}

template <class Field, class Args>
void collect(const Field& field, Args& args) {
  if constexpr (kIsSizes<Field>) {
    const auto [begin, end] = sizes_of(field);
    std::for_each(begin, end, [&](const c10::SymInt& size) { args.collect(size); });
  } else {
    args.collect(field);
  }
}

// Sizes become values of the compiled graph; all else is a constant of it.
template <class Field, class Each>
void each_size(Field& field, Each each) {
  if constexpr (kIsSizes<Field>) {
    const auto [begin, end] = sizes_of(field);
    std::for_each(begin, end, each);
  }
}

template <class Field>
void pack(const Field& field, torch::dynamo::autograd::PackedArgs& args) {
  if constexpr (kIsSizes<Field>) {
    const auto [begin, end] = sizes_of(field);
    args.pack(Sizes(begin, end));
  } else {
    args.pack(field);
  }
}

template <class Field>
at::TypePtr packed_type() {
  using Packed = std::conditional_t<kIsSizes<Field>, Sizes, Field>;
  return torch::dynamo::autograd::IValuePacker<Packed>::packed_type();
}

template <class Field>
void unpack(Field& field, torch::dynamo::autograd::PackedArgs& args) {
  if constexpr (std::is_same_v<Field, SymSizes>) {
    field = copy_sizes(args.unpack<Sizes>());
  } else if constexpr (kIsSizes<Field>) {
    const Sizes sizes = args.unpack<Sizes>();
    std::copy(sizes.begin(), sizes.end(), sizes_of(field).first);
  } else {
    field = args.unpack<Field>();
  }
}

}  // namespace node_fields

template <class Backward, class = void>
constexpr bool kNeedsSecond = false;
template <class Backward>
constexpr bool kNeedsSecond<Backward, std::enable_if_t<Backward::kNeedsSecond>> = true;
template <class Backward, class = void>
constexpr bool kNeedsFirst = false;
template <class Backward>
constexpr bool kNeedsFirst<Backward, std::enable_if_t<Backward::kNeedsFirst>> = true;
template <class Backward, class = void>
constexpr size_t kSaved = 2;
template <class Backward>
constexpr size_t kSaved<Backward, std::enable_if_t<(Backward::kSaved > 0)>> = Backward::kSaved;
template <class Backward, class = void>
constexpr bool kSavesOutput = false;
template <class Backward>
constexpr bool kSavesOutput<Backward, std::enable_if_t<Backward::kSavesOutput>> = true;

template <class Backward, class = void>
constexpr size_t kCoupled = 0;
template <class Backward>
constexpr size_t kCoupled<Backward, std::enable_if_t<(Backward::kCoupled > 0)>> = Backward::kCoupled;

template <class Backward>
struct OpNode final : torch::autograd::TraceableFunction {
  using State = typename Backward::State;
  using Tensor = at::Tensor;
  using Tensors = std::array<Tensor, kSaved<Backward>>;
  using variable_list = torch::autograd::variable_list;

  std::array<torch::autograd::SavedVariable, kSaved<Backward>> saved;
  State state;
  // Recorded for a transform of torch.func, whose levels decide what requires a gradient; they may have ended by the
  // time that gradients are computed.
  bool in_transform = false;

  // Edges are set by now: the gradients that will be wanted are known.
  template <class... Some>
  void save(const Some&... tensors) {
    static_assert(sizeof...(tensors) == kSaved<Backward>);
    const Tensor* const all[] = {&tensors...};
    const Wanted wanted = wanted_by([this](size_t i) { return should_compute_output(i); });
    for (size_t i = 0; i < saved.size(); ++i) {
      if (needs(i, wanted)) saved[i] = torch::autograd::SavedVariable(*all[i], /*is_output=*/false);
    }
  }

  // Once it has its history.
  void save_output(const Tensor& output) { saved[1] = torch::autograd::SavedVariable(output, /*is_output=*/true); }

  std::string name() const override { return Backward::kName; }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Wanted wanted = wanted_now();
    Tensors tensors;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (needs(i, wanted)) tensors[i] = unpacked(i);
    }
    variable_list result = run(grads, tensors, state, wanted);
    if (kCoupled<Backward> > 0 && !in_transform && c10::GradMode::is_enabled()) {
      require_grad(result, grads[0]);
    }
    return result;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved) variable.reset_data();
  }

  // ---- compiled autograd: which values the compiled graph depends on, and the backward as one call in that graph

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (size_t i = 0; i < saved.size(); ++i) args.collect(saved[i], kSavesOutput<Backward> && i == 1);
    State::visit(state, [&](const auto& field) { node_fields::collect(field, args); });
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
    static const std::string function =
        compiler->bind_function(swap.get_py_compiler(), Backward::kName, run_packed, packed_types());
    const auto each_size = [&](auto each) {
      State::visit(state, [&](auto& field) { node_fields::each_size(field, each); });
    };
    for (auto& variable : saved) swap.before(variable);
    each_size([&](c10::SymInt& size) { swap.before(size); });
    variable_list result = compiler->call_function(
        swap.get_py_compiler(), "apply_functional", function, grads, packed(),
        torch::dynamo::autograd::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            torch::dynamo::autograd::get_input_metadata(next_edges())));
    for (auto& variable : saved) swap.after(variable);
    each_size([&](c10::SymInt& size) { swap.after(size); });
    return result;
  }

 private:
  template <class IsWanted>
  static Wanted wanted_by(IsWanted is_wanted) {
    Wanted wanted{};
    for (size_t i = 0; i < Backward::kArguments; ++i) wanted[i] = is_wanted(i);
    return wanted;
  }
  Wanted wanted_now() const {
    return wanted_by([this](size_t i) { return task_should_compute_output(i); });
  }

  // Whether the gradients that are wanted need tensor i.
  static constexpr bool needs(size_t i, const Wanted& wanted) {
    if (kSaved<Backward> != 2) return true;
    return i == 0 ? kNeedsFirst<Backward> || wanted[1] : kNeedsSecond<Backward> || wanted[0];
  }
  // (The second of two may be the op's result, whose history is this node.)
  Tensor unpacked(size_t i) { return kSaved<Backward> == 2 && i == 1 ? saved[i].unpack(getptr()) : saved[i].unpack(); }

  // (The incoming gradient is the caller's.)
  void require_grad(const variable_list& gradients, const Tensor& incoming) const {
    torch::autograd::edge_list edges;
    for (size_t i = 0; i < kCoupled<Backward>; ++i) {
      if (should_compute_output(i)) {
        edges.push_back(next_edge(i));
      }
    }
    for (const Tensor& gradient : gradients) {
      if (!edges.empty() && gradient.defined() && !gradient.requires_grad() && !gradient.is_same(incoming)) {
        auto node = new_node<ConstantGradientBackward>();
        node->set_next_edges(torch::autograd::edge_list(edges));
        torch::autograd::set_history(gradient, node);
      }
    }
  }

  static variable_list run(const variable_list& grads, const Tensors& tensors, const State& state,
                           const Wanted& wanted) {
    variable_list result(Backward::kArguments);
    if (grads[0].defined()) {
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      if constexpr (kSaved<Backward> == 2) {
        Backward::apply(grads[0], tensors[0], tensors[1], state, wanted, result);
      } else {
        Backward::apply(grads[0], tensors, state, wanted, result);
      }
    }
    return result;
  }

  // The order is that of packed_types and of run_packed.
  std::vector<at::IValue> packed() {
    torch::dynamo::autograd::PackedArgs args;
    for (size_t i = 0; i < saved.size(); ++i) args.pack(unpacked(i));
    State::visit(state, [&](const auto& field) { node_fields::pack(field, args); });
    args.pack(wanted_now());
    return args.vec();
  }

  static std::vector<at::TypePtr> packed_types() {
    const auto tensor = torch::dynamo::autograd::IValuePacker<Tensor>::packed_type();
    std::vector<at::TypePtr> types(kSaved<Backward>, tensor);
    const State unset{};
    State::visit(unset, [&](const auto& field) {
      types.push_back(node_fields::packed_type<std::remove_cv_t<std::remove_reference_t<decltype(field)>>>());
    });
    types.push_back(torch::dynamo::autograd::IValuePacker<Wanted>::packed_type());
    return types;
  }

  static variable_list run_packed(const variable_list& grads, const std::vector<at::IValue>& values) {
    torch::dynamo::autograd::PackedArgs args(values);
    Tensors tensors;
    for (Tensor& tensor : tensors) tensor = args.unpack<Tensor>();
    State state{};
    State::visit(state, [&](auto& field) { node_fields::unpack(field, args); });
    const auto wanted = args.unpack<Wanted>();
    return run(grads, tensors, state, wanted);
  }
};

// What the kernel below autograd makes of an op's call: a result without a history.
template <class Signature, class... Arguments>
auto below_autograd(const c10::TypedOperatorHandle<Signature>& op, c10::DispatchKeySet keys,
                    const Arguments&... arguments) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.redispatch(keys & c10::after_autograd_keyset, arguments...);
}

template <class Backward, class... Tensors>
auto make_node(const Tensors&... differentiable) {
  auto node = new_node<OpNode<Backward>>();
  node->set_next_edges(torch::autograd::collect_next_edges(differentiable...));
  return node;
}

// ---- forward mode

inline const at::Tensor& tangent(const at::Tensor& tensor) { return tensor._fw_grad(/*level=*/0); }
inline at::Tensor primal(const at::Tensor& tensor) { return tensor._fw_primal(/*level=*/0); }

// What the result changes by with its op's first argument, by_first(), and with its second one, where these move.
template <class ByFirst, class BySecond>
void set_tangent_of_two(const at::Tensor& result, const at::Tensor& first, const at::Tensor& second, ByFirst by_first,
                        BySecond by_second) {
  at::Tensor sum;
  if (torch::autograd::isFwGradDefined(first)) sum = by_first();
  if (torch::autograd::isFwGradDefined(second)) {
    const at::Tensor term = by_second();
    sum = sum.defined() ? sum.add(term) : term;
  }
  if (sum.defined()) result._set_fw_grad(sum, /*level=*/0, /*is_inplace_op=*/false);
}

// The tangent of a bilinear op is the sum of the op at (tangent, primal) and (primal, tangent).
template <class Op>
void set_bilinear_tangent(const at::Tensor& result, const at::Tensor& first, const at::Tensor& second, Op op) {
  set_tangent_of_two(
      result, first, second, [&] { return op(tangent(first), primal(second)); },
      [&] { return op(primal(first), tangent(second)); });
}

inline bool is_wrapped(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(c10::DispatchKey::FuncTorchGradWrapper);
}

}  // namespace conv2d_ext
