// The packers of weight panels.
#pragma once

#include "../isa/convert.h"
#include "lanes.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// Weights of one K segment: `lanes` lanes that are lane_step apart, of so many channels and a rectangle of taps.
template <class S>
struct WeightSegment {
  const S* data;
  int64_t lane_step, lanes, channels, tap_rows, tap_cols;
  int64_t taps() const { return tap_rows * tap_cols; }
  // Where tap number t lies.
  int64_t tap_offset(const ConvGemm& gemm, int64_t t) const {
    return t / tap_cols * gemm.weight_i + t % tap_cols * gemm.weight_j;
  }
};

// A band's taps are transposed together with what lies between them where a channel has at most so many elements for
// each of them: gathering them one by one takes longer.
constexpr int64_t kMostElementsOfTap = 5;

// The taps of a segment among the elements from a channel to the next one. None where they don't lie in order there,
// are few of many elements, or have lanes side by side, which are copied.
template <class S>
PickedElements picked_taps(const ConvGemm& gemm, const WeightSegment<S>& from) {
  const int64_t i_step = from.tap_rows > 1 ? gemm.weight_i : gemm.weight_c,
                j_step = from.tap_cols > 1 ? gemm.weight_j : 1;
  const int64_t last_col = (from.tap_cols - 1) * j_step, last = (from.tap_rows - 1) * i_step + last_col;
  PickedElements taps{gemm.weight_c, 0};
  const bool in_order = from.lane_step != 1 && j_step > 0 && i_step > last_col && last < gemm.weight_c;
  if (!in_order || gemm.weight_c > PickedElements::kMost || gemm.weight_c > kMostElementsOfTap * from.taps())
    return taps;
  for (int64_t i = 0; i < from.tap_rows; ++i) {
    for (int64_t j = 0; j < from.tap_cols; ++j) taps.picked |= uint64_t{1} << (i * i_step + j * j_step);
  }
  return taps;
}

// Row k = (c, i, j) of the panel: the lanes' weights of that channel and tap.
template <class S, class T>
void pack_weight(const ConvGemm& gemm, const WeightSegment<S>& from, const Panel<T>& to) {
  const int64_t channels = from.channels, taps = from.taps(), tap_cols = from.tap_cols;
  // Dimensions of k that continue one another are taken as one, the longer the better.
  const bool rows_join = from.tap_rows == 1 || gemm.weight_i == gemm.weight_j * tap_cols;
  const int64_t tap_step = tap_cols > 1 ? gemm.weight_j : gemm.weight_i;
  // Rows k, k + step, ... of the panel.
  const auto pack = [&](const S* src, int64_t k_step, int64_t depth, int64_t k, int64_t step = 1) {
    pack_lanes(LaneSource<S>{src, from.lane_step, k_step, from.lanes, depth},
               Panel<T>{to.data + k * to.pitch, step * to.pitch, to.width}, gemm.is_gradient);
  };
  const bool takes_thirds = kLoadsThirds<S> && rows_join && tap_step == 3 && channels <= 3;
  if (taps == 1) {
    pack(from.data, gemm.weight_c, channels, 0);
  } else if (gemm.weight_c == 1 && channels > 1 && takes_thirds) {
    // Two or three channels in channels_last: a channel's taps at a time. A tap's channels would leave a transposition
    // mostly empty.
    for (int64_t c = 0; c < channels; ++c) pack(from.data + c, tap_step, taps, c * taps);
  } else if (gemm.weight_c == 1 && channels > 1) {
    // channels_last: one tap at a time, its channels `taps` rows of the panel apart.
    for (int64_t t = 0; t < taps; ++t) {
      pack(from.data + from.tap_offset(gemm, t), 1, channels, t, taps);
    }
  } else if (rows_join && (channels == 1 || gemm.weight_c == tap_step * taps)) {
    pack(from.data, tap_step, channels * taps, 0);
  } else {
    if constexpr (kHasTranspose<T>) {
      const PickedElements picked = picked_taps(gemm, from);
      if (channels > 1 && picked.count() > 0) {
        const int64_t depth = (channels - 1) * picked.size + (64 - __builtin_clzll(picked.picked));
        return pack_transposed<T>(LaneSource<S>{from.data, from.lane_step, 1, from.lanes, depth},
                                  PickedPanel<T>{to, picked});
      }
    }
    const int64_t rows = rows_join ? 1 : from.tap_rows, run = rows_join ? taps : tap_cols;
    const int64_t step = rows_join ? tap_step : gemm.weight_j;
    // As grad_input has them, all taps or a phase's: the lines of later channels, which lie far apart, are asked for
    // early.
    const int64_t last_ahead = gemm.weight_c >= int64_t(64 / sizeof(S)) ? channels - kStepsAhead : 0;
    for (int64_t c = 0; c < channels; ++c) {
      const S* const channel = from.data + c * gemm.weight_c;
      if (c < last_ahead) prefetch_lanes(channel + kStepsAhead * gemm.weight_c, from.lane_step, from.lanes);
      for (int64_t i = 0; i < rows; ++i) pack(channel + i * gemm.weight_i, step, run, (c * rows + i) * run);
    }
  }
}

// Lanes are groups: a vector of them for each of so many result channels, side by side in the panel.
template <class S, class T>
void pack_weight_of_groups(const ConvGemm& gemm, const WeightSegment<S>& from, int64_t vectors, const Panel<T>& to) {
  if constexpr (kPacksFours<T>) {
    if (packs_fours(vectors, gemm.weight_m)) {
      const int64_t taps = from.taps();
      T* row = to.data;
      for (int64_t k = 0; k < from.channels * taps; ++k, row += to.pitch) {
        const S* const src = from.data + k / taps * gemm.weight_c + from.tap_offset(gemm, k % taps);
        pack_fours<T>(from.lanes, row, [&](int64_t lane) { return load_as_partial(src + lane * from.lane_step, 4); });
      }
      return;
    }
  }
  for (int64_t v = 0; v < vectors; ++v) {
    WeightSegment<S> channel = from;
    channel.data += v * gemm.weight_m;
    pack_weight(gemm, channel, Panel<T>{to.data + v * Vec<T>::kLanes, to.pitch, Vec<T>::kLanes});
  }
}

// The same for result channels that are (channel, tap) pairs, number m and following (ConvGemm, result_taps), of a
// group's weight. Reduced channels have one tap here.
template <class S, class T>
void pack_weight_of_taps(const ConvGemm& gemm, const S* weight, int64_t m, int64_t lanes, int64_t channels,
                         const Panel<T>& to) {
  const int64_t taps_w = gemm.result_taps_w, taps = gemm.result_taps();
  if (gemm.weight_result_i == taps_w * gemm.weight_result_j && gemm.weight_m == taps * gemm.weight_result_j) {
    pack_lanes(LaneSource<S>{weight + m * gemm.weight_result_j, gemm.weight_result_j, gemm.weight_c, lanes, channels},
               to, gemm.is_gradient);
    return;
  }
  fill_zero(to.data, channels * to.pitch);
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t tap = (m + lane) % taps;
    const S* const src = weight + (m + lane) / taps * gemm.weight_m + tap / taps_w * gemm.weight_result_i +
                         tap % taps_w * gemm.weight_result_j;
    for (int64_t k = 0; k < channels; ++k) {
      const T value = widen_scalar(src[k * gemm.weight_c]);
      set_lane(to.data + k * to.pitch, lane, gemm.is_gradient ? conjugate(value) : value);
    }
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
