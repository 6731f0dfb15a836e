// Sixteen lanes of float or double, in as many vectors as the instruction set needs for them, and e^x of a vector.
//
// e^x is made of IEEE operations that round once, without branches and without fused multiply-adds, so that every
// instruction set gives the same bits in every lane.
#pragma once

#include "../isa/convert.h"
#include "reduce.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

constexpr int kSumLanes = 16;

template <class T>
struct LaneTraits;
template <>
struct LaneTraits<float> {
  typedef float Vector __attribute__((vector_size(sizeof(Vec<float>::reg))));
  typedef int32_t Bits __attribute__((vector_size(sizeof(Vec<float>::reg))));
  using Integer = int32_t;
  static constexpr int32_t kBias = 127, kMantissa = 23;
  static constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  static constexpr float kLowest = -104.0f, kHighest = 89.0f;  // where e^x is 0 and infinity
  // ln 2 in two parts, of which the first has so few bits that its product with an exponent is exact.
  static constexpr float kLn2High = 6.93145751953125e-1f, kLn2Low = 1.42860682e-6f;
  // (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2
  static constexpr float kFit[] = {5.0e-1f, 1.66665092e-1f, 4.16664481e-2f, 8.36993009e-3f, 1.39365997e-3f};
};
template <>
struct LaneTraits<double> {
  typedef double Vector __attribute__((vector_size(sizeof(Vec<double>::reg))));
  typedef int64_t Bits __attribute__((vector_size(sizeof(Vec<double>::reg))));
  using Integer = int64_t;
  static constexpr int64_t kBias = 1023, kMantissa = 52;
  static constexpr double kRounder = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLowest = -746.0, kHighest = 710.0;
  static constexpr double kLn2High = 6.9314718056011770e-1, kLn2Low = -1.7239444525614835e-13;
  static constexpr double kFit[] = {5.0000000000000144e-1, 1.6666666666666685e-1, 4.1666666666500651e-2,
                                    8.3333333333156425e-3, 1.3888888951057829e-3, 1.9841269899920785e-4,
                                    2.4801485590978921e-5, 2.7557231273194939e-6, 2.7632887231992739e-7,
                                    2.5113299942207406e-8};
};
template <class T>
using VectorOf = typename LaneTraits<T>::Vector;

