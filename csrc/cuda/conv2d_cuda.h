// The CUDA engine's interface: raw device pointers, strides, a Conv2dProblem and a stream; no torch header.
//
// A call is planned on the host first. The plan says everything about it but the pointers: `explain` prints it, the
// caller allocates the workspace it asks for, and the launch follows it. Launches are asynchronous on the stream, read
// nothing back and synchronise with nothing, so that they can be captured in a CUDA graph.
#pragma once

#include <cstdint>

#include "../export.h"
#include "../conv2d_problem.h"
#include "../tensor_view.h"

#if defined(CONV2D_CUDA_ON_HOST)
#include "cuda_on_host.h"
#else
#include <cuda_runtime_api.h>
#endif

namespace conv2d_ext::cuda {

enum class Direction : int { kForward, kGradInput, kGradWeight };

// How float32 values are multiplied; other dtypes ignore it.
enum class Float32Math : int { kIeee, kTF32 };

enum class Engine : int {
  kNothing,       // an empty result, or one of zeros
  kImplicitGemm,  // tiles of a GEMM whose columns are loaded from where they lie
  kDirect,        // few channels a group: without tiles of a GEMM
};

// What the mapping to the machine may read. It changes no bit of a result.
struct Machine {
  int sm_count;
  int shared_bytes_per_block;  // with opt-in
  // What tests and tuning want instead of the planner's choice, where it is possible; -1: nothing.
  int wanted_variant = -1;
  int wanted_split = -1;   // 0: a CTA takes all segments of K, 1: each has its own
  int wanted_packed = -1;  // 0: the weight is read where it lies, 1: it is packed first
};

// The machine with what this process wants of all later plans; nothing, until want() says otherwise.
CONV2D_EXT_EXPORT Machine with_wants(Machine machine);
// As in Machine, for every thread. False, and nothing changes, where no plan could ever have it.
CONV2D_EXT_EXPORT bool want(int64_t variant, int64_t split, int64_t packed);

// How an operand is copied 16 bytes at a time: as neighbouring k of an x (or of a row m), or as neighbouring x of a k;
// 8 in 16 bits, 4 in float32.
enum class Vectors : int { kNone, kOverK, kOverX };

constexpr int64_t kMaxWorkspaceBytes = int64_t{32} << 20;

// How the kernels for one channel a group walk, where they are taken (depthwise_kernel.cuh).
struct DepthwiseTiling {
  int kernel;     // taps of an axis that the kernel is compiled for; 0: another kernel is taken
  int step;       // rows of the source from a result to the next
  int vector;     // groups of a lane
  int band_rows;  // results of a thread, at most
  bool lanes_are_groups;
  int64_t phase_blocks;  // CTAs of a phase
};

struct Plan {
  Direction direction;
  Engine engine;
  DType dtype;
  Float32Math math;
  int variant;                          // the kernel's place in the table of its dtype and math
  Vectors vector_a, vector_b;           // of float32 and 16-bit types
  int stages;                           // of the ring of tiles in shared memory
  int64_t gemm_m, gemm_n, gemm_k;       // per group, of the largest GEMM; gemm_k as the kernel counts it
  int tile_m, tile_n, tile_k, threads;  // of a CTA
  DepthwiseTiling depthwise;
  // K is cut into segments, a segment into chains: each chain is summed from zero, chains are added in order to their
  // segment's sum, segments in order to the result.
  int64_t segments, segment_length, chain_length;
  bool split;          // segments run in CTAs of their own, their sums pass through the workspace
  int64_t packed_row;  // bytes of a row of the weight packed in the workspace; 0: it is read where it lies
  int64_t packed_at;   // of that in the workspace
  int64_t ctas;
  int shared_bytes;
  int64_t workspace_bytes;
  const char* kernel;   // name, as in "conv_gemm_f32_128x128x16"; a literal
  const char* refused;  // why a faster kernel is not taken; "" where none exists
  const char* wanted;   // what became of the machine's wants; "" where it has none
  const char* error;    // why the call can't run: a size beyond the kernels' range; "" where it can
  double cycles;        // that an implicit GEMM is estimated to take, by which kernels were compared
};

// Of the operands only strides and the alignment of data are read, and both matter to the mapping alone. Results are
// dense: they fill a run of memory that begins at their first element.
CONV2D_EXT_EXPORT Plan plan_forward(const Conv2dProblem& problem, DType dtype, Float32Math math, ConstTensorView input,
                                    ConstTensorView weight, const int64_t (&output_stride)[4], const Machine& machine);
CONV2D_EXT_EXPORT Plan plan_grad_input(const Conv2dProblem& problem, DType dtype, Float32Math math,
                                       ConstTensorView grad_output, ConstTensorView weight,
                                       const int64_t (&grad_input_stride)[4], const Machine& machine);
CONV2D_EXT_EXPORT Plan plan_grad_weight(const Conv2dProblem& problem, DType dtype, Float32Math math,
                                        ConstTensorView grad_output, ConstTensorView input, const Machine& machine);
// Sums in an order that follows from k, the dtype and its math alone.
CONV2D_EXT_EXPORT Plan plan_matmul(const MatmulSizes& size, DType dtype, Float32Math math, ConstMatrixView mat1,
                                   ConstMatrixView mat2, const MatrixView& result, const Machine& machine);
// As Plan::error and Plan::workspace_bytes.
const char* grad_bias_error(int64_t batch, int64_t out_channels, int64_t out_h, int64_t out_w, DType dtype);
int64_t grad_bias_workspace(int64_t batch, int64_t out_channels, int64_t out_h, int64_t out_w, DType dtype);

// As in cpu/plan/call.h; every element of the result is written. workspace: plan.workspace_bytes, aligned to 256, or
// nullptr where that is 0. The first failure of a launch is returned.
cudaError_t forward(const Plan& plan, const Conv2dProblem& problem, ConstTensorView input, ConstTensorView weight,
                    const void* bias, int64_t bias_stride, TensorView output, void* workspace, cudaStream_t stream);
cudaError_t grad_input(const Plan& plan, const Conv2dProblem& problem, ConstTensorView grad_output,
                       ConstTensorView weight, TensorView grad_input, void* workspace, cudaStream_t stream);
cudaError_t grad_weight(const Plan& plan, const Conv2dProblem& problem, ConstTensorView grad_output,
                        ConstTensorView input, TensorView grad_weight, void* workspace, cudaStream_t stream);
// bias: n elements, or nullptr, as it is where mat2 has a batch.
cudaError_t matmul(const Plan& plan, const MatmulSizes& size, ConstMatrixView mat1, ConstMatrixView mat2,
                   const void* bias, int64_t bias_stride, MatrixView result, void* workspace, cudaStream_t stream);
// grad_bias: out_channels contiguous elements.
cudaError_t grad_bias(int64_t batch, int64_t out_channels, int64_t out_h, int64_t out_w, DType dtype,
                      ConstTensorView grad_output, void* grad_bias, void* workspace, cudaStream_t stream);

}  // namespace conv2d_ext::cuda
