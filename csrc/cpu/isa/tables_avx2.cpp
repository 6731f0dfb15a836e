// Pointwise functions, sums and softmax compiled for AVX2 + FMA + F16C.
#include "shared_headers.h"

#if defined(__x86_64__)
#include <memory>

#include "tables_in_use.h"

#define CONV2D_ISA avx2
#define CONV2D_NATIVE_VEC "vec_avx2.h"
#define CONV2D_TARGET "avx2,fma,f16c"
#include "target_begin.h"

#include "tables.h"

#include "target_end.h"

namespace conv2d_ext::cpu {
const Tables* avx2_tables() {
  static constexpr Tables kTables = avx2::make_tables();
  return &kTables;
}
}  // namespace conv2d_ext::cpu
#endif
