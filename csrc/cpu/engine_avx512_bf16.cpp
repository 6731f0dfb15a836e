// What the AVX-512 engines do otherwise on a CPU with AVX512_BF16: bfloat16 products are taken in pairs. Only these
// kernels are compiled here; all others are those of engine_avx512.cpp.
#include "engine.h"
#include "numeric.h"

#if defined(__x86_64__)
// GCC 12 warns of variables in its own header that are meant to be undefined.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#define CONV2D_ISA avx512_bf16
#define CONV2D_TARGET "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#define CONV2D_HAS_NATIVE_VEC
#define CONV2D_BFLOAT16_PAIRS
#include "isa_target.h"

#include "vec_avx512.h"
#include "vec_portable.h"
#include "convert.h"
#include "gemm_ukernel.h"
#include "pack.h"
#include "pack_pairs.h"
#include "epilogue.h"
#include "interleave.h"
#include "conv_driver.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

inline void conv(DType, const ConvGemm& gemm, const Executor& executor) {
  ConvCall<BFloat16, float, false> call(gemm, executor.num_threads);
  run_items(executor, call.items(), &call, &ConvCall<BFloat16, float, false>::run);
}
inline VectorShape shape_of(DType) { return vector_shape<float>(); }

inline int rows_of(DType, int64_t vectors) { return ukernels_for<float, false>(vectors).rows; }

constexpr Engine kPairsEngine{kIsaName, kIsaName, nullptr, conv,     nullptr, nullptr, nullptr,
                              nullptr,  nullptr,  nullptr, shape_of, nullptr, rows_of, nullptr};

}  // namespace conv2d_ext::cpu::CONV2D_ISA

#include "isa_target_end.h"

namespace conv2d_ext::cpu {
const Engine* avx512_bf16_engine() {
  static const Engine engine = [] {
    Engine same = *avx512_engine();
    same.isa = avx512_bf16::kIsaName;
    same.pairs = &avx512_bf16::kPairsEngine;
    return same;
  }();
  return &engine;
}
}  // namespace conv2d_ext::cpu
#else
namespace conv2d_ext::cpu {
const Engine* avx512_bf16_engine() { return nullptr; }
}  // namespace conv2d_ext::cpu
#endif
