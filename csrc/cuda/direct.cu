// The direct kernels of every dtype.
#include "direct_kernel.cuh"
#include "gemm_launch.cuh"

namespace conv2d_ext::cuda {

namespace {

template <class T, int TILE_M>
cudaError_t conv_of(const ConvParams& params, const DirectLaunch& launch_of) {
  const DirectShape shape{launch_of.pixel_blocks, launch_of.group_blocks, launch_of.lanes_are_groups};
  const int64_t items = launch_of.pixel_blocks * launch_of.group_blocks * launch_of.phases;
  bool has_three_taps = true;
  for (int col = 0; col < params.col_phases; ++col) has_three_taps = has_three_taps && params.cols[col].taps == 3;
  void (*kernel)(const ConvParams, const DirectShape) = direct_conv<T, TILE_M, 0>;
  // Wider sums haven't the registers; and with lanes over groups, which share no load of the weight, it is slower.
  if constexpr (sizeof(SumOf<T>) == 4) {
    if (has_three_taps && !launch_of.lanes_are_groups) kernel = direct_conv<T, TILE_M, 3>;
  }
  return launch(kernel, dim3(static_cast<unsigned>(items)), dim3(kDirectThreads), 0, launch_of.stream, params, shape);
}

template <class T>
cudaError_t conv(const ConvParams& params, const DirectLaunch& launch_of) {
  if (params.m == 1) return conv_of<T, 1>(params, launch_of);
  if (params.m <= 4) return conv_of<T, 4>(params, launch_of);
  if constexpr (sizeof(T) < 16) return conv_of<T, kMostDirectChannels>(params, launch_of);
  return cudaErrorInvalidValue;
}

// More rows share each load of the input; wide sums would take too many registers.
template <class T>
constexpr int kRows = sizeof(SumOf<T>) == 4 ? 4 : 1;

template <class T, int ROWS>
cudaError_t weight_of(const WeightParams& params, const DirectWeightLaunch& launch_of) {
  // So that no launch here needs a SharedMemoryLimit.
  static_assert(direct_weight_shared_bytes<SumOf<T>, ROWS>() <= kSharedBytesOfAll);
  const DirectWeightShape shape{launch_of.segment_pixels, launch_of.column_blocks, launch_of.row_blocks,
                                launch_of.group_blocks, launch_of.lanes_are_groups};
  const int64_t items = launch_of.column_blocks * launch_of.row_blocks * launch_of.group_blocks * params.tile.segments;
  const cudaError_t error = launch(direct_weight<T, ROWS>, dim3(static_cast<unsigned>(items)), dim3(kDirectThreads),
                                   direct_weight_shared_bytes<SumOf<T>, ROWS>(), launch_of.stream, params, shape);
  if (error != cudaSuccess || launch_of.reduce_items == 0) return error;
  return launch(reduce_partials<T, WeightGeometry>, dim3(static_cast<unsigned>(launch_of.reduce_items)),
                dim3(kReduceThreads), 0, launch_of.stream, params);
}

template <class T>
cudaError_t weight(const WeightParams& params, const DirectWeightLaunch& launch_of) {
  return params.m == 1 ? weight_of<T, 1>(params, launch_of) : weight_of<T, kRows<T>>(params, launch_of);
}

template <class T>
cudaError_t bias(const BiasLaunch& b) {
  const int64_t size = sizeof(T);
  const BiasParams params{b.grad_output,
                          b.result,
                          b.partials,
                          b.stride[0] * size,
                          b.stride[1] * size,
                          b.stride[2] * size,
                          b.stride[3] * size,
                          b.batch,
                          b.channels,
                          b.out_h,
                          b.out_w,
                          b.segments,
                          b.segment_pixels,
                          b.lanes_are_channels};
  const int64_t items = (b.channels + kSlots - 1) / kSlots * b.segments;
  constexpr int shared = kSlots * (kResidues + 1) * static_cast<int>(sizeof(SumOf<T>));
  static_assert(shared <= kSharedBytesOfAll);
  const cudaError_t error =
      launch(sum_pixels<T>, dim3(static_cast<unsigned>(items)), dim3(kDirectThreads), shared, b.stream, params);
  if (error != cudaSuccess || b.partials == 0) return error;
  const int64_t blocks = (b.channels + kDirectThreads - 1) / kDirectThreads;
  return launch(add_pixel_sums<T>, dim3(static_cast<unsigned>(blocks)), dim3(kDirectThreads), 0, b.stream, params);
}

// Calls f with a null pointer to the element type.
template <class F>
auto with_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat64:
      return f(static_cast<double*>(nullptr));
    case DType::kBFloat16:
      return f(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16:
      return f(static_cast<Float16*>(nullptr));
    case DType::kComplex64:
      return f(static_cast<Complex<float>*>(nullptr));
    case DType::kComplex128:
      return f(static_cast<Complex<double>*>(nullptr));
    default:
      return f(static_cast<float*>(nullptr));
  }
}

template <class Pointer>
using Pointed = std::remove_pointer_t<Pointer>;

}  // namespace

cudaError_t launch_direct_conv(DType dtype, const ConvParams& params, const DirectLaunch& launch_of) {
  return with_type(dtype, [&](auto* type) { return conv<Pointed<decltype(type)>>(params, launch_of); });
}

cudaError_t launch_direct_weight(DType dtype, const WeightParams& params, const DirectWeightLaunch& launch_of) {
  return with_type(dtype, [&](auto* type) { return weight<Pointed<decltype(type)>>(params, launch_of); });
}

cudaError_t launch_grad_bias(DType dtype, const BiasLaunch& launch_of) {
  return with_type(dtype, [&](auto* type) { return bias<Pointed<decltype(type)>>(launch_of); });
}

int direct_weight_rows(DType dtype, int64_t m) {
  return m == 1 ? 1 : with_type(dtype, [](auto* type) { return kRows<Pointed<decltype(type)>>; });
}

int direct_weight_shared_bytes(DType dtype, int64_t m) {
  return with_type(dtype, [&](auto* type) {
    using T = Pointed<decltype(type)>;
    return m == 1 ? direct_weight_shared_bytes<SumOf<T>, 1>() : direct_weight_shared_bytes<SumOf<T>, kRows<T>>();
  });
}

}  // namespace conv2d_ext::cuda
