// Convolutions in three dimensions by those in two: planes of the depth are taken for images and taps along it for
// channels. What that copies is said at each.
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/new_zeros.h>
#include <ATen/ops/stack.h>

#include <array>
#include <optional>
#include <vector>

#include "autograd_node.h"
#include "conv2d_ops.h"
#include "convolution_family.h"
#include "copy_as.h"
#include "result_sizes.h"
#include "sym_arithmetic.h"

namespace conv2d_ext {
namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;

// Sizes decide which code runs: a trace is one of such sizes, and guards them. (sym_arithmetic.h's comparisons are of
// what must hold in any trace.)
bool is(const SymInt& a, const SymInt& b) { return a.sym_eq(b).guard_bool(__FILE__, __LINE__); }
bool reaches(const SymInt& a, const SymInt& b) { return a.sym_ge(b).guard_bool(__FILE__, __LINE__); }

// That of one dimension, of a list that may have one element for all.
const SymInt& of(SymIntArrayRef values, int64_t dimension) { return values[values.size() == 1 ? 0 : dimension]; }

bool are_both(SymIntArrayRef values, const SymInt& wanted) {
  return is(of(values, 1), wanted) && is(of(values, 2), wanted);
}

// a * b + c
bool times_plus(const SymInt& a, const SymInt& b, const SymInt& c, SymInt* out) {
  SymInt product = 0;
  return mul(a, b, &product) && add(product, c, out);
}

// Whether the kernel fits the padded input, or the border a transposed output with the largest output_padding that it
// may have, in this dimension.
bool fits(const SymInt& size, const SymInt& kernel, const SymInt& stride, const SymInt& padding, const SymInt& dilation,
          bool transposed) {
  if (!reaches(size, 1) || !reaches(kernel, 1) || !reaches(stride, 1) || !reaches(padding, 0) ||
      !reaches(dilation, 1)) {
    return false;
  }
  SymInt extent = 0, border = 0, whole = 0;
  if (!times_plus(dilation, kernel - 1, 1, &extent) || !mul(padding, 2, &border)) return false;
  if (transposed) {
    return times_plus(size - 1, stride, extent, &whole) && add(whole, stride.max(dilation) - 1, &whole) &&
           reaches(whole, border + 1);
  }
  return add(size, border, &whole) && reaches(whole, extent);
}

at::MemoryFormat output_format(const Tensor& input, const Tensor& weight) {
  const auto suggests = [](const Tensor& tensor) {
    return tensor.suggest_memory_format() == at::MemoryFormat::ChannelsLast3d;
  };
  const bool channels_last = input.scalar_type() != at::kDouble && (suggests(input) || suggests(weight));
  return channels_last ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::Contiguous;
}

// Every step-th plane of `length`, from one on.
Tensor planes_from(const Tensor& input, const SymInt& first, const SymInt& length, const SymInt& step) {
  return input.slice_symint(2, first, first + (length - 1) * step + 1, step);
}

// (N, C, D, H, W) as images (N * OD, C * KD, H, W), each of the planes that an output plane is the sum of. A view where
// the kernel steps by its own size and is as deep as the input, or the input has one channel; else a copy, of KD times
// the input where the stride is 1.
Tensor depth_as_channels(const Tensor& input, const SymInt& kernel, const SymInt& stride, const SymInt& padding,
                         const SymInt& dilation, const SymInt& depth) {
  if (is(stride, kernel) && is(padding, 0) && is(dilation, 1)) {
    return input.narrow_symint(2, 0, depth * kernel)
        .unflatten_symint(2, {depth, kernel})
        .transpose(1, 2)
        .flatten(2, 3)
        .flatten(0, 1);
  }
  const Tensor padded =
      is(padding, 0) ? input : at::constant_pad_nd_symint(input, {SymInt(0), 0, 0, 0, padding, padding});
  std::vector<Tensor> taps;  // as many in every call of a trace
  for (int64_t i = 0; i < kernel.guard_int(__FILE__, __LINE__); ++i) {
    taps.push_back(planes_from(padded, dilation * i, depth, stride).transpose(1, 2));
  }
  return at::stack(taps, 3).flatten(2, 3).flatten(0, 1);
}

}  // namespace

