// A direction as GEMMs: forward, the phases of grad_input, bands without taps that lie in the padding.
#pragma once

#include <cstdint>

#include "../base/numeric.h"
#include "../base/visitor.h"
#include "call.h"
#include "summation_order.h"

namespace conv2d_ext::cpu {

// A convolution as the GEMM drivers see it; forward and each stride phase of grad_input are of this form:
//
//   destination[n, g, m, p, q] = bias[g, m] + sum over (c, i, j) of
//       weight[g, m, c, i, j] * source[n, g, c, axis_h.source(p, i), axis_w.source(q, j)]
//
// with zero for source coordinates outside [0, source_h) x [0, source_w). An axis' tap may be negative.
struct ConvGemm : ImageGemm {
  int64_t batch;
  int64_t source_h, source_w;
  GatherAxis axis_h, axis_w;

  const void* source;
  int64_t source_n, source_c, source_row, source_col;  // strides, elements; a group is `channels` further
  const void* weight;
  int64_t weight_g, weight_m, weight_c, weight_i, weight_j;
  const void* bias;  // or nullptr
  int64_t bias_stride;
  void* destination;
  int64_t destination_n, destination_m, destination_row, destination_col;

  // The input gradient where no two taps meet at an input position (a stride no less than the kernel): one GEMM with a
  // result channel for every (channel, tap), m = channels * result_taps(). Channel (c, i, j) of position (p, q) is
  //   destination[n, g, c, place_h.source(p, i), place_w.source(q, j)],
  // and is dropped where that lies outside destination_h x destination_w. weight_m and destination_m belong to c.
  int64_t weight_result_i = 0, weight_result_j = 0;
  GatherAxis place_h{}, place_w{};
  int64_t destination_h = 0, destination_w = 0;

  // The columns between two neighbours of the result belong to the same call, and nobody else touches them while one of
  // this GEMM's items runs: it is a phase of a stride of 2 along the row, and the phases of the other columns are
  // computed before or after it, or (drivers/phases.h) by the same item. A store may read and write them back.
  bool owns_columns_between = false;

  // Where a step of a sum takes the products of several neighbouring channels (in_steps: pairs, or blocks for AMX),
  // `channels` counts steps, and source_c and weight_c lead from step to step. The last one lacks `missing` channels.
  int64_t per_step = 1, missing = 0;
  // Where such a step of one block takes several neighbouring columns of the kernel instead (columns_per_step), taps_w,
  // axis_w and weight_j lead from step to step. The last one of a row lacks so many columns.
  int64_t columns = 1, missing_columns = 0;

  // Whether narrow groups lie side by side: many share a page, or a line.
  bool groups_are_neighbours(int64_t element_size) const {
    return source_c == per_step && destination_m == 1 && groups_are_narrow(groups, single_channels(), m, element_size);
  }

