// Vec<T>: the vector operations that micro-kernels, packers and epilogues are written in.
//
//   reg                           a native vector of kLanes elements (arrays of it stay in registers)
//   kMaxVectors                   vectors in the widest panel a micro-kernel takes
//   zero load store broadcast     load and store take any alignment
//   add, fma(a, b, c) = a * b + c rounded once where the instruction set has a fused multiply-add
//   multiply_into(c, a, b)        c = fma(a, b, c) in one instruction that the compiler can't rearrange (AVX2's
//                                 float and double)
//   sqrt                          (float)
//   load_partial, store_partial   the first n lanes, 0 <= n <= kLanes; nothing else is touched
//   load_lanes, store_lanes       those whose bits are set; others load as zero (AVX-512's float and double)
//   transpose                     of kLanes vectors, in registers (float and double)
//   transpose_quads               of four vectors, the 4 x 4 blocks in each 128-bit lane (AVX2's and AVX-512's float)
//   of_quads                      the first four lanes of each of four vectors (AVX-512's float)
//   store_quads                   lane l of vector i to p + (4 * l + i) * pitch (the same)
//   load_transposed               transpose of 32-bit elements in memory (float where kLoadsTransposed)
//   load_thirds                   the first n of every third element, 1 <= n <= kLanes; AVX-512 touches those alone,
//                                 AVX2 also what lies between them (the float of both)
//   unzip, zip                    the elements of two vectors in a row, those of even and of odd number; the inverse
//   sum_each(r)                   element i: the sum of r[i]'s lanes, where lane l is added to lane l + kLanes / 2, of
//                                 these sums l to l + kLanes / 4, and so on (float and double)
//
// This file: vectors of any size by the compiler's vector extension: 128 bits of every element type for any
// architecture, and integers for all instruction sets.
// Without a hardware fused multiply-add (x86-64 before AVX2), fma rounds twice; with one (aarch64) once.
#pragma once

#include "vec.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// What the elements of packed panels and patches are: T itself, or (where a step of k takes two products) a pair, or
// (in AMX tiles, whose step takes 32) a block.
#if defined(CONV2D_BFLOAT16_PAIRS)
using FloatOperand = BFloat16Pair;
#elif defined(CONV2D_AMX)
using FloatOperand = BFloat16Block;
#else
using FloatOperand = float;
#endif
template <class T>
using Operand = std::conditional_t<std::is_same_v<T, float>, FloatOperand, T>;
template <class T>
constexpr bool kTakesPairs = std::is_same_v<Operand<T>, BFloat16Pair>;
template <class T>
constexpr bool kTakesBlocks = std::is_same_v<Operand<T>, BFloat16Block>;

#if !defined(CONV2D_NATIVE_VEC)
constexpr bool kIsNative = false;
constexpr bool kHasIntegers = true;
constexpr int kIntegerBytes = 16;
constexpr bool kLoopsInRounds = false;
constexpr bool kLoadsTransposed = false;
#if defined(__ARM_FEATURE_FMA)
constexpr bool kFusedMultiplyAdd = true;
#else
constexpr bool kFusedMultiplyAdd = false;
#endif
template <class T>
struct Vec;
#endif

template <class T, int kBytes>
struct GenericVec {
  typedef T reg __attribute__((vector_size(kBytes)));
  static constexpr int kLanes = kBytes / sizeof(T);
  static constexpr int kMaxVectors = 1;  // 6 accumulators, 1 weight, 1 broadcast: leaves room on 16 registers
  static CONV2D_INLINE reg zero() { return reg{}; }
  static CONV2D_INLINE reg load(const T* p) {
    reg v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  static CONV2D_INLINE void store(T* p, reg v) { __builtin_memcpy(p, &v, sizeof v); }
  static CONV2D_INLINE reg broadcast(const T* p) {
    reg v;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) v[i] = *p;
    return v;
  }
  static CONV2D_INLINE reg add(reg a, reg b) { return a + b; }
  static CONV2D_INLINE reg fma(reg a, reg b, reg c) {
#if defined(__ARM_FEATURE_FMA)
    if constexpr (T(0.5) != T(0)) {
      reg v;
#pragma GCC unroll 4
      for (int i = 0; i < kLanes; ++i) {
        v[i] = sizeof(T) == 4 ? T(__builtin_fmaf(float(a[i]), float(b[i]), float(c[i])))
                              : T(__builtin_fma(double(a[i]), double(b[i]), double(c[i])));
      }
      return v;
    }
#endif
    return a * b + c;
  }
  static CONV2D_INLINE reg sqrt(reg a) {
    for (int i = 0; i < kLanes; ++i) a[i] = __builtin_sqrtf(a[i]);
    return a;
  }
  static CONV2D_INLINE reg load_partial(const T* p, int n) {
    reg v{};
    for (int i = 0; i < n; ++i) v[i] = p[i];
    return v;
  }
  static CONV2D_INLINE void store_partial(T* p, reg v, int n) {
    for (int i = 0; i < n; ++i) p[i] = v[i];
  }
  static CONV2D_INLINE reg sum_each(reg (&r)[kLanes]) {
    reg sums{};
    for (int i = 0; i < kLanes; ++i) {
      T lanes[kLanes];
      store(lanes, r[i]);
      for (int n = kLanes / 2; n > 0; n /= 2) {
        for (int l = 0; l < n; ++l) lanes[l] = T(lanes[l] + lanes[l + n]);
      }
      sums[i] = lanes[0];
    }
    return sums;
  }
};

