// Calls of PyTorch's own kernels in the mode, where no graph is traced, whose bits follow the number of threads or the
// strides: on one thread, or of arguments that lie in one way.
#include <algorithm>
#include <numeric>
#include <vector>

#include "invariance_kernels.h"

namespace conv2d_ext {
namespace {

using namespace invariance;
using Stack = torch::jit::Stack;

const at::IValue& argument(const c10::OperatorHandle& op, const Stack& stack, size_t i) {
  return torch::jit::peek(stack, i, op.schema().arguments().size());
}
bool lies_on_cpu(const at::IValue& value) { return value.isTensor() && value.toTensor().device().is_cpu(); }

// ---- which calls follow the number of threads

using Asks = bool(const c10::OperatorHandle&, const Stack&);

// index_put and put. (Below index_put lies another kernel, invariance_indexing.cpp, which a TorchDispatchMode would
// hide.)
bool accumulates(const c10::OperatorHandle& op, const Stack& stack) { return argument(op, stack, 3).toBool(); }

template <size_t number>
bool is_tensor_on_cpu(const c10::OperatorHandle& op, const Stack& stack) {
  return lies_on_cpu(argument(op, stack, number));
}

// PyTorch's code for one thread and that for several are compiled to other roundings. Groups of whole vectors of
// channels have neither's rest.
bool group_norm_backward_follows(const c10::OperatorHandle& op, const Stack& stack) {
  constexpr int64_t kVectors = 32;  // of 16-bit elements, the longest
  if (!lies_on_cpu(argument(op, stack, 0)) || !argument(op, stack, 4).isTensor()) return false;
  const int64_t channels = argument(op, stack, 6).toSymInt().guard_int(__FILE__, __LINE__);
  const int64_t groups = argument(op, stack, 8).toInt();
  return groups > 0 && channels / groups % kVectors != 0;
}

// Each thread sums some of the rows of batch norm's input where its channels are innermost. (Channels of others are
// dealt out whole.)
bool sums_rows(const at::IValue& input) {
  if (!lies_on_cpu(input)) return false;
  const Tensor& tensor = input.toTensor();
  return tensor.dim() == 2 || !tensor.is_contiguous() || tensor.sym_numel() == tensor.sym_size(0) * tensor.sym_size(1);
}
bool batch_norm_follows(const c10::OperatorHandle& op, const Stack& stack) {
  return argument(op, stack, 5).toBool() && sums_rows(argument(op, stack, 0));
}
bool batch_norm_backward_follows(const c10::OperatorHandle& op, const Stack& stack) {
  return sums_rows(argument(op, stack, 1));
}

// Of images of three channels PyTorch's one thread has another kernel than its several.
bool resizing_follows(const c10::OperatorHandle& op, const Stack& stack) {
  const at::IValue& image = argument(op, stack, 0);
  return lies_on_cpu(image) && image.toTensor().dim() == 4 && image.toTensor().sym_size(1).maybe_as_int() == 3;
}

// ---- the calls

void pass(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) { op.redispatchBoxed(keys, stack); }

template <Asks follows>
void pass_on_one_thread(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const OneThread alone(follows(op, *stack));
  op.redispatchBoxed(keys, stack);
}

// The order in which the gradient of grid_sample's input is summed follows the grid's strides, which may be others in a
// batch of one.
void pass_contiguous_grid(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  at::IValue& grid = torch::jit::peek(*stack, 2, op.schema().arguments().size());
  grid = grid.toTensor().contiguous();
  op.redispatchBoxed(keys, stack);
}

// The gradients of layer norm's weight and bias: sums over rows, of which each of PyTorch's threads takes some, in
// 16-bit types where these are the weight's. Here they are the mode's sums, of float32 at least.
class LayerNormSums {
 public:
  LayerNormSums(const c10::OperatorHandle& op, const Stack& stack) {
    const auto tensor = [&](size_t i) {
      const at::IValue& value = argument(op, stack, i);
      return value.isTensor() ? value.toTensor() : Tensor();
    };
    grad_output_ = tensor(0), input_ = tensor(1), mean_ = tensor(3), rstd_ = tensor(4);
    weight_ = tensor(5), bias_ = tensor(6);
    rows_dims_ = input_.dim() - int64_t(argument(op, stack, 2).toListRef().size());
    wanted_ = argument(op, stack, 7).toBoolList();
    dtype_ = compute_type(input_.scalar_type());
  }
  // Where they are differentiated again, mean and rstd depend on the input, as PyTorch's own derivative knows.
  bool takes() const {
    return rows_dims_ >= 0 && takes_on_cpu(input_, grad_output_) && !may_record(grad_output_, input_, weight_, bias_);
  }
  bool has_weight() const { return wanted_.get(1) && weight_.defined(); }
  bool has_bias() const { return wanted_.get(2) && bias_.defined(); }
  // What is left to PyTorch.
  c10::List<bool> others() const {
    return c10::List<bool>({wanted_.get(0), wanted_.get(1) && !has_weight(), wanted_.get(2) && !has_bias()});
  }
  Tensor of_weight() const {
    const Tensor normalized = input_.to(dtype_).sub(of_rows(mean_)).mul_(of_rows(rstd_));
    return sum_over_rows(at::mul(normalized, grad_output_)).to(weight_.scalar_type());
  }
  Tensor of_bias() const {
    // A copy, which may be the result.
    return sum_over_rows(grad_output_.to(dtype_, /*non_blocking=*/false, /*copy=*/rows_dims_ == 0))
        .to(bias_.scalar_type());
  }

