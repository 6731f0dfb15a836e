// The engine compiled for AVX-512 (F, BW, DQ, VL). Its integers are AVX2's.
#include "shared_headers.h"

#if defined(__x86_64__)
#define CONV2D_ISA avx512
#define CONV2D_NATIVE_VEC "vec_avx512.h"
#define CONV2D_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#include "target_begin.h"

#include "run.h"

#include "target_end.h"

namespace conv2d_ext::cpu {
const Engine* avx512_engine() {
  static constexpr Engine kEngine = avx512::make_engine(avx2_engine);
  return &kEngine;
}
}  // namespace conv2d_ext::cpu
#endif
