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
  const DType bit = is_integer(dtype) ? DType::kInt8 : dtype;
  return (kHasIntegers || !is_integer(dtype)) && (CONV2D_COMPILED_DTYPES >> int(bit) & 1) != 0;
}

template <DType kDType, class S, class Call>
CONV2D_INLINE auto call_compiled(const Call& call) {
  if constexpr (is_compiled(kDType)) {
    return call(S{});
  } else {
    __builtin_unreachable();
    return decltype(call(float{}))();
  }
}

// call(S{}), S a dtype's storage type. Signed integers are computed as unsigned ones: the same bits, and wrap-around is
// defined. An engine whose integers are another one's has none (Engine::integers).
template <class Call>
auto with_storage(DType dtype, const Call& call) {
  if (dtype == DType::kFloat32) return call_compiled<DType::kFloat32, float>(call);
  if (dtype == DType::kFloat64) return call_compiled<DType::kFloat64, double>(call);
  if (dtype == DType::kBFloat16) return call_compiled<DType::kBFloat16, BFloat16>(call);
  if (dtype == DType::kFloat16) return call_compiled<DType::kFloat16, Float16>(call);
  if (dtype == DType::kComplex64) return call_compiled<DType::kComplex64, Complex<float>>(call);
  if (dtype == DType::kComplex128) return call_compiled<DType::kComplex128, Complex<double>>(call);
  if (dtype == DType::kInt16) return call_compiled<DType::kInt16, uint16_t>(call);
  if (dtype == DType::kInt32) return call_compiled<DType::kInt32, uint32_t>(call);
  if (dtype == DType::kInt64) return call_compiled<DType::kInt64, uint64_t>(call);
  return call_compiled<DType::kInt8, uint8_t>(call);  // or kUInt8
}

template <class S>
void run_task_of(const Task& task, const Executor& executor) {
  using T = ComputeType<S>;
  const int threads = executor.num_threads;
  const Driver driver = task.driver;
  if constexpr (kIsFloating<S>) {
    if (driver == Driver::kDot) return run_all(DotCall<S>{*task.gemm, threads}, executor);
  }
  if constexpr (std::is_same_v<T, float>) {
    if (driver == Driver::kWinograd) return run_all(WinogradCall<S, T>{*task.gemm, threads}, executor);
  }
  // Drivers that the portable engine, and other types, lack: planning gives them none (VectorShape::is_native).
  if constexpr (kHasTranspose<T>) {
    if (driver == Driver::kRows) return run_all(RowCall<S, T, Along::kLanes>{*task.rows, threads}, executor);
    if (driver == Driver::kColumns) return run_all(RowCall<S, T, Along::kK>{*task.rows, threads}, executor);
    if (driver == Driver::kStrided) return run_all(StridedCall<S, T>(*task.call, threads), executor);
    if (driver == Driver::kPhases && task.phases->over_groups) {
      return run_all(PhasesCall<S, T, true>(*task.phases, threads), executor);
    }
    if (driver == Driver::kPhases) return run_all(PhasesCall<S, T, false>(*task.phases, threads), executor);
    if (driver == Driver::kDepthwise) return run_all(DepthwiseCalls<S, T>(task, threads), executor);
    if (driver == Driver::kPlanes) return run_all(FewPlanesCall<S, T>{*task.gemm, threads}, executor);
    if (driver == Driver::kPixels) return run_all(PixelCall<S, T>{*task.gemm, threads}, executor);
    if (driver == Driver::kWeightDepthwise) {
      return run_chunks<T>(DepthwiseWeightCall<S, T>(*task.call, threads), executor);
    }
  }
  if (driver == Driver::kGroups) return run_all(ConvCall<S, T, true>{*task.gemm, threads}, executor);
  if (driver == Driver::kGemm) return run_all(ConvCall<S, T, false>{*task.gemm, threads}, executor);
  if (driver == Driver::kWeightGroups) {
    return run_chunks<T>(GradWeightCall<S, T, WeightLanes::kGroups>(*task.call, threads), executor);
  }
  if (driver == Driver::kWeightTransposed || driver == Driver::kWeightGemm) {
    return run_chunks<T>(GradWeightCall<S, T, WeightLanes::kChannels>(*task.call, threads), executor);
  }
  // kPadding is no instruction set's, and Engine::pairs and Engine::amx run their own.
  CONV2D_EXT_ASSERT(false);
}

inline void run_task(DType dtype, const Task& task, const Executor& executor) {
  with_storage(dtype, [&](auto storage) { run_task_of<decltype(storage)>(task, executor); });
}

inline void grad_bias(const TensorSizes& size, DType dtype, ConstTensorView grad_output, void* result,
                      const Executor& executor) {
  with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    run_all(GradBiasCall<S>{size, grad_output, static_cast<S*>(result), executor.num_threads}, executor);
  });
}

inline IsaShape shape_of(DType dtype) {
  return with_storage(dtype, [](auto storage) {
    using S = decltype(storage);
    IsaShape shape{vector_shape<ComputeType<S>>()};
    if constexpr (kIsFloating<S>) shape.dot = dot_shape<ComputeType<S>>();
    return shape;
  });
}

inline int rows_of(DType dtype, int64_t vectors) {
  return with_storage(dtype,
                      [&](auto storage) { return ukernels_for<ComputeType<decltype(storage)>, false>(vectors).rows; });
}

// Made while compiling: it must not run on a machine that lacks the instruction set.
constexpr Engine make_engine(const Engine* (*integers)() = nullptr) {
  return {kIsaName, kIsaName, run_task, grad_bias, shape_of, rows_of, integers};
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
