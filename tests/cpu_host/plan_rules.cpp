// The rules of the plan, each by itself: the order of summation against docs/design.md ("One order of summation"),
// written here a second time in other words; patches of an axis; tilings, which have to cover everything once; whose
// scratch is whose.
// Compiled with plan/*.cpp, UBSan and CONV2D_EXT_DEBUG. See tests/test_cpu_parts.py.
#include <unistd.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/cpu/base/limits.h"
#include "../../csrc/cpu/base/scratch.cpp"
#include "../../csrc/cpu/plan/candidates.h"
#include "../../csrc/cpu/plan/padding_classes.h"
#include "../../csrc/cpu/plan/patch_axis.h"
#include "../../csrc/cpu/plan/tile_amx.h"
#include "../../csrc/cpu/plan/tile_depthwise.h"
#include "../../csrc/cpu/plan/tile_gemm.h"
#include "../../csrc/cpu/plan/tile_one_pixel.h"
#include "../../csrc/cpu/plan/tile_phases.h"
#include "../../csrc/cpu/plan/tile_pixels.h"
#include "../../csrc/cpu/plan/tile_planes.h"
#include "../../csrc/cpu/plan/tile_winograd.h"
#include "parts/check.h"

namespace {

using namespace conv2d_ext;
using namespace conv2d_ext::cpu;
using namespace parts;

// ---- the order of summation

// "Of near-equal length": the fewest pieces of at most `most`, and then the smallest size that so many pieces need.
// Counted up, not divided.
int64_t near_equal(int64_t whole, int64_t most) {
  int64_t pieces = 1;
  while (pieces * most < whole) ++pieces;
  int64_t size = 1;
  while (pieces * size < whole) ++size;
  return size;
}
int64_t pieces_of(int64_t whole, int64_t size) {
  int64_t pieces = 0;
  for (int64_t at = 0; at < whole; at += size) ++pieces;
  return pieces;
}

// The limits of docs/design.md.
struct Documented {
  const char* name;
  ChainLimits limits;
  int64_t segment, pointwise_segment, chain, short_gradient_chain, short_gradient_products, pixel_chain, few_pixels,
      few_pixels_chain;
};
const Documented kDocumented[] = {
    {"fused", chain_limits(true), 256, 128, 64, 32, 64, 64, 47, 32},
    // Where multiply and add aren't fused, chains are half as long.
    {"unfused", chain_limits(false), 256, 128, 32, 16, 32, 32, 23, 16},
    // In pairs: segments of at most 144 (128 for 1 x 1), each of them one chain.
    {"pairs", pair_limits(), 144, 128, 144, 144, 144, 0, 0, 0},
    // In AMX steps: segments of at most 72, each step a chain.
    {"AMX", amx_limits(), 72, 72, 1, 1, 1, 32, 0, 32},
};

void check_k(const Documented& d, int64_t channels, int64_t taps_h, int64_t taps_w, bool is_gradient) {
  const int64_t taps = taps_h * taps_w, segment = taps == 1 ? d.pointwise_segment : d.segment;
  describe("%s: %d channels, %d x %d taps, gradient %d", d.name, int(channels), int(taps_h), int(taps_w), is_gradient);
  ImageGemm gemm{1, 8, channels, taps_h, taps_w, 9, 9};
  gemm.is_gradient = is_gradient;
  const KBlocking k = block_k(gemm, d.limits);
  int64_t part_channels = 1, part_rows = taps_h, part_cols = taps_w;
  if (taps <= segment) {  // whole channels, of near-equal number
    int64_t most = 1;
    while ((most + 1) * taps <= segment) ++most;
    part_channels = near_equal(channels, most);
  } else if (taps_w <= segment) {  // rectangles of one channel's taps: whole rows, as many as fit
    int64_t most = 1;
    while ((most + 1) * taps_w <= segment) ++most;
    part_rows = near_equal(taps_h, most);
  } else {  // pieces of a row
    part_rows = 1;
    part_cols = near_equal(taps_w, segment);
  }
  expect(k.segment_channels == part_channels, "channels of a segment");
  expect(k.tap_rows == part_rows && k.tap_cols == part_cols, "taps of a segment");
  expect(k.max_depth() <= segment, "a segment's products");
  const int64_t blocks_c = pieces_of(channels, part_channels), blocks_h = pieces_of(taps_h, part_rows);
  const int64_t blocks_w = pieces_of(taps_w, part_cols), segments = blocks_c * blocks_h * blocks_w;
  expect(k.blocks_c == blocks_c && k.blocks_h == blocks_h && k.blocks_w == blocks_w, "blocks");
  // 32 in those sums of grad_input that have at most 64 products, over several channels.
  const bool is_short = is_gradient && channels > 1 && channels * taps <= d.short_gradient_products;
  const int64_t chain = near_equal(part_channels * part_rows * part_cols, is_short ? d.short_gradient_chain : d.chain);
  expect(k.chain == chain, "products of a chain");
  if (d.limits.segment == 144) expect(k.chain == k.max_depth(), "a segment of pairs is one chain");
  expect(k.has_chunks() == (segments > 16), "chunks of 16 segments");
  // Segments are numbered in the order of k = (channel, row of taps, column).
  int64_t number = 0;
  for (int64_t c = 0; c < channels && segments < 2000; c += part_channels) {
    for (int64_t i = 0; i < taps_h; i += part_rows) {
      for (int64_t j = 0; j < taps_w; j += part_cols) expect(k.segment_at(c, i, j) == number++, "a segment's number");
    }
  }
}

void check_order_of_k() {
  begin_part("block_k");
  for (const Documented& d : kDocumented) {
    for (const bool is_gradient : {false, true}) {
      for (int64_t channels = 1; channels <= 700; channels += channels < 140 ? 1 : 13) {
        for (const int64_t taps : {1, 2, 3, 5, 7}) {
          check_k(d, channels, taps, taps, is_gradient);
          check_k(d, channels, 1, taps, is_gradient);
        }
      }
      for (int64_t h = 1; h <= 40; h += 3) {
        for (int64_t w = 1; w <= 600; w += w < 40 ? 1 : 37) check_k(d, h % 3 + 1, h, w, is_gradient);
      }
      check_k(d, 2048, 1, 1, is_gradient);
      check_k(d, 4096, 3, 3, is_gradient);
    }
  }
  describe("no products");
  const KBlocking none = block_k({1, 8, 0, 3, 3, 9, 9, 1, false}, chain_limits(true));
  expect(none.segments() == 0, "segments of no channels");
}

Conv2dProblem problem_of_pixels(int64_t batch, int64_t h, int64_t w) {
  Conv2dProblem p{};
  p.batch = batch;
  p.in_channels = p.out_channels = 6;
  p.groups = 1;
  p.out_h = h;
  p.out_w = w;
  return p;
}

void check_order_of_pixels() {
  begin_part("block_pixels");
  for (const Documented& d : kDocumented) {
    if (d.pixel_chain == 0) continue;  // grad_weight takes no pairs
    for (const int64_t batch : {1, 2, 3, 7, 64, 300}) {
      for (int64_t h = 1; h <= 300; h += h < 20 ? 1 : 19) {
        for (int64_t w = 1; w <= 600; w += w < 20 ? 1 : 23) {
          describe("%s: %d images of %d x %d", d.name, int(batch), int(h), int(w));
          Conv2dProblem p = problem_of_pixels(batch, h, w);
          const PixelBlocking b = block_pixels(p, d.limits);
          int64_t images = 1, rows = h, cols = w;
          if (h * w <= 256) {  // several whole images
            while ((images + 1) * h * w <= 256) ++images;
          } else if (w <= 256) {  // rows
            int64_t most = 1;
            while ((most + 1) * w <= 256) ++most;
            rows = near_equal(h, most);
          } else {  // pieces of a row
            rows = 1;
            cols = near_equal(w, 256);
          }
          expect(b.images == images && b.rows == rows && b.cols == cols, "pixels of a segment");
          expect(images * rows * cols <= 256, "at most 256 pixels");
          const int64_t most = h * w <= d.few_pixels ? d.few_pixels_chain : d.pixel_chain;
          expect(b.chain == near_equal(images * rows * cols, most), "pixels of a chain");
          // Groups of one channel, and one channel.
          const int64_t short_chain = near_equal(images * rows * cols, d.few_pixels_chain);
          p.groups = p.in_channels;
          expect(block_pixels(p, d.limits).chain == short_chain, "pixels of a chain of a depthwise layer");
          p.groups = p.in_channels = 1;
          expect(block_pixels(p, d.limits).chain == short_chain, "pixels of a chain of one channel");
          const int64_t segments = pieces_of(batch, images) * pieces_of(h, rows) * pieces_of(w, cols);
          expect(b.segments() == segments, "segments");
          expect(b.chunks() == pieces_of(segments, 8), "chunks of 8 segments");
        }
      }
    }
  }
}

void check_other_rules() {
  begin_part("one pixel, pairs");
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kComplex64, DType::kInt32}) {
    for (const int64_t channels : {1, 2, 5, 15, 16, 17, 64, 1000}) {
      for (const int64_t m : {1, 5, 6, 16, 60, 63, 64, 65, 1024}) {
        for (const int64_t taps : {1, 3}) {
          for (const int64_t rows : {1, 2}) {
            describe("dtype %d, %d channels, %d results, %d taps, %d rows", int(dtype), int(channels), int(m),
                     int(taps * taps), int(rows));
            const ImageGemm gemm{1, m, channels, taps, taps, rows, 1};
            const int64_t products = channels * taps * taps;
            const bool real = dtype != DType::kComplex64 && dtype != DType::kInt32;
            // K >= 16 and at least 1024 weights a group, of one result pixel and a real floating-point type.
            expect(sums_as_dots(gemm, dtype) == (rows == 1 && real && products >= 16 && products * m >= 1024), "dots");
            for (const int64_t width : {8, 16}) {
              const DotBlocking k = block_dot(gemm, width, chain_limits(true));
              const int64_t steps = pieces_of(products, width);
              expect(k.products == products && k.steps == steps && k.chain == near_equal(steps, 64), "dot's chains");
            }
            // One channel, fewer than six result channels, one pixel: not in pairs.
            expect(takes_pairs(gemm) == (channels > 1 && m >= 6 && rows > 1), "pairs");
            // Columns of up to 8 channels that lie side by side share a step of tiles, as 2, 4 or 8 words each; so 4 or
            // more channels are enough for tiles, or such columns of fewer for 6 or more results.
            for (const int64_t tap : {1, -1, 2, -3}) {
              const bool shares = channels <= 8 && taps > 1 && (tap == 1 || tap == -1);
              const int64_t words = channels > 4 ? 8 : channels > 2 ? 4 : 2;
              const int64_t together = shares ? channels * std::min(32 / words, taps) : channels;
              expect(columns_per_step(gemm, {1, 0, tap}) == (shares ? 32 / words : 1), "columns of a step");
              expect(takes_amx(gemm, {1, 0, tap}) == ((channels >= 4 || (together >= 4 && m >= 6)) && rows > 1),
                     "tiles");
            }
          }
        }
      }
    }
  }
  describe("patch layers take no pairs, groups do as one group does");
  expect(!takes_pairs({1, 64, 8, 1, 1, 7, 7, 2, 2, true}), "patch layer");
  expect(takes_pairs({64, 6, 6, 3, 3, 7, 7}) && !takes_pairs({64, 5, 6, 3, 3, 7, 7}), "groups");
  for (const int64_t groups : {1, 15, 16, 64}) {
    for (const int64_t m : {5, 6, 8, 9, 16}) {
      for (const int64_t channels : {6, 16, 17}) {
        describe("phases of %d groups, %d channels to %d", int(groups), int(channels), int(m));
        ImageGemm gemm{groups, m, channels, 2, 2, 7, 7};
        gemm.is_phase = true;
        expect(takes_pairs(gemm) == (m >= 6 && (m > 8 || groups < 16 || channels > 16)), "phases");
      }
    }
  }
  expect(!takes_amx({1, 64, 8, 1, 1, 7, 7, 2, 2, true}, {1, 0, 1}), "patch layer in tiles");
  expect(!takes_amx({4, 16, 8, 3, 3, 7, 7}, {1, 0, 1}) && !takes_amx({4, 15, 16, 3, 3, 7, 7}, {1, 0, 1}) &&
             takes_amx({4, 16, 16, 3, 3, 7, 7}, {1, 0, 1}),
         "groups in tiles");
}

