// kernels/columns.h, of elements and of pairs of them.
#pragma once

#include "../../../csrc/cpu/kernels/columns.h"
#include "arithmetic.h"

namespace parts {

// Step k of a lane, as the kernel's products take it.
template <class S, class T>
Operand<T> step_of(const S* lane, int64_t k) {
  if constexpr (kTakesPairs<T>) {
    return {uint32_t(lane[2 * k].bits) | uint32_t(lane[2 * k + 1].bits) << 16};
  } else {
    return widened(lane[k]);
  }
}

template <class S, class T, int MR>
void check_column_panels(Random& random) {
  constexpr int L = Vec<T>::kLanes;
  constexpr int64_t kPerStep = kTakesPairs<T> ? 2 : 1;
  for (int64_t lanes = 1; lanes <= 2 * L + 1; ++lanes) {
    const int64_t depth = random.between(1, 5 * L), segment = random.between(1, 4 * L);
    const int64_t chain = random.between(1, segment), lane_step = depth * kPerStep + random.between(0, 3);
    const int64_t sum_pitch = round_up(lanes, L) + random.between(0, 3);
    describe("%d results, %d lanes, depth %d, segments of %d, chains of %d", MR, int(lanes), int(depth), int(segment),
             int(chain));
    Buffer<S> elements((lanes - 1) * lane_step + depth * kPerStep);
    Buffer<Operand<T>> rows(MR * depth);
    const Operand<T>* factors[MR];
    fill(rows, random);
    for (int r = 0; r < MR; ++r) factors[r] = rows.data() + r * depth;
    Result<T> sums((MR - 1) * sum_pitch + round_up(lanes, L));
    fill(elements, random);
    ColumnOperands<S, T> o{};
    o.depth = depth;
    o.segment = segment;
    o.chain = chain;
    o.factors = factors;
    o.lanes = elements.data();
    o.lane_step = lane_step;
    o.ahead = ColumnsAhead(random.between(0, 2));
    o.sums = sums.data();
    o.sum_pitch = sum_pitch;
    column_panels<S, T, MR>(o, lanes);
    for (int64_t r = 0; r < MR; ++r) {
      for (int64_t lane = 0; lane < lanes; ++lane) {
        T sum{};
        for (int64_t k = 0, end = 0; k < depth; k = end) {
          const int64_t segment_end = min64((k / segment + 1) * segment, depth);
          end = min64(k + chain, segment_end);
          T acc{};
          for (int64_t i = k; i < end; ++i) {
            acc = multiply_add(step_of<S, T>(elements.data() + lane * lane_step, i), factors[r][i], acc);
          }
          sum = k == 0 ? acc : add(sum, acc);
        }
        sums.expected[size_t(r * sum_pitch + lane)] = sum;
      }
      // Lanes beyond the last one may be anything.
      for (int64_t lane = lanes; lane < round_up(lanes, L); ++lane) sums.ignore(r * sum_pitch + lane);
    }
    sums.compare();
  }
}
template <class S, class T>
void check_columns() {
  begin_part(std::string("column_ukernel ") + kNameOf<S>);
  Random random(13);
  check_column_panels<S, T, 1>(random);
  check_column_panels<S, T, 2>(random);
  check_column_panels<S, T, 4>(random);
  check_column_panels<S, T, 6>(random);
  check_column_panels<S, T, 8>(random);
}

}  // namespace parts
