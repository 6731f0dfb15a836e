// The kernels of the instruction set in use, as pointwise.h and reduce.h declare them.
#include "tables_in_use.h"

#include <string_view>

#include "engine.h"

namespace conv2d_ext::cpu {

namespace {

// (AVX512_BF16 and AMX have AVX-512's kernels.)
const Tables& in_use() {
  static const Tables& chosen = []() -> const Tables& {
    const std::string_view kernels = engine().kernels;
    return *(kernels == "avx512" ? avx512_tables() : kernels == "avx2" ? avx2_tables() : portable_tables());
  }();
  return chosen;
}

}  // namespace

namespace pointwise {
ValueRow value_row(Function function, DType dtype) { return in_use().rows.value[int(function)][int(dtype)]; }
SlopeRow slope_row(Function function, DType dtype) { return in_use().rows.slope[int(function)][int(dtype)]; }
PairRow pair_row(PairFunction function, DType dtype) { return in_use().rows.pair[int(function)][int(dtype)]; }
}  // namespace pointwise

namespace reduce {
void sum(DType dtype, const SumCall& call, const Executor& executor) {
  in_use().kernels.sum[int(dtype)](call, executor);
}
void softmax(DType dtype, bool log, const SoftmaxCall& call, const Executor& executor) {
  in_use().kernels.softmax[log][int(dtype)](call, executor);
}
void softmax_grad(DType dtype, bool log, const SoftmaxCall& call, const Executor& executor) {
  in_use().kernels.softmax_grad[log][int(dtype)](call, executor);
}
}  // namespace reduce

}  // namespace conv2d_ext::cpu
