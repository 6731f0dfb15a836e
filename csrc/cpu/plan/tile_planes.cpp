#include "tile_planes.h"

#include "../base/limits.h"
#include "tile_grid.h"

namespace conv2d_ext::cpu {

namespace limit = limits::few_planes;

FewPlanesTiling tile_few_planes(const ConvGemm& gemm, const VectorShape& vector, int64_t storage_size,
                                int num_threads) {
  FewPlanesTiling t{};
  const int64_t plane_bytes = gemm.cols * storage_size;
  int64_t runs = div_up(plane_bytes, limit::kRunBytes);
  if (has_few_items(runs * gemm.batch * gemm.groups, num_threads)) {
    runs = max64(runs, min64(round_up(runs, num_threads), plane_bytes / limit::kLeastRunBytes));
  }
  t.run = min64(round_up(div_up(gemm.cols, runs), 4 * vector.lanes), gemm.cols);
  t.runs = div_up(gemm.cols, t.run);
  return t;
}

int64_t scratch_bytes(const ConvGemm& gemm, const FewPlanesTiling& tiling, const VectorShape& vector) {
  const int64_t rows = block_k(gemm, vector.limits).has_chunks() ? 4 : 2;
  return rows * gemm.m * padded_run(tiling, vector) * vector.element_size;
}

}  // namespace conv2d_ext::cpu
