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
    const Wide wide = widen_floats(x);
    return narrow_doubles({function.value(wide.low), function.value(wide.high)});
  }
  CONV2D_INLINE Floats slope(Floats x) const {
    const Wide wide = widen_floats(x);
    return narrow_doubles({function.slope(wide.low), function.slope(wide.high)});
  }
};

// to[i] = f(from[i]...): of numbers, or of vectors of floats.
template <class S, class F, class... From>
CONV2D_INLINE void fill_row(void* result, int64_t n, const F& f, const From*... from) {
  S* const to = static_cast<S*>(result);
  int64_t i = 0;
  if constexpr (std::is_same_v<S, double>) {
    for (; i < n; ++i) to[i] = f(from[i]...);
  } else {
    constexpr int64_t L = Vec<float>::kLanes;
    for (; i + L <= n; i += L) store_as(to + i, f(load_as(from + i)...));
    const int rest = int(n - i);
    if (rest > 0) store_as_partial(to + i, f(load_as_partial(from + i, rest)...), rest);
  }
}

// A function as a row of the storage type is computed by it.
template <template <class> class Function, Kind kind, class S>
using OfRow = std::conditional_t<std::is_same_v<S, double>, Function<double>, OfFloats<Function, kind>>;

template <template <class> class Function, Kind kind, class S>
void value_row(const void* input, void* output, int64_t n, const double* parameters) {
  const OfRow<Function, kind, S> function(parameters);
  fill_row<S>(output, n, [&](auto x) CONV2D_INLINE_LAMBDA { return function.value(x); }, static_cast<const S*>(input));
}

template <template <class> class Function, Kind kind, class S>
void slope_row(const void* grad_output, const void* input, void* result, int64_t n, const double* parameters) {
  const OfRow<Function, kind, S> function(parameters);
  fill_row<S>(
      result, n, [&](auto g, auto x) CONV2D_INLINE_LAMBDA { return g * function.slope(x); },
      static_cast<const S*>(grad_output), static_cast<const S*>(input));
}

template <class Function>
CONV2D_INLINE double value_of(double x, double y) {
  return Function::template value<double>(x, y);
}
template <class Function>
CONV2D_INLINE Floats value_of(Floats x, Floats y) {
  const Wide a = widen_floats(x), b = widen_floats(y);
  return narrow_doubles(
      {Function::template value<Doubles>(a.low, b.low), Function::template value<Doubles>(a.high, b.high)});
}

template <class Function, class S>
void pair_row(const void* first, const void* second, void* result, int64_t n) {
  fill_row<S>(
      result, n, [&](auto x, auto y) CONV2D_INLINE_LAMBDA { return value_of<Function>(x, y); },
      static_cast<const S*>(first), static_cast<const S*>(second));
}

// One for each dtype, in DType's order.
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
