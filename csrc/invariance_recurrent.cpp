// The mode's kernels of LSTM and of GRU over packed sequences.
//
// LSTM: PyTorch gives a batch of sequences to oneDNN, whose gradients follow the batch. Here its steps are calls that
// the mode takes. With dropout between layers, which draws by an element's place anyway, a batch is packed: packed
// sequences PyTorch computes step by step (from torch 2.15 on by oneDNN, too).
//
// GRU: a step's hidden state has several uses, whose gradients autograd adds in the order of its graph. PyTorch's graph
// has a node more where a sequence of the batch ends, after which the others' gradients are added in another order.
// Here every step has that node.
#include <ATen/autocast_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>

#include "invariance_kernels.h"

namespace conv2d_ext {
namespace {

using namespace invariance;

// Of input (length, batch, features); hx: (h, c), each (layers * directions, batch, hidden or projected). params: for
// each layer and direction weight_ih, weight_hh, bias_ih and bias_hh where there are biases, weight_hr where h is
// projected.
std::tuple<Tensor, Tensor, Tensor> lstm_by_steps(Tensor input, at::TensorList hx, at::TensorList params,
                                                 bool has_biases, int64_t num_layers, bool bidirectional) {
  const bool is_projected = hx[0].sym_size(2) != hx[1].sym_size(2);
  const int64_t directions = bidirectional ? 2 : 1, count = (has_biases ? 4 : 2) + (is_projected ? 1 : 0);
  const int64_t length = input.sym_size(0).guard_int(__FILE__, __LINE__);
  std::vector<Tensor> last_h, last_c;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    std::vector<Tensor> outputs;
    for (int64_t direction = 0; direction < directions; ++direction) {
      const int64_t at = layer * directions + direction;
      const at::TensorList p = params.slice(at * count, count);
      const auto bias = [&](int64_t i) { return has_biases ? std::optional<Tensor>(p[i]) : std::nullopt; };
      const Tensor of_input = at::linear(input, p[0], bias(2));
      Tensor h = hx[0].select(0, at), c = hx[1].select(0, at);
      std::vector<Tensor> steps(length);
      for (int64_t i = 0; i < length; ++i) {
        const int64_t step = direction == 0 ? i : length - 1 - i;
        const auto gates = at::linear(h, p[1], bias(3)).add(of_input.select(0, step)).chunk(4, 1);
        c = at::sigmoid(gates[1]).mul(c).add(at::sigmoid(gates[0]).mul(at::tanh(gates[2])));
        h = at::sigmoid(gates[3]).mul(at::tanh(c));
        if (is_projected) h = at::linear(h, p[count - 1]);
        steps[step] = h;
      }
      outputs.push_back(at::stack(steps));
      last_h.push_back(h);
      last_c.push_back(c);
    }
    input = bidirectional ? at::cat(outputs, -1) : outputs[0];
  }
  return {input, at::stack(last_h), at::stack(last_c)};
}

struct Lstm {
  using Op = at::_ops::lstm_input;
  static std::tuple<Tensor, Tensor, Tensor> call(DispatchKeySet keys, const Tensor& input, at::TensorList hx,
                                                 at::TensorList params, bool has_biases, int64_t num_layers,
                                                 double dropout, bool train, bool bidirectional, bool batch_first) {
    // Where PyTorch takes oneDNN's layer autocast casts all operands; elsewhere those of its products alone. (This op
    // knows nothing of autocast: its keys don't tell.)
    const bool is_cast = at::autocast::is_autocast_enabled(at::kCPU) &&
                         !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCPU);
    const bool is_onednns = takes_on_cpu(input) && input.scalar_type() == at::kFloat && hx.size() == 2 &&
                            hx[0].dim() == 3 && hx[1].dim() == 3 && hx[0].sym_size(2) == hx[1].sym_size(2) &&
                            at::globalContext().userEnabledMkldnn();
    if (is_cast && is_onednns) {
      const auto cast = [](const auto& tensors) {
        return at::autocast::cached_cast(at::autocast::get_autocast_dtype(at::kCPU), tensors, at::kCPU);
      };
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      return at::lstm(cast(input), cast(hx), cast(params), has_biases, num_layers, dropout, train, bidirectional,
                      batch_first);
    }
    const bool is_traced = is_taken_apart(keys);
    const bool has_steps = is_traced || (!c10::impl::TorchDispatchModeTLS::any_modes_set() && input.sym_numel() != 0);
    if (!leaves<Op>(keys) && has_steps && takes_on_cpu(input) && input.dim() == 3 && hx.size() == 2 &&
        hx[0].dim() == 3 && hx[0].sym_size(1) == input.sym_size(batch_first ? 0 : 1) && (dropout == 0 || !train)) {
      auto [output, h, c] =
          lstm_by_steps(batch_first ? input.transpose(0, 1) : input, hx, params, has_biases, num_layers, bidirectional);
      return {batch_first ? output.transpose(0, 1) : output, h, c};
    }
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

// The steps of one layer and direction. data: (elements, features), the sequences' elements of a step side by side;
// sizes: how many sequences have a step. Returns the hidden states, in data's order, and the last of each sequence.
struct PackedGru {
  at::TensorList params;
  bool has_biases;

