// Which engine runs, and the memory that engines work in.
#include "engine.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace conv2d_ext::cpu {

// ---- the instruction set --------------------------------------------------------------------------------------------

namespace {

const char* const kIsaVariable = "CONV2D_EXT_CPU_ISA";

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

const Engine& choose_isa() {
  const Engine* const engines[] = {avx512_bf16_engine(), avx512_engine(), avx2_engine(), portable_engine()};
  const char* const wanted = std::getenv(kIsaVariable);
  const bool forced = wanted != nullptr && *wanted != '\0';
  for (const Engine* engine : engines) {
    if (engine == nullptr || (forced && std::strcmp(engine->isa, wanted) != 0)) continue;
    if (machine_has(engine->isa)) return *engine;
    if (forced) {
      throw std::runtime_error(std::string(kIsaVariable) + "=" + wanted + ": this CPU lacks that instruction set");
    }
  }
  throw std::runtime_error(std::string(kIsaVariable) + "=" + wanted + ": expected one of " + compiled_isas());
}

}  // namespace

const Engine& engine() {
  static const Engine& chosen = choose_isa();
  return chosen;
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

const char* isa_name() { return engine().isa; }

const char* compiled_isas() { return avx2_engine() != nullptr ? "portable, avx2, avx512, avx512_bf16" : "portable"; }

// ---- memory ---------------------------------------------------------------------------------------------------------

namespace {

constexpr int64_t kAlignment = 64;

void* allocate(int64_t bytes) { return ::operator new(static_cast<size_t>(bytes), std::align_val_t(kAlignment)); }
void release(void* memory) { ::operator delete(memory, std::align_val_t(kAlignment)); }

struct ThreadScratch {
  void* memory = nullptr;
  int64_t bytes = 0;
  ~ThreadScratch() { release(memory); }
};
thread_local ThreadScratch scratch;

}  // namespace

void* thread_scratch(int64_t bytes) {
  if (scratch.bytes < bytes) {
    release(scratch.memory);
    scratch.memory = nullptr;
    scratch.bytes = 0;
    scratch.memory = allocate(bytes);
    scratch.bytes = bytes;
  }
  return scratch.memory;
}

CallWorkspace::CallWorkspace(int64_t bytes) : data_(allocate(bytes)) {}
CallWorkspace::~CallWorkspace() { release(data_); }

}  // namespace conv2d_ext::cpu
