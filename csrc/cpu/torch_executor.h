// PyTorch's threads as the engines' workers, and its errors.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <new>

#include "base/executor.h"
#include "float_environment.h"

namespace conv2d_ext::cpu {

inline int available_threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

// Neighbouring items, which a worker takes one by one.
struct alignas(64) ItemRange {
  std::atomic<int64_t> next;
  int64_t end;
};

// Each worker begins with a range of items of its own. Neighbouring items share operands, and a call that is repeated
// finds them in the caches of the same core. Items may take unequal times: a worker that has none left takes those of
// other ranges. at::parallel_for carries a worker's exception to the caller.
inline void run_items(int64_t items, void* context, void (*body)(void* context, int64_t item)) {
  const int64_t workers = std::min<int64_t>(items, available_threads());
  if (workers <= 1) return kSerial.run(items, context, body);
  const FloatEnvironment environment;
  constexpr int64_t kMostRanges = 64;  // more workers share them
  ItemRange ranges[kMostRanges];
  const int64_t count = std::min(workers, kMostRanges);
  for (int64_t r = 0; r < count; ++r) {
    ranges[r].next.store(r * items / count, std::memory_order_relaxed);
    ranges[r].end = (r + 1) * items / count;
  }
  at::parallel_for(0, workers, 1, [&](int64_t worker, int64_t) {
    const FloatEnvironmentScope scope(environment);
    for (int64_t r = 0; r < count; ++r) {
      ItemRange& range = ranges[(worker + r) % count];
      for (int64_t item = range.next++; item < range.end; item = range.next++) {
        body(context, item);
      }
    }
  });
}

inline Executor executor() { return {available_threads(), run_items}; }

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

}  // namespace conv2d_ext::cpu
