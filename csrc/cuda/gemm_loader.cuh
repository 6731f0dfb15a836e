// How a tile of an operand gets from where it lies in global memory into shared memory.
//
// Nothing is assumed of the tensors' strides. Which index neighbouring threads take, x or k, follows from the one along
// which memory is contiguous: a warp then reads whole sectors. What is stored where does not depend on it.
#pragma once

#include <type_traits>

#include "gemm_geometry.cuh"
#include "gemm_policies.cuh"

namespace conv2d_ext::cuda {

// A thread's view of the tables in shared memory that a tile's loads read.
struct Tables {
  const KOffsets* offsets;  // of the tile's first k
  const KPosition* positions;
  const XEntry* im2col;  // [TILE_X]
  const int64_t* dense;  // [TILE_M], addresses
};

// The limits of the image that the im2col operand is gathered from.
struct Bounds {
  int32_t rows, cols;
  __device__ __forceinline__ bool contain(const XEntry& x, const KPosition& k) const {
    return static_cast<uint32_t>(x.h + k.h) < static_cast<uint32_t>(rows) &&
           static_cast<uint32_t>(x.w + k.w) < static_cast<uint32_t>(cols);
  }
};

// One operand's side of the tables.
template <bool IM2COL>
struct Side;

template <>
struct Side<true> {
  Tables tables;
  Bounds bounds;
  int64_t step;   // bytes from one channel of a group to the next
  bool keeps_l1;  // TileParams
  __device__ __forceinline__ XEntry entry(unsigned x) const { return load_shared(tables.im2col + x); }
  __device__ __forceinline__ int64_t offset(unsigned k) const { return load_shared(&tables.offsets[k].im2col); }
  __device__ __forceinline__ bool contains(const XEntry& x, const KPosition& k) const { return bounds.contain(x, k); }
};

template <>
struct Side<false> {
  Tables tables;
  int64_t step;
  bool keeps_l1;
  __device__ __forceinline__ XEntry entry(unsigned x) const { return {load_shared(tables.dense + x), 0, 0}; }
  __device__ __forceinline__ int64_t offset(unsigned k) const { return load_shared(&tables.offsets[k].dense); }
  __device__ __forceinline__ bool contains(const XEntry&, const KPosition&) const { return true; }
};

// Where the table has the entry of k where groups of 8 k are gathered one by one: what neighbouring lanes, which take
// neighbouring groups, read at once lies side by side.
template <int GROUPS>
__device__ __forceinline__ unsigned entry_place(unsigned k) {
  return k / (8 * GROUPS) * (8 * GROUPS) + k % 8 * GROUPS + k / 8 % GROUPS;
}

__device__ __forceinline__ const void* at_address(int64_t address) { return reinterpret_cast<const void*>(address); }

// Single elements, copied asynchronously to [k][x] in rows of TILE + padding.
template <class Policy, int TILE, int THREADS, int GROUP, bool IM2COL>
struct ElementLoader {
  using T = typename Policy::Element;
  static constexpr int kRow = TILE + Policy::kRowPadding;
  static constexpr int kTileK = Policy::kTileK;
  static constexpr unsigned kPerThread = TILE * kTileK / THREADS;
  static_assert(TILE * kTileK % THREADS == 0);

  // The entries of so many copies are read before the first of them is made: a copy that follows other work waits for
  // it.
  template <unsigned COUNT>
  static constexpr unsigned kBatchOf = COUNT < 4 ? COUNT : 4;

