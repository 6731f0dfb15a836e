// Each direction as the parameters of the kernels.
#include <algorithm>

#include "plan.h"

namespace conv2d_ext::cuda {

namespace {

int64_t bytes(DType dtype, int64_t elements) { return elements * size_of(dtype); }

void set_axis(AxisPlan& axis, const AxisPhase& phase) {
  axis.phases.push_back(phase);
  axis.positions += phase.positions;
  axis.most_positions = std::max(axis.most_positions, phase.positions);
  axis.most_taps = std::max(axis.most_taps, phase.taps);
}

AxisPlan one_phase(int64_t positions, int64_t taps, int64_t origin) {
  AxisPlan axis{};
  set_axis(axis, {positions, 0, 0, static_cast<int32_t>(taps), static_cast<int32_t>(origin)});
  return axis;
}

AxisPlan grad_input_phases(int64_t in_size, int64_t kernel, int64_t stride, int64_t pad, int64_t dilation,
                           int64_t result_bytes, int64_t weight_bytes) {
  AxisPlan axis{};
  const int64_t phases = std::min(grad_input_tap_step(stride, dilation), kernel);
  for (int64_t first_tap = 0; first_tap < phases; ++first_tap) {
    const GradInputPhase phase = grad_input_phase(first_tap, in_size, kernel, stride, pad, dilation);
    if (phase.positions == 0) continue;
    set_axis(axis, {phase.positions, phase.phase * result_bytes, first_tap * weight_bytes,
                    static_cast<int32_t>(phase.taps), static_cast<int32_t>(phase.axis.origin)});
  }
  return axis;
}

}  // namespace

ConvCall forward_call(const Conv2dProblem& p, DType dtype, const int64_t (&input)[4], const int64_t (&weight)[4],
                      const int64_t (&output)[4]) {
  ConvCall call{};
  call.rows = one_phase(p.out_h, p.kernel_h, p.rows().origin);
  call.cols = one_phase(p.out_w, p.kernel_w, p.cols().origin);
  call.fills_result = true;
  ConvParams& g = call.params;
  g.m = static_cast<int32_t>(p.out_channels_per_group());
  g.channels = static_cast<int32_t>(p.in_channels_per_group());
  g.groups = static_cast<int32_t>(p.groups);
  g.batch = p.batch;
  g.weight_m = bytes(dtype, weight[0]);
  g.weight_c = bytes(dtype, weight[1]);
  g.weight_h = bytes(dtype, weight[2]);
  g.weight_w = bytes(dtype, weight[3]);
  g.weight_group = g.weight_m * g.m;
  g.source_n = bytes(dtype, input[0]);
  g.source_c = bytes(dtype, input[1]);
  g.source_h = bytes(dtype, input[2]);
  g.source_w = bytes(dtype, input[3]);
  g.source_group = g.source_c * g.channels;
  g.source_rows = static_cast<int32_t>(p.in_h);
  g.source_cols = static_cast<int32_t>(p.in_w);
  g.result_n = bytes(dtype, output[0]);
  g.result_m = bytes(dtype, output[1]);
  g.result_h = bytes(dtype, output[2]);
  g.result_w = bytes(dtype, output[3]);
  g.result_group = g.result_m * g.m;
  g.step_h = static_cast<int32_t>(p.stride_h);
  g.step_w = static_cast<int32_t>(p.stride_w);
  g.tap_h = static_cast<int32_t>(p.dilation_h);
  g.tap_w = static_cast<int32_t>(p.dilation_w);
  return call;
}

ConvCall matmul_call(const MatmulSizes& size, DType dtype, const ConstMatrixView& mat1, const ConstMatrixView& mat2,
                     const MatrixView& result) {
  const bool shares_mat2 = mat2.batch_stride == 0;
  Conv2dProblem p{};
  p.batch = shares_mat2 ? size.batch : 1;
  p.groups = shares_mat2 ? 1 : size.batch;
  p.in_channels = p.groups * size.k;
  p.out_channels = p.groups * size.n;
  p.in_w = p.out_w = size.m;
  p.in_h = p.out_h = p.kernel_h = p.kernel_w = p.stride_h = p.stride_w = p.dilation_h = p.dilation_w = 1;
  ConvCall call = forward_call(p, dtype, {mat1.batch_stride, mat1.col_stride, 0, mat1.row_stride},
                               {mat2.col_stride, mat2.row_stride, 0, 0},
                               {result.batch_stride, result.col_stride, 0, result.row_stride});
  call.is_matmul = true;
  call.params.source_group = bytes(dtype, mat1.batch_stride);
  call.params.weight_group = bytes(dtype, mat2.batch_stride);
  call.params.result_group = bytes(dtype, result.batch_stride);
  return call;
}

ConvCall grad_input_call(const Conv2dProblem& p, DType dtype, const int64_t (&grad_output)[4],
                         const int64_t (&weight)[4], const int64_t (&grad_input)[4]) {
  ConvCall call{};
  call.rows = grad_input_phases(p.in_h, p.kernel_h, p.stride_h, p.pad_top, p.dilation_h, bytes(dtype, grad_input[2]),
                                bytes(dtype, weight[2]));
  call.cols = grad_input_phases(p.in_w, p.kernel_w, p.stride_w, p.pad_left, p.dilation_w, bytes(dtype, grad_input[3]),
                                bytes(dtype, weight[3]));
  call.fills_result = call.rows.positions == p.in_h && call.cols.positions == p.in_w;
  const int64_t tap_step_h = grad_input_tap_step(p.stride_h, p.dilation_h);
  const int64_t tap_step_w = grad_input_tap_step(p.stride_w, p.dilation_w);
  ConvParams& g = call.params;
  g.m = static_cast<int32_t>(p.in_channels_per_group());
  g.channels = static_cast<int32_t>(p.out_channels_per_group());
  g.groups = static_cast<int32_t>(p.groups);
  g.batch = p.batch;
  g.weight_m = bytes(dtype, weight[1]);
  g.weight_c = bytes(dtype, weight[0]);
  g.weight_h = bytes(dtype, weight[2]) * tap_step_h;
  g.weight_w = bytes(dtype, weight[3]) * tap_step_w;
  g.weight_group = g.weight_c * g.channels;
  g.source_n = bytes(dtype, grad_output[0]);
  g.source_c = bytes(dtype, grad_output[1]);
  g.source_h = bytes(dtype, grad_output[2]);
  g.source_w = bytes(dtype, grad_output[3]);
  g.source_group = g.source_c * g.channels;
  g.source_rows = static_cast<int32_t>(p.out_h);
  g.source_cols = static_cast<int32_t>(p.out_w);
  g.result_n = bytes(dtype, grad_input[0]);
  g.result_m = bytes(dtype, grad_input[1]);
  g.result_h = bytes(dtype, grad_input[2]) * p.stride_h;
  g.result_w = bytes(dtype, grad_input[3]) * p.stride_w;
  g.result_group = g.result_m * g.m;
  g.step_h = g.step_w = 1;
  g.tap_h = static_cast<int32_t>(-(p.dilation_h / (p.stride_h / tap_step_h)));
  g.tap_w = static_cast<int32_t>(-(p.dilation_w / (p.stride_w / tap_step_w)));
  g.tile.conjugate_a = true;
  return call;
}

WeightParams grad_weight_params(const Conv2dProblem& p, DType dtype, const int64_t (&grad_output)[4],
                                const int64_t (&input)[4], const int64_t (&grad_weight)[4]) {
  WeightParams g{};
  g.m = static_cast<int32_t>(p.out_channels_per_group());
  g.channels = static_cast<int32_t>(p.in_channels_per_group());
  g.groups = static_cast<int32_t>(p.groups);
  g.batch = p.batch;
  g.out_w = p.out_w;
  g.out_pixels = p.out_pixels();
  g.grad_n = bytes(dtype, grad_output[0]);
  g.grad_m = bytes(dtype, grad_output[1]);
  g.grad_h = bytes(dtype, grad_output[2]);
  g.grad_w = bytes(dtype, grad_output[3]);
  g.grad_group = g.grad_m * g.m;
  g.source_n = bytes(dtype, input[0]);
  g.source_c = bytes(dtype, input[1]);
  g.source_h = bytes(dtype, input[2]);
  g.source_w = bytes(dtype, input[3]);
  g.source_group = g.source_c * g.channels;
  g.source_rows = static_cast<int32_t>(p.in_h);
  g.source_cols = static_cast<int32_t>(p.in_w);
  g.result_m = bytes(dtype, grad_weight[0]);
  g.result_c = bytes(dtype, grad_weight[1]);
  g.result_h = bytes(dtype, grad_weight[2]);
  g.result_w = bytes(dtype, grad_weight[3]);
  g.result_group = g.result_m * g.m;
  g.step_h = static_cast<int32_t>(p.stride_h);
  g.step_w = static_cast<int32_t>(p.stride_w);
  g.origin_h = static_cast<int32_t>(p.rows().origin);
  g.origin_w = static_cast<int32_t>(p.cols().origin);
  g.tap_h = static_cast<int32_t>(p.dilation_h);
  g.tap_w = static_cast<int32_t>(p.dilation_w);
  g.taps_h = static_cast<int32_t>(p.kernel_h);
  g.taps_w = static_cast<int32_t>(p.kernel_w);
  g.tile.conjugate_b = true;
  return g;
}

}  // namespace conv2d_ext::cuda
