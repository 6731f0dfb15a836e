// The micro-kernel family pixel_ukernel_<dtype>_<MR>x<NR>__<isa>, from one template: vectors of neighbouring pixels.
//
//   C[j][0:NR]  =  (C[j][0:NR] if accumulate) + sum over k of W[j][k] * B[k][0:NR]     for 0 <= j < MR
//
// for each of `blocks` blocks of MR rows, which follow one another; with a scalar bias[j] added after the last product
// where there is one.
//
// W: rows of weights, `w_pitch` apart, k contiguous: the weight tensor itself, or a copy in scratch.
// B: neighbouring pixels of a planar source, of which NR are NR result pixels; k_offset[k], a tap of a channel, is the
// im2col.
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
  int64_t blocks;
  // Of more than two rows each block asks for so many steps of the next panel, after those that the block before has
  // asked for: `next_pixels` elements, which lie `next` after this panel's.
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
template <class T, int MR, int NV>
CONV2D_INLINE void multiply_pixels(const PixelOperands<T>& operands) {
  using V = Vec<T>;
  using reg = typename V::reg;
  constexpr int kPanel = NV * V::kLanes, kLine = 64 / int(sizeof(T));
  // Successive k lie in different planes, which hardware prefetchers don't follow from panel to panel. One or two rows,
  // which compute hardly longer than memory takes, ask in every step for the next panel but one. More rows ask for
  // their share of the next panel at once.
  constexpr bool kAsksEachStep = MR <= 2;
  WeightPointers<T, MR> weights(operands.w, operands.w_pitch);
  const T* const b = operands.b;
  const int64_t* const k_offset = operands.k_offset;
  if constexpr (!kAsksEachStep) {
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
      const T* pixels = b + k_offset[at];
      if constexpr (kAsksEachStep) {
#pragma GCC unroll 4
        for (int x = 0; x + kLine <= kPanel; x += kLine) __builtin_prefetch(pixels + 2 * kPanel + x);
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

template <class T, int MR, int NV>
void pixel_ukernel(const PixelOperands<T>& operands) {
  PixelOperands<T> block = operands;
  for (int64_t n = 0; n < operands.blocks; ++n) {
    multiply_pixels<T, MR, NV>(block);
    block.w += MR * block.w_pitch;
    block.start += MR;
    if (block.bias != nullptr) block.bias += MR;
    block.c += MR * block.c_pitch;
    block.first_asked += block.asked_steps;
  }
}

template <class T>
using PixelUkernel = void (*)(const PixelOperands<T>&);

// visit(constant rows, constant vectors) for a block of so many rows and a panel of so many vectors.
template <class T, class Visit>
CONV2D_INLINE auto with_pixel_shape(int64_t rows, int64_t vectors, const Visit& visit) {
  return with_number<int(pixel_rows(vector_shape<T>()))>(rows, [&](auto mr) {
    constexpr int kWidest = int(pixel_panel_vectors(decltype(mr)::value, vector_shape<T>()));
    return with_number<kWidest>(vectors, [&](auto nv) { return visit(mr, nv); });
  });
}
template <class T>
PixelUkernel<T> pixel_ukernel_for(int64_t rows, int64_t vectors) {
  return with_pixel_shape<T>(rows, vectors, [](auto mr, auto nv) -> PixelUkernel<T> {
    return pixel_ukernel<T, decltype(mr)::value, decltype(nv)::value>;
  });
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
