// The micro-kernel family pixel_ukernel_<dtype>_<MR>x<NR>__<isa>, from one template: vectors of neighbouring pixels.
//
//   C[j][0:NR]  =  (C[j][0:NR] if accumulate) + sum over k of W[j][k] * B[k_offset[k]][0:NR]     for 0 <= j < MR
//
// with a scalar bias[j] added after the last product where there is one.
//
// W: MR rows of weights, `w_pitch` apart, k contiguous: the weight tensor itself, or a copy in scratch.
// B: a planar source patch. k_offset, a tap of a channel, is the im2col; NR neighbours of it are NR result pixels.
// C: MR rows of pixels, `c_pitch` apart: planes of the result tensor itself, or scratch.
//
// Where kernels/gemm.h holds vectors of result channels, and so packs weights and transposes results, this one packs no
// weight and stores planes as they lie. It wants neighbouring pixels: a step of one along the row.
//
// Order of summation: that of kernels/gemm.h, chain for chain. start: MR scalars that the chains start from, zeros or
// (where K is a single chain) the bias.
//
// Registers: MR * NV accumulators, NV vectors of pixels, one broadcast weight. AVX2 4x3: 16 of 16; AVX-512 6x4: 29
// of 32. Fewer rows take more vectors (pixel_panel_vectors, plan/tile_pixels.h).
#pragma once

#include "gemm.h"
#include "vector_shape.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class T>
struct PixelOperands {
  int64_t depth, chain;
  const T* w;
  int64_t w_pitch;
  const T* b;
  const int64_t* k_offset;
  const T* start;
  const T* bias;  // or nullptr
  T* c;
  int64_t c_pitch;
  bool accumulate;
};

template <class T, int MR, int NV>
void pixel_ukernel(const PixelOperands<T>& operands) {
  using V = Vec<T>;
  using reg = typename V::reg;
  const T* wj[MR];
#pragma GCC unroll 8
  for (int j = 0; j < MR; ++j) {
    wj[j] = operands.w + j * operands.w_pitch;
    // Kept as pointers: else the compiler recomputes them from w_pitch.
    __asm__("" : "+r"(wj[j]));
  }
  const T* const b = operands.b;
  const int64_t* const k_offset = operands.k_offset;
  const int64_t depth = operands.depth;
  bool accumulate = operands.accumulate;
  // Successive k lie in different planes, which hardware prefetchers don't follow from panel to panel. One or two rows,
  // which compute hardly longer than memory takes, ask in every step for the next panel but one; for more rows the
  // driver asks (drivers/pixels.h), since here the requests would cost more than they save.
  constexpr bool kAsksAhead = MR <= 2;
  // Planes of the result are often farther away than L2: their lines are asked for before the first chain.
  constexpr int kPanel = NV * V::kLanes, kLine = 64 / int(sizeof(T));
  T* planes = operands.c;
#pragma GCC unroll 8
  for (int j = 0; j < MR; ++j, planes += operands.c_pitch) {
#pragma GCC unroll 4
    for (int x = 0; x < kPanel; x += kLine) __builtin_prefetch(planes + x, 1);
    __builtin_prefetch(planes + kPanel - 1, 1);
  }

  for (int64_t k = 0; k != depth;) {
    const int64_t chain_end = min64(k + operands.chain, depth);
    reg acc[MR][NV];
#pragma GCC unroll 8
    for (int j = 0; j < MR; ++j) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[j][v] = V::broadcast(operands.start + j);
    }

    const auto step = [&](int64_t at) CONV2D_INLINE_LAMBDA {
      const T* pixels = b + k_offset[at];
      if constexpr (kAsksAhead) {
#pragma GCC unroll 4
        for (int x = 0; x + kLine <= kPanel; x += kLine) __builtin_prefetch(pixels + 2 * kPanel + x);
      }
      reg bv[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) bv[v] = V::load(pixels + v * V::kLanes);
#pragma GCC unroll 8
      for (int j = 0; j < MR; ++j) {
        const reg wv = V::broadcast(wj[j] + at);
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) multiply_add<T>(acc[j][v], wv, bv[v]);
      }
      end_step<T>(pixels);
    };
    if constexpr (kInRounds<T>) {
      for (const int64_t end = k + ((chain_end - k) & ~int64_t{3}); k != end; k += 4) {
        // Kept as an index: else some compilers advance a pointer for each row.
        __asm__("" : "+r"(k));
        step(k);
        step(k + 1);
        step(k + 2);
        step(k + 3);
      }
    }
    for (; k != chain_end; ++k) {
      __asm__("" : "+r"(k));
      step(k);
    }

    T* c = operands.c;
    const bool add_bias = operands.bias != nullptr && k == depth;
#pragma GCC unroll 8
    for (int j = 0; j < MR; ++j, c += operands.c_pitch) {
      if (accumulate) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[j][v] = V::add(V::load(c + v * V::kLanes), acc[j][v]);
      }
      if (add_bias) {
        const reg bias = V::broadcast(operands.bias + j);
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[j][v] = V::add(acc[j][v], bias);
      }
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) V::store(c + v * V::kLanes, acc[j][v]);
    }
    accumulate = true;
  }
}

template <class T>
using PixelUkernel = void (*)(const PixelOperands<T>&);

template <class T, int MR>
CONV2D_INLINE PixelUkernel<T> pixel_ukernel_of(int64_t vectors) {
  constexpr int64_t kWidest = pixel_panel_vectors(MR, vector_shape<T>());
  if constexpr (kWidest >= 4) {
    if (vectors == 4) return pixel_ukernel<T, MR, 4>;
  }
  if constexpr (kWidest >= 3) {
    if (vectors == 3) return pixel_ukernel<T, MR, 3>;
  }
  return vectors == 2 ? pixel_ukernel<T, MR, 2> : pixel_ukernel<T, MR, 1>;
}
template <class T>
PixelUkernel<T> pixel_ukernel_for(int64_t rows, int64_t vectors) {
  const auto of = [vectors](auto mr) { return pixel_ukernel_of<T, decltype(mr)::value>(vectors); };
  if constexpr (pixel_rows(vector_shape<T>()) > 4) {
    return with_constant<1, 2, 3, 4, 5, 6>(rows, of);
  } else {
    return with_constant<1, 2, 3, 4>(rows, of);
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
