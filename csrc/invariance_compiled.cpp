// The mode under torch.compile: calls that hold as PyTorch computes them, and would not as a compiler does.
//
// A compiler writes its own loops: it cuts a sum among threads or vectors by sizes, and takes other functions for the
// rest of a vector. So while a graph is traced in the mode, each op of the list below is recorded as
// conv2d_ext::eager_<name>, which no compiler knows and which calls the op as it is. What is left to the compiler is
// exact: additions, products, comparisons, copies.
//
// Ops that the mode computes itself are not in the list; a compiler knows nothing of those either.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "invariance_kernels.h"
#include "invariance_recorded.h"
#include "tracing.h"

namespace conv2d_ext {
namespace {

// None that PyTorch composes of others: it would be taken apart where it is to be recorded.
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
    "hypot",
    "lgamma",
    "digamma",
    "sinc",
    "i0",
    "special_entr",
    "special_log_ndtr",
    "special_xlog1py",
    "special_xlog1py.self_scalar",
    "special_xlog1py.other_scalar",
    "xlogy.Tensor",
    "xlogy.Scalar_Self",
    "xlogy.Scalar_Other",
    "mvlgamma",
    "log_sigmoid_forward",
    "log_sigmoid_backward",
    "logit_backward",
    // sums
    "_safe_softmax",
    "logsumexp",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "renorm",
    "trace",
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
    "index_reduce",
    "put",
    "scatter_add",
    "scatter_reduce.two",
    "col2im",
    "unfold_backward",
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
    "multi_margin_loss",
    "multi_margin_loss_backward",
    "multilabel_margin_loss_forward",
    "multilabel_margin_loss_backward",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_linear1d",
    "upsample_trilinear3d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward",
    "upsample_linear1d_backward",
    "upsample_trilinear3d_backward",
    "upsample_nearest1d_backward",
    "upsample_nearest2d_backward",
    "upsample_nearest3d_backward",
    "_upsample_nearest_exact1d_backward",
    "_upsample_nearest_exact2d_backward",
    "_upsample_nearest_exact3d_backward",
    "grid_sampler_2d",
    "grid_sampler_2d_backward",
    // products, made of calls that the mode takes
    "conv_tbc",
    "_grouped_mm",
};

const std::string kAten = "aten::", kEager = "conv2d_ext::eager_";

// The op of PyTorch's that a name of the list means, where this version has it.
std::optional<c10::OperatorHandle> aten_op(const char* name) { return invariance::find_overload(kAten + name); }

// ---- what the two names take
//
// A package of AOTInductor passes arguments to ops that it doesn't know by their types and defaults, and not all: a
// list that is empty by default arrives as none, a dtype as another one, a list of tensors that may be undefined not
// at all. So no recorded call has any of these.

bool is_named(const c10::OperatorHandle& op, const char* name) { return op.operator_name().name == kAten + name; }

// Of the recorded name, where it isn't aten's: a dtype is a number, as it is on the stack; index_put takes the defined
// indices, and their places among all.
std::optional<std::string> recorded_schema(const c10::OperatorHandle& op) {
  if (is_named(op, "cumsum")) return "eager_cumsum(Tensor self, int dim, *, int? dtype=None) -> Tensor";
  if (is_named(op, "cumprod")) return "eager_cumprod(Tensor self, int dim, *, int? dtype=None) -> Tensor";
  if (is_named(op, "_safe_softmax")) return "eager__safe_softmax(Tensor self, int dim, int? dtype=None) -> Tensor";
  if (is_named(op, "_grouped_mm")) {
    return "eager__grouped_mm(Tensor self, Tensor mat2, Tensor? offs=None, Tensor? bias=None, int? out_dtype=None) -> "
           "Tensor";
  }
  if (is_named(op, "index_put")) {
    return "eager_index_put(Tensor self, Tensor[] indices, int[] places, Tensor values, bool accumulate=False) -> "
           "Tensor";
  }
  return std::nullopt;
}

// From the arguments of aten's op to those of its recorded name, and back.
void to_recorded(const c10::OperatorHandle& aten, torch::jit::Stack& stack) {
  if (is_named(aten, "avg_pool2d") || is_named(aten, "avg_pool3d")) {
    const size_t count = aten.schema().arguments().size();
    at::IValue& stride = torch::jit::peek(stack, 2, count);
    if (stride.toIntVector().empty()) stride = torch::jit::peek(stack, 1, count);  // the kernel's size
  }
  if (!is_named(aten, "index_put")) return;
  const at::IValue accumulate = torch::jit::pop(stack), values = torch::jit::pop(stack);
  const auto indices = torch::jit::pop(stack).toOptionalTensorVector();
  const int64_t dims = torch::jit::peek(stack, 0, 1).toTensor().dim();
  TORCH_CHECK_INDEX(static_cast<int64_t>(indices.size()) <= dims, "too many indices for tensor of dimension ", dims,
                    " (got ", indices.size(), ")");
  c10::List<at::Tensor> defined;
  c10::List<int64_t> places;
  for (size_t place = 0; place < indices.size(); ++place) {
    if (!indices[place].has_value() || !indices[place]->defined()) continue;
    defined.push_back(*indices[place]);
    places.push_back(static_cast<int64_t>(place));
  }
  torch::jit::push(stack, defined, places, values, accumulate);
}
void to_aten(const c10::OperatorHandle& aten, torch::jit::Stack& stack) {
  if (!is_named(aten, "index_put")) return;
  const at::IValue accumulate = torch::jit::pop(stack), values = torch::jit::pop(stack);
  const auto places = torch::jit::pop(stack).toIntVector();
  const auto defined = torch::jit::pop(stack).toTensorVector();
  TORCH_CHECK(places.size() == defined.size(), "expected as many places as indices, but got ", places.size(), " and ",
              defined.size());
  const int64_t most = torch::jit::peek(stack, 0, 1).toTensor().dim();
  c10::List<std::optional<at::Tensor>> indices;
  for (size_t i = 0; i < places.size(); ++i) {
    TORCH_CHECK(places[i] >= static_cast<int64_t>(indices.size()) && places[i] < most,
                "expected places to rise, below the ", most, " of self, but got ", places);
    while (static_cast<int64_t>(indices.size()) < places[i]) indices.push_back(std::nullopt);
    indices.push_back(defined[i]);
  }
  torch::jit::push(stack, indices, values, accumulate);
}

// An op by the other one of its two names.
struct Twin : c10::OperatorKernel {
  explicit Twin(const c10::OperatorHandle& op) : other(op) {}
  const c10::OperatorHandle other;
};

// aten's op, in the mode. A context that lay inside of a compiled function is over by the time that this runs.
struct CallEagerly final : Twin {
  explicit CallEagerly(const c10::OperatorHandle& op) : Twin(op), settles(RecordedResults::settles(op.schema())) {}
  const bool settles;
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const invariance::InTheMode mode;
    to_aten(other, *stack);
    if (!settles) return other.callBoxed(stack);
    const size_t count = other.schema().arguments().size(), results = other.schema().returns().size();
    RecordedResults::Tensors arguments;
    for (size_t i = 0; i < count; ++i) {
      const at::IValue& argument = torch::jit::peek(*stack, i, count);
      arguments.push_back(argument.isTensor() ? std::optional<at::Tensor>(argument.toTensor()) : std::nullopt);
    }
    const RecordedResults settled(other.operator_name().name, arguments);
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
    const invariance::InTheMode mode;
    to_aten(other, *stack);
    other.callBoxed(stack);
  }
};