  std::optional<Tensor> bias(size_t i) const { return has_biases ? std::optional<Tensor>(params[i]) : std::nullopt; }

  Tensor next(const Tensor& of_input, const Tensor& h) const {
    const auto i = of_input.chunk(3, 1), g = at::linear(h, params[1], bias(3)).chunk(3, 1);
    const Tensor reset = at::sigmoid(g[0].add(i[0])), update = at::sigmoid(g[1].add(i[1]));
    const Tensor fresh = at::tanh(i[2].add(g[2].mul(reset)));
    return h.sub(fresh).mul(update).add(fresh);
  }

  std::pair<Tensor, Tensor> run(const Tensor& data, at::IntArrayRef sizes, const Tensor& first, bool reverse) const {
    const Tensor of_input = at::linear(data, params[0], bias(2));
    std::vector<Tensor> steps(sizes.size()), ended;
    Tensor h = reverse ? first.narrow(0, 0, sizes.back()) : first;
    int64_t at = reverse ? data.size(0) : 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const size_t step = reverse ? sizes.size() - 1 - i : i;
      const int64_t size = sizes[step], before = h.size(0);
      if (reverse) {
        at -= size;
        h = at::cat({h, first.narrow(0, before, size - before)});
      } else {
        ended.push_back(h.narrow(0, size, before - size));
        h = h.narrow(0, 0, size);
      }
      h = next(of_input.narrow(0, at, size), h);
      steps[step] = h;
      if (!reverse) at += size;
    }
    ended.push_back(h);
    std::reverse(ended.begin(), ended.end());
    return {at::cat(steps), at::cat(ended)};
  }
};

struct GruOfPacked {
  using Op = at::_ops::gru_data;
  static std::tuple<Tensor, Tensor> call(DispatchKeySet keys, const Tensor& data, const Tensor& batch_sizes,
                                         const Tensor& hx, at::TensorList params, bool has_biases, int64_t num_layers,
                                         double dropout, bool train, bool bidirectional) {
    const int64_t directions = bidirectional ? 2 : 1;
    const auto count = size_t(has_biases ? 4 : 2);
    const bool is_gru = takes_on_cpu(data, hx) && is_on_cpu(batch_sizes) && data.dim() == 2 && hx.dim() == 3 &&
                        batch_sizes.scalar_type() == at::kLong && batch_sizes.dim() == 1 && batch_sizes.numel() != 0 &&
                        hx.size(0) == num_layers * directions &&
                        params.size() == size_t(num_layers * directions) * count;
    if (leaves<Op>(keys) || !is_gru || (dropout != 0 && train) || c10::impl::TorchDispatchModeTLS::any_modes_set() ||
        is_transformed()) {
      return redispatch_composite<Op>(keys, data, batch_sizes, hx, params, has_biases, num_layers, dropout, train,
                                      bidirectional);
    }
    const Tensor contiguous = batch_sizes.contiguous();
    const at::IntArrayRef sizes(contiguous.const_data_ptr<int64_t>(), size_t(contiguous.numel()));
    TORCH_CHECK(hx.size(1) == sizes[0], "Expected hidden size ", num_layers * directions, ", ", sizes[0], ", but got ",
                hx.sizes());
    Tensor input = data;
    std::vector<Tensor> last;
    for (int64_t layer = 0; layer < num_layers; ++layer) {
      std::vector<Tensor> outputs;
      for (int64_t direction = 0; direction < directions; ++direction) {
        const int64_t at = layer * directions + direction;
        const PackedGru gru{params.slice(size_t(at) * count, count), has_biases};
        auto [output, h] = gru.run(input, sizes, hx.select(0, at), direction != 0);
        outputs.push_back(output);
        last.push_back(h);
      }
      input = bidirectional ? at::cat(outputs, -1) : outputs[0];
    }
    return {input, at::stack(last)};
  }
};

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) { cover_all<Lstm, GruOfPacked>(m); }

}  // namespace
}  // namespace conv2d_ext
