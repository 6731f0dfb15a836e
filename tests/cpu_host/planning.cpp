// Plans random problems as the CPU engines do, and computes none of them: sizes, paddings, strides and dilations up to
// 2^63, every shape of vectors, every driver that takes a GEMM. Compiled with -fsanitize=undefined and
// CONV2D_EXT_DEBUG, so that a product or sum that overflows ends it. What is checked beside that:
//  * a thread's scratch, and its share of the call's workspace, stay within their bounds;
//  * bands are those that one finds position by position, tap by tap.
//
// Usage: planning SEED COUNT. Prints the largest scratch of each driver, or the problem that fails.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "../../csrc/cpu/base/limits.h"
#include "../../csrc/cpu/plan/candidates.h"
#include "../../csrc/cpu/plan/tile_amx.h"
#include "../../csrc/cpu/plan/tile_depthwise.h"
#include "../../csrc/cpu/plan/tile_gemm.h"
#include "../../csrc/cpu/plan/tile_one_pixel.h"
#include "../../csrc/cpu/plan/tile_phases.h"
#include "../../csrc/cpu/plan/tile_pixels.h"
#include "../../csrc/cpu/plan/tile_planes.h"
#include "../../csrc/cpu/plan/tile_winograd.h"

namespace {

using namespace conv2d_ext;
using namespace conv2d_ext::cpu;
using Wide = __int128;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
constexpr int64_t kPartialBytes = int64_t{1} << 20;  // a thread's share of the workspace
static_assert(limits::kMaxScratchBytes + kPartialBytes <= int64_t{4} << 20, "what the README promises");

struct Strides {
  int64_t stride[4];
};

struct Draw {
  Conv2dProblem problem;
  DType dtype;
  int threads;
  bool winograd;
  Strides input, weight, output, grad_input, grad_weight;
};

// What the instruction sets have; the last two take bfloat16 in pairs and in AMX tiles.
struct Isa {
  int vector_bytes;
  bool has_pairs, has_amx;
};
constexpr Isa kIsas[] = {{16, false, false}, {32, false, false}, {64, true, false}, {64, false, true}};
IsaShape shapes_of(DType dtype, const Isa& isa) {
  int vector_bytes = isa.vector_bytes;
  const int64_t storage = size_of(dtype);
  const bool narrow = dtype == DType::kBFloat16 || dtype == DType::kFloat16;
  const bool native = narrow || dtype == DType::kFloat32 || dtype == DType::kFloat64;
  const bool complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  const int64_t element = narrow ? 4 : storage == 1 ? 2 : storage;
  if (!native) vector_bytes = complex || vector_bytes > 16 ? 32 : 16;
  const int64_t vectors = vector_bytes == 64 ? 4 : vector_bytes == 32 && native ? 2 : 1;
  const bool is_native = native && vector_bytes > 16;
  const VectorShape vector{vector_bytes / element, vectors, element, is_native, chain_limits(vector_bytes > 16)};
  const int64_t single = vector_bytes == 64 ? 8 : vector_bytes == 32 ? 6 : 3, rows = vector_bytes == 64 ? 6 : 3;
  IsaShape shape{};
  shape.vector = vector;
  shape.dot = {vector.lanes, 64 / element, element, single, rows, vector_bytes == 64 ? 4 : vector_bytes == 32 ? 2 : 1};
  shape.has_pairs = dtype == DType::kBFloat16 && isa.has_pairs;
  shape.pairs = vector;
  shape.pairs.limits = pair_limits();
  shape.pairs.step = 2;
  shape.has_amx = dtype == DType::kBFloat16 && isa.has_amx;
  shape.amx = {16, 2, 4, true, amx_limits(), kBlockChannels};
  return shape;
}

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t between(int64_t low, int64_t high) { return low + int64_t(engine_() % (uint64_t(high) - uint64_t(low) + 1)); }
  bool once_in(int64_t n) { return between(1, n) == 1; }
  // Any order of magnitude up to `most`.
  int64_t magnitude(int64_t most) {
    const int64_t bits = between(0, 62);
    return std::min(most, std::max<int64_t>(1, kHuge >> (62 - bits)) - between(0, 3) % 2);
  }

