// What the checks of single parts share: guarded memory, numbers, comparison to the bit.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define CONV2D_PARTS_ASAN
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CONV2D_PARTS_ASAN
#endif
#endif
#if defined(CONV2D_PARTS_ASAN)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace parts {

// ---- reports: one line for each part, with the number of values that were compared

struct Report {
  std::map<std::string, int64_t> compared;  // by part
  std::string part, now;
  int64_t failures = 0;
};
inline Report& report() {
  static Report instance;
  return instance;
}
inline void begin_part(const std::string& name) {
  report().part = name;
  report().now.clear();
  report().compared[name] += 0;
}
// Which case is computed now.
__attribute__((format(printf, 1, 2))) inline void describe(const char* format, ...) {
  char text[400];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  report().now = text;
}
__attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  constexpr int64_t kMostFailures = 20;
  char text[400];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::printf("FAILED %s: %s: %s\n", report().part.c_str(), report().now.c_str(), text);
  if (++report().failures == kMostFailures) std::exit(1);
}
inline void expect(bool holds, const char* what) {
  ++report().compared[report().part];
  if (!holds) fail("%s", what);
}
inline int finish() {
  for (const auto& [name, count] : report().compared) std::printf("%s: %" PRId64 "\n", name.c_str(), count);
  return report().failures == 0 ? 0 : 1;
}

// ---- memory

// Pages between two that nobody may touch. The sanitizer doesn't see what masked instructions read and write; the pages
// do.
class GuardedPages {
 public:
  static char* take(int64_t pages) {
    std::vector<char*>& free = pool()[pages];
    if (!free.empty()) {
      char* const memory = free.back();
      free.pop_back();
      return memory;
    }
    const int64_t page = page_bytes();
    void* const memory =
        mmap(nullptr, size_t((pages + 2) * page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    char* const first = static_cast<char*>(memory) + page;
    if (mprotect(memory, size_t(page), PROT_NONE) != 0) std::abort();
    if (mprotect(first + pages * page, size_t(page), PROT_NONE) != 0) std::abort();
    return first;
  }
  static void give_back(char* memory, int64_t pages) { pool()[pages].push_back(memory); }
  static int64_t page_bytes() {
    static const int64_t bytes = sysconf(_SC_PAGESIZE);
    return bytes;
  }

 private:
  static std::map<int64_t, std::vector<char*>>& pool() {
    static std::map<int64_t, std::vector<char*>> instance;
    return instance;
  }
};

// n elements that end where a guard page begins; what is before them is poisoned, and seen to be as it was. All bits
// are set at first: NaN, for every floating-point type.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t n) : size_(n), bytes_(n * int64_t(sizeof(T))) {
    const int64_t page = GuardedPages::page_bytes();
    pages_ = bytes_ / page + 1;
    memory_ = GuardedPages::take(pages_);
    data_ = memory_ + pages_ * page - bytes_;
    std::memset(data_, 0xff, size_t(bytes_));
    slack_ = data_ - memory_ < kSlack ? data_ - memory_ : kSlack;
    std::memset(data_ - slack_, 0xa5, size_t(slack_));
    ASAN_POISON_MEMORY_REGION(memory_, size_t(data_ - memory_));
  }
  ~Buffer() {
    ASAN_UNPOISON_MEMORY_REGION(memory_, size_t(pages_ * GuardedPages::page_bytes()));
    for (int64_t i = 1; i <= slack_; ++i) {
      if (uint8_t(data_[-i]) != 0xa5) {
        fail("written %" PRId64 " bytes before a buffer", i);
        break;
      }
    }
    GuardedPages::give_back(memory_, pages_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() { return reinterpret_cast<T*>(data_); }
  const T* data() const { return reinterpret_cast<const T*>(data_); }
  T& operator[](int64_t i) { return data()[i]; }
  const T& operator[](int64_t i) const { return data()[i]; }
  int64_t size() const { return size_; }

 private:
  static constexpr int64_t kSlack = 256;
  int64_t size_, bytes_, pages_, slack_;
  char *memory_, *data_;
};

template <class T>
bool same_bits(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

// A result and what it should become. Elements that nothing is expected of keep their bits.
template <class T>
class Result {
 public:
  explicit Result(int64_t n) : actual(n), expected(static_cast<size_t>(n)) {
    if (n > 0) std::memcpy(static_cast<void*>(expected.data()), actual.data(), size_t(n) * sizeof(T));
  }
  T* data() { return actual.data(); }
  void fill(int64_t i, const T& value) { actual[i] = expected[size_t(i)] = value; }
  // Whatever is there, the part may leave.
  void ignore(int64_t i) { expected[size_t(i)] = actual[i]; }
  void compare() {
    report().compared[report().part] += actual.size();
    for (int64_t i = 0; i < actual.size(); ++i) {
      if (same_bits(actual[i], expected[size_t(i)])) continue;
      std::string bits;
      for (const unsigned char* bytes : {reinterpret_cast<const unsigned char*>(&actual[i]),
                                         reinterpret_cast<const unsigned char*>(&expected[size_t(i)])}) {
        for (size_t b = sizeof(T); b-- > 0;) {
          char hex[3];
          std::snprintf(hex, sizeof hex, "%02x", bytes[b]);
          bits += hex;
        }
        if (bits.size() == 2 * sizeof(T)) bits += ", expected ";
      }
      fail("element %" PRId64 " of %" PRId64 " is %s", i, actual.size(), bits.c_str());
      return;
    }
  }

  Buffer<T> actual;
  std::vector<T> expected;
};

// ---- numbers

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ * 0x2545f4914f6cdd1du >> 8;
  }
  int64_t between(int64_t low, int64_t high) { return low + int64_t(next() % uint64_t(high - low + 1)); }
  bool once_in(int64_t n) { return between(1, n) == 1; }
  template <size_t N>
  int64_t one_of(const int64_t (&values)[N]) {
    return values[between(0, int64_t(N) - 1)];
  }

 private:
  uint64_t state_;
};

// Runs of a loop over some values, without a line for each.
template <class Call>
void for_each(std::initializer_list<int64_t> values, Call call) {
  for (const int64_t value : values) call(value);
}

// A strided tensor of up to five dimensions in memory that holds exactly what its elements span.
struct Dimension {
  int64_t size, stride;
};
template <size_t N>
void span_of(const Dimension (&dimensions)[N], int64_t& before, int64_t& elements) {
  int64_t low = 0, high = 0;
  for (const Dimension& d : dimensions) {
    const int64_t reach = (d.size - 1) * d.stride;
    (reach < 0 ? low : high) += reach;
  }
  before = -low;
  elements = high - low + 1;
}
// Gives dimensions their strides: order[0] is the innermost, gap[0] apart, and so on; sizes are multiplied with gaps.
template <size_t N>
void lay_out(Dimension (&dimensions)[N], const int (&order)[N], const int64_t (&gap)[N]) {
  int64_t stride = 1;
  for (size_t i = 0; i < N; ++i) {
    stride *= gap[i];
    dimensions[order[i]].stride = stride;
    stride *= dimensions[order[i]].size;
  }
}

}  // namespace parts