// ---- patches of an axis

// Of a matrix product no rule reads anything but k, whatever the rows and columns.
void check_order_of_products() {
  const VectorShape avx512{16, 4, 4, true, chain_limits(true)};
  for (int64_t k : {1, 2, 16, 129, 3000}) {
    for (int64_t rows : {1, 2, 1000}) {
      for (int64_t columns : {1, 5, 4096}) {
        describe("product: %d rows, %d columns, k %d", int(rows), int(columns), int(k));
        ImageGemm gemm{1, columns, k, 1, 1, 1, rows};
        gemm.is_matmul = true;
        expect(!sums_as_dots(gemm, DType::kFloat32) && !sums_as_dots(gemm, DType::kBFloat16), "no dots");
        expect(takes_pairs(gemm) == (k > 1), "pairs");
        const KBlocking blocks = block_k(gemm, avx512.limits);
        expect(blocks.segment_channels == near_equal(k, 128) && blocks.chain == near_equal(blocks.segment_channels, 64),
               "segments and chains");
      }
    }
  }
}

void check_patch_axes() {
  begin_part("make_patch_axis");
  Random random(1);
  for (int n = 0; n < 20000; ++n) {
    const GatherAxis axis{random.between(1, 5), random.between(-9, 9), random.between(1, 5) * (n % 3 ? 1 : -1)};
    const int64_t position0 = random.between(0, 3), positions = random.between(1, 9);
    const int64_t tap0 = random.between(0, 3), taps = random.between(1, 7);
    describe("step %d, tap %d, %d positions from %d, %d taps from %d", int(axis.step), int(axis.tap), int(positions),
             int(position0), int(taps), int(tap0));
    const bool phased = axis.tap == 1 && random.once_in(2);
    const PatchAxis patch = phased ? make_phased_axis(axis, position0, positions, tap0, taps)
                                   : make_patch_axis(axis, position0, positions, tap0, taps);
    // The source coordinate of each coordinate of the patch.
    std::vector<int64_t> held;
    for (int64_t run = 0; run < patch.runs; ++run) {
      for (int64_t i = 0; i < patch.run_length; ++i) {
        held.push_back(patch.first + run * patch.run_shift + i * patch.run_step);
      }
    }
    expect(int64_t(held.size()) == patch.size, "its size");
    expect(patch.size <= positions * taps + (phased ? axis.step * (taps / axis.step) : 0),
           "no larger than its products, but for the ends of phases");
    for (int64_t p = 0; p < positions; ++p) {
      for (int64_t t = 0; t < taps; ++t) {
        const int64_t at = p * patch.position_pitch + patch.tap(t);
        const bool inside = at >= 0 && at < patch.size;
        expect(inside && held[size_t(at)] == axis.source(position0 + p, tap0 + t), "a coordinate of the source");
      }
    }
    expect(phased || patch_size(axis, positions, taps) == patch.size, "the same size anywhere");
  }
  for (const int64_t size : {4, 8, 16}) {
    for (int64_t elements = 1; elements < 5000; elements += 7) {
      describe("%d elements of %d bytes", int(elements), int(size));
      const int64_t padded = odd_lines(elements, size), channels = odd_lines_of_channels(elements, size);
      const bool small = elements * size < 1024, few = elements * size < 512;
      expect(small ? padded == elements
                   : padded * size % 128 == 64 && padded >= elements && padded - elements < 128 / size,
             "an odd number of lines");
      expect(few ? channels == elements
                 : channels * size % 128 == 64 && channels >= elements && channels - elements < 128 / size,
             "an odd number of lines for channels");
    }
  }
}