struct Record final : Twin {
  using Twin::Twin;
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    to_recorded(op, *stack);
    other.callBoxed(stack);
  }
};

// A recorded call keeps PyTorch's derivatives: it goes to PyTorch's autograd kernel first, which takes down how to
// differentiate it and hands it on to the kernel of its backend. That kernel records the other name. (The ops that a
// backward calls come here themselves.) For it to be ours the call pretends to be one of MAIA, a backend that PyTorch
// has the name of, with the autograd kernels of all backends, and no kernel.
const c10::DispatchKeySet kAsMaia({c10::DispatchKey::AutogradMAIA, c10::DispatchKey::MAIA});

bool is_recording() { return has_mode(c10::impl::TorchDispatchModeKey::PROXY); }

// A compiler may write in place what only stores, such as a cache of keys and values.
bool only_stores(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const std::string& name = op.operator_name().name;
  constexpr const char* kPuts[] = {"aten::index_put", "aten::index_put_", "aten::_unsafe_index_put", "aten::put",
                                   "aten::put_"};
  return std::find(std::begin(kPuts), std::end(kPuts), name) != std::end(kPuts) &&
         !torch::jit::peek(stack, 3, 4).toBool();
}

// Sums and products of integers, modulo a power of 2; reductions to the largest or the smallest.
bool is_exact(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (is_named(op, "scatter_reduce") || is_named(op, "index_reduce")) {
    const auto reduce = torch::jit::peek(stack, 4, 6).toStringView();
    return reduce == "amax" || reduce == "amin";
  }
  if (!is_named(op, "cumsum") && !is_named(op, "cumprod")) return false;
  const at::IValue& dtype = torch::jit::peek(stack, 2, 3);
  return c10::isIntegralType(
      dtype.isNone() ? torch::jit::peek(stack, 0, 3).toTensor().scalar_type() : dtype.toScalarType(),
      /*includeBool=*/true);
}

// Batch norm in training does.
bool writes_statistics(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  return op.operator_name().name == "aten::native_batch_norm" && torch::jit::peek(stack, 5, 8).toBool();
}

