// Winograd's minimal filtering F(2 x 2, 3 x 3) (Lavin and Gray, 2016), whose three transformations are the kernels of
// this file. Of a square of 2 x 2 results, with d the 4 x 4 source elements that it meets and g the 3 x 3 weights,
//
//   Y = A' [ sum over channels of (G g G') . (B' d B) ] A        . element by element, ' transposed
//
//         | 1  0 -1  0 |         | 1   0   0 |
//    B' = | 0  1  1  0 |     G = | .5  .5  .5|     A' = | 1  1  1  0 |
//         | 0 -1  1  0 |         | .5 -.5  .5|          | 0  1 -1 -1 |
//         | 0  1  0 -1 |         | 0   0   1 |
//
// 16 multiplications a channel instead of 36. The sums are 16 matrix products, by kernels/gemm.h.
//
// Order of operations: columns first, then rows; a sum of three as written in the source, from left to right. Halves
// are exact. No operation is fused, so that all instruction sets agree.
#pragma once

#include "../isa/convert.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// t = G g of one column.
template <class R>
CONV2D_INLINE void winograd_weights(R a, R b, R c, R half, R (&t)[4]) {
  const R outer = (a + c) * half, inner = b * half;
  t[0] = a;
  t[1] = outer + inner;
  t[2] = outer - inner;
  t[3] = c;
}

// The weights of one channel, a vector of lanes: nine vectors `step` apart -> 16 vectors `pitch` apart.
template <class T>
CONV2D_INLINE void transform_weight(const T* g, int64_t step, T* to, int64_t pitch) {
  using V = Vec<T>;
  using reg = typename V::reg;
  const T one_half = T(0.5);
  const reg half = V::broadcast(&one_half);
  reg t[3][4];
#pragma GCC unroll 3
  for (int j = 0; j < 3; ++j) {
    winograd_weights(V::load(g + j * step), V::load(g + (3 + j) * step), V::load(g + (6 + j) * step), half, t[j]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    reg u[4];
    winograd_weights(t[0][i], t[1][i], t[2][i], half, u);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) V::store(to + (4 * i + j) * pitch, u[j]);
  }
}

// v = B' d of one column.
template <class R>
CONV2D_INLINE void winograd_source(R a, R b, R c, R d, R (&v)[4]) {
  v[0] = a - c;
  v[1] = b + c;
  v[2] = c - b;
  v[3] = b - d;
}

// The 16 results of the columns' transformation, columns first in `t`, to their places.
template <class T>
CONV2D_INLINE void transform_source_rows(const typename Vec<T>::reg (&a)[4], const typename Vec<T>::reg (&b)[4],
                                         const typename Vec<T>::reg (&c)[4], const typename Vec<T>::reg (&d)[4], T* to,
                                         int64_t pitch) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    typename Vec<T>::reg v[4];
    winograd_source(a[i], b[i], c[i], d[i], v);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) Vec<T>::store(to + (4 * i + j) * pitch, v[j]);
  }
}

// A row of squares of a patch whose channels are inner: a vector of channels of `count` squares. Squares share two of
// their four columns with the next one, which are transformed once.
template <class T>
void transform_inner_squares(const T* from, int64_t row, int64_t col, int64_t count, T* to, int64_t square,
                             int64_t pitch) {
  using V = Vec<T>;
  using reg = typename V::reg;
  const auto column = [&](const T* p, reg(&v)[4]) CONV2D_INLINE_LAMBDA {
    winograd_source(V::load(p), V::load(p + row), V::load(p + 2 * row), V::load(p + 3 * row), v);
  };
  reg a[4], b[4], c[4], d[4];
  column(from, a);
  column(from + col, b);
  for (int64_t x = 0; x < count; ++x) {
    from += 2 * col;
    column(from, c);
    column(from + col, d);
    transform_source_rows<T>(a, b, c, d, to, pitch);
    to += square;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      a[i] = c[i];
      b[i] = d[i];
    }
  }
}

// Elements 0, 2, 4, ... and 1, 3, 5, ... of two vectors' worth.
template <class T>
CONV2D_INLINE void load_even_odd(const T* p, typename Vec<T>::reg& even, typename Vec<T>::reg& odd) {
  using V = Vec<T>;
  if constexpr (kHasTranspose<T>) {
    V::unzip(V::load(p), V::load(p + V::kLanes), even, odd);
  } else {
    for (int i = 0; i < V::kLanes; ++i) {
      even[i] = p[2 * i];
      odd[i] = p[2 * i + 1];
    }
  }
}

// A row of squares of a plane, a vector of squares at a time. It reads up to 2 * kLanes + 1 elements beyond the row,
// and writes up to kLanes - 1 squares beyond the last one, whatever they hold.
template <class T>
void transform_planar_squares(const T* from, int64_t row, int64_t count, T* to, int64_t pitch) {
  using V = Vec<T>;
  using reg = typename V::reg;
  for (int64_t x = 0; x < count; x += V::kLanes, from += 2 * V::kLanes, to += V::kLanes) {
    reg t[4][4];  // by column
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      reg even[4], odd[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) load_even_odd<T>(from + i * row + 2 * pair, even[i], odd[i]);
      winograd_source(even[0], even[1], even[2], even[3], t[2 * pair]);
      winograd_source(odd[0], odd[1], odd[2], odd[3], t[2 * pair + 1]);
    }
    transform_source_rows<T>(t[0], t[1], t[2], t[3], to, pitch);
  }
}

// y = A' m of one column.
template <class R>
CONV2D_INLINE void winograd_results(R a, R b, R c, R d, R& first, R& second) {
  first = a + b + c;
  second = b - c - d;
}

// The four results of a square, a vector of lanes, from 16 sums that are `pitch` apart.
template <class T>
CONV2D_INLINE void transform_sums(const T* m, int64_t pitch, typename Vec<T>::reg (&y)[2][2]) {
  using V = Vec<T>;
  typename V::reg t[2][4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    winograd_results(V::load(m + j * pitch), V::load(m + (4 + j) * pitch), V::load(m + (8 + j) * pitch),
                     V::load(m + (12 + j) * pitch), t[0][j], t[1][j]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) winograd_results(t[i][0], t[i][1], t[i][2], t[i][3], y[i][0], y[i][1]);
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
