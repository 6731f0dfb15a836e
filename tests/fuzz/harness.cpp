// The fuzz target: one case from bytes, or from text as the corpus holds it, of convolutions or of elements.
#include "harness.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "check.h"
#include "elements.h"

// The address and undefined-behaviour sanitizers end the process by a signal, whose handler shows the case.
extern "C" const char* __asan_default_options() {
  return "abort_on_error=1:detect_leaks=0:quarantine_size_mb=8:allocator_may_return_null=1";
}
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }
// ThreadSanitizer holds locks then, which a handler would wait for: it calls back instead.
extern "C" const char* __tsan_default_options() { return "halt_on_error=1"; }
#if defined(__SANITIZE_THREAD__)
#define FUZZ_THREAD_SANITIZER
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define FUZZ_THREAD_SANITIZER
#endif
#endif
#if defined(FUZZ_THREAD_SANITIZER)
extern "C" void __sanitizer_set_death_callback(void (*callback)());
#endif

namespace conv2d_ext::fuzz {

const std::string* current_input = nullptr;
std::string (*text_of_current)() = nullptr;

namespace {

void show_case() {
  if (current_input != nullptr) std::fprintf(stderr, "Input %s\n", current_input->c_str());
  if (text_of_current != nullptr) std::fprintf(stderr, "The case:\n  %s\n", text_of_current().c_str());
}

#if !defined(FUZZ_THREAD_SANITIZER)
extern "C" void show_case_and_end(int signal) {
  show_case();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}
#endif

void prepare() {
#if defined(FUZZ_THREAD_SANITIZER)
  __sanitizer_set_death_callback(show_case);
#else
  std::signal(SIGABRT, show_case_and_end);
#endif
}

}  // namespace

void fail(const std::string& what) {
  ++counts.failures;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  if (!goes_on_after_failures) end_after_failure();
  std::fprintf(stderr, "  %s\n", text_of_current().c_str());
}

void end_after_failure() {
#if defined(FUZZ_THREAD_SANITIZER)
  show_case();
#endif
  std::abort();
}

// One in eight: they are cheap. By the last byte, which says no more.
static bool are_of_elements(const uint8_t* data, size_t size) { return size > 0 && data[size - 1] % 8 == 7; }

std::string text_of_bytes(const uint8_t* data, size_t size) {
  return are_of_elements(data, size) ? to_text(decode_elements(data, size)) : to_text(decode(data, size));
}

void run_bytes(const uint8_t* data, size_t size) {
  static const bool prepared = (prepare(), true);
  (void)prepared;
  const char* const text = reinterpret_cast<const char*>(data);
  ElementCase elements;
  Case value;
  if (parse(text, size, elements)) return check(elements);
  if (parse(text, size, value)) return check(value);
  if (are_of_elements(data, size)) return check(decode_elements(data, size));
  check(decode(data, size));
}

}  // namespace conv2d_ext::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  conv2d_ext::fuzz::run_bytes(data, size);
  return 0;
}
