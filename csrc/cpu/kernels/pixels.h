// The micro-kernel family pixel_ukernel_<dtype>_<MR>x<NR>__<isa>, from one template: vectors of neighbouring pixels.
//
//   C[j][0:NR]  =  (C[j][0:NR] if accumulate) + sum over k of W[j][k] * B[k][0:NR]     for 0 <= j < MR
//
// for each of `blocks` blocks of MR rows, which follow one another; with a scalar bias[j] added after the last product
// where there is one.
//
// W: rows of weights, `w_pitch` apart, k contiguous: the weight tensor itself, or a copy in scratch.
// B: neighbouring pixels of a planar source, of which NR are NR result pixels. Steps::kTaps: k_offset[k], a tap of a
// channel, is the im2col. Steps::kPlanes: of a 1x1 kernel, b_pitch * k: planes of the source tensor, of all channels.
// C: rows of pixels, `c_pitch` apart: planes of the result tensor itself, or scratch.
//
// Where kernels/gemm.h holds vectors of result channels, and so packs weights and transposes results, this one packs no
// weight and stores planes as they lie. It wants neighbouring pixels: a step of one along the row.
//
// Order of summation: that of kernels/gemm.h, chain for chain. start: a scalar for each row that its chains start from,
// zero or (where K is a single chain) the bias.
//
// Registers: MR * NV accumulators, NV vectors of pixels, one broadcast weight. AVX2 4x3: 16 of 16; AVX-512 8x3: 28
// of 32, and 11 loads for 24 multiply-adds; what else a step does to integers competes with these for execution ports.
// Fewer rows take more vectors (pixel_panel_vectors, plan/tile_pixels.h).
#pragma once

#include "gemm.h"
#include "vector_shape.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

enum class Steps { kTaps, kPlanes };

template <class T>
struct PixelOperands {
  int64_t depth, chain;
  const T* w;
  int64_t w_pitch;
  const T* b;
  const int64_t* k_offset;  // kTaps
  int64_t b_pitch;          // kPlanes
  const T* start;
  const T* bias;  // or nullptr
  T* c;
  int64_t c_pitch;
  bool accumulate;
  int64_t blocks;
  // kTaps of more than two rows: each block asks for so many steps of the next panel, after those that the block before
  // has asked for: `next_pixels` elements, which lie `next` after this panel's.
  int64_t asked_steps, first_asked, next, next_pixels;
};

// Rows of weights that have a pointer each would leave too few registers: four share one.
template <class T, int MR>
struct WeightPointers {
  const char* rows[(MR + 3) / 4];
  int64_t pitch, pitch_of_three;

  CONV2D_INLINE WeightPointers(const T* w, int64_t elements) {
    pitch = elements * int64_t(sizeof(T));
    pitch_of_three = 3 * pitch;
    // Kept in registers: else the compiler computes them anew.
    __asm__("" : "+r"(pitch), "+r"(pitch_of_three));
    for (int p = 0; p < (MR + 3) / 4; ++p) rows[p] = reinterpret_cast<const char*>(w + 4 * p * elements);
  }
  CONV2D_INLINE const T* row(int j) const {
    return reinterpret_cast<const T*>(rows[j / 4] + (j % 4 == 3 ? pitch_of_three : j % 4 * pitch));
  }
  CONV2D_INLINE void step() {
#pragma GCC unroll 2
    for (int p = 0; p < (MR + 3) / 4; ++p) {
      rows[p] += sizeof(T);
      __asm__("" : "+r"(rows[p]));
    }
  }
};

