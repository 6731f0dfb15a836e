// The kernels of the instruction set in use.
#include "reduce.h"

#include <cstring>

#include "../isa/engine.h"

namespace conv2d_ext::cpu::reduce {

namespace {

// AVX512_BF16 has nothing to add here.
const Kernels& choose_kernels() {
#if defined(__x86_64__)
  const char* const isa = engine().isa;
  if (std::strncmp(isa, "avx512", 6) == 0) return *avx512_kernels();
  if (std::strcmp(isa, "avx2") == 0) return *avx2_kernels();
#endif
  return *portable_kernels();
}

const Kernels& kernels() {
  static const Kernels& chosen = choose_kernels();
  return chosen;
}

int index_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 1;
    case DType::kBFloat16:
      return 2;
    case DType::kFloat16:
      return 3;
    default:
      return 0;
  }
}

}  // namespace

void sum(DType dtype, const SumCall& call, const Executor& executor) { kernels().sum[index_of(dtype)](call, executor); }
void softmax(DType dtype, bool log, const SoftmaxCall& call, const Executor& executor) {
  kernels().softmax[log][index_of(dtype)](call, executor);
}
void softmax_grad(DType dtype, bool log, const SoftmaxCall& call, const Executor& executor) {
  kernels().softmax_grad[log][index_of(dtype)](call, executor);
}

}  // namespace conv2d_ext::cpu::reduce
