// Packers for sums whose step takes a pair of products (AVX512_BF16): the second of a pair is the next channel. A lone
// last channel is paired with zeros in both operands, whose product is zero whatever the other channel holds.
#pragma once

#include "../isa/convert.h"
#include "patch.h"
#include "weights.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

CONV2D_INLINE __mmask16 pair_mask(int64_t n) { return static_cast<__mmask16>(mask_of_first(n)); }
// Those words, or pairs, that the mask names; of the others no memory is touched.
CONV2D_INLINE __m512i load_words(const BFloat16* p, __mmask32 mask) {
  announce_load(p, mask);
  return _mm512_maskz_loadu_epi16(mask, p);
}
CONV2D_INLINE void store_words(BFloat16* p, __mmask32 mask, __m512i words) {
  announce_store(p, mask);
  _mm512_mask_storeu_epi16(p, mask, words);
}
CONV2D_INLINE void store_pairs(BFloat16Pair* p, __mmask16 mask, __m512i pairs) {
  announce_store(p, mask);
  _mm512_mask_storeu_epi32(p, mask, pairs);
}
// Both halves of element i: i. (Word i of a vector goes to both halves of pair i.)
CONV2D_INLINE __m512i twice_iota() {
  return _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                            _mm512_set1_epi32(0x00010001));
}

// Word i: i.
CONV2D_INLINE __m512i word_iota() {
  return _mm512_add_epi32(_mm512_slli_epi16(twice_iota(), 1), _mm512_set1_epi32(0x00010000));
}
// Vectors of words, as interleave() takes them.
struct Words {
  using reg = __m512i;
  // The words of two vectors in turn: of the first 16 of each, and of the others.
  static CONV2D_INLINE void zip(reg a, reg b, reg& low, reg& high) {
    const reg first = _mm512_add_epi32(twice_iota(), _mm512_set1_epi32(32 << 16));
    low = _mm512_permutex2var_epi16(a, first, b);
    high = _mm512_permutex2var_epi16(a, _mm512_add_epi32(first, _mm512_set1_epi32(0x00100010)), b);
  }
};

