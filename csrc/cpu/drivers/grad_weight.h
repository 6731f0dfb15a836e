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
#include "parts.h"

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

  GradWeightCall(const Call& call, int num_threads)
      : problem(call.problem),
        grad_output(call.a),
        input(call.b),
        grad_weight(call.result),
        pixels(block_pixels(problem.batch, problem.out_h, problem.out_w, vector_shape<T>().limits)),
        tiling(tile_grad_weight(problem, pixels, vector_shape<T>(), kLanes, num_threads)),
        layout(lay_out_scratch(tiling, pixels, vector_shape<T>())),
        in_place(input_is_patch()) {}

  // One tap that never lies in the padding: the input itself is the patch, whatever its strides.
  bool input_is_patch() const {
    if constexpr (G || !std::is_same_v<S, T> || !kHasTranspose<T>) return false;
    // Pixels that lie so far apart share few sets of the caches, and each block of channels would read them again. (For
    // a few results copying them would cost more than that.)
    const int64_t pitch = input.stride[3] * int64_t(sizeof(S)), few = 64 / int64_t(sizeof(S));
    if (input.stride[1] == 1 && pitch >= limits::tiling::kFarRowsBytes && problem.out_channels_per_group() > few) {
      return false;
    }
    return problem.taps() == 1 &&
           positions_inside(problem.rows(), 1, problem.out_h, problem.in_h).count() == problem.out_h &&
           positions_inside(problem.cols(), 1, problem.out_w, problem.in_w).count() == problem.out_w;
  }

  int64_t tile_size() const { return tiling.tile_size(L); }
  int64_t items() const { return tiling.items(); }

  // The tile of weights that an item owns.
  struct WeightTile {
    int64_t group, groups, m0, channels_m, c0, channels, i0, tap_rows, j0, tap_cols;
    int64_t elements() const { return channels * tap_rows * tap_cols; }
  };
  WeightTile tile_of(int64_t item) const {
    WeightTile t{};
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

  // Where a thread's operands lie in scratch.
  struct Scratch {
    int64_t *element_offsets, *pixel_offsets, *columns, *edges;
    T *zeros, *panel, *patch, *pieces;
  };
  Scratch scratch_in(char* memory) const {
    return {part<int64_t>(memory, layout.element_offsets),
            part<int64_t>(memory, layout.pixel_offsets),
            part<int64_t>(memory, layout.columns),
            part<int64_t>(memory, layout.edges),
            part<T>(memory, layout.zeros),
            part<T>(memory, layout.panel),
            part<T>(memory, layout.patch),
            part<T>(memory, layout.pieces)};
  }

  // The pixels of a segment.
  Tile segment_at(int64_t number) const {
    const int64_t n = number / (pixels.blocks_h * pixels.blocks_w) * pixels.images;
    const int64_t p = number / pixels.blocks_w % pixels.blocks_h * pixels.rows;
    const int64_t q = number % pixels.blocks_w * pixels.cols;
    return {n, min64(pixels.images, problem.batch - n), p, min64(pixels.rows, problem.out_h - p),
            q, min64(pixels.cols, problem.out_w - q)};
  }

  // The input as the micro-kernels read it: a patch in scratch, or the input itself.
  struct PatchView {
    Patch patch;
    const T* data;
    int64_t first_row, end;  // the first output row it covers; the segment after the last (not of the input itself)
  };

  // c[panel][element][channel] = the sum over one chunk of pixels.
  void sum_chunk(const WeightTile& t, int64_t chunk, char* memory, T* c_tile) const {
    if constexpr (kTakesBlocks<T>) {
      sum_chunk_in_tiles(*this, t, chunk, memory, c_tile);
    } else {
      sum_chunk_in_vectors(t, chunk, memory, c_tile);
    }
  }
  void sum_chunk_in_vectors(const WeightTile& t, int64_t chunk, char* memory, T* c_tile) const {
    const int64_t first = chunk * kPixelSegmentsPerChunk;
    const int64_t last = min64(first + kPixelSegmentsPerChunk, pixels.segments());
    const Scratch scratch = scratch_in(memory);
    fill_zero(scratch.zeros, Vec<T>::kMaxVectors * L);
    if constexpr (kInner) fill_columns(t, scratch);
    PatchView view{};
    view.end = first;
    for (int64_t number = first; number < last; ++number) {
      const Tile segment = segment_at(number);
      if constexpr (kInner) {
        if (reads_rows_in_place(t, segment)) {
          multiply_rows_in_place(t, segment, scratch, number != first, c_tile);
          view.end = number + 1;  // the patches of its edges lie where the view's patch was
          continue;
        }
      }
      if (in_place) {
        view = input_in_place(t, segment);
      } else if (number == view.end) {
        view = pack_input(t, segment, number, last, scratch.patch);
      }
      fill_taps(view.patch, t.channels, t.tap_rows, t.tap_cols, scratch.element_offsets);
      fill_positions(view.patch, segment.images, segment.rows, segment.cols, scratch.pixel_offsets,
                     segment.row - view.first_row);
      if constexpr (kInner) {
        multiply_inner(t, segment, view, scratch, number != first, c_tile);
      } else {
        multiply(t, segment, view, scratch, number != first, c_tile);
      }
    }
  }

  PatchView input_in_place(const WeightTile& t, const Tile& segment) const {
    const int64_t* const in = input.stride;
    const S* const data = input_at(t, segment) + problem.rows().source(segment.row, 0) * in[2] +
                          problem.cols().source(segment.col, 0) * in[3];
    return {patch_in_place(problem.rows(), problem.cols(), in[0], in[1], in[2], in[3]),
            reinterpret_cast<const T*>(data), segment.row, 0};
  }
  const S* input_at(const WeightTile& t, const Tile& segment) const {
    return static_cast<const S*>(input.data) + segment.image * input.stride[0] +
           (t.group * problem.in_channels_per_group() + t.c0) * input.stride[1];
  }

  // Strided patches of channels_last are transposed into planes, where the positions that a tap meets lie side by side.
  // (Measured with 16 registers, on channels that fill a vector; with 32 it was not.)
  bool transposes_patch(const WeightTile& t) const {
    return !G && kHasTranspose<T> && Vec<T>::kMaxVectors <= 2 && problem.stride_w > 1 && problem.taps() > 1 &&
           t.channels >= L;
  }

  // The patch of segment `number`, and of those below it in the image that tiling lets share it.
  PatchView pack_input(const WeightTile& t, const Tile& segment, int64_t number, int64_t last, T* patch_data) const {
    const int64_t* const in = input.stride;
    const int64_t below = min64(min64(tiling.patch_segments, last - number),
                                pixels.blocks_h - number / pixels.blocks_w % pixels.blocks_h);
    const int64_t rows = min64(below * pixels.rows, problem.out_h - segment.row);
    const PatchOrder order = kInner                ? PatchOrder::kChannelInner
                             : transposes_patch(t) ? PatchOrder::kPlanar
                                                   : patch_order(G, t.channels, in[1], in[3], problem.in_w);
    const Patch patch = lay_out_patch(order, make_patch_axis(problem.rows(), segment.row, rows, t.i0, t.tap_rows),
                                      make_patch_axis(problem.cols(), segment.col, segment.cols, t.j0, t.tap_cols),
                                      segment.images, kInner ? t.groups : t.channels, L, sizeof(T));
    Source<S> source{};
    source.data = input_at(t, segment);
    source.image = in[0];
    source.channel = in[1];
    source.row = in[2];
    source.col = in[3];
    source.height = problem.in_h;
    source.width = problem.in_w;
    source.group = problem.in_channels_per_group() * in[1];
    source.lanes = t.groups;
    pack_patch(patch, source, true, patch_data);
    return {patch, patch_data, segment.row, number + below};
  }

  const S* grad_output_at(const Tile& segment, int64_t channel) const {
    const int64_t* const go = grad_output.stride;
    return static_cast<const S*>(grad_output.data) + segment.image * go[0] + channel * go[1] + segment.row * go[2] +
           segment.col * go[3];
  }

  // Neighbouring groups of a channels_last depthwise problem.
  CONV2D_INLINE void multiply_inner(const WeightTile& t, const Tile& segment, const PatchView& view,
                                    const Scratch& scratch, bool accumulate, T* c_tile) const {
    const int64_t* const go = grad_output.stride;
    const S* const source = grad_output_at(segment, t.group);
    const int64_t depth = segment.pixels(), vectors = div_up(t.groups, L);
    const int64_t first_tap = view.patch.tap_offset(0, 0, 0);
    DepthwiseWeightOperands<T> operands{};
    operands.depth = depth;
    operands.chain = pixels.chain;
    operands.k_offset = scratch.pixel_offsets;
    // A step that is never taken may be of any length.
    operands.tap_row = t.tap_rows == 1 ? 0 : view.patch.tap_offset(0, 1, 0) - first_tap;
    operands.tap_col = t.tap_cols == 1 ? 0 : view.patch.tap_offset(0, 0, 1) - first_tap;
    operands.accumulate = accumulate;
    const auto multiply_vector = [&](int64_t v, const T* a, int64_t a_pitch) {
      operands.a = a;
      operands.a_pitch = a_pitch;
      operands.b = view.data + first_tap + inner_lane(t, v);
      operands.c = c_tile + v * t.elements() * L;
      depthwise_weight_panel<T>(t.tap_rows, t.tap_cols, scratch.element_offsets, scratch.zeros, operands);
    };
    // Pixels that lie evenly are read in place, a chain in all vectors after the other.
    if constexpr (sizeof(S) == sizeof(T)) {
      if ((segment.rows == 1 || go[2] == segment.cols * go[3]) &&
          (segment.images == 1 || go[0] == segment.rows * segment.cols * go[3])) {
        for (int64_t k = 0; k < depth; k += pixels.chain) {
          operands.depth = min64(pixels.chain, depth - k);
          operands.k_offset = scratch.pixel_offsets + k;
          for (int64_t v = 0; v < vectors; ++v) multiply_vector(v, source + inner_lane(t, v) + k * go[3], go[3]);
          operands.accumulate = true;
        }
        return;
      }
    }
    for (int64_t v = 0; v < vectors; ++v) {
      for (int64_t x = 0; x < segment.images * segment.rows; ++x) {
        const S* const row = source + inner_lane(t, v) + x / segment.rows * go[0] + x % segment.rows * go[2];
        pack_lanes(LaneSource<S>{row, 1, go[3], L, segment.cols}, Panel<T>{scratch.panel + x * segment.cols * L, L, L},
                   false);
      }
      multiply_vector(v, scratch.panel, L);
    }
  }

  // The output columns of a segment whose taps all lie in the input.
  Interval columns_inside(const Tile& segment) const {
    const Interval all = positions_inside(problem.cols(), problem.kernel_w, problem.out_w, problem.in_w);
    const int64_t begin = max64(all.begin, segment.col), end = min64(all.end, segment.col + segment.cols);
    return {min64(begin, end), end};
  }

  // Whether a segment of neighbouring groups reads the input where it lies. Of a stride of 1 each copied element serves
  // all taps, of others few. Pixels at the edges, some of whose taps lie in the padding, have a patch each, all of
  // which should be smaller than what is not copied.
  bool reads_rows_in_place(const WeightTile& t, const Tile& segment) const {
    if (!std::is_same_v<S, T> || !has_depthwise_weight_ukernel(t.tap_cols) || t.tap_cols != problem.kernel_w)
      return false;
    const GatherAxis rows = problem.rows();
    if (segment.images != 1 || rows.source(segment.row, t.i0) < 0 ||
        rows.source(segment.row + segment.rows - 1, t.i0 + t.tap_rows - 1) >= problem.in_h) {
      return false;
    }
    const int64_t inside = columns_inside(segment).count(), edges = segment.cols - inside;
    const int64_t copied_rows = min64(problem.stride_h, t.tap_rows), cols = min64(problem.stride_w, t.tap_cols);
    return inside > 1 && copied_rows * cols > 1 && 2 * edges * t.tap_rows * t.tap_cols <= inside * copied_rows * cols;
  }

  // The same sums as multiply_inner's. A chain's pixels inside and at the edges are pieces of it.
  CONV2D_INLINE void multiply_rows_in_place(const WeightTile& t, const Tile& segment, const Scratch& scratch,
                                            bool accumulate, T* c_tile) const {
    const int64_t *const in = input.stride, *const go = grad_output.stride;
    const int64_t depth = segment.pixels(), end_col = segment.col + segment.cols;
    const Interval inside = columns_inside(segment);
    const GatherAxis rows = problem.rows(), cols = problem.cols();
    const S* const image = static_cast<const S*>(input.data) + segment.image * in[0] + t.group * in[1];
    for (int64_t k = 0, count = 0; k < depth; k += count) {
      const int64_t r = k / segment.cols, col = segment.col + k % segment.cols;
      const bool is_inside = inside.contains(col);
      const int64_t change = is_inside ? inside.end : col < inside.begin ? inside.begin : end_col;
      count = min64(change - col, pixels.chain - k % pixels.chain);
      const S* const row = image + rows.source(segment.row + r, t.i0) * in[2];
      const S* const output = grad_output_at(segment, t.group) + r * go[2] + (col - segment.col) * go[3];
      DepthwiseWeightOperands<T> operands{};
      operands.depth = operands.chain = count;
      operands.a_pitch = go[3];
      operands.resumes = k % pixels.chain != 0;
      operands.pauses = (k + count) % pixels.chain != 0 && k + count < depth;
      operands.accumulate = accumulate || k >= pixels.chain;
      if (is_inside) {
        operands.b = reinterpret_cast<const T*>(row + cols.source(col, 0) * in[3]);
        operands.k_offset = scratch.columns;
        operands.tap_row = t.tap_rows == 1 ? 0 : in[2] * problem.dilation_h;  // of any length
        operands.tap_col = in[3] * problem.dilation_w;
      } else {
        for (int64_t x = 0; x < count; ++x) pack_edge(t, row, col + x, scratch.patch + scratch.edges[x]);
        operands.b = scratch.patch;
        operands.k_offset = scratch.edges;
        operands.tap_row = t.tap_cols * t.groups;
        operands.tap_col = t.groups;
      }
      for (int64_t v = 0; v * L < t.groups; ++v) {
        DepthwiseWeightOperands<T> vector = operands;
        vector.a = reinterpret_cast<const T*>(output) + inner_lane(t, v);
        vector.b += inner_lane(t, v);
        vector.c = c_tile + v * t.elements() * L;
        vector.pieces = scratch.pieces + v * t.elements() * L;
        depthwise_weight_panel<T>(t.tap_rows, t.tap_cols, nullptr, scratch.zeros, vector);
      }
    }
  }

  // Offsets of columns inside from the first one, and of the patches of columns at the edges.
  void fill_columns(const WeightTile& t, const Scratch& scratch) const {
    for (int64_t q = 0; q < pixels.cols; ++q) {
      scratch.columns[q] = saturating_mul(q, problem.stride_w, input.stride[3]);
      scratch.edges[q] = q * t.tap_rows * t.tap_cols * t.groups;
    }
  }

  // The taps of one output column, those in the padding as zeros.
  CONV2D_INLINE void pack_edge(const WeightTile& t, const S* row, int64_t col, T* patch) const {
    const int64_t* const in = input.stride;
    for (int64_t i = 0; i < t.tap_rows; ++i) {
      const S* const taps = row + i * in[2] * problem.dilation_h;
      for (int64_t j = 0; j < t.tap_cols; ++j, patch += t.groups) {
        const int64_t source = problem.cols().source(col, j);
        if (source < 0 || source >= problem.in_w) {
          fill_zero(patch, t.groups);
        } else {
          copy_run(taps + source * in[3], 1, t.groups, patch, false);
        }
      }
    }
  }

  CONV2D_INLINE void multiply(const WeightTile& t, const Tile& segment, const PatchView& view, const Scratch& scratch,
                              bool accumulate, T* c_tile) const {
    GemmOperands<T> operands{};
    operands.depth = segment.pixels();
    operands.chain = pixels.chain;
    operands.a = scratch.panel;
    operands.b = view.data;
    operands.j_offset = scratch.element_offsets;
    operands.k_offset = scratch.pixel_offsets;
    operands.start = scratch.zeros;
    operands.accumulate = accumulate;
    const Panels panels = panels_of(t);
    for (int64_t x = 0; x < panels.count; ++x) {
      const int64_t vectors = panels.size(x), start = panels.start(x);
      pack_grad_output(t, segment, start * kPerVector, vectors, scratch.panel);
      operands.a_pitch = operands.c_pitch = vectors * L;
      operands.c = c_tile + t.elements() * start * L;
      gemm_panel<G, T>(t.elements(), vectors, operands);
    }
  }
  Panels panels_of(const WeightTile& t) const { return cut_panels(div_up(t.channels_m, kPerVector), kPanelVectors<T>); }

  // A panel of a segment's pixels: [pixel][lane], from the tile's output channel m on.
  CONV2D_INLINE void pack_grad_output(const WeightTile& t, const Tile& segment, int64_t m, int64_t vectors,
                                      T* dst) const {
    const int64_t* const go = grad_output.stride;
    const int64_t width = vectors * L, group_channels = problem.out_channels_per_group();
    // Rows that continue one another are one run.
    const bool join_rows = segment.rows == 1 || go[2] == segment.cols * go[3];
    const int64_t run = join_rows ? segment.rows * segment.cols : segment.cols, runs = join_rows ? 1 : segment.rows;
    const S* const source = grad_output_at(segment, t.group * group_channels + t.m0 + m);
    for (int64_t n = 0; n < segment.images; ++n) {
      for (int64_t r = 0; r < runs; ++r, dst += run * width) {
        const S* const s = source + n * go[0] + r * go[2];
        if constexpr (!G) {
          pack_lanes(LaneSource<S>{s, go[1], go[3], min64(width, t.channels_m - m), run}, Panel<T>{dst, width, width},
                     false);
          continue;
        }
        if constexpr (kHasTranspose<T>) {
          if (go[1] == 1 && can_interleave(group_channels)) {
            load_interleaved(group_channels, GroupPixels<const S>{s - (t.m0 + m), go[3], run, t.groups}, t.m0 + m,
                             vectors, GroupPlanes<T>{dst, width, L});
            continue;
          }
        }
        for (int64_t v = 0; v < vectors; ++v) {
          pack_lanes(LaneSource<S>{s + v * go[1], group_channels * go[1], go[3], t.groups, run},
                     Panel<T>{dst + v * L, width, L}, false);
        }
      }
    }
  }

  int64_t used_size(const WeightTile& t) const {
    return t.elements() * div_up(t.channels_m, kPerVector) * L * (kInner ? div_up(t.groups, L) : 1);
  }
  // Where a vector of an item's groups begins; what is left over overlaps the last whole one.
  static int64_t inner_lane(const WeightTile& t, int64_t vector) { return min64(vector * L, t.groups - L); }

  void store(const WeightTile& t, const T* c_tile) const {
    const Panels panels = panels_of(t);
    const int64_t* const gw = grad_weight.stride;
    const int64_t group_channels = problem.out_channels_per_group(), taps = t.tap_rows * t.tap_cols;
    for (int64_t x = 0; x < panels.count; ++x) {
      const int64_t vectors = panels.size(x), width = vectors * L, start = panels.start(x);
      const int64_t m = t.m0 + start * kPerVector;
      const T* const c = c_tile + t.elements() * start * L;
      S* const to = static_cast<S*>(grad_weight.data) + (t.group * group_channels + m) * gw[0] + t.c0 * gw[1] +
                    t.i0 * gw[2] + t.j0 * gw[3];
      if constexpr (kInner) {
        for (int64_t v = 0; v * L < t.groups; ++v) {
          store_lane_block(t, {c + v * t.elements() * L, L, 0, L, nullptr}, {to + inner_lane(t, v) * gw[0], 0, gw[0]});
        }
      } else if constexpr (G) {
        for (int64_t v = 0; v < vectors; ++v) {
          store_lane_block(t, {c + v * L, width, 0, t.groups, nullptr}, {to + v * gw[0], 0, group_channels * gw[0]});
        }
      } else {
        const int64_t channels = min64(width, t.m0 + t.channels_m - m);
        if (gw[1] == 1 && gw[3] != 1 && t.channels > 1) {
          // channels_last: a tap's channels lie side by side.
          for (int64_t tap = 0; tap < taps; ++tap) {
            store_tile(TileSums<T>{c + tap * width, taps * width, t.channels, channels, nullptr},
                       TileTarget<S>{to + tap / t.tap_cols * gw[2] + tap % t.tap_cols * gw[3], gw[1], gw[0]},
                       Between::kOthers);
          }
          continue;
        }
        store_lane_block(t, {c, width, 0, channels, nullptr}, {to, 0, gw[0]});
      }
    }
  }
  // All elements of the tile, in the lanes of one panel or vector. Rows that continue one another in the result are
  // stored as one run.
  void store_lane_block(const WeightTile& t, TileSums<T> sums, TileTarget<S> to) const {
    const int64_t* const gw = grad_weight.stride;
    const bool join_i = gw[2] == gw[3] * t.tap_cols || t.tap_rows == 1;
    const bool join_c = join_i && (gw[1] == gw[3] * t.tap_rows * t.tap_cols || t.channels == 1);
    sums.pixels = t.tap_cols * (join_i ? t.tap_rows : 1) * (join_c ? t.channels : 1);
    to.x_step = gw[3];
    S* const first = to.data;
    for (int64_t e = 0; e < t.elements(); e += sums.pixels) {
      to.data = first + e / (t.tap_rows * t.tap_cols) * gw[1] + e / t.tap_cols % t.tap_rows * gw[2];
      store_tile(sums, to, Between::kOthers);
      sums.data += sums.pixels * sums.pitch;
    }
  }

  // All chunks one after the other.
  static void whole_item(void* context, int64_t item) {
    const GradWeightCall& call = *static_cast<const GradWeightCall*>(context);
    const WeightTile t = call.tile_of(item);
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
    const WeightTile t = call.tile_of(item);
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

}  // namespace conv2d_ext::cpu::CONV2D_ISA
