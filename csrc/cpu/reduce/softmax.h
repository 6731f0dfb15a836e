// softmax and log_softmax over `length` of (outer, length, inner), and their gradients: rows that lie in one piece
// (inner is 1), or columns, a vector of them at a time. Both add in the order of reduce.h.
#pragma once

#include "lanes.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

CONV2D_INLINE float log_of_sum(float x) { return __builtin_logf(x); }
CONV2D_INLINE double log_of_sum(double x) { return __builtin_log(x); }

// Functions of vectors are lambdas that may capture, even where they don't: others would also be plain functions, which
// cannot return vectors.

// ---- rows

template <class S, bool log>
void softmax_row(const S* x, S* y, int64_t length) {
  using T = ComputeType<S>;
  using Vector = VectorOf<T>;
  using Row = Lanes<T>;
  Row maxima(-kInfinity<T>);
  const auto larger = [&](Vector a, Vector b) CONV2D_INLINE_LAMBDA { return larger_of<T>(a, b); };
  for_each_lanes(length, [&](int64_t i, auto n) CONV2D_INLINE_LAMBDA {
    maxima = Row::load(x + i, n, -kInfinity<T>).with(maxima, larger);
  });
  const T largest = maxima.largest();

  // Powers are kept where the result goes, unless it would round them: those of a short row are then kept here, and
  // those of a long one are computed again.
  constexpr bool kKeeps = !log && sizeof(S) == sizeof(T);
  constexpr int64_t kShort = 2048;
  T kept[!log && !kKeeps ? kShort : 1];
  const bool is_kept = !log && !kKeeps && length + kSumLanes <= kShort;
  const auto power = [=](Vector v) CONV2D_INLINE_LAMBDA { return exp_of_any<Vector>(v - largest); };
  Row sums(T(0));
  for_each_lanes(length, [&](int64_t i, auto n) CONV2D_INLINE_LAMBDA {
    const Row powers = Row::load(x + i, n, -kInfinity<T>).map(power);
    sums.add(powers);
    if constexpr (kKeeps) {
      powers.store(y + i, n);
    } else if (is_kept) {
      powers.store(kept + i, kSumLanes);
    }
  });
  const T sum = sums.total(), logarithm = log ? log_of_sum(sum) : T(0);

  if (is_kept) {
    const auto share = [=](Vector v) CONV2D_INLINE_LAMBDA { return v / sum; };
    for_each_lanes(length, [&](int64_t i, auto n) CONV2D_INLINE_LAMBDA {
      Row::load(kept + i, kSumLanes, T(0)).map(share).store(y + i, n);
    });
    return;
  }
  const auto result = [=](Vector v) CONV2D_INLINE_LAMBDA {
    if constexpr (log) return (v - largest) - logarithm;
    return (kKeeps ? v : power(v)) / sum;
  };
  const S* const from = kKeeps ? y : x;
  for_each_lanes(length, [&](int64_t i, auto n)
                             CONV2D_INLINE_LAMBDA { Row::load(from + i, n, T(0)).map(result).store(y + i, n); });
}

template <class S, bool log>
void softmax_grad_row(const S* gy, const S* y, S* gx, int64_t length) {
  using T = ComputeType<S>;
  using Vector = VectorOf<T>;
  using Row = Lanes<T>;
  Row sums(T(0));
  const auto product = [&](Vector a, Vector b) CONV2D_INLINE_LAMBDA { return a * b; };
  for_each_lanes(length, [&](int64_t i, auto n) CONV2D_INLINE_LAMBDA {
    const Row g = Row::load(gy + i, n, T(0));
    sums.add(log ? g : g.with(Row::load(y + i, n, T(0)), product));
  });
  const T sum = sums.total() + T(0);
  const auto result = [=](Vector g, Vector v) CONV2D_INLINE_LAMBDA {
    if constexpr (log) return g - exp_of_any<Vector>(v) * sum;
    return v * (g - sum);
  };
  for_each_lanes(length, [&](int64_t i, auto n) CONV2D_INLINE_LAMBDA {
    Row::load(gy + i, n, T(0)).with(Row::load(y + i, n, T(0)), result).store(gx + i, n);
  });
}

// ---- columns

// The lanes of a vector of columns, added pairwise.
template <class T>
CONV2D_INLINE VectorOf<T> total_of(VectorOf<T> (&sums)[kSumLanes]) {
  for (int half = kSumLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
  }
  return sums[0];
}

