#include "conv2d_checks.h"

#include <array>
#include <cctype>
#include <string>

#include "sym_arithmetic.h"

namespace conv2d_ext {
namespace {

using at::Tensor;
using c10::ArrayRef;
using c10::SymInt;

template <class Int>
ArrayRef<Int> sizes_of(const Tensor& tensor) {
  if constexpr (std::is_same_v<Int, int64_t>) {
    return tensor.sizes();
  } else {
    return tensor.sym_sizes();
  }
}

// ---- hyper-parameters and geometry

void expand_pair(const char* name, c10::SymIntArrayRef values, SymInt (&pair)[2]) {
  check_length(name, values, 2);
  pair[0] = values.front();
  pair[1] = values.back();
}

// A 1-D convolution is checked as an image of one row. Its messages leave that out: they show the caller's sizes.
enum class Shown { kImage, kRow };

const char* function_of(Shown shown) { return shown == Shown::kImage ? "conv2d" : "conv1d"; }

template <class Int>
std::string show_sizes(ArrayRef<Int> size, Shown shown) {
  if (shown == Shown::kImage) {
    return c10::str(size);
  }
  const size_t row = size.size() - 2;
  c10::SmallVector<Int, 4> without(size.slice(0, row).begin(), size.slice(0, row).end());
  without.push_back(size[row + 1]);
  return c10::str(ArrayRef<Int>(without));
}

// What stride or dilation should be, and is.
template <class Int>
std::string show_pair(const char* name, const Int (&pair)[2], Shown shown) {
  const ArrayRef<Int> values(pair);
  return shown == Shown::kImage
             ? c10::str("expected ", name, " (height, width) of at least 1, but got ", name, "=", values)
             : c10::str("expected ", name, " of at least 1, but got ", name, "=", values.slice(1));
}

template <class Int>
std::string show_extents(const Int& height, const Int& width, Shown shown) {
  return shown == Shown::kImage ? c10::str("(", height, " x ", width, ")") : c10::str("(", width, ")");
}

template <class Int>
void check_hyper_parameters(const Conv2dParams<Int>& params, Shown shown) {
  for (const Int& padding : params.padding) {
    TORCH_CHECK(
        at_least(padding, Int(0)), "negative padding is not supported: expected padding ",
        shown == Shown::kImage ? "(top, bottom, left, right)" : "(left, right)",
        " of at least 0, but got padding=", ArrayRef<Int>(params.padding).slice(shown == Shown::kImage ? 0 : 2));
  }
  for (const Int& stride : params.stride) {
    TORCH_CHECK(at_least(stride, Int(1)),
                "non-positive stride is not supported: ", show_pair("stride", params.stride, shown));
  }
  for (const Int& dilation : params.dilation) {
    TORCH_CHECK(at_least(dilation, Int(1)),
                "dilation should be greater than zero, non-positive dilation is not supported: ",
                show_pair("dilation", params.dilation, shown));
  }
  TORCH_CHECK(at_least(params.groups, Int(1)),
              "non-positive groups is not supported: expected groups of at least 1, but got groups=", params.groups);
}

template <class Int>
void check_bytes(Shown shown, const char* name, std::array<Int, 4> size, int64_t itemsize) {
  Int bytes = itemsize;
  for (const Int& extent : size) {
    // A zero hides what the others multiply to; their product is still what the engines index with.
    if (!known_zero(extent)) {
      TORCH_CHECK(mul(bytes, extent, &bytes), "Storage size calculation overflowed with sizes=", ArrayRef<Int>(size),
                  ": the bytes of ", function_of(shown), "'s ", name, " don't fit 64 bits");
    }
  }
}

// One dimension of the padded input and of the dilated kernel.
template <class Int>
struct Extent {
  Int padded, kernel;
};

template <class Int>
Extent<Int> extent_of(Shown shown, const char* dimension, const Int& in, const Int& pad_before, const Int& pad_after,
                      const Int& kernel, const Int& dilation) {
  Extent<Int> extent;
  TORCH_CHECK(add(in, pad_before, &extent.padded) && add(extent.padded, pad_after, &extent.padded), function_of(shown),
              ": the padded ", dimension, " of input overflows: input has ", in, ", padding is ", pad_before, " and ",
              pad_after);
  TORCH_CHECK(mul(dilation, kernel - 1, &extent.kernel) && add(extent.kernel, Int(1), &extent.kernel),
              function_of(shown), ": the dilated ", dimension, " of weight overflows: weight has ", kernel,
              ", dilation is ", dilation);
  return extent;
}

template <class Int>
ProblemOf<Int> check_geometry(ArrayRef<Int> input_size, ArrayRef<Int> weight_size, const Conv2dParams<Int>& params,
                              int64_t itemsize, Shown shown = Shown::kImage) {
  const size_t dim = input_size.size();
  TORCH_CHECK(dim == 3 || dim == 4,
              "Expected 3D (unbatched) or 4D (batched) input to conv2d, but got input of size: ", input_size);
  const size_t weight_dim = weight_size.size();
  TORCH_CHECK(weight_dim >= 3,
              "weight should have at least three dimensions: expected weight of size (out_channels, "
              "in_channels/groups, kernel_h, kernel_w), but got weight of size ",
              weight_size);
  TORCH_CHECK(weight_dim == 4, "Expected ", weight_dim, "-dimensional input for ", weight_dim, "-dimensional weight ",
              weight_size, ", but got ", dim, "-dimensional input of size ", input_size,
              " instead: conv2d takes weight of size (out_channels, in_channels/groups, kernel_h, kernel_w)");
  check_hyper_parameters(params, shown);

  ProblemOf<Int> p;
  p.batch = dim == 4 ? input_size[0] : Int(1);
  p.in_channels = input_size[dim - 3];
  p.in_h = input_size[dim - 2];
  p.in_w = input_size[dim - 1];
  p.out_channels = weight_size[0];
  p.kernel_h = weight_size[2];
  p.kernel_w = weight_size[3];
  p.stride_h = params.stride[0];
  p.stride_w = params.stride[1];
  p.pad_top = params.padding[0];
  p.pad_bottom = params.padding[1];
  p.pad_left = params.padding[2];
  p.pad_right = params.padding[3];
  p.dilation_h = params.dilation[0];
  p.dilation_w = params.dilation[1];
  p.groups = params.groups;

  TORCH_CHECK(at_least(p.out_channels, p.groups), "Given groups=", p.groups, ", expected weight to be at least ",
              p.groups, " at dimension 0, but got weight of size ", show_sizes(weight_size, shown), " instead");
  TORCH_CHECK(equal(p.out_channels % p.groups, Int(0)), "Given groups=", p.groups,
              ", expected weight to be divisible by ", p.groups, " at dimension 0, but got weight of size ",
              show_sizes(weight_size, shown), " instead");
  Int expected_channels;
  const bool channels_fit = mul(weight_size[1], p.groups, &expected_channels);
  TORCH_CHECK(channels_fit && equal(p.in_channels, expected_channels), "Given groups=", p.groups, ", weight of size ",
              show_sizes(weight_size, shown), ", expected input", show_sizes(input_size, shown), " to have ",
              channels_fit ? c10::str(expected_channels) : "2^63 or more", " channels, but got ", p.in_channels,
              " channels instead");
  TORCH_CHECK(at_least(p.kernel_h, Int(1)) && at_least(p.kernel_w, Int(1)),
              "kernel size should be greater than zero: expected weight to have a kernel of at least ",
              shown == Shown::kImage ? "1 x 1" : "1", ", but got weight of size ", show_sizes(weight_size, shown));

  const Extent<Int> h = extent_of(shown, "height", p.in_h, p.pad_top, p.pad_bottom, p.kernel_h, p.dilation_h);
  const Extent<Int> w = extent_of(shown, "width", p.in_w, p.pad_left, p.pad_right, p.kernel_w, p.dilation_w);
  TORCH_CHECK(at_least(h.padded, h.kernel) && at_least(w.padded, w.kernel),
              "Calculated padded input size per channel: ", show_extents(h.padded, w.padded, shown),
              ". Kernel size: ", show_extents(h.kernel, w.kernel, shown),
              ". Kernel size can't be greater than actual input size: input is of size ", show_sizes(input_size, shown),
              ", weight of size ", show_sizes(weight_size, shown));
  TORCH_CHECK(
      !(known_zero(p.in_h) || known_zero(p.in_w)) || known_zero(p.batch) || known_zero(p.in_channels),
      "Only zero batch or zero channel inputs are supported, but got input shape: ", show_sizes(input_size, shown));
  p.out_h = (h.padded - h.kernel) / p.stride_h + 1;
  p.out_w = (w.padded - w.kernel) / p.stride_w + 1;
  check_bytes<Int>(shown, "output", {p.batch, p.out_channels, p.out_h, p.out_w}, itemsize);
  check_bytes<Int>(shown, "input", {p.batch, p.in_channels, p.in_h, p.in_w}, itemsize);
  check_bytes<Int>(shown, "weight", {p.out_channels, weight_size[1], p.kernel_h, p.kernel_w}, itemsize);
  return p;
}

template <class Int>
void check_grad_output(const Tensor& grad_output, const ProblemOf<Int>& p, size_t input_dim) {
  const auto size = sizes_of<Int>(grad_output);
  const Int channels = result_channels<Int>(p);
  const bool matches = size.size() == input_dim && (input_dim == 3 || equal(size[0], p.batch)) &&
                       equal(size[input_dim - 3], channels) && equal(size[input_dim - 2], p.out_h) &&
                       equal(size[input_dim - 1], p.out_w);
  if (!matches) {
    const Int wanted[] = {p.batch, channels, p.out_h, p.out_w};
    TORCH_CHECK(false, "expected grad_output to have the output's size ",
                ArrayRef<Int>(wanted).slice(input_dim == 4 ? 0 : 1), ", but got grad_output of size ", size);
  }
}

// ---- dtype, device, layout

bool is_supported(c10::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kHalf:
    case at::kComplexFloat:
    case at::kComplexDouble:
      return true;
    default:
      return false;
  }
}

bool is_supported_integer(c10::ScalarType dtype) {
  switch (dtype) {
    case at::kChar:
    case at::kByte:
    case at::kShort:
    case at::kInt:
    case at::kLong:
      return true;
    default:
      return false;
  }
}

constexpr const char* kDTypes = "float32, float64, bfloat16, float16, complex64, complex128";

void check_layout(const char* function, const char* name, const Tensor& tensor) {
  TORCH_CHECK(!tensor.is_quantized(), function, ": expected ", name, " not to be quantized, but got ",
              tensor.toString());
  TORCH_CHECK(tensor.layout() == c10::kStrided, function, ": expected ", name,
              " to be a dense (strided) tensor, but got ", tensor.toString(), " of layout ", tensor.layout());
}

// F.conv2d leaves other dtypes to cuDNN on CUDA, and to a dispatch over dtypes on the CPU: hence two types of errors.
void check_dtype(const char* function, const char* name, const Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  if (is_cuda_or_fake(tensor)) {
    TORCH_CHECK(is_supported(dtype), function, " on CUDA is not supported for ", c10::toString(dtype), ": ", name,
                " is a ", tensor.toString(), "; expected ", kDTypes);
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(is_supported(dtype) || is_supported_integer(dtype), "\"", function,
                                "\" not implemented for '", c10::toString(dtype), "': ", name, " is a ",
                                tensor.toString(), "; expected ", kDTypes,
                                ", or on the CPU int8, uint8, int16, int32, int64");
  }
}

std::string types_differ(std::string first_name, const Tensor& first, const char* second_name, const Tensor& second) {
  first_name[0] = static_cast<char>(std::toupper(first_name[0]));
  return c10::str(first_name, " type (", first.toString(), ") and ", second_name, " type (", second.toString(),
                  ") should be the same");
}

// The names are those of the ops' schemas.
void check_same_kind(const char* function, const char* first_name, const Tensor& first, const char* second_name,
                     const Tensor& second) {
  check_layout(function, second_name, second);
  TORCH_CHECK(first.scalar_type() == second.scalar_type(), types_differ(first_name, first, second_name, second),
              ": expected scalar type ", first.scalar_type(), " but found ", second.scalar_type());
  TORCH_CHECK(first.device() == second.device(), types_differ(first_name, first, second_name, second),
              ": Expected all tensors to be on the same device, but ", first_name, " is on ", first.device(), " and ",
              second_name, " is on ", second.device());
}

}  // namespace

