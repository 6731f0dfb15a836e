#include "elements.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <utility>
#include <vector>

#include "../../csrc/cpu/isa/engine.h"
#include "../../csrc/cpu/isa/tables_in_use.h"
#include "check.h"
#include "environment.h"
#include "harness.h"
#include "seams.h"
#include "tensor.h"
#include "text.h"
#include "threads.h"

// Tables that this build leaves out.
namespace conv2d_ext::cpu {
__attribute__((weak)) const Tables* portable_tables() { return nullptr; }
__attribute__((weak)) const Tables* avx2_tables() { return nullptr; }
__attribute__((weak)) const Tables* avx512_tables() { return nullptr; }
}  // namespace conv2d_ext::cpu

namespace conv2d_ext::fuzz {

namespace {

namespace pointwise = cpu::pointwise;
namespace reduce = cpu::reduce;

ElementCase current;

// ---- text -----------------------------------------------------------------------------------------------------------

const char kKind[] = "elements";
const char* const kOps[kElementOps] = {"value",   "slope",        "pair",        "sum",
                                       "softmax", "softmax_grad", "log_softmax", "log_softmax_grad"};
const char* const kDTypes[] = {"float32", "float64", "bfloat16", "float16"};
constexpr int kTables = 3;  // those of the first instruction sets of kIsaNames

template <class Visit>
void for_each_field(ElementCase& c, Visit visit) {
  visit("op", c.op, kOps, kElementOps);
  visit("dtype", c.dtype, kDTypes, int(std::size(kDTypes)));
  visit("isa", c.isa, kIsaNames, kTables);
  const auto number = [&](const std::string& name, int64_t& value) { visit(name, value, nullptr, 0); };
  number("function", c.function);
  for (int d = 0; d < 4; ++d) number("size" + std::to_string(d), c.size[d]);
  number("reduced", c.reduced);
  visit_layout("input", c.layout, number);
  for (int t = 0; t < 3; ++t) number("offset" + std::to_string(t), c.offset[t]);
  for (int t = 0; t < 2; ++t) visit("values" + std::to_string(t), c.values[t], kValueNames, kValues);
  number("seed", c.seed);
  number("threads", c.threads);
  number("schedule", c.schedule);
  number("flush", c.flush);
}

void clamp_fields(ElementCase& c) {
  clamp(c.op, 0, kElementOps - 1);
  clamp(c.dtype, -1, int64_t(std::size(kDTypes)) - 1);
  clamp(c.isa, -1, kTables - 1);
  clamp(c.function, 0, 1 << 20);
  for (int64_t& size : c.size) clamp(size, 1, 1 << 20);
  clamp(c.reduced, 0, 15);
  clamp(c.layout);
  c.layout.far = 0;
  for (int64_t& offset : c.offset) clamp(offset, 0, 31);
  for (int64_t& values : c.values) clamp(values, 0, kValues - 1);
  clamp(c.threads, 1, 4);
  clamp(c.schedule, 0, 3);
  clamp(c.flush, 0, 2);
}

// ---- what every op is held to ---------------------------------------------------------------------------------------

using Bytes = std::vector<uint8_t>;

Layout at_offset(int64_t offset) {
  Layout layout;
  layout.offset = offset;
  return layout;
}
Numbers in_a_row(DType dtype, const uint8_t* bytes, int64_t n) {
  return {dtype, {1, 1, 1, n}, {n, n, n, 1}, Bytes(bytes, bytes + n * size_of(dtype))};
}
Numbers in_a_row(DType dtype, const Bytes& bytes) {
  return in_a_row(dtype, bytes.data(), int64_t(bytes.size()) / size_of(dtype));
}

// A result of n elements: what a call writes to it, and nothing beside it.
Bytes result_of(DType dtype, int64_t n, int64_t offset, const std::function<void(void*)>& call) {
  Tensor result(dtype, {1, 1, 1, n}, at_offset(offset), 0xff);
  {
    const Environment environment(0, current.flush);
    call(result.view().data);
  }
  ++counts.calls;
  bool others_untouched = true;
  Bytes numbers = result.take(others_untouched);
  if (!others_untouched) fail("something beside the result was written");
  return numbers;
}

void compare(DType dtype, const uint8_t* first, const Bytes& other, const std::string& what) {
  const size_t item = size_t(size_of(dtype));
  for (size_t at = 0; at < other.size(); at += item) {
    if (same_bits(dtype, first + at, other.data() + at)) continue;
    const Format& format = storage_format(dtype);
    return fail("bits follow " + what + ": element " + std::to_string(at / item) + " of " +
                std::to_string(other.size() / item) + " is " + std::to_string(decode(format, first + at)) + " and " +
                std::to_string(decode(format, other.data() + at)));
  }
}

std::string table_name(int isa) { return std::string("the instruction set, ") + kIsaNames[isa]; }

// `got` against `wanted`, where an error of `tolerance` is allowed before the result is rounded to storage.
void compare_with(DType dtype, const Bytes& numbers, int64_t i, long double wanted, double tolerance) {
  const Format& storage = storage_format(dtype);
  const double got = decode(storage, numbers.data() + i * storage.bytes);
  const double floor = current.flush != 0 ? 2 * storage.least_normal : storage.least_denormal;
  const double rounding = storage.unit * (std::fabs(double(wanted)) + tolerance) + floor;
  if (std::isinf(got) && std::fabs(double(wanted)) + tolerance + rounding >= storage.largest) return;
  if (std::fabs(double((long double)got - wanted)) <= tolerance + rounding) return;
  fail("element " + std::to_string(i) + " is " + std::to_string(got) + ", expected " + std::to_string(double(wanted)) +
       " within " + std::to_string(tolerance + rounding));
}

const cpu::Tables* tables_of(int64_t isa) {
  return isa == 0 ? cpu::portable_tables() : isa == 1 ? cpu::avx2_tables() : cpu::avx512_tables();
}
const pointwise::Rows& rows_of(int64_t isa) { return tables_of(isa)->rows; }
const reduce::Kernels& kernels_of(int64_t isa) { return tables_of(isa)->kernels; }

// ---- functions ------------------------------------------------------------------------------------------------------

// Parameters that the function takes: powers of all kinds, else positive numbers.
struct Parameters {
  double value[pointwise::kMaxParameters];
};
Parameters draw_parameters(int64_t function, uint64_t seed) {
  static constexpr double kPowers[] = {-2, -1, -0.5, 0, 0.25, 0.5, 1, 1.5, 2, 3, 7.25, 1e3};
  static constexpr double kPositive[] = {0.01, 0.5, 1, 1, 1.5, 2, 10, 20};
  Random random(seed);
  Parameters parameters{};
  for (double& value : parameters.value) {
    const bool any = pointwise::Function(function) == pointwise::Function::kPow;
    value = any ? kPowers[random.below(int64_t(std::size(kPowers)))] : kPositive[random.below(8)];
  }
  if (pointwise::Function(function) == pointwise::Function::kLogit && random.below(2) == 0) parameters.value[0] = -1;
  return parameters;
}

// Results of the elements from `first` on, as they would be if there were no others.
Bytes run_function(const ElementCase& c, int64_t isa, const Numbers& a, const Numbers& b, int64_t first, int64_t n) {
  const DType dtype = DType(c.dtype);
  const Tensor x(in_a_row(dtype, a.bytes.data() + first * size_of(dtype), n), at_offset(c.offset[0]));
  const Tensor y(in_a_row(dtype, b.bytes.data() + first * size_of(dtype), n), at_offset(c.offset[1]));
  const void *const from = x.view().data, *const other = y.view().data;
  const pointwise::Rows& rows = rows_of(isa);
  return result_of(dtype, n, c.offset[2], [&](void* to) {
    if (ElementOp(c.op) == ElementOp::kPair) {
      return rows.pair[c.function % pointwise::kPairFunctions][c.dtype](from, other, to, n);
    }
    const int64_t function = c.function % pointwise::kFunctions;
    const Parameters parameters = draw_parameters(function, uint64_t(c.seed));
    if (ElementOp(c.op) == ElementOp::kValue) return rows.value[function][c.dtype](from, to, n, parameters.value);
    rows.slope[function][c.dtype](other, from, to, n, parameters.value);
  });
}

// An element's bits follow from its value alone. (How accurate they are: tests/test_pointwise.py.)
void check_function(const ElementCase& c, Random& random) {
  const DType dtype = DType(c.dtype);
  const int64_t n = c.size[0] * c.size[1] * c.size[2] * c.size[3], item = size_of(dtype);
  const Numbers a = draw_numbers(dtype, {1, 1, 1, n}, Layout(), Values(c.values[0]), uint64_t(2 * c.seed));
  const Numbers b = draw_numbers(dtype, {1, 1, 1, n}, Layout(), Values(c.values[1]), uint64_t(2 * c.seed + 1));
  const Bytes numbers = run_function(c, c.isa, a, b, 0, n);
  for (const int isa : element_isas()) {
    if (isa != c.isa) compare(dtype, numbers.data(), run_function(c, isa, a, b, 0, n), table_name(isa));
  }
  for (int i = 0; i < 8; ++i) {
    const int64_t first = random.below(n), some = i < 6 ? 1 : 1 + random.below(n - first);
    compare(dtype, numbers.data() + first * item, run_function(c, c.isa, a, b, first, some), "the place in a row");
  }
}

// ---- sums -----------------------------------------------------------------------------------------------------------

// How a sum is run: positions along `reduced` for each of `kept`.
struct SumWay {
  int64_t isa, threads, schedule;
  reduce::Dims kept, reduced;
};
Bytes run_sum(const ElementCase& c, const SumWay& way, const void* input) {
  const DType dtype = DType(c.dtype);
  return result_of(dtype, way.kept.numel(), c.offset[2], [&](void* to) {
    kernels_of(way.isa).sum[c.dtype]({way.kept, way.reduced, input, to},
                                     executor(int(way.threads), Schedule(way.schedule)));
  });
}

int64_t offset_of(const reduce::Dims& dims, int64_t position) {
  int64_t offset = 0;
  for (int i = dims.count - 1; i >= 0; --i) {
    offset += position % dims.size[i] * dims.stride[i];
    position /= dims.size[i];
  }
  return offset;
}

void check_sum(const ElementCase& c, Random& random) {
  const DType dtype = DType(c.dtype);
  const Sizes size{c.size[0], c.size[1], c.size[2], c.size[3]};
  const Tensor input(draw_numbers(dtype, size, c.layout, Values(c.values[0]), uint64_t(c.seed)), c.layout);
  const ConstTensorView view = input.view();
  const auto* const data = static_cast<const uint8_t*>(view.data);
  // As the op does: the dimensions that are summed over as they lie in memory.
  std::vector<int> order;
  SumWay first{c.isa, c.threads, c.schedule, {}, {}};
  for (int d = 0; d < 4; ++d) {
    if ((c.reduced >> d & 1) != 0) {
      order.push_back(d);
    } else {
      first.kept.append(size[size_t(d)], view.stride[d]);
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return view.stride[a] > view.stride[b]; });
  for (const int d : order) first.reduced.append(size[size_t(d)], view.stride[d]);

  const Bytes numbers = run_sum(c, first, data);
  const int64_t results = first.kept.numel(), length = first.reduced.numel(), item = size_of(dtype);
  const Format &storage = storage_format(dtype), &compute = compute_format(dtype);
  for (int64_t result = 0; result < results; ++result) {
    long double sum = 0;
    double sizes = 0;
    const int64_t base = offset_of(first.kept, result);
    for (int64_t p = 0; p < length; ++p) {
      const double x = decode(storage, data + (base + offset_of(first.reduced, p)) * item);
      sum += x;
      sizes += std::fabs(x);
    }
    if (!(sizes < compute.largest / 4)) continue;  // not finite, or it may overflow on the way
    // A block's 32 rounds of lanes, its 4 of pairs, and those of the blocks and parts.
    const double steps = 40 + std::log2(double(length) + 1);
    const double floor = c.flush != 0 ? double(length) * compute.least_normal : 0;
    compare_with(dtype, numbers, result, sum, steps * compute.unit * sizes + floor);
    const double got = decode(storage, numbers.data() + result * item);
    if (got == 0 && std::signbit(got) && storage.bytes == compute.bytes) fail("a sum is -0");
  }

  SumWay way = first;
  way.threads = first.threads == 1 ? 2 + random.below(3) : 1;
  way.schedule = random.below(4);
  compare(dtype, numbers.data(), run_sum(c, way, data), "the threads");
  for (const int isa : element_isas()) {
    way = first;
    way.isa = isa;
    if (isa != c.isa) compare(dtype, numbers.data(), run_sum(c, way, data), table_name(isa));
  }
  for (int i = 0; i < 4; ++i) {  // one result alone, where it lies, and its numbers in a row
    const int64_t result = random.below(results), base = offset_of(first.kept, result);
    way = first;
    way.kept = {};
    compare(dtype, numbers.data() + result * item, run_sum(c, way, data + base * item), "the other results");
    Bytes row;
    for (int64_t p = 0; p < length; ++p) {
      const uint8_t* const from = data + (base + offset_of(first.reduced, p)) * item;
      row.insert(row.end(), from, from + item);
    }
    const Tensor dense(in_a_row(dtype, row), at_offset(c.offset[0]));
    way.reduced = {};
    way.reduced.append(length, 1);
    compare(dtype, numbers.data() + result * item, run_sum(c, way, dense.view().data), "the strides");
  }
}

// ---- softmax --------------------------------------------------------------------------------------------------------

struct SoftmaxWay {
  int64_t isa, threads, schedule, outer, inner;
};
Bytes run_softmax(const ElementCase& c, const SoftmaxWay& way, const Bytes& a, const Bytes& b) {
  const DType dtype = DType(c.dtype);
  const Tensor x(in_a_row(dtype, a), at_offset(c.offset[0])), y(in_a_row(dtype, b), at_offset(c.offset[1]));
  const int64_t length = c.size[1];
  return result_of(dtype, way.outer * length * way.inner, c.offset[2], [&](void* to) {
    const reduce::SoftmaxCall call{x.view().data, y.view().data, to, way.outer, length, way.inner};
    const ElementOp op = ElementOp(c.op);
    const bool log = op == ElementOp::kLogSoftmax || op == ElementOp::kLogSoftmaxGrad;
    const bool grad = op == ElementOp::kSoftmaxGrad || op == ElementOp::kLogSoftmaxGrad;
    const reduce::Kernels& kernels = kernels_of(way.isa);
    (grad ? kernels.softmax_grad : kernels.softmax)[log][c.dtype](call,
                                                                  executor(int(way.threads), Schedule(way.schedule)));
  });
}

// The elements of one row: position p of (outer, length, inner) lies `inner` apart.
struct SoftmaxRow {
  int64_t first, step;
};
Bytes elements_of_row(const ElementCase& c, const Bytes& numbers, const SoftmaxRow& row) {
  const int64_t item = size_of(DType(c.dtype));
  Bytes taken;
  for (int64_t p = 0; p < c.size[1]; ++p) {
    const uint8_t* const from = numbers.data() + (row.first + p * row.step) * item;
    taken.insert(taken.end(), from, from + item);
  }
  return taken;
}

// One row against its formula, where nothing overflows. `a` and `b` are the operands' numbers.
void compare_softmax(const ElementCase& c, const Bytes& a, const Bytes& b, const Bytes& numbers) {
  const DType dtype = DType(c.dtype);
  const Format &storage = storage_format(dtype), &compute = compute_format(dtype);
  const int64_t length = c.size[1];
  std::vector<double> x, y;
  double largest = -1, most = 0;
  for (int64_t p = 0; p < length; ++p) {
    x.push_back(decode(storage, a.data() + p * storage.bytes));
    y.push_back(decode(storage, b.data() + p * storage.bytes));
    if (!std::isfinite(x.back()) || !std::isfinite(y.back())) return;
    largest = p == 0 ? x[0] : std::max(largest, x.back());
    most = std::max({most, std::fabs(x.back()), std::fabs(y.back())});
  }
  if (!(most < 1e15)) return;  // differences and products may overflow
  const double steps = 48 + double(length) / cpu::reduce::kMaxDims;
  const ElementOp op = ElementOp(c.op);
  if (op == ElementOp::kSoftmax || op == ElementOp::kLogSoftmax) {
    long double sum = 0;
    for (const double value : x) sum += std::exp((long double)value - largest);
    for (int64_t p = 0; p < length; ++p) {
      const long double distance = (long double)x[size_t(p)] - largest;
      const double moved = compute.unit * (std::fabs(double(distance)) + steps);  // of the exponent
      if (op == ElementOp::kLogSoftmax) {
        const long double wanted = distance - std::log(sum);
        compare_with(dtype, numbers, p, wanted, moved + 4 * compute.unit * std::fabs(double(wanted)));
      } else {
        const long double wanted = std::exp(distance) / sum;
        compare_with(dtype, numbers, p, wanted, moved * double(wanted) * 2 + compute.least_normal);
      }
    }
    return;
  }
  const bool log = op == ElementOp::kLogSoftmaxGrad;
  double flushed = 0;  // by operands that are taken as zeros, and products
  long double sum = 0;
  double sizes = 0;
  for (int64_t p = 0; p < length; ++p) {
    const long double term = log ? (long double)x[size_t(p)] : (long double)x[size_t(p)] * y[size_t(p)];
    sum += term;
    sizes += std::fabs(double(term));
    if (c.flush != 0) flushed += compute.least_normal * (1 + (log ? 0 : std::fabs(y[size_t(p)])));
  }
  for (int64_t p = 0; p < length; ++p) {
    const long double factor = log ? std::exp((long double)y[size_t(p)]) : y[size_t(p)];
    if (!(std::fabs(double(factor)) < 1e15)) continue;
    const long double wanted = log ? x[size_t(p)] - factor * sum : factor * (x[size_t(p)] - sum);
    const double scale = std::fabs(double(factor)) * (sizes + (log ? 0 : std::fabs(x[size_t(p)])));
    const double reach = log ? std::fabs(y[size_t(p)]) : 0;  // e^y errs with y
    compare_with(dtype, numbers, p, wanted,
                 (steps + reach) * compute.unit * (scale + std::fabs(double(wanted))) +
                     compute.least_normal * (2 + std::fabs(double(factor)) + sizes) +
                     flushed * (1 + std::fabs(double(factor))));
  }
}

void check_softmax(const ElementCase& c, Random& random) {
  const DType dtype = DType(c.dtype);
  const int64_t outer = c.size[0], length = c.size[1], inner = c.size[2], n = outer * length * inner;
  const Bytes a = draw_numbers(dtype, {1, 1, 1, n}, Layout(), Values(c.values[0]), uint64_t(2 * c.seed)).bytes;
  const Bytes b = draw_numbers(dtype, {1, 1, 1, n}, Layout(), Values(c.values[1]), uint64_t(2 * c.seed + 1)).bytes;
  const SoftmaxWay first{c.isa, c.threads, c.schedule, outer, inner};
  const Bytes numbers = run_softmax(c, first, a, b);
  SoftmaxWay way = first;
  way.threads = first.threads == 1 ? 2 + random.below(3) : 1;
  way.schedule = random.below(4);
  compare(dtype, numbers.data(), run_softmax(c, way, a, b), "the threads");
  for (const int isa : element_isas()) {
    way = first;
    way.isa = isa;
    if (isa != c.isa) compare(dtype, numbers.data(), run_softmax(c, way, a, b), table_name(isa));
  }
  for (int i = 0; i < 4; ++i) {
    const int64_t at = random.below(outer * inner);
    const SoftmaxRow row{at / inner * length * inner + at % inner, inner};
    const Bytes one_a = elements_of_row(c, a, row), one_b = elements_of_row(c, b, row);
    const Bytes one = elements_of_row(c, numbers, row);
    compare_softmax(c, one_a, one_b, one);
    compare(dtype, one.data(), run_softmax(c, {c.isa, 1, 0, 1, 1}, one_a, one_b), "the other rows, or the strides");
  }
}

void check_one(const ElementCase& c) {
  current = c;
  text_of_current = [] { return to_text(current); };
  ++counts.cases;
  const double elements = double(c.size[0]) * double(c.size[1]) * double(c.size[2]) * double(c.size[3]);
  const bool is_sum = ElementOp(c.op) == ElementOp::kSum;
  const bool has_layout =
      is_sum && Tensor::fits(DType(c.dtype), {c.size[0], c.size[1], c.size[2], c.size[3]}, c.layout);
  if (elements > 500e3 || (is_sum && !has_layout)) {
    ++counts.too_large;
    return;
  }
  Random random(uint64_t(c.seed) * 31 + uint64_t(c.function));
  switch (ElementOp(c.op)) {
    case ElementOp::kValue:
    case ElementOp::kSlope:
    case ElementOp::kPair:
      return check_function(c, random);
    case ElementOp::kSum:
      return check_sum(c, random);
    default:
      return check_softmax(c, random);
  }
}

}  // namespace

std::vector<int> element_isas() {
  std::vector<int> present;
  for (int isa = 0; isa < kTables; ++isa) {
    if (tables_of(isa) != nullptr && cpu::machine_has(kIsaNames[isa])) present.push_back(isa);
  }
  return present;
}

std::string to_text(const ElementCase& value) {
  return write_text(kKind, value, [](ElementCase& c, auto visit) { for_each_field(c, visit); });
}

bool parse(const char* text, size_t size, ElementCase& result) {
  const auto fields = [](ElementCase& c, auto visit) { for_each_field(c, visit); };
  if (!read_text(kKind, std::string(text, size), result, fields)) return false;
  clamp_fields(result);
  return true;
}

void check(const ElementCase& value) {
  for (int64_t dtype = 0; dtype < int64_t(std::size(kDTypes)); ++dtype) {
    if (value.dtype >= 0 && value.dtype != dtype) continue;
    for (const int isa : element_isas()) {
      if (value.isa >= 0 && value.isa != isa) continue;
      ElementCase one = value;
      one.dtype = dtype;
      one.isa = isa;
      check_one(one);
    }
  }
}

}  // namespace conv2d_ext::fuzz
