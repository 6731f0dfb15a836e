// The fuzz target: one case from bytes, or from text as the corpus holds it.
#include "harness.h"

#include <csignal>
#include <cstdio>

#include "check.h"

// The sanitizers end the process by a signal, so that the case can be shown whatever was found.
extern "C" const char* __asan_default_options() {
  return "abort_on_error=1:detect_leaks=0:quarantine_size_mb=8:allocator_may_return_null=1";
}
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }
extern "C" const char* __tsan_default_options() { return "abort_on_error=1:halt_on_error=1"; }

namespace conv2d_ext::fuzz {

const std::string* current_input = nullptr;

namespace {

extern "C" void show_case(int signal) {
  if (current_input != nullptr) std::fprintf(stderr, "Input %s\n", current_input->c_str());
  std::fprintf(stderr, "The case:\n  %s\n", to_text(current_case()).c_str());
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

}  // namespace

void run_bytes(const uint8_t* data, size_t size) {
  static const bool prepared = [] {
    std::signal(SIGABRT, show_case);
    return true;
  }();
  (void)prepared;
  Case value;
  const char* const text = reinterpret_cast<const char*>(data);
  if (!parse(text, size, value)) value = decode(data, size);
  check(value);
}

}  // namespace conv2d_ext::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  conv2d_ext::fuzz::run_bytes(data, size);
  return 0;
}
