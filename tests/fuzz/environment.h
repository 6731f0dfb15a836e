// The caller's floating-point environment: cases choose one.
#pragma once

#include <cfenv>
#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace conv2d_ext::fuzz {

// An environment for the time of a call. rounding: to nearest, down, up, towards zero; flush: 1 where denormal results
// are flushed, 2 where operands are, too.
class Environment {
 public:
  Environment(int64_t rounding, int64_t flush) {
    static constexpr int kModes[] = {FE_TONEAREST, FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO};
    std::fegetenv(&before_);
    std::fesetround(kModes[rounding]);
#if defined(__SSE2__)
    if (flush > 0) _mm_setcsr(_mm_getcsr() | 0x8000u | (flush > 1 ? 0x40u : 0u));
#endif
  }
  ~Environment() { std::fesetenv(&before_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  std::fenv_t before_;
};

}  // namespace conv2d_ext::fuzz