 private:
  std::mt19937_64 engine_;
};

// Kinds of problems that drivers of their own take.
enum class Style { kAny, kPointwise, kOnePixel, kFarRow, kStrided, kWinograd, kImage, kNarrowGroups };

// One axis: false where it makes no convolution.
bool draw_axis(Random& random, Style style, bool is_row, int64_t& in, int64_t& out, int64_t& kernel, int64_t& stride,
               int64_t& before, int64_t& after, int64_t& dilation) {
  if (style != Style::kAny && style != Style::kNarrowGroups) {
    before = after = 0;
    stride = dilation = 1;
    if (style == Style::kPointwise || style == Style::kOnePixel) {
      in = random.between(1, style == Style::kPointwise ? 400 : 20);
      kernel = style == Style::kPointwise ? 1 : in;
    } else if (style == Style::kFarRow) {  // of many taps, far apart
      kernel = is_row ? random.between(150, 256) : random.between(1, 2) % 2 + 1;
      dilation = is_row ? random.between(1, 200) : 1;
      in = (kernel - 1) * dilation + random.between(1, 30000);
    } else if (style == Style::kWinograd) {
      kernel = 3;
      in = random.once_in(8) ? random.between(1, 100000) : random.between(3, 200);
      before = random.between(0, 3);
      after = random.between(0, 3);
      out = in + before + after - 2;
      return out > 0;
    } else if (style == Style::kImage) {  // many taps of few channels
      kernel = random.between(8, 40);
      stride = random.between(1, kernel);
      in = kernel + random.between(0, 300);
    } else {  // the phases of columns together
      kernel = is_row ? random.between(2, 20) : random.once_in(8) ? random.between(1, 100000) : random.between(1, 8);
      stride = is_row ? 2 : kernel;
      in = kernel + random.between(0, 200);
    }
    out = (in - (kernel - 1) * dilation - 1) / stride + 1;
    return true;
  }
  const bool huge = random.once_in(6);
  in = std::max<int64_t>(1, huge && random.once_in(3) ? random.magnitude(kHuge) : random.between(1, 80));
  if (random.once_in(12)) in = random.between(1, 40000);
  const int64_t kernels[] = {1, 1, 2, 3, 3, 5, 7, 16, 17, 150, 256, 300, 2000};
  kernel = kernels[random.between(0, 12)];
  if (random.once_in(40)) kernel = std::max<int64_t>(1, random.magnitude(kHuge));
  stride = std::max<int64_t>(1, huge && random.once_in(2) ? random.magnitude(kHuge) : random.between(1, 4));
  dilation = std::max<int64_t>(1, huge && random.once_in(2) ? random.magnitude(kHuge)
                                  : random.once_in(3)       ? random.between(1, 200)
                                                            : random.between(1, 2));
  before = huge && random.once_in(2) ? random.magnitude(kHuge) : random.between(0, 3);
  after = huge && random.once_in(2) ? random.magnitude(kHuge) : random.between(0, 3);
  const Wide extent = Wide(kernel - 1) * dilation + 1;
  Wide missing = extent - (Wide(in) + before + after);
  if (missing > kHuge) return false;
  if (missing > 0) {  // what the dilated kernel needs
    missing += random.between(0, 70);
    const int64_t half = int64_t(missing / 2);
    const Wide more_before = random.once_in(2) ? half : random.once_in(2) ? 0 : int64_t(missing);
    if (before + more_before > kHuge || after + missing - more_before > kHuge) return false;
    before += int64_t(more_before);
    after += int64_t(missing - more_before);
  }
  const Wide padded = Wide(in) + before + after;
  if (padded > kHuge || extent > padded) return false;
  out = int64_t((padded - extent) / stride) + 1;
  return true;
}

bool bytes_fit(std::initializer_list<int64_t> sizes, int64_t itemsize) {
  Wide bytes = itemsize;
  for (const int64_t size : sizes) {
    bytes *= size;
    if (bytes > kHuge) return false;
  }
  return true;
}

