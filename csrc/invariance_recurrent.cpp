// The mode's kernels of LSTM and of GRU over packed sequences.
//
// LSTM: PyTorch gives a batch of sequences to oneDNN, whose gradients follow the batch; from torch 2.15 on packed
// sequences of one length, too. Here the steps are calls that the mode takes.
//
// Packed sequences: a step's hidden state has several uses, whose gradients autograd adds in the order of its graph.
// PyTorch's graph has a node more where a sequence of the batch ends, after which the others' gradients are added in
// another order. Here every step has that node.
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "invariance_kernels.h"
#include "result_sizes.h"

namespace conv2d_ext {
namespace {

using namespace invariance;

// Between layers, in training.
Tensor drop(const Tensor& output, double dropout, bool is_last) {
  return dropout == 0 || is_last ? output : at::dropout(output, dropout, /*train=*/true);
}

using State = std::vector<Tensor>;  // (sequences, features) each

State narrow(const State& state, int64_t first, int64_t count) {
  State part;
  for (const Tensor& tensor : state) part.push_back(tensor.narrow(0, first, count));
  return part;
}
State join(at::ArrayRef<State> parts) {
  State joined;
  for (size_t i = 0; i < parts[0].size(); ++i) {
    std::vector<Tensor> tensors;
    for (const State& part : parts) tensors.push_back(part[i]);
    joined.push_back(at::cat(tensors));
  }
  return joined;
}

// The parameters of a layer and direction.
struct Cell {
  at::TensorList params;
  bool has_biases;
  Tensor linear(const Tensor& input, size_t weight) const {
    return at::linear(input, params[weight], has_biases ? std::optional<Tensor>(params[weight + 2]) : std::nullopt);
  }
};
struct GruCell : Cell {
  static constexpr size_t kStates = 1;
  State next(const Tensor& of_input, const State& state) const {
    const auto i = of_input.chunk(3, 1), g = linear(state[0], 1).chunk(3, 1);
    const Tensor reset = at::sigmoid(g[0].add(i[0])), update = at::sigmoid(g[1].add(i[1]));
    const Tensor fresh = at::tanh(i[2].add(g[2].mul(reset)));
    return {state[0].sub(fresh).mul(update).add(fresh)};
  }
};
struct LstmCell : Cell {  // whose state is (h, c)
  static constexpr size_t kStates = 2;
  State next(const Tensor& of_input, const State& state) const {
    const auto gates = linear(state[0], 1).add(of_input).chunk(4, 1);
    const Tensor c = at::sigmoid(gates[1]).mul(state[1]).add(at::sigmoid(gates[0]).mul(at::tanh(gates[2])));
    const Tensor h = at::sigmoid(gates[3]).mul(at::tanh(c));
    const bool is_projected = params.size() == (has_biases ? 5 : 3);
    return {is_projected ? at::linear(h, params.back()) : h, c};
  }
};

struct LayerOptions {
  bool has_biases;
  int64_t num_layers;
  double dropout;  // between layers; 0 where nothing is trained
  bool bidirectional;
  int64_t directions() const { return bidirectional ? 2 : 1; }
  int64_t parts() const { return num_layers * directions(); }
};

// Whether the states have one batch and dtype, and each layer and direction its parameters, as run_layers has them.
// Otherwise PyTorch reports it.
bool fit_together(at::TensorList hx, at::TensorList params, const LayerOptions& options, const SymInt& batch) {
  for (const Tensor& state : hx) {
    if (state.dim() != 3 || state.sym_size(0) != options.parts() || state.sym_size(1) != batch ||
        state.scalar_type() != hx[0].scalar_type()) {
      return false;
    }
  }
  const bool is_projected = hx.size() == 2 && hx[0].sym_size(2) != hx[1].sym_size(2);
  return options.parts() > 0 &&
         params.size() == size_t(options.parts()) * ((options.has_biases ? 4 : 2) + (is_projected ? 1 : 0));
}

// All layers. hx: (layers * directions, sequences, features) each. params: for each layer and direction weight_ih,
// weight_hh, bias_ih and bias_hh where there are biases, weight_hr where an LSTM's h is projected. run(cell, input,
// first state, reverse): the hidden states of one layer and direction, and the last state. Returns those of the last
// layer, and the last states as hx has them.
template <class C, class Run>
std::pair<Tensor, State> run_layers(Tensor input, at::TensorList hx, at::TensorList params, const LayerOptions& options,
                                    const Run& run) {
  const size_t count = params.size() / size_t(options.parts());
  std::vector<std::vector<Tensor>> last(C::kStates);
  for (int64_t layer = 0; layer < options.num_layers; ++layer) {
    std::vector<Tensor> outputs;
    for (int64_t direction = 0; direction < options.directions(); ++direction) {
      const int64_t at = layer * options.directions() + direction;
      const C cell{{params.slice(size_t(at) * count, count), options.has_biases}};
      State first;
      for (const Tensor& state : hx) first.push_back(state.select(0, at));
      const auto [output, state] = run(cell, input, first, direction != 0);
      outputs.push_back(output);
      for (size_t i = 0; i < C::kStates; ++i) last[i].push_back(state[i]);
    }
    input = drop(options.bidirectional ? at::cat(outputs, -1) : outputs[0], options.dropout,
                 layer == options.num_layers - 1);
  }
  State states;
  for (const auto& tensors : last) states.push_back(at::stack(tensors));
  return {input, states};
}

// The steps of one layer and direction, of input (length, batch, features).
std::pair<Tensor, State> run_batch(const LstmCell& cell, const Tensor& input, State state, bool reverse) {
  const Tensor of_input = cell.linear(input, 0);
  const int64_t length = input.sym_size(0).guard_int(__FILE__, __LINE__);
  std::vector<Tensor> steps(length);
  for (int64_t i = 0; i < length; ++i) {
    const int64_t step = reverse ? length - 1 - i : i;
    state = cell.next(of_input.select(0, step), state);
    steps[step] = state[0];
  }
  return {at::stack(steps), state};
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
    const auto is_like_input = [&](const Tensor& param) { return is_cast || takes_on_cpu(input, param); };
    const bool has_steps = is_taken_apart(keys) || (!is_tracing() && input.sym_numel() != 0);
    const bool trains = train && dropout != 0;
    const LayerOptions options{has_biases, num_layers, trains ? dropout : 0, bidirectional};
    if (leaves<Op>(keys) || !has_steps || input.dim() != 3 || hx.size() != 2 || !takes_on_cpu(input, hx[0], hx[1]) ||
        !fit_together(hx, params, options, input.sym_size(batch_first ? 0 : 1)) ||
        !std::all_of(params.begin(), params.end(), is_like_input) || (trains && is_jit_tracing())) {
      return Op::redispatch(keys & kBelow, input, hx, params, has_biases, num_layers, dropout, train, bidirectional,
                            batch_first);
    }
    const auto [output, states] =
        run_layers<LstmCell>(batch_first ? input.transpose(0, 1) : input, hx, params, options, run_batch);
    return {batch_first ? output.transpose(0, 1) : output, states[0], states[1]};
  }
};

// ---- packed sequences

// The steps of one layer and direction. data: (elements, features), the sequences' elements of a step side by side;
// sizes: how many sequences have a step. Returns the hidden states, in data's order, and the last of each sequence.
template <class C>
std::pair<Tensor, State> run_packed(const C& cell, const Tensor& data, at::IntArrayRef sizes, const State& first,
                                    bool reverse) {
  const Tensor of_input = cell.linear(data, 0);
  std::vector<Tensor> steps(sizes.size());
  std::vector<State> ended;
  State state = reverse ? narrow(first, 0, sizes.back()) : first;
  int64_t at = reverse ? data.size(0) : 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const size_t step = reverse ? sizes.size() - 1 - i : i;
    const int64_t size = sizes[step], before = state[0].size(0);
    if (reverse) at -= size;
    if (size < before) ended.push_back(narrow(state, size, before - size));
    state = size > before ? join({state, narrow(first, before, size - before)}) : narrow(state, 0, size);
    state = cell.next(of_input.narrow(0, at, size), state);
    steps[step] = state[0];
    if (!reverse) at += size;
  }
  ended.push_back(state);
  std::reverse(ended.begin(), ended.end());
  return {at::cat(steps), join(ended)};
}