  // Neighbouring threads take neighbouring x, a thread several k of a group: one test for all of them.
  __device__ static __forceinline__ void over_x(T* tile, const Side<IM2COL>& side, unsigned thread) {
    constexpr unsigned kRun = kPerThread < GROUP ? kPerThread : GROUP;
    constexpr unsigned kRuns = kPerThread / kRun;
    constexpr unsigned kBatch = kBatchOf<kRuns>;
    static_assert(kRuns % kBatch == 0);
    // Unrolled further, the table's entries would take more registers than there are.
#pragma unroll 1
    for (unsigned first = 0; first < kRuns; first += kBatch) {
      KPosition positions[kBatch];
      int64_t addresses[kBatch];
      bool inside[kBatch];
#pragma unroll
      for (unsigned i = 0; i < kBatch; ++i) {
        const unsigned unit = thread + (first + i) * THREADS;
        const unsigned k = unit / TILE * kRun;
        const XEntry entry = side.entry(THREADS % TILE == 0 ? thread % TILE : unit % TILE);
        positions[i] = load_shared(side.tables.positions + k / GROUP);
        addresses[i] = entry.address + side.offset(k / GROUP);
        inside[i] = side.contains(entry, positions[i]);
      }
#pragma unroll
      for (unsigned i = 0; i < kBatch; ++i) {
        const unsigned unit = thread + (first + i) * THREADS;
        const unsigned k = unit / TILE * kRun;
#pragma unroll
        for (unsigned j = 0; j < kRun; ++j) {
          const int channel = static_cast<int>(k % GROUP + j);
          copy_async<sizeof(T)>(tile + (k + j) * kRow + unit % TILE, at_address(addresses[i] + channel * side.step),
                                inside[i] && channel < positions[i].count);
        }
      }
    }
  }

  // Neighbouring threads take neighbouring k, a thread one k of several x. A warp covers 8 k of 4 x, which in rows 16
  // bytes apart (modulo all banks) meet no bank twice.
  __device__ static __forceinline__ void over_k(T* tile, const Side<IM2COL>& side, unsigned thread) {
    constexpr unsigned kLanesK = 8;
    constexpr unsigned kWarpsK = kTileK / kLanesK;
    constexpr unsigned kBatch = kBatchOf<kPerThread>;
    static_assert(kTileK % kLanesK == 0 && THREADS % (32 * kWarpsK) == 0 && kPerThread % kBatch == 0);
    const unsigned lane = thread % 32;
    const unsigned warp = thread / 32;
    const unsigned k = lane % kLanesK + warp % kWarpsK * kLanesK;
    const unsigned x0 = lane / kLanesK + warp / kWarpsK * (32 / kLanesK);
    const KPosition position = load_shared(side.tables.positions + k / GROUP);
    const int channel = static_cast<int>(k % GROUP);
    const int64_t offset = side.offset(k / GROUP) + channel * side.step;
    const bool exists = channel < position.count;
#pragma unroll 1
    for (unsigned first = 0; first < kPerThread; first += kBatch) {
      XEntry entries[kBatch];
#pragma unroll
      for (unsigned i = 0; i < kBatch; ++i) entries[i] = side.entry(x0 + (first + i) * (THREADS / kTileK));
#pragma unroll
      for (unsigned i = 0; i < kBatch; ++i)
        copy_async<sizeof(T)>(tile + k * kRow + x0 + (first + i) * (THREADS / kTileK),
                              at_address(entries[i].address + offset), exists && side.contains(entries[i], position));
    }
  }
};

// As many neighbouring x as 16 bytes hold, copied asynchronously to [k][x] in rows of TILE + padding. A thread takes
// the same x in every step, and several k.
template <class Policy, int TILE, int THREADS, int GROUP, bool IM2COL>
struct ElementVectorLoader {
  using T = typename Policy::Element;
  static constexpr int kRow = TILE + Policy::kRowPadding;
  static constexpr unsigned kWidth = 16 / sizeof(T);
  static constexpr unsigned kGroups = TILE / kWidth;
  static constexpr unsigned kRows = THREADS / kGroups;  // from a copy's k to the next one's
  static constexpr unsigned kCopies = Policy::kTileK / kRows;
  static_assert(TILE % kWidth == 0 && THREADS % kGroups == 0 && Policy::kTileK % kRows == 0);
  static_assert(kRow * sizeof(T) % 16 == 0);
  // The entries of so many copies are read before the first of them is made, as in ElementLoader.
  static constexpr unsigned kBatch = kCopies < 4 ? kCopies : 4;
  static_assert(kCopies % kBatch == 0);

