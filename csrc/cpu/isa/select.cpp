// The instruction set in use.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../conv2d_cpu.h"
#include "engine.h"

namespace conv2d_ext::cpu {

namespace {

const char* const kIsaVariable = "CONV2D_EXT_CPU_ISA";

const Engine& choose_isa() {
  const Engine* const engines[] = {amx_engine(),  avx512_bf16_engine(), avx512_engine(),
                                   avx2_engine(), portable_engine(),    amx_emulated_engine()};
  const char* const wanted = std::getenv(kIsaVariable);
  const bool forced = wanted != nullptr && isa_is_forced();
  for (const Engine* engine : engines) {
    if (engine == nullptr || (forced && std::strcmp(engine->isa, wanted) != 0)) continue;
    if (machine_has(engine->isa) && (forced || machine_prefers(engine->isa))) return *engine;
    if (forced) {
      std::string reason = "this CPU lacks that instruction set";
      if (std::strcmp(wanted, "amx") == 0 && why_no_amx() != nullptr) {
        reason = std::string("this CPU can't use that instruction set: ") + why_no_amx();
      }
      throw std::runtime_error(std::string(kIsaVariable) + "=" + wanted + ": " + reason);
    }
  }
  throw std::runtime_error(std::string(kIsaVariable) + "=" + wanted + ": expected one of " + compiled_isas());
}

}  // namespace

bool isa_is_forced() {
  static const bool forced = [] {
    const char* const wanted = std::getenv(kIsaVariable);
    return wanted != nullptr && *wanted != '\0';
  }();
  return forced;
}

const Engine& engine() {
  static const Engine& chosen = choose_isa();
  return chosen;
}

const char* isa_name() { return engine().isa; }

const char* compiled_isas() {
  if (avx2_engine() == nullptr) return "portable";
  return amx_engine() != nullptr ? "portable, avx2, avx512, avx512_bf16, amx, amx_emulated"
                                 : "portable, avx2, avx512, avx512_bf16, amx_emulated";
}

}  // namespace conv2d_ext::cpu
