// Which kernel a call takes, and how its work is laid out over the machine.
//
// Two kinds of decisions are made here and must not be mixed. What fixes bits (the engine, the order of k, segments and
// chains) reads the geometry of one image, the weight's shape and the dtype, for grad_weight also the batch. Everything
// else (tiles, whether segments get CTAs of their own, which way lanes run) may read the batch, strides, alignment and
// the machine as well, since it can't change a bit.
#include "plan.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>

#include "../checked_arithmetic.h"

namespace conv2d_ext::cuda {

namespace {

// ---- limits of the kernels' 32-bit fields

constexpr int64_t kMostSide = int64_t{1} << 30;
constexpr int64_t kMostItems = (int64_t{1} << 31) - 1;  // also of a grid's CTAs
constexpr const char* kTooManyItems = "the result is too large for one call on CUDA";

const char* size_error(const Conv2dProblem& p) {
  const int64_t sides[] = {p.in_h + p.pad_top + p.pad_bottom,
                           p.in_w + p.pad_left + p.pad_right,
                           p.out_h,
                           p.out_w,
                           p.pad_top,
                           p.pad_bottom,
                           p.pad_left,
                           p.pad_right,
                           p.stride_h,
                           p.stride_w,
                           p.dilation_h,
                           p.dilation_w};
  for (const int64_t side : sides)
    if (side >= kMostSide) return "an image, padded, must have fewer than 2^30 rows and columns on CUDA";
  if (std::max(p.in_channels, p.out_channels) > kMostItems) return "there must be fewer than 2^31 channels on CUDA";
  const int64_t channels = std::max(p.in_channels_per_group(), p.out_channels_per_group()) + kChannelGroup;
  if (p.kernel_h > kMostItems / p.kernel_w || channels > (kMostItems - kMostTileK) / p.taps())
    return "a sum must have fewer than 2^31 products on CUDA";
  return "";
}

// ---- what fixes bits

// A GEMM's narrowest tile has 32 rows. In complex128 a thread hasn't the registers for the sums of more than 4.
bool is_direct(int64_t m, int64_t groups, DType dtype) {
  return m <= (groups > 1 && dtype != DType::kComplex128 ? kMostDirectChannels : 4);
}

// Shorter segments would spend their time on beginning and ending. The GEMM's are at least a chain; the direct kernel's
// pixels are dealt out to kResidues.
constexpr int64_t kLeastGemmPixels = 256;
constexpr int64_t kLeastDirectPixels = 1024;
constexpr int64_t kWantedWeightTiles = 1024;

// Segments of a weight gradient: as many as keep a large machine busy and whose sums fit the workspace.
PixelSegments cut_weight_pixels(const Conv2dProblem& p, DType dtype, int64_t tiles, int64_t least_pixels) {
  const int64_t sums = saturating_mul(p.out_channels, p.in_channels_per_group() * p.taps(), sum_bytes(dtype));
  const int64_t fitting = kMaxWorkspaceBytes / std::max<int64_t>(sums, 1);
  return cut_pixels(p.batch * p.out_pixels(), least_pixels,
                    std::min(fitting, std::max<int64_t>(kWantedWeightTiles / tiles, 1)));
}

// ---- the machine

// Multiply-adds that an SM does in a cycle with a policy's kernels: the order of magnitude, for comparing tiles.
double products_per_cycle(DType dtype, Float32Math math) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
      return 1024;
    case DType::kFloat64:
      return 64;
    case DType::kComplex64:
      return 32;
    case DType::kComplex128:
      return 16;
    default:
      return math == Float32Math::kTF32 ? 512 : 128;
  }
}

// What a launch of a table's entry takes of an SM.
struct Footprint {
  int threads, ctas_per_sm, stages, shared_bytes;
};

Footprint footprint(const GemmKernel& kernel, bool vectors, int stages, bool several_chains) {
  return {vectors ? kernel.vector_threads : kernel.threads, vectors ? kernel.vector_ctas_per_sm : kernel.ctas_per_sm,
          stages, kernel.shared_bytes(stages, several_chains)};
}

// What the system takes of shared memory for itself, for each CTA.
constexpr int kReservedSharedBytes = 1024;

int resident_ctas(const Footprint& of, const Machine& machine) {
  const int fitting =
      (machine.shared_bytes_per_block + kReservedSharedBytes) / (of.shared_bytes + kReservedSharedBytes);
  return std::max(1, std::min(of.ctas_per_sm, fitting));
}

