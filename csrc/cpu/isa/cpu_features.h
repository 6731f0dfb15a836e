// What the CPU has beyond the instruction set that an engine is compiled for, where that gives the same bits sooner.
#pragma once

namespace conv2d_ext::cpu {

#if defined(__x86_64__)
// AVX512_BF16's narrowing of float32 to bfloat16. (No constant: a test clears it.)
inline bool cpu_narrows_bfloat16 = [] {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") != 0;
}();
#endif

}  // namespace conv2d_ext::cpu
