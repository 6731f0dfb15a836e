// kernels/winograd.h: each transformation against its matrices, one square and one lane at a time.
#pragma once

#include "../../../csrc/cpu/kernels/winograd.h"
#include "arithmetic.h"

namespace parts {

// out = M in M' for a rows x cols matrix M: columns first, each in the order that `one` has.
template <class T, int kIn, int kOut, class One>
void transform_square(const T (&in)[kIn][kIn], T (&out)[kOut][kOut], One one) {
  T columns[kOut][kIn];
  for (int j = 0; j < kIn; ++j) {
    T from[kIn], to[kOut];
    for (int i = 0; i < kIn; ++i) from[i] = in[i][j];
    one(from, to);
    for (int i = 0; i < kOut; ++i) columns[i][j] = to[i];
  }
  for (int i = 0; i < kOut; ++i) one(columns[i], out[i]);
}
template <class T>
void source_column(const T (&d)[4], T (&v)[4]) {
  v[0] = d[0] - d[2];
  v[1] = d[1] + d[2];
  v[2] = d[2] - d[1];
  v[3] = d[1] - d[3];
}
template <class T>
void weight_column(const T (&g)[3], T (&u)[4]) {
  const T outer = (g[0] + g[2]) * T(0.5), inner = g[1] * T(0.5);
  u[0] = g[0];
  u[1] = outer + inner;
  u[2] = outer - inner;
  u[3] = g[2];
}
template <class T>
void sums_column(const T (&m)[4], T (&y)[2]) {
  y[0] = (m[0] + m[1]) + m[2];
  y[1] = (m[1] - m[2]) - m[3];
}

template <class T>
void check_weight_transformation(Random& random) {
  constexpr int64_t L = Vec<T>::kLanes;
  begin_part(std::string("transform_weight ") + kNameOf<T>);
  for (int n = 0; n < 40; ++n) {
    const bool descends = random.once_in(2);
    const int64_t step = L + random.between(0, 3), pitch = L + random.between(0, 5);
    describe("step %d, pitch %d, descends %d", int(step), int(pitch), descends);
    Buffer<T> taps(8 * step + L);
    Result<T> to(15 * pitch + L);
    fill(taps, random);
    transform_weight<T>(taps.data() + (descends ? 8 * step : 0), descends ? -step : step, to.data(), pitch);
    for (int64_t lane = 0; lane < L; ++lane) {
      T g[3][3], u[4][4];
      for (int tap = 0; tap < 9; ++tap) g[tap / 3][tap % 3] = taps[(descends ? 8 - tap : tap) * step + lane];
      transform_square(g, u, weight_column<T>);
      for (int f = 0; f < 16; ++f) to.expected[size_t(f * pitch + lane)] = u[f / 4][f % 4];
    }
    to.compare();
  }
}

// A row of `count` squares, of a plane (`inner` false) or of pixels that hold a vector of channels.
template <class T>
void check_source_transformation(Random& random, bool inner) {
  constexpr int64_t L = Vec<T>::kLanes;
  begin_part(std::string(inner ? "transform_inner_squares " : "transform_planar_squares ") + kNameOf<T>);
  for (int64_t count = 1; count <= 2 * L + 3; ++count) {
    // A vector more may be read, and is written.
    const int64_t all = inner ? count : round_up(count, L), lanes = inner ? L : 1;
    const int64_t col = inner ? L + random.between(0, 4) : 1, row = (2 * count + 2) * col + random.between(0, 3);
    const int64_t square = inner ? L + random.between(0, 2) : 1, pitch = all * square + random.between(0, 4);
    describe("%d squares, row %d, col %d, square %d, pitch %d", int(count), int(row), int(col), int(square),
             int(pitch));
    Buffer<T> from(3 * row + (2 * all + 2) * col);
    Result<T> to(15 * pitch + (inner ? (count - 1) * square + L : all));
    fill(from, random);
    if (inner) {
      transform_inner_squares<T>(from.data(), row, col, count, to.data(), square, pitch);
    } else {
      transform_planar_squares<T>(from.data(), row, count, to.data(), pitch);
    }
    for (int64_t x = 0; x < all; ++x) {
      for (int64_t lane = 0; lane < lanes; ++lane) {
        T d[4][4], v[4][4];
        for (int at = 0; at < 16; ++at) d[at / 4][at % 4] = from[at / 4 * row + (2 * x + at % 4) * col + lane];
        transform_square(d, v, source_column<T>);
        for (int f = 0; f < 16; ++f) to.expected[size_t(f * pitch + x * square + lane)] = v[f / 4][f % 4];
      }
    }
    to.compare();
  }
}

template <class T>
void check_sums_transformation(Random& random) {
  constexpr int64_t L = Vec<T>::kLanes;
  begin_part(std::string("transform_sums ") + kNameOf<T>);
  for (int n = 0; n < 40; ++n) {
    const int64_t pitch = L + random.between(0, 5);
    describe("pitch %d", int(pitch));
    Buffer<T> sums(15 * pitch + L);
    Result<T> to(4 * L);
    fill(sums, random);
    typename Vec<T>::reg y[2][2];
    transform_sums<T>(sums.data(), pitch, y);
    for (int pixel = 0; pixel < 4; ++pixel) Vec<T>::store(to.data() + pixel * L, y[pixel / 2][pixel % 2]);
    for (int64_t lane = 0; lane < L; ++lane) {
      T m[4][4], expected[2][2];
      for (int f = 0; f < 16; ++f) m[f / 4][f % 4] = sums[f * pitch + lane];
      transform_square(m, expected, sums_column<T>);
      for (int pixel = 0; pixel < 4; ++pixel) {
        to.expected[size_t(pixel * L + lane)] = expected[pixel / 2][pixel % 2];
      }
    }
    to.compare();
  }
}

template <class T>
void check_winograd() {
  Random random(11);
  check_weight_transformation<T>(random);
  check_source_transformation<T>(random, true);
  check_source_transformation<T>(random, false);
  check_sums_transformation<T>(random);
}

}  // namespace parts
