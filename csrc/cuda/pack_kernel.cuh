// The weight of a convolution as the implicit GEMM walks along it: rows of k, in the kernel's order, of neighbouring m.
//
// In memory the m of a k lie a filter apart, so a GEMM that reads the weight where it lies copies each element by
// itself, for every tile of pixels again. Packed once, 16 bytes are copied at a time. A CTA turns a block of 64 k and
// 32 m in shared memory: it reads along k, where a filter's elements lie near one another, and writes along m.
#pragma once

#include "gemm_geometry.cuh"
#include "kernels.h"

namespace conv2d_ext::cuda {

constexpr int kPackK = 64, kPackM = 32, kPackThreads = 256;

// The grid: blocks of k, of m, groups, phases. params: of the weight where it lies.
template <class T, class Geometry>
__global__ void __launch_bounds__(kPackThreads)
    pack_weight(const __grid_constant__ ConvParams params, const __grid_constant__ PackShape shape) {
  constexpr int kRow = kPackM + 1;  // written across and read along, no bank is met twice
  constexpr unsigned kGroup = Geometry::kGroup;
  uint32_t item = blockIdx.x;
  const int64_t k0 = int64_t{take_index(item, shape.k_blocks)} * kPackK;
  const int64_t m0 = int64_t{take_index(item, shape.m_blocks)} * kPackM;
  const Geometry geometry(params, item);
  T* const tile = reinterpret_cast<T*>(dynamic_shared());

  const unsigned k = threadIdx.x % kPackK;
  KOffsets offsets;
  KPosition position;
  geometry.k_entry((k0 + k) / kGroup, offsets, position);
  const int channel = static_cast<int>((k0 + k) % kGroup);
#pragma unroll
  for (unsigned m = threadIdx.x / kPackK; m < kPackM; m += kPackThreads / kPackK) {
    T value{};
    if (channel < position.count)  // rows past the last repeat it
      value = load_global(reinterpret_cast<const T*>(geometry.dense_address(m0 + m, 1) + offsets.dense +
                                                     channel * geometry.dense_step()));
    store_shared(tile + k * kRow + m, value);
  }
  sync_threads();
#pragma unroll
  for (unsigned unit = threadIdx.x; unit < kPackK * kPackM; unit += kPackThreads) {
    const unsigned m = unit % kPackM, row = unit / kPackM;
    if (k0 + row < shape.rows && m0 + m < shape.row_values)
      store_global(reinterpret_cast<T*>(shape.packed + ((item * shape.rows + k0 + row) * shape.row_values + m0 + m) *
                                                           static_cast<int64_t>(sizeof(T))),
                   load_shared(tile + row * kRow + m));
  }
}

}  // namespace conv2d_ext::cuda