Strides channels_last(int64_t c, int64_t h, int64_t w) { return {{c * h * w, 1, w * c, c}}; }

Strides dense(Random& random, int64_t n, int64_t c, int64_t h, int64_t w, bool may_expand) {
  Strides s{{c * h * w, h * w, w, 1}};
  if (random.once_in(2)) s = channels_last(c, h, w);
  for (int d = 0; d < 4 && may_expand; ++d) {
    if (random.once_in(10)) s.stride[d] = 0;
  }
  // Whatever stands for the stride of a dimension that has none.
  const int64_t sizes[] = {n, c, h, w};
  for (int d = 0; d < 4; ++d) {
    if (sizes[d] == 1 && random.once_in(20)) s.stride[d] = random.magnitude(kHuge);
  }
  return s;
}

bool draw(Random& random, Draw& d) {
  Conv2dProblem& p = d.problem;
  constexpr DType kDTypes[] = {DType::kFloat32,   DType::kFloat32, DType::kFloat64,    DType::kBFloat16,
                               DType::kComplex64, DType::kInt8,    DType::kComplex128, DType::kInt64};
  d.dtype = kDTypes[random.between(0, 7)];
  d.threads = int(random.between(1, 5));
  if (random.once_in(5)) d.threads = int(random.between(1, 192));
  const auto count = [&](int64_t usual) {
    return random.once_in(25) ? std::max<int64_t>(1, random.magnitude(kHuge)) : random.between(1, usual);
  };
  p.groups = random.once_in(2) ? 1 : count(70);
  const Style style = random.once_in(12)   ? Style::kPointwise
                      : random.once_in(12) ? Style::kOnePixel
                      : random.once_in(30) ? Style::kFarRow
                      : random.once_in(30) ? Style::kStrided
                      : random.once_in(30) ? Style::kWinograd
                      : random.once_in(15) ? Style::kImage
                      : random.once_in(15) ? Style::kNarrowGroups
                                           : Style::kAny;
  const bool many = style == Style::kWinograd, image = style == Style::kImage, narrow = style == Style::kNarrowGroups;
  const bool depthwise =
      (random.once_in(2) && !many && !image && !narrow) || style == Style::kFarRow || style == Style::kStrided;
  if (narrow) {  // in channels_last, of channels that are transposed in registers
    d.dtype = random.once_in(2) ? DType::kBFloat16 : d.dtype;
    p.groups = count(200);
  }
  if (image) {  // few tiles for many threads, which share the pixels
    d.dtype = random.once_in(2) ? DType::kBFloat16 : d.dtype;
    d.threads = int(random.between(1, 16));
  }
  const int64_t in_channels = depthwise ? 1
                              : image   ? random.between(1, 5)
                              : narrow  ? int64_t{4} << random.between(0, 2)
                                        : count(many                ? 2100
                                                : random.once_in(2) ? 600
                                                                    : 5);
  const int64_t out_channels = depthwise ? 1
                               : image   ? random.between(1, 1400)
                               : narrow  ? int64_t{8} << random.between(0, 1)
                                         : count(many || random.once_in(2) ? 600 : 5);
  d.winograd = many || random.once_in(2);
  if (Wide(p.groups) * in_channels > kHuge || Wide(p.groups) * out_channels > kHuge) return false;
  p.in_channels = p.groups * in_channels;
  p.out_channels = p.groups * out_channels;
  p.batch = image ? random.between(1, 12) : random.once_in(3) ? count(300) : 1;
  if (!draw_axis(random, style, false, p.in_h, p.out_h, p.kernel_h, p.stride_h, p.pad_top, p.pad_bottom,
                 p.dilation_h) ||
      !draw_axis(random, style, true, p.in_w, p.out_w, p.kernel_w, p.stride_w, p.pad_left, p.pad_right, p.dilation_w)) {
    return false;
  }
  const int64_t size = size_of(d.dtype);
  if (!bytes_fit({p.batch, p.in_channels, p.in_h, p.in_w}, size) ||
      !bytes_fit({p.batch, p.out_channels, p.out_h, p.out_w}, size) ||
      !bytes_fit({p.out_channels, in_channels, p.kernel_h, p.kernel_w}, size)) {
    return false;
  }
  d.input = dense(random, p.batch, p.in_channels, p.in_h, p.in_w, true);
  d.output = dense(random, p.batch, p.out_channels, p.out_h, p.out_w, true);
  d.weight = dense(random, p.out_channels, in_channels, p.kernel_h, p.kernel_w, true);
  d.grad_input = dense(random, p.batch, p.in_channels, p.in_h, p.in_w, false);
  d.grad_weight = dense(random, p.out_channels, in_channels, p.kernel_h, p.kernel_w, false);
  if (narrow) {
    d.input = d.grad_input = channels_last(p.in_channels, p.in_h, p.in_w);
    d.output = channels_last(p.out_channels, p.out_h, p.out_w);
  }
  return true;
}

