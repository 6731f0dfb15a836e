// The mode's kernel of LSTM. PyTorch gives a batch of sequences to oneDNN, whose gradients follow the batch; sequences
// that are packed it computes step by step, by calls that the mode takes. So a batch is packed here, as a view.
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "invariance_kernels.h"

namespace conv2d_ext {
namespace {

using namespace invariance;

struct Lstm {
  using Op = at::_ops::lstm_input;
  static std::tuple<Tensor, Tensor, Tensor> call(DispatchKeySet keys, const Tensor& input, at::TensorList hx,
                                                 at::TensorList params, bool has_biases, int64_t num_layers,
                                                 double dropout, bool train, bool bidirectional, bool batch_first) {
    // Packing reads sizes as data, which tracing cannot.
    if (leaves<Op>(keys) || !takes_on_cpu(input) || input.dim() != 3 || input.sym_numel() == 0 ||
        c10::impl::TorchDispatchModeTLS::any_modes_set()) {
      return Op::redispatch(keys & kBelow, input, hx, params, has_biases, num_layers, dropout, train, bidirectional,
                            batch_first);
    }
    const Tensor steps = batch_first ? input.transpose(0, 1) : input;
    const int64_t length = steps.size(0), batch = steps.size(1);
    const Tensor batch_sizes = at::full({length}, batch, at::TensorOptions().dtype(at::kLong));
    auto [output, h, c] = at::lstm(steps.reshape({length * batch, steps.size(2)}), batch_sizes, hx, params, has_biases,
                                   num_layers, dropout, train, bidirectional);
    const Tensor result = output.view({length, batch, output.size(-1)});
    return {batch_first ? result.transpose(0, 1) : result, h, c};
  }
};

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) { cover<Lstm>(m); }

}  // namespace
}  // namespace conv2d_ext
