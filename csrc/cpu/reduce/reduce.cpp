// The kernels of the instruction set in use.
#include "reduce.h"

#include "../isa/tables_in_use.h"

namespace conv2d_ext::cpu::reduce {

namespace {

const Kernels& kernels() { return tables_in_use().kernels; }

// Tables have the real floating-point types in DType's order.
int index_of(DType dtype) { return static_cast<int>(dtype); }

}  // namespace

void sum(DType dtype, const SumCall& call, const Executor& executor) { kernels().sum[index_of(dtype)](call, executor); }
void softmax(DType dtype, bool log, const SoftmaxCall& call, const Executor& executor) {
  kernels().softmax[log][index_of(dtype)](call, executor);
}
void softmax_grad(DType dtype, bool log, const SoftmaxCall& call, const Executor& executor) {
  kernels().softmax_grad[log][index_of(dtype)](call, executor);
}

}  // namespace conv2d_ext::cpu::reduce
