#include "shared_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace conv2d_ext::cuda_host {
namespace {

constexpr size_t kReservedBytes = size_t{1} << 20;
constexpr size_t kMarginBytes = size_t{64} << 10;  // before base(), for addresses that are too low
constexpr size_t kCellBytes = 2;
constexpr size_t kMostSites = 4096, kHashedSites = 2 * kMostSites;
constexpr int kLanes = 32, kBanks = 32;
constexpr uint32_t kWordBytes = 4;

// Passes over the banks that lanes [first, end) take together.
int wavefronts_of(const uint32_t (&offset)[kLanes], uint32_t lanes, int first, int end, int bytes) {
  uint32_t words[kBanks][kLanes];
  int counts[kBanks] = {};
  int most = 0;
  for (int lane = first; lane < end; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    const uint32_t begin = offset[lane] / kWordBytes;
    const uint32_t past = (offset[lane] + bytes + kWordBytes - 1) / kWordBytes;
    for (uint32_t word = begin; word < past; ++word) {
      const uint32_t bank = word % kBanks;
      uint32_t* const seen_end = words[bank] + counts[bank];
      if (std::find(words[bank], seen_end, word) != seen_end) continue;
      *seen_end = word;
      most = std::max(most, ++counts[bank]);
    }
  }
  return most;
}

}  // namespace

SharedMemory::SharedMemory() : site_table_(kHashedSites) {
  void* const reserved = mmap(nullptr, kReservedBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<char*>(reserved) + kMarginBytes;
}

SharedMemory::~SharedMemory() { munmap(base_ - kMarginBytes, kReservedBytes); }

bool SharedMemory::reserves(const void* address) const {
  const auto offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(base_ - kMarginBytes);
  return offset < kReservedBytes;
}

void SharedMemory::begin_grid(int bytes, int threads, bool counts_banks) {
  counts_banks_ = counts_banks;
  bytes_ = static_cast<size_t>(bytes);
  data_.assign(bytes_, 0);
  cells_.assign((bytes_ + kCellBytes - 1) / kCellBytes, Cell{});
  warps_.clear();
  warps_.resize((threads + kLanes - 1) / kLanes);
  epoch_ = 1;
  sites_.clear();
  std::fill(site_table_.begin(), site_table_.end(), uint16_t{0});
}

void SharedMemory::begin_cta() {
  std::fill(data_.begin(), data_.end(), '\xff');
  ++epoch_;
}

void SharedMemory::pass_block_barrier() {
  count_all();
  ++epoch_;
}

void SharedMemory::pass_warp_barrier(int warp) {
  count(warp);
  ++warps_[warp].epoch;
}

inline uint16_t SharedMemory::number_of(Site site, AccessKind kind, int bytes) {
  size_t hash = reinterpret_cast<uintptr_t>(site.file) / 8 + static_cast<size_t>(site.line) * 40503u +
                static_cast<size_t>(bytes) * 7u + static_cast<size_t>(kind) * 131u;
  for (;; ++hash) {
    uint16_t& entry = site_table_[hash % kHashedSites];
    if (entry == 0) {
      if (sites_.size() == kMostSites) fail("more lines of source reach shared memory than there is room for");
      sites_.push_back({site, kind, bytes, {0, 0, 0}});
      entry = static_cast<uint16_t>(sites_.size());
      return entry - 1;
    }
    const AccessSite& known = sites_[entry - 1];
    // A file's name is one literal in each translation unit: the pointer is enough.
    if (known.site.line == site.line && known.site.file == site.file && known.kind == kind && known.bytes == bytes)
      return entry - 1;
  }
}

size_t SharedMemory::checked_offset(Site site, const void* address, int bytes, const char* verb) const {
  const auto offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(base_));
  const bool is_inside = offset >= 0 && offset + bytes <= static_cast<int64_t>(bytes_);
  const bool is_aligned = (offset & (bytes - 1)) == 0;
  if (is_inside && is_aligned) return static_cast<size_t>(offset);
  const auto where = [&] {
    return std::string(verb) + " " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) + " (" +
           site.text() + ")";
  };
  if (is_inside) fail("misaligned: " + where() + " of shared memory");
  fail("out of range: " + where() + " of " + std::to_string(bytes_) + " bytes of shared memory");
}

// ---- races