// Cycles of an SM for each copy from global to shared memory, of an element or of 16 bytes. Single elements of the
// im2col operand take half of it: so the timings have it, of one tap and of several, whichever way lanes run.
constexpr double kCopyCycles = 0.4;
// For each result: the sums go to memory through shared memory.
constexpr double kResultCycles = 0.5;
// A CTA begins with its tables and an empty ring.
constexpr double kCtaCycles = 1500;
// An SM is as fast as so many warps by themselves would be: each waits for its copies and products in turn.
constexpr double kWarpsOfSm = 3.3;
// A ring of two stages waits longer than a deeper one.
constexpr double kShallowWait = 1.1;

// Cycles that `items` CTAs of equal work take, with constants from timings on a machine of 132 SMs. Copies and products
// add up, since both are instructions of the same warps: larger tiles copy less for a product. An SM takes as long as
// its work lasts, or as its waves of resident CTAs wait; where these are alike, longer than either.
double estimate_cycles(const GemmKernel& kernel, const Footprint& of, const Machine& machine, double rate,
                       double copies, int64_t items, double k) {
  const int64_t per_sm = div_up(items, machine.sm_count);
  const int64_t waves = div_up(per_sm, resident_ctas(of, machine));
  const double results = static_cast<double>(kernel.tile_m) * kernel.tile_x;
  const double work = k * (results / rate + copies * kCopyCycles) + results * kResultCycles;
  const double wait = work * kWarpsOfSm / (of.threads / 32.0) * (of.stages < 3 ? kShallowWait : 1.0);
  return std::hypot(static_cast<double>(per_sm) * work, static_cast<double>(waves) * (wait + kCtaCycles));
}

// What another kernel beside the GEMM adds: its launch, and bytes that are written and read again.
double launch_cycles(int64_t bytes, const Machine& machine) {
  constexpr double kLaunchCycles = 9000, kBytesPerCycle = 12;  // the latter of an SM
  return kLaunchCycles + 2.0 * static_cast<double>(bytes) / (kBytesPerCycle * machine.sm_count);
}

// What comes first of two choices: the one with more of what the machine wants, then the faster one.
using Rank = std::pair<int, double>;

Rank rank_of(const Machine& machine, int variant, bool split, bool packed, double cycles) {
  const bool misses_variant = machine.wanted_variant >= 0 && variant != machine.wanted_variant;
  const bool misses_split = machine.wanted_split >= 0 && int{split} != machine.wanted_split;
  const bool misses_packed = machine.wanted_packed >= 0 && int{packed} != machine.wanted_packed;
  return {4 * misses_split + 2 * misses_variant + misses_packed, cycles};
}

const char* note_on_wants(const Plan& plan, const Machine& machine) {
  if (machine.wanted_variant < 0 && machine.wanted_split < 0 && machine.wanted_packed < 0) return "";
  if (plan.engine != Engine::kImplicitGemm) return "not taken: the call is no implicit GEMM";
  if (machine.wanted_split >= 0 && int{plan.split} != machine.wanted_split)
    return machine.wanted_split == 1 ? "not taken: K is one segment, or the segments' sums exceed the workspace"
                                     : "not taken: segments of pixels have CTAs of their own";
  if (machine.wanted_variant >= 0 && plan.variant != machine.wanted_variant)
    return "not taken: the kernel is for other calls, or needs more shared memory than there is";
  if (machine.wanted_packed >= 0 && int{plan.packed_row != 0} != machine.wanted_packed)
    return "not taken: only a weight of float32 with 8 channels a group or more is packed, where the workspace holds "
           "it and it can't be read 16 bytes at a time where it lies";
  return "taken";
}

// Of the process: the numbers of want(), 16 bits each, in one word, so that no thread sees parts of two.
std::atomic<uint64_t> process_wants{~uint64_t{0}};

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }
bool keeps_groups(int64_t values, int64_t stride_bytes) { return keeps_aligned(values, stride_bytes, 16); }

Plan base_plan(Direction direction, DType dtype, Float32Math math) {
  Plan plan{};
  plan.direction = direction;
  plan.engine = Engine::kNothing;
  plan.dtype = dtype;
  plan.math = dtype == DType::kFloat32 ? math : Float32Math::kIeee;
  plan.variant = -1;
  plan.segments = 1;
  plan.kernel = plan.refused = plan.wanted = plan.error = "";
  return plan;
}

// ---- one channel a group

// Whether a kernel compiled for `kernel` taps an axis has those of every phase: all of them, or every other one.
bool has_taps(const ConvCall& call, int kernel, int step) {
  for (const AxisPhase& rows : call.rows.phases)
    for (const AxisPhase& cols : call.cols.phases) {
      const auto is_half = [&](int32_t taps) {
        return step == 1 && (taps == more_taps(kernel) || taps == fewer_taps(kernel));
      };
      const bool is_whole = rows.taps == kernel && cols.taps == kernel;
      if (!is_whole && !(is_half(rows.taps) && is_half(cols.taps))) return false;
    }
  return true;
}

