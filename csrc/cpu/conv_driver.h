// The GEMM driver of forward and grad_input (a ConvGemm, blocking.h).
//
// A work item is (group, chunk of result channels, tile of pixels). For each block of source channels the item copies
// the tile's zero-padded patch into scratch; for each panel of result channels it packs the weights of one K segment
// after the other and lets the micro-kernel run over the tile's pixels. The C tile is kept in scratch, pixel by pixel
// with NR channels each, until K is exhausted; then the epilogue stores it.
//
// Where groups have few channels, vectors run over groups instead (G): an item then takes a block of `lanes` groups,
// and a panel NV result channels of each. The bits are the same either way.
#pragma once

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class T>
constexpr VectorShape vector_shape() {
  return {Vec<T>::kLanes, Vec<T>::kMaxVectors, int64_t(sizeof(T)), kHasTranspose<T>, chain_limits(kFusedMultiplyAdd)};
}

template <class S, class T, bool G>
struct ConvCall {
  static constexpr int L = Vec<T>::kLanes;
  const ConvGemm& gemm;
  const KBlocking k;
  const ConvTiling tiling;
  PatchOrder order;
  const ConvScratch layout;

  ConvCall(const ConvGemm& g, int num_threads)
      : gemm(g),
        k(block_k(g.channels, g.taps_h, g.taps_w, vector_shape<T>().limits)),
        tiling(tile_conv(g, k, vector_shape<T>(), G, num_threads)),
        order(patch_order(G, tiling.block_channels, g.source_c, g.source_col, g.source_w)),
        layout(lay_out_scratch(tiling, k, vector_shape<T>())) {}

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
    const Result result{group, groups, image0, row0, col0, images, rows, cols};

    char* const memory = static_cast<char*>(thread_scratch(layout.bytes));
    int64_t* const position_offsets = reinterpret_cast<int64_t*>(memory + layout.position_offsets);
    int64_t* const tap_offsets = reinterpret_cast<int64_t*>(memory + layout.tap_offsets);
    T* const zeros = reinterpret_cast<T*>(memory + layout.zeros);
    T* const bias = reinterpret_cast<T*>(memory + layout.bias);
    T* const panel = reinterpret_cast<T*>(memory + layout.panel);
    T* const c_tile = reinterpret_cast<T*>(memory + layout.c_tile);
    T* const patch_data = reinterpret_cast<T*>(memory + layout.patch);

    const S* const source =
        static_cast<const S*>(gemm.source) + image0 * gemm.source_n + group * gemm.channels * gemm.source_c;
    const S* const weight = static_cast<const S*>(gemm.weight) + group * gemm.weight_g + m0 * gemm.weight_m;

