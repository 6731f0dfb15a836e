// The mode under torch.compile: calls that hold as PyTorch computes them, and would not as a compiler does.
//
// A compiler writes its own loops: it cuts a sum among threads or vectors by sizes, and takes other functions for the
// rest of a vector. So while a graph is traced in the mode, each op of the list below is recorded as
// conv2d_ext::eager_<name>, which no compiler knows and which calls the op as it is. What is left to the compiler is
// exact: additions, products, comparisons, copies.
//
// Ops that the mode computes itself are not in the list; a compiler knows nothing of those either.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>

#include "invariance_kernels.h"

namespace conv2d_ext {
namespace {

constexpr const char* kEagerOps[] = {
    // functions that are rounded as they are computed
    "exp",
    "expm1",
    "log",
    "log1p",
    "log2",
    "log10",
    "erf",
    "erfc",
    "erfinv",
    "tanh",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "asinh",
    "acosh",
    "lgamma",
    "digamma",
    "sinc",
    "special_i0",
    "special_entr",
    "special_xlog1py",
    "xlogy.Tensor",
    "mvlgamma",
    "log_sigmoid_forward",
    "log_sigmoid_backward",
    "logit_backward",
    // sums
    "logsumexp",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "cumsum",
    "cumprod",
    "logcumsumexp",
    "native_layer_norm",
    "native_layer_norm_backward",
    "native_group_norm",
    "native_group_norm_backward",
    "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit.no_stats",
    "native_batch_norm",
    "native_batch_norm_backward",
    "avg_pool2d",
    "avg_pool2d_backward",
    "avg_pool3d",
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d",
    "embedding_dense_backward",
    "_trilinear",
    "_weight_norm_interface",
    "_weight_norm_interface_backward",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    "index_add",
    "index_put",
    "scatter_add",
    "nll_loss_forward",
    "nll_loss2d_forward",
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_backward",
    "binary_cross_entropy_with_logits",
    "soft_margin_loss",
    "soft_margin_loss_backward",
    "multilabel_margin_loss_forward",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_linear1d",
    "upsample_trilinear3d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward",
    "grid_sampler_2d",
    "grid_sampler_2d_backward",
};

const std::string kAten = "aten::", kEager = "conv2d_ext::eager_";
const std::string kLayerNormBackward = kAten + "native_layer_norm_backward";

std::optional<c10::OperatorHandle> find(const std::string& prefix, const std::string& name) {
  const size_t dot = name.find('.');
  const bool overloaded = dot != std::string::npos;
  return c10::Dispatcher::singleton().findSchema(
      {prefix + name.substr(0, dot), overloaded ? name.substr(dot + 1) : ""});
}

// An op by the other one of its two names.
struct Twin : c10::OperatorKernel {
  explicit Twin(const c10::OperatorHandle& op) : other(op) {}
  const c10::OperatorHandle other;
};

// The mode for calls of this thread, also where a TorchDispatchMode or a tensor's class is at work, which PyTorch
// calls without the keys above them.
class InTheMode {
 public:
  InTheMode() : excluded_(c10::impl::tls_is_dispatch_key_excluded(kInvarianceKey)), included_(kInvarianceKey) {
    if (excluded_) c10::impl::tls_set_dispatch_key_excluded(kInvarianceKey, false);
  }
  ~InTheMode() {
    if (excluded_) c10::impl::tls_set_dispatch_key_excluded(kInvarianceKey, true);
  }
  InTheMode(const InTheMode&) = delete;
  InTheMode& operator=(const InTheMode&) = delete;

 private:
  const bool excluded_;
  const c10::impl::IncludeDispatchKeyGuard included_;
};

// The results of a recorded call as a compiler expects them, to whom PyTorch's functions of shapes describe them. Those
// give some results other strides than PyTorch's kernels do, and other types where a norm's weights have another one
// than its input. Both are made to follow a rule here, of the arguments that are tensors: results of ops of
// several tensors are channels_last where the first one's channels lie side by side, else row by row. (Of one tensor,
// both agree.)
class SettledResults {
 public:
  using Tensors = std::vector<std::optional<Tensor>>;

