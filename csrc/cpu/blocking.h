// The canonical order of summation, and along which dimension vectors run.
//
// KBlocking, PixelBlocking and takes_pairs fix the order in which each result element is summed. They read the geometry
// of one image, the weight's shape (PixelBlocking also the batch) and whether the CPU fuses multiply and add
// (ChainLimits), never threads or layout. The choice of a dimension, like the tiles (tiling.h), may read anything: it
// changes no bit.
#pragma once

#include <cstdint>

#include "../checked_arithmetic.h"
#include "../conv2d_problem.h"

namespace conv2d_ext::cpu {

// Products in a segment, the piece of K whose weights are packed at once; taps of one channel, and output pixels of
// grad_weight, that one patch covers.
constexpr int64_t kMaxSegment = 256;

// The longest chains of multiply-adds. A chain is summed from zero, and chains are added in order. Long chains lose
// accuracy (one over K = 2048 had 7 times the error of F.conv2d's); short ones cost the additions of their sums.
struct ChainLimits {
  int64_t products;               // forward, grad_input
  int64_t short_gradient;         // grad_input's sums of up to `products`: F.conv2d, which they must be as accurate
                                  // as, has a chain for each tap there
  int64_t pixels;                 // grad_weight, whose long sums other libraries keep in many short chains
  int64_t segment = kMaxSegment;  // forward, grad_input
};
// Products and sums rounded each by itself make more errors a step than fused ones, so their chains are shorter.
constexpr ChainLimits chain_limits(bool fused) {
  return fused ? ChainLimits{/*products=*/64, /*short_gradient=*/32, /*pixels=*/32}
               : ChainLimits{/*products=*/32, /*short_gradient=*/16, /*pixels=*/16};
}
// Pairs of bfloat16 products: what a chain of float32 sums loses is nothing beside the rounding of the result, so that
// a segment is one chain. Its panel of weights and the patch it reads fit L1 (16 pairs of channels of a 3x3 kernel).
constexpr ChainLimits kPairLimits{/*products=*/144, /*short_gradient=*/144, /*pixels=*/0, /*segment=*/144};

// Segments in a chunk. A chunk is summed from zero, and its sum added to those of the chunks before it, with what that
// addition loses kept beside the total (add_chunk, epilogue.h): one after the other, the chains of a long sum whose
// products have a mean would lose a bit with every fourfold length.
constexpr int64_t kSegmentsPerChunk = 16;
constexpr int64_t kPixelSegmentsPerChunk = 8;  // grad_weight, whose chains are half as long

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
  bool is_gradient;  // a GEMM of grad_input
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

  // The columns between two neighbours of the result belong to the same call, and nobody else touches them while one of
  // this GEMM's items runs: it is a phase of a stride of 2 along the row, and the phases of the other columns are
  // computed before or after it, or (phases_driver.h) by the same item. A store may read and write them back.
  bool owns_columns_between = false;

  // Where products are taken in pairs (in_pairs), `channels` counts pairs of neighbouring channels, and source_c and
  // weight_c lead from pair to pair, half of them from a pair's first channel to its second. The last pair may lack it.
  bool pairs = false, lone = false;

  int64_t single_channels() const { return pairs ? 2 * channels - (lone ? 1 : 0) : channels; }
  int64_t source_g() const { return single_channels() * (pairs ? source_c / 2 : source_c); }
  int64_t taps() const { return taps_h * taps_w; }
  int64_t result_taps() const { return result_taps_h * result_taps_w; }
};

// What an instruction set's vectors of a type are.
struct VectorShape {
  int64_t lanes;         // result channels in a vector
  int64_t max_vectors;   // vectors in the widest panel
  int64_t element_size;  // bytes of the compute type
  bool interleaves;      // has interleave.h's stores
  ChainLimits limits;
};

// Whether a bfloat16 problem goes to the kernels that take products in pairs, on a CPU that has them. The order of
// summation follows from it, so it may read no more than KBlocking may. `vector`: of the kernels that do not.
bool takes_pairs(const ConvGemm& gemm, const VectorShape& vector);
ConvGemm in_pairs(const ConvGemm& gemm);

