// Integer arithmetic of sizes that nothing is known to bound yet. Host code.
#pragma once

#include <cstdint>
#include <limits>

namespace conv2d_ext {

// false where the sum (product) doesn't fit 64 bits.
inline bool add_fits(int64_t a, int64_t b, int64_t* out) { return !__builtin_add_overflow(a, b, out); }
inline bool mul_fits(int64_t a, int64_t b, int64_t* out) { return !__builtin_mul_overflow(a, b, out); }

// The sum (product), or the nearest number that fits: what it is compared with is exceeded all the same, and where it
// is a step that no index but 0 is multiplied by, any number does.
inline int64_t saturating_add(int64_t a, int64_t b) {
  int64_t sum = 0;
  if (add_fits(a, b, &sum)) return sum;
  return a < 0 ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int64_t>::max();
}
inline int64_t saturating_mul(int64_t a, int64_t b) {
  int64_t product = 0;
  if (mul_fits(a, b, &product)) return product;
  return (a < 0) != (b < 0) ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int64_t>::max();
}
template <class... Rest>
int64_t saturating_mul(int64_t a, int64_t b, Rest... rest) {
  return saturating_mul(saturating_mul(a, b), rest...);
}

// Of 0 <= a, 0 < b: no sum that could overflow.
inline int64_t div_up(int64_t a, int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }

}  // namespace conv2d_ext
