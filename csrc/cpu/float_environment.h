// The floating-point settings of a thread, carried to another.
#pragma once

#include <cfenv>
#include <thread>

namespace conv2d_ext::cpu {

// Rounding, and whether denormal numbers are flushed, are settings of a thread. A worker takes the caller's while it
// works, so that the bits of a result don't depend on which thread computed it. The C library's environment holds them
// all, on every architecture: x86-64's MXCSR, aarch64's FPCR. (Instructions on bfloat16 read none of it: VDPBF16PS and
// AMX's TDPBF16PS round to nearest even and take denormal numbers as zeros, whatever the setting.)
struct FloatEnvironment {  // of the thread that makes it, the caller
  FloatEnvironment() { std::fegetenv(&environment); }
  const std::thread::id thread = std::this_thread::get_id();
  std::fenv_t environment;
};

// A thread's work for the caller. The caller, which works as well, keeps the exceptions that it raises.
class FloatEnvironmentScope {
 public:
  explicit FloatEnvironmentScope(const FloatEnvironment& caller)
      : is_worker_(std::this_thread::get_id() != caller.thread) {
    if (!is_worker_) return;
    std::fegetenv(&before_);
    std::fesetenv(&caller.environment);
  }
  ~FloatEnvironmentScope() {
    if (is_worker_) std::fesetenv(&before_);
  }
  FloatEnvironmentScope(const FloatEnvironmentScope&) = delete;
  FloatEnvironmentScope& operator=(const FloatEnvironmentScope&) = delete;

 private:
  const bool is_worker_;
  std::fenv_t before_;
};

}  // namespace conv2d_ext::cpu
