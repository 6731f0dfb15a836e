// The fuzz target, for both of its drivers: libFuzzer, which calls LLVMFuzzerTestOneInput, and generator.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace conv2d_ext::fuzz {

// What is being run, a file or a seed, for what ends the process.
extern const std::string* current_input;

// The text of the case that is being run.
extern std::string (*text_of_current)();

// Prints what failed with the case, and ends the process; or, where that is wished, goes on.
void fail(const std::string& what);
// Shows what is being run, and ends the process.
[[noreturn]] void end_after_failure();

void run_bytes(const uint8_t* data, size_t size);
// The case that bytes which are no text stand for.
std::string text_of_bytes(const uint8_t* data, size_t size);

}  // namespace conv2d_ext::fuzz
