// A line of a kernel's source, and the failure that names it.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>

namespace conv2d_ext::cuda_host {

struct Site {
  const char* file;
  int line;

  // As a default argument: the line of the call.
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }

  bool operator==(const Site& other) const {
    return line == other.line && (file == other.file || std::strcmp(file, other.file) == 0);
  }
  bool operator!=(const Site& other) const { return !(*this == other); }
  const char* file_name() const {
    const char* const slash = std::strrchr(file, '/');
    return slash == nullptr ? file : slash + 1;
  }
  std::string text() const { return std::string(file_name()) + ":" + std::to_string(line); }
};

// What the launch of a kernel that does something wrong throws.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Ends the launch with a Failure that names the thread that runs, and its CTA and kernel.
[[noreturn]] void fail(const std::string& what);

}  // namespace conv2d_ext::cuda_host
