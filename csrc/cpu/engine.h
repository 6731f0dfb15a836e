// What an instruction set provides, and what the engines need from outside.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "tiling.h"
#include "conv2d_cpu.h"
#include "depthwise.h"
#include "few_planes.h"
#include "one_pixel.h"
#include "phases.h"

namespace conv2d_ext::cpu {

// One table for each instruction set; a null engine means "not compiled into this build".
struct Engine {
  const char* isa;
  // The instruction set that its kernels are compiled for: its own, or one that it includes. Those of integers.
  const char* kernels;
  const char* integer_kernels;
  void (*conv)(DType, const ConvGemm&, const Executor&);
  void (*grad_weight)(const Conv2dProblem&, DType, ConstTensorView, ConstTensorView, TensorView, const Executor&);
  void (*grad_bias)(int64_t, int64_t, int64_t, int64_t, DType, ConstTensorView, void*, const Executor&);
  void (*strided_grad_input)(const Conv2dProblem&, DType, ConstTensorView, ConstTensorView, TensorView,
                             const Executor&);                         // where is_depthwise_strided
  void (*joined_phases)(DType, const JoinedPhases&, const Executor&);  // grad_input, where join_phases
  void (*dot_products)(DType, const ConvGemm&, const Executor&);     // forward of one result pixel, where sums_as_dots
  void (*row_products)(DType, const RowProducts&, const Executor&);  // gradients of one, where takes_rows
  VectorShape (*vector_shape)(DType);
  DotKernelShape (*dot_shape)(DType);
  int (*rows)(DType, int64_t vectors);  // MR, of the micro-kernels that many vectors wide
  // What bfloat16 problems that take pairs (takes_pairs) go to: an engine with `conv` alone. Or nullptr.
  const Engine* pairs;
};
const Engine* portable_engine();
const Engine* avx2_engine();
const Engine* avx512_engine();
const Engine* avx512_bf16_engine();

// Whether this machine runs an instruction set.
bool machine_has(const char* isa);

// The one in use; isa_name() says which. (It and the memory below are apart, in isa.cpp and scratch.cpp, for a test to
// put others in their place.)
const Engine& engine();

// The engine that takes a GEMM, and the GEMM as that engine takes it.
struct EngineChoice {
  const Engine& engine;
  ConvGemm gemm;
};
EngineChoice choose_engine(DType dtype, const ConvGemm& gemm);

// join_phases for the engine in use, as far as it has kernels for the dtype.
bool joins_phases(const Conv2dProblem& problem, DType dtype, const int64_t* grad_output, const int64_t* weight,
                  const int64_t* grad_input, JoinedPhases& phases);

// This thread's scratch memory, at least `bytes` large, on a 64-byte border. It is kept for the thread's life, so that
// calls of varying shapes don't churn the heap, and is at most limits::kMaxScratchBytes.
void* thread_scratch(int64_t bytes);

// Memory shared by the threads of one call.
class CallWorkspace {
 public:
  explicit CallWorkspace(int64_t bytes);
  ~CallWorkspace();
  CallWorkspace(const CallWorkspace&) = delete;
  CallWorkspace& operator=(const CallWorkspace&) = delete;
  void* data() const { return data_; }

 private:
  void* data_;
};

#if defined(CONV2D_WATCHED_RUNS)
// A test's: hears of every run of a driver, which `body` tells.
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
