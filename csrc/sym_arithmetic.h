// One vocabulary of sizes for int64_t, which the kernels compute with, and SymInt, for tracing: what checks of both are
// written in. A symbolic comparison becomes an assertion of the traced graph.
#pragma once

#include <c10/core/SymInt.h>

#include "checked_arithmetic.h"

namespace conv2d_ext {

inline bool equal(int64_t a, int64_t b) { return a == b; }
inline bool equal(const c10::SymInt& a, const c10::SymInt& b) { return a.sym_eq(b).expect_true(__FILE__, __LINE__); }

inline bool at_least(int64_t a, int64_t b) { return a >= b; }
inline bool at_least(const c10::SymInt& a, const c10::SymInt& b) { return a.sym_ge(b).expect_true(__FILE__, __LINE__); }

// Tracing takes a symbolic size to be nonzero, as torch.compile does.
inline bool known_zero(int64_t a) { return a == 0; }
inline bool known_zero(const c10::SymInt& a) {
  const auto value = a.maybe_as_int();
  return value.has_value() && *value == 0;
}

// false where the sum (product) doesn't fit; symbolic values are not bounded here.
inline bool add(int64_t a, int64_t b, int64_t* out) { return add_fits(a, b, out); }
inline bool mul(int64_t a, int64_t b, int64_t* out) { return mul_fits(a, b, out); }
template <class Operation, class Symbolic>
bool concrete_or(const c10::SymInt& a, const c10::SymInt& b, c10::SymInt* out, Operation operation, Symbolic symbolic) {
  const auto x = a.maybe_as_int();
  const auto y = b.maybe_as_int();
  if (!x || !y) {
    *out = symbolic(a, b);
    return true;
  }
  int64_t value = 0;
  const bool fits = operation(*x, *y, &value);
  *out = value;
  return fits;
}
inline bool add(const c10::SymInt& a, const c10::SymInt& b, c10::SymInt* out) {
  return concrete_or(
      a, b, out, [](int64_t x, int64_t y, int64_t* z) { return add(x, y, z); },
      [](const c10::SymInt& x, const c10::SymInt& y) { return x + y; });
}
inline bool mul(const c10::SymInt& a, const c10::SymInt& b, c10::SymInt* out) {
  return concrete_or(
      a, b, out, [](int64_t x, int64_t y, int64_t* z) { return mul(x, y, z); },
      [](const c10::SymInt& x, const c10::SymInt& y) { return x * y; });
}

}  // namespace conv2d_ext
