// What a call will do: the tasks that it is planned as (plan/candidates.h), printed instead of run.
#include <string>

#include "conv2d_cpu.h"
#include "isa/engine.h"
#include "plan/candidates.h"
#include "plan/tile_depthwise.h"
#include "plan/tile_gemm.h"
#include "plan/tile_one_pixel.h"
#include "plan/tile_phases.h"
#include "plan/tile_pixels.h"
#include "plan/tile_planes.h"

namespace conv2d_ext::cpu {

namespace {

const char* compute_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kBFloat16:
    case DType::kFloat16:
      return "f32";
    case DType::kFloat64:
      return "f64";
    case DType::kComplex64:
      return "c64";
    case DType::kComplex128:
      return "c128";
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kInt16:
      return "u16";
    case DType::kInt32:
      return "u32";
    default:
      return "u64";
  }
}

std::string ukernel_suffix(const char* type, int64_t rows, int64_t cols) {
  return std::string("_") + type + "_" + std::to_string(rows) + "x" + std::to_string(cols);
}

// Why a 16-bit type is widened to float32 instead of multiplied as it is.
std::string why_widened(DType dtype, const char* where) {
  const char* const reason =
      dtype == DType::kBFloat16 && engine().pairs != nullptr
          ? "bfloat16 products are taken in pairs only in forward and grad_input, and there neither with few channels "
            "a group nor by the kernels for groups, for images of one pixel and for gradients of patch layers"
          : "no native 16-bit micro-kernel for this dtype and instruction set";
  return std::string(reason) + ": widened to float32 " + where + ", rounded once";
}

// The micro-kernels of an engine that runs a task.
struct Kernels {
  DType dtype;
  const Engine& engine;
  VectorShape vector;
  bool pairs;
};

std::string ukernel(const Kernels& kernels, const char* family, int64_t rows, int64_t width) {
  return family + ukernel_suffix(kernels.pairs ? "bf16" : compute_name(kernels.dtype), rows, width) + "__" +
         kernels.engine.kernels;
}

// Kernels that take packed operands, and those that pack nothing and widen 16 bits as they load them.
enum class Widened { kInPackers, kAsLoaded };
void name_kernel(Explanation& e, const Kernels& kernels, const char* family, int64_t rows, int64_t width,
                 Widened widened = Widened::kInPackers) {
  e.micro_kernel = ukernel(kernels, family, rows, width);
  const bool narrow = kernels.dtype == DType::kBFloat16 || kernels.dtype == DType::kFloat16;
  if (narrow && !kernels.pairs) {
    e.refused = why_widened(kernels.dtype, widened == Widened::kInPackers ? "in the packers" : "as loaded");
  } else if (is_integer(kernels.dtype)) {
    e.refused = "integers use generic vectors, of the compiler's vector extension";
  }
}

void name_gemm_kernel(Explanation& e, const Kernels& kernels, int64_t chunk_vectors, int64_t max_vectors) {
  const int64_t vectors = cut_panels(chunk_vectors, max_vectors).size(0);
  name_kernel(e, kernels, "gemm_ukernel", kernels.engine.rows(kernels.dtype, vectors), vectors * kernels.vector.lanes);
}

void set_tile(Explanation& e, int64_t images, int64_t rows, int64_t cols) {
  e.tile_images = images;
  e.tile_rows = rows;
  e.tile_cols = cols;
  e.tile_pixels = images * rows * cols;
}

// A dimension in blocks: all of one size but the last, which may be shorter.
struct Blocks {
  int64_t size, count, length;
  // Of the whole ones (0) or of the last (1): how many, and how long.
  int64_t number(int which) const { return which == 0 ? count - 1 : 1; }
  int64_t length_of(int which) const { return which == 0 ? length : size - (count - 1) * length; }
};
// The chains that a sum is made of. Where segments end, chains do.
int64_t count_chains(const Blocks (&dimensions)[3], int64_t chain) {
  int64_t chains = 0;
  for (int which = 0; which < 8; ++which) {
    int64_t segments = 1, products = 1;
    for (int d = 0; d < 3; ++d) {
      if (dimensions[d].count == 0) return 0;
      segments *= dimensions[d].number(which >> d & 1);
      products *= dimensions[d].length_of(which >> d & 1);
    }
    if (segments > 0) chains += segments * div_up(products, chain);
  }
  return chains;
}
int64_t count_chains(const KBlocking& k, const ConvGemm& g) {
  return count_chains({{g.channels, k.blocks_c, k.segment_channels},
                       {g.taps_h, k.blocks_h, k.tap_rows},
                       {g.taps_w, k.blocks_w, k.tap_cols}},
                      k.chain);
}
int64_t count_chains(const PixelBlocking& pixels, const Conv2dProblem& p) {
  return count_chains({{p.batch, pixels.blocks_n, pixels.images},
                       {p.out_h, pixels.blocks_h, pixels.rows},
                       {p.out_w, pixels.blocks_w, pixels.cols}},
                      pixels.chain);
}

