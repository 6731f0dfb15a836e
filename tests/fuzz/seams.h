// What the harness puts in the engine's place, and what it sees of it: the choice of an instruction set for each call
// (csrc/cpu/isa/select.cpp), poisoned and guarded scratch (csrc/cpu/base/scratch.cpp), the drivers that ran, and
// smaller limits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../../csrc/tensor_view.h"

namespace conv2d_ext::fuzz {

constexpr int kIsas = 6;
extern const char* const kIsaNames[kIsas];  // from the lowest on
// Those that are compiled in and that this machine runs, ascending.
const std::vector<int>& isas_present();
bool is_compiled(int isa);

// The dtypes that are compiled in.
const std::vector<DType>& dtypes_present();

// The instruction set of the calls that follow.
void use_isa(int isa);

// One run of a driver.
struct Run {
  void (*body)(void*, int64_t);
  int64_t items;
};

// What a call took and ran, from start_watching on.
struct Watched {
  int64_t scratch_bytes;    // the most that a thread took
  int64_t workspace_bytes;  // shared by the threads
  std::vector<Run> runs;
};
void start_watching();
Watched watched();

// The driver that `body` belongs to, e.g. "avx2 ConvCall<float, float, true>"; empty where it is none.
const std::string& driver_of(void (*body)(void*, int64_t));

// Plans see caches of several kinds of CPUs and not this machine's, with which some plans would never be made.
constexpr int64_t kMachines = 5;
// Of 0 the product's limits and the first machine, of kProductLimits + m those limits and machine m; of seeds in
// between smaller limits, and a machine, that follow from the seed.
constexpr int64_t kProductLimits = 256;
void use_limits(int64_t seed);

}  // namespace conv2d_ext::fuzz
