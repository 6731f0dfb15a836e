// Sizes of a core's caches on this machine, in bytes; 0 where the system doesn't tell. Only tiles follow them, never an
// order of summation.
#pragma once

#include <cstdint>

namespace conv2d_ext::cpu {

int64_t l1_bytes();
int64_t l2_bytes();

}  // namespace conv2d_ext::cpu
