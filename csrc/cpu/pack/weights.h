// The packers of weight panels.
#pragma once

#include "../isa/convert.h"
#include "lanes.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// One K segment of weights as [k][dst_pitch], k = (c, i, j), `lanes` lanes that are lane_step apart in the weight and
// zeros up to `width`.
template <class S, class T>
void pack_weight(const ConvGemm& gemm, const S* weight, int64_t lane_step, int64_t lanes, int64_t channels,
                 int64_t tap_rows, int64_t tap_cols, T* dst, int64_t dst_pitch, int64_t width) {
  const bool conj = gemm.conj_weight;
  // Dimensions of k that continue one another are taken as one, the longer the better.
  const bool rows_join = tap_rows == 1 || gemm.weight_i == gemm.weight_j * tap_cols;
  const int64_t taps = tap_rows * tap_cols;
  const int64_t tap_step = tap_cols > 1 ? gemm.weight_j : gemm.weight_i;
  const auto pack = [&](const S* src, int64_t k_step, int64_t depth, int64_t k) {
    pack_lanes(src, lane_step, k_step, lanes, depth, dst + k * dst_pitch, dst_pitch, width, conj);
  };
  if (taps == 1) {
    pack(weight, gemm.weight_c, channels, 0);
  } else if (gemm.weight_c == 1 && channels > 1) {
    // channels_last: one tap at a time, its channels `taps` rows of the panel apart.
    for (int64_t t = 0; t < taps; ++t) {
      pack_lanes(weight + t / tap_cols * gemm.weight_i + t % tap_cols * gemm.weight_j, lane_step, 1, lanes, channels,
                 dst + t * dst_pitch, taps * dst_pitch, width, conj);
    }
  } else if (rows_join && (channels == 1 || gemm.weight_c == tap_step * taps)) {
    pack(weight, tap_step, channels * taps, 0);
  } else {
    const int64_t rows = rows_join ? 1 : tap_rows, run = rows_join ? taps : tap_cols;
    const int64_t step = rows_join ? tap_step : gemm.weight_j;
    // As grad_input has them, all taps or a phase's: the lines of later channels, which lie far apart, are asked for
    // early.
    const int64_t last_ahead = gemm.weight_c >= int64_t(64 / sizeof(S)) ? channels - kStepsAhead : 0;
    for (int64_t c = 0; c < channels; ++c) {
      if (c < last_ahead) prefetch_lanes(weight + (c + kStepsAhead) * gemm.weight_c, lane_step, lanes);
      for (int64_t i = 0; i < rows; ++i) {
        pack(weight + c * gemm.weight_c + i * gemm.weight_i, step, run, (c * rows + i) * run);
      }
    }
  }
}

// The same for result channels that are (channel, tap) pairs, number m and following (ConvGemm, result_taps).
template <class S, class T>
void pack_weight_of_taps(const ConvGemm& gemm, const S* weight, int64_t m, int64_t lanes, int64_t channels, T* dst,
                         int64_t width) {
  const int64_t taps_w = gemm.result_taps_w, taps = gemm.result_taps();
  if (gemm.weight_result_i == taps_w * gemm.weight_result_j && gemm.weight_m == taps * gemm.weight_result_j) {
    pack_lanes(weight + m * gemm.weight_result_j, gemm.weight_result_j, gemm.weight_c, lanes, channels, dst, width,
               width, gemm.conj_weight);
    return;
  }
  fill_zero(dst, channels * width);
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t tap = (m + lane) % taps;
    const S* const src = weight + (m + lane) / taps * gemm.weight_m + tap / taps_w * gemm.weight_result_i +
                         tap % taps_w * gemm.weight_result_j;
    for (int64_t k = 0; k < channels; ++k) {
      const T value = widen_scalar(src[k * gemm.weight_c]);
      set_lane(dst + k * width + lane / Vec<T>::kLanes * Vec<T>::kLanes, int(lane % Vec<T>::kLanes),
               gemm.conj_weight ? conjugate(value) : value);
    }
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