// A product of matrices with the draw's batch, channels and row of pixels; either factor's elements may lie along k.
Call product_call(const Draw& d) {
  const int64_t k = d.problem.in_channels_per_group(), n = d.problem.out_channels_per_group();
  const int64_t m = std::min<int64_t>(d.problem.out_w, 64);
  // Matrices with a gap between them are not joined.
  const ConstMatrixView mat1{nullptr, k * m + 1, k, 1};
  const ConstMatrixView mat2 = d.threads % 2 ? ConstMatrixView{nullptr, 0, 1, k} : ConstMatrixView{nullptr, 0, n, 1};
  return cpu::product_call({d.problem.batch, m, n, k}, d.dtype, mat1, mat2, {}, {nullptr, n * m, n, 1});
}

// ---- checks

const Draw* now = nullptr;
std::map<std::string, int64_t> largest;

[[noreturn]] void fail(const std::string& what) {
  const Conv2dProblem& p = now->problem;
  std::printf("%s\n  dtype %d, %d threads, input %" PRId64 " x %" PRId64 " x %" PRId64 " x %" PRId64 ", weight %" PRId64
              " x %" PRId64 " x %" PRId64 " x %" PRId64 ", groups %" PRId64 ", stride %" PRId64 " %" PRId64
              ", padding %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 ", dilation %" PRId64 " %" PRId64 "\n",
              what.c_str(), int(now->dtype), now->threads, p.batch, p.in_channels, p.in_h, p.in_w, p.out_channels,
              p.in_channels_per_group(), p.kernel_h, p.kernel_w, p.groups, p.stride_h, p.stride_w, p.pad_top,
              p.pad_bottom, p.pad_left, p.pad_right, p.dilation_h, p.dilation_w);
  std::exit(1);
}

void check_scratch(const char* driver, int64_t bytes) {
  int64_t& most = largest[driver];
  most = std::max(most, bytes);
  if (bytes < 0 || bytes > limits::kMaxScratchBytes) {
    fail(std::string(driver) + ": " + std::to_string(bytes) + " bytes of scratch");
  }
}

void plan_gemm(const char* driver, const ConvGemm& g, bool over_groups, const Draw& d, const VectorShape& vector) {
  const KBlocking k = block_k(g, vector.limits);
  check_scratch(driver, lay_out_scratch(tile_conv(g, k, vector, over_groups, d.threads), k, vector).bytes);
}

void plan_amx(const ConvGemm& g, const Draw& d, const VectorShape& vector) {
  const KBlocking k = block_k(g, vector.limits);
  const AmxTiling t = tile_amx(g, k, vector, d.threads);
  const int64_t scratch = lay_out_scratch(t, k, vector).bytes;
  check_scratch("amx", scratch);
  const int64_t shared = (t.shared_bytes + d.threads - 1) / d.threads;
  largest["amx, shared weights"] = std::max(largest["amx, shared weights"], shared);
  if (shared < 0 || shared > kPartialBytes) fail(std::to_string(shared) + " bytes of shared weights a thread");
}

