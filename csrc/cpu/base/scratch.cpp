// The memory that engines work in.
#include "scratch.h"

#include <atomic>
#include <cstddef>
#include <new>

#include "../../debug_assert.h"

namespace conv2d_ext::cpu {

namespace {

constexpr int64_t kAlignment = 64;

void* allocate(int64_t bytes) { return ::operator new(static_cast<size_t>(bytes), std::align_val_t(kAlignment)); }
void release(void* memory) { ::operator delete(memory, std::align_val_t(kAlignment)); }

struct ThreadScratch {
  void* memory = nullptr;
  int64_t bytes = 0;
  uint64_t owner = 0;  // nobody
  ~ThreadScratch() { release(memory); }
};
thread_local ThreadScratch scratch;

}  // namespace

void* thread_scratch(int64_t bytes) {
  CONV2D_EXT_ASSERT(bytes >= 0 && bytes <= limits::kMaxScratchBytes);
  scratch.owner = 0;
  if (scratch.bytes < bytes) {
    release(scratch.memory);
    scratch.memory = nullptr;
    scratch.bytes = 0;
    scratch.memory = allocate(bytes);
    scratch.bytes = bytes;
  }
  return scratch.memory;
}

OwnedScratch thread_scratch(int64_t bytes, uint64_t owner) {
  const bool kept = scratch.owner == owner;
  void* const memory = thread_scratch(bytes);
  scratch.owner = owner;
  return {memory, kept};
}

uint64_t new_scratch_owners(int64_t count) {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(static_cast<uint64_t>(count), std::memory_order_relaxed);
}

CallWorkspace::CallWorkspace(int64_t bytes) : data_(allocate(bytes)) {}
CallWorkspace::~CallWorkspace() { release(data_); }

}  // namespace conv2d_ext::cpu
