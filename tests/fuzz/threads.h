// Threads for the engine's items: std::thread and nothing else, which ThreadSanitizer understands.
#pragma once

#include "../../csrc/cpu/conv2d_cpu.h"

namespace conv2d_ext::fuzz {

// In which order, and by whom, items are computed.
enum class Schedule : int {
  kDealt,      // item i by thread i mod threads: every thread has its share, however short they are
  kTaken,      // the next one by whoever is free, as the product does
  kBackwards,  // from the last to the first, by the caller alone
  kBlocks,     // neighbouring ones by the same thread
};

// An executor of so many threads, whose workers take the caller's rounding and treatment of denormal numbers. Valid
// until the next call.
cpu::Executor executor(int threads, Schedule schedule);

}  // namespace conv2d_ext::fuzz