// ---- tilings

// Each result is in one class, which takes every step that meets the source there; a whole class takes all steps.
void check_padding_classes() {
  begin_part("padding_classes");
  Random random(4);
  int64_t listed = 0, crossed = 0, whole_rows = 0, none_whole = 0;
  for (int n = 0; n < 3000; ++n) {
    Conv2dProblem p{};
    p.groups = 1;
    p.in_channels = random.between(1, 8);
    p.kernel_h = random.between(1, random.once_in(5) ? 20 : 5);
    p.kernel_w = random.between(1, random.once_in(5) ? 20 : 5);
    p.stride_h = random.between(1, 2);
    p.stride_w = random.between(1, 2);
    p.dilation_h = random.between(1, 2);
    p.dilation_w = random.between(1, 2);
    p.pad_top = random.between(0, 4);
    p.pad_left = random.between(0, 4);
    p.in_h = random.between(1, 16);
    p.in_w = random.between(1, 16);
    const Tile tile{0,
                    random.once_in(2) ? 1 : 8,
                    random.between(0, 2),
                    random.between(1, 14),
                    random.between(0, 2),
                    random.between(1, 14)};
    const PaddingRule rule{random.once_in(2) ? 1 : random.between(1, 300), random.between(1, 8),
                           random.once_in(2) ? 0 : random.between(1, 9)};
    const bool of_weights = random.once_in(2);
    ConvGemm g{};
    g.axis_h = p.rows();
    g.axis_w = p.cols();
    g.taps_h = p.kernel_h;
    g.taps_w = p.kernel_w;
    g.source_h = p.in_h;
    g.source_w = p.in_w;
    describe(
        "%d x %d taps, strides %d and %d, dilation %d and %d, padding %d and %d, %d x %d, tile %d x %d, weights %d",
        int(p.kernel_h), int(p.kernel_w), int(p.stride_h), int(p.stride_w), int(p.dilation_h), int(p.dilation_w),
        int(p.pad_top), int(p.pad_left), int(p.in_h), int(p.in_w), int(tile.rows), int(tile.cols), of_weights);
    const PaddingClasses classes = of_weights
                                       ? padding_classes(p, tile, {0, p.kernel_h, 0, p.kernel_w, p.in_channels}, rule)
                                       : padding_classes(g, tile, rule);
    if (classes.count == 0) continue;
    ++listed;
    const int64_t rows = of_weights ? p.kernel_h : tile.rows, cols = of_weights ? p.kernel_w : tile.cols;
    const int64_t step_rows = of_weights ? tile.rows : p.kernel_h, step_cols = of_weights ? tile.cols : p.kernel_w;
    const auto meets = [&](int64_t row, int64_t col, int64_t i, int64_t j) {
      const int64_t p_row = of_weights ? i : row, p_col = of_weights ? j : col;
      const int64_t tap_row = of_weights ? row : i, tap_col = of_weights ? col : j;
      const int64_t y = p.rows().source(tile.row + p_row, tap_row), x = p.cols().source(tile.col + p_col, tap_col);
      return y >= 0 && y < p.in_h && x >= 0 && x < p.in_w;
    };
    std::vector<int> times(size_t(rows * cols));
    int64_t taken = 0, steps = 0;
    bool takes_all = true, single = true;
    for (int c = 0; c < classes.count; ++c) {
      const PaddingClass& of = classes.classes[c];
      steps += of.step_rows * of.step_cols;
      single = single && (of.rows == classes.classes[0].rows || of.cols != cols);
      for (int64_t row = of.row; row < of.row + of.rows; ++row) {
        for (int64_t col = of.col; col < of.col + of.cols; ++col) {
          ++times[size_t(row * cols + col)];
          for (int64_t i = 0; i < step_rows; ++i) {
            for (int64_t j = 0; j < step_cols; ++j) {
              const bool takes = i >= of.step_row && i < of.step_row + of.step_rows && j >= of.step_col &&
                                 j < of.step_col + of.step_cols;
              taken += takes;
              takes_all = takes_all && (takes || !meets(row, col, i, j)) && (takes || c > 0 || !classes.has_whole);
            }
          }
        }
      }
    }
    (!classes.has_whole ? none_whole : single ? crossed : whole_rows) += 1;
    expect(takes_all, "a product that counts is left out");
    expect(std::all_of(times.begin(), times.end(), [](int n) { return n == 1; }), "each result is in one class");
    const int64_t all = rows * cols * step_rows * step_cols;
    expect((all - taken) * 1000 >= all * rule.permille, "enough is left out");
    const int64_t of_each = of_weights ? p.in_channels : tile.images;
    expect((all - taken) * of_each >= steps * rule.listing, "and more than listing steps costs");
  }
  expect(listed > 500 && crossed > 100 && whole_rows > 20 && none_whole > 100, "problems of each kind");
}

