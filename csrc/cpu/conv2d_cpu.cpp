// The CPU entry points: each direction becomes ConvGemms or a grad_weight run for the instruction set in use.
#include "conv2d_cpu.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace conv2d_ext::cpu {

namespace {

const char* const kIsaVariable = "CONV2D_EXT_CPU_ISA";

bool machine_has(const char* isa) {
#if defined(__x86_64__)
  if (std::strcmp(isa, "avx512_bf16") == 0) return __builtin_cpu_supports("avx512bf16") && machine_has("avx512");
  if (std::strcmp(isa, "avx512") == 0) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && machine_has("avx2");
  }
  if (std::strcmp(isa, "avx2") == 0) {
    // Not every compiler's __builtin_cpu_supports knows F16C.
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }
#endif
  return std::strcmp(isa, "portable") == 0;
}

const Engine& choose_engine() {
  const Engine* const engines[] = {avx512_bf16_engine(), avx512_engine(), avx2_engine(), portable_engine()};
  const char* const wanted = std::getenv(kIsaVariable);
  const bool forced = wanted != nullptr && *wanted != '\0';
  for (const Engine* engine : engines) {
    if (engine == nullptr || (forced && std::strcmp(engine->isa, wanted) != 0)) continue;
    if (machine_has(engine->isa)) return *engine;
    if (forced) {
      throw std::runtime_error(std::string(kIsaVariable) + "=" + wanted + ": this CPU lacks that instruction set");
    }
  }
  throw std::runtime_error(std::string(kIsaVariable) + "=" + wanted + ": expected one of " + compiled_isas());
}

const Engine& engine() {
  static const Engine& chosen = choose_engine();
  return chosen;
}

// The engine that takes a GEMM, and the GEMM as that engine takes it.
struct Choice {
  const Engine& engine;
  ConvGemm gemm;
};
Choice choose(DType dtype, const ConvGemm& gemm) {
  const Engine& widest = engine();
  if (dtype == DType::kBFloat16 && widest.pairs != nullptr && takes_pairs(gemm, widest.vector_shape(dtype))) {
    return {*widest.pairs, in_pairs(gemm)};
  }
  return {widest, gemm};
}
void run_conv(DType dtype, const ConvGemm& gemm, const Executor& executor) {
  const Choice choice = choose(dtype, gemm);
  choice.engine.conv(dtype, choice.gemm, executor);
}

// With one output row or column the stride is never taken: any value past the padded input means the same, and a small
// one can't overflow.
Conv2dProblem with_bounded_strides(Conv2dProblem p) {
  if (p.out_h == 1) p.stride_h = min64(p.stride_h, p.in_h + p.pad_top + p.pad_bottom + 1);
  if (p.out_w == 1) p.stride_w = min64(p.stride_w, p.in_w + p.pad_left + p.pad_right + 1);
  return p;
}

ConvGemm forward_gemm(const Conv2dProblem& p, ConstTensorView input, ConstTensorView weight, const void* bias,
                      int64_t bias_stride, TensorView output) {
  ConvGemm g{};
  g.batch = p.batch;
  g.groups = p.groups;
  g.m = p.out_channels_per_group();
  g.channels = p.in_channels_per_group();
  g.taps_h = p.kernel_h;
  g.taps_w = p.kernel_w;
  g.rows = p.out_h;
  g.cols = p.out_w;
  g.source_h = p.in_h;
  g.source_w = p.in_w;
  g.axis_h = p.rows();
  g.axis_w = p.cols();
  g.source = input.data;
  g.source_n = input.stride[0];
  g.source_c = input.stride[1];
  g.source_row = input.stride[2];
  g.source_col = input.stride[3];
  g.weight = weight.data;
  g.weight_g = p.out_channels_per_group() * weight.stride[0];
  g.weight_m = weight.stride[0];
  g.weight_c = weight.stride[1];
  g.weight_i = weight.stride[2];
  g.weight_j = weight.stride[3];
  g.bias = bias;
  g.bias_stride = bias_stride;
  g.destination = output.data;
  g.destination_n = output.stride[0];
  g.destination_m = output.stride[1];
  g.destination_row = output.stride[2];
  g.destination_col = output.stride[3];
  return g;
}

