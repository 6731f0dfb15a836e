// Storage types to compute types and back, for numbers, vectors and runs of numbers; conjugation and addition; numbers
// as constants.
#pragma once

#include "vec.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

CONV2D_INLINE float bits_to_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
CONV2D_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

template <class T>
CONV2D_INLINE T widen_scalar(T value) {
  return value;
}
CONV2D_INLINE uint16_t widen_scalar(uint8_t value) { return value; }
CONV2D_INLINE float widen_scalar(BFloat16 value) { return bits_to_float(uint32_t(value.bits) << 16); }
#if defined(CONV2D_NATIVE_VEC)
CONV2D_INLINE float widen_scalar(Float16 value) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(value.bits))); }
CONV2D_INLINE Float16 narrow_scalar(float value) {
  return {uint16_t(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT)))};
}
#else
// Not inlined: a copy for each lane would make a third of the portable engine.
inline __attribute__((noinline)) float widen_scalar(Float16 value) {
  const uint32_t sign = uint32_t(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1fu, fraction = value.bits & 0x3ffu;
  if (exponent == 0x1f) {  // infinity, or a NaN made quiet
    return bits_to_float(sign | 0x7f800000u | (fraction << 13) | (fraction ? 0x00400000u : 0u));
  }
  if (exponent != 0) return bits_to_float(sign | ((exponent + 112) << 23) | (fraction << 13));
  if (fraction == 0) return bits_to_float(sign);
  // A subnormal is normal in float32: shift its leading one up to the implicit place. (Multiplying by 2^-24 would
  // do, but not in a thread that flushes denormals.)
  const int shift = __builtin_clz(fraction) - 21;
  return bits_to_float(sign | (uint32_t(113 - shift) << 23) | ((fraction << (13 + shift)) & 0x7fffffu));
}
inline __attribute__((noinline)) Float16 narrow_scalar(float value) {
  const uint32_t bits = float_to_bits(value), magnitude = bits & 0x7fffffffu;
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
  if (magnitude > 0x7f800000u) return {uint16_t(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
  if (magnitude >= 0x477ff000u) return {uint16_t(sign | 0x7c00u)};  // rounds beyond 65504
  if (magnitude < 0x33000001u) return {sign};                       // at most half the smallest subnormal
  const uint32_t exponent = magnitude >> 23;
  // Bits to drop: 13 for a normal result, more for a subnormal one.
  const uint32_t drop = exponent >= 113 ? 13 : 126 - exponent;
  const uint32_t significand = exponent >= 113 ? magnitude - (112u << 23) : (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t kept = significand >> drop, rest = significand & ((1u << drop) - 1), half = 1u << (drop - 1);
  return {uint16_t(sign | (kept + (rest > half || (rest == half && (kept & 1u)))))};
}
#endif

template <class S>
struct Narrow {
  static CONV2D_INLINE S from(S value) { return value; }
};
template <>
struct Narrow<BFloat16> {
  static CONV2D_INLINE BFloat16 from(float value) {
    const uint32_t bits = float_to_bits(value);
    if (value != value) return {uint16_t((bits | 0x00400000u) >> 16)};
    return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
  }
};
template <>
struct Narrow<Float16> {
  static CONV2D_INLINE Float16 from(float value) { return narrow_scalar(value); }
};

template <class T>
CONV2D_INLINE T conjugate(T value) {
  return value;
}
template <class R>
CONV2D_INLINE Complex<R> conjugate(Complex<R> value) {
  return {value.re, -value.im};
}
template <class T>
CONV2D_INLINE T add_scalar(T a, T b) {
  return T(a + b);
}
template <class R>
CONV2D_INLINE Complex<R> add_scalar(Complex<R> a, Complex<R> b) {
  return {a.re + b.re, a.im + b.im};
}

// What the parts of complex numbers are; another type itself.
template <class T>
struct RealOf {
  using type = T;
};
template <class R>
struct RealOf<Complex<R>> {
  using type = R;
};
template <class T>
constexpr bool kIsComplex = !std::is_same_v<T, typename RealOf<T>::type>;

template <class T>
CONV2D_INLINE void fill_zero(T* dst, int64_t n) {
  if (n > 0) __builtin_memset(dst, 0, size_t(n) * sizeof(T));
}

// Whether Vec<T> has transpose, unzip and zip, which all but the generic drivers, packers and stores need. The portable
// engine has none: it is there for results, not for speed, and each driver takes minutes to compile. Which of them run
// changes no bit.
template <class T>
constexpr bool kHasTranspose = kIsNative && std::is_floating_point_v<T>;

#if !defined(CONV2D_NATIVE_VEC)
// What native vectors have of their own.
template <class S>
CONV2D_INLINE Vec<float>::reg widen_partial(const S* p, int n) {
  float values[Vec<float>::kLanes] = {};
  for (int i = 0; i < n; ++i) values[i] = widen_scalar(p[i]);
  return Vec<float>::load(values);
}
template <class S>
CONV2D_INLINE Vec<float>::reg widen(const S* p) {
  return widen_partial(p, Vec<float>::kLanes);
}
CONV2D_INLINE Vec<double>::reg widen(const float* p) {
  Vec<double>::reg v;
  for (int i = 0; i < Vec<double>::kLanes; ++i) v[i] = double(p[i]);
  return v;
}
template <class S>
CONV2D_INLINE void narrow_partial(S* p, Vec<float>::reg v, int n) {
  float values[Vec<float>::kLanes];
  Vec<float>::store(values, v);
  for (int i = 0; i < n; ++i) p[i] = Narrow<S>::from(values[i]);
}
template <class S>
CONV2D_INLINE void narrow(S* p, Vec<float>::reg v) {
  narrow_partial(p, v, Vec<float>::kLanes);
}
#endif

// A vector of the compute type from any storage type, and back.
template <class T>
CONV2D_INLINE typename Vec<T>::reg load_as(const T* p) {
  return Vec<T>::load(p);
}
template <class T>
CONV2D_INLINE typename Vec<T>::reg load_as_partial(const T* p, int n) {
  return Vec<T>::load_partial(p, n);
}
template <class T>
CONV2D_INLINE void store_as(T* p, typename Vec<T>::reg v) {
  Vec<T>::store(p, v);
}
template <class T>
CONV2D_INLINE void store_as_partial(T* p, typename Vec<T>::reg v, int n) {
  Vec<T>::store_partial(p, v, n);
}
CONV2D_INLINE Vec<float>::reg load_as(const BFloat16* p) { return widen(p); }
CONV2D_INLINE Vec<float>::reg load_as(const Float16* p) { return widen(p); }
CONV2D_INLINE Vec<float>::reg load_as_partial(const BFloat16* p, int n) { return widen_partial(p, n); }
CONV2D_INLINE Vec<float>::reg load_as_partial(const Float16* p, int n) { return widen_partial(p, n); }
CONV2D_INLINE void store_as(BFloat16* p, Vec<float>::reg v) { narrow(p, v); }
CONV2D_INLINE void store_as(Float16* p, Vec<float>::reg v) { narrow(p, v); }
CONV2D_INLINE void store_as_partial(BFloat16* p, Vec<float>::reg v, int n) { narrow_partial(p, v, n); }
CONV2D_INLINE void store_as_partial(Float16* p, Vec<float>::reg v, int n) { narrow_partial(p, v, n); }

// The first n lanes: all of them, some, or none; the others are zero.
template <class S>
CONV2D_INLINE typename Vec<ComputeType<S>>::reg load_first(const S* p, int64_t n) {
  using V = Vec<ComputeType<S>>;
  return n >= V::kLanes ? load_as(p) : n > 0 ? load_as_partial(p, int(n)) : V::zero();
}
template <class S>
CONV2D_INLINE void store_first(S* p, typename Vec<ComputeType<S>>::reg v, int64_t n) {
  if (n >= Vec<ComputeType<S>>::kLanes) {
    store_as(p, v);
  } else if (n > 0) {
    store_as_partial(p, v, int(n));
  }
}

// Whether some lanes of a vector are loaded and stored as fast as all of them: by masks.
constexpr bool kHasMasks = Vec<float>::kLanes == 16;

// Whether 32 elements of a type are widened as the even and the odd ones, by an instruction each, and narrowed so, by
// one for both if the CPU has it.
template <class S>
constexpr bool kHasEvenOdd = kHasMasks && std::is_same_v<S, BFloat16>;

// Whether a vector of every third element takes a few instructions, not one a lane. (Images in channels_last mostly
// have three channels.)
template <class S>
constexpr bool kLoadsThirds =
    kIsNative && (std::is_same_v<S, float> || (kHasMasks && kIsFloating<S> && sizeof(S) == 2));
// n of them, 1 to kLanes.
template <class S>
CONV2D_INLINE Vec<float>::reg load_thirds_as_float(const S* p, int n) {
  static_assert(kLoadsThirds<S>);
  if constexpr (std::is_same_v<S, float>) {
    return Vec<S>::load_thirds(p, n);
  } else {
    return widen_thirds(p, n);
  }
}

// Keeps the compiler from loading a vector anew for each of its uses.
template <class Reg>
CONV2D_INLINE void load_once([[maybe_unused]] Reg& v) {
#if defined(CONV2D_NATIVE_VEC)
  __asm__("" : "+v"(v));
#endif
}

// `p` if bit number `bit` of `bits` is set, or `other`: without a branch.
template <class T>
CONV2D_INLINE const T* if_bit(uint32_t bits, int bit, const T* p, const T* other) {
#if defined(CONV2D_NATIVE_VEC)
  __asm__("test %[mask], %k[bits]\n\tcmovz %[other], %[p]"
          : [p] "+r"(p)
          : [mask] "ri"(1 << bit), [bits] "r"(bits), [other] "r"(other)
          : "cc");
  return p;
#else
  return bits >> bit & 1 ? p : other;
#endif
}

// call(std::integral_constant<int, n>) for an n of those listed; the last one stands for every other.
template <int N, int... kMore, class Call>
CONV2D_INLINE auto with_constant(int64_t n, const Call& call) {
  if constexpr (sizeof...(kMore) == 0) {
    return call(std::integral_constant<int, N>{});
  } else {
    return n == N ? call(std::integral_constant<int, N>{}) : with_constant<kMore...>(n, call);
  }
}
// The same of all n from 1 to kMost.
template <int kMost, class Call>
CONV2D_INLINE auto with_number(int64_t n, const Call& call) {
  if constexpr (kMost == 1) {
    return call(std::integral_constant<int, 1>{});
  } else {
    return n == kMost ? call(std::integral_constant<int, kMost>{}) : with_number<kMost - 1>(n, call);
  }
}

// dst[i] = src[2 * i] for i in [0, n), n > 0. Nothing behind the last one is read.
template <class T>
CONV2D_INLINE void copy_every_other(const T* src, int64_t n, T* dst) {
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  typename V::reg even, odd;
  int64_t i = 0;
  for (; i + L < n; i += L) {
    V::unzip(V::load(src + 2 * i), V::load(src + 2 * i + L), even, odd);
    V::store(dst + i, even);
  }
  if constexpr (kHasMasks) {
    const int left = int(n - i), span = 2 * left - 1;
    const typename V::reg low = V::load_partial(src + 2 * i, span < L ? span : L);
    V::unzip(low, span > L ? V::load_partial(src + 2 * i + L, span - L) : V::zero(), even, odd);
    V::store_partial(dst + i, even, left);
  } else if (n >= L) {  // the last block overlaps
    i = n - L;
    V::unzip(V::load(src + 2 * i), V::load_partial(src + 2 * i + L, L - 1), even, odd);
    V::store(dst + i, even);
  } else {
    for (; i < n; ++i) dst[i] = src[2 * i];
  }
}

// dst[i] = src[3 * i] for i in [0, n). Nothing behind the last one is read.
template <class S>
CONV2D_INLINE void copy_every_third(const S* src, int64_t n, float* dst) {
  constexpr int L = Vec<float>::kLanes;
  int64_t i = 0;
  for (; i + L <= n; i += L) Vec<float>::store(dst + i, load_thirds_as_float(src + 3 * i, L));
  if constexpr (kHasMasks) {
    if (i < n) Vec<float>::store_partial(dst + i, load_thirds_as_float(src + 3 * i, int(n - i)), int(n - i));
  } else {
    for (; i < n; ++i) dst[i] = widen_scalar(src[3 * i]);
  }
}

// dst[i] = src[i * step] for i in [0, n), widened, conjugated where asked and complex.
template <class S, class T>
CONV2D_INLINE void copy_run(const S* src, int64_t step, int64_t n, T* dst, bool conj) {
  if constexpr (kLoadsThirds<S> && std::is_same_v<T, float>) {
    if (step == 3) return copy_every_third(src, n, dst);
  }
  if constexpr (sizeof(T) == sizeof(S)) {
    if (!kIsComplex<T> || !conj) {
      if (step == 1) {
        // Rows of a patch are short: a call of memcpy would cost as much as the copy. The last block overlaps.
        constexpr int64_t kBlock = 32 / int64_t(sizeof(T));
        int64_t i = 0;
        if (n < kBlock) {
          for (; i < n; ++i) dst[i] = src[i];
          return;
        }
        for (; i + 4 * kBlock <= n; i += 4 * kBlock) __builtin_memcpy(dst + i, src + i, 128);
        for (; i + kBlock <= n; i += kBlock) __builtin_memcpy(dst + i, src + i, 32);
        if (i < n) __builtin_memcpy(dst + n - kBlock, src + n - kBlock, 32);
        return;
      }
      if constexpr (kHasTranspose<T> && std::is_same_v<S, T>) {
        if (step == 2 && n > 0) return copy_every_other(src, n, dst);
      }
      for (int64_t i = 0; i < n; ++i) dst[i] = src[i * step];
      return;
    }
  } else if (kIsFloating<S> && step == 1) {
    int64_t i = 0;
    if constexpr (kIsNative && kIsFloating<S>) {
      for (; i + Vec<float>::kLanes <= n; i += Vec<float>::kLanes) Vec<float>::store(dst + i, widen(src + i));
      if constexpr (kHasMasks) {
        if (i < n) Vec<float>::store_partial(dst + i, load_as_partial(src + i, int(n - i)), int(n - i));
        return;
      }
    }
    for (; i < n; ++i) dst[i] = widen_scalar(src[i]);
    return;
  }
  if constexpr (!std::is_same_v<S, T> || kIsComplex<T>) {
    for (int64_t i = 0; i < n; ++i) {
      const T value = widen_scalar(src[i * step]);
      dst[i] = conj ? conjugate(value) : value;
    }
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
