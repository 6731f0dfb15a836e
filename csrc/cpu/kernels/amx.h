// The micro-kernel family amx_ukernel_bf16_<rows>x<columns>__amx: sums of GEMMs in AMX tiles.
//
//   C[j][0:NR]  =  (C[j][0:NR] if accumulate) + sum over steps s and channels c of a step of
//                      B[j_offset[j] + k_offset[s]].channel[c] * A(s, c)[0:NR]
//
// for 0 <= j < rows, NR = 16 or 32. A step is 32 channels at one tap, and one multiplication of tiles: isa/amx.h has
// its order of summation. Steps are added to C one after the other.
//
// A: packed weights (pack/amx.h): for each 16 columns `depth` steps of 16 blocks, a_pitch blocks from columns to
//    columns. Row p of a step's tile holds channels 2p and 2p + 1 of its columns, in pairs.
// B: a source patch of blocks, or the source itself, where neighbouring pixels are at an even distance in most places:
//    16 of them are then a tile as they lie in memory, im2col by addresses. Others are copied together.
// C: rows of NR float32, `c_pitch` apart.
//
// Four tiles are sums, two hold pixels and two weights: a step of 32 x 32 sums takes four loads of tiles (8 cycles each
// from L1) beside four multiplications (16 cycles each). 16 columns take 64 rows and five loads.
#pragma once

#include "../isa/amx.h"
#include "gemm.h"
#include "vector_shape.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// Steps of packed weights that all rows of C use before the next ones: 36 KiB of 32 columns stay in L1 beside the
// pixels that neighbouring taps share. Sums wait in C meanwhile, which changes no bit.
constexpr int64_t kAmxPass = 18;

// 16 or fewer rows of C: where their pixels lie, and their sums.
struct AmxRows {
  const BFloat16Block* first;  // the first pixel
  const int64_t* offset;       // of each, from B
  int64_t count, pitch;        // pixels; the bytes between them where they are 16 at an even distance, else 0
  float* c;
};

CONV2D_INLINE AmxRows amx_rows_at(const GemmOperands<float>& operands, int64_t first, int64_t count) {
  const int64_t* const offset = operands.j_offset + first;
  const int64_t step = count > 1 ? offset[1] - offset[0] : 0;
  int64_t uneven = count == kTileRows ? 0 : 1;
  for (int64_t i = 1; i < count; ++i) uneven |= (offset[i] - offset[i - 1]) ^ step;
  return {operands.b + offset[0], offset, count, uneven != 0 ? 0 : step * int64_t(sizeof(BFloat16Block)),
          operands.c + first * operands.c_pitch};
}

// The pixels of a step that are not at an even distance, together. Rows that there are no pixels for keep what they
// hold, and their sums are dropped. (Apart, for the sake of the registers of the loop that seldom calls it.)
__attribute__((noinline)) inline void copy_pixels(const AmxRows& rows, int64_t k_offset, BFloat16Block* copy) {
  using V = Vec<float>;
  const BFloat16Block* const data = rows.first - rows.offset[0] + k_offset;
  for (int64_t i = 0; i < rows.count; ++i) {
    const float* const pixel = reinterpret_cast<const float*>(data + rows.offset[i]);
    // Whole lines, which the load of the tile takes from the stores before it.
    for (int64_t at = 0; at < kTileColumns; at += V::kLanes) {
      V::store(reinterpret_cast<float*>(copy + i) + at, V::load(pixel + at));
    }
  }
}

// Loads tile N with a step's pixels. `copy`: room for a tile.
template <int N>
CONV2D_INLINE void load_pixels(const AmxRows& rows, int64_t k_offset, BFloat16Block* copy) {
  if (__builtin_expect(rows.pitch != 0, 1)) return tile_load<N>(rows.first + k_offset, rows.pitch);
  copy_pixels(rows, k_offset, copy);
  tile_load<N>(copy, kTileBytes);
}

template <int N>
CONV2D_INLINE void load_sums(const AmxRows& rows, int64_t column, int64_t c_pitch, bool accumulate) {
  if (!accumulate) return tile_zero<N>();
  float* const c = rows.c + column;
  if (rows.count == kTileRows) return tile_load<N>(c, c_pitch * int64_t(sizeof(float)));
  alignas(64) float sums[kTileRows * kTileColumns] = {};
  for (int64_t i = 0; i < rows.count; ++i) {
    __builtin_memcpy(sums + i * kTileColumns, c + i * c_pitch, size_t(kTileBytes));
  }
  tile_load<N>(sums, kTileBytes);
}

