// Sixteen lanes of float or double, in as many vectors as the instruction set needs for them.
#pragma once

#include "../isa/convert.h"
#include "../pointwise/functions.h"
#include "reduce.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

constexpr int kSumLanes = 16;

// Pieces of so many elements that are worth a thread's while.
constexpr int64_t pieces_at_once(int64_t elements) { return max64(1, 16384 / elements); }

template <class T>
struct LaneTraits;
template <>
struct LaneTraits<float> {
  using Vector = Floats;
  using Integer = int32_t;
};
template <>
struct LaneTraits<double> {
  using Vector = Doubles;
  using Integer = int64_t;
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

// Elements from one of a vector's length, or the first n of them; the rest is `fill`.
template <class S, class T = ComputeType<S>>
CONV2D_INLINE VectorOf<T> load_vector(const S* p) {
  return load_as(p);
}
template <class S, class T = ComputeType<S>>
CONV2D_INLINE VectorOf<T> load_vector(const S* p, int n, T fill) {
  using LaneBits = Bits<VectorOf<T>>;
  if (n == Vec<T>::kLanes) return load_as(p);
  if (n <= 0) return VectorOf<T>{} + fill;
  const VectorOf<T> v = load_as_partial(p, n);
  if (fill == T(0)) return v;
  LaneBits lane;
  __builtin_memcpy(&lane, kLaneNumbers<typename LaneTraits<T>::Integer>, sizeof lane);
  return lane < LaneBits{} + n ? v : VectorOf<T>{} + fill;
}
template <class S, class T = ComputeType<S>>
CONV2D_INLINE void store_vector(S* p, VectorOf<T> v, int n) {
  if (n == Vec<T>::kLanes) {
    store_as(p, v);
  } else if (n > 0) {
    store_as_partial(p, v, n);
  }
}

// A count of elements that is kSumLanes: whole vectors.
struct AllLanes {};

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

  template <class S>
  static CONV2D_INLINE Lanes load(const S* p, AllLanes, T) {
    return load(p);
  }
  template <class S>
  CONV2D_INLINE void store(S* p, AllLanes) const {
    store(p);
  }

 private:
  static CONV2D_INLINE int rest(int64_t n, int i) {
    const int64_t left = n - i * kLength;
    return int(left < 0 ? 0 : left > kLength ? kLength : left);
  }
};

// visit(i, count) for each kSumLanes elements of a row from i on: AllLanes, or how many there are at the row's end.
template <class Visit>
CONV2D_INLINE void for_each_lanes(int64_t length, const Visit& visit) {
  const int64_t whole = length / kSumLanes * kSumLanes;
  for (int64_t i = 0; i < whole; i += kSumLanes) visit(i, AllLanes());
  if (whole < length) visit(whole, length - whole);
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
