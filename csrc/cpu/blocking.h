// How a problem is cut: the canonical order of summation, and the tiles.
//
// Two kinds of decisions live here, and they must not be mixed up:
//  * KBlocking and PixelBlocking fix the order in which each result element is summed. They read the geometry of
//    one image, the weight's shape (PixelBlocking also the batch) and whether the CPU fuses multiply and add
//    (ChainLimits), never threads or layout.
//  * Tiling chooses tiles and work items. It may read anything, since no tile border changes a bit.
#pragma once

#include <cstdint>

#include "../conv2d_problem.h"

namespace conv2d_ext::cpu {

// Products in a segment, the piece of K whose weights are packed at once; taps of one channel, and output pixels of
// grad_weight, that one patch covers.
constexpr int64_t kMaxSegment = 256;

// The longest chains of multiply-adds. A chain is summed from zero, and chains are added in order. Long chains lose
// accuracy (one over K = 2048 had 7 times the error of F.conv2d's); short ones cost the additions of their sums.
struct ChainLimits {
  int64_t products;               // forward, grad_input
  int64_t pixels;                 // grad_weight, whose long sums other libraries keep in many short chains
  int64_t segment = kMaxSegment;  // forward, grad_input
};
// Products and sums rounded each by itself make more errors a step than fused ones, so their chains are shorter.
constexpr ChainLimits chain_limits(bool fused) { return fused ? ChainLimits{64, 32} : ChainLimits{32, 16}; }
// Pairs of bfloat16 products: what a chain of float32 sums loses is nothing beside the rounding of the result, so that
// a segment is one chain. Its panel of weights and the patch it reads fit L1 (16 pairs of channels of a 3x3 kernel).
constexpr ChainLimits kPairLimits{144, 0, 144};

// Up to this many products the one chain there is starts from the bias, which saves a rounding. A longer sum is formed
// first and the bias added last, so that a large bias can't swallow the low bits of every product.
constexpr int64_t kBiasFirstProducts = 8;

// A convolution as the GEMM driver sees it; forward and each stride phase of grad_input are of this form:
//
//   destination[n, g, m, p, q] = bias[g, m] + sum over (c, i, j) of
//       weight[g, m, c, i, j] * source[n, g, c, axis_h.source(p, i), axis_w.source(q, j)]
//
// with zero for source coordinates outside [0, source_h) x [0, source_w). An axis' tap may be negative.
struct ConvGemm {
  int64_t batch, groups;
  int64_t m;         // result channels per group
  int64_t channels;  // reduced channels per group
  int64_t taps_h, taps_w;
  int64_t rows, cols;  // result positions
  int64_t source_h, source_w;
  GatherAxis axis_h, axis_w;

  const void* source;
  int64_t source_n, source_c, source_row, source_col;  // strides, elements; a group is `channels` further
  const void* weight;
  int64_t weight_g, weight_m, weight_c, weight_i, weight_j;
  bool conj_weight;
  const void* bias;  // or nullptr
  int64_t bias_stride;
  void* destination;
  int64_t destination_n, destination_m, destination_row, destination_col;

  // The input gradient where no two taps meet at an input position (a stride no less than the kernel): one GEMM with a
  // result channel for every (channel, tap), m = channels * result_taps(). Channel (c, i, j) of position (p, q) is
  //   destination[n, g, c, place_h.source(p, i), place_w.source(q, j)],
  // and is dropped where that lies outside destination_h x destination_w. weight_m and destination_m belong to c.
  int64_t result_taps_h = 1, result_taps_w = 1;
  int64_t weight_result_i = 0, weight_result_j = 0;
  GatherAxis place_h{}, place_w{};
  int64_t destination_h = 0, destination_w = 0;

  // Where products are taken in pairs (in_pairs), `channels` counts pairs of neighbouring channels, and source_c and
  // weight_c lead from pair to pair, half of them from a pair's first channel to its second. The last pair may lack it.
  bool pairs = false, lone = false;