bool is_supported_on(const Tensor& tensor) {
  return is_supported(tensor.scalar_type()) || (!is_cuda_or_fake(tensor) && is_supported_integer(tensor.scalar_type()));
}

void check_length(const char* name, c10::SymIntArrayRef values, size_t dims) {
  TORCH_CHECK(values.size() == 1 || values.size() == dims, "expected ", name,
              " to be a single integer value or a list of ", dims,
              " values to match the convolution dimensions, but got ", name, "=", values);
}

template <class Int>
Conv2dParams<Int> make_params(ArrayRef<Int> stride, ArrayRef<Int> padding, ArrayRef<Int> dilation, const Int& groups) {
  TORCH_CHECK(stride.size() == 2, "expected stride to be a list of 2 values (height, width), but got stride=", stride);
  TORCH_CHECK(padding.size() == 4,
              "expected padding to be a list of 4 values (top, bottom, left, right), but got padding=", padding);
  TORCH_CHECK(dilation.size() == 2,
              "expected dilation to be a list of 2 values (height, width), but got dilation=", dilation);
  return {{stride[0], stride[1]}, {padding[0], padding[1], padding[2], padding[3]}, {dilation[0], dilation[1]}, groups};
}

SymConv2dParams params_from_pairs(c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                                  const SymInt& groups) {
  SymConv2dParams params;
  expand_pair("stride", stride, params.stride);
  expand_pair("dilation", dilation, params.dilation);
  SymInt pad[2];
  expand_pair("padding", padding, pad);
  params.padding[0] = params.padding[1] = pad[0];
  params.padding[2] = params.padding[3] = pad[1];
  params.groups = groups;
  return params;
}

