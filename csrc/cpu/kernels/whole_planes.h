// The micro-kernel family whole_plane_ukernel_<dtype>_<MR>x<NR>__<isa>, from one template: that of kernels/pixels.h
// where planes are read and summed in place, with all of K at once.
//
//   C[j][0:NR]  =  sum over k of W[j][k] * B[k][0:NR] + bias[j]     for 0 <= j < MR
//
// for `blocks` blocks of MR rows, and in each of them for `panels` panels of neighbouring pixels. A block takes all
// panels before the next block, so that a plane of the result is written in long runs; the pixels, which all blocks
// read, stay in L2 meanwhile.
//
// W: rows of weights, `w_pitch` apart, k contiguous: the weight tensor itself, or a copy in scratch.
// B: planes of the source tensor, `plane_pitch` apart, one for each k.
// C: planes of the result tensor, `c_pitch` apart. A panel that would begin after pixel `last` begins there: its first
// pixels are computed twice, to the same bits, and none beyond the end.
//
// Order of summation: that of kernels/gemm.h, chain for chain. A chain ends after `chain` products and with each
// segment; the sums of the chains before wait in L1: a vector of the result mostly lies in two lines, and each row in a
// page of its own.
//
// Registers: as in kernels/pixels.h. Each step asks for pixels `ahead` of those that it reads: no hardware prefetcher
// follows them from plane to plane. The result is not prefetched: that cost up to 20 % of the time (Emerald Rapids).
#pragma once

#include "pixels.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class T>
struct WholePlaneOperands {
  int64_t depth, segment, chain;  // 1 and more
  const T* w;
  int64_t w_pitch;
  const T* planes;
  int64_t plane_pitch;
  int64_t ahead;   // elements
  const T* start;  // of each row's chains, or nullptr: zero
  const T* bias;
  T* c;
  int64_t c_pitch;
  int64_t blocks, panels, last;
};

// One panel of one block.
template <class T, int MR, int NV>
CONV2D_INLINE void multiply_whole_planes(const WholePlaneOperands<T>& operands, WeightPointers<T, MR> weights,
                                         const T* pixels, T* c) {
  using V = Vec<T>;
  using reg = typename V::reg;
  constexpr int kPanel = NV * V::kLanes, kLine = 64 / int(sizeof(T));
  const int64_t plane_pitch = operands.plane_pitch, ahead = operands.ahead;
  int64_t left = operands.depth, segment = min64(operands.segment, left), chain = min64(operands.chain, segment);
  alignas(64) T sums[MR][kPanel];  // of the chains before
  reg acc[MR][NV];
  for (bool is_first = true;; is_first = false) {
    if (operands.start == nullptr) {
#pragma GCC unroll 8
      for (int j = 0; j < MR; ++j) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[j][v] = V::zero();
      }
    } else {
#pragma GCC unroll 8
      for (int j = 0; j < MR; ++j) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[j][v] = V::broadcast(operands.start + j);
      }
    }
    left -= chain;
    segment -= chain;
    for (int64_t k = chain; k != 0; --k) {
#pragma GCC unroll 4
      for (int x = 0; x < kPanel; x += kLine) __builtin_prefetch(pixels + ahead + x);
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
      pixels += plane_pitch;
      // Kept as a pointer and a count: else the compiler advances more of them.
      __asm__("" : "+r"(pixels), "+r"(k));
    }
    if (!is_first) {
#pragma GCC unroll 8
      for (int j = 0; j < MR; ++j) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[j][v] = V::add(V::load(sums[j] + v * V::kLanes), acc[j][v]);
      }
    }
    if (left == 0) break;
#pragma GCC unroll 8
    for (int j = 0; j < MR; ++j) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) V::store(sums[j] + v * V::kLanes, acc[j][v]);
    }
    if (segment == 0) segment = min64(operands.segment, left);
    chain = min64(operands.chain, segment);
  }
  // Not before: rows' addresses would take registers of the loop.
  const T* bias = operands.bias;
  __asm__("" : "+r"(c), "+r"(bias));
#pragma GCC unroll 8
  for (int j = 0; j < MR; ++j, c += operands.c_pitch) {
    const reg b = V::broadcast(bias + j);
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) V::store(c + v * V::kLanes, V::add(acc[j][v], b));
  }
}

template <class T, int MR, int NV>
void whole_plane_ukernel(const WholePlaneOperands<T>& operands) {
  WholePlaneOperands<T> block = operands;
  for (int64_t n = 0; n < operands.blocks; ++n) {
    const WeightPointers<T, MR> weights(block.w, block.w_pitch);
    for (int64_t p = 0; p < operands.panels; ++p) {
      const int64_t pixel = min64(p * NV * Vec<T>::kLanes, operands.last);
      multiply_whole_planes<T, MR, NV>(block, weights, block.planes + pixel, block.c + pixel);
    }
    block.w += MR * block.w_pitch;
    if (block.start != nullptr) block.start += MR;
    block.bias += MR;
    block.c += MR * block.c_pitch;
  }
}

template <class T>
using WholePlaneUkernel = void (*)(const WholePlaneOperands<T>&);

template <class T>
WholePlaneUkernel<T> whole_plane_ukernel_for(int64_t rows, int64_t vectors) {
  return with_pixel_shape<T>(rows, vectors, [](auto mr, auto nv) -> WholePlaneUkernel<T> {
    return whole_plane_ukernel<T, decltype(mr)::value, decltype(nv)::value>;
  });
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
