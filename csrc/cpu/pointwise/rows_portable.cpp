// The pointwise functions for any architecture, by the compiler's 128-bit vector extension.
#include "rows.h"

namespace conv2d_ext::cpu::pointwise {
const Rows* portable_rows() {
  static constexpr Rows kRows = portable::make_rows();
  return &kRows;
}
#if !defined(__x86_64__)
const Rows* avx2_rows() { return nullptr; }
const Rows* avx512_rows() { return nullptr; }
#endif
}  // namespace conv2d_ext::cpu::pointwise
