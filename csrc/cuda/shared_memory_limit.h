// How much dynamic shared memory a kernel's launches may ask for, beyond the 48 KiB that all may.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(CONV2D_CUDA_ON_HOST)
#include "cuda_names.h"
#else
#include <cuda_runtime_api.h>
#endif

namespace conv2d_ext::cuda {

constexpr int kSharedBytesOfAll = 48 * 1024;

// The limit of one kernel, which CUDA keeps for each device and all host threads together. It is set once, to the most
// that any launch of the kernel asks for: set to a launch's own size, it could go down between another thread's setting
// and that thread's launch. Threads that come at once set the same value.
class SharedMemoryLimit {
 public:
  // On the current device. most_bytes: the same in every call.
  cudaError_t raise(const void* kernel, int most_bytes) {
    if (most_bytes <= kSharedBytesOfAll) return cudaSuccess;
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    // Devices beyond the 64th are not remembered.
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if ((raised_.load(std::memory_order_acquire) & bit) != 0) return cudaSuccess;
    int allowed = 0;
    error = cudaDeviceGetAttribute(&allowed, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error != cudaSuccess) return error;
    // A device may have less than the largest launch takes; there the planner takes smaller ones.
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, std::min(most_bytes, allowed));
    if (error == cudaSuccess) raised_.fetch_or(bit, std::memory_order_release);
    return error;
  }

 private:
  std::atomic<uint64_t> raised_{0};  // a bit for each device
};

}  // namespace conv2d_ext::cuda
