// The CPU entry points: each direction becomes ConvGemms or a grad_weight run for the instruction set in use.
#include "conv2d_cpu.h"

#include "depthwise.h"
#include "direction_gemms.h"
#include "engine.h"
#include "padding_products.h"
#include "phases.h"

namespace conv2d_ext::cpu {

namespace {

void run_conv(DType dtype, const ConvGemm& gemm, const Executor& executor) {
  const EngineChoice choice = choose_engine(dtype, gemm);
  choice.engine.conv(dtype, choice.gemm, executor);
}

Executor executor_for(const Conv2dProblem& p, const Executor& executor) {
  if (!is_small(p)) return executor;
  return {1, [](int64_t items, void* context, void (*body)(void*, int64_t)) {
            for (int64_t item = 0; item < items; ++item) body(context, item);
          }};
}

}  // namespace

void forward(const Conv2dProblem& problem, DType dtype, ConstTensorView input, ConstTensorView weight, const void* bias,
             int64_t bias_stride, TensorView output, const Executor& threads) {
  const Conv2dProblem p = with_bounded_strides(problem);
  if (p.batch == 0 || p.out_channels == 0 || p.out_pixels() == 0) return;
  drop_unused_strides(input.stride, p.batch, p.in_channels, p.in_h, p.in_w);
  drop_unused_strides(weight.stride, p.out_channels, p.in_channels_per_group(), p.kernel_h, p.kernel_w);
  drop_unused_strides(output.stride, p.batch, p.out_channels, p.out_h, p.out_w);
  const Executor executor = executor_for(p, threads);
  const ConvGemm g = forward_gemm(p, input, weight, bias, bias_stride, output);
  if (sums_as_dots(p, dtype)) {
    engine().dot_products(dtype, g, executor);
    return;
  }
  if (!forward_cuts_bands(p)) {
    run_conv(dtype, g, executor);
    return;
  }
  const int64_t size = size_of(dtype);
  for_each_forward_gemm(p, g, [&](ConvGemm& band, const GemmOffsets& offsets) {
    band.weight = static_cast<const char*>(weight.data) + offsets.weight * size;
    band.destination = static_cast<char*>(output.data) + offsets.destination * size;
    run_conv(dtype, band, executor);
  });
  multiply_padding(p, dtype, weight, output, executor);
}

void grad_input(const Conv2dProblem& problem, DType dtype, ConstTensorView grad_output, ConstTensorView weight,
                TensorView grad_input, const Executor& threads) {
  const Conv2dProblem p = with_bounded_strides(problem);
  if (p.batch == 0 || p.in_channels == 0 || p.in_h == 0 || p.in_w == 0) return;
  drop_unused_strides(grad_output.stride, p.batch, p.out_channels, p.out_h, p.out_w);
  drop_unused_strides(weight.stride, p.out_channels, p.in_channels_per_group(), p.kernel_h, p.kernel_w);
  drop_unused_strides(grad_input.stride, p.batch, p.in_channels, p.in_h, p.in_w);
  const Executor executor = executor_for(p, threads);
  if (is_depthwise_strided(p, grad_input.stride, engine().vector_shape(dtype))) {
    engine().strided_grad_input(p, dtype, grad_output, weight, grad_input, executor);
    return;
  }
  const int64_t size = size_of(dtype);
  const auto at = [size](const void* data, int64_t offset) { return static_cast<const char*>(data) + offset * size; };
  JoinedPhases phases;
  if (joins_phases(p, dtype, grad_output.stride, weight.stride, grad_input.stride, phases)) {
    for (int f = 0; f < phases.count; ++f) {
      phases.gemm[f].source = grad_output.data;
      phases.gemm[f].weight = weight.data;
      phases.gemm[f].destination = static_cast<char*>(grad_input.data) + phases.destination[f] * size;
    }
    engine().joined_phases(dtype, phases, executor);
    return;
  }
  for_each_grad_input_gemm(p, grad_output.stride, weight.stride, grad_input.stride,
                           [&](ConvGemm& g, const GemmOffsets& offsets) {
                             g.source = at(grad_output.data, offsets.source);
                             g.weight = at(weight.data, offsets.weight);
                             g.destination = static_cast<char*>(grad_input.data) + offsets.destination * size;
                             if (takes_rows(g, dtype, engine().vector_shape(dtype))) {
                               RowProducts rows = row_products(g, engine().vector_shape(dtype).limits);
                               rows.factor = g.source;
                               rows.rows = g.weight;
                               rows.result = g.destination;
                               engine().row_products(dtype, rows, executor);
                             } else {
                               run_conv(dtype, g, executor);
                             }
                           });
}

void grad_weight(const Conv2dProblem& problem, DType dtype, ConstTensorView grad_output, ConstTensorView input,
                 TensorView grad_weight, const Executor& threads) {
  Conv2dProblem p = with_bounded_strides(problem);
  if (p.out_channels == 0 || p.in_channels == 0 || p.taps() == 0) return;
  // One output position takes no step.
  if (p.out_h == 1) p.stride_h = 1;
  if (p.out_w == 1) p.stride_w = 1;
  drop_unused_strides(grad_output.stride, p.batch, p.out_channels, p.out_h, p.out_w);
  drop_unused_strides(input.stride, p.batch, p.in_channels, p.in_h, p.in_w);
  drop_unused_strides(grad_weight.stride, p.out_channels, p.in_channels_per_group(), p.kernel_h, p.kernel_w);
  const Executor executor = executor_for(p, threads);
  const VectorShape vector = engine().vector_shape(dtype);
  if (takes_rows(p, dtype, input.stride, grad_weight.stride, vector)) {
    RowProducts rows = row_products(p, grad_output.stride, input.stride, grad_weight.stride, vector.limits);
    rows.factor = grad_output.data;
    rows.rows = input.data;
    rows.result = grad_weight.data;
    engine().row_products(dtype, rows, executor);
    return;
  }
  engine().grad_weight(p, dtype, grad_output, input, grad_weight, executor);
}

void grad_bias(int64_t batch, int64_t out_channels, int64_t out_h, int64_t out_w, DType dtype,
               ConstTensorView grad_output, void* grad_bias, const Executor& executor) {
  engine().grad_bias(batch, out_channels, out_h, out_w, dtype, grad_output, grad_bias, executor);
}

}  // namespace conv2d_ext::cpu
