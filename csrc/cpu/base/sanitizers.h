// Announces memory accesses to the sanitizer that a build runs under. Compilers instrument what they know as a load or
// a store; a masked one is the call of a builtin to them, which AddressSanitizer and ThreadSanitizer then never see. Of
// AMX tiles the emulated engine makes the same accesses in plain code.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#define CONV2D_ADDRESS_SANITIZER
#elif defined(__SANITIZE_THREAD__)
#define CONV2D_THREAD_SANITIZER
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CONV2D_ADDRESS_SANITIZER
#elif __has_feature(thread_sanitizer)
#define CONV2D_THREAD_SANITIZER
#endif
#endif

#if defined(CONV2D_ADDRESS_SANITIZER)
extern "C" void __asan_loadN(void* address, size_t bytes);
extern "C" void __asan_storeN(void* address, size_t bytes);
#define CONV2D_LOADS __asan_loadN
#define CONV2D_STORES __asan_storeN
#elif defined(CONV2D_THREAD_SANITIZER)
extern "C" void __tsan_read_range(void* address, size_t bytes);
extern "C" void __tsan_write_range(void* address, size_t bytes);
#define CONV2D_LOADS __tsan_read_range
#define CONV2D_STORES __tsan_write_range
#endif

namespace conv2d_ext::cpu {

// The mask of the first n of at most 32 elements.
constexpr uint32_t mask_of_first(int64_t n) { return n <= 0 ? 0 : n >= 32 ? ~0u : (1u << n) - 1u; }

#if defined(CONV2D_LOADS)
template <class T>
inline void announce(const T* first, uint32_t mask, void (*access)(void*, size_t)) {
  for (; mask != 0; ++first, mask >>= 1) {
    if ((mask & 1u) != 0) access(const_cast<void*>(static_cast<const void*>(first)), sizeof(T));
  }
}
template <class T>
inline void announce_load(const T* first, uint32_t mask) {
  announce(first, mask, CONV2D_LOADS);
}
template <class T>
inline void announce_store(T* first, uint32_t mask) {
  announce(first, mask, CONV2D_STORES);
}
#else
inline __attribute__((always_inline)) void announce_load(const void*, uint32_t) {}
inline __attribute__((always_inline)) void announce_store(const void*, uint32_t) {}
#endif

}  // namespace conv2d_ext::cpu