// `columns` at most the lanes of a vector; `step` elements from one position to the next.
template <class S, bool log>
void softmax_columns(const S* x, S* y, int64_t length, int64_t step, int columns) {
  using T = ComputeType<S>;
  using Vector = VectorOf<T>;
  Vector largest = Vector{} - kInfinity<T>;
  for (int64_t i = 0; i < length; ++i) largest = larger_of<T>(load_first(x + i * step, columns), largest);
  constexpr bool kKeeps = !log && sizeof(S) == sizeof(T);
  Vector sums[kSumLanes] = {};
  for (int64_t i = 0; i < length; ++i) {
    const Vector power = exp_of_any<Vector>(load_first(x + i * step, columns) - largest);
    sums[i % kSumLanes] = sums[i % kSumLanes] + power;
    if constexpr (kKeeps) store_first(y + i * step, power, columns);
  }
  const Vector sum = total_of<T>(sums);
  Vector logarithm{};
  if constexpr (log) {
    for (int i = 0; i < columns; ++i) logarithm[i] = log_of_sum(sum[i]);
  }
  const S* const from = kKeeps ? y : x;
  for (int64_t i = 0; i < length; ++i) {
    Vector v = load_first(from + i * step, columns);
    if constexpr (log) {
      v = (v - largest) - logarithm;
    } else {
      v = (kKeeps ? v : exp_of_any<Vector>(v - largest)) / sum;
    }
    store_first(y + i * step, v, columns);
  }
}

template <class S, bool log>
void softmax_grad_columns(const S* gy, const S* y, S* gx, int64_t length, int64_t step, int columns) {
  using T = ComputeType<S>;
  using Vector = VectorOf<T>;
  Vector sums[kSumLanes] = {};
  for (int64_t i = 0; i < length; ++i) {
    const Vector g = load_first(gy + i * step, columns);
    Vector& lane = sums[i % kSumLanes];
    lane = lane + (log ? g : g * load_first(y + i * step, columns));
  }
  const Vector sum = total_of<T>(sums) + T(0);
  for (int64_t i = 0; i < length; ++i) {
    const Vector g = load_first(gy + i * step, columns), v = load_first(y + i * step, columns);
    store_first(gx + i * step, log ? g - exp_of_any<Vector>(v) * sum : v * (g - sum), columns);
  }
}

// ---- work items: some rows, or a vector of columns of one row of `outer`

template <class S>
struct SoftmaxItems {
  const reduce::SoftmaxCall& call;

  static constexpr int64_t kColumns = Vec<ComputeType<S>>::kLanes;

  int64_t vectors() const { return div_up(call.inner, kColumns); }
  int64_t pieces() const { return call.outer * vectors(); }
  int64_t pieces_in_item() const { return pieces_at_once(call.length * min64(call.inner, kColumns)); }
  int64_t items() const { return div_up(pieces(), pieces_in_item()); }

  template <class Row, class Columns>
  void run(int64_t item, Row row, Columns columns) const {
    const int64_t first = item * pieces_in_item(), end = min64(first + pieces_in_item(), pieces());
    for (int64_t piece = first; piece < end; ++piece) {
      if (call.inner == 1) {
        row(piece * call.length);
      } else {
        const int64_t column = piece % vectors() * kColumns;
        columns(piece / vectors() * call.length * call.inner + column, int(min64(kColumns, call.inner - column)));
      }
    }
  }
};

template <class S, bool log>
void softmax_of(const reduce::SoftmaxCall& call, const Executor& executor) {
  SoftmaxItems<S> items{call};
  run_items(executor, items.items(), &items, [](void* context, int64_t item) {
    const SoftmaxItems<S>& work = *static_cast<const SoftmaxItems<S>*>(context);
    const reduce::SoftmaxCall& c = work.call;
    const S* const x = static_cast<const S*>(c.first);
    S* const y = static_cast<S*>(c.result);
    work.run(
        item, [&](int64_t at) { softmax_row<S, log>(x + at, y + at, c.length); },
        [&](int64_t at, int columns) { softmax_columns<S, log>(x + at, y + at, c.length, c.inner, columns); });
  });
}

template <class S, bool log>
void softmax_grad_of(const reduce::SoftmaxCall& call, const Executor& executor) {
  SoftmaxItems<S> items{call};
  run_items(executor, items.items(), &items, [](void* context, int64_t item) {
    const SoftmaxItems<S>& work = *static_cast<const SoftmaxItems<S>*>(context);
    const reduce::SoftmaxCall& c = work.call;
    const S* const gy = static_cast<const S*>(c.first);
    const S* const y = static_cast<const S*>(c.second);
    S* const gx = static_cast<S*>(c.result);
    work.run(
        item, [&](int64_t at) { softmax_grad_row<S, log>(gy + at, y + at, gx + at, c.length); },
        [&](int64_t at, int columns) {
          softmax_grad_columns<S, log>(gy + at, y + at, gx + at, c.length, c.inner, columns);
        });
  });
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
