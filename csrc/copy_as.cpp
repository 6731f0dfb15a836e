// conv2d_ext::copy_as, closed under differentiation.
#include "copy_as.h"

#include <torch/library.h>

#include "autograd_node.h"

namespace conv2d_ext {

namespace {

at::Tensor copy_as_anywhere(const at::Tensor& input, bool channels_last, bool) {
  TORCH_CHECK(!channels_last || input.dim() == 4 || input.dim() == 5,
              "copy_as: expected 4 or 5 dimensions for channels_last, but got ", input.dim());
  return input.clone(!channels_last     ? at::MemoryFormat::Contiguous
                     : input.dim() == 4 ? at::MemoryFormat::ChannelsLast
                                        : at::MemoryFormat::ChannelsLast3d);
}

TORCH_LIBRARY_IMPL(conv2d_ext, CompositeExplicitAutograd, m) { m.impl("copy_as", copy_as_anywhere); }

struct CopyAsBackward {
  static constexpr const char* kName = "Conv2dExtCopyAsBackward";
  static constexpr size_t kArguments = 1;
  struct State {
    bool channels_last = false, grad_channels_last = false;
    template <class Self, class Visit>
    static void visit(Self& self, Visit visit) {
      visit(self.channels_last);
      visit(self.grad_channels_last);
    }
  };
  static void apply(const at::Tensor& grad, const at::Tensor&, const at::Tensor&, const State& state,
                    const Wanted& wanted, torch::autograd::variable_list& result) {
    if (wanted[0]) {
      result[0] = copy_as(grad, state.grad_channels_last, state.channels_last);
    }
  }
};

at::Tensor copy_as_autograd(c10::DispatchKeySet keys, const at::Tensor& input, bool channels_last,
                            bool grad_channels_last) {
  const at::Tensor result = below_autograd(copy_as_op(), keys, input, channels_last, grad_channels_last);
  if (torch::autograd::compute_requires_grad(input)) {
    auto node = make_node<CopyAsBackward>(input);
    node->state = {channels_last, grad_channels_last};
    torch::autograd::set_history(result, node);
  }
  if (torch::autograd::isFwGradDefined(input)) {
    result._set_fw_grad(copy_as(tangent(input), channels_last, grad_channels_last), /*level=*/0,
                        /*is_inplace_op=*/false);
  }
  return result;
}

TORCH_LIBRARY_IMPL(conv2d_ext, Autograd, m) { m.impl("copy_as", copy_as_autograd); }

}  // namespace
}  // namespace conv2d_ext
