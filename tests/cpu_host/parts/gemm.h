// kernels/gemm.h, kernels/pixels.h, kernels/whole_planes.h and kernels/depthwise_weight.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <list>
#include <vector>

#include "../../../csrc/cpu/drivers/listed_steps.h"
#include "../../../csrc/cpu/kernels/depthwise_weight.h"
#include "../../../csrc/cpu/kernels/gemm.h"
#include "../../../csrc/cpu/kernels/pixels.h"
#include "../../../csrc/cpu/kernels/whole_planes.h"
#include "arithmetic.h"

namespace parts {

// One element's sum in chains: product(k, sum) gives the sum with product k. The order that all three headers name.
template <class T, class Product>
T chained_sum(int64_t depth, int64_t chain, T start, bool accumulate, T c, const T* bias, Product product) {
  for (int64_t first = 0; first < depth; first += chain) {
    T sum = start;
    for (int64_t k = first; k < depth && k < first + chain; ++k) sum = product(k, sum);
    c = accumulate || first > 0 ? add(c, sum) : sum;
  }
  return bias != nullptr ? add(c, *bias) : c;
}

// Depths and chains with every rest of a round of four, chains of one product and of more than there are.
struct Sum {
  int64_t depth, chain;
  bool accumulate, has_bias;
};
constexpr Sum kSums[] = {{1, 1, false, false}, {1, 64, true, true},  {2, 64, false, true}, {3, 2, true, false},
                         {4, 4, false, false}, {5, 3, false, true},  {6, 5, true, true},   {7, 8, true, false},
                         {8, 8, false, true},  {9, 4, false, false}, {10, 7, true, true},  {11, 11, false, false},
                         {13, 6, true, false}, {16, 5, false, true}, {17, 1, true, true},  {23, 9, false, false}};

template <class T, bool G>
struct GemmCase {
  static constexpr int L = Vec<T>::kLanes;
  const int64_t rows, width;
  const Sum sum;
  Buffer<Operand<T>> a, b;
  Buffer<int64_t> j_offset, k_offset;
  Buffer<T> start, bias;
  int64_t a_pitch, c_pitch;
  Result<T> c;
  bool half = false;  // of the last vector, half is computed, and zeros are stored behind
  // Listed steps: those that are taken, and their list. The rows of C lie the other way round.
  std::vector<bool> taken;
  std::vector<int64_t> chain_ends;
  std::list<Buffer<int64_t>> lists;