// How many input positions of an axis some output position meets at some tap. No two meet at the same one.
int64_t count_met(const GatherAxis& axis, int64_t taps, int64_t positions, int64_t in_size) {
  int64_t met = 0;
  for (int64_t tap = 0; tap < taps; ++tap) {
    const int64_t first = axis.source(0, tap);
    const int64_t skipped = first < 0 ? div_up(-first, axis.step) : 0;
    const int64_t inside = in_size > first ? div_up(in_size - first, axis.step) : 0;
    met += max64(0, min64(positions, inside) - skipped);
  }
  return met;
}

// The GEMM without products that writes zeros to all of grad_input.
ConvGemm zero_gemm(const Conv2dProblem& p, const ConvGemm& any, const int64_t* gi) {
  ConvGemm zeros = any;
  zeros.taps_h = zeros.taps_w = 0;
  zeros.rows = p.in_h;
  zeros.cols = p.in_w;
  zeros.destination_row = gi[2];
  zeros.destination_col = gi[3];
  return zeros;
}

// Where a GEMM's operands begin in its tensors, in elements.
struct GemmOffsets {
  int64_t source, weight, destination;
};

// The GEMMs of grad_input for one output pixel. A tap meets one input position, so no tap but that is summed over: each
// is a 1 x 1 convolution of its own. Taps and channels that lie alike in weight and result are taken as channels of
// one.
template <class Visit>
void for_each_one_pixel_gemm(const Conv2dProblem& p, ConvGemm g, const int64_t* w, const int64_t* gi, Visit visit) {
  const MetTaps h = met_taps(p.rows(), p.kernel_h, p.in_h), v = met_taps(p.cols(), p.kernel_w, p.in_w);
  if (h.count * v.count < p.in_h * p.in_w) {
    ConvGemm zeros = zero_gemm(p, g, gi);
    visit(zeros, {0, 0, 0});
  }
  if (h.count * v.count == 0) return;
  const SharedDimensions lanes =
      join_dimensions({g.m, w[1], gi[1]}, {h.count, w[2], gi[2] * p.dilation_h}, {v.count, w[3], gi[3] * p.dilation_w});
  const SharedDimension &inner = lanes.dimension[0], &middle = lanes.dimension[1], &outer = lanes.dimension[2];
  const int64_t group_destination = g.m * gi[1];
  const int64_t weight_offset = h.first * w[2] + v.first * w[3];
  const int64_t destination_offset = p.rows().source(0, h.first) * gi[2] + p.cols().source(0, v.first) * gi[3];
  g.taps_h = g.taps_w = 1;
  g.rows = g.cols = 1;
  g.axis_h = g.axis_w = {1, 0, 1};
  g.m = inner.size;
  g.weight_m = inner.stride_a;
  g.destination_m = inner.stride_b;
  // Groups whose results don't follow one another are visited one by one.
  const bool together = g.groups == 1 || group_destination == inner.size * inner.stride_b;
  const int64_t visits = together ? 1 : g.groups;
  if (!together) g.groups = 1;
  for (int64_t group = 0; group < visits; ++group) {
    for (int64_t x = 0; x < outer.size; ++x) {
      for (int64_t y = 0; y < middle.size; ++y) {
        visit(g, {group * g.channels * g.source_c,
                  weight_offset + group * g.weight_g + x * outer.stride_a + y * middle.stride_a,
                  destination_offset + group * group_destination + x * outer.stride_b + y * middle.stride_b});
      }
    }
  }
}

// Neighbouring positions of a phase that meet outputs at the same taps.
struct Band {
  int64_t first, positions, first_tap, taps;
};

