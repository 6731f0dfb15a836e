// Packers for AMX tiles whose steps take several neighbouring columns of the kernel (columns_per_step): blocks of
// [column][channel], a column's channels filled up to a power of two. What the last step of a row lacks, and channels
// that fill up, are zeros in both operands.
#pragma once

#include "amx.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// Columns of the kernel in step `number` of a row.
inline int64_t columns_of_step(const ConvGemm& gemm, int64_t number) {
  return min64(gemm.columns, gemm.kernel_columns() - number * gemm.columns);
}

// `count` pixels of up to kWords planes, of which a row lies together, as kWords words each. (columns_per_step folds up
// to 8 channels.)
template <int kWords>
inline void interleave_words(const BFloat16* src, int64_t plane, int64_t channels, int64_t count, BFloat16* dst) {
  for (int64_t x = 0; x < count; x += 32) {
    const int64_t words = (count - x) * kWords;
    __m512i planes[kWords];
#pragma GCC unroll 16
    for (int c = 0; c < kWords; ++c) {
      // A channel that is not there has no address either.
      const bool present = c < channels;
      planes[c] = load_words(src + (present ? c * plane + x : 0), present ? mask_of_first(count - x) : 0);
    }
    interleave<Words, kWords>(planes);
#pragma GCC unroll 16
    for (int i = 0; i < kWords; ++i) {
      if (32 * i < words) store_words(dst + x * kWords + 32 * i, mask_of_first(words - 32 * i), planes[i]);
    }
  }
}

// A patch of blocks (PatchOrder::kBlocks) whose columns are expanded: a run for each step of a row, a block for each
// position. `strips`: room for kRowBlocks blocks, where the columns that a piece of a run meets lie together, row after
// row, padding included; neighbouring positions' blocks overlap there.
class ColumnPatchPacker {
 public:
  // first_step: of the patch's taps along the row.
  ColumnPatchPacker(const Patch& patch, const Source<BFloat16>& source, const ConvGemm& gemm, int64_t first_step,
                    BFloat16Block* strips)
      : patch_(patch),
        source_(source),
        gemm_(gemm),
        first_step_(first_step),
        words_(kBlockChannels / gemm.columns),
        channels_(kBlockChannels - source.missing),
        plane_(source.channel / kBlockChannels),
        strips_(strips->channel) {}

  void pack(BFloat16Block* dst) const {
    const PatchAxis& cols = patch_.cols;
    for (int64_t image = 0; image < patch_.images; ++image) {
      const BFloat16* const from = source_.data + image * source_.image;
      BFloat16Block* to = dst + image * patch_.image_pitch;
      for (int64_t run = 0; run < cols.runs; ++run, to += patch_.rows.size * cols.run_length) {
        const int64_t columns = columns_of_step(gemm_, first_step_ + run);
        // Positions whose columns fit the strips.
        const int64_t most = (limits::amx::kRowBlocks * gemm_.columns - columns) / min64(cols.run_step, columns) + 1;
        for (int64_t x = 0; x < cols.run_length; x += most) {
          const int64_t count = min64(most, cols.run_length - x), step = count > 1 ? cols.run_step : 0;
          pack_rows(from, {cols.first + run * cols.run_shift + x * cols.run_step, columns, count, step}, to + x);
        }
      }
    }
  }

 private:
  // Positions along a row: the first one's first column, the columns of each, their number, and columns between them.
  struct Positions {
    int64_t first, columns, count, step;
  };

  // All rows at these positions. As many strips as there is room for are filled before the first of them is read: a
  // load that takes from several stores waits for all stores before it. Columns between those of positions are left
  // out.
  void pack_rows(const BFloat16* from, const Positions& at, BFloat16Block* to) const {
    const PatchAxis& rows = patch_.rows;
    const bool apart = at.step > at.columns;
    const int64_t pieces = apart ? at.count : 1, piece = apart ? at.columns : (at.count - 1) * at.step + at.columns;
    const int64_t strip = pieces * piece, pitch = strip * words_, block_step = min64(at.step, at.columns) * words_;
    const int64_t most = limits::amx::kRowBlocks * gemm_.columns / strip;
    const __mmask32 mask = mask_of_first(at.columns * words_);
    for (int64_t row0 = 0; row0 < rows.size; row0 += most) {
      const int64_t end = min64(row0 + most, rows.size);
      for (int64_t row = row0; row < end; ++row) {
        const int64_t y = source_coordinate(rows, row);
        BFloat16* const dst = strips_ + (row - row0) * pitch;
        if (y < 0 || y >= source_.height) {
          fill_zero(dst, pitch);
          continue;
        }
        for (int64_t i = 0; i < pieces; ++i) {
          fill_strip(from + y * source_.row, at.first + i * at.step, piece, dst + i * piece * words_);
        }
      }
      for (int64_t row = row0; row < end; ++row) {
        const BFloat16* block = strips_ + (row - row0) * pitch;
        BFloat16Block* const dst = to + row * patch_.row_pitch;
        for (int64_t i = 0; i < at.count; ++i, block += block_step) {
          _mm512_storeu_si512(dst + i, load_words(block, mask));
        }
      }
    }
  }

