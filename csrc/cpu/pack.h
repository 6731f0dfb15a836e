// Packers: source patches, and panels of the vector operand.
#pragma once

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class T>
CONV2D_INLINE void fill_zero(T* dst, int64_t n) {
  if (n > 0) __builtin_memset(dst, 0, size_t(n) * sizeof(T));
}

// ---- vectors from strided memory -----------------------------------------------------------------------------------

// Whether there are the operations (transpose, unzip, zip) of which drivers, packers and stores beyond the generic ones
// are made. The portable engine has none: it is there for results, not for speed, and each driver is minutes of
// compiling. Which of them run changes no bit.
template <class T>
constexpr bool kHasTranspose = false;
#if defined(CONV2D_HAS_NATIVE_VEC)
template <>
constexpr bool kHasTranspose<float> = true;
template <>
constexpr bool kHasTranspose<double> = true;
#endif

// A vector of the compute type from any storage type.
template <class T>
CONV2D_INLINE typename Vec<T>::reg load_as(const T* p) {
  return Vec<T>::load(p);
}
#if defined(CONV2D_HAS_NATIVE_VEC)
CONV2D_INLINE Vec<float>::reg load_as(const BFloat16* p) { return widen(p); }
CONV2D_INLINE Vec<float>::reg load_as(const Float16* p) { return widen(p); }
#else
template <class S>
CONV2D_INLINE Vec<float>::reg load_widened(const S* p) {
  float values[Vec<float>::kLanes];
  for (int i = 0; i < Vec<float>::kLanes; ++i) values[i] = widen_scalar(p[i]);
  return Vec<float>::load(values);
}
CONV2D_INLINE Vec<float>::reg load_as(const BFloat16* p) { return load_widened(p); }
CONV2D_INLINE Vec<float>::reg load_as(const Float16* p) { return load_widened(p); }
#endif

template <class T>
CONV2D_INLINE typename Vec<T>::reg load_as_partial(const T* p, int n) {
  return Vec<T>::load_partial(p, n);
}
template <class S>
CONV2D_INLINE Vec<float>::reg load_partial_widened(const S* p, int n) {
  float values[Vec<float>::kLanes] = {};
  for (int i = 0; i < n; ++i) values[i] = widen_scalar(p[i]);
  return Vec<float>::load(values);
}
CONV2D_INLINE Vec<float>::reg load_as_partial(const BFloat16* p, int n) { return load_partial_widened(p, n); }
CONV2D_INLINE Vec<float>::reg load_as_partial(const Float16* p, int n) { return load_partial_widened(p, n); }

// Keeps the compiler from loading a vector anew for each of its uses.
template <class Reg>
CONV2D_INLINE void load_once([[maybe_unused]] Reg& v) {
#if defined(CONV2D_HAS_NATIVE_VEC)
  __asm__("" : "+v"(v));
#endif
}

// dst[k * dst_pitch + lane] = src[lane * lane_step + k] for `depth` contiguous k, by kLanes x kLanes blocks in
// registers. `lanes` <= width; the lanes beyond become zero. Where depth is no multiple of kLanes, the last block
// overlaps the one before it.
template <class S, class T>
CONV2D_INLINE void pack_transposed(const S* src, int64_t lane_step, int64_t lanes, int64_t depth, T* dst,
                                   int64_t dst_pitch, int64_t width) {
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  for (int64_t lane = 0; lane < width; lane += L) {
    const int64_t valid = min64(lanes - lane, L);
    const S* const s = src + lane * lane_step;
    T* const d = dst + lane;
    if (valid <= 0) {
      for (int64_t k = 0; k < depth; ++k) V::store(d + k * dst_pitch, V::zero());
      continue;
    }
    for (int64_t k0 = 0; k0 < depth; k0 += L) {
      const int64_t k = depth - k0 >= L ? k0 : max64(depth - L, 0);
      typename V::reg r[L];
      if (depth < L) {
        for (int i = 0; i < L; ++i) r[i] = i < valid ? load_as_partial(s + i * lane_step, int(depth)) : V::zero();
      } else if (valid == L) {
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) {
          r[i] = load_as(s + i * lane_step + k);
          __builtin_prefetch(s + i * lane_step + k + depth);
        }
      } else {
        for (int i = 0; i < L; ++i) r[i] = i < valid ? load_as(s + i * lane_step + k) : V::zero();
      }
      V::transpose(r);
      const int64_t n = min64(depth, L);
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) {
        if (i < n) V::store(d + (k + i) * dst_pitch, r[i]);
      }
    }
  }
}

// Steps of k ahead of which the packers ask for lanes that hardware prefetchers don't see coming.
constexpr int64_t kStepsAhead = 8;

// Asks for the lines of `lanes` elements that are lane_step apart.
template <class S>
CONV2D_INLINE void prefetch_lanes(const S* src, int64_t lane_step, int64_t lanes) {
  const int64_t apart = max64(int64_t(64 / sizeof(S)), lane_step);
  for (int64_t i = 0; i < lanes * lane_step; i += apart) __builtin_prefetch(src + i);
}

