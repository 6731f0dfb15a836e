// The engine compiled for AVX2 + FMA + F16C.
#include "shared_headers.h"

#if defined(__x86_64__)
#define CONV2D_ISA avx2
#define CONV2D_NATIVE_VEC "vec_avx2.h"
#define CONV2D_TARGET "avx2,fma,f16c"
#include "target_begin.h"

#include "run.h"

#include "target_end.h"

namespace conv2d_ext::cpu {
const Engine* avx2_engine() {
  static constexpr Engine kEngine = avx2::make_engine();
  return &kEngine;
}
}  // namespace conv2d_ext::cpu
#endif
