// The body of engine_amx.cpp and engine_amx_emulated.cpp: the tasks that AMX tiles take.
#pragma once

#include "vec.h"

#if defined(CONV2D_AMX)
#include "../drivers/gemm.h"
#include "../drivers/grad_weight_amx.h"
#include "engine.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

inline void run_task(DType, const Task& task, const Executor& executor) {
  if (task.driver == Driver::kWeightAmx) {
    return run_grad_weight<BFloat16, float, WeightLanes::kChannels>(*task.call, executor);
  }
  using Call = ConvCall<BFloat16, float, false>;
  Call call(*task.gemm, executor.num_threads);
  if (call.shares() == 0) return run_all(call, executor);
  const CallWorkspace workspace(call.tiling.shared_bytes);
  call.shared = static_cast<BFloat16Block*>(workspace.data());
  run_items(executor, call.shares(), &call, &Call::share);
  run_all(call, executor);
}
inline IsaShape shape_of(DType) {
  IsaShape shape{};
  shape.vector = vector_shape<float>();
  return shape;
}
inline int rows_of(DType, int64_t vectors) { return int(amx_rows(vectors)); }

// `base` with tiles: it has the engine of all other tasks.
inline Engine make_engine(const Engine& base) {
  static constexpr Engine kTiles = [] {
    Engine engine{};
    engine.isa = engine.kernels = kIsaName;
    engine.run = run_task;
    engine.shape = shape_of;
    engine.rows = rows_of;
    return engine;
  }();
  Engine engine = base;
  engine.isa = kIsaName;
  engine.amx = &kTiles;
  return engine;
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
#endif
