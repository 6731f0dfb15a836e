// The GEMM driver of forward and grad_input with vectors over pixels (a ConvGemm, plan/conv_gemm.h).
//
// A work item is (group, chunk of result channels, tile of pixels of one image). For each block of source channels the
// item copies the tile's zero-padded patch into scratch, planar (from channels_last by transposition); for each K
// segment and each panel of neighbouring pixels the micro-kernel runs over the chunk's channels. What already lies as
// the micro-kernel wants it is not copied:
//  * the pixels of a 1x1 kernel, full panels of them;
//  * weights whose k is contiguous (but many pixels of a 1x1 kernel read a copy of rows that lie far apart);
//  * results: full panels are summed in the planes of the result tensor.
// What needs converting or has other strides goes through scratch, and so does the last panel of a run where pixels
// don't fill it: nothing is read or written beyond a tensor's end.
//
// It computes what drivers/gemm.h does, in the same order, bit for bit; plan/candidates.cpp chooses.
#pragma once

#include "../kernels/pixels.h"
#include "../pack/interleave.h"
#include "../pack/patch.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class S, class T>
struct PixelCall {
  static constexpr int L = Vec<T>::kLanes;
  static constexpr int64_t kLine = 64 / sizeof(T);
  const ConvGemm& gemm;
  const KBlocking k;
  const PixelTiling tiling;
  const PixelScratch layout;

  PixelCall(const ConvGemm& g, int num_threads)
      : gemm(g),
        k(block_k(g.geometry(), vector_shape<T>().limits)),
        tiling(tile_pixel_conv(g, k, vector_shape<T>(), sizeof(S), num_threads)),
        layout(lay_out_scratch(tiling, k, vector_shape<T>())) {}

  int64_t items() const { return gemm.groups * tiling.tiles() * tiling.chunks_m; }

  static void run(void* context, int64_t item) { static_cast<const PixelCall*>(context)->work(item); }

  // The weights of one K segment for the micro-kernel: rows `pitch` apart.
  struct WeightRows {
    const T* data;
    int64_t pitch;
  };
  WeightRows weight_rows(const S* weight, int64_t rows, int64_t channels, int64_t tap_rows, int64_t tap_cols,
                         T* scratch) const {
    if constexpr (sizeof(S) == sizeof(T)) {
      if (tiling.weight_in_place) return {weight, gemm.weight_m};
    }
    const int64_t depth = channels * tap_rows * tap_cols, pitch = round_up(depth, L);
    if (tap_rows * tap_cols == 1) {
      // Where the rows' step is the smaller one (grad_input), a transposition.
      pack_lanes(weight, gemm.weight_c, gemm.weight_m, channels, rows, scratch, pitch, pitch, false);
      return {scratch, pitch};
    }
    for (int64_t m = 0; m < rows; ++m) {
      T* dst = scratch + m * pitch;
      for (int64_t c = 0; c < channels; ++c) {
        for (int64_t i = 0; i < tap_rows; ++i, dst += tap_cols) {
          copy_run(weight + m * gemm.weight_m + c * gemm.weight_c + i * gemm.weight_i, gemm.weight_j, tap_cols, dst,
                   false);
        }
      }
    }
    return {scratch, pitch};
  }

