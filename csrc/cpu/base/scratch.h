// The memory that drivers work in.
#pragma once

#include <cstdint>
#include <memory>

#include "integers.h"
#include "limits.h"

namespace conv2d_ext::cpu {

// This thread's scratch memory, at least `bytes` large, on a 64-byte border. It is kept for the thread's life, so that
// calls of varying shapes don't allocate, and is at most limits::kMaxScratchBytes.
void* thread_scratch(int64_t bytes);

// The same for work items that leave something in it for the thread's next items of the same owner, which ask for as
// many bytes. kept: nobody else has asked for this thread's scratch since such an item did. (Owner 0: nobody.)
struct OwnedScratch {
  void* memory;
  bool kept;
};
OwnedScratch thread_scratch(int64_t bytes, uint64_t owner);
// The first of `count` numbers that no other owner has.
uint64_t new_scratch_owners(int64_t count);

// Memory on a 64-byte border. A call's is shared by its threads.
struct ReleaseScratch {
  void operator()(void* memory) const;
};
using ScratchMemory = std::unique_ptr<void, ReleaseScratch>;
ScratchMemory allocate_scratch(int64_t bytes);

// Where sums lie in a thread's scratch: those of a chunk of K and, of several chunks, the total of the chunks before
// and what that lost (ChunkSums, pack/store.h).
struct SumsLayout {
  int64_t sums, total, lost;
  bool several;
};

// Parts of a thread's scratch, one after the other, each on a cache line of its own. A driver's layout adds where
// they begin.
struct ScratchLayout {
  int64_t bytes = 0;
  int64_t take(int64_t count) {
    const int64_t here = bytes;
    bytes = round_up(bytes + count, 64);
    return here;
  }
  int64_t take_offsets(int64_t count) { return take(count * int64_t(sizeof(int64_t))); }
  SumsLayout take_sums(int64_t sum_bytes, bool several) { return take_sums(sum_bytes, sum_bytes, several); }
  SumsLayout take_sums(int64_t sum_bytes, int64_t total_bytes, bool several) {
    const int64_t sums = take(sum_bytes);
    return {sums, several ? take(total_bytes) : sums, several ? take(total_bytes) : sums, several};
  }
};

// Whether a thread's memory takes what was laid out.
inline bool fits_scratch(const ScratchLayout& layout) { return layout.bytes <= limits::kMaxScratchBytes; }

}  // namespace conv2d_ext::cpu
