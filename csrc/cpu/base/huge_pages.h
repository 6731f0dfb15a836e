// The memory of a large result, before it is written.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace conv2d_ext::cpu {

// By default glibc's malloc maps a block of 32 MiB or more anew for each call (its threshold grows to that at most),
// and of such memory every 4 KiB are a page fault when they are written. Huge pages, where the system gives them to
// those who ask, leave one fault for 2 MiB. Smaller blocks mostly come back from earlier calls, with their pages. Only
// pages that the result fills are asked for, and the request ends when the block is unmapped; under other allocators
// it stays with the addresses, and what lies there next may take whole huge pages. What the system refuses changes
// nothing; where its memory is fragmented, it may move other pages first, which takes time.
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
