// The packer of source patches.
#pragma once

#include "../isa/convert.h"
#include "interleave.h"
#include "lanes.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// The zero-padded piece of a source that the pixels of one tile read, in scratch as
//   planar          [image][channel][row][col]       or
//   channel_inner   [image][row][col][channel]       whichever is nearer to the source's own order;
//   lanes           [image][channel][row][col][L]    where vectors run over groups: element L is the group.
// Zero padding becomes real zeros here, so that it multiplies like any other value (Inf * 0 = NaN).
enum class PatchOrder { kPlanar, kChannelInner, kLanes };

// Of a block of `channels`. A column of width one has no stride to speak of.
inline PatchOrder patch_order(bool lanes_are_groups, int64_t channels, int64_t channel_stride, int64_t col_stride,
                              int64_t width) {
  if (lanes_are_groups) return PatchOrder::kLanes;
  const bool channels_are_inner = channels > 1 && channel_stride == 1 && (col_stride != 1 || width == 1);
  return channels_are_inner ? PatchOrder::kChannelInner : PatchOrder::kPlanar;
}

struct Patch {
  PatchOrder order;
  PatchAxis rows, cols;
  int64_t images, channels;
  int64_t image_pitch, channel_pitch, row_pitch, col_pitch;

  int64_t position_offset(int64_t image, int64_t p, int64_t q) const {
    return image * image_pitch + p * rows.position_pitch * row_pitch + q * cols.position_pitch * col_pitch;
  }
  int64_t tap_offset(int64_t channel, int64_t i, int64_t j) const {
    return channel * channel_pitch + (i * rows.tap_pitch + rows.shift) * row_pitch +
           (j * cols.tap_pitch + cols.shift) * col_pitch;
  }
};

// Whether a single tap meets the source, of `extent` rows or columns, at all positions.
inline bool stays_inside(const GatherAxis& axis, int64_t positions, int64_t extent) {
  return axis.source(0, 0) >= 0 && axis.source(positions - 1, 0) < extent;
}

// The patch that such a source itself is, for the two offsets: its strides are the pitches.
inline Patch patch_in_place(const GatherAxis& rows, const GatherAxis& cols, int64_t image, int64_t channel, int64_t row,
                            int64_t col) {
  Patch patch{};
  patch.rows.position_pitch = rows.step;
  patch.cols.position_pitch = cols.step;
  patch.image_pitch = image;
  patch.channel_pitch = channel;
  patch.row_pitch = row;
  patch.col_pitch = col;
  return patch;
}

template <class S>
struct Source {
  const S* data;  // image 0, channel 0 of the block, row 0, col 0
  int64_t image, channel, row, col;
  int64_t height, width;
  int64_t group, lanes;  // kLanes: the distance between groups, and how many there are
  bool lone = false;     // pairs of channels: the last one has no second
};

inline Patch lay_out_patch(PatchOrder order, const PatchAxis& rows, const PatchAxis& cols, int64_t images,
                           int64_t channels, int64_t lanes, int64_t element_size) {
  Patch patch{order, rows, cols, images, channels, 0, 0, 0, 0};
  if (order == PatchOrder::kChannelInner) {
    patch.channel_pitch = 1;
    patch.col_pitch = odd_lines_of_channels(channels, element_size);
    patch.row_pitch = cols.size * patch.col_pitch;
    patch.image_pitch = odd_lines(rows.size * patch.row_pitch, element_size);
  } else {
    patch.col_pitch = order == PatchOrder::kLanes ? lanes : 1;
    patch.row_pitch = cols.size * patch.col_pitch;
    patch.channel_pitch = odd_lines(rows.size * patch.row_pitch, element_size);
    patch.image_pitch = channels * patch.channel_pitch;
  }
  return patch;
}

// The part [low, high) of a run of `length` coordinates first, first + step, ... that lies in [0, extent).
struct RunBounds {
  int64_t low, high;
};
inline RunBounds clip_run(int64_t first, int64_t step, int64_t length, int64_t extent) {
  const int64_t low = min64(first < 0 ? div_up(-first, step) : 0, length);
  const int64_t high = min64(extent > first ? div_up(extent - first, step) : 0, length);
  return {low, max64(low, high)};
}

// pack_patch's inner step: `count` pixels of a patch's row from source pixels `step` apart, of one plane, or of all
// channels where they are inner. Pairs of bfloat16 have their own (pairs.h).
template <class S, class T>
struct PixelCopier {
  static CONV2D_INLINE void copy(const Patch& patch, const Source<S>& source, int64_t /*plane*/, const S* src,
                                 int64_t step, int64_t count, T* dst, bool conj) {
    if (patch.order == PatchOrder::kPlanar) {
      copy_run(src, step, count, dst, conj);
    } else if (patch.order == PatchOrder::kLanes) {
      pack_lanes(src, source.group, step, source.lanes, count, dst, patch.col_pitch, patch.col_pitch, conj);
    } else if (step == patch.col_pitch && step == patch.channels && source.channel == 1) {
      copy_run(src, 1, count * patch.channels, dst, conj);
    } else {
      for (int64_t x = 0; x < count; ++x) {
        copy_run(src + x * step, source.channel, patch.channels, dst + x * patch.col_pitch, conj);
      }
    }
  }
};

