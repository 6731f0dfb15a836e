// Included before the engine where only some dtypes are compiled: bit d of FUZZ_DTYPES stands for DType d, integers are
// all there or none. It puts its dispatches in place of engine_impl.h's.
#pragma once

#if FUZZ_DTYPES & 1
#define FUZZ_FLOAT32(call) CONV2D_CASE(kFloat32, float, call)
#else
#define FUZZ_FLOAT32(call)
#endif
#if FUZZ_DTYPES & 2
#define FUZZ_FLOAT64(call) CONV2D_CASE(kFloat64, double, call)
#else
#define FUZZ_FLOAT64(call)
#endif
#if FUZZ_DTYPES & 4
#define FUZZ_BFLOAT16(call) CONV2D_CASE(kBFloat16, BFloat16, call)
#else
#define FUZZ_BFLOAT16(call)
#endif
#if FUZZ_DTYPES & 8
#define FUZZ_FLOAT16(call) CONV2D_CASE(kFloat16, Float16, call)
#else
#define FUZZ_FLOAT16(call)
#endif
#if FUZZ_DTYPES & 16
#define FUZZ_COMPLEX64(call) CONV2D_CASE(kComplex64, Complex<float>, call)
#else
#define FUZZ_COMPLEX64(call)
#endif
#if FUZZ_DTYPES & 32
#define FUZZ_COMPLEX128(call) CONV2D_CASE(kComplex128, Complex<double>, call)
#else
#define FUZZ_COMPLEX128(call)
#endif
#if FUZZ_DTYPES & 64
#define FUZZ_INTEGERS(call, integers) CONV2D_INTEGER_CASES(call, integers)
#else
#define FUZZ_INTEGERS(call, integers) \
  default:                            \
    __builtin_unreachable();
#endif

#define CONV2D_DISPATCH(dtype, call, integers) \
  switch (dtype) {                             \
    FUZZ_FLOAT32(call)                         \
    FUZZ_FLOAT64(call)                         \
    FUZZ_BFLOAT16(call)                        \
    FUZZ_FLOAT16(call)                         \
    FUZZ_COMPLEX64(call)                       \
    FUZZ_COMPLEX128(call)                      \
    FUZZ_INTEGERS(call, integers)              \
  }
#define CONV2D_DISPATCH_FLOATING(dtype, call) \
  switch (dtype) {                            \
    FUZZ_FLOAT32(call)                        \
    FUZZ_FLOAT64(call)                        \
    FUZZ_BFLOAT16(call)                       \
    FUZZ_FLOAT16(call)                        \
    default:                                  \
      __builtin_unreachable();                \
  }