  // arguments: those that are tensors, the first of all among them.
  SettledResults(const std::string& aten_name, const Tensors& arguments) {
    TORCH_INTERNAL_ASSERT(!arguments.empty() && arguments[0].has_value());
    const Tensor& like = *arguments[0];
    dims_ = like.dim();
    // By strides that no size of 1 changes, such as that of a batch of one, and without asking what a symbolic one is.
    const auto is_one = [&](int64_t dim) { return like.sym_stride(dim).maybe_as_int() == 1; };
    if ((dims_ == 4 || dims_ == 5) && is_one(1) && !is_one(dims_ - 1)) {
      format_ = dims_ == 4 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
    }
    // (On CUDA PyTorch's functions of shapes know the types.)
    if (!like.device().is_cpu()) return;
    const auto type_of = [&](size_t begin, size_t end) {
      for (size_t i = begin; i < std::min(end, arguments.size()); ++i) {
        if (arguments[i].has_value() && arguments[i]->defined()) return arguments[i]->scalar_type();
      }
      return like.scalar_type();
    };
    // Statistics have the type of what is learned; the gradient of an input has the input's.
    if (aten_name == kAten + "native_layer_norm") types_ = {like.scalar_type(), type_of(2, 4), type_of(2, 4)};
    if (aten_name == kAten + "native_group_norm") types_ = {like.scalar_type(), type_of(1, 3), type_of(1, 3)};
    if (aten_name.find("native_batch_norm") != std::string::npos && aten_name.find("backward") == std::string::npos) {
      types_ = {like.scalar_type(), type_of(1, 5), type_of(1, 5)};
    }
    if (aten_name == kAten + "native_group_norm_backward") types_ = {type_of(1, 2)};
  }

  Tensor settle(size_t number, Tensor result) const {
    if (!result.defined()) return result;
    if (number < types_.size()) result = result.to(types_[number]);
    return result.contiguous(result.dim() == dims_ ? format_ : at::MemoryFormat::Contiguous);
  }

  static bool settles(const c10::FunctionSchema& schema) {
    const auto is_tensor = [](const c10::Argument& argument) {
      return argument.type()->isSubtypeOf(*c10::OptionalType::ofTensor()) ||
             argument.type()->isSubtypeOf(*c10::ListType::ofOptionalTensors());
    };
    const auto& arguments = schema.arguments();
    return schema.returns().size() > 1 || std::count_if(arguments.begin(), arguments.end(), is_tensor) > 1;
  }

 private:
  int64_t dims_ = 0;
  at::MemoryFormat format_ = at::MemoryFormat::Contiguous;
  std::vector<at::ScalarType> types_;  // of the first results, where they are known
};

// aten's op, in the mode. A context that lay inside of a compiled function is over by the time that this runs.
struct CallEagerly final : Twin {
  explicit CallEagerly(const c10::OperatorHandle& op) : Twin(op), settles(SettledResults::settles(op.schema())) {}
  const bool settles;
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const InTheMode mode;
    if (!settles) return other.callBoxed(stack);
    const size_t count = other.schema().arguments().size(), results = other.schema().returns().size();
    SettledResults::Tensors arguments;
    for (size_t i = 0; i < count; ++i) {
      const at::IValue& argument = torch::jit::peek(*stack, i, count);
      arguments.push_back(argument.isTensor() ? std::optional<Tensor>(argument.toTensor()) : std::nullopt);
    }
    const SettledResults settled(other.operator_name().name, arguments);
    other.callBoxed(stack);
    for (size_t i = 0; i < results; ++i) {
      at::IValue& result = torch::jit::peek(*stack, i, results);
      if (result.isTensor()) result = settled.settle(i, result.toTensor());
    }
  }
};
// The same for vmap, whose strides don't show.
struct CallBatched final : Twin {
  using Twin::Twin;
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const InTheMode mode;
    other.callBoxed(stack);
  }
};

struct Record final : Twin {
  using Twin::Twin;
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) { other.callBoxed(stack); }
};

// A recorded call keeps PyTorch's derivatives: it goes to PyTorch's autograd kernel first, which takes down how to
// differentiate it and hands it on to the kernel of its backend. That kernel records the other name. (The ops that a
// backward calls come here themselves.) For it to be ours the call pretends to be one of MAIA, a backend that PyTorch
// has the name of, with the autograd kernels of all backends, and no kernel.
const c10::DispatchKeySet kAsMaia({c10::DispatchKey::AutogradMAIA, c10::DispatchKey::MAIA});

bool is_recording() {
  return c10::impl::TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::PROXY).has_value();
}

bool is_index_put(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  return name == "aten::index_put" || name == "aten::index_put_";
}
bool accumulates(const torch::jit::Stack& stack) { return torch::jit::peek(stack, 3, 4).toBool(); }

// A compiler may write in place what only stores, such as a cache of keys and values.
bool only_stores(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  return is_index_put(op) && !accumulates(stack);
}

// PyTorch's code for one thread and that for several are compiled to other roundings. Groups of whole vectors of
// channels have neither's rest.
bool group_norm_follows_threads(int64_t channels, int64_t groups) {
  constexpr int64_t kVectors = 32;  // of 16-bit elements, the longest
  return groups > 0 && channels / groups % kVectors != 0;
}

