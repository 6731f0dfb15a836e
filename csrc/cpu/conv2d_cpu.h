// The CPU engines' interface: raw pointers, strides and a Conv2dProblem; no torch header.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../export.h"
#include "../conv2d_problem.h"
#include "../tensor_view.h"
#include "base/executor.h"

namespace conv2d_ext::cpu {

// out_channels elements, `stride` apart. No data: no bias.
struct Bias {
  const void* data;
  int64_t stride;
};

// How a call computes.
struct Arithmetic {
  Arithmetic(DType type, bool winograd = false)  // NOLINT(google-explicit-constructor): a dtype's usual one
      : dtype(type), allow_winograd(winograd) {}
  DType dtype;
  bool allow_winograd;  // Winograd's F(2 x 2, 3 x 3) where it applies: other bits, and another error
};

// Every function writes all elements of its result, and nothing else. Results must not overlap inputs.
void forward(const Conv2dProblem& problem, Arithmetic arithmetic, ConstTensorView input, ConstTensorView weight,
             Bias bias, TensorView output, const Executor& executor);

// grad_input[n, ic, ih, iw] = sum over (oc, kh, kw) with rows().source(oh, kh) == ih and
// cols().source(ow, kw) == iw of
//     grad_output[n, oc, oh, ow] * conj(weight[oc, ic, kh, kw])
void grad_input(const Conv2dProblem& problem, Arithmetic arithmetic, ConstTensorView grad_output,
                ConstTensorView weight, TensorView grad_input, const Executor& executor);

// grad_weight[oc, ic, kh, kw] = sum over (n, oh, ow) of
//     grad_output[n, oc, oh, ow] * conj(input[n, ic, rows().source(oh, kh), cols().source(ow, kw)])
void grad_weight(const Conv2dProblem& problem, DType dtype, ConstTensorView grad_output, ConstTensorView input,
                 TensorView grad_weight, const Executor& executor);

// grad_bias[oc] = sum over (n, oh, ow) of grad_output[n, oc, oh, ow]; grad_bias is contiguous.
void grad_bias(const TensorSizes& size, DType dtype, ConstTensorView grad_output, void* grad_bias,
               const Executor& executor);

// result[b, i, j] = bias[j] + sum over k of mat1[b, i, k] * mat2[b, k, j], with sums whose order follows from k, the
// dtype and the instruction set alone.
void matmul(const MatmulSizes& size, DType dtype, ConstMatrixView mat1, ConstMatrixView mat2, Bias bias,
            MatrixView result, const Executor& executor);

enum class Direction : int { kForward, kGradInput, kGradWeight };

// A call to explain. Of the operands only strides are read.
struct ExplainedCall {
  Direction direction;
  Conv2dProblem problem;
  DType dtype;
  ConstTensorView input, weight;
  int64_t grad_weight_stride[4];
  bool channels_last;  // output, grad_output and grad_input are, or else contiguous
  int num_threads;
  bool allow_winograd = false;
};

// What a call will do; the source of conv2d_ext.explain.
struct Explanation {
  std::string engine;                                      // e.g. "implicit GEMM, vectors over result channels"
  std::string micro_kernel;                                // e.g. "gemm_ukernel_f32_6x16__avx2"
  std::string isa;                                         // "portable", "avx2", "avx512", "avx512_bf16", "amx"
  int64_t gemm_m, gemm_n, gemm_k;                          // per group
  int64_t tile_pixels, tile_rows, tile_cols, tile_images;  // one tile of the pixel dimension
  int64_t k_segments;        // chains of multiply-adds the sum over K is made of, each from zero, added in order
  int64_t k_segment_length;  // products in a full chain
  int64_t work_items;
  int64_t workspace_bytes_per_thread;
  std::string refused;  // why a faster path is not taken; empty where none exists
  // The drivers that were asked before the one that was taken, and why they refused.
  std::vector<std::pair<std::string, std::string>> candidates;
};
CONV2D_EXT_EXPORT Explanation explain(const ExplainedCall& call);

// What matmul will do. Of a batch whose second factors differ: for one of its products, the work items of all.
CONV2D_EXT_EXPORT Explanation explain_matmul(const MatmulSizes& size, DType dtype, ConstMatrixView mat1,
                                             ConstMatrixView mat2, MatrixView result, int num_threads);

// The instruction set in use: the best of this machine, or a lower one named by the environment variable
// CONV2D_EXT_CPU_ISA ("portable", "avx2", "avx512", "avx512_bf16", "amx"; "amx_emulated" for tests).
CONV2D_EXT_EXPORT const char* isa_name();
// All instruction sets compiled into this build, comma-separated.
CONV2D_EXT_EXPORT const char* compiled_isas();

}  // namespace conv2d_ext::cpu
