// The depthwise kernels of the dtypes that have them.
#include "depthwise_kernel.cuh"

namespace conv2d_ext::cuda {

namespace {

template <class T, int VECTOR, int KERNEL>
cudaError_t conv_of(const ConvParams& params, const DepthwiseLaunch& launch_of) {
  void (*const kernel)(const ConvParams, const DepthwiseShape) =
      launch_of.step == 1 ? depthwise_conv<T, VECTOR, KERNEL, 1> : depthwise_conv<T, VECTOR, KERNEL, 2>;
  return launch(kernel, dim3(static_cast<unsigned>(launch_of.shape.phase_blocks * launch_of.phases)),
                dim3(kDepthwiseThreads), 0, launch_of.stream, params, launch_of.shape);
}

template <class T, int VECTOR>
cudaError_t conv(const ConvParams& params, const DepthwiseLaunch& launch_of) {
  if (launch_of.kernel == 3) return conv_of<T, VECTOR, 3>(params, launch_of);
  if (launch_of.kernel == 5) return conv_of<T, VECTOR, 5>(params, launch_of);
  // Two channels' rows and kernels of 7 x 7 would take more registers than there are.
  if constexpr (VECTOR == 1) return conv_of<T, VECTOR, 7>(params, launch_of);
  return cudaErrorInvalidValue;
}

template <class T>
cudaError_t conv_16(const ConvParams& params, const DepthwiseLaunch& launch_of) {
  return launch_of.vector == 2 ? conv<T, 2>(params, launch_of) : conv<T, 1>(params, launch_of);
}

}  // namespace

bool has_depthwise_kernel(DType dtype, int kernel, int vector) {
  switch (dtype) {
    case DType::kFloat32:
      return vector == 1;
    case DType::kFloat16:
    case DType::kBFloat16:
      return vector == 1 || kernel < 7;
    default:
      return false;
  }
}

int depthwise_threads() { return kDepthwiseThreads; }

cudaError_t launch_depthwise_conv(DType dtype, const ConvParams& params, const DepthwiseLaunch& launch_of) {
  if (dtype == DType::kFloat16) return conv_16<Float16>(params, launch_of);
  if (dtype == DType::kBFloat16) return conv_16<BFloat16>(params, launch_of);
  return conv<float, 1>(params, launch_of);
}

}  // namespace conv2d_ext::cuda