// Two groups a lane, where 4 bytes hold them everywhere.
bool pairs_groups(const ConvParams& p, const void* source) {
  return p.source_group == 2 && p.groups % 2 == 0 && reinterpret_cast<uintptr_t>(source) % 4 == 0 &&
         keeps_aligned(p.batch, p.source_n, 4) && keeps_aligned(p.source_rows, p.source_h, 4) &&
         keeps_aligned(p.source_cols, p.source_w, 4);
}

DepthwiseTiling depthwise_tiling(const ConvCall& call, DType dtype, const void* source, const Machine& machine) {
  const ConvParams& p = call.params;
  DepthwiseTiling tiling{};
  // Taps go down row by row, or up, as grad_input's do.
  const bool walks = (p.tap_h == 1 && p.step_h <= 2) || (p.tap_h == -1 && p.step_h == 1);
  if (p.m != 1 || p.channels != 1 || !walks) return tiling;
  tiling.step = p.step_h;
  for (const int kernel : {7, 5, 3})
    if (has_depthwise_kernel(dtype, kernel, 1) && has_taps(call, kernel, tiling.step)) tiling.kernel = kernel;
  if (tiling.kernel == 0) return tiling;
  tiling.lanes_are_groups = lies_over_channels(p.source_group, p.groups, p.source_w);
  const bool pairs =
      tiling.lanes_are_groups && has_depthwise_kernel(dtype, tiling.kernel, 2) && pairs_groups(p, source);
  tiling.vector = pairs ? 2 : 1;
  // The longer a thread walks, the more rows it shares; but every SM wants some thousand threads.
  constexpr int64_t kWantedThreads = 1024, kMostBandRows = 64;
  const int64_t columns = saturating_mul(p.batch, call.cols.most_positions, p.groups / tiling.vector);
  const int64_t phases = static_cast<int64_t>(call.rows.phases.size() * call.cols.phases.size());
  const int64_t rows = call.rows.most_positions;
  const int64_t fitting = saturating_mul(columns, rows, phases) / (kWantedThreads * machine.sm_count);
  const int64_t bands = div_up(rows, std::clamp<int64_t>(fitting, 1, kMostBandRows));
  tiling.band_rows = static_cast<int>(div_up(rows, bands));
  tiling.phase_blocks = div_up(saturating_mul(columns, bands), depthwise_threads());
  if (saturating_mul(tiling.phase_blocks, phases) > kMostItems) tiling.kernel = 0;
  return tiling;
}

void plan_direct_conv(Plan& plan, const ConvCall& call, const void* source, const Machine& machine) {
  const ConvParams& p = call.params;
  plan.engine = Engine::kDirect;
  plan.segments = 1;
  plan.segment_length = plan.gemm_k;
  plan.chain_length = std::min<int64_t>(plan.gemm_k, kDirectChain);
  plan.tile_k = 1;
  plan.depthwise = depthwise_tiling(call, plan.dtype, source, machine);
  const int64_t phases = static_cast<int64_t>(call.rows.phases.size() * call.cols.phases.size());
  if (plan.depthwise.kernel != 0) {
    plan.kernel = "depthwise_conv";
    plan.threads = depthwise_threads();
    plan.tile_m = plan.depthwise.vector;
    plan.tile_n = plan.threads * plan.depthwise.band_rows;
    plan.ctas = plan.depthwise.phase_blocks * phases;
    return;
  }
  plan.kernel = "direct_conv";
  const bool lanes_are_groups = lies_over_channels(p.source_group, p.groups, p.source_w);
  const int64_t pixels = call.params.batch * call.rows.most_positions * call.cols.most_positions;
  plan.tile_m = plan.gemm_m == 1 ? 1 : plan.gemm_m <= 4 ? 4 : kMostDirectChannels;
  plan.tile_n = direct_conv_pixels(lanes_are_groups);
  plan.threads = kDirectThreads;
  plan.ctas =
      saturating_mul(div_up(pixels, plan.tile_n), div_up(p.groups, direct_conv_groups(lanes_are_groups)), phases);
}

// ---- what copies of 16 bytes ask of the operands

struct OperandVectors {
  Vectors a, b;
  bool both() const { return a != Vectors::kNone && b != Vectors::kNone; }
};

// Whether all that a weight is indexed by beside its channels keeps groups of 16 bytes.
bool keeps_weight_groups(const ConvCall& call, const void* weight) {
  const ConvParams& p = call.params;
  bool fits = is_aligned(weight) && keeps_groups(call.rows.most_taps, p.weight_h) &&
              keeps_groups(call.cols.most_taps, p.weight_w) && keeps_groups(p.groups, p.weight_group);
  for (const AxisPlan* axis : {&call.rows, &call.cols})
    for (const AxisPhase& phase : axis->phases) fits = fits && phase.weight_offset % 16 == 0;
  return fits;
}