// Where vectors run over groups although a group's channels fill vectors.
void check_filled_vectors() {
  begin_part("filled vectors");
  const VectorShape wide{16, 4, 4, true, {}}, narrow{8, 2, 4, true, {}};
  struct Case {
    int64_t groups, m, taps;
    bool side_by_side, fills;
  };
  for (const Case& c : {Case{32, 16, 9, true, false}, Case{32, 16, 9, false, false}, Case{32, 16, 1, true, true},
                        Case{32, 16, 0, true, true}, Case{14, 16, 9, true, false}, Case{13, 16, 9, true, true},
                        Case{31, 16, 9, false, true}, Case{32, 32, 9, true, true}, Case{32, 8, 9, true, false}}) {
    describe("%d groups of %d, %d taps, side by side %d", int(c.groups), int(c.m), int(c.taps), c.side_by_side);
    expect(fills_wide_vectors(c.groups, c.m, c.taps, c.side_by_side, wide) == c.fills, "vectors of 64 bytes");
    expect(!fills_wide_vectors(c.groups, c.m, c.taps, c.side_by_side, narrow), "vectors of 32 bytes");
  }
  for (const int threads : {1, 2, 3, 64}) {
    describe("%d threads", threads);
    expect(occupies(threads, 32, 49, wide) == (threads <= 2), "an item a vector of groups");
    expect(occupies(threads, 17, 64 * 31 + 1, wide), "and for each 64 pixels");
  }
}

// Pieces of `whole`, the last of which may be smaller: all of it, once, and none empty.
void expect_cut(int64_t whole, int64_t piece, int64_t count, const char* what) {
  expect(piece > 0 && count > 0 && (count - 1) * piece < whole && whole <= count * piece, what);
}
void check_panels() {
  begin_part("cut_panels");
  for (int64_t vectors = 1; vectors <= 60; ++vectors) {
    for (int64_t most = 1; most <= 9; ++most) {
      describe("%d vectors, at most %d", int(vectors), int(most));
      const Panels panels = cut_panels(vectors, most);
      int64_t at = 0;
      for (int64_t i = 0; i < panels.count; ++i) {
        expect(panels.start(i) == at && panels.size(i) >= 1 && panels.size(i) <= most, "a panel");
        expect(panels.size(0) - panels.size(i) <= 1, "near-equal");
        at += panels.size(i);
      }
      expect(at == vectors && panels.count == pieces_of(vectors, most), "all vectors, in the fewest panels");
    }
  }
}

void expect_scratch(int64_t bytes) { expect(bytes >= 0 && bytes <= limits::kMaxScratchBytes, "scratch"); }

// Micro-kernels of rows of taps alone read zeros beside the source, or widen what they read.
bool may_read_in_place(const ConvGemm& g, const VectorShape& vector, int64_t storage_size) {
  const bool inside = positions_inside(g.axis_h, g.taps_h, g.rows, g.source_h).count() == g.rows &&
                      positions_inside(g.axis_w, g.taps_w, g.cols, g.source_w).count() == g.cols;
  return (inside && storage_size == vector.element_size) ||
         (g.taps() <= block_k(g, vector.limits).chain && has_depthwise_ukernel(g.taps_w, depthwise_row(g), g.cols));
}

void check_conv_tiling(const ConvGemm& g, const VectorShape& vector, bool over_groups, int threads) {
  const KBlocking k = block_k(g, vector.limits);
  const ConvTiling t = tile_conv(g, k, vector, over_groups, threads);
  expect_cut(g.batch, t.tile_images, t.tiles_n, "images");
  expect_cut(g.rows, t.tile_rows, t.tiles_h, "rows");
  expect_cut(g.cols, t.tile_cols, t.tiles_w, "columns");
  expect(t.tile_images == 1 || (t.tiles_h == 1 && t.tiles_w == 1), "only whole images together");
  expect_cut(over_groups ? g.m : div_up(g.m, vector.lanes), t.chunk_vectors, t.chunks_m, "result channels");
  if (g.channels > 0 && g.taps() > 0) {
    expect(t.block_channels % k.segment_channels == 0 && (k.blocks_h * k.blocks_w == 1 || t.block_channels == 1),
           "blocks of whole segments");
    expect(t.one_block == (!t.interleaved && t.block_channels >= g.channels && k.blocks_h * k.blocks_w == 1),
           "one block");
    expect(t.segments_at_once == 1 || (k.max_depth() % k.chain == 0 && !k.has_chunks()), "panels of whole chains");
  }
  expect(t.kept_panels == 0 || t.tiles() > threads, "weights are kept for a thread's next tile");
  expect_scratch(lay_out_scratch(t, k, vector).bytes);
}
void check_amx_tiling(const ConvGemm& g, const VectorShape& vector, int threads) {
  const KBlocking k = block_k(g, vector.limits);
  const AmxTiling t = tile_amx(g, k, vector, threads);
  expect_cut(g.batch, t.tile_images, t.tiles_n, "images");
  expect_cut(g.rows, t.tile_rows, t.tiles_h, "rows");
  expect_cut(g.cols, t.tile_cols, t.tiles_w, "columns");
  expect(t.tile_images == 1 || (t.tiles_h == 1 && t.tiles_w == 1), "only whole images together");
  expect_cut(div_up(g.m, vector.lanes), t.chunk_vectors, t.chunks_m, "result channels");
  const bool in_place = source_is_patch(g);
  expect(in_place
             ? t.block_channels == g.channels
             : t.block_channels % k.segment_channels == 0 && (k.blocks_h * k.blocks_w == 1 || t.block_channels == 1),
         "blocks of whole segments");
  expect(t.one_block == (t.block_channels >= g.channels && k.blocks_h * k.blocks_w == 1), "one block");
  expect(t.sums % 16 == 0 && t.sums_at_once % 16 == 0 && t.sums_at_once <= t.sums, "whole tiles of sums");
  expect(t.one_block || t.sums_at_once == t.sums, "runs of finished sums");
  // A tile anywhere has as many sums, each pixel one of its own, and reads nothing behind its patch.
  for (const int64_t number : {int64_t{0}, t.tiles() / 2, t.tiles() - 1}) {
    const Tile tile = t.tile(number, g);
    const PatchAxis rows = amx_patch_rows(g, tile, 0, k.tap_rows),
                    cols = amx_patch_cols(g, t.expands, tile, 0, k.tap_cols);
    const SumPitches pitches = amx_sum_pitches(g, tile, cols.run_length);
    expect(pitches.row >= tile.cols && pitches.image >= (tile.rows - 1) * pitches.row + tile.cols, "pitches");
    expect(round_up(tile.images * pitches.image, 16) <= t.sums, "sums of a tile");
    const int64_t plane = tile.images * rows.size * cols.size;
    expect(in_place || odd_lines(plane, 64) * min64(t.block_channels, g.channels) + 15 < t.patch_elements, "its patch");
    expect(rows.position_pitch == 1 && cols.position_pitch == 1, "neighbours in the patch");
    // From row to row as the sums go; from image to image too, but where they begin whole tiles.
    expect(g.taps() != 1 || rows.size * cols.size == pitches.image, "images without borders");
  }
  const int64_t scratch = lay_out_scratch(t, k, vector).bytes;
  expect_scratch(scratch);
  expect(t.shared_bytes == 0 || t.tiles() > 1, "weights are shared between tiles");
  expect(t.shared_bytes <= threads * (int64_t{1} << 20), "shared weights");
}
void check_weight_tiling(const Call& call, const VectorShape& vector, WeightLanes lanes, int threads) {
  const Conv2dProblem& p = call.problem;
  const PixelBlocking pixels = block_pixels(p, vector.limits);
  const WeightTiling t = tile_grad_weight(call, pixels, vector, lanes, threads);
  const bool groups = lanes != WeightLanes::kChannels;
  expect_cut(div_up(p.out_channels_per_group(), groups ? 1 : vector.lanes), t.chunk_vectors, t.chunks_m, "outputs");
  expect_cut(p.in_channels_per_group(), t.block_channels, t.blocks_c, "input channels");
  expect_cut(p.kernel_h, t.tap_rows, t.blocks_h, "rows of taps");
  expect_cut(p.kernel_w, t.tap_cols, t.blocks_w, "columns of taps");
  if (lanes == WeightLanes::kInnerGroups) {
    expect_cut(p.groups / vector.lanes, t.group_vectors, t.group_blocks, "vectors of groups");
  } else {
    expect_cut(p.groups, groups ? vector.lanes : t.groups_in_turn, t.group_blocks, "groups");
    expect(t.groups_in_turn == 1 || (weight_groups_are_neighbours(call, vector.element_size) && !groups),
           "groups in turn");
    const int64_t rounds = div_up(t.group_blocks, threads);
    expect(rounds * t.groups_in_turn < div_up(p.groups, threads) + rounds, "groups of the thread that has most");
  }
  expect(t.slots >= 1 && t.slots <= max64(pixels.chunks(), 1), "slots");
  expect(partial_bytes(t, vector) <= int64_t(threads) * 1024 * 1024, "partials");
  expect_scratch(lay_out_scratch(t, pixels, vector).bytes);
}

