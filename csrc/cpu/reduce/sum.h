// Sums over any dimensions, in the order of reduce.h, whatever the strides.
//
// Where the reduced positions lie next to one another they are read a vector at a time; where the results' do, a few
// vectors of results are summed at once; else positions are gathered, a block at a time.
#pragma once

#include <memory>

#include "lanes.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

constexpr int64_t kSumBlock = 512, kSumPart = 64 * kSumBlock;

// Sums of 2^i things wherever bit i of the count is set.
template <class T>
struct PairwiseCounter {
  T level[48];
  uint64_t count = 0;
  void add(T value) {
    int i = 0;
    for (; (count >> i) & 1u; ++i) value = level[i] + value;
    level[i] = value;
    ++count;
  }
  T total() const {
    T sum{};
    for (int i = 0; (count >> i) != 0; ++i) {
      if ((count >> i) & 1u) sum = level[i] + sum;
    }
    return sum;
  }
};

// A position among dimensions, and where its element lies.
class DimsWalk {
 public:
  DimsWalk(const reduce::Dims& dims, int64_t position) : dims_(dims) {
    for (int i = dims.count - 1; i >= 0; --i) {
      index_[i] = position % dims.size[i];
      position /= dims.size[i];
      offset_ += index_[i] * dims.stride[i];
    }
  }
  int64_t offset() const { return offset_; }
  int64_t step() const { return dims_.count == 0 ? 1 : dims_.stride[dims_.count - 1]; }
  // Positions from here on that lie `step` apart.
  int64_t run() const { return dims_.count == 0 ? 1 : dims_.size[dims_.count - 1] - index_[dims_.count - 1]; }
  // At most to the end of the run.
  void advance(int64_t n) {
    int i = dims_.count - 1;
    if (i < 0) return;
    index_[i] += n;
    offset_ += n * dims_.stride[i];
    for (; i > 0 && index_[i] == dims_.size[i]; --i) {
      offset_ += dims_.stride[i - 1] - dims_.size[i] * dims_.stride[i];
      index_[i] = 0;
      ++index_[i - 1];
    }
  }

 private:
  const reduce::Dims& dims_;
  int64_t index_[reduce::kMaxDims];
  int64_t offset_ = 0;
};

template <class S, class T = ComputeType<S>>
T sum_of_run(const S* p, int64_t n) {
  Lanes<T> sums(T(0));
  for_each_lanes(n, [&](int64_t i, auto count) CONV2D_INLINE_LAMBDA { sums.add(Lanes<T>::load(p + i, count, T(0))); });
  return sums.total();
}

// The sum of the positions from begin to end, at most kSumPart of them.
template <class S, class T = ComputeType<S>>
T sum_of_positions(const S* base, const reduce::Dims& reduced, int64_t begin, int64_t end) {
  DimsWalk walk(reduced, begin);
  PairwiseCounter<T> blocks;
  for (int64_t at = begin; at < end; at += kSumBlock) {
    const int64_t n = min64(kSumBlock, end - at);
    if (walk.step() == 1 && walk.run() >= n) {
      blocks.add(sum_of_run(base + walk.offset(), n));
      walk.advance(n);
      continue;
    }
    S gathered[kSumBlock];
    for (int64_t i = 0; i < n;) {
      const int64_t run = min64(n - i, walk.run()), step = walk.step();
      const S* const from = base + walk.offset();
      for (int64_t j = 0; j < run; ++j) gathered[i + j] = from[j * step];
      i += run;
      walk.advance(run);
    }
    blocks.add(sum_of_run(gathered, n));
  }
  return blocks.total();
}

