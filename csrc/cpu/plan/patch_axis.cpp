#include "patch_axis.h"

#include "../base/limits.h"

namespace conv2d_ext::cpu {

PatchAxis make_patch_axis(const GatherAxis& gather, int64_t position0, int64_t positions, int64_t tap0, int64_t taps) {
  // The taps lie in the padded source together, as the positions do, but one beyond the other need not.
  const int64_t reach = (taps - 1) * (gather.tap < 0 ? -gather.tap : gather.tap);
  const int64_t dense = saturating_add(saturating_mul(positions - 1, gather.step), reach + 1);
  const int64_t expanded = saturating_mul(positions, taps);
  if (dense > expanded) return make_expanded_axis(gather, position0, positions, tap0, taps);
  PatchAxis axis{};
  axis.size = axis.run_length = dense;
  axis.position_pitch = gather.step;
  axis.tap_pitch = gather.tap;
  axis.shift = gather.tap < 0 ? reach : 0;
  axis.runs = axis.run_step = 1;
  axis.first = gather.source(position0, tap0) - axis.shift;
  return axis;
}

PatchAxis make_expanded_axis(const GatherAxis& gather, int64_t position0, int64_t positions, int64_t tap0,
                             int64_t taps) {
  PatchAxis axis{};
  axis.size = saturating_mul(positions, taps);
  axis.position_pitch = 1;
  axis.tap_pitch = axis.run_length = positions;
  axis.runs = taps;
  axis.run_step = gather.step;
  axis.run_shift = gather.tap;
  axis.first = gather.source(position0, tap0);
  return axis;
}

PatchAxis make_phased_axis(const GatherAxis& gather, int64_t position0, int64_t positions, int64_t tap0, int64_t taps) {
  PatchAxis axis{};
  axis.runs = axis.tap_runs = max64(min64(taps, gather.step), 1);
  axis.position_pitch = axis.run_shift = 1;
  axis.tap_pitch = axis.run_length = saturating_add(positions, max64(taps - 1, 0) / gather.step);
  axis.size = saturating_mul(axis.runs, axis.run_length);
  axis.run_step = gather.step;
  axis.first = gather.source(position0, tap0);
  return axis;
}

int64_t patch_elements(int64_t planes, int64_t channels, int64_t images, int64_t element_size) {
  return saturating_add(saturating_mul(planes, odd_lines_of_channels(max64(channels, 1), element_size)),
                        saturating_mul(images, 128 / element_size));
}

int64_t channels_of_block(const KBlocking& k, int64_t plane, int64_t element_size, int64_t most_bytes) {
  if (!k.takes_all_taps() || k.blocks_c == 0) return 1;
  const int64_t segment = max64(saturating_mul(plane, k.segment_channels), 1);
  return k.segment_channels * even_piece(k.blocks_c, most_bytes / element_size / segment);
}

}  // namespace conv2d_ext::cpu
