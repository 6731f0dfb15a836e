// The micro-kernels of few results, where the other factor's elements lie along k: of matmul's, and of 1x1 kernels
// whose pixels have their channels side by side.
#pragma once

#include "../isa/convert.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// What a micro-kernel prefetches. Hardware prefetchers follow fewer streams than there are lanes.
enum class ColumnsAhead {
  kNothing,
  // Lanes that lie apart in memory. From caches they come faster without.
  kOfEachLane,
  // Lanes that continue one another, as pixels do: as many bytes as a block has, in ascending order, which the hardware
  // prefetchers then follow.
  kOfTheRun
};

// column_ukernel_<dtype>_<MR>x<NR>__<isa>
//
//   sums[r][0:NR]  =  sum over k of factors[r][k] * lanes[0:NR][k]
//
// for 0 <= r < MR, with one vector of lanes: segment by segment, each in chains of at most `chain` fused multiply-adds
// from zero, added one after the other. A product's elements are used once or a few times, so nothing is packed: blocks
// of NR x NR are transposed in registers, and each of their vectors is multiplied at once. Reading the elements is the
// bound. Of several vectors of lanes at a time, as of several chains, none was faster: a lane's cache lines often lie a
// multiple of 4 KiB from the next one's, in one set of L1, which holds twelve of them; each is read whole by a single
// load.
//
// With kPartial `valid_lanes` lanes exist; the others repeat the last one.
//
// Registers: MR accumulators, MR sums, a block.

template <class S, class T>
struct ColumnOperands {
  int64_t depth, segment, chain;     // steps of k: elements, or pairs of them
  const Operand<T>* const* factors;  // MR
  const S* lanes;
  int64_t lane_step, valid_lanes;
  ColumnsAhead ahead;
  T* sums;
  int64_t sum_pitch;
};

// How far ahead elements of each lane and of a run are prefetched.
constexpr int64_t kColumnBytesAhead = 512, kRunBytesAhead = 8192;

template <class S, class T, int MR, bool kPartial, ColumnsAhead kAhead>
struct ColumnUkernel {
  using V = Vec<T>;
  using reg = typename V::reg;
  static constexpr int L = V::kLanes;
  static constexpr int64_t kPerStep = kTakesPairs<T> ? 2 : 1;  // elements in a step of k

  static CONV2D_INLINE reg load_steps(const S* from, int steps) {
    if constexpr (kTakesPairs<T>) {
      const BFloat16Pair* const pairs = reinterpret_cast<const BFloat16Pair*>(from);
      return steps == L ? V::load(pairs) : V::load_partial(pairs, steps);
    } else {
      return steps == L ? load_as(from) : load_as_partial(from, steps);
    }
  }

  static CONV2D_INLINE void load_block(const ColumnOperands<S, T>& operands, const S* first, int steps,
                                       reg (&block)[L]) {
    if constexpr (kLoadsTransposed && sizeof(T) == 4 && sizeof(S) * kPerStep == 4 && !kPartial) {
      if (steps == L) {
        return V::load_transposed(reinterpret_cast<const char*>(first), operands.lane_step * int64_t(sizeof(S)), block);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) {
      const int64_t lane = kPartial ? min64(i, operands.valid_lanes - 1) : i;
      block[i] = load_steps(first + lane * operands.lane_step, steps);
    }
    V::transpose(block);
  }

  // `steps` steps from k on; L of them where that is a constant.
  static CONV2D_INLINE void add_block(const ColumnOperands<S, T>& operands, int64_t k, int steps, reg (&acc)[MR]) {
    reg block[L];
    const S* const first = operands.lanes + k * kPerStep;
    load_block(operands, first, steps, block);
    if constexpr (kAhead == ColumnsAhead::kOfEachLane) {
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) {
        __builtin_prefetch(first + i * operands.lane_step + kColumnBytesAhead / int64_t(sizeof(S)));
      }
    } else if constexpr (kAhead == ColumnsAhead::kOfTheRun) {
      constexpr int64_t kLine = 64 / sizeof(S);
      const S* const line = operands.lanes + kRunBytesAhead / int64_t(sizeof(S)) + k * kPerStep * L;
#pragma GCC unroll 16
      for (int64_t i = 0; i < L * L * kPerStep; i += kLine) __builtin_prefetch(line + i);
    }
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) {
      if (i >= steps) break;
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) acc[r] = V::fma(block[i], V::broadcast(operands.factors[r] + k + i), acc[r]);
    }
  }

  static __attribute__((noinline)) void run(const ColumnOperands<S, T>& operands) {
    reg sums[MR];
    for (int64_t k = 0, segment_end = 0; k < operands.depth;) {
      const bool first = k == 0;
      if (k == segment_end) segment_end = min64(k + operands.segment, operands.depth);
      const int64_t end = min64(k + operands.chain, segment_end);
      reg acc[MR];
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) acc[r] = V::zero();
      for (; k + L <= end; k += L) add_block(operands, k, L, acc);
      if (k < end) add_block(operands, k, int(end - k), acc);
      k = end;
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) sums[r] = first ? acc[r] : V::add(sums[r], acc[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) V::store(operands.sums + r * operands.sum_pitch, sums[r]);
  }
};

// A whole vector of lanes.
template <class S, class T, int MR>
CONV2D_INLINE void column_panel(const ColumnOperands<S, T>& operands) {
  if (operands.ahead == ColumnsAhead::kOfEachLane) {
    return ColumnUkernel<S, T, MR, false, ColumnsAhead::kOfEachLane>::run(operands);
  }
  if constexpr (MR <= kMostPixelColumnResults) {
    if (operands.ahead == ColumnsAhead::kOfTheRun) {
      return ColumnUkernel<S, T, MR, false, ColumnsAhead::kOfTheRun>::run(operands);
    }
  }
  ColumnUkernel<S, T, MR, false, ColumnsAhead::kNothing>::run(operands);
}

// Any number of lanes.
template <class S, class T, int MR>
void column_panels(ColumnOperands<S, T> operands, int64_t lanes) {
  constexpr int L = Vec<T>::kLanes;
  for (; lanes >= L; lanes -= L) {
    column_panel<S, T, MR>(operands);
    operands.lanes += L * operands.lane_step;
    operands.sums += L;
  }
  operands.valid_lanes = lanes;
  if (lanes > 0) ColumnUkernel<S, T, MR, true, ColumnsAhead::kNothing>::run(operands);
}
// Of as many results as row_results() says.
template <class S, class T>
CONV2D_INLINE void column_panels(int64_t results, const ColumnOperands<S, T>& operands, int64_t lanes) {
  with_constant<1, 2, 4, 6, kMostColumnResults>(
      results, [&](auto r) { column_panels<S, T, decltype(r)::value>(operands, lanes); });
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