// Whether each thread sums some of the rows of batch norm's input, whose channels are innermost. (Channels of others
// are dealt out whole.)
bool batch_norm_follows_threads(const at::Tensor& input) {
  return input.dim() == 2 || !input.is_contiguous() || input.sym_numel() == input.sym_size(0) * input.sym_size(1);
}

// Of images of three channels PyTorch's one thread has another kernel than its several.
bool resizing_follows_threads(const at::Tensor& image) {
  return image.dim() == 4 && image.sym_size(1).maybe_as_int() == 3;
}

// Ops that are made of calls that the mode takes, and that PyTorch doesn't take apart. A TorchDispatchMode, or a
// tensor's class, calls them without the keys above it, so that these calls would not come here: it is given the op's
// other name, which does.
bool hides_calls(const c10::OperatorHandle& op, c10::DispatchKeySet keys) {
  constexpr const char* kMadeOfCalls[] = {"aten::_trilinear", "aten::_native_multi_head_attention",
                                          "aten::_transformer_encoder_layer_fwd"};
  const std::string& name = op.operator_name().name;
  return keys.has(c10::DispatchKey::Python) && !keys.has(c10::DispatchKey::NestedTensor) &&
         std::find(std::begin(kMadeOfCalls), std::end(kMadeOfCalls), name) != std::end(kMadeOfCalls);
}

// index_put as its kernel below (invariance_indexing.cpp), which a TorchDispatchMode would hide; and what follows the
// number of threads.
bool runs_on_one_thread(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (is_index_put(op)) return accumulates(stack);
  const auto argument = [&](size_t i) { return torch::jit::peek(stack, i, op.schema().arguments().size()); };
  const auto is_on_cpu = [&](size_t i) { return argument(i).isTensor() && argument(i).toTensor().device().is_cpu(); };
  const std::string& name = op.operator_name().name;
  if (name == "aten::native_group_norm_backward") {
    return is_on_cpu(0) && argument(4).isTensor() &&
           group_norm_follows_threads(argument(6).toSymInt().guard_int(__FILE__, __LINE__), argument(8).toInt());
  }
  if (name == "aten::native_batch_norm") {
    return is_on_cpu(0) && argument(5).toBool() && batch_norm_follows_threads(argument(0).toTensor());
  }
  if (name == "aten::native_batch_norm_backward") {
    return is_on_cpu(1) && batch_norm_follows_threads(argument(1).toTensor());
  }
  if (name == "aten::_weight_norm_interface") return is_on_cpu(0);
  if (name == "aten::_weight_norm_interface_backward") return is_on_cpu(1);
  if (name == "aten::upsample_bilinear2d") return is_on_cpu(0) && resizing_follows_threads(argument(0).toTensor());
  return name == kLayerNormBackward && is_on_cpu(1);
}

