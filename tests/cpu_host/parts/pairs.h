// pack/pairs.h: the packers of bfloat16 pairs.
#pragma once

#include "../../../csrc/cpu/pack/pairs.h"
#include "packing.h"

namespace parts {

inline BFloat16Pair pair_of(BFloat16 first, const BFloat16* second) {
  return {uint32_t(first.bits) | (second != nullptr ? uint32_t(second->bits) << 16 : 0u)};
}

inline void check_pair_copies() {
  Random random(60);
  begin_part("copy_pairs");
  for (const int64_t step : {1, 2, 3, 4, -1, 0}) {
    for (int64_t n = 1; n <= 70; ++n) {
      for (const bool has_second : {true, false}) {
        describe("%d pairs %d apart, second %d", int(n), int(step), has_second);
        const Dimension from[] = {{n, step}};
        int64_t before = 0, elements = 0;
        span_of(from, before, elements);
        Buffer<BFloat16> first(elements), second(elements);
        Result<BFloat16Pair> dst(n);
        fill(first, random);
        fill(second, random);
        copy_pairs(first.data() + before, has_second ? second.data() + before : nullptr, step, n, dst.data());
        for (int64_t i = 0; i < n; ++i) {
          const int64_t at = before + i * step;
          dst.expected[size_t(i)] = pair_of(first[at], has_second ? &second[at] : nullptr);
        }
        dst.compare();
      }
    }
  }
  begin_part("copy_channels");
  for (int64_t n = 1; n <= 100; ++n) {
    describe("%d channels", int(n));
    Buffer<BFloat16> src(n);
    Result<BFloat16Pair> dst(div_up(n, 2));
    fill(src, random);
    copy_channels(src.data(), n, dst.data());
    for (int64_t i = 0; i < n; i += 2) dst.expected[size_t(i / 2)] = pair_of(src[i], i + 1 < n ? &src[i + 1] : nullptr);
    dst.compare();
  }
  begin_part("ShortRuns");
  for (int64_t n = 1; n <= 32; ++n) {
    for (int64_t count = 1; count <= 40; count += random.between(1, 3)) {
      const int64_t words = random.once_in(2) ? (n + 1) / 2 * 2 : random.between(std::max<int64_t>(n, 2), 32);
      const int64_t apart = random.between(1, 2), span = (n - 1) * apart + 1;
      const int64_t step = span + (random.once_in(2) ? random.between(0, 20) : 0);
      describe("%d runs %d apart, of %d words %d apart as %d", int(count), int(step), int(n), int(apart), int(words));
      Buffer<BFloat16> src((count - 1) * step + span);
      Result<BFloat16> dst(count * words);
      fill(src, random);
      ShortRuns(n, apart, step, words).copy(src.data(), count, dst.data());
      for (int64_t i = 0; i < count * words; ++i) {
        dst.expected[size_t(i)] = i % words < n ? src[i / words * step + i % words * apart] : BFloat16{0};
      }
      dst.compare();
    }
  }
}

inline void check_pair_patch() {
  begin_part("pack_patch bfloat16 pairs");
  Random random(61);
  for (int i = 0; i < 600; ++i) {
    check_patch_of<BFloat16, BFloat16Pair>(
        i % 2 ? PatchOrder::kPlanar : PatchOrder::kChannelInner, 2, false, random,
        [&](BFloat16Pair actual, const BFloat16* element, int64_t pair, int64_t stride, int64_t channels) {
          const BFloat16* const second = element != nullptr && 2 * pair + 1 < channels ? element + stride : nullptr;
          const BFloat16Pair expected = element == nullptr ? BFloat16Pair{0} : pair_of(*element, second);
          expect(same_bits(actual, expected), "another pair");
        });
  }
}

inline void check_pair_weights() {
  begin_part("pack_weight_pairs");
  Random random(62);
  for (int n = 0; n < 800; ++n) {
    constexpr int64_t L = Vec<float>::kLanes;
    const int64_t lanes = random.between(1, 3 * L), channels = random.between(1, random.once_in(3) ? 70 : 5);
    const int64_t rows = random.between(1, 4), cols = random.between(1, random.once_in(4) ? 33 : 5);
    const int64_t width = round_up(lanes, L), pairs = div_up(channels, 2), depth = pairs * rows * cols;
    const AnyWeight<BFloat16> from(lanes, channels, rows, cols, random);
    ConvGemm gemm{};
    gemm.weight_m = from.d[kLane].stride;
    gemm.per_step = 2;
    gemm.weight_c = 2 * from.d[kReduced].stride;
    gemm.weight_i = from.d[kTapRow].stride;
    gemm.weight_j = from.d[kTapCol].stride;
    describe("%d lanes, %d channels, %d x %d taps, strides %d, %d, %d, %d", int(lanes), int(channels), int(rows),
             int(cols), int(gemm.weight_m), int(gemm.weight_c), int(gemm.weight_i), int(gemm.weight_j));
    Buffer<BFloat16> weight(from.elements);
    Result<BFloat16Pair> dst(depth * width);
    fill(weight, random);
    const WeightSegment<BFloat16> segment{weight.data() + from.before, gemm.weight_m, lanes, pairs, rows, cols};
    pack_weight_pairs(gemm, segment, channels % 2 == 1, {dst.data(), width, width});
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t lane = 0; lane < width; ++lane) {
        const int64_t c = 2 * (k / cols / rows), i = k / cols % rows, j = k % cols;
        dst.expected[size_t(k * width + lane)] =
            lane >= lanes ? BFloat16Pair{0}
                          : pair_of(weight[from.at(lane, c, i, j)],
                                    c + 1 < channels ? &weight[from.at(lane, c + 1, i, j)] : nullptr);
      }
    }
    dst.compare();
  }
}

inline void check_pair_weights_of_groups() {
  check_weight_of_groups<BFloat16, BFloat16Pair>(
      "pack_weight_of_groups bfloat16 pairs", 2,
      [](BFloat16Pair* row, int64_t lane, const BFloat16* weight, int64_t step, bool) {
        row[lane] = weight != nullptr ? pair_of(*weight, weight + step) : BFloat16Pair{0};
      });
}

#if defined(CONV2D_BFLOAT16_PAIRS)
// What VDPBF16PS makes of denormal numbers, and in which order it adds.
inline void check_pair_products() {
  begin_part("products of pairs");
  Random random(63);
  using V = Vec<float>;
  for (int n = 0; n < 2000; ++n) {
    Buffer<BFloat16Pair> a(V::kLanes), b(V::kLanes);
    Buffer<float> c(V::kLanes);
    Result<float> result(V::kLanes);
    for (int i = 0; i < V::kLanes; ++i) {
      // Exponents around those of the smallest normal numbers.
      const auto any = [&] {
        return uint32_t(random.between(0, 1) << 15 | random.between(0, 130) << 7 | random.between(0, 127));
      };
      a[i] = {any() << 16 | any()};
      b[i] = {any() << 16 | any()};
      const uint32_t bits = any() << 16 | uint32_t(random.between(0, 65535));
      std::memcpy(&c[i], &bits, sizeof bits);
      result.expected[size_t(i)] = multiply_add(a[i], b[i], c[i]);
    }
    describe("vector %d", n);
    V::store(result.data(), V::fma(V::load(a.data()), V::load(b.data()), V::load(c.data())));
    result.compare();
  }
}

inline void check_pairs() {
  check_pair_copies();
  check_pair_patch();
  check_pair_weights();
  check_pair_weights_of_groups();
  check_pair_products();
}
#endif

}  // namespace parts