// dst[i] = (first[i * step], second[i * step]) for i in [0, n); zero for `second` where it is nullptr.
CONV2D_INLINE void copy_pairs(const BFloat16* first, const BFloat16* second, int64_t step, int64_t n,
                              BFloat16Pair* dst) {
  const __mmask32 has_second = second != nullptr ? ~__mmask32(0) : __mmask32(0);
  if (second == nullptr) second = first;
  if (step == 1) {
    for (int64_t i = 0; i < n; i += 32) {
      const __mmask32 mask = mask_of_first(n - i);
      __m512i low, high;
      Words::zip(load_words(first + i, mask), load_words(second + i, mask & has_second), low, high);
      store_pairs(dst + i, pair_mask(n - i), low);
      if (n - i > 16) store_pairs(dst + i + 16, pair_mask(n - i - 16), high);
    }
  } else if (step == 2) {
    for (int64_t i = 0; i < n; i += 16) {
      // Up to the last element that is wanted: the one after it may not exist.
      const __mmask32 mask = mask_of_first(min64(2 * (n - i) - 1, 31)) & 0x55555555u;
      const __m512i a = load_words(first + 2 * i, mask);
      const __m512i b = load_words(second + 2 * i, mask & has_second);
      store_pairs(dst + i, pair_mask(n - i), _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
    }
  } else if (step == 3) {
    // Word i to the low half of pair i.
    const __m512i order = _mm512_mullo_epi16(twice_iota(), _mm512_set1_epi16(3));
    const auto every_third = [&](const BFloat16* p, uint64_t mask) CONV2D_INLINE_LAMBDA {
      const __m512i a = load_words(p, __mmask32(mask)),
                    b = load_words(p + (mask >> 32 ? 32 : 0), __mmask32(mask >> 32));
      return _mm512_maskz_permutex2var_epi16(0x55555555u, a, order, b);
    };
    for (int64_t i = 0; i < n; i += 16) {
      const uint64_t mask = thirds_mask(int(min64(n - i, 16)));
      const __m512i a = every_third(first + 3 * i, mask);
      const __m512i b = every_third(second + 3 * i, has_second ? mask : 0);
      store_pairs(dst + i, pair_mask(n - i), _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t high = has_second ? second[i * step].bits : 0u;
      dst[i].bits = first[i * step].bits | high << 16;
    }
  }
}

// n contiguous channels of a pixel; a pair's missing channel becomes zero.
CONV2D_INLINE void copy_channels(const BFloat16* src, int64_t n, BFloat16Pair* dst) {
  for (int64_t i = 0; i < n; i += 32) {
    store_pairs(dst + i / 2, pair_mask(div_up(n - i, 2)), load_words(src + i, mask_of_first(n - i)));
  }
}

// Copies runs of n words that are one or two apart, from run to run `step` apart, each filled up with zeros to `words`
// of them, 2 to 32. A vector is stored, and one is loaded or two, for as many runs as fit.
class ShortRuns {
 public:
  CONV2D_INLINE ShortRuns(int64_t n, int64_t apart, int64_t step, int64_t words)
      : span_((n - 1) * apart + 1),
        step_(step),
        words_(words),
        at_once_(min64(32 / words, ((apart > 1 ? 64 : 32) - span_) / step + 1)),
        two_(apart > 1) {
    // Word w is word w % words of run w / words. (Computed: a table could be loaded only behind all stores before it.)
    const __m512i word = word_iota();
    const __m512i run = _mm512_mulhi_epu16(word, _mm512_set1_epi16(int16_t(65535 / words + 1)));
    const __m512i place = _mm512_sub_epi16(word, _mm512_mullo_epi16(run, _mm512_set1_epi16(int16_t(words))));
    index_ = _mm512_add_epi16(_mm512_mullo_epi16(run, _mm512_set1_epi16(int16_t(step))),
                              _mm512_mullo_epi16(place, _mm512_set1_epi16(int16_t(apart))));
    real_ = _mm512_cmplt_epu16_mask(place, _mm512_set1_epi16(int16_t(n)));
  }
  CONV2D_INLINE void copy(const BFloat16* src, int64_t count, BFloat16* dst) const {
    for (; count > at_once_; count -= at_once_, src += at_once_ * step_, dst += at_once_ * words_) {
      copy_some(src, at_once_, dst);
    }
    copy_some(src, count, dst);
  }

 private:
  CONV2D_INLINE void copy_some(const BFloat16* src, int64_t count, BFloat16* dst) const {
    const int64_t extent = (count - 1) * step_ + span_;
    const __m512i low = load_words(src, mask_of_first(extent));
    const __m512i high = two_ && extent > 32 ? load_words(src + 32, mask_of_first(extent - 32)) : low;
    store_words(dst, mask_of_first(count * words_), _mm512_maskz_permutex2var_epi16(real_, low, index_, high));
  }
  __m512i index_;
  const int64_t span_, step_, words_, at_once_;
  __mmask32 real_;
  const bool two_;
};

// source.channel leads from pair to pair.
template <>
struct PixelCopier<BFloat16, BFloat16Pair> {
  static constexpr bool kAllChannels = false;
  static CONV2D_INLINE void copy(const Patch& patch, const Source<BFloat16>& source, int64_t plane,
                                 const SourceRun<BFloat16>& from, BFloat16Pair* dst, bool) {
    const BFloat16* const src = from.data;
    const int64_t step = from.step, count = from.count;
    if (patch.order == PatchOrder::kPlanar) {
      const bool lone = source.missing != 0 && plane == patch.channels - 1;
      copy_pairs(src, lone ? nullptr : src + source.channel / 2, step, count, dst);
    } else {
      const int64_t channels = 2 * patch.channels - source.missing;
      if (step == channels && source.missing == 0 && patch.col_pitch == patch.channels) {
        __builtin_memcpy(dst, src, size_t(count * patch.channels) * sizeof(BFloat16Pair));
      } else if (channels <= step && step < 16) {  // so few lie without gaps in the patch
        ShortRuns(channels, 1, step, round_up(channels, 2)).copy(src, count, reinterpret_cast<BFloat16*>(dst));
      } else {
        // The even numbers of channels that groups have, of which a copy is a move or two, are constants.
        with_constant<8, 16, 24, 32, 0>(channels, [&](auto constant) CONV2D_INLINE_LAMBDA {
          constexpr int64_t kChannels = constant;
          for (int64_t x = 0; x < count; ++x) {
            BFloat16Pair* const to = dst + x * patch.col_pitch;
            if constexpr (kChannels > 0) {
              __builtin_memcpy(to, src + x * step, kChannels * sizeof(BFloat16));
            } else {
              copy_channels(src + x * step, channels, to);
            }
          }
        });
      }
    }
  }
};

// `depth` rows of `lanes` lanes, by blocks of 16 x 16 in registers. load(lane, k) gives 16 pairs of one lane, or what
// there is of them, from k on.
template <class Load>
CONV2D_INLINE void pack_transposed_pairs(int64_t lanes, int64_t depth, const Panel<BFloat16Pair>& to, Load load) {
  using V = Vec<float>;
  constexpr int L = V::kLanes;
  for (int64_t lane = 0; lane < to.width; lane += L) {
    const int64_t valid = min64(lanes - lane, L);
    for (int64_t k = 0; k < depth; k += L) {
      const int64_t n = min64(depth - k, L);
      V::reg r[L];
      if (valid == L) {
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) r[i] = _mm512_castsi512_ps(load(lane + i, k));
      } else {
        for (int i = 0; i < L; ++i) r[i] = i < valid ? _mm512_castsi512_ps(load(lane + i, k)) : V::zero();
      }
      V::transpose(r);
      BFloat16Pair* const d = to.data + k * to.pitch + lane;
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) {
        if (i < n) _mm512_storeu_ps(d + i * to.pitch, r[i]);
      }
    }
  }
}

