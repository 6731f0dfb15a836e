// Which strides the results have: the same decisions for the kernels of every device and for tracing.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/MemoryFormat.h>
#include <c10/util/SmallVector.h>

#include "conv2d_checks.h"

namespace conv2d_ext {

inline bool has_no_elements(const at::Tensor& tensor) {
  const auto numel = tensor.sym_numel().maybe_as_int();
  return numel.has_value() && *numel == 0;
}

// suggest_memory_format(), but that an unbatched tensor counts as a batch of one. An operator that makes it one would
// cost a tiny call a tenth of its time.
inline bool suggests_channels_last(const at::Tensor& tensor) {
  if (tensor.dim() != 3) {
    return tensor.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
  }
  const auto* const impl = tensor.unsafeGetTensorImpl();
  if (impl->has_symbolic_sizes_strides() || impl->is_python_dispatch()) {
    return tensor.unsqueeze(0).suggest_memory_format() == at::MemoryFormat::ChannelsLast;
  }
  const auto size = tensor.sizes(), stride = tensor.strides();
  return tensor.layout() == at::kStrided &&
         c10::is_channels_last_strides_2d<int64_t>({1, size[0], size[1], size[2]},
                                                   {size[0] * stride[0], stride[0], stride[1], stride[2]});
}

// The format of F.conv2d's output: channels_last where input or weight suggests it; never for float64 on CUDA, nor for
// complex128 there, which PyTorch takes apart into float64, and for empty inputs. An unbatched input counts as a batch
// of one.
inline bool output_is_channels_last(const at::Tensor& input, const at::Tensor& weight) {
  const bool is_double = input.scalar_type() == at::kDouble || input.scalar_type() == at::kComplexDouble;
  if ((is_double && is_cuda_or_fake(input)) || has_no_elements(input)) {
    return false;
  }
  return suggests_channels_last(weight) || suggests_channels_last(input);
}

// Of symbolic sizes: whether it is known.
inline bool are_equal(int64_t a, int64_t b) { return a == b; }
inline bool are_equal(const c10::SymInt& a, const c10::SymInt& b) {
  const auto known = a.maybe_as_int(), other = b.maybe_as_int();
  return known.has_value() && other.has_value() && *known == *other;
}
template <class Int>
bool is_one(const Int& value) {
  return are_equal(value, Int(1));
}

// Whether F.conv2d computes each group by itself on the CPU and joins the results, as it does with the types that
// oneDNN has no convolution of.
inline bool joins_groups(const at::Tensor& input) {
  if (is_cuda_or_fake(input)) return false;
  const auto has = [](const char* asks) {
    const auto op = c10::Dispatcher::singleton().findOp({asks, ""});
    return op.has_value() && op->typed<bool()>().call();
  };
  static const bool has_float16 = has("mkldnn::_is_mkldnn_fp16_supported");
  static const bool has_bfloat16 = has("mkldnn::_is_mkldnn_bf16_supported");
  const at::ScalarType dtype = input.scalar_type();
  return dtype == at::kDouble || c10::isIntegralType(dtype, /*includeBool=*/false) ||
         (dtype == at::kHalf && !has_float16) || (dtype == at::kBFloat16 && !has_bfloat16);
}
// Whether what it joins are single elements, one channel and one pixel a group: they have no format that it could keep.
template <class Int>
bool joins_elements(const at::Tensor& input, const Int& groups, const Int& channels, const Int& height,
                    const Int& width) {
  return !is_one(groups) && are_equal(groups, channels) && is_one(height) && is_one(width) && joins_groups(input);
}

// F.conv2d's grad_input has the output's format, but for complex types, whose gradients PyTorch assembles, and for
// elements that it joins.
inline bool grad_input_is_channels_last(const at::Tensor& input, const at::Tensor& weight) {
  if (input.is_complex() || !output_is_channels_last(input, weight)) return false;
  const c10::SymInt channels = input.sym_size(-3);
  return !is_one(weight.sym_size(1)) ||
         !joins_elements(input, /*groups=*/channels, channels, input.sym_size(-2), input.sym_size(-1));
}

// at::empty and at::empty_strided for the kernels of convolutions and products: on the CPU past the dispatcher, which
// takes a fortieth of a tiny call.
inline at::Tensor empty_here(c10::IntArrayRef size, const at::TensorOptions& options) {
  return options.device().is_cpu() ? at::Tensor(at::detail::empty_cpu(size, options)) : at::empty(size, options);
}
inline at::Tensor empty_strided_here(c10::IntArrayRef size, c10::IntArrayRef stride, const at::TensorOptions& options) {
  return options.device().is_cpu() ? at::Tensor(at::detail::empty_strided_cpu(size, stride, options))
                                   : at::empty_strided(size, stride, options);
}

// (N, C, H, W), or (C, H, W) with the strides of a batch of one.
template <class Int>
at::Tensor empty_activation(const Int& batch, const Int& channels, const Int& height, const Int& width, bool unbatched,
                            bool channels_last, const at::TensorOptions& options) {
  if (c10::isComplexType(c10::typeMetaToScalarType(options.dtype())) &&
      (is_one(channels) || (is_one(height) && is_one(width)))) {
    channels_last = false;  // both formats describe these; PyTorch's complex results have the contiguous strides
  }
  const auto format = channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  const Int size[] = {batch, channels, height, width};
  if constexpr (std::is_same_v<Int, int64_t>) {
    if (!unbatched) {
      return empty_here(size, options.memory_format(format));
    }
    return channels_last ? empty_strided_here({channels, height, width}, {1, width * channels, channels}, options)
                         : empty_here({channels, height, width}, options);
  } else {
    const at::Tensor result = at::empty_symint(size, options.memory_format(format));
    return unbatched ? result.squeeze(0) : result;
  }
}

// F.conv2d's output, without values.
template <class Int>
at::Tensor empty_output(const ProblemOf<Int>& problem, const at::Tensor& input, const at::Tensor& weight) {
  const bool channels_last =
      output_is_channels_last(input, weight) &&
      !joins_elements<Int>(input, problem.groups, problem.out_channels, problem.out_h, problem.out_w);
  return empty_activation<Int>(problem.batch, result_channels<Int>(problem), problem.out_h, problem.out_w,
                               input.dim() == 3, channels_last, input.options());
}

// What the gradient of a weight should have: the weight's own strides where they are non-overlapping and dense,
// so that DistributedDataParallel needs no copy; contiguous ones otherwise.
inline c10::SmallVector<c10::SymInt, 4> grad_weight_strides(const at::Tensor& weight) {
  const auto from = weight.is_non_overlapping_and_dense() ? weight.sym_strides() : weight.sym_sizes();
  c10::SmallVector<c10::SymInt, 4> strides(from.begin(), from.end());
  if (!weight.is_non_overlapping_and_dense()) {
    c10::SymInt running = 1;
    for (size_t i = strides.size(); i-- > 0;) {
      const c10::SymInt size = strides[i];
      strides[i] = running;
      running *= size;
    }
  }
  return strides;
}

// Passes on a result of conv2d_grad_weight that was allocated with the caller's strides.
inline at::Tensor checked_weight_strides(at::Tensor grad_weight) {
  TORCH_CHECK(grad_weight.is_non_overlapping_and_dense(),
              "conv2d_grad_weight: expected weight_stride to be non-overlapping and dense, but got weight_stride=",
              grad_weight.sym_strides(), " for weight_size=", grad_weight.sym_sizes());
  return grad_weight;
}

}  // namespace conv2d_ext
