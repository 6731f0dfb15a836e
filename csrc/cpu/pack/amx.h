// Packers for AMX tiles: source patches and weights in blocks of 32 channels, a row of a tile each. Channels that the
// last block lacks are zeros in both operands.
#pragma once

#include "pairs.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// `count` pixels, `step` apart, of `channels` planes as blocks.
inline void transpose_planes(const BFloat16* src, int64_t step, int64_t count, int64_t plane, int64_t channels,
                             BFloat16Block* dst) {
  if (step == 1) {
    for (int64_t x = 0; x < count; x += 32) {
      // More planes than hardware prefetchers follow.
      for (int64_t c = 0; c < channels && x + 32 < count; ++c) __builtin_prefetch(src + x + 32 + c * plane);
      transpose_words({src + x, plane, channels, min64(count - x, 32)}, dst[x].channel, kBlockChannels, kBlockChannels);
    }
    return;
  }
  for (int64_t x = 0; x < count; ++x) {
    BFloat16Block block{};
    for (int64_t c = 0; c < channels; ++c) block.channel[c] = src[x * step + c * plane];
    dst[x] = block;
  }
}

// A patch of blocks (PatchOrder::kBlocks). `row`: room for kRowBlocks blocks.
class BlockPatchPacker {
 public:
  BlockPatchPacker(const Patch& patch, const Source<BFloat16>& source, BFloat16Block* row)
      : patch_(patch), source_(source), plane_(source.channel / kBlockChannels), row_(row) {
    // The columns of the source that all taps meet.
    const PatchAxis& cols = patch.cols;
    first_ = source.width;
    for (int64_t run = 0; run < cols.runs; ++run) {
      const Interval in = inside(run);
      if (in.count() <= 0) continue;
      first_ = min64(first_, column(run, in.begin));
      end_ = max64(end_, column(run, in.end - 1) + 1);
    }
  }

  void pack(BFloat16Block* dst) const {
    const PatchAxis& rows = patch_.rows;
    for (int64_t block = 0; block < patch_.channels; ++block) {
      const bool last = block == patch_.channels - 1;
      const int64_t channels = kBlockChannels - (last ? source_.missing : 0);
      for (int64_t image = 0; image < patch_.images; ++image) {
        const BFloat16* const from = source_.data + image * source_.image + block * source_.channel;
        BFloat16Block* to = dst + image * patch_.image_pitch + block * patch_.channel_pitch;
        for (int64_t row = 0; row < rows.size; ++row, to += patch_.row_pitch) {
          const int64_t y = source_coordinate(rows, row);
          pack_row(y < 0 || y >= source_.height ? nullptr : from + y * source_.row, channels, to);
        }
      }
    }
  }

 private:
  int64_t column(int64_t run, int64_t index) const {
    const PatchAxis& cols = patch_.cols;
    return cols.first + run * cols.run_shift + index * cols.run_step;
  }
  Interval inside(int64_t run) const {
    return indices_inside(column(run, 0), patch_.cols.run_step, patch_.cols.run_length, source_.width);
  }

  // A row of the source, or of padding (nullptr), to each tap's copy.
  void pack_row(const BFloat16* from, int64_t channels, BFloat16Block* to) const {
    const PatchAxis& cols = patch_.cols;
    const bool transposed = plane_ != 1 && channels > 1;
    const bool at_once = transposed && cols.runs > 1 && from != nullptr && end_ - first_ <= limits::amx::kRowBlocks;
    if (at_once) transpose_planes(from + first_ * source_.col, source_.col, end_ - first_, plane_, channels, row_);
    for (int64_t run = 0; run < cols.runs; ++run, to += patch_.rows.size * cols.run_length) {
      const Interval in = from == nullptr ? Interval{0, 0} : inside(run);
      if (in.count() <= 0) {
        fill_zero(to, cols.run_length);
        continue;
      }
      fill_zero(to, in.begin);
      fill_zero(to + in.end, cols.run_length - in.end);
      BFloat16Block* const d = to + in.begin;
      const int64_t x = column(run, in.begin), count = in.count(), step = count > 1 ? cols.run_step : 0;
      if (at_once) {
        for (int64_t i = 0; i < count; ++i) d[i] = row_[x - first_ + i * step];
      } else if (transposed) {
        transpose_planes(from + x * source_.col, step * source_.col, count, plane_, channels, d);
      } else {
        const BFloat16* const src = from + x * source_.col;
        const __mmask32 mask = mask_of_first(channels);
        for (int64_t i = 0; i < count; ++i) _mm512_storeu_si512(d + i, load_words(src + i * step * source_.col, mask));
      }
    }
  }