SymConv2dParams params_for_same_padding(const Tensor& weight, c10::SymIntArrayRef stride, c10::SymIntArrayRef dilation,
                                        const SymInt& groups) {
  SymConv2dParams params = params_from_pairs(stride, {SymInt(0)}, dilation, groups);
  if (weight.dim() != 4) return params;  // which the op refuses
  for (const SymInt& value : params.stride) {
    TORCH_CHECK(equal(value, SymInt(1)),
                "padding='same' is not supported for strided convolutions: expected stride=1, but got stride=", stride);
  }
  for (int i = 0; i < 2; ++i) {
    SymInt total;
    // What doesn't fit or isn't positive is left for the op to refuse.
    if (mul(params.dilation[i], weight.sym_size(2 + i) - 1, &total) && at_least(total, SymInt(0))) {
      params.padding[2 * i] = total / 2;
      params.padding[2 * i + 1] = total - params.padding[2 * i];
    }
  }
  return params;
}

void check_forward(const Tensor& im, const Tensor& kernel, const std::optional<Tensor>& bias) {
  TORCH_CHECK(im.dim() == 3 || im.dim() == 4,
              "Expected 3D (unbatched) or 4D (batched) im of size (bs, di, H, W) or (di, H, W), but got im of size ",
              im.sym_sizes());
  TORCH_CHECK(kernel.dim() == 4, "expected kernel of size (di, do, kh, kw), but got kernel of size ",
              kernel.sym_sizes());
  TORCH_CHECK(equal(kernel.sym_size(0), im.sym_size(-3)),
              "expected kernel of size (di, do, kh, kw) with di = ", im.sym_size(-3), " as in im of size ",
              im.sym_sizes(), ", but got kernel of size ", kernel.sym_sizes());
  if (bias.has_value() && bias->defined()) {
    const bool is_column = bias->dim() == 2 && equal(bias->sym_size(1), SymInt(1));
    TORCH_CHECK((bias->dim() == 1 || is_column) && equal(bias->sym_size(0), kernel.sym_size(1)),
                "expected bias of size (do,) or (do, 1) with do = ", kernel.sym_size(1), " as in kernel of size ",
                kernel.sym_sizes(), ", but got bias of size ", bias->sym_sizes());
    check_same_kind("forward", "im", im, "bias", *bias);
  }
}

