// Vectors of AVX-512 (F, BW, DQ, VL; and AVX512_BF16's narrowing where the CPU has it). What a Vec<T> is: see
// vec_portable.h.
//
// With CONV2D_BFLOAT16_PAIRS they are those of AVX512_BF16: an operand of float32 sums is a pair of bfloat16, and
//   fma(a, b, c)  =  a.first * b.first + (a.second * b.second + c),
// two fused multiply-adds one after the other, each rounded to nearest even, with denormal numbers (operands,
// intermediate and final sums) taken as zeros whatever the thread's setting. That is Intel's definition of VDPBF16PS;
// Zen 5 was seen to follow it to the bit.
#pragma once

#include "shared_headers.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

constexpr bool kIsNative = true;
constexpr bool kFusedMultiplyAdd = true;
constexpr bool kHasIntegers = false;
constexpr int kIntegerBytes = 32;
constexpr bool kLoopsInRounds = false;
constexpr bool kLoadsTransposed = true;

// Of 3 * n elements the first of each three; n up to 16.
CONV2D_INLINE uint64_t thirds_mask(int n) { return 0x249249249249u & ((uint64_t{1} << (3 * n)) - 1); }

template <class T>
struct Vec;

template <>
struct Vec<float> {
  using reg = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kMaxVectors = 4;  // 6 x 4 accumulators + 4 weights + 1 broadcast of 32 registers
  static CONV2D_INLINE reg zero() { return _mm512_setzero_ps(); }
  static CONV2D_INLINE reg load(const float* p) { return _mm512_loadu_ps(p); }
  static CONV2D_INLINE void store(float* p, reg v) { _mm512_storeu_ps(p, v); }
  static CONV2D_INLINE reg broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static CONV2D_INLINE reg add(reg a, reg b) { return _mm512_add_ps(a, b); }
#if defined(CONV2D_BFLOAT16_PAIRS)
  // Pairs travel in registers of the same width; nothing computes with their bits as float32.
  static CONV2D_INLINE reg load(const BFloat16Pair* p) { return _mm512_loadu_ps(p); }
  static CONV2D_INLINE reg broadcast(const BFloat16Pair* p) {
    int bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return _mm512_castsi512_ps(_mm512_set1_epi32(bits));
  }
  static CONV2D_INLINE reg load_partial(const BFloat16Pair* p, int n) {
    announce_load(p, mask(n));
    return _mm512_maskz_loadu_ps(mask(n), p);
  }
  static CONV2D_INLINE reg fma(reg a, reg b, reg c) { return _mm512_dpbf16_ps(c, __m512bh(a), __m512bh(b)); }
#else
  static CONV2D_INLINE reg fma(reg a, reg b, reg c) { return _mm512_fmadd_ps(a, b, c); }
#endif
  static CONV2D_INLINE reg sqrt(reg a) { return _mm512_sqrt_ps(a); }
  static CONV2D_INLINE __mmask16 mask(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
  static CONV2D_INLINE reg load_lanes(const float* p, __mmask16 lanes) {
    announce_load(p, lanes);
    return _mm512_maskz_loadu_ps(lanes, p);
  }
  static CONV2D_INLINE void store_lanes(float* p, reg v, __mmask16 lanes) {
    announce_store(p, lanes);
    _mm512_mask_storeu_ps(p, lanes, v);
  }
  static CONV2D_INLINE reg load_partial(const float* p, int n) { return load_lanes(p, mask(n)); }
  static CONV2D_INLINE void store_partial(float* p, reg v, int n) { store_lanes(p, v, mask(n)); }
  // Of the three vectors that they lie in, each has them in other lanes.
  static CONV2D_INLINE reg load_thirds(const float* p, int n) {
    const uint64_t wanted = thirds_mask(n);
    const __m512i a = _mm512_castps_si512(load_lanes(p, __mmask16(wanted)));
    // What is not there has no address either.
    const __m512i b = _mm512_castps_si512(load_lanes(p + (n > 5 ? 16 : 0), __mmask16(wanted >> 16)));
    const __m512i c = _mm512_castps_si512(load_lanes(p + (n > 10 ? 32 : 0), __mmask16(wanted >> 32)));
    const __m512i order = _mm512_setr_epi32(0, 3, 6, 9, 12, 15, 2, 5, 8, 11, 14, 1, 4, 7, 10, 13);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi32(order, _mm512_ternarylogic_epi32(a, b, c, 0xfe)));
  }
  static CONV2D_INLINE void unzip(reg a, reg b, reg& even, reg& odd) {
    const __m512i first = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    even = _mm512_permutex2var_ps(a, first, b);
    odd = _mm512_permutex2var_ps(a, _mm512_add_epi32(first, _mm512_set1_epi32(1)), b);
  }
  static CONV2D_INLINE void zip(reg even, reg odd, reg& a, reg& b) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    a = _mm512_permutex2var_ps(even, first, odd);
    b = _mm512_permutex2var_ps(even, _mm512_add_epi32(first, _mm512_set1_epi32(8)), odd);
  }
  // 4 x 4 blocks within each 128-bit lane.
  static CONV2D_INLINE void transpose_quads(reg* r) {
    const reg a = _mm512_unpacklo_ps(r[0], r[1]), b = _mm512_unpackhi_ps(r[0], r[1]);
    const reg c = _mm512_unpacklo_ps(r[2], r[3]), d = _mm512_unpackhi_ps(r[2], r[3]);
    r[0] = _mm512_shuffle_ps(a, c, 0x44);
    r[1] = _mm512_shuffle_ps(a, c, 0xee);
    r[2] = _mm512_shuffle_ps(b, d, 0x44);
    r[3] = _mm512_shuffle_ps(b, d, 0xee);
  }
  static CONV2D_INLINE reg of_quads(reg a, reg b, reg c, reg d) {
    const reg ab = _mm512_insertf32x4(a, _mm512_castps512_ps128(b), 1);
    const reg cd = _mm512_insertf32x4(c, _mm512_castps512_ps128(d), 1);
    return _mm512_insertf32x8(ab, _mm512_castps512_ps256(cd), 1);
  }
  static CONV2D_INLINE void store_quads(const reg* r, float* p, int64_t pitch) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      _mm_storeu_ps(p + i * pitch, _mm512_castps512_ps128(r[i]));
      _mm_storeu_ps(p + (i + 4) * pitch, _mm512_extractf32x4_ps(r[i], 1));
      _mm_storeu_ps(p + (i + 8) * pitch, _mm512_extractf32x4_ps(r[i], 2));
      _mm_storeu_ps(p + (i + 12) * pitch, _mm512_extractf32x4_ps(r[i], 3));
    }
  }
  static CONV2D_INLINE void transpose(reg (&r)[16]) {
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) transpose_quads(r + i);
    // Then the 128-bit lanes as a 4 x 4 block.
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const reg a = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
      const reg c = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88),
                d = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
      r[i] = _mm512_shuffle_f32x4(a, c, 0x88);
      r[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
      r[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
      r[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
  }
  // The transpose of 16 rows of 32-bit elements, `step` bytes apart. Rows i and i + 8 are put together as they are
  // loaded, half a row at a time, which leaves 48 shuffles of transpose's 64.
  static CONV2D_INLINE void load_transposed(const char* rows, int64_t step, reg (&r)[16]) {
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13),
                  high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    const auto pair = [&](int i, int64_t column) CONV2D_INLINE_LAMBDA {
      const __m256 first = _mm256_loadu_ps(reinterpret_cast<const float*>(rows + i * step) + column);
      const __m256 second = _mm256_loadu_ps(reinterpret_cast<const float*>(rows + (i + 8) * step) + column);
      return _mm512_castpd_ps(
          _mm512_insertf64x4(_mm512_castps_pd(_mm512_castps256_ps512(first)), _mm256_castps_pd(second), 1));
    };
#pragma GCC unroll 2
    for (int column = 0; column < 16; column += 8) {
      // 4 x 4 blocks within each 128-bit lane: t[i] and t[i + 4] have columns i and i + 4 of four rows each ...
      reg t[8];
#pragma GCC unroll 2
      for (int i = 0; i < 8; i += 4) {
#pragma GCC unroll 4
        for (int j = i; j < i + 4; ++j) t[j] = pair(j, column);
        transpose_quads(t + i);
      }
      // ... then a column of 16 rows from two vectors.
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512d first = _mm512_castps_pd(t[i]), second = _mm512_castps_pd(t[i + 4]);
        r[column + i] = _mm512_castpd_ps(_mm512_permutex2var_pd(first, low, second));
        r[column + i + 4] = _mm512_castpd_ps(_mm512_permutex2var_pd(first, high, second));
      }
    }
  }
  static CONV2D_INLINE reg sum_each(reg (&r)[16]) {
    reg t[8], u[4], v[2];
    // Halves, then quarters, of r[i], r[i + 4], r[i + 8] and r[i + 12], which then lie in the quarters of one vector
    // ...
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const reg a = r[i + 8 * half], b = r[i + 8 * half + 4];
        t[2 * i + half] = add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
      }
      u[i] =
          add(_mm512_shuffle_f32x4(t[2 * i], t[2 * i + 1], 0x88), _mm512_shuffle_f32x4(t[2 * i], t[2 * i + 1], 0xdd));
    }
    // ... then pairs, and single lanes, of two vectors at a time.
    v[0] = add(_mm512_shuffle_ps(u[0], u[1], 0x44), _mm512_shuffle_ps(u[0], u[1], 0xee));
    v[1] = add(_mm512_shuffle_ps(u[2], u[3], 0x44), _mm512_shuffle_ps(u[2], u[3], 0xee));
    return add(_mm512_shuffle_ps(v[0], v[1], 0x88), _mm512_shuffle_ps(v[0], v[1], 0xdd));
  }
  // Half a vector, the lower one. A CPU that takes vectors of 512 bits in two steps (Zen 4) takes halves in one.
  struct Half {
    using reg = __m256;
    static CONV2D_INLINE reg load(const float* p) { return _mm256_loadu_ps(p); }
    static CONV2D_INLINE void store(float* p, reg v) { _mm256_storeu_ps(p, v); }
    static CONV2D_INLINE reg broadcast(const float* p) { return _mm256_set1_ps(*p); }
    static CONV2D_INLINE reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
#if defined(CONV2D_BFLOAT16_PAIRS)
    static CONV2D_INLINE reg load(const BFloat16Pair* p) {
      return _mm256_castsi256_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(p)));
    }
    static CONV2D_INLINE reg broadcast(const BFloat16Pair* p) { return of(Vec<float>::broadcast(p)); }
    static CONV2D_INLINE reg fma(reg a, reg b, reg c) { return _mm256_dpbf16_ps(c, __m256bh(a), __m256bh(b)); }
