// The micro-kernel family amx_ukernel_bf16_<rows>x<columns>__amx: sums of GEMMs in AMX tiles.
//
//   C[j][0:NR]  =  (C[j][0:NR] if accumulate) + sum over steps s and channels c of a step of
//                      B[row(j) + k_offset[s]].channel[c] * A(s, c)[0:NR]
//
// for the rows j of up to four tiles, NR = 16 or 32. A step is 32 channels (columns_per_step: of one tap or of
// several), and one multiplication of tiles: isa/amx.h has its order of summation. Steps are added to C one after the
// other; the sums stay in their tiles meanwhile.
//
// A: packed weights (pack/amx.h): for each 16 columns `depth` steps of 16 blocks, a_pitch blocks from columns to
//    columns. Row p of a step's tile holds channels 2p and 2p + 1 of its columns, in pairs. They stream from L2.
// B: a source patch of blocks, or the source itself. 16 pixels at an even distance are a tile as they lie in memory,
//    im2col by addresses; neighbouring taps find them in L1. Others are copied together.
// C: rows of NR float32, one after the other.
//
// Four tiles are sums, two hold pixels and two weights: a step of 32 x 32 sums takes four loads of tiles (8 cycles each
// from L1) beside four multiplications (16 cycles each). 16 columns take 64 rows and five loads.
#pragma once

#include "../isa/amx.h"
#include "../isa/convert.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// The rows of a tile, 16 or what is left of them, and where their operands lie.
struct RowTile {
  int64_t first;          // the first row's offset from B
  int64_t pitch;          // blocks from row to row, where all 16 may be read; else 0:
  const int64_t* offset;  // of each row from B
  int64_t count;
};

// The tiles of `count` rows at these offsets.
CONV2D_INLINE RowTile row_tile_at(const int64_t* offset, int64_t count) {
  const int64_t step = count > 1 ? offset[1] - offset[0] : 0;
  int64_t uneven = count == kTileRows ? 0 : 1;
  for (int64_t i = 1; i < count; ++i) uneven |= (offset[i] - offset[i - 1]) ^ step;
  return {offset[0], uneven != 0 ? 0 : step, offset, count};
}

struct AmxOperands {
  int64_t depth;
  const BFloat16Block* a;
  int64_t a_pitch;
  const BFloat16Block* b;
  const int64_t* k_offset;
  float* c;
  bool accumulate;
};

// The pixels of a step that are not at an even distance, together. Rows that there are no pixels for keep what they
// hold, and their sums are dropped. (Apart, for the sake of the registers of the loop that seldom calls it.)
__attribute__((noinline)) inline void copy_pixels(const RowTile& rows, const BFloat16Block* data, BFloat16Block* copy) {
  using V = Vec<float>;
  for (int64_t i = 0; i < rows.count; ++i) {
    const float* const pixel = reinterpret_cast<const float*>(data + rows.offset[i]);
    // Whole lines, which the load of the tile takes from the stores before it.
    for (int64_t at = 0; at < kTileColumns; at += V::kLanes) {
      V::store(reinterpret_cast<float*>(copy + i) + at, V::load(pixel + at));
    }
  }
}

template <int N, int64_t kPitch>
CONV2D_INLINE void load_sums(const float* c, int64_t count) {
  if (count == kTileRows) return tile_load<N>(c, kPitch * int64_t(sizeof(float)));
  alignas(64) float sums[kTileRows * kTileColumns] = {};
  for (int64_t i = 0; i < count; ++i) __builtin_memcpy(sums + i * kTileColumns, c + i * kPitch, size_t(kTileBytes));
  tile_load<N>(sums, kTileBytes);
}

template <int N, int64_t kPitch>
CONV2D_INLINE void store_sums(float* c, int64_t count) {
  if (count == kTileRows) return tile_store<N>(c, kPitch * int64_t(sizeof(float)));
  alignas(64) float sums[kTileRows * kTileColumns];
  tile_store<N>(sums, kTileBytes);
  for (int64_t i = 0; i < count; ++i) __builtin_memcpy(c + i * kPitch, sums + i * kTileColumns, size_t(kTileBytes));
}

// Storing a tile takes a thousand cycles where for two thousand no arithmetic on vectors of 64 bytes was done: a unit
// of theirs has gone to sleep (Granite Rapids). An addition a step keeps it awake; loads, stores and logic don't.
CONV2D_INLINE void keep_awake([[maybe_unused]] Vec<float>::reg& zero) {
#if !defined(CONV2D_AMX_EMULATED)
  __asm__ volatile("vaddps %0, %0, %0" : "+v"(zero));
#endif
}

// visit(integral_constant<int, i>) for i in [0, N).
template <int... kIndex, class Visit>
CONV2D_INLINE void unroll(std::integer_sequence<int, kIndex...>, const Visit& visit) {
  (visit(std::integral_constant<int, kIndex>()), ...);
}

// What a micro-kernel does between its tiles: nothing, or LineStores (pack/line_stores.h).
struct NothingInterleaved {
  static constexpr bool kAccumulates = true;
  struct Pending {};
  CONV2D_INLINE explicit NothingInterleaved(const Pending&) {}
  CONV2D_INLINE void advance() {}
  CONV2D_INLINE void finish() {}
};

