// The body of every engine_<isa>.cpp: the drivers for each dtype, compiled for one instruction set.
#include "convert.h"
#include "gemm_ukernel.h"
#include "pack.h"
#include "epilogue.h"
#include "interleave.h"
#include "conv_driver.h"
#include "phases_driver.h"
#include "pixel_ukernel.h"
#include "pixel_driver.h"
#include "few_planes_driver.h"
#include "depthwise_driver.h"
#include "depthwise_strided_driver.h"
#include "depthwise_weight_ukernel.h"
#include "one_pixel_dot_driver.h"
#if defined(CONV2D_HAS_NATIVE_VEC)
#include "one_pixel_row_driver.h"
#endif
#include "grad_weight_driver.h"
#include "grad_bias.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

#define CONV2D_CASE(name, type, call) \
  case DType::name: {                 \
    using S = type;                   \
    return call;                      \
  }
#define CONV2D_FLOATING_CASES(call)      \
  CONV2D_CASE(kFloat32, float, call)     \
  CONV2D_CASE(kFloat64, double, call)    \
  CONV2D_CASE(kBFloat16, BFloat16, call) \
  CONV2D_CASE(kFloat16, Float16, call)

// A test may compile fewer dtypes, to have them sooner, and then brings the two dispatches.
#if !defined(CONV2D_DISPATCH)
#define CONV2D_DISPATCH(dtype, call, integers)      \
  switch (dtype) {                                  \
    CONV2D_FLOATING_CASES(call)                     \
    CONV2D_CASE(kComplex64, Complex<float>, call)   \
    CONV2D_CASE(kComplex128, Complex<double>, call) \
    CONV2D_INTEGER_CASES(call, integers)            \
  }
// Of real floating-point types: the callers pass no other.
#define CONV2D_DISPATCH_FLOATING(dtype, call) \
  switch (dtype) {                            \
    CONV2D_FLOATING_CASES(call)               \
    default:                                  \
      __builtin_unreachable();                \
  }
#endif

#if defined(CONV2D_INTEGER_ENGINE)
// Vectors of integers have 128 bits in every engine, so another one's kernels will do, and take no time to compile.
#define CONV2D_INTEGER_CASES(call, integers) \
  default:                                   \
    return CONV2D_INTEGER_ENGINE()->integers;
#else
// Signed integers are computed as unsigned ones: the same bits, and wrap-around is defined.
#define CONV2D_INTEGER_CASES(call, integers) \
  case DType::kInt8:                         \
    CONV2D_CASE(kUInt8, uint8_t, call)       \
    CONV2D_CASE(kInt16, uint16_t, call)      \
    CONV2D_CASE(kInt32, uint32_t, call)      \
  default: {                                 \
    using S = uint64_t;                      \
    return call;                             \
  }
#endif

// The driver for a ConvGemm. Which one it is changes no bit.
template <class S>
void run_conv(const ConvGemm& problem, const Executor& executor) {
  using T = ComputeType<S>;
  const ConvGemm gemm = join_rows_of_planes(problem);
  if constexpr (kHasTranspose<T>) {
    if (is_depthwise_inner(gemm, vector_shape<T>())) {
      DepthwiseCall<S, T> call(gemm, executor.num_threads);
      run_items(executor, call.tiling.items(), &call, &DepthwiseCall<S, T>::run);
      return;
    }
  }
  if (lanes_are_groups(gemm, vector_shape<T>())) {
    ConvCall<S, T, true> call(gemm, executor.num_threads);
    run_items(executor, call.items(), &call, &ConvCall<S, T, true>::run);
    return;
  }
  if constexpr (kHasTranspose<T>) {
    if (is_few_planes(gemm, vector_shape<T>(), sizeof(S))) {
      FewPlanesCall<S, T> call(gemm, executor.num_threads);
      run_items(executor, call.items(), &call, &FewPlanesCall<S, T>::run);
      return;
    }
    if (vectors_are_pixels(gemm, vector_shape<T>())) {
      PixelCall<S, T> call(gemm, executor.num_threads);
      run_items(executor, call.items(), &call, &PixelCall<S, T>::run);
      return;
    }
  }
  ConvCall<S, T, false> call(gemm, executor.num_threads);
  run_items(executor, call.items(), &call, &ConvCall<S, T, false>::run);
}