Vectors weight_vectors(const ConvCall& call, const void* weight) {
  const ConvParams& p = call.params;
  if (!keeps_weight_groups(call, weight)) return Vectors::kNone;
  if (p.weight_c == 2 && p.channels % kChannelGroup == 0 && keeps_groups(p.m, p.weight_m)) return Vectors::kOverK;
  if (p.weight_m == 2 && p.m % 8 == 0 && keeps_groups(p.channels, p.weight_c)) return Vectors::kOverX;
  return Vectors::kNone;
}

// Whether the columns of the GEMM are the pixels of whole images, in the order of memory and without gaps.
bool columns_are_pixels(const ConvCall& call, int64_t size) {
  const ConvParams& p = call.params;
  const auto is_whole = [](const AxisPlan& axis, int32_t size, int32_t step) {
    return axis.phases.size() == 1 && axis.most_taps == 1 && axis.phases[0].origin == 0 && axis.positions == size &&
           (size == 1 || step == 1);
  };
  return is_whole(call.rows, p.source_rows, p.step_h) && is_whole(call.cols, p.source_cols, p.step_w) &&
         (p.source_cols == 1 || p.source_w == size) &&
         (p.source_rows == 1 || p.source_h == size * int64_t{p.source_cols});
}

// The same, 16 bytes of neighbouring pixels at a time.
bool columns_are_vectors(const ConvCall& call, int64_t size) {
  const ConvParams& p = call.params;
  return columns_are_pixels(call, size) && int64_t{p.source_rows} * p.source_cols * size % 16 == 0 &&
         keeps_groups(p.channels, p.source_c);
}

Vectors source_vectors(const ConvCall& call, const void* source) {
  const ConvParams& p = call.params;
  if (!is_aligned(source) || !keeps_groups(p.batch, p.source_n) || !keeps_groups(p.groups, p.source_group))
    return Vectors::kNone;
  if (p.source_c == 2 && p.channels % kChannelGroup == 0 && keeps_groups(p.source_rows, p.source_h) &&
      keeps_groups(p.source_cols, p.source_w))
    return Vectors::kOverK;
  return columns_are_vectors(call, 2) ? Vectors::kOverX : Vectors::kNone;
}

// Forward and grad_input. Where the im2col operand is gathered, the dense one is too.
OperandVectors conv_vectors(const ConvCall& call, const void* source, const void* weight) {
  const Vectors b = source_vectors(call, source);
  if (b == Vectors::kNone) return {Vectors::kNone, b};
  const Vectors a = weight_vectors(call, weight);
  return {a, a == Vectors::kNone && b == Vectors::kOverX ? Vectors::kNone : b};
}

// The same in float32, whose kernels have vectors over x alone. packed: as if the weight were.
OperandVectors float32_vectors(const ConvCall& call, const void* source, const void* weight, bool packed) {
  const ConvParams& p = call.params;
  const bool a = packed || (keeps_weight_groups(call, weight) && p.weight_m == 4 && p.m % 4 == 0 &&
                            keeps_groups(p.channels, p.weight_c));
  const bool b = a && is_aligned(source) && keeps_groups(p.batch, p.source_n) &&
                 keeps_groups(p.groups, p.source_group) && columns_are_vectors(call, 4);
  return {a ? Vectors::kOverX : Vectors::kNone, b ? Vectors::kOverX : Vectors::kNone};
}

// Copies for one k, in single elements and in 16 bytes. Of 16-bit operands gathered ones count as elements.
double copies_of(const GemmKernel& kernel, const OperandVectors& vectors, DType dtype) {
  const double width = 16.0 / static_cast<double>(size_of(dtype));
  const bool elements = size_of(dtype) == 2 && !vectors.both();
  const double a = elements || vectors.a == Vectors::kNone ? kernel.tile_m : kernel.tile_m / width;
  const double b = elements || vectors.b == Vectors::kNone ? kernel.tile_x / 2.0 : kernel.tile_x / width;
  return a + b;
}

const char* refused_vectors(const ConvCall& call, const OperandVectors& vectors) {
  if (vectors.b != Vectors::kNone)
    return vectors.a != Vectors::kNone
               ? ""
               : "the weight's channels don't lie side by side, aligned: its elements are gathered one by one";
  if (call.params.channels % kChannelGroup != 0)
    return "the channels of a group are no multiple of 8: elements are gathered one by one";
  return call.params.source_c != 2 ? "channels don't lie side by side (channels_last): elements are gathered one by one"
                                   : "rows are not aligned to 16 bytes: elements are gathered one by one";
}