// The sizes of a packed sequence's steps, or none where PyTorch has to take the call: also of a trace of torch.jit,
// whose steps would be those of the example's lengths.
std::optional<std::vector<int64_t>> packed_sizes(const Tensor& data, const Tensor& batch_sizes, at::TensorList hx,
                                                 at::TensorList params, const LayerOptions& options) {
  if (is_tracing() || in_transform() || is_jit_tracing() || !is_on_cpu(batch_sizes) ||
      batch_sizes.scalar_type() != at::kLong || batch_sizes.dim() != 1 || batch_sizes.numel() == 0 || data.dim() != 2) {
    return std::nullopt;
  }
  const Tensor contiguous = batch_sizes.contiguous();
  const int64_t* const first = contiguous.const_data_ptr<int64_t>();
  std::vector<int64_t> sizes(first, first + contiguous.numel());
  const bool descend = sizes.back() > 0 && std::is_sorted(sizes.begin(), sizes.end(), std::greater<>());
  if (!descend || std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) != data.size(0)) return std::nullopt;
  for (const Tensor& state : hx) {
    if (!takes_on_cpu(data, state)) return std::nullopt;
  }
  if (!fit_together(hx, params, options, sizes[0])) return std::nullopt;
  return sizes;
}

template <class C>
std::pair<Tensor, State> run_packed_layers(const Tensor& data, at::IntArrayRef sizes, at::TensorList hx,
                                           at::TensorList params, const LayerOptions& options) {
  return run_layers<C>(data, hx, params, options,
                       [&](const C& cell, const Tensor& input, const State& first, bool reverse) {
                         return run_packed(cell, input, sizes, first, reverse);
                       });
}

