// The CPU entry points: a call becomes tasks (plan/candidates.h), and these run one after the other.
#include "conv2d_cpu.h"

#include "isa/engine.h"
#include "plan/candidates.h"
#include "plan/padding_products.h"
#include "plan/tile_depthwise.h"
#include "plan/tile_one_pixel.h"

namespace conv2d_ext::cpu {

namespace {

void run_task(const Task& task, const Executor& executor) {
  if (task.driver == Driver::kPadding) return multiply_padding(*task.call, executor);
  const DType dtype = task.call->dtype;
  engine_for(dtype, task).run(dtype, task, executor);
}

// Phases of a depthwise input gradient read the same grad_output. They become one task, which computes a tile of each
// while that lies in the caches.
void run_phases_in_turn(const Call& call, const Executor& executor) {
  ConvGemm gemms[kMostDepthwiseGemms];
  Task phases{Driver::kDepthwise, &call, gemms, 0};
  const auto run_phases = [&] {
    if (phases.gemms > 0) run_task(phases, executor);
    phases.gemms = 0;
  };
  for_each_task(call, shape_for(call.dtype), executor.num_threads, [&](const Task& task) {
    if (task.driver != Driver::kDepthwise) return run_task(task, executor);
    if (phases.gemms == kMostDepthwiseGemms) run_phases();
    ConvGemm& gemm = gemms[phases.gemms++] = *task.gemm;
    gemm.owns_columns_between = false;  // items of several phases run at once
  });
  run_phases();
}

}  // namespace

void run(Call call, const Executor& threads) {
  if (is_empty(call)) return;
  normalize(call);
  const Executor& executor = is_small(call.problem) ? kSerial : threads;
  if (has_phases_in_turn(call)) return run_phases_in_turn(call, executor);
  const IsaShape isa = shape_for(call.dtype);
  const auto run_all = [&](const Call& now) {
    for_each_task(now, isa, executor.num_threads, [&](const Task& task) { run_task(task, executor); });
  };
  const int64_t batch = call.problem.batch, at_once = images_in_turn(call, isa, executor.num_threads);
  if (at_once == 0) return run_all(call);
  for (int64_t n = 0; n < batch; n += at_once) run_all(images_of(call, n, min64(at_once, batch - n)));
}

void matmul(const MatmulSizes& size, DType dtype, ConstMatrixView mat1, ConstMatrixView mat2, Bias bias,
            MatrixView result, const Executor& executor) {
  if (size.batch == 1 || mat2.batch_stride == 0) {
    return run(product_call(size, dtype, mat1, mat2, bias, result), executor);
  }
  // A batch whose second factors differ: one call for each product.
  MatmulSizes one = size;
  one.batch = 1;
  const auto of = [&](auto matrix, int64_t b) {
    matrix.data = behind(matrix.data, b * matrix.batch_stride, dtype);
    return matrix;
  };
  auto multiply = [&](int64_t b, const Executor& now) {
    run(product_call(one, dtype, of(mat1, b), of(mat2, b), bias, of(result, b)), now);
  };
  if (!shares_products(size, mat2, executor.num_threads)) {
    for (int64_t b = 0; b < size.batch; ++b) multiply(b, executor);
    return;
  }
  run_items(executor, size.batch, &multiply,
            [](void* context, int64_t b) { (*static_cast<decltype(multiply)*>(context))(b, kSerial); });
}

void grad_bias(const TensorSizes& size, DType dtype, ConstTensorView grad_output, void* grad_bias,
               const Executor& executor) {
  engine_for(dtype).grad_bias(size, dtype, grad_output, grad_bias, executor);
}

}  // namespace conv2d_ext::cpu