inline bool SharedMemory::is_ordered(const Access& earlier, const Access& later) const {
  return earlier.epoch != later.epoch || earlier.thread == later.thread ||
         (earlier.thread / kLanes == later.thread / kLanes && earlier.warp_epoch < later.warp_epoch);
}

std::string SharedMemory::describe(const Access& access) const {
  return "thread " + std::to_string(access.thread) + " (" + sites_[access.site].site.text() + ")";
}

void SharedMemory::fail_race(const Access& access, const char* verb, size_t offset, const Access& other,
                             const char* other_verb) const {
  fail("race: " + describe(access) + " " + verb + " shared memory at offset " + std::to_string(offset) + ", which " +
       describe(other) + " " + other_verb + "; no barrier is between them");
}

void SharedMemory::fail_in_flight(const Access& access, const char* verb, size_t offset, const Access& copy) const {
  fail("race: " + describe(access) + " " + verb + " shared memory at offset " + std::to_string(offset) +
       ", where an asynchronous copy of " + describe(copy) + " has not been waited for");
}

// Whatever races with the read races with one of those that are kept: these are of two warps, unordered until the next
// barrier of the CTA, or of two threads of the read's own warp since it last met.
inline bool SharedMemory::is_known(const Cell& cell, const Access& read) {
  const auto& [first, second] = cell.reads;
  if (first.epoch != read.epoch || second.epoch != read.epoch) return false;
  const int warp = first.thread / kLanes;
  return warp != second.thread / kLanes ||
         (warp == read.thread / kLanes && first.warp_epoch == read.warp_epoch && second.warp_epoch == read.warp_epoch);
}

void SharedMemory::check_read(const Access& access, size_t offset, int bytes) {
  for (size_t at = offset; at < offset + bytes; at += kCellBytes) {
    Cell& cell = cells_[at / kCellBytes];
    if (cell.in_flight) fail_in_flight(access, "reads", at, cell.write);
    if (!is_ordered(cell.write, access)) fail_race(access, "reads", at, cell.write, "writes");
    if (is_known(cell, access)) continue;
    // Reads that come before this one for whoever comes after it are forgotten.
    Access kept[2];
    int count = 0;
    for (const Access& read : cell.reads)
      if (read.epoch == access.epoch && !is_ordered(read, access)) kept[count++] = read;
    if (count == 2) {
      // Three threads. Two of different warps stay unordered until the next barrier of the CTA.
      const int warp = kept[0].thread / kLanes;
      if (warp == kept[1].thread / kLanes && warp != access.thread / kLanes) cell.reads[1] = access;
    } else {
      cell.reads[0] = count == 1 ? kept[0] : access;
      cell.reads[1] = count == 1 ? access : Access{};
    }
  }
}

void SharedMemory::check_write(const Access& access, size_t offset, int bytes, const char* verb) {
  for (size_t at = offset; at < offset + bytes; at += kCellBytes) {
    Cell& cell = cells_[at / kCellBytes];
    if (cell.in_flight) fail_in_flight(access, verb, at, cell.write);
    if (!is_ordered(cell.write, access)) fail_race(access, verb, at, cell.write, "writes");
    for (const Access& read : cell.reads)
      if (!is_ordered(read, access)) fail_race(access, verb, at, read, "reads");
    cell.write = access;
  }
}

SharedMemory::Access SharedMemory::access_by(int thread, uint16_t site) const {
  return {epoch_, warps_[thread / kLanes].epoch, static_cast<uint16_t>(thread), site};
}

// ---- accesses

void SharedMemory::load(int thread, Site site, const void* address, int bytes, int alignment, void* to) {
  const size_t offset = checked_offset(site, address, bytes, "reads");
  const uint16_t number = number_of(site, AccessKind::kLoad, alignment);
  check_read(access_by(thread, number), offset, bytes);
  for (int at = 0; at < bytes; at += alignment) record(thread, number, offset + at);
  std::memcpy(to, data_.data() + offset, bytes);
}

void SharedMemory::store(int thread, Site site, void* address, int bytes, int alignment, const void* from) {
  const size_t offset = checked_offset(site, address, bytes, "writes");
  const uint16_t number = number_of(site, AccessKind::kStore, alignment);
  check_write(access_by(thread, number), offset, bytes, "writes");
  for (int at = 0; at < bytes; at += alignment) record(thread, number, offset + at);
  std::memcpy(data_.data() + offset, from, bytes);
}