  const Patch& patch_;
  const Source<BFloat16>& source_;
  const int64_t plane_;  // from channel to channel
  BFloat16Block* const row_;
  int64_t first_, end_ = 0;
};

// Up to 32 words that are kStep apart.
template <int kStep>
class SpacedWords {
 public:
  explicit SpacedWords(int64_t count) {
    const __m512i at = _mm512_mullo_epi16(word_iota(), _mm512_set1_epi16(kStep));
    index_ = _mm512_and_si512(at, _mm512_set1_epi16(31));
    for (int i = 0; i < kStep; ++i) {
      read_[i] = mask_of_first((count - 1) * kStep + 1 - 32 * i);
      from_[i] = _mm512_cmpeq_epi16_mask(_mm512_srli_epi16(at, 5), _mm512_set1_epi16(int16_t(i)));
    }
  }
  CONV2D_INLINE __m512i load(const BFloat16* p, bool present) const {
    if (kStep == 1) return load_words(p, present ? read_[0] : 0);
    __m512i words = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int i = 0; i < kStep; ++i) {
      words = _mm512_mask_permutexvar_epi16(words, from_[i], index_, load_words(p + 32 * i, present ? read_[i] : 0));
    }
    return words;
  }

 private:
  __m512i index_;
  __mmask32 read_[kStep], from_[kStep];  // words that are read, and lanes that a load gives
};

// The weights of up to 32 result channels, of a segment of whole blocks: a tile for each (block, i, j), whose row p
// holds channels 2p and 2p + 1 of 16 result channels. The tiles of the next 16 are `pitch` blocks further.
class BlockWeightPacker {
 public:
  BlockWeightPacker(const ConvGemm& gemm, const WeightSegment<BFloat16>& from, int64_t missing)
      : gemm_(gemm), from_(from), channels_(from.channels * kBlockChannels - missing) {}

  void pack(BFloat16Block* dst, int64_t pitch) const {
    with_constant<1, 2, 3, 4, 0>(from_.lane_step, [&](auto step) {
      if constexpr (step > 0) {
        pack_rows<step>(dst, pitch);
      } else {
        for (int64_t lane = 0; lane < from_.lanes; lane += kPairs) pack_columns(lane, dst + lane / kPairs * pitch);
      }
    });
  }

 private:
  static constexpr int64_t kPairs = kBlockChannels / 2;

  // Result channels lie side by side, or nearly: two channels' as rows of pairs.
  template <int kStep>
  void pack_rows(BFloat16Block* dst, int64_t pitch) const {
    const SpacedWords<kStep> lanes(from_.lanes);
    const int64_t step = gemm_.weight_c / gemm_.per_step, taps = from_.taps();
    for (int64_t t = 0; t < taps; ++t) {
      const BFloat16* const tap = from_.data + from_.tap_offset(gemm_, t);
      for (int64_t c = 0; c < from_.channels * kBlockChannels; c += 2) {
        // A channel that is not there has no address either.
        const BFloat16* const first = tap + min64(c, channels_ - 1) * step;
        const BFloat16* const second = tap + min64(c + 1, channels_ - 1) * step;
        __m512i low, high;
        Words::zip(lanes.load(first, c < channels_), lanes.load(second, c + 1 < channels_), low, high);
        BFloat16Block* const to = dst + (c / kBlockChannels * taps + t) * kPairs + c % kBlockChannels / 2;
        _mm512_storeu_si512(to, low);
        if (from_.lanes > kPairs) _mm512_storeu_si512(to + pitch, high);
      }
    }
  }

  void pack_columns(int64_t lane, BFloat16Block* dst) const {
    const Panel<BFloat16Pair> to{reinterpret_cast<BFloat16Pair*>(dst), kPairs, kPairs};
    WeightSegment<BFloat16> pairs = from_;
    pairs.data += lane * from_.lane_step;
    pairs.lanes = min64(from_.lanes - lane, kPairs);
    pairs.channels = div_up(channels_, 2);
    pack_weight_pairs(gemm_, pairs, channels_ % 2 != 0, to, kPairs);
    const int64_t present = pairs.channels % kPairs;
    if (present == 0) return;
    const int64_t taps = from_.taps();
    for (int64_t t = 0; t < taps; ++t) {
      BFloat16Pair* const tile = to.data + ((from_.channels - 1) * taps + t) * kPairs * to.pitch;
      fill_zero(tile + present * to.pitch, (kPairs - present) * to.pitch);
    }
  }

  const ConvGemm& gemm_;
  const WeightSegment<BFloat16>& from_;
  const int64_t channels_;
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
