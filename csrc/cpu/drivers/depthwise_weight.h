// The driver of grad_weight for depthwise problems in channels_last: vectors run over neighbouring groups.
//
//   grad_weight[g, i, j] = sum over output pixels of grad_output[g, pixel] * patch[g, pixel, i, j]
//
// A work item (drivers/weight_chunks.h) has a block of groups. It takes a segment in a few of its vectors at a time. A
// chain is a list of runs of pixels (kernels/depthwise_weight.h), which end where a row of the result does or where the
// input lies elsewhere. Most pixels read the input in place. Those some of whose taps lie in the padding have patches;
// so have all pixels of several images in a segment, and where pixels lie in few sets of the caches (read_in_place).
// Patches hold elements as they are stored.
#pragma once

#include "../kernels/depthwise_weight.h"
#include "weight_chunks.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class S, class T>
struct DepthwiseWeightCall : WeightCall {
  static constexpr int L = Vec<T>::kLanes;
  static_assert(sizeof(WeightRun<S>) == kWeightRunBytes);

  DepthwiseWeightCall(const Call& call, int num_threads)
      : WeightCall{call, WeightLanes::kInnerGroups, vector_shape<T>(), num_threads} {}

  // The weights that an item owns.
  struct WeightTile {
    int64_t group, groups, i0, tap_rows, j0, tap_cols;
    int64_t taps() const { return tap_rows * tap_cols; }
    int64_t vectors() const { return div_up(groups, L); }
    // Where a vector of groups begins; what is left over overlaps the last whole one.
    int64_t lane(int64_t vector) const { return min64(vector * L, groups - L); }
  };
  WeightTile tile_of(int64_t item) const {
    WeightTile t{};
    t.j0 = item % tiling.blocks_w * tiling.tap_cols;
    item /= tiling.blocks_w;
    t.i0 = item % tiling.blocks_h * tiling.tap_rows;
    const int64_t block = item / tiling.blocks_h;
    t.group = block * tiling.group_vectors * L;
    t.groups = block + 1 == tiling.group_blocks ? problem.groups - t.group : tiling.group_vectors * L;
    t.tap_rows = min64(tiling.tap_rows, problem.kernel_h - t.i0);
    t.tap_cols = min64(tiling.tap_cols, problem.kernel_w - t.j0);
    return t;
  }
  int64_t used_size(const WeightTile& t) const { return t.vectors() * t.taps() * L; }

  // A rectangle of the result's pixels, and the patch they read.
  struct PackedPixels {
    int64_t row, col, end_col;
    Patch patch;
    const S* data;
  };
  // Segments that lie one below the other in an image, up to segment `end`, and where their pixels read the input:
  // those of the rows and columns given here where it lies, those above, below, left and right of them in patches.
  // Where nothing is read in place all pixels are above.
  struct Block {
    int64_t end;
    Interval rows, cols;
    PackedPixels above, below, left, right;
    const PackedPixels* packed(int64_t row, int64_t col) const {
      return row < rows.begin   ? &above
             : row >= rows.end  ? &below
             : col < cols.begin ? &left
             : col >= cols.end  ? &right
                                : nullptr;
    }
  };

  // c[vector][tap][lane] = the sum over one chunk of pixels.
  void sum_chunk(const WeightTile& t, int64_t chunk, char* memory, T* c_tile) const {
    const Interval segments = segments_of(chunk);
    Block block{};
    block.end = segments.begin;
    for (int64_t number = segments.begin; number < segments.end; ++number) {
      const Tile segment = segment_at(number);
      if (number == block.end) block = make_block(t, number, segments.end, part<S>(memory, layout.patch));
      multiply(t, segment, block, memory, number != segments.begin, c_tile);
    }
  }

  void store(const WeightTile& t, const T* c_tile) const {
    const int64_t* const gw = grad_weight.stride;
    for (int64_t v = 0; v < t.vectors(); ++v) {
      S* const to = static_cast<S*>(grad_weight.data) + (t.group + t.lane(v)) * gw[0] + t.i0 * gw[2] + t.j0 * gw[3];
      const TileSums<T> sums{c_tile + v * t.taps() * L, L, 0, L, nullptr};
      store_elements(1, t.tap_rows, t.tap_cols, sums, TileTarget<S>{to, 0, gw[0]});
    }
  }

