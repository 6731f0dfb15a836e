// The dispatcher's CPU kernels: tensors become raw pointers and strides.
#include <torch/library.h>

#include "../conv2d_device_ops.h"
#include "../conv2d_tensors.h"
#include "base/huge_pages.h"
#include "conv2d_cpu.h"
#include "torch_executor.h"

namespace conv2d_ext::cpu {
namespace {

using at::Tensor;

Bias bias_of(const Tensor& bias) { return bias.defined() ? Bias{bias.const_data_ptr(), bias.stride(0)} : Bias{}; }

void run(const Call& call) {
  with_memory_errors([&] { cpu::run(call, executor()); });
}

struct Cpu {
  static void forward(const Conv2dProblem& problem, const Tensor& input, const Tensor& weight, const Tensor& bias,
                      const Tensor& output, bool allow_winograd) {
    ask_for_huge_pages(output.mutable_data_ptr(), output.nbytes());
    run({Direction::kForward, problem, to_dtype(input.scalar_type()), view(input), view(weight), mutable_view(output),
         bias_of(bias), allow_winograd});
  }

  static void grad_input(const Conv2dProblem& problem, const Tensor& grad_output, const Tensor& weight,
                         const Tensor& result, bool allow_winograd) {
    ask_for_huge_pages(result.mutable_data_ptr(), result.nbytes());
    run({Direction::kGradInput, problem, to_dtype(weight.scalar_type()), view(grad_output), view(weight),
         mutable_view(result), /*bias=*/{}, allow_winograd});
  }

  static void grad_weight(const Conv2dProblem& problem, const Tensor& grad_output, const Tensor& input,
                          const Tensor& result) {
    run({Direction::kGradWeight, problem, to_dtype(input.scalar_type()), view(grad_output), view(input),
         mutable_view(result)});
  }

  static void grad_bias(const Tensor& grad_output, const Tensor& result) {
    with_memory_errors([&] {
      const TensorSizes size{grad_output.dim() == 4 ? grad_output.size(0) : 1, grad_output.size(-3),
                             grad_output.size(-2), grad_output.size(-1)};
      cpu::grad_bias(size, to_dtype(grad_output.scalar_type()), view(grad_output), result.mutable_data_ptr(),
                     executor());
    });
  }

  static void matmul(const Tensor& mat1, const Tensor& mat2, const Tensor& bias, const Tensor& result) {
    with_memory_errors([&] {
      ask_for_huge_pages(result.mutable_data_ptr(), result.nbytes());
      cpu::matmul(matmul_sizes(mat1, mat2), to_dtype(mat1.scalar_type()), matrix_view(mat1), matrix_view(mat2),
                  bias_of(bias), mutable_matrix_view(result), executor());
    });
  }
};

using Ops = DeviceOps<Cpu>;

TORCH_LIBRARY_IMPL(conv2d_ext, CPU, m) { Ops::register_ops(m); }

// Not to compute, but so that the checks, and not the dispatcher, say what is wrong with these.
TORCH_LIBRARY_IMPL(conv2d_ext, SparseCPU, m) { Ops::register_ops(m); }
TORCH_LIBRARY_IMPL(conv2d_ext, SparseCsrCPU, m) { Ops::register_ops(m); }
TORCH_LIBRARY_IMPL(conv2d_ext, MkldnnCPU, m) { Ops::register_ops(m); }
TORCH_LIBRARY_IMPL(conv2d_ext, QuantizedCPU, m) { Ops::register_ops(m); }

}  // namespace
}  // namespace conv2d_ext::cpu
