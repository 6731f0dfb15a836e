// The body of engine_avx512_bf16.cpp, engine_amx.cpp and engine_amx_emulated.cpp: the tasks whose steps take several
// products of bfloat16, in pairs or in tiles.
#pragma once

#include "engine.h"
#if defined(CONV2D_AMX)
#include "../drivers/amx.h"
#else
#include "../drivers/gemm.h"
#include "../drivers/rows.h"
#endif
#include "../drivers/grad_weight_steps.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

#if defined(CONV2D_AMX)
inline void run_task(DType, const Task& task, const Executor& executor) {
  const int threads = executor.num_threads;
  if (task.driver == Driver::kWeightAmx) {
    using Driver = GradWeightCall<BFloat16, float, WeightLanes::kChannels>;
    return run_chunks<float>(Driver(*task.call, threads), executor);
  }
  AmxCall call{*task.gemm, threads};
  if (call.shares() == 0) return run_all(call, executor);
  const ScratchMemory workspace = allocate_scratch(call.tiling.shared_bytes);
  call.shared = static_cast<BFloat16Block*>(workspace.get());
  run_items(executor, call.shares(), &call, &AmxCall::share);
  run_all(call, executor);
}
inline int rows_of(DType, int64_t vectors) { return int(amx_row_tiles(vectors) * kTileRows); }
#else
inline void run_task(DType, const Task& task, const Executor& executor) {
  const int threads = executor.num_threads;
  if (task.driver == Driver::kColumns) {
    run_all(RowCall<BFloat16, float, Along::kK>{*task.rows, threads}, executor);
  } else if (task.driver == Driver::kWeightPairs) {
    run_chunks<float>(GradWeightCall<BFloat16, float, WeightLanes::kChannels>(*task.call, threads), executor);
  } else if (task.driver == Driver::kPairsOfGroups) {
    run_all(ConvCall<BFloat16, float, true>{*task.gemm, threads}, executor);
  } else {
    run_all(ConvCall<BFloat16, float, false>{*task.gemm, threads}, executor);
  }
}
inline int rows_of(DType, int64_t vectors) { return ukernels_for<float, false>(vectors).rows; }
#endif
inline IsaShape shape_of(DType) { return {vector_shape<float>()}; }

// Made while compiling, as every engine.
constexpr Engine make_engine() { return {kIsaName, kIsaName, run_task, nullptr, shape_of, rows_of}; }

}  // namespace conv2d_ext::cpu::CONV2D_ISA
