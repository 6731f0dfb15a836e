// The instruction set in use.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "engine.h"

namespace conv2d_ext::cpu {

namespace {

const char* const kIsaVariable = "CONV2D_EXT_CPU_ISA";

const Engine& choose_isa() {
  const Engine* const engines[] = {avx512_bf16_engine(), avx512_engine(), avx2_engine(), portable_engine()};
  const char* const wanted = std::getenv(kIsaVariable);
  const bool forced = wanted != nullptr && *wanted != '\0';
  for (const Engine* engine : engines) {
    if (engine == nullptr || (forced && std::strcmp(engine->isa, wanted) != 0)) continue;
    if (machine_has(engine->isa) && (forced || machine_prefers(engine->isa))) return *engine;
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

const char* isa_name() { return engine().isa; }

const char* compiled_isas() { return avx2_engine() != nullptr ? "portable, avx2, avx512, avx512_bf16" : "portable"; }

}  // namespace conv2d_ext::cpu
