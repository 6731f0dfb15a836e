// The packer of source patches.
#pragma once

#include "../isa/convert.h"
#include "interleave.h"
#include "lanes.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// The zero-padded piece of a source that the pixels of one tile read, in scratch as
//   planar          [image][channel][row][col]       or
//   channel_inner   [image][row][col][channel]       whichever is nearer to the source's own order;
//   lanes           [image][channel][row][col][L]    where vectors run over groups: the last index is the group;
//   blocks          [block][image][tap][row][col]    of blocks of channels (pack/amx.h). Where columns are expanded,
//                                                    each tap along the row has a copy of all rows.
// Zero padding becomes real zeros here, so that it multiplies like any other value (Inf * 0 = NaN).
enum class PatchOrder { kPlanar, kChannelInner, kLanes, kBlocks };

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
    return channel * channel_pitch + rows.tap(i) * row_pitch + cols.tap(j) * col_pitch;
  }
};

// A source as its own patch, with its strides as pitches: for a single tap that lies inside at all positions.
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
  int64_t group = 0, lanes = 1;  // kLanes: the distance between groups, and how many there are
  int64_t missing = 0;           // channels that the last pair or block lacks
  // kLanes: how many channels a group has, and with which one the block begins.
  int64_t of_group = 0, first = 0;
  // kChannelInner: which of a pixel's channels, counted from the block's first, are prefetched for the next block.
  Interval ahead{0, 0};
};

inline Patch lay_out_patch(PatchOrder order, const PatchAxis& rows, const PatchAxis& cols, int64_t images,
                           int64_t channels, int64_t lanes, int64_t element_size) {
  Patch patch{order, rows, cols, images, channels, 0, 0, 0, 0};
  if (order == PatchOrder::kChannelInner) {
    patch.channel_pitch = 1;
    patch.col_pitch = odd_lines_of_channels(channels, element_size);
    patch.row_pitch = cols.size * patch.col_pitch;
    patch.image_pitch = odd_lines(rows.size * patch.row_pitch, element_size);
  } else if (order == PatchOrder::kBlocks) {
    patch.col_pitch = 1;
    patch.row_pitch = cols.run_length;
    if (cols.runs > 1) patch.cols.tap_pitch = rows.size * cols.run_length;
    patch.image_pitch = rows.size * cols.size;
    patch.channel_pitch = odd_lines(images * patch.image_pitch, element_size);
  } else {
    patch.col_pitch = order == PatchOrder::kLanes ? lanes : 1;
    patch.row_pitch = cols.size * patch.col_pitch;
    patch.channel_pitch = odd_lines(rows.size * patch.row_pitch, element_size);
    patch.image_pitch = channels * patch.channel_pitch;
  }
  return patch;
}

// Neighbouring elements of a row of a source: `count` of them, `step` apart.
template <class S>
struct SourceRun {
  const S* data;
  int64_t step, count;
};

// Copies a run into a patch: one plane of it, or all channels where they are inner or kAllChannels. Pairs of bfloat16
// have their own (pairs.h), and words of pixels (pixel_rows.h).
template <class S, class T>
struct PixelCopier {
  static constexpr bool kAllChannels = false;
  static CONV2D_INLINE void copy(const Patch& patch, const Source<S>& source, int64_t /*plane*/,
                                 const SourceRun<S>& from, T* dst, bool conj) {
    if constexpr (kCopiesWords) {
      copy_pixels(patch, from, dst, false);
    } else if (patch.order == PatchOrder::kPlanar) {
      copy_run(from.data, from.step, from.count, dst, conj);
    } else if (patch.order == PatchOrder::kLanes) {
      pack_lanes(LaneSource<S>{from.data, source.group, from.step, source.lanes, from.count},
                 Panel<T>{dst, patch.col_pitch, patch.col_pitch}, conj);
    } else if (from.step == patch.col_pitch && from.step == patch.channels && source.channel == 1) {
      copy_run(from.data, 1, from.count * patch.channels, dst, conj);
    } else if (source.channel != 1) {
      for (int64_t x = 0; x < from.count; ++x) {
        copy_run(from.data + x * from.step, source.channel, patch.channels, dst + x * patch.col_pitch, conj);
      }
    } else {
      copy_pixels(patch, from, dst, conj);
    }
  }

 private:
  // Words of 16 bits are copied as they are where channels are inner and lie side by side.
  static constexpr bool kCopiesWords = std::is_same_v<S, T> && !std::is_same_v<T, ComputeType<T>>;
  // Pixels whose channels lie side by side. The numbers of channels that groups have, of which a copy is a few
  // instructions, are constants.
  static CONV2D_INLINE void copy_pixels(const Patch& patch, const SourceRun<S>& from, T* dst, bool conj) {
    with_constant<8, 16, 24, 32, 0>(patch.channels, [&](auto constant) CONV2D_INLINE_LAMBDA {
      const int64_t channels = constant > 0 ? int64_t(constant) : patch.channels;
      const S* src = from.data;
      T* to = dst;
      for (int64_t x = 0; x < from.count; ++x, src += from.step, to += patch.col_pitch) {
        copy_run(src, 1, channels, to, conj);
      }
    });
  }
};

