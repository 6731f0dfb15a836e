// The geometry of source patches: the zero-padded piece of a source that the positions of a tile meet.
#pragma once

#include "../base/integers.h"
#include "summation_order.h"

namespace conv2d_ext::cpu {

// One axis of a source patch: how (position, tap) pairs of a tile map to patch coordinates,
//   coordinate = position * position_pitch + tap * tap_pitch + shift,
// and which source coordinates the patch holds: `runs` runs of run_length coordinates; run r starts at source
// coordinate first + r * run_shift and advances by run_step. Where the taps of neighbouring positions overlap the
// patch is one dense run; where dilation or stride would leave holes it is expanded, a run for each tap. Where tap_runs
// is not 0, taps go through so many runs in turn, and in each from coordinate to coordinate: tap() says where a tap is.
// A size that doesn't fit 64 bits is the largest that does.
struct PatchAxis {
  int64_t size, position_pitch, tap_pitch, shift;
  int64_t runs, run_length, run_step, run_shift, first;
  int64_t tap_runs;
  int64_t tap(int64_t number) const {
    return (tap_runs == 0 ? number * tap_pitch : number % tap_runs * tap_pitch + number / tap_runs) + shift;
  }
};
// The source's coordinate of a patch's.
inline int64_t source_coordinate(const PatchAxis& axis, int64_t number) {
  return axis.first + number / axis.run_length * axis.run_shift + number % axis.run_length * axis.run_step;
}
PatchAxis make_patch_axis(const GatherAxis& gather, int64_t position0, int64_t positions, int64_t tap0, int64_t taps);

// The same with a run for each tap, so that neighbouring positions are neighbours whatever the stride.
PatchAxis make_expanded_axis(const GatherAxis& gather, int64_t position0, int64_t positions, int64_t tap0,
                             int64_t taps);

// The same without copies, for neighbouring taps: a run for each phase of the stride, which its taps share.
PatchAxis make_phased_axis(const GatherAxis& gather, int64_t position0, int64_t positions, int64_t tap0, int64_t taps);

// Of the positions from 0 to before `positions` those all of whose taps lie in a source of `size` coordinates.
inline Interval positions_inside(const GatherAxis& axis, int64_t taps, int64_t positions, int64_t size) {
  const int64_t reach = (taps - 1) * axis.tap;
  const int64_t begin = indices_inside(axis.origin + min64(reach, 0), axis.step, positions, size).begin;
  const int64_t end = indices_inside(axis.origin + max64(reach, 0), axis.step, positions, size).end;
  return {begin, max64(begin, end)};
}

// Whether no tap of any position lies in the padding.
inline bool are_inside(const GatherAxis& axis, int64_t taps, int64_t positions, int64_t size) {
  return positions_inside(axis, taps, positions, size).count() == positions;
}
inline bool are_inside(const GatheredAxis& a) { return are_inside(a.axis, a.taps, a.positions, a.size); }

// Of `count` coordinates first, first + step, ..., those that lie in a source of `size`. They may descend; step is not
// 0.
inline Interval coordinates_inside(int64_t first, int64_t step, int64_t count, int64_t size) {
  return step < 0 ? indices_inside(size - 1 - first, -step, count, size) : indices_inside(first, step, count, size);
}

// Of the first position those taps that lie in a source of `size` coordinates; they ascend.
inline Interval taps_inside(const GatherAxis& axis, int64_t taps, int64_t size) {
  return indices_inside(axis.origin, axis.tap, taps, size);
}

// Elements along one axis of the patch of the first `positions` and `taps`.
inline int64_t patch_size(const GatherAxis& axis, int64_t positions, int64_t taps) {
  return make_patch_axis(axis, 0, positions, 0, taps).size;
}

// Planes of a patch: an odd number of cache lines, so that equal positions of successive planes fall into different
// cache sets; small planes stay as they are.
inline int64_t odd_lines(int64_t elements, int64_t element_size, int64_t least_bytes = 1024) {
  if (elements < least_bytes / element_size) return elements;
  const int64_t line = 64 / element_size;
  return saturating_mul(div_up(elements, line) | 1, line);
}
// The same for pixels whose channels lie together: a segment reads a few lines of each.
inline int64_t odd_lines_of_channels(int64_t channels, int64_t element_size) {
  return odd_lines(channels, element_size, 512);
}

// Scratch for the patch of `channels` planes of all images, in either layout: planar ones pad every plane, those with
// the channels inside every image, by up to two cache lines.
int64_t patch_elements(int64_t planes, int64_t channels, int64_t images, int64_t element_size);

// Channels whose patch, `plane` elements of each, lies in scratch together: near-equal blocks of whole segments.
int64_t channels_of_block(const KBlocking& k, int64_t plane, int64_t element_size, int64_t most_bytes);

}  // namespace conv2d_ext::cpu
