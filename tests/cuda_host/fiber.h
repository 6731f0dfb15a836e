// Stacks of their own for the threads of a CTA, and switching between them without a system call.
#pragma once

#include <cstddef>

namespace conv2d_ext::cuda_host {

// One flow of control. A default-constructed one stands for the caller's own stack.
class Fiber {
 public:
  Fiber() = default;
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // From now on the fiber runs entry(), on a stack that is made once and kept. entry must end in leave_to().
  void prepare(void (*entry)());
  // Suspends this fiber, which is running, and goes on with the other.
  void switch_to(Fiber& other);
  // As switch_to, but this fiber is never gone on with. returned: nothing but entry() is on its stack.
  [[noreturn]] void leave_to(Fiber& other, bool returned);
  // What entry() calls first; `from` is the fiber that switched here.
  static void arrived(Fiber& from);

 private:
  void switch_stacks(Fiber& other);

  char* mapping_ = nullptr;  // a guard page, then the stack
  void* context_ = nullptr;  // where the suspended fiber goes on
  const void* stack_ = nullptr;
  size_t stack_bytes_ = 0;
  void* fake_stack_ = nullptr;  // AddressSanitizer's
  bool has_frames_ = false;     // left on the stack, when its last entry() was
};

}  // namespace conv2d_ext::cuda_host