  GemmCase(int64_t rows_, int64_t vectors, Sum sum_, int64_t a_gap, int64_t c_gap, Random& random)
      : rows(rows_),
        width(vectors * L),
        sum(sum_),
        a((sum_.depth - 1) * (vectors * L + a_gap) + vectors * L),
        b(span(rows_, sum_.depth)),
        j_offset(rows_),
        k_offset(sum_.depth),
        start(vectors * L),
        bias(vectors * L),
        a_pitch(vectors * L + a_gap),
        c_pitch(vectors * L + c_gap),
        c((rows_ - 1) * (vectors * L + c_gap) + vectors * L) {
    fill(a, random);
    fill(b, random);
    fill(bias, random);
    for (int64_t i = 0; i < width; ++i) start[i] = random.once_in(2) ? any_value<T>(random) : T{};
    // Both tables ascend and descend; the last row's last product reads the last element there is.
    for (int64_t j = 0; j < rows; ++j) j_offset[j] = (rows - 1 - j) % 3 == 0 ? 5 * (rows - 1) : 5 * j;
    for (int64_t k = 0; k < sum.depth; ++k) k_offset[k] = k % 2 ? 3 * k : 3 * (sum.depth - 1);
    if (sum.accumulate) fill_c(random);
  }
  static int64_t span(int64_t rows, int64_t depth) { return 5 * (rows - 1) + 3 * (depth - 1) + (G ? L : 1); }
  void fill_c(Random& random) {
    for (int64_t j = 0; j < rows; ++j) {
      for (int64_t i = 0; i < width; ++i) c.fill(j * c_pitch + i, any_value<T>(random));
    }
  }
  GemmOperands<T> operands() {
    return {sum.depth, sum.chain,       a.data(),        a_pitch,
            b.data(),  j_offset.data(), k_offset.data(), start.data(),
            c.data(),  c_pitch,         sum.accumulate,  sum.has_bias ? bias.data() : nullptr,
            half};
  }
  GemmOperands<T> listed_operands(Random& random) {
    std::vector<int64_t> numbers;
    for (int64_t k = 0; k < sum.depth; ++k) {
      taken.push_back(!random.once_in(3));
      if (taken.back()) numbers.insert(numbers.end(), {k_offset[k], k * L});
      if ((k + 1) % sum.chain == 0 || k + 1 == sum.depth) chain_ends.push_back(int64_t(numbers.size()) / 2);
    }
    Buffer<int64_t>& list = lists.emplace_back(std::max<int64_t>(int64_t(numbers.size()), 1));
    std::copy(numbers.begin(), numbers.end(), list.data());
    Buffer<int64_t>& c_offset = lists.emplace_back(rows);
    for (int64_t j = 0; j < rows; ++j) c_offset[j] = rows - 1 - j;
    GemmOperands<T> now = operands();
    now.depth = now.chain = 0;  // nobody reads them
    now.k_offset = list.data();
    now.chains = int64_t(chain_ends.size());
    now.chain_ends = chain_ends.data();
    now.c_offset = c_offset.data();
    return now;
  }
  void compare() {
    const int64_t stored = width - (half ? L / 2 : 0);
    for (int64_t j = 0; j < rows; ++j) {
      for (int64_t i = 0; i < stored; ++i) {
        T* const row = c.expected.data() + (taken.empty() ? j : rows - 1 - j) * c_pitch;
        const T last = get(bias.data(), i);
        put(row, i,
            chained_sum<T>(sum.depth, sum.chain, get(start.data(), i), sum.accumulate, get(row, i),
                           sum.has_bias ? &last : nullptr, [&](int64_t k, T so_far) {
                             if (!taken.empty() && !taken[size_t(k)]) return so_far;
                             const Operand<T>* const at = b.data() + j_offset[j] + k_offset[k];
                             return multiply_add(get(a.data() + k * a_pitch, i), G ? get(at, i % L) : *at, so_far);
                           }));
      }
    }
    c.compare();
  }
};

template <class T, bool G>
void check_gemm_ukernels() {
  begin_part(std::string("gemm_ukernel ") +
             (kTakesPairs<T> ? kNameOf<BFloat16Pair> : kNameOf<T>)+(G ? ", groups" : ""));
  Random random(1);
  // Vectors of a panel, twice; the odd numbers end in a half.
  for (int64_t halves = kHasHalves<T> && !G ? 1 : 2; halves <= 2 * Vec<T>::kMaxVectors;
       halves += kHasHalves<T> && !G ? 1 : 2) {
    const int64_t vectors = div_up(halves, 2);
    const Ukernels<T> ukernels = ukernels_for<T, G>(vectors, halves % 2 == 1);
    for (int64_t rows = 1; rows <= ukernels.rows; ++rows) {
      for (const Sum& sum : kSums) {
        // Only a single vector of groups has a pitch of its own.
        const int64_t a_gap = G && vectors == 1 && sum.depth % 2 ? 3 : 0;
        describe("%dx%g, depth %d, chain %d, accumulate %d, bias %d", int(rows), double(halves) / 2, int(sum.depth),
                 int(sum.chain), sum.accumulate, sum.has_bias);
        GemmCase<T, G> now(rows, vectors, sum, a_gap, sum.depth % 3 == 0 ? 5 : 0, random);
        now.half = halves % 2 == 1;
        ukernels.by_rows[rows - 1](now.operands());
        now.compare();
      }
    }
  }
}

template <class T>
void check_listed_ukernels() {
  begin_part(std::string("gemm_ukernel ") + kNameOf<T> + ", listed");
  Random random(5);
  for (int64_t vectors = 1; vectors <= Vec<T>::kMaxVectors; ++vectors) {
    const Ukernels<T> ukernels = ukernels_for<T, false, true>(vectors);
    for (int64_t rows = 1; rows <= ukernels.rows; ++rows) {
      for (const Sum& sum : kSums) {
        describe("%dx%d, depth %d, chain %d, accumulate %d, bias %d", int(rows), int(vectors), int(sum.depth),
                 int(sum.chain), sum.accumulate, sum.has_bias);
        GemmCase<T, false> now(rows, vectors, sum, 0, sum.depth % 3 == 0 ? 5 : 0, random);
        ukernels.by_rows[rows - 1](now.listed_operands(random));
        now.compare();
      }
    }
  }
}

// Random tiles of a padded source: what leaves products out gives the bits of what multiplies zeros. Now and then
// a weight is infinite or NaN.
template <class T>
void check_listed_steps() {
  begin_part(std::string("ListedSteps ") + kNameOf<T>);
  constexpr int L = Vec<T>::kLanes;
  Random random(6);
  for (int n = 0; n < 400; ++n) {
    const int64_t images = random.between(1, random.once_in(3) ? 8 : 3), channels = random.between(1, 9),
                  vectors = random.between(1, 2);
    ConvGemm g{};
    g.channels = channels;
    g.taps_h = random.between(1, 5);
    g.taps_w = random.between(1, 5);
    g.source_h = random.between(1, 12);
    g.source_w = random.between(1, 12);
    // Taps ascend (forward) or descend (grad_input).
    g.axis_h = {random.between(1, 2), -random.between(0, 2), random.once_in(2) ? 1 : -1};
    g.axis_w = {random.between(1, 2), -random.between(0, 2), random.between(1, 2)};
    if (g.axis_h.tap < 0) g.axis_h.origin += g.taps_h - 1;
    g.rows = random.between(1, 12);
    g.cols = random.between(1, 12);
    const Tile tile{0, images, random.between(0, 2), g.rows, random.between(0, 2), g.cols};
    ListedSteps<T> listed;
    listed.padding = padding_classes(g, tile, {1, random.between(1, 4)});
    if (listed.padding.count == 0) continue;
    const KBlock block{0, channels, 0, g.taps_h, 0, g.taps_w};
    const Patch patch = lay_out_patch<T>(PatchOrder::kPlanar, g, tile, block);
    const int64_t pixels = tile.pixels(), depth = channels * g.taps(), width = vectors * L;
    const int64_t source_elements = images * channels * g.source_h * g.source_w;
    Buffer<T> source(source_elements), patch_data(images * patch.image_pitch), a(depth * width), zeros(width);
    fill(source, random);
    fill(a, random);
    for (int64_t i = 0; i < width; ++i) zeros[i] = 0;
    if (random.once_in(3)) a[random.between(0, depth * width - 1)] = random.once_in(2) ? T(INFINITY) : T(NAN);
    Source<T> from{};
    from.data = source.data();
    from.image = channels * g.source_h * g.source_w;
    from.channel = g.source_h * g.source_w;
    from.row = g.source_w;
    from.col = 1;
    from.height = g.source_h;
    from.width = g.source_w;
    pack_patch(patch, from, false, patch_data.data());

    Buffer<int64_t> j_offset(pixels), k_offset(depth), b_offset(pixels), number(pixels);
    fill_positions(patch, images, tile.rows, tile.cols, j_offset.data());
    fill_taps(patch, channels, g.taps_h, g.taps_w, k_offset.data());
    Result<T> c(pixels * width);
    GemmOperands<T> operands{};
    operands.depth = depth;
    operands.chain = listed.chain = random.between(1, 40);
    operands.a = a.data();
    operands.a_pitch = operands.c_pitch = width;
    operands.b = patch_data.data();
    operands.j_offset = j_offset.data();
    operands.k_offset = k_offset.data();
    operands.start = zeros.data();
    operands.c = c.expected.data();
    describe("%d images, %d channels, %d x %d taps, %d x %d of %d x %d, chains of %d", int(images), int(channels),
             int(g.taps_h), int(g.taps_w), int(g.rows), int(g.cols), int(g.source_h), int(g.source_w),
             int(listed.chain));
    gemm_panel<false, T>(pixels, vectors, operands);

    listed.results = {images, tile.rows, tile.cols};
    listed.all_steps = {channels, g.taps_h, g.taps_w};
    listed.pitch = 2 * depth;
    Buffer<int64_t> steps(listed.padding.lists() * listed.pitch);
    listed.b_offsets = b_offset.data();
    listed.steps = steps.data();
    listed.for_each_result([&](int64_t at, int64_t image, int64_t p, int64_t q) {
      b_offset[at] = patch.position_offset(image, p, q);
      number[at] = (image * tile.rows + p) * tile.cols + q;
    });
    listed.fill_steps([&](int64_t channel, int64_t i, int64_t j) { return patch.tap_offset(channel, i, j); });
    operands.c = c.data();
    operands.c_offset = number.data();
    listed.multiply(vectors, operands, [](int64_t) {});
    c.compare();
  }
}

// Any number of rows, and passes over the panel: chains that divide a pass, that don't, and that are longer.
template <class T, bool G>
void check_gemm_panel() {
  begin_part(std::string("gemm_panel ") + (kTakesPairs<T> ? kNameOf<BFloat16Pair> : kNameOf<T>)+(G ? ", groups" : ""));
  Random random(2);
  for (int64_t vectors = 1; vectors <= Vec<T>::kMaxVectors; ++vectors) {
    const int64_t most = 2 * ukernels_for<T, G>(vectors).rows + 3;
    for (int64_t rows = 1; rows <= most; ++rows) {
      const Sum sum{random.between(1, 40), random.between(1, 16), random.once_in(2), random.once_in(2)};
      describe("%d rows, %d vectors, depth %d, chain %d", int(rows), int(vectors), int(sum.depth), int(sum.chain));
      GemmCase<T, G> now(rows, vectors, sum, 0, 0, random);
      now.half = kHasHalves<T> && !G && random.once_in(2);
      GemmOperands<T> operands = now.operands();
      gemm_panel<G, T>(rows, vectors, operands);
      now.compare();
    }
    constexpr Sum kLong[] = {{2 * kPassDepth + 5, 64, false, true},
                             {kPassDepth + 1, 50, true, true},
                             {kPassDepth, 32, false, true},
                             {2 * kPassDepth, kPassDepth + 7, false, true},
                             {kPassDepth - 1, kPassDepth, false, false}};
    for (const Sum& sum : kLong) {
      describe("%d vectors, depth %d, chain %d", int(vectors), int(sum.depth), int(sum.chain));
      GemmCase<T, G> now(most / 2 + 2, vectors, sum, 0, 1, random);
      GemmOperands<T> operands = now.operands();
      gemm_panel<G, T>(now.rows, vectors, operands);
      now.compare();
    }
  }
}

#if defined(CONV2D_BFLOAT16_PAIRS)
// The same with sums that are rounded and stored in the result, of which some are zeros or denormal numbers: those of
// lanes without weights are their bias alone.
inline void check_rounded_panels() {
  begin_part("gemm_panel bfloat16 pairs, rounded");
  Random random(7);
  const float denormal = bits_to_float(0x00012345), small = bits_to_float(0x00800001);
  const float without_sum[] = {0.0f, -0.0f, denormal, -denormal, small};
  constexpr int64_t L = Vec<float>::kLanes;
  for (int n = 0; n < 2000; ++n) {
    const int64_t vectors = random.between(1, Vec<float>::kMaxVectors);
    const int64_t rows = random.between(1, 2 * ukernels_for<float, false>(vectors).rows + 3);
    const Sum sum{random.once_in(4) ? random.between(1, 2 * kPassDepth) : random.between(1, 9), random.between(1, 70),
                  random.once_in(4), true};
    GemmCase<float, false> now(rows, vectors, sum, 0, random.between(0, 3), random);
    now.half = random.once_in(2);
    const int64_t most = now.width - (now.half ? L / 2 : 0),
                  lanes = random.between(now.half ? most - 7 : most - 15, most);
    if (random.once_in(2)) {
      for (int64_t i = 0; i < now.width; ++i) {
        if (!random.once_in(5)) continue;
        now.start[i] = 0;
        now.bias[i] = without_sum[random.between(0, 4)];
        for (int64_t k = 0; k < sum.depth; ++k) now.a[k * now.a_pitch + i] = BFloat16Pair{};
        for (int64_t j = 0; j < rows && sum.accumulate; ++j) now.c.fill(j * now.c_pitch + i, 0.0f);
      }
    }
    describe("%d rows, %d vectors, %d lanes, depth %d, chain %d, accumulate %d", int(rows), int(vectors), int(lanes),
             int(sum.depth), int(sum.chain), sum.accumulate);
    const int64_t pitch = lanes + random.between(0, 2) * 32;
    Result<BFloat16> result((rows - 1) * pitch + lanes);
    GemmOperands<float> operands = now.operands();
    operands.result = result.data();
    operands.result_pitch = pitch;
    operands.lanes = lanes;
    // What the sums are, other micro-kernels say, which have a check of their own.
    Buffer<float> c((rows - 1) * now.c_pitch + now.width);
    std::copy_n(now.c.data(), c.size(), c.data());
    GemmOperands<float> exact = operands;
    exact.c = c.data();
    gemm_panel<false, float>(rows, vectors, exact);
    for (int64_t j = 0; j < rows; ++j) {
      for (int64_t i = 0; i < lanes; ++i) {
        result.expected[size_t(j * pitch + i)] = Narrow<BFloat16>::from(c[j * now.c_pitch + i]);
      }
    }
    gemm_panel<false, float, BFloat16>(rows, vectors, operands);
    result.compare();
  }
}
#endif

template <class T>
void check_pixel_ukernels() {
  begin_part(std::string("pixel_ukernel ") + kNameOf<T>);
  constexpr int L = Vec<T>::kLanes;
  Random random(3);
  for (int64_t rows = 1; rows <= pixel_rows(vector_shape<T>()); ++rows) {
    for (int64_t vectors = 1; vectors <= pixel_panel_vectors(rows, vector_shape<T>()); ++vectors) {
      for (const Sum& sum : kSums) {
        const int64_t blocks = random.between(1, 3), m = blocks * rows;
        describe("%dx%d, %d blocks, depth %d, chain %d, accumulate %d, bias %d", int(rows), int(vectors), int(blocks),
                 int(sum.depth), int(sum.chain), sum.accumulate, sum.has_bias);
        const int64_t width = vectors * L, w_pitch = sum.depth + sum.depth % 3;
        const int64_t c_pitch = width + sum.chain % 4;
        Buffer<T> w((m - 1) * w_pitch + sum.depth), b(7 * (sum.depth - 1) + width), start(m), bias(m);
        Buffer<int64_t> k_offset(sum.depth);
        Result<T> c((m - 1) * c_pitch + width);
        fill(w, random);
        fill(b, random);
        fill(start, random);
        fill(bias, random);
        for (int64_t k = 0; k < sum.depth; ++k) k_offset[k] = k % 2 ? 7 * (sum.depth - 1) : 7 * k;
        for (int64_t j = 0; j < m && sum.accumulate; ++j) {
          for (int64_t i = 0; i < width; ++i) c.fill(j * c_pitch + i, any_value<T>(random));
        }
        PixelOperands<T> operands{};
        operands.depth = sum.depth;
        operands.chain = sum.chain;
        operands.w = w.data();
        operands.w_pitch = w_pitch;
        operands.b = b.data();
        operands.k_offset = k_offset.data();
        operands.start = start.data();
        operands.bias = sum.has_bias ? bias.data() : nullptr;
        operands.c = c.data();
        operands.c_pitch = c_pitch;
        operands.accumulate = sum.accumulate;
        operands.blocks = blocks;
        // More than there are: the last blocks ask for less.
        operands.asked_steps = div_up(sum.depth + 1, blocks);
        operands.next = operands.next_pixels = width;
        pixel_ukernel_for<T>(rows, vectors)(operands);
        for (int64_t j = 0; j < m; ++j) {
          for (int64_t i = 0; i < width; ++i) {
            T& element = c.expected[size_t(j * c_pitch + i)];
            element = chained_sum<T>(
                sum.depth, sum.chain, start[j], sum.accumulate, element, sum.has_bias ? &bias[j] : nullptr,
                [&](int64_t k, T so_far) { return multiply_add(w[j * w_pitch + k], b[k_offset[k] + i], so_far); });
          }
        }
        c.compare();
      }
    }
  }
}

// Several panels of several blocks, the last of which begin no later than `last`; segments that end amid chains.
template <class T>
void check_whole_plane_ukernels() {
  begin_part(std::string("whole_plane_ukernel ") + kNameOf<T>);
  constexpr int L = Vec<T>::kLanes;
  Random random(5);
  for (int64_t rows = 1; rows <= pixel_rows(vector_shape<T>()); ++rows) {
    for (int64_t vectors = 1; vectors <= pixel_panel_vectors(rows, vector_shape<T>()); ++vectors) {
      for (const Sum& sum : kSums) {
        if (sum.depth == 0) continue;
        const int64_t blocks = random.between(1, 3), m = blocks * rows, panels = random.between(1, 3);
        const int64_t segment = random.once_in(2) ? sum.depth : random.between(1, sum.depth);
        const int64_t width = vectors * L, last = max64(0, (panels - 1) * width - random.between(0, width - 1));
        describe("%dx%d, %d blocks, %d panels to %d, depth %d, segment %d, chain %d, from zero %d", int(rows),
                 int(vectors), int(blocks), int(panels), int(last), int(sum.depth), int(segment), int(sum.chain),
                 !sum.has_bias);
        const int64_t w_pitch = sum.depth + sum.depth % 3, run = last + width;
        const int64_t plane_pitch = run + 7, c_pitch = run + sum.chain % 4;
        Buffer<T> w((m - 1) * w_pitch + sum.depth), planes((sum.depth - 1) * plane_pitch + run), start(m), bias(m);
        Result<T> c((m - 1) * c_pitch + run);
        fill(w, random);
        fill(planes, random);
        fill(start, random);
        fill(bias, random);
        WholePlaneOperands<T> operands{};
        operands.depth = sum.depth;
        operands.segment = segment;
        operands.chain = sum.chain;
        operands.w = w.data();
        operands.w_pitch = w_pitch;
        operands.planes = planes.data();
        operands.plane_pitch = plane_pitch;
        operands.ahead = random.once_in(2) ? width : 4 * plane_pitch;
        operands.start = sum.has_bias ? start.data() : nullptr;
        operands.bias = bias.data();
        operands.c = c.data();
        operands.c_pitch = c_pitch;
        operands.blocks = blocks;
        operands.panels = panels;
        operands.last = last;
        whole_plane_ukernel_for<T>(rows, vectors)(operands);
        for (int64_t j = 0; j < m; ++j) {
          for (int64_t i = 0; i < run; ++i) {
            T& element = c.expected[size_t(j * c_pitch + i)];
            for (int64_t first = 0; first < sum.depth; first += segment) {
              const int64_t depth = min64(segment, sum.depth - first);
              const T* const added = first + depth == sum.depth ? &bias[j] : nullptr;
              element = chained_sum<T>(depth, sum.chain, sum.has_bias ? start[j] : T(0), first > 0, element, added,
                                       [&](int64_t k, T so_far) {
                                         return multiply_add(w[j * w_pitch + first + k],
                                                             planes[(first + k) * plane_pitch + i], so_far);
                                       });
            }
          }
        }
        c.compare();
      }
    }
  }
}

// All taps of a vector of groups, of a chain of several runs: with columns that neighbouring pixels share, and without.
template <class S>
void check_depthwise_weight() {
  using T = ComputeType<S>;
  begin_part(std::string("depthwise_weight_panel ") + kNameOf<S>);
  constexpr int L = Vec<T>::kLanes;
  Random random(4);
  for (int64_t tap_rows = 1; tap_rows <= 9; ++tap_rows) {
    for (int64_t tap_cols = 1; tap_cols <= 17; ++tap_cols) {
      for (int64_t step = 0; step <= 2; ++step) {
        const int64_t lane = random.between(0, 3), pitch = L + random.between(0, 2);
        const bool accumulate = random.once_in(2);
        std::list<Buffer<S>> buffers;
        std::vector<WeightRun<S>> runs(size_t(random.between(1, 4)));
        for (WeightRun<S>& run : runs) {
          run.count = random.once_in(3) ? random.between(1, 3) : random.between(1, 20);
          // A row of taps may run backwards. Now and then a run's pixels share no columns after all.
          run.tap_col = random.once_in(3) ? -L : L + random.between(0, 1);
          run.tap_row = random.between(-2, 2) * 9 * L;
          run.position = step == 0 || random.once_in(4) ? random.between(0, 2) * L + 1 : step * run.tap_col;
          const Dimension dimensions[] = {
              {run.count, run.position}, {tap_rows, run.tap_row}, {tap_cols, run.tap_col}, {L + lane, 1}};
          int64_t before = 0, elements = 0;
          span_of(dimensions, before, elements);
          Buffer<S>& a = buffers.emplace_back((run.count - 1) * pitch + L + lane);
          Buffer<S>& b = buffers.emplace_back(elements);
          fill(a, random);
          fill(b, random);
          run.a = a.data();
          run.b = b.data() + before;
        }
        describe("%d x %d taps, step %d, %d runs, the first of %d pixels, accumulate %d", int(tap_rows), int(tap_cols),
                 int(step), int(runs.size()), int(runs[0].count), accumulate);
        Result<T> c(tap_rows * tap_cols * L);
        if (accumulate) fill(c, random);
        DepthwiseWeightOperands<S, T> operands{};
        operands.runs = runs.data();
        operands.count = int64_t(runs.size());
        operands.a_pitch = pitch;
        operands.lane = lane;
        operands.c = c.data();
        operands.accumulate = accumulate;
        depthwise_weight_panel<S, T>(tap_rows, tap_cols, step, operands);
        for (int64_t e = 0; e < tap_rows * tap_cols; ++e) {
          for (int64_t i = 0; i < L; ++i) {
            T sum{};
            for (const WeightRun<S>& run : runs) {
              const S* const tap = run.b + e / tap_cols * run.tap_row + e % tap_cols * run.tap_col + lane + i;
              for (int64_t k = 0; k < run.count; ++k) {
                sum = multiply_add(widened(run.a[k * pitch + lane + i]), widened(tap[k * run.position]), sum);
              }
            }
            T& element = c.expected[size_t(e * L + i)];
            element = accumulate ? add(element, sum) : sum;
          }
        }
        c.compare();
      }
    }
  }
}

template <class T>
void check_gemm() {
  check_gemm_ukernels<T, false>();
  check_gemm_panel<T, false>();
  if constexpr (ListedSteps<T>::kExists) {
    check_listed_ukernels<T>();
    check_listed_steps<T>();
  }
  check_gemm_ukernels<T, true>();
  check_gemm_panel<T, true>();
#if defined(CONV2D_BFLOAT16_PAIRS)
  if constexpr (kTakesPairs<T>) check_rounded_panels();
#endif
}

}  // namespace parts
