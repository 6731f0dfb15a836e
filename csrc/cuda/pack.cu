// The packing of weights.
#include "pack_kernel.cuh"
#include "shared_memory_limit.h"

namespace conv2d_ext::cuda {

cudaError_t launch_pack_weight(const ConvParams& params, const PackLaunch& launch_of) {
  PackShape shape = launch_of.shape;
  shape.k_blocks = (shape.rows + kPackK - 1) / kPackK;
  shape.m_blocks = (shape.row_values + kPackM - 1) / kPackM;
  const int64_t items = shape.k_blocks * shape.m_blocks * launch_of.groups_and_phases;
  constexpr int shared = kPackK * (kPackM + 1) * static_cast<int>(sizeof(float));
  static_assert(shared <= kSharedBytesOfAll);
  return launch(pack_weight<float, ConvGeometry<kChannelGroup, 1>>, dim3(static_cast<unsigned>(items)),
                dim3(kPackThreads), shared, launch_of.stream, params, shape);
}

}  // namespace conv2d_ext::cuda