void plan_weight(const Call& call, const Draw& d, const VectorShape& vector, WeightLanes lanes) {
  const Conv2dProblem& p = call.problem;
  const PixelBlocking pixels = block_pixels(p, vector.limits);
  const WeightTiling t = tile_grad_weight(call, pixels, vector, lanes, d.threads);
  check_scratch("grad_weight", lay_out_scratch(t, pixels, vector).bytes);
  const int64_t partials = (partial_bytes(t, vector) + d.threads - 1) / d.threads;
  largest["partials"] = std::max(largest["partials"], partials);
  if (partials < 0 || partials > kPartialBytes) fail(std::to_string(partials) + " bytes of partials a thread");
}

void plan_task(const Task& task, const Draw& d, const IsaShape& isa) {
  const VectorShape& vector = isa.vector;
  const Conv2dProblem& p = task.call->problem;
  switch (task.driver) {
    case Driver::kDot: {
      const DotBlocking k = block_dot(*task.gemm, isa.dot.width, vector.limits);
      return check_scratch("dots", lay_out_scratch(tile_dot(*task.gemm, k, isa.dot, d.threads), isa.dot).bytes);
    }
    case Driver::kRows:
    case Driver::kColumns: {
      const Along along = task.rows->along;
      const RowTiling t = tile_rows(*task.rows, d.threads);
      const char* const name = along == Along::kK ? "columns" : "rows";
      return check_scratch(name, lay_out_scratch(*task.rows, t, vector.element_size).bytes);
    }
    case Driver::kStrided:
      return check_scratch("strided", lay_out_scratch(tile_strided(p, vector, d.threads), p, vector).bytes);
    case Driver::kPhases: {
      const PhasesTiling t = tile_phases(*task.phases, vector, d.threads);
      return check_scratch("phases", lay_out_scratch(t, *task.phases, vector).bytes);
    }
    case Driver::kAmx:
      return plan_amx(*task.gemm, d, isa.amx);
    case Driver::kPairsOfGroups:
      return plan_gemm("conv, pairs of groups", *task.gemm, true, d, isa.pairs);
    case Driver::kPairs:
      return plan_gemm("conv, pairs", *task.gemm, false, d, isa.pairs);
    case Driver::kWinograd: {
      const WinogradTiling t = tile_winograd(*task.gemm, vector, d.threads);
      return check_scratch("winograd", lay_out_scratch(t, *task.gemm, vector).bytes);
    }
    case Driver::kDepthwise: {
      for (const ConvGemm* const g : {task.gemm, task.whole}) {
        if (g == nullptr) continue;
        const DepthwiseTiling t = tile_depthwise(*g, vector, size_of(d.dtype), d.threads);
        check_scratch("depthwise", lay_out_scratch(t, *g, vector).bytes);
      }
      return;
    }
    case Driver::kGroups:
      return plan_gemm("conv, groups", *task.gemm, true, d, vector);
    case Driver::kPlanes:
      return check_scratch(
          "few planes",
          scratch_bytes(*task.gemm, tile_few_planes(*task.gemm, vector, size_of(d.dtype), d.threads), vector));
    case Driver::kPixels: {
      const KBlocking k = block_k(*task.gemm, vector.limits);
      const PixelTiling t = tile_pixel_conv(*task.gemm, k, vector, size_of(d.dtype), d.threads);
      return check_scratch(t.by_columns ? "pixels, by columns" : "pixels", lay_out_scratch(t, k, vector).bytes);
    }
    case Driver::kGemm:
      return plan_gemm("conv", *task.gemm, false, d, vector);
    case Driver::kWeightAmx:
      return plan_weight(*task.call, d, isa.amx, WeightLanes::kChannels);
    case Driver::kWeightPairs:
      return plan_weight(*task.call, d, isa.pairs, WeightLanes::kChannels);
    case Driver::kWeightDepthwise:
      return plan_weight(*task.call, d, vector, WeightLanes::kInnerGroups);
    case Driver::kWeightGroups:
      return plan_weight(*task.call, d, vector, WeightLanes::kGroups);
    case Driver::kWeightTransposed:
    case Driver::kWeightGemm:
      return plan_weight(*task.call, d, vector, WeightLanes::kChannels);
    case Driver::kPadding:
      return;
  }
}

