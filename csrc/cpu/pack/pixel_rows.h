// Packers of grad_weight's operands where a step takes several pixels of a segment: pairs, or 32 for AMX tiles. Both
// have the same rows of the input's pixels, in blocks of 32, the last of which is filled up with zeros.
#pragma once

#include "pairs.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// dst[i] = src[i * step] for i in [0, n).
CONV2D_INLINE void copy_words(const BFloat16* src, int64_t step, int64_t n, BFloat16* dst) {
  if (step == 1) {
    for (int64_t i = 0; i < n; i += 32) {
      const __mmask32 mask = mask_of_first(n - i);
      store_words(dst + i, mask, load_words(src + i, mask));
    }
  } else if (step == 2) {
    for (int64_t i = 0; i < n; i += 16) {
      // Up to the last word that is wanted: the one after it may not exist.
      const __mmask32 mask = mask_of_first(min64(2 * (n - i) - 1, 31));
      announce_store(dst + i, pair_mask(n - i));
      _mm512_mask_cvtepi32_storeu_epi16(dst + i, pair_mask(n - i), load_words(src + 2 * i, mask));
    }
  } else {
    for (int64_t i = 0; i < n; ++i) dst[i] = src[i * step];
  }
}

// The zero-padded piece of the input that a segment's pixels meet, [image][channel][row][col], as it is stored.
inline Patch lay_out_pixel_patch(const PatchAxis& rows, const PatchAxis& cols, int64_t images, int64_t channels) {
  const int64_t plane = rows.size * cols.size;
  return {PatchOrder::kPlanar, rows, cols, images, channels, channels * plane, plane, cols.size, 1};
}

// A word of such a patch, of whose pixels all channels are packed at once.
struct PixelWord : BFloat16 {};

template <>
struct PixelCopier<BFloat16, PixelWord> {
  static constexpr bool kAllChannels = true;
  static CONV2D_INLINE void copy(const Patch& patch, const Source<BFloat16>& source, int64_t /*plane*/,
                                 const SourceRun<BFloat16>& from, PixelWord* dst, bool /*conj*/) {
    if (source.channel == 1 && patch.channels > 1) {
      for (int64_t c = 0; c < patch.channels; c += 32) {
        for (int64_t x = 0; x < from.count; x += 32) {
          const int64_t pixels = min64(from.count - x, 32);
          transpose_words({from.data + x * from.step + c, from.step, pixels, min64(patch.channels - c, 32)},
                          dst + c * patch.channel_pitch + x, patch.channel_pitch, pixels);
        }
      }
      return;
    }
    for (int64_t c = 0; c < patch.channels; ++c) {
      copy_words(from.data + c * source.channel, from.step, from.count, dst + c * patch.channel_pitch);
    }
  }
};

struct TapCounts {
  int64_t rows, cols;
};

// For each (channel, i, j) the segment's pixels, `steps` blocks of them.
inline void copy_pixel_rows(const Patch& patch, const Tile& segment, const TapCounts& taps, const BFloat16* patch_data,
                            int64_t steps, BFloat16Block* rows) {
  const int64_t step = segment.cols > 1 ? patch.cols.position_pitch : 1;
  const int64_t filled = segment.pixels(), length = steps * kBlockChannels;
  const int64_t pitch = patch.rows.position_pitch * patch.row_pitch;
  // Rows of which a vector holds several.
  const bool are_short = step <= 2 && segment.cols > 1 && segment.rows > 1 && pitch + step * segment.cols <= step * 32;
  const int64_t cols = are_short ? segment.cols : 2;
  const ShortRuns short_rows(cols, are_short ? step : 1, are_short ? pitch : 2, cols);
  const bool is_vector = step == 1 && segment.cols <= 32;
  const __mmask32 of_row = mask_of_first(segment.cols);
  BFloat16* to = rows->channel;
  for (int64_t c = 0; c < patch.channels; ++c) {
    for (int64_t i = 0; i < taps.rows; ++i) {
      for (int64_t j = 0; j < taps.cols; ++j, to += length) {
        const BFloat16* const tap = patch_data + patch.tap_offset(c, i, j);
        BFloat16* d = to;
        for (int64_t n = 0; n < segment.images; ++n) {
          const BFloat16* from = tap + n * patch.image_pitch;
          if (are_short) {
            short_rows.copy(from, segment.rows, d);
            d += segment.rows * segment.cols;
            continue;
          }
          for (int64_t p = 0; p < segment.rows; ++p, d += segment.cols) {
            if (is_vector) {
              store_words(d, of_row, load_words(from, of_row));
            } else {
              copy_words(from, step, segment.cols, d);
            }
            from += pitch;
          }
        }
        store_words(to + filled, mask_of_first(length - filled), _mm512_setzero_si512());
      }
    }
  }
}

