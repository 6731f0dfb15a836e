// The memory that engines work in.
#include "scratch.h"

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
  ~ThreadScratch() { release(memory); }
};
thread_local ThreadScratch scratch;

}  // namespace

void* thread_scratch(int64_t bytes) {
  CONV2D_EXT_ASSERT(bytes >= 0 && bytes <= limits::kMaxScratchBytes);
  if (scratch.bytes < bytes) {
    release(scratch.memory);
    scratch.memory = nullptr;
    scratch.bytes = 0;
    scratch.memory = allocate(bytes);
    scratch.bytes = bytes;
  }
  return scratch.memory;
}

CallWorkspace::CallWorkspace(int64_t bytes) : data_(allocate(bytes)) {}
CallWorkspace::~CallWorkspace() { release(data_); }

}  // namespace conv2d_ext::cpu
