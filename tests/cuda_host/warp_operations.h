// Operations of a whole warp: exchange, matrix loads and tensor cores.
//
// They don't order memory: on the device, neither shuffles nor matrix instructions do.
#pragma once

#include <cstdint>

#include "execution.h"

namespace conv2d_ext::cuda {

template <class T>
T shuffle_xor(T value, int mask, cuda_host::Site site = cuda_host::Site::here()) {
  struct Lane {
    T value, result;
    int mask;
  } mine{value, value, mask};
  cuda_host::meet_warp("shuffle_xor", site, &mine, [](int, cuda_host::Site, void* const(&lanes)[32]) {
    for (int lane = 0; lane < 32; ++lane) {
      Lane& it = *static_cast<Lane*>(lanes[lane]);
      if (it.mask < 0 || it.mask >= 32) cuda_host::fail("shuffle_xor: no lane has this number");
      it.result = static_cast<Lane*>(lanes[lane ^ it.mask])->value;
    }
  });
  return mine.result;
}

void load_matrix_x4(uint32_t (&result)[4], const void* row, cuda_host::Site site = cuda_host::Site::here());
void load_matrix_x4_transposed(uint32_t (&result)[4], const void* row, cuda_host::Site site = cuda_host::Site::here());

// Products are exact, their sum with d is formed in float64 and rounded once. Tensor cores align all of them to the
// largest and cut off what lies below the sum's precision, so their results differ from these in the last bits.
void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
              cuda_host::Site site = cuda_host::Site::here());
void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
             cuda_host::Site site = cuda_host::Site::here());
void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
              cuda_host::Site site = cuda_host::Site::here());

}  // namespace conv2d_ext::cuda