  XEntry entry;

  __device__ __forceinline__ void begin(const Side<IM2COL>& side, unsigned thread) {
    entry = side.entry(thread % kGroups * kWidth);
  }
  __device__ __forceinline__ void read(const Side<IM2COL>&, unsigned) {}
  __device__ __forceinline__ void copy(T* tile, const Side<IM2COL>& side, unsigned thread) const {
    const unsigned k0 = thread / kGroups;
    T* const first = tile + k0 * kRow + thread % kGroups * kWidth;
#pragma unroll
    for (unsigned batch = 0; batch < kCopies; batch += kBatch) {
      int64_t addresses[kBatch];
      bool inside[kBatch];
#pragma unroll
      for (unsigned i = 0; i < kBatch; ++i) {
        const unsigned k = k0 + (batch + i) * kRows;
        const KPosition position = load_shared(side.tables.positions + k / GROUP);
        const int channel = static_cast<int>(k % GROUP);
        addresses[i] = entry.address + side.offset(k / GROUP) + channel * side.step;
        inside[i] = channel < position.count && side.contains(entry, position);
      }
#pragma unroll
      for (unsigned i = 0; i < kBatch; ++i)
        copy_async<16, true>(first + (batch + i) * kRows * kRow, at_address(addresses[i]), inside[i]);
    }
  }
};

// 16-byte groups of 8 neighbouring k, copied asynchronously to [x][k]. A thread takes the same group and the same x in
// every step, so their entries stay in registers, and a step reads one entry of k.
template <class Policy, int TILE, int THREADS, bool IM2COL>
struct VectorLoader {
  using T = typename Policy::Element;
  static constexpr unsigned kGroups = Policy::kTileK / 8;
  static constexpr unsigned kRows = THREADS / kGroups;  // from a copy's x to the next one's
  static constexpr unsigned kCopies = TILE / kRows;
  static_assert(THREADS % kGroups == 0 && TILE % kRows == 0);
  static_assert(kRows % 8 == 0, "a thread's groups have the same place in their rows");

  XEntry entries[kCopies];
  KPosition position;
  int64_t offset;

  __device__ __forceinline__ void begin(const Side<IM2COL>& side, unsigned thread) {
#pragma unroll
    for (unsigned i = 0; i < kCopies; ++i) entries[i] = side.entry(thread / kGroups + i * kRows);
  }
  // All reads of the table come before the first copy of either operand: a copy is a fence for the compiler.
  __device__ __forceinline__ void read(const Side<IM2COL>& side, unsigned thread) {
    position = load_shared(side.tables.positions + thread % kGroups);
    offset = side.offset(thread % kGroups);
  }
  __device__ __forceinline__ void copy(T* tile, const Side<IM2COL>& side, unsigned thread) const {
    T* const first = tile + Policy::group_offset(thread / kGroups, thread % kGroups);
#pragma unroll
    for (unsigned i = 0; i < kCopies; ++i) {
      T* const to = first + i * kRows * Policy::kTileK;
      const void* const from = at_address(entries[i].address + offset);
      const bool inside = position.count != 0 && side.contains(entries[i], position);
      if (side.keeps_l1) {
        copy_async<16>(to, from, inside);
      } else {
        copy_async<16, true>(to, from, inside);
      }
    }
  }
};

// 16-byte groups of 8 neighbouring x, copied asynchronously to [k][x]. A thread takes the same 8 x in every step, and
// several k.
template <class Policy, int TILE, int THREADS, int GROUP, bool IM2COL>
struct RowVectorLoader {
  using T = typename Policy::Element;
  static constexpr unsigned kGroups = TILE / 8;
  static constexpr unsigned kRows = THREADS / kGroups;  // from a copy's k to the next one's
  static constexpr unsigned kCopies = Policy::kTileK / kRows;
  static_assert(THREADS % kGroups == 0 && Policy::kTileK % kRows == 0);
  static_assert(kRows % 8 == 0, "a thread's groups have the same place in their rows, and the same channel");