 private:
  // A segment: some vectors after the other, so that the rows that their chains share stay in L1.
  CONV2D_INLINE void multiply(const WeightTile& t, const Tile& segment, const Block& block, char* memory,
                              bool accumulate, T* c_tile) const {
    WeightRun<S>* const runs = part<WeightRun<S>>(memory, layout.runs);
    const int64_t chains = cut_into_runs(t, segment, block, runs);
    const int64_t at_once = max64(1, limits::tiling::kVectorsInTurnBytes / int64_t(L * sizeof(T)));
    const int64_t step = depthwise_weight_step(problem.kernel_w, problem.stride_w, problem.dilation_w);
    DepthwiseWeightOperands<S, T> chain{};
    // Of a single column it may be of any length.
    chain.a_pitch = segment.cols > 1 ? grad_output.stride[3] : 0;
    for (int64_t v = 0; v < t.vectors(); v += at_once) {
      const int64_t end = min64(v + at_once, t.vectors());
      chain.runs = runs;
      for (int64_t x = 0; x < chains; ++x, chain.runs += chain.count) {
        chain.count = chain.runs->chain_runs;
        chain.accumulate = accumulate || x > 0;
        for (int64_t u = v; u < end; ++u) {
          chain.lane = t.lane(u);
          chain.c = c_tile + u * t.taps() * L;
          depthwise_weight_panel<S, T>(t.tap_rows, t.tap_cols, step, chain);
        }
      }
    }
  }

  // A segment's pixels in order, and how many chains they make.
  CONV2D_INLINE int64_t cut_into_runs(const WeightTile& t, const Tile& segment, const Block& block,
                                      WeightRun<S>* run) const {
    WeightRun<S>* chain = run;
    int64_t chains = 0, room = 0;
    for (int64_t image = segment.image; image < segment.image + segment.images; ++image) {
      for (int64_t row = segment.row; row < segment.row + segment.rows; ++row) {
        for (int64_t col = segment.col; col < segment.col + segment.cols; col += run->count, ++run) {
          if (room == 0) {
            chain = run;
            chain->chain_runs = 0;
            room = pixels.chain;
            ++chains;
          }
          ++chain->chain_runs;
          const int64_t end = begin_run(t, segment, block, {image, row, col}, *run);
          run->count = min64(end - col, room);
          room -= run->count;
        }
      }
    }
    return chains;
  }

  // Where the pixels from this one on lie, and the first column that lies elsewhere.
  struct Pixel {
    int64_t image, row, col;
  };
  CONV2D_INLINE int64_t begin_run(const WeightTile& t, const Tile& segment, const Block& block, const Pixel& pixel,
                                  WeightRun<S>& run) const {
    const int64_t* const in = input.stride;
    run.a = grad_output_at(t, pixel);
    // Steps that are never taken may be of any length: they are 0.
    if (const PackedPixels* const packed = block.packed(pixel.row, pixel.col)) {
      const Patch& patch = packed->patch;
      run.b = packed->data + patch.tap_offset(0, 0, 0) +
              patch.position_offset(pixel.image - segment.image, pixel.row - packed->row, pixel.col - packed->col);
      run.tap_row = t.tap_rows > 1 ? patch.rows.tap_pitch * patch.row_pitch : 0;
      run.tap_col = t.tap_cols > 1 ? patch.cols.tap_pitch * patch.col_pitch : 0;
      run.position = packed->end_col - pixel.col > 1 ? patch.cols.position_pitch * patch.col_pitch : 0;
      return packed->end_col;
    }
    const S* const first = input_at(t, pixel.image) + problem.rows().source(pixel.row, t.i0) * in[2];
    run.b = first + problem.cols().source(pixel.col, t.j0) * in[3];
    run.tap_row = t.tap_rows > 1 ? in[2] * problem.dilation_h : 0;
    run.tap_col = t.tap_cols > 1 ? in[3] * problem.dilation_w : 0;
    run.position = block.cols.end - pixel.col > 1 ? in[3] * problem.stride_w : 0;
    return block.cols.end;
  }

  const S* input_at(const WeightTile& t, int64_t image) const {
    return static_cast<const S*>(input.data) + image * input.stride[0] + t.group * input.stride[1];
  }
  const S* grad_output_at(const WeightTile& t, const Pixel& pixel) const {
    const int64_t* const go = grad_output.stride;
    return static_cast<const S*>(grad_output.data) + pixel.image * go[0] + t.group * go[1] + pixel.row * go[2] +
           pixel.col * go[3];
  }

