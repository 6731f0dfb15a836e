// CONV2D_EXT_ASSERT(condition): what the code relies on, where nothing else would show that it doesn't hold. Builds
// with CONV2D_EXT_DEBUG, the tests' among them, end there; in others it is neither evaluated nor compiled.
#pragma once

#if defined(CONV2D_EXT_DEBUG) && !defined(__CUDA_ARCH__)
#include <cstdio>
#include <cstdlib>

#define CONV2D_EXT_ASSERT(condition)                                                         \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::fprintf(stderr, "%s:%d: assertion failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                          \
    }                                                                                        \
  } while (false)
#else
#define CONV2D_EXT_ASSERT(condition) static_cast<void>(0)
#endif
