// The kernels of the instruction set in use.
#include "reduce.h"

#include "../isa/tables_in_use.h"

namespace conv2d_ext::cpu::reduce {

namespace {

const Kernels& kernels() { return tables_in_use().kernels; }

}  // namespace

void sum(DType dtype, const SumCall& call, const Executor& executor) { kernels().sum[int(dtype)](call, executor); }
void softmax(DType dtype, bool log, const SoftmaxCall& call, const Executor& executor) {
  kernels().softmax[log][int(dtype)](call, executor);
}
void softmax_grad(DType dtype, bool log, const SoftmaxCall& call, const Executor& executor) {
  kernels().softmax_grad[log][int(dtype)](call, executor);
}

}  // namespace conv2d_ext::cpu::reduce
