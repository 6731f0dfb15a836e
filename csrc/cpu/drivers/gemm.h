// The GEMM driver of forward and grad_input (a ConvGemm, plan/conv_gemm.h).
//
// A work item is (group, chunk of result channels, tile of pixels):
//
//   for each block of source channels          copy the tile's zero-padded patch into scratch
//     for each panel of result channels
//       for each K segment of the block        pack its weights; run the micro-kernel over the tile's pixels
//   store the C tile (panel by panel, where the only block of channels is all of K)
//
// The C tile stays in scratch until K is exhausted: pixel by pixel, NR channels each. Where K
// is one segment and the result channels_last, the micro-kernel sums in the result itself.
//
// Where groups have few channels, vectors run over groups instead (G): an item then takes a block of `lanes` groups,
// and a panel NV result channels of each. The bits are the same either way.
#pragma once

#include "../kernels/gemm.h"
#include "../kernels/vector_shape.h"
#include "../pack/interleave.h"
#include "../pack/patch.h"
#if defined(CONV2D_BFLOAT16_PAIRS)
#include "../pack/pairs.h"
#endif
#include "../pack/store.h"
#include "../pack/weights.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// Pixels of a finished piece of the C tile, about. Pieces are near-equal, since a rest of few pixels would leave the
// FMA units waiting, and whole micro-kernels but for the last.
template <class T>
constexpr int64_t store_pixels(int64_t vectors) {
  return kTakesPairs<T> && vectors < 3 ? 144 : 48;
}

template <class S, class T, bool G>
struct ConvCall {
  static constexpr int L = Vec<T>::kLanes;
  static constexpr int kPerStep = kTakesPairs<T> ? 2 : 1;  // channels in a step of k
  const ConvGemm& gemm;
  const KBlocking k;
  const ConvTiling tiling;
  PatchOrder order;
  const ConvScratch layout;
  bool in_place;  // the source is read where it lies

  ConvCall(const ConvGemm& g, int num_threads)
      : gemm(g),
        k(block_k(g.geometry(), vector_shape<T>().limits)),
        tiling(tile_conv(g, k, vector_shape<T>(), G, num_threads)),
        order(patch_order(G, tiling.block_channels * kPerStep, g.source_c / kPerStep, g.source_col, g.source_w)),
        layout(lay_out_scratch(tiling, k, vector_shape<T>())),
        in_place(source_is_patch()) {}

  // With one tap, no padding and channels together the source itself is a patch, if its elements are operands. With
  // pixels far apart a segment reads a few lines of each, every time from other pages; with many result channels a
  // dense copy is then 3 to 7 % faster (AVX2).
  bool source_is_patch() const {
    constexpr int64_t kFarApart = 2048, kLeastChannels = 128;
    if (G || gemm.taps() != 1 || order != PatchOrder::kChannelInner || gemm.lone) return false;
    const bool far_apart = saturating_mul(gemm.source_col, gemm.axis_w.step, int64_t(sizeof(S))) >= kFarApart;
    if (!kTakesPairs<T> && far_apart && gemm.m >= kLeastChannels) return false;
    const bool inside =
        stays_inside(gemm.axis_h, gemm.rows, gemm.source_h) && stays_inside(gemm.axis_w, gemm.cols, gemm.source_w);
    if constexpr (kTakesPairs<T>) {
      return inside && gemm.source_n % 2 == 0 && gemm.source_row % 2 == 0 && gemm.source_col % 2 == 0;
    }
    return inside && std::is_same_v<S, Operand<T>>;
  }

  int64_t items() const { return div_up(gemm.groups, G ? L : 1) * tiling.tiles() * tiling.chunks_m; }

  static void run(void* context, int64_t item) { static_cast<const ConvCall*>(context)->work(item); }