// A matrix of 16-bit words in memory: rows `pitch` words apart.
struct WordRows {
  const BFloat16* data;
  int64_t pitch, rows, columns;  // at most 32 of either
};

// Half of the columns, 4 of each 8, as rows of `width` words, dst_pitch apart; words beyond the last row are zeros.
template <bool kHigh>
CONV2D_INLINE void transpose_half(const WordRows& from, BFloat16* dst, int64_t dst_pitch, int64_t width) {
  using V = Vec<float>;
  const __mmask32 columns = mask_of_first(from.columns), stored = mask_of_first(width);
  V::reg r[16];
#pragma GCC unroll 16
  for (int p = 0; p < 16; ++p) {
    const __mmask32 has_first = 2 * p < from.rows ? columns : 0, has_second = 2 * p + 1 < from.rows ? columns : 0;
    // A row that is not there has no address either.
    const __m512i a = load_words(from.data + (has_first ? 2 * p * from.pitch : 0), has_first);
    const __m512i b = load_words(from.data + (has_second ? (2 * p + 1) * from.pitch : 0), has_second);
    r[p] = _mm512_castsi512_ps(kHigh ? _mm512_unpackhi_epi16(a, b) : _mm512_unpacklo_epi16(a, b));
  }
  V::transpose(r);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    const int column = i / 4 * 8 + i % 4 + (kHigh ? 4 : 0);
    if (column < from.columns) store_words(dst + column * dst_pitch, stored, _mm512_castps_si512(r[i]));
  }
}
CONV2D_INLINE void transpose_words(const WordRows& from, BFloat16* dst, int64_t dst_pitch, int64_t width) {
  transpose_half<false>(from, dst, dst_pitch, width);
  if (from.columns > 4) transpose_half<true>(from, dst, dst_pitch, width);
}

// A pair of more taps nearly fills a transposition by itself; and the words of a lane that one reads, two vectors.
constexpr int64_t kFewTaps = 8, kWordsAtOnce = 64;

// Whether more than one pair lies within the words of two vectors, each tap behind the one before it.
inline bool are_near(const ConvGemm& gemm, const WeightSegment<BFloat16>& from) {
  const int64_t taps = from.taps(), second = gemm.weight_c / gemm.per_step, pair_step = 2 * second;
  if (taps > kFewTaps || from.lane_step == 1 || second <= 1) return false;
  const int64_t last_tap = from.tap_offset(gemm, taps - 1), last_col = (from.tap_cols - 1) * gemm.weight_j;
  const bool in_order = (from.tap_cols == 1 || gemm.weight_j > 0) && (from.tap_rows == 1 || gemm.weight_i > last_col);
  return in_order && last_tap < pair_step && max64(last_tap, pair_step) + second < kWordsAtOnce;
}

