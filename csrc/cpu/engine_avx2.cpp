// The engines compiled for AVX2 + FMA + F16C; isa_target.h says why the includes stand in this order.
#include "engine.h"
#include "numeric.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define CONV2D_ISA avx2
#define CONV2D_TARGET "avx2,fma,f16c"
#define CONV2D_HAS_NATIVE_VEC
#include "isa_target.h"

#include "vec_avx2.h"
#include "vec_portable.h"
#include "engine_impl.h"

#include "isa_target_end.h"

namespace conv2d_ext::cpu {
const Engine* avx2_engine() { return &avx2::kEngine; }
}  // namespace conv2d_ext::cpu
#else
namespace conv2d_ext::cpu {
const Engine* avx2_engine() { return nullptr; }
}  // namespace conv2d_ext::cpu
#endif