  void work(int64_t item) const {
    // Pixel tiles vary fastest: neighbouring items share weights.
    const int64_t tile = item % tiling.tiles(), chunk = item / tiling.tiles() % tiling.chunks_m;
    const int64_t group = item / tiling.tiles() / tiling.chunks_m * (G ? L : 1);
    const int64_t groups = G ? min64(L, gemm.groups - group) : 1;
    const int64_t image0 = tile / (tiling.tiles_h * tiling.tiles_w) * tiling.tile_images;
    const int64_t row0 = tile / tiling.tiles_w % tiling.tiles_h * tiling.tile_rows;
    const int64_t col0 = tile % tiling.tiles_w * tiling.tile_cols;
    const int64_t images = min64(tiling.tile_images, gemm.batch - image0);
    const int64_t rows = min64(tiling.tile_rows, gemm.rows - row0);
    const int64_t cols = min64(tiling.tile_cols, gemm.cols - col0);
    const int64_t pixels = images * rows * cols;

    // Result channels in a vector: L, or one of each of L groups.
    constexpr int kPerVector = G ? 1 : L;
    const int64_t m0 = chunk * tiling.chunk_vectors * kPerVector;
    const int64_t channels_m = min64(tiling.chunk_vectors * kPerVector, gemm.m - m0);
    const Panels panels = cut_panels(div_up(channels_m, kPerVector), Vec<T>::kMaxVectors);
    const ResultPiece result{group, groups, image0, row0, col0, images, rows, cols};

    char* const memory = static_cast<char*>(thread_scratch(layout.bytes));
    int64_t* const position_offsets = reinterpret_cast<int64_t*>(memory + layout.position_offsets);
    int64_t* const tap_offsets = reinterpret_cast<int64_t*>(memory + layout.tap_offsets);
    T* const zeros = reinterpret_cast<T*>(memory + layout.zeros);
    T* const bias = reinterpret_cast<T*>(memory + layout.bias);
    Operand<T>* const panel = reinterpret_cast<Operand<T>*>(memory + layout.panel);
    T* const c_tile = reinterpret_cast<T*>(memory + layout.c_tile);
    T* const total_tile = reinterpret_cast<T*>(memory + layout.total_tile);
    T* const lost_tile = reinterpret_cast<T*>(memory + layout.lost_tile);
    Operand<T>* const patch_data = reinterpret_cast<Operand<T>*>(memory + layout.patch);

    const S* const source = static_cast<const S*>(gemm.source) + image0 * gemm.source_n + group * gemm.source_g();
    const S* const weight = static_cast<const S*>(gemm.weight) + group * gemm.weight_g;

    fill_zero(zeros, panels.size(0) * L);
    const bool bias_first = gemm.channels * gemm.taps() <= kBiasFirstProducts;
    bool is_empty = true;  // the sum: no channels or no taps
    // Blocks of channels; where a kernel has too many taps for one segment, rectangles of taps inside a channel.
    for (int64_t c0 = 0; c0 < gemm.channels; c0 += tiling.block_channels) {
      const int64_t block_channels = min64(tiling.block_channels, gemm.channels - c0);
      for (int64_t i0 = 0; i0 < gemm.taps_h; i0 += k.tap_rows) {
        const int64_t tap_rows = min64(k.tap_rows, gemm.taps_h - i0);
        for (int64_t j0 = 0; j0 < gemm.taps_w; j0 += k.tap_cols) {
          const int64_t tap_cols = min64(k.tap_cols, gemm.taps_w - j0);
          const Operand<T>* operand = patch_data;
          Patch patch;
          if (in_place) {
            patch = patch_in_place(gemm.axis_h, gemm.axis_w, gemm.source_n / kPerStep, 1, gemm.source_row / kPerStep,
                                   gemm.source_col / kPerStep);
            operand = reinterpret_cast<const Operand<T>*>(source + c0 * gemm.source_c +
                                                          gemm.axis_h.source(row0, 0) * gemm.source_row +
                                                          gemm.axis_w.source(col0, 0) * gemm.source_col);
          } else {
            patch = lay_out_patch(order, make_patch_axis(gemm.axis_h, row0, rows, i0, tap_rows),
                                  make_patch_axis(gemm.axis_w, col0, cols, j0, tap_cols), images, block_channels, L,
                                  sizeof(T));
            pack_patch(patch,
                       Source<S>{source + c0 * gemm.source_c, gemm.source_n, gemm.source_c, gemm.source_row,
                                 gemm.source_col, gemm.source_h, gemm.source_w, gemm.source_g(), groups,
                                 gemm.lone && c0 + block_channels == gemm.channels},
                       false, patch_data);
          }
          int64_t pixel = 0;
          for (int64_t n = 0; n < images; ++n) {
            for (int64_t p = 0; p < rows; ++p) {
              for (int64_t q = 0; q < cols; ++q) position_offsets[pixel++] = patch.position_offset(n, p, q);
            }
          }
          // Of the first segment; in later ones the same taps lie whole channels further.
          int64_t tap = 0;
          for (int64_t s = 0, channels = min64(k.segment_channels, block_channels); s < channels; ++s) {
            for (int64_t i = 0; i < tap_rows; ++i) {
              for (int64_t j = 0; j < tap_cols; ++j) tap_offsets[tap++] = patch.tap_offset(s, i, j);
            }
          }

          for (int64_t at = 0; at < panels.count; ++at) {
            const int64_t vectors = panels.size(at), width = vectors * L, start = panels.start(at);
            const int64_t m = start * kPerVector;
            T* const c = tiling.one_block ? c_tile : c_tile + pixels * start * L;
            if (tiling.one_block || bias_first) load_bias(group, groups, m0 + m, vectors, bias);
            for (int64_t s0 = 0; s0 < block_channels; s0 += k.segment_channels) {
              const int64_t segment = min64(k.segment_channels, block_channels - s0);
              const S* const segment_weight =
                  weight + (c0 + s0) * gemm.weight_c + i0 * gemm.weight_i + j0 * gemm.weight_j;
              const S* const w = segment_weight + (m0 + m) * gemm.weight_m;
              if constexpr (G) {
                for (int64_t v = 0; v < vectors; ++v) {
                  pack_weight<S, T>(gemm, w + v * gemm.weight_m, gemm.weight_g, groups, segment, tap_rows, tap_cols,
                                    panel + v * L, width, L);
                }
              } else if constexpr (kTakesPairs<T>) {
                pack_weight_pairs(gemm, w, min64(width, channels_m - m), segment,
                                  gemm.lone && c0 + s0 + segment == gemm.channels, tap_rows, tap_cols, panel, width);
              } else if (gemm.result_taps() > 1) {
                pack_weight_of_taps<S, T>(gemm, segment_weight, m0 + m, min64(width, channels_m - m), segment, panel,
                                          width);
              } else {
                pack_weight<S, T>(gemm, w, gemm.weight_m, min64(width, channels_m - m), segment, tap_rows, tap_cols,
                                  panel, width, width);
              }
              const bool last = tiling.one_block && s0 + segment == gemm.channels, complete = last && s0 == 0;
              const int64_t number = k.segment_at(c0 + s0, i0, j0);
              const bool begins_chunk = number % kSegmentsPerChunk == 0;
              T* const total = total_tile + (c - c_tile);
              T* const lost = lost_tile + (c - c_tile);
              if (begins_chunk && number > 0) {
                add_chunk(total, lost, c, pixels * width, number == kSegmentsPerChunk);
              }
              GemmOperands<T> operands{segment * tap_rows * tap_cols,
                                       k.chain,
                                       panel,
                                       width,
                                       operand + s0 * patch.channel_pitch,
                                       position_offsets,
                                       tap_offsets,
                                       bias_first ? bias : zeros,
                                       c,
                                       width,
                                       !begins_chunk,
                                       nullptr};
              if constexpr (kStoresSums) {
                if (complete && m + width <= channels_m && result_is_panel(result)) {
                  operands.c_pitch = gemm.destination_col;
                  operands.bias = bias_first ? zeros : bias;
                  run_rows(result, m0 + m, vectors, operands);
                  continue;
                }
              }
              // Sums that this segment completes leave scratch while they are still in L1; for planes of channels
              // longer runs are the better. A piece's pixels, where they lie far apart, are asked for meanwhile.
              const bool piecewise = last && gemm.destination_m == 1 && gemm.result_taps() == 1;
              int64_t pieces = piecewise ? div_up(pixels, store_pixels<T>(vectors)) : 1;
              for (int64_t x = 0, now = 0; x < pixels; x += now, --pieces) {
                const int64_t left = pixels - x, rows_at_once = ukernels_for<T, G>(vectors).rows;
                now = min64(round_up(div_up(left, pieces), rows_at_once), left);
                operands.j_offset = position_offsets + x;
                operands.c = complete ? c : c + x * width;
                if (!G && piecewise) prefetch_result(result, x, now, m0 + m, vectors);
                gemm_panel<G, T>(now, vectors, operands);
                if (last && k.has_chunks()) {
                  add_chunk(total + x * width, lost + x * width, operands.c, now * width, false);
                  finish_chunks(operands.c, total + x * width, lost + x * width, now * width);
                }
                if (last) store(result, x, now, operands.c, vectors, m0 + m, bias_first ? zeros : bias);
              }
            }
          }
          is_empty = false;
        }
      }
    }
    if (!tiling.one_block && k.has_chunks()) {
      const int64_t elements = pixels * div_up(channels_m, kPerVector) * L;
      add_chunk(total_tile, lost_tile, c_tile, elements, false);
      finish_chunks(c_tile, total_tile, lost_tile, elements);
    }
    if constexpr (G && kHasTranspose<T>) {
      if (tiling.interleaved) {
        store_groups(result, panels, c_tile, bias_first);
        return;
      }
    }
    if (!tiling.one_block) {
      for (int64_t at = 0; at < panels.count; ++at) {
        const int64_t vectors = panels.size(at), start = panels.start(at);
        T* const c = c_tile + pixels * start * L;
        if (is_empty) fill_zero(c, pixels * vectors * L);
        load_bias(group, groups, m0 + start * kPerVector, vectors, bias);
        store(result, 0, pixels, c, vectors, m0 + start * kPerVector, bias);
      }
    }
  }

