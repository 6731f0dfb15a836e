// Vectors of AVX2 + FMA + F16C. What a Vec<T> is: see vec_portable.h.
#pragma once

#include "shared_headers.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

constexpr bool kIsNative = true;
constexpr bool kFusedMultiplyAdd = true;
constexpr bool kHasIntegers = true;
constexpr int kIntegerBytes = 32;
constexpr bool kLoopsInRounds = true;
constexpr bool kLoadsTransposed = false;

template <class T>
struct Vec;

template <>
struct Vec<float> {
  using reg = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kMaxVectors = 2;  // 6 x 2 accumulators + 2 weights + 1 broadcast of 16 registers
  static CONV2D_INLINE reg zero() { return _mm256_setzero_ps(); }
  static CONV2D_INLINE reg load(const float* p) { return _mm256_loadu_ps(p); }
  static CONV2D_INLINE void store(float* p, reg v) { _mm256_storeu_ps(p, v); }
  static CONV2D_INLINE reg broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static CONV2D_INLINE reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
  static CONV2D_INLINE reg fma(reg a, reg b, reg c) { return _mm256_fmadd_ps(a, b, c); }
  static CONV2D_INLINE reg sqrt(reg a) { return _mm256_sqrt_ps(a); }
  static CONV2D_INLINE void multiply_into(reg& c, reg a, reg b) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
  }
  static CONV2D_INLINE __m256i mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static CONV2D_INLINE reg load_partial(const float* p, int n) {
    announce_load(p, mask_of_first(n));
    return _mm256_maskload_ps(p, mask(n));
  }
  static CONV2D_INLINE void store_partial(float* p, reg v, int n) {
    announce_store(p, mask_of_first(n));
    _mm256_maskstore_ps(p, mask(n), v);
  }
  // Of vectors seven apart, each has them in other lanes.
  static CONV2D_INLINE reg load_thirds(const float* p, int n) {
    if (n < kLanes) {
      alignas(32) float some[kLanes] = {};
      for (int i = 0; i < n; ++i) some[i] = p[3 * i];
      return load(some);
    }
    const reg lanes = _mm256_blend_ps(_mm256_blend_ps(load(p), load(p + 7), 0x24), load(p + 14), 0x92);
    return _mm256_permutevar8x32_ps(lanes, _mm256_setr_epi32(0, 3, 6, 2, 5, 1, 4, 7));
  }
  static CONV2D_INLINE void unzip(reg a, reg b, reg& even, reg& odd) {
    const reg lo = _mm256_permute2f128_ps(a, b, 0x20), hi = _mm256_permute2f128_ps(a, b, 0x31);
    even = _mm256_shuffle_ps(lo, hi, 0x88);
    odd = _mm256_shuffle_ps(lo, hi, 0xdd);
  }
  static CONV2D_INLINE void zip(reg even, reg odd, reg& a, reg& b) {
    const reg lo = _mm256_unpacklo_ps(even, odd), hi = _mm256_unpackhi_ps(even, odd);
    a = _mm256_permute2f128_ps(lo, hi, 0x20);
    b = _mm256_permute2f128_ps(lo, hi, 0x31);
  }
  // 4 x 4 blocks within each 128-bit lane.
  static CONV2D_INLINE void transpose_quads(reg* r) {
    const reg a = _mm256_unpacklo_ps(r[0], r[1]), b = _mm256_unpackhi_ps(r[0], r[1]);
    const reg c = _mm256_unpacklo_ps(r[2], r[3]), d = _mm256_unpackhi_ps(r[2], r[3]);
    r[0] = _mm256_shuffle_ps(a, c, 0x44);
    r[1] = _mm256_shuffle_ps(a, c, 0xee);
    r[2] = _mm256_shuffle_ps(b, d, 0x44);
    r[3] = _mm256_shuffle_ps(b, d, 0xee);
  }
  static CONV2D_INLINE void store_quads(const reg* r, float* p, int64_t pitch) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      _mm_storeu_ps(p + i * pitch, _mm256_castps256_ps128(r[i]));
      _mm_storeu_ps(p + (i + 4) * pitch, _mm256_extractf128_ps(r[i], 1));
    }
  }
  static CONV2D_INLINE void transpose(reg (&r)[8]) {
    transpose_quads(r);
    transpose_quads(r + 4);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const reg low = r[i], high = r[i + 4];
      r[i] = _mm256_permute2f128_ps(low, high, 0x20);
      r[i + 4] = _mm256_permute2f128_ps(low, high, 0x31);
    }
  }
  static CONV2D_INLINE reg sum_each(reg (&r)[8]) {
    reg t[4], u[2];
    // Halves of r[i] and r[i + 4], which then lie in the halves of one vector ...
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      t[i] = add(_mm256_permute2f128_ps(r[i], r[i + 4], 0x20), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
    // ... then pairs, and single lanes, of two vectors at a time.
    u[0] = add(_mm256_shuffle_ps(t[0], t[1], 0x44), _mm256_shuffle_ps(t[0], t[1], 0xee));
    u[1] = add(_mm256_shuffle_ps(t[2], t[3], 0x44), _mm256_shuffle_ps(t[2], t[3], 0xee));
    return add(_mm256_shuffle_ps(u[0], u[1], 0x88), _mm256_shuffle_ps(u[0], u[1], 0xdd));
  }
};

