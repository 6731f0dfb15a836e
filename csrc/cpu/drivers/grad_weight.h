// The GEMM driver of grad_weight.
//
//   grad_weight[m, (c, i, j)] = sum over output pixels of grad_output[m, pixel] * conj(patch[c, pixel, i, j])
//
// The micro-kernel is that of drivers/gemm.h, with the offset tables exchanged: its rows are weight elements (c, i, j),
// its K runs over pixels, its vectors hold output channels.
//
// A work item owns a tile of the weight and walks over all pixels, rectangle by rectangle (PixelBlocking). It packs the
// patch, unless the input itself can serve as one, and a panel of grad_output. Each run of pixels is one chain from
// zero, added to the sum of its chunk. Chunk sums are added in order, whether one item forms them one after the other
// or several items at once (`slots`).
//
// Where groups have few channels, vectors run over groups (G), as in drivers/gemm.h.
#pragma once

#include "../kernels/depthwise_weight.h"
#include "../kernels/gemm.h"
#include "../kernels/vector_shape.h"
#include "../pack/interleave.h"
#include "../pack/patch.h"
#include "../pack/store.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class S, class T, WeightLanes kLanes>
struct GradWeightCall {
  static constexpr bool G = kLanes != WeightLanes::kChannels;
  // Neighbouring groups of a channels_last depthwise problem: several vectors of them in an item.
  static constexpr bool kInner = kLanes == WeightLanes::kInnerGroups;
  const Conv2dProblem& problem;
  ConstTensorView grad_output, input;
  TensorView grad_weight;
  PixelBlocking pixels;
  WeightTiling tiling;
  WeightScratch layout;
  bool in_place;          // the input is read where it lies
  T* partials = nullptr;  // [slot][item][tile], when tiling.slots > 1
  T* totals = nullptr;    // [item][tile], and what they lost behind them
  int64_t first_chunk = 0, chunks_in_flight = 0;

  static constexpr int L = Vec<T>::kLanes;
  // Output channels in a vector: L, or one of each of L groups.
  static constexpr int kPerVector = G ? 1 : L;

  GradWeightCall(const Conv2dProblem& p, ConstTensorView go, ConstTensorView in, TensorView gw, int num_threads)
      : problem(p),
        grad_output(go),
        input(in),
        grad_weight(gw),
        pixels(block_pixels(p.batch, p.out_h, p.out_w, vector_shape<T>().limits)),
        tiling(tile_grad_weight(p, pixels, vector_shape<T>(), kLanes, num_threads)),
        layout(lay_out_scratch(tiling, pixels, vector_shape<T>())),
        in_place(input_is_patch()) {}

  // One tap that never lies in the padding: the input itself is the patch, whatever its strides.
  bool input_is_patch() const {
    if constexpr (G || !std::is_same_v<S, T> || !kHasTranspose<T>) return false;
    return problem.taps() == 1 && stays_inside(problem.rows(), problem.out_h, problem.in_h) &&
           stays_inside(problem.cols(), problem.out_w, problem.in_w);
  }

  int64_t tile_size() const { return tiling.tile_size(L); }
  int64_t items() const { return tiling.group_blocks * tiling.tiles(); }

  // The tile of weights that an item owns.
  struct Tile {
    int64_t group, groups, m0, channels_m, c0, channels, i0, tap_rows, j0, tap_cols;
    int64_t elements() const { return channels * tap_rows * tap_cols; }
  };
  Tile tile_of(int64_t item) const {
    Tile t{};
    t.j0 = item % tiling.blocks_w * tiling.tap_cols;
    item /= tiling.blocks_w;
    t.i0 = item % tiling.blocks_h * tiling.tap_rows;
    item /= tiling.blocks_h;
    t.c0 = item % tiling.blocks_c * tiling.block_channels;
    item /= tiling.blocks_c;
    t.m0 = item % tiling.chunks_m * tiling.chunk_vectors * kPerVector;
    const int64_t block = item / tiling.chunks_m, block_groups = kInner ? tiling.group_vectors * L : G ? L : 1;
    t.group = block * block_groups;
    t.groups = kInner && block + 1 == tiling.group_blocks ? problem.groups - t.group
                                                          : min64(block_groups, problem.groups - t.group);
    t.channels_m = min64(tiling.chunk_vectors * kPerVector, problem.out_channels_per_group() - t.m0);
    t.channels = min64(tiling.block_channels, problem.in_channels_per_group() - t.c0);
    t.tap_rows = min64(tiling.tap_rows, problem.kernel_h - t.i0);
    t.tap_cols = min64(tiling.tap_cols, problem.kernel_w - t.j0);
    return t;
  }

