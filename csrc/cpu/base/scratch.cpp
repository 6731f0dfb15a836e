// The memory that engines work in.
#include "scratch.h"

#include <atomic>
#include <cstddef>
#include <new>

#include "../../debug_assert.h"

namespace conv2d_ext::cpu {

namespace {

constexpr int64_t kAlignment = 64;

struct ThreadScratch {
  ScratchMemory memory;
  int64_t bytes = 0;
  uint64_t owner = 0;  // nobody
};
thread_local ThreadScratch scratch;

}  // namespace

void ReleaseScratch::operator()(void* memory) const { ::operator delete(memory, std::align_val_t(kAlignment)); }

ScratchMemory allocate_scratch(int64_t bytes) {
  return ScratchMemory(::operator new(static_cast<size_t>(bytes), std::align_val_t(kAlignment)));
}

void* thread_scratch(int64_t bytes) {
  CONV2D_EXT_ASSERT(bytes >= 0 && bytes <= limits::kMaxScratchBytes);
  scratch.owner = 0;
  if (scratch.bytes < bytes) {
    scratch.memory.reset();
    scratch.bytes = 0;
    scratch.memory = allocate_scratch(bytes);
    scratch.bytes = bytes;
  }
  return scratch.memory.get();
}

OwnedScratch thread_scratch(int64_t bytes, uint64_t owner) {
  const bool kept = owner != 0 && scratch.owner == owner;
  void* const memory = thread_scratch(bytes);
  scratch.owner = owner;
  return {memory, kept};
}

uint64_t new_scratch_owners(int64_t count) {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(static_cast<uint64_t>(count), std::memory_order_relaxed);
}

}  // namespace conv2d_ext::cpu