const char* short_name(Driver driver) {
  static const char* const kNames[] = {"dot",
                                       "rows",
                                       "columns",
                                       "strided",
                                       "phases",
                                       "amx",
                                       "pairs_of_groups",
                                       "pairs",
                                       "winograd",
                                       "depthwise",
                                       "groups",
                                       "planes",
                                       "pixels",
                                       "gemm",
                                       "weight_amx",
                                       "weight_pairs",
                                       "weight_depthwise",
                                       "weight_groups",
                                       "weight_transposed",
                                       "weight_gemm",
                                       "padding"};
  return kNames[int(driver)];
}

// A product of matrices of the problem's sizes, the other factor's elements along k or not.
Call product_call(const Conv2dProblem& problem, DType dtype) {
  const int64_t k = problem.in_channels_per_group(), n = problem.out_channels_per_group();
  const int64_t m = problem.out_w;
  // Matrices with a gap between them are not joined.
  const ConstMatrixView mat1{nullptr, k * m + 1, k, 1};
  const ConstMatrixView mat2 =
      problem.kernel_h % 2 ? ConstMatrixView{nullptr, 0, 1, k} : ConstMatrixView{nullptr, 0, n, 1};
  return cpu::product_call({problem.batch, m, n, k}, dtype, mat1, mat2, {}, {nullptr, n * m, n, 1});
}

