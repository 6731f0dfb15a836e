#include "seams.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "../../csrc/cpu/base/limits.h"
#include "../../csrc/cpu/base/scratch.h"
#include "../../csrc/cpu/isa/engine.h"
#include "../../csrc/cpu/plan/caches.h"
#include "harness.h"

#if defined(__SANITIZE_ADDRESS__)
#define FUZZ_ADDRESS_SANITIZER
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FUZZ_ADDRESS_SANITIZER
#endif
#endif
#if defined(FUZZ_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#endif

namespace conv2d_ext::cpu {

// Engines that this build leaves out.
__attribute__((weak)) const Engine* portable_engine() { return nullptr; }
__attribute__((weak)) const Engine* avx2_engine() { return nullptr; }
__attribute__((weak)) const Engine* avx512_engine() { return nullptr; }
__attribute__((weak)) const Engine* avx512_bf16_engine() { return nullptr; }
__attribute__((weak)) const Engine* amx_engine() { return nullptr; }
__attribute__((weak)) const Engine* amx_emulated_engine() { return nullptr; }
bool isa_is_forced() { return true; }

}  // namespace conv2d_ext::cpu

namespace conv2d_ext::fuzz {

// ---- instruction sets -----------------------------------------------------------------------------------------------

const char* const kIsaNames[kIsas] = {"portable", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated"};

namespace {

const cpu::Engine* engine_of(int isa) {
  switch (isa) {
    case 0:
      return cpu::portable_engine();
    case 1:
      return cpu::avx2_engine();
    case 2:
      return cpu::avx512_engine();
    default:  // made of that one
      if (cpu::avx512_engine() == nullptr) return nullptr;
      return isa == 3 ? cpu::avx512_bf16_engine() : isa == 4 ? cpu::amx_engine() : cpu::amx_emulated_engine();
  }
}

const cpu::Engine* current_engine = nullptr;

}  // namespace

bool is_compiled(int isa) { return engine_of(isa) != nullptr; }

const std::vector<int>& isas_present() {
  static const std::vector<int> present = [] {
    std::vector<int> isas;
    for (int isa = 0; isa < kIsas; ++isa) {
      if (is_compiled(isa) && cpu::machine_has(kIsaNames[isa])) isas.push_back(isa);
    }
    return isas;
  }();
  return present;
}

const std::vector<DType>& dtypes_present() {
#if defined(CONV2D_COMPILED_DTYPES)
  constexpr int kCompiled = CONV2D_COMPILED_DTYPES;
#else
  constexpr int kCompiled = 127;
#endif
  static const std::vector<DType> present = [] {
    std::vector<DType> dtypes;
    for (int dtype = 0; dtype <= int(DType::kInt64); ++dtype) {
      if ((kCompiled >> (dtype < 6 ? dtype : 6) & 1) != 0) dtypes.push_back(DType(dtype));
    }
    return dtypes;
  }();
  return present;
}

void use_isa(int isa) { current_engine = engine_of(isa); }

// ---- memory ---------------------------------------------------------------------------------------------------------

namespace {

std::atomic<int64_t> scratch_most{0}, workspace_most{0};
std::vector<Run> runs;
int64_t call_number = 0;  // of calls that are watched; workers read it after they are woken

void poison(void* memory, int64_t bytes) {
#if defined(FUZZ_ADDRESS_SANITIZER)
  ASAN_POISON_MEMORY_REGION(memory, size_t(bytes));
#else
  (void)memory, (void)bytes;
#endif
}
void unpoison(void* memory, int64_t bytes) {
#if defined(FUZZ_ADDRESS_SANITIZER)
  ASAN_UNPOISON_MEMORY_REGION(memory, size_t(bytes));
#else
  (void)memory, (void)bytes;
#endif
}

constexpr int64_t kLine = 64;

// A thread's memory: what is beyond the bytes asked for can't be touched, nor what is before them.
struct GuardedScratch {
  char* memory = nullptr;  // a line before the first byte
  int64_t bytes = 0;
  int64_t filled_in = 0;  // the call in which it was filled with NaN, and how much of it
  int64_t filled = 0;
  uint64_t owner = 0;  // of what was left in it; 0: nobody

  ~GuardedScratch() { release(); }
  void release() {
    if (memory == nullptr) return;
    unpoison(memory, bytes + 2 * kLine);
    std::free(memory);
    memory = nullptr;
    filled = 0;
  }
  void* take(int64_t wanted) {
    const int64_t room = (wanted + kLine - 1) / kLine * kLine;
    owner = 0;
    if (room > bytes || memory == nullptr) {
      release();
      bytes = room < 65536 ? 65536 : room;
      memory = static_cast<char*>(std::aligned_alloc(kLine, size_t(bytes + 2 * kLine)));
      poison(memory, bytes + 2 * kLine);
    } else {
      poison(memory + kLine, bytes);
    }
    unpoison(memory + kLine, wanted);
    if (filled_in != call_number) filled = 0;
    filled_in = call_number;
    if (filled < wanted) {
      std::memset(memory + kLine + filled, 0xff, size_t(wanted - filled));
      filled = wanted;
    }
    return memory + kLine;
  }
};
thread_local GuardedScratch scratch;

void keep_most(std::atomic<int64_t>& most, int64_t value) {
  int64_t seen = most.load();
  while (seen < value && !most.compare_exchange_weak(seen, value)) {
  }
}

}  // namespace

void start_watching() {
  scratch_most = 0;
  workspace_most = 0;
  runs.clear();
  ++call_number;
}

Watched watched() { return {scratch_most, workspace_most, runs}; }

const std::string& driver_of(void (*body)(void*, int64_t)) {
  static std::map<void (*)(void*, int64_t), std::string> names;
  const auto found = names.find(body);
  if (found != names.end()) return found->second;
  std::string& name = names[body];
  Dl_info info;
  void* const address = reinterpret_cast<void*>(body);
  if (dladdr(address, &info) == 0 || info.dli_saddr != address) return name;
  int status = 0;
  char* const demangled = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  if (status != 0) return name;
  // conv2d_ext::cpu::avx2::Items<conv2d_ext::cpu::avx2::ConvCall<float, float, true> >::run(void*, long)
  // conv2d_ext::cpu::amx::AmxCall::share(void*, long)
  const std::string prefix = "conv2d_ext::cpu::", wrapper = "Items<";
  std::string full = demangled;
  std::free(demangled);
  const size_t function = full.rfind("::", full.rfind('('));
  if (full.find(prefix) == std::string::npos || function == std::string::npos) return name;
  full.erase(function);
  const size_t wrapped = full.find(wrapper);
  if (wrapped != std::string::npos) {
    full = full.substr(wrapped + wrapper.size());
    full.erase(full.find_last_not_of(" ", full.size() - 2) + 1);
  }
  const size_t isa = full.find(prefix) + prefix.size(), type = full.find("::", isa);
  name = full.substr(isa, type - isa) + " " + full.substr(type + 2);
  return name;
}

// ---- limits ---------------------------------------------------------------------------------------------------------

namespace {

namespace t = cpu::limits::tiling;
namespace d = cpu::limits::depthwise;
namespace p = cpu::limits::phases;
namespace f = cpu::limits::few_planes;
namespace o = cpu::limits::one_pixel;
namespace w = cpu::limits::winograd;
namespace a = cpu::limits::amx;

// New ones at the end: the cases of the corpus name them by their places.
int64_t* const kLimits[] = {
    &t::kTilePixels,
    &t::kPanelBytes,
    &t::kFarRowsBytes,
    &t::kLeastPixelsToCopyRows,
    &t::kLeastChannelsToAlign,
    &t::kPatchBytes,
    &a::kTilePixels,
    &a::kPatchBytes,
    &a::kRowBytes,
    &t::kMaxPatchBytes,
    &t::kTileBytes,
    &t::kSumBytes,
    &t::kWeightTileBytes,
    &t::kWeightTileColumns,
    &t::kPartialBytes,
    &t::kInnerGroupsBytes,
    &t::kInnerPatchBytes,
    &d::kBlockBytes,
    &d::kPackedBytes,
    &d::kTileBytes,
    &d::kTilePixels,
    &d::kStridedPairs,
    &d::kStridedPixels,
    &d::kMaxStridedPatchBytes,
    &p::kMostPhasePixels,
    &p::kMostPatchBytes,
    &p::kMostPanelBytes,
    &f::kRunBytes,
    &f::kLeastRunBytes,
    &f::kLeastSourceBytes,
    &f::kLeastPlaneBytes,
    &f::kLeastWidenedPlaneBytes,
    &o::kDotResults,
    &o::kDotImages,
    &o::kDotStreamBytes,
    &o::kDotBlockBytes,
    &o::kThreadProducts,
    &o::kSmallProducts,
    &o::kRowLanes,
    &o::kMaxRowImages,
    &o::kMaxRowImagesFar,
    &o::kFarWeights,
    &o::kMostProductRows,
    &o::kMostColumnRows,
    &o::kFarColumnsBytes,
    &w::kSquares,
    &w::kSourceBytes,
    &w::kKeptWeightBytes,
    &w::kItemsPerThread,
    &w::kBlockChannels,
    &w::kStagedChannels,
    &t::kKeptWeightBytes,
    &f::kLeastStreamedBytes,
    &a::kTileBytes,
    &a::kStreamedWeightBytes,
    &a::kSumsAtOnce,
    &a::kColumnsPerReach,
    &a::kWeightTileBytes,
    &a::kWeightTileColumns,
    &a::kRowBlocks,
    &a::kBiasBytes,
    &d::kWidenedRows,
    &t::kWeightRows,
    &t::kFarWeightBytes,
    &t::kLeastWeightTileColumns,
    &t::kVectorsInTurnBytes,
    &t::kStreamedBytes,
    &t::kFewSetsBytes,
    &t::kLeastChunksOfThread,
    &p::kMostSumBytes,
    &p::kLeastRows,
    &d::kLeastBlockBytes,
    &d::kBlockWeightBytes,
    &t::kPaddingPermille,
    &t::kNarrowPaddingPermille,
    &t::kHalfPanelPermille,
    &p::kMostNeighbourPixels,
    &p::kResultBytes,
    &d::kCopiedBytes,
    &d::kTwoSetsBytes,
    &t::kMostPanelsOfTile,
    &t::kPanelPlanes,
    &t::kLeastTilesOfThread,
    &t::kGatheredTileBytes,
    &o::kDotPackedBytes,
    &t::kWeightTileColumnsByTap,
    &o::kDotPackedImages,
    &d::kFiniteProducts,
    &o::kMaxPlacedImages,
    &o::kLeastPlacedLanes,
    &o::kMostPlacedTaps,
    &t::kPairRowBytes,
    &t::kPairColumns,
    &t::kStreamedPairBytes,
    &t::kChunkedTileBytes,
    &d::kRowsWidenedAside,
    &t::kStreamedPairSourceBytes,
    &t::kLeastPairPixelBytes,
    &t::kWholePixelChannels,
    &t::kListedStepProducts,
    &d::kStreamedBlockBytes,
    &d::kStreamedBlockWeightBytes,
    &d::kPrefetchedResultBytes,
    &t::kMovedBytes,
    &t::kMovedDepth,
    &t::kLeastWholePixels,
    &t::kFarPixelBytes,
    &t::kFarWeightRowBytes,
    &t::kWholePanelBytes,
    &t::kLeastWholeRows,
    &t::kWholeWeightBytes,
    &t::kMostRowsOfOneSet,
    &t::kLeastWholeWays,
    &t::kWholePageBytes,
    &t::kWholeTilePixels,
    &t::kWholeRunBytes,
    &t::kNextPanelDepth,
    &t::kPanelsOfRun,
    &t::kLargeWeightTileBytes,
};
constexpr int kLimitCount = int(sizeof(kLimits) / sizeof(*kLimits));

struct Caches {
  int64_t l1_kib, l2_kib, l3_kib;
};
constexpr Caches kCachesOf[kMachines] = {
    {48, 1024, 32 << 10},
    // 8 ways of L1, a small L2
    {32, 512, 16 << 10},
    // a large L2, and an L3 of a whole socket, which answers late
    {48, 2048, 260 << 10},
    {32, 1024, 105 << 10},
    // none known
    {0, 0, 0},
};
Caches caches = kCachesOf[0];

}  // namespace

void use_limits(int64_t seed) {
  static int64_t product[kLimitCount], in_use = 0;
  static const bool saved = [] {
    t::kLeastWholeWays = 0;  // whole planes are tested whatever L1 this machine has
    for (int i = 0; i < kLimitCount; ++i) product[i] = *kLimits[i];
    return true;
  }();
  (void)saved;
  if (seed == in_use) return;
  in_use = seed;
  const bool shrinks = seed > 0 && seed < kProductLimits;
  caches = kCachesOf[uint64_t(seed) % kProductLimits % kMachines];
  uint64_t state = uint64_t(seed);
  for (int i = 0; i < kLimitCount; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const int64_t random = int64_t(state >> 40);
    *kLimits[i] = product[i];
    if (!shrinks || random % 4 == 0) continue;
    // Most are set to a few percent: cheap problems then have as many tiles as large ones otherwise.
    const int64_t shrunk = product[i] >> (random / 4 % 12);
    *kLimits[i] = shrunk < 1 ? 1 : shrunk;
  }
}

}  // namespace conv2d_ext::fuzz

// ---- in the engine's place ------------------------------------------------------------------------------------------

namespace conv2d_ext::cpu {

const Engine& engine() { return *fuzz::current_engine; }

int64_t l1_bytes() { return fuzz::caches.l1_kib << 10; }
int64_t l2_bytes() { return fuzz::caches.l2_kib << 10; }
int64_t l3_bytes() { return fuzz::caches.l3_kib << 10; }

void* thread_scratch(int64_t bytes) {
  fuzz::keep_most(fuzz::scratch_most, bytes);
  if (bytes < 0 || bytes > int64_t{1} << 30) {  // there may be no such memory
    std::fprintf(stderr, "FAILED: a thread takes %lld bytes of scratch\n", (long long)bytes);
    fuzz::end_after_failure();
  }
  return fuzz::scratch.take(bytes);
}

OwnedScratch thread_scratch(int64_t bytes, uint64_t owner) {
  const bool kept = owner != 0 && fuzz::scratch.owner == owner;
  void* const memory = thread_scratch(bytes);
  fuzz::scratch.owner = owner;
  return {memory, kept};
}

uint64_t new_scratch_owners(int64_t count) {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(uint64_t(count));
}

ScratchMemory allocate_scratch(int64_t bytes) {
  fuzz::keep_most(fuzz::workspace_most, bytes);
  ScratchMemory memory(std::aligned_alloc(64, size_t((bytes + 63) / 64 * 64)));
  std::memset(memory.get(), 0xff, size_t(bytes));
  return memory;
}
void ReleaseScratch::operator()(void* memory) const { std::free(memory); }

void watch_run(int64_t items, void (*body)(void*, int64_t)) { fuzz::runs.push_back({body, items}); }

}  // namespace conv2d_ext::cpu