// The gradients of layer norm's weight and bias: sums over rows, of which each of PyTorch's threads takes some, in
// 16-bit types where these are the weight's. Here they are the mode's sums, of float32 at least.
class LayerNormSums {
 public:
  explicit LayerNormSums(const torch::jit::Stack& stack) {
    const auto argument = [&](size_t i) { return torch::jit::peek(stack, i, kArguments); };
    const auto tensor = [&](size_t i) { return argument(i).isTensor() ? argument(i).toTensor() : Tensor(); };
    grad_output_ = tensor(0), input_ = tensor(1), mean_ = tensor(3), rstd_ = tensor(4);
    weight_ = tensor(5), bias_ = tensor(6);
    rows_dims_ = input_.dim() - int64_t(argument(2).toListRef().size());
    wanted_ = argument(7).toBoolList();
    dtype_ = input_.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  }
  // Where they are differentiated again, mean and rstd depend on the input, as PyTorch's own derivative knows.
  bool takes() const {
    return rows_dims_ >= 0 && invariance::takes_on_cpu(input_, grad_output_) &&
           !invariance::may_record(grad_output_, input_, weight_, bias_);
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
  static constexpr size_t kArguments = 8;
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

void sum_layer_norm(const LayerNormSums& sums, const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                    torch::jit::Stack* stack) {
  stack->back() = sums.others();
  op.redispatchBoxed(keys, stack);
  if (sums.has_weight()) torch::jit::peek(*stack, 1, 3) = sums.of_weight();
  if (sums.has_bias()) torch::jit::peek(*stack, 2, 3) = sums.of_bias();
}

void record_or_pass(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  // In training it writes to its running statistics.
  const bool mutates = op.operator_name().name == "aten::native_batch_norm" && torch::jit::peek(*stack, 5, 8).toBool();
  // Each level of a transform of torch.func is to see the op that it knows how to batch, or to differentiate. What a
  // level makes of it comes here again, at last below all of them.
  const bool records = (is_recording() || hides_calls(op, keys)) && !mutates && !only_stores(op, *stack) &&
                       !invariance::is_transformed();
  if (!records && op.operator_name().name == kLayerNormBackward) {
    const LayerNormSums sums(*stack);
    if (sums.takes()) return sum_layer_norm(sums, op, keys & invariance::kBelow, stack);
  }
  if (!records && op.operator_name().name == "aten::grid_sampler_2d_backward") {
    // The order in which the input's gradient is summed follows the grid's strides, which may be another's in a batch
    // of one.
    at::IValue& grid = torch::jit::peek(*stack, 2, op.schema().arguments().size());
    grid = grid.toTensor().contiguous();
  }
  const invariance::OneThread alone(!records && runs_on_one_thread(op, *stack));
  op.redispatchBoxed(records ? kAsMaia : keys & invariance::kBelow, stack);
}

// exp_ and its like: a compiler would make exp of it, and compute that.
struct RecordInPlace final : Twin {  // of the op that is not in place
  using Twin::Twin;
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (!is_recording() || only_stores(op, *stack)) {
      const invariance::OneThread alone(runs_on_one_thread(op, *stack));
      op.redispatchBoxed(keys & invariance::kBelow, stack);
      return;
    }
    at::IValue& argument = torch::jit::peek(*stack, 0, op.schema().arguments().size());
    const at::Tensor self = argument.toTensor();
    // A derivative needs the values that are overwritten here.
    if (invariance::may_record(self)) argument = self.clone();
    other.callBoxed(stack);
    const at::Tensor result = torch::jit::pop(*stack).toTensor();
    TORCH_CHECK(c10::canCast(result.scalar_type(), self.scalar_type()), "result type ", result.scalar_type(),
                " can't be cast to the desired output type ", self.scalar_type());
    self.copy_(result);
    torch::jit::push(*stack, self);
  }
};

template <class Kernel>
torch::CppFunction kernel_of(const c10::OperatorHandle& other) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(other));
}

TORCH_LIBRARY_FRAGMENT(conv2d_ext, m) {
  for (const char* name : kEagerOps) {
    // Not every version of PyTorch has all of them.
    if (const auto op = find(kAten, name)) {
      const c10::OperatorName& aten = op->operator_name();
      m.def(op->schema().cloneWithName(kEager + aten.name.substr(kAten.size()), aten.overload_name),
            {at::Tag::pt2_compliant_tag});
    }
  }
}

template <class Kernel>
void call_eagerly(torch::Library& m) {
  for (const char* name : kEagerOps) {
    if (const auto op = find(kAten, name)) {
      m.impl((std::string("eager_") + name).c_str(), kernel_of<Kernel>(*op));
    }
  }
}

TORCH_LIBRARY_IMPL(conv2d_ext, CompositeExplicitAutograd, m) { call_eagerly<CallEagerly>(m); }
// Who differentiates or batches a recorded call, as of an exported program, does so with aten's op.
TORCH_LIBRARY_IMPL(conv2d_ext, Autograd, m) { call_eagerly<CallEagerly>(m); }
TORCH_LIBRARY_IMPL(conv2d_ext, FuncTorchBatched, m) { call_eagerly<CallBatched>(m); }

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) {
  for (const char* name : kEagerOps) {
    const auto op = find(kAten, name);
    if (!op) continue;
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&record_or_pass>());
    const std::string in_place = std::string(name) + "_";
    if (in_place.find('.') == std::string::npos && find(kAten, in_place)) {
      m.impl(in_place.c_str(), kernel_of<RecordInPlace>(*op));
    }
  }
}

TORCH_LIBRARY_IMPL(aten, MAIA, m) {
  for (const char* name : kEagerOps) {
    if (find(kAten, name)) {
      m.impl(name, kernel_of<Record>(*find(kEager, name)));
    }
  }
}

}  // namespace

std::vector<std::optional<at::Tensor>> settle_recorded_results(const std::string& name,
                                                               const std::vector<std::optional<at::Tensor>>& arguments,
                                                               std::vector<std::optional<at::Tensor>> results) {
  const auto op = find(kAten, name);
  TORCH_INTERNAL_ASSERT(op.has_value());
  if (!SettledResults::settles(op->schema())) return results;
  const SettledResults settled(op->operator_name().name, arguments);
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].has_value()) results[i] = settled.settle(i, *results[i]);
  }
  return results;
}

}  // namespace conv2d_ext
