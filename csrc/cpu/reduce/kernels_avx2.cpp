// Sums and softmax compiled for AVX2.
#include "../isa/shared_headers.h"
#include "reduce.h"

#if defined(__x86_64__)
#include <memory>

#define CONV2D_ISA avx2
#define CONV2D_NATIVE_VEC "vec_avx2.h"
#define CONV2D_TARGET "avx2,fma,f16c"
#include "../isa/target_begin.h"

#include "kernels.h"

#include "../isa/target_end.h"

namespace conv2d_ext::cpu::reduce {
const Kernels* avx2_kernels() {
  static constexpr Kernels kKernels = avx2::make_kernels();
  return &kKernels;
}
}  // namespace conv2d_ext::cpu::reduce
#else
namespace conv2d_ext::cpu::reduce {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace conv2d_ext::cpu::reduce
#endif
