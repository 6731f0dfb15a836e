// The memory of a large result, before it is written.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace conv2d_ext::cpu {

// The C library maps a block of 32 MiB or more anew for each call (the most that its threshold grows to), and of such
// memory every 4 KiB are a page fault when they are written: four fifths of the time of a 1 x 1 layer that writes
// 64 MiB. Huge pages, where the system gives them to those who ask, leave one fault for 2 MiB. Smaller blocks mostly
// come back from earlier calls, with their pages. Only pages that the result fills are asked for, so it takes no more
// memory; what the system refuses changes nothing.
inline void ask_for_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] uint64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kLeast = uintptr_t{32} << 20, kPage = uintptr_t{2} << 20;
  if (bytes < kLeast) return;
  const uintptr_t first = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (first + kPage - 1) / kPage * kPage, end = (first + bytes) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace conv2d_ext::cpu
