// Runs of elements, for each function and storage type; compiled once for each instruction set.
//
// The tail of a run is computed by the same vectors as the rest, partly filled.
#pragma once

#include "../isa/convert.h"
#include "functions.h"
#include "pointwise.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

using pointwise::Kind;

// A function of a vector of floats.
template <template <class> class Function, Kind kind>
struct OfFloats {
  Function<Floats> function;
  explicit CONV2D_INLINE OfFloats(const double* parameters) : function(parameters) {}
  CONV2D_INLINE Floats value(Floats x) const { return function.value(x); }
  CONV2D_INLINE Floats slope(Floats x) const { return function.slope(x); }
};

template <template <class> class Function>
struct OfFloats<Function, Kind::kWide> {
  Function<Doubles> function;
  explicit CONV2D_INLINE OfFloats(const double* parameters) : function(parameters) {}
  CONV2D_INLINE Floats value(Floats x) const {
    Wide wide = widen_floats(x);
    wide.low = function.value(wide.low);
    wide.high = function.value(wide.high);
    return narrow_doubles(wide);
  }
  CONV2D_INLINE Floats slope(Floats x) const {
    Wide wide = widen_floats(x);
    wide.low = function.slope(wide.low);
    wide.high = function.slope(wide.high);
    return narrow_doubles(wide);
  }
};

template <template <class> class Function, Kind kind, class S>
void value_row(const void* input, void* output, int64_t n, const double* parameters) {
  const S* const x = static_cast<const S*>(input);
  S* const y = static_cast<S*>(output);
  if constexpr (std::is_same_v<S, double>) {
    const Function<double> function(parameters);
    for (int64_t i = 0; i < n; ++i) y[i] = function.value(x[i]);
  } else {
    const OfFloats<Function, kind> function(parameters);
    constexpr int64_t kLanes = Vec<float>::kLanes;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store_as(y + i, function.value(load_as(x + i)));
    if (i < n) store_as_partial(y + i, function.value(load_as_partial(x + i, int(n - i))), int(n - i));
  }
}

template <template <class> class Function, Kind kind, class S>
void slope_row(const void* grad_output, const void* input, void* result, int64_t n, const double* parameters) {
  const S* const g = static_cast<const S*>(grad_output);
  const S* const x = static_cast<const S*>(input);
  S* const y = static_cast<S*>(result);
  if constexpr (std::is_same_v<S, double>) {
    const Function<double> function(parameters);
    for (int64_t i = 0; i < n; ++i) y[i] = g[i] * function.slope(x[i]);
  } else {
    const OfFloats<Function, kind> function(parameters);
    constexpr int64_t kLanes = Vec<float>::kLanes;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store_as(y + i, load_as(g + i) * function.slope(load_as(x + i)));
    if (i < n) {
      const int rest = int(n - i);
      store_as_partial(y + i, load_as_partial(g + i, rest) * function.slope(load_as_partial(x + i, rest)), rest);
    }
  }
}

template <class Function>
CONV2D_INLINE Floats value_of_floats(Floats x, Floats y) {
  const Wide a = widen_floats(x), b = widen_floats(y);
  return narrow_doubles(
      {Function::template value<Doubles>(a.low, b.low), Function::template value<Doubles>(a.high, b.high)});
}

template <class Function, class S>
void pair_row(const void* first, const void* second, void* result, int64_t n) {
  const S* const x = static_cast<const S*>(first);
  const S* const y = static_cast<const S*>(second);
  S* const z = static_cast<S*>(result);
  if constexpr (std::is_same_v<S, double>) {
    for (int64_t i = 0; i < n; ++i) z[i] = Function::template value<double>(x[i], y[i]);
  } else {
    constexpr int64_t kLanes = Vec<float>::kLanes;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store_as(z + i, value_of_floats<Function>(load_as(x + i), load_as(y + i)));
    if (i < n) {
      const int rest = int(n - i);
      store_as_partial(z + i, value_of_floats<Function>(load_as_partial(x + i, rest), load_as_partial(y + i, rest)),
                       rest);
    }
  }
}

// One for each dtype, in the order of pointwise.cpp's index_of.
template <template <class> class Function, Kind kind>
constexpr void set_rows(pointwise::Rows& rows, int at) {
  rows.value[at][0] = value_row<Function, kind, float>;
  rows.value[at][1] = value_row<Function, kind, double>;
  rows.value[at][2] = value_row<Function, kind, BFloat16>;
  rows.value[at][3] = value_row<Function, kind, Float16>;
  rows.slope[at][0] = slope_row<Function, kind, float>;
  rows.slope[at][1] = slope_row<Function, kind, double>;
  rows.slope[at][2] = slope_row<Function, kind, BFloat16>;
  rows.slope[at][3] = slope_row<Function, kind, Float16>;
}

template <class Function>
constexpr void set_pair_rows(pointwise::Rows& rows, int at) {
  rows.pair[at][0] = pair_row<Function, float>;
  rows.pair[at][1] = pair_row<Function, double>;
  rows.pair[at][2] = pair_row<Function, BFloat16>;
  rows.pair[at][3] = pair_row<Function, Float16>;
}

constexpr pointwise::Rows make_rows() {
  pointwise::Rows rows{};
#define CONV2D_SET(Class, name, parameters, kind) set_rows<Class, Kind::kind>(rows, int(pointwise::Function::k##Class));
  CONV2D_POINTWISE_FUNCTIONS(CONV2D_SET)
#undef CONV2D_SET
#define CONV2D_SET(Class, name) set_pair_rows<Class>(rows, int(pointwise::PairFunction::k##Class));
  CONV2D_POINTWISE_PAIRS(CONV2D_SET)
#undef CONV2D_SET
  return rows;
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