void SharedMemory::begin_copy(int thread, Site site, void* address, int bytes) {
  const size_t offset = checked_offset(site, address, bytes, "copies");
  const uint16_t number = number_of(site, AccessKind::kCopy, bytes);
  check_write(access_by(thread, number), offset, bytes, "begins an asynchronous copy to");
  for (size_t at = offset; at < offset + bytes; at += kCellBytes) cells_[at / kCellBytes].in_flight = true;
  record(thread, number, offset);
  std::memset(data_.data() + offset, 0xff, bytes);
}

void SharedMemory::land_copy(int thread, Site site, void* address, int bytes, const void* from) {
  const size_t offset = static_cast<char*>(address) - base_;
  const uint16_t number = number_of(site, AccessKind::kCopy, bytes);
  for (size_t at = offset; at < offset + bytes; at += kCellBytes) {
    cells_[at / kCellBytes].in_flight = false;
    cells_[at / kCellBytes].write = access_by(thread, number);
  }
  std::memcpy(data_.data() + offset, from, bytes);
}

void SharedMemory::load_matrices(int warp, Site site, const void* const (&rows)[32], uint32_t (*const (&result)[32])[4],
                                 bool transposed) {
  constexpr int kRowBytes = 16, kElementBytes = 2;
  const uint16_t number = number_of(site, AccessKind::kMatrix, kRowBytes);
  uint32_t offsets[kLanes];
  for (int lane = 0; lane < kLanes; ++lane)
    offsets[lane] = static_cast<uint32_t>(checked_offset(site, rows[lane], kRowBytes, "reads"));
  Traffic& traffic = sites_[number].traffic;
  ++traffic.accesses;
  for (int matrix = 0; matrix < 4; ++matrix) {
    if (counts_banks_) traffic.wavefronts += wavefronts_of(offsets, ~0u, matrix * 8, matrix * 8 + 8, kRowBytes);
    traffic.ideal += 1;
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int half = 0; half < 2; ++half) {
        const int across = lane / 4, along = lane % 4 * 2 + half;
        const size_t offset =
            offsets[matrix * 8 + (transposed ? along : across)] + (transposed ? across : along) * kElementBytes;
        // A read of the lane that receives it: rows that another lane has stored need a barrier, whoever names them.
        check_read(access_by(warp * kLanes + lane, number), offset, kElementBytes);
        std::memcpy(reinterpret_cast<char*>(&(*result[lane])[matrix]) + half * kElementBytes, data_.data() + offset,
                    kElementBytes);
      }
    }
  }
}

// ---- bank conflicts

void SharedMemory::record(int thread, uint16_t site, size_t offset) {
  if (!counts_banks_) return;
  Warp& warp = warps_[thread / kLanes];
  const int lane = thread % kLanes;
  if (warp.sites.size() <= site) warp.sites.resize(site + 1);
  SiteAccesses& here = warp.sites[site];
  if (here.used == 0) warp.touched.push_back(site);
  const size_t number = here.count[lane]++;
  if (number == here.used) {
    if (here.accesses.size() == here.used) here.accesses.emplace_back();
    here.accesses[here.used++].lanes = 0;
  }
  WarpAccess& access = here.accesses[number];
  access.lanes |= 1u << lane;
  access.offset[lane] = static_cast<uint32_t>(offset);
}

void SharedMemory::count(int warp) {
  for (const uint16_t site : warps_[warp].touched) {
    SiteAccesses& here = warps_[warp].sites[site];
    AccessSite& counted = sites_[site];
    const int together = std::min(kLanes, kBanks * static_cast<int>(kWordBytes) / counted.bytes);
    for (size_t i = 0; i < here.used; ++i) {
      ++counted.traffic.accesses;
      for (int first = 0; first < kLanes; first += together) {
        const int passes =
            wavefronts_of(here.accesses[i].offset, here.accesses[i].lanes, first, first + together, counted.bytes);
        counted.traffic.wavefronts += passes;
        counted.traffic.ideal += passes > 0;
      }
    }
    here.used = 0;
    std::fill(std::begin(here.count), std::end(here.count), 0u);
  }
  warps_[warp].touched.clear();
}

void SharedMemory::count_all() {
  for (size_t warp = 0; warp < warps_.size(); ++warp) count(static_cast<int>(warp));
}

}  // namespace conv2d_ext::cuda_host