  // c[panel][element][channel] = the sum over one chunk of pixels.
  void sum_chunk(const Tile& t, int64_t chunk, char* memory, T* c_tile) const {
    const int64_t first = chunk * kPixelSegmentsPerChunk;
    const int64_t last = min64(first + kPixelSegmentsPerChunk, pixels.segments());
    int64_t* const element_offsets = reinterpret_cast<int64_t*>(memory + layout.element_offsets);
    int64_t* const pixel_offsets = reinterpret_cast<int64_t*>(memory + layout.pixel_offsets);
    T* const panel = reinterpret_cast<T*>(memory + layout.panel);
    T* const patch_data = reinterpret_cast<T*>(memory + layout.patch);
    T* const zeros = reinterpret_cast<T*>(memory + layout.zeros);
    fill_zero(zeros, Vec<T>::kMaxVectors * L);
    const Panels panels = cut_panels(div_up(t.channels_m, kPerVector), Vec<T>::kMaxVectors);
    const int64_t* const go = grad_output.stride;
    const int64_t* const in = input.stride;
    const PatchOrder order =
        kInner ? PatchOrder::kChannelInner : patch_order(G, t.channels, in[1], in[3], problem.in_w);

    Patch patch{};
    const T* operand = patch_data;
    int64_t next_patch = first, patch_row = 0;
    for (int64_t segment = first; segment < last; ++segment) {
      const int64_t n0 = segment / (pixels.blocks_h * pixels.blocks_w) * pixels.images;
      const int64_t p0 = segment / pixels.blocks_w % pixels.blocks_h * pixels.rows;
      const int64_t q0 = segment % pixels.blocks_w * pixels.cols;
      const int64_t images = min64(pixels.images, problem.batch - n0);
      const int64_t rows = min64(pixels.rows, problem.out_h - p0);
      const int64_t cols = min64(pixels.cols, problem.out_w - q0);

      // The patch, of this segment or of several.
      if (in_place) {
        patch = patch_in_place(problem.rows(), problem.cols(), in[0], in[1], in[2], in[3]);
        operand =
            reinterpret_cast<const T*>(static_cast<const S*>(input.data) + n0 * in[0] +
                                       (t.group * problem.in_channels_per_group() + t.c0) * in[1] +
                                       problem.rows().source(p0, 0) * in[2] + problem.cols().source(q0, 0) * in[3]);
        patch_row = p0;
      } else if (segment == next_patch) {
        const int64_t below = min64(min64(tiling.patch_segments, last - segment),
                                    pixels.blocks_h - segment / pixels.blocks_w % pixels.blocks_h);
        next_patch = segment + below;
        patch_row = p0;
        patch = lay_out_patch(
            order,
            make_patch_axis(problem.rows(), p0, min64(below * pixels.rows, problem.out_h - p0), t.i0, t.tap_rows),
            make_patch_axis(problem.cols(), q0, cols, t.j0, t.tap_cols), images, kInner ? t.groups : t.channels, L,
            sizeof(T));
        pack_patch(patch,
                   Source<S>{static_cast<const S*>(input.data) + n0 * in[0] +
                                 (t.group * problem.in_channels_per_group() + t.c0) * in[1],
                             in[0], in[1], in[2], in[3], problem.in_h, problem.in_w,
                             problem.in_channels_per_group() * in[1], t.groups},
                   true, patch_data);
      }
      int64_t e = 0;
      for (int64_t c = 0; c < t.channels; ++c) {
        for (int64_t i = 0; i < t.tap_rows; ++i) {
          for (int64_t j = 0; j < t.tap_cols; ++j) element_offsets[e++] = patch.tap_offset(c, i, j);
        }
      }
      int64_t depth = 0;
      for (int64_t n = 0; n < images; ++n) {
        for (int64_t p = 0; p < rows; ++p) {
          for (int64_t q = 0; q < cols; ++q) pixel_offsets[depth++] = patch.position_offset(n, p0 - patch_row + p, q);
        }
      }

      if constexpr (kInner) {
        const S* const source =
            static_cast<const S*>(grad_output.data) + n0 * go[0] + t.group + p0 * go[2] + q0 * go[3];
        DepthwiseWeightOperands<T> operands{
            depth, pixels.chain, nullptr, 0, patch_data + patch.tap_offset(0, 0, 0), pixel_offsets,
            // A step that is never taken may be of any length.
            t.tap_rows == 1 ? 0 : patch.tap_offset(0, 1, 0) - patch.tap_offset(0, 0, 0),
            t.tap_cols == 1 ? 0 : patch.tap_offset(0, 0, 1) - patch.tap_offset(0, 0, 0), nullptr, segment != first};
        const auto multiply = [&](int64_t v, const T* a, int64_t a_pitch) {
          depthwise_weight_panel<T>(t.tap_rows, t.tap_cols, element_offsets, zeros, operands, inner_lane(t, v), a,
                                    a_pitch, c_tile + v * t.elements() * L);
        };
        // Pixels that lie evenly are read in place, a chain in all vectors after the other.
        if constexpr (sizeof(S) == sizeof(T)) {
          if ((rows == 1 || go[2] == cols * go[3]) && (images == 1 || go[0] == rows * cols * go[3])) {
            for (int64_t k = 0; k < depth; k += pixels.chain) {
              operands.depth = min64(pixels.chain, depth - k);
              operands.k_offset = pixel_offsets + k;
              for (int64_t v = 0; v * L < t.groups; ++v) multiply(v, source + inner_lane(t, v) + k * go[3], go[3]);
              operands.accumulate = true;
            }
            continue;
          }
        }
        for (int64_t v = 0; v * L < t.groups; ++v) {
          for (int64_t x = 0; x < images * rows; ++x) {
            pack_lanes(source + inner_lane(t, v) + x / rows * go[0] + x % rows * go[2], 1, go[3], L, cols,
                       panel + x * cols * L, L, L, false);
          }
          multiply(v, panel, L);
        }
        continue;
      }
      const bool join_rows = rows == 1 || go[2] == cols * go[3];
      const int64_t run = join_rows ? rows * cols : cols, runs = join_rows ? 1 : rows;
      for (int64_t x = 0; x < panels.count; ++x) {
        const int64_t vectors = panels.size(x), width = vectors * L, start = panels.start(x);
        const int64_t m = start * kPerVector;
        const S* const source = static_cast<const S*>(grad_output.data) + n0 * go[0] +
                                (t.group * problem.out_channels_per_group() + t.m0 + m) * go[1] + p0 * go[2] +
                                q0 * go[3];
        T* dst = panel;
        for (int64_t n = 0; n < images; ++n) {
          for (int64_t r = 0; r < runs; ++r, dst += run * width) {
            const S* const s = source + n * go[0] + r * go[2];
            if constexpr (G) {
              if constexpr (kHasTranspose<T>) {
                if (go[1] == 1 && can_interleave(problem.out_channels_per_group())) {
                  load_interleaved(problem.out_channels_per_group(), s - (t.m0 + m), go[3], run, t.groups, t.m0 + m,
                                   vectors, dst, width, L);
                  continue;
                }
              }
              for (int64_t v = 0; v < vectors; ++v) {
                pack_lanes(s + v * go[1], problem.out_channels_per_group() * go[1], go[3], t.groups, run, dst + v * L,
                           width, L, false);
              }
            } else {
              pack_lanes(s, go[1], go[3], min64(width, t.channels_m - m), run, dst, width, width, false);
            }
          }
        }
        gemm_panel<G, T>(t.elements(), vectors,
                         {depth, pixels.chain, panel, width, operand, element_offsets, pixel_offsets, zeros,
                          c_tile + t.elements() * start * L, width, segment != first});
      }
    }
  }