bool takes_conv3d(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, SymIntArrayRef stride,
                  SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed, const SymInt& groups) {
  for (const SymIntArrayRef values : {stride, padding, dilation}) {
    if (values.size() != 1 && values.size() != 3) return false;
  }
  if (input.dim() != 5 || weight.dim() != 5 || !reaches(groups, 1)) return false;
  for (int64_t i = 0; i < 3; ++i) {
    if (!fits(input.sym_size(2 + i), weight.sym_size(2 + i), of(stride, i), of(padding, i), of(dilation, i),
              transposed)) {
      return false;
    }
  }
  SymInt channels = 0;
  if (!reaches(weight.sym_size(0), 1) || !reaches(weight.sym_size(1), 1) || !is(weight.sym_size(0) % groups, 0) ||
      !mul(weight.sym_size(1), groups, &channels)) {
    return false;
  }
  if (!is(input.sym_size(1), transposed ? weight.sym_size(0) : channels)) return false;
  const SymInt& results = transposed ? channels : weight.sym_size(0);
  return !bias.has_value() || !bias->defined() || (bias->dim() == 1 && is(bias->sym_size(0), results));
}

// By the first way that fits: planes as rows of pixels, patches in place of images, a copy for each tap along the
// depth.
Tensor conv3d(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, SymIntArrayRef stride,
              SymIntArrayRef padding, SymIntArrayRef dilation, const SymInt& groups) {
  TORCH_CHECK(takes_conv3d(input, weight, bias, stride, padding, dilation, /*transposed=*/false, groups),
              "conv3d is supported for sizes that fit together, but got input of size ", input.sym_sizes(),
              ", weight of size ", weight.sym_sizes(), ", stride=", stride, ", padding=", padding,
              ", dilation=", dilation, ", groups=", groups);
  const auto format = output_format(input, weight);
  const SymInt kernel = weight.sym_size(2);
  if (is(weight.sym_size(3), 1) && is(weight.sym_size(4), 1) && are_both(stride, 1) && are_both(padding, 0)) {
    // A plane is a row of pixels. A contiguous input is not copied.
    const SymConv2dParams params{
        {of(stride, 0), 1}, {of(padding, 0), of(padding, 0), 0, 0}, {of(dilation, 0), 1}, groups};
    const Tensor result = conv2d(input.flatten(3, 4), weight.flatten(3, 4), bias, params);
    return in_sizes(result,
                    {result.sym_size(0), result.sym_size(1), result.sym_size(2), input.sym_size(3), input.sym_size(4)})
        .contiguous(format);
  }
  const SymInt extent = of(dilation, 0) * (kernel - 1) + 1;
  const SymInt depth = (input.sym_size(2) + of(padding, 0) * 2 - extent) / of(stride, 0) + 1;
  const SymConv2dParams params{{of(stride, 1), of(stride, 2)},
                               {of(padding, 1), of(padding, 1), of(padding, 2), of(padding, 2)},
                               {of(dilation, 1), of(dilation, 2)},
                               groups};
  const Tensor result = conv2d(depth_as_channels(input, kernel, of(stride, 0), of(padding, 0), of(dilation, 0), depth),
                               weight.flatten(1, 2), bias, params);
  const SymInt channels = result.sym_size(1), height = result.sym_size(2), width = result.sym_size(3);
  if (is(depth, 1) || is(channels, 1)) {
    return in_sizes(result, {input.sym_size(0), channels, depth, height, width}).contiguous(format);
  }
  const Tensor by_plane = in_sizes(result, {input.sym_size(0), depth, channels, height, width});
  const Tensor output = is_plain_result(by_plane) ? by_plane.transpose_(1, 2) : by_plane.transpose(1, 2);
  return output.contiguous(format);
}

