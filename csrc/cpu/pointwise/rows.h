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

template <class... S>
constexpr pointwise::Rows make_rows(Types<S...>) {
#define CONV2D_VALUES(Class, name, parameters, kind) {value_row<Class, Kind::kind, S>...},
#define CONV2D_SLOPES(Class, name, parameters, kind) {slope_row<Class, Kind::kind, S>...},
#define CONV2D_PAIRS(Class, name) {pair_row<Class, S>...},
  return {{CONV2D_POINTWISE_FUNCTIONS(CONV2D_VALUES)},
          {CONV2D_POINTWISE_FUNCTIONS(CONV2D_SLOPES)},
          {CONV2D_POINTWISE_PAIRS(CONV2D_PAIRS)}};
#undef CONV2D_VALUES
#undef CONV2D_SLOPES
#undef CONV2D_PAIRS
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
