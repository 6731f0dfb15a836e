#include "candidates.h"

#include <algorithm>
#include <iterator>

#include "../base/limits.h"
#include "patch_axis.h"
#include "tile_depthwise.h"
#include "tile_pixels.h"
#include "tile_planes.h"
#include "tile_winograd.h"

namespace conv2d_ext::cpu {

namespace {

namespace few_planes = limits::few_planes;
namespace one_pixel = limits::one_pixel;

const char* const kRowsApart = "the weight's rows don't lie as the result's";
const char* const kFewerLanesAtWork = "vectors over a group's channels have more lanes at work";
const char* const kFewItems = "threads would idle: a group's channels make more work items";
const char* const kFilled = "a group's channels fill vectors, which groups would do no better";

// A sum so short that the transposition of results takes a good part of the time.
constexpr int64_t kShortSum = 64;

// ---- candidates for a GEMM ----------------------------------------------------------------------------------------
// Each returns nullptr where it accepts, else why not.

// The rows of a product of matrices, for kRows and kColumns.
const char* refuse_few_rows(const ConvGemm& g, const VectorShape& vector, int64_t most) {
  if (!vector.is_native) return kNotCompiled;
  if ((g.batch != 1 && g.cols != 1) || g.destination_m != 1) return "rows that follow no single stride, or lie apart";
  if (g.starts_from_bias()) return "a sum that starts from its bias";
  return g.batch * g.cols <= most ? nullptr : "from so many rows on packing the other factor pays";
}

const char* refuse_columns(const ConvGemm& g, const VectorShape& vector) {
  if (const char* const reason = refuse_few_rows(g, vector, one_pixel::kMostColumnRows)) return reason;
  if (g.missing != 0) return "an odd number of products, which are taken in pairs";
  return g.weight_c == g.per_step ? nullptr : "the other factor doesn't lie along k";
}

const char* refuse_rows(const ConvGemm& g, const VectorShape& vector) {
  if (!vector.is_native) return kNotCompiled;
  if (g.is_matmul) {
    if (const char* const reason = refuse_few_rows(g, vector, one_pixel::kMostProductRows)) return reason;
    return g.weight_m == 1 ? nullptr : kRowsApart;
  }
  if (!g.is_gradient || g.taps() != 1 || g.rows != 1 || g.cols != 1 || g.source_h != 1 || g.source_w != 1) {
    return "neither the gradient of one output pixel nor a product of matrices";
  }
  if (g.m == 1 && g.channels == 1 && g.groups > 1) return "one product a result: vectors over groups";
  if (g.weight_m != 1 || g.destination_m != 1 || g.channels == 0) return kRowsApart;
  const bool far = g.channels * g.m >= one_pixel::kFarWeights;
  return g.batch <= (far ? one_pixel::kMaxRowImagesFar : one_pixel::kMaxRowImages)
             ? nullptr
             : "from this batch on packing the weight pays";
}

const char* refuse_depthwise(const ConvGemm& g, const VectorShape& vector) {
  if (!vector.is_native) return kNotCompiled;
  if (g.m != 1 || g.channels != 1) return "a group has several channels";
  if (g.groups < vector.lanes) return "fewer groups than a vector has lanes";
  if (g.source_c != 1 || g.destination_m != 1) return "groups don't lie side by side";
  const bool one_segment = g.taps() > 0 && g.taps() <= kMaxSegment && g.source_h > 0 && g.source_w > 0;
  return one_segment ? nullptr : "the taps make several segments, or none";
}

const char* refuse_groups(const ConvGemm& g, const VectorShape& vector, int num_threads) {
  const bool side_by_side = g.source_c == 1 && g.destination_m == 1;
  if (g.result_taps() != 1 || !lanes_are_groups(g.groups, g.m, g.channels, vector)) return kFewerLanesAtWork;
  if (side_by_side && g.m > 1 && g.taps() == 0) return "zeros, which are stored as they are";
  if (g.m % vector.lanes != 0) return nullptr;
  if (fills_wide_vectors(g.groups, g.m, g.taps(), side_by_side, vector)) return kFilled;
  return occupies(num_threads, g.groups, g.batch * g.pixels(), vector) ? nullptr : kFewItems;
}

// The same of bfloat16 pairs, whose channels and groups are moved two words at a time.
const char* refuse_groups_of_pairs(const ConvGemm& g, const VectorShape& vector, int num_threads) {
  if (!lanes_are_groups(g.groups, g.m, g.channels, vector)) return kFewerLanesAtWork;
  const bool together = g.source_c == 1 && g.destination_m == 1 && can_interleave(g.m) && g.taps() > 0;
  const bool in_words = g.channels % 2 == 0 && can_interleave(g.channels / 2) && g.source_n % 2 == 0 &&
                        g.source_row % 2 == 0 && g.source_col % 2 == 0;
  if (!together || !in_words) return "channels of groups are not interleaved in words of two";
  // (Phases scatter their results, which whole groups make up for.)
  const int64_t taps = g.is_phase ? max64(g.taps(), 2) : g.taps();
  if (fills_wide_vectors(g.groups, g.m, taps, /*side_by_side=*/true, vector)) return kFilled;
  return occupies(num_threads, g.groups, g.batch * g.pixels(), vector) ? nullptr : kFewItems;
}

const char* refuse_planes(const ConvGemm& g, DType dtype, const VectorShape& vector) {
  if (!vector.is_native) return kNotCompiled;
  if (g.m > kMostFewPlanes || g.channels < 2) return "more than four result channels, or one source channel";
  if (!reads_whole_planes(g) || g.destination_col != 1 || g.result_taps() != 1) {
    return "not a 1x1 kernel on whole planes";
  }
  const int64_t storage_size = size_of(dtype), plane_bytes = g.cols * storage_size;
  const char* const kSmall = "small planes do as well with panels of pixels";
  if (storage_size != vector.element_size) return plane_bytes >= few_planes::kLeastWidenedPlaneBytes ? nullptr : kSmall;
  const int64_t source_bytes = saturating_mul(g.channels, plane_bytes);
  if (plane_bytes < few_planes::kLeastPlaneBytes || source_bytes < few_planes::kLeastSourceBytes) return kSmall;
  // With vectors of 64 bytes panels are fast enough for what caches deliver, unless there is one result channel.
  const bool panels_keep_up = vector.is_wide() && g.m > 1;
  const bool in_caches = saturating_mul(g.batch, g.groups, source_bytes) < few_planes::kLeastStreamedBytes;
  return panels_keep_up && in_caches ? "panels of pixels are faster where the source lies in caches" : nullptr;
}

const char* refuse_pixels(const ConvGemm& g, DType dtype, const VectorShape& vector) {
  if (!vector.is_native) return kNotCompiled;
  // Along a row the pixels of a patch are neighbours unless there are taps that a stride skips between.
  const bool neighbours = g.axis_w.step == 1 || g.taps_w == 1;
  const int64_t depth = g.channels * g.taps();
  if (!neighbours) return "pixels of a row are not neighbours in the patch";
  if (depth == 0 || g.result_taps() != 1) return "no products, or the result is taps";
  if (goes_by_columns(g, block_k(g, vector.limits), vector, size_of(dtype))) return nullptr;
  const bool pointwise = g.taps() == 1;
  const int64_t run = pointwise ? g.rows * g.cols : g.cols;
  // Sums in flight: more rows than these gain nothing where they are of one vector, since each multiply-add has a load;
  // of several vectors these are enough.
  constexpr int64_t kMostRows = 6;
  const int64_t rows = cut_panels(g.m, min64(pixel_rows(vector), kMostRows)).size(0);
  const int64_t sums = rows * min64(pixel_panel_vectors(rows, vector), div_up(run, vector.lanes));
  const double over_pixels = vector.filled(run) * std::min(1.0, double(sums) / double(kSumsInFlight));
  const int64_t parts = vector.halves_pay && !pointwise ? 2 : 1;
  const double over_channels = vector.filled(parts * g.m);
  const char* const kDearer = "vectors over result channels are estimated to be faster";
  if (g.source_c == 1 && g.channels > 1 && g.source_col != 1) {
    // Where a pixel's channels lie together, as in channels_last, a planar patch is a transposition: it takes the time
    // of one product for about 8 bytes of a vector, and all taps share it. Measured for 1x1 and 3x3 kernels.
    const double transposition = double(vector.bytes()) / 8.0 / vector.filled(g.channels);
    const double here = double(g.m) / (over_pixels * 0.85) + transposition / double(g.taps());
    return here < double(g.m) / over_channels ? nullptr : kDearer;
  }
  // Pixels whose result channels lie together are stored by transposition here, and as they are there. From many source
  // channels that is no more than what it costs to store them (above); from one it takes most of the time.
  if (g.channels == 1 && g.destination_m == 1 && g.m >= vector.lanes) return kDearer;
  // Vectors over pixels pack no weights and transpose no results, which counts where sums are short. In longer ones of
  // a 1x1 kernel it does where the source is read in place, or where its planes are a multiple of 4 KiB apart, so that
  // they fall into one set of L1 whoever copies them; else the copy costs as much. Panels that take all of K at once
  // also store their sums once. With several taps vectors over pixels load across cache lines, and reload what
  // neighbouring taps share.
  const int64_t size = size_of(dtype);
  const bool same_type = size == vector.element_size, short_sum = depth <= kShortSum;
  double advantage = 0.9;
  if (short_sum && (same_type || g.axis_w.step == 1 || !pointwise)) {
    advantage = 1.1;
  } else if (pointwise) {
    const bool one_set = g.axis_w.step == 1 && saturating_mul(g.source_c, size) % 4096 == 0;
    const KBlocking k = block_k(g, vector.limits);
    // With vectors of 32 bytes and less, and of so many pixels, it does wherever planes lie (float32 and float64).
    constexpr int64_t kLeastPixels = 512;
    const bool copies_well =
        !vector.is_wide() && same_type && g.axis_w.step == 1 && g.destination_col == 1 && run >= kLeastPixels;
    advantage = takes_whole_planes(g, k, vector, size)                                ? 1.2
                : one_set || copies_well || reads_pixels_in_place(g, k, vector, size) ? 1.05
                                                                                      : 1.0;
  }
  // A single vector of result channels costs a load for each product. With AVX-512 and float32 that shows, against
  // pixels that fill theirs.
  const bool one_wide_vector = same_type && g.m <= vector.lanes && vector.lanes == 16;
  return over_pixels * advantage > over_channels * (one_wide_vector ? 0.88 : 1.0) ? nullptr : kDearer;
}

// Whether a step of a GEMM's sums takes a pair of products, or an AMX tile's 32.
bool in_pairs(const ConvGemm& gemm, const IsaShape& isa) { return isa.has_pairs && takes_pairs(gemm); }
bool in_tiles(const ConvGemm& gemm, const IsaShape& isa) { return isa.has_amx && takes_amx(gemm, gemm.axis_w); }

// The tasks of a call, on their way to a visitor.
struct Tasks {
  const Call& call;
  const IsaShape& isa;
  const int num_threads;
  const TaskVisitor& visitor;
  Refusals* const refusals;