// All of it is inlined into pack_patch, so that its members stay in registers: rows are short, and calls would cost as
// much as copying.
template <class S, class T>
class PatchPacker {
 public:
  PatchPacker(const Patch& patch, const Source<S>& source, bool conj)
      : patch_(patch),
        source_(source),
        conj_(conj),
        interleaved_(kHasTranspose<T> && patch.order == PatchOrder::kLanes && source.channel == 1 &&
                     source.group == source.of_group && can_interleave(source.of_group)),
        transposed_(kHasTranspose<T> && patch.order == PatchOrder::kPlanar && source.channel == 1 && source.col != 1 &&
                    patch.channels > 1),
        planes_(all_at_once() || patch.order == PatchOrder::kChannelInner ? 1 : patch.channels),
        first_run_(indices_inside(patch.cols.first, patch.cols.run_step, patch.cols.run_length, source.width)),
        by_masks_(patch.order == PatchOrder::kPlanar && !transposed_ && patch.cols.runs == 1 &&
                  patch.cols.run_step == 1 && source.col == 1 && patch.cols.run_length <= 64),
        joins_lanes_(kHasTranspose<T> && patch.order == PatchOrder::kLanes && !interleaved_ && patch.rows.runs == 1 &&
                     patch.cols.runs == 1 && patch.rows.run_step == 1 && patch.cols.run_step == 1 && source.col == 1 &&
                     source.row == source.width && first_run_.count() == source.width && source.group != 1),
        row_bits_(first_bits(patch.cols.run_length)),
        inside_bits_(first_bits(first_run_.end) & ~first_bits(first_run_.begin)) {}

  CONV2D_INLINE void pack(T* dst) const {
    const bool joined = rows_join();
    for (int64_t image = 0; image < patch_.images; ++image) {
      for (int64_t plane = 0; plane < planes_; ++plane) {
        const S* const from = source_.data + image * source_.image + plane * source_.channel;
        T* const to = dst + image * patch_.image_pitch + plane * patch_.channel_pitch;
        if (joined) {
          const int64_t count = patch_.rows.run_length * patch_.cols.run_length;
          copy(plane, {from + patch_.rows.first * source_.row, source_.col, count}, to);
        } else {
          pack_plane(plane, from, to);
        }
      }
    }
  }

 private:
  // Lanes of groups that lie side by side, and planes of pixels whose channels lie together, are packed for all
  // channels at once.
  bool all_at_once() const { return interleaved_ || transposed_ || PixelCopier<S, T>::kAllChannels; }

  // Whether whole rows of the source continue one another, in it and in the patch.
  bool rows_join() const {
    const PatchAxis &rows = patch_.rows, &cols = patch_.cols;
    return patch_.order == PatchOrder::kPlanar && !transposed_ && rows.runs == 1 && cols.runs == 1 &&
           rows.run_step == 1 && cols.run_step == 1 && cols.first == 0 && cols.run_length == source_.width &&
           source_.row == source_.col * source_.width && rows.first >= 0 &&
           rows.first + rows.run_length <= source_.height && patch_.row_pitch == cols.run_length * patch_.col_pitch;
  }

  CONV2D_INLINE void pack_plane(int64_t plane, const S* from, T* to) const {
    const PatchAxis& rows = patch_.rows;
    if constexpr (kHasTranspose<T>) {
      if (joins_lanes_) return pack_joined_lanes(from, to);
    }
    for (int64_t run = 0; run < rows.runs; ++run) {
      const int64_t first = rows.first + run * rows.run_shift;
      for (int64_t r = 0; r < rows.run_length; ++r, to += patch_.row_pitch) {
        const int64_t row = first + r * rows.run_step;
        if (row < 0 || row >= source_.height) {
          clear(to, patch_.row_pitch);
        } else {
          pack_row(plane, from + row * source_.row, to);
        }
      }
    }
  }

