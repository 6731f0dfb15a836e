// Sizes of the caches that a core reads through on this machine, in bytes; 0 where the system doesn't tell. Only tiles
// and what is prefetched follow them, never an order of summation.
#pragma once

#include <cstdint>

namespace conv2d_ext::cpu {

int64_t l1_bytes();
int64_t l2_bytes();
int64_t l3_bytes();

}  // namespace conv2d_ext::cpu
