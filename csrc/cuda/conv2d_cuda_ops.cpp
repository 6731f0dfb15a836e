// The dispatcher's CUDA kernels: tensors become raw pointers and strides, the workspace comes from PyTorch's caching
// allocator, and what is launched goes to the current stream of the tensors' device. Nothing waits for the device, so
// calls can be captured in a CUDA graph.
#include "conv2d_cuda_ops.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "../conv2d_device_ops.h"
#include "../conv2d_tensors.h"
#include "float32_math.h"

namespace conv2d_ext::cuda {

Machine machine_of(c10::DeviceIndex device) {
  const cudaDeviceProp* const properties = at::cuda::getDeviceProperties(device);  // cached by PyTorch
  TORCH_CHECK(properties->major >= 8, "conv2d on CUDA needs a GPU of compute capability 8.0 or newer, but device ",
              static_cast<int>(device), " (", properties->name, ") has ", properties->major, ".", properties->minor);
  return with_wants({properties->multiProcessorCount, static_cast<int>(properties->sharedMemPerBlockOptin)});
}

namespace {

using at::Tensor;

// The device of a tensor as the current one, its current stream, and what plans are made for. A destroyed workspace
// goes back to the allocator, which gives it to later work of the same stream alone.
class Call {
 public:
  explicit Call(const Tensor& tensor, Float32Math (*setting)() = float32_math)
      : guard_(tensor.device()),
        stream_(c10::cuda::getCurrentCUDAStream()),
        dtype_(to_dtype(tensor.scalar_type())),
        math_(dtype_ == DType::kFloat32 ? setting() : Float32Math::kIeee) {}

  DType dtype() const { return dtype_; }
  Float32Math math() const { return math_; }
  cudaStream_t stream() const { return stream_; }
  Machine machine() const { return machine_of(guard_.current_device().index()); }

  void* workspace(int64_t bytes) {
    if (bytes == 0) return nullptr;
    workspace_ = c10::cuda::CUDACachingAllocator::get()->allocate(static_cast<size_t>(bytes));
    return workspace_.get();
  }

 private:
  c10::cuda::CUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
  DType dtype_;
  Float32Math math_;
  c10::DataPtr workspace_;
};

// The problem has passed the checks of all devices; some sizes are beyond the kernels here.
void check_plan(const Plan& plan, const Conv2dProblem& p) {
  TORCH_CHECK(plan.error[0] == '\0', "conv2d: ", plan.error, ", but got input of size [", p.batch, ", ", p.in_channels,
              ", ", p.in_h, ", ", p.in_w, "], weight of size [", p.out_channels, ", ", p.in_channels_per_group(), ", ",
              p.kernel_h, ", ", p.kernel_w, "], stride=[", p.stride_h, ", ", p.stride_w, "], padding=[", p.pad_top,
              ", ", p.pad_bottom, ", ", p.pad_left, ", ", p.pad_right, "], dilation=[", p.dilation_h, ", ",
              p.dilation_w, "]");
}

struct Cuda {
  static void forward(const Conv2dProblem& problem, const Tensor& input, const Tensor& weight, const Tensor& bias,
                      const Tensor& output, bool /*allow_winograd*/) {
    Call call(input);
    const auto x = view(input);
    const auto w = view(weight);
    const auto y = mutable_view(output);
    const Plan plan = plan_forward(problem, call.dtype(), call.math(), x, w, y.stride, call.machine());
    check_plan(plan, problem);
    C10_CUDA_CHECK(cuda::forward(plan, problem, x, w, bias.defined() ? bias.const_data_ptr() : nullptr,
                                 bias.defined() ? bias.stride(0) : 0, y, call.workspace(plan.workspace_bytes),
                                 call.stream()));
  }

  static void grad_input(const Conv2dProblem& problem, const Tensor& grad_output, const Tensor& weight,
                         const Tensor& result, bool /*allow_winograd*/) {
    Call call(grad_output);
    const auto gy = view(grad_output);
    const auto w = view(weight);
    const auto gx = mutable_view(result);
    const Plan plan = plan_grad_input(problem, call.dtype(), call.math(), gy, w, gx.stride, call.machine());
    check_plan(plan, problem);
    C10_CUDA_CHECK(cuda::grad_input(plan, problem, gy, w, gx, call.workspace(plan.workspace_bytes), call.stream()));
  }

  static void grad_weight(const Conv2dProblem& problem, const Tensor& grad_output, const Tensor& input,
                          const Tensor& result) {
    Call call(grad_output);
    const auto gy = view(grad_output);
    const auto x = view(input);
    const Plan plan = plan_grad_weight(problem, call.dtype(), call.math(), gy, x, call.machine());
    check_plan(plan, problem);
    C10_CUDA_CHECK(cuda::grad_weight(plan, problem, gy, x, mutable_view(result), call.workspace(plan.workspace_bytes),
                                     call.stream()));
  }

  static void grad_bias(const Tensor& grad_output, const Tensor& result) {
    Call call(grad_output);
    const int64_t batch = grad_output.dim() == 4 ? grad_output.size(0) : 1;
    const int64_t channels = grad_output.size(-3), height = grad_output.size(-2), width = grad_output.size(-1);
    const char* const error = grad_bias_error(batch, channels, height, width, call.dtype());
    TORCH_CHECK(error[0] == '\0', "conv2d_grad_bias: ", error, ", but got grad_output of size ", grad_output.sizes());
    const int64_t bytes = grad_bias_workspace(batch, channels, height, width, call.dtype());
    C10_CUDA_CHECK(cuda::grad_bias(batch, channels, height, width, call.dtype(), view(grad_output),
                                   result.mutable_data_ptr(), call.workspace(bytes), call.stream()));
  }

  static void matmul(const Tensor& mat1, const Tensor& mat2, const Tensor& bias, const Tensor& result) {
    Call call(mat1, float32_matmul_math);
    const auto size = matmul_sizes(mat1, mat2);
    const auto a = matrix_view(mat1);
    const auto b = matrix_view(mat2);
    const auto c = mutable_matrix_view(result);
    const Plan plan = plan_matmul(size, call.dtype(), call.math(), a, b, c, call.machine());
    TORCH_CHECK(plan.error[0] == '\0', "matmul: ", plan.error, ", but got mat1 of size ", mat1.sizes(),
                " and mat2 of size ", mat2.sizes());
    C10_CUDA_CHECK(cuda::matmul(plan, size, a, b, bias.defined() ? bias.const_data_ptr() : nullptr,
                                bias.defined() ? bias.stride(0) : 0, c, call.workspace(plan.workspace_bytes),
                                call.stream()));
  }
};

using Ops = DeviceOps<Cuda>;

TORCH_LIBRARY_IMPL(conv2d_ext, CUDA, m) { Ops::register_ops(m); }

// Not to compute, but so that the checks, and not the dispatcher, say what is wrong with these.
TORCH_LIBRARY_IMPL(conv2d_ext, SparseCUDA, m) { Ops::register_ops(m); }
TORCH_LIBRARY_IMPL(conv2d_ext, SparseCsrCUDA, m) { Ops::register_ops(m); }
TORCH_LIBRARY_IMPL(conv2d_ext, QuantizedCUDA, m) { Ops::register_ops(m); }

}  // namespace
}  // namespace conv2d_ext::cuda