  // Planes whose rows continue one another are transposed as one run: rows are often shorter than a vector.
  CONV2D_INLINE void pack_joined_lanes(const S* from, T* to) const {
    const PatchAxis &rows = patch_.rows, &cols = patch_.cols;
    const int64_t row_pitch = patch_.row_pitch, col_pitch = patch_.col_pitch;
    const Interval in = indices_inside(rows.first, 1, rows.run_length, source_.height);
    const int64_t left = first_run_.begin * col_pitch, right = first_run_.end * col_pitch;
    clear(to, in.begin * row_pitch);
    for (int64_t row = in.begin; row < in.end; ++row) {
      clear(to + row * row_pitch, left);
      clear(to + row * row_pitch + right, cols.run_length * col_pitch - right);
    }
    clear(to + in.end * row_pitch, (rows.run_length - in.end) * row_pitch);
    if (in.count() == 0) return;
    const LaneSource<S> lanes{from + (rows.first + in.begin) * source_.row, source_.group, 1, source_.lanes,
                              in.count() * source_.width};
    T* const first = to + in.begin * row_pitch + left;
    pack_transposed<T>(lanes, GappedPanel<T>{{first, col_pitch, col_pitch}, source_.width, row_pitch - (right - left)});
  }

  CONV2D_INLINE void pack_row(int64_t plane, const S* from, T* to) const {
    const PatchAxis& cols = patch_.cols;
    if constexpr (kCopiesByMasks) {
      if (by_masks_) {
        using V = Vec<T>;
        // Of a row that lies in the padding the first coordinate may be huge.
        if (inside_bits_ == 0) return clear(to, cols.run_length);
        const S* const first = from + cols.first;
        for (int64_t x = 0; x < cols.run_length; x += V::kLanes) {
          const typename V::reg pixels = V::load_lanes(first + x, inside_bits_ >> x);
          V::store_lanes(to + x, pixels, row_bits_ >> x);
        }
        return;
      }
    }
    for (int64_t run = 0; run < cols.runs; ++run, to += cols.run_length * patch_.col_pitch) {
      const int64_t first = cols.first + run * cols.run_shift;
      const Interval in = run == 0 ? first_run_ : indices_inside(first, cols.run_step, cols.run_length, source_.width);
      clear(to, in.begin * patch_.col_pitch);
      clear(to + in.end * patch_.col_pitch, (cols.run_length - in.end) * patch_.col_pitch);
      if (in.count() == 0) continue;
      const S* const s = from + (first + in.begin * cols.run_step) * source_.col;
      // The step from a single element, which may be huge, is never taken.
      const int64_t count = in.count(), step = (count > 1 ? cols.run_step : 1) * source_.col;
      copy(plane, {s, step, count}, to + in.begin * patch_.col_pitch);
    }
  }

  CONV2D_INLINE void copy(int64_t plane, const SourceRun<S>& from, T* to) const {
    if constexpr (kHasTranspose<T>) {
      if (interleaved_) {
        return load_interleaved(
            source_.of_group, GroupPixels<const S>{from.data - source_.first, from.step, from.count, source_.lanes},
            source_.first, patch_.channels, GroupPlanes<T>{to, patch_.col_pitch, patch_.channel_pitch});
      }
      if (transposed_) {
        return pack_planes(from.data, from.step, from.count, patch_.channels, to, patch_.channel_pitch);
      }
    }
    if (from.step == 1 && plane + 1 < planes_) {
      // Runs jump from plane to plane: hardware prefetchers see few of their lines coming.
      constexpr int64_t kLine = int64_t(64 / sizeof(S));
      for (int64_t x = 0; x < from.count; x += kLine) __builtin_prefetch(from.data + source_.channel + x);
    }
    PixelCopier<S, T>::copy(patch_, source_, plane, from, to, conj_);
    prefetch_row_parts(from.data, from.step, from.count, source_.ahead);
  }

  // Zeros, in each of the planes that are written at once.
  CONV2D_INLINE void clear(T* to, int64_t n) const {
    // Borders that are set faster than memset is called.
    constexpr int64_t kShortBorder = 4;
    for (int64_t c = 0, planes = all_at_once() ? patch_.channels : 1; c < planes; ++c, to += patch_.channel_pitch) {
      if (n <= kShortBorder) {
        for (int64_t i = 0; i < n; ++i) to[i] = T{};
      } else {
        fill_zero(to, n);
      }
    }
  }

  // A row of at most 64 pixels that lie side by side, together with its padding.
  static constexpr bool kCopiesByMasks = kHasMasks && kHasTranspose<T> && std::is_same_v<S, T>;
  static constexpr uint64_t first_bits(int64_t n) {
    return n <= 0 ? 0 : n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
  }

  const Patch& patch_;
  const Source<S>& source_;
  const bool conj_, interleaved_, transposed_;
  const int64_t planes_;
  const Interval first_run_;
  const bool by_masks_, joins_lanes_;
  const uint64_t row_bits_, inside_bits_;  // of a row's pixels, and of those inside the source
};

template <class S, class T>
void pack_patch(const Patch& patch, const Source<S>& source, bool conj, T* dst) {
  PatchPacker<S, T>(patch, source, conj).pack(dst);
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