// Each plane's results for all taps along the depth, (N * D, O * KD, OH, OW), which are KD / stride times the output;
// where planes share output planes, they are added in the order of the taps, in float32 where they have 16 bits.
Tensor conv_transpose3d(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                        SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef output_padding,
                        const SymInt& groups, SymIntArrayRef dilation) {
  TORCH_CHECK(takes_conv3d(input, weight, bias, stride, padding, dilation, /*transposed=*/true, groups) &&
                  (output_padding.size() == 1 || output_padding.size() == 3),
              "conv_transpose3d is supported for sizes that fit together, but got input of size ", input.sym_sizes(),
              ", weight of size ", weight.sym_sizes(), ", stride=", stride, ", padding=", padding,
              ", output_padding=", output_padding, ", dilation=", dilation, ", groups=", groups);
  const SymInt &step = of(stride, 0), &dilate = of(dilation, 0), &more = of(output_padding, 0);
  TORCH_CHECK(at_least(more, 0) && at_least(step.max(dilate), more + 1),
              "output padding must be smaller than either stride or dilation, but got output_padding=", output_padding,
              ", stride=", stride, ", dilation=", dilation);
  const SymInt kernel = weight.sym_size(2), depth = input.sym_size(2), &border = of(padding, 0);
  const SymInt length = (depth - 1) * step + dilate * (kernel - 1) + 1;
  TORCH_CHECK(at_least(length + more, border * 2 + 1), "Given input size per channel: ", input.sym_sizes().slice(2),
              ". Calculated output size per channel has a depth of ", length + more - border * 2,
              ". Output size is too small");
  // No two planes of the input meet in one of the output.
  const bool is_apart = is(step, kernel) && is(dilate, 1);
  const auto dtype = input.scalar_type();
  const bool widens = !is_apart && (dtype == at::kBFloat16 || dtype == at::kHalf);
  const auto wide = [&](const Tensor& tensor) { return widens ? tensor.to(at::kFloat) : tensor; };
  const auto last_two = [](SymIntArrayRef values) { return std::array<SymInt, 2>{of(values, 1), of(values, 2)}; };
  // The gradient of a transposed copy would be transposed, too.
  const auto format = output_format(input, weight);
  const bool input_is_last = input.suggest_memory_format() == at::MemoryFormat::ChannelsLast3d;
  const Tensor source = torch::autograd::compute_requires_grad(input) || is_wrapped(input)
                            ? copy_as(input, /*channels_last=*/false, input_is_last)
                            : input;
  const Tensor planes = conv_transpose2d_op().call(
      wide(source).transpose(1, 2).flatten(0, 1), wide(weight).flatten(1, 2), std::nullopt, last_two(stride),
      last_two(padding), last_two(output_padding), groups, last_two(dilation));
  const SymInt height = planes.sym_size(2), width = planes.sym_size(3), channels = weight.sym_size(1) * groups;
  const Tensor parts = in_sizes(planes.contiguous(), {input.sym_size(0), depth, channels, kernel, height, width});
  Tensor output;
  if (is_apart) {
    output = in_sizes(parts.transpose(1, 2).contiguous(), {input.sym_size(0), channels, length, height, width});
  } else {
    output = parts.new_zeros_symint({input.sym_size(0), channels, length, height, width});
    for (int64_t i = 0; i < kernel.guard_int(__FILE__, __LINE__); ++i) {
      planes_from(output, dilate * i, depth, step).add_(parts.select(3, i).transpose(1, 2));
    }
  }
  if (!is(more, 0)) output = at::constant_pad_nd_symint(output, {SymInt(0), 0, 0, 0, 0, more});
  if (!is(border, 0)) {  // a copy, which is no view
    output = output.narrow_symint(2, border, length + more - border * 2).clone(at::MemoryFormat::Contiguous);
  }
  if (bias.has_value() && bias->defined()) {
    const Tensor sum = conv2d_add_bias(output.flatten(3, 4), wide(*bias));
    output = in_sizes(sum, output.sym_sizes());
  }
  // oneDNN, whose results may be channels_last, takes no larger output_padding.
  bool is_padded_less = true;
  for (int64_t i = 0; i < 3; ++i) is_padded_less = is_padded_less && !reaches(of(output_padding, i), of(stride, i));
  return output.to(dtype).contiguous(is_padded_less ? format : at::MemoryFormat::Contiguous);
}

}  // namespace conv2d_ext