namespace {

template <class Int>
ProblemOf<Int> check_sizes_as(Shown shown, ArrayRef<Int> input, ArrayRef<Int> weight, std::optional<ArrayRef<Int>> bias,
                              const Conv2dParams<Int>& params, int64_t itemsize) {
  auto problem = check_geometry<Int>(input, weight, params, itemsize, shown);
  if (bias.has_value()) {
    TORCH_CHECK(bias->size() == 1 && equal((*bias)[0], problem.out_channels), "Given weight of size ",
                show_sizes(weight, shown), ", expected bias to be 1-dimensional with ", problem.out_channels,
                " elements, but got bias of size ", *bias, " instead");
  }
  return problem;
}

}  // namespace

template <class Int>
ProblemOf<Int> check_conv2d_sizes(ArrayRef<Int> input, ArrayRef<Int> weight, std::optional<ArrayRef<Int>> bias,
                                  const Conv2dParams<Int>& params, int64_t itemsize) {
  return check_sizes_as<Int>(Shown::kImage, input, weight, bias, params, itemsize);
}

void check_conv1d_sizes(c10::SymIntArrayRef input, c10::SymIntArrayRef weight, std::optional<c10::SymIntArrayRef> bias,
                        const SymConv2dParams& params, int64_t itemsize) {
  check_sizes_as<SymInt>(Shown::kRow, input, weight, bias, params, itemsize);
}

