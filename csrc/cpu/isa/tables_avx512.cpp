// Pointwise functions, sums and softmax compiled for AVX-512 (F, BW, DQ, VL).
#include "shared_headers.h"

#if defined(__x86_64__)
#include <memory>

#include "tables_in_use.h"

#define CONV2D_ISA avx512
#define CONV2D_NATIVE_VEC "vec_avx512.h"
#define CONV2D_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#include "target_begin.h"

#include "tables.h"

#include "target_end.h"

namespace conv2d_ext::cpu {
const Tables* avx512_tables() {
  static constexpr Tables kTables = avx512::make_tables();
  return &kTables;
}
}  // namespace conv2d_ext::cpu
#endif