  // Whether the result tensor itself can serve as the C tile of a complete sum: pixel by pixel, channels side by side.
  static constexpr bool kStoresSums = std::is_same_v<S, T> && kHasTranspose<T> && !G;
  // Rows that don't continue one another are summed one by one, if they have enough pixels.
  bool result_is_panel(const ResultPiece& r) const {
    constexpr int64_t kLeastPixels = 4 * kMR;
    return gemm.destination_m == 1 && gemm.result_taps() == 1 && (r.cols >= kLeastPixels || joins_rows(r));
  }
  bool joins_rows(const ResultPiece& r) const {
    const bool rows_join =
        r.rows == 1 || (r.cols == gemm.cols && gemm.destination_row == gemm.destination_col * r.cols);
    return rows_join &&
           (r.images == 1 || (r.rows == gemm.rows && gemm.destination_n == gemm.destination_col * r.rows * r.cols));
  }
  void run_rows(const ResultPiece& r, int64_t m, int64_t vectors, GemmOperands<T> operands) const {
    const int64_t rows = joins_rows(r) ? 1 : r.images * r.rows, pixels = r.images * r.rows * r.cols / rows;
    S* const first = static_cast<S*>(gemm.destination) + (r.group * gemm.m + m) * gemm.destination_m +
                     r.image0 * gemm.destination_n + r.row0 * gemm.destination_row + r.col0 * gemm.destination_col;
    for (int64_t row = 0; row < rows; ++row) {
      operands.c = first + row / r.rows * gemm.destination_n + row % r.rows * gemm.destination_row;
      gemm_panel<G, T>(pixels, vectors, operands);
      operands.j_offset += pixels;
    }
  }