void check_task(const Task& task, const IsaShape& isa, int threads) {
  const VectorShape& vector = isa.vector;
  const Conv2dProblem& p = task.call->problem;
  const ConvGemm* const g = task.gemm;
  begin_part(std::string("tiling: ") + short_name(task.driver));
  switch (task.driver) {
    case Driver::kDot: {
      const DotBlocking k = block_dot(*g, isa.dot.width, vector.limits);
      const DotTiling t = tile_dot(*g, k, isa.dot, threads);
      expect_cut(g->batch, t.images, t.blocks_n, "images");
      expect_cut(g->m, t.rows, t.blocks_m, "rows");
      // Blocks of K end where a chain ends.
      expect(t.depth > 0 && (t.depth >= k.products || t.depth % (k.chain * isa.dot.width) == 0), "whole chains");
      return expect_scratch(lay_out_scratch(t, isa.dot).bytes);
    }
    case Driver::kRows:
    case Driver::kColumns: {
      const Along along = task.rows->along;
      const RowTiling t = tile_rows(*task.rows, threads);
      expect_cut(task.rows->results, t.results, t.blocks_r, "results");
      expect_cut(task.rows->lanes, t.lanes, t.blocks_l, "lanes");
      const int64_t step = row_results(t.results, along);
      expect(step == 1 || step == 2 || step == 4 || step == 6 || step == (along == Along::kK ? 8 : 3),
             "a compiled number of results");
      return expect_scratch(lay_out_scratch(*task.rows, t, vector.element_size).bytes);
    }
    case Driver::kStrided: {
      const StridedTiling t = tile_strided(p, vector, threads);
      expect_cut(p.in_h, t.tile_rows, t.tiles_h, "rows");
      expect_cut(div_up(p.in_w, 2), t.tile_pairs, t.tiles_w, "pairs of columns");
      expect(t.tile_rows % p.stride_h == 0, "whole rounds of the phases");
      for (int64_t row = 0; row < p.in_h; row += t.tile_rows) {
        const Interval met = met_outputs(p.rows(), p.kernel_h, row, min64(t.tile_rows, p.in_h - row));
        expect(met.count() <= t.patch_rows, "rows of the patch");
      }
      return expect_scratch(lay_out_scratch(t, p, vector).bytes);
    }
    case Driver::kPhases: {
      const PhasesTiling t = tile_phases(*task.phases, vector, threads);
      expect_cut(task.phases->gemm[0].batch, t.tile_images, t.tiles_n, "images");
      expect_cut(task.phases->most_rows(), t.tile_rows, t.tiles_h, "rows of the phases");
      expect(t.tile_images == 1 || t.tiles_h == 1, "only whole images together");
      const ConvGemm& first = task.phases->gemm[0];
      const bool over_groups = task.phases->over_groups;
      expect_cut(over_groups ? first.m : div_up(first.m, vector.lanes), t.chunk_vectors, t.chunks_m, "result channels");
      expect(!over_groups || t.chunks_m == 1, "all channels of a vector of groups");
      expect(t.group_blocks == div_up(first.groups, over_groups ? vector.lanes : 1), "groups");
      return expect_scratch(lay_out_scratch(t, *task.phases, vector).bytes);
    }
    case Driver::kAmx:
      return check_amx_tiling(*g, isa.amx, threads);
    case Driver::kPairsOfGroups:
      return check_conv_tiling(*g, isa.pairs, true, threads);
    case Driver::kPairs:
      return check_conv_tiling(*g, isa.pairs, false, threads);
    case Driver::kWinograd: {
      const WinogradTiling t = tile_winograd(*g, vector, threads);
      expect_cut(g->batch, t.tile_images, t.tiles_n, "images");
      expect_cut(g->rows, t.tile_rows, t.tiles_h, "rows");
      expect_cut(g->cols, t.tile_cols, t.tiles_w, "columns");
      expect_cut(t.tiles(), t.run, t.runs, "runs of tiles");
      expect_cut(div_up(g->m, vector.lanes), t.chunk_vectors, t.chunks_m, "result channels");
      expect((t.tile_rows % 2 == 0 || t.tiles_h == 1) && (t.tile_cols % 2 == 0 || t.tiles_w == 1), "whole squares");
      expect(t.tile_images == 1 || (t.tiles_h == 1 && t.tiles_w == 1), "only whole images together");
      const int64_t squares = t.tile_images * ((t.tile_rows + 1) / 2) * ((t.tile_cols + 1) / 2);
      expect(t.squares == squares, "squares of a tile");
      const int64_t chains = pieces_of(g->channels, vector.limits.products == 64 ? 32 : 16);
      expect(t.chain == pieces_of(g->channels, chains), "chains of near-equal length");
      expect(t.block_channels == g->channels || t.block_channels % t.chain == 0, "blocks of whole chains");
      expect(t.staged_channels == g->channels || t.staged_channels % vector.lanes == 0, "whole vectors of channels");
      return expect_scratch(lay_out_scratch(t, *g, vector).bytes);
    }
    case Driver::kGroups:
      return check_conv_tiling(*g, vector, true, threads);
    case Driver::kGemm:
      return check_conv_tiling(*g, vector, false, threads);
    case Driver::kDepthwise: {
      const DepthwiseTiling t = tile_depthwise(*g, vector, size_of(task.call->dtype), threads);
      expect_cut(g->groups / vector.lanes, t.block_vectors, t.blocks, "vectors of groups");
      expect_cut(g->batch, t.tile_images, t.tiles_n, "images");
      expect_cut(g->rows, t.tile_rows, t.tiles_h, "rows");
      expect_cut(g->cols, t.tile_cols, t.tiles_w, "columns");
      const int64_t widest = min64(g->groups, (t.block_vectors + 1) * vector.lanes - 1);
      const int64_t pixels =
          saturating_mul(patch_size(g->axis_h, t.tile_rows, g->taps_h), patch_size(g->axis_w, t.tile_cols, g->taps_w));
      expect(t.in_place == (t.patch_elements == 0), "a patch, or none");
      expect(!t.in_place || may_read_in_place(*g, vector, size_of(task.call->dtype)), "zeros at the edges");
      expect(
          t.in_place || saturating_mul(pixels, odd_lines_of_channels(widest, vector.element_size)) <= t.patch_elements,
          "room for the patch");
      return expect_scratch(lay_out_scratch(t, *g, vector).bytes);
    }
    case Driver::kPlanes: {
      const FewPlanesTiling t = tile_few_planes(*g, vector, size_of(task.call->dtype), threads);
      expect_cut(g->cols, t.run, t.runs, "pixels");
      return expect_scratch(scratch_bytes(*g, t, vector));
    }
    case Driver::kPixels: {
      const KBlocking k = block_k(*g, vector.limits);
      const PixelTiling t = tile_pixel_conv(*g, k, vector, size_of(task.call->dtype), threads);
      expect(t.tile_images == 1 && t.tiles_n == g->batch, "images");
      expect_cut(g->rows, t.tile_rows, t.tiles_h, "rows");
      expect_cut(g->cols, t.tile_cols, t.tiles_w, "columns");
      expect_cut(g->m, t.chunk_m, t.chunks_m, "result channels");
      if (t.by_columns) {
        const int64_t run = round_up(t.tile_cols, vector.lanes), results = row_results(t.chunk_m, Along::kK);
        expect(!t.join_rows && !t.direct && t.patch_elements == 0, "no patch, sums in scratch");
        expect(t.c_elements >= (t.tile_rows * t.chunk_m + results - t.chunk_m) * run, "room for surplus results");
        expect(t.weight_depth == g->channels || (t.weight_in_place() && g->weight_c == 1), "all weights of a result");
      }
      return expect_scratch(lay_out_scratch(t, k, vector).bytes);
    }
    case Driver::kWeightAmx:
      return check_weight_tiling(*task.call, isa.amx, WeightLanes::kChannels, threads);
    case Driver::kWeightPairs:
      return check_weight_tiling(*task.call, isa.pairs, WeightLanes::kChannels, threads);
    case Driver::kWeightDepthwise:
      return check_weight_tiling(*task.call, vector, WeightLanes::kInnerGroups, threads);
    case Driver::kWeightGroups:
      return check_weight_tiling(*task.call, vector, WeightLanes::kGroups, threads);
    case Driver::kWeightTransposed:
    case Driver::kWeightGemm:
      return check_weight_tiling(*task.call, vector, WeightLanes::kChannels, threads);
    case Driver::kPadding:
      return;
  }
}

