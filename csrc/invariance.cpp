// The mode itself: which threads are in it, its contexts, and the kernels of convolutions.
//
// Each kernel of the mode, here and in invariance_*.cpp, takes the calls that this library can compute and hands the
// others on, so that PyTorch's own errors and its other layouts, dtypes and devices stay as they are. Under autocast it
// lets PyTorch cast first.
#include "invariance.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string_view>

#include "conv2d_ops.h"
#include "convolution_family.h"
#include "invariance_kernels.h"
#include "tracing.h"

namespace conv2d_ext {
namespace {

using namespace invariance;

// ---- which threads are in the mode

std::atomic<bool> process_enabled{false};
thread_local InvarianceState state;
// This thread left the mode in inference mode, at whose end it gets back the keys that it had before.
thread_local bool may_come_back = false;

bool in_contexts() { return state.contexts > 0 || state.traced > 0; }

void update_thread() {
  const bool is_on = in_contexts() || state.joined;
  c10::impl::tls_set_dispatch_key_included(kInvarianceKey, is_on);
  may_come_back = !is_on && c10::InferenceMode::is_enabled();
}
// What the thread does include: leaving torch.inference_mode sets its keys back to what they were before.
bool is_included() { return c10::impl::tls_is_dispatch_key_included(kInvarianceKey); }

}  // namespace

bool invariance::has_left() {
  if (in_contexts() || process_enabled.load(std::memory_order_relaxed)) return false;
  if (state.joined || may_come_back) {
    state.joined = false;
    update_thread();
  }
  return !is_included();
}

invariance::InTheMode::InTheMode()
    : excluded_(c10::impl::tls_is_dispatch_key_excluded(kInvarianceKey)), included_(kInvarianceKey) {
  if (excluded_) c10::impl::tls_set_dispatch_key_excluded(kInvarianceKey, false);
  ++state.contexts;
}

invariance::InTheMode::~InTheMode() {
  --state.contexts;
  if (excluded_) c10::impl::tls_set_dispatch_key_excluded(kInvarianceKey, true);
}

std::vector<std::string>& invariance::covered_ops() {
  static std::vector<std::string> names;
  return names;
}

std::optional<c10::OperatorHandle> invariance::find_overload(const std::string& name) {
  const size_t dot = std::min(name.find('.'), name.size());
  return c10::Dispatcher::singleton().findSchema({name.substr(0, dot), name.substr(std::min(dot + 1, name.size()))});
}

namespace {

// ---- convolutions

// rest: what PyTorch's _convolution, the op that traces of torch.jit record, has beside: settings of cuDNN.
template <class AtOp, class... Rest>
struct Convolution {
  using Op = AtOp;
  static Tensor call(DispatchKeySet keys, const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                     SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed,
                     SymIntArrayRef output_padding, SymInt groups, Rest... rest) {
    const bool has_bias = bias.has_value() && bias->defined();
    const bool keeps_sizes = input.dim() == 5 && is_jit_tracing();
    if (leaves<Op>(keys) || keeps_sizes || !takes(input, weight) || (has_bias && !takes(input, *bias)) ||
        !takes_convolution(input, weight, bias, stride, padding, dilation, transposed, groups)) {
      return Op::redispatch(keys & kBelow, input, weight, bias, stride, padding, dilation, transposed, output_padding,
                            std::move(groups), rest...);
    }
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return conv2d_ext::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding,
                                   std::move(groups));
  }
};

// For callers of the op itself, such as torch.nn.grad: what the mode records has backwards of its own. And for what was
// recorded before the mode.
struct ConvolutionBackward {
  using Op = at::_ops::convolution_backward;
  static std::tuple<Tensor, Tensor, Tensor> call(DispatchKeySet keys, const Tensor& grad_output, const Tensor& input,
                                                 const Tensor& weight, at::OptionalSymIntArrayRef bias_sizes,
                                                 SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                                                 bool transposed, SymIntArrayRef output_padding, SymInt groups,
                                                 std::array<bool, 3> output_mask) {
    if (leaves<Op>(keys) || !takes(input, weight, grad_output) ||
        !takes_convolution_backward(grad_output, input, weight, stride, padding, dilation, transposed, groups)) {
      return Op::redispatch(keys & kBelow, grad_output, input, weight, bias_sizes, stride, padding, dilation,
                            transposed, output_padding, std::move(groups), output_mask);
    }
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return convolution_backward(grad_output, input, weight, stride, padding, dilation, transposed, output_padding,
                                std::move(groups), output_mask);
  }
};

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) {
  cover_all<Convolution<at::_ops::convolution>, Convolution<at::_ops::_convolution, bool, bool, bool, bool>,
            ConvolutionBackward>(m);
}

