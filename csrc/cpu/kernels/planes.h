// The micro-kernels of 1x1 convolutions from many planes to few.
#pragma once

#include "../isa/convert.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// plane_ukernel_<dtype>_<MR>x<NK>__<isa>
//
//   chain[r][x]  =  (first ? start[r] : chain[r][x]) + sum over s < NK of weights[s][r] * planes[s * plane_pitch + x]
//
// for 0 <= r < MR, 0 <= x < pixels, by fused multiply-adds, ascending. At a chain's end it is added to sums[r][x], or
// becomes it where nothing was summed before.
//
// It prefetches the same pixels of the planes `next` elements further, next_pixels of them.
//
// Registers: MR * NU accumulators, NU vectors of a plane; weights are broadcast from L1. Bound: reading the planes from
// L3 or memory. A spilled vector costs nothing beside that, so tests/test_machine_code.py leaves this family out.
template <class S, class T>
struct PlaneOperands {
  int64_t pixels;
  const S* planes;
  int64_t plane_pitch, next, next_pixels;
  const T* weights;  // [NK][MR]
  const T* start;
  T* chains;
  T* sums;
  int64_t row_pitch;
  bool first, chain_ends, adds;
};

template <class S, class T, int MR, int NK>
void plane_ukernel(const PlaneOperands<S, T>& o) {
  using V = Vec<T>;
  using reg = typename V::reg;
  constexpr int L = V::kLanes, kLineVectors = int(64 / sizeof(S)) / L;
  // A cache line of the plane, as far as accumulators have registers.
  constexpr int NU = kLineVectors < 1 ? 1 : kLineVectors > 8 / MR ? 8 / MR : kLineVectors;

  // NU vectors, or (kPartial) one of `lanes` pixels.
  const auto sum_pixels = [&](int64_t x, auto vectors, auto partial, int lanes) CONV2D_INLINE_LAMBDA {
    constexpr int N = decltype(vectors)::value;
    constexpr bool kPartial = decltype(partial)::value;
    reg acc[MR][N];
#pragma GCC unroll 4
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
      for (int u = 0; u < N; ++u) {
        acc[r][u] = o.first ? V::broadcast(o.start + r) : V::load(o.chains + r * o.row_pitch + x + u * L);
      }
    }
#pragma GCC unroll 8
    for (int s = 0; s < NK; ++s) {
      const S* const plane = o.planes + s * o.plane_pitch + x;
      reg v[N];
#pragma GCC unroll 8
      for (int u = 0; u < N; ++u) v[u] = kPartial ? load_as_partial(plane, lanes) : load_as(plane + u * L);
#pragma GCC unroll 4
      for (int r = 0; r < MR; ++r) {
        const reg w = V::broadcast(o.weights + s * MR + r);
#pragma GCC unroll 8
        for (int u = 0; u < N; ++u) acc[r][u] = V::fma(w, v[u], acc[r][u]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
      for (int u = 0; u < N; ++u) {
        const int64_t at = r * o.row_pitch + x + u * L;
        if (!o.chain_ends) {
          V::store(o.chains + at, acc[r][u]);
          continue;
        }
        V::store(o.sums + at, o.adds ? V::add(V::load(o.sums + at), acc[r][u]) : acc[r][u]);
      }
    }
  };

  int64_t x = 0;
  for (; x + NU * L <= o.pixels; x += NU * L) {
    if (x < o.next_pixels) {
#pragma GCC unroll 8
      for (int s = 0; s < NK; ++s) __builtin_prefetch(o.planes + s * o.plane_pitch + o.next + x);
    }
    sum_pixels(x, std::integral_constant<int, NU>{}, std::false_type{}, L);
  }
  for (; x + L <= o.pixels; x += L) sum_pixels(x, std::integral_constant<int, 1>{}, std::false_type{}, L);
  if (x < o.pixels) sum_pixels(x, std::integral_constant<int, 1>{}, std::true_type{}, int(o.pixels - x));
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