// The share of (position, tap) pairs of a phase that meet an output.
double share_met(const GradInputPhase& phase, int64_t out_size) {
  double met = 0;
  for (int64_t tap = 0; tap < phase.taps; ++tap) {
    const int64_t first = phase.axis.source(0, tap);
    met += double(max64(0, min64(phase.positions, out_size - first) - max64(0, -first)));
  }
  return met / (double(phase.positions) * double(phase.taps));
}

std::vector<Band> cut_bands(const GradInputPhase& phase, int64_t out_size) {
  std::vector<Band> bands;
  for (int64_t q = 0; q < phase.positions; ++q) {
    // A position's later taps meet earlier outputs.
    int64_t first = 0, last = phase.taps;
    while (first < last && phase.axis.source(q, first) >= out_size) ++first;
    while (last > first && phase.axis.source(q, last - 1) < 0) --last;
    if (!bands.empty() && bands.back().first_tap == first && bands.back().taps == last - first) {
      ++bands.back().positions;
    } else {
      bands.push_back({q, 1, first, last - first});
    }
  }
  return bands;
}

// A phase of both axes: one GEMM, or where far taps meet no output at many positions one for each pair of bands,
// without these taps. Decided by the geometry, since the sums' order follows.
template <class Visit>
void for_each_band_gemm(const Conv2dProblem& p, ConvGemm& g, const GradInputPhase& h, const GradInputPhase& v,
                        const int64_t* w, const int64_t* gi, Visit visit) {
  constexpr double kShareMet = 0.85;
  constexpr int64_t kBandPixels = 64;
  const Band all_rows{0, h.positions, 0, h.taps}, all_cols{0, v.positions, 0, v.taps};
  std::vector<Band> row_bands, col_bands;
  bool cut = false;
  if (share_met(h, p.out_h) * share_met(v, p.out_w) < kShareMet) {
    row_bands = cut_bands(h, p.out_h);
    col_bands = cut_bands(v, p.out_w);
    const auto bands = static_cast<int64_t>(row_bands.size() * col_bands.size());
    cut = h.positions * v.positions >= kBandPixels * bands;
  }
  const Band *const first_row = cut ? row_bands.data() : &all_rows, *const first_col =
                                                                        cut ? col_bands.data() : &all_cols;
  const Band *const last_row = first_row + (cut ? row_bands.size() : 1), *const last_col =
                                                                             first_col + (cut ? col_bands.size() : 1);
  g.weight_i = h.tap_step * w[2];
  g.weight_j = v.tap_step * w[3];
  for (const Band* row = first_row; row != last_row; ++row) {
    for (const Band* col = first_col; col != last_col; ++col) {
      g.taps_h = row->taps;
      g.taps_w = col->taps;
      g.rows = row->positions;
      g.cols = col->positions;
      g.axis_h = {h.axis.step, h.axis.source(row->first, row->first_tap), h.axis.tap};
      g.axis_w = {v.axis.step, v.axis.source(col->first, col->first_tap), v.axis.tap};
      visit(g, {0, h.first_tap * w[2] + row->first_tap * g.weight_i + v.first_tap * w[3] + col->first_tap * g.weight_j,
                (h.phase + row->first * p.stride_h) * gi[2] + (v.phase + col->first * p.stride_w) * gi[3]});
    }
  }
}

