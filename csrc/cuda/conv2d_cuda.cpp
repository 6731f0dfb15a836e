// The entry points: a plan's kernels, launched.
#include "conv2d_cuda.h"

#include <algorithm>

#include "../checked_arithmetic.h"
#include "plan.h"

namespace conv2d_ext::cuda {

namespace {

constexpr int64_t kL1LineBytes = 128;

int64_t address(const void* data) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(data)); }

// How many neighbouring results of 16 bits lie side by side everywhere, aligned: 8, 4, or 0 where fewer do.
int result_vector(const ConvCall& call, const ConvParams& p, int64_t result, bool over_m) {
  const AxisPlan &rows = call.rows, &cols = call.cols;
  const int64_t positions = rows.positions * cols.positions;
  for (const int64_t count : {8, 4}) {
    const int64_t bytes = count * 2;
    const auto keeps = [&](int64_t values, int64_t stride) { return keeps_aligned(values, stride, bytes); };
    bool fits = result % bytes == 0 && keeps(p.batch, p.result_n) && keeps(p.groups, p.result_group);
    if (over_m) {
      fits = fits && p.result_m == 2 && p.m % count == 0 && keeps(rows.positions, p.result_h) &&
             keeps(cols.positions, p.result_w);
      for (const AxisPlan* axis : {&rows, &cols})
        for (const AxisPhase& phase : axis->phases) fits = fits && phase.result_offset % bytes == 0;
    } else {
      // Pixels are counted through whole images, so these must have no gaps.
      fits = fits && rows.phases.size() == 1 && cols.phases.size() == 1 && positions % count == 0 &&
             (cols.positions == 1 || p.result_w == 2) && (rows.positions == 1 || p.result_h == 2 * cols.positions) &&
             keeps(p.m, p.result_m) && (rows.phases[0].result_offset + cols.phases[0].result_offset) % bytes == 0;
    }
    if (fits) return static_cast<int>(count);
  }
  return 0;
}

// Whether the results of two groups lie in one aligned word of 4 bytes everywhere.
bool stores_pairs(const ConvCall& call, const ConvParams& p, int64_t result) {
  bool fits = result % 4 == 0 && p.result_group == 2 && keeps_aligned(p.batch, p.result_n, 4) &&
              keeps_aligned(call.rows.positions, p.result_h, 4) && keeps_aligned(call.cols.positions, p.result_w, 4);
  for (const AxisPlan* axis : {&call.rows, &call.cols})
    for (const AxisPhase& phase : axis->phases) fits = fits && phase.result_offset % 4 == 0;
  return fits;
}

// Copies of 16 bytes need an aligned address even for taps outside of the image, which read nothing. The stride along a
// side of length 1 may be unaligned: nothing else needs it, so it becomes 0.
template <class Params>
void drop_strides_of_single_lines(Params& p) {
  if (p.source_rows == 1) p.source_h = 0;
  if (p.source_cols == 1) p.source_w = 0;
}

// The parameters of a launch that reads the weight packed, as launch_pack_weight leaves it.
ConvParams with_packed_weight(const Plan& plan, const ConvParams& unpacked, int64_t packed) {
  ConvParams p = unpacked;
  p.weight = packed;
  p.weight_m = size_of(plan.dtype);
  p.weight_c = p.tile.packed_row = plan.packed_row;
  p.weight_group = plan.gemm_k * plan.packed_row;
  p.tile.dense_rows = static_cast<int32_t>(plan.packed_row / size_of(plan.dtype));
  const int64_t phase = p.groups * p.weight_group;
  for (int row = 0; row < p.row_phases; ++row) p.rows[row].weight_offset = row * p.col_phases * phase;
  for (int col = 0; col < p.col_phases; ++col) p.cols[col].weight_offset = col * phase;
  return p;
}