// The canonical cut of K = (c, i, j), c slowest, in products or pairs of them. Up to 256 taps: segments of whole
// channels. More: each channel's taps are cut into rectangles, one segment each. A segment is summed in chains of
// `chain` products; chains are added in order within a chunk of kSegmentsPerChunk segments, chunk sums in order.
struct KBlocking {
  int64_t segment_channels;    // channels in a full segment
  int64_t tap_rows, tap_cols;  // taps in a full segment's rectangle
  int64_t blocks_c, blocks_h, blocks_w;
  int64_t chain;
  int64_t max_depth() const { return segment_channels * tap_rows * tap_cols; }
  int64_t segments() const { return blocks_c * blocks_h * blocks_w; }
  bool has_chunks() const { return segments() > kSegmentsPerChunk; }
  // The number of the segment that begins at channel c and tap (i, j).
  int64_t segment_at(int64_t c, int64_t i, int64_t j) const {
    return (c / segment_channels * blocks_h + i / tap_rows) * blocks_w + j / tap_cols;
  }
};
KBlocking block_k(const ConvGemm& gemm, const ChainLimits& limits);

// A kernel of more than `limit` taps, cut into near-equal rectangles of at most as many: whole rows if they fit.
void cut_taps(int64_t taps_h, int64_t taps_w, int64_t limit, int64_t& rows, int64_t& cols);

// The canonical cut of the output pixels that grad_weight sums over: segments are rectangles of at most 256 pixels
// (images of up to 128 pixels several together), taken in chains of `chain` pixels. Chains are added in order within a
// chunk of segments, chunk sums in order.
struct PixelBlocking {
  int64_t images, rows, cols;  // in a full segment
  int64_t chain;
  int64_t blocks_n, blocks_h, blocks_w;
  int64_t segments() const { return blocks_n * blocks_h * blocks_w; }
  int64_t chunks() const { return (segments() + kPixelSegmentsPerChunk - 1) / kPixelSegmentsPerChunk; }
};
PixelBlocking block_pixels(int64_t batch, int64_t out_h, int64_t out_w, const ChainLimits& limits);

// One axis of a source patch: how (position, tap) pairs of a tile map to patch coordinates,
//   coordinate = position * position_pitch + tap * tap_pitch + shift,
// and which source coordinates the patch holds: `runs` runs of run_length coordinates; run r starts at source
// coordinate first + r * run_shift and advances by run_step. Where the taps of neighbouring positions overlap the
// patch is one dense run; where dilation or stride would leave holes it is expanded, a run for each tap. A size that
// doesn't fit 64 bits is the largest that does.
struct PatchAxis {
  int64_t size, position_pitch, tap_pitch, shift;
  int64_t runs, run_length, run_step, run_shift, first;
};
PatchAxis make_patch_axis(const GatherAxis& gather, int64_t position0, int64_t positions, int64_t tap0, int64_t taps);

// The same problem with its rows joined into one, where a 1x1 kernel meets all pixels of planes without gaps.
ConvGemm join_rows_of_planes(const ConvGemm& gemm);

// Whether the one row there is (join_rows_of_planes) is all of a plane, pixel beside pixel, of a 1x1 kernel.
bool reads_whole_planes(const ConvGemm& gemm);

// Whether vectors should run over neighbouring pixels instead of over a group's result channels.
bool vectors_are_pixels(const ConvGemm& gemm, const VectorShape& vector);

// Whether vectors should run over groups instead of over one group's result channels (m of them, from `channels`).
bool lanes_are_groups(int64_t groups, int64_t m, int64_t channels, const VectorShape& vector);
inline bool lanes_are_groups(const ConvGemm& gemm, const VectorShape& vector) {
  return gemm.result_taps() == 1 && lanes_are_groups(gemm.groups, gemm.m, gemm.channels, vector);
}

inline int64_t div_up(int64_t a, int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }  // of 0 <= a, 0 < b
inline int64_t round_up(int64_t a, int64_t b) { return saturating_mul(div_up(a, b), b); }
inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
// `whole` cut into near-equal pieces of at most about `target`: the size of a piece.
inline int64_t even_piece(int64_t whole, int64_t target) {
  return whole <= 1 ? 1 : div_up(whole, div_up(whole, max64(target, 1)));
}
// Planes of a patch: an odd number of cache lines, so that equal positions of successive planes fall into different
// cache sets; small planes stay as they are.
inline int64_t odd_lines(int64_t elements, int64_t element_size) {
  if (elements < 1024 / element_size) return elements;
  const int64_t line = 64 / element_size;
  const int64_t lines = div_up(elements, line);
  return saturating_mul(lines | 1, line);
}
// The same for pixels whose channels lie together: a segment reads a few lines of each.
inline int64_t odd_lines_of_channels(int64_t channels, int64_t element_size) {
  if (channels < 512 / element_size) return channels;
  const int64_t line = 64 / element_size;
  return saturating_mul(div_up(channels, line) | 1, line);
}

}  // namespace conv2d_ext::cpu
