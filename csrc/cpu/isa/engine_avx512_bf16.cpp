// The AVX-512 engine for a CPU with AVX512_BF16, where drivers/gemm.h, rows.h and grad_weight_steps.h take bfloat16
// products in pairs. Only what takes pairs is compiled here; all else is engine_avx512.cpp's.
#include "shared_headers.h"

#if defined(__x86_64__)
#define CONV2D_ISA avx512_bf16
#define CONV2D_NATIVE_VEC "vec_avx512.h"
#define CONV2D_TARGET "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#define CONV2D_BFLOAT16_PAIRS
#define CONV2D_NARROWS_BFLOAT16
#include "target_begin.h"

#include "run_steps.h"

#include "target_end.h"

namespace conv2d_ext::cpu {
const Engine* avx512_bf16_engine() {
  static constexpr Engine kSteps = avx512_bf16::make_engine();
  static const Engine engine = with_steps(*avx512_engine(), kSteps, &Engine::pairs);
  return &engine;
}
}  // namespace conv2d_ext::cpu
#endif
