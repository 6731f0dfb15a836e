// The pointwise functions compiled for AVX-512 (F, BW, DQ, VL).
#include "../isa/shared_headers.h"
#include "pointwise.h"

#if defined(__x86_64__)
#define CONV2D_ISA avx512
#define CONV2D_NATIVE_VEC "vec_avx512.h"
#define CONV2D_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#include "../isa/target_begin.h"

#include "rows.h"

#include "../isa/target_end.h"

namespace conv2d_ext::cpu::pointwise {
const Rows* avx512_rows() {
  static constexpr Rows kRows = avx512::make_rows();
  return &kRows;
}
}  // namespace conv2d_ext::cpu::pointwise
#else
namespace conv2d_ext::cpu::pointwise {
const Rows* avx512_rows() { return nullptr; }
}  // namespace conv2d_ext::cpu::pointwise
#endif
