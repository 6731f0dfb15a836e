// The floating-point settings of a thread, carried to another.
#pragma once

#include <cfenv>

namespace conv2d_ext::cpu {

// Rounding, and whether denormal numbers are flushed, are settings of a thread. A worker takes the caller's while it
// works, so that the bits of a result don't depend on which thread computed it. The C library's environment holds them
// all, on every architecture: x86-64's MXCSR, aarch64's FPCR. (Instructions on bfloat16 read none of it: VDPBF16PS and
// AMX's TDPBF16PS round to nearest even and take denormal numbers as zeros, whatever the setting.)
class FloatEnvironmentScope {
 public:
  explicit FloatEnvironmentScope(const std::fenv_t& wanted) {
    std::fegetenv(&before_);
    std::fesetenv(&wanted);
  }
  ~FloatEnvironmentScope() { std::fesetenv(&before_); }
  FloatEnvironmentScope(const FloatEnvironmentScope&) = delete;
  FloatEnvironmentScope& operator=(const FloatEnvironmentScope&) = delete;

 private:
  std::fenv_t before_;
};

}  // namespace conv2d_ext::cpu
