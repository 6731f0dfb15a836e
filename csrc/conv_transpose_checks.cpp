#include "conv_transpose_checks.h"

#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <string>

#include "sym_arithmetic.h"

namespace conv2d_ext {
namespace {

using c10::SymInt;
using c10::SymIntArrayRef;

// The lists with one element for each dimension.
struct PerDimension {
  c10::SmallVector<SymInt, 2> stride, padding, output_padding, dilation;
};

c10::SmallVector<SymInt, 2> expand(const char* name, SymIntArrayRef values, int64_t dims) {
  check_length(name, values, dims);
  c10::SmallVector<SymInt, 2> expanded(values.begin(), values.end());
  expanded.resize(dims, values.back());
  return expanded;
}

void check_ranks(int64_t dims, SymIntArrayRef input, SymIntArrayRef weight) {
  const auto dim = static_cast<int64_t>(input.size());
  TORCH_CHECK(dim == dims + 1 || dim == dims + 2, "Expected ", dims + 1, "D (unbatched) or ", dims + 2,
              "D (batched) input to conv_transpose", dims, "d, but got input of size: ", input);
  const auto weight_dim = static_cast<int64_t>(weight.size());
  TORCH_CHECK(weight_dim >= 3,
              "weight should have at least three dimensions: expected weight of size (in_channels, "
              "out_channels/groups, kernel), but got weight of size ",
              weight);
  TORCH_CHECK(weight_dim == dims + 2, "Expected ", weight_dim, "-dimensional input for ", weight_dim,
              "-dimensional weight ", weight, ", but got ", dim, "-dimensional input of size ", input,
              " instead: conv_transpose", dims, "d takes weight of ", dims + 2, " dimensions");
}

void check_hyper_parameters(const PerDimension& p, const SymInt& groups, bool is_empty) {
  for (size_t i = 0; i < p.stride.size(); ++i) {
    TORCH_CHECK(at_least(p.padding[i], SymInt(0)),
                "negative padding is not supported: expected padding of at least 0, but got padding=",
                SymIntArrayRef(p.padding));
    TORCH_CHECK(at_least(p.output_padding[i], SymInt(0)),
                "negative output_padding is not supported: expected output_padding of at least 0, but got "
                "output_padding=",
                SymIntArrayRef(p.output_padding));
    TORCH_CHECK(at_least(p.stride[i], SymInt(1)),
                "non-positive stride is not supported: expected stride of at least 1, but got stride=",
                SymIntArrayRef(p.stride));
    TORCH_CHECK(at_least(p.dilation[i], SymInt(1)),
                "dilation should be greater than zero, non-positive dilation is not supported: expected dilation of "
                "at least 1, but got dilation=",
                SymIntArrayRef(p.dilation));
  }
  TORCH_CHECK(at_least(groups, SymInt(1)),
              "non-positive groups is not supported: expected groups of at least 1, but got groups=", groups);
  for (size_t i = 0; i < p.stride.size() && !is_empty; ++i) {  // PyTorch looks at it as it computes
    const SymInt limit = p.stride[i].max(p.dilation[i]);
    TORCH_CHECK(at_least(limit, p.output_padding[i] + 1),
                "output padding must be smaller than either stride or dilation, but got output_padding=",
                SymIntArrayRef(p.output_padding), ", stride=", SymIntArrayRef(p.stride),
                ", dilation=", SymIntArrayRef(p.dilation));
  }
}

void check_channels(const SymInt& channels, SymIntArrayRef input, SymIntArrayRef weight, const SymInt& groups) {
  TORCH_CHECK(at_least(weight[0], groups), "Given groups=", groups, ", expected weight to be at least ", groups,
              " at dimension 0, but got weight of size ", weight, " instead");
  TORCH_CHECK(equal(weight[0] % groups, SymInt(0)), "Given groups=", groups, ", expected weight to be divisible by ",
              groups, " at dimension 0, but got weight of size ", weight, " instead");
  TORCH_CHECK(equal(channels, weight[0]), "Given transposed=1, weight of size ", weight, ", expected input", input,
              " to have ", weight[0], " channels, but got ", channels, " channels instead");
  for (size_t i = 1; i < weight.size(); ++i) {
    TORCH_CHECK(at_least(weight[i], SymInt(1)),
                "kernel size should be greater than zero: a non-empty weight tensor expected, but got: ", weight);
  }
}

// (H - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1
bool size_of_output(const SymInt& in, const SymInt& kernel, const PerDimension& p, int64_t i, SymInt* out) {
  SymInt moved;
  SymInt reach;
  SymInt padded;
  return mul(in - 1, p.stride[i], &moved) && mul(p.dilation[i], kernel - 1, &reach) &&
         mul(p.padding[i], SymInt(-2), &padded) && add(moved, reach, out) && add(*out, p.output_padding[i], out) &&
         add(*out, SymInt(1), out) && add(*out, padded, out);
}

std::string show_extents(SymIntArrayRef extents) {
  return extents.size() == 1 ? c10::str("(", extents[0], ")") : c10::str("(", extents[0], " x ", extents[1], ")");
}

}  // namespace

ConvTransposeCall check_conv_transpose(int64_t dims, SymIntArrayRef input, SymIntArrayRef weight,
                                       std::optional<SymIntArrayRef> bias, const ConvTransposeParams& params) {
  check_ranks(dims, input, weight);
  const PerDimension p{expand("stride", params.stride, dims), expand("padding", params.padding, dims),
                       expand("output_padding", params.output_padding, dims),
                       expand("dilation", params.dilation, dims)};
  const bool batched = static_cast<int64_t>(input.size()) == dims + 2;
  const bool is_empty = batched && known_zero(input[0]);
  check_hyper_parameters(p, params.groups, is_empty);
  const SymIntArrayRef in = input.slice(input.size() - dims);
  const SymIntArrayRef kernel = weight.slice(2);
  check_channels(input[batched ? 1 : 0], input, weight, params.groups);
  SymInt channels;
  TORCH_CHECK(mul(weight[1], params.groups, &channels), "Given groups=", params.groups, ", weight of size ", weight,
              ", the output's channels overflow");
  if (bias.has_value()) {
    TORCH_CHECK(bias->size() == 1 && equal((*bias)[0], channels), "Given transposed=1, weight of size ", weight,
                ", expected bias to be 1-dimensional with ", channels, " elements, but got bias of size ", *bias,
                " instead");
  }

  ConvTransposeCall call{{{1, 1}, {0, 0, 0, 0}, {1, 1}, params.groups}, {}, {0, 0}, {0, 0}};
  if (batched) {
    call.output_size.push_back(input[0]);
  }
  call.output_size.push_back(channels);
  if (dims == 1) {
    call.output_size.emplace_back(1);
  }
  c10::SmallVector<SymInt, 2> sizes(dims);
  for (int64_t i = 0; i < dims; ++i) {
    TORCH_CHECK(size_of_output(in[i], kernel[i], p, i, &sizes[i]), "conv_transpose", dims,
                "d: the output's size overflows at dimension ", i, ": input of size ", input, ", weight of size ",
                weight, ", stride=", SymIntArrayRef(p.stride), ", padding=", SymIntArrayRef(p.padding),
                ", dilation=", SymIntArrayRef(p.dilation));
  }
  for (int64_t i = 0; i < dims; ++i) {
    TORCH_CHECK(!known_zero(in[i]) || is_empty,
                "Only zero batch or zero channel inputs are supported, but got input shape: ", input);
    TORCH_CHECK(at_least(sizes[i], SymInt(is_empty ? 0 : 1)), "Given input size per channel: ", show_extents(in),
                ". Calculated output size per channel: ", show_extents(sizes),
                ". Output size is too small: kernel=", kernel, ", stride=", SymIntArrayRef(p.stride),
                ", padding=", SymIntArrayRef(p.padding), ", dilation=", SymIntArrayRef(p.dilation),
                ", output_padding=", SymIntArrayRef(p.output_padding));
    const int64_t at = 2 - dims + i;  // in the image
    call.params.stride[at] = p.stride[i];
    call.params.padding[2 * at] = call.params.padding[2 * at + 1] = p.padding[i];
    call.params.dilation[at] = p.dilation[i];
    // A convolution of the output gives floor(((in - 1) * stride + output_padding) / stride) + 1 elements: those of
    // input, and one more for each whole stride in output_padding (which then is less than the dilation).
    call.append[at] = p.output_padding[i] / p.stride[i];
    if (is_empty && (known_zero(in[i]) || known_zero(sizes[i]))) {  // neither side of a convolution may be
      call.append[at] += 1;
      call.cut[at] = p.stride[i];
    }
    call.output_size.push_back(sizes[i] + call.cut[at]);
  }
  return call;
}

}  // namespace conv2d_ext
