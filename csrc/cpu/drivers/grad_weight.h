// The GEMM driver of grad_weight.
//
//   grad_weight[m, (c, i, j)] = sum over output pixels of grad_output[m, pixel] * conj(patch[c, pixel, i, j])
//
// The micro-kernel is that of drivers/gemm.h, with the offset tables exchanged: its rows are weight elements (c, i, j),
// its K runs over pixels, its vectors hold output channels.
//
// A work item (drivers/weight_chunks.h) packs the patch of each segment of pixels and a panel of grad_output, unless
// the input or grad_output can serve as one.
//
// Products with the padding are left out where they are enough (drivers/listed_steps.h).
//
// Where groups have few channels, vectors run over groups (G), as in drivers/gemm.h. Depthwise problems in
// channels_last have a driver of their own (drivers/depthwise_weight.h).
#pragma once

#include "../kernels/gemm.h"
#include "../pack/interleave.h"
#include "../pack/patch.h"
#include "lines_ahead.h"
#include "listed_steps.h"
#include "weight_chunks.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class S, class T, WeightLanes kLanes>
struct GradWeightCall : WeightCall {
  static constexpr int L = Vec<T>::kLanes;
  static constexpr bool G = kLanes == WeightLanes::kGroups;
  static_assert(kLanes != WeightLanes::kInnerGroups);
  static constexpr bool kListsSteps = !G && ListedSteps<T>::kExists;
  // Output channels in a vector: L, or one of each of L groups.
  static constexpr int kPerVector = G ? 1 : L;
  const bool in_place = input_is_patch();      // the input is read where it lies
  const bool asks_ahead = waits_for_memory();  // while a segment multiplies, what the next one reads is prefetched

  GradWeightCall(const Call& call, int num_threads) : WeightCall{call, kLanes, vector_shape<T>(), num_threads} {}

  // One tap that never lies in the padding: the input itself is the patch, whatever its strides.
  bool input_is_patch() const {
    if constexpr (G || !std::is_same_v<S, T> || !kHasTranspose<T>) return false;
    if (input.stride[1] == 1 && copies_pixels()) return false;
    return problem.taps() == 1 && are_inside(problem.rows(), 1, problem.out_h, problem.in_h) &&
           are_inside(problem.cols(), 1, problem.out_w, problem.in_w);
  }

  // Whether pixels whose channels lie together are copied before they are read.
  bool copies_pixels() const {
    const int64_t pitch = input.stride[3] * int64_t(sizeof(S));
    // Pixels that lie so far apart share few sets of the caches, and each block of channels would read them again. (For
    // a few results copying them would cost more than that.)
    constexpr int64_t kFew = 64 / int64_t(sizeof(S));
    if (pitch >= limits::tiling::kFarRowsBytes && problem.out_channels_per_group() > kFew) return true;
    // From beyond L2 a copy reads whole pixels in their order, which hardware prefetchers follow; a micro-kernel reads
    // some channels of many pixels. (Measured with 16 registers; with 32 each line that is read serves more products.)
    const int64_t bytes = saturating_mul(problem.batch, problem.out_h * problem.out_w, pitch);
    return Vec<T>::kMaxVectors <= 2 && bytes >= limits::tiling::kStreamedBytes;
  }

  // Channels_last from beyond L2: a segment's pixels are short runs, or end before hardware prefetchers are up to
  // speed.
  bool waits_for_memory() const {
    if constexpr (G || kTakesBlocks<T> || !kHasTranspose<T> || !(std::is_same_v<S, T> || kTakesPairs<T>)) return false;
    const bool side_by_side = input.stride[1] == 1 && grad_output.stride[1] == 1 && problem.groups == 1;
    const int64_t elements = saturating_add(saturating_mul(problem.out_pixels(), problem.out_channels),
                                            saturating_mul(problem.in_h, problem.in_w, problem.in_channels));
    const int64_t bytes = saturating_mul(problem.batch, elements, int64_t(sizeof(S)));
    // Rows that no tap meets are not worth a request.
    const bool meets_all = problem.stride_h <= tiling.tap_rows && problem.stride_w <= tiling.tap_cols;
    // Beside what this segment uses, L2 holds what the next one does.
    const int64_t channels = saturating_add(tiling.chunk_vectors * kPerVector, tiling.block_channels);
    const int64_t ahead = saturating_mul(pixels.images * pixels.rows * pixels.cols, channels, int64_t(sizeof(S)));
    const bool fits = l2_bytes() == 0 || ahead <= l2_bytes() / 2;
    const int64_t least = kTakesPairs<T> ? limits::tiling::kStreamedPairBytes : limits::tiling::kStreamedBytes;
    return side_by_side && meets_all && fits && bytes / num_threads >= least;
  }