template <class S, class T>
void pack_patch(const Patch& patch, const Source<S>& source, bool conj, T* dst) {
  const PatchAxis &rows = patch.rows, &cols = patch.cols;
  // Lanes of whole groups that lie side by side are packed for all their channels at once.
  const bool interleaved = kHasTranspose<T> && patch.order == PatchOrder::kLanes && source.channel == 1 &&
                           source.group == patch.channels && can_interleave(patch.channels);
  // Planes of pixels whose channels lie together, in blocks of all channels.
  const bool transposed = kHasTranspose<T> && patch.order == PatchOrder::kPlanar && source.channel == 1 &&
                          source.col != 1 && patch.channels > 1;
  const bool all_at_once = interleaved || transposed;
  const int64_t planes = all_at_once || patch.order == PatchOrder::kChannelInner ? 1 : patch.channels;
  constexpr int64_t kLine = int64_t(64 / sizeof(S));
  // Borders that are set faster than memset is called.
  constexpr int64_t kShortBorder = 4;
  // Planes that are written at once: zeros go to each of them.
  const int64_t together = all_at_once ? patch.channels : 1;
  const auto clear = [&](T* d, int64_t n) {
    if (n <= kShortBorder) {
      for (int64_t c = 0; c < together; ++c) {
        for (int64_t i = 0; i < n; ++i) d[c * patch.channel_pitch + i] = T{};
      }
      return;
    }
    for (int64_t c = 0; c < together; ++c) fill_zero(d + c * patch.channel_pitch, n);
  };
  // Whole rows that continue one another, in the source and in the patch, are one run.
  const bool rows_join = patch.order == PatchOrder::kPlanar && !transposed && rows.runs == 1 && cols.runs == 1 &&
                         rows.run_step == 1 && cols.run_step == 1 && cols.first == 0 &&
                         cols.run_length == source.width && source.row == source.col * source.width &&
                         rows.first >= 0 && rows.first + rows.run_length <= source.height &&
                         patch.row_pitch == cols.run_length * patch.col_pitch;
  if (rows_join) {
    for (int64_t image = 0; image < patch.images; ++image) {
      for (int64_t plane = 0; plane < planes; ++plane) {
        const S* const s = source.data + image * source.image + plane * source.channel + rows.first * source.row;
        PixelCopier<S, T>::copy(patch, source, plane, s, source.col, rows.run_length * cols.run_length,
                                dst + image * patch.image_pitch + plane * patch.channel_pitch, conj);
      }
    }
    return;
  }
  const RunBounds first_run = clip_run(cols.first, cols.run_step, cols.run_length, source.width);
  for (int64_t image = 0; image < patch.images; ++image) {
    for (int64_t plane = 0; plane < planes; ++plane) {
      const S* const src_plane = source.data + image * source.image + plane * source.channel;
      T* dst_row = dst + image * patch.image_pitch + plane * patch.channel_pitch;
      for (int64_t run_row = 0; run_row < rows.runs; ++run_row) {
        const int64_t first_row = rows.first + run_row * rows.run_shift;
        for (int64_t r = 0; r < rows.run_length; ++r, dst_row += patch.row_pitch) {
          const int64_t row = first_row + r * rows.run_step;
          if (row < 0 || row >= source.height) {
            clear(dst_row, patch.row_pitch);
            continue;
          }
          const S* const src_row = src_plane + row * source.row;
          for (int64_t run = 0; run < cols.runs; ++run) {
            const int64_t first = cols.first + run * cols.run_shift;
            const RunBounds in = run == 0 ? first_run : clip_run(first, cols.run_step, cols.run_length, source.width);
            T* d = dst_row + run * cols.run_length * patch.col_pitch;
            clear(d, in.low * patch.col_pitch);
            clear(d + in.high * patch.col_pitch, (cols.run_length - in.high) * patch.col_pitch);
            if (in.low == in.high) continue;
            const S* const s = src_row + (first + in.low * cols.run_step) * source.col;
            // The step from a single element, which may be huge, is never taken.
            const int64_t count = in.high - in.low, step = (count > 1 ? cols.run_step : 1) * source.col;
            d += in.low * patch.col_pitch;
            if (all_at_once) {
              if constexpr (kHasTranspose<T>) {
                if (interleaved) {
                  load_interleaved(patch.channels, s, step, count, source.lanes, 0, patch.channels, d, patch.col_pitch,
                                   patch.channel_pitch);
                } else {
                  pack_planes(s, step, count, patch.channels, d, patch.channel_pitch);
                }
              }
            } else {
              if (step == 1 && plane + 1 < planes) {
                // Pieces of rows that jump from plane to plane: hardware prefetchers see few of their lines coming.
                for (int64_t x = 0; x < count; x += kLine) __builtin_prefetch(s + source.channel + x);
              }
              PixelCopier<S, T>::copy(patch, source, plane, s, step, count, d, conj);
            }
          }
        }
      }
    }
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
