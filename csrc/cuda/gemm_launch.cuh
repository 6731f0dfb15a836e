// From a table entry to a kernel's instantiation.
#pragma once

#include "gemm_kernel.cuh"
#include "kernels.h"
#include "shared_memory_limit.h"

namespace conv2d_ext::cuda {

template <class Policy, class Geometry>
cudaError_t launch_reduction(const typename Geometry::Params& params, const GemmLaunch& launch_of) {
  if (launch_of.reduce_items == 0) return cudaSuccess;
  return launch(reduce_partials<typename Policy::Element, Geometry>,
                dim3(static_cast<unsigned>(launch_of.reduce_items)), dim3(kReduceThreads), 0, launch_of.stream, params);
}

template <class Policy, class Geometry, int WARPS_M, int WARPS_X, int STAGES, int MIN_CTAS, Load LOAD_A, Load LOAD_B>
cudaError_t launch_gemm(const typename Geometry::Params& params, const GemmLaunch& launch_of) {
  void (*const kernel)(const typename Geometry::Params) =
      gemm_kernel<Policy, Geometry, WARPS_M, WARPS_X, STAGES, MIN_CTAS, LOAD_A, LOAD_B>;
  static SharedMemoryLimit limit;
  cudaError_t error = limit.raise(reinterpret_cast<const void*>(kernel), launch_of.most_shared_bytes);
  if (error != cudaSuccess) return error;
  error = launch(kernel, dim3(static_cast<unsigned>(launch_of.items)), dim3(WARPS_M * WARPS_X * 32),
                 launch_of.shared_bytes, launch_of.stream, params);
  return error != cudaSuccess ? error : launch_reduction<Policy, Geometry>(params, launch_of);
}

// Which instantiations a kernel has for the way along which its dense operand is contiguous. The im2col operand always
// has both. What is left out is read with gaps: the operand is small or the case is rare.
enum class DenseLoads {
  kBoth,      // forward reads the weight along k, grad_input along m
  kOverK,     // along k
  kAsIm2col,  // as the im2col operand: grad_output and input of one memory format
};

// Policies that load single elements: the way along which each operand is contiguous is part of the instantiation.
template <class Policy, class Geometry, int WARPS_M, int WARPS_X, int STAGES, int MIN_CTAS, DenseLoads DENSE>
struct ElementGemm {
  using Params = typename Geometry::Params;
  // 16 bytes at a time: in float32, where k is counted in groups of channels.
  static constexpr bool kHasVectors = DENSE == DenseLoads::kBoth && Geometry::kGroup == kChannelGroup &&
                                      std::is_same_v<typename Policy::Element, float>;
  template <Load LOAD_A, Load LOAD_B>
  static cudaError_t launch_as(const Params& params, const GemmLaunch& launch_of) {
    return launch_gemm<Policy, Geometry, WARPS_M, WARPS_X, STAGES, MIN_CTAS, LOAD_A, LOAD_B>(params, launch_of);
  }
  template <Load LOAD_B>
  static cudaError_t launch_b(const Params& params, const GemmLaunch& launch_of) {
    if constexpr (DENSE == DenseLoads::kAsIm2col) {
      return launch_as<LOAD_B, LOAD_B>(params, launch_of);
    } else {
      if constexpr (kHasVectors) {
        if (launch_of.vector_a == Vectors::kOverX) return launch_as<Load::kRowVector, LOAD_B>(params, launch_of);
      }
      if constexpr (DENSE == DenseLoads::kBoth) {
        if (!params.tile.a_over_k) return launch_as<Load::kOverX, LOAD_B>(params, launch_of);
      }
      return launch_as<Load::kOverK, LOAD_B>(params, launch_of);
    }
  }
  static cudaError_t run(const Params& params, const GemmLaunch& launch_of) {
    if constexpr (kHasVectors) {
      // The planner has vectors of pixels only beside such of the weight.
      if (launch_of.vector_b == Vectors::kOverX)
        return launch_as<Load::kRowVector, Load::kRowVector>(params, launch_of);
    }
    return params.tile.b_over_k ? launch_b<Load::kOverK>(params, launch_of) : launch_b<Load::kOverX>(params, launch_of);
  }
};

// 16-bit policies: whole groups where both operands allow it, or the im2col one does; otherwise element by element.
// Whole groups need no registers, so their warps can be taller.
template <class Policy, class VectorPolicy, class Geometry, int WARPS_M, int WARPS_X>
struct Gemm16 {
  using Params = typename Geometry::Params;
  static constexpr int kWarps = WARPS_M * WARPS_X;
  static constexpr int kVectorWarpsM = WARPS_M * Policy::kWarpM / VectorPolicy::kWarpM;
  // Gathering holds a stage in registers, so two stages of shared memory are enough, and 8 warps fill an SM's.
  static constexpr int kGatherCtas = kWarps >= 8 ? 1 : 8 / kWarps;
  static constexpr int kVectorCtas = kWarps >= 8 ? 2 : 12 / kWarps;
  static constexpr int kGatherStages = 2, kVectorStages = 3;
  template <Load LOAD_A, Load LOAD_B>
  static cudaError_t copy(const Params& params, const GemmLaunch& launch_of) {
    return launch_gemm<VectorPolicy, Geometry, kVectorWarpsM, WARPS_X, kVectorStages, kVectorCtas, LOAD_A, LOAD_B>(
        params, launch_of);
  }
  template <Load LOAD_B>
  static cudaError_t gather(const Params& params, const GemmLaunch& launch_of) {
    return launch_gemm<Policy, Geometry, WARPS_M, WARPS_X, kGatherStages, kGatherCtas, Load::kGather, LOAD_B>(
        params, launch_of);
  }
  static cudaError_t run(const Params& params, const GemmLaunch& launch_of) {
    const Vectors a = launch_of.vector_a, b = launch_of.vector_b;
    if constexpr (Geometry::kGroup == 8) {
      if (b == Vectors::kOverK) {
        if (a == Vectors::kOverK) return copy<Load::kVector, Load::kVector>(params, launch_of);
        if (a == Vectors::kOverX) return copy<Load::kRowVector, Load::kVector>(params, launch_of);
        return gather<Load::kVector>(params, launch_of);
      }
      if (b == Vectors::kOverX && a == Vectors::kOverK) return copy<Load::kVector, Load::kRowVector>(params, launch_of);
    }
    if constexpr (Geometry::kGroup == 8 || std::is_same_v<Params, WeightParams>) {
      if (b == Vectors::kOverX && a == Vectors::kOverX)
        return copy<Load::kRowVector, Load::kRowVector>(params, launch_of);
    }
    return gather<Load::kGather>(params, launch_of);
  }
};

// A table entry. Kernel has the static function run.
template <class Kernel, class Policy, class Geometry, int WARPS_M, int WARPS_X, int STAGES>
constexpr GemmKernel gemm_entry(const char* name, GemmKind kind, int ctas_per_sm) {
  using Tiling = GemmTiling<Policy, Geometry::kGroup, WARPS_M, WARPS_X, STAGES>;
  GemmKernel kernel{};
  kernel.name = name;
  kernel.kind = kind;
  kernel.tile_m = Tiling::kTileM;
  kernel.tile_x = Tiling::kTileX;
  static_assert(Tiling::kTileK <= kMostTileK);
  kernel.tile_k = Tiling::kTileK;
  kernel.threads = kernel.vector_threads = Tiling::kThreads;
  kernel.ctas_per_sm = kernel.vector_ctas_per_sm = ctas_per_sm;
  kernel.stages = kernel.vector_stages = STAGES;
  kernel.chain_tiles = Policy::chain_k(Geometry::kGroup) / Tiling::kTileK;
  kernel.table_bytes = Tiling::kStagesAt;
  kernel.stage_bytes = Tiling::kStageBytes;
  kernel.sums_bytes = Tiling::kResultBytes;
  if constexpr (std::is_same_v<typename Geometry::Params, ConvParams>) {
    kernel.launch_conv = Kernel::run;
  } else {
    kernel.launch_weight = Kernel::run;
  }
  return kernel;
}

template <class Policy, class Geometry, int WARPS_M, int WARPS_X, int STAGES, int MIN_CTAS, DenseLoads DENSE>
constexpr GemmKernel element_entry(const char* name, GemmKind kind) {
  return gemm_entry<ElementGemm<Policy, Geometry, WARPS_M, WARPS_X, STAGES, MIN_CTAS, DENSE>, Policy, Geometry, WARPS_M,
                    WARPS_X, STAGES>(name, kind, MIN_CTAS);
}
template <class Policy, class VectorPolicy, class Geometry, int WARPS_M, int WARPS_X>
constexpr GemmKernel entry_16(const char* name, GemmKind kind) {
  using Kernel = Gemm16<Policy, VectorPolicy, Geometry, WARPS_M, WARPS_X>;
  GemmKernel kernel =
      gemm_entry<Kernel, Policy, Geometry, WARPS_M, WARPS_X, Kernel::kGatherStages>(name, kind, Kernel::kGatherCtas);
  kernel.vector_threads = Kernel::kVectorWarpsM * WARPS_X * 32;
  kernel.vector_ctas_per_sm = Kernel::kVectorCtas;
  kernel.vector_stages = Kernel::kVectorStages;
  return kernel;
}

}  // namespace conv2d_ext::cuda