// Results that lie next to one another, a few vectors of them.
template <class S>
struct ColumnSums {
  using T = ComputeType<S>;
  using Vector = VectorOf<T>;
  static constexpr int kVectors = 4, kLength = Vec<T>::kLanes;
  static constexpr int64_t kWidth = kVectors * kLength;
  struct Row {
    Vector v[kVectors];
    friend CONV2D_INLINE Row operator+(const Row& a, const Row& b) {
      Row sum;
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) sum.v[i] = a.v[i] + b.v[i];
      return sum;
    }
  };

  static CONV2D_INLINE Row load(const S* p, int columns) {
    Row row;
    if (columns == kWidth) {
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) row.v[i] = load_as(p + i * kLength);
    } else {
      for (int i = 0; i < kVectors; ++i) row.v[i] = load_first(p + i * kLength, columns - i * kLength);
    }
    return row;
  }

  // Columns [0, columns) at base, of the positions from begin to end.
  static void sum(const S* base, const reduce::Dims& reduced, int64_t begin, int64_t end, int columns, T* sums) {
    DimsWalk walk(reduced, begin);
    PairwiseCounter<Row> blocks;
    for (int64_t at = begin; at < end; at += kSumBlock) {
      const int64_t n = min64(kSumBlock, end - at);
      Row lanes[kSumLanes];
      for (int64_t i = 0; i < n;) {
        const int64_t run = min64(n - i, walk.run()), step = walk.step();
        const S* const from = base + walk.offset();
        for (int64_t j = 0; j < run; ++j) {
          const Row row = load(from + j * step, columns);
          Row& lane = lanes[(i + j) % kSumLanes];
          // The first, too, is added: denormal numbers are flushed by operations alone.
          lane = (i + j < kSumLanes ? Row{} : lane) + row;
        }
        i += run;
        walk.advance(run);
      }
      // A lane without elements counts as 0.
      int64_t filled = min64(n, kSumLanes);
      for (int half = kSumLanes / 2; half > 0; half /= 2) {
        for (int i = 0; i + half < filled; ++i) lanes[i] = lanes[i] + lanes[i + half];
        filled = min64(filled, half);
      }
      blocks.add(lanes[0]);
    }
    const Row total = blocks.total();
    for (int i = 0; i < kVectors; ++i) Vec<T>::store(sums + i * kLength, total.v[i]);
  }
};

template <class S>
struct SumItems {
  using T = ComputeType<S>;
  const reduce::SumCall& call;
  int64_t results, length, parts;  // a sum is made of so many parts
  bool columns;
  T* partial;  // [parts][results], or null where there is one part

  static bool has_columns(const reduce::SumCall& call) {
    const auto last_step = [](const reduce::Dims& dims) { return dims.count == 0 ? 0 : dims.stride[dims.count - 1]; };
    return last_step(call.kept) == 1 && last_step(call.reduced) != 1;
  }

  int64_t width() const { return columns ? ColumnSums<S>::kWidth : 1; }
  int64_t row() const { return columns ? call.kept.size[call.kept.count - 1] : 1; }
  int64_t in_row() const { return div_up(row(), width()); }
  int64_t pieces() const { return results / row() * in_row(); }
  int64_t pieces_in_item() const { return pieces_at_once(min64(length, kSumPart) * min64(width(), row())); }
  int64_t groups() const { return div_up(pieces(), pieces_in_item()); }
  int64_t items() const { return groups() * parts; }

  void put(int64_t part, int64_t result, T sum) const {
    if (partial != nullptr) {
      partial[part * results + result] = sum;
    } else {
      finish(result, sum);
    }
  }
  // Zero has one sign, also where denormal numbers are flushed.
  void finish(int64_t result, T sum) const { static_cast<S*>(call.result)[result] = Narrow<S>::from(sum + T(0)); }

  void run(int64_t item) const {
    const int64_t part = item / groups(), first = item % groups() * pieces_in_item();
    const int64_t begin = part * kSumPart, end = min64(begin + kSumPart, length);
    for (int64_t piece = first; piece < min64(first + pieces_in_item(), pieces()); ++piece) {
      const int64_t column = piece % in_row() * width(), result = piece / in_row() * row() + column;
      const S* const base = static_cast<const S*>(call.input) + DimsWalk(call.kept, result).offset();
      if (!columns) {
        put(part, result, sum_of_positions(base, call.reduced, begin, end));
        continue;
      }
      T sums[ColumnSums<S>::kWidth];
      const int n = int(min64(width(), row() - column));
      ColumnSums<S>::sum(base, call.reduced, begin, end, n, sums);
      for (int i = 0; i < n; ++i) put(part, result + i, sums[i]);
    }
  }

  void add_parts() const {
    for (int64_t result = 0; result < results; ++result) {
      PairwiseCounter<T> counter;
      for (int64_t part = 0; part < parts; ++part) counter.add(partial[part * results + result]);
      finish(result, counter.total());
    }
  }
};

// Neither the sums nor their positions are empty.
template <class S>
void sum_of(const reduce::SumCall& call, const Executor& executor) {
  using T = ComputeType<S>;
  const int64_t results = call.kept.numel(), length = call.reduced.numel(), parts = div_up(length, kSumPart);
  const std::unique_ptr<T[]> partial(parts > 1 ? new T[size_t(parts * results)] : nullptr);
  SumItems<S> items{call, results, length, parts, SumItems<S>::has_columns(call), partial.get()};
  run_items(executor, items.items(), &items,
            [](void* context, int64_t item) { static_cast<const SumItems<S>*>(context)->run(item); });
  if (parts > 1) items.add_parts();
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