  int64_t used_size(const Tile& t) const {
    return t.elements() * div_up(t.channels_m, kPerVector) * L * (kInner ? div_up(t.groups, L) : 1);
  }
  // Where a vector of an item's groups begins; what is left over overlaps the last whole one.
  static int64_t inner_lane(const Tile& t, int64_t vector) { return min64(vector * L, t.groups - L); }

  void store(const Tile& t, const T* c_tile) const {
    const Panels panels = cut_panels(div_up(t.channels_m, kPerVector), Vec<T>::kMaxVectors);
    const int64_t* const gw = grad_weight.stride;
    // Rows of the tile that continue one another in the result are stored as one run.
    const bool join_i = gw[2] == gw[3] * t.tap_cols || t.tap_rows == 1;
    const bool join_c = join_i && (gw[1] == gw[3] * t.tap_rows * t.tap_cols || t.channels == 1);
    const int64_t run = t.tap_cols * (join_i ? t.tap_rows : 1) * (join_c ? t.channels : 1);
    for (int64_t x = 0; x < panels.count; ++x) {
      const int64_t vectors = panels.size(x), width = vectors * L, start = panels.start(x);
      const int64_t m = t.m0 + start * kPerVector;
      const T* const c_panel = c_tile + t.elements() * start * L;
      S* const destination = static_cast<S*>(grad_weight.data) +
                             (t.group * problem.out_channels_per_group() + m) * gw[0] + t.c0 * gw[1] + t.i0 * gw[2] +
                             t.j0 * gw[3];
      if constexpr (!G && !kInner) {
        if (gw[1] == 1 && gw[3] != 1 && t.channels > 1) {
          // channels_last: a tap's channels lie side by side.
          const int64_t taps = t.tap_rows * t.tap_cols;
          for (int64_t tap = 0; tap < taps; ++tap) {
            store_tile<S, T>(c_panel + tap * width, taps * width, t.channels, min64(width, t.m0 + t.channels_m - m),
                             nullptr, destination + tap / t.tap_cols * gw[2] + tap % t.tap_cols * gw[3], gw[1], gw[0]);
          }
          continue;
        }
      }
      for (int64_t e = 0; e < t.elements(); e += run) {
        const int64_t c = e / (t.tap_rows * t.tap_cols), i = e / t.tap_cols % t.tap_rows;
        const T* const from = c_panel + e * width;
        S* const to = destination + c * gw[1] + i * gw[2];
        if constexpr (kInner) {
          for (int64_t v = 0; v * L < t.groups; ++v) {
            store_tile<S, T>(from + v * t.elements() * L, L, run, L, nullptr, to + inner_lane(t, v) * gw[0], gw[3],
                             gw[0]);
          }
        } else if constexpr (G) {
          for (int64_t v = 0; v < vectors; ++v) {
            store_tile<S, T>(from + v * L, width, run, t.groups, nullptr, to + v * gw[0], gw[3],
                             problem.out_channels_per_group() * gw[0]);
          }
        } else {
          store_tile<S, T>(from, width, run, min64(width, t.m0 + t.channels_m - m), nullptr, to, gw[3], gw[0]);
        }
      }
    }
  }

