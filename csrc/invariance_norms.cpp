// The mode's kernels of norms: PyTorch's own, of tensors in the format in which their bits follow no batch.
//   group_norm     channels_last: sums are shared out among threads
//   instance_norm  a gradient that is channels_last: read as one image's for a batch of one, copied for others
//   batch_norm     evaluated, not dense: another order of operations than of a dense tensor, as a batch of one is
#include "copy_as.h"
#include "invariance_kernels.h"

namespace conv2d_ext {
namespace {

using namespace invariance;

bool is_channels_last(const Tensor& tensor) {
  const auto format = tensor.suggest_memory_format();
  return format == at::MemoryFormat::ChannelsLast || format == at::MemoryFormat::ChannelsLast3d;
}

struct GroupNorm {
  using Op = at::_ops::group_norm;
  static Tensor call(DispatchKeySet keys, const Tensor& input, int64_t num_groups, const std::optional<Tensor>& weight,
                     const std::optional<Tensor>& bias, double eps, bool cudnn_enabled) {
    if (leaves<Op>(keys) || !takes_on_cpu(input) || !is_channels_last(input)) {
      return redispatch_composite<Op>(keys, input, num_groups, weight, bias, eps, cudnn_enabled);
    }
    const Tensor contiguous = copy_as(input, /*channels_last=*/false, /*grad_channels_last=*/true);
    const Tensor result = redispatch_composite<Op>(keys, contiguous, num_groups, weight, bias, eps, cudnn_enabled);
    return copy_as(result, /*channels_last=*/true, /*grad_channels_last=*/false);
  }
};

struct InstanceNorm {
  using Op = at::_ops::instance_norm;
  static Tensor call(DispatchKeySet keys, const Tensor& input, const std::optional<Tensor>& weight,
                     const std::optional<Tensor>& bias, const std::optional<Tensor>& running_mean,
                     const std::optional<Tensor>& running_var, bool use_input_stats, double momentum, double eps,
                     bool cudnn_enabled) {
    const bool takes = !leaves<Op>(keys) && takes_on_cpu(input);
    const Tensor result = redispatch_composite<Op>(keys, input, weight, bias, running_mean, running_var,
                                                   use_input_stats, momentum, eps, cudnn_enabled);
    // Its result is contiguous: the copy is there for the gradient.
    if (!takes || !(c10::GradMode::is_enabled() || at::tracer::impl::is_dispatch_enabled())) return result;
    return copy_as(result, /*channels_last=*/false, /*grad_channels_last=*/false);
  }
};

struct BatchNorm {
  using Op = at::_ops::batch_norm;
  // Of the formats that a dense tensor is in, which sizes of 1 can make several, the one that PyTorch's result has.
  static at::MemoryFormat format_of(const Tensor& input) {
    for (const auto format :
         {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast3d, at::MemoryFormat::ChannelsLast}) {
      if (input.is_contiguous(format)) return format;
    }
    return input.suggest_memory_format();
  }
  static Tensor call(DispatchKeySet keys, const Tensor& input, const std::optional<Tensor>& weight,
                     const std::optional<Tensor>& bias, const std::optional<Tensor>& running_mean,
                     const std::optional<Tensor>& running_var, bool training, double momentum, double eps,
                     bool cudnn_enabled) {
    if (leaves<Op>(keys) || !takes_on_cpu(input) || training) {
      return Op::redispatch(keys & kBelow, input, weight, bias, running_mean, running_var, training, momentum, eps,
                            cudnn_enabled);
    }
    const at::MemoryFormat format = format_of(input);
    const bool last = format != at::MemoryFormat::Contiguous, dense = input.is_contiguous(format);
    const Tensor result = Op::redispatch(keys & kBelow, dense ? input : copy_as(input, last, last), weight, bias,
                                         running_mean, running_var, training, momentum, eps, cudnn_enabled);
    // The same of a gradient: of one in another format PyTorch's order shows in 16-bit types, and in a batch of one,
    // which it takes for the format of the input, its result is wrong.
    return may_record(result) && (input.dim() == 4 || !last) ? copy_as(result, last, last) : result;
  }
};

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) { cover_all<GroupNorm, InstanceNorm, BatchNorm>(m); }

}  // namespace
}  // namespace conv2d_ext