  XEntry entry;
  KPosition positions[kCopies];
  int64_t offsets[kCopies];

  __device__ static __forceinline__ int channel(unsigned thread) { return static_cast<int>(thread / kGroups % GROUP); }

  __device__ __forceinline__ void begin(const Side<IM2COL>& side, unsigned thread) {
    entry = side.entry(thread % kGroups * 8);
    entry.address += channel(thread) * side.step;
  }
  __device__ __forceinline__ void read(const Side<IM2COL>& side, unsigned thread) {
#pragma unroll
    for (unsigned i = 0; i < kCopies; ++i) {
      const unsigned k = (thread / kGroups + i * kRows) / GROUP;
      positions[i] = load_shared(side.tables.positions + k);
      offsets[i] = side.offset(k);
    }
  }
  __device__ __forceinline__ void copy(T* tile, const Side<IM2COL>& side, unsigned thread) const {
    T* const first = tile + Policy::template row_offset<TILE>(thread / kGroups, thread % kGroups);
#pragma unroll
    for (unsigned i = 0; i < kCopies; ++i)
      copy_async<16, true>(first + i * kRows * TILE, at_address(entry.address + offsets[i]),
                           channel(thread) < positions[i].count && side.contains(entry, positions[i]));
  }
};

// Groups of 8 neighbouring k gathered element by element, through registers: loaded before a tile is multiplied, stored
// after it.
template <class Policy, int TILE, int THREADS, int GROUP, bool IM2COL>
struct GatherLoader {
  using T = typename Policy::Element;
  static constexpr unsigned kGroups = Policy::kTileK / 8;
  static constexpr unsigned kUnits = TILE * kGroups / THREADS;
  uint16_t values[kUnits][8];

  __device__ __forceinline__ void load(const Side<IM2COL>& side, bool over_k, unsigned thread) {
#pragma unroll
    for (unsigned i = 0; i < kUnits; ++i) {
      const unsigned unit = thread + i * THREADS;
      const unsigned group = over_k ? unit % kGroups : unit / TILE;
      const XEntry entry = side.entry(over_k ? unit / kGroups : unit % TILE);
      if (GROUP == 8) {
        const KPosition position = load_shared(side.tables.positions + group);
        const int64_t address = entry.address + side.offset(group);
        const int count = side.contains(entry, position) ? position.count : 0;
#pragma unroll
        for (int j = 0; j < 8; ++j)
          values[i][j] = j < count ? load_global(static_cast<const uint16_t*>(at_address(address + j * side.step))) : 0;
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const unsigned k = entry_place<kGroups>(group * 8 + j);
          const KPosition position = load_shared(side.tables.positions + k);
          values[i][j] = position.count != 0 && side.contains(entry, position)
                             ? load_global(static_cast<const uint16_t*>(at_address(entry.address + side.offset(k))))
                             : 0;
        }
      }
    }
  }

  __device__ __forceinline__ void store(T* tile, bool over_k, unsigned thread) const {
#pragma unroll
    for (unsigned i = 0; i < kUnits; ++i) {
      const unsigned unit = thread + i * THREADS;
      const unsigned group = over_k ? unit % kGroups : unit / TILE;
      const unsigned x = over_k ? unit / kGroups : unit % TILE;
      uint4 packed;
      packed.x = values[i][0] | static_cast<uint32_t>(values[i][1]) << 16;
      packed.y = values[i][2] | static_cast<uint32_t>(values[i][3]) << 16;
      packed.z = values[i][4] | static_cast<uint32_t>(values[i][5]) << 16;
      packed.w = values[i][6] | static_cast<uint32_t>(values[i][7]) << 16;
      store_shared(reinterpret_cast<uint4*>(tile + Policy::group_offset(x, group)), packed);
    }
  }
};