  // All chunks one after the other.
  static void whole_item(void* context, int64_t item) {
    const GradWeightCall& call = *static_cast<const GradWeightCall*>(context);
    const Tile t = call.tile_of(item);
    char* const memory = static_cast<char*>(thread_scratch(call.layout.bytes));
    T* const total = reinterpret_cast<T*>(memory + call.layout.total);
    T* const tile = reinterpret_cast<T*>(memory + call.layout.tile);
    T* const lost = reinterpret_cast<T*>(memory + call.layout.lost);
    const int64_t chunks = call.pixels.chunks();
    if (chunks == 0) fill_zero(tile, call.used_size(t));
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      call.sum_chunk(t, chunk, memory, tile);
      if (chunks > 1) add_chunk(total, lost, tile, call.used_size(t), chunk == 0);
    }
    if (chunks > 1) finish_chunks(tile, total, lost, call.used_size(t));
    call.store(t, tile);
  }

  // One chunk of one tile, into its slot; then, item by item, the slots in order.
  static void chunk_item(void* context, int64_t index) {
    const GradWeightCall& call = *static_cast<const GradWeightCall*>(context);
    call.sum_chunk(call.tile_of(index % call.items()), call.first_chunk + index / call.items(),
                   static_cast<char*>(thread_scratch(call.layout.bytes)), call.partials + index * call.tile_size());
  }
  static void reduce_item(void* context, int64_t item) {
    const GradWeightCall& call = *static_cast<const GradWeightCall*>(context);
    const Tile t = call.tile_of(item);
    T* const total = call.totals + item * call.tile_size();
    T* const lost = total + call.items() * call.tile_size();
    for (int64_t slot = 0; slot < call.chunks_in_flight; ++slot) {
      const T* const partial = call.partials + (slot * call.items() + item) * call.tile_size();
      add_chunk(total, lost, partial, call.used_size(t), call.first_chunk + slot == 0);
    }
    if (call.first_chunk + call.chunks_in_flight == call.pixels.chunks()) {
      finish_chunks(total, total, lost, call.used_size(t));
      call.store(t, total);
    }
  }

  void run(const Executor& executor) {
    if (tiling.slots == 1) {
      run_items(executor, items(), this, &whole_item);
      return;
    }
    const CallWorkspace workspace(partial_bytes(tiling, vector_shape<T>()));
    partials = static_cast<T*>(workspace.data());
    totals = partials + tiling.slots * items() * tile_size();
    for (first_chunk = 0; first_chunk < pixels.chunks(); first_chunk += chunks_in_flight) {
      chunks_in_flight = min64(tiling.slots, pixels.chunks() - first_chunk);
      run_items(executor, chunks_in_flight * items(), this, &chunk_item);
      run_items(executor, items(), this, &reduce_item);
    }
  }
};

template <class S, class T, WeightLanes kLanes>
void run_grad_weight(const Call& call, const Executor& executor) {
  GradWeightCall<S, T, kLanes>(call.problem, call.a, call.b, call.result, executor.num_threads).run(executor);
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