#if !defined(CONV2D_NATIVE_VEC)
template <>
struct Vec<float> : GenericVec<float, 16> {};
template <>
struct Vec<double> : GenericVec<double, 16> {};
#endif
template <>
struct Vec<uint16_t> : GenericVec<uint16_t, kIntegerBytes> {};
template <>
struct Vec<uint32_t> : GenericVec<uint32_t, kIntegerBytes> {};
template <>
struct Vec<uint64_t> : GenericVec<uint64_t, kIntegerBytes> {};

// Complex numbers: a vector of real and a vector of imaginary parts. In a panel or C tile each group of kLanes
// elements is stored in that split form (kLanes real parts, then kLanes imaginary parts); elsewhere, and where
// broadcast reads, elements are stored as pairs.
template <class R>
struct Vec<Complex<R>> {
  using V = Vec<R>;
  struct reg {
    typename V::reg re, im;
  };
  static constexpr int kLanes = V::kLanes;
  static constexpr int kMaxVectors = 1;  // 6 x 2 accumulators, 2 weights, 2 broadcasts of 16 registers
  static CONV2D_INLINE R* parts(Complex<R>* p) { return reinterpret_cast<R*>(p); }
  static CONV2D_INLINE const R* parts(const Complex<R>* p) { return reinterpret_cast<const R*>(p); }
  static CONV2D_INLINE reg zero() { return {V::zero(), V::zero()}; }
  static CONV2D_INLINE reg load(const Complex<R>* p) { return {V::load(parts(p)), V::load(parts(p) + kLanes)}; }
  static CONV2D_INLINE void store(Complex<R>* p, reg v) {
    V::store(parts(p), v.re);
    V::store(parts(p) + kLanes, v.im);
  }
  static CONV2D_INLINE reg broadcast(const Complex<R>* p) { return {V::broadcast(&p->re), V::broadcast(&p->im)}; }
  static CONV2D_INLINE reg add(reg a, reg b) { return {V::add(a.re, b.re), V::add(a.im, b.im)}; }
  static CONV2D_INLINE reg fma(reg a, reg b, reg c) {
    c.re = V::fma(a.re, b.re, c.re);
    c.im = V::fma(a.re, b.im, c.im);
    // Without fused operations not as -a * b + c: a compiler may negate the product instead of its factor, here but not
    // there, and where rounding has a direction that is another number.
    if constexpr (kFusedMultiplyAdd) {
      c.re = V::fma(-a.im, b.im, c.re);
    } else {
      c.re = c.re - a.im * b.im;
    }
    c.im = V::fma(a.im, b.re, c.im);
    return c;
  }
};

// A lane of stored vectors, one after the other. One of complex numbers holds their real parts, then the imaginary
// ones.
template <class T>
CONV2D_INLINE void set_lane(T* vectors, int64_t lane, T value) {
  vectors[lane] = value;
}
template <class R>
CONV2D_INLINE void set_lane(Complex<R>* vectors, int64_t lane, Complex<R> value) {
  constexpr int L = Vec<R>::kLanes;
  R* const parts = reinterpret_cast<R*>(vectors + lane / L * L);
  parts[lane % L] = value.re;
  parts[L + lane % L] = value.im;
}
template <class T>
CONV2D_INLINE T get_lane(const T* vectors, int64_t lane) {
  return vectors[lane];
}
template <class R>
CONV2D_INLINE Complex<R> get_lane(const Complex<R>* vectors, int64_t lane) {
  constexpr int L = Vec<R>::kLanes;
  const R* const parts = reinterpret_cast<const R*>(vectors + lane / L * L);
  return {parts[lane % L], parts[L + lane % L]};
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
