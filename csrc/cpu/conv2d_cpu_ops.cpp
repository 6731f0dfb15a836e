// The dispatcher's CPU kernels: tensors become raw pointers and strides, PyTorch's threads the engines' workers.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <optional>
#include <thread>
#include <new>

#include "../conv2d_device_ops.h"
#include "../conv2d_tensors.h"
#include "base/huge_pages.h"
#include "conv2d_cpu.h"
#include "float_environment.h"

namespace conv2d_ext::cpu {
namespace {

using at::Tensor;

// ---- threads

int available_threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

// Neighbouring items, which a worker takes one by one.
struct alignas(64) ItemRange {
  std::atomic<int64_t> next;
  int64_t end;
};

// Each worker has a range of items: a repeated call finds their data in that core's caches, and neighbours share
// operands. Items may be uneven: a worker that is done takes items from other ranges.
// at::parallel_for carries a worker's exception to the caller.
void run_items(int64_t items, void* context, void (*body)(void* context, int64_t item)) {
  const int64_t workers = std::min<int64_t>(items, available_threads());
  if (workers <= 1) {
    for (int64_t item = 0; item < items; ++item) {
      body(context, item);
    }
    return;
  }
  std::fenv_t environment;
  std::fegetenv(&environment);
  constexpr int64_t kMostRanges = 64;  // more workers share them
  ItemRange ranges[kMostRanges];
  const int64_t count = std::min(workers, kMostRanges);
  for (int64_t r = 0; r < count; ++r) {
    ranges[r].next.store(r * items / count, std::memory_order_relaxed);
    ranges[r].end = (r + 1) * items / count;
  }
  const std::thread::id caller = std::this_thread::get_id();
  at::parallel_for(0, workers, 1, [&](int64_t worker, int64_t) {
    // The caller, which works as well, keeps the exceptions that it raises.
    std::optional<FloatEnvironmentScope> scope;
    if (std::this_thread::get_id() != caller) scope.emplace(environment);
    for (int64_t r = 0; r < count; ++r) {
      ItemRange& range = ranges[(worker + r) % count];
      for (int64_t item = range.next++; item < range.end; item = range.next++) {
        body(context, item);
      }
    }
  });
}

Executor executor() { return {available_threads(), run_items}; }

// ---- the ops

// Lack of memory is the same exception as PyTorch's, whichever way an op was called: pybind11 would make a MemoryError
// of std::bad_alloc, PyTorch a RuntimeError that names nothing.
template <class Call>
void with_memory_errors(const Call& call) {
  try {
    call();
  } catch (const std::bad_alloc&) {
    TORCH_CHECK_WITH(OutOfMemoryError, false,
                     "conv2d_ext: not enough memory: beside its result a call needs up to 4 MiB a thread");
  }
}

struct Cpu {
  static void forward(const Conv2dProblem& problem, const Tensor& input, const Tensor& weight, const Tensor& bias,
                      const Tensor& output, bool allow_winograd) {
    with_memory_errors([&] {
      ask_for_huge_pages(output.mutable_data_ptr(), output.nbytes());
      cpu::forward(problem, {to_dtype(input.scalar_type()), allow_winograd}, view(input), view(weight),
                   bias.defined() ? Bias{bias.const_data_ptr(), bias.stride(0)} : Bias{}, mutable_view(output),
                   executor());
    });
  }

  static void grad_input(const Conv2dProblem& problem, const Tensor& grad_output, const Tensor& weight,
                         const Tensor& result, bool allow_winograd) {
    with_memory_errors([&] {
      ask_for_huge_pages(result.mutable_data_ptr(), result.nbytes());
      cpu::grad_input(problem, {to_dtype(weight.scalar_type()), allow_winograd}, view(grad_output), view(weight),
                      mutable_view(result), executor());
    });
  }

  static void grad_weight(const Conv2dProblem& problem, const Tensor& grad_output, const Tensor& input,
                          const Tensor& result) {
    with_memory_errors([&] {
      cpu::grad_weight(problem, to_dtype(input.scalar_type()), view(grad_output), view(input), mutable_view(result),
                       executor());
    });
  }

  static void grad_bias(const Tensor& grad_output, const Tensor& result) {
    with_memory_errors([&] {
      const TensorSizes size{grad_output.dim() == 4 ? grad_output.size(0) : 1, grad_output.size(-3),
                             grad_output.size(-2), grad_output.size(-1)};
      cpu::grad_bias(size, to_dtype(grad_output.scalar_type()), view(grad_output), result.mutable_data_ptr(),
                     executor());
    });
  }

  static void matmul(const Tensor& mat1, const Tensor& mat2, const Tensor& bias, const Tensor& result) {
    with_memory_errors([&] {
      ask_for_huge_pages(result.mutable_data_ptr(), result.nbytes());
      cpu::matmul(matmul_sizes(mat1, mat2), to_dtype(mat1.scalar_type()), matrix_view(mat1), matrix_view(mat2),
                  bias.defined() ? Bias{bias.const_data_ptr(), bias.stride(0)} : Bias{}, mutable_matrix_view(result),
                  executor());
    });
  }
};

using Ops = DeviceOps<Cpu>;

TORCH_LIBRARY_IMPL(conv2d_ext, CPU, m) { Ops::register_ops(m); }

// Not to compute, but so that the checks, and not the dispatcher, say what is wrong with these.
TORCH_LIBRARY_IMPL(conv2d_ext, SparseCPU, m) { Ops::register_ops(m); }
TORCH_LIBRARY_IMPL(conv2d_ext, SparseCsrCPU, m) { Ops::register_ops(m); }
TORCH_LIBRARY_IMPL(conv2d_ext, MkldnnCPU, m) { Ops::register_ops(m); }
TORCH_LIBRARY_IMPL(conv2d_ext, QuantizedCPU, m) { Ops::register_ops(m); }

}  // namespace
}  // namespace conv2d_ext::cpu