struct GruOfPacked {
  using Op = at::_ops::gru_data;
  static std::tuple<Tensor, Tensor> call(DispatchKeySet keys, const Tensor& data, const Tensor& batch_sizes,
                                         const Tensor& hx, at::TensorList params, bool has_biases, int64_t num_layers,
                                         double dropout, bool train, bool bidirectional) {
    const LayerOptions options{has_biases, num_layers, train ? dropout : 0, bidirectional};
    const bool leave = leaves<Op>(keys);
    const auto sizes = leave ? std::nullopt : packed_sizes(data, batch_sizes, {hx}, params, options);
    if (!sizes.has_value()) {
      return redispatch_composite<Op>(keys, data, batch_sizes, hx, params, has_biases, num_layers, dropout, train,
                                      bidirectional);
    }
    const auto [output, states] = run_packed_layers<GruCell>(data, *sizes, {hx}, params, options);
    return {output, states[0]};
  }
};

struct LstmOfPacked {
  using Op = at::_ops::lstm_data;
  static std::tuple<Tensor, Tensor, Tensor> call(DispatchKeySet keys, const Tensor& data, const Tensor& batch_sizes,
                                                 at::TensorList hx, at::TensorList params, bool has_biases,
                                                 int64_t num_layers, double dropout, bool train, bool bidirectional) {
    const LayerOptions options{has_biases, num_layers, train ? dropout : 0, bidirectional};
    const bool leave = leaves<Op>(keys) || hx.size() != 2;
    const auto sizes = leave ? std::nullopt : packed_sizes(data, batch_sizes, hx, params, options);
    if (!sizes.has_value()) {
      return redispatch_composite<Op>(keys, data, batch_sizes, hx, params, has_biases, num_layers, dropout, train,
                                      bidirectional);
    }
    const auto [output, states] = run_packed_layers<LstmCell>(data, *sizes, hx, params, options);
    return {output, states[0], states[1]};
  }
};

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) { cover_all<Lstm, GruOfPacked, LstmOfPacked>(m); }

}  // namespace
}  // namespace conv2d_ext
