// isa/amx.h, kernels/amx.h and pack/amx.h: AMX tiles of bfloat16.
#pragma once

#include "../../../csrc/cpu/kernels/amx.h"
#include "../../../csrc/cpu/pack/amx_columns.h"
#include "../../../csrc/cpu/pack/line_stores.h"
#include "packing.h"
#include "pairs.h"
#include "pixel_rows.h"
#include "store.h"

namespace parts {

// A sum goes on by 32 products: even and odd channels apart, from zero, with denormal numbers as zeros everywhere.
inline float add_step(float sum, const BFloat16* left, const BFloat16Pair* right, int64_t right_pitch) {
  float even = 0, odd = 0;
  for (int64_t k = 0; k < 16; ++k) {
    const uint32_t pair = right[k * right_pitch].bits;
    even = flushed(std::fma(of_bfloat16(left[2 * k].bits), of_bfloat16(pair & 0xffff), even));
    odd = flushed(std::fma(of_bfloat16(left[2 * k + 1].bits), of_bfloat16(pair >> 16), odd));
  }
  return flushed(flushed(sum) + flushed(even + odd));
}

inline void check_tiles() {
  begin_part("products of tiles");
  Random random(70);
  for (int n = 0; n < 200; ++n) {
    // In turn ordinary numbers, and exponents around those of the smallest normal numbers.
    const bool tiny = n % 2 == 1;
    const auto any = [&] {
      return tiny ? uint16_t(random.between(0, 1) << 15 | random.between(0, 130) << 7 | random.between(0, 127))
                  : any_bfloat16(random);
    };
    Buffer<BFloat16> a(512);
    Buffer<BFloat16Pair> b(256);
    Result<float> d(256);
    for (int64_t i = 0; i < 512; ++i) a[i] = {any()};
    for (int64_t i = 0; i < 256; ++i) b[i] = {uint32_t(any()) << 16 | any()};
    for (int64_t i = 0; i < 256; ++i) {
      const uint32_t bits = uint32_t(any()) << 16 | uint32_t(random.between(0, 65535));
      float value;
      std::memcpy(&value, &bits, sizeof value);
      d.fill(i, value);
    }
    for (int64_t i = 0; i < 256; ++i) {
      float& sum = d.expected[size_t(i)];
      sum = add_step(sum, a.data() + i / 16 * 32, b.data() + i % 16, 16);
    }
    describe("tiles %d", n);
    const unsigned settings = _mm_getcsr();
    {
      const AmxScope tiles;
      tile_load<3>(d.data(), 64);
      tile_load<4>(a.data(), 64);
      tile_load<7>(b.data(), 64);
      tile_multiply<3, 4, 7>();
      tile_store<3>(d.data(), 64);
    }
    expect(_mm_getcsr() == settings, "flags or settings that were changed");
    d.compare();
  }
}

// Rows at one distance, and at any; whole tiles and rests; sums that go on.
inline void check_amx_panel() {
  begin_part("amx_panel");
  Random random(71);
  for (int n = 0; n < 260; ++n) {
    const int64_t rows = n < 130 ? n + 1 : random.between(1, 100), vectors = n % 2 + 1, width = vectors * 16;
    const int64_t depth = random.once_in(6) ? random.between(17, 40) : random.between(1, 6);
    const int64_t step = random.between(1, 3), a_gap = random.between(0, 2);
    // Where 16 rows may be read a rest need not be copied.
    const bool readable = random.once_in(2);
    const bool accumulate = random.once_in(2), uneven = random.once_in(3);
    Buffer<int64_t> j_offset(rows), k_offset(depth);
    int64_t at = 0;
    for (int64_t j = 0; j < rows; ++j) {
      j_offset[j] = at;
      if (j + 1 < rows) at += uneven && random.once_in(10) ? random.between(1, 9) : step;
    }
    for (int64_t s = 0; s < depth; ++s) k_offset[s] = s % 2 ? s : 2 * depth - s;
    const int64_t a_pitch = depth * 16 + a_gap;
    Buffer<BFloat16Block> a(a_pitch * (vectors - 1) + depth * 16), b(at + 2 * depth + 1 + (readable ? 15 * step : 0));
    fill(reinterpret_cast<BFloat16*>(a.data()), a.size() * 32, random);
    fill(reinterpret_cast<BFloat16*>(b.data()), b.size() * 32, random);
    Result<float> c(rows * width);
    for (int64_t j = 0; j < rows && accumulate; ++j) {
      for (int64_t i = 0; i < width; ++i) c.fill(j * width + i, any_value<float>(random));
    }
    for (int64_t j = 0; j < rows; ++j) {
      for (int64_t i = 0; i < width; ++i) {
        float& sum = c.expected[size_t(j * width + i)];
        if (!accumulate) sum = 0;
        for (int64_t s = 0; s < depth; ++s) {
          const BFloat16Block* const tile = a.data() + i / 16 * a_pitch + s * 16;
          sum = add_step(sum, b[j_offset[j] + k_offset[s]].channel,
                         reinterpret_cast<const BFloat16Pair*>(tile) + i % 16, 16);
        }
      }
    }
    describe("%d x %d, depth %d, step %d, uneven %d, accumulate %d", int(rows), int(width), int(depth), int(step),
             uneven, accumulate);
    std::vector<RowTile> tiles;
    for (int64_t j = 0; j < rows; j += 16) {
      tiles.push_back(row_tile_at(j_offset.data() + j, min64(16, rows - j)));
      RowTile& tile = tiles.back();
      expect(tile.pitch == 0 || tile.count == 16, "rests are copied");
      if (readable && !uneven) tile = {j_offset[j], step, nullptr, tile.count};
    }
    AmxOperands operands{};
    operands.depth = depth;
    operands.a = a.data();
    operands.a_pitch = a_pitch;
    operands.b = b.data();
    operands.k_offset = k_offset.data();
    operands.c = c.data();
    operands.accumulate = accumulate;
    {
      const AmxScope scope;
      amx_panel(tiles.data(), int64_t(tiles.size()), vectors, operands);
    }
    c.compare();
  }
}

// A micro-kernel that stores what the one before has summed.
template <int C>
void check_line_stores() {
  Random random(C);
  for (int n = 0; n < 300; ++n) {
    constexpr int64_t kWidth = C * 16;
    const int64_t channels = random.between(kWidth - 15, kWidth), depth = random.between(1, 4);
    const int64_t rows = random.between(1, C == 2 ? 2 : 4) * 16, waiting = random.between(1, 1024 / kWidth);
    const int64_t first = random.between(0, 1) * 32, x_step = channels + random.between(0, 3);
    // The runs of pixels among the sums that wait, in any order in memory, with gaps.
    std::vector<PixelRun> runs;
    for (int64_t sum = 0; sum < waiting;) {
      const int64_t pixels = min64(random.once_in(3) ? 1 : random.between(1, 20), waiting - sum);
      if (!random.once_in(4)) runs.push_back({first + sum, pixels, (random.once_in(2) ? sum : 70 + sum) * x_step});
      sum += pixels;
    }
    Buffer<float> sums(waiting * kWidth), bias(kWidth);
    Result<BFloat16> dst(140 * x_step);
    fill(sums, random);
    fill(bias, random);
    fill(dst, random);
    const bool has_bias = random.once_in(2);
    // Zeros of either sign, and denormal numbers: with a bias only those that it does not change.
    for (int64_t i = random.once_in(2) ? 0 : sums.size(); i < sums.size(); i += random.between(1, 60)) {
      if (has_bias && random.once_in(2)) bias[i % kWidth] = random.once_in(2) ? 0.0f : -0.0f;
      sums[i] = (random.once_in(2) ? 1.0f : -1.0f) * (random.once_in(2) ? 0.0f : 0x1p-130f);
    }
    for (const PixelRun& run : runs) {
      for (int64_t x = 0; x < run.pixels; ++x) {
        for (int64_t m = 0; m < channels; ++m) {
          const float sum = sums[(run.sum - first + x) * kWidth + m];
          dst.expected[size_t(run.offset + x * x_step + m)] = narrowed<BFloat16>(add(sum, has_bias ? bias[m] : 0.0f));
        }
      }
    }
    Buffer<BFloat16Block> a(C * depth * 16), b(rows + depth);
    Buffer<int64_t> k_offset(depth);
    fill(reinterpret_cast<BFloat16*>(a.data()), a.size() * 32, random);
    fill(reinterpret_cast<BFloat16*>(b.data()), b.size() * 32, random);
    Result<float> c(rows * kWidth);
    for (int64_t s = 0; s < depth; ++s) k_offset[s] = s;
    std::vector<RowTile> tiles;
    for (int64_t j = 0; j < rows; j += 16) tiles.push_back({j, 1, nullptr, 16});
    for (int64_t j = 0; j < rows; ++j) {
      for (int64_t i = 0; i < kWidth; ++i) {
        float sum = 0;
        for (int64_t s = 0; s < depth; ++s) {
          const BFloat16Block* const tile = a.data() + i / 16 * depth * 16 + s * 16;
          sum = add_step(sum, b[j + s].channel, reinterpret_cast<const BFloat16Pair*>(tile) + i % 16, 16);
        }
        c.expected[size_t(j * kWidth + i)] = sum;
      }
    }
    describe("%d channels of %d, %d sums in %d runs, bias %d, beside %d x %d, depth %d", int(channels), int(kWidth),
             int(waiting), int(runs.size()), has_bias, int(rows), int(kWidth), int(depth));
    AmxOperands operands{};
    operands.depth = depth;
    operands.a = a.data();
    operands.a_pitch = depth * 16;
    operands.b = b.data();
    operands.k_offset = k_offset.data();
    PendingLines<C> pending{};
    pending.sums = sums.data();
    pending.first = first;
    pending.runs = runs.data();
    pending.end = runs.data() + runs.size();
    pending.bias = has_bias ? bias.data() : nullptr;
    pending.destination = dst.data();
    pending.x_step = x_step;
    pending.channels = channels;
    {
      const AmxScope scope;
      kAmxUkernels<C, LineStores<C>>[rows / 16 - 1](operands, tiles.data(), c.data(), pending);
    }
    c.compare();
    dst.compare();
  }
}

inline void check_block_patch() {
  begin_part("pack_patch blocks");
  Random random(72);
  for (int i = 0; i < 600; ++i) {
    check_patch_of<BFloat16, BFloat16Block>(
        PatchOrder::kBlocks, kBlockChannels, false, random,
        [&](const BFloat16Block& actual, const BFloat16* element, int64_t block, int64_t stride, int64_t channels) {
          BFloat16Block expected{};
          for (int64_t c = 0; c < kBlockChannels && element != nullptr; ++c) {
            if (block * kBlockChannels + c < channels) expected.channel[c] = element[c * stride];
          }
          expect(same_bits(actual, expected), "another block");
        });
  }
}

inline void check_block_weights() {
  begin_part("BlockWeightPacker");
  Random random(73);
  for (int n = 0; n < 400; ++n) {
    const int64_t lanes = random.between(1, 32), channels = random.between(1, random.once_in(3) ? 140 : 34);
    const int64_t rows = random.between(1, 4), cols = random.between(1, random.once_in(4) ? 33 : 5), taps = rows * cols;
    const int64_t blocks = div_up(channels, kBlockChannels);
    const AnyWeight<BFloat16> from(lanes, channels, rows, cols, random);
    ConvGemm gemm{};
    gemm.per_step = kBlockChannels;
    gemm.weight_m = from.d[kLane].stride;
    gemm.weight_c = kBlockChannels * from.d[kReduced].stride;
    gemm.weight_i = from.d[kTapRow].stride;
    gemm.weight_j = from.d[kTapCol].stride;
    describe("%d lanes, %d channels, %d x %d taps, strides %d, %d, %d, %d", int(lanes), int(channels), int(rows),
             int(cols), int(gemm.weight_m), int(from.d[kReduced].stride), int(gemm.weight_i), int(gemm.weight_j));
    Buffer<BFloat16> weight(from.elements);
    const int64_t pitch = blocks * taps * 16 + random.between(0, 2);
    Result<BFloat16Block> dst(lanes > 16 ? pitch + blocks * taps * 16 : blocks * taps * 16);
    fill(weight, random);
    const WeightSegment<BFloat16> segment{weight.data() + from.before, gemm.weight_m, lanes, blocks, rows, cols};
    BlockWeightPacker(gemm, segment, blocks * kBlockChannels - channels).pack(dst.data(), pitch);
    for (int64_t step = 0; step < blocks * taps; ++step) {
      for (int64_t i = 0; i < 512 * div_up(lanes, 16); ++i) {
        const int64_t c = step / taps * kBlockChannels + i % 512 / 32 * 2 + i % 2, tap = step % taps;
        const int64_t lane = i / 512 * 16 + i % 32 / 2;
        dst.expected[size_t(i / 512 * pitch + step * 16 + i % 512 / 32)].channel[i % 32] =
            c < channels && lane < lanes ? weight[from.at(lane, c, tap / cols, tap % cols)] : BFloat16{0};
      }
    }
    dst.compare();
  }
}

// What in_blocks gives a GEMM of few channels and kernels of so many columns; the words of a column.
inline int64_t take_columns(ConvGemm& gemm, int64_t channels, int64_t kernel) {
  int64_t words = 2;
  while (words < channels) words *= 2;
  gemm.columns = kBlockChannels / words;
  gemm.taps_w = div_up(kernel, gemm.columns);
  gemm.missing_columns = gemm.taps_w * gemm.columns - kernel;
  return words;
}

// Blocks of [column][channel]: patches whose columns are expanded, and weights.
inline void check_columns() {
  begin_part("ColumnPatchPacker");
  Random random(77);
  for (int n = 0; n < 800; ++n) {
    int64_t p = 0, q = 0, taps_h = 0, unused = 0;
    Dimension d[5];
    const GatherAxis h = any_axis(random, 4, p, taps_h, d[kRow].size);
    GatherAxis w = any_axis(random, random.once_in(4) ? 120 : 12, q, unused, d[kCol].size);
    d[kImage].size = random.between(1, 2);
    d[kGroup].size = 1;
    d[kChannel].size = random.between(1, 8);
    const int64_t gaps[5] = {random.once_in(4) ? 2 : 1, 1, random.once_in(4) ? 2 : 1, 1, random.once_in(4) ? 2 : 1};
    lay_out(d, kOrders[random.between(0, 5)], gaps);
    int64_t before = 0, span = 0;
    span_of(d, before, span);
    Buffer<BFloat16> memory(span);
    fill(memory, random);
    const int64_t channels = d[kChannel].size, kernel = random.between(1, random.once_in(3) ? 40 : 9);
    ConvGemm gemm{};
    const int64_t words = take_columns(gemm, channels, kernel);
    w.tap = gemm.columns;
    if (random.once_in(4)) w.step = random.between(4, 40);
    // Steps from any of a row on, as segments have them.
    const int64_t first_step = random.between(0, gemm.taps_w - 1), steps = gemm.taps_w - first_step;
    const Patch patch =
        lay_out_patch(PatchOrder::kBlocks, amx_patch_axis(h, 0, p, 0, taps_h),
                      make_expanded_axis(w, 0, q, first_step, steps), d[kImage].size, 1, 1, sizeof(BFloat16Block));
    describe("%d x %d positions of steps %d, %d, %d x %d taps, %d channels, step %d, strides %d, %d, %d, %d", int(p),
             int(q), int(h.step), int(w.step), int(taps_h), int(kernel), int(channels), int(first_step),
             int(d[kImage].stride), int(d[kChannel].stride), int(d[kRow].stride), int(d[kCol].stride));
    const BFloat16* const source = memory.data() + before;
    const Source<BFloat16> from{source,
                                d[kImage].stride,
                                kBlockChannels * d[kChannel].stride,
                                d[kRow].stride,
                                d[kCol].stride,
                                d[kRow].size,
                                d[kCol].size,
                                0,
                                1,
                                kBlockChannels - channels};
    Buffer<BFloat16Block> strips(limits::amx::kRowBlocks), dst(d[kImage].size * patch.image_pitch);
    ColumnPatchPacker(patch, from, gemm, first_step, strips.data()).pack(dst.data());
    for (int64_t at = 0; at < d[kImage].size * p * q * taps_h * steps; ++at) {
      const int64_t t = at % steps, i = at / steps % taps_h, x = at / steps / taps_h % q;
      const int64_t y = at / steps / taps_h / q % p, image = at / steps / taps_h / q / p, row = h.source(y, i);
      BFloat16Block expected{};
      for (int64_t word = 0; word < kBlockChannels; ++word) {
        const int64_t column = word / words, channel = word % words, col = w.source(x, first_step + t) + column;
        if ((first_step + t) * gemm.columns + column >= kernel || channel >= channels) continue;
        if (row < 0 || row >= d[kRow].size || col < 0 || col >= d[kCol].size) continue;
        expected.channel[word] = source[image * d[kImage].stride + channel * d[kChannel].stride + row * d[kRow].stride +
                                        col * d[kCol].stride];
      }
      expect(same_bits(dst[patch.position_offset(image, y, x) + patch.tap_offset(0, i, t)], expected), "another block");
    }
  }
  begin_part("pack_weight_columns");
  for (int n = 0; n < 600; ++n) {
    const int64_t lanes = random.between(1, 32), channels = random.between(1, 8), rows = random.between(1, 4);
    const int64_t cols = random.between(1, random.once_in(4) ? 40 : 9);
    const AnyWeight<BFloat16> from(lanes, channels, rows, cols, random);
    ConvGemm gemm{};
    const int64_t words = take_columns(gemm, channels, cols);
    gemm.per_step = kBlockChannels;
    gemm.channels = 1;
    gemm.missing = kBlockChannels - channels;
    gemm.weight_c = kBlockChannels * from.d[kReduced].stride;
    gemm.weight_i = from.d[kTapRow].stride;
    gemm.weight_j = gemm.columns * from.d[kTapCol].stride;
    const int64_t first_step = random.between(0, gemm.taps_w - 1), steps = gemm.taps_w - first_step;
    describe("%d lanes, %d channels, %d x %d taps from step %d, strides %d, %d, %d, %d", int(lanes), int(channels),
             int(rows), int(cols), int(first_step), int(from.d[kLane].stride), int(from.d[kReduced].stride),
             int(from.d[kTapRow].stride), int(from.d[kTapCol].stride));
    Buffer<BFloat16> weight(from.elements);
    fill(weight, random);
    const int64_t blocks = rows * steps * 16, pitch = blocks + random.between(0, 2);
    Result<BFloat16Block> dst(lanes > 16 ? pitch + blocks : blocks);
    const BFloat16* const data = weight.data() + from.before;
    pack_weight_columns(gemm, {data + first_step * gemm.weight_j, from.d[kLane].stride, lanes, 1, rows, steps},
                        first_step, dst.data(), pitch);
    for (int64_t at = 0; at < blocks * 32 * div_up(lanes, 16); ++at) {
      const int64_t half = at / 32 / blocks, block = at / 32 % blocks, row = block / 16 / steps;
      const int64_t word = block % 16 * 2 + at % 2, lane = half * 16 + at % 32 / 2, channel = word % words;
      const int64_t col = (first_step + block / 16 % steps) * gemm.columns + word / words;
      dst.expected[size_t(half * pitch + block)].channel[at % 32] =
          lane < lanes && channel < channels && col < cols ? weight[from.at(lane, channel, row, col)] : BFloat16{0};
    }
    dst.compare();
  }
}

inline void check_amx() {
  check_tiles();
  check_amx_panel();
  begin_part("LineStores");
  check_line_stores<1>();
  check_line_stores<2>();
  check_store_tile<BFloat16>();
  check_store_lanes<BFloat16>();
  check_block_patch();
  check_block_weights();
  check_columns();
  check_pixel_steps();
}

}  // namespace parts