// The same for any strides: dst[k * dst_pitch + lane] = src[lane * lane_step + k * k_step].
template <class S, class T>
CONV2D_INLINE void pack_lanes(const S* src, int64_t lane_step, int64_t k_step, int64_t lanes, int64_t depth, T* dst,
                              int64_t dst_pitch, int64_t width, bool conj) {
  constexpr int L = Vec<T>::kLanes;
  if constexpr (kHasTranspose<T>) {
    if (lane_step == 1) {
      for (int64_t k = 0; k < depth; ++k, dst += dst_pitch, src += k_step) {
        copy_run(src, 1, lanes, dst, false);
        fill_zero(dst + lanes, width - lanes);
      }
      return;
    }
    if (k_step == 1 && depth >= L / 4) {
      pack_transposed(src, lane_step, lanes, depth, dst, dst_pitch, width);
      return;
    }
  }
  if constexpr (kHasTranspose<T>) {
    // Steps of k that lie pages apart: what is needed is asked for early, so that the page tables are searched
    // meanwhile.
    const int64_t whole = lanes / L * L, last_ahead = k_step >= int64_t(64 / sizeof(S)) ? depth - kStepsAhead : 0;
    for (int64_t k = 0; k < depth; ++k, dst += dst_pitch, src += k_step) {
      if (k < last_ahead) prefetch_lanes(src + kStepsAhead * k_step, lane_step, lanes);
      const S* s = src;
      for (int64_t lane = 0; lane < whole; lane += L, s += L * lane_step) {
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) dst[lane + i] = widen_scalar(s[i * lane_step]);
      }
      for (int64_t lane = whole; lane < width; ++lane) {
        dst[lane] = lane < lanes ? widen_scalar(src[lane * lane_step]) : T{};
      }
    }
    return;
  }
  for (int64_t k = 0; k < depth; ++k, dst += dst_pitch, src += k_step) {
    for (int64_t lane = 0; lane < width; ++lane) {
      const T value = lane < lanes ? widen_scalar(src[lane * lane_step]) : T{};
      set_lane(dst + lane / L * L, int(lane % L), conj ? conjugate(value) : value);
    }
  }
}

// How far ahead pack_planes asks for source memory.
constexpr int64_t kPrefetchedBytes = 8192;

// dst[c * dst_pitch + x] = src[x * step + c] for x < count and `channels` contiguous c: pixels whose channels lie
// together become planes. Nothing but these elements is written: at the end of a plane the next row or plane follows.
template <class S, class T>
CONV2D_INLINE void pack_planes(const S* src, int64_t step, int64_t count, int64_t channels, T* dst, int64_t dst_pitch) {
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  // A block takes lines from many pixels, which hardware prefetchers follow badly.
  const int64_t ahead = step > 0 ? max64(L, div_up(kPrefetchedBytes / int64_t(sizeof(S)), step)) * step : 0;
  if (count >= L && channels >= L) {
    // Whole blocks only: the last one overlaps the one before it, in either direction.
    for (int64_t x0 = 0; x0 < count; x0 += L) {
      const int64_t x = min64(x0, count - L);
      for (int64_t c0 = 0; c0 < channels; c0 += L) {
        const int64_t c = min64(c0, channels - L);
        const S* const s = src + x * step + c;
        typename V::reg r[L];
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) {
          r[i] = load_as(s + i * step);
          __builtin_prefetch(s + i * step + ahead);
        }
        V::transpose(r);
        T* const d = dst + c * dst_pitch + x;
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) V::store(d + i * dst_pitch, r[i]);
      }
    }
    return;
  }
  const int pixels = int(min64(count, L)), planes = int(min64(channels, L));
  for (int64_t x0 = 0; x0 < count; x0 += L) {
    const int64_t x = min64(x0, count - pixels);
    // A pixel of few channels is loaded with what follows it, as far as that belongs to the run.
    const int64_t readable = (count - 1 - x) * step + channels;
    for (int64_t c0 = 0; c0 < channels; c0 += L) {
      const int64_t c = min64(c0, channels - planes);
      const S* const s = src + x * step;
      typename V::reg r[L];
      for (int i = 0; i < L; ++i) {
        const int64_t at = i * step + c;
        r[i] = i >= pixels ? V::zero() : at + L <= readable ? load_as(s + at) : load_as_partial(s + at, planes);
      }
      V::transpose(r);
      T* const d = dst + c * dst_pitch + x;
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) {
        if (i < planes) V::store_partial(d + i * dst_pitch, r[i], pixels);
      }
    }
  }
}

// ---- the source patch --------------------------------------------------------------------------------------------

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

// interleave.h
inline bool can_interleave(int64_t channels);
template <class S, class T>
void load_interleaved(int64_t group_channels, const S* src, int64_t step, int64_t count, int64_t lanes, int64_t first,
                      int64_t channels, T* dst, int64_t dst_step, int64_t channel_pitch);

// `count` pixels of a patch's row from source pixels `step` apart: of one plane, or of all channels where they are
// inner.
template <class S, class T>
CONV2D_INLINE void copy_pixels(const Patch& patch, const Source<S>& source, int64_t, const S* src, int64_t step,
                               int64_t count, T* dst, bool conj) {
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
        copy_pixels(patch, source, plane, s, source.col, rows.run_length * cols.run_length,
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
              copy_pixels(patch, source, plane, s, step, count, d, conj);
            }
          }
        }
      }
    }
  }
}

// ---- weight panels -----------------------------------------------------------------------------------------------

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