  int64_t single_channels() const { return pairs ? 2 * channels - (lone ? 1 : 0) : channels; }
  int64_t source_g() const { return single_channels() * (pairs ? source_c / 2 : source_c); }
  int64_t taps() const { return taps_h * taps_w; }
  int64_t result_taps() const { return result_taps_h * result_taps_w; }
};

// Whether a bfloat16 problem goes to the kernels that take products in pairs, on a CPU that has them. The order of
// summation follows from it, so it may read no more than KBlocking may. `vector`: of the kernels that do not.
struct VectorShape;
bool takes_pairs(const ConvGemm& gemm, const VectorShape& vector);
ConvGemm in_pairs(const ConvGemm& gemm);

// The canonical cut of K = (c, i, j), c slowest, in products or pairs of them. Up to 256 taps: segments of whole
// channels. More: each channel's taps are cut into rectangles, one segment each. A segment is summed in chains of
// `chain` products.
struct KBlocking {
  int64_t segment_channels;    // channels in a full segment
  int64_t tap_rows, tap_cols;  // taps in a full segment's rectangle
  int64_t blocks_c, blocks_h, blocks_w;
  int64_t chain;
  int64_t max_depth() const { return segment_channels * tap_rows * tap_cols; }
};
KBlocking block_k(int64_t channels, int64_t taps_h, int64_t taps_w, const ChainLimits& limits);

// The canonical cut of the output pixels that grad_weight sums over: segments are rectangles of at most 256 pixels
// (images of up to 128 pixels several together), taken in chains of `chain` pixels. Chains are added in order within a
// chunk of segments, chunk sums in order.
struct PixelBlocking {
  int64_t images, rows, cols;  // in a full segment
  int64_t chain;
  int64_t blocks_n, blocks_h, blocks_w;
  int64_t segments() const { return blocks_n * blocks_h * blocks_w; }
  int64_t chunks() const { return (segments() + kSegmentsPerChunk - 1) / kSegmentsPerChunk; }
  static constexpr int64_t kSegmentsPerChunk = 16;
};
PixelBlocking block_pixels(int64_t batch, int64_t out_h, int64_t out_w, const ChainLimits& limits);

// One axis of a source patch: how (position, tap) pairs of a tile map to patch coordinates,
//   coordinate = position * position_pitch + tap * tap_pitch + shift,
// and which source coordinates the patch holds: `runs` runs of run_length coordinates; run r starts at source
// coordinate first + r * run_shift and advances by run_step. Where the taps of neighbouring positions overlap the
// patch is one dense run; where dilation or stride would leave holes it is expanded, a run for each tap.
struct PatchAxis {
  int64_t size, position_pitch, tap_pitch, shift;
  int64_t runs, run_length, run_step, run_shift, first;
};
PatchAxis make_patch_axis(const GatherAxis& gather, int64_t position0, int64_t positions, int64_t tap0, int64_t taps);

// Tiles of the driver for ConvGemm.
struct ConvTiling {
  int64_t tile_images, tile_rows, tile_cols;  // pixels of a tile
  int64_t tiles_n, tiles_h, tiles_w;
  int64_t block_channels;           // channels whose patch lies in scratch together (whole segments)
  int64_t chunk_vectors, chunks_m;  // result channels of a work item, in vectors
  int64_t patch_elements;           // scratch for the patch
  bool one_block;                   // the whole of K passes in one block of channels, and panels are stored one by one
  bool interleaved;                 // lanes are groups, and all result channels of them are stored together
  int64_t pixels() const { return tile_images * tile_rows * tile_cols; }
  int64_t tiles() const { return tiles_n * tiles_h * tiles_w; }
};
struct VectorShape {
  int64_t lanes;         // result channels in a vector
  int64_t max_vectors;   // vectors in the widest panel
  int64_t element_size;  // bytes of the compute type
  bool interleaves;      // has interleave.h's stores
  ChainLimits limits;
};
ConvTiling tile_conv(const ConvGemm& gemm, const KBlocking& k, const VectorShape& vector, bool lanes_are_groups,
                     int num_threads);

// The same problem with its rows joined into one, where a 1x1 kernel meets all pixels of planes without gaps.
ConvGemm join_rows_of_planes(const ConvGemm& gemm);

// Whether vectors should run over neighbouring pixels instead of over a group's result channels.
bool vectors_are_pixels(const ConvGemm& gemm, const VectorShape& vector);

// Vectors of the widest panel of its micro-kernels, and the most rows of any of them.
constexpr int64_t kMaxPanelVectors = 4, kMaxPixelRows = 6;

// Rows (result channels) of its micro-kernels. With 16 registers 4 x 3 accumulators: 7 loads for 12 multiply-adds,
// where 6 x 2 take 8, and a weight serves half as many pixels more. On Zen 3 that is 3 to 5 %.
constexpr int64_t pixel_rows(const VectorShape& vector) {
  return vector.max_vectors >= kMaxPanelVectors ? kMaxPixelRows : 4;
}

// Vectors of the widest panel for blocks of up to `rows` result channels: few rows take more, to have eight
// accumulators.
constexpr int64_t pixel_panel_vectors(int64_t rows, const VectorShape& vector) {
  return vector.max_vectors >= kMaxPanelVectors || rows <= 2 ? kMaxPanelVectors : 3;
}

// Tiles of the driver with vectors over pixels: of one image each.
struct PixelTiling {
  int64_t tile_rows, tile_cols;
  int64_t batch, tiles_h, tiles_w;
  int64_t block_channels;
  int64_t chunk_m, chunks_m;  // result channels of a work item
  int64_t patch_elements, c_elements;
  bool join_rows;        // the tile's rows continue one another in the patch
  bool source_in_place;  // full panels are read from the source tensor
  bool weight_in_place;  // weights are read from the weight tensor
  bool direct;           // full panels are summed in the result tensor
  int64_t tiles() const { return batch * tiles_h * tiles_w; }
};
PixelTiling tile_pixel_conv(const ConvGemm& gemm, const KBlocking& k, const VectorShape& vector, int64_t storage_size,
                            int num_threads);

// Whether vectors should run over groups instead of over one group's result channels (m of them, from `channels`).
bool lanes_are_groups(int64_t groups, int64_t m, int64_t channels, const VectorShape& vector);
inline bool lanes_are_groups(const ConvGemm& gemm, const VectorShape& vector) {
  return gemm.result_taps() == 1 && lanes_are_groups(gemm.groups, gemm.m, gemm.channels, vector);
}

// Tiles of the driver for grad_weight: a work item owns chunk_vectors vectors of output channels times a block of
// input channels (or, for kernels of many taps, a rectangle of one channel's taps).
struct WeightTiling {
  int64_t chunk_vectors, chunks_m;
  int64_t block_channels, tap_rows, tap_cols;
  int64_t blocks_c, blocks_h, blocks_w;
  int64_t patch_elements;
  // Where lanes are groups: vectors of groups in an item (the last item's last one may take fewer groups), and items.
  int64_t group_vectors, group_blocks;
  int64_t patch_segments;  // segments, rows of one image below one another, that a patch serves: they share its rows
  int64_t slots;  // chunks of pixels summed in parallel, each into a partial of its own; 1: one after the other
  int64_t max_elements() const { return block_channels * tap_rows * tap_cols; }
  int64_t tiles() const { return chunks_m * blocks_c * blocks_h * blocks_w; }
  int64_t tile_size(int64_t lanes) const {
    return chunk_vectors * lanes * max_elements() * (group_vectors > 0 ? group_vectors + 1 : 1);
  }
};
enum class WeightLanes { kChannels, kGroups, kInnerGroups };  // the last: is_depthwise_inner of depthwise.h
WeightTiling tile_grad_weight(const Conv2dProblem& problem, const PixelBlocking& pixels, const VectorShape& vector,
                              WeightLanes lanes, int num_threads);

// How many vectors each panel of a chunk takes: near-equal, at most max_vectors.
struct Panels {
  int64_t count, vectors, larger;  // the first `larger` panels take one vector more
  int64_t size(int64_t panel) const { return vectors + (panel < larger ? 1 : 0); }
  int64_t start(int64_t panel) const { return panel * vectors + (panel < larger ? panel : larger); }
};
Panels cut_panels(int64_t vectors, int64_t max_vectors);

// A thread's scratch: offsets in bytes, each part on a cache line of its own.
struct ConvScratch {
  int64_t position_offsets, tap_offsets, zeros, bias, panel, c_tile, patch, bytes;
};
ConvScratch lay_out_scratch(const ConvTiling& tiling, const KBlocking& k, const VectorShape& vector);
struct PixelScratch {
  int64_t tap_offsets, channel_offsets, zeros, bias, weight, c, patch, bytes;
};
PixelScratch lay_out_scratch(const PixelTiling& tiling, const KBlocking& k, const VectorShape& vector);
struct WeightScratch {
  int64_t element_offsets, pixel_offsets, zeros, panel, patch, tile, total, bytes;
};
WeightScratch lay_out_scratch(const WeightTiling& tiling, const PixelBlocking& pixels, const VectorShape& vector);

inline int64_t div_up(int64_t a, int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }  // of 0 <= a, 0 < b
inline int64_t round_up(int64_t a, int64_t b) { return div_up(a, b) * b; }
inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
// `whole` cut into near-equal pieces of at most about `target`: the size of a piece.
inline int64_t even_piece(int64_t whole, int64_t target) {
  return whole <= 1 ? 1 : div_up(whole, div_up(whole, max64(target, 1)));
}
// Planes of a patch: an odd number of cache lines, so that equal positions of successive planes fall into different
// cache sets; small planes stay as they are.
inline int64_t odd_lines(int64_t elements, int64_t element_size) {
  if (elements * element_size < 1024) return elements;
  const int64_t line = 64 / element_size;
  const int64_t lines = div_up(elements, line);
  return (lines | 1) * line;
}
// The same for pixels whose channels lie together: a segment reads a few lines of each.
inline int64_t odd_lines_of_channels(int64_t channels, int64_t element_size) {
  if (channels * element_size < 512) return channels;
  const int64_t line = 64 / element_size;
  return (div_up(channels, line) | 1) * line;
}

}  // namespace conv2d_ext::cpu
