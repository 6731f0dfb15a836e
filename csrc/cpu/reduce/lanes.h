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
using VectorOf = std::conditional_t<std::is_same_v<T, float>, Floats, Doubles>;

template <class T>
constexpr T kInfinity = T(__builtin_inf());

template <class T>
CONV2D_INLINE VectorOf<T> larger_of(VectorOf<T> a, VectorOf<T> b) {  // a NaN in a is left out
  return a > b ? a : b;
}

// As load_first, but the lanes after the first n become `fill`.
template <class S, class T = ComputeType<S>>
CONV2D_INLINE VectorOf<T> load_filled(const S* p, int64_t n, T fill) {
  const VectorOf<T> v = load_first(p, n);
  if (n >= Vec<T>::kLanes || fill == T(0)) return v;
  Bits<VectorOf<T>> lane{};
#pragma GCC unroll 16
  for (int i = 0; i < Vec<T>::kLanes; ++i) lane[i] = i;
  return lane < Bits<VectorOf<T>>{} + int(n) ? v : VectorOf<T>{} + fill;
}

// Where the number n of elements is the constant kSumLanes, no loop asks how many there are.
template <class T>
struct Lanes {
  using Vector = VectorOf<T>;
  static constexpr int kLength = Vec<T>::kLanes, kVectors = kSumLanes / kLength;
  Vector v[kVectors];

  explicit CONV2D_INLINE Lanes(T value) {
    for (int i = 0; i < kVectors; ++i) v[i] = Vector{} + value;
  }
  template <class S>
  static CONV2D_INLINE Lanes load(const S* p, int64_t n, T fill) {
    Lanes lanes(fill);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) lanes.v[i] = load_filled(p + i * kLength, n - i * kLength, fill);
    return lanes;
  }
  template <class S>
  CONV2D_INLINE void store(S* p, int64_t n) const {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) store_first(p + i * kLength, v[i], n - i * kLength);
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
    store(sums, kSumLanes);
    Four four[4];
    __builtin_memcpy(four, sums, sizeof four);
    const Four last = (four[0] + four[2]) + (four[1] + four[3]);
    return (last[0] + last[2]) + (last[1] + last[3]);
  }
  CONV2D_INLINE T largest() const {
    T values[kSumLanes];
    store(values, kSumLanes);
    T result = values[0];
    for (int i = 1; i < kSumLanes; ++i) result = values[i] > result ? values[i] : result;
    return result;
  }
};

// visit(i, count) for each kSumLanes elements of a row from i on: that number, as a constant, or how many there are at
// the row's end.
template <class Visit>
CONV2D_INLINE void for_each_lanes(int64_t length, const Visit& visit) {
  const int64_t whole = length / kSumLanes * kSumLanes;
  for (int64_t i = 0; i < whole; i += kSumLanes) visit(i, std::integral_constant<int64_t, kSumLanes>());
  if (whole < length) visit(whole, length - whole);
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