// C of R x C tiles (rows, columns), the last rows of which may be fewer than 16. Tiles: sums are 0 to 3, pixels 4 and
// 5, weights 6 and 7.
template <int R, int C, class Interleaved>
void amx_ukernel(const AmxOperands& operands, const RowTile* rows, float* c_data,
                 const typename Interleaved::Pending& pending) {
  Interleaved interleaved(pending);
  static_assert(R * C <= 4 && C <= 2);
  using RowTiles = std::make_integer_sequence<int, R>;
  using ColumnTiles = std::make_integer_sequence<int, C>;
  alignas(64) BFloat16Block copies[R][kTileRows];
  int64_t first[R], pitch[R];  // which the loop keeps in registers
  for (int64_t r = 0; r < R; ++r) {
    first[r] = rows[r].first;
    pitch[r] = rows[r].pitch * int64_t(sizeof(BFloat16Block));
    if (pitch[r] == 0 && rows[r].count < kTileRows) fill_zero(copies[r], kTileRows);
  }
  constexpr int64_t kPitch = C * kTileColumns;
  const int64_t depth = operands.depth, a_pitch = operands.a_pitch;
  const BFloat16Block *a = operands.a, *const b = operands.b;
  const int64_t* const k_offset = operands.k_offset;
  unroll(RowTiles(), [&](auto r) CONV2D_INLINE_LAMBDA {
    unroll(ColumnTiles(), [&](auto c) CONV2D_INLINE_LAMBDA {
      if (!Interleaved::kAccumulates || !operands.accumulate) return tile_zero<r() * C + c()>();
      const float* const sums = c_data + r() * kTileRows * kPitch + c() * kTileColumns;
      load_sums<r() * C + c(), kPitch>(sums, rows[r()].count);
    });
  });
  Vec<float>::reg zero = Vec<float>::zero();
  for (int64_t s = 0; s < depth; ++s, a += kTileRows) {
    keep_awake(zero);
    const BFloat16Block* const data = b + k_offset[s];
    unroll(ColumnTiles(), [&](auto c) CONV2D_INLINE_LAMBDA { tile_load<6 + c()>(a + c() * a_pitch, kTileBytes); });
    unroll(RowTiles(), [&](auto r) CONV2D_INLINE_LAMBDA {
      if (__builtin_expect(pitch[r()] != 0, 1)) {
        tile_load<4 + r() % 2>(data + first[r()], pitch[r()]);
      } else {
        copy_pixels(rows[r()], data, copies[r()]);
        tile_load<4 + r() % 2>(copies[r()], kTileBytes);
      }
      unroll(ColumnTiles(), [&](auto c) CONV2D_INLINE_LAMBDA {
        tile_multiply<r() * C + c(), 4 + r() % 2, 6 + c()>();
        interleaved.advance();
      });
    });
  }
  unroll(RowTiles(), [&](auto r) CONV2D_INLINE_LAMBDA {
    unroll(ColumnTiles(), [&](auto c) CONV2D_INLINE_LAMBDA {
      store_sums<r() * C + c(), kPitch>(c_data + r() * kTileRows * kPitch + c() * kTileColumns, rows[r()].count);
      interleaved.advance();
    });
  });
  interleaved.finish();
}

// Tiles of rows that a micro-kernel takes.
constexpr int64_t amx_row_tiles(int64_t vectors) { return vectors == 2 ? 2 : 4; }

template <class Interleaved>
using AmxUkernel = void (*)(const AmxOperands&, const RowTile*, float*, const typename Interleaved::Pending&);
// Those of C vectors, for each number of tiles of rows.
template <int C, class Interleaved>
inline constexpr AmxUkernel<Interleaved> kAmxUkernels[] = {
    amx_ukernel<1, 1, Interleaved>, amx_ukernel<2, 1, Interleaved>, amx_ukernel<3, 1, Interleaved>,
    amx_ukernel<4, 1, Interleaved>};
template <class Interleaved>
inline constexpr AmxUkernel<Interleaved> kAmxUkernels<2, Interleaved>[] = {amx_ukernel<1, 2, Interleaved>,
                                                                           amx_ukernel<2, 2, Interleaved>};

// C (rows x 16 or 32) for any number of tiles of rows. (Operands are not copied: a copy's loads would be wider than the
// stores that they wait for, and behind these stand all stores of sums.)
inline void amx_panel(const RowTile* rows, int64_t tiles, int64_t vectors, const AmxOperands& operands) {
  const auto* const ukernels = vectors == 2 ? kAmxUkernels<2, NothingInterleaved> : kAmxUkernels<1, NothingInterleaved>;
  const int64_t most = amx_row_tiles(vectors);
  for (int64_t tile = 0; tile < tiles; tile += most) {
    const int64_t now = min64(most, tiles - tile);
    ukernels[now - 1](operands, rows + tile, operands.c + tile * kTileRows * vectors * kTileColumns, {});
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