// ---- threads that follow the process

// A thread that was running before joins with its first call of an op that is covered. At the autograd key of its
// tensors, or below at BackendSelect, which every thread includes, stand gates: there the thread joins, and the call
// begins again.

bool joins() {
  if (!process_enabled.load(std::memory_order_relaxed) || state.kept_out || is_included()) return false;
  state.joined = true;
  update_thread();
  return true;
}

// (The keys that a kernel gets may have higher ones than its own, where Python dispatches.)
const DispatchKeySet kBeyondBackendSelect(DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
const DispatchKeySet kBeyondAutograd(DispatchKeySet::FULL_AFTER, c10::DispatchKey::AutogradFunctionality);

void pass_backend_gate(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  joins() ? op.callBoxed(stack) : op.redispatchBoxed(keys & kBeyondBackendSelect, stack);
}
// PyTorch registers its autograd kernels for all devices alike, so those of other devices' tensors are the same ones.
void pass_autograd_gate(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  joins() ? op.callBoxed(stack)
          : op.redispatchBoxed((keys & kBeyondAutograd).add(c10::DispatchKey::AutogradOther), stack);
}
// An op that is made of others has one kernel for all keys.
void pass_composite_gate(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  joins() ? op.callBoxed(stack) : op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
}

void put_up_gates() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Never taken down: another thread may be passing.
    const auto library = [](c10::DispatchKey key) {
      return new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    };
    torch::Library* const backend_select = library(c10::DispatchKey::BackendSelect);
    torch::Library* const autograd[] = {library(c10::DispatchKey::AutogradCPU),
                                        library(c10::DispatchKey::AutogradCUDA)};
    for (const std::string& name : invariance::covered_ops()) {
      const auto op = *find_overload(name);
      const bool is_composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
      for (torch::Library* const m : autograd) {
        m->impl(name.c_str(), is_composite ? torch::CppFunction::makeFromBoxedFunction<&pass_composite_gate>()
                                           : torch::CppFunction::makeFromBoxedFunction<&pass_autograd_gate>());
      }
      backend_select->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&pass_backend_gate>());
    }
  });
}

// ---- contexts

// A context is entered and left by ops, so that torch.compile can trace one that lies inside a function: it records
// them as calls, and runs them while it traces what lies between. Where it only asks for shapes they do nothing, since
// that may end between the two.
bool is_asking_for_shapes() { return is_tracing() && !traces_a_graph(); }

void enter_batch_invariant(std::string_view /*version*/) {
  if (is_asking_for_shapes()) return;
  ++(traces_a_graph() ? state.traced : state.contexts);
  update_thread();
}

void leave_batch_invariant() {
  if (is_asking_for_shapes()) return;
  if (traces_a_graph()) {
    // After a graph break another graph leaves what this one has entered, each as often as it is traced.
    if (state.traced > 0) --state.traced;
  } else {
    TORCH_CHECK(state.contexts > 0, "batch_invariant: left in a thread that has not entered it");
    --state.contexts;
  }
  update_thread();
}

TORCH_LIBRARY_IMPL(conv2d_ext, CompositeImplicitAutograd, m) {
  m.impl("enter_batch_invariant", enter_batch_invariant);
  m.impl("leave_batch_invariant", leave_batch_invariant);
}

}  // namespace

void enable_batch_invariant() {
  put_up_gates();
  process_enabled = true;
  state.joined = true;
  update_thread();
}

void disable_batch_invariant() {
  process_enabled = false;
  state.joined = false;
  update_thread();
}

bool is_batch_invariant() { return in_contexts() || (process_enabled && !state.kept_out); }

void leave_traced_contexts() {
  if (state.traced == 0) return;
  state.traced = 0;
  update_thread();
}

InvarianceState swap_invariance_state(const InvarianceState& next) {
  const InvarianceState before = state;
  state = next;
  update_thread();
  return before;
}

bool is_enabled_in_process() { return process_enabled; }

}  // namespace conv2d_ext
