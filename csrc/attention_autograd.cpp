// conv2d_ext::attention and attention_grad: checks, shapes and derivatives.
//
// A gradient's own derivatives, and tangents, are those of the calls that attention is made of.
#include <ATen/Functions.h>
#include <torch/library.h>

#include "attention.h"
#include "autograd_node.h"
#include "op_checks.h"
#include "sym_arithmetic.h"

namespace conv2d_ext {

namespace {

void check_mask(const at::Tensor& mask, const at::Tensor& q, const at::Tensor& k) {
  const auto dtype = mask.scalar_type();
  TORCH_CHECK(dtype == at::kBool || is_real(dtype),
              "conv2d_ext::attention: expected a mask of dtype bool, float32, float64, bfloat16 or float16, but got ",
              dtype);
  check_device("conv2d_ext::attention", "mask", mask, "q", q);
  const c10::SymInt scores[] = {q.sym_size(0), q.sym_size(1), q.sym_size(2), k.sym_size(2)};
  bool expands = mask.dim() == 4;
  for (int64_t d = 0; expands && d < 4; ++d) {
    expands = mask.sym_size(d).maybe_as_int() == 1 || equal(mask.sym_size(d), scores[d]);
  }
  TORCH_CHECK(expands, "conv2d_ext::attention: expected a mask of 4 dimensions that expand to ",
              c10::SymIntArrayRef(scores), ", but got ", mask.sym_sizes());
}

}  // namespace

void check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::optional<at::Tensor>& mask) {
  constexpr const char* kOp = "conv2d_ext::attention";
  check_real(kOp, "q", q);
  check_kind(kOp, "k", k, "q", q);
  check_kind(kOp, "v", v, "q", q);
  const auto is_empty = [](const at::Tensor& t) { return t.sym_numel().sym_eq(0).guard_bool(__FILE__, __LINE__); };
  TORCH_CHECK(!is_empty(q) && !is_empty(k) && !is_empty(v), kOp, ": expected tensors with elements, but got q of size ",
              q.sym_sizes(), ", k ", k.sym_sizes(), " and v ", v.sym_sizes());
  const bool fits = q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && equal(q.sym_size(0), k.sym_size(0)) &&
                    equal(q.sym_size(0), v.sym_size(0)) && equal(k.sym_size(1), v.sym_size(1)) &&
                    equal(k.sym_size(2), v.sym_size(2)) && equal(q.sym_size(3), k.sym_size(3)) &&
                    equal(q.sym_size(1) % k.sym_size(1), c10::SymInt(0));
  TORCH_CHECK(fits, kOp,
              ": expected q of size (N, heads, L, E), k (N, kv_heads, S, E) and v (N, kv_heads, S, Ev), but got ",
              q.sym_sizes(), ", ", k.sym_sizes(), " and ", v.sym_sizes());
  if (mask.has_value() && mask->defined()) check_mask(*mask, q, k);
}

void check_attention_grad(const at::Tensor& grad_output, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::optional<at::Tensor>& mask, const AttentionWanted& wanted) {
  constexpr const char* kOp = "conv2d_ext::attention_grad";
  check_attention(q, k, v, mask);
  check_kind(kOp, "grad_output", grad_output, "q", q);
  const c10::SymInt wanted_size[] = {q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)};
  bool fits = grad_output.dim() == 4;
  for (int64_t d = 0; fits && d < 4; ++d) fits = equal(grad_output.sym_size(d), wanted_size[d]);
  TORCH_CHECK(fits, kOp, ": expected grad_output of size ", c10::SymIntArrayRef(wanted_size), ", but got ",
              grad_output.sym_sizes());
  TORCH_CHECK(!wanted[3] || (mask.has_value() && mask->defined()), kOp,
              ": expected a mask where its gradient is wanted, but got none");
}

namespace {

using at::Tensor;
using c10::SymInt;
using torch::autograd::compute_requires_grad;
using torch::autograd::isFwGradDefined;
using torch::autograd::variable_list;
using MaybeTensor = std::optional<Tensor>;

Tensor defined_or_none(const MaybeTensor& tensor) { return tensor.value_or(Tensor()); }

// ---- checks and fake kernels

Tensor attention_meta(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& mask, bool, double,
                      bool fused_layout) {
  check_attention(q, k, v, mask);
  return fused_layout ? at::empty_like(q)
                      : at::empty_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)}, q.options());
}

