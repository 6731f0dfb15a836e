// The tables of compiled kernels, one per way of multiplying. The planner chooses from them and knows kernels only by
// what stands here; each table is defined in the file that compiles its kernels.
#pragma once

#include <cstdint>

#include "conv2d_cuda.h"
#include "gemm_params.h"

namespace conv2d_ext::cuda {

enum class GemmKind : int {
  kConvGroups,    // forward and grad_input, k counted in groups of 8 channels
  kConvElements,  // the same, k counted one by one: fewer than 8 channels
  kWeight,        // grad_weight
};

// How a launch of a GEMM kernel is told from others of its table entry.
struct GemmLaunch {
  int64_t items;         // CTAs
  int64_t reduce_items;  // CTAs of reduce_partials; 0 where there are no partials
  int shared_bytes;
  int most_shared_bytes;  // of any launch of this table entry
  Vectors vector_a, vector_b;
  cudaStream_t stream;
};

// A table's entry: kernels of one tile. The one that copies both operands 16 bytes at a time may have other warps and a
// deeper ring than the others; its ring may be used with fewer stages.
struct GemmKernel {
  const char* name;
  GemmKind kind;
  int tile_m, tile_x, tile_k;
  int threads, vector_threads;
  int ctas_per_sm, vector_ctas_per_sm;  // that registers allow
  int stages, vector_stages;            // of the ring
  int chain_tiles;                      // the most tiles of k in a chain
  // Shared memory: of the tables, of a stage, of the tile of sums.
  int table_bytes, stage_bytes, sums_bytes;
  // Of the two, one is set.
  cudaError_t (*launch_conv)(const ConvParams& params, const GemmLaunch& launch);
  cudaError_t (*launch_weight)(const WeightParams& params, const GemmLaunch& launch);

  // A single chain's sums take the ring's place when it is done.
  constexpr int shared_bytes(int stages_used, bool several_chains) const {
    const int ring = stages_used * stage_bytes;
    return table_bytes + (several_chains ? ring + sums_bytes : ring > sums_bytes ? ring : sums_bytes);
  }
  constexpr int most_shared_bytes() const {
    return shared_bytes(vector_stages > stages ? vector_stages : stages, true);
  }
};

struct GemmTable {
  const GemmKernel* kernels;
  int count;
};

GemmTable gemm_table_f32();
GemmTable gemm_table_tf32();
GemmTable gemm_table_f64();
GemmTable gemm_table_f16();
GemmTable gemm_table_bf16();
GemmTable gemm_table_c64();
GemmTable gemm_table_c128();

// A weight of float32 whose k is counted in groups of channels, packed: for each phase and group, `rows` of k of
// `row_values` neighbouring m.
struct PackShape {
  int64_t packed;  // address
  int64_t rows, row_values;
  int64_t k_blocks, m_blocks;  // which the launch sets
};
struct PackLaunch {
  PackShape shape;
  int64_t groups_and_phases;
  cudaStream_t stream;
};
cudaError_t launch_pack_weight(const ConvParams& params, const PackLaunch& launch);

// The kernels for few channels a group, and grad_bias's, of every dtype; and what their launches count with
// (direct_kernel.cuh).
constexpr int kDirectThreads = 256;                 // of a CTA
constexpr int kDirectChain = 256;                   // products
constexpr int kDirectPixels = 4;                    // of a thread of direct_conv
constexpr int kDirectColumns = 9;                   // of a CTA of direct_weight
constexpr int kResidues = 32;                       // that direct_weight and grad_bias deal pixels out to
constexpr int kSlots = kDirectThreads / kResidues;  // their groups, or channels, of a CTA
// Of a CTA of direct_conv: neighbouring lanes take neighbouring groups, or pixels of one group.
constexpr int direct_conv_groups(bool lanes_are_groups) { return lanes_are_groups ? 32 : 1; }
constexpr int direct_conv_pixels(bool lanes_are_groups) {
  return kDirectThreads * kDirectPixels / direct_conv_groups(lanes_are_groups);
}
struct DirectLaunch {
  int64_t pixel_blocks, group_blocks, phases;
  bool lanes_are_groups;
  cudaStream_t stream;
};
constexpr int kMostDirectChannels = 8;  // result channels of a group
cudaError_t launch_direct_conv(DType dtype, const ConvParams& params, const DirectLaunch& launch);

// The kernels for one channel a group on both sides, of float32 and 16 bits, and what a launch is told beside
// ConvParams.
struct DepthwiseShape {
  uint32_t phase_blocks;  // CTAs of a phase
  int32_t band_rows;      // results that a thread walks along, at most
  bool lanes_are_groups;  // neighbouring lanes take neighbouring groups instead of neighbouring columns
  bool stores_vectors;    // the results of two groups at once
};
struct DepthwiseLaunch {
  DepthwiseShape shape;
  int kernel, step, vector;  // taps of an axis, rows from a result to the next, groups of a lane
  int64_t phases;
  cudaStream_t stream;
};
// Taps of the phases of grad_input at a stride of 2: every other one of a kernel's.
constexpr int more_taps(int kernel) { return (kernel + 1) / 2; }
constexpr int fewer_taps(int kernel) { return kernel / 2; }
bool has_depthwise_kernel(DType dtype, int kernel, int vector);
int depthwise_threads();  // of a CTA
cudaError_t launch_depthwise_conv(DType dtype, const ConvParams& params, const DepthwiseLaunch& launch);

struct DirectWeightLaunch {
  int64_t segment_pixels, column_blocks, row_blocks, group_blocks;
  int64_t reduce_items;  // as in GemmLaunch
  bool lanes_are_groups;
  cudaStream_t stream;
};
int direct_weight_rows(DType dtype, int64_t m);  // result channels of a CTA
int direct_weight_shared_bytes(DType dtype, int64_t m);
cudaError_t launch_direct_weight(DType dtype, const WeightParams& params, const DirectWeightLaunch& launch);

struct BiasLaunch {
  int64_t grad_output, result, partials;
  int64_t stride[4];  // of grad_output, in elements
  int64_t batch, channels, out_h, out_w;
  int64_t segments, segment_pixels;
  bool lanes_are_channels;
  cudaStream_t stream;
};
cudaError_t launch_grad_bias(DType dtype, const BiasLaunch& launch);

// Of the type that sums of a dtype have.
constexpr int sum_bytes(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? 4 : static_cast<int>(size_of(dtype));
}

}  // namespace conv2d_ext::cuda
