// What a call will do, by the same decisions that it takes: the engine, the micro-kernel, the tiles, the chains.
#include <string>

#include "conv2d_cpu.h"
#include "direction_gemms.h"
#include "engine.h"

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
      return "u8";
    case DType::kInt16:
      return "u16";
    case DType::kInt32:
      return "u32";
    default:
      return "u64";
  }
}

std::string ukernel_suffix(DType dtype, int64_t rows, int64_t cols) {
  return std::string("_") + compute_name(dtype) + "_" + std::to_string(rows) + "x" + std::to_string(cols);
}

const char* const kInnerGroupsEngine = "depthwise, vectors over groups as they lie in memory";

// Why a 16-bit type is widened to float32 instead of multiplied as it is.
std::string why_widened(DType dtype, const char* where) {
  const char* const reason =
      dtype == DType::kBFloat16 && engine().pairs != nullptr
          ? "bfloat16 products are taken in pairs only in forward and grad_input, and there neither with few channels "
            "a group nor by the kernels for groups, for images of one pixel and for gradients of patch layers"
          : "no native 16-bit micro-kernel for this dtype and instruction set";
  return std::string(reason) + ": widened to float32 " + where + ", rounded once";
}

// `taken`: the engine whose kernels run; `pairs`: those that take bfloat16 products in pairs.
void name_kernel(Explanation& e, DType dtype, const Engine& taken, bool pairs, const char* family, int64_t rows,
                 int64_t width) {
  const bool integers = dtype >= DType::kInt8;
  e.micro_kernel = std::string(family) + "_" + (pairs ? "bf16" : compute_name(dtype)) + "_" + std::to_string(rows) +
                   "x" + std::to_string(width) + "__" + (integers ? taken.integer_kernels : taken.kernels);
  if (pairs) {
    e.engine += ", bfloat16 products in pairs";
  } else if (dtype == DType::kBFloat16 || dtype == DType::kFloat16) {
    e.refused = why_widened(dtype, "in the packers");
  } else if (dtype != DType::kFloat32 && dtype != DType::kFloat64 && dtype != DType::kComplex64 &&
             dtype != DType::kComplex128) {
    e.refused = "integers use the generic 128-bit micro-kernel";
  }
}

void name_gemm_ukernel(Explanation& e, DType dtype, const Engine& taken, bool pairs, int64_t chunk_vectors,
                       bool over_groups) {
  const VectorShape vector = taken.vector_shape(dtype);
  const int64_t vectors = cut_panels(chunk_vectors, vector.max_vectors).size(0);
  e.engine = over_groups ? "implicit GEMM, vectors over groups" : "implicit GEMM, vectors over result channels";
  name_kernel(e, dtype, taken, pairs, "gemm_ukernel", taken.rows(dtype, vectors), vectors * vector.lanes);
}