  // The bias of a panel's result channels, zeros where there is none.
  void load_bias(int64_t group, int64_t groups, int64_t m, int64_t vectors, T* bias) const {
    fill_zero(bias, vectors * L);
    if (gemm.bias == nullptr) return;
    const S* const source = static_cast<const S*>(gemm.bias) + (group * gemm.m + m) * gemm.bias_stride;
    if constexpr (G) {
      for (int64_t v = 0; v < vectors; ++v) {
        for (int64_t lane = 0; lane < groups; ++lane) {
          set_lane(bias + v * L, int(lane), widen_scalar(source[(lane * gemm.m + v) * gemm.bias_stride]));
        }
      }
    } else {
      for (int64_t i = 0, valid = min64(vectors * L, gemm.m - m); i < valid; ++i) {
        set_lane(bias + i / L * L, int(i % L), widen_scalar(source[i * gemm.bias_stride]));
      }
    }
  }

  // `count` finished pixels of the tile, from `first` on: a panel of result channels from m on.
  void store(const ResultPiece& r, int64_t first, int64_t count, const T* c, int64_t vectors, int64_t m,
             const T* bias) const {
    const int64_t width = vectors * L;
    if constexpr (G) {
      for (int64_t v = 0; v < vectors; ++v) {
        store_lanes<S, T>(gemm, r, first, count, c + v * L, width, r.group * gemm.m + m + v, gemm.m, r.groups,
                          bias + v * L);
      }
    } else if (gemm.result_taps() > 1) {
      store_taps(r, c, width, m, min64(width, gemm.m - m));
    } else {
      store_lanes<S, T>(gemm, r, first, count, c, width, r.group * gemm.m + m, 1, min64(width, gemm.m - m), bias);
    }
  }