#else
    static CONV2D_INLINE reg fma(reg a, reg b, reg c) { return _mm256_fmadd_ps(a, b, c); }
#endif
    static CONV2D_INLINE reg of(__m512 a) { return _mm512_castps512_ps256(a); }
    static CONV2D_INLINE __m512 widened(reg a) { return _mm512_zextps256_ps512(a); }
  };
};

template <>
struct Vec<double> {
  using reg = __m512d;
  static constexpr int kLanes = 8;
  static constexpr int kMaxVectors = 4;
  static CONV2D_INLINE reg zero() { return _mm512_setzero_pd(); }
  static CONV2D_INLINE reg load(const double* p) { return _mm512_loadu_pd(p); }
  static CONV2D_INLINE void store(double* p, reg v) { _mm512_storeu_pd(p, v); }
  static CONV2D_INLINE reg broadcast(const double* p) { return _mm512_set1_pd(*p); }
  static CONV2D_INLINE reg add(reg a, reg b) { return _mm512_add_pd(a, b); }
  static CONV2D_INLINE reg fma(reg a, reg b, reg c) { return _mm512_fmadd_pd(a, b, c); }
  static CONV2D_INLINE __mmask8 mask(int n) { return static_cast<__mmask8>((1u << n) - 1u); }
  static CONV2D_INLINE reg load_lanes(const double* p, __mmask8 lanes) {
    announce_load(p, lanes);
    return _mm512_maskz_loadu_pd(lanes, p);
  }
  static CONV2D_INLINE void store_lanes(double* p, reg v, __mmask8 lanes) {
    announce_store(p, lanes);
    _mm512_mask_storeu_pd(p, lanes, v);
  }
  static CONV2D_INLINE reg load_partial(const double* p, int n) { return load_lanes(p, mask(n)); }
  static CONV2D_INLINE void store_partial(double* p, reg v, int n) { store_lanes(p, v, mask(n)); }
  static CONV2D_INLINE void unzip(reg a, reg b, reg& even, reg& odd) {
    const __m512i first = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
    even = _mm512_permutex2var_pd(a, first, b);
    odd = _mm512_permutex2var_pd(a, _mm512_add_epi64(first, _mm512_set1_epi64(1)), b);
  }
  static CONV2D_INLINE void zip(reg even, reg odd, reg& a, reg& b) {
    const __m512i first = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    a = _mm512_permutex2var_pd(even, first, odd);
    b = _mm512_permutex2var_pd(even, _mm512_add_epi64(first, _mm512_set1_epi64(4)), odd);
  }
  static CONV2D_INLINE void transpose(reg (&r)[8]) {
    reg t[8];
    // 2 x 2 blocks within each 128-bit lane ...
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm512_unpacklo_pd(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_pd(r[i], r[i + 1]);
    }
    // ... then the 128-bit lanes as a 4 x 4 block.
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const reg a = _mm512_shuffle_f64x2(t[i], t[i + 2], 0x88), b = _mm512_shuffle_f64x2(t[i], t[i + 2], 0xdd);
      const reg c = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0x88), d = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0xdd);
      r[i] = _mm512_shuffle_f64x2(a, c, 0x88);
      r[i + 2] = _mm512_shuffle_f64x2(b, d, 0x88);
      r[i + 4] = _mm512_shuffle_f64x2(a, c, 0xdd);
      r[i + 6] = _mm512_shuffle_f64x2(b, d, 0xdd);
    }
  }
  static CONV2D_INLINE reg sum_each(reg (&r)[8]) {
    reg t[4], u[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const reg a = r[i + 4 * half], b = r[i + 4 * half + 2];
        t[2 * i + half] = add(_mm512_shuffle_f64x2(a, b, 0x44), _mm512_shuffle_f64x2(a, b, 0xee));
      }
      u[i] =
          add(_mm512_shuffle_f64x2(t[2 * i], t[2 * i + 1], 0x88), _mm512_shuffle_f64x2(t[2 * i], t[2 * i + 1], 0xdd));
    }
    return add(_mm512_unpacklo_pd(u[0], u[1]), _mm512_unpackhi_pd(u[0], u[1]));
  }
};