// Rows k = (pair, i, j) of a panel, up to 16 at a time: as many as two vectors of a lane's words have.
inline void pack_near_pairs(const ConvGemm& gemm, const WeightSegment<BFloat16>& from, bool lone,
                            const Panel<BFloat16Pair>& to) {
  const int64_t second = gemm.weight_c / gemm.per_step, depth = from.channels * from.taps();
  int64_t pair = 0, i = 0, j = 0;
  const auto offset = [&] { return pair * 2 * second + i * gemm.weight_i + j * gemm.weight_j; };
  for (int64_t k = 0, n = 0; k < depth; k += n) {
    const int64_t first = offset();
    uint32_t words[16] = {};
    __mmask32 present = 0;
    int64_t end = 0;
    for (n = 0; n < 16 && k + n < depth; ++n) {
      const bool alone = lone && pair == from.channels - 1;
      const int64_t at = offset() - first, last = at + (alone ? 0 : second);
      if (last >= kWordsAtOnce) break;
      words[n] = uint32_t(at) | uint32_t(last) << 16;
      present |= (alone ? 1u : 3u) << (2 * n);
      end = max64(end, last + 1);
      if (++j == from.tap_cols) {
        j = 0;
        if (++i == from.tap_rows) i = 0, ++pair;
      }
    }
    const __m512i index = _mm512_loadu_si512(words);
    const __mmask32 low = mask_of_first(end), high = mask_of_first(end - 32);
    const BFloat16* const src = from.data + first;
    const Panel<BFloat16Pair> rows{to.data + k * to.pitch, to.pitch, to.width};
    pack_transposed_pairs(from.lanes, n, rows, [&](int64_t lane, int64_t) {
      const BFloat16* const s = src + lane * from.lane_step;
      return _mm512_maskz_permutex2var_epi16(present, load_words(s, low), index, load_words(s + (high ? 32 : 0), high));
    });
  }
}

// Taps of a channel, from t0 on and at most 16, that lie within one vector.
CONV2D_INLINE int64_t taps_in_vector(const ConvGemm& gemm, const WeightSegment<BFloat16>& from, int64_t t0) {
  int64_t n = 1;
  for (; n < 16 && t0 + n < from.taps(); ++n) {
    const int64_t offset = from.tap_offset(gemm, t0 + n) - from.tap_offset(gemm, t0);
    if (offset < 0 || offset >= 32) break;
  }
  return n;
}

