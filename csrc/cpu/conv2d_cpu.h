// The CPU engines' interface: raw pointers, strides and a Conv2dProblem (plan/call.h); no torch header.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../export.h"
#include "base/executor.h"
#include "plan/call.h"

namespace conv2d_ext::cpu {

// Writes all elements of the result, and nothing else. It must not overlap the operands.
void run(Call call, const Executor& executor);

// grad_bias[oc] = sum over (n, oh, ow) of grad_output[n, oc, oh, ow]; grad_bias is contiguous.
void grad_bias(const TensorSizes& size, DType dtype, ConstTensorView grad_output, void* grad_bias,
               const Executor& executor);

// result[b, i, j] = bias[j] + sum over k of mat1[b, i, k] * mat2[b, k, j], with sums whose order follows from k, the
// dtype and the instruction set alone.
void matmul(const MatmulSizes& size, DType dtype, ConstMatrixView mat1, ConstMatrixView mat2, Bias bias,
            MatrixView result, const Executor& executor);

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
// Of the operands only strides are read.
CONV2D_EXT_EXPORT Explanation explain(Call call, int num_threads);

// What matmul will do. Of a batch whose second factors differ: for one of its products, the work items of all.
CONV2D_EXT_EXPORT Explanation explain_matmul(const MatmulSizes& size, DType dtype, ConstMatrixView mat1,
                                             ConstMatrixView mat2, MatrixView result, int num_threads);

// The instruction set in use: the best of this machine, or a lower one named by the environment variable
// CONV2D_EXT_CPU_ISA ("portable", "avx2", "avx512", "avx512_bf16", "amx"; "amx_emulated" for tests).
CONV2D_EXT_EXPORT const char* isa_name();
// All instruction sets compiled into this build, comma-separated.
CONV2D_EXT_EXPORT const char* compiled_isas();

}  // namespace conv2d_ext::cpu
