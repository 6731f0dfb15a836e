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

struct AttentionBackward {  // of (q, k, v, mask)
  static constexpr const char* kName = "Conv2dExtAttentionBackward";
  static constexpr size_t kArguments = 4, kSaved = 4;
  struct State {
    bool causal = false;
    double scale = 1;
    bool fused_layout = false;
    template <class Self, class Visit>
    static void visit(Self& self, Visit visit) {
      visit(self.causal);
      visit(self.scale);
      visit(self.fused_layout);
    }
  };

  static void apply(const Tensor& grad, const std::array<Tensor, kSaved>& tensors, const State& state,
                    const Wanted& wanted, variable_list& result) {
    const auto& [q, k, v, bias] = tensors;
    const MaybeTensor mask = bias.defined() ? MaybeTensor(bias) : std::nullopt;
    auto [gq, gk, gv, gmask] =
        attention_grad_op().call(grad, q, k, v, mask, state.causal, state.scale, state.fused_layout, wanted);
    const Tensor found[] = {gq, gk, gv, gmask};
    for (size_t i = 0; i < kArguments; ++i) {
      if (wanted[i]) result[i] = found[i];
    }
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
    auto node = make_node<AttentionBackward>(q, k, v, bias);
    node->state = {causal, scale, fused_layout};
    node->save(q, k, v, bias);
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
