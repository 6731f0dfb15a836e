// engine_amx.cpp for tests on CPUs without AMX: the same code, but for the instructions on tiles, which are emulated
// (isa/amx.h). Slow; runs where CONV2D_EXT_CPU_ISA names it.
#include "shared_headers.h"

#if defined(__x86_64__)
#define CONV2D_ISA amx_emulated
#define CONV2D_NATIVE_VEC "vec_avx512.h"
#define CONV2D_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#define CONV2D_AMX
#define CONV2D_AMX_EMULATED
#include "target_begin.h"

#include "run_steps.h"

#include "target_end.h"

namespace conv2d_ext::cpu {
const Engine* amx_emulated_engine() {
  static constexpr Engine kSteps = amx_emulated::make_engine();
  static const Engine engine = with_steps(*avx512_engine(), kSteps, &Engine::amx);
  return &engine;
}
}  // namespace conv2d_ext::cpu
#endif