inline void conv(DType dtype, const ConvGemm& gemm, const Executor& executor) {
  CONV2D_DISPATCH(dtype, run_conv<S>(gemm, executor), conv(dtype, gemm, executor))
}
inline void grad_weight(const Conv2dProblem& problem, DType dtype, ConstTensorView grad_output, ConstTensorView input,
                        TensorView result, const Executor& executor) {
  CONV2D_DISPATCH(dtype, run_grad_weight<S>(problem, grad_output, input, result, executor),
                  grad_weight(problem, dtype, grad_output, input, result, executor))
}
inline void grad_bias(int64_t batch, int64_t out_channels, int64_t out_h, int64_t out_w, DType dtype,
                      ConstTensorView grad_output, void* result, const Executor& executor) {
  CONV2D_DISPATCH(dtype, run_grad_bias<S>(batch, out_channels, out_h, out_w, grad_output, result, executor),
                  grad_bias(batch, out_channels, out_h, out_w, dtype, grad_output, result, executor))
}
inline void dot_products(DType dtype, const ConvGemm& gemm, const Executor& executor) {
  CONV2D_DISPATCH_FLOATING(dtype, run_dot<S>(gemm, executor))
}
#if defined(CONV2D_HAS_NATIVE_VEC)
inline void row_products(DType dtype, const RowProducts& products, const Executor& executor) {
  CONV2D_DISPATCH_FLOATING(dtype, run_rows<S>(products, executor))
}
inline void strided_grad_input(const Conv2dProblem& problem, DType dtype, ConstTensorView grad_output,
                               ConstTensorView weight, TensorView result, const Executor& executor) {
  CONV2D_DISPATCH_FLOATING(dtype, run_strided<S>(problem, grad_output, weight, result, executor))
}
template <class S>
void run_phases(const JoinedPhases& phases, const Executor& executor) {
  using Call = PhasesCall<S, ComputeType<S>>;
  Call call(phases, executor.num_threads);
  run_items(executor, call.items(), &call, &Call::run);
}
inline void joined_phases(DType dtype, const JoinedPhases& phases, const Executor& executor) {
  CONV2D_DISPATCH_FLOATING(dtype, run_phases<S>(phases, executor))
}
#else
// No problem is theirs (VectorShape::interleaves).
constexpr decltype(Engine::strided_grad_input) strided_grad_input = nullptr;
constexpr decltype(Engine::joined_phases) joined_phases = nullptr;
constexpr decltype(Engine::row_products) row_products = nullptr;
#endif
inline DotKernelShape dot_shape_of(DType dtype) { CONV2D_DISPATCH_FLOATING(dtype, dot_shape<S>()) }
inline VectorShape shape_of(DType dtype) { CONV2D_DISPATCH(dtype, vector_shape<ComputeType<S>>(), vector_shape(dtype)) }

template <class S>
int rows_of_type(int64_t vectors) {
  return ukernels_for<ComputeType<S>, false>(vectors).rows;
}
inline int rows_of(DType dtype, int64_t vectors) {
  CONV2D_DISPATCH(dtype, rows_of_type<S>(vectors), rows(dtype, vectors))
}

#if defined(CONV2D_INTEGER_ENGINE)
constexpr const char* kIntegerIsaName = CONV2D_INTEGER_ISA;
#else
constexpr const char* kIntegerIsaName = kIsaName;
#endif
constexpr Engine kEngine{kIsaName,  kIsaName,           kIntegerIsaName, conv,         grad_weight,
                         grad_bias, strided_grad_input, joined_phases,   dot_products, row_products,
                         shape_of,  dot_shape_of,       rows_of,         nullptr};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
