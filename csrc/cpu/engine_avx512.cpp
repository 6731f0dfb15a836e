// The engines compiled for AVX-512 (F, BW, DQ, VL); isa_target.h says why the includes stand in this order.
#include "engine.h"
#include "numeric.h"

#if defined(__x86_64__)
// GCC 12 warns of variables in its own header that are meant to be undefined.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#define CONV2D_ISA avx512
#define CONV2D_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#define CONV2D_HAS_NATIVE_VEC
#define CONV2D_INTEGER_ENGINE avx2_engine
#define CONV2D_INTEGER_ISA "avx2"
#include "isa_target.h"

#include "vec_avx512.h"
#include "vec_portable.h"
#include "engine_impl.h"

#include "isa_target_end.h"

namespace conv2d_ext::cpu {
const Engine* avx512_engine() { return &avx512::kEngine; }
}  // namespace conv2d_ext::cpu
#else
namespace conv2d_ext::cpu {
const Engine* avx512_engine() { return nullptr; }
}  // namespace conv2d_ext::cpu
#endif