// Ordinary problems: tests/cpu_host/planning.cpp has those of any size.
void check_tilings() {
  Random random(2);
  for (int n = 0; n < 6000; ++n) {
    Conv2dProblem p{};
    const bool depthwise = random.once_in(3), pointwise = random.once_in(4), one_pixel = random.once_in(6);
    p.groups = depthwise ? random.between(1, 200) : random.once_in(3) ? random.between(1, 40) : 1;
    const int64_t most = random.once_in(3) ? 700 : 20;
    p.in_channels = p.groups * (depthwise ? 1 : random.between(1, most));
    p.out_channels = p.groups * (depthwise ? 1 : random.between(1, most));
    const bool few_planes = pointwise && !depthwise && random.once_in(3);
    if (few_planes)
      p.out_channels = p.groups * random.between(1, 6), p.in_channels = p.groups * random.between(20, 300);
    p.batch = random.once_in(2) ? 1 : random.between(1, 70);
    p.kernel_h = pointwise ? 1 : random.between(1, random.once_in(9) ? 30 : 5);
    p.kernel_w = pointwise ? 1 : random.between(1, random.once_in(9) ? 30 : 5);
    const bool steps = !pointwise || random.once_in(3);
    p.stride_h = steps ? random.between(1, 3) : 1;
    p.stride_w = steps ? random.between(1, 3) : 1;
    p.dilation_h = random.once_in(5) ? random.between(1, 9) : 1;
    p.dilation_w = random.once_in(5) ? random.between(1, 9) : 1;
    const bool winograd = !pointwise && !depthwise && random.once_in(6);
    if (winograd) p.kernel_h = p.kernel_w = 3, p.stride_h = p.stride_w = p.dilation_h = p.dilation_w = 1;
    if (!pointwise) p.pad_top = p.pad_bottom = random.between(0, 2), p.pad_left = p.pad_right = random.between(0, 2);
    const int64_t reach_h = (p.kernel_h - 1) * p.dilation_h + 1, reach_w = (p.kernel_w - 1) * p.dilation_w + 1;
    const int64_t extent = few_planes || random.once_in(4) ? 250 : 30;
    p.out_h = one_pixel ? 1 : random.between(1, extent);
    p.out_w = one_pixel ? 1 : random.between(1, extent);
    p.in_h = (p.out_h - 1) * p.stride_h + reach_h - p.pad_top - p.pad_bottom;
    p.in_w = (p.out_w - 1) * p.stride_w + reach_w - p.pad_left - p.pad_right;
    if (p.in_h < 1 || p.in_w < 1) continue;
    const bool last = random.once_in(2);
    constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kComplex64};
    const DType dtype = kDTypes[random.between(0, 3)];
    const TensorView input = dense_view({p.batch, p.in_channels, p.in_h, p.in_w}, last);
    const TensorView output = dense_view({p.batch, p.out_channels, p.out_h, p.out_w}, last);
    const TensorView weight = dense_view({p.out_channels, p.in_channels_per_group(), p.kernel_h, p.kernel_w}, last);
    Call calls[] = {{Direction::kForward, p, dtype, input, weight, output},
                    {Direction::kGradInput, p, dtype, output, weight, input},
                    {Direction::kGradWeight, p, dtype, output, input, weight},
                    product_call(p, dtype)};
    const int64_t bytes = 16 << random.between(0, 2), element = max64(4, size_of(dtype));
    const bool native = dtype != DType::kComplex64 && bytes > 16;
    IsaShape isa{};
    isa.vector = {dtype == DType::kComplex64 ? bytes / 4 : bytes / element, !native ? 1 : bytes / 16, element, native,
                  chain_limits(bytes > 16)};
    isa.dot = {isa.vector.lanes,
               64 / element,
               element,
               size_of(dtype),
               bytes == 64   ? 8
               : bytes == 32 ? 6
                             : 3,
               bytes == 64 ? 6 : 3,
               bytes == 64   ? 4
               : bytes == 32 ? 2
                             : 1};
    const bool has_amx = bytes == 64 && random.once_in(2);
    isa.has_pairs = dtype == DType::kBFloat16 && bytes == 64 && !has_amx;
    isa.has_amx = dtype == DType::kBFloat16 && has_amx;
    isa.amx = {16, 2, 4, true, amx_limits(), kBlockChannels};
    isa.pairs = isa.vector;
    isa.pairs.limits = pair_limits();
    isa.pairs.step = 2;
    const int threads = int(random.once_in(2) ? random.between(1, 4) : random.between(1, 64));
    for (Call& call : calls) {
      describe(
          "direction %d, dtype %d, %d x %d x %d x %d to %d x %d x %d, %d x %d taps, groups %d, strides %d, %d, %d "
          "threads, %d bytes",
          int(call.direction), int(dtype), int(p.batch), int(p.in_channels), int(p.in_h), int(p.in_w),
          int(p.out_channels), int(p.out_h), int(p.out_w), int(p.kernel_h), int(p.kernel_w), int(p.groups),
          int(p.stride_h), int(p.stride_w), threads, int(bytes));
      const std::string now = report().now;
      normalize(call);
      call.allow_winograd = winograd;
      for_each_task(call, isa, threads, [&](const Task& task) {
        report().now = now;
        check_task(task, isa, threads);
      });
    }
  }
}

void check_scratch() {
  begin_part("scratch");
  constexpr int64_t kBytes = 4096;
  const uint64_t first = new_scratch_owners(2), second = first + 1;
  expect(new_scratch_owners(1) > second, "owners of their own");
  describe("owners one after the other");
  void* const memory = thread_scratch(kBytes, first).memory;
  *static_cast<char*>(memory) = 1;
  const OwnedScratch again = thread_scratch(kBytes, first);
  expect(again.kept && again.memory == memory && *static_cast<char*>(memory) == 1, "kept for its owner");
  expect(!thread_scratch(kBytes, second).kept, "not for another one");
  expect(!thread_scratch(kBytes, first).kept, "nor when another one had it meanwhile");
  thread_scratch(kBytes);
  expect(!thread_scratch(kBytes, first).kept, "nor when nobody owned it");
  bool kept = true;
  std::thread([&] { kept = thread_scratch(kBytes, first).kept; }).join();
  expect(!kept, "nor on another thread");
}

// Shared weights beside a C tile of all result channels: the many, the few, and those between that just fit.
void check_shared_weights() {
  begin_part("shared weights of AMX");
  const VectorShape vector{16, 2, 4, true, amx_limits(), kBlockChannels};
  Random random(77);
  for (int n = 0; n < 4000; ++n) {
    ConvGemm g{};
    g.groups = random.between(1, 12);
    g.m = random.between(1, random.once_in(2) ? 10000 : 600);
    g.channels = random.between(1, 8);
    g.taps_h = g.taps_w = random.once_in(4) ? 3 : 1;
    g.batch = random.between(1, 3);
    g.rows = g.source_h = random.between(1, 40);
    g.cols = g.source_w = random.between(1, 400);
    g.per_step = kBlockChannels;
    g.axis_h = g.axis_w = {1, 0, 1};
    const int64_t all = g.groups * g.channels * kBlockChannels, results = g.groups * g.m;
    g.source_c = kBlockChannels;
    g.source_col = all;
    g.source_row = all * g.source_w;
    g.source_n = g.source_row * g.source_h;
    g.destination_m = 1;
    g.destination_col = results;
    g.destination_row = results * g.cols;
    g.destination_n = g.destination_row * g.rows;
    const int threads = int(random.between(1, 4));
    describe("%d groups of %d to %d channels, %d x %d taps, %d x %d pixels, %d threads", int(g.groups), int(g.channels),
             int(g.m), int(g.taps_h), int(g.taps_w), int(g.rows), int(g.cols), threads);
    check_amx_tiling(g, vector, threads);
  }
}

// Weight gradients of kernels with many taps on images in channels_last: few tiles of many weights, so that threads
// share pixels.
void check_image_weights() {
  begin_part("weights of images");
  VectorShape vectors[] = {{16, 4, 4, true, chain_limits(true)}, {16, 4, 4, true, pair_limits()}};
  vectors[1].step = 2;
  Random random(78);
  for (int n = 0; n < 40000; ++n) {
    Conv2dProblem p{};
    p.batch = random.between(1, 8);
    p.groups = p.dilation_h = p.dilation_w = 1;
    p.in_channels = random.between(1, 5);
    p.out_channels = random.between(1, 1400);
    p.kernel_h = random.between(6, 24);
    p.kernel_w = random.once_in(3) ? random.between(6, 24) : p.kernel_h;
    p.stride_h = p.stride_w = random.between(p.kernel_h / 2, p.kernel_h);
    p.out_h = random.between(1, 40);
    p.out_w = random.between(1, 40);
    p.in_h = (p.out_h - 1) * p.stride_h + p.kernel_h;
    p.in_w = (p.out_w - 1) * p.stride_w + p.kernel_w;
    const bool pairs = random.once_in(2);
    const int threads = int(random.between(1, 24));
    const Call call{Direction::kGradWeight,
                    p,
                    pairs ? DType::kBFloat16 : DType::kFloat32,
                    dense_view({p.batch, p.out_channels, p.out_h, p.out_w}, true),
                    dense_view({p.batch, p.in_channels, p.in_h, p.in_w}, true),
                    dense_view({p.out_channels, p.in_channels, p.kernel_h, p.kernel_w}, true)};
    describe("%d images of %d channels to %d, %d x %d taps, stride %d, to %d x %d pixels, %d threads, pairs %d",
             int(p.batch), int(p.in_channels), int(p.out_channels), int(p.kernel_h), int(p.kernel_w), int(p.stride_h),
             int(p.out_h), int(p.out_w), threads, pairs);
    check_weight_tiling(call, vectors[pairs ? 1 : 0], WeightLanes::kChannels, threads);
  }
}

