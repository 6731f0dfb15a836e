// Integer arithmetic of sizes.
#pragma once

#include <cstdint>

#include "../../checked_arithmetic.h"

namespace conv2d_ext::cpu {

inline int64_t round_up(int64_t a, int64_t b) { return saturating_mul(div_up(a, b), b); }
constexpr int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
// `whole` cut into near-equal pieces of at most about `target`: the size of a piece.
inline int64_t even_piece(int64_t whole, int64_t target) {
  return whole <= 1 ? 1 : div_up(whole, div_up(whole, max64(target, 1)));
}

// Modulo 2^64: of addresses, steps between which may lead beyond what memory there can be.
inline int64_t wrapping_mul(int64_t a, int64_t b) { return int64_t(uint64_t(a) * uint64_t(b)); }

// The indices from `begin` to before `end`.
struct Interval {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
  bool contains(int64_t index) const { return begin <= index && index < end; }
};
// Of `count` coordinates first, first + step, ... those that lie in [0, size), by their indices; 0 < step, 0 <= size.
inline Interval indices_inside(int64_t first, int64_t step, int64_t count, int64_t size) {
  return {min64(first < 0 ? div_up(-first, step) : 0, count),
          min64(first < size ? div_up(size - first, step) : 0, count)};
}

}  // namespace conv2d_ext::cpu