template <>
struct Vec<double> {
  using reg = __m256d;
  static constexpr int kLanes = 4;
  static constexpr int kMaxVectors = 2;
  static CONV2D_INLINE reg zero() { return _mm256_setzero_pd(); }
  static CONV2D_INLINE reg load(const double* p) { return _mm256_loadu_pd(p); }
  static CONV2D_INLINE void store(double* p, reg v) { _mm256_storeu_pd(p, v); }
  static CONV2D_INLINE reg broadcast(const double* p) { return _mm256_broadcast_sd(p); }
  static CONV2D_INLINE reg add(reg a, reg b) { return _mm256_add_pd(a, b); }
  static CONV2D_INLINE reg fma(reg a, reg b, reg c) { return _mm256_fmadd_pd(a, b, c); }
  static CONV2D_INLINE void multiply_into(reg& c, reg a, reg b) {
    __asm__("vfmadd231pd %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
  }
  static CONV2D_INLINE __m256i mask(int n) {
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3));
  }
  static CONV2D_INLINE reg load_partial(const double* p, int n) {
    announce_load(p, mask_of_first(n));
    return _mm256_maskload_pd(p, mask(n));
  }
  static CONV2D_INLINE void store_partial(double* p, reg v, int n) {
    announce_store(p, mask_of_first(n));
    _mm256_maskstore_pd(p, mask(n), v);
  }
  static CONV2D_INLINE void unzip(reg a, reg b, reg& even, reg& odd) {
    const reg lo = _mm256_permute2f128_pd(a, b, 0x20), hi = _mm256_permute2f128_pd(a, b, 0x31);
    even = _mm256_unpacklo_pd(lo, hi);
    odd = _mm256_unpackhi_pd(lo, hi);
  }
  static CONV2D_INLINE void zip(reg even, reg odd, reg& a, reg& b) {
    const reg lo = _mm256_unpacklo_pd(even, odd), hi = _mm256_unpackhi_pd(even, odd);
    a = _mm256_permute2f128_pd(lo, hi, 0x20);
    b = _mm256_permute2f128_pd(lo, hi, 0x31);
  }
  static CONV2D_INLINE void transpose(reg (&r)[4]) {
    const reg t0 = _mm256_unpacklo_pd(r[0], r[1]), t1 = _mm256_unpackhi_pd(r[0], r[1]);
    const reg t2 = _mm256_unpacklo_pd(r[2], r[3]), t3 = _mm256_unpackhi_pd(r[2], r[3]);
    r[0] = _mm256_permute2f128_pd(t0, t2, 0x20);
    r[1] = _mm256_permute2f128_pd(t1, t3, 0x20);
    r[2] = _mm256_permute2f128_pd(t0, t2, 0x31);
    r[3] = _mm256_permute2f128_pd(t1, t3, 0x31);
  }
  static CONV2D_INLINE reg sum_each(reg (&r)[4]) {
    reg t[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      t[i] = add(_mm256_permute2f128_pd(r[i], r[i + 2], 0x20), _mm256_permute2f128_pd(r[i], r[i + 2], 0x31));
    }
    return add(_mm256_unpacklo_pd(t[0], t[1]), _mm256_unpackhi_pd(t[0], t[1]));
  }
};

CONV2D_INLINE __m256d widen(const float* p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
// 16-bit storage, widened and rounded a vector at a time. Rounding is to nearest even; NaNs stay NaNs.
template <class S>
CONV2D_INLINE __m256 widen_bits(__m128i bits) {
  static_assert(sizeof(S) == 2);
  if constexpr (std::is_same_v<S, Float16>) return _mm256_cvtph_ps(bits);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
template <class S>
CONV2D_INLINE __m256 widen(const S* p) {
  return widen_bits<S>(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// The first n < 4 elements as the low bits of four, zeros above.
template <class S>
CONV2D_INLINE int64_t bits_of_some(const S* p, int n) {
  uint32_t pair = 0;
  if (n & 2) __builtin_memcpy(&pair, p, sizeof(pair));
  return n & 1 ? int64_t(pair) | int64_t(p[n - 1].bits) << (16 * (n - 1)) : int64_t(pair);
}
// The first n lanes, and zeros. There are no masks of 16 bits.
template <class S>
CONV2D_INLINE __m256 widen_partial(const S* p, int n) {
  if (n == 8) return widen(p);
  int64_t low;
  if (n < 4) return widen_bits<S>(_mm_cvtsi64_si128(bits_of_some(p, n)));
  __builtin_memcpy(&low, p, sizeof(low));
  return widen_bits<S>(_mm_set_epi64x(bits_of_some(p + 4, n - 4), low));
}
CONV2D_INLINE void narrow(Float16* p, __m256 v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
CONV2D_INLINE void narrow(BFloat16* p, __m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  rounded = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
  const __m256i high = _mm256_srli_epi32(rounded, 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
// The first n lanes.
template <class S>
CONV2D_INLINE void narrow_partial(S* p, __m256 v, int n) {
  S lanes[8];
  narrow(lanes, v);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
// The first n lanes, to every other element.
template <class S>
CONV2D_INLINE void narrow_every_other(S* p, __m256 v, int n) {
  S lanes[8];
  narrow(lanes, v);
  for (int i = 0; i < n; ++i) p[2 * i] = lanes[i];
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
