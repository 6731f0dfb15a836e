// The AVX-512 engine for a CPU with AMX (AMX_TILE, AMX_BF16), where drivers/amx.h and grad_weight_steps.h multiply
// tiles of bfloat16. Only what takes tiles is compiled here; all else is engine_avx512.cpp's.
#include "shared_headers.h"

#if defined(__x86_64__)
// Older compilers don't know the instructions.
#if defined(__clang__) ? __clang_major__ >= 11 : __GNUC__ >= 11
#define CONV2D_ISA amx
#define CONV2D_NATIVE_VEC "vec_avx512.h"
#define CONV2D_TARGET "amx-tile,amx-bf16,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#define CONV2D_AMX
#define CONV2D_NARROWS_BFLOAT16
#include "target_begin.h"

#include "run_steps.h"

#include "target_end.h"

namespace conv2d_ext::cpu {
const Engine* amx_engine() {
  static constexpr Engine kSteps = amx::make_engine();
  static const Engine engine = with_steps(*avx512_engine(), kSteps, &Engine::amx);
  return &engine;
}
}  // namespace conv2d_ext::cpu
#else
namespace conv2d_ext::cpu {
const Engine* amx_engine() { return nullptr; }
}  // namespace conv2d_ext::cpu
#endif
#endif