// The GEMM's sizes, and the chains that its sums are made of.
void set_gemm(Explanation& e, const ConvGemm& g, const VectorShape& vector) {
  const KBlocking k = block_k(g.geometry(), vector.limits);
  e.gemm_m = g.m;
  e.gemm_n = g.batch * g.rows * g.cols;
  e.gemm_k = g.single_channels() * g.taps();
  e.k_segments = count_chains(k, g);
  e.k_segment_length = g.pairs ? 2 * k.chain : k.chain;
}

void explain_dot(Explanation& e, const ConvGemm& g, const Kernels& kernels, const DotKernelShape& shape, int threads) {
  const DotBlocking k = block_dot(g.geometry(), shape.width, kernels.vector.limits);
  const DotTiling t = tile_dot(g, k, shape, threads);
  const bool single = t.images == 1;
  name_kernel(e, kernels, "dot_ukernel", single ? shape.single_rows : shape.rows, single ? 1 : shape.columns,
              Widened::kAsLoaded);
  e.k_segments = shape.width * div_up(k.steps, k.chain);
  e.k_segment_length = k.chain;
  set_tile(e, t.images, 1, 1);
  e.work_items = t.items(g.groups);
  e.workspace_bytes_per_thread = lay_out_scratch(t, shape).bytes;
}

void explain_rows(Explanation& e, const RowProducts& rows, const Kernels& kernels, int threads) {
  const RowTiling t = tile_rows(rows, threads);
  const int64_t results = row_results(t.results), lanes = kernels.vector.lanes;
  name_kernel(e, kernels, "row_ukernel", results, lanes * row_vectors(lanes * kernels.vector.element_size, results),
              Widened::kAsLoaded);
  e.work_items = t.items(rows.groups);
  e.workspace_bytes_per_thread = row_scratch_bytes(rows, t, results, kernels.vector.element_size);
}

void explain_depthwise(Explanation& e, const ConvGemm& g, const Kernels& kernels, int threads) {
  const DepthwiseTiling t = tile_depthwise(g, kernels.vector, threads);
  name_gemm_kernel(e, kernels, 1, kernels.vector.max_vectors);
  const int64_t step = g.taps_w == 1 ? 1 : depthwise_step(g.axis_w.step, g.axis_w.tap);
  if (g.taps() <= block_k(g.geometry(), kernels.vector.limits).chain && has_depthwise_ukernel(g.taps_w, step)) {
    const std::string kernel = ukernel(kernels, "depthwise_ukernel", kDepthwisePixels, g.taps_w);
    e.micro_kernel = kernel;
    e.micro_kernel.insert(kernel.rfind("__"), "s" + std::to_string(step));
  }
  set_tile(e, t.tile_images, t.tile_rows, t.tile_cols);
  e.work_items = t.items();
  e.workspace_bytes_per_thread = lay_out_scratch(t, g, kernels.vector).bytes;
}

void explain_planes(Explanation& e, const ConvGemm& g, const Kernels& kernels, int threads) {
  const FewPlanesTiling t = tile_few_planes(g, kernels.vector, size_of(kernels.dtype), threads);
  name_kernel(e, kernels, "plane_ukernel", g.m, planes_at_once(block_k(g.geometry(), kernels.vector.limits).chain),
              Widened::kAsLoaded);
  // Rows that continue one another are one run of pixels.
  set_tile(e, 1, 1, t.run);
  e.work_items = t.items(g);
  e.workspace_bytes_per_thread = scratch_bytes(g, t, kernels.vector);
}

void explain_pixels(Explanation& e, const ConvGemm& g, const Kernels& kernels, int threads) {
  const KBlocking k = block_k(g.geometry(), kernels.vector.limits);
  const PixelTiling t = tile_pixel_conv(g, k, kernels.vector, size_of(kernels.dtype), threads);
  const int64_t lanes = kernels.vector.lanes, block = cut_panels(t.chunk_m, pixel_rows(kernels.vector)).size(0);
  const int64_t run = t.join_rows ? t.tile_rows * t.tile_cols : t.tile_cols;
  const int64_t vectors = cut_panels(div_up(run, lanes), pixel_panel_vectors(block, kernels.vector)).size(0);
  name_kernel(e, kernels, "pixel_ukernel", block, vectors * lanes);
  set_tile(e, 1, t.tile_rows, t.tile_cols);
  e.work_items = t.tiles() * t.chunks_m * g.groups;
  e.workspace_bytes_per_thread = lay_out_scratch(t, k, kernels.vector).bytes;
}

