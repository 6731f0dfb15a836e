// The mode's kernels of norms: PyTorch's own, of tensors in the format in which their bits follow no batch.
//   group_norm     channels_last: sums are shared out among threads
//   instance_norm  a gradient that is channels_last: read as one image's for a batch of one, copied for others
//   batch_norm     evaluated: the order of operations follows the format of the input, and of its gradient, which a
//                  batch of one can have another than a batch of several. In training, too, where sizes are 1: PyTorch
//                  mistakes the format of some such gradients, and its result is wrong
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
    if (!takes || !(c10::GradMode::is_enabled() || is_jit_tracing())) return result;
    return copy_as(result, /*channels_last=*/false, /*grad_channels_last=*/false);
  }
};

struct BatchNorm {
  using Op = at::_ops::batch_norm;
  static bool holds(const c10::SymBool& condition) { return condition.guard_bool(__FILE__, __LINE__); }
  // Whether an example is channels_last: its channels lie closer together than its pixels. The batch's stride doesn't
  // count, of which a batch of one has none to speak of.
  static bool examples_are_channels_last(const Tensor& input) {
    if (input.is_contiguous() || (input.dim() != 4 && input.dim() != 5) || holds(input.sym_size(1).sym_eq(1))) {
      return false;
    }
    bool is_pixel = true;
    for (int64_t d = 2; d < input.dim(); ++d) {
      if (holds(input.sym_size(d).sym_eq(1))) continue;
      if (holds(input.sym_stride(1).sym_ge(input.sym_stride(d)))) return false;
      is_pixel = false;
    }
    return !is_pixel;
  }
  // Whether PyTorch's result is. (Sizes of 1 can make a dense tensor both this and contiguous.)
  static bool result_is_channels_last(const Tensor& input) {
    if (input.is_contiguous()) return false;
    return input.is_contiguous(at::MemoryFormat::ChannelsLast3d) ||
           input.is_contiguous(at::MemoryFormat::ChannelsLast) || is_channels_last(input);
  }
  // Whether strides, those of sizes of 1, can suggest another format than the one in which a tensor lies.
  static bool may_suggest_another_format(const Tensor& input) {
    bool has_one = false;
    for (int64_t d = 0; d < input.dim(); ++d) has_one |= d != 1 && input.sym_size(d).maybe_as_int() == 1;
    return has_one && (input.dim() == 4 || input.dim() == 5);
  }
  // Left to PyTorch: statistics of the batch, no elements, and examples of vmap, whose strides don't show.
  static bool leaves_to_pytorch(const Tensor& input, bool training) {
    const bool is_batched = input.key_set().has(c10::DispatchKey::FuncTorchBatched);
    if (training && (is_batched || !may_suggest_another_format(input))) return true;
    return (is_batched && !input.is_contiguous()) || holds(input.sym_numel().sym_eq(0));
  }
  static Tensor call(DispatchKeySet keys, const Tensor& input, const std::optional<Tensor>& weight,
                     const std::optional<Tensor>& bias, const std::optional<Tensor>& running_mean,
                     const std::optional<Tensor>& running_var, bool training, double momentum, double eps,
                     bool cudnn_enabled) {
    if (leaves<Op>(keys) || !takes_on_cpu(input) || leaves_to_pytorch(input, training)) {
      return Op::redispatch(keys & kBelow, input, weight, bias, running_mean, running_var, training, momentum, eps,
                            cudnn_enabled);
    }
    const bool last = examples_are_channels_last(input), result_last = result_is_channels_last(input);
    const auto last_format = input.dim() == 5 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
    // PyTorch goes by what strides suggest, too, those of sizes of 1 among them.
    const bool dense =
        input.is_contiguous(last ? last_format : at::MemoryFormat::Contiguous) && is_channels_last(input) == last;
    const Tensor result = Op::redispatch(keys & kBelow, dense ? input : copy_as(input, last, last), weight, bias,
                                         running_mean, running_var, training, momentum, eps, cudnn_enabled);
    // The gradient is in the example's format, too. In another one PyTorch computes in another order, which shows in 16
    // bits, or reads elements in the wrong places.
    return may_record(result) || last != result_last ? copy_as(result, result_last, last) : result;
  }
};

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) { cover_all<GroupNorm, InstanceNorm, BatchNorm>(m); }

}  // namespace
}  // namespace conv2d_ext