// The GEMMs of grad_input: one for each phase of the stride that a tap meets; a single one where every phase has a
// single tap (ConvGemm, result_taps), or there is one output pixel. Where no product belongs to an input position, a
// zero does: one GEMM without products writes zeros, before the others.
template <class Visit>
void for_each_grad_input_gemm(const Conv2dProblem& p, const VectorShape& vector, const int64_t* go, const int64_t* w,
                              const int64_t* gi, Visit visit) {
  ConvGemm g{};
  g.batch = p.batch;
  g.groups = p.groups;
  g.m = p.in_channels_per_group();
  g.channels = p.out_channels_per_group();
  g.source_h = p.out_h;
  g.source_w = p.out_w;
  g.source_n = go[0];
  g.source_c = go[1];
  g.source_row = go[2];
  g.source_col = go[3];
  g.weight_g = p.out_channels_per_group() * w[0];
  g.weight_m = w[1];
  g.weight_c = w[0];
  g.conj_weight = true;
  g.destination_n = gi[0];
  g.destination_m = gi[1];

  const auto fill_zero = [&] {
    ConvGemm zeros = zero_gemm(p, g, gi);
    visit(zeros, {0, 0, 0});
  };

  if (p.out_h == 1 && p.out_w == 1) {
    for_each_one_pixel_gemm(p, g, w, gi, visit);
    return;
  }

  // Patch layers. With fewer taps in a row, planes written with gaps cost less than pieces of rows so short.
  constexpr int64_t kLeastTapsOfRow = 4;
  const bool taps_are_apart = grad_input_tap_step(p.stride_h, p.dilation_h) >= p.kernel_h &&
                              grad_input_tap_step(p.stride_w, p.dilation_w) >= p.kernel_w;
  if (taps_are_apart && p.kernel_w >= kLeastTapsOfRow && !lanes_are_groups(g.groups, g.m, g.channels, vector)) {
    if (count_met(p.rows(), p.kernel_h, p.out_h, p.in_h) < p.in_h ||
        count_met(p.cols(), p.kernel_w, p.out_w, p.in_w) < p.in_w) {
      fill_zero();
    }
    g.m *= p.taps();
    g.taps_h = g.taps_w = 1;
    g.rows = p.out_h;
    g.cols = p.out_w;
    g.axis_h = g.axis_w = {1, 0, 0};
    g.result_taps_h = p.kernel_h;
    g.result_taps_w = p.kernel_w;
    g.weight_result_i = w[2];
    g.weight_result_j = w[3];
    g.place_h = p.rows();
    g.place_w = p.cols();
    g.destination_h = p.in_h;
    g.destination_w = p.in_w;
    g.destination_row = gi[2];
    g.destination_col = gi[3];
    visit(g, {0, 0, 0});
    return;
  }

  const int64_t first_taps_h = min64(grad_input_tap_step(p.stride_h, p.dilation_h), p.kernel_h);
  const int64_t first_taps_w = min64(grad_input_tap_step(p.stride_w, p.dilation_w), p.kernel_w);
  const auto row_phase = [&](int64_t first_tap) {
    return grad_input_phase(first_tap, p.in_h, p.kernel_h, p.stride_h, p.pad_top, p.dilation_h);
  };
  const auto col_phase = [&](int64_t first_tap) {
    return grad_input_phase(first_tap, p.in_w, p.kernel_w, p.stride_w, p.pad_left, p.dilation_w);
  };
  int64_t met_h = 0, met_w = 0;
  for (int64_t tap = 0; tap < first_taps_h; ++tap) met_h += row_phase(tap).positions > 0;
  for (int64_t tap = 0; tap < first_taps_w; ++tap) met_w += col_phase(tap).positions > 0;
  if (met_h < min64(p.stride_h, p.in_h) || met_w < min64(p.stride_w, p.in_w)) fill_zero();

  g.destination_row = gi[2] * p.stride_h;
  g.destination_col = gi[3] * p.stride_w;
  for (int64_t tap_h = 0; tap_h < first_taps_h; ++tap_h) {
    const GradInputPhase h = row_phase(tap_h);
    if (h.positions == 0) continue;
    for (int64_t tap_w = 0; tap_w < first_taps_w; ++tap_w) {
      const GradInputPhase v = col_phase(tap_w);
      if (v.positions == 0) continue;
      for_each_band_gemm(p, g, h, v, w, gi, visit);
    }
  }
}

