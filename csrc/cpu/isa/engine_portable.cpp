// The engine for any architecture, by the compiler's 128-bit vector extension.
#include "run.h"

namespace conv2d_ext::cpu {
const Engine* portable_engine() {
  static constexpr Engine kEngine = portable::make_engine();
  return &kEngine;
}
#if !defined(__x86_64__)
const Engine* avx2_engine() { return nullptr; }
const Engine* avx512_engine() { return nullptr; }
const Engine* avx512_bf16_engine() { return nullptr; }
const Engine* amx_engine() { return nullptr; }
const Engine* amx_emulated_engine() { return nullptr; }
#endif
}  // namespace conv2d_ext::cpu