    fill_zero(zeros, panels.size(0) * L);
    const bool bias_first = gemm.channels * gemm.taps() <= kBiasFirstProducts;
    bool first = true;
    // Blocks of channels; where a kernel has too many taps for one segment, rectangles of taps inside a channel.
    for (int64_t c0 = 0; c0 < gemm.channels; c0 += tiling.block_channels) {
      const int64_t block_channels = min64(tiling.block_channels, gemm.channels - c0);
      for (int64_t i0 = 0; i0 < gemm.taps_h; i0 += k.tap_rows) {
        const int64_t tap_rows = min64(k.tap_rows, gemm.taps_h - i0);
        for (int64_t j0 = 0; j0 < gemm.taps_w; j0 += k.tap_cols) {
          const int64_t tap_cols = min64(k.tap_cols, gemm.taps_w - j0);
          const Patch patch = lay_out_patch(order, make_patch_axis(gemm.axis_h, row0, rows, i0, tap_rows),
                                            make_patch_axis(gemm.axis_w, col0, cols, j0, tap_cols), images,
                                            block_channels, L, sizeof(T));
          pack_patch(patch,
                     Source<S>{source + c0 * gemm.source_c, gemm.source_n, gemm.source_c, gemm.source_row,
                               gemm.source_col, gemm.source_h, gemm.source_w, gemm.channels * gemm.source_c, groups},
                     false, patch_data);
          int64_t pixel = 0;
          for (int64_t n = 0; n < images; ++n) {
            for (int64_t p = 0; p < rows; ++p) {
              for (int64_t q = 0; q < cols; ++q) position_offsets[pixel++] = patch.position_offset(n, p, q);
            }
          }

          for (int64_t at = 0; at < panels.count; ++at) {
            const int64_t vectors = panels.size(at), width = vectors * L, start = panels.start(at);
            const int64_t m = start * kPerVector;
            T* const c = tiling.one_block ? c_tile : c_tile + pixels * start * L;
            if (tiling.one_block || bias_first) load_bias(group, groups, m0 + m, vectors, bias);
            for (int64_t s0 = 0; s0 < block_channels; s0 += k.segment_channels) {
              const int64_t segment = min64(k.segment_channels, block_channels - s0);
              const S* const w =
                  weight + m * gemm.weight_m + (c0 + s0) * gemm.weight_c + i0 * gemm.weight_i + j0 * gemm.weight_j;
              if constexpr (G) {
                for (int64_t v = 0; v < vectors; ++v) {
                  pack_weight<S, T>(gemm, w + v * gemm.weight_m, gemm.weight_g, groups, segment, tap_rows, tap_cols,
                                    panel + v * L, width, L);
                }
              } else {
                pack_weight<S, T>(gemm, w, gemm.weight_m, min64(width, channels_m - m), segment, tap_rows, tap_cols,
                                  panel, width, width);
              }
              int64_t depth = 0;
              for (int64_t s = 0; s < segment; ++s) {
                for (int64_t i = 0; i < tap_rows; ++i) {
                  for (int64_t j = 0; j < tap_cols; ++j) tap_offsets[depth++] = patch.tap_offset(s0 + s, i, j);
                }
              }
              gemm_panel<G, T>(pixels, vectors,
                               {depth, k.chain, panel, width, patch_data, position_offsets, tap_offsets,
                                bias_first ? bias : zeros, c, width, !(first && s0 == 0)});
            }
            if (tiling.one_block) store(result, c, vectors, m0 + m, bias_first ? zeros : bias);
          }
          first = false;
        }
      }
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
        if (first) fill_zero(c, pixels * vectors * L);  // an empty sum: no channels or no taps
        load_bias(group, groups, m0 + start * kPerVector, vectors, bias);
        store(result, c, vectors, m0 + start * kPerVector, bias);
      }
    }
  }

  // The piece of the destination that a work item owns.
  struct Result {
    int64_t group, groups, image0, row0, col0, images, rows, cols;
  };

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

  // A finished panel of result channels from m on.
  void store(const Result& r, const T* c, int64_t vectors, int64_t m, const T* bias) const {
    const int64_t width = vectors * L;
    if constexpr (G) {
      for (int64_t v = 0; v < vectors; ++v) {
        store_lanes(r, c + v * L, width, r.group * gemm.m + m + v, gemm.m, r.groups, bias + v * L);
      }
    } else {
      store_lanes(r, c, width, r.group * gemm.m + m, 1, min64(width, gemm.m - m), bias);
    }
  }

  // All panels of whole groups whose channels lie side by side.
  void store_groups(const Result& r, const Panels& panels, const T* c_tile, bool bias_added) const {
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
        store_interleaved(gemm.m, planes, width, r.cols, r.groups, bias,
                          destination + n * gemm.destination_n + y * gemm.destination_row, gemm.destination_col);
        for (int64_t v = 0; v < gemm.m; ++v) planes[v] += r.cols * width;
      }
    }
  }

  // Lane l of the panel is result channel `channel` + l * channel_step.
  void store_lanes(const Result& r, const T* c, int64_t width, int64_t channel, int64_t channel_step, int64_t lanes,
                   const T* bias) const {
    // Rows that continue one another are stored as one run.
    const bool join_rows = r.cols == gemm.cols && gemm.destination_row == gemm.destination_col * r.cols;
    const int64_t run = join_rows ? r.rows * r.cols : r.cols, runs = join_rows ? 1 : r.rows;
    S* const destination = static_cast<S*>(gemm.destination) + channel * gemm.destination_m +
                           r.image0 * gemm.destination_n + r.row0 * gemm.destination_row +
                           r.col0 * gemm.destination_col;
    for (int64_t n = 0; n < r.images; ++n) {
      for (int64_t y = 0; y < runs; ++y, c += run * width) {
        store_tile<S, T>(c, width, run, lanes, bias, destination + n * gemm.destination_n + y * gemm.destination_row,
                         gemm.destination_col, channel_step * gemm.destination_m);
      }
    }
  }
};

template <class S>
void run_gemm(const ConvGemm& gemm, const Executor& executor) {
  using T = ComputeType<S>;
  if (lanes_are_groups(gemm.groups, gemm.m, gemm.channels, vector_shape<T>())) {
    ConvCall<S, T, true> call(gemm, executor.num_threads);
    run_items(executor, call.items(), &call, &ConvCall<S, T, true>::run);
  } else {
    ConvCall<S, T, false> call(gemm, executor.num_threads);
    run_items(executor, call.items(), &call, &ConvCall<S, T, false>::run);
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