// grad_weight: 8 neighbouring channels of a pixel, or nothing.
OperandVectors pixel_vectors(const WeightParams& p, const void* grad_output, const void* source) {
  const bool fits = p.m % 8 == 0 && p.channels % 8 == 0 && p.grad_m == 2 && p.source_c == 2 &&
                    is_aligned(grad_output) && is_aligned(source) && keeps_groups(p.batch, p.grad_n) &&
                    keeps_groups(p.out_pixels / p.out_w, p.grad_h) && keeps_groups(p.out_w, p.grad_w) &&
                    keeps_groups(p.batch, p.source_n) && keeps_groups(p.source_rows, p.source_h) &&
                    keeps_groups(p.source_cols, p.source_w);
  return fits ? OperandVectors{Vectors::kOverX, Vectors::kOverX} : OperandVectors{Vectors::kNone, Vectors::kNone};
}

void take(Plan& plan, int variant, const GemmKernel& kernel, const Footprint& of, double cycles, int64_t items) {
  plan.variant = variant;
  plan.cycles = cycles;
  plan.kernel = kernel.name;
  plan.tile_m = kernel.tile_m;
  plan.tile_n = kernel.tile_x;
  plan.tile_k = kernel.tile_k;
  plan.threads = of.threads;
  plan.stages = of.stages;
  plan.shared_bytes = of.shared_bytes;
  plan.ctas = items;
}

// How an implicit GEMM reads its operands.
struct Reading {
  OperandVectors vectors;
  int64_t packed_row, packed_bytes;  // of the weight where it is packed, or 0
};

// The ways in which a call's operands can be read; float32's weight packed, too. A batch's second factors are not: they
// may be activations.
std::vector<Reading> readings_of(const Plan& plan, const ConvCall& call, const OperandVectors& vectors,
                                 const void* source, const void* weight) {
  const ConvParams& p = call.params;
  if (plan.dtype != DType::kFloat32 || !counts_channel_groups(p.channels)) return {{vectors, 0, 0}};
  std::vector<Reading> found{{float32_vectors(call, source, weight, /*packed=*/false), 0, 0}};
  const int64_t row = div_up(p.m, 4) * 16;
  const auto at_once = [](const AxisPlan& axis) {
    return std::min<int64_t>(static_cast<int64_t>(axis.phases.size()), kMaxPhases);
  };
  const int64_t bytes = saturating_mul(row, plan.gemm_k, p.groups, at_once(call.rows) * at_once(call.cols));
  const bool is_weight = !call.is_matmul || p.groups == 1;
  if (is_weight && found[0].vectors.a == Vectors::kNone && bytes <= kMaxWorkspaceBytes)
    found.push_back({float32_vectors(call, source, weight, /*packed=*/true), row, bytes});
  return found;
}

// Forward and grad_input: the best tile, how its operands are read, and whether segments get CTAs of their own.
void plan_conv_gemm(Plan& plan, const ConvCall& call, const std::vector<Reading>& readings, const Machine& machine) {
  plan.engine = Engine::kImplicitGemm;
  const ConvParams& p = call.params;
  const GemmKind kind = counts_channel_groups(p.channels) ? GemmKind::kConvGroups : GemmKind::kConvElements;
  const GemmTable table = gemm_table(plan.dtype, plan.math);
  const double rate = products_per_cycle(plan.dtype, plan.math);
  const int64_t phases = static_cast<int64_t>(call.rows.phases.size() * call.cols.phases.size());
  const int64_t pixels = p.batch * call.rows.most_positions * call.cols.most_positions;
  Rank best;
  for (int i = 0; i < table.count; ++i) {
    const GemmKernel& kernel = table.kernels[i];
    if (kernel.kind != kind) continue;
    const auto k_tiles = static_cast<int32_t>(div_up(plan.gemm_k, kernel.tile_k));
    const Segments segments = cut_into_segments(k_tiles, kernel.chain_tiles);
    const int64_t tiles = saturating_mul(div_up(p.m, kernel.tile_m), div_up(pixels, kernel.tile_x), p.groups, phases);
    const int64_t partials = saturating_mul(segments.count, pixels, p.m, p.groups, phases, sum_bytes(plan.dtype));
    for (const bool split : {false, true}) {
      if (split && (segments.count == 1 || partials > kMaxWorkspaceBytes)) continue;
      for (const Reading& reading : readings) {
        // The weight lies behind the sums.
        const int64_t packed_at = split ? div_up(partials, 256) * 256 : 0;
        const int64_t workspace = reading.packed_row != 0 ? packed_at + reading.packed_bytes : split ? partials : 0;
        if (workspace > kMaxWorkspaceBytes) continue;
        // Of 16-bit types a kernel of its own reads vectors.
        const bool vectors = size_of(plan.dtype) == 2 && reading.vectors.both();
        for (int stages = vectors ? kernel.vector_stages : kernel.stages; stages >= kernel.stages; --stages) {
          const Footprint of = footprint(kernel, vectors, stages, segments.count > 1 && !split);
          if (of.shared_bytes > machine.shared_bytes_per_block) continue;
          const int64_t items = split ? saturating_mul(tiles, segments.count) : tiles;
          const double k = static_cast<double>(split ? segments.tiles : k_tiles) * kernel.tile_k;
          const double cycles =
              estimate_cycles(kernel, of, machine, rate, copies_of(kernel, reading.vectors, plan.dtype), items, k) +
              (split ? launch_cycles(partials, machine) : 0) +
              (reading.packed_row != 0 ? launch_cycles(reading.packed_bytes, machine) : 0);
          const Rank rank = rank_of(machine, i, split, reading.packed_row != 0, cycles);
          if (plan.variant >= 0 && rank >= best) continue;
          best = rank;
          take(plan, i, kernel, of, cycles, items);
          plan.vector_a = reading.vectors.a;
          plan.vector_b = reading.vectors.b;
          plan.segments = segments.count;
          plan.segment_length = plan.chain_length = int64_t{segments.tiles} * kernel.tile_k;
          plan.split = split;
          plan.packed_row = reading.packed_row;
          plan.packed_at = packed_at;
          plan.workspace_bytes = workspace;
        }
      }
    }
  }
  if (plan.variant < 0) plan.error = "the device has too little shared memory for the kernels of this dtype";
}

