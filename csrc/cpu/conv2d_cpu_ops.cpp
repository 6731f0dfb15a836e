// The dispatcher's CPU kernels: tensors become raw pointers and strides, PyTorch's threads the engines' workers.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>

#include "../conv2d_device_ops.h"
#include "../conv2d_tensors.h"
#include "conv2d_cpu.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace conv2d_ext::cpu {
namespace {

using at::Tensor;

// ---- threads

// Denormals are flushed per thread. A worker takes the caller's setting while it works, so that the bits of a
// result don't depend on which thread computed it.
class FlushDenormalScope {
 public:
#if defined(__SSE2__)
  static unsigned current() { return _mm_getcsr() & kFlushBits; }
  explicit FlushDenormalScope(unsigned wanted) : before_(_mm_getcsr()) { _mm_setcsr((before_ & ~kFlushBits) | wanted); }
  ~FlushDenormalScope() { _mm_setcsr((_mm_getcsr() & ~kFlushBits) | (before_ & kFlushBits)); }
#else
  static unsigned current() { return 0; }
  explicit FlushDenormalScope(unsigned) {}
#endif
  FlushDenormalScope(const FlushDenormalScope&) = delete;
  FlushDenormalScope& operator=(const FlushDenormalScope&) = delete;

 private:
#if defined(__SSE2__)
  static constexpr unsigned kFlushBits = 0x8040;  // flush to zero, denormals are zero
  unsigned before_;
#endif
};

int available_threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

// Items may be uneven: each worker takes the next one when it is free. at::parallel_for carries a worker's
// exception to the caller.
void run_items(int64_t items, void* context, void (*body)(void* context, int64_t item)) {
  const int64_t workers = std::min<int64_t>(items, available_threads());
  if (workers <= 1) {
    for (int64_t item = 0; item < items; ++item) {
      body(context, item);
    }
    return;
  }
  const unsigned flush_denormal = FlushDenormalScope::current();
  std::atomic<int64_t> next{0};
  at::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    const FlushDenormalScope scope(flush_denormal);
    for (int64_t item = next++; item < items; item = next++) {
      body(context, item);
    }
  });
}

Executor executor() { return {available_threads(), run_items}; }

// ---- the ops

struct Cpu {
  static void forward(const Conv2dProblem& problem, const Tensor& input, const Tensor& weight, const Tensor& bias,
                      const Tensor& output) {
    cpu::forward(problem, to_dtype(input.scalar_type()), view(input), view(weight),
                 bias.defined() ? bias.const_data_ptr() : nullptr, bias.defined() ? bias.stride(0) : 0,
                 mutable_view(output), executor());
  }

  static void grad_input(const Conv2dProblem& problem, const Tensor& grad_output, const Tensor& weight,
                         const Tensor& result) {
    cpu::grad_input(problem, to_dtype(weight.scalar_type()), view(grad_output), view(weight), mutable_view(result),
                    executor());
  }

  static void grad_weight(const Conv2dProblem& problem, const Tensor& grad_output, const Tensor& input,
                          const Tensor& result) {
    cpu::grad_weight(problem, to_dtype(input.scalar_type()), view(grad_output), view(input), mutable_view(result),
                     executor());
  }

  static void grad_bias(const Tensor& grad_output, const Tensor& result) {
    cpu::grad_bias(grad_output.dim() == 4 ? grad_output.size(0) : 1, grad_output.size(-3), grad_output.size(-2),
                   grad_output.size(-1), to_dtype(grad_output.scalar_type()), view(grad_output),
                   result.mutable_data_ptr(), executor());
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