// Ops that are made of calls that the mode takes, and that PyTorch doesn't take apart. A TorchDispatchMode, or a
// tensor's class, calls them without the keys above it, so that these calls would not come here: it is given the op's
// other name, which does.
bool hides_calls(const c10::OperatorHandle& op, c10::DispatchKeySet keys) {
  constexpr const char* kMadeOfCalls[] = {"aten::conv_tbc",
                                          "aten::_grouped_mm",
                                          "aten::_trilinear",
                                          "aten::_native_multi_head_attention",
                                          "aten::_transformer_encoder_layer_fwd",
                                          "aten::_safe_softmax",
                                          "aten::logsumexp",
                                          "aten::mvlgamma",
                                          "aten::renorm",
                                          "aten::mse_loss",
                                          "aten::smooth_l1_loss",
                                          "aten::huber_loss",
                                          "aten::binary_cross_entropy",
                                          "aten::binary_cross_entropy_with_logits",
                                          "aten::soft_margin_loss",
                                          "aten::norm"};
  const std::string& name = op.operator_name().name;
  return keys.has(c10::DispatchKey::Python) && !keys.has(c10::DispatchKey::NestedTensor) &&
         std::find(std::begin(kMadeOfCalls), std::end(kMadeOfCalls), name) != std::end(kMadeOfCalls);
}

// What becomes of a call: while a graph is traced in the mode it is recorded, else PyTorch's kernel computes it.
struct RecordOrPass final : c10::OperatorKernel {
  explicit RecordOrPass(const c10::OperatorHandle& op) : pass(invariance::eager_call(op.operator_name().name)) {}
  const invariance::EagerCall pass;
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (invariance::leaves(op, keys)) return op.redispatchBoxed(keys & invariance::kBelow, stack);
    // Each level of a transform of torch.func is to see the op that it knows how to batch, or to differentiate. What a
    // level makes of it comes here again, at last below all of them.
    const bool records = (is_recording() || hides_calls(op, keys)) && !writes_statistics(op, *stack) &&
                         !only_stores(op, *stack) && !is_exact(op, *stack) && !invariance::in_transform();
    if (!records) return pass(op, keys & invariance::kBelow, stack);
    op.redispatchBoxed(kAsMaia, stack);
  }
};

// exp_ and its like: a compiler would make exp of it, and compute that.
struct RecordInPlace final : Twin {  // of the op that is not in place
  explicit RecordInPlace(const c10::OperatorHandle& op)
      : Twin(op), pass(invariance::eager_call(op.operator_name().name)) {}
  const invariance::EagerCall pass;
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (invariance::has_left()) return op.redispatchBoxed(keys & invariance::kBelow, stack);
    if (!is_recording() || only_stores(op, *stack)) {
      return pass(op, keys & invariance::kBelow, stack);
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

// _unsafe_index_put, by which PyTorch differentiates the gathers of its formulas in Python, such as interpolation's:
// recorded as index_put, since its indices are known to lie inside.
struct RecordAsIndexPut final : Twin {  // of index_put
  using Twin::Twin;
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const bool records =
        !invariance::has_left() && is_recording() && !only_stores(op, *stack) && !invariance::in_transform();
    if (!records) return op.redispatchBoxed(keys & invariance::kBelow, stack);
    other.callBoxed(stack);
  }
};

template <class Kernel>
torch::CppFunction kernel_of(const c10::OperatorHandle& other) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(other));
}

TORCH_LIBRARY_FRAGMENT(conv2d_ext, m) {
  for (const char* name : kEagerOps) {
    // Not every version of PyTorch has all of them.
    const auto op = aten_op(name);
    if (!op) continue;
    if (const auto schema = recorded_schema(*op)) {
      m.def(schema->c_str(), {at::Tag::pt2_compliant_tag});
    } else {
      const c10::OperatorName& aten = op->operator_name();
      m.def(op->schema().cloneWithName(kEager + aten.name.substr(kAten.size()), aten.overload_name),
            {at::Tag::pt2_compliant_tag});
    }
  }
}

template <class Kernel>
void call_eagerly(torch::Library& m) {
  for (const char* name : kEagerOps) {
    if (const auto op = aten_op(name)) {
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
    const auto op = aten_op(name);
    if (!op) continue;
    m.impl(name, kernel_of<RecordOrPass>(*op));
    std::string in_place = name;
    in_place.insert(std::min(in_place.find('.'), in_place.size()), "_");
    if (invariance::find_overload(kAten + in_place)) m.impl(in_place.c_str(), kernel_of<RecordInPlace>(*op));
  }
  if (const auto index_put = aten_op("index_put"); index_put && aten_op("_unsafe_index_put")) {
    m.impl("_unsafe_index_put", kernel_of<RecordAsIndexPut>(*index_put));
  }
}

TORCH_LIBRARY_IMPL(aten, MAIA, m) {
  for (const char* name : kEagerOps) {
    if (aten_op(name)) {
      m.impl(name, kernel_of<Record>(*invariance::find_overload(kEager + name)));
    }
  }
}

}  // namespace
}  // namespace conv2d_ext
