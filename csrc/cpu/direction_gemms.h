// Forward and grad_input as ConvGemms: what runs, and what explain tells about.
#pragma once

#include "blocking.h"
#include "conv2d_cpu.h"

namespace conv2d_ext::cpu {

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
// left out; what they would change is padding_products.h's affair.
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