// With one output pixel, less than this many products take less time than waking a thread.
bool is_small(const Conv2dProblem& p) {
  constexpr double kProducts = 128 * 1024;
  return p.out_h == 1 && p.out_w == 1 && double(p.batch) * double(p.out_channels) * double(p.gemm_k()) < kProducts;
}
Executor executor_for(const Conv2dProblem& p, const Executor& executor) {
  if (!is_small(p)) return executor;
  return {1, [](int64_t items, void* context, void (*body)(void*, int64_t)) {
            for (int64_t item = 0; item < items; ++item) body(context, item);
          }};
}

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
    case DType::kUInt8:
      return 1;
    case DType::kBFloat16:
    case DType::kFloat16:
    case DType::kInt16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kComplex128:
      return 16;
    default:
      return 8;
  }
}

}  // namespace

void forward(const Conv2dProblem& problem, DType dtype, ConstTensorView input, ConstTensorView weight, const void* bias,
             int64_t bias_stride, TensorView output, const Executor& threads) {
  const Conv2dProblem p = with_bounded_strides(problem);
  if (p.batch == 0 || p.out_channels == 0 || p.out_pixels() == 0) return;
  const Executor executor = executor_for(p, threads);
  const ConvGemm g = forward_gemm(p, input, weight, bias, bias_stride, output);
  if (sums_as_dots(p, dtype)) {
    engine().dot_products(dtype, g, executor);
  } else {
    run_conv(dtype, g, executor);
  }
}

void grad_input(const Conv2dProblem& problem, DType dtype, ConstTensorView grad_output, ConstTensorView weight,
                TensorView grad_input, const Executor& threads) {
  const Conv2dProblem p = with_bounded_strides(problem);
  if (p.batch == 0 || p.in_channels == 0 || p.in_h == 0 || p.in_w == 0) return;
  const Executor executor = executor_for(p, threads);
  const int64_t size = size_of(dtype);
  const auto at = [size](const void* data, int64_t offset) { return static_cast<const char*>(data) + offset * size; };
  for_each_grad_input_gemm(p, engine().vector_shape(dtype), grad_output.stride, weight.stride, grad_input.stride,
                           [&](ConvGemm& g, const GemmOffsets& offsets) {
                             g.source = at(grad_output.data, offsets.source);
                             g.weight = at(weight.data, offsets.weight);
                             g.destination = static_cast<char*>(grad_input.data) + offsets.destination * size;
                             if (takes_rows(g, dtype)) {
                               RowProducts rows = row_products(g, engine().vector_shape(dtype).limits);
                               rows.factor = g.source;
                               rows.rows = g.weight;
                               rows.result = g.destination;
                               engine().row_products(dtype, rows, executor);
                             } else {
                               run_conv(dtype, g, executor);
                             }
                           });
}

void grad_weight(const Conv2dProblem& problem, DType dtype, ConstTensorView grad_output, ConstTensorView input,
                 TensorView grad_weight, const Executor& threads) {
  const Conv2dProblem p = with_bounded_strides(problem);
  if (p.out_channels == 0 || p.in_channels == 0 || p.taps() == 0) return;
  const Executor executor = executor_for(p, threads);
  if (takes_rows(p, dtype, input.stride, grad_weight.stride)) {
    RowProducts rows =
        row_products(p, grad_output.stride, input.stride, grad_weight.stride, engine().vector_shape(dtype).limits);
    rows.factor = grad_output.data;
    rows.rows = input.data;
    rows.result = grad_weight.data;
    engine().row_products(dtype, rows, executor);
    return;
  }
  engine().grad_weight(p, dtype, grad_output, input, grad_weight, executor);
}

void grad_bias(int64_t batch, int64_t out_channels, int64_t out_h, int64_t out_w, DType dtype,
               ConstTensorView grad_output, void* grad_bias, const Executor& executor) {
  engine().grad_bias(batch, out_channels, out_h, out_w, dtype, grad_output, grad_bias, executor);
}

const char* isa_name() { return engine().isa; }

const char* compiled_isas() { return avx2_engine() != nullptr ? "portable, avx2, avx512, avx512_bf16" : "portable"; }