// An undefined tensor, which has none, is refused for its size, [0].
int64_t element_bytes(const Tensor& tensor) { return tensor.defined() ? tensor.element_size() : 1; }

void check_not_nested(const char* function, const Tensor& input, const Tensor& weight,
                      const std::optional<Tensor>& bias) {
  const auto check = [&](const char* name, const Tensor& tensor) {
    TORCH_CHECK_NOT_IMPLEMENTED(!tensor.is_nested(), function, ": expected dense tensors, but got a nested tensor for ",
                                name);
  };
  check("input", input);
  check("weight", weight);
  if (bias.has_value() && bias->defined()) check("bias", *bias);
}

void check_kinds(const char* function, const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_layout(function, "input", input);
  if (bias.has_value() && bias->defined()) {
    check_same_kind(function, "input", input, "bias", *bias);
  }
  check_dtype(function, "input", input);
  check_same_kind(function, "input", input, "weight", weight);
}

template <class Int>
ProblemOf<Int> check_conv2d(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                            const Conv2dParams<Int>& params) {
  std::optional<ArrayRef<Int>> bias_size;
  if (bias.has_value() && bias->defined()) {
    bias_size = sizes_of<Int>(*bias);
  }
  auto problem =
      check_conv2d_sizes<Int>(sizes_of<Int>(input), sizes_of<Int>(weight), bias_size, params, element_bytes(input));
  check_kinds("conv2d", input, weight, bias);
  return problem;
}

template <class Int>
ProblemOf<Int> check_conv2d_grad_input(const Tensor& grad_output, const Tensor& weight, ArrayRef<Int> input_size,
                                       const Conv2dParams<Int>& params) {
  auto problem = check_geometry<Int>(input_size, sizes_of<Int>(weight), params, element_bytes(grad_output));
  check_grad_output<Int>(grad_output, problem, input_size.size());
  check_layout("conv2d_grad_input", "grad_output", grad_output);
  check_dtype("conv2d_grad_input", "grad_output", grad_output);
  check_same_kind("conv2d_grad_input", "grad_output", grad_output, "weight", weight);
  return problem;
}

