// A direction as GEMMs: forward, the phases of grad_input, bands without taps that lie in the padding.
#pragma once

#include <cstdint>

#include "../../conv2d_problem.h"
#include "../../tensor_view.h"
#include "summation_order.h"

namespace conv2d_ext::cpu {

// A convolution as the GEMM drivers see it; forward and each stride phase of grad_input are of this form:
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
  // computed before or after it, or (drivers/phases.h) by the same item. A store may read and write them back.
  bool owns_columns_between = false;

  // Where products are taken in pairs (in_pairs), `channels` counts pairs of neighbouring channels, and source_c and
  // weight_c lead from pair to pair, half of them from a pair's first channel to its second. The last pair may lack it.
  bool pairs = false, lone = false;

  int64_t single_channels() const { return pairs ? 2 * channels - (lone ? 1 : 0) : channels; }
  int64_t source_g() const { return single_channels() * (pairs ? source_c / 2 : source_c); }
  int64_t taps() const { return taps_h * taps_w; }
  int64_t result_taps() const { return result_taps_h * result_taps_w; }
  ImageGemm geometry() const { return {groups, m, channels, taps_h, taps_w, rows, cols, result_taps(), is_gradient}; }
};

inline bool lanes_are_groups(const ConvGemm& gemm, const VectorShape& vector) {
  return gemm.result_taps() == 1 && lanes_are_groups(gemm.groups, gemm.m, gemm.channels, vector);
}

// The GEMM as the kernels take it whose products are pairs of bfloat16 (takes_pairs).
ConvGemm in_pairs(const ConvGemm& gemm);

// The same problem with its rows joined into one, where a 1x1 kernel meets all pixels of planes without gaps.
ConvGemm join_rows_of_planes(const ConvGemm& gemm);

// Whether the one row there is (join_rows_of_planes) is all of a plane, pixel beside pixel, of a 1x1 kernel.
bool reads_whole_planes(const ConvGemm& gemm);

// A dimension of two tensors that are walked together: its size and its strides in either.
struct SharedDimension {
  int64_t size, stride_a, stride_b;
};
// Joins dimensions that continue one another in both tensors. What is left: `count` of them (at least one), the largest
// first; beyond them dimensions of size 1.
struct SharedDimensions {
  SharedDimension dimension[3];
  int count;
};
SharedDimensions join_dimensions(SharedDimension c, SharedDimension i, SharedDimension j);

// The taps of an axis that meet the input when there is one output coordinate: [first, first + count).
struct MetTaps {
  int64_t first, count;
};
MetTaps met_taps(const GatherAxis& axis, int64_t kernel, int64_t size);

ConvGemm forward_gemm(const Conv2dProblem& problem, ConstTensorView input, ConstTensorView weight, const void* bias,
                      int64_t bias_stride, TensorView output);

// The strides of a tensor, without the huge ones of dimensions that have no second element.
void drop_unused_strides(int64_t (&stride)[4], int64_t n, int64_t c, int64_t h, int64_t w);

// Where a GEMM's operands begin in its tensors, in elements.
struct GemmOffsets {
  int64_t source, weight, destination;
};

// Calls call(context, gemm, offsets).
struct GemmVisitor {
  void* context;
  void (*call)(void* context, ConvGemm& gemm, const GemmOffsets& offsets);
  void operator()(ConvGemm& gemm, const GemmOffsets& offsets) const { call(context, gemm, offsets); }
};

// The forward in bands of output pixels that meet the same taps, from the GEMM of all. Taps that lie in the padding are
// left out; padding_products.h sets the NaNs that they would make.
void visit_forward_gemms(const Conv2dProblem& problem, const ConvGemm& whole, const GemmVisitor& visit);

// Whether bands pay: where taps lie in the padding at many positions, as with large dilations.
bool forward_cuts_bands(const Conv2dProblem& problem);

// The GEMMs of grad_input, without their tensors' addresses; grad_output, weight and grad_input are strides. They are:
// one for each phase of the stride that a tap meets; a single one where every phase has a single tap (ConvGemm,
// result_taps), or there is one output pixel. Where no product belongs to an input position, a zero does: one GEMM
// without products writes zeros, before the others.
void visit_grad_input_gemms(const Conv2dProblem& problem, const int64_t* grad_output, const int64_t* weight,
                            const int64_t* grad_input, const GemmVisitor& visit);

// Whether taps that meet no output at many positions are left out of a phase's sums there.
bool grad_input_cuts_bands(const Conv2dProblem& problem);

template <class Visit>
GemmVisitor gemm_visitor(Visit& visit) {
  return {&visit, [](void* context, ConvGemm& gemm, const GemmOffsets& offsets) {
            (*static_cast<Visit*>(context))(gemm, offsets);
          }};
}
template <class Visit>
void for_each_forward_gemm(const Conv2dProblem& problem, const ConvGemm& whole, Visit visit) {
  visit_forward_gemms(problem, whole, gemm_visitor(visit));
}
template <class Visit>
void for_each_grad_input_gemm(const Conv2dProblem& problem, const int64_t* grad_output, const int64_t* weight,
                              const int64_t* grad_input, Visit visit) {
  visit_grad_input_gemms(problem, grad_output, weight, grad_input, gemm_visitor(visit));
}

}  // namespace conv2d_ext::cpu
