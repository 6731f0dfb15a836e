#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#include "sanitizer.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace conv2d_ext::cuda_host {
namespace {

constexpr size_t kGuardBytes = 4096;
#if defined(CONV2D_ADDRESS_SANITIZER)
constexpr size_t kStackBytes = size_t{256} << 10;  // red zones around every array
#else
constexpr size_t kStackBytes = size_t{128} << 10;
#endif

}  // namespace

#if defined(__x86_64__)

// Saves what a callee has to preserve, and returns on the other stack. The floating-point modes are the same
// everywhere.
extern "C" void conv2d_ext_switch_stacks(void** save, void* load);
asm(R"(
.text
.globl conv2d_ext_switch_stacks
.hidden conv2d_ext_switch_stacks
.type conv2d_ext_switch_stacks, @function
conv2d_ext_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size conv2d_ext_switch_stacks, . - conv2d_ext_switch_stacks
)");

static void* make_context(char* stack_end, void (*entry)()) {
  // Six saved registers, the address that `ret` takes, and a return address that entry() never uses: at its first
  // instruction the stack is aligned as after a call.
  uint64_t* const top = reinterpret_cast<uint64_t*>(stack_end) - 8;
  for (int i = 0; i < 8; ++i) top[i] = 0;
  top[6] = reinterpret_cast<uint64_t>(entry);
  return top;
}

void Fiber::switch_stacks(Fiber& other) { conv2d_ext_switch_stacks(&context_, other.context_); }

#else

// Portable, with two system calls a switch. The contexts lie at the ends of the stacks; the caller's own is static.
static void* make_context(char* stack_end, void (*entry)()) {
  auto* const context = reinterpret_cast<ucontext_t*>(stack_end - (sizeof(ucontext_t) + 63) / 64 * 64);
  getcontext(context);
  context->uc_stack.ss_sp = stack_end - kStackBytes;
  context->uc_stack.ss_size = reinterpret_cast<char*>(context) - (stack_end - kStackBytes);
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}

void Fiber::switch_stacks(Fiber& other) {
  static ucontext_t callers;
  if (mapping_ == nullptr) context_ = &callers;
  swapcontext(static_cast<ucontext_t*>(context_), static_cast<const ucontext_t*>(other.context_));
}

#endif

Fiber::~Fiber() {
  if (mapping_ != nullptr) munmap(mapping_, kGuardBytes + kStackBytes);
}

void Fiber::prepare(void (*entry)()) {
  if (mapping_ == nullptr) {
    void* const mapping = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    mapping_ = static_cast<char*>(mapping);
    mprotect(mapping_, kGuardBytes, PROT_NONE);
    stack_ = mapping_ + kGuardBytes;
    stack_bytes_ = kStackBytes;
  }
  char* const end = mapping_ + kGuardBytes + kStackBytes;
#if defined(CONV2D_ADDRESS_SANITIZER)
  // Frames that were left without returning are still marked: those of entry() always, more after a failure.
  const size_t marked = context_ == nullptr ? 0 : has_frames_ ? kStackBytes : 2048;
  __asan_unpoison_memory_region(end - marked, marked);
#endif
  fake_stack_ = nullptr;
  has_frames_ = true;
  context_ = make_context(end, entry);
}

void Fiber::switch_to(Fiber& other) {
#if defined(CONV2D_ADDRESS_SANITIZER)
  __sanitizer_start_switch_fiber(&fake_stack_, other.stack_, other.stack_bytes_);
#endif
  switch_stacks(other);
#if defined(CONV2D_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
}

void Fiber::leave_to(Fiber& other, bool returned) {
  has_frames_ = !returned;
#if defined(CONV2D_ADDRESS_SANITIZER)
  __sanitizer_start_switch_fiber(nullptr, other.stack_, other.stack_bytes_);
#endif
  switch_stacks(other);
  __builtin_unreachable();
}

void Fiber::arrived([[maybe_unused]] Fiber& from) {
#if defined(CONV2D_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(nullptr, &from.stack_, &from.stack_bytes_);
#endif
}

}  // namespace conv2d_ext::cuda_host