cudaError_t launch_conv(const Plan& plan, const ConvCall& call, int64_t source, int64_t weight, const void* bias,
                        int64_t bias_stride, TensorView result, int64_t result_elements, void* workspace,
                        cudaStream_t stream) {
  if (!call.fills_result || plan.engine == Engine::kNothing) {
    const cudaError_t error = cudaMemsetAsync(result.data, 0, result_elements * size_of(plan.dtype), stream);
    if (error != cudaSuccess || plan.engine == Engine::kNothing) return error;
  }
  ConvParams p = call.params;
  p.source = source;
  p.weight = weight;
  p.bias = static_cast<const char*>(bias);
  p.bias_stride = bias_stride * size_of(plan.dtype);
  TileParams& tile = p.tile;
  tile.result = address(result.data);
  tile.partials = plan.split ? address(workspace) : 0;
  tile.sum_bytes = sum_bytes(plan.dtype);
  tile.tile_k = plan.tile_k;
  tile.stages = plan.stages;
  tile.dense_rows = p.m;
  tile.a_over_k = !lies_over_channels(p.weight_m, p.m, p.weight_c);
  tile.b_over_k = lies_over_channels(p.source_c, p.channels, p.source_w);
  tile.result_over_m = lies_over_channels(p.result_m, p.m, p.result_w);
  // Of pixels that fill a line of L1 copies past it are 1.1 to 1.3 times as fast, although taps read elements again; of
  // pixels of 16 channels, which share lines with their neighbours, 2 to 3.4 times as slow.
  tile.keeps_l1 = int64_t{p.channels} * size_of(plan.dtype) < kL1LineBytes;
  if (size_of(plan.dtype) == 2 && plan.engine == Engine::kImplicitGemm)
    tile.result_vector = result_vector(call, p, tile.result, tile.result_over_m);
  if (plan.engine == Engine::kImplicitGemm) drop_strides_of_single_lines(p);

  // As many phases at a time as the parameters hold.
  const auto rows = static_cast<int>(call.rows.phases.size()), cols = static_cast<int>(call.cols.phases.size());
  for (int row = 0; row < rows; row += kMaxPhases) {
    for (int col = 0; col < cols; col += kMaxPhases) {
      p.row_phases = std::min(rows - row, kMaxPhases);
      p.col_phases = std::min(cols - col, kMaxPhases);
      std::copy_n(call.rows.phases.begin() + row, p.row_phases, p.rows);
      std::copy_n(call.cols.phases.begin() + col, p.col_phases, p.cols);
      const int64_t phases = int64_t{p.row_phases} * p.col_phases;
      const int64_t pixels = p.batch * call.rows.most_positions * call.cols.most_positions;
      cudaError_t error = cudaSuccess;
      if (plan.depthwise.kernel != 0) {
        const DepthwiseTiling& tiling = plan.depthwise;
        DepthwiseLaunch depthwise{};
        depthwise.shape = {static_cast<uint32_t>(tiling.phase_blocks), tiling.band_rows, tiling.lanes_are_groups,
                           stores_pairs(call, p, tile.result)};
        depthwise.kernel = tiling.kernel;
        depthwise.step = tiling.step;
        depthwise.vector = tiling.vector;
        depthwise.phases = phases;
        depthwise.stream = stream;
        error = launch_depthwise_conv(plan.dtype, p, depthwise);
      } else if (plan.engine == Engine::kDirect) {
        DirectLaunch direct{};
        direct.lanes_are_groups = lies_over_channels(p.source_group, p.groups, p.source_w);
        direct.pixel_blocks = div_up(pixels, plan.tile_n);
        direct.group_blocks = div_up(p.groups, direct_conv_groups(direct.lanes_are_groups));
        direct.phases = phases;
        direct.stream = stream;
        error = launch_direct_conv(plan.dtype, p, direct);
      } else {
        const GemmKernel& kernel = gemm_table(plan.dtype, plan.math).kernels[plan.variant];
        tile.m_tiles = div_up(p.m, kernel.tile_m);
        tile.x_tiles = div_up(pixels, kernel.tile_x);
        tile.segments = plan.split ? plan.segments : 1;
        tile.segment_tiles = kernel.chain_tiles;
        tile.partial_row = pixels * tile.sum_bytes;
        GemmLaunch gemm{};
        gemm.items = tile.m_tiles * tile.x_tiles * tile.segments * p.groups * phases;
        if (plan.split) gemm.reduce_items = div_up(pixels * p.m * p.groups * phases, kReduceThreads);
        gemm.shared_bytes = plan.shared_bytes;
        gemm.most_shared_bytes = kernel.most_shared_bytes();
        gemm.vector_a = plan.vector_a;
        gemm.vector_b = plan.vector_b;
        gemm.stream = stream;
        if (plan.packed_row == 0) {
          error = kernel.launch_conv(p, gemm);
        } else {
          const ConvParams packed = with_packed_weight(plan, p, address(workspace) + plan.packed_at);
          error = launch_pack_weight(
              p,
              {{packed.weight, plan.gemm_k, plan.packed_row / size_of(plan.dtype), 0, 0}, p.groups * phases, stream});
          if (error == cudaSuccess) error = kernel.launch_conv(packed, gemm);
        }
      }
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t forward(const Plan& plan, const Conv2dProblem& problem, ConstTensorView input, ConstTensorView weight,
                    const void* bias, int64_t bias_stride, TensorView output, void* workspace, cudaStream_t stream) {
  const Conv2dProblem p = with_bounded_strides(problem);
  if (p.batch * p.out_channels * p.out_pixels() == 0) return cudaSuccess;
  return launch_conv(plan, forward_call(p, plan.dtype, input.stride, weight.stride, output.stride), address(input.data),
                     address(weight.data), bias, bias_stride, output, p.batch * p.out_channels * p.out_pixels(),
                     workspace, stream);
}

cudaError_t matmul(const Plan& plan, const MatmulSizes& size, ConstMatrixView mat1, ConstMatrixView mat2,
                   const void* bias, int64_t bias_stride, MatrixView result, void* workspace, cudaStream_t stream) {
  const int64_t elements = size.batch * size.m * size.n;
  if (elements == 0) return cudaSuccess;
  return launch_conv(plan, matmul_call(size, plan.dtype, mat1, mat2, result), address(mat1.data), address(mat2.data),
                     bias, bias_stride, {result.data, {}}, elements, workspace, stream);
}

cudaError_t grad_input(const Plan& plan, const Conv2dProblem& problem, ConstTensorView grad_output,
                       ConstTensorView weight, TensorView grad_input, void* workspace, cudaStream_t stream) {
  const Conv2dProblem p = with_bounded_strides(problem);
  const int64_t elements = p.batch * p.in_channels * p.in_h * p.in_w;
  if (elements == 0) return cudaSuccess;
  return launch_conv(plan, grad_input_call(p, plan.dtype, grad_output.stride, weight.stride, grad_input.stride),
                     address(grad_output.data), address(weight.data), nullptr, 0, grad_input, elements, workspace,
                     stream);
}

cudaError_t grad_weight(const Plan& plan, const Conv2dProblem& problem, ConstTensorView grad_output,
                        ConstTensorView input, TensorView grad_weight, void* workspace, cudaStream_t stream) {
  const Conv2dProblem p = with_bounded_strides(problem);
  const int64_t elements = p.out_channels * p.in_channels_per_group() * p.taps();
  if (elements == 0) return cudaSuccess;
  if (plan.engine == Engine::kNothing)
    return cudaMemsetAsync(grad_weight.data, 0, elements * size_of(plan.dtype), stream);
  WeightParams g = grad_weight_params(p, plan.dtype, grad_output.stride, input.stride, grad_weight.stride);
  g.grad_output = address(grad_output.data);
  g.source = address(input.data);
  const bool channels_last = lies_over_channels(g.source_c, p.in_channels, g.source_w);
  TileParams& tile = g.tile;
  tile.result = address(grad_weight.data);
  tile.partials = plan.split ? address(workspace) : 0;
  tile.sum_bytes = sum_bytes(plan.dtype);
  tile.tile_k = plan.tile_k;
  tile.stages = plan.stages;
  tile.dense_rows = g.m;
  tile.partial_row = plan.gemm_n * tile.sum_bytes;
  tile.segments = plan.segments;
  const int64_t reduce_items = plan.split ? div_up(plan.gemm_n * p.out_channels, kReduceThreads) : 0;
  if (plan.engine == Engine::kDirect) {
    DirectWeightLaunch direct{};
    direct.segment_pixels = plan.segment_length;
    direct.column_blocks = div_up(plan.gemm_n, plan.tile_n);
    direct.row_blocks = div_up(plan.gemm_m, plan.tile_m);
    direct.group_blocks = div_up(p.groups, kSlots);
    direct.reduce_items = reduce_items;
    direct.lanes_are_groups = channels_last;
    direct.stream = stream;
    return launch_direct_weight(plan.dtype, g, direct);
  }
  const GemmKernel& kernel = gemm_table(plan.dtype, plan.math).kernels[plan.variant];
  drop_strides_of_single_lines(g);
  g.channels_fastest = channels_last || plan.vector_b == Vectors::kOverX;
  tile.a_over_k = !lies_over_channels(g.grad_m, g.m, g.grad_w);
  tile.b_over_k = !channels_last;
  tile.m_tiles = div_up(plan.gemm_m, kernel.tile_m);
  tile.x_tiles = div_up(plan.gemm_n, kernel.tile_x);
  tile.segment_tiles = static_cast<int32_t>(div_up(plan.segment_length, kernel.tile_k));
  tile.chain_tiles = kernel.chain_tiles;
  GemmLaunch gemm{};
  gemm.items = tile.m_tiles * tile.x_tiles * tile.segments * p.groups;
  gemm.reduce_items = reduce_items;
  gemm.shared_bytes = plan.shared_bytes;
  gemm.most_shared_bytes = kernel.most_shared_bytes();
  gemm.vector_a = plan.vector_a;
  gemm.vector_b = plan.vector_b;
  gemm.stream = stream;
  return kernel.launch_weight(g, gemm);
}

cudaError_t grad_bias(int64_t batch, int64_t out_channels, int64_t out_h, int64_t out_w, DType dtype,
                      ConstTensorView grad_output, void* grad_bias, void* workspace, cudaStream_t stream) {
  if (out_channels == 0) return cudaSuccess;
  if (batch * out_h * out_w == 0) return cudaMemsetAsync(grad_bias, 0, out_channels * size_of(dtype), stream);
  const PixelSegments segments = grad_bias_segments(batch, out_channels, out_h, out_w, dtype);
  BiasLaunch launch{};
  launch.grad_output = address(grad_output.data);
  launch.result = address(grad_bias);
  launch.partials = segments.count > 1 ? address(workspace) : 0;
  std::copy_n(grad_output.stride, 4, launch.stride);
  launch.batch = batch;
  launch.channels = out_channels;
  launch.out_h = out_h;
  launch.out_w = out_w;
  launch.segments = segments.count;
  launch.segment_pixels = segments.pixels;
  launch.lanes_are_channels = lies_over_channels(grad_output.stride[1], out_channels, grad_output.stride[3]);
  launch.stream = stream;
  return launch_grad_bias(dtype, launch);
}

}  // namespace conv2d_ext::cuda