  void work(int64_t item) const {
    // Pixel tiles vary fastest: neighbouring items share weights.
    const int64_t tile = item % tiling.tiles(), chunk = item / tiling.tiles() % tiling.chunks_m;
    const int64_t group = item / tiling.tiles() / tiling.chunks_m;
    const int64_t image = tile / (tiling.tiles_h * tiling.tiles_w);
    const int64_t row0 = tile / tiling.tiles_w % tiling.tiles_h * tiling.tile_rows;
    const int64_t col0 = tile % tiling.tiles_w * tiling.tile_cols;
    const int64_t rows = min64(tiling.tile_rows, gemm.rows - row0);
    const int64_t cols = min64(tiling.tile_cols, gemm.cols - col0);
    const int64_t m0 = chunk * tiling.chunk_m, channels_m = min64(tiling.chunk_m, gemm.m - m0);

    char* const memory = static_cast<char*>(thread_scratch(layout.bytes));
    int64_t* const tap_offsets = reinterpret_cast<int64_t*>(memory + layout.tap_offsets);
    int64_t* const channel_offsets = reinterpret_cast<int64_t*>(memory + layout.channel_offsets);
    T* const zeros = reinterpret_cast<T*>(memory + layout.zeros);
    T* const bias = reinterpret_cast<T*>(memory + layout.bias);
    T* const weight_scratch = reinterpret_cast<T*>(memory + layout.weight);
    T* const c_scratch = reinterpret_cast<T*>(memory + layout.c);
    T* const total_scratch = reinterpret_cast<T*>(memory + layout.total);
    T* const lost_scratch = reinterpret_cast<T*>(memory + layout.lost);
    T* const patch_data = reinterpret_cast<T*>(memory + layout.patch);

    const S* const source =
        static_cast<const S*>(gemm.source) + image * gemm.source_n + group * gemm.channels * gemm.source_c;
    const S* const weight = static_cast<const S*>(gemm.weight) + group * gemm.weight_g + m0 * gemm.weight_m;
    S* const destination = static_cast<S*>(gemm.destination) + image * gemm.destination_n +
                           (group * gemm.m + m0) * gemm.destination_m + row0 * gemm.destination_row +
                           col0 * gemm.destination_col;

    // Blocks of result channels, and panels of pixels, near-equal.
    const Panels blocks = cut_panels(channels_m, pixel_rows(vector_shape<T>()));
    const int64_t max_vectors = pixel_panel_vectors(blocks.size(0), vector_shape<T>());
    fill_zero(zeros, blocks.size(0));
    fill_zero(bias, channels_m);
    if (gemm.bias != nullptr) {
      const S* const from = static_cast<const S*>(gemm.bias) + (group * gemm.m + m0) * gemm.bias_stride;
      for (int64_t m = 0; m < channels_m; ++m) bias[m] = widen_scalar(from[m * gemm.bias_stride]);
    }
    const bool bias_first = gemm.channels * gemm.taps() <= kBiasFirstProducts;

    // Pixels that are neighbours in the patch: of a row, or of all rows.
    const int64_t runs = tiling.join_rows ? 1 : rows, run = tiling.join_rows ? rows * cols : cols;
    const Panels panels = cut_panels(div_up(run, L), max_vectors);
    const int64_t full_panels = panels.count - (run % L != 0 ? 1 : 0);
    const int64_t direct_panels = tiling.direct ? full_panels : 0;
    const int64_t first_scratch = panels.start(direct_panels) * L, scratch_pitch = div_up(run, L) * L - first_scratch;
    const int64_t in_place_panels = tiling.source_in_place ? full_panels : 0;
    const int64_t first_packed = panels.start(in_place_panels) * L;

    for (int64_t c0 = 0; c0 < gemm.channels; c0 += tiling.block_channels) {
      const int64_t block_channels = min64(tiling.block_channels, gemm.channels - c0);
      for (int64_t i0 = 0; i0 < gemm.taps_h; i0 += k.tap_rows) {
        const int64_t tap_rows = min64(k.tap_rows, gemm.taps_h - i0);
        for (int64_t j0 = 0; j0 < gemm.taps_w; j0 += k.tap_cols) {
          const int64_t tap_cols = min64(k.tap_cols, gemm.taps_w - j0);
          Patch patch{};
          if (in_place_panels < panels.count) {
            patch = lay_out_patch(PatchOrder::kPlanar, make_patch_axis(gemm.axis_h, row0, rows, i0, tap_rows),
                                  make_patch_axis(gemm.axis_w, col0 + first_packed, cols - first_packed, j0, tap_cols),
                                  1, block_channels, L, sizeof(T));
            pack_patch(patch,
                       Source<S>{source + c0 * gemm.source_c, gemm.source_n, gemm.source_c, gemm.source_row,
                                 gemm.source_col, gemm.source_h, gemm.source_w, 0, 1},
                       false, patch_data);
          }
          for (int64_t s0 = 0; s0 < block_channels; s0 += k.segment_channels) {
            const int64_t segment = min64(k.segment_channels, block_channels - s0);
            const WeightRows w =
                weight_rows(weight + (c0 + s0) * gemm.weight_c + i0 * gemm.weight_i + j0 * gemm.weight_j, channels_m,
                            segment, tap_rows, tap_cols, weight_scratch);
            int64_t depth = 0;
            for (int64_t s = 0; s < segment; ++s) {
              for (int64_t i = 0; i < tap_rows; ++i) {
                for (int64_t j = 0; j < tap_cols; ++j) {
                  channel_offsets[depth] = (c0 + s0 + s) * gemm.source_c;
                  tap_offsets[depth++] = patch.tap_offset(s0 + s, i, j);
                }
              }
            }
            const int64_t number = k.segment_at(c0 + s0, i0, j0);
            const bool begins_chunk = number % kSegmentsPerChunk == 0, last = number + 1 == k.segments();
            if (begins_chunk && number > 0) {
              add_chunk(total_scratch, lost_scratch, c_scratch, runs * channels_m * scratch_pitch,
                        number == kSegmentsPerChunk);
            }
            for (int64_t r = 0; r < runs; ++r) {
              for (int64_t p = 0; p < panels.count; ++p) {
                const int64_t start = panels.start(p) * L;
                PixelOperands<T> o{};
                o.depth = depth;
                o.chain = k.chain;
                o.w_pitch = w.pitch;
                o.accumulate = !begins_chunk;
                o.b = patch_data + patch.position_offset(0, r, 0) + start - first_packed;
                o.k_offset = tap_offsets;
                T* c = c_scratch + r * channels_m * scratch_pitch + start - first_scratch;
                o.c_pitch = scratch_pitch;
                if constexpr (sizeof(S) == sizeof(T)) {
                  if (p < in_place_panels) {
                    o.b = source + col0 + start;
                    o.k_offset = channel_offsets;
                  }
                  if (p < direct_panels) {
                    c = destination + r * gemm.destination_row + start;
                    o.c_pitch = gemm.destination_m;
                  }
                }
                // Each block of channels asks for its share of the next panel.
                const bool has_next = p + 1 < panels.count && p + 1 != in_place_panels && blocks.size(0) > 2;
                const T* const next = o.b + (has_next ? panels.size(p) * L : 0);
                const int64_t next_pixels = has_next ? panels.size(p + 1) * L : 0, share = div_up(depth, blocks.count);
                for (int64_t at = 0; at < blocks.count; ++at) {
                  const int64_t m = blocks.start(at);
                  for (int64_t i = at * share, end = min64(i + share, depth); i < end; ++i) {
                    for (int64_t x = 0; x < next_pixels; x += kLine) __builtin_prefetch(next + o.k_offset[i] + x);
                  }
                  o.w = w.data + m * w.pitch;
                  o.c = c + m * o.c_pitch;
                  o.start = bias_first ? bias + m : zeros;
                  o.bias = !last || k.has_chunks() ? nullptr : bias_first ? zeros : bias + m;
                  pixel_ukernel_for<T>(blocks.size(at), panels.size(p))(o);
                }
              }
            }
          }
        }
      }
    }
    if (direct_panels == panels.count) return;
    if (k.has_chunks()) {
      add_chunk(total_scratch, lost_scratch, c_scratch, runs * channels_m * scratch_pitch, false);
      finish_chunks(c_scratch, total_scratch, lost_scratch, runs * channels_m * scratch_pitch);
      for (int64_t row = 0; row < runs * channels_m; ++row) {
        T* const c = c_scratch + row * scratch_pitch;
        const typename Vec<T>::reg b = Vec<T>::broadcast(bias + row % channels_m);
        for (int64_t x = 0; x < scratch_pitch; x += L) Vec<T>::store(c + x, Vec<T>::add(Vec<T>::load(c + x), b));
      }
    }
    const int64_t step = gemm.destination_col;
    const bool interleaved = gemm.destination_m == 1 && step == channels_m && can_interleave(channels_m);
    for (int64_t r = 0; r < runs; ++r) {
      const T* const from = c_scratch + r * channels_m * scratch_pitch;
      S* const to = destination + r * gemm.destination_row;
      // What lies in scratch is the rest of a run, or all rows of it.
      const bool whole_rows = tiling.join_rows && !tiling.direct;
      const int64_t pieces = whole_rows ? rows : 1, n = whole_rows ? cols : run - first_scratch;
      for (int64_t y = 0; y < pieces; ++y) {
        const T* const c = from + y * cols;
        S* const d = to + (whole_rows ? y * gemm.destination_row : first_scratch * step);
        if (interleaved) {
          store_inner(c, scratch_pitch, channels_m, n, d);
          continue;
        }
        for (int64_t m = 0; m < channels_m; ++m) {
          store_run(c + m * scratch_pitch, n, d + m * gemm.destination_m, step);
        }
      }
    }
  }

  // To pixels that consist of these 2, 4, 8 or 16 channels.
  static void store_inner(const T* from, int64_t pitch, int64_t channels, int64_t n, S* to) {
    const T* const no_bias = nullptr;
    const T* planes[kMaxInterleaved];
    for (int64_t m = 0; m < channels; ++m) planes[m] = from + m * pitch;
    store_interleaved<true>(channels, planes, L, n / L, L, no_bias, to, channels * L);
    const int64_t done = n / L * L;
    if (done == n) return;
    for (int64_t m = 0; m < channels; ++m) planes[m] += done;
    store_interleaved<true>(channels, planes, L, 1, n - done, no_bias, to + done * channels, channels * L);
  }

  static void store_run(const T* from, int64_t n, S* to, int64_t step) {
    int64_t x = 0;
    if (step == 1) {
      for (; x + L <= n; x += L) store_as(to + x, Vec<T>::load(from + x));
    }
    for (; x < n; ++x) to[x * step] = Narrow<S>::from(from[x]);
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
