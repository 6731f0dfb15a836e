// Which instruction sets the machine has, and which engine runs a dtype or task.
#include "engine.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace conv2d_ext::cpu {

Engine with_steps(const Engine& base, const Engine& steps, const Engine* Engine::* member) {
  Engine engine = base;
  engine.isa = steps.isa;
  engine.*member = &steps;
  return engine;
}

bool machine_has(const char* isa) {
#if defined(__x86_64__)
  if (std::strcmp(isa, "amx") == 0) return machine_has("avx512_bf16") && why_no_amx() == nullptr;
  if (std::strcmp(isa, "amx_emulated") == 0) return machine_has("avx512");
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

bool machine_prefers([[maybe_unused]] const char* isa) {
#if defined(__x86_64__)
  // Intel's VDPBF16PS has half the rate of its multiply-adds, so that it takes as long as they for as many products,
  // and pairs cost more to pack: float16, which is widened, was 1.4 times as fast on Sapphire Rapids. AMD's has the
  // full rate.
  if (std::strcmp(isa, "avx512_bf16") == 0) return !__builtin_cpu_is("intel");
#endif
  return true;
}

const Engine& engine_for(DType dtype) {
  const Engine& widest = engine();
  return is_integer(dtype) && widest.integers != nullptr ? *widest.integers() : widest;
}

namespace {

// Whether this is a CPU known to take twice the time for a vector of 512 bits as for one of 256: Zen 4, AMD's family
// 19h, of which Zen 3 has no AVX-512. Not every compiler's __builtin_cpu_is knows amdfam19h. CPUID is asked once: under
// a hypervisor it takes longer than a small convolution.
bool halves_wide_vectors() {
#if defined(__x86_64__)
  static const bool halves = [] {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    const bool known = __builtin_cpu_is("amd") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0;
    return known && (eax >> 8 & 0xf) + (eax >> 20 & 0xff) == 0x19;
  }();
  return halves;
#else
  return false;
#endif
}

}  // namespace

IsaShape shape_for(DType dtype) {
  const Engine& taken = engine_for(dtype);
  IsaShape shape = taken.shape(dtype);
  shape.vector.halves_pay = halves_wide_vectors() && shape.vector.is_wide();
  shape.has_pairs = dtype == DType::kBFloat16 && taken.pairs != nullptr;
  if (shape.has_pairs) shape.pairs = taken.pairs->shape(dtype).vector;
  shape.has_amx = dtype == DType::kBFloat16 && taken.amx != nullptr;
  if (shape.has_amx) shape.amx = taken.amx->shape(dtype).vector;
  const bool lacks_amx = dtype == DType::kBFloat16 && taken.amx == nullptr && amx_engine() != nullptr;
  if (lacks_amx) shape.no_amx = isa_is_forced() ? "another instruction set was asked for" : why_no_amx();
  return shape;
}

const Engine& engine_for(DType dtype, const Task& task) {
  const Engine& taken = engine_for(dtype);
  const int64_t step = step_of(task);
  return step == 1 ? taken : step == 2 ? *taken.pairs : *taken.amx;
}

}  // namespace conv2d_ext::cpu