// A tensor like another one, two of whose dimensions lie in the other order.
Tensor empty_turned(const Tensor& like, int64_t first, int64_t second) {
  SymSizes size = copy_sizes(like.sym_sizes());
  std::swap(size[size_t(first)], size[size_t(second)]);
  return at::empty_symint(size, like.options()).transpose(first, second);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_grad_meta(const Tensor& grad_output, const Tensor& q,
                                                               const Tensor& k, const Tensor& v,
                                                               const MaybeTensor& mask, bool, double, bool fused_layout,
                                                               AttentionWanted wanted) {
  check_attention_grad(grad_output, q, k, v, mask, wanted);
  const auto contiguous = [](const Tensor& like) { return at::empty_symint(like.sym_sizes(), like.options()); };
  const auto none = [&] { return at::empty({0}, q.options()); };
  const Tensor gq = !wanted[0] ? none() : fused_layout ? empty_turned(q, 1, 2) : contiguous(q);
  const Tensor gk = !wanted[1] ? none() : fused_layout ? empty_turned(k, 1, 2) : empty_turned(k, 2, 3);
  const Tensor gv = !wanted[2] ? none() : fused_layout ? empty_turned(v, 1, 2) : contiguous(v);
  return {gq, gk, gv, wanted[3] ? contiguous(*mask) : none()};
}

TORCH_LIBRARY_IMPL(conv2d_ext, Meta, m) {
  m.impl("attention", attention_meta);
  m.impl("attention_grad", attention_grad_meta);
}

// ---- the node

struct AttentionBackward final : torch::autograd::TraceableFunction {
  std::array<torch::autograd::SavedVariable, 4> saved;  // q, k, v, mask
  bool causal = false, fused_layout = false;
  double scale = 1;

  std::string name() const override { return "Conv2dExtAttentionBackward"; }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return run(grads, {saved[0].unpack(), saved[1].unpack(), saved[2].unpack(), saved[3].unpack()}, causal, scale,
               fused_layout, wanted_now());
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved) variable.reset_data();
  }

  // ---- compiled autograd: one call in its graph

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (const auto& variable : saved) args.collect(variable, /*is_output=*/false);
    args.collect(causal);
    args.collect(scale);
    args.collect(fused_layout);
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    using torch::dynamo::autograd::IValuePacker;
    const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
    const auto tensor = IValuePacker<Tensor>::packed_type();
    static const std::string function = compiler->bind_function(
        swap.get_py_compiler(), name(), run_packed,
        {tensor, tensor, tensor, tensor, IValuePacker<bool>::packed_type(), IValuePacker<double>::packed_type(),
         IValuePacker<bool>::packed_type(), IValuePacker<AttentionWanted>::packed_type()});
    for (auto& variable : saved) swap.before(variable);
    torch::dynamo::autograd::PackedArgs args;
    for (auto& variable : saved) args.pack(Tensor(variable.unpack()));
    args.pack(causal);
    args.pack(scale);
    args.pack(fused_layout);
    args.pack(wanted_now());
    variable_list result =
        compiler->call_function(swap.get_py_compiler(), "apply_functional", function, grads, args.vec(),
                                IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
                                    torch::dynamo::autograd::get_input_metadata(next_edges())));
    for (auto& variable : saved) swap.after(variable);
    return result;
  }

 private:
  AttentionWanted wanted_now() const {
    AttentionWanted wanted{};
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = task_should_compute_output(i);
    return wanted;
  }

  static variable_list run(const variable_list& grads, const std::array<Tensor, 4>& tensors, bool causal, double scale,
                           bool fused_layout, const AttentionWanted& wanted) {
    variable_list result(4);
    if (!grads[0].defined()) return result;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const MaybeTensor mask = tensors[3].defined() ? MaybeTensor(tensors[3]) : std::nullopt;
    const auto found = attention_grad_op().call(grads[0], tensors[0], tensors[1], tensors[2], mask, causal, scale,
                                                fused_layout, wanted);
    const Tensor all[] = {std::get<0>(found), std::get<1>(found), std::get<2>(found), std::get<3>(found)};
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (wanted[i]) result[i] = all[i];
    }
    return result;
  }

  static variable_list run_packed(const variable_list& grads, const std::vector<at::IValue>& values) {
    torch::dynamo::autograd::PackedArgs args(values);
    std::array<Tensor, 4> tensors;
    for (Tensor& tensor : tensors) tensor = args.unpack<Tensor>();
    const bool causal = args.unpack<bool>();
    const double scale = args.unpack<double>();
    const bool fused_layout = args.unpack<bool>();
    const auto wanted = args.unpack<AttentionWanted>();
    return run(grads, tensors, causal, scale, fused_layout, wanted);
  }
};

// ---- the autograd kernels

bool moves(const Tensor& tensor) { return tensor.defined() && isFwGradDefined(tensor); }

Tensor attention_autograd(c10::DispatchKeySet keys, const Tensor& q, const Tensor& k, const Tensor& v,
                          const MaybeTensor& mask, bool causal, double scale, bool fused_layout) {
  const Tensor bias = defined_or_none(mask);
  if (moves(q) || moves(k) || moves(v) || moves(bias)) {
    check_attention(q, k, v, mask);
    return attention_by_calls(q, k, v, {bias, causal, scale, fused_layout});
  }
  const Tensor result = below_autograd(attention_op(), keys, q, k, v, mask, causal, scale, fused_layout);
  if (compute_requires_grad(q, k, v, bias)) {
    auto node = new_node<AttentionBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(q, k, v, bias));
    const Tensor* const tensors[] = {&q, &k, &v, &bias};
    for (size_t i = 0; i < node->saved.size(); ++i) {
      node->saved[i] = torch::autograd::SavedVariable(*tensors[i], /*is_output=*/false);
    }
    node->causal = causal;
    node->scale = scale;
    node->fused_layout = fused_layout;
    torch::autograd::set_history(result, node);
  }
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_grad_autograd(c10::DispatchKeySet keys, const Tensor& grad_output,
                                                                   const Tensor& q, const Tensor& k, const Tensor& v,
                                                                   const MaybeTensor& mask, bool causal, double scale,
                                                                   bool fused_layout, AttentionWanted wanted) {
  const Tensor bias = defined_or_none(mask);
  if (compute_requires_grad(grad_output, q, k, v, bias) || moves(grad_output) || moves(q) || moves(k) || moves(v) ||
      moves(bias)) {
    check_attention_grad(grad_output, q, k, v, mask, wanted);
    AttentionGrads grads = attention_grads_by_calls(grad_output, q, k, v, {bias, causal, scale, fused_layout}, wanted);
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!wanted[i]) grads[i] = at::empty({0}, q.options());
    }
    return {grads[0], grads[1], grads[2], grads[3]};
  }
  return below_autograd(attention_grad_op(), keys, grad_output, q, k, v, mask, causal, scale, fused_layout, wanted);
}

TORCH_LIBRARY_IMPL(conv2d_ext, Autograd, m) {
  m.impl("attention", attention_autograd);
  m.impl("attention_grad", attention_grad_autograd);
}

}  // namespace
}  // namespace conv2d_ext