// A 1x1 kernel over an image of one row, in planes; weights whose k are neighbours.
ConvGemm planar_gemm(int64_t m, int64_t channels, int64_t pixels) {
  ConvGemm g{};
  g.groups = g.batch = 1;
  g.m = m;
  g.channels = channels;
  g.taps_h = g.taps_w = g.rows = g.source_h = g.per_step = g.source_col = g.destination_col = 1;
  g.cols = g.source_w = g.source_row = g.source_c = g.destination_row = g.destination_m = pixels;
  g.source_n = pixels * channels;
  g.destination_n = pixels * m;
  g.weight_c = 1;
  g.weight_m = channels;
  g.axis_h = g.axis_w = {1, 0, 1};
  return g;
}

// Planes of whole lines, read in place by vectors of a line: a panel leaves two ways of each of L1's 64 sets free,
// where these have 12 and more; else its first lines leave half of eight. Counted line by line. Not those of which
// panels take all of K.
void check_panels_in_place() {
  begin_part("panels in place");
  const int64_t ways = sysconf(_SC_LEVEL1_DCACHE_SIZE) / 4096;
  const int64_t most = ways >= 12 ? ways - 2 : 4, counted = ways >= 12 ? kMaxPanelVectors : 1;
  Random random(78);
  for (int n = 0; n < 4000; ++n) {
    const VectorShape vector{16, 4, 4, true, chain_limits(true)};
    const int64_t lines = random.between(1, 6) << random.between(0, 7);
    ConvGemm g = planar_gemm(random.between(pixel_rows(vector) + 1, 300), random.between(1, 200), 16 * lines);
    g.destination_col = random.between(1, 2);  // with gaps sums are not formed in the result
    const KBlocking k = block_k(g, vector.limits);
    describe("%d to %d channels, planes of %d lines", int(g.channels), int(g.m), int(lines));
    const bool in_place = reads_pixels_in_place(g, k, vector, 4);
    if (takes_whole_planes(g, k, vector, 4)) {
      expect(in_place, "whole planes are read in place");
      continue;
    }
    int64_t sets[64] = {};
    for (int64_t channel = 0; channel < k.segment_channels; ++channel) {
      for (int64_t line = 0; line < counted; ++line) ++sets[(lines * channel + line) % 64];
    }
    expect(!in_place || *std::max_element(sets, sets + 64) <= most, "ways are left");
    expect(in_place || k.segment_channels > most, "few rows are read in place");
  }
}

// The panels of a run of pixels cover it, and only of whole planes the last one begins before the one before has ended:
// it then ends with the run.
void check_pixel_panels() {
  begin_part("panels of a run");
  Random random(79);
  for (int n = 0; n < 4000; ++n) {
    const VectorShape vector{16, 4, 4, true, chain_limits(true)};
    const int64_t run = random.between(1, 400), rows = random.between(1, pixel_rows(vector));
    PixelTiling tiling{};
    tiling.whole_planes = random.once_in(2);
    describe("%d pixels, %d rows, whole planes %d", int(run), int(rows), tiling.whole_planes);
    const Panels panels = cut_run(tiling, run, rows, vector);
    expect(panels.start(panels.count) == div_up(run, vector.lanes), "all vectors are in a panel");
    expect(panels.size(0) <= pixel_panel_vectors(rows, vector), "a micro-kernel has the first panel's width");
    if (!tiling.whole_planes || run < vector.lanes) continue;
    const int64_t last = panels.count - 1, begin = run - panels.size(last) * vector.lanes;
    expect(begin >= 0, "the last panel begins within the run");
    expect(last > 0 || begin == 0, "a single panel is full");
  }
}

// Whole planes: source and result lie as they should, and a tile copies few weights, of all channels.
void check_whole_planes() {
  begin_part("whole planes");
  Random random(80);
  int whole = 0;
  for (int n = 0; n < 4000; ++n) {
    const VectorShape vector{16, 4, 4, true, chain_limits(true)};
    ConvGemm g = planar_gemm(random.between(1, 600), random.between(1, 2500), random.between(1, 4000));
    if (random.once_in(2)) {
      g.weight_c = g.m;
      g.weight_m = 1;
    }
    const KBlocking k = block_k(g, vector.limits);
    const int threads = int(random.between(1, 24));
    describe("%d to %d channels, %d pixels, %d threads", int(g.channels), int(g.m), int(g.cols), threads);
    const PixelTiling t = tile_pixel_conv(g, k, vector, 4, threads);
    if (!t.whole_planes) continue;
    ++whole;
    expect(t.source_in_place && t.direct && !k.has_chunks(), "read and summed in place");
    expect(t.weight_depth == (g.weight_c == 1 ? 0 : g.channels), "all of K of a row's weights");
    expect(t.chunk_m * t.weight_depth * 4 <= limits::tiling::kWholeWeightBytes, "few weights are copied");
    const auto panel_of = [&](int64_t m) {
      return pixel_panel_vectors(cut_panels(m, pixel_rows(vector)).size(0), vector) * 16;
    };
    const int64_t panel = panel_of(g.m), lines = panel / 16 + (g.source_c % 16 != 0 ? 1 : 0);
    expect(t.tile_cols == g.cols || t.tile_cols % panel == 0 || t.tile_cols < panel, "whole panels");
    expect(g.channels * lines * 64 <= limits::tiling::kWholePanelBytes, "a panel stays in L2");
    expect(g.channels * min64(g.source_c * 4, 4096) <= limits::tiling::kWholePageBytes, "its pages stay in the TLB");
    const int64_t run_bytes = t.panels_at_once * g.channels * panel_of(t.chunk_m) * 4,
                  l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
    expect(t.panels_at_once >= 1, "some panels at once");
    expect(run_bytes <= max64(limits::tiling::kWholeRunBytes, l2 / 2) || t.panels_at_once == (l2 == 0 ? 4 : 1),
           "all result channels read the same panels from L2");
  }
  expect(whole > 500 || sysconf(_SC_LEVEL1_DCACHE_SIZE) / 4096 < 12, "there are such tilings");
}

}  // namespace

int main() {
  check_panels_in_place();
  check_pixel_panels();
  check_whole_planes();
  check_shared_weights();
  check_image_weights();
  check_scratch();
  check_order_of_k();
  check_order_of_pixels();
  check_other_rules();
  check_order_of_products();
  check_patch_axes();
  check_padding_classes();
  check_filled_vectors();
  check_panels();
  check_tilings();
  return finish();
}
