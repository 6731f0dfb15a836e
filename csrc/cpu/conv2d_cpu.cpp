// The CPU entry points: a call becomes tasks (plan/candidates.h), and these run one after the other.
#include "conv2d_cpu.h"

#include "isa/engine.h"
#include "plan/candidates.h"
#include "plan/padding_products.h"
#include "plan/tile_one_pixel.h"

namespace conv2d_ext::cpu {

namespace {

void run(Call call, const Executor& threads) {
  if (is_empty(call)) return;
  normalize(call);
  const Executor serial{1, [](int64_t items, void* context, void (*body)(void*, int64_t)) {
                          for (int64_t item = 0; item < items; ++item) body(context, item);
                        }};
  const Executor& executor = is_small(call.problem) ? serial : threads;
  for_each_task(call, shape_for(call.dtype), [&](const Task& task) {
    if (task.driver == Driver::kPadding) {
      multiply_padding(call, executor);
    } else {
      engine_for(call.dtype, task).run(call.dtype, task, executor);
    }
  });
}

}  // namespace

void forward(const Conv2dProblem& problem, DType dtype, ConstTensorView input, ConstTensorView weight, Bias bias,
             TensorView output, const Executor& executor) {
  run({Direction::kForward, problem, dtype, input, weight, output, bias}, executor);
}

void grad_input(const Conv2dProblem& problem, DType dtype, ConstTensorView grad_output, ConstTensorView weight,
                TensorView grad_input, const Executor& executor) {
  run({Direction::kGradInput, problem, dtype, grad_output, weight, grad_input}, executor);
}

void grad_weight(const Conv2dProblem& problem, DType dtype, ConstTensorView grad_output, ConstTensorView input,
                 TensorView grad_weight, const Executor& executor) {
  run({Direction::kGradWeight, problem, dtype, grad_output, input, grad_weight}, executor);
}

void grad_bias(const TensorSizes& size, DType dtype, ConstTensorView grad_output, void* grad_bias,
               const Executor& executor) {
  engine_for(dtype).grad_bias(size, dtype, grad_output, grad_bias, executor);
}

}  // namespace conv2d_ext::cpu