void explain_gemm(Explanation& e, const ConvGemm& g, const Kernels& kernels, bool over_groups, int threads) {
  const KBlocking k = block_k(g.geometry(), kernels.vector.limits);
  const ConvTiling t = tile_conv(g, k, kernels.vector, over_groups, threads);
  name_gemm_kernel(e, kernels, t.chunk_vectors, kernels.vector.max_vectors);
  set_tile(e, t.tile_images, t.tile_rows, t.tile_cols);
  e.work_items = t.tiles() * t.chunks_m * div_up(g.groups, over_groups ? kernels.vector.lanes : 1);
  e.workspace_bytes_per_thread = lay_out_scratch(t, k, kernels.vector).bytes;
}

double products(const ConvGemm& g) {
  return double(g.batch) * double(g.rows) * double(g.cols) * double(g.channels) * double(g.taps());
}

void explain_strided(Explanation& e, const Call& call, const Kernels& kernels, int threads) {
  const Conv2dProblem& p = call.problem;
  // The phase of the most products stands for all.
  double most = -1;
  for_each_grad_input_gemm(p, call.a.stride, call.b.stride, call.result.stride,
                           [&](const ConvGemm& g, const GemmOffsets&) {
                             if (products(g) <= most) return;
                             most = products(g);
                             set_gemm(e, g, kernels.vector);
                           });
  const StridedTiling t = tile_strided(p, kernels.vector, threads);
  const int64_t lanes = kernels.vector.lanes;
  const int64_t vectors = cut_panels(div_up(t.tile_pairs, lanes), kStridedVectors).size(0);
  name_kernel(e, kernels, "strided_ukernel", strided_rows(vectors), 2 * vectors * lanes);
  set_tile(e, 1, t.tile_rows, min64(2 * t.tile_pairs, p.in_w));
  e.work_items = p.batch * p.groups * t.tiles();
  e.workspace_bytes_per_thread = lay_out_scratch(t, p, kernels.vector).bytes;
}

void explain_phases(Explanation& e, const JoinedPhases& phases, const Kernels& kernels, int threads) {
  const PhasesTiling t = tile_phases(phases, kernels.vector, threads);
  const ConvGemm* most = &phases.gemm[0];
  for (int f = 1; f < phases.count; ++f) {
    if (products(phases.gemm[f]) > products(*most)) most = &phases.gemm[f];
  }
  set_gemm(e, *most, kernels.vector);
  name_gemm_kernel(e, kernels, t.chunk_vectors, t.panel_vectors);
  set_tile(e, t.tile_images, most->rows, most->cols);
  e.work_items = t.items(phases);
  e.workspace_bytes_per_thread = lay_out_scratch(t, phases, kernels.vector).bytes;
}

// The sums of grad_weight, whichever driver forms them.
void set_weight_sums(Explanation& e, const Conv2dProblem& p, const PixelBlocking& pixels) {
  e.gemm_m = p.out_channels_per_group();
  e.gemm_n = p.gemm_k();
  e.gemm_k = p.gemm_n();
  set_tile(e, pixels.images, pixels.rows, pixels.cols);
  e.k_segments = count_chains(pixels, p);
  e.k_segment_length = pixels.chain;
}

void explain_weight(Explanation& e, const Conv2dProblem& p, const Kernels& kernels, WeightLanes lanes, int threads) {
  const VectorShape& vector = kernels.vector;
  const PixelBlocking pixels = block_pixels(p.batch, p.out_h, p.out_w, vector.limits);
  const WeightTiling t = tile_grad_weight(p, pixels, vector, lanes, threads);
  name_gemm_kernel(e, kernels, t.chunk_vectors, vector.max_vectors);
  if (lanes == WeightLanes::kInnerGroups && has_depthwise_weight_ukernel(p.kernel_w)) {
    const int64_t rows =
        depthwise_weight_rows(p.kernel_w, vector.max_vectors * kernels.engine.rows(kernels.dtype, vector.max_vectors));
    e.micro_kernel = ukernel(kernels, "depthwise_weight_ukernel", min64(rows, p.kernel_h), p.kernel_w);
  }
  e.work_items = t.tiles() * t.group_blocks * t.slots;
  e.workspace_bytes_per_thread = lay_out_scratch(t, pixels, vector).bytes + div_up(partial_bytes(t, vector), threads);
}