// One block.
template <class T, int MR, int NV, Steps kSteps>
CONV2D_INLINE void multiply_pixels(const PixelOperands<T>& operands) {
  using V = Vec<T>;
  using reg = typename V::reg;
  constexpr int kPanel = NV * V::kLanes, kLine = 64 / int(sizeof(T));
  // Successive k lie in different planes, which hardware prefetchers don't follow from panel to panel. One or two rows,
  // which compute hardly longer than memory takes, ask in every step for the next panel but one. More rows ask for
  // their share of the next panel at once. A panel of whole planes exceeds L1: each step asks for the pixels that the
  // panel's step kStepsAhead later reads.
  constexpr bool kAsksEachStep = kSteps == Steps::kTaps && MR <= 2;
  constexpr int kStepsAhead = 8;
  WeightPointers<T, MR> weights(operands.w, operands.w_pitch);
  const T* const b = operands.b;
  const int64_t* const k_offset = operands.k_offset;
  const T *plane = b, *plane_ahead = b + (kSteps == Steps::kPlanes ? kStepsAhead * operands.b_pitch : 0);
  const int64_t b_pitch = operands.b_pitch;
  if constexpr (kSteps == Steps::kTaps && !kAsksEachStep) {
    const int64_t end = min64(operands.first_asked + operands.asked_steps, operands.depth);
    for (int64_t k = operands.first_asked; k < end; ++k) {
      for (int64_t x = 0; x < operands.next_pixels; x += kLine) __builtin_prefetch(b + k_offset[k] + operands.next + x);
    }
  }
  const int64_t depth = operands.depth;
  bool accumulate = operands.accumulate;
  // Planes of the result are often farther away than L2: their lines are asked for before the first chain.
  T* result = operands.c;
#pragma GCC unroll 8
  for (int j = 0; j < MR; ++j, result += operands.c_pitch) {
#pragma GCC unroll 4
    for (int x = 0; x < kPanel; x += kLine) __builtin_prefetch(result + x, 1);
    __builtin_prefetch(result + kPanel - 1, 1);
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
      const T* pixels = kSteps == Steps::kPlanes ? plane : b + k_offset[at];
      if constexpr (kAsksEachStep) {
#pragma GCC unroll 4
        for (int x = 0; x + kLine <= kPanel; x += kLine) __builtin_prefetch(pixels + 2 * kPanel + x);
      }
      if constexpr (kSteps == Steps::kPlanes) {
#pragma GCC unroll 4
        for (int x = 0; x < kPanel; x += kLine) __builtin_prefetch(plane_ahead + x);
      }
      reg bv[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) bv[v] = V::load(pixels + v * V::kLanes);
#pragma GCC unroll 8
      for (int j = 0; j < MR; ++j) {
        const reg wv = V::broadcast(weights.row(j));
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) multiply_add<T>(acc[j][v], wv, bv[v]);
      }
      weights.step();
      if constexpr (kSteps == Steps::kPlanes) {
        plane += b_pitch;
        plane_ahead += b_pitch;
        __asm__("" : "+r"(plane), "+r"(plane_ahead));
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

template <class T, int MR, int NV, Steps kSteps>
void pixel_ukernel(const PixelOperands<T>& operands) {
  PixelOperands<T> block = operands;
  for (int64_t n = 0; n < operands.blocks; ++n) {
    multiply_pixels<T, MR, NV, kSteps>(block);
    block.w += MR * block.w_pitch;
    block.start += MR;
    if (block.bias != nullptr) block.bias += MR;
    block.c += MR * block.c_pitch;
    block.first_asked += block.asked_steps;
  }
}

template <class T>
using PixelUkernel = void (*)(const PixelOperands<T>&);

template <class T, int MR, Steps kSteps>
CONV2D_INLINE PixelUkernel<T> pixel_ukernel_of(int64_t vectors) {
  constexpr int64_t kWidest = pixel_panel_vectors(MR, vector_shape<T>());
  if constexpr (kWidest >= 4) {
    if (vectors == 4) return pixel_ukernel<T, MR, 4, kSteps>;
  }
  if constexpr (kWidest >= 3) {
    if (vectors == 3) return pixel_ukernel<T, MR, 3, kSteps>;
  }
  return vectors == 2 ? pixel_ukernel<T, MR, 2, kSteps> : pixel_ukernel<T, MR, 1, kSteps>;
}
template <class T, Steps kSteps>
PixelUkernel<T> pixel_ukernel_for(int64_t rows, int64_t vectors) {
  const auto of = [vectors](auto mr) { return pixel_ukernel_of<T, decltype(mr)::value, kSteps>(vectors); };
  if constexpr (pixel_rows(vector_shape<T>()) > 4) {
    return with_constant<1, 2, 3, 4, 5, 6, 7, 8>(rows, of);
  } else {
    return with_constant<1, 2, 3, 4>(rows, of);
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
