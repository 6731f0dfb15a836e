// float16 on the tensor cores, sums in float32.
#include "gemm_launch.cuh"

namespace conv2d_ext::cuda {

namespace {

using Policy = Mma16Policy<Float16, 32>;
using WidePolicy = Mma16Policy<Float16, 64>;
// Blocks of 32 channels: their 64 bytes are whole sectors where channels lie side by side.
using Groups = ConvGeometry<8, 4>;
using Elements = ConvGeometry<1, 1>;

constexpr GemmKernel kKernels[] = {
    entry_16<Policy, WidePolicy, Groups, 4, 2>("conv_gemm_f16_128x128x32", GemmKind::kConvGroups),
    entry_16<Policy, Policy, Groups, 2, 2>("conv_gemm_f16_64x128x32", GemmKind::kConvGroups),
    entry_16<Policy, Policy, Groups, 2, 1>("conv_gemm_f16_64x64x32", GemmKind::kConvGroups),
    entry_16<Policy, Policy, Elements, 2, 2>("conv_gemm_f16_64x128x32_by_element", GemmKind::kConvElements),
    entry_16<Policy, Policy, WeightGeometry, 2, 2>("weight_gemm_f16_64x128x32", GemmKind::kWeight),
    entry_16<Policy, Policy, WeightGeometry, 2, 1>("weight_gemm_f16_64x64x32", GemmKind::kWeight),
};

}  // namespace

GemmTable gemm_table_f16() { return {kKernels, static_cast<int>(sizeof(kKernels) / sizeof(kKernels[0]))}; }

}  // namespace conv2d_ext::cuda