  // The block that begins with segment `number`.
  Block make_block(const WeightTile& t, int64_t number, int64_t last, S* memory) const {
    const Tile segment = segment_at(number);
    const int64_t segments = min64(min64(tiling.patch_segments, last - number),
                                   pixels.blocks_h - number / pixels.blocks_w % pixels.blocks_h);
    const int64_t end_row = min64(segment.row + segments * pixels.rows, problem.out_h);
    const int64_t end_col = segment.col + segment.cols;
    Block block{};
    block.end = number + segments;
    block.rows = {end_row, end_row};
    if (segment.images == 1) read_in_place(t, {segment.row, end_row}, {segment.col, end_col}, block);
    const auto pack = [&](const Interval& rows, const Interval& cols, PackedPixels& packed) {
      if (rows.count() > 0 && cols.count() > 0) memory = pack_input(t, segment, rows, cols, memory, packed);
    };
    [[maybe_unused]] const S* const first = memory;
    pack({segment.row, block.rows.begin}, {segment.col, end_col}, block.above);
    pack({block.rows.end, end_row}, {segment.col, end_col}, block.below);
    pack(block.rows, {segment.col, block.cols.begin}, block.left);
    pack(block.rows, {block.cols.end, end_col}, block.right);
    CONV2D_EXT_ASSERT(segment.images > 1 || memory - first <= tiling.patch_elements);
    return block;
  }

  // Reads a block in place if that leaves half of it to be copied, or less.
  void read_in_place(const WeightTile& t, const Interval& rows, const Interval& cols, Block& block) const {
    // Pixels that lie so far apart share few sets of the caches. (Of strides, copying most of what is not used would
    // cost more than that.)
    const int64_t pitch = input.stride[3] * int64_t(sizeof(S));
    if (problem.stride_w == 1 && pitch % limits::tiling::kFewSetsBytes == 0) return;
    const Interval in_rows = inside(problem.rows(), t.i0, t.tap_rows, rows, problem.in_h);
    const Interval in_cols = inside(problem.cols(), t.j0, t.tap_cols, cols, problem.in_w);
    if (in_rows.count() == 0 || in_cols.count() == 0) return;
    const auto copied = [](const GatherAxis& axis, int64_t taps, int64_t first, int64_t end) {
      return first < end ? make_patch_axis(axis, first, end - first, 0, taps).size : 0;
    };
    const GatherAxis h = problem.rows(), w = problem.cols();
    const int64_t all_rows = copied(h, t.tap_rows, rows.begin, rows.end);
    const int64_t all_cols = copied(w, t.tap_cols, cols.begin, cols.end);
    const int64_t edge_cols =
        copied(w, t.tap_cols, cols.begin, in_cols.begin) + copied(w, t.tap_cols, in_cols.end, cols.end);
    const int64_t edge_rows =
        copied(h, t.tap_rows, rows.begin, in_rows.begin) + copied(h, t.tap_rows, in_rows.end, rows.end);
    const int64_t edges = edge_rows * all_cols + copied(h, t.tap_rows, in_rows.begin, in_rows.end) * edge_cols;
    if (2 * edges > all_rows * all_cols) return;
    block.rows = in_rows;
    block.cols = in_cols;
  }

  // Of some positions of the result those all of whose taps lie in the input.
  static Interval inside(GatherAxis axis, int64_t first_tap, int64_t taps, const Interval& positions, int64_t size) {
    axis.origin = axis.source(0, first_tap);
    const Interval all = positions_inside(axis, taps, positions.end, size);
    const int64_t begin = max64(all.begin, positions.begin);
    return {begin, max64(all.end, begin)};
  }

  // Returns where the patch ends, if it is of one image.
  S* pack_input(const WeightTile& t, const Tile& segment, const Interval& rows, const Interval& cols, S* memory,
                PackedPixels& packed) const {
    const Patch patch = lay_out_patch(PatchOrder::kChannelInner,
                                      make_patch_axis(problem.rows(), rows.begin, rows.count(), t.i0, t.tap_rows),
                                      make_patch_axis(problem.cols(), cols.begin, cols.count(), t.j0, t.tap_cols),
                                      segment.images, t.groups, L, sizeof(S));
    packed = {rows.begin, cols.begin, cols.end, patch, memory};
    pack_patch(patch, source_from(input_at(t, segment.image)), false, memory);
    return memory + patch.rows.size * patch.row_pitch;
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