Explanation explain_task(const Task& task, const IsaShape& isa, int threads) {
  const Call& call = *task.call;
  const bool pairs = task.driver == Driver::kPairs;
  const Kernels kernels{call.dtype, engine_for(call.dtype, task), pairs ? isa.pairs : isa.vector, pairs};
  Explanation e{};
  e.engine = name_of(task.driver);
  e.isa = engine().isa;
  if (call.direction == Direction::kGradWeight) {
    const Conv2dProblem& p = call.problem;
    set_weight_sums(e, p, block_pixels(p.batch, p.out_h, p.out_w, kernels.vector.limits));
  } else if (task.driver != Driver::kStrided && task.driver != Driver::kPhases) {
    set_gemm(e, *task.gemm, kernels.vector);
    set_tile(e, 1, 1, 1);
  }
  switch (task.driver) {
    case Driver::kDot:
      explain_dot(e, *task.gemm, kernels, isa.dot, threads);
      break;
    case Driver::kRows:
      explain_rows(e, *task.rows, kernels, threads);
      break;
    case Driver::kStrided:
      explain_strided(e, call, kernels, threads);
      break;
    case Driver::kPhases:
      explain_phases(e, *task.phases, kernels, threads);
      break;
    case Driver::kDepthwise:
      explain_depthwise(e, *task.gemm, kernels, threads);
      break;
    case Driver::kPlanes:
      explain_planes(e, *task.gemm, kernels, threads);
      break;
    case Driver::kPixels:
      explain_pixels(e, *task.gemm, kernels, threads);
      break;
    case Driver::kPairs:
    case Driver::kGroups:
    case Driver::kGemm:
      explain_gemm(e, *task.gemm, kernels, task.driver == Driver::kGroups, threads);
      break;
    case Driver::kWeightDepthwise:
      explain_weight(e, call.problem, kernels, WeightLanes::kInnerGroups, threads);
      break;
    case Driver::kWeightGroups:
      explain_weight(e, call.problem, kernels, WeightLanes::kGroups, threads);
      break;
    case Driver::kWeightGemm:
      explain_weight(e, call.problem, kernels, WeightLanes::kChannels, threads);
      break;
    case Driver::kPadding:
      break;
  }
  return e;
}

// One more task of a call: that of the most products stands for them all.
void add_task(Explanation& e, const Explanation& task) {
  const int64_t items = e.work_items + task.work_items;
  const int64_t workspace = max64(e.workspace_bytes_per_thread, task.workspace_bytes_per_thread);
  if (e.engine.empty() || double(task.gemm_n) * double(task.gemm_k) > double(e.gemm_n) * double(e.gemm_k)) e = task;
  e.work_items = items;
  e.workspace_bytes_per_thread = workspace;
}

// A tensor without data, in one of the two formats that results have.
TensorView result_view(int64_t channels, int64_t height, int64_t width, bool channels_last) {
  if (channels_last) return {nullptr, {channels * height * width, 1, width * channels, channels}};
  return {nullptr, {channels * height * width, height * width, width, 1}};
}

}  // namespace

Explanation explain(const Conv2dProblem& problem, DType dtype, Direction direction, ConstTensorView input,
                    ConstTensorView weight, const int64_t (&grad_weight_stride)[4], bool channels_last,
                    int num_threads) {
  const Conv2dProblem& p = problem;
  const TensorView output = result_view(p.out_channels, p.out_h, p.out_w, channels_last);
  const ConstTensorView grad_output{nullptr, {output.stride[0], output.stride[1], output.stride[2], output.stride[3]}};
  Call call{direction, problem, dtype, input, weight, output};
  if (direction == Direction::kGradInput) {
    call.a = grad_output;
    call.result = result_view(p.in_channels, p.in_h, p.in_w, channels_last);
  } else if (direction == Direction::kGradWeight) {
    call.a = grad_output;
    call.b = input;
    const int64_t* const gw = grad_weight_stride;
    call.result = {nullptr, {gw[0], gw[1], gw[2], gw[3]}};
  }
  Explanation e{};
  e.isa = engine().isa;
  if (is_empty(call)) {
    e.engine = "none: the result is empty";
    return e;
  }
  normalize(call);
  // Data that nobody reads: where operands begin may decide nothing.
  call.a.data = call.b.data = call.result.data = nullptr;
  if (is_small(call.problem)) num_threads = 1;
  const IsaShape isa = shape_for(dtype);
  Refusals refusals;
  const auto add = [&](const Task& task) {
    if (task.driver == Driver::kPadding) {
      e.engine += ", in bands without the taps that lie in the padding";
      return;
    }
    Explanation one = explain_task(task, isa, num_threads);
    for (int i = 0; i < refusals.count; ++i) {
      one.candidates.emplace_back(name_of(refusals.refusal[i].driver), refusals.refusal[i].reason);
    }
    add_task(e, one);
  };
  for_each_task(call, isa, add, &refusals);
  return e;
}

}  // namespace conv2d_ext::cpu