template <class Int>
ProblemOf<Int> check_conv2d_grad_weight(const Tensor& grad_output, const Tensor& input, ArrayRef<Int> weight_size,
                                        const Conv2dParams<Int>& params) {
  const auto input_size = sizes_of<Int>(input);
  auto problem = check_geometry<Int>(input_size, weight_size, params, element_bytes(grad_output));
  check_grad_output<Int>(grad_output, problem, input_size.size());
  check_layout("conv2d_grad_weight", "grad_output", grad_output);
  check_dtype("conv2d_grad_weight", "grad_output", grad_output);
  check_same_kind("conv2d_grad_weight", "grad_output", grad_output, "input", input);
  return problem;
}

void check_conv2d_grad_bias(const Tensor& grad_output) {
  TORCH_CHECK(grad_output.dim() == 3 || grad_output.dim() == 4,
              "Expected 3D (unbatched) or 4D (batched) grad_output to conv2d_grad_bias, but got grad_output of size: ",
              grad_output.sym_sizes());
  check_layout("conv2d_grad_bias", "grad_output", grad_output);
  check_dtype("conv2d_grad_bias", "grad_output", grad_output);
}

void check_data(const char* name, const Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  TORCH_CHECK(impl->storage_initialized(),
              "The tensor has a non-zero number of elements, but its data is not allocated yet. Got ", name,
              " of size ", tensor.sizes(), ", whose storage has been freed");
  if (tensor.numel() == 0) {
    return;
  }
  const bool contiguous = tensor.is_contiguous();  // then numel() says where the last element lies
  int64_t end = tensor.storage_offset();
  bool fits = add(end, contiguous ? tensor.numel() : 1, &end);
  for (int64_t i = 0; !contiguous && i < tensor.dim(); ++i) {
    int64_t step = 0;
    fits = fits && mul(tensor.size(i) - 1, tensor.stride(i), &step) && add(end, step, &end);
  }
  fits = fits && mul(end, tensor.element_size(), &end);
  const auto bytes = impl->unsafe_storage().nbytes();
  TORCH_CHECK(fits && static_cast<uint64_t>(end) <= bytes, name, " of size ", tensor.sizes(), ", strides ",
              tensor.strides(), " and storage offset ", tensor.storage_offset(),
              " is out of bounds for storage of size ", bytes);
}

template <class Int>
Int result_channels(const ProblemOf<Int>& problem) {
  return known_zero(problem.in_channels) ? Int(0) : problem.out_channels;
}

#define INSTANTIATE(Int)                                                                                 \
  template Conv2dParams<Int> make_params(ArrayRef<Int>, ArrayRef<Int>, ArrayRef<Int>, const Int&);       \
  template ProblemOf<Int> check_conv2d_sizes(ArrayRef<Int>, ArrayRef<Int>, std::optional<ArrayRef<Int>>, \
                                             const Conv2dParams<Int>&, int64_t);                         \
  template ProblemOf<Int> check_conv2d(const Tensor&, const Tensor&, const std::optional<Tensor>&,       \
                                       const Conv2dParams<Int>&);                                        \
  template ProblemOf<Int> check_conv2d_grad_input(const Tensor&, const Tensor&, ArrayRef<Int>,           \
                                                  const Conv2dParams<Int>&);                             \
  template ProblemOf<Int> check_conv2d_grad_weight(const Tensor&, const Tensor&, ArrayRef<Int>,          \
                                                   const Conv2dParams<Int>&);                            \
  template Int result_channels<Int>(const ProblemOf<Int>&);
INSTANTIATE(int64_t)
INSTANTIATE(SymInt)
#undef INSTANTIATE

}  // namespace conv2d_ext