 private:
  Tensor grad_output_, input_, mean_, rstd_, weight_, bias_;
  int64_t rows_dims_ = 0;  // what precedes normalized_shape
  c10::List<bool> wanted_;
  at::ScalarType dtype_ = at::kFloat;

  // One number for each row, whatever the shape in which they came.
  Tensor of_rows(const Tensor& numbers) const {
    std::vector<c10::SymInt> sizes = input_.sym_sizes().vec();
    std::fill(sizes.begin() + rows_dims_, sizes.end(), 1);
    return numbers.to(dtype_).reshape_symint(sizes);
  }
  Tensor sum_over_rows(const Tensor& rows) const {
    std::vector<int64_t> dims(static_cast<size_t>(rows_dims_));
    std::iota(dims.begin(), dims.end(), 0);
    return dims.empty() ? rows : at::sum(rows, dims);
  }
};

void sum_layer_norm(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const LayerNormSums sums(op, *stack);
  if (!sums.takes()) return pass_on_one_thread<is_tensor_on_cpu<1>>(op, keys, stack);
  stack->back() = sums.others();
  op.redispatchBoxed(keys, stack);
  if (sums.has_weight()) torch::jit::peek(*stack, 1, 3) = sums.of_weight();
  if (sums.has_bias()) torch::jit::peek(*stack, 2, 3) = sums.of_bias();
}

}  // namespace

invariance::EagerCall invariance::eager_call(const std::string& aten_name) {
  static const std::pair<const char*, EagerCall> calls[] = {
      {"aten::index_put", pass_on_one_thread<accumulates>},
      {"aten::index_put_", pass_on_one_thread<accumulates>},
      {"aten::put", pass_on_one_thread<accumulates>},
      {"aten::put_", pass_on_one_thread<accumulates>},
      {"aten::native_group_norm_backward", pass_on_one_thread<group_norm_backward_follows>},
      {"aten::native_batch_norm", pass_on_one_thread<batch_norm_follows>},
      {"aten::native_batch_norm_backward", pass_on_one_thread<batch_norm_backward_follows>},
      {"aten::_weight_norm_interface", pass_on_one_thread<is_tensor_on_cpu<0>>},
      {"aten::_weight_norm_interface_backward", pass_on_one_thread<is_tensor_on_cpu<1>>},
      {"aten::upsample_bilinear2d", pass_on_one_thread<resizing_follows>},
      {"aten::native_layer_norm_backward", sum_layer_norm},
      {"aten::grid_sampler_2d_backward", pass_contiguous_grid},
  };
  const auto found =
      std::find_if(std::begin(calls), std::end(calls), [&](const auto& call) { return call.first == aten_name; });
  return found == std::end(calls) ? pass : found->second;
}

}  // namespace conv2d_ext