template <class Integer>
constexpr Integer kLaneNumbers[kSumLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

template <class T>
constexpr T kInfinity = T(__builtin_inf());

template <class T>
CONV2D_INLINE VectorOf<T> larger_of(VectorOf<T> a, VectorOf<T> b) {  // a NaN in a is left out
  return a > b ? a : b;
}

template <class T>
CONV2D_INLINE VectorOf<T> exp_of_lanes(VectorOf<T> x) {
  using Traits = LaneTraits<T>;
  using Vector = VectorOf<T>;
  using Bits = typename Traits::Bits;
  const Vector lowest = Vector{} + Traits::kLowest, highest = Vector{} + Traits::kHighest;
  x = x < lowest ? lowest : x;  // a NaN stays
  x = x > highest ? highest : x;
  const Vector shifted = x * T(1.4426950408889634) + Traits::kRounder;
  const Bits n = Bits(shifted) - Bits(Vector{} + Traits::kRounder);
  const Vector whole = shifted - Traits::kRounder;
  const Vector r = (x - whole * Traits::kLn2High) - whole * Traits::kLn2Low, square = r * r;
  // Even and odd powers by themselves: two short chains of operations instead of a long one.
  constexpr int kTerms = int(sizeof(Traits::kFit) / sizeof(T));
  Vector last = Vector{} + Traits::kFit[kTerms - 1], before = Vector{} + Traits::kFit[kTerms - 2];
#pragma GCC unroll 16
  for (int i = kTerms - 3; i >= 0; i -= 2) {
    last = last * square + Traits::kFit[i];
    if (i > 0) before = before * square + Traits::kFit[i - 1];
  }
  const Vector fit = kTerms % 2 != 0 ? last + r * before : before + r * last;
  const Vector power = (r + square * fit) + T(1);
  // In two steps, so that it underflows gradually and overflows.
  const Bits half = n >> 1;
  return power * Vector((half + Traits::kBias) << Traits::kMantissa) *
         Vector((n - half + Traits::kBias) << Traits::kMantissa);
}

// Elements from one of a vector's length, or the first n of them; the rest is `fill`.
template <class S, class T = ComputeType<S>>
CONV2D_INLINE VectorOf<T> load_vector(const S* p) {
  return load_as(p);
}
template <class S, class T = ComputeType<S>>
CONV2D_INLINE VectorOf<T> load_vector(const S* p, int n, T fill) {
  using Bits = typename LaneTraits<T>::Bits;
  if (n == Vec<T>::kLanes) return load_as(p);
  if (n <= 0) return VectorOf<T>{} + fill;
  const VectorOf<T> v = load_as_partial(p, n);
  if (fill == T(0)) return v;
  Bits lane;
  __builtin_memcpy(&lane, kLaneNumbers<typename LaneTraits<T>::Integer>, sizeof lane);
  return lane < Bits{} + n ? v : VectorOf<T>{} + fill;
}
template <class S, class T = ComputeType<S>>
CONV2D_INLINE void store_vector(S* p, VectorOf<T> v, int n) {
  if (n == Vec<T>::kLanes) {
    store_as(p, v);
  } else if (n > 0) {
    store_as_partial(p, v, n);
  }
}

template <class T>
struct Lanes {
  using Vector = VectorOf<T>;
  static constexpr int kLength = Vec<T>::kLanes, kVectors = kSumLanes / kLength;
  Vector v[kVectors];

  explicit CONV2D_INLINE Lanes(T value) {
    for (int i = 0; i < kVectors; ++i) v[i] = Vector{} + value;
  }
  template <class S>
  static CONV2D_INLINE Lanes load(const S* p) {
    Lanes lanes(T(0));
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) lanes.v[i] = load_vector(p + i * kLength);
    return lanes;
  }
  template <class S>
  static CONV2D_INLINE Lanes load(const S* p, int64_t n, T fill) {
    Lanes lanes(fill);
    for (int i = 0; i < kVectors; ++i) lanes.v[i] = load_vector(p + i * kLength, rest(n, i), fill);
    return lanes;
  }
  template <class S>
  CONV2D_INLINE void store(S* p) const {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) store_as(p + i * kLength, v[i]);
  }
  template <class S>
  CONV2D_INLINE void store(S* p, int64_t n) const {
    for (int i = 0; i < kVectors; ++i) store_vector(p + i * kLength, v[i], rest(n, i));
  }
  template <class Function>
  CONV2D_INLINE Lanes map(Function function) const {
    Lanes result(T(0));
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) result.v[i] = function(v[i]);
    return result;
  }
  template <class Function>
  CONV2D_INLINE Lanes with(const Lanes& other, Function function) const {
    Lanes result(T(0));
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) result.v[i] = function(v[i], other.v[i]);
    return result;
  }
  CONV2D_INLINE void add(const Lanes& other) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) v[i] = v[i] + other.v[i];
  }
  // All lanes pairwise.
  CONV2D_INLINE T total() const {
    typedef T Four __attribute__((vector_size(4 * sizeof(T))));
    T sums[kSumLanes];
    store(sums);
    Four four[4];
    __builtin_memcpy(four, sums, sizeof four);
    const Four last = (four[0] + four[2]) + (four[1] + four[3]);
    return (last[0] + last[2]) + (last[1] + last[3]);
  }
  CONV2D_INLINE T largest() const {
    T values[kSumLanes];
    store(values);
    T result = values[0];
    for (int i = 1; i < kSumLanes; ++i) result = values[i] > result ? values[i] : result;
    return result;
  }

 private:
  static CONV2D_INLINE int rest(int64_t n, int i) {
    const int64_t left = n - i * kLength;
    return int(left < 0 ? 0 : left > kLength ? kLength : left);
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
