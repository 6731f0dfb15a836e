// Between the planner and the launches: a direction as the kernels' parameters.
#pragma once

#include <vector>

#include "../export.h"
#include "conv2d_cuda.h"
#include "gemm_params.h"
#include "kernels.h"

namespace conv2d_ext::cuda {

// Phases of one axis that hold a position and a tap. Forward has one.
struct AxisPlan {
  std::vector<AxisPhase> phases;
  int64_t positions;  // of all phases
  int64_t most_positions;
  int32_t most_taps;
};

// Forward or grad_input, without addresses and without what a plan decides. strides: in elements, as in the interface.
struct ConvCall {
  AxisPlan rows, cols;
  ConvParams params;
  bool fills_result;  // whether the phases cover the result; elsewhere it is zero
  bool is_matmul;     // no rule may read the number of result channels, which is as well a batch's
};
ConvCall forward_call(const Conv2dProblem& problem, DType dtype, const int64_t (&input_stride)[4],
                      const int64_t (&weight_stride)[4], const int64_t (&output_stride)[4]);
ConvCall grad_input_call(const Conv2dProblem& problem, DType dtype, const int64_t (&grad_output_stride)[4],
                         const int64_t (&weight_stride)[4], const int64_t (&grad_input_stride)[4]);
// The rows of mat1 are the pixels of an image, those of mat2 its channels; a batch is one of images where they share
// mat2, and groups where each has its own.
ConvCall matmul_call(const MatmulSizes& size, DType dtype, const ConstMatrixView& mat1, const ConstMatrixView& mat2,
                     const MatrixView& result);
WeightParams grad_weight_params(const Conv2dProblem& problem, DType dtype, const int64_t (&grad_output_stride)[4],
                                const int64_t (&input_stride)[4], const int64_t (&grad_weight_stride)[4]);

CONV2D_EXT_EXPORT GemmTable gemm_table(DType dtype, Float32Math math);

// Whether neighbouring lanes share memory along channels rather than along pixels.
bool lies_over_channels(int64_t channel_stride, int64_t channels, int64_t pixel_stride);

// Whether an index keeps groups of so many bytes aligned. The stride of one that has a single value says nothing.
inline bool keeps_aligned(int64_t values, int64_t stride_bytes, int64_t bytes) {
  return values <= 1 || stride_bytes % bytes == 0;
}

// How a sum over pixels is cut.
struct PixelSegments {
  int64_t count, pixels;
};
PixelSegments cut_pixels(int64_t pixels, int64_t least_pixels, int64_t most_segments);
PixelSegments grad_bias_segments(int64_t batch, int64_t out_channels, int64_t out_h, int64_t out_w, DType dtype);

}  // namespace conv2d_ext::cuda