Plan plan_conv(Direction direction, DType dtype, Float32Math math, const ConvCall& call, const void* source,
               const void* weight, const Machine& machine) {
  Plan plan = base_plan(direction, dtype, math);
  const ConvParams& g = call.params;
  plan.gemm_m = g.m;
  plan.gemm_n = g.batch * call.rows.most_positions * call.cols.most_positions;
  const int64_t taps = int64_t{call.rows.most_taps} * call.cols.most_taps;
  if (plan.gemm_n == 0 || g.m == 0 || g.channels == 0) return plan;
  if (!call.is_matmul && is_direct(g.m, g.groups, dtype)) {
    plan.gemm_k = g.channels * taps;
    if (math == Float32Math::kTF32 && dtype == DType::kFloat32)
      plan.refused =
          "few result channels a group: computed in IEEE float32, tiles of tensor cores would be mostly empty";
    plan.math = Float32Math::kIeee;
    plan_direct_conv(plan, call, source, machine);
  } else {
    plan.gemm_k = conv_k(g.channels, taps);
    const bool in_groups = size_of(dtype) == 2 && counts_channel_groups(g.channels);
    const OperandVectors vectors = in_groups ? conv_vectors(call, source, weight) : OperandVectors{};
    if (in_groups) plan.refused = refused_vectors(call, vectors);
    plan_conv_gemm(plan, call, readings_of(plan, call, vectors, source, weight), machine);
  }
  plan.wanted = note_on_wants(plan, machine);
  if (plan.ctas > kMostItems) plan.error = kTooManyItems;
  return plan;
}

}  // namespace

bool lies_over_channels(int64_t channel_stride, int64_t channels, int64_t pixel_stride) {
  return channels > 1 &&
         (channel_stride < 0 ? -channel_stride : channel_stride) < (pixel_stride < 0 ? -pixel_stride : pixel_stride);
}

PixelSegments cut_pixels(int64_t pixels, int64_t least_pixels, int64_t most_segments) {
  const int64_t wanted = std::min(div_up(pixels, least_pixels), std::max<int64_t>(most_segments, 1));
  // Whole steps of every kernel, so that no segment begins inside one.
  const int64_t length = div_up(div_up(pixels, std::max<int64_t>(wanted, 1)), 64) * 64;
  return {div_up(pixels, length), length};
}

PixelSegments grad_bias_segments(int64_t batch, int64_t out_channels, int64_t out_h, int64_t out_w, DType dtype) {
  const int64_t fitting = kMaxWorkspaceBytes / (out_channels * sum_bytes(dtype));
  return cut_pixels(batch * out_h * out_w, kLeastDirectPixels, std::min<int64_t>(fitting, 1024));
}

Machine with_wants(Machine machine) {
  const uint64_t wants = process_wants.load(std::memory_order_relaxed);
  machine.wanted_variant = static_cast<int16_t>(wants >> 32);
  machine.wanted_split = static_cast<int16_t>(wants >> 16);
  machine.wanted_packed = static_cast<int16_t>(wants);
  return machine;
}