// The same from the source, by way of the patch, which `patch_data` has room for. Of one tap the patch is these rows.
inline void pack_pixel_rows(const Patch& patch, const Source<BFloat16>& source, const Tile& segment,
                            const TapCounts& taps, BFloat16* patch_data, int64_t steps, BFloat16Block* rows) {
  if (taps.rows * taps.cols > 1) {
    pack_patch(patch, source, false, static_cast<PixelWord*>(patch_data));
    return copy_pixel_rows(patch, segment, taps, patch_data, steps, rows);
  }
  const int64_t length = steps * kBlockChannels;
  Patch direct = patch;
  direct.image_pitch = segment.rows * segment.cols;
  direct.channel_pitch = length;
  pack_patch(direct, source, false, static_cast<PixelWord*>(&rows->channel[0]));
  for (int64_t c = 0; c < patch.channels; ++c) {
    fill_zero(rows->channel + c * length + segment.pixels(), length - segment.pixels());
  }
}

// The pixels of a segment, one after the other.
class PixelWalk {
 public:
  PixelWalk(const BFloat16* first, const int64_t (&stride)[4], const Tile& segment)
      : at_(first),
        col_step_(stride[3]),
        row_step_(stride[2] - (segment.cols - 1) * stride[3]),
        image_step_(stride[0] - (segment.rows - 1) * stride[2] - (segment.cols - 1) * stride[3]),
        rows_(segment.rows),
        cols_(segment.cols) {}
  CONV2D_INLINE const BFloat16* next() {
    at_ += step_;
    // The step to the pixel after it, which may not exist, is taken when that is asked for.
    step_ = col_step_;
    if (++col_ == cols_) {
      col_ = 0;
      step_ = row_step_;
      if (++row_ == rows_) {
        row_ = 0;
        step_ = image_step_;
      }
    }
    return at_;
  }

 private:
  const BFloat16* at_;
  const int64_t col_step_, row_step_, image_step_, rows_, cols_;
  int64_t row_ = 0, col_ = 0, step_ = 0;
};

// Rows of pairs of pixels, of 16 channels each: from row to row, and from a row to that of the next 16 channels, in
// blocks.
struct PairRows {
  BFloat16Block* first;
  int64_t count, row_pitch, pitch;
};
// Of a segment's pixels, of up to 32 channels of grad_output: row p holds pixels 2p and 2p + 1; beyond the last pixel
// there are zeros. `src`: the segment's first pixel and the first channel.
inline void pack_pixel_pairs(const BFloat16* src, const int64_t (&stride)[4], const Tile& segment, int64_t lanes,
                             const PairRows& to) {
  constexpr int64_t L = kBlockChannels / 2;
  const int64_t pixels = segment.pixels();
  BFloat16Block* dst = to.first;
  if (stride[1] == 1 && lanes > 1) {
    const __mmask32 mask = mask_of_first(lanes);
    PixelWalk walk(src, stride, segment);
    for (int64_t x = 0; x < pixels; x += 2, dst += to.row_pitch) {
      const __m512i a = load_words(walk.next(), mask);
      const __m512i b = x + 1 < pixels ? load_words(walk.next(), mask) : _mm512_setzero_si512();
      __m512i low, high;
      Words::zip(a, b, low, high);
      _mm512_storeu_si512(dst, low);
      if (lanes > L) _mm512_storeu_si512(dst + to.pitch, high);
    }
    for (int64_t row = div_up(pixels, 2); row < to.count; ++row, dst += to.row_pitch) {
      fill_zero(dst, 1);
      if (lanes > L) fill_zero(dst + to.pitch, 1);
    }
    return;
  }
  const bool one_run = stride[3] == 1 && segment.images == 1 && (segment.rows == 1 || stride[2] == segment.cols);
  for (int64_t lane0 = 0; lane0 < lanes; lane0 += L, dst += to.pitch, src += L * stride[1]) {
    const Panel<BFloat16Pair> panel{reinterpret_cast<BFloat16Pair*>(dst), to.row_pitch * L, L};
    const int64_t now = min64(lanes - lane0, L);
    if (one_run) {
      pack_transposed_pairs(now, to.count, panel, [&](int64_t lane, int64_t k) {
        return load_words(src + lane * stride[1] + 2 * k, mask_of_first(max64(pixels - 2 * k, 0)));
      });
      continue;
    }
    BFloat16 planes[L][kMaxSegment];
    for (int64_t lane = 0; lane < now; ++lane) {
      BFloat16* d = planes[lane];
      for (int64_t n = 0; n < segment.images; ++n) {
        for (int64_t p = 0; p < segment.rows; ++p, d += segment.cols) {
          copy_words(src + lane * stride[1] + n * stride[0] + p * stride[2], stride[3], segment.cols, d);
        }
      }
      fill_zero(d, 2 * round_up(to.count, L) - pixels);
    }
    pack_transposed_pairs(now, to.count, panel,
                          [&](int64_t lane, int64_t k) { return _mm512_loadu_si512(planes[lane] + 2 * k); });
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