  // Whether a candidate accepts.
  bool takes(Driver driver, const char* refusal) const {
    if (refusal != nullptr && refusals != nullptr) refusals->push_back({driver, refusal});
    return refusal == nullptr;
  }

  // The same of AMX. Where it is not there, or not used, no_amx says why, where that is worth saying.
  bool takes_amx_tiles(Driver driver, bool fits, const char* refusal) const {
    if (isa.no_amx != nullptr) return takes(driver, isa.no_amx);
    return isa.has_amx && takes(driver, fits ? nullptr : refusal);
  }

  void visit(Driver driver) const { visitor({driver, &call}); }
  void visit(Driver driver, const ConvGemm& gemm) const { visitor({driver, &call, &gemm}); }

  void visit_rows(const ConvGemm* gemm, const RowProducts& rows) const {
    Task task{rows.along == Along::kK ? Driver::kColumns : Driver::kRows, &call, gemm};
    task.rows = &rows;
    visitor(task);
  }

  void visit_depthwise(const ConvGemm& gemm) const {
    const ConvGemm met = has_phases_in_turn(call) ? gemm : without_unmet_taps(gemm, call.dtype, isa.vector.limits);
    Task task{Driver::kDepthwise, &call, &met};
    if (met.taps() < gemm.taps()) task.whole = &gemm;
    visitor(task);
  }