bool want(int64_t variant, int64_t split, int64_t packed) {
  int most_variants = 0;
  for (const GemmTable& table : {gemm_table_f32(), gemm_table_tf32(), gemm_table_f64(), gemm_table_f16(),
                                 gemm_table_bf16(), gemm_table_c64(), gemm_table_c128()})
    most_variants = std::max(most_variants, table.count);
  if (variant < -1 || variant >= most_variants || split < -1 || split > 1 || packed < -1 || packed > 1) return false;
  const auto bits = [](int64_t value) { return static_cast<uint64_t>(static_cast<uint16_t>(value)); };
  process_wants.store(bits(variant) << 32 | bits(split) << 16 | bits(packed), std::memory_order_relaxed);
  return true;
}

GemmTable gemm_table(DType dtype, Float32Math math) {
  switch (dtype) {
    case DType::kFloat64:
      return gemm_table_f64();
    case DType::kBFloat16:
      return gemm_table_bf16();
    case DType::kFloat16:
      return gemm_table_f16();
    case DType::kComplex64:
      return gemm_table_c64();
    case DType::kComplex128:
      return gemm_table_c128();
    default:
      return math == Float32Math::kTF32 ? gemm_table_tf32() : gemm_table_f32();
  }
}

Plan plan_forward(const Conv2dProblem& problem, DType dtype, Float32Math math, ConstTensorView input,
                  ConstTensorView weight, const int64_t (&output_stride)[4], const Machine& machine) {
  const Conv2dProblem p = with_bounded_strides(problem);
  Plan plan = base_plan(Direction::kForward, dtype, math);
  plan.error = size_error(p);
  if (plan.error[0] != '\0' || p.out_channels == 0 || p.out_pixels() == 0) return plan;
  return plan_conv(Direction::kForward, dtype, math, forward_call(p, dtype, input.stride, weight.stride, output_stride),
                   input.data, weight.data, machine);
}

Plan plan_grad_input(const Conv2dProblem& problem, DType dtype, Float32Math math, ConstTensorView grad_output,
                     ConstTensorView weight, const int64_t (&grad_input_stride)[4], const Machine& machine) {
  const Conv2dProblem p = with_bounded_strides(problem);
  Plan plan = base_plan(Direction::kGradInput, dtype, math);
  plan.error = size_error(p);
  if (plan.error[0] != '\0' || p.in_channels == 0 || p.in_h * p.in_w == 0) return plan;
  return plan_conv(Direction::kGradInput, dtype, math,
                   grad_input_call(p, dtype, grad_output.stride, weight.stride, grad_input_stride), grad_output.data,
                   weight.data, machine);
}

Plan plan_matmul(const MatmulSizes& size, DType dtype, Float32Math math, ConstMatrixView mat1, ConstMatrixView mat2,
                 const MatrixView& result, const Machine& machine) {
  Plan plan = base_plan(Direction::kForward, dtype, math);
  if (size.m >= kMostSide) plan.error = "a matrix must have fewer than 2^30 rows on CUDA";
  if (std::max({size.batch, size.n, size.k}) > kMostItems - kMostTileK)
    plan.error = "a batch, the columns of a matrix and a sum must be fewer than 2^31 on CUDA";
  if (plan.error[0] != '\0' || size.batch == 0 || size.n == 0) return plan;
  return plan_conv(Direction::kForward, dtype, math, matmul_call(size, dtype, mat1, mat2, result), mat1.data, mat2.data,
                   machine);
}

