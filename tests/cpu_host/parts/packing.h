// pack/lanes.h, pack/patch.h, pack/weights.h and pack/interleave.h, and copy_run of isa/convert.h.
#pragma once

#if defined(CONV2D_AMX)
#include "../../../csrc/cpu/pack/amx.h"
#endif
#include "../../../csrc/cpu/pack/interleave.h"
#include "../../../csrc/cpu/pack/lanes.h"
#include "../../../csrc/cpu/pack/patch.h"
#include "../../../csrc/cpu/pack/weights.h"
#include "arithmetic.h"

namespace parts {

template <class S>
void check_copy_run() {
  using T = ComputeType<S>;
  begin_part(std::string("copy_run ") + kNameOf<S>);
  Random random(30);
  for (const int64_t step : {1, 2, 3, 5, -1, -3, 0}) {
    for (int64_t n = 0; n <= 80; n += n < 40 ? 1 : 7) {
      const bool conj = n % 2 == 1;
      describe("%d elements, %d apart, conj %d", int(n), int(step), conj);
      const Dimension from[] = {{max64(n, 1), step}};
      int64_t before = 0, elements = 0;
      span_of(from, before, elements);
      Buffer<S> src(n > 0 ? elements : 0);
      Result<T> dst(n);
      fill(src, random);
      copy_run(src.data() + before, step, n, dst.data(), conj);
      for (int64_t i = 0; i < n; ++i) {
        dst.expected[size_t(i)] = conjugated(widened(src[before + i * step]), conj);
      }
      dst.compare();
    }
  }
}

// dst[k * dst_pitch + lane] = src[lane * lane_step + k * k_step], zeros up to `width`.
template <class S, class Pack>
void check_lanes_of(int64_t lanes, int64_t lane_step, int64_t depth, int64_t k_step, int64_t width, bool conj,
                    Random& random, Pack pack) {
  using T = ComputeType<S>;
  describe("%d of %d lanes, %d apart, depth %d, %d apart, conj %d", int(lanes), int(width), int(lane_step), int(depth),
           int(k_step), conj);
  const int64_t pitch = width + (kIsComplex<T> ? 0 : random.between(0, 3));
  const Dimension from[] = {{lanes, lane_step}, {depth, k_step}};
  int64_t before = 0, elements = 0;
  span_of(from, before, elements);
  Buffer<S> src(elements);
  Result<T> dst((depth - 1) * pitch + width);
  fill(src, random);
  pack(src.data() + before, dst.data(), pitch);
  for (int64_t k = 0; k < depth; ++k) {
    T* const row = dst.expected.data() + k * pitch;
    for (int64_t lane = 0; lane < width; ++lane) {
      const T value = lane < lanes ? widened(src[before + lane * lane_step + k * k_step]) : T{};
      put(row, lane, conjugated(value, conj));
    }
  }
  dst.compare();
}
template <class S>
void check_lanes() {
  using T = ComputeType<S>;
  constexpr int64_t L = Vec<T>::kLanes;
  Random random(31);
  if constexpr (kHasTranspose<T>) {
    begin_part(std::string("pack_transposed ") + kNameOf<S>);
    for (int64_t lanes = 1; lanes <= 2 * L; ++lanes) {
      for (int64_t depth = 1; depth <= 2 * L + 3; ++depth) {
        const int64_t width = round_up(lanes, L) + (lanes % 5 == 0 ? L : 0);
        const int64_t steps[] = {depth, depth + 3, -depth - 1, 0};
        const int64_t lane_step = random.one_of(steps);
        check_lanes_of<S>(lanes, lane_step, depth, 1, width, false, random, [&](const S* src, T* dst, int64_t pitch) {
          pack_transposed<T>(LaneSource<S>{src, lane_step, 1, lanes, depth}, Panel<T>{dst, pitch, width});
        });
      }
    }
    begin_part(std::string("pack_transposed ") + kNameOf<S> + ", in rows");
    for (int64_t depth = 1; depth <= 2 * L + 3; ++depth) {
      for (int64_t run = 1; run <= depth; run += random.between(1, 3)) {
        const int64_t lanes = random.between(1, L), gap = random.between(0, 3) * L;
        describe("%d lanes of %d elements in rows of %d, %d apart", int(lanes), int(depth), int(run), int(gap));
        Buffer<S> src(lanes * depth);
        Result<T> dst((depth - 1) * L + (depth - 1) / run * gap + L);
        fill(src, random);
        pack_transposed<T>(LaneSource<S>{src.data(), depth, 1, lanes, depth},
                           GappedPanel<T>{{dst.data(), L, L}, run, gap});
        for (int64_t k = 0; k < depth; ++k) {
          for (int64_t lane = 0; lane < L; ++lane) {
            dst.expected[size_t(k * L + k / run * gap + lane)] = lane < lanes ? widened(src[lane * depth + k]) : T{};
          }
        }
        dst.compare();
      }
    }
    begin_part(std::string("pack_planes ") + kNameOf<S>);
    for (int64_t count = 1; count <= 2 * L + 3; ++count) {
      for (int64_t channels = 1; channels <= 2 * L + 3; channels += random.between(1, 2)) {
        const int64_t steps[] = {channels, channels + 3, 2 * channels, -channels - 1, 0, 1};
        const int64_t step = random.one_of(steps), pitch = count + random.between(0, 3);
        describe("%d pixels, %d apart, of %d channels", int(count), int(step), int(channels));
        const Dimension from[] = {{count, step}, {channels, 1}};
        int64_t before = 0, elements = 0;
        span_of(from, before, elements);
        Buffer<S> src(elements);
        Result<T> dst((channels - 1) * pitch + count);
        fill(src, random);
        pack_planes(src.data() + before, step, count, channels, dst.data(), pitch);
        for (int64_t c = 0; c < channels; ++c) {
          for (int64_t x = 0; x < count; ++x) dst.expected[size_t(c * pitch + x)] = widened(src[before + x * step + c]);
        }
        dst.compare();
      }
    }
  }
  begin_part(std::string("pack_lanes ") + kNameOf<S>);
  for (int64_t lanes = 1; lanes <= 2 * L + 1; ++lanes) {
    for (const int64_t depth : {int64_t{1}, int64_t{2}, int64_t{3}, L / 2 + 1, L, L + 1, 2 * L + 3}) {
      const int64_t width = round_up(lanes, L);
      const int64_t kinds[][2] = {{1, lanes},     {1, lanes + 40}, {depth, 1}, {-depth, 1},  {2 * depth, 2},
                                  {2, 70},        {0, 1},          {1, 0},     {3, -70 * 3}, {1, -lanes},
                                  {3 * depth, 3}, {-3 * depth, 3}, {0, 3},     {1, 3}};
      for (const auto& kind : kinds) {
        const int64_t lane_step = kind[0], k_step = kind[1];
        const bool conj = kIsComplex<T> && random.once_in(2);
        check_lanes_of<S>(
            lanes, lane_step, depth, k_step, width, conj, random, [&](const S* src, T* dst, int64_t pitch) {
              pack_lanes(LaneSource<S>{src, lane_step, k_step, lanes, depth}, Panel<T>{dst, pitch, width}, conj);
            });
      }
    }
  }
}

template <class S>
void check_interleave() {
  using T = ComputeType<S>;
  constexpr int64_t L = Vec<T>::kLanes;
  Random random(32);
  for (const int64_t channels : {2, 4, 8, 16}) {
    for (int64_t lanes = 1; lanes <= L; ++lanes) {
      const int64_t count = random.between(1, 4), step = lanes * channels + random.between(0, 3);
      {
        begin_part(std::string("load_interleaved ") + kNameOf<S>);
        const int64_t first = random.once_in(2) ? 0 : random.between(0, channels - 1);
        const int64_t taken = random.once_in(2) && first == 0 ? channels : random.between(1, channels - first);
        const int64_t dst_step = L + random.between(0, 2), plane = count * dst_step + random.between(0, 2);
        describe("%d channels from %d of %d, %d lanes", int(taken), int(first), int(channels), int(lanes));
        Buffer<S> src((count - 1) * step + lanes * channels);
        Result<T> dst((taken - 1) * plane + (count - 1) * dst_step + L);
        fill(src, random);
        load_interleaved(channels, GroupPixels<const S>{src.data(), step, count, lanes}, first, taken,
                         GroupPlanes<T>{dst.data(), dst_step, plane});
        for (int64_t x = 0; x < count; ++x) {
          for (int64_t c = 0; c < taken; ++c) {
            for (int64_t l = 0; l < L; ++l) {
              dst.expected[size_t(x * dst_step + c * plane + l)] =
                  l < lanes ? widened(src[x * step + l * channels + first + c]) : T{};
            }
          }
        }
        dst.compare();
      }
      for (const bool finished : {false, true}) {
        begin_part(std::string("store_interleaved ") + kNameOf<S>);
        const int64_t src_step = L + random.between(0, 2), plane = (count - 1) * src_step + L;
        describe("%d channels, %d lanes, finished %d", int(channels), int(lanes), finished);
        Buffer<T> src(channels * plane), bias(channels * L);
        Result<S> dst((count - 1) * step + lanes * channels);
        fill(src, random);
        fill(bias, random);
        const T* planes[16];
        for (int64_t c = 0; c < channels; ++c) planes[c] = src.data() + c * plane;
        const T* const added = finished ? nullptr : bias.data();
        store_interleaved(channels, planes, src_step, added, GroupPixels<S>{dst.data(), step, count, lanes});
        for (int64_t x = 0; x < count; ++x) {
          for (int64_t c = 0; c < channels; ++c) {
            for (int64_t l = 0; l < lanes; ++l) {
              const T sum = planes[c][x * src_step + l];
              dst.expected[size_t(x * step + l * channels + c)] =
                  narrowed<S>(finished ? sum : add(sum, bias[c * L + l]));
            }
          }
        }
        dst.compare();
      }
    }
  }
}

// ---- patches

enum { kImage, kGroup, kChannel, kRow, kCol };
// Orders of a source's dimensions, the innermost first: planes, channels_last, groups inside the image, rows inside.
constexpr int kOrders[][5] = {{kCol, kRow, kChannel, kGroup, kImage}, {kChannel, kGroup, kCol, kRow, kImage},
                              {kGroup, kChannel, kCol, kRow, kImage}, {kRow, kCol, kChannel, kImage, kGroup},
                              {kChannel, kCol, kRow, kGroup, kImage}, {kImage, kCol, kChannel, kRow, kGroup}};

inline GatherAxis any_axis(Random& random, int64_t most, int64_t& positions, int64_t& taps, int64_t& size) {
  positions = random.between(1, random.once_in(5) ? most : 4);
  taps = random.between(1, 3);
  const int64_t step = random.between(1, 3), tap = random.between(1, 3) * (random.once_in(3) ? -1 : 1);
  size = random.between(1, random.once_in(3) ? 40 : 6);
  // From far before the source to far behind it.
  const int64_t low = -(positions - 1) * step - 2, high = size + 1;
  if (random.once_in(3)) {  // neither side is clipped
    size = (positions - 1) * step + (taps - 1) * (tap < 0 ? -tap : tap) + 1;
    return {step, tap < 0 ? -(taps - 1) * tap : 0, tap};
  }
  return {step, random.once_in(2) ? random.between(-3, 3) : random.between(low, high), tap};
}

// `steps`: channels in an element of the patch, two where products are taken in pairs.
template <class S, class T>
void pack(const Patch& patch, const Source<S>& from, bool conj, Buffer<T>& dst) {
  pack_patch(patch, from, conj, dst.data());
}
#if defined(CONV2D_AMX)
inline void pack(const Patch& patch, const Source<BFloat16>& from, bool, Buffer<BFloat16Block>& dst) {
  Buffer<BFloat16Block> row(limits::amx::kRowBlocks);
  BlockPatchPacker(patch, from, row.data()).pack(dst.data());
}
#endif
template <class S, class T, class Expect>
void check_patch_of(PatchOrder order, int64_t steps, bool conj, Random& random, Expect expect_element) {
  const bool lanes_are_groups = order == PatchOrder::kLanes;
  constexpr int64_t L = Vec<ComputeType<S>>::kLanes;
  int64_t p = 0, q = 0, taps_h = 0, taps_w = 0;
  Dimension d[5];
  const GatherAxis h = any_axis(random, 4, p, taps_h, d[kRow].size), w = any_axis(random, 20, q, taps_w, d[kCol].size);
  const int64_t images = random.between(1, 2), lanes = lanes_are_groups ? random.between(1, L) : 1;
  constexpr int64_t kChannels[] = {1, 2, 3, 4, 8, 16, L, L + 1, 2 * L + 3};
  const int64_t of_group = kChannels[random.between(0, lanes_are_groups ? 5 : 8)];
  const int64_t first = lanes_are_groups && random.once_in(2) ? random.between(0, of_group - 1) : 0;
  const bool is_part = first > 0 || (lanes_are_groups && random.once_in(3));
  const int64_t channels = is_part ? random.between(1, of_group - first) : of_group;
  const int64_t elements = div_up(channels, steps);
  d[kImage].size = images;
  d[kGroup].size = lanes;
  d[kChannel].size = of_group;
  const int64_t gaps[5] = {random.once_in(4) ? 2 : 1, random.once_in(4) ? 3 : 1, random.once_in(4) ? 2 : 1, 1, 1};
  lay_out(d, kOrders[random.between(0, 5)], gaps);
  for (Dimension& dimension : d) {  // flipped, or expanded
    if (random.once_in(8)) dimension.stride = -dimension.stride;
    if (random.once_in(12)) dimension.stride = 0;
  }
  // Pairs are only taken together where they lie together (patch_order).
  constexpr bool in_blocks = std::is_same_v<T, BFloat16Block>;
  if (!in_blocks && steps > 1 && d[kChannel].stride != 1) order = PatchOrder::kPlanar;
  int64_t before = 0, span = 0;
  span_of(d, before, span);
  Buffer<S> memory(span);
  fill(memory, random);
  // A tile of positions and a rectangle of taps of a larger problem.
  const int64_t p0 = random.between(0, p - 1), i0 = random.between(0, taps_h - 1), q0 = random.between(0, q - 1);
  const int64_t j0 = random.between(0, taps_w - 1);
  p -= p0, q -= q0, taps_h -= i0, taps_w -= j0;
  const bool expanded = in_blocks && random.once_in(2);
  const auto axis = [&](const GatherAxis& a, int64_t position0, int64_t positions, int64_t tap0, int64_t taps) {
    return expanded    ? make_expanded_axis(a, position0, positions, tap0, taps)
           : in_blocks ? amx_patch_axis(a, position0, positions, tap0, taps)
                       : make_patch_axis(a, position0, positions, tap0, taps);
  };
  const PatchAxis rows = axis(h, p0, p, i0, taps_h), cols = axis(w, q0, q, j0, taps_w);
  const Patch patch = lay_out_patch(order, rows, cols, images, elements, L, sizeof(T));
  const bool inner = order == PatchOrder::kChannelInner;
  const int64_t size = (images - 1) * patch.image_pitch + (inner ? 0 : (elements - 1) * patch.channel_pitch) +
                       (in_blocks ? rows.size * cols.size : patch.rows.size * patch.row_pitch);
  describe(
      "order %d, %d x %d positions from %d, %d of steps %d, %d, %d x %d taps from %d, %d, %d and %d apart, "
      "origins %d, %d, source %d x %d x %d x %d x %d, strides %d, %d, %d, %d, %d, channels from %d of %d, conj %d",
      int(order), int(p), int(q), int(p0), int(q0), int(h.step), int(w.step), int(taps_h), int(taps_w), int(i0),
      int(j0), int(h.tap), int(w.tap), int(h.origin), int(w.origin), int(images), int(lanes), int(channels),
      int(d[kRow].size), int(d[kCol].size), int(d[kImage].stride), int(d[kGroup].stride), int(d[kChannel].stride),
      int(d[kRow].stride), int(d[kCol].stride), int(first), int(of_group), conj);
  Buffer<T> dst(size);
  const S* const source = memory.data() + before + first * d[kChannel].stride;
  const Source<S> from{source,
                       d[kImage].stride,
                       steps * d[kChannel].stride,
                       d[kRow].stride,
                       d[kCol].stride,
                       d[kRow].size,
                       d[kCol].size,
                       d[kGroup].stride,
                       lanes,
                       elements * steps - channels,
                       of_group,
                       first};
  pack(patch, from, conj, dst);
  for (int64_t n = 0; n < images; ++n) {
    for (int64_t c = 0; c < elements; ++c) {
      for (int64_t at = 0; at < p * q * taps_h * taps_w; ++at) {
        const int64_t y = at / taps_w / taps_h / q, x = at / taps_w / taps_h % q, i = at / taps_w % taps_h;
        const int64_t j = at % taps_w, row = h.source(p0 + y, i0 + i), col = w.source(q0 + x, j0 + j);
        const bool inside = row >= 0 && row < d[kRow].size && col >= 0 && col < d[kCol].size;
        const S* const element = source + n * d[kImage].stride + c * steps * d[kChannel].stride + row * d[kRow].stride +
                                 col * d[kCol].stride;
        const int64_t to = patch.position_offset(n, y, x) + patch.tap_offset(c, i, j);
        if (to < 0 || to + (lanes_are_groups ? L : 1) > size) {
          fail("an offset of %d in a patch of %d", int(to), int(size));
          return;
        }
        for (int64_t lane = 0; lane < (lanes_are_groups ? L : 1); ++lane) {
          expect_element(lanes_are_groups ? get(dst.data() + to, lane) : dst[to],
                         inside && lane < lanes ? element + lane * d[kGroup].stride : nullptr, c, d[kChannel].stride,
                         channels);
        }
      }
    }
  }
}
template <class S>
void check_patch() {
  using T = ComputeType<S>;
  begin_part(std::string("pack_patch ") + kNameOf<S>);
  Random random(33);
  for (int i = 0; i < 600; ++i) {
    const PatchOrder orders[] = {PatchOrder::kPlanar, PatchOrder::kChannelInner, PatchOrder::kLanes};
    const bool conj = kIsComplex<S> && i % 2 == 1;
    check_patch_of<S, T>(orders[i % 3], 1, conj, random,
                         [&](const T& actual, const S* element, int64_t, int64_t, int64_t) {
                           // Lanes without a group may be zeros of either sign.
                           if (element == nullptr) {
                             expect(same_bits(add(actual, T{}), T{}), "not zero in the padding");
                           } else {
                             expect(same_bits(actual, conjugated(widened(*element), conj)), "another element");
                           }
                         });
  }
}

// ---- weights

// Layouts of weights, the innermost dimension first: OIHW, channels_last, IOHW, and rows inside columns.
enum { kLane, kReduced, kTapRow, kTapCol };
constexpr int kWeightOrders[][4] = {{kTapCol, kTapRow, kReduced, kLane}, {kReduced, kTapCol, kTapRow, kLane},
                                    {kTapCol, kTapRow, kLane, kReduced}, {kLane, kTapCol, kTapRow, kReduced},
                                    {kLane, kReduced, kTapCol, kTapRow}, {kTapRow, kTapCol, kReduced, kLane}};

// A weight in memory, of which a part is packed: lanes, channels and taps of a larger one.
template <class S>
struct AnyWeight {
  Dimension d[4];
  int64_t before = 0, elements = 0;
  AnyWeight(int64_t lanes, int64_t channels, int64_t rows, int64_t cols, Random& random)
      : d{{lanes + random.between(0, 2), 0}, {channels, 0}, {rows + random.between(0, 1), 0}, {cols, 0}} {
    d[kTapCol].size += random.once_in(3) ? 1 : 0;
    const int64_t gaps[4] = {random.once_in(4) ? 2 : 1, 1, random.once_in(4) ? 3 : 1, 1};
    lay_out(d, kWeightOrders[random.between(0, 5)], gaps);
    // Taps run backwards in grad_input.
    if (random.once_in(3)) d[kTapRow].stride *= -1, d[kTapCol].stride *= -1;
    // What is packed ends with what there is.
    const Dimension part[] = {{lanes, d[0].stride}, {channels, d[1].stride}, {rows, d[2].stride}, {cols, d[3].stride}};
    span_of(part, before, elements);
  }
  int64_t at(int64_t lane, int64_t c, int64_t i, int64_t j) const {
    return before + lane * d[kLane].stride + c * d[kReduced].stride + i * d[kTapRow].stride + j * d[kTapCol].stride;
  }
};
// A vector of groups for each of several result channels. set(panel row, lane, the weight or nullptr, the step from a
// channel to the next): one lane of what is expected.
template <class S, class P, class Set>
void check_weight_of_groups(const char* name, int64_t steps, const Set& set) {
  constexpr int64_t L = Vec<ComputeType<S>>::kLanes;
  begin_part(name);
  Random random(39);
  for (int n = 0; n < 400; ++n) {
    const int64_t groups = random.once_in(2) ? L : random.between(1, L);
    const int64_t vectors = random.between(1, Vec<ComputeType<S>>::kMaxVectors), elements = random.between(1, 5);
    const int64_t rows = random.between(1, 3), cols = random.between(1, random.once_in(4) ? 18 : 4);
    Dimension d[5];
    d[kImage].size = vectors, d[kGroup].size = groups, d[kChannel].size = steps * elements;
    d[kRow].size = rows, d[kCol].size = cols;
    const int64_t gaps[5] = {random.once_in(4) ? 2 : 1, random.once_in(4) ? 3 : 1, random.once_in(4) ? 2 : 1, 1, 1};
    // Result channels innermost is what input gradients have in channels_last.
    lay_out(d, random.once_in(2) ? kOrders[5] : kOrders[random.between(0, 5)], gaps);
    if (random.once_in(3)) d[kRow].stride *= -1, d[kCol].stride *= -1;
    int64_t before = 0, span = 0;
    span_of(d, before, span);
    ConvGemm gemm{};
    gemm.per_step = steps;
    gemm.weight_m = d[kImage].stride;
    gemm.weight_c = steps * d[kChannel].stride;
    gemm.weight_i = d[kRow].stride;
    gemm.weight_j = d[kCol].stride;
    gemm.is_gradient = kIsComplex<S> && random.once_in(2);
    const int64_t width = vectors * L, pitch = width + (random.once_in(3) ? L : 0), depth = elements * rows * cols;
    describe("%d groups, %d vectors, %d channels, %d x %d taps, strides %d, %d, %d, %d, %d, conj %d", int(groups),
             int(vectors), int(steps * elements), int(rows), int(cols), int(gemm.weight_m), int(d[kGroup].stride),
             int(gemm.weight_c), int(gemm.weight_i), int(gemm.weight_j), gemm.is_gradient);
    Buffer<S> weight(span);
    Result<P> dst((depth - 1) * pitch + width);
    fill(weight, random);
    const S* const first = weight.data() + before;
    const WeightSegment<S> segment{first, d[kGroup].stride, groups, elements, rows, cols};
    pack_weight_of_groups(gemm, segment, vectors, Panel<P>{dst.data(), pitch, width});
    for (int64_t k = 0; k < depth; ++k) {
      const S* const tap =
          first + k / cols / rows * gemm.weight_c + k / cols % rows * gemm.weight_i + k % cols * gemm.weight_j;
      for (int64_t v = 0; v < vectors; ++v) {
        for (int64_t lane = 0; lane < L; ++lane) {
          set(dst.expected.data() + k * pitch + v * L, lane,
              lane < groups ? tap + v * gemm.weight_m + lane * d[kGroup].stride : nullptr, d[kChannel].stride,
              gemm.is_gradient);
        }
      }
    }
    dst.compare();
  }
}
template <class S>
void check_weight_of_groups() {
  using T = ComputeType<S>;
  check_weight_of_groups<S, T>((std::string("pack_weight_of_groups ") + kNameOf<S>).c_str(), 1,
                               [](T* row, int64_t lane, const S* weight, int64_t, bool conj) {
                                 put(row, lane, conjugated(weight != nullptr ? widened(*weight) : T{}, conj));
                               });
}

template <class S>
void check_weights() {
  using T = ComputeType<S>;
  constexpr int64_t L = Vec<T>::kLanes;
  Random random(34);
  begin_part(std::string("pack_weight ") + kNameOf<S>);
  for (int n = 0; n < 600; ++n) {
    const int64_t lanes = random.between(1, 3 * L), channels = random.between(1, random.once_in(3) ? 20 : 4);
    const int64_t rows = random.between(1, 4), cols = random.between(1, random.once_in(4) ? 19 : 4);
    const int64_t width = round_up(lanes, L), pitch = width + (random.once_in(3) ? L : 0),
                  depth = channels * rows * cols;
    const AnyWeight<S> from(lanes, channels, rows, cols, random);
    ConvGemm gemm{};
    gemm.weight_m = from.d[kLane].stride;
    gemm.weight_c = from.d[kReduced].stride;
    gemm.weight_i = from.d[kTapRow].stride;
    gemm.weight_j = from.d[kTapCol].stride;
    gemm.is_gradient = kIsComplex<S> && random.once_in(2);
    describe("%d lanes, %d channels, %d x %d taps, strides %d, %d, %d, %d, conj %d", int(lanes), int(channels),
             int(rows), int(cols), int(gemm.weight_m), int(gemm.weight_c), int(gemm.weight_i), int(gemm.weight_j),
             gemm.is_gradient);
    Buffer<S> weight(from.elements);
    Result<T> dst((depth - 1) * pitch + width);
    fill(weight, random);
    const WeightSegment<S> segment{weight.data() + from.before, gemm.weight_m, lanes, channels, rows, cols};
    pack_weight(gemm, segment, Panel<T>{dst.data(), pitch, width});
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t lane = 0; lane < width; ++lane) {
        const T value = lane < lanes ? widened(weight[from.at(lane, k / cols / rows, k / cols % rows, k % cols)]) : T{};
        put(dst.expected.data() + k * pitch, lane, conjugated(value, gemm.is_gradient));
      }
    }
    dst.compare();
  }
  begin_part(std::string("pack_weight_of_taps ") + kNameOf<S>);
  for (int n = 0; n < 300; ++n) {
    const int64_t m = random.between(1, 5), channels = random.between(1, 9), rows = random.between(1, 3);
    const int64_t cols = random.between(1, 4), results = m * rows * cols, first = random.between(0, results - 1);
    const int64_t lanes = random.between(1, results - first), width = round_up(lanes, L);
    const AnyWeight<S> from(m, channels, rows, cols, random);
    ConvGemm gemm{};
    gemm.weight_m = from.d[kLane].stride;
    gemm.weight_c = from.d[kReduced].stride;
    gemm.weight_result_i = from.d[kTapRow].stride;
    gemm.weight_result_j = from.d[kTapCol].stride;
    gemm.result_taps_h = rows;
    gemm.result_taps_w = cols;
    gemm.is_gradient = kIsComplex<S> && random.once_in(2);
    describe("results %d to %d of %d x %d x %d, %d channels", int(first), int(first + lanes), int(m), int(rows),
             int(cols), int(channels));
    Buffer<S> weight(from.elements);
    Result<T> dst(channels * width);
    fill(weight, random);
    pack_weight_of_taps(gemm, weight.data() + from.before, first, lanes, channels, Panel<T>{dst.data(), width, width});
    for (int64_t k = 0; k < channels; ++k) {
      for (int64_t lane = 0; lane < width; ++lane) {
        T* const row = dst.expected.data() + k * width;
        const int64_t at = first + lane;
        if (lane < lanes) {
          put(row, lane,
              conjugated(widened(weight[from.at(at / cols / rows, k, at / cols % rows, at % cols)]), gemm.is_gradient));
        } else {  // zeros of either sign
          put(row, lane, add(get(dst.data() + k * width, lane), T{}));
          expect(same_bits(get(row, lane), T{}), "no zero beyond the lanes");
          put(row, lane, get(dst.data() + k * width, lane));
        }
      }
    }
    dst.compare();
  }
}

}  // namespace parts
