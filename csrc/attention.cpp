// Attention by blocks, and its history.
#include "attention.h"

#include <ATen/Functions.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <limits>

#include "autograd_node.h"
#include "matmul.h"
#include "reductions.h"

namespace conv2d_ext {
namespace {

using at::Tensor;
using c10::SymInt;
using torch::autograd::compute_requires_grad;
using torch::autograd::isFwGradDefined;
using torch::autograd::variable_list;

constexpr int64_t kBlockShares = 65536;  // that the block of one head has, unless a key has more queries
constexpr int64_t kFewestQueries = 32;
constexpr int64_t kPieceShares = 1 << 20;  // of the heads that are computed together

// Some images' and heads' queries, with all of their keys.
struct Piece {
  Tensor q, k, v;  // (P, queries of all heads of a key, E), (P, S, E), (P, S, Ev)
  Tensor mask;
  SymInt images, heads, queries, first_query;
};

// Tensors as (images * kv_heads, rows, columns).
Tensor matrices(const Tensor& tensor, const SymInt& kv_heads) {
  const SymInt images = tensor.sym_size(0);
  return tensor.reshape_symint(
      {images * kv_heads, tensor.sym_size(1) * tensor.sym_size(2) / kv_heads, tensor.sym_size(3)});
}

Piece whole(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  const SymInt kv_heads = k.sym_size(1);
  return {matrices(q, kv_heads), matrices(k, kv_heads), matrices(v, kv_heads), options.mask,
          q.sym_size(0),         q.sym_size(1),         q.sym_size(2),         0};
}

// The softmax of a piece, as (P, queries, S).
Tensor shares(const Piece& piece, const AttentionOptions& options) {
  const SymInt keys = piece.k.sym_size(1);
  const double lowest = -std::numeric_limits<double>::infinity();
  Tensor scores = matrix_product(at::mul(piece.q, options.scale), piece.k.transpose(1, 2));
  scores = scores.view_symint({piece.images, piece.heads, piece.queries, keys});
  if (options.causal) {
    const int64_t first = piece.first_query.guard_int(__FILE__, __LINE__);
    const Tensor later = at::ones_symint({piece.queries, keys}, scores.options().dtype(at::kBool)).triu(first + 1);
    scores = at::masked_fill(scores, later, lowest);
  }
  if (!piece.mask.defined()) {
    return softmax_over(scores, -1).view_symint({piece.k.sym_size(0), -1, keys});
  }
  scores = piece.mask.scalar_type() == at::kBool ? at::masked_fill(scores, piece.mask.logical_not(), lowest)
                                                 : at::add(scores, piece.mask);
  // A query without a key has shares of 0, and so gradients of 0.
  const Tensor without = at::all(at::eq(scores, lowest), -1, /*keepdim=*/true);
  const Tensor result = at::masked_fill(softmax_over(at::masked_fill(scores, without, 0), -1), without, 0);
  return result.view_symint({piece.k.sym_size(0), -1, keys});
}

// Gradients of a piece, in its shapes.
struct Grads {
  Tensor q, k, v;
};

Grads grads_of(const Piece& piece, const Tensor& gy, const AttentionOptions& options, const Wanted& wanted) {
  Grads grads;
  const Tensor p = shares(piece, options);
  if (wanted[2]) grads.v = matrix_product(p.transpose(1, 2), gy);
  if (wanted[0] || wanted[1]) {
    const Tensor gs = softmax_grad(matrix_product(gy, piece.v.transpose(1, 2)), p, -1, /*log=*/false);
    if (wanted[0]) grads.q = at::mul(matrix_product(gs, piece.k), options.scale);
    if (wanted[1]) grads.k = matrix_product(gs.transpose(1, 2), at::mul(piece.q, options.scale));
  }
  return grads;
}

// Calls body(part, piece) for pieces that cover all queries; part(tensor) is what a piece has of a tensor with images,
// heads and queries, kv_part(tensor) what it has of one with keys.
template <class Body>
void each_piece(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options, Body body) {
  const int64_t images = q.size(0), heads = q.size(1), queries = q.size(2), keys = k.size(2);
  const int64_t kv_heads = k.size(1), group = heads / kv_heads;
  const int64_t block = std::min(queries, std::max(kFewestQueries, kBlockShares / keys));
  const int64_t fitting = std::max<int64_t>(1, kPieceShares / (block * keys));
  const int64_t some_images = std::min(images, std::max<int64_t>(1, fitting / heads));
  const int64_t some_heads = std::min(heads, std::max<int64_t>(1, fitting / group) * group);
  for (int64_t n = 0; n < images; n += some_images) {
    const int64_t ns = std::min(some_images, images - n);
    for (int64_t h = 0; h < heads; h += some_heads) {
      const int64_t hs = std::min(some_heads, heads - h);
      for (int64_t i = 0; i < queries; i += block) {
        const int64_t is = std::min(block, queries - i);
        const auto part = [&](const Tensor& t) { return t.narrow(0, n, ns).narrow(1, h, hs).narrow(2, i, is); };
        const auto kv_part = [&](const Tensor& t) { return t.narrow(0, n, ns).narrow(1, h / group, hs / group); };
        const SymInt kv = hs / group;
        Piece piece{
            matrices(part(q), kv), matrices(kv_part(k), kv), matrices(kv_part(v), kv), options.mask, ns, hs, is, i};
        if (piece.mask.defined()) {
          const int64_t first[] = {n, h, i}, count[] = {ns, hs, is};
          for (int64_t d = 0; d < 3; ++d) {
            if (piece.mask.size(d) != 1) piece.mask = piece.mask.narrow(d, first[d], count[d]);
          }
        }
        body(piece, part, kv_part);
      }
    }
  }
}

Tensor attention_by_pieces(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  const Tensor result = options.heads_inside
                            ? at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2)
                            : at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
  each_piece(q, k, v, options, [&](const Piece& piece, const auto& part, const auto&) {
    const Tensor here = part(result);
    here.copy_(matrix_product(shares(piece, options), piece.v).view(here.sizes()));
  });
  return result;
}

Grads grads_by_pieces(const Tensor& gy, const Tensor& q, const Tensor& k, const Tensor& v,
                      const AttentionOptions& options, const Wanted& wanted) {
  Grads grads;
  if (wanted[0]) grads.q = at::empty_like(q, at::MemoryFormat::Preserve);
  if (wanted[1]) grads.k = at::zeros_like(k);
  if (wanted[2]) grads.v = at::zeros_like(v);
  each_piece(q, k, v, options, [&](const Piece& piece, const auto& part, const auto& kv_part) {
    const Grads some = grads_of(piece, matrices(part(gy), piece.k.sym_size(0) / piece.images), options, wanted);
    if (wanted[0]) part(grads.q).copy_(some.q.view(part(grads.q).sizes()));
    if (wanted[1]) kv_part(grads.k).add_(some.k.view(kv_part(grads.k).sizes()));
    if (wanted[2]) kv_part(grads.v).add_(some.v.view(kv_part(grads.v).sizes()));
  });
  return grads;
}

// By differentiable calls, in one piece.
Tensor attention_by_calls(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  const Piece piece = whole(q, k, v, options);
  const Tensor result = matrix_product(shares(piece, options), piece.v)
                            .view_symint({piece.images, piece.heads, piece.queries, v.sym_size(3)});
  return options.heads_inside ? result.transpose(1, 2).contiguous().transpose(1, 2) : result;
}

Grads grads_by_calls(const Tensor& gy, const Tensor& q, const Tensor& k, const Tensor& v,
                     const AttentionOptions& options, const Wanted& wanted) {
  Grads grads = grads_of(whole(q, k, v, options), matrices(gy, k.sym_size(1)), options, wanted);
  if (wanted[0]) grads.q = grads.q.view_symint(q.sym_sizes());
  if (wanted[1]) grads.k = grads.k.view_symint(k.sym_sizes());
  if (wanted[2]) grads.v = grads.v.view_symint(v.sym_sizes());
  return grads;
}

struct AttentionBackward final : torch::autograd::TraceableFunction {
  torch::autograd::SavedVariable q_saved, k_saved, v_saved, mask_saved;
  bool causal = false;
  double scale = 1;

