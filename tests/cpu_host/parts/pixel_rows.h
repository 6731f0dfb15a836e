// pack/pixel_rows.h: the packers of weight gradients whose steps take several pixels.
#pragma once

#include "../../../csrc/cpu/pack/pixel_rows.h"
#include "packing.h"

namespace parts {

inline void check_copy_words() {
  begin_part("copy_words");
  Random random(74);
  for (const int64_t step : {1, 2, 3, -1, 0}) {
    for (int64_t n = 1; n <= 70; ++n) {
      describe("%d words %d apart", int(n), int(step));
      const Dimension from[] = {{n, step}};
      int64_t before = 0, elements = 0;
      span_of(from, before, elements);
      Buffer<BFloat16> src(elements);
      Result<BFloat16> dst(n);
      fill(src, random);
      copy_words(src.data() + before, step, n, dst.data());
      for (int64_t i = 0; i < n; ++i) dst.expected[size_t(i)] = src[before + i * step];
      dst.compare();
    }
  }
}

// Images of the dimensions' sizes in any order, some with gaps: the memory that they span, of which the first element
// is `before` elements on.
inline int64_t lay_out_images(Random& random, Dimension (&d)[5], int64_t& before) {
  const int64_t gaps[5] = {random.once_in(4) ? 2 : 1, random.once_in(4) ? 3 : 1, random.once_in(4) ? 2 : 1, 1, 1};
  lay_out(d, kOrders[random.between(0, 5)], gaps);
  int64_t span = 0;
  span_of(d, before, span);
  return span;
}

// A segment's pixels at each weight element, and grad_output's in pairs.
inline void check_pixel_rows() {
  begin_part("pixel rows");
  Random random(75);
  for (int n = 0; n < 400; ++n) {
    int64_t p = 0, q = 0, taps_h = 0, taps_w = 0;
    Dimension d[5];
    const GatherAxis h = any_axis(random, 4, p, taps_h, d[kRow].size),
                     w = any_axis(random, 20, q, taps_w, d[kCol].size);
    d[kImage].size = random.between(1, 2);
    d[kGroup].size = 1;
    d[kChannel].size = random.between(1, random.once_in(3) ? 70 : 5);
    int64_t before = 0;
    Buffer<BFloat16> memory(lay_out_images(random, d, before));
    fill(memory, random);
    const Tile segment{0, d[kImage].size, 0, p, 0, q};
    const int64_t channels = d[kChannel].size, steps = div_up(segment.pixels(), kBlockChannels);
    const Patch patch = lay_out_pixel_patch(make_patch_axis(h, 0, p, 0, taps_h), make_patch_axis(w, 0, q, 0, taps_w),
                                            segment.images, channels);
    describe("%d x %d x %d pixels of steps %d, %d, %d x %d taps, %d channels, strides %d, %d, %d, %d",
             int(segment.images), int(p), int(q), int(h.step), int(w.step), int(taps_h), int(taps_w), int(channels),
             int(d[kImage].stride), int(d[kChannel].stride), int(d[kRow].stride), int(d[kCol].stride));
    Buffer<BFloat16> packed(segment.images * patch.image_pitch);
    Result<BFloat16Block> rows(channels * taps_h * taps_w * steps);
    const Source<BFloat16> source{memory.data() + before, d[kImage].stride, d[kChannel].stride, d[kRow].stride,
                                  d[kCol].stride,         d[kRow].size,     d[kCol].size};
    pack_pixel_rows(patch, source, segment, {taps_h, taps_w}, packed.data(), steps, rows.data());
    for (int64_t e = 0; e < channels * taps_h * taps_w; ++e) {
      for (int64_t x = 0; x < steps * kBlockChannels; ++x) {
        BFloat16& expected = rows.expected[size_t(e * steps + x / 32)].channel[x % 32];
        expected = {0};
        if (x >= segment.pixels()) continue;
        const int64_t row = h.source(x / q % p, e / taps_w % taps_h), col = w.source(x % q, e % taps_w);
        if (row < 0 || row >= d[kRow].size || col < 0 || col >= d[kCol].size) continue;
        expected = source.data[x / q / p * source.image + e / taps_w / taps_h * source.channel + row * source.row +
                               col * source.col];
      }
    }
    rows.compare();
  }
}

inline void check_pixel_pairs() {
  begin_part("pack_pixel_pairs");
  Random random(76);
  for (int n = 0; n < 400; ++n) {
    Dimension d[5];
    d[kImage].size = random.between(1, 3);
    d[kGroup].size = 1;
    d[kChannel].size = random.between(1, 32);
    d[kRow].size = random.between(1, 5);
    d[kCol].size = random.between(1, 17);
    int64_t before = 0;
    Buffer<BFloat16> memory(lay_out_images(random, d, before));
    fill(memory, random);
    const Tile segment{0, d[kImage].size, 0, d[kRow].size, 0, d[kCol].size};
    const int64_t lanes = d[kChannel].size, pixels = segment.pixels(), steps = div_up(pixels, kBlockChannels);
    const int64_t stride[4] = {d[kImage].stride, d[kChannel].stride, d[kRow].stride, d[kCol].stride};
    describe("%d x %d x %d pixels, %d channels, strides %d, %d, %d, %d", int(segment.images), int(segment.rows),
             int(segment.cols), int(lanes), int(stride[0]), int(stride[1]), int(stride[2]), int(stride[3]));
    // Channels behind channels, as tiles have them, or side by side.
    const int64_t tile = steps * 16 + random.between(0, 2);
    const bool beside = random.once_in(2);
    const int64_t count = beside ? div_up(pixels, 2) : steps * 16, vectors = lanes > 16 ? 2 : 1;
    const int64_t row_pitch = beside ? vectors + random.between(0, 1) : 1, pitch = beside ? 1 : tile;
    Result<BFloat16Block> dst((count - 1) * row_pitch + (vectors - 1) * pitch + 1);
    pack_pixel_pairs(memory.data() + before, stride, segment, lanes, {dst.data(), count, row_pitch, pitch});
    for (int64_t x = 0; x < 2 * count; ++x) {
      for (int64_t lane = 0; lane < round_up(lanes, 16); ++lane) {
        const int64_t y = x / segment.cols;
        const int64_t at = before + y / segment.rows * stride[0] + lane * stride[1] + y % segment.rows * stride[2] +
                           x % segment.cols * stride[3];
        dst.expected[size_t(lane / 16 * pitch + x / 2 * row_pitch)].channel[lane % 16 * 2 + x % 2] =
            x < pixels && lane < lanes ? memory[at] : BFloat16{0};
      }
    }
    dst.compare();
  }
}

inline void check_pixel_steps() {
  check_copy_words();
  check_pixel_rows();
  check_pixel_pairs();
}

}  // namespace parts