CONV2D_INLINE __m512d widen(const float* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
// 16-bit storage, widened and rounded a vector at a time. Rounding is to nearest even; NaNs stay NaNs.
template <class S>
CONV2D_INLINE __m512 widened(__m256i bits) {
  if constexpr (std::is_same_v<S, Float16>) return _mm512_cvtph_ps(bits);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
template <class S>
CONV2D_INLINE __m512 widen(const S* p) {
  return widened<S>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// The first n lanes, and zeros.
template <class S>
CONV2D_INLINE __m512 widen_partial(const S* p, int n) {
  announce_load(p, Vec<float>::mask(n));
  return widened<S>(_mm256_maskz_loadu_epi16(Vec<float>::mask(n), p));
}
// The first n of every third element, and zeros.
template <class S>
CONV2D_INLINE __m512 widen_thirds(const S* p, int n) {
  const uint64_t wanted = thirds_mask(n);
  const __mmask32 low = __mmask32(wanted), high = __mmask32(wanted >> 32);
  const S* const after = p + (high ? 32 : 0);
  announce_load(p, low);
  announce_load(after, high);
  // Word i of the half that is kept: 3 * i.
  const __m512i order =
      _mm512_castsi256_si512(_mm256_setr_epi16(0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36, 39, 42, 45));
  const __m512i words =
      _mm512_permutex2var_epi16(_mm512_maskz_loadu_epi16(low, p), order, _mm512_maskz_loadu_epi16(high, after));
  return widened<S>(_mm512_castsi512_si256(words));
}
// 32 elements: the even ones and the odd ones, an instruction each.
CONV2D_INLINE void widen_even_odd(const BFloat16* p, __m512& even, __m512& odd) {
  const __m512i words = _mm512_loadu_si512(p);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(-65536)));
}
// Asked of the bits: VFPCLASSPS sees no denormal numbers in a thread that takes them as zeros.
CONV2D_INLINE __mmask16 denormal_lanes(__m512 v, __m512i exponent, __m512i fraction) {
  const __m512i bits = _mm512_castps_si512(v);
  return _mm512_mask_test_epi32_mask(_mm512_testn_epi32_mask(bits, exponent), bits, fraction);
}
CONV2D_INLINE bool has_denormal(__m512 v) {
  return denormal_lanes(v, _mm512_set1_epi32(0x7f800000), _mm512_set1_epi32(0x007fffff)) != 0;
}
// AVX512_BF16's instruction, which flushes denormal numbers: for a CPU that has it.
CONV2D_INLINE __m256i narrowed_by_instruction(__m512 v) {
#if defined(CONV2D_NARROWS_BFLOAT16)
  return __m256i(_mm512_cvtneps_pbh(v));
#else
  __m256i words;
  // Volatile: it must not move before the question whether the CPU has it.
  __asm__ volatile("vcvtneps2bf16 %1, %0" : "=v"(words) : "v"(v));
  return words;
#endif
}
CONV2D_INLINE bool has_narrowing_instruction() {
#if defined(CONV2D_NARROWS_BFLOAT16)
  return true;
#else
  return cpu_narrows_bfloat16;
#endif
}
// Rounding to bfloat16 in the upper half of each lane, whose lower half then means nothing.
struct RoundedInPlace {
  __m512i one, below_half, quiet;
  CONV2D_INLINE __m512i of(__m512 v) const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, below_half));
    return _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), bits, quiet);
  }
};
CONV2D_INLINE __m256i narrowed(const BFloat16*, __m512 v) {
  if (__builtin_expect(has_narrowing_instruction() && !has_denormal(v), 1)) {
    return narrowed_by_instruction(v);
  }
  const RoundedInPlace rounded{_mm512_set1_epi32(1), _mm512_set1_epi32(0x7fff), _mm512_set1_epi32(0x00400000)};
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded.of(v), 16));
}
// Two vectors by the instruction.
CONV2D_INLINE __m512i narrowed_by_instruction(__m512 low, __m512 high) {
#if defined(CONV2D_NARROWS_BFLOAT16)
  return __m512i(_mm512_cvtne2ps_pbh(high, low));
#else
  __m512i words;
  __asm__ volatile("vcvtne2ps2bf16 %1, %2, %0" : "=v"(words) : "v"(low), "v"(high));
  return words;
#endif
}
// Constants that are loaded here and now, not kept in registers that sums need until then.
CONV2D_INLINE __m512i load_here(const int32_t& of_all_lanes) {
  __m512i lanes;
  __asm__ volatile("vpbroadcastd %1, %0" : "=v"(lanes) : "m"(of_all_lanes));
  return lanes;
}
CONV2D_INLINE __m512i load_here(const uint16_t (&words)[32]) {
  __m512i vector;
  __asm__ volatile("vmovdqu64 %1, %0" : "=v"(vector) : "m"(words));
  return vector;
}
// The reverse of widen_even_odd: N times 32 elements, `step` apart.
template <int N>
CONV2D_INLINE void narrow_even_odd(BFloat16* p, int64_t step, const __m512 (&even)[N], const __m512 (&odd)[N]) {
  if (__builtin_expect(has_narrowing_instruction(), 1)) {
    static constexpr uint16_t kInTurn[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    static constexpr int32_t kAllButSigns = 0x7fff7fff, kExponent = 0x7f800000, kFraction = 0x007fffff;
    const __m512i in_turn = load_here(kInTurn), all_but_signs = load_here(kAllButSigns);
    __mmask32 zeros = 0;
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      const __m512i words = narrowed_by_instruction(even[i], odd[i]);
      zeros |= _mm512_testn_epi16_mask(words, all_but_signs);
      _mm512_storeu_si512(p + i * step, _mm512_permutexvar_epi16(in_turn, words));
    }
    if (zeros == 0) return;
    // Some of them may be denormal numbers.
    const __m512i exponent = load_here(kExponent), fraction = load_here(kFraction);
    __mmask16 flushed = 0;
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      flushed |= denormal_lanes(even[i], exponent, fraction) | denormal_lanes(odd[i], exponent, fraction);
    }
    if (flushed == 0) return;
  }
  static constexpr int32_t kOne = 1, kBelowHalf = 0x7fff, kQuiet = 0x00400000;
  const RoundedInPlace rounded{load_here(kOne), load_here(kBelowHalf), load_here(kQuiet)};
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {
    const __m512i low = _mm512_srli_epi32(rounded.of(even[i]), 16);
    _mm512_storeu_si512(p + i * step, _mm512_mask_mov_epi16(low, 0xaaaaaaaa, rounded.of(odd[i])));
  }
}
// Two vectors, or one, where denormal numbers may become zeros.
CONV2D_INLINE __m512i narrowed_flushed(__m512 low, __m512 high) {
#if defined(CONV2D_NARROWS_BFLOAT16)
  return narrowed_by_instruction(low, high);
#else
  const BFloat16* const type = nullptr;
  return _mm512_inserti64x4(_mm512_castsi256_si512(narrowed(type, low)), narrowed(type, high), 1);
#endif
}
CONV2D_INLINE __m256i narrowed_flushed(__m512 v) {
#if defined(CONV2D_NARROWS_BFLOAT16)
  return narrowed_by_instruction(v);
#else
  return narrowed(static_cast<const BFloat16*>(nullptr), v);
#endif
}
// Their first lanes. The lanes of `nonzero` that did not become zero.
CONV2D_INLINE __mmask32 narrow_flushed(BFloat16* p, __m512 low, __m512 high, __mmask32 lanes, __mmask32 nonzero) {
  const __m512i words = narrowed_flushed(low, high);
  announce_store(p, lanes);
  _mm512_mask_storeu_epi16(p, lanes, words);
  return _mm512_mask_test_epi16_mask(nonzero, words, _mm512_set1_epi16(0x7fff));
}
CONV2D_INLINE __mmask16 narrow_flushed(BFloat16* p, __m512 v, __mmask16 lanes, __mmask16 nonzero) {
  const __m256i words = narrowed_flushed(v);
  announce_store(p, lanes);
  _mm256_mask_storeu_epi16(p, lanes, words);
  return _mm256_mask_test_epi16_mask(nonzero, words, _mm256_set1_epi16(0x7fff));
}
CONV2D_INLINE __m256i narrowed(const Float16*, __m512 v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
template <class S>
CONV2D_INLINE void narrow(S* p, __m512 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed(p, v));
}
// The first n lanes.
template <class S>
CONV2D_INLINE void narrow_partial(S* p, __m512 v, int n) {
  announce_store(p, Vec<float>::mask(n));
  _mm256_mask_storeu_epi16(p, Vec<float>::mask(n), narrowed(p, v));
}
// The first n lanes, to every other element.
template <class S>
CONV2D_INLINE void narrow_every_other(S* p, __m512 v, int n) {
  const __mmask32 mask = mask_of_first(2 * n) & 0x55555555u;
  announce_store(p, mask);
  _mm512_mask_storeu_epi16(p, mask, _mm512_cvtepu16_epi32(narrowed(p, v)));
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