  std::string name() const override { return "Conv2dExtAttentionBackward"; }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list result(3);
    if (!grads[0].defined()) return result;
    const Tensor q = q_saved.unpack(), k = k_saved.unpack(), v = v_saved.unpack();
    const AttentionOptions options{mask_saved.unpack(), causal, scale};
    const Wanted wanted{task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Grads found = c10::GradMode::is_enabled() ? grads_by_calls(grads[0], q, k, v, options, wanted)
                                                    : grads_by_pieces(grads[0], q, k, v, options, wanted);
    result[0] = found.q;
    result[1] = found.k;
    result[2] = found.v;
    return result;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto* saved : {&q_saved, &k_saved, &v_saved, &mask_saved}) saved->reset_data();
  }
};

// Whether something watches single calls: a transform of torch.func, forward mode, tracing.
bool is_watched(const Tensor& tensor) {
  return tensor.defined() && (is_transformed(tensor) || tensor.key_set().has(c10::DispatchKey::FuncTorchBatched) ||
                              tensor.key_set().has(c10::DispatchKey::Python) || isFwGradDefined(tensor) ||
                              tensor.key_set().has(c10::DispatchKey::Functionalize));
}

}  // namespace

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  const bool has_mask_grad = c10::GradMode::is_enabled() && options.mask.defined() && options.mask.requires_grad();
  if (has_mask_grad || is_watched(q) || is_watched(k) || is_watched(v) || is_watched(options.mask) ||
      c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    return attention_by_calls(q, k, v, options);
  }
  Tensor result;
  {
    const at::NoGradGuard no_grad;
    result = attention_by_pieces(q, k, v, options);
  }
  if (compute_requires_grad(q, k, v)) {
    auto node = new_node<AttentionBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(q, k, v));
    node->q_saved = torch::autograd::SavedVariable(q, /*is_output=*/false);
    node->k_saved = torch::autograd::SavedVariable(k, /*is_output=*/false);
    node->v_saved = torch::autograd::SavedVariable(v, /*is_output=*/false);
    node->mask_saved = torch::autograd::SavedVariable(options.mask, /*is_output=*/false);
    node->causal = options.causal;
    node->scale = options.scale;
    torch::autograd::set_history(result, node);
  }
  return result;
}

}  // namespace conv2d_ext
