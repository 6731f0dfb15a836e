// Scalars as the kernels' headers mean them: products and sums, each rounded as the instruction set rounds.
#pragma once

#include <cmath>

#include "../../../csrc/cpu/isa/convert.h"
#include "check.h"

namespace parts {

using namespace conv2d_ext;
using namespace conv2d_ext::cpu;
using namespace conv2d_ext::cpu::CONV2D_ISA;

template <class T>
constexpr const char* kNameOf = "?";
template <>
constexpr const char* kNameOf<float> = "float32";
template <>
constexpr const char* kNameOf<double> = "float64";
template <>
constexpr const char* kNameOf<BFloat16> = "bfloat16";
template <>
constexpr const char* kNameOf<Float16> = "float16";
template <>
constexpr const char* kNameOf<Complex<float>> = "complex64";
template <>
constexpr const char* kNameOf<uint16_t> = "int16";
template <>
constexpr const char* kNameOf<BFloat16Pair> = "bfloat16 pairs";

// a * b + c. Written without the library's vectors, and compiled without contraction.
template <class R>
R multiply_add_real(R a, R b, R c) {
  if constexpr (std::is_floating_point_v<R>) {
    if constexpr (kFusedMultiplyAdd) {
      return std::fma(a, b, c);
    } else {
      const R product = a * b;
      return product + c;
    }
  } else {
    return R(uint64_t(a) * uint64_t(b) + uint64_t(c));
  }
}
template <class T>
struct Scalar {
  static T multiply_add(T a, T b, T c) { return multiply_add_real(a, b, c); }
  static T add(T a, T b) { return T(a + b); }
};
template <class R>
struct Scalar<Complex<R>> {
  using T = Complex<R>;
  // Products with the real part of `a` first.
  static T multiply_add(T a, T b, T c) {
    c.re = multiply_add_real(a.re, b.re, c.re);
    c.im = multiply_add_real(a.re, b.im, c.im);
    c.re = multiply_add_real(-a.im, b.im, c.re);
    c.im = multiply_add_real(a.im, b.re, c.im);
    return c;
  }
  static T add(T a, T b) { return {a.re + b.re, a.im + b.im}; }
};
template <class T>
T add(T a, T b) {
  return Scalar<T>::add(a, b);
}
template <class T>
T multiply_add(T a, T b, T c) {
  return Scalar<T>::multiply_add(a, b, c);
}

// Pairs: the second product is added first; denormal numbers are taken as zeros, before and after.
inline float flushed(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}
inline float of_bfloat16(uint32_t bits) {
  float value;
  bits <<= 16;
  std::memcpy(&value, &bits, sizeof value);
  return flushed(value);
}
inline float multiply_add(BFloat16Pair a, BFloat16Pair b, float c) {
  const float second = flushed(std::fma(of_bfloat16(a.bits >> 16), of_bfloat16(b.bits >> 16), flushed(c)));
  return flushed(std::fma(of_bfloat16(a.bits & 0xffff), of_bfloat16(b.bits & 0xffff), second));
}

// Element `at` of a row of whole vectors: complex numbers lie there as so many real parts, then imaginary parts.
template <class T>
T get(const T* row, int64_t at) {
  return row[at];
}
template <class R>
Complex<R> get(const Complex<R>* row, int64_t at) {
  const int64_t lanes = Vec<R>::kLanes;
  const R* const group = reinterpret_cast<const R*>(row + at / lanes * lanes);
  return {group[at % lanes], group[lanes + at % lanes]};
}
template <class T>
void put(T* row, int64_t at, T value) {
  row[at] = value;
}
template <class R>
void put(Complex<R>* row, int64_t at, Complex<R> value) {
  const int64_t lanes = Vec<R>::kLanes;
  R* const group = reinterpret_cast<R*>(row + at / lanes * lanes);
  group[at % lanes] = value.re;
  group[lanes + at % lanes] = value.im;
}

// Numbers of full precision and some orders of magnitude, so that every rounding shows.
inline double any_real(Random& random) {
  const double fraction = 1 + double(random.next() & 0xfffffffffffffu) / 4503599627370496.0;
  return std::ldexp(random.once_in(2) ? fraction : -fraction, int(random.between(-3, 3)));
}
inline uint16_t any_bfloat16(Random& random) {
  return uint16_t(random.between(0, 1) << 15 | random.between(125, 130) << 7 | random.between(0, 127));
}
template <class T>
T any_value(Random& random) {
  if constexpr (std::is_floating_point_v<T>) {
    return T(any_real(random));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return {any_bfloat16(random)};
  } else if constexpr (std::is_same_v<T, Float16>) {
    return {uint16_t(random.between(0, 1) << 15 | random.between(12, 18) << 10 | random.between(0, 1023))};
  } else if constexpr (std::is_same_v<T, BFloat16Pair>) {
    return {uint32_t(any_bfloat16(random)) << 16 | any_bfloat16(random)};
  } else if constexpr (kIsComplex<T>) {
    using R = decltype(T::re);
    return {R(any_real(random)), R(any_real(random))};
  } else {
    return T(random.next());
  }
}
template <class T>
void fill(T* values, int64_t n, Random& random) {
  for (int64_t i = 0; i < n; ++i) values[i] = any_value<T>(random);
}
template <class T>
void fill(Buffer<T>& buffer, Random& random) {
  fill(buffer.data(), buffer.size(), random);
}
template <class T>
void fill(Result<T>& result, Random& random) {
  for (int64_t i = 0; i < result.actual.size(); ++i) result.fill(i, any_value<T>(random));
}

// A stored number as its sums' type, and back. isa/convert.h's own: convert.h of these checks holds them against the
// formats' definitions.
template <class S>
ComputeType<S> widened(S value) {
  return widen_scalar(value);
}
template <class S>
S narrowed(ComputeType<S> value) {
  return Narrow<S>::from(value);
}
template <class T>
T conjugated(T value, bool conj) {
  if constexpr (kIsComplex<T>) {
    if (conj) value.im = -value.im;
  }
  return value;
}

}  // namespace parts
