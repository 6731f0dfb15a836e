// 1x1 convolutions from many planes to few (drivers/planes.h): tiles and scratch. plan/candidates.cpp says which.
#pragma once

#include <cstdint>

#include "../base/scratch.h"
#include "conv_gemm.h"
#include "summation_order.h"

namespace conv2d_ext::cpu {

// Result channels of a group that its micro-kernels take at most.
constexpr int64_t kMostFewPlanes = 4;
// Source planes that they take at once, of a chain's `left`. Eight are as many streams as hardware prefetchers follow
// and as L1 has ways for.
constexpr int kMostPlanesAtOnce = 8, kFewerPlanesAtOnce = 4;
inline int planes_at_once(int64_t left) {
  return left >= kMostPlanesAtOnce ? kMostPlanesAtOnce : left >= kFewerPlanesAtOnce ? kFewerPlanesAtOnce : 1;
}

// A work item: a run of pixels of one image and group.
struct FewPlanesTiling {
  int64_t run, runs;
  int64_t items(const ConvGemm& gemm) const { return gemm.batch * gemm.groups * runs; }
};
FewPlanesTiling tile_few_planes(const ConvGemm& gemm, const VectorShape& vector, int64_t storage_size, int num_threads);

// A thread's scratch: of each result channel a row of chains that are not complete yet, then a row of sums, and (of
// several chunks) rows of totals and of what they lost.
inline int64_t padded_run(const FewPlanesTiling& tiling, const VectorShape& vector) {
  return round_up(tiling.run, 64 / vector.element_size);
}
int64_t scratch_bytes(const ConvGemm& gemm, const FewPlanesTiling& tiling, const VectorShape& vector);

}  // namespace conv2d_ext::cpu
