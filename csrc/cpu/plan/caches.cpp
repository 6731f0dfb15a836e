#include "caches.h"

#include <unistd.h>

#include <cstdio>

#include "../base/integers.h"

namespace conv2d_ext::cpu {

// Names of caches are glibc's; others lack them.
#if defined(_SC_LEVEL1_DCACHE_SIZE) && defined(_SC_LEVEL2_CACHE_SIZE)

int64_t l1_bytes() {
  static const int64_t bytes = max64(sysconf(_SC_LEVEL1_DCACHE_SIZE), 0);
  return bytes;
}

int64_t l2_bytes() {
  static const int64_t bytes = max64(sysconf(_SC_LEVEL2_CACHE_SIZE), 0);
  return bytes;
}

#else

int64_t l1_bytes() { return 0; }

int64_t l2_bytes() { return 0; }

#endif

namespace {

// "32768K", a file's only line; 0 where it can't be read.
int64_t read_kib(const char* path) {
  std::FILE* const file = std::fopen(path, "re");
  if (file == nullptr) return 0;
  long long kib = 0;
  char unit = 0;
  const bool is_read = std::fscanf(file, "%lld%c", &kib, &unit) == 2 && unit == 'K';
  std::fclose(file);
  return is_read ? max64(kib, 0) : 0;
}

}  // namespace

// Linux tells the L3 that a core shares. (Some versions of glibc add up those of an AMD package.)
int64_t l3_bytes() {
  static const int64_t bytes = saturating_mul(read_kib("/sys/devices/system/cpu/cpu0/cache/index3/size"), 1024);
  return bytes;
}

}  // namespace conv2d_ext::cpu
