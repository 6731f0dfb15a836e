// The body of every engine_<isa>.cpp: tasks to drivers, for each dtype, compiled for one instruction set.
#pragma once

#include "../drivers/depthwise.h"
#include "../drivers/depthwise_weight.h"
#include "../drivers/dot.h"
#include "../drivers/gemm.h"
#include "../drivers/grad_bias.h"
#include "../drivers/grad_weight.h"
#include "../drivers/phases.h"
#include "../drivers/pixels.h"
#include "../drivers/planes.h"
#include "../drivers/rows.h"
#include "../drivers/strided.h"
#include "../drivers/winograd.h"
#include "engine.h"
#include "../kernels/vector_shape.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// A test may compile fewer dtypes, to have them sooner: bits in the order of DType, integers all of one.
#if !defined(CONV2D_COMPILED_DTYPES)
#define CONV2D_COMPILED_DTYPES 127
#endif
constexpr bool is_compiled(DType dtype) {
  return (CONV2D_COMPILED_DTYPES >> (is_integer(dtype) ? int(DType::kInt8) : int(dtype)) & 1) != 0;
}

template <class S>
struct StorageOf {
  using type = S;
};

template <DType kDType, class S, class Call>
CONV2D_INLINE auto call_compiled(const Call& call) {
  if constexpr (is_compiled(kDType)) {
    return call(StorageOf<S>{});
  } else {
    __builtin_unreachable();
    return decltype(call(StorageOf<S>{}))();
  }
}

// call(StorageOf<S>{}), S a dtype's storage type. Signed integers are computed as unsigned ones: the same bits, and
// wrap-around is defined. An engine whose integers are another one's has none (Engine::integers).
template <class Call>
auto with_storage(DType dtype, const Call& call) {
  switch (dtype) {
    case DType::kFloat32:
      return call_compiled<DType::kFloat32, float>(call);
    case DType::kFloat64:
      return call_compiled<DType::kFloat64, double>(call);
    case DType::kBFloat16:
      return call_compiled<DType::kBFloat16, BFloat16>(call);
    case DType::kFloat16:
      return call_compiled<DType::kFloat16, Float16>(call);
    case DType::kComplex64:
      return call_compiled<DType::kComplex64, Complex<float>>(call);
    case DType::kComplex128:
      return call_compiled<DType::kComplex128, Complex<double>>(call);
    default:
      break;
  }
  if constexpr (kHasIntegers) {
    switch (dtype) {
      case DType::kInt8:
      case DType::kUInt8:
        return call_compiled<DType::kInt8, uint8_t>(call);
      case DType::kInt16:
        return call_compiled<DType::kInt8, uint16_t>(call);
      case DType::kInt32:
        return call_compiled<DType::kInt8, uint32_t>(call);
      default:
        return call_compiled<DType::kInt8, uint64_t>(call);
    }
  }
  __builtin_unreachable();
}

template <class S>
void run_task_of(const Task& task, const Executor& executor) {
  using T = ComputeType<S>;
  const int threads = executor.num_threads;
  // Drivers that the portable engine, and other types, lack: planning gives them none (VectorShape::is_native).
  constexpr bool kNative = kHasTranspose<T>;
  switch (task.driver) {
    case Driver::kDot:
      if constexpr (kIsFloating<S>) run_all(DotCall<S>(*task.gemm, threads), executor);
      return;
    case Driver::kRows:
      if constexpr (kNative) run_all(RowCall<S, T, Along::kLanes>(*task.rows, threads), executor);
      return;
    case Driver::kColumns:
      if constexpr (kNative) run_all(RowCall<S, T, Along::kK>(*task.rows, threads), executor);
      return;
    case Driver::kStrided:
      if constexpr (kNative) run_all(StridedCall<S, T>(*task.call, threads), executor);
      return;
    case Driver::kPhases:
      if constexpr (kNative) {
        if (task.phases->over_groups) {
          run_all(PhasesCall<S, T, true>(*task.phases, threads), executor);
        } else {
          run_all(PhasesCall<S, T, false>(*task.phases, threads), executor);
        }
      }
      return;
    case Driver::kWinograd:
      if constexpr (std::is_same_v<T, float>) run_all(WinogradCall<S, T>(*task.gemm, threads), executor);
      return;
    case Driver::kDepthwise:
      if constexpr (kNative) run_all(DepthwiseCalls<S, T>(task, threads), executor);
      return;
    case Driver::kPlanes:
      if constexpr (kNative) run_all(FewPlanesCall<S, T>(*task.gemm, threads), executor);
      return;
    case Driver::kPixels:
      if constexpr (kNative) run_all(PixelCall<S, T>(*task.gemm, threads), executor);
      return;
    case Driver::kGroups:
      run_all(ConvCall<S, T, true>(*task.gemm, threads), executor);
      return;
    case Driver::kGemm:
      run_all(ConvCall<S, T, false>(*task.gemm, threads), executor);
      return;
    case Driver::kWeightDepthwise:
      if constexpr (kNative) run_chunks<T>(DepthwiseWeightCall<S, T>(*task.call, threads), executor);
      return;
    case Driver::kWeightGroups:
      run_chunks<T>(GradWeightCall<S, T, WeightLanes::kGroups>(*task.call, threads), executor);
      return;
    case Driver::kWeightTransposed:
    case Driver::kWeightGemm:
      run_chunks<T>(GradWeightCall<S, T, WeightLanes::kChannels>(*task.call, threads), executor);
      return;
    case Driver::kAmx:  // Engine::amx runs them
    case Driver::kWeightAmx:
    case Driver::kPairsOfGroups:  // Engine::pairs
    case Driver::kPairs:
    case Driver::kWeightPairs:
    case Driver::kPadding:  // no instruction set's
      return;
  }
}

inline void run_task(DType dtype, const Task& task, const Executor& executor) {
  with_storage(dtype, [&](auto storage) { run_task_of<typename decltype(storage)::type>(task, executor); });
}

inline void grad_bias(const TensorSizes& size, DType dtype, ConstTensorView grad_output, void* result,
                      const Executor& executor) {
  with_storage(dtype, [&](auto storage) {
    using S = typename decltype(storage)::type;
    run_all(GradBiasCall<S>{size, grad_output, static_cast<S*>(result), executor.num_threads}, executor);
  });
}

inline IsaShape shape_of(DType dtype) {
  return with_storage(dtype, [](auto storage) {
    using S = typename decltype(storage)::type;
    IsaShape shape{};
    shape.vector = vector_shape<ComputeType<S>>();
    if constexpr (kIsFloating<S>) shape.dot = dot_shape<ComputeType<S>>();
    return shape;
  });
}

inline int rows_of(DType dtype, int64_t vectors) {
  return with_storage(dtype, [&](auto storage) {
    return ukernels_for<ComputeType<typename decltype(storage)::type>, false>(vectors).rows;
  });
}

// Made while compiling: it must not run on a machine that lacks the instruction set.
constexpr Engine make_engine() {
  Engine engine{};
  engine.isa = engine.kernels = kIsaName;
  engine.run = run_task;
  engine.grad_bias = grad_bias;
  engine.shape = shape_of;
  engine.rows = rows_of;
  return engine;
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