// ---- bands, position by position

struct Axis {
  GatherAxis axis;
  int64_t taps, positions, size;
};
struct FoundBand {
  int64_t first, positions, first_tap, taps;
};
std::vector<FoundBand> bands_of(const Axis& a, int64_t& inside) {
  std::vector<FoundBand> bands;
  for (int64_t q = 0; q < a.positions; ++q) {
    FoundBand band{q, 1, 0, 0};
    for (int64_t tap = 0; tap < a.taps; ++tap) {
      const int64_t coordinate = a.axis.source(q, tap);
      if (coordinate < 0 || coordinate >= a.size) continue;
      if (band.taps++ == 0) band.first_tap = tap;
    }
    inside += band.taps;
    if (!bands.empty() && bands.back().first_tap == band.first_tap && bands.back().taps == band.taps) {
      ++bands.back().positions;
    } else {
      bands.push_back(band);
    }
  }
  return bands;
}
// The GEMMs that axes h and v make, as (rows, cols, taps, origins): what visits are compared with.
using Pieces = std::vector<std::vector<int64_t>>;
bool add_pieces(const Axis& h, const Axis& v, Pieces& pieces) {
  int64_t inside_h = 0, inside_v = 0;
  std::vector<FoundBand> rows = bands_of(h, inside_h), cols = bands_of(v, inside_v);
  const double share = double(inside_h) / (double(h.positions) * double(h.taps)) *
                       (double(inside_v) / (double(v.positions) * double(v.taps)));
  const bool cut = share < 0.85 && h.positions * v.positions >= 64 * int64_t(rows.size()) * int64_t(cols.size());
  if (!cut) {
    rows = {{0, h.positions, 0, h.taps}};
    cols = {{0, v.positions, 0, v.taps}};
  }
  for (const FoundBand& row : rows) {
    for (const FoundBand& col : cols) {
      const bool met = row.taps > 0 && col.taps > 0;
      pieces.push_back({row.positions, col.positions, met ? row.taps : 0, met ? col.taps : 0,
                        h.axis.source(row.first, row.first_tap), v.axis.source(col.first, col.first_tap)});
    }
  }
  return cut;
}
std::vector<int64_t> piece_of(const ConvGemm& g) {
  return {g.rows, g.cols, g.taps_h, g.taps_w, g.axis_h.origin, g.axis_w.origin};
}

void check_bands(const Conv2dProblem& p, const Call& forward, const Call& grad_input) {
  const auto costs = [](int64_t a, int64_t b) { return Wide(a) * b; };
  constexpr int64_t kMost = 20000;
  if (costs(p.out_h, p.kernel_h) > kMost || costs(p.out_w, p.kernel_w) > kMost || costs(p.in_h, p.kernel_h) > kMost ||
      costs(p.in_w, p.kernel_w) > kMost) {
    return;
  }
  Pieces expected, found;
  const bool cut =
      add_pieces({p.rows(), p.kernel_h, p.out_h, p.in_h}, {p.cols(), p.kernel_w, p.out_w, p.in_w}, expected);
  largest["bands"] += cut;
  if (for_each_band(forward_gemm(forward), forward.dtype, [&](const ConvGemm& g) { found.push_back(piece_of(g)); }) !=
      cut) {
    fail("forward: other decision on bands");
  }
  if (cut && found != expected) fail("forward: other bands");
  if (p.out_h == 1 && p.out_w == 1) return;
  expected.clear();
  found.clear();
  bool any_cut = false;
  const auto first_taps = [](int64_t kernel, int64_t stride, int64_t dilation) {
    return std::min(kernel, grad_input_tap_step(stride, dilation));
  };
  for (int64_t i = 0; i < first_taps(p.kernel_h, p.stride_h, p.dilation_h); ++i) {
    const GradInputPhase h = grad_input_phase(i, p.in_h, p.kernel_h, p.stride_h, p.pad_top, p.dilation_h);
    for (int64_t j = 0; j < first_taps(p.kernel_w, p.stride_w, p.dilation_w); ++j) {
      const GradInputPhase v = grad_input_phase(j, p.in_w, p.kernel_w, p.stride_w, p.pad_left, p.dilation_w);
      if (h.positions == 0 || v.positions == 0) continue;
      any_cut = add_pieces({h.axis, h.taps, h.positions, p.out_h}, {v.axis, v.taps, v.positions, p.out_w}, expected) ||
                any_cut;
    }
  }
  if (any_cut != grad_input_cuts_bands(p)) fail("grad_input: other decision on bands");
  largest["bands"] += any_cut;
  bool zeros = false, patch_layers = false;
  for_each_grad_input_gemm(grad_input, [&](const ConvGemm& g) {
    patch_layers = patch_layers || g.result_taps() > 1;
    found.push_back(piece_of(g));
  });
  zeros = found.size() > expected.size();
  if (patch_layers) return;
  if (zeros) found.erase(found.begin());
  if (found != expected) fail("grad_input: other bands");
}