// pack_weight_pairs, whatever the strides.
inline void pack_any_pairs(const ConvGemm& gemm, const WeightSegment<BFloat16>& from, bool lone,
                           const Panel<BFloat16Pair>& to, int64_t pairs_per_block) {
  const int64_t lane_step = from.lane_step, lanes = from.lanes, pairs = from.channels, width = to.width;
  const int64_t second = gemm.weight_c / gemm.per_step, pair_step = 2 * second, taps = from.taps();
  const BFloat16* const weight = from.data;
  // From the row of pair c and tap t on, every so many rows.
  const auto rows = [&](int64_t c, int64_t t, int64_t step) {
    const int64_t row = (c / pairs_per_block * taps + t) * pairs_per_block + c % pairs_per_block;
    return Panel<BFloat16Pair>{to.data + row * to.pitch, step * to.pitch, width};
  };

  if (lane_step == 1) {
    for (int64_t c = 0; c < pairs; ++c) {
      const bool alone = lone && c == pairs - 1;
      for (int64_t t = 0; t < taps; ++t) {
        const BFloat16* const src = weight + c * pair_step + from.tap_offset(gemm, t);
        BFloat16Pair* const dst = rows(c, t, 1).data;
        copy_pairs(src, alone ? nullptr : src + second, 1, lanes, dst);
        fill_zero(dst + lanes, width - lanes);
      }
    }
    return;
  }
  if (second == 1 && (pairs_per_block > 1 || pairs >= taps_in_vector(gemm, from, 0))) {
    // Channels lie together, and so do pairs: one tap after the other, its pairs `taps` rows of the panel apart, or
    // side by side in a block.
    const bool in_blocks = pairs_per_block > 1;
    const int64_t run = in_blocks ? pairs_per_block : pairs, step = in_blocks ? 1 : taps;
    for (int64_t t = 0; t < taps; ++t) {
      for (int64_t c = 0; c < pairs; c += run) {
        const BFloat16* const src = weight + from.tap_offset(gemm, t) + 2 * c;
        const int64_t words = 2 * (pairs - c) - (lone ? 1 : 0);
        pack_transposed_pairs(lanes, min64(run, pairs - c), rows(c, t, step), [&](int64_t lane, int64_t k) {
          return load_words(src + lane * lane_step + 2 * k, mask_of_first(words - 2 * k));
        });
      }
    }
    return;
  }
  // Up to 16 taps of a channel at a time, as many as lie within one vector.
  for (int64_t t0 = 0, n = 0; t0 < taps; t0 += n) {
    uint32_t words[16] = {};
    int64_t span = 0;
    n = taps_in_vector(gemm, from, t0);
    for (int64_t t = 0; t < n; ++t) {
      const int64_t offset = from.tap_offset(gemm, t0 + t) - from.tap_offset(gemm, t0);
      words[t] = uint32_t(offset) * 0x00010001u;
      span = max64(span, offset + 1);
    }
    __m512i index = _mm512_loadu_si512(words);
    const BFloat16* const block = weight + from.tap_offset(gemm, t0);
    const bool adjacent = second > 0 && second + span <= 32;
    // As in pack_weight: the lines of later channels, which lie far apart.
    const int64_t last_ahead = pair_step >= 32 ? pairs - kStepsAhead / 2 : 0;
    if (adjacent) index = _mm512_add_epi32(index, _mm512_set1_epi32(int(second << 16)));
    for (int64_t c = 0; c < pairs; ++c) {
      const BFloat16* const src = block + c * pair_step;
      if (c < last_ahead) {
        const BFloat16* const ahead = src + kStepsAhead / 2 * pair_step;
        prefetch_lanes(ahead, lane_step, lanes);
        if (!adjacent) prefetch_lanes(ahead + second, lane_step, lanes);
      }
      const bool alone = lone && c == pairs - 1;
      if (adjacent || alone) {
        const __mmask32 mask = mask_of_first(alone ? span : second + span), halves = alone ? 0x55555555u : ~0u;
        pack_transposed_pairs(lanes, n, rows(c, t0, pairs_per_block), [&](int64_t lane, int64_t) {
          return _mm512_maskz_permutexvar_epi16(halves, index, load_words(src + lane * lane_step, mask));
        });
      } else {
        const __mmask32 mask = mask_of_first(span);
        pack_transposed_pairs(lanes, n, rows(c, t0, pairs_per_block), [&](int64_t lane, int64_t) {
          const BFloat16* const s = src + lane * lane_step;
          const __m512i a = _mm512_permutexvar_epi16(index, load_words(s, mask));
          return _mm512_mask_permutexvar_epi16(a, 0xaaaaaaaau, index, load_words(s + second, mask));
        });
      }
    }
  }
}

// pack_weight for k = (block of pairs of channels, i, j, pair of the block). `lone`: the last pair has one channel.
inline void pack_weight_pairs(const ConvGemm& gemm, const WeightSegment<BFloat16>& from, bool lone,
                              const Panel<BFloat16Pair>& to, int64_t pairs_per_block = 1) {
  if (pairs_per_block == 1 && are_near(gemm, from)) return pack_near_pairs(gemm, from, lone, to);
  pack_any_pairs(gemm, from, lone, to, pairs_per_block);
}

// pack_weight_of_groups, none of whose pairs lacks a channel.
inline void pack_weight_of_groups(const ConvGemm& gemm, const WeightSegment<BFloat16>& from, int64_t vectors,
                                  const Panel<BFloat16Pair>& to) {
  constexpr int L = Vec<float>::kLanes;
  if (packs_fours(vectors, gemm.weight_m)) {
    const int64_t taps = from.taps(), second = gemm.weight_c / gemm.per_step;
    BFloat16Pair* row = to.data;
    for (int64_t k = 0; k < from.channels * taps; ++k, row += to.pitch) {
      const BFloat16* const src = from.data + k / taps * gemm.weight_c + from.tap_offset(gemm, k % taps);
      pack_fours<float>(from.lanes, row, [&](int64_t lane) {
        const BFloat16* const four = src + lane * from.lane_step;
        const __m128i pairs = _mm_unpacklo_epi16(_mm_loadu_si64(four), _mm_loadu_si64(four + second));
        return _mm512_castps128_ps512(_mm_castsi128_ps(pairs));
      });
    }
    return;
  }
  for (int64_t v = 0; v < vectors; ++v) {
    WeightSegment<BFloat16> channel = from;
    channel.data += v * gemm.weight_m;
    pack_weight_pairs(gemm, channel, false, {to.data + v * L, to.pitch, L});
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
