// The body of engine_avx512_bf16.cpp, engine_amx.cpp and engine_amx_emulated.cpp: the tasks whose steps take several
// products of bfloat16, in pairs or in tiles.
#pragma once

#include "vec.h"

#if defined(CONV2D_BFLOAT16_PAIRS) || defined(CONV2D_AMX)
#include "../drivers/gemm.h"
#include "../drivers/rows.h"
#include "engine.h"
#if defined(CONV2D_AMX)
#include "../drivers/grad_weight_amx.h"
#endif

namespace conv2d_ext::cpu::CONV2D_ISA {

inline void run_task(DType, const Task& task, const Executor& executor) {
  const int threads = executor.num_threads;
  using Gemm = ConvCall<BFloat16, float, false>;
#if defined(CONV2D_AMX)
  if (task.driver == Driver::kWeightAmx) {
    return GradWeightCall<BFloat16, float, WeightLanes::kChannels>(*task.call, threads).run(executor);
  }
  Gemm call(*task.gemm, threads);
  if (call.shares() == 0) return run_all(call, executor);
  const CallWorkspace workspace(call.tiling.shared_bytes);
  call.shared = static_cast<BFloat16Block*>(workspace.data());
  run_items(executor, call.shares(), &call, &Gemm::share);
  run_all(call, executor);
#else
  if (task.driver == Driver::kColumns) {
    run_all(RowCall<BFloat16, float, Along::kK>(*task.rows, threads), executor);
  } else {
    run_all(Gemm(*task.gemm, threads), executor);
  }
#endif
}
inline IsaShape shape_of(DType) {
  IsaShape shape{};
  shape.vector = vector_shape<float>();
  return shape;
}
inline int rows_of(DType, int64_t vectors) { return ConvCall<BFloat16, float, false>::ukernel_rows(vectors); }

constexpr Engine make_steps() {
  Engine engine{};
  engine.isa = engine.kernels = kIsaName;
  engine.run = run_task;
  engine.shape = shape_of;
  engine.rows = rows_of;
  return engine;
}

// `base` with them: it has the engine of all other tasks.
inline Engine make_engine(const Engine& base) {
  static constexpr Engine kSteps = make_steps();
  Engine engine = base;
  engine.isa = kIsaName;
  (kTakesBlocks<float> ? engine.amx : engine.pairs) = &kSteps;
  return engine;
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
#endif