  // A GEMM of forward or grad_input, to the first that accepts it.
  void visit_candidate(const ConvGemm& gemm) const {
    const size_t of_the_call = refusals != nullptr ? refusals->size() : 0;
    give(gemm);
    if (refusals != nullptr) refusals->resize(of_the_call);
  }

 private:
  void give(const ConvGemm& gemm) const {
    const bool pairs = in_pairs(gemm, isa), amx = in_tiles(gemm, isa);
    const bool has_rows = !pairs && !amx && (gemm.is_gradient || gemm.is_matmul);
    if (has_rows && takes(Driver::kRows, refuse_rows(gemm, isa.vector))) {
      return visit_rows(&gemm, row_products(gemm, isa.vector.limits, Along::kLanes));
    }
    if (gemm.is_matmul && !amx) {
      const ConvGemm operands = pairs ? in_steps(gemm, 2) : gemm;
      if (takes(Driver::kColumns, refuse_columns(operands, isa.vector))) {
        const ChainLimits& limits = pairs ? isa.pairs.limits : isa.vector.limits;
        return visit_rows(&operands, row_products(operands, limits, Along::kK));
      }
    }
    if (takes_amx_tiles(Driver::kAmx, amx, "few channels, a patch layer, or one pixel")) {
      return visit(Driver::kAmx, in_blocks(join_rows_of_planes(gemm)));
    }
    if (pairs && takes(Driver::kPairsOfGroups, refuse_groups_of_pairs(gemm, isa.pairs, num_threads))) {
      return visit(Driver::kPairsOfGroups, in_steps(gemm, 2));
    }
    const char* const no_pairs = pairs ? nullptr : "few channels, a patch layer, one pixel, or phases of narrow groups";
    if (isa.has_pairs && takes(Driver::kPairs, no_pairs)) return visit(Driver::kPairs, in_steps(gemm, 2));
    if (call.allow_winograd) {
      if (takes(Driver::kWinograd, refuse_winograd(gemm, call.dtype))) return visit(Driver::kWinograd, gemm);
    } else if (refusals != nullptr && refuse_winograd(gemm, call.dtype) == nullptr) {
      takes(Driver::kWinograd, "not asked for: conv2d_ext.allow_winograd");
    }
    const ConvGemm joined = join_rows_of_planes(gemm);
    const VectorShape& vector = isa.vector;
    if (takes(Driver::kDepthwise, refuse_depthwise(joined, vector))) return visit_depthwise(joined);
    if (takes(Driver::kGroups, refuse_groups(joined, vector, num_threads))) return visit(Driver::kGroups, joined);
    if (takes(Driver::kPlanes, refuse_planes(joined, call.dtype, vector))) return visit(Driver::kPlanes, joined);
    if (takes(Driver::kPixels, refuse_pixels(joined, call.dtype, vector))) return visit(Driver::kPixels, joined);
    visit(Driver::kGemm, joined);
  }
};

void visit_forward(const Tasks& tasks) {
  const ConvGemm whole = forward_gemm(tasks.call);
  if (sums_as_dots(whole, tasks.call.dtype)) return tasks.visit(Driver::kDot, whole);
  if (tasks.isa.has_amx && multiplies_padding(whole, gathered_rows(whole), gathered_cols(whole)))
    return tasks.visit_candidate(whole);
  const bool in_bands =
      for_each_band(whole, tasks.call.dtype, [&](const ConvGemm& gemm) { tasks.visit_candidate(gemm); });
  if (in_bands) tasks.visit(Driver::kPadding);
}

const char* refuse_strided(const Conv2dProblem& p, const int64_t* result, const VectorShape& vector) {
  if (!vector.is_native) return kNotCompiled;
  if (p.in_channels_per_group() != 1 || p.out_channels_per_group() != 1) return "not depthwise";
  if (p.stride_w != 2 || result[3] != 1 || p.kernel_w < 2 || p.dilation_w % 2 == 0) {
    return "the stride along the row is not 2, or pixels are not neighbours";
  }
  if (p.in_w < div_up(vector.lanes, 2) || p.out_pixels() < 2) return "rows shorter than half a vector, or one output";
  const int64_t row_phases = grad_input_tap_step(p.stride_h, p.dilation_h);
  if (row_phases != p.stride_h || p.kernel_h < row_phases) return "a phase of the rows has no tap";
  // All taps of a phase have to make one chain, and none of them may be left out.
  ImageGemm phase{};
  phase.channels = 1;
  phase.taps_h = div_up(p.kernel_h, row_phases);
  phase.taps_w = div_up(p.kernel_w, 2);
  phase.is_gradient = true;
  if (block_k(phase, vector.limits).chain < phase.taps()) return "a phase's taps make several chains";
  // Tiles end beyond the last row and column, which must not lead beyond 2^63.
  constexpr int64_t kMostSide = int64_t{1} << 62;
  const int64_t most = limits::depthwise::kMaxStridedPatchBytes / vector.element_size;
  const char* const kTooLarge = "its patch would not fit a thread's scratch";
  if (p.in_h + p.pad_top + p.pad_bottom > kMostSide || p.in_w + p.pad_left + p.pad_right > kMostSide ||
      p.kernel_h > most) {
    return kTooLarge;
  }
  const StridedTiling t = tile_strided(p, vector, 1);
  if (saturating_mul(t.patch_rows, t.patch_pitch) > most) return kTooLarge;
  return grad_input_cuts_bands(p) ? "taps are left out in bands" : nullptr;
}

// Whether groups fill more lanes of their vectors than the pairs of columns of short rows do.
bool groups_fill_more(const Conv2dProblem& p, const VectorShape& vector) {
  return p.in_w < div_up(3 * vector.lanes, 2) && vector.filled(p.groups) > vector.filled(div_up(p.in_w, 2));
}

// Lanes that are gathered, or scattered.
const char* refuse_placed_lanes(const Conv2dProblem& p, const int64_t* weight) {
  if (p.batch > one_pixel::kMaxPlacedImages) return "from this batch on packing pays more than placing lanes";
  if (!has_dense_rows(p, weight)) return "a row of the weight is not one run";
  // Each item looks at all taps; and groups of one channel are better lanes themselves.
  const bool depthwise = p.groups > 1 && p.in_channels_per_group() == 1;
  if (p.taps() > one_pixel::kMostPlacedTaps || depthwise) return "many taps, or depthwise";
  return p.gemm_k() >= one_pixel::kLeastPlacedLanes ? nullptr : "few lanes in a row of the weight";
}

// Whether the input gradient of one output pixel scatters patches. Each tap would else be a GEMM of its own, which
// reads the weight's lines anew, unless they lie as rows.
bool scatters_patch(const Call& call, const VectorShape& vector) {
  const Conv2dProblem& p = call.problem;
  const int64_t *const weight = call.b.stride, *const grad_input = call.result.stride;
  if (p.out_pixels() != 1 || p.out_channels == 0 || !vector.is_native) return false;
  if (lies_as_a_row(p, grad_input, weight) || (weight[1] == 1 && grad_input[1] == 1)) return false;
  // Every input pixel meets a tap, and not too many taps lie in the padding.
  const int64_t met =
      taps_inside(p.rows(), p.kernel_h, p.in_h).count() * taps_inside(p.cols(), p.kernel_w, p.in_w).count();
  return met >= p.in_h * p.in_w && saturating_mul(3, met) >= p.taps() && refuse_placed_lanes(p, weight) == nullptr;
}

// Products in pairs and tiles have an order of their own, which phases that run together don't follow.
const char* refuse_phases_of_steps(const JoinedPhases& phases, const IsaShape& isa) {
  for (int f = 0; f < phases.count; ++f) {
    const ConvGemm& gemm = phases.gemm[f];
    if (in_pairs(gemm, isa)) return "bfloat16 products are taken in pairs";
    if (in_tiles(gemm, isa)) return "bfloat16 products are taken in AMX tiles";
  }
  return nullptr;
}

void visit_grad_input(const Tasks& tasks) {
  const Call& call = tasks.call;
  const VectorShape& vector = tasks.isa.vector;
  // No refusal where it doesn't: kRows may yet take the GEMMs of single taps, and explain would contradict itself.
  if (scatters_patch(call, vector)) {
    const ConvGemm patches = patch_gemm(call);
    return tasks.visit_rows(&patches, input_row_products(call, patches, vector.limits));
  }
  const char* const not_strided = refuse_strided(call.problem, call.result.stride, vector);
  const bool has_short_rows = not_strided == nullptr && groups_fill_more(call.problem, vector);
  if (!has_short_rows && tasks.takes(Driver::kStrided, not_strided)) return tasks.visit(Driver::kStrided);
  JoinedPhases phases;
  const char* refusal = join_phases(call, vector, tasks.num_threads, phases);
  if (refusal == nullptr) refusal = refuse_phases_of_steps(phases, tasks.isa);
  if (has_short_rows) {
    if (refusal != nullptr) return tasks.visit(Driver::kStrided);
    tasks.takes(Driver::kStrided, "groups fill more lanes than short rows do");
  }
  if (tasks.takes(Driver::kPhases, refusal)) {
    Task task{Driver::kPhases, &call};
    task.phases = &phases;
    return tasks.visitor(task);
  }
  for_each_grad_input_gemm(call, [&](const ConvGemm& gemm) { tasks.visit_candidate(gemm); });
}

const char* refuse_weight_rows(const Call& call, const VectorShape& vector) {
  const Conv2dProblem& p = call.problem;
  if (!vector.is_native) return kNotCompiled;
  if (p.out_h != 1 || p.out_w != 1 || p.batch == 0) return "not the gradient of one output pixel";
  if (p.batch > one_pixel::kMaxRowImages) return "from this batch on packing pays";
  if (lies_as_a_row(p, call.b.stride, call.result.stride)) return nullptr;
  return refuse_placed_lanes(p, call.result.stride);
}

const char* refuse_weight_depthwise(const Call& call, const VectorShape& vector) {
  const Conv2dProblem& p = call.problem;
  if (!vector.is_native) return kNotCompiled;
  if (p.out_channels_per_group() != 1 || p.in_channels_per_group() != 1) return "a group has several channels";
  if (p.groups < vector.lanes) return "fewer groups than a vector has lanes";
  if (!channels_are_neighbours(call)) return "groups don't lie side by side";
  return p.taps() <= kMaxSegment && p.in_h > 0 && p.in_w > 0 ? nullptr : "the taps make several segments, or none";
}

const char* refuse_weight_groups(const Call& call, const VectorShape& vector) {
  const Conv2dProblem& p = call.problem;
  const int64_t m = p.out_channels_per_group();
  if (!lanes_are_groups(p.groups, m, p.in_channels_per_group(), vector)) return kFewerLanesAtWork;
  return fills_wide_vectors(p.groups, m, p.taps(), channels_are_neighbours(call), vector) ? kFilled : nullptr;
}

const char* refuse_weight_transposed(const Call& call, const VectorShape& vector) {
  const Conv2dProblem& p = call.problem;
  const int64_t m = p.out_channels_per_group(), channels = p.in_channels_per_group();
  if (!vector.is_native) return kNotCompiled;
  if (p.groups != 1 || p.taps() != 1 || p.pad_top != 0 || p.pad_bottom != 0 || p.pad_left != 0 || p.pad_right != 0) {
    return "several groups or taps, or padding";
  }
  if (call.result.stride[1] != 1) return "the weight's input channels don't lie side by side";
  // Over few result channels most lanes are idle. With half a vector of them that costs more than packing the input;
  // with an eighth more than transposing its planes. Input channels have to fill vectors; those of planes half a one.
  const bool inner = channels_are_neighbours(call), enough = 2 * channels >= vector.max_vectors * vector.lanes;
  const bool fills = enough || (inner ? channels % vector.lanes == 0 : 2 * channels >= vector.lanes);
  if (fills && saturating_mul(m, inner ? 2 : 8) <= vector.lanes) return nullptr;
  if (!enough) return "too few input channels for vectors";
  // Of each pixel m - channels elements less are packed. A row of the weight, on the other hand, is stored in pieces,
  // and planes are dearer to transpose where each belongs to another pixel.
  const int64_t pixels = saturating_mul(p.batch, p.out_pixels()), least = inner ? 1 : 8;
  const bool pays = m > channels && saturating_mul(pixels, m - channels) >= saturating_mul(least, channels, m);
  return pays ? nullptr : "packing the gradient's channels costs no more than packing the input's";
}

void visit_grad_weight(const Tasks& tasks) {
  const Call& call = tasks.call;
  const VectorShape& vector = tasks.isa.vector;
  if (tasks.takes(Driver::kRows, refuse_weight_rows(call, vector))) {
    return tasks.visit_rows(nullptr, weight_row_products(call, vector.limits));
  }
  const char* const kTooFew = "few channels, or one output pixel";
  if (tasks.takes_amx_tiles(Driver::kWeightAmx, takes_amx_weight(call.problem), kTooFew)) {
    return tasks.visit(Driver::kWeightAmx);
  }
  const char* const no_pairs = takes_pairs_weight(call.problem) ? nullptr : kTooFew;
  if (tasks.isa.has_pairs && tasks.takes(Driver::kWeightPairs, no_pairs)) return tasks.visit(Driver::kWeightPairs);
  if (tasks.takes(Driver::kWeightDepthwise, refuse_weight_depthwise(call, vector))) {
    return tasks.visit(Driver::kWeightDepthwise);
  }
  if (tasks.takes(Driver::kWeightGroups, refuse_weight_groups(call, vector))) {
    return tasks.visit(Driver::kWeightGroups);
  }
  if (tasks.takes(Driver::kWeightTransposed, refuse_weight_transposed(call, vector))) {
    const Call other = transposed(call);
    return tasks.visitor(Task{Driver::kWeightTransposed, &other});
  }
  tasks.visit(Driver::kWeightGemm);
}

// Whether it is an input gradient with a stride.
bool has_phases(const Call& call) {
  return call.direction == Direction::kGradInput && (call.problem.stride_h > 1 || call.problem.stride_w > 1);
}

}  // namespace

const char* name_of(Driver driver) {
  // In the order of Driver. The last one, kPadding, runs after others and has no name.
  static const char* const kNames[] = {
      "one pixel, dot products along the weight's rows",
      "rows times factors",
      "columns times factors",
      "depthwise, vectors over the pixels of two phases",
      "implicit GEMM, the phases of the stride together",
      "implicit GEMM, AMX tiles of bfloat16",
      "implicit GEMM, vectors over groups, bfloat16 products in pairs",
      "implicit GEMM, vectors over result channels, bfloat16 products in pairs",
      "Winograd F(2x2, 3x3), vectors over result channels",
      "depthwise, vectors over groups as they lie in memory",
      "implicit GEMM, vectors over groups",
      "1x1 from many planes to few, plane by plane",
      "implicit GEMM, vectors over pixels",
      "implicit GEMM, vectors over result channels",
      "implicit GEMM, AMX tiles of bfloat16",
      "implicit GEMM, vectors over result channels, bfloat16 products in pairs",
      "depthwise, vectors over groups as they lie in memory",
      "implicit GEMM, vectors over groups",
      "implicit GEMM, vectors over input channels",
      "implicit GEMM, vectors over result channels",
  };
  static_assert(std::size(kNames) == size_t(Driver::kPadding));
  CONV2D_EXT_ASSERT(driver != Driver::kPadding);
  return kNames[int(driver)];
}

bool has_phases_in_turn(const Call& call) {
  const Conv2dProblem& p = call.problem;
  return has_phases(call) && p.in_channels_per_group() == 1 && p.out_channels_per_group() == 1;
}

int64_t images_in_turn(const Call& call, const IsaShape& isa, int num_threads) {
  const Conv2dProblem& p = call.problem;
  if (!has_phases(call) || has_phases_in_turn(call) || p.out_pixels() <= 1 || is_patch_layer(p)) return 0;
  const int64_t size = size_of(call.dtype);
  const int64_t image = saturating_mul(p.in_channels, p.in_h, saturating_mul(p.in_w, size));
  const int64_t images = max64(limits::phases::kResultBytes * num_threads / max64(image, 1), 1);
  const int64_t weights = saturating_mul(p.out_channels, p.in_channels_per_group(), saturating_mul(p.taps(), size));
  // Each time, weights are packed anew.
  if (images >= p.batch || weights > saturating_mul(images, image) / 4) return 0;
  int tasks = 0;
  for_each_task(call, isa, num_threads, [&](const Task&) { ++tasks; });
  return tasks > 1 ? even_piece(p.batch, images) : 0;
}

Call images_of(const Call& call, int64_t first, int64_t count) {
  Call images = call;
  images.problem.batch = count;
  images.a.data = behind(call.a.data, first * call.a.stride[0], call.dtype);
  images.result.data = behind(call.result.data, first * call.result.stride[0], call.dtype);
  return images;
}

void for_each_task(const Call& call, const IsaShape& isa, int num_threads, const TaskVisitor& visit,
                   Refusals* refusals) {
  const Tasks tasks{call, isa, num_threads, visit, refusals};
  switch (call.direction) {
    case Direction::kForward:
      return visit_forward(tasks);
    case Direction::kGradInput:
      return visit_grad_input(tasks);
    case Direction::kGradWeight:
      return visit_grad_weight(tasks);
  }
}

}  // namespace conv2d_ext::cpu
