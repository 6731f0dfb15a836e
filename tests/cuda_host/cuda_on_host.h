// csrc/cuda/device.cuh for the host: the same names, checked. Compile with -DCONV2D_CUDA_ON_HOST and with this folder
// among the include paths.
//
// What is modelled: execution.h (threads, barriers, order), shared_memory.h (races, banks), warp_operations.h (tensor
// cores). What is not: memory that CTAs share (atomics, fences), the order of a thread's own global accesses as others
// see it, coalescing, timing, and how tensor cores round inside a sum.
#pragma once

#include <cstdint>

#include "cuda_names.h"
#include "execution.h"
#include "numeric.h"
#include "warp_operations.h"

namespace conv2d_ext::cuda {

using cuda_host::Site;

inline char* dynamic_shared() { return cuda_host::shared_memory().base(); }

template <class T>
inline constexpr bool kIsSharedAccess =
    std::is_trivially_copyable_v<T> && (sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);

template <class T>
T load_shared(const T* address, Site site = Site::here()) {
  static_assert(kIsSharedAccess<T>, "races are followed by 2 bytes");
  T value;
  cuda_host::shared_memory().load(cuda_host::current_thread(), site, address, sizeof(T), alignof(T), &value);
  return value;
}
template <class T>
void store_shared(T* address, T value, Site site = Site::here()) {
  static_assert(kIsSharedAccess<T>, "races are followed by 2 bytes");
  cuda_host::shared_memory().store(cuda_host::current_thread(), site, address, sizeof(T), alignof(T), &value);
}

template <class T>
T load_global(const T* address, Site site = Site::here()) {
  cuda_host::check_global(site, address, sizeof(T), alignof(T));
  return *address;
}

template <class T>
void store_global(T* address, T value, Site site = Site::here()) {
  cuda_host::check_global(site, address, sizeof(T), alignof(T));
  *address = value;
}

inline void sync_threads(Site site = Site::here()) { cuda_host::wait_at_block_barrier(site); }
inline void sync_warp(Site site = Site::here()) { cuda_host::wait_at_warp_barrier(site); }

template <int BYTES, bool PAST_L1 = false>
void copy_async(void* shared, const void* global, bool inside, Site site = Site::here()) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16);
  static_assert(!PAST_L1 || BYTES == 16);
  cuda_host::begin_copy(site, shared, global, BYTES, inside);
}
inline void commit_copies() { cuda_host::commit_copies(); }
template <int PENDING>
void wait_copies() {
  cuda_host::wait_copies(PENDING);
}

template <class T>
struct Same {
  using Type = T;
};
template <class... Params>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, int shared_bytes, cudaStream_t,
                   typename Same<Params>::Type... args) {
  return cuda_host::launch(kernel, grid, block, shared_bytes, args...);
}

}  // namespace conv2d_ext::cuda
