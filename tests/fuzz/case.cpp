#include "case.h"

#include <iterator>

#include "text.h"

namespace conv2d_ext::fuzz {

const int kOrder[kOrders][4] = {{0, 1, 2, 3}, {0, 1, 3, 2}, {0, 2, 1, 3}, {0, 2, 3, 1}, {0, 3, 1, 2}, {0, 3, 2, 1},
                                {1, 0, 2, 3}, {1, 0, 3, 2}, {1, 2, 0, 3}, {1, 2, 3, 0}, {1, 3, 0, 2}, {1, 3, 2, 0},
                                {2, 0, 1, 3}, {2, 0, 3, 1}, {2, 1, 0, 3}, {2, 1, 3, 0}, {2, 3, 0, 1}, {2, 3, 1, 0},
                                {3, 0, 1, 2}, {3, 0, 2, 1}, {3, 1, 0, 2}, {3, 1, 2, 0}, {3, 2, 0, 1}, {3, 2, 1, 0}};

// ---- the problem ----------------------------------------------------------------------------------------------------

Conv2dProblem Case::problem() const {
  Conv2dProblem p{};
  p.batch = batch;
  p.groups = groups;
  p.in_h = in_h;
  p.in_w = in_w;
  p.kernel_h = kernel_h;
  p.kernel_w = kernel_w;
  p.stride_h = stride_h;
  p.stride_w = stride_w;
  p.pad_top = top;
  p.pad_bottom = bottom;
  p.pad_left = left;
  p.pad_right = right;
  p.dilation_h = dilation_h;
  p.dilation_w = dilation_w;
  // What overflows is refused by is_valid.
  if (__builtin_mul_overflow(in, groups, &p.in_channels)) p.in_channels = -1;
  if (__builtin_mul_overflow(out, groups, &p.out_channels)) p.out_channels = -1;
  return p;
}

namespace {

bool bytes_fit(int64_t itemsize, int64_t a, int64_t b, int64_t c, int64_t d) {
  int64_t bytes = itemsize;
  for (const int64_t size : {a, b, c, d}) {
    if (size != 0 && __builtin_mul_overflow(bytes, size, &bytes)) return false;
  }
  return true;
}

bool output_size(int64_t in, int64_t before, int64_t after, int64_t kernel, int64_t dilation, int64_t stride,
                 int64_t& out) {
  int64_t padded = 0, reach = 0;
  if (__builtin_add_overflow(in, before, &padded) || __builtin_add_overflow(padded, after, &padded)) return false;
  if (__builtin_mul_overflow(dilation, kernel - 1, &reach) || __builtin_add_overflow(reach, 1, &reach)) return false;
  if (padded < reach) return false;
  out = (padded - reach) / stride + 1;
  return true;
}

}  // namespace

bool is_valid(Conv2dProblem& p, DType dtype) {
  if (p.batch < 0 || p.in_channels < 0 || p.in_h < 0 || p.in_w < 0 || p.out_channels < 0) return false;
  if (p.pad_top < 0 || p.pad_bottom < 0 || p.pad_left < 0 || p.pad_right < 0) return false;
  if (p.stride_h < 1 || p.stride_w < 1 || p.dilation_h < 1 || p.dilation_w < 1 || p.groups < 1) return false;
  if (p.kernel_h < 1 || p.kernel_w < 1 || p.out_channels < p.groups) return false;
  if (!output_size(p.in_h, p.pad_top, p.pad_bottom, p.kernel_h, p.dilation_h, p.stride_h, p.out_h)) return false;
  if (!output_size(p.in_w, p.pad_left, p.pad_right, p.kernel_w, p.dilation_w, p.stride_w, p.out_w)) return false;
  if ((p.in_h == 0 || p.in_w == 0) && p.batch != 0 && p.in_channels != 0) return false;
  const int64_t size = size_of(dtype);
  return bytes_fit(size, p.batch, p.out_channels, p.out_h, p.out_w) &&
         bytes_fit(size, p.batch, p.in_channels, p.in_h, p.in_w) &&
         bytes_fit(size, p.out_channels, p.in_channels / p.groups, p.kernel_h, p.kernel_w);
}

bool is_product(const Conv2dProblem& p) {
  return p.groups == 1 && p.in_h == 1 && p.kernel_h == 1 && p.kernel_w == 1 && p.stride_h == 1 && p.stride_w == 1 &&
         p.pad_top == 0 && p.pad_bottom == 0 && p.pad_left == 0 && p.pad_right == 0;
}

double products(const Conv2dProblem& p) {
  return double(p.batch) * double(p.out_channels) * double(p.out_h) * double(p.out_w) *
         double(p.in_channels_per_group()) * double(p.kernel_h) * double(p.kernel_w);
}

const char* const kValueNames[kValues] = {"normal", "positive", "rectified",    "small_whole",
                                          "zeros",  "denormal", "underflowing", "overflowing",
                                          "wild",   "infinite", "nan",          "least_normal"};

// ---- text -----------------------------------------------------------------------------------------------------------

namespace {

const char kKind[] = "conv2d";

const char* const kOps[] = {"forward", "grad_input", "grad_weight", "grad_bias", "matmul"};
const char* const kDTypes[] = {"float32", "float64", "bfloat16", "float16", "complex64", "complex128",
                               "int8",    "uint8",   "int16",    "int32",   "int64"};
const char* const kIsas[] = {"portable", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated"};
const char* const kRoundings[] = {"nearest", "down", "up", "zero"};

constexpr int kOpCount = int(std::size(kOps)), kDTypeCount = int(std::size(kDTypes));
constexpr int kIsaCount = int(std::size(kIsas)), kRoundingCount = int(std::size(kRoundings));

template <class Visit>
void for_each_field(Case& c, Visit visit) {
  visit("op", c.op, kOps, kOpCount);
  visit("dtype", c.dtype, kDTypes, kDTypeCount);
  visit("isa", c.isa, kIsas, kIsaCount);
  const auto number = [&](const std::string& name, int64_t& value) { visit(name, value, nullptr, 0); };
  number("batch", c.batch);
  number("groups", c.groups);
  number("in", c.in);
  number("out", c.out);
  number("in_h", c.in_h);
  number("in_w", c.in_w);
  number("kernel_h", c.kernel_h);
  number("kernel_w", c.kernel_w);
  number("stride_h", c.stride_h);
  number("stride_w", c.stride_w);
  number("top", c.top);
  number("bottom", c.bottom);
  number("left", c.left);
  number("right", c.right);
  number("dilation_h", c.dilation_h);
  number("dilation_w", c.dilation_w);
  number("bias", c.bias);
  number("bias_stride", c.bias_stride);
  const char* const tensors[] = {"input", "weight", "output"};
  for (int t = 0; t < 3; ++t) visit_layout(tensors[t], c.layout[t], number);
  for (int t = 0; t < 3; ++t) visit("values" + std::to_string(t), c.values[t], kValueNames, kValues);
  number("seed", c.seed);
  number("threads", c.threads);
  number("schedule", c.schedule);
  visit("rounding", c.rounding, kRoundings, kRoundingCount);
  number("flush", c.flush);
  number("limits", c.limits);
  number("variants", c.variants);
  number("winograd", c.winograd);
  number("plan", c.plan);
}

void clamp_fields(Case& c) {
  for (Layout& layout : c.layout) clamp(layout);
  for (int64_t& values : c.values) clamp(values, 0, kValues - 1);
  clamp(c.op, 0, kOpCount - 1);
  clamp(c.dtype, -1, kDTypeCount - 1);
  clamp(c.isa, -1, kIsaCount - 1);
  clamp(c.bias, 0, 1);
  clamp(c.bias_stride, 0, 3);
  clamp(c.threads, 1, 4);
  clamp(c.schedule, 0, 3);
  clamp(c.rounding, 0, kRoundingCount - 1);
  clamp(c.flush, 0, 2);
  clamp(c.winograd, 0, 1);
}

}  // namespace

const char* name_of(DType dtype) { return kDTypes[int(dtype)]; }
const char* name_of(Op op) { return kOps[int(op)]; }

void clamp(Layout& layout) {
  clamp(layout.order, 0, kOrders - 1);
  for (int64_t& slice : layout.slice) clamp(slice, 0, 7);
  clamp(layout.expanded, 0, 15);
  clamp(layout.windows, 0, 3);
  clamp(layout.offset, 0, 31);
  clamp(layout.single, 0, int64_t(sizeof(kSingleStrides) / sizeof(*kSingleStrides)) - 1);
  clamp(layout.far, 0, 1);
}

std::string to_text(const Case& value) {
  return write_text(kKind, value, [](Case& c, auto visit) { for_each_field(c, visit); });
}

bool parse(const char* text, size_t size, Case& result) {
  const auto fields = [](Case& c, auto visit) { for_each_field(c, visit); };
  if (!read_text(kKind, std::string(text, size), result, fields)) return false;
  clamp_fields(result);
  return true;
}

}  // namespace conv2d_ext::fuzz
