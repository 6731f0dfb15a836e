// Work items, and the threads that they run on.
#pragma once

#include <cstdint>

namespace conv2d_ext::cpu {

// How the engines reach the caller's thread pool. run() calls body(context, item) once for every item in
// [0, items), from up to num_threads threads, and returns when all are done.
struct Executor {
  int num_threads;
  void (*run)(int64_t items, void* context, void (*body)(void* context, int64_t item));
};

// Without threads.
inline constexpr Executor kSerial{1, [](int64_t items, void* context, void (*body)(void*, int64_t)) {
                                    for (int64_t item = 0; item < items; ++item) body(context, item);
                                  }};

#if defined(CONV2D_WATCHED_RUNS)
// Defined by a test, to see every run of a driver: `body` is the driver's.
void watch_run(int64_t items, void (*body)(void*, int64_t));
#endif

inline void run_items(const Executor& executor, int64_t items, void* context, void (*body)(void*, int64_t)) {
#if defined(CONV2D_WATCHED_RUNS)
  watch_run(items, body);
#endif
  if (items == 1) {
    body(context, 0);
  } else if (items > 1) {
    executor.run(items, context, body);
  }
}

}  // namespace conv2d_ext::cpu