// ---- memory
// ----------------------------------------------------------------------------------------------------------

namespace {

constexpr int64_t kAlignment = 64;

void* allocate(int64_t bytes) { return ::operator new(static_cast<size_t>(bytes), std::align_val_t(kAlignment)); }
void release(void* memory) { ::operator delete(memory, std::align_val_t(kAlignment)); }

struct ThreadScratch {
  void* memory = nullptr;
  int64_t bytes = 0;
  ~ThreadScratch() { release(memory); }
};
thread_local ThreadScratch scratch;

}  // namespace

void* thread_scratch(int64_t bytes) {
  if (scratch.bytes < bytes) {
    release(scratch.memory);
    scratch.memory = nullptr;
    scratch.bytes = 0;
    scratch.memory = allocate(bytes);
    scratch.bytes = bytes;
  }
  return scratch.memory;
}

CallWorkspace::CallWorkspace(int64_t bytes) : data_(allocate(bytes)) {}
CallWorkspace::~CallWorkspace() { release(data_); }

// ---- explain
// ---------------------------------------------------------------------------------------------------------

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

const char* const kInnerGroupsEngine = "depthwise, vectors over groups as they lie in memory";

// `taken`: the engine whose kernels run; `pairs`: those that take bfloat16 products in pairs.
void name_kernel(Explanation& e, DType dtype, const Engine& taken, bool pairs, const char* family, int64_t rows,
                 int64_t width) {
  e.micro_kernel = std::string(family) + "_" + (pairs ? "bf16" : compute_name(dtype)) + "_" + std::to_string(rows) +
                   "x" + std::to_string(width) + "__" + taken.kernels;
  if (pairs) {
    e.engine += ", bfloat16 products in pairs";
  } else if (dtype == DType::kBFloat16 && engine().pairs != nullptr) {
    e.refused =
        "bfloat16 products are taken in pairs only in forward and grad_input, of several channels a group and with "
        "vectors over result channels: widened to float32 in the packers, rounded once";
  } else if (dtype == DType::kBFloat16 || dtype == DType::kFloat16) {
    e.refused = "no native 16-bit micro-kernel in this build: widened to float32 in the packers, rounded once";
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

void name_one_pixel_kernel(Explanation& e, DType dtype, const char* engine_name, const char* family, int64_t rows,
                           int64_t columns) {
  e.engine = engine_name;
  e.micro_kernel = std::string(family) + "_" + compute_name(dtype) + "_" + std::to_string(rows) + "x" +
                   std::to_string(columns) + "__" + engine().kernels;
  if (dtype == DType::kBFloat16 || dtype == DType::kFloat16) {
    e.refused = "no native 16-bit micro-kernel in this build: widened to float32 as loaded, rounded once";
  }
}

// The chains that a sum is made of. Where segments end, chains do.
int64_t count_chains(const KBlocking& k, const ConvGemm& g) {
  int64_t chains = 0;
  for (int64_t c = 0; c < g.channels; c += k.segment_channels) {
    for (int64_t i = 0; i < g.taps_h; i += k.tap_rows) {
      for (int64_t j = 0; j < g.taps_w; j += k.tap_cols) {
        chains += div_up(min64(k.segment_channels, g.channels - c) * min64(k.tap_rows, g.taps_h - i) *
                             min64(k.tap_cols, g.taps_w - j),
                         k.chain);
      }
    }
  }
  return chains;
}
int64_t count_chains(const PixelBlocking& pixels, const Conv2dProblem& p) {
  int64_t chains = 0;
  for (int64_t n = 0; n < min64(pixels.blocks_n, 2); ++n) {
    const int64_t images = n == 0 ? min64(pixels.images, p.batch) : p.batch - (pixels.blocks_n - 1) * pixels.images;
    for (int64_t h = 0; h < pixels.blocks_h; ++h) {
      const int64_t rows = min64(pixels.rows, p.out_h - h * pixels.rows);
      for (int64_t w = 0; w < pixels.blocks_w; ++w) {
        const int64_t cols = min64(pixels.cols, p.out_w - w * pixels.cols);
        chains += (n == 0 ? max64(pixels.blocks_n - 1, 1) : 1) * div_up(images * rows * cols, pixels.chain);
      }
    }
  }
  return chains;
}

std::string ukernel_suffix(DType dtype, int64_t rows, int64_t cols) {
  return std::string("_") + compute_name(dtype) + "_" + std::to_string(rows) + "x" + std::to_string(cols);
}

void explain_conv(Explanation& e, const ConvGemm& problem, DType dtype, int num_threads) {
  const Choice choice = choose(dtype, problem);
  const ConvGemm g = choice.gemm.pairs ? choice.gemm : join_rows_of_planes(choice.gemm);
  const VectorShape vector = choice.engine.vector_shape(dtype);
  const KBlocking k = block_k(g.channels, g.taps_h, g.taps_w, vector.limits);
  e.gemm_m = g.m;
  e.gemm_n = g.batch * g.rows * g.cols;
  e.gemm_k = g.single_channels() * g.taps();
  e.k_segments = count_chains(k, g);
  e.k_segment_length = g.pairs ? 2 * k.chain : k.chain;
  const bool over_groups = !g.pairs && lanes_are_groups(g, vector);
  if (!g.pairs && !over_groups && vectors_are_pixels(g, vector)) {
    const PixelTiling t = tile_pixel_conv(g, k, vector, size_of(dtype), num_threads);
    const int64_t block = cut_panels(t.chunk_m, kPixelRows).size(0);
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
  name_one_pixel_kernel(e, dtype, "one pixel, dot products along the weight's rows", "dot_ukernel",
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
  name_one_pixel_kernel(e, dtype, "one pixel, rows times factors", "row_ukernel", results,
                        vector.lanes * row_vectors(vector.lanes * vector.element_size, results));
  e.work_items = t.items(rows.groups);
  e.workspace_bytes_per_thread = row_scratch_bytes(rows, t, results, vector.element_size);
}

}  // namespace

Explanation explain(const Conv2dProblem& problem, DType dtype, Direction direction, ConstTensorView input,
                    ConstTensorView weight, bool channels_last, int num_threads) {
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
        p, engine().vector_shape(dtype), grad_output.stride, weight.stride, result.stride,
        [&](const ConvGemm& g, const GemmOffsets&) {
          Explanation phase{};
          phase.isa = e.isa;
          explain_conv(phase, g, dtype, num_threads);
          if (takes_rows(g, dtype)) {
            explain_rows(phase, row_products(g, engine().vector_shape(dtype).limits), dtype, num_threads);
          }
          const int64_t items = e.work_items + phase.work_items;
          const int64_t workspace = max64(e.workspace_bytes_per_thread, phase.workspace_bytes_per_thread);
          if (e.engine.empty() || double(phase.gemm_n) * double(phase.gemm_k) > double(e.gemm_n) * double(e.gemm_k)) {
            e = phase;
          }
          e.work_items = items;
          e.workspace_bytes_per_thread = workspace;
        });
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
        const int64_t rows = depthwise_weight_rows(p.kernel_w, vector.max_vectors * engine().rows(dtype, vector.max_vectors));
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
    const int64_t owners = t.tiles() * t.group_blocks;
    e.work_items = owners * t.slots;
    e.workspace_bytes_per_thread = lay_out_scratch(t, pixels, vector).bytes;
    if (t.slots > 1) {
      e.workspace_bytes_per_thread +=
          div_up((t.slots + 1) * owners * t.tile_size(vector.lanes) * vector.element_size, num_threads);
    }
    if (takes_rows(p, dtype, input.stride, weight.stride)) {
      explain_rows(e, row_products(p, grad_output.stride, input.stride, weight.stride, vector.limits), dtype,
                   num_threads);
    }
  }
  return e;
}

}  // namespace conv2d_ext::cpu