  // Asks for the lines that store() will write, where pixels lie so far apart that no hardware prefetcher would.
  void prefetch_result(const ResultPiece& r, int64_t first, int64_t count, int64_t m, int64_t vectors) const {
    constexpr int64_t kLine = 64 / sizeof(S), kFarApart = 1024 / sizeof(S);
    if (gemm.destination_col < kFarApart) return;
    const S* const channel = static_cast<const S*>(gemm.destination) + (r.group * gemm.m + m) * gemm.destination_m +
                             r.image0 * gemm.destination_n + r.row0 * gemm.destination_row +
                             r.col0 * gemm.destination_col;
    const int64_t lanes = min64(vectors * L, gemm.m - m);
    for (int64_t x = first, end = first + count; x < end;) {
      const int64_t row = x / r.cols, col = x - row * r.cols, run = min64(r.cols - col, end - x);
      const S* pixel = channel + row / r.rows * gemm.destination_n + row % r.rows * gemm.destination_row +
                       col * gemm.destination_col;
      for (const S* const last = pixel + run * gemm.destination_col; pixel != last; pixel += gemm.destination_col) {
        for (int64_t i = 0; i < lanes; i += kLine) __builtin_prefetch(pixel + i, 1);
      }
      x += run;
    }
  }

  // Lane l of the panel is (channel, tap) number m + l; the taps of a row of the kernel lie side by side.
  void store_taps(const ResultPiece& r, const T* c, int64_t width, int64_t m, int64_t lanes) const {
    const int64_t taps_w = gemm.result_taps_w, channels = gemm.m / gemm.result_taps();
    S* const destination =
        static_cast<S*>(gemm.destination) + r.image0 * gemm.destination_n + r.group * channels * gemm.destination_m;
    for (int64_t lane = 0, run = 0; lane < lanes; lane += run) {
      const int64_t tap_row = (m + lane) / taps_w, j = (m + lane) % taps_w;
      run = min64(taps_w - j, lanes - lane);
      S* const plane = destination + tap_row / gemm.result_taps_h * gemm.destination_m;
      const T* from = c;
      for (int64_t n = 0; n < r.images; ++n) {
        for (int64_t p = r.row0; p < r.row0 + r.rows; ++p) {
          const int64_t row = gemm.place_h.source(p, tap_row % gemm.result_taps_h);
          if (row < 0 || row >= gemm.destination_h) {
            from += r.cols * width;
            continue;
          }
          S* const to = plane + n * gemm.destination_n + row * gemm.destination_row;
          for (int64_t q = r.col0; q < r.col0 + r.cols; ++q, from += width) {
            const int64_t col = gemm.place_w.source(q, j), step = gemm.place_w.tap;
            const RunBounds in = clip_run(col, step, run, gemm.destination_w);
            S* const first = to + col * gemm.destination_col;
            // As with every other result a bias, here none, is added last.
            for (int64_t t = in.low; t < in.high; ++t) {
              T sum;
              if constexpr (kHasTranspose<T>) {
                sum = from[lane + t];
              } else {
                sum = get_lane(from + (lane + t) / L * L, int((lane + t) % L));
              }
              first[t * step * gemm.destination_col] = Narrow<S>::from(add_scalar(sum, T{}));
            }
          }
        }
      }
    }
  }

  // All panels of whole groups whose channels lie side by side.
  void store_groups(const ResultPiece& r, const Panels& panels, const T* c_tile, bool bias_added) const {
    const int64_t pixels = r.images * r.rows * r.cols;
    T bias[kMaxInterleaved * L];
    if (bias_added) {
      fill_zero(bias, gemm.m * L);
    } else {
      load_bias(r.group, r.groups, 0, gemm.m, bias);
    }
    S* const destination = static_cast<S*>(gemm.destination) + r.group * gemm.m + r.image0 * gemm.destination_n +
                           r.row0 * gemm.destination_row + r.col0 * gemm.destination_col;
    // A power of two of channels is cut into panels of one width.
    const int64_t width = panels.size(0) * L;
    const T* planes[kMaxInterleaved];
    for (int64_t v = 0; v < gemm.m; ++v)
      planes[v] = c_tile + v / panels.size(0) * pixels * width + v % panels.size(0) * L;
    for (int64_t n = 0; n < r.images; ++n) {
      for (int64_t y = 0; y < r.rows; ++y) {
        store_interleaved<false>(gemm.m, planes, width, r.cols, r.groups, bias,
                                 destination + n * gemm.destination_n + y * gemm.destination_row, gemm.destination_col);
        for (int64_t v = 0; v < gemm.m; ++v) planes[v] += r.cols * width;
      }
    }
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
