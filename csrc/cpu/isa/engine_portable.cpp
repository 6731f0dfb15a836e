// The engine for any architecture, by the compiler's 128-bit vector extension.
#include "run.h"

namespace conv2d_ext::cpu {
const Engine* portable_engine() {
  static constexpr Engine kEngine = portable::make_engine();
  return &kEngine;
}
}  // namespace conv2d_ext::cpu