  // Columns [first, first + count) of a row of the source, with zeros where it has none.
  void fill_strip(const BFloat16* row, int64_t first, int64_t count, BFloat16* dst) const {
    const Interval in = indices_inside(first, 1, count, source_.width);
    if (in.count() <= 0) return fill_zero(dst, count * words_);
    fill_zero(dst, in.begin * words_);
    fill_zero(dst + in.end * words_, (count - in.end) * words_);
    copy_columns(row + (first + in.begin) * source_.col, in.count(), dst + in.begin * words_);
  }

  void copy_columns(const BFloat16* src, int64_t count, BFloat16* dst) const {
    const bool together = plane_ == 1 || channels_ == 1;
    if (together && source_.col == channels_) return ShortRuns(channels_, 1, channels_, words_).copy(src, count, dst);
    if (source_.col == 1) {
      return with_constant<2, 4, 8>(
          words_, [&](auto words) { interleave_words<decltype(words)::value>(src, plane_, channels_, count, dst); });
    }
    fill_zero(dst, count * words_);
    for (int64_t x = 0; x < count; ++x) {
      for (int64_t c = 0; c < channels_; ++c) dst[x * words_ + c] = src[x * source_.col + c * plane_];
    }
  }

  const Patch& patch_;
  const Source<BFloat16>& source_;
  const ConvGemm& gemm_;
  const int64_t first_step_, words_, channels_;
  const int64_t plane_;  // from channel to channel
  BFloat16* const strips_;
};

// How the words of a step are taken from a result channel's weights: a few loads, each permuted.
class ColumnWeights {
 public:
  // Columns and channels are so many elements apart.
  ColumnWeights(int64_t columns, int64_t channels, int64_t words, int64_t column_step, int64_t channel_step) {
    const int64_t reach_columns = (columns - 1) * column_step, reach_channels = (channels - 1) * channel_step;
    const int64_t of_columns = reach_columns < 0 ? -reach_columns : reach_columns;
    const int64_t of_channels = reach_channels < 0 ? -reach_channels : reach_channels;
    // All of them, a channel's columns, or single words lie within a load.
    const int64_t piece_channels = of_columns + of_channels < kBlockChannels ? channels : 1;
    const int64_t piece_columns = of_columns < kBlockChannels ? columns : 1;
    for (int64_t c = 0; c < channels; c += piece_channels) {
      for (int64_t j = 0; j < columns; j += piece_columns) {
        Load& load = loads_[count_++];
        load = {};
        const int64_t first =
            min64(0, (piece_columns - 1) * column_step) + min64(0, (piece_channels - 1) * channel_step);
        load.offset = j * column_step + c * channel_step + first;
        for (int64_t i = 0; i < piece_columns * piece_channels; ++i) {
          const int64_t column = i / piece_channels, channel = i % piece_channels;
          const int64_t at = column * column_step + channel * channel_step - first;
          const int64_t word = (j + column) * words + c + channel;
          load.from |= 1u << at;
          load.to |= 1u << word;
          load.index[word] = uint16_t(at);
        }
      }
    }
  }

  // The block of the result channel whose first weight this is.
  CONV2D_INLINE __m512i block(const BFloat16* weight) const {
    __m512i words = _mm512_setzero_si512();
    for (int64_t i = 0; i < count_; ++i) {
      const Load& load = loads_[i];
      words = _mm512_mask_permutexvar_epi16(words, load.to, _mm512_loadu_si512(load.index),
                                            load_words(weight + load.offset, load.from));
    }
    return words;
  }

 private:
  struct Load {
    int64_t offset;
    __mmask32 from, to;  // words that are read, and where they go
    uint16_t index[kBlockChannels];
  };
  Load loads_[kBlockChannels];
  int64_t count_ = 0;
};

// The weights of up to 32 result channels, of a segment whose first step of a row has this number: a tile for each
// (row of the kernel, step), whose row p holds words 2p and 2p + 1 of 16 result channels. The tiles of the next 16 are
// `pitch` blocks further.
inline void pack_weight_columns(const ConvGemm& gemm, const WeightSegment<BFloat16>& from, int64_t first_step,
                                BFloat16Block* dst, int64_t pitch) {
  constexpr int64_t L = kBlockChannels / 2;
  const int64_t words = kBlockChannels / gemm.columns, channels = gemm.single_channels();
  const int64_t column_step = gemm.weight_j / gemm.columns, channel_step = gemm.weight_c / kBlockChannels;
  for (int64_t t = 0; t < from.tap_cols; ++t) {
    const ColumnWeights step(columns_of_step(gemm, first_step + t), channels, words, column_step, channel_step);
    for (int64_t i = 0; i < from.tap_rows; ++i) {
      const BFloat16* const tap = from.data + i * gemm.weight_i + t * gemm.weight_j;
      for (int64_t lane0 = 0; lane0 < from.lanes; lane0 += L) {
        const Panel<BFloat16Pair> tile{
            reinterpret_cast<BFloat16Pair*>(dst + lane0 / L * pitch + (i * from.tap_cols + t) * L), L, L};
        pack_transposed_pairs(min64(from.lanes - lane0, L), L, tile,
                              [&](int64_t lane, int64_t) { return step.block(tap + (lane0 + lane) * from.lane_step); });
      }
    }
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
