// Pointwise functions, sums and softmax for any architecture.
#include "tables.h"

namespace conv2d_ext::cpu {
const Tables* portable_tables() {
  static constexpr Tables kTables = portable::make_tables();
  return &kTables;
}
#if !defined(__x86_64__)
const Tables* avx2_tables() { return nullptr; }
const Tables* avx512_tables() { return nullptr; }
#endif
}  // namespace conv2d_ext::cpu