// What a kernel's instantiation says of an operand.
enum class Load {
  kOverX,      // single elements
  kOverK,      // single elements
  kVector,     // 16 bytes along k
  kGather,     // through registers, over x or k as the parameters say
  kRowVector,  // 16 bytes along x
};

// An operand's loads. begin() reads what is the same for all tiles, read() what all copies of a tile need; start()
// begins a tile's loads, finish() ends them after the multiplication that hides them.
template <class Policy, int TILE, int THREADS, int GROUP, bool IM2COL, Load LOAD>
struct TileLoader {
  using T = typename Policy::Element;
  using Elements = ElementLoader<Policy, TILE, THREADS, GROUP, IM2COL>;
  __device__ __forceinline__ void begin(const Side<IM2COL>&, unsigned) {}
  __device__ __forceinline__ void read(const Side<IM2COL>&, unsigned) {}
  __device__ __forceinline__ void start(T* tile, const Side<IM2COL>& side, bool, unsigned thread) {
    if (LOAD == Load::kOverK) {
      Elements::over_k(tile, side, thread);
    } else {
      Elements::over_x(tile, side, thread);
    }
  }
  __device__ __forceinline__ void finish(T*, bool, unsigned) {}
};

// Of a loader of vectors.
template <class Loader, bool IM2COL>
struct VectorTileLoader {
  using T = typename Loader::T;
  Loader vectors;
  __device__ __forceinline__ void begin(const Side<IM2COL>& side, unsigned thread) { vectors.begin(side, thread); }
  __device__ __forceinline__ void read(const Side<IM2COL>& side, unsigned thread) { vectors.read(side, thread); }
  __device__ __forceinline__ void start(T* tile, const Side<IM2COL>& side, bool, unsigned thread) {
    vectors.copy(tile, side, thread);
  }
  __device__ __forceinline__ void finish(T*, bool, unsigned) {}
};

template <class Policy, int TILE, int THREADS, int GROUP, bool IM2COL>
struct TileLoader<Policy, TILE, THREADS, GROUP, IM2COL, Load::kVector>
    : VectorTileLoader<VectorLoader<Policy, TILE, THREADS, IM2COL>, IM2COL> {
  static_assert(GROUP == 8);
};

template <class Policy, int TILE, int THREADS, int GROUP, bool IM2COL>
using RowsLoader = std::conditional_t<Policy::kTransposed, ElementVectorLoader<Policy, TILE, THREADS, GROUP, IM2COL>,
                                      RowVectorLoader<Policy, TILE, THREADS, GROUP, IM2COL>>;

template <class Policy, int TILE, int THREADS, int GROUP, bool IM2COL>
struct TileLoader<Policy, TILE, THREADS, GROUP, IM2COL, Load::kRowVector>
    : VectorTileLoader<RowsLoader<Policy, TILE, THREADS, GROUP, IM2COL>, IM2COL> {};

template <class Policy, int TILE, int THREADS, int GROUP, bool IM2COL>
struct TileLoader<Policy, TILE, THREADS, GROUP, IM2COL, Load::kGather> {
  using T = typename Policy::Element;
  GatherLoader<Policy, TILE, THREADS, GROUP, IM2COL> gather;
  __device__ __forceinline__ void begin(const Side<IM2COL>&, unsigned) {}
  __device__ __forceinline__ void read(const Side<IM2COL>&, unsigned) {}
  __device__ __forceinline__ void start(T*, const Side<IM2COL>& side, bool over_k, unsigned thread) {
    gather.load(side, over_k, thread);
  }
  __device__ __forceinline__ void finish(T* tile, bool over_k, unsigned thread) { gather.store(tile, over_k, thread); }
};

}  // namespace conv2d_ext::cuda
