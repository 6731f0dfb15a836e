// The kernels, packers and stores of one instruction set, each by itself. See tests/test_cpu_parts.py.
#include "columns.h"
#include "convert.h"
#include "depthwise.h"
#include "gemm.h"
#include "packing.h"
#include "rows.h"
#include "store.h"
#include "winograd.h"
#if defined(CONV2D_BFLOAT16_PAIRS)
#include "pairs.h"
#include "pixel_rows.h"
#endif
#if defined(CONV2D_AMX)
#include "amx.h"
#endif

namespace parts {

// What the engine of pairs has of its own.
template <class Float>
void check_pair_parts() {
#if defined(CONV2D_BFLOAT16_PAIRS)
  check_gemm<Float>();
  check_pairs();
  check_pixel_steps();
  check_columns<BFloat16, Float>();
  check_convert<BFloat16>();
#endif
}

// What the engines of AMX have of their own.
inline void check_amx_parts() {
#if defined(CONV2D_AMX)
  check_amx();
  check_convert<BFloat16>();
#endif
}

// What every engine has.
template <class Float>
void check_general_parts() {
  check_gemm<Float>();
  check_gemm<double>();
  check_gemm<Complex<float>>();
  if constexpr (kHasIntegers) check_gemm<uint16_t>();
  check_dot<Float>();
  check_dot<double>();
  check_dot<BFloat16>();
  check_vector<Float>();
  check_vector<double>();
  check_convert<BFloat16>();
  check_convert<Float16>();
  check_copy_run<Float>();
  check_copy_run<double>();
  check_copy_run<BFloat16>();
  check_copy_run<Complex<float>>();
  check_lanes<Float>();
  check_lanes<double>();
  check_lanes<BFloat16>();
  check_lanes<Complex<float>>();
  check_patch<Float>();
  check_patch<double>();
  check_patch<BFloat16>();
  check_patch<Complex<float>>();
  check_weights<Float>();
  check_weights<BFloat16>();
  check_weights<Complex<float>>();
  check_weight_of_groups<Float>();
  check_weight_of_groups<double>();
  check_weight_of_groups<BFloat16>();
  check_weight_of_groups<Complex<float>>();
  check_store_tile<Float>();
  check_store_tile<double>();
  check_store_tile<BFloat16>();
  check_store_tile<Complex<float>>();
  check_store_lanes<Float>();
  check_store_lanes<BFloat16>();
  check_winograd<Float>();
  check_chunks<Float>();
  check_chunks<double>();
  if constexpr (kHasIntegers) {
    check_patch<uint16_t>();
    check_store_tile<uint16_t>();
    check_chunks<uint16_t>();
  }
}

// What engines with transpose, unzip and zip have.
template <class Float>
void check_native_parts() {
  if constexpr (kHasTranspose<Float>) {
    check_pixel_ukernels<Float>();
    check_pixel_ukernels<double>();
    check_whole_plane_ukernels<Float>();
    check_whole_plane_ukernels<double>();
    check_depthwise_weight<Float>();
    check_depthwise_weight<double>();
    check_depthwise_weight<BFloat16>();
    check_depthwise_weight<Float16>();
    check_planes<Float>();
    check_planes<double>();
    check_planes<BFloat16>();
    check_rows<Float>();
    check_rows<double>();
    check_rows<BFloat16>();
    check_columns<Float, Float>();
    check_columns<double, double>();
    check_columns<BFloat16, Float>();
    check_depthwise<Float, Float>();
    check_depthwise<double, double>();
    check_depthwise<BFloat16, BFloat16>();
    check_depthwise<Float, BFloat16>();
    check_strided<Float>();
    check_strided<double>();
    check_strided<BFloat16>();
    check_interleave<Float>();
    check_interleave<double>();
    check_interleave<BFloat16>();
    check_store_placed<Float>();
    check_store_placed<double>();
    check_store_placed<BFloat16>();
    check_store_row<Float>();
    check_store_row<double>();
    check_store_row<BFloat16>();
  }
}

template <class Float>
void check_all() {
  if constexpr (kTakesPairs<Float>) {
    check_pair_parts<Float>();
  } else if constexpr (kTakesBlocks<Float>) {
    check_amx_parts();
  } else {
    check_general_parts<Float>();
    check_native_parts<Float>();
  }
}

}  // namespace parts

int run_parts() {
  parts::check_all<float>();
  return parts::finish();
}
