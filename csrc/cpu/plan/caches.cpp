#include "caches.h"

#include <unistd.h>

#include "../base/integers.h"

namespace conv2d_ext::cpu {

// Names of caches are glibc's; others lack them.
#if defined(_SC_LEVEL1_DCACHE_SIZE) && defined(_SC_LEVEL2_CACHE_SIZE) && defined(_SC_LEVEL3_CACHE_SIZE)

int64_t l1_bytes() {
  static const int64_t bytes = max64(sysconf(_SC_LEVEL1_DCACHE_SIZE), 0);
  return bytes;
}

int64_t l2_bytes() {
  static const int64_t bytes = max64(sysconf(_SC_LEVEL2_CACHE_SIZE), 0);
  return bytes;
}

int64_t l3_bytes() {
  static const int64_t bytes = max64(sysconf(_SC_LEVEL3_CACHE_SIZE), 0);
  return bytes;
}

#else

int64_t l1_bytes() { return 0; }

int64_t l2_bytes() { return 0; }

int64_t l3_bytes() { return 0; }

#endif

}  // namespace conv2d_ext::cpu
