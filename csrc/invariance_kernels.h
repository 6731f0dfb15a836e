// What kernels of the mode (invariance.h) share: which calls they leave to PyTorch, and how they are registered. Each
// file of kernels has its own block TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m).
#pragma once

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <omp.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "invariance.h"
#include "matmul.h"
#include "op_checks.h"
#include "tracing.h"

namespace conv2d_ext::invariance {

using at::Scalar;
using at::Tensor;
using c10::DispatchKeySet;
using c10::SymInt;
using c10::SymIntArrayRef;

const DispatchKeySet kBelow(DispatchKeySet::FULL_AFTER, kInvarianceKey);

// Whether a graph is traced, in which this call, a function of PyTorch's made of others, is to be taken apart.
bool is_taken_apart(DispatchKeySet keys);

// Whether this thread followed a process that has left the mode, and is in no context: it leaves as well.
bool has_left();

// A context for calls of this thread, also where a TorchDispatchMode or a tensor's class is at work, which PyTorch
// calls without the keys above them.
class InTheMode {
 public:
  InTheMode();
  ~InTheMode();
  InTheMode(const InTheMode&) = delete;
  InTheMode& operator=(const InTheMode&) = delete;

 private:
  const bool excluded_;
  const c10::impl::IncludeDispatchKeyGuard included_;
};

// Whether the mode leaves a call of this op to the kernel below: PyTorch is to cast its arguments first, after which
// the call comes back; or this thread is in the mode no longer.
inline bool leaves(const c10::OperatorHandle& op, DispatchKeySet keys) {
  for (const auto key : {c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA}) {
    if (keys.has(key) && op.hasKernelForDispatchKey(key)) {
      return true;
    }
  }
  return has_left();
}
template <class Op>
bool leaves(DispatchKeySet keys) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
  return leaves(op, keys);
}

// The kernel below of a function that PyTorch makes of others, whose results are tensors.
template <class Op, class... Arguments>
auto redispatch_composite(DispatchKeySet keys, const Arguments&... arguments) {
  using Result = decltype(Op::redispatch(keys, arguments...));
  if (!is_taken_apart(keys)) return Op::redispatch(keys & kBelow, arguments...);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
  torch::jit::Stack stack;
  torch::jit::push(stack, arguments...);
  op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, stack);
  if constexpr (std::is_same_v<Result, Tensor>) {
    return torch::jit::pop(stack).toTensor();
  } else {
    Result result;
    std::apply(
        [&](auto&... tensors) {
          size_t number = 0;
          ((tensors = torch::jit::peek(stack, number++, sizeof...(tensors)).toTensor()), ...);
        },
        result);
    return result;
  }
}

// Named dimensions, which torch 2.15 no longer has.
template <class T>
auto has_names(const T& tensor, int) -> decltype(tensor.has_names()) {
  return tensor.has_names();
}
template <class T>
bool has_names(const T&, long) {
  return false;
}

inline bool is_strided(const Tensor& tensor) {
  return tensor.defined() && tensor.layout() == c10::kStrided && !tensor.is_nested() && !has_names(tensor, 0);
}
inline bool is_on_cpu(const Tensor& tensor) { return is_strided(tensor) && tensor.device().is_cpu(); }
// Where this library has kernels.
inline bool is_dense(const Tensor& tensor) {
  return is_strided(tensor) &&
         (tensor.device().is_cpu() ||
          (tensor.device().is_cuda() && matmul_op().hasKernelForDispatchKey(c10::DispatchKey::CUDA)));
}

inline bool is_summed(at::ScalarType dtype) {
  return is_real(dtype) || dtype == at::kComplexFloat || dtype == at::kComplexDouble;
}

// Tensors that our ops take together. (Integers are exact wherever they are summed.)
template <class... Others>
bool takes(const Tensor& first, const Others&... others) {
  return is_dense(first) && is_summed(first.scalar_type()) &&
         ((is_dense(others) && others.scalar_type() == first.scalar_type() && others.device() == first.device()) &&
          ...);
}

// Real floating-point numbers on the CPU, for kernels that the CPU alone has.
template <class... Others>
bool takes_on_cpu(const Tensor& first, const Others&... others) {
  return is_on_cpu(first) && is_real(first.scalar_type()) &&
         ((is_on_cpu(others) && others.scalar_type() == first.scalar_type()) && ...);
}

// Whether a result can be written where the caller wants it. If not, PyTorch has to say why.
inline bool can_write(const Tensor& out, const Tensor& like) {
  return is_dense(out) && out.scalar_type() == like.scalar_type() && out.device() == like.device();
}
// Whether a transform of torch.func is at work. Its tensors show the level above all others; one below may record.
inline bool in_transform() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}
// Whether a gradient may be wanted of a call on these. A trace of torch.jit is used with other tensors than those it
// was made with, so it is always made as if.
template <class... Inputs>
bool may_record(const Inputs&... inputs) {
  return in_transform() || is_jit_tracing() || (c10::GradMode::is_enabled() && (inputs.requires_grad() || ...));
}
template <class... Inputs>
bool records_gradients(const Tensor& out, const Inputs&... inputs) {
  // Below autograd PyTorch's own kernels call those with `out`.
  return c10::GradMode::is_enabled() &&
         !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality) &&
         (out.requires_grad() || (inputs.requires_grad() || ...));
}
inline Tensor& write(Tensor& out, const Tensor& result) {
  at::native::resize_output_symint(out, result.sym_sizes());
  return out.copy_(result);
}

// While it lives, kernels that this thread calls run on it alone. (OpenMP's number of threads is the thread's own, and
// at::parallel_for asks for it. at::get_num_threads sets it in a thread that has not asked before, which a kernel would
// do else, in place of the one set here.)
class OneThread {
 public:
  explicit OneThread(bool asked) : threads_(asked ? at::get_num_threads() : 0) {
    if (asked) omp_set_num_threads(1);
  }
  ~OneThread() {
    if (threads_ != 0) omp_set_num_threads(threads_);
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int threads_;
};

// The names of all ops that the mode has kernels for, as in "aten::mm.out".
std::vector<std::string>& covered_ops();

// The op of such a name; none in versions of PyTorch that don't have it.
std::optional<c10::OperatorHandle> find_overload(const std::string& name);

// How PyTorch's kernel of an op is called where no graph is traced (invariance_eager.cpp). keys: those below the mode.
using EagerCall = void (*)(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack);
EagerCall eager_call(const std::string& aten_name);

template <class Kernel>
std::string register_kernel(torch::Library& m) {
  const std::string name = Kernel::Op::name, overload = Kernel::Op::overload_name;
  const std::string full_name = overload.empty() ? name : name + "." + overload;
  m.impl(full_name.c_str(), TORCH_FN(Kernel::call));
  return full_name;
}

template <class... Kernels>
void cover_all(torch::Library& m) {
  (covered_ops().push_back(register_kernel<Kernels>(m)), ...);
}

// Kernels that change an argument of some calls. What computes stays PyTorch's.
template <class... Kernels>
void adjust_all(torch::Library& m) {
  (register_kernel<Kernels>(m), ...);
}

}  // namespace conv2d_ext::invariance