// Kernels that pack nothing, and widen 16 bits as they load them.
void name_loading_kernel(Explanation& e, DType dtype, const char* engine_name, const char* family, int64_t rows,
                         int64_t columns) {
  e.engine = engine_name;
  e.micro_kernel = family + ukernel_suffix(dtype, rows, columns) + "__" + engine().kernels;
  if (dtype == DType::kBFloat16 || dtype == DType::kFloat16) {
    e.refused = why_widened(dtype, "as loaded");
  }
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

void explain_conv(Explanation& e, const ConvGemm& problem, DType dtype, int num_threads) {
  const EngineChoice choice = choose_engine(dtype, problem);
  const ConvGemm g = choice.gemm.pairs ? choice.gemm : join_rows_of_planes(choice.gemm);
  const VectorShape vector = choice.engine.vector_shape(dtype);
  const KBlocking k = block_k(g, vector.limits);
  e.gemm_m = g.m;
  e.gemm_n = g.batch * g.rows * g.cols;
  e.gemm_k = g.single_channels() * g.taps();
  e.k_segments = count_chains(k, g);
  e.k_segment_length = g.pairs ? 2 * k.chain : k.chain;
  const bool over_groups = !g.pairs && lanes_are_groups(g, vector);
  if (!over_groups && is_few_planes(g, vector, size_of(dtype))) {
    const FewPlanesTiling t = tile_few_planes(g, vector, size_of(dtype), num_threads);
    name_loading_kernel(e, dtype, "1x1 from many planes to few, plane by plane", "plane_ukernel", g.m,
                        planes_at_once(k.chain));
    // Rows that continue one another are one run of pixels.
    e.tile_images = e.tile_rows = 1;
    e.tile_cols = t.run;
    e.work_items = t.items(g);
    e.workspace_bytes_per_thread = scratch_bytes(g, t, vector);
  } else if (!g.pairs && !over_groups && vectors_are_pixels(g, vector)) {
    const PixelTiling t = tile_pixel_conv(g, k, vector, size_of(dtype), num_threads);
    const int64_t block = cut_panels(t.chunk_m, pixel_rows(vector)).size(0);
    const int64_t run = t.join_rows ? t.tile_rows * t.tile_cols : t.tile_cols;
    e.engine = "implicit GEMM, vectors over pixels";
    name_kernel(e, dtype, choice.engine, false, "pixel_ukernel", block,
                cut_panels(div_up(run, vector.lanes), pixel_panel_vectors(block, vector)).size(0) * vector.lanes);
    e.tile_images = 1;
    e.tile_rows = t.tile_rows;
    e.tile_cols = t.tile_cols;
    e.work_items = t.tiles() * t.chunks_m * g.groups;
    e.workspace_bytes_per_thread = lay_out_scratch(t, k, vector).bytes;
  } else if (over_groups && vector.interleaves && is_depthwise_inner(g, vector)) {
    const DepthwiseTiling d = tile_depthwise(g, vector, num_threads);
    name_gemm_ukernel(e, dtype, choice.engine, false, 1, true);
    e.engine = kInnerGroupsEngine;
    const int64_t step = g.taps_w == 1 ? 1 : depthwise_step(g.axis_w.step, g.axis_w.tap);
    if (g.taps() <= k.chain && has_depthwise_ukernel(g.taps_w, step)) {
      e.micro_kernel = "depthwise_ukernel" + ukernel_suffix(dtype, kDepthwisePixels, g.taps_w) + "s" +
                       std::to_string(step) + "__" + choice.engine.kernels;
    }
    e.tile_images = d.tile_images;
    e.tile_rows = d.tile_rows;
    e.tile_cols = d.tile_cols;
    e.work_items = d.items();
    e.workspace_bytes_per_thread = lay_out_scratch(d, g, vector).bytes;
  } else {
    const ConvTiling t = tile_conv(g, k, vector, over_groups, num_threads);
    name_gemm_ukernel(e, dtype, choice.engine, g.pairs, t.chunk_vectors, over_groups);
    e.tile_images = t.tile_images;
    e.tile_rows = t.tile_rows;
    e.tile_cols = t.tile_cols;
    e.work_items = t.tiles() * t.chunks_m * div_up(g.groups, over_groups ? vector.lanes : 1);
    e.workspace_bytes_per_thread = lay_out_scratch(t, k, vector).bytes;
  }
  e.tile_pixels = e.tile_images * e.tile_rows * e.tile_cols;
}

// A tensor without data, in one of the two formats that results have.
TensorView result_view(int64_t channels, int64_t height, int64_t width, bool channels_last) {
  if (channels_last) return {nullptr, {channels * height * width, 1, width * channels, channels}};
  return {nullptr, {channels * height * width, height * width, width, 1}};
}

void explain_dots(Explanation& e, const ConvGemm& g, DType dtype, int num_threads) {
  const DotKernelShape shape = engine().dot_shape(dtype);
  const DotBlocking k = block_dot(g, shape.width, engine().vector_shape(dtype).limits);
  const DotTiling t = tile_dot(g, k, shape, num_threads);
  const bool single = t.images == 1;
  name_loading_kernel(e, dtype, "one pixel, dot products along the weight's rows", "dot_ukernel",
                      single ? shape.single_rows : shape.rows, single ? 1 : shape.columns);
  e.gemm_m = g.m;
  e.gemm_n = g.batch;
  e.gemm_k = k.products;
  e.tile_pixels = e.tile_images = t.images;
  e.tile_rows = e.tile_cols = 1;
  e.k_segments = shape.width * div_up(k.steps, k.chain);
  e.k_segment_length = k.chain;
  e.work_items = t.items(g.groups);
  e.workspace_bytes_per_thread = lay_out_scratch(t, shape).bytes;
}

// What differs from the GEMM driver: neither the problem nor its chains.
void explain_rows(Explanation& e, const RowProducts& rows, DType dtype, int num_threads) {
  const VectorShape vector = engine().vector_shape(dtype);
  const RowTiling t = tile_rows(rows, num_threads);
  const int64_t results = row_results(t.results);
  name_loading_kernel(e, dtype, "one pixel, rows times factors", "row_ukernel", results,
                      vector.lanes * row_vectors(vector.lanes * vector.element_size, results));
  e.work_items = t.items(rows.groups);
  e.workspace_bytes_per_thread = row_scratch_bytes(rows, t, results, vector.element_size);
}

// One more GEMM of a direction: that of the most products stands for them all.
void add_gemm(Explanation& e, const Explanation& gemm) {
  const int64_t items = e.work_items + gemm.work_items;
  const int64_t workspace = max64(e.workspace_bytes_per_thread, gemm.workspace_bytes_per_thread);
  if (e.engine.empty() || double(gemm.gemm_n) * double(gemm.gemm_k) > double(e.gemm_n) * double(e.gemm_k)) e = gemm;
  e.work_items = items;
  e.workspace_bytes_per_thread = workspace;
}

Explanation explain_bands(const Conv2dProblem& p, const ConvGemm& whole, DType dtype, int num_threads) {
  Explanation e{};
  for_each_forward_gemm(p, whole, [&](const ConvGemm& g, const GemmOffsets&) {
    Explanation band{};
    band.isa = engine().isa;
    explain_conv(band, g, dtype, num_threads);
    add_gemm(e, band);
  });
  e.engine += ", in bands without the taps that lie in the padding";
  return e;
}

// What differs from the phases' GEMMs: neither the problem nor its chains.
void explain_strided(Explanation& e, const Conv2dProblem& p, DType dtype, int num_threads) {
  const VectorShape vector = engine().vector_shape(dtype);
  const StridedTiling t = tile_strided(p, vector, num_threads);
  const int64_t vectors = cut_panels(div_up(t.tile_pairs, vector.lanes), kStridedVectors).size(0);
  e.engine = "depthwise, vectors over the pixels of two phases";
  name_kernel(e, dtype, engine(), false, "strided_ukernel", strided_rows(vectors), 2 * vectors * vector.lanes);
  e.tile_images = 1;
  e.tile_rows = t.tile_rows;
  e.tile_cols = min64(2 * t.tile_pairs, p.in_w);
  e.tile_pixels = e.tile_rows * e.tile_cols;
  e.work_items = p.batch * p.groups * t.tiles();
  e.workspace_bytes_per_thread = lay_out_scratch(t, p, vector).bytes;
}

// The same, and the phase of the most products stays the one told of.
void explain_phases(Explanation& e, const JoinedPhases& phases, DType dtype, int num_threads) {
  const VectorShape vector = engine().vector_shape(dtype);
  const PhasesTiling t = tile_phases(phases, vector, num_threads);
  const int64_t vectors = cut_panels(t.chunk_vectors, t.panel_vectors).size(0);
  e.engine = "implicit GEMM, the phases of the stride together";
  e.refused.clear();
  name_kernel(e, dtype, engine(), false, "gemm_ukernel", engine().rows(dtype, vectors), vectors * vector.lanes);
  e.tile_images = t.tile_images;
  for (int f = 0; f < phases.count; ++f) {
    const ConvGemm& g = phases.gemm[f];
    if (g.batch * g.rows * g.cols != e.gemm_n || g.channels * g.taps() != e.gemm_k) continue;
    e.tile_rows = g.rows;
    e.tile_cols = g.cols;
    break;
  }
  e.tile_pixels = e.tile_images * e.tile_rows * e.tile_cols;
  e.work_items = t.items(phases);
  e.workspace_bytes_per_thread = lay_out_scratch(t, phases, vector).bytes;
}

}  // namespace

