// What the machine has, and which kernels of the engine in use take a problem.
#include "engine.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace conv2d_ext::cpu {

bool machine_has(const char* isa) {
#if defined(__x86_64__)
  if (std::strcmp(isa, "avx512_bf16") == 0) return __builtin_cpu_supports("avx512bf16") && machine_has("avx512");
  if (std::strcmp(isa, "avx512") == 0) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && machine_has("avx2");
  }
  if (std::strcmp(isa, "avx2") == 0) {
    // Not every compiler's __builtin_cpu_supports knows F16C.
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }
#endif
  return std::strcmp(isa, "portable") == 0;
}

EngineChoice choose_engine(DType dtype, const ConvGemm& gemm) {
  const Engine& widest = engine();
  if (dtype == DType::kBFloat16 && widest.pairs != nullptr && takes_pairs(gemm, widest.vector_shape(dtype))) {
    return {*widest.pairs, in_pairs(gemm)};
  }
  return {widest, gemm};
}

bool joins_phases(const Conv2dProblem& problem, DType dtype, const int64_t* grad_output, const int64_t* weight,
                  const int64_t* grad_input, JoinedPhases& phases) {
  const Engine& widest = engine();
  // Products in pairs have an order of their own.
  if (dtype == DType::kBFloat16 && widest.pairs != nullptr) return false;
  return join_phases(problem, widest.vector_shape(dtype), grad_output, weight, grad_input, phases);
}

}  // namespace conv2d_ext::cpu