Plan plan_grad_weight(const Conv2dProblem& problem, DType dtype, Float32Math math, ConstTensorView grad_output,
                      ConstTensorView input, const Machine& machine) {
  const Conv2dProblem p = with_bounded_strides(problem);
  Plan plan = base_plan(Direction::kGradWeight, dtype, math);
  plan.error = size_error(p);
  plan.gemm_m = p.out_channels_per_group();
  plan.gemm_n = p.in_channels_per_group() * p.taps();
  plan.gemm_k = p.batch * p.out_pixels();
  if (plan.error[0] != '\0' || plan.gemm_m == 0 || plan.gemm_n == 0 || plan.gemm_k == 0) return plan;

  PixelSegments segments{};
  if (is_direct(plan.gemm_m, p.groups, dtype) && p.groups > 1) {
    plan.engine = Engine::kDirect;
    plan.kernel = "direct_weight";
    if (plan.math == Float32Math::kTF32)
      plan.refused =
          "few output channels a group: computed in IEEE float32, tiles of tensor cores would be mostly empty";
    plan.math = Float32Math::kIeee;
    plan.tile_m = direct_weight_rows(dtype, plan.gemm_m);
    plan.tile_n = kDirectColumns;
    plan.tile_k = kResidues;
    plan.threads = kDirectThreads;
    plan.shared_bytes = direct_weight_shared_bytes(dtype, plan.gemm_m);
    const int64_t tiles =
        saturating_mul(div_up(plan.gemm_m, plan.tile_m), div_up(plan.gemm_n, plan.tile_n), div_up(p.groups, kSlots));
    segments = cut_weight_pixels(p, dtype, tiles, kLeastDirectPixels);
    plan.ctas = saturating_mul(tiles, segments.count);
    plan.chain_length = kDirectChain;  // of a residue's products
  } else {
    plan.engine = Engine::kImplicitGemm;
    // Of a tile that is the same on every machine: segments fix bits.
    segments = cut_weight_pixels(p, dtype, saturating_mul(div_up(plan.gemm_m, 64), div_up(plan.gemm_n, 128), p.groups),
                                 kLeastGemmPixels);
    const GemmTable table = gemm_table(dtype, plan.math);
    const double rate = products_per_cycle(dtype, plan.math);
    OperandVectors vectors{};
    if (size_of(dtype) == 2) {
      const int64_t unread[4] = {};
      vectors = pixel_vectors(grad_weight_params(p, dtype, grad_output.stride, input.stride, unread), grad_output.data,
                              input.data);
      if (!vectors.both())
        plan.refused =
            "pixels are summed over, and their channels don't lie side by side in whole, aligned groups of 8 "
            "(channels_last): elements are gathered one by one";
    }
    plan.vector_a = vectors.a;
    plan.vector_b = vectors.b;
    Rank best;
    for (int i = 0; i < table.count; ++i) {
      const GemmKernel& kernel = table.kernels[i];
      if (kernel.kind != GemmKind::kWeight) continue;
      const int64_t items = saturating_mul(div_up(plan.gemm_m, kernel.tile_m), div_up(plan.gemm_n, kernel.tile_x),
                                           p.groups, segments.count);
      const bool one_chain = div_up(std::min(segments.pixels, plan.gemm_k), kernel.tile_k) <= kernel.chain_tiles;
      for (int stages = vectors.both() ? kernel.vector_stages : kernel.stages; stages >= kernel.stages; --stages) {
        const Footprint of = footprint(kernel, vectors.both(), stages, !one_chain);
        if (of.shared_bytes > machine.shared_bytes_per_block) continue;
        const double cycles = estimate_cycles(kernel, of, machine, rate, copies_of(kernel, vectors, dtype), items,
                                              static_cast<double>(segments.pixels));
        const Rank rank = rank_of(machine, i, segments.count > 1, /*packed=*/machine.wanted_packed == 1, cycles);
        if (plan.variant >= 0 && rank >= best) continue;
        best = rank;
        take(plan, i, kernel, of, cycles, items);
        plan.chain_length = int64_t{kernel.chain_tiles} * kernel.tile_k;
      }
    }
    if (plan.variant < 0) {
      plan.error = "the device has too little shared memory for the kernels of this dtype";
    } else if (div_up(plan.gemm_k, plan.tile_k) > kMostItems / 2) {
      // Steps of k are counted in 32 bits, and to the end of a segment that the sum doesn't fill.
      plan.error = "a weight gradient sums over too many output pixels for one call on CUDA";
    }
  }
  plan.segments = segments.count;
  plan.segment_length = segments.pixels;
  plan.split = segments.count > 1;
  plan.workspace_bytes = plan.split ? segments.count * p.out_channels * plan.gemm_n * sum_bytes(dtype) : 0;
  plan.wanted = note_on_wants(plan, machine);
  if (plan.ctas > kMostItems) plan.error = kTooManyItems;
  return plan;
}

const char* grad_bias_error(int64_t batch, int64_t out_channels, int64_t out_h, int64_t out_w, DType dtype) {
  if (batch * out_channels * out_h * out_w == 0) return "";
  const PixelSegments segments = grad_bias_segments(batch, out_channels, out_h, out_w, dtype);
  return saturating_mul(div_up(out_channels, kSlots), segments.count) > kMostItems ? kTooManyItems : "";
}

int64_t grad_bias_workspace(int64_t batch, int64_t out_channels, int64_t out_h, int64_t out_w, DType dtype) {
  if (batch * out_channels * out_h * out_w == 0) return 0;
  const PixelSegments segments = grad_bias_segments(batch, out_channels, out_h, out_w, dtype);
  return segments.count > 1 ? segments.count * out_channels * sum_bytes(dtype) : 0;
}

}  // namespace conv2d_ext::cuda