Explanation explain(const Conv2dProblem& problem, DType dtype, Direction direction, ConstTensorView input,
                    ConstTensorView weight, const int64_t (&grad_weight_stride)[4], bool channels_last,
                    int num_threads) {
  const Conv2dProblem p = with_bounded_strides(problem);
  if (is_small(p)) num_threads = 1;
  Explanation e{};
  e.isa = engine().isa;
  if (direction == Direction::kForward) {
    if (p.batch == 0 || p.out_channels == 0 || p.out_pixels() == 0) {
      e.engine = "none: the result is empty";
      return e;
    }
    const TensorView output = result_view(p.out_channels, p.out_h, p.out_w, channels_last);
    const ConvGemm g = forward_gemm(p, input, weight, nullptr, 0, output);
    if (sums_as_dots(p, dtype)) {
      explain_dots(e, g, dtype, num_threads);
    } else if (forward_cuts_bands(p)) {
      e = explain_bands(p, g, dtype, num_threads);
    } else {
      explain_conv(e, g, dtype, num_threads);
    }
  } else if (direction == Direction::kGradInput) {
    if (p.batch == 0 || p.in_channels == 0 || p.in_h == 0 || p.in_w == 0) {
      e.engine = "none: the result is empty";
      return e;
    }
    // A strided problem is one GEMM for each phase of the stride; the one of the most products stands for them.
    const TensorView grad_output = result_view(p.out_channels, p.out_h, p.out_w, channels_last);
    const TensorView result = result_view(p.in_channels, p.in_h, p.in_w, channels_last);
    for_each_grad_input_gemm(
        p, grad_output.stride, weight.stride, result.stride, [&](const ConvGemm& g, const GemmOffsets&) {
          Explanation phase{};
          phase.isa = e.isa;
          explain_conv(phase, g, dtype, num_threads);
          if (takes_rows(g, dtype, engine().vector_shape(dtype))) {
            explain_rows(phase, row_products(g, engine().vector_shape(dtype).limits), dtype, num_threads);
          }
          add_gemm(e, phase);
        });
    JoinedPhases phases;
    if (joins_phases(p, dtype, grad_output.stride, weight.stride, result.stride, phases)) {
      explain_phases(e, phases, dtype, num_threads);
    }
    const VectorShape vector = engine().vector_shape(dtype);
    if (is_depthwise_strided(p, result.stride, vector)) explain_strided(e, p, dtype, num_threads);
  } else {
    if (p.out_channels == 0 || p.in_channels == 0 || p.taps() == 0) {
      e.engine = "none: the result is empty";
      return e;
    }
    const VectorShape vector = engine().vector_shape(dtype);
    const bool over_groups = lanes_are_groups(p.groups, p.out_channels_per_group(), p.in_channels_per_group(), vector);
    const PixelBlocking pixels = block_pixels(p.batch, p.out_h, p.out_w, vector.limits);
    const TensorView grad_output = result_view(p.out_channels, p.out_h, p.out_w, channels_last);
    const bool inner_groups = vector.interleaves && is_depthwise_inner(p, input.stride, grad_output.stride, vector);
    const WeightTiling t = tile_grad_weight(p, pixels, vector,
                                            inner_groups  ? WeightLanes::kInnerGroups
                                            : over_groups ? WeightLanes::kGroups
                                                          : WeightLanes::kChannels,
                                            num_threads);
    name_gemm_ukernel(e, dtype, engine(), false, t.chunk_vectors, over_groups || inner_groups);
    if (inner_groups) {
      e.engine = kInnerGroupsEngine;
      if (has_depthwise_weight_ukernel(p.kernel_w)) {
        const int64_t rows =
            depthwise_weight_rows(p.kernel_w, vector.max_vectors * engine().rows(dtype, vector.max_vectors));
        e.micro_kernel = "depthwise_weight_ukernel" + ukernel_suffix(dtype, min64(rows, p.kernel_h), p.kernel_w) +
                         "__" + engine().kernels;
      }
    }
    e.gemm_m = p.out_channels_per_group();
    e.gemm_n = p.gemm_k();
    e.gemm_k = p.gemm_n();
    e.tile_pixels = pixels.images * pixels.rows * pixels.cols;
    e.tile_images = pixels.images;
    e.tile_rows = pixels.rows;
    e.tile_cols = pixels.cols;
    e.k_segments = count_chains(pixels, p);
    e.k_segment_length = pixels.chain;
    e.work_items = t.tiles() * t.group_blocks * t.slots;
    e.workspace_bytes_per_thread =
        lay_out_scratch(t, pixels, vector).bytes + div_up(partial_bytes(t, vector), num_threads);
    if (takes_rows(p, dtype, input.stride, grad_weight_stride, vector)) {
      explain_rows(e, row_products(p, grad_output.stride, input.stride, grad_weight_stride, vector.limits), dtype,
                   num_threads);
    }
  }
  return e;
}

}  // namespace conv2d_ext::cpu
