// complex64 on the FMA units.
#include "gemm_launch.cuh"

namespace conv2d_ext::cuda {

namespace {

using Policy = FmaPolicy<Complex<float>, 2, 2>;
using Groups = ConvGeometry<8, 1>;
using Elements = ConvGeometry<1, 1>;

constexpr GemmKernel kKernels[] = {
    element_entry<Policy, Groups, 4, 2, 3, 1, DenseLoads::kOverK>("conv_gemm_c64_64x64x16", GemmKind::kConvGroups),
    // Two stages, so that with a long table of k several chains fit the 99 KiB of smaller GPUs.
    element_entry<Policy, Elements, 4, 2, 2, 1, DenseLoads::kOverK>("conv_gemm_c64_64x64x16_by_element",
                                                                    GemmKind::kConvElements),
    element_entry<Policy, WeightGeometry, 4, 2, 2, 1, DenseLoads::kAsIm2col>("weight_gemm_c64_64x64x16",
                                                                             GemmKind::kWeight),
};

}  // namespace

GemmTable gemm_table_c64() { return {kKernels, static_cast<int>(sizeof(kKernels) / sizeof(kKernels[0]))}; }

}  // namespace conv2d_ext::cuda
