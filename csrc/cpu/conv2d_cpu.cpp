// The CPU entry points: a call becomes tasks (plan/candidates.h), and these run one after the other.
#include "conv2d_cpu.h"

#include "isa/engine.h"
#include "plan/candidates.h"
#include "plan/padding_products.h"
#include "plan/tile_one_pixel.h"

namespace conv2d_ext::cpu {

namespace {

const Executor kSerial{1, [](int64_t items, void* context, void (*body)(void*, int64_t)) {
                         for (int64_t item = 0; item < items; ++item) body(context, item);
                       }};

void run(Call call, const Executor& threads) {
  if (is_empty(call)) return;
  normalize(call);
  const Executor& executor = is_small(call.problem) ? kSerial : threads;
  for_each_task(call, shape_for(call.dtype), [&](const Task& task) {
    if (task.driver == Driver::kPadding) {
      multiply_padding(call, executor);
    } else {
      engine_for(call.dtype, task).run(call.dtype, task, executor);
    }
  });
}

// A batch of products whose second factors differ: one call for each.
struct Products {
  const MatmulSizes& size;
  const DType dtype;
  const ConstMatrixView &mat1, &mat2;
  const Bias& bias;
  const MatrixView& result;

  // The product of `images` pairs of matrices that have one mat2, from number `first` on.
  void multiply(int64_t first, int64_t images, const Executor& executor) const {
    Conv2dProblem p{};
    p.batch = images;
    p.in_channels = size.k;
    p.out_channels = size.n;
    p.in_w = p.out_w = size.m;
    p.in_h = p.out_h = p.kernel_h = p.kernel_w = p.stride_h = p.stride_w = p.dilation_h = p.dilation_w = p.groups = 1;
    const int64_t bytes = first * size_of(dtype);
    Call call{Direction::kForward, p, dtype, {}, {}, {}, bias, /*is_matmul=*/true};
    call.a = {static_cast<const char*>(mat1.data) + mat1.batch_stride * bytes,
              {mat1.batch_stride, mat1.col_stride, 0, mat1.row_stride}};
    call.b = {static_cast<const char*>(mat2.data) + mat2.batch_stride * bytes,
              {mat2.col_stride, mat2.row_stride, 0, 0}};
    call.result = {static_cast<char*>(result.data) + result.batch_stride * bytes,
                   {result.batch_stride, result.col_stride, 0, result.row_stride}};
    run(call, executor);
  }
};

}  // namespace

void forward(const Conv2dProblem& problem, Arithmetic arithmetic, ConstTensorView input, ConstTensorView weight,
             Bias bias, TensorView output, const Executor& executor) {
  Call call{Direction::kForward, problem, arithmetic.dtype, input, weight, output, bias};
  call.allow_winograd = arithmetic.allow_winograd;
  run(call, executor);
}

void grad_input(const Conv2dProblem& problem, Arithmetic arithmetic, ConstTensorView grad_output,
                ConstTensorView weight, TensorView grad_input, const Executor& executor) {
  Call call{Direction::kGradInput, problem, arithmetic.dtype, grad_output, weight, grad_input};
  call.allow_winograd = arithmetic.allow_winograd;
  run(call, executor);
}

void grad_weight(const Conv2dProblem& problem, DType dtype, ConstTensorView grad_output, ConstTensorView input,
                 TensorView grad_weight, const Executor& executor) {
  run({Direction::kGradWeight, problem, dtype, grad_output, input, grad_weight}, executor);
}

void matmul(const MatmulSizes& size, DType dtype, ConstMatrixView mat1, ConstMatrixView mat2, Bias bias,
            MatrixView result, const Executor& executor) {
  if (size.batch == 0 || size.m == 0 || size.n == 0) return;
  Products products{size, dtype, mat1, mat2, bias, result};
  if (size.batch == 1 || mat2.batch_stride == 0) return products.multiply(0, size.batch, executor);
  // Threads share the products out, or each product is shared out among them: of many small products the first.
  if (size.batch < executor.num_threads) {
    for (int64_t b = 0; b < size.batch; ++b) products.multiply(b, 1, executor);
    return;
  }
  run_items(executor, size.batch, &products,
            [](void* context, int64_t b) { static_cast<const Products*>(context)->multiply(b, 1, kSerial); });
}

void grad_bias(const TensorSizes& size, DType dtype, ConstTensorView grad_output, void* grad_bias,
               const Executor& executor) {
  engine_for(dtype).grad_bias(size, dtype, grad_output, grad_bias, executor);
}

}  // namespace conv2d_ext::cpu
