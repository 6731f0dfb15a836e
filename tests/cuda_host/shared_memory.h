// Shared memory of the CTA that runs: every access is checked for races and counted.
//
// A race is a pair of accesses of two threads to the same bytes, one of them a write, that no barrier orders. Barriers
// of the CTA order everything before them and after them; sync_warp does so for the lanes of its warp; nothing else
// does. Since an access is compared with all those that it might race with, and not with those that happened to come
// just before it, what is found does not depend on the order in which threads run.
//
// An asynchronous copy is a write that lasts from its issue until its thread has waited for it. It counts at both ends;
// in between, nobody may touch its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "site.h"

namespace conv2d_ext::cuda_host {

// How the warp-wide accesses of one source line met the banks. A wavefront is one pass over all 32 banks; an access
// takes as many as its worst bank has different words, each group of lanes that make up 128 bytes for itself.
struct Traffic {
  uint64_t accesses, wavefronts;
  uint64_t ideal;  // the fewest wavefronts that accesses of such a size take
};

enum class AccessKind : uint8_t { kLoad, kStore, kCopy, kMatrix };

// One line of source that reaches shared memory by accesses of one kind and size.
struct AccessSite {
  Site site;
  AccessKind kind;
  int bytes;  // of a lane's access
  Traffic traffic;
};

class SharedMemory {
 public:
  SharedMemory();
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void begin_grid(int bytes, int threads, bool counts_banks);
  void begin_cta();  // every byte 0xff: a NaN in each floating type
  void end_cta() { count_all(); }
  void pass_block_barrier();
  void pass_warp_barrier(int warp);
  // All lanes of a warp have come to an operation that orders no memory.
  void pass_warp_operation(int warp) { count(warp); }

  // Where kernels are told that it lies. Nothing is mapped there, so that an access that isn't checked here is a fault.
  char* base() const { return base_; }
  bool reserves(const void* address) const;

  // alignment: what a compiler may assume, hence the size of the accesses that it will make.
  void load(int thread, Site site, const void* address, int bytes, int alignment, void* to);
  void store(int thread, Site site, void* address, int bytes, int alignment, const void* from);
  void begin_copy(int thread, Site site, void* address, int bytes);
  void land_copy(int thread, Site site, void* address, int bytes, const void* from);
  // rows[l]: 16 bytes, row l % 8 of matrix l / 8. result[lane][matrix]: two neighbouring elements of row lane / 4, or,
  // transposed, of column lane / 4.
  void load_matrices(int warp, Site site, const void* const (&rows)[32], uint32_t (*const (&result)[32])[4],
                     bool transposed);

  // What was counted since begin_grid.
  const std::vector<AccessSite>& sites() const { return sites_; }

 private:
  // When and by whom. Epochs never repeat, so that nothing has to be cleared between CTAs.
  struct Access {
    uint32_t epoch = 0, warp_epoch = 0;  // how many barriers of the CTA, of the warp
    uint16_t thread = 0, site = 0;
  };
  // Of two bytes: what may still race with an access to come. One write is enough, since all are ordered; of the reads,
  // two by threads that stay unordered towards each other, if there are two, one otherwise.
  struct Cell {
    Access write, reads[2];
    bool in_flight = false;
  };
  // The n-th accesses of a warp's lanes at one site since they last met.
  struct WarpAccess {
    uint32_t lanes;
    uint32_t offset[32];
  };
  struct SiteAccesses {
    uint32_t count[32] = {};  // of each lane
    std::vector<WarpAccess> accesses;
    size_t used = 0;
  };
  struct Warp {
    uint32_t epoch = 1;
    std::vector<SiteAccesses> sites;  // by number
    std::vector<uint16_t> touched;
  };

  uint16_t number_of(Site site, AccessKind kind, int bytes);
  size_t checked_offset(Site site, const void* address, int bytes, const char* verb) const;
  bool is_ordered(const Access& earlier, const Access& later) const;
  static bool is_known(const Cell& cell, const Access& read);
  void check_read(const Access& access, size_t offset, int bytes);
  void check_write(const Access& access, size_t offset, int bytes, const char* verb);
  Access access_by(int thread, uint16_t site) const;
  void record(int thread, uint16_t site, size_t offset);
  void count(int warp);
  void count_all();
  std::string describe(const Access& access) const;
  [[noreturn]] void fail_race(const Access& access, const char* verb, size_t offset, const Access& other,
                              const char* other_verb) const;
  [[noreturn]] void fail_in_flight(const Access& access, const char* verb, size_t offset, const Access& copy) const;

  char* base_;
  size_t bytes_ = 0;
  std::vector<char> data_;
  std::vector<Cell> cells_;
  std::vector<Warp> warps_;
  uint32_t epoch_ = 1;
  bool counts_banks_ = false;
  std::vector<AccessSite> sites_;
  std::vector<uint16_t> site_table_;  // hashed; number + 1, 0 where free
};

}  // namespace conv2d_ext::cuda_host