  // The tile of weights that an item owns of each of its groups. These are a vector's lanes (G), or taken in turn.
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
    const int64_t all_m = problem.out_channels_per_group();
    const Panels chunks = near_equal(div_up(all_m, kPerVector), tiling.chunks_m);
    t.m0 = chunks.start(item % tiling.chunks_m) * kPerVector;
    t.channels_m = min64(chunks.size(item % tiling.chunks_m) * kPerVector, all_m - t.m0);
    const int64_t block_groups = G ? L : tiling.groups_in_turn;
    t.group = item / tiling.chunks_m * block_groups;
    t.groups = min64(block_groups, problem.groups - t.group);
    t.channels = min64(tiling.block_channels, problem.in_channels_per_group() - t.c0);
    t.tap_rows = min64(tiling.tap_rows, problem.kernel_h - t.i0);
    t.tap_cols = min64(tiling.tap_cols, problem.kernel_w - t.j0);
    return t;
  }

  static constexpr int64_t turns_of(const WeightTile& t) { return G ? 1 : t.groups; }
  // Of one of the groups that are taken in turn.
  static WeightTile in_turn(WeightTile t, int64_t turn) {
    if constexpr (!G) {
      t.group += turn;
      t.groups = 1;
    }
    return t;
  }
  int64_t sums_of_group(const WeightTile& t) const { return t.elements() * div_up(t.channels_m, kPerVector) * L; }

  // Where a thread's operands lie in scratch.
  struct Scratch {
    int64_t *element_offsets, *pixel_offsets, *listed_offsets, *listed_numbers, *listed_steps;
    T *zeros, *panel, *patch;
  };
  Scratch scratch_in(char* memory) const {
    return {part<int64_t>(memory, layout.element_offsets),
            part<int64_t>(memory, layout.pixel_offsets),
            part<int64_t>(memory, layout.listed_offsets),
            part<int64_t>(memory, layout.listed_numbers),
            part<int64_t>(memory, layout.listed_steps),
            part<T>(memory, layout.zeros),
            part<T>(memory, layout.panel),
            part<T>(memory, layout.patch)};
  }

  // The input as the micro-kernels read it: a patch in scratch, or the input itself.
  struct PatchView {
    Patch patch;
    const T* data;
  };

  // What the next segment reads.
  struct SegmentAhead {
    LinesAhead grad_output, input;
    // Asks for what belongs to so many rows of C, of one panel and pass.
    CONV2D_INLINE void ask(int64_t rows) {
      grad_output.ask(rows);
      input.ask(rows);
    }
  };
  // The same, and which steps the sums take.
  struct SegmentSource {
    const PatchView& view;
    const ListedSteps<T>& listed;
    SegmentAhead& ahead;
  };
  // Asked for while the one before is multiplied, in so many passes; where there is a next one, and where it pays.
  SegmentAhead ahead_of(const WeightTile& t, const Interval& segments, int64_t number, int64_t passes) const {
    SegmentAhead ahead;
    if (!asks_ahead || number + 1 >= segments.end) return ahead;
    const Tile next = segment_at(number + 1);
    const int64_t shares = panels_of(t).count * t.elements() * passes;
    if (pixels_join(next, grad_output_steps())) {
      ahead.grad_output =
          LinesAhead::of_pixels(grad_output_at(next, t.m0), next.pixels(), t.channels_m, grad_output.stride[3], shares);
    }
    GatheredAxis h{problem.rows(), t.tap_rows, problem.out_h, problem.in_h};
    GatheredAxis w{problem.cols(), t.tap_cols, problem.out_w, problem.in_w};
    h.axis.origin = h.axis.source(0, t.i0);
    w.axis.origin = w.axis.source(0, t.j0);
    const SourceOfTile<S> source{input_at(t, next), t.channels, input.stride[2], input.stride[3]};
    ahead.input = LinesAhead::of(source, h, w, next, shares);
    return ahead;
  }

  // c[panel][element][channel] = the sum over one chunk of pixels.
  void sum_chunk(const WeightTile& t, int64_t chunk, char* memory, T* c_tile) const {
    if constexpr (kTakesBlocks<T> || kTakesPairs<T>) {
      sum_chunk_in_steps(*this, t, chunk, memory, c_tile);
    } else {
      sum_chunk_in_vectors(t, chunk, memory, c_tile);
    }
  }
  void sum_chunk_in_vectors(const WeightTile& t, int64_t chunk, char* memory, T* c_tile) const {
    const Interval segments = segments_of(chunk);
    const Scratch scratch = scratch_in(memory);
    fill_zero(scratch.zeros, Vec<T>::kMaxVectors * L);
    for (int64_t number = segments.begin; number < segments.end; ++number) {
      const Tile segment = segment_at(number);
      ListedSteps<T> listed;
      for (int64_t turn = 0; turn < turns_of(t); ++turn) {
        const WeightTile of = in_turn(t, turn);
        const PatchView view = in_place ? input_in_place(of, segment) : pack_input(of, segment, scratch.patch);
        if (turn == 0) {
          fill_taps(view.patch, t.channels, t.tap_rows, t.tap_cols, scratch.element_offsets);
          fill_positions(view.patch, segment.images, segment.rows, segment.cols, scratch.pixel_offsets);
          listed = list_steps(t, segment, view.patch, scratch);
        }
        SegmentAhead ahead = ahead_of(of, segments, number, div_up(segment.pixels(), pass_depth(pixels.chain)));
        multiply(of, segment, {view, listed, ahead}, scratch, number != segments.begin,
                 c_tile + turn * sums_of_group(t));
      }
    }
  }

  // The steps of each weight element's sum without pixels whose input is padding, or none.
  CONV2D_INLINE ListedSteps<T> list_steps(const WeightTile& t, const Tile& segment, const Patch& patch,
                                          const Scratch& scratch) const {
    ListedSteps<T> listed;
    if constexpr (kListsSteps) {
      if (tiling.padding.permille > 0) {
        listed.padding =
            padding_classes(problem, segment, {t.i0, t.tap_rows, t.j0, t.tap_cols, t.channels}, tiling.padding);
      }
      if (listed.padding.count == 0) return listed;
      listed.chain = pixels.chain;
      listed.results = {t.channels, t.tap_rows, t.tap_cols};
      listed.all_steps = {segment.images, segment.rows, segment.cols};
      listed.b_offsets = scratch.listed_offsets;
      listed.steps = scratch.listed_steps;
      listed.pitch = 2 * pixels.images * pixels.rows * pixels.cols;
      listed.for_each_result([&](int64_t at, int64_t c, int64_t i, int64_t j) {
        listed.b_offsets[at] = patch.tap_offset(c, i, j);
        scratch.listed_numbers[at] = (c * t.tap_rows + i) * t.tap_cols + j;
      });
      listed.fill_steps([&](int64_t n, int64_t p, int64_t q) { return patch.position_offset(n, p, q); });
    }
    return listed;
  }

  PatchView input_in_place(const WeightTile& t, const Tile& segment) const {
    const int64_t* const in = input.stride;
    const S* const data = input_at(t, segment) + problem.rows().source(segment.row, 0) * in[2] +
                          problem.cols().source(segment.col, 0) * in[3];
    return {patch_in_place(problem.rows(), problem.cols(), in[0], in[1], in[2], in[3]),
            reinterpret_cast<const T*>(data)};
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

  PatchView pack_input(const WeightTile& t, const Tile& segment, T* patch_data) const {
    const int64_t* const in = input.stride;
    const PatchOrder order =
        transposes_patch(t) ? PatchOrder::kPlanar : patch_order(G, t.channels, in[1], in[3], problem.in_w);
    const Patch patch =
        lay_out_patch(order, make_patch_axis(problem.rows(), segment.row, segment.rows, t.i0, t.tap_rows),
                      make_patch_axis(problem.cols(), segment.col, segment.cols, t.j0, t.tap_cols), segment.images,
                      t.channels, L, sizeof(T));
    Source<S> source = source_from(input_at(t, segment));
    source.group = problem.in_channels_per_group() * in[1];
    source.lanes = t.groups;
    source.of_group = problem.in_channels_per_group();
    source.first = t.c0;
    pack_patch(patch, source, true, patch_data);
    return {patch, patch_data};
  }

  const S* grad_output_at(const Tile& segment, int64_t channel) const {
    const int64_t* const go = grad_output.stride;
    return static_cast<const S*>(grad_output.data) + segment.image * go[0] + channel * go[1] + segment.row * go[2] +
           segment.col * go[3];
  }

  CONV2D_INLINE void multiply(const WeightTile& t, const Tile& segment, const SegmentSource& patch,
                              const Scratch& scratch, bool accumulate, T* c_tile) const {
    const Panels panels = panels_of(t);
    for (int64_t x = 0; x < panels.count; ++x) {
      const int64_t vectors = panels.size(x), start = panels.start(x);
      const S* const source =
          grad_output_at(segment, t.group * problem.out_channels_per_group() + t.m0 + start * kPerVector);
      GemmOperands<T> operands{};
      operands.depth = segment.pixels();
      operands.chain = pixels.chain;
      operands.b = patch.view.data;
      operands.j_offset = scratch.element_offsets;
      operands.k_offset = scratch.pixel_offsets;
      operands.start = scratch.zeros;
      operands.accumulate = accumulate;
      if (is_panel(t, segment, vectors)) {
        operands.a = reinterpret_cast<const T*>(source);
      } else {
        operands.a = scratch.panel;
        pack_grad_output(t, segment, source, start * kPerVector, vectors, scratch.panel);
      }
      operands.a_pitch = operands.c_pitch = vectors * L;
      operands.c = c_tile + t.elements() * start * L;
      operands.half = !G && ends_in_half<T>(min64(vectors * L, t.channels_m - start * L));
      const auto ask_ahead = [&](int64_t rows) { patch.ahead.ask(rows); };
      if constexpr (kListsSteps) {
        if (patch.listed.padding.count > 0 && !operands.half) {
          operands.c_offset = scratch.listed_numbers;
          patch.listed.multiply(vectors, operands, ask_ahead);
          continue;
        }
      }
      gemm_panel<G, T>(t.elements(), vectors, operands, ask_ahead);
    }
  }
  Panels panels_of(const WeightTile& t) const { return cut_panels(div_up(t.channels_m, kPerVector), kPanelVectors<T>); }

  // Whether grad_output itself is the panel: whole vectors of channels_last, pixel after pixel.
  bool is_panel(const WeightTile& t, const Tile& segment, int64_t vectors) const {
    if constexpr (G || !std::is_same_v<S, T> || !kHasTranspose<T>) return false;
    const int64_t width = vectors * L;
    return t.channels_m == width && grad_output.stride[1] == 1 && grad_output.stride[3] == width &&
           pixels_join(segment, grad_output_steps());
  }
  PixelSteps grad_output_steps() const { return {grad_output.stride[0], grad_output.stride[2], grad_output.stride[3]}; }

  // A panel of a segment's pixels: [pixel][lane], from the tile's output channel m on, which lies at `source`.
  CONV2D_INLINE void pack_grad_output(const WeightTile& t, const Tile& segment, const S* source, int64_t m,
                                      int64_t vectors, T* dst) const {
    const int64_t* const go = grad_output.stride;
    const int64_t width = vectors * L, group_channels = problem.out_channels_per_group();
    // Rows that continue one another are one run.
    const int64_t runs = rows_join(segment, grad_output_steps()) ? 1 : segment.rows,
                  run = segment.rows / runs * segment.cols;
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

  int64_t used_size(const WeightTile& t) const { return turns_of(t) * sums_of_group(t); }
  void store(const WeightTile& t, const T* c_tile) const {
    for (int64_t turn = 0; turn < turns_of(t); ++turn) store_group(in_turn(t, turn), c_tile + turn * sums_of_group(t));
  }
  void store_group(const WeightTile& t, const T* c_tile) const {
    const Panels panels = panels_of(t);
    const int64_t* const gw = grad_weight.stride;
    const int64_t group_channels = problem.out_channels_per_group();
    const bool by_tap = gw[1] == 1 && gw[3] != 1 && t.channels > 1;
    const bool together = gw[3] == t.channels && (t.tap_rows == 1 || gw[2] == gw[3] * t.tap_cols);
    const bool side_by_side = !G && by_tap && t.channels < L && together;
    for (int64_t x = 0; x < panels.count; ++x) {
      const int64_t vectors = panels.size(x), width = vectors * L, start = panels.start(x);
      const int64_t m = t.m0 + start * kPerVector;
      const T* const c = c_tile + t.elements() * start * L;
      S* const to = static_cast<S*>(grad_weight.data) + (t.group * group_channels + m) * gw[0] + t.c0 * gw[1] +
                    t.i0 * gw[2] + t.j0 * gw[3];
      const int64_t lanes = G ? t.groups : min64(width, t.m0 + t.channels_m - m);
      for (int64_t v = 0; v < (G ? vectors : 1); ++v) {
        const TileSums<T> sums{c + v * L, width, 0, lanes, nullptr};
        const TileTarget<S> target{to + v * gw[0], 0, (G ? group_channels : 1) * gw[0]};
        if (side_by_side) {
          store_side_by_side(t, sums, target.data);
        } else if (by_tap) {
          store_tap_by_tap(t, sums, target);
        } else {
          store_elements(t.channels, t.tap_rows, t.tap_cols, sums, target);
        }
      }
    }
  }
  // channels_last: a tap's channels lie side by side.
  void store_tap_by_tap(const WeightTile& t, TileSums<T> sums, TileTarget<S> to) const {
    const int64_t* const gw = grad_weight.stride;
    const int64_t taps = t.tap_rows * t.tap_cols, width = sums.pitch;
    S* const first = to.data;
    to.x_step = gw[1];
    sums.pitch = taps * width;
    sums.pixels = t.channels;
    for (int64_t tap = 0; tap < taps; ++tap, sums.data += width) {
      to.data = first + tap / t.tap_cols * gw[2] + tap % t.tap_cols * gw[3];
      store_tile(sums, to, Between::kOthers);
    }
  }
  // Few channels of taps that all lie side by side in the result: a vector of elements at a time, put in order in L1.
  void store_side_by_side(const WeightTile& t, const TileSums<T>& sums, S* to) const {
    alignas(64) T rows[L * kPanelVectors<T> * L];
    const int64_t taps = t.tap_rows * t.tap_cols;
    for (int64_t at = 0, tap = 0, channel = 0, n = 0; at < t.elements(); at += n) {
      for (n = 0; n < min64(L, t.elements() - at); ++n) {
        copy_run(sums.data + (channel * taps + tap) * sums.pitch, 1, sums.pitch, rows + n * sums.pitch, false);
        if (++channel == t.channels) channel = 0, ++tap;
      }
      store_tile(TileSums<T>{rows, sums.pitch, n, sums.channels, nullptr},
                 TileTarget<S>{to + at, 1, grad_weight.stride[0]}, Between::kOthers);
    }
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
