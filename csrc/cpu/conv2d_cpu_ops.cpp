// The dispatcher's CPU kernels: check, allocate the result, hand raw pointers and strides to the engines.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>

#include "../conv2d_checks.h"
#include "../conv2d_format.h"
#include "../conv2d_tensors.h"
#include "conv2d_cpu.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace conv2d_ext::cpu {
namespace {

using at::Tensor;
using c10::IntArrayRef;

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

Tensor conv2d_cpu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
                  IntArrayRef padding, IntArrayRef dilation, int64_t groups) {
  const auto problem =
      check_conv2d<int64_t>(input, weight, bias, make_params<int64_t>(stride, padding, dilation, groups));
  const auto output =
      empty_activation<int64_t>(problem.batch, result_channels<int64_t>(problem), problem.out_h, problem.out_w,
                                input.dim() == 3, output_is_channels_last(input, weight), input.options());
  if (output.numel() != 0) {
    const bool has_bias = bias.has_value() && bias->defined();
    forward(problem, to_dtype(input.scalar_type()), view(input), view(weight),
            has_bias ? bias->const_data_ptr() : nullptr, has_bias ? bias->stride(0) : 0, mutable_view(output),
            executor());
  }
  return output;
}

Tensor conv2d_grad_input_cpu(const Tensor& grad_output, const Tensor& weight, IntArrayRef input_size,
                             IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups,
                             bool channels_last) {
  const auto problem = check_conv2d_grad_input<int64_t>(grad_output, weight, input_size,
                                                        make_params<int64_t>(stride, padding, dilation, groups));
  const auto result = empty_activation<int64_t>(problem.batch, problem.in_channels, problem.in_h, problem.in_w,
                                                input_size.size() == 3, channels_last, grad_output.options());
  if (result.numel() != 0) {
    grad_input(problem, to_dtype(weight.scalar_type()), view(grad_output), view(weight), mutable_view(result),
               executor());
  }
  return result;
}

Tensor conv2d_grad_weight_cpu(const Tensor& grad_output, const Tensor& input, IntArrayRef weight_size,
                              IntArrayRef weight_stride, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                              int64_t groups) {
  const auto problem = check_conv2d_grad_weight<int64_t>(grad_output, input, weight_size,
                                                         make_params<int64_t>(stride, padding, dilation, groups));
  const auto result = checked_weight_strides(at::empty_strided(weight_size, weight_stride, grad_output.options()));
  if (input.numel() == 0) {
    result.zero_();
  } else {
    grad_weight(problem, to_dtype(input.scalar_type()), view(grad_output), view(input), mutable_view(result),
                executor());
  }
  return result;
}

Tensor conv2d_grad_bias_cpu(const Tensor& grad_output) {
  check_conv2d_grad_bias(grad_output);
  const auto channels = grad_output.size(-3);
  if (grad_output.numel() == 0) {
    return at::zeros({channels}, grad_output.options());
  }
  const auto result = at::empty({channels}, grad_output.options());
  grad_bias(grad_output.dim() == 4 ? grad_output.size(0) : 1, channels, grad_output.size(-2), grad_output.size(-1),
            to_dtype(grad_output.scalar_type()), view(grad_output), result.mutable_data_ptr(), executor());
  return result;
}

void register_ops(torch::Library& m) {
  m.impl("conv2d", conv2d_cpu);
  m.impl("conv2d_grad_input", conv2d_grad_input_cpu);
  m.impl("conv2d_grad_weight", conv2d_grad_weight_cpu);
  m.impl("conv2d_grad_bias", conv2d_grad_bias_cpu);
}

TORCH_LIBRARY_IMPL(conv2d_ext, CPU, m) { register_ops(m); }

// Not to compute, but so that the checks, and not the dispatcher, say what is wrong with these.
TORCH_LIBRARY_IMPL(conv2d_ext, SparseCPU, m) { register_ops(m); }
TORCH_LIBRARY_IMPL(conv2d_ext, SparseCsrCPU, m) { register_ops(m); }
TORCH_LIBRARY_IMPL(conv2d_ext, MkldnnCPU, m) { register_ops(m); }
TORCH_LIBRARY_IMPL(conv2d_ext, QuantizedCPU, m) { register_ops(m); }

}  // namespace
}  // namespace conv2d_ext::cpu
