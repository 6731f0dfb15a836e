// The AVX-512 engine for a CPU with AVX512_BF16, where drivers/gemm.h takes bfloat16 products in pairs. Only this
// driver is compiled here; all others are those of engine_avx512.cpp.
#include "shared_headers.h"

#if defined(__x86_64__)
#define CONV2D_ISA avx512_bf16
#define CONV2D_NATIVE_VEC "vec_avx512.h"
#define CONV2D_TARGET "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#define CONV2D_BFLOAT16_PAIRS
#define CONV2D_NARROWS_BFLOAT16
#include "target_begin.h"

#include "../drivers/gemm.h"
#include "../drivers/rows.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

inline void run_task(DType, const Task& task, const Executor& executor) {
  const int threads = executor.num_threads;
  if (task.driver == Driver::kColumns) {
    run_all(RowCall<BFloat16, float, Along::kK>(*task.rows, threads), executor);
  } else {
    run_all(ConvCall<BFloat16, float, false>(*task.gemm, threads), executor);
  }
}
inline IsaShape shape_of(DType) {
  IsaShape shape{};
  shape.vector = vector_shape<float>();
  return shape;
}
inline int rows_of(DType, int64_t vectors) { return ukernels_for<float, false>(vectors).rows; }

constexpr Engine make_engine() {
  Engine engine{};
  engine.isa = engine.kernels = kIsaName;
  engine.run = run_task;
  engine.shape = shape_of;
  engine.rows = rows_of;
  return engine;
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA

#include "target_end.h"

namespace conv2d_ext::cpu {
const Engine* avx512_bf16_engine() {
  static const Engine engine = [] {
    static constexpr Engine kPairs = avx512_bf16::make_engine();
    Engine same = *avx512_engine();
    same.isa = avx512_bf16::kIsaName;
    same.pairs = &kPairs;
    return same;
  }();
  return &engine;
}
}  // namespace conv2d_ext::cpu
#endif
