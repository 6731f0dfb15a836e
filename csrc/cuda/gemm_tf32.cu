// float32 rounded to tf32, on the tensor cores.
#include "gemm_launch.cuh"

namespace conv2d_ext::cuda {

namespace {

using Policy = Tf32Policy<32>;
using WidePolicy = Tf32Policy<64>;
using Groups = ConvGeometry<8, 1>;
using Elements = ConvGeometry<1, 1>;

constexpr GemmKernel kKernels[] = {
    element_entry<WidePolicy, Groups, 2, 2, 3, 2, DenseLoads::kBoth>("conv_gemm_tf32_128x128x16",
                                                                     GemmKind::kConvGroups),
    element_entry<Policy, Groups, 2, 2, 3, 3, DenseLoads::kBoth>("conv_gemm_tf32_64x128x16", GemmKind::kConvGroups),
    element_entry<Policy, Groups, 1, 4, 3, 3, DenseLoads::kBoth>("conv_gemm_tf32_32x256x16", GemmKind::kConvGroups),
    element_entry<Policy, Groups, 2, 1, 3, 6, DenseLoads::kBoth>("conv_gemm_tf32_64x64x16", GemmKind::kConvGroups),
    element_entry<Policy, Elements, 2, 2, 3, 3, DenseLoads::kOverK>("conv_gemm_tf32_64x128x16_by_element",
                                                                    GemmKind::kConvElements),
    element_entry<Policy, Elements, 1, 4, 3, 3, DenseLoads::kOverK>("conv_gemm_tf32_32x256x16_by_element",
                                                                    GemmKind::kConvElements),
    element_entry<Policy, WeightGeometry, 2, 2, 3, 3, DenseLoads::kAsIm2col>("weight_gemm_tf32_64x128x16",
                                                                             GemmKind::kWeight),
    element_entry<Policy, WeightGeometry, 2, 1, 3, 6, DenseLoads::kAsIm2col>("weight_gemm_tf32_64x64x16",
                                                                             GemmKind::kWeight),
};

}  // namespace

GemmTable gemm_table_tf32() { return {kKernels, static_cast<int>(sizeof(kKernels) / sizeof(kKernels[0]))}; }

}  // namespace conv2d_ext::cuda