void plan(const Draw& d) {
  // GEMMs of a call that are planned; the others are like these.
  constexpr int kMostGemms = 40;
  const Conv2dProblem p = with_bounded_strides(d.problem);
  const auto view = [](const Strides& s) {
    return ConstTensorView{nullptr, {s.stride[0], s.stride[1], s.stride[2], s.stride[3]}};
  };
  const auto result = [](const Strides& s) {
    return TensorView{nullptr, {s.stride[0], s.stride[1], s.stride[2], s.stride[3]}};
  };
  is_small(p);
  check_bands(p, {Direction::kForward, p, d.dtype, view(d.input), view(d.weight), result(d.output)},
              {Direction::kGradInput, p, d.dtype, view(d.output), view(d.weight), result(d.grad_input)});
  const int64_t taps_h = std::min(p.kernel_h, grad_input_tap_step(p.stride_h, p.dilation_h));
  const int64_t taps_w = std::min(p.kernel_w, grad_input_tap_step(p.stride_w, p.dilation_w));
  const bool few_phases = Wide(taps_h) * taps_w <= 10000 && Wide(p.kernel_h) * p.kernel_w <= 10000000;
  // Deciding on bands takes a step for each tap or position of an axis, whichever are fewer.
  constexpr int64_t kMostSteps = 100000;
  const bool few_steps = std::min(p.kernel_h, p.out_h) <= kMostSteps && std::min(p.kernel_w, p.out_w) <= kMostSteps;
  Call calls[] = {{Direction::kForward, d.problem, d.dtype, view(d.input), view(d.weight), result(d.output)},
                  {Direction::kGradInput, d.problem, d.dtype, view(d.output), view(d.weight), result(d.grad_input)},
                  {Direction::kGradWeight, d.problem, d.dtype, view(d.output), view(d.input), result(d.grad_weight)},
                  product_call(d)};
  for (const Isa& set : kIsas) {
    const IsaShape isa = shapes_of(d.dtype, set);
    for (Call call : calls) {
      if (call.direction == Direction::kGradInput && !few_phases) continue;
      if (call.direction == Direction::kForward && !few_steps) continue;
      normalize(call);
      call.allow_winograd = d.winograd;
      struct Enough {};
      int tasks = 0;
      try {
        for_each_task(call, isa, d.threads, [&](const Task& task) {
          if (tasks++ == kMostGemms) throw Enough{};
          plan_task(task, d, isa);
        });
      } catch (Enough) {
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  Random random(std::strtoull(argv[1], nullptr, 10));
  const int64_t count = std::atoll(argv[2]);
  for (int64_t done = 0; done < count;) {
    Draw d{};
    if (!draw(random, d)) continue;
    now = &d;
    plan(d);
    ++done;
  }
  for (const auto& [name, value] : largest) std::printf("%s: %" PRId64 "\n", name.c_str(), value);
}
