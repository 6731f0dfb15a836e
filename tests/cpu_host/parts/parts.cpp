// The kernels, packers and stores of one instruction set, each by itself. See tests/test_cpu_parts.py.
#include "depthwise.h"
#include "gemm.h"
#include "rows.h"

int run_parts() {
  using namespace parts;
  check_gemm<float>();
#if !defined(CONV2D_BFLOAT16_PAIRS)
  check_gemm<double>();
  check_gemm<Complex<float>>();
  if constexpr (kHasIntegers) check_gemm<uint16_t>();
  if constexpr (kHasTranspose<float>) {
    check_pixel_ukernels<float>();
    check_pixel_ukernels<double>();
    check_depthwise_weight<float>();
    check_depthwise_weight<double>();
    check_planes<float>();
    check_planes<double>();
    check_planes<BFloat16>();
    check_rows<float>();
    check_rows<double>();
    check_rows<BFloat16>();
    check_depthwise<float>();
    check_depthwise<double>();
    check_strided<float>();
    check_strided<double>();
    check_strided<BFloat16>();
  }
  check_dot<float>();
  check_dot<double>();
  check_dot<BFloat16>();
#endif
  return finish();
}
