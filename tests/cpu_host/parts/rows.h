// kernels/planes.h, kernels/rows.h and kernels/dot.h.
#pragma once

#include "../../../csrc/cpu/kernels/dot.h"
#include "../../../csrc/cpu/kernels/planes.h"
#include "../../../csrc/cpu/kernels/rows.h"
#include "arithmetic.h"

namespace parts {

template <class S, class T, int MR, int NK>
void check_plane_ukernel(Random& random) {
  constexpr int L = Vec<T>::kLanes;
  // Rows of scratch are whole cache lines: of the last vector the part beyond the pixels may be anything.
  constexpr int64_t kLine = 64 / int64_t(sizeof(T));
  for (int64_t pixels = 1; pixels <= 4 * kLine + L + 1; pixels += pixels < 2 * L ? 1 : random.between(1, 5)) {
    const bool first = random.once_in(2), chain_ends = random.once_in(2), adds = random.once_in(2);
    describe("%dx%d, %d pixels, first %d, chain_ends %d, adds %d", MR, NK, int(pixels), first, chain_ends, adds);
    const int64_t plane_pitch = pixels + random.between(0, 3), row_pitch = round_up(pixels, kLine);
    Buffer<S> planes((NK - 1) * plane_pitch + pixels);
    Buffer<T> weights(NK * MR), start(MR);
    Result<T> chains(MR * row_pitch), sums(MR * row_pitch);
    fill(planes, random);
    fill(weights, random);
    fill(start, random);
    if (!first) fill(chains, random);
    if (adds) fill(sums, random);
    PlaneOperands<S, T> o{};
    o.pixels = pixels;
    o.planes = planes.data();
    o.plane_pitch = plane_pitch;
    o.next = 0;
    o.next_pixels = pixels;
    o.weights = weights.data();
    o.start = start.data();
    o.chains = chains.data();
    o.sums = sums.data();
    o.row_pitch = row_pitch;
    o.first = first;
    o.chain_ends = chain_ends;
    o.adds = adds;
    plane_ukernel<S, T, MR, NK>(o);
    for (int64_t r = 0; r < MR; ++r) {
      for (int64_t x = 0; x < row_pitch; ++x) {
        const size_t at = size_t(r * row_pitch + x);
        Result<T>& written = chain_ends ? sums : chains;
        if (x >= pixels) {
          if (x < round_up(pixels, L)) written.ignore(int64_t(at));
          continue;
        }
        T chain = first ? start[r] : chains.expected[at];
        for (int64_t s = 0; s < NK; ++s) {
          chain = multiply_add(weights[s * MR + r], widened(planes[s * plane_pitch + x]), chain);
        }
        written.expected[at] = chain_ends && adds ? add(sums.expected[at], chain) : chain;
      }
    }
    chains.compare();
    sums.compare();
  }
}
template <class S, int MR>
void check_plane_rows(Random& random) {
  using T = ComputeType<S>;
  check_plane_ukernel<S, T, MR, 1>(random);
  check_plane_ukernel<S, T, MR, kFewerPlanesAtOnce>(random);
  check_plane_ukernel<S, T, MR, kMostPlanesAtOnce>(random);
}
template <class S>
void check_planes() {
  begin_part(std::string("plane_ukernel ") + kNameOf<S>);
  Random random(10);
  check_plane_rows<S, 1>(random);
  check_plane_rows<S, 2>(random);
  check_plane_rows<S, 3>(random);
  check_plane_rows<S, 4>(random);
}

template <class S, int MR>
void check_row_chain(Random& random) {
  using T = ComputeType<S>;
  constexpr int L = Vec<T>::kLanes;
  const int64_t most = 2 * row_vectors(L * int64_t(sizeof(T)), MR) * L + L;
  for (int64_t lanes = 1; lanes <= most; lanes += lanes < 2 * L ? 1 : random.between(1, 2 * L)) {
    const int64_t depth = random.between(1, 9), valid = random.between(1, MR);
    const bool first = random.once_in(2), last = random.once_in(2), has_bias = random.once_in(2);
    describe("%d results, %d of them valid, %d lanes, depth %d, first %d, last %d, bias %d", MR, int(valid), int(lanes),
             int(depth), first, last, has_bias);
    // Rows of sums are whole vectors: of the last one the lanes beyond may be anything.
    const int64_t sum_pitch = round_up(lanes, 16), pitch = lanes + random.between(0, 3), result_pitch = lanes + 2;
    Buffer<T> factors(depth * MR);
    Buffer<S> rows((depth - 1) * pitch + lanes);
    Result<T> sums(MR * sum_pitch);
    Result<S> result((valid - 1) * result_pitch + lanes);
    Buffer<T> bias(round_up(lanes, L));  // whole vectors
    fill(bias, random);
    fill(factors, random);
    fill(rows, random);
    if (!first) fill(sums, random);
    RowOperands<S, T> o{};
    o.depth = depth;
    o.factors = factors.data();
    o.rows = rows.data();
    o.row_pitch = pitch;
    o.sums = sums.data();
    o.sum_pitch = sum_pitch;
    o.result = result.data();
    o.result_pitch = result_pitch;
    o.valid_results = valid;
    o.first = first;
    o.last = last;
    o.bias = has_bias ? bias.data() : nullptr;
    row_chain<S, T, MR>(o, lanes);
    for (int64_t r = 0; r < valid; ++r) {
      for (int64_t x = 0; x < lanes; ++x) {
        T sum{};
        for (int64_t k = 0; k < depth; ++k) sum = multiply_add(widened(rows[k * pitch + x]), factors[k * MR + r], sum);
        T& so_far = sums.expected[size_t(r * sum_pitch + x)];
        if (!first) sum = add(so_far, sum);
        if (last) {
          result.expected[size_t(r * result_pitch + x)] = narrowed<S>(add(sum, has_bias ? bias[x] : T{}));
        } else {
          so_far = sum;
        }
      }
      for (int64_t x = lanes; x < round_up(lanes, L) && !last; ++x) sums.ignore(r * sum_pitch + x);
    }
    sums.compare();
    result.compare();
  }
}
template <class S>
void check_rows() {
  begin_part(std::string("row_ukernel ") + kNameOf<S>);
  Random random(11);
  check_row_chain<S, 1>(random);
  check_row_chain<S, 2>(random);
  check_row_chain<S, 3>(random);
  check_row_chain<S, 4>(random);
  check_row_chain<S, 6>(random);
}

template <class S, int MR, int NC>
void check_dot_ukernel(Random& random) {
  using T = ComputeType<S>;
  constexpr int64_t W = kDotWidth<T>;
  for (int64_t steps = 1; steps <= 6; ++steps) {
    for (int64_t tail = 0; tail < W; ++tail) {
      const int64_t chain = random.between(1, steps + 1), valid_rows = random.between(1, MR);
      const int64_t valid_sources = random.between(1, NC), depth = tail != 0 ? (steps - 1) * W + tail : steps * W;
      const bool accumulate = random.once_in(2);
      describe("%dx%d, %d rows and %d sources, %d steps, tail %d, chain %d, accumulate %d", MR, NC, int(valid_rows),
               int(valid_sources), int(steps), int(tail), int(chain), accumulate);
      const int64_t row_pitch = depth + random.between(0, 2), source_pitch = depth + random.between(0, 2);
      const int64_t lane_pitch = MR * W + 3;
      Buffer<S> rows((valid_rows - 1) * row_pitch + depth);
      Buffer<T> source((valid_sources - 1) * source_pitch + depth);
      Result<T> lanes((NC - 1) * lane_pitch + MR * W);
      fill(rows, random);
      fill(source, random);
      for (int64_t c = 0; c < NC && accumulate; ++c) {
        for (int64_t i = 0; i < MR * W; ++i) lanes.fill(c * lane_pitch + i, any_value<T>(random));
      }
      DotOperands<S, T> o{};
      o.steps = steps;
      o.tail = tail;
      o.chain = chain;
      o.rows = rows.data();
      o.row_pitch = row_pitch;
      o.valid_rows = valid_rows;
      o.source = source.data();
      o.source_pitch = source_pitch;
      o.valid_sources = valid_sources;
      o.lanes = lanes.data();
      o.lane_pitch = lane_pitch;
      o.accumulate = accumulate;
      dot_ukernel<S, T, MR, NC>(o);
      for (int64_t c = 0; c < NC; ++c) {
        for (int64_t r = 0; r < MR; ++r) {
          for (int64_t l = 0; l < W; ++l) {
            // Surplus rows and sources stand for the last ones.
            const S* const row = rows.data() + min64(r, valid_rows - 1) * row_pitch;
            const T* const other = source.data() + min64(c, valid_sources - 1) * source_pitch;
            T& lane = lanes.expected[size_t(c * lane_pitch + r * W + l)];
            T total = lane;
            for (int64_t begin = 0; begin < steps; begin += chain) {
              T sum{};
              for (int64_t s = begin; s < min64(begin + chain, steps); ++s) {
                const int64_t k = s * W + l;
                sum = multiply_add(k < depth ? widened(row[k]) : T{}, k < depth ? other[k] : T{}, sum);
              }
              total = begin > 0 || accumulate ? add(total, sum) : sum;
            }
            lane = total;
          }
        }
      }
      lanes.compare();
    }
  }
}
template <class T>
void check_dot_lanes(Random& random) {
  constexpr int64_t W = kDotWidth<T>;
  constexpr int L = Vec<T>::kLanes;
  describe("the sum of lanes");
  Buffer<T> lanes(L * W);
  Result<T> sums(L);
  fill(lanes, random);
  Vec<T>::store(sums.data(), add_dot_lanes<T>(lanes.data()));
  for (int64_t i = 0; i < L; ++i) {
    T tree[W];
    for (int64_t l = 0; l < W; ++l) tree[l] = lanes[i * W + l];
    for (int64_t n = W / 2; n > 0; n /= 2) {
      for (int64_t l = 0; l < n; ++l) tree[l] = add(tree[l], tree[l + n]);
    }
    sums.expected[size_t(i)] = tree[0];
  }
  sums.compare();
}
template <class S>
void check_dot() {
  using T = ComputeType<S>;
  constexpr DotKernelShape kShape = dot_shape<T>();
  begin_part(std::string("dot_ukernel ") + kNameOf<S>);
  Random random(12);
  check_dot_ukernel<S, kShape.single_rows, 1>(random);
  check_dot_ukernel<S, kShape.rows, kShape.columns>(random);
  check_dot_ukernel<S, kShape.rows, kShape.few_columns>(random);
  for (int i = 0; i < 20; ++i) check_dot_lanes<T>(random);
}

}  // namespace parts