  int64_t single_channels() const { return per_step * channels - missing; }
  int64_t kernel_columns() const { return taps_w * columns - missing_columns; }
  int64_t source_g() const { return single_channels() * (source_c / per_step); }
  // A sum of few steps starts from the bias; a longer one starts from zero and has it added last. (AMX tiles start from
  // zero.)
  bool starts_from_bias() const { return channels * taps() <= kBiasFirstProducts && per_step != kBlockChannels; }
};

// The axes of a GEMM's source as its positions and taps gather them.
inline GatheredAxis gathered_rows(const ConvGemm& gemm) { return {gemm.axis_h, gemm.taps_h, gemm.rows, gemm.source_h}; }
inline GatheredAxis gathered_cols(const ConvGemm& gemm) { return {gemm.axis_w, gemm.taps_w, gemm.cols, gemm.source_w}; }

// The GEMM as kernels take it whose step of a sum is so many neighbouring channels (takes_pairs), or a row of an AMX
// tile (takes_amx).
ConvGemm in_steps(const ConvGemm& gemm, int64_t channels);
ConvGemm in_blocks(const ConvGemm& gemm);

// Groups of so many channels, side by side, are reordered in registers (pack/interleave.h). Such powers of two are cut
// into panels of one width.
constexpr int64_t kMaxInterleaved = 16;
inline bool can_interleave(int64_t channels) {
  return channels == 2 || channels == 4 || channels == 8 || channels == kMaxInterleaved;
}

// The same problem with its rows joined into one, where a 1x1 kernel meets all pixels of planes without gaps.
ConvGemm join_rows_of_planes(const ConvGemm& gemm);

// Whether no tap of any position lies in the padding.
bool meets_no_padding(const ConvGemm& gemm);

// Whether the source itself is a patch: of one tap, without padding, channels together and in whole steps.
bool source_is_patch(const ConvGemm& gemm);

// Whether the one row there is (join_rows_of_planes) is all of a plane, pixel beside pixel, of a 1x1 kernel.
bool reads_whole_planes(const ConvGemm& gemm);

// The GEMM of one channel without taps that meet the padding at all its pixels, as on maps smaller than the kernel,
// where that pays: as long as weights are finite and no bias is -0, products with zeros change no chain that remains
// one. Else the GEMM itself.
ConvGemm without_unmet_taps(const ConvGemm& gemm, DType dtype, const ChainLimits& limits);
// The same of rows of taps that lie in the padding at some rows of pixels: whether a micro-kernel may leave them out
// there, and that pays.
bool may_leave_out_rows(const ConvGemm& gemm, const ChainLimits& limits);

// A dimension of two tensors that are walked together: its size and its strides in either.
struct SharedDimension {
  int64_t size = 1, stride_a = 1, stride_b = 1;
};
// Joins dimensions that continue one another in both tensors. What is left: `count` of them (at least one), the largest
// first; beyond them dimensions of size 1.
struct SharedDimensions {
  SharedDimension dimension[3];
  int count;
};
SharedDimensions join_dimensions(SharedDimension c, SharedDimension i, SharedDimension j);

using GemmVisitor = Visitor<ConvGemm>;

// The forward as one GEMM.
ConvGemm forward_gemm(const Call& call);

// Visits a GEMM, or, where taps lie in the padding at many positions, as with large dilations, one for each band of
// positions that meet the same taps. Bands leave out the taps that lie in the padding; then this returns true, and
// after a forward padding_products.h sets the NaNs that those would make.
bool for_each_band(const ConvGemm& whole, DType dtype, const GemmVisitor& visit);

// The GEMMs of grad_input: one for each phase of the stride that a tap meets, or for each band of it; a single one
// where every phase has a single tap (ConvGemm, result_taps). Of one output pixel: one for all taps that lie in weight
// and result as channels do. Where no product belongs to an input position, a zero does: one GEMM without products
// writes zeros, before the others.
void for_each_grad_input_gemm(const Call& call, const GemmVisitor& visit);

// One axis of grad_input. The phases that taps meet are those of its first taps.
struct PhasedAxis {
  int64_t in, out, kernel, stride, pad, dilation;

  int64_t first_taps() const { return min64(grad_input_tap_step(stride, dilation), kernel); }
  GradInputPhase phase(int64_t first_tap) const {
    return grad_input_phase(first_tap, in, kernel, stride, pad, dilation);
  }
  // Whether taps meet every phase that has positions.
  bool meets_all() const {
    int64_t met = 0;
    for (int64_t tap = 0; tap < first_taps(); ++tap) met += phase(tap).positions > 0;
    return met >= min64(stride, in);
  }
  GatheredAxis gathered(const GradInputPhase& phase) const { return {phase.axis, phase.taps, phase.positions, out}; }
};
inline PhasedAxis phased_rows(const Conv2dProblem& p) {
  return {p.in_h, p.out_h, p.kernel_h, p.stride_h, p.pad_top, p.dilation_h};
}
inline PhasedAxis phased_cols(const Conv2dProblem& p) {
  return {p.in_w, p.out_w, p.kernel_w, p.stride_w, p.pad_left, p.dilation_w};
}

// Of one output pixel and a weight whose rows are runs: one GEMM with a result channel for each element of a row:
// patches. Where their elements go, it doesn't say: its destination strides within an image mean nothing.
ConvGemm patch_gemm(const Call& call);

// Whether taps that meet no output at many positions are left out of a phase's sums there.
bool grad_input_cuts_bands(const Conv2dProblem& problem);

// Whether vectors should run over groups instead of over one group's result channels (m of them, from `channels`). This
// changes no bit.
bool lanes_are_groups(int64_t groups, int64_t m, int64_t channels, const VectorShape& vector);
// Not so where channels of one group fill vectors of 64 bytes as well. In planes that is as fast, and faster if groups
// leave lanes empty. Where groups lie side by side, vectors over them are faster for several taps, if they leave few
// lanes empty and are transposed in registers.
bool fills_wide_vectors(int64_t groups, int64_t m, int64_t taps, bool side_by_side, const VectorShape& vector);
// Whether vectors over groups have work for all threads: an item for each, of enough pixels to pay for its weights.
bool occupies(int num_threads, int64_t groups, int64_t pixels, const VectorShape& vector);

}  // namespace conv2d_ext::cpu
