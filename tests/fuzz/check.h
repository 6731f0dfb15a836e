// The properties that every case is held to.
#pragma once

#include "case.h"

namespace conv2d_ext::fuzz {

// Runs a case and compares. What fails is printed with the case, and the process ends; or, where that is wished, goes
// on.
void check(const Case& value);

// What happened since the start.
struct Counts {
  int64_t cases = 0, refused = 0, too_large = 0, plans = 0, calls = 0, failures = 0;
};
extern Counts counts;
extern bool goes_on_after_failures;

// What a call of the case is explained as, and what ran, where all of its tensors have one of the two formats: e.g.
// "depthwise float32 forward channels_last avx2". Nothing where the result is empty.
struct Reached {
  std::string explained, ran;
};
Reached reach(const Case& value, bool channels_last, bool run);

}  // namespace conv2d_ext::fuzz
