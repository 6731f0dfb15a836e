// What a call will do: the tasks that it is planned as (plan/candidates.h), printed instead of run.
#include <string>

#include "conv2d_cpu.h"
#include "base/numeric.h"
#include "isa/engine.h"
#include "plan/candidates.h"
#include "plan/tile_amx.h"
#include "plan/tile_depthwise.h"
#include "plan/tile_gemm.h"
#include "plan/tile_one_pixel.h"
#include "plan/tile_phases.h"
#include "plan/tile_pixels.h"
#include "plan/tile_planes.h"
#include "plan/tile_winograd.h"

namespace conv2d_ext::cpu {

namespace {

// Why a 16-bit type is widened to float32 instead of multiplied as it is.
std::string why_widened(DType dtype, const char* where) {
  const char* const reason =
      dtype == DType::kBFloat16 && engine().amx != nullptr
          ? "AMX tiles take bfloat16 from 4 channels on (for 6 results and more from 4 channels times neighbouring "
            "columns of the kernel on; with groups 16 channels of each, source and result; in grad_weight 16 "
            "results), and neither images of one pixel nor input gradients of patch layers"
      : dtype == DType::kBFloat16 && engine().pairs != nullptr
          ? "bfloat16 products are taken in pairs, but not with one channel or fewer than 6 results a group (in "
            "strided grad_input of 16 groups and more, of up to 16 channels, up to 8 results; in grad_weight fewer "
            "than 16 results, with groups 32, or than 16 channels times taps), nor for images of one pixel, or for "
            "input gradients of patch layers"
          : "no native 16-bit micro-kernel for this dtype and instruction set";
  return std::string(reason) + ": widened to float32 " + where + ", rounded once";
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

double products(const ConvGemm& g) {
  return double(g.batch) * double(g.rows) * double(g.cols) * double(g.channels) * double(g.taps());
}

// Kernels that take packed operands, and those that pack nothing and widen 16 bits as they load them.
enum class Widened { kInPackers, kAsLoaded };

// Of a call's tasks: its memory in parts, since threads keep their scratch from one task to the next.
struct TaskExplanation : Explanation {
  int64_t scratch_bytes = 0, shared_bytes = 0;  // a thread's, and its share of the call's
};

// Explains one task, by what its driver plans.
struct TaskExplainer {
  const Task& task;
  const IsaShape& isa;
  const int threads;
  const Conv2dProblem& problem = task.call->problem;
  const DType dtype = task.call->dtype;
  const bool amx = step_of(task) == kBlockChannels;  // AMX tiles of bfloat16
  const bool native = step_of(task) > 1;             // these, or pairs: bfloat16 as it is
  const Engine& runs_on = engine_for(dtype, task);
  const VectorShape& vector = amx ? isa.amx : native ? isa.pairs : isa.vector;
  TaskExplanation e{};

  TaskExplanation explain() {
    e.engine = name_of(task.driver);
    e.isa = engine().isa;
    const bool has_phases = task.driver == Driver::kStrided || task.driver == Driver::kPhases;
    if (task.call->direction == Direction::kGradWeight) {
      set_weight_sums();
    } else if (!has_phases) {
      set_gemm(task.whole != nullptr ? *task.whole : *task.gemm);
    }
    explain_driver();
    return e;
  }

  void explain_driver() {
    switch (task.driver) {
      case Driver::kDot:
        return explain_dot(*task.gemm);
      case Driver::kRows:
      case Driver::kColumns:
        return explain_rows(*task.rows);
      case Driver::kStrided:
        return explain_strided();
      case Driver::kPhases:
        return explain_phases(*task.phases);
      case Driver::kWinograd:
        return explain_winograd(*task.gemm);
      case Driver::kDepthwise:
        return explain_depthwise(*task.gemm);
      case Driver::kPlanes:
        return explain_planes(*task.gemm);
      case Driver::kPixels:
        return explain_pixels(*task.gemm);
      case Driver::kAmx:
        return explain_amx(*task.gemm);
      case Driver::kPairs:
      case Driver::kGemm:
        return explain_gemm(*task.gemm, false);
      case Driver::kPairsOfGroups:
      case Driver::kGroups:
        return explain_gemm(*task.gemm, true);
      case Driver::kWeightDepthwise:
        return explain_weight(WeightLanes::kInnerGroups);
      case Driver::kWeightGroups:
        return explain_weight(WeightLanes::kGroups);
      case Driver::kWeightAmx:
      case Driver::kWeightPairs:
      case Driver::kWeightTransposed:
      case Driver::kWeightGemm:
        return explain_weight(WeightLanes::kChannels);
      case Driver::kPadding:
        return;
    }
  }

  // ---- what is printed of any driver

  // E.g. "gemm_ukernel_f32_6x16__avx2"; `detail`: what comes after the sizes.
  std::string ukernel(const char* family, int64_t rows, int64_t width, const std::string& detail = "") const {
    const char* const kind = is_integer(dtype) ? "u" : is_floating(dtype) ? "f" : "c";
    const std::string type = native ? "bf16" : kind + std::to_string(8 * vector.element_size);
    return std::string(family) + "_" + type + "_" + std::to_string(rows) + "x" + std::to_string(width) + detail + "__" +
           runs_on.kernels;
  }

  void name_kernel(const char* family, int64_t rows, int64_t width, Widened widened = Widened::kInPackers,
                   const char* detail = "") {
    e.micro_kernel = ukernel(family, rows, width, detail);
    if (is_integer(dtype)) {
      e.refused = "integers use generic vectors, of the compiler's vector extension";
    } else if (size_of(dtype) == 2 && !native) {
      e.refused = why_widened(dtype, widened == Widened::kInPackers ? "in the packers" : "as loaded");
    }
  }
  // padding_permille: as a tiling has it.
  void name_gemm_kernel(int64_t chunk_vectors, int64_t max_vectors, int64_t padding_permille = 0) {
    const int64_t vectors = cut_panels(chunk_vectors, max_vectors).size(0);
    name_kernel(amx ? "amx_ukernel" : "gemm_ukernel", runs_on.rows(dtype, vectors), vectors * vector.lanes,
                Widened::kInPackers, padding_permille > 0 ? "_listed" : "");
  }

  void set_tile(int64_t images, int64_t rows, int64_t cols) {
    e.tile_images = images;
    e.tile_rows = rows;
    e.tile_cols = cols;
    e.tile_pixels = images * rows * cols;
  }

  void set_work(int64_t items, int64_t scratch_bytes, int64_t bytes_of_call = 0) {
    e.work_items = items;
    e.scratch_bytes = scratch_bytes;
    e.shared_bytes = div_up(bytes_of_call, threads);
  }

  KBlocking blocking(const ConvGemm& g) const { return block_k(g, vector.limits); }

  // The GEMM's sizes, and the chains that its sums are made of.
  void set_gemm(const ConvGemm& g) {
    const KBlocking k = blocking(g);
    e.gemm_m = g.m;
    e.gemm_n = g.batch * g.rows * g.cols;
    e.gemm_k = g.single_channels() * g.taps_h * g.kernel_columns();
    // A tile sums its even and its odd channels apart.
    e.k_segments = (amx ? 2 : 1) * count_chains(k, g);
    e.k_segment_length = (amx ? g.per_step / 2 : g.per_step) * k.chain;
    set_tile(1, 1, 1);
  }

  PixelBlocking pixel_blocking() const { return block_pixels(problem, vector.limits); }

  // The GEMM's sizes and chains of grad_weight, whichever driver forms its sums.
  void set_weight_sums() {
    const Conv2dProblem& p = problem;
    const PixelBlocking pixels = pixel_blocking();
    e.gemm_m = p.out_channels_per_group();
    e.gemm_n = p.gemm_k();
    e.gemm_k = p.gemm_n();
    e.k_segments = (amx ? 2 : 1) * count_chains(pixels, p);
    e.k_segment_length = amx ? kBlockChannels / 2 : pixels.chain;
    set_tile(pixels.images, pixels.rows, pixels.cols);
  }

  // ---- the drivers

  void explain_dot(const ConvGemm& g) {
    const DotBlocking k = block_dot(g, isa.dot.width, vector.limits);
    const DotTiling t = tile_dot(g, k, isa.dot, threads);
    const bool single = t.images == 1;
    const int64_t columns = t.images <= isa.dot.few_columns ? isa.dot.few_columns : isa.dot.columns;
    name_kernel("dot_ukernel", single ? isa.dot.single_rows : isa.dot.rows, single ? 1 : columns, Widened::kAsLoaded);
    e.k_segments = isa.dot.width * div_up(k.steps, k.chain);
    e.k_segment_length = k.chain;
    set_tile(t.images, 1, 1);
    set_work(t.items(g.groups), lay_out_scratch(t, isa.dot).bytes);
  }

  void explain_rows(const RowProducts& rows) {
    const bool along_k = rows.along == Along::kK;
    const RowTiling t = tile_rows(rows, threads);
    const int64_t results = row_results(t.results, rows.along), lanes = vector.lanes, size = vector.element_size;
    const int64_t vectors = along_k ? 1 : row_vectors(lanes * size, results);
    name_kernel(along_k ? "column_ukernel" : "row_ukernel", results, lanes * vectors, Widened::kAsLoaded);
    set_work(t.items(rows.groups), lay_out_scratch(rows, t, size).bytes);
  }

  void explain_strided() {
    // The phase of the most products stands for all.
    double most = -1;
    for_each_grad_input_gemm(*task.call, [&](const ConvGemm& g) {
      if (products(g) <= most) return;
      most = products(g);
      set_gemm(g);
    });
    const StridedTiling t = tile_strided(problem, vector, threads);
    const int64_t vectors = cut_panels(div_up(t.tile_pairs, vector.lanes), kStridedVectors).size(0);
    name_kernel("strided_ukernel", strided_rows(vectors), 2 * vectors * vector.lanes);
    set_tile(1, t.tile_rows, min64(2 * t.tile_pairs, problem.in_w));
    set_work(t.items(problem), lay_out_scratch(t, problem, vector).bytes);
  }

  void explain_phases(const JoinedPhases& phases) {
    const ConvGemm* most = &phases.gemm[0];
    for (int f = 1; f < phases.count; ++f) {
      if (products(phases.gemm[f]) > products(*most)) most = &phases.gemm[f];
    }
    set_gemm(*most);
    const PhasesTiling t = tile_phases(phases, vector, threads);
    name_gemm_kernel(t.chunk_vectors, t.panel_vectors);
    set_tile(t.tile_images, min64(t.tile_rows, most->rows), most->cols);
    set_work(t.items(), lay_out_scratch(t, phases, vector).bytes);
  }

  void explain_winograd(const ConvGemm& g) {
    const WinogradTiling t = tile_winograd(g, vector, threads);
    name_gemm_kernel(t.chunk_vectors, vector.max_vectors);
    // Of each of the 16 matrix products.
    e.k_segments = div_up(g.channels, t.chain);
    e.k_segment_length = t.chain;
    set_tile(t.tile_images, t.tile_rows, t.tile_cols);
    set_work(t.items(g.groups), lay_out_scratch(t, g, vector).bytes);
  }

  void explain_depthwise(const ConvGemm& g) {
    const DepthwiseTiling t = tile_depthwise(g, vector, size_of(dtype), threads);
    name_gemm_kernel(1, vector.max_vectors);
    const DepthwiseRow row = depthwise_row(g);
    if (g.taps() <= blocking(g).chain && has_depthwise_ukernel(g.taps_w, row, g.cols)) {
      e.micro_kernel = ukernel("depthwise_ukernel", kDepthwisePixels, g.taps_w, "s" + std::to_string(row.step));
    }
    if (is_floating(dtype) && size_of(dtype) == 2 && t.in_place) {
      e.refused = why_widened(dtype, "as loaded or in the packers");
    }
    set_tile(t.tile_images, t.tile_rows, t.tile_cols);
    int64_t bytes = lay_out_scratch(t, g, vector).bytes;
    if (task.whole != nullptr) {  // what runs if a weight is not finite, or a bias is -0
      const DepthwiseTiling other = tile_depthwise(*task.whole, vector, size_of(dtype), threads);
      bytes = max64(bytes, lay_out_scratch(other, *task.whole, vector).bytes);
    }
    set_work(t.items(), bytes);
  }

  void explain_planes(const ConvGemm& g) {
    const FewPlanesTiling t = tile_few_planes(g, vector, size_of(dtype), threads);
    name_kernel("plane_ukernel", g.m, planes_at_once(blocking(g).chain), Widened::kAsLoaded);
    // Rows that continue one another are one run of pixels.
    set_tile(1, 1, t.run);
    set_work(t.items(g), scratch_bytes(g, t, vector));
  }

  void explain_pixels(const ConvGemm& g) {
    const KBlocking k = blocking(g);
    const PixelTiling t = tile_pixel_conv(g, k, vector, size_of(dtype), threads);
    const int64_t rows = cut_panels(t.chunk_m, pixel_rows(vector)).size(0);
    const int64_t run = t.join_rows ? t.tile_rows * t.tile_cols : t.tile_cols;
    const int64_t vectors = cut_run(t, run, rows, vector).size(0);
    if (t.by_columns) {
      name_kernel("column_ukernel", row_results(t.chunk_m, Along::kK), vector.lanes, Widened::kAsLoaded);
    } else {
      name_kernel(t.whole_planes ? "whole_plane_ukernel" : "pixel_ukernel", rows, vectors * vector.lanes);
    }
    set_tile(1, t.tile_rows, t.tile_cols);
    set_work(t.items(g.groups), lay_out_scratch(t, k, vector).bytes);
  }

  void explain_gemm(const ConvGemm& g, bool over_groups) {
    const int64_t groups = over_groups ? vector.lanes : 1;  // of a work item
    const KBlocking k = blocking(g);
    const ConvTiling t = tile_conv(g, k, vector, over_groups, threads);
    name_gemm_kernel(t.chunk_vectors, vector.max_vectors, t.padding.permille);
    set_tile(t.tile_images, t.tile_rows, t.tile_cols);
    set_work(t.items(div_up(g.groups, groups)), lay_out_scratch(t, k, vector).bytes);
  }

  void explain_amx(const ConvGemm& g) {
    const KBlocking k = blocking(g);
    const AmxTiling t = tile_amx(g, k, vector, threads);
    name_gemm_kernel(t.chunk_vectors, vector.max_vectors);
    set_tile(t.tile_images, t.tile_rows, t.tile_cols);
    set_work(t.items(g.groups), lay_out_scratch(t, k, vector).bytes, t.shared_bytes);
  }

  void explain_weight(WeightLanes lanes) {
    const PixelBlocking pixels = pixel_blocking();
    const WeightTiling t = tile_grad_weight(*task.call, pixels, vector, lanes, threads);
    name_gemm_kernel(t.chunk_vectors, vector.max_vectors, t.padding.permille);
    if (lanes == WeightLanes::kInnerGroups) {
      const int64_t cols = depthwise_weight_cols(t.tap_cols);
      const int64_t accumulators = vector.max_vectors * runs_on.rows(dtype, vector.max_vectors);
      const int64_t rows = depthwise_weight_rows(t.tap_rows, most_depthwise_weight_rows(cols, accumulators));
      const int64_t step = depthwise_weight_step(cols, problem.stride_w, problem.dilation_w);
      const std::string detail = "s" + std::to_string(step);
      name_kernel("depthwise_weight_ukernel", rows, cols, Widened::kAsLoaded, detail.c_str());
    }
    set_work(t.items() * t.slots, lay_out_scratch(t, pixels, vector).bytes, partial_bytes(t, vector));
  }
};

// One more task of a call: that of the most products stands for them all.
void add_task(TaskExplanation& e, const TaskExplanation& task) {
  const int64_t items = e.work_items + task.work_items;
  const int64_t scratch = max64(e.scratch_bytes, task.scratch_bytes), shared = max64(e.shared_bytes, task.shared_bytes);
  if (e.engine.empty() || double(task.gemm_n) * double(task.gemm_k) > double(e.gemm_n) * double(e.gemm_k)) e = task;
  e.work_items = items;
  e.scratch_bytes = scratch;
  e.shared_bytes = shared;
  e.workspace_bytes_per_thread = scratch + shared;
}

}  // namespace

Explanation explain(Call call, int threads) {
  // Where operands begin may decide nothing.
  call.a.data = call.b.data = nullptr;
  TaskExplanation e{};
  e.isa = engine().isa;
  if (is_empty(call)) {
    e.engine = "none: the result is empty";
    return e;
  }
  normalize(call);
  const int num_threads = is_small(call.problem) ? 1 : threads;
  const IsaShape isa = shape_for(call.dtype);
  Refusals refusals;
  int in_turn = 0;  // phases so far of those that an item takes in turn, and items of these
  int64_t items_in_turn = 0;
  const auto add = [&](const Task& task) {
    if (task.driver == Driver::kPadding) {
      e.engine += ", in bands without the taps that lie in the padding";
      return;
    }
    TaskExplanation one = TaskExplainer{task, isa, num_threads}.explain();
    for (const Refusal& refusal : refusals) one.candidates.emplace_back(name_of(refusal.driver), refusal.reason);
    if (task.driver == Driver::kDepthwise && has_phases_in_turn(call)) {
      if (in_turn++ % kMostDepthwiseGemms == 0) items_in_turn = 0;
      const int64_t more = max64(one.work_items - items_in_turn, 0);
      items_in_turn += more;
      one.work_items = more;
    }
    add_task(e, one);
  };
  const int64_t batch = call.problem.batch, at_once = images_in_turn(call, isa, num_threads);
  if (at_once == 0) {
    for_each_task(call, isa, num_threads, add, &refusals);
    return e;
  }
  // The first images stand for all; those that are left may be fewer.
  for_each_task(images_of(call, 0, at_once), isa, num_threads, add, &refusals);
  e.work_items *= batch / at_once;
  e.gemm_n = e.gemm_n / at_once * batch;
  if (batch % at_once > 0) for_each_task(images_of(call, 0, batch % at_once), isa, num_threads, add, &refusals);
  return e;
}

Explanation explain_matmul(const MatmulSizes& size, DType dtype, ConstMatrixView mat1, ConstMatrixView mat2,
                           MatrixView result, int num_threads) {
  MatmulSizes one = size;
  const bool differ = size.batch > 1 && mat2.batch_stride != 0;
  if (differ) one.batch = 1;
  const int threads = shares_products(size, mat2, num_threads) ? 1 : num_threads;
  Explanation e = explain(product_call(one, dtype, mat1, mat2, {}, result), threads);
  if (differ) e.work_items *= size.batch;
  return e;
}

}  // namespace conv2d_ext::cpu
