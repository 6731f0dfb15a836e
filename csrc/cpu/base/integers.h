// Integer arithmetic of sizes.
#pragma once

#include <cstdint>

#include "../../checked_arithmetic.h"

namespace conv2d_ext::cpu {

inline int64_t div_up(int64_t a, int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }  // of 0 <= a, 0 < b
inline int64_t round_up(int64_t a, int64_t b) { return saturating_mul(div_up(a, b), b); }
inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
// `whole` cut into near-equal pieces of at most about `target`: the size of a piece.
inline int64_t even_piece(int64_t whole, int64_t target) {
  return whole <= 1 ? 1 : div_up(whole, div_up(whole, max64(target, 1)));
}

}  // namespace conv2d_ext::cpu
