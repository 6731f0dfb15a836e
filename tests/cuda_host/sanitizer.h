// Whether AddressSanitizer is there, and its interface.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#define CONV2D_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CONV2D_ADDRESS_SANITIZER 1
#endif
#endif
#if defined(CONV2D_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