template <int N>
CONV2D_INLINE void store_sums(const AmxRows& rows, int64_t column, int64_t c_pitch) {
  float* const c = rows.c + column;
  if (rows.count == kTileRows) return tile_store<N>(c, c_pitch * int64_t(sizeof(float)));
  alignas(64) float sums[kTileRows * kTileColumns];
  tile_store<N>(sums, kTileBytes);
  for (int64_t i = 0; i < rows.count; ++i) {
    __builtin_memcpy(c + i * c_pitch, sums + i * kTileColumns, size_t(kTileBytes));
  }
}

// visit(integral_constant<int, i>) for i in [0, N).
template <int... kIndex, class Visit>
CONV2D_INLINE void unroll(std::integer_sequence<int, kIndex...>, const Visit& visit) {
  (visit(std::integral_constant<int, kIndex>()), ...);
}

// C of up to R x C tiles (rows, columns), the last rows of which may be fewer than 16. Tiles: sums are 0 to 3, pixels 4
// and 5, weights 6 and 7.
template <int R, int C>
void amx_ukernel(const GemmOperands<float>& operands, int64_t rows) {
  static_assert(R * C <= 4 && C <= 2);
  using RowTiles = std::make_integer_sequence<int, R>;
  using ColumnTiles = std::make_integer_sequence<int, C>;
  alignas(64) BFloat16Block copies[R][kTileRows];
  AmxRows at[R];
  for (int64_t r = 0; r < R; ++r) {
    at[r] = amx_rows_at(operands, r * kTileRows, min64(kTileRows, rows - r * kTileRows));
    if (at[r].count < kTileRows) fill_zero(copies[r], kTileRows);
  }
  const int64_t c_pitch = operands.c_pitch, depth = operands.depth, a_pitch = operands.a_pitch;
  const BFloat16Block* a = operands.a;
  const int64_t* const k_offset = operands.k_offset;
  const bool accumulate = operands.accumulate;
  unroll(RowTiles(), [&](auto r) CONV2D_INLINE_LAMBDA {
    unroll(ColumnTiles(), [&](auto c) CONV2D_INLINE_LAMBDA {
      load_sums<r() * C + c()>(at[r()], c() * kTileColumns, c_pitch, accumulate);
    });
  });
  for (int64_t s = 0; s < depth; ++s, a += kTileRows) {
    const int64_t offset = k_offset[s];
    unroll(ColumnTiles(), [&](auto c) CONV2D_INLINE_LAMBDA { tile_load<6 + c()>(a + c() * a_pitch, kTileBytes); });
    unroll(RowTiles(), [&](auto r) CONV2D_INLINE_LAMBDA {
      load_pixels<4 + r() % 2>(at[r()], offset, copies[r()]);
      unroll(ColumnTiles(), [&](auto c) CONV2D_INLINE_LAMBDA { tile_multiply<r() * C + c(), 4 + r() % 2, 6 + c()>(); });
    });
  }
  unroll(RowTiles(), [&](auto r) CONV2D_INLINE_LAMBDA {
    unroll(ColumnTiles(),
           [&](auto c) CONV2D_INLINE_LAMBDA { store_sums<r() * C + c()>(at[r()], c() * kTileColumns, c_pitch); });
  });
}

// C (rows x 16 or 32) for any number of rows.
inline void amx_panel(int64_t rows, int64_t vectors, const GemmOperands<float>& operands) {
  using Ukernel = void (*)(const GemmOperands<float>&, int64_t);
  static constexpr Ukernel kOneColumn[] = {amx_ukernel<1, 1>, amx_ukernel<2, 1>, amx_ukernel<3, 1>, amx_ukernel<4, 1>};
  static constexpr Ukernel kTwoColumns[] = {amx_ukernel<1, 2>, amx_ukernel<2, 2>};
  const Ukernel* const ukernels = vectors == 2 ? kTwoColumns : kOneColumn;
  const int64_t most = amx_rows(vectors), pass = even_piece(operands.depth, kAmxPass);
  for (int64_t s = 0; s < operands.depth; s += pass) {
    GemmOperands<float> now = operands;
    now.depth = min64(pass, operands.depth - s);
    now.a += s * kTileRows;
    now.k_offset += s;
    now.accumulate = operands.accumulate || s > 0;
    for (int64_t row = 0; row < rows; row += most) {
      const int64_t block = min64(most, rows - row);
      ukernels[div_up(block, kTileRows) - 1](now, block);
      now.j_offset += block;
      now.c += block * now.c_pitch;
    }
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
