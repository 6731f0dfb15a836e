// The pointwise functions compiled for AVX2 + FMA + F16C.
#include "../isa/shared_headers.h"
#include "pointwise.h"

#if defined(__x86_64__)
#define CONV2D_ISA avx2
#define CONV2D_NATIVE_VEC "vec_avx2.h"
#define CONV2D_TARGET "avx2,fma,f16c"
#include "../isa/target_begin.h"

#include "rows.h"

#include "../isa/target_end.h"

namespace conv2d_ext::cpu::pointwise {
const Rows* avx2_rows() {
  static constexpr Rows kRows = avx2::make_rows();
  return &kRows;
}
}  // namespace conv2d_ext::cpu::pointwise
#else
namespace conv2d_ext::cpu::pointwise {
const Rows* avx2_rows() { return nullptr; }
}  // namespace conv2d_ext::cpu::pointwise
#endif
