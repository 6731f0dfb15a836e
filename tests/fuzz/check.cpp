#include "check.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "../../csrc/cpu/conv2d_cpu.h"
#include "environment.h"
#include "harness.h"
#include "oracle.h"
#include "seams.h"
#include "threads.h"

namespace conv2d_ext::fuzz {

Counts counts;
bool goes_on_after_failures = false;

namespace {

Case current;

void set_current(const Case& c) {
  current = c;
  text_of_current = [] { return to_text(current); };
}

std::string number(double value) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

// ---- one call -------------------------------------------------------------------------------------------------------

constexpr int64_t kMostScratch = 4 * 1024 * 1024;  // what is promised
constexpr double kMostProducts = 4e6;
constexpr int64_t kMostResults = int64_t{1} << 20;

// A way to run the case's op on numbers.
struct Way {
  int64_t isa, threads, schedule, limits;
  Layout layout[3];
  int64_t bias_stride;
  uint8_t filling;
  bool one_matrix = false;  // of a product with one row an image: they are the rows of one matrix
};

Way first_way(const Case& c) {
  return {c.isa, c.threads, c.schedule, c.limits, {c.layout[0], c.layout[1], c.layout[2]}, c.bias_stride, 0xff};
}

struct Operands {
  Numbers a, b, bias;
  bool has_bias;
};

bool fits(const Case& c, const Conv2dProblem& p, const Way& way) {
  for (int t = 0; t < 3; ++t) {
    if (!Tensor::fits(DType(c.dtype), tensor_size(p, t), way.layout[t])) return false;
  }
  return true;
}

// The forward as a product of matrices: for each image one of its pixels' rows, or of all images' single pixels one.
struct ProductViews {
  ConstTensorView a, b;
  TensorView result;
};
void multiply(const Conv2dProblem& p, DType dtype, const ProductViews& views, const cpu::Bias& bias, bool one_matrix,
              const cpu::Executor& threads) {
  const auto &a = views.a, &b = views.b;
  const auto& result = views.result;
  const int row = one_matrix ? 0 : 3;
  const int64_t batch = one_matrix ? 1 : p.batch;
  const MatmulSizes size{batch, one_matrix ? p.batch : p.out_w, p.out_channels, p.in_channels};
  const int64_t from = one_matrix ? 0 : a.stride[0], to = one_matrix ? 0 : result.stride[0];
  cpu::matmul(size, dtype, {a.data, from, a.stride[row], a.stride[1]}, {b.data, 0, b.stride[1], b.stride[0]}, bias,
              {result.data, to, result.stride[row], result.stride[1]}, threads);
}

Layout layout_of_bias(int64_t stride) {
  Layout layout;
  layout.slice[3] = stride == 2 ? 4 : 0;
  layout.expanded = stride == 0 ? 15 : 0;
  return layout;
}

// The result's numbers. What a call may not do is found here: touch other memory, take too much scratch.
std::vector<uint8_t> call(const Case& c, const Conv2dProblem& p, const Operands& operands, const Way& way) {
  const Op op = Op(c.op);
  const DType dtype = DType(c.dtype);
  const Roles roles = roles_of(op);
  const Tensor a(operands.a, way.layout[roles.a]), b(operands.b, way.layout[roles.b]);
  const Tensor bias(operands.bias, layout_of_bias(way.bias_stride));
  const cpu::Bias added{operands.has_bias ? bias.view().data : nullptr, bias.view().stride[3]};
  Layout result_layout = roles.result < 0 ? Layout() : way.layout[roles.result];
  result_layout.expanded = result_layout.windows = 0;
  Tensor result(dtype, result_size(op, p), result_layout, way.filling);

  use_isa(int(way.isa));
  use_limits(way.limits);
  const cpu::Executor threads = executor(int(way.threads), Schedule(way.schedule));
  start_watching();
  {
    const Environment environment(c.rounding, c.flush);
    switch (op) {
      case Op::kForward:
        cpu::run({cpu::Direction::kForward, p, dtype, a.view(), b.view(), result.view(), added, c.winograd != 0},
                 threads);
        break;
      case Op::kMatmul:
        multiply(p, dtype, {a.view(), b.view(), result.view()}, added, way.one_matrix, threads);
        break;
      case Op::kGradInput:
        cpu::run({cpu::Direction::kGradInput, p, dtype, a.view(), b.view(), result.view(), {}, c.winograd != 0},
                 threads);
        break;
      case Op::kGradWeight:
        cpu::run({cpu::Direction::kGradWeight, p, dtype, a.view(), b.view(), result.view()}, threads);
        break;
      default:
        cpu::grad_bias({p.batch, p.out_channels, p.out_h, p.out_w}, dtype, a.view(), result.view().data, threads);
    }
  }
  ++counts.calls;
  const Watched seen = watched();
  const int64_t taken = seen.scratch_bytes + (seen.workspace_bytes + way.threads - 1) / way.threads;
  if (taken > kMostScratch) fail("a thread takes " + std::to_string(taken) + " bytes of scratch");
  bool others_untouched = true;
  std::vector<uint8_t> numbers = result.take(others_untouched);
  if (!others_untouched) fail("something beside the result was written");
  return numbers;
}

// ---- against the oracle ---------------------------------------------------------------------------------------------

bool is_smooth(int64_t values) {
  return values == int64_t(Values::kNormal) || values == int64_t(Values::kPositive) ||
         values == int64_t(Values::kRectified);
}
bool is_whole(int64_t values) { return values == int64_t(Values::kSmallWhole) || values == int64_t(Values::kZeros); }

// Errors of random numbers, in units of roundoff times the sum of the products' sizes. Rounding is as good as random
// there, and a library that sums in blocks stays far below what could happen at worst: these are what the promise
// allows where F.conv2d sums a long sum of non-zero mean (an error of 1.8 in the mean, 6.2 at most).
constexpr double kMeanError = 4.6, kLargestError = 13.4;

// The largest finite number of both operands, 1 at least.
double largest_operand(const Operands& operands, const Format& storage) {
  double largest = 1;
  for (const Numbers* x : {&operands.a, &operands.b}) {
    const int64_t parts = int64_t(x->bytes.size()) / storage.bytes;
    for (int64_t i = 0; i < parts; ++i) {
      const double size = std::fabs(decode(storage, x->bytes.data() + i * storage.bytes));
      if (std::isfinite(size) && size > largest) largest = size;
    }
  }
  return largest;
}

// Whether Winograd's F(2 x 2, 3 x 3) may compute some of it, whose errors follow from an element's neighbours, too.
bool may_take_winograd(const Case& c, const Conv2dProblem& p) {
  return c.winograd != 0 && p.kernel_h == 3 && p.kernel_w == 3 && storage_format(DType(c.dtype)).bytes <= 4 &&
         (Op(c.op) == Op::kForward || Op(c.op) == Op::kGradInput);
}

void compare_with_oracle(const Case& c, const Conv2dProblem& p, const Operands& operands,
                         const std::vector<uint8_t>& numbers) {
  const Op op = Op(c.op);
  const DType dtype = DType(c.dtype);
  const Expected expected = expect(op, p, operands.a, operands.b, operands.has_bias ? &operands.bias : nullptr);
  if (is_integer(dtype)) {
    const size_t item = size_t(size_of(dtype));
    for (size_t i = 0; i < expected.whole.size(); ++i) {
      if (std::memcmp(numbers.data() + i * item, &expected.whole[i], item) != 0) {
        return fail("element " + std::to_string(i) + " is wrong");
      }
    }
    return;
  }
  const Format &storage = storage_format(dtype), &compute = compute_format(dtype);
  const double k = double(expected.products);
  const bool pairs = c.isa == 3 && dtype == DType::kBFloat16, amx = c.isa > 3 && dtype == DType::kBFloat16;
  const bool directed = c.rounding != 0, flushes = c.flush != 0 || pairs || amx;
  // An operand of the result's last addition could be any: what rounds, and how often, on an element's way.
  const double steps = std::min(k + 2, 176 + k / (amx ? 16 : 2048)) * (directed ? 2 : 1) *
                       (compute.fraction == 23 && c.isa == 0 ? 2 : 1);
  const double largest = largest_operand(operands, storage);
  const bool winograd = may_take_winograd(c, p);
  // 16 products of a channel, whose factors are sums of four operands and halves of denormal numbers.
  const double spread = winograd ? 16 * k * largest * largest : 0;
  double floor = (2 * k + 4) * (flushes ? compute.least_normal : compute.least_denormal);
  if (winograd) floor *= 64 * largest;
  if (flushes) floor += (2 * k + 4) * compute.least_normal * largest;
  floor += flushes && storage.least == compute.least ? storage.least_normal : 2 * storage.least_denormal;
  const bool whole = is_whole(c.values[0]) && (op == Op::kGradBias || is_whole(c.values[1])) &&
                     (!operands.has_bias || is_whole(c.values[2]));
  const bool exact = whole && k * 20 < 1 / compute.unit;

  bool weights_finite = true;
  if (op == Op::kGradInput) {
    const int64_t parts = int64_t(operands.b.bytes.size()) / storage.bytes;
    for (int64_t i = 0; i < parts; ++i) {
      weights_finite = weights_finite && std::isfinite(decode(storage, operands.b.bytes.data() + i * storage.bytes));
    }
  }
  if (!weights_finite) return;  // what is NaN follows the geometry; its consistency is compared elsewhere

  // Sums end with the addition of the bias or of +0, so that -0 needs a bias of -0. Also where denormal numbers are
  // flushed: what +0 is added to has been by the operation before.
  const bool no_negative_zeros = !operands.has_bias && !directed && storage.bytes == compute.bytes;

  double squares = 0, most = 0, all_errors = 0, all_units = 0;
  int64_t measured = 0;
  for (size_t i = 0; i < expected.value.size(); ++i) {
    const double got = decode(storage, numbers.data() + i * size_t(storage.bytes));
    const long double wanted = expected.value[i];
    const double magnitude = expected.magnitude[i];
    const auto wrong = [&](const char* how) {
      fail("element " + std::to_string(i) + " is " + number(got) + ", " + how + " " + number(double(wanted)) +
           ", sum of sizes " + number(magnitude));
    };
    if (!(magnitude < compute.largest / 4)) continue;  // may overflow on the way
    // Infinity times a denormal number that is taken as zero is NaN.
    if (!std::isfinite(wanted) && (c.flush == 2 || pairs || amx)) {
      if (std::isfinite(got)) return wrong("expected");
      continue;
    }
    if (std::isnan(wanted)) {
      if (!std::isnan(got)) return wrong("expected");
      continue;
    }
    if (std::isinf(wanted)) {
      if (got != double(wanted)) return wrong("expected");
      continue;
    }
    if (got == 0 && std::signbit(got) && no_negative_zeros) return wrong("sign of zero, expected");
    const double sizes = exact ? 0 : steps * compute.unit * (magnitude + spread);
    const double narrowing = (storage.bytes == compute.bytes ? (exact ? 0 : compute.unit) : storage.unit) *
                             (directed ? 2 : 1) * (std::fabs(double(wanted)) + sizes);
    const double tolerance = sizes + narrowing + (exact ? 0 : floor);
    if (std::isinf(got) && std::fabs(double(wanted)) + tolerance >= storage.largest) continue;
    const double error = std::fabs(double((long double)got - wanted));
    if (!(error <= tolerance)) return wrong("expected");
    if (magnitude > 0) {
      const double relative = error / (compute.unit * magnitude);
      squares += relative * relative;
      all_errors += error * error;
      all_units += compute.unit * magnitude * compute.unit * magnitude;
      if (relative > most) most = relative;
      ++measured;
    }
  }
  const bool smooth =
      is_smooth(c.values[0]) && is_smooth(c.values[1]) && (!operands.has_bias || is_smooth(c.values[2]));
  bool repeated = false;
  for (const Layout& layout : c.layout) repeated = repeated || layout.expanded != 0 || layout.windows != 0;
  if (smooth && !repeated && !directed && !flushes && storage.bytes == compute.bytes && measured >= 32) {
    // Winograd's error follows from the neighbours' sums, beside which an element's own may be small: all together.
    const double mean = std::sqrt(winograd ? all_errors / all_units : squares / double(measured));
    if (mean > kMeanError || (most > kLargestError && !winograd)) {
      fail("accuracy: error of " + number(mean) + " roundoffs in the mean, " + number(most) + " at most");
    }
  }
}

// ---- against other ways ---------------------------------------------------------------------------------------------

void compare(const Case& c, const std::vector<uint8_t>& first, const std::vector<uint8_t>& other, size_t begin,
             const char* what) {
  const DType dtype = DType(c.dtype);
  const size_t item = size_t(size_of(dtype));
  size_t different = 0, where = 0;
  for (size_t i = 0; i < other.size(); i += item) {
    if (same_bits(dtype, first.data() + begin + i, other.data() + i)) continue;
    if (different++ == 0) where = i;
  }
  if (different == 0) return;
  std::string shown;
  if (!is_integer(dtype)) {
    const Format& format = storage_format(dtype);
    shown = ": " + number(decode(format, first.data() + begin + where)) + " and " +
            number(decode(format, other.data() + where));
  }
  fail(std::string("bits follow ") + what + ": " + std::to_string(different) + " elements of " +
       std::to_string(other.size() / item) + " differ, the first is " + std::to_string(where / item) + shown);
}

void set_format(Way& way, bool channels_last) {
  for (Layout& layout : way.layout) {
    layout = Layout();
    layout.order = channels_last ? kChannelsLast : kContiguous;
  }
  way.bias_stride = way.bias_stride == 0 ? 0 : 1;
}

// The bits of one image do not follow the batch.
void compare_batches(const Case& c, const Conv2dProblem& p, const Operands& operands, const Way& first,
                     const std::vector<uint8_t>& numbers, Random& random) {
  static constexpr int64_t kBatches[] = {1, 2, 3, 5, 8, 13, 65, 130};
  const int64_t batch = kBatches[random.below(8)], image = random.below(p.batch), place = random.below(batch);
  if (products(p) / double(p.batch) * double(batch) > std::max(100e3, 2 * products(p))) return;
  std::vector<int64_t> images;
  for (int64_t n = 0; n < batch; ++n) images.push_back(n == place ? image : random.below(p.batch));
  Conv2dProblem other = p;
  other.batch = batch;
  Operands others{take_images(operands.a, images), operands.b, operands.bias, operands.has_bias};
  Way way = first;
  if (random.below(2) == 0) set_format(way, random.below(2) == 0);
  way.one_matrix = Op(c.op) == Op::kMatmul && p.in_w == 1 && random.below(2) == 0;
  way.layout[0].far = way.layout[2].far = 0;
  if (!fits(c, other, way) || !is_valid(other, DType(c.dtype))) return;
  const std::vector<uint8_t> result = call(c, other, others, way);
  const size_t bytes = numbers.size() / size_t(p.batch);
  const std::vector<uint8_t> one(result.begin() + int64_t(bytes) * place,
                                 result.begin() + int64_t(bytes) * (place + 1));
  compare(c, numbers, one, bytes * size_t(image), "the batch");
}

bool agree(int64_t a, int64_t b, const Case& c) {
  if (a == 0 || b == 0) return false;
  if (DType(c.dtype) != DType::kBFloat16 || Op(c.op) == Op::kGradBias) return true;
  if (a > 3 || b > 3) return a > 3 && b > 3;  // AMX's tiles, and their emulation
  return a != 3 && b != 3;                    // products in pairs
}

// ---- explain --------------------------------------------------------------------------------------------------------

// A driver's name, of what ran and of what is explained.
std::string kind_of_run(const Run& run) {
  const std::string& name = driver_of(run.body);
  if (name.find("amx") == 0) return name.find("GradWeightCall<") != std::string::npos ? "weight, amx" : "amx";
  const char* const kKinds[][2] = {
      {"PixelCall<", "pixels"},
      {"WinogradCall<", "winograd"},
      {"FewPlanesCall<", "few planes"},
      {"DepthwiseCalls<", "depthwise"},
      {"DepthwiseWeightCall<", "depthwise weight"},
      {"StridedCall<", "strided"},
      {"PhasesCall<", "phases"},
      {"DotCall<", "dot products"},
      {"Along)0>", "rows"},
      {"Along)1>", "columns"},
      {"GradBiasCall<", "bias"},
      {"WeightLanes)0>", name.find("avx512_bf16 ") == 0 ? "weight, pairs" : "weight, channels"},
      {"WeightLanes)1>", "weight, groups"},
  };
  for (const auto& kind : kKinds) {
    if (name.find(kind[0]) != std::string::npos) return kind[1];
  }
  if (name.find("ConvCall<") == std::string::npos) return "";
  const bool pairs = name.find("avx512_bf16 ") == 0, groups = name.find(", true>") != std::string::npos;
  return pairs ? groups ? "pairs of groups" : "pairs" : groups ? "groups" : "channels";
}
std::string isa_of_run(const Run& run) {
  const std::string& name = driver_of(run.body);
  return name.substr(0, name.find(' '));
}

std::string kind_of_explanation(const cpu::Explanation& e, Op op) {
  const auto has = [&](const char* part) { return e.engine.find(part) != std::string::npos; };
  if (has("AMX tiles")) return op == Op::kGradWeight ? "weight, amx" : "amx";
  if (has("over groups, bfloat16 products in pairs")) return "pairs of groups";
  if (has("bfloat16 products in pairs")) return op == Op::kGradWeight ? "weight, pairs" : "pairs";
  if (has("Winograd")) return "winograd";
  if (has("plane by plane")) return "few planes";
  if (has("vectors over pixels")) return "pixels";
  if (has("as they lie in memory")) return op == Op::kGradWeight ? "depthwise weight" : "depthwise";
  if (has("dot products along")) return "dot products";
  if (has("rows times factors")) return "rows";
  if (has("columns times factors")) return "columns";
  if (has("pixels of two phases")) return "strided";
  if (has("phases of the stride together")) return "phases";
  if (has("vectors over groups")) return op == Op::kGradWeight ? "weight, groups" : "groups";
  if (has("vectors over input channels")) return "weight, channels";
  if (has("vectors over result channels")) return op == Op::kGradWeight ? "weight, channels" : "channels";
  return "";
}

TensorView view_of(const Sizes& size, bool channels_last) {
  return dense_view({size[0], size[1], size[2], size[3]}, channels_last);
}

cpu::Explanation explain(const Case& c, const Conv2dProblem& p, const Way& way, bool channels_last) {
  static constexpr cpu::Direction kDirections[] = {cpu::Direction::kForward, cpu::Direction::kGradInput,
                                                   cpu::Direction::kGradWeight};
  use_isa(int(way.isa));
  use_limits(way.limits);
  // Choices that change no bit weigh shares, which are rounded as the call's are.
  const Environment environment(c.rounding, c.flush);
  if (Op(c.op) == Op::kMatmul) {
    const TensorView a = view_of(tensor_size(p, 0), channels_last), b = view_of(tensor_size(p, 1), channels_last);
    const TensorView result = view_of(tensor_size(p, 2), channels_last);
    return cpu::explain_matmul({p.batch, p.out_w, p.out_channels, p.in_channels}, DType(c.dtype),
                               {nullptr, a.stride[0], a.stride[3], a.stride[1]}, {nullptr, 0, b.stride[1], b.stride[0]},
                               {nullptr, result.stride[0], result.stride[3], result.stride[1]}, int(way.threads));
  }
  const Roles roles = roles_of(Op(c.op));
  const auto view = [&](int tensor) { return view_of(tensor_size(p, tensor), channels_last); };
  return cpu::explain({kDirections[c.op], p, DType(c.dtype), view(roles.a), view(roles.b), view(roles.result),
                       /*bias=*/{}, c.winograd != 0},
                      int(way.threads));
}

// What is explained is what runs.
void compare_explanation(const Case& c, const Conv2dProblem& p, const Operands& operands, Way way, bool channels_last) {
  set_format(way, channels_last);
  if (!fits(c, p, way)) return;
  const cpu::Explanation e = explain(c, p, way, channels_last);
  call(c, p, operands, way);
  const Watched seen = watched();
  const std::string kind = kind_of_explanation(e, Op(c.op));
  bool found = false, others = false;
  std::string ran;
  for (const Run& run : seen.runs) {
    const std::string one = kind_of_run(run);
    if (one.empty() || run.items == 0) continue;
    if (e.micro_kernel.find("__" + isa_of_run(run)) == std::string::npos) others = true;
    if (ran.find(one) == std::string::npos) ran += (ran.empty() ? "" : ", ") + one;
    found = found || one == kind;
  }
  if (ran.empty() ? e.engine.find("none") != 0 && e.work_items != 0 : !found) {
    fail("explain says " + kind + " (" + e.engine + "), and what ran is " + ran);
  }
  if (others && ran == kind) fail("explain names the kernel " + e.micro_kernel + ", and another instruction set ran");
  const int64_t taken = seen.scratch_bytes + (seen.workspace_bytes + way.threads - 1) / way.threads;
  if (taken > e.workspace_bytes_per_thread) {
    fail("explain says " + std::to_string(e.workspace_bytes_per_thread) + " bytes a thread, and " +
         std::to_string(taken) + " were taken");
  }
}

// Problems of any size are only planned.
void check_plan(const Case& c, const Conv2dProblem& p) {
  ++counts.plans;
  Way way = first_way(c);
  for (int64_t machine = 0; machine < kMachines; ++machine) {
    way.limits = kProductLimits + machine;
    for (const bool channels_last : {false, true}) {
      const cpu::Explanation e = explain(c, p, way, channels_last);
      if (e.workspace_bytes_per_thread > kMostScratch || e.workspace_bytes_per_thread < 0) {
        fail("planned scratch of a thread: " + std::to_string(e.workspace_bytes_per_thread) + " bytes (" + e.engine +
             ", limits=" + std::to_string(way.limits) + ")");
      }
    }
  }
}

// ---- a case ---------------------------------------------------------------------------------------------------------

Operands draw_operands(const Case& c, const Conv2dProblem& p) {
  const Roles roles = roles_of(Op(c.op));
  const DType dtype = DType(c.dtype);
  const uint64_t seed = uint64_t(c.seed);
  Operands o;
  o.a = draw_numbers(dtype, tensor_size(p, roles.a), c.layout[roles.a], Values(c.values[0]), 3 * seed);
  o.b = draw_numbers(dtype, tensor_size(p, roles.b), c.layout[roles.b], Values(c.values[1]), 3 * seed + 1);
  o.has_bias = c.bias != 0 && is_forward(Op(c.op));
  o.bias = draw_numbers(dtype, {1, 1, 1, o.has_bias ? p.out_channels : 1}, layout_of_bias(c.bias_stride),
                        Values(c.values[2]), 3 * seed + 2);
  return o;
}

// Whether the library would call the engine at all.
bool is_called(Op op, const Conv2dProblem& p) {
  const Sizes input = tensor_size(p, 0), result = result_size(op, p);
  if (elements_of(result) == 0 || p.in_channels == 0) return false;
  if (op == Op::kGradWeight) return elements_of(input) != 0;
  if (op == Op::kGradBias) return elements_of(tensor_size(p, 2)) != 0;
  return true;
}

bool is_small(Op op, const Conv2dProblem& p, const Case& c) {
  if (products(p) > kMostProducts * 8 || elements_of(result_size(op, p)) > kMostResults) return false;
  if (double(p.out_h) * double(p.kernel_h) > 1e6 || double(p.out_w) * double(p.kernel_w) > 1e6) return false;
  const Roles roles = roles_of(op);
  Sizes stored;
  for (const int t : {roles.a, roles.b}) {
    if (!stored_size(tensor_size(p, t), c.layout[t], stored)) return false;
  }
  return true;
}

void check_one(const Case& c) {
  set_current(c);
  ++counts.cases;
  const Op op = Op(c.op);
  Conv2dProblem p = c.problem();
  if (!is_valid(p, DType(c.dtype)) || (op == Op::kMatmul && !is_product(p))) {
    ++counts.refused;
    return;
  }
  if (c.plan != 0) {
    if (op != Op::kGradBias) check_plan(c, p);
    return;
  }
  // In this order: a size that is too large may be too large for an int64_t.
  if (double(p.batch) * double(p.out_channels) * double(p.out_h) * double(p.out_w) > 1e7 || !is_small(op, p, c) ||
      !is_called(op, p)) {
    ++counts.too_large;
    return;
  }
  const Way first = first_way(c);
  if (!fits(c, p, first)) {
    ++counts.too_large;
    return;
  }
  const Operands operands = draw_operands(c, p);
  const std::vector<uint8_t> numbers = call(c, p, operands, first);
  compare_with_oracle(c, p, operands, numbers);

  Random random(uint64_t(c.seed) ^ uint64_t(c.variants) << 32);
  if ((c.variants & 1) != 0) {
    Way way = first;
    way.threads = first.threads == 1 ? 2 + random.below(3) : 1;
    way.schedule = random.below(4);
    compare(c, numbers, call(c, p, operands, way), 0, "the threads");
  }
  for (const bool channels_last : {false, true}) {
    if ((c.variants & (channels_last ? 4 : 2)) == 0) continue;
    Way way = first;
    set_format(way, channels_last);
    way.filling = 0xa5;
    if (fits(c, p, way)) compare(c, numbers, call(c, p, operands, way), 0, "the strides");
  }
  if ((c.variants & 8) != 0 && (is_forward(op) || op == Op::kGradInput)) {
    compare_batches(c, p, operands, first, numbers, random);
  }
  // Small tiles of large problems take long: weights are packed for every tile.
  if ((c.variants & 16) != 0 && (first.limits != 0 || products(p) < 50e3)) {
    Way way = first;
    way.limits = first.limits == 0 ? 1 + random.below(255) : 0;
    compare(c, numbers, call(c, p, operands, way), 0, "the limits of tiles");
  }
  if ((c.variants & 32) != 0) {
    for (const int isa : isas_present()) {
      if (isa == c.isa || !agree(isa, c.isa, c)) continue;
      Way way = first;
      way.isa = isa;
      compare(c, numbers, call(c, p, operands, way), 0,
              (std::string("the instruction set, ") + kIsaNames[isa]).c_str());
    }
  }
  if ((c.variants & 64) != 0 && op != Op::kGradBias) {
    compare_explanation(c, p, operands, first, (c.variants & 256) != 0);
  }
}

}  // namespace

void check(const Case& value) {
  for (const DType dtype : dtypes_present()) {
    if (value.dtype >= 0 && value.dtype != int64_t(dtype)) continue;
    for (const int isa : isas_present()) {
      if (value.isa >= 0 && value.isa != isa) continue;
      Case one = value;
      one.dtype = int64_t(dtype);
      one.isa = isa;
      check_one(one);
    }
  }
}

Reached reach(const Case& c, bool channels_last, bool run) {
  set_current(c);
  const Op op = Op(c.op);
  Conv2dProblem p = c.problem();
  if (!is_valid(p, DType(c.dtype)) || op == Op::kGradBias) return {};
  if (double(p.batch) * double(p.out_channels) * double(p.out_h) * double(p.out_w) > 1e7 || !is_small(op, p, c) ||
      !is_called(op, p)) {
    return {};
  }
  Way way = first_way(c);
  set_format(way, channels_last);
  if (!fits(c, p, way)) return {};
  const std::string rest = std::string(" | ") + name_of(DType(c.dtype)) + " | " + name_of(op) + " | " +
                           (channels_last ? "channels_last" : "contiguous") + " | " + kIsaNames[c.isa];
  Reached reached;
  reached.explained = kind_of_explanation(explain(c, p, way, channels_last), op) + rest;
  if (!run) return reached;
  call(c, p, draw_operands(c, p), way);
  for (const Run& one : watched().runs) {
    const std::string kind = kind_of_run(one);
    if (!kind.empty() && one.items > 0) reached.ran += kind + rest + "\n";
  }
  return reached;
}

}  // namespace conv2d_ext::fuzz
