// Attention by blocks, and by differentiable calls.
#include "attention.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include <limits>

#include "conv2d_checks.h"
#include "matmul.h"
#include "op_checks.h"
#include "reductions.h"

namespace conv2d_ext {
namespace {

using at::Tensor;
using c10::SymInt;

constexpr int64_t kBlockShares = 65536;  // that the block of one head has, unless a key has more queries
constexpr int64_t kFewestQueries = 32;
constexpr int64_t kPieceShares = 1 << 20;  // of the heads that are computed together

// Some images' and heads' queries, with all of their keys.
struct Piece {
  Tensor q, k, v;  // (P, queries of all heads of a key, E), (P, S, E), (P, S, Ev)
  Tensor mask;
  SymInt images, heads, queries, first_query;
};

// Tensors as (images * kv_heads, rows, columns), in the type that is computed in.
Tensor matrices(const Tensor& tensor, const SymInt& kv_heads) {
  const SymInt images = tensor.sym_size(0);
  return tensor
      .reshape_symint({images * kv_heads, tensor.sym_size(1) * tensor.sym_size(2) / kv_heads, tensor.sym_size(3)})
      .to(compute_type(tensor.scalar_type()));
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
                                                 : at::add(scores, piece.mask.to(scores.scalar_type()));
  // A query without a key has shares of 0, and so gradients of 0.
  const Tensor without = at::all(at::eq(scores, lowest), -1, /*keepdim=*/true);
  const Tensor result = at::masked_fill(softmax_over(at::masked_fill(scores, without, 0), -1), without, 0);
  return result.view_symint({piece.k.sym_size(0), -1, keys});
}

// The sum over the dimensions in which the mask has one element for all.
Tensor grad_of_mask(const Tensor& grad_scores, const Tensor& mask) {
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < 4; ++d) {
    if (mask.sym_size(d).sym_eq(1).guard_bool(__FILE__, __LINE__)) dims.push_back(d);
  }
  return dims.empty() ? grad_scores : sum_over(grad_scores, dims, /*keepdim=*/true);
}

// Gradients of a piece: of q, k and v in its shapes, of the mask in the mask's.
AttentionGrads grads_of(const Piece& piece, const Tensor& gy, const AttentionOptions& options,
                        const AttentionWanted& wanted) {
  AttentionGrads grads;
  const Tensor p = shares(piece, options);
  if (wanted[2]) grads[2] = matrix_product(p.transpose(1, 2), gy);
  if (!wanted[0] && !wanted[1] && !wanted[3]) return grads;
  const Tensor gs = softmax_grad(matrix_product(gy, piece.v.transpose(1, 2)), p, -1, /*log=*/false);
  if (wanted[0]) grads[0] = at::mul(matrix_product(gs, piece.k), options.scale);
  if (wanted[1]) grads[1] = matrix_product(gs.transpose(1, 2), at::mul(piece.q, options.scale));
  if (wanted[3]) {
    const SymInt keys = piece.k.sym_size(1);
    grads[3] = grad_of_mask(gs.view_symint({piece.images, piece.heads, piece.queries, keys}), piece.mask);
  }
  return grads;
}

// Calls body(part, kv_part, mask_part, piece) for pieces that cover all queries: what a piece has of a tensor with
// images, heads and queries, of one with keys, of one like the mask.
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
        const auto mask_part = [&](Tensor t) {
          const int64_t first[] = {n, h, i}, count[] = {ns, hs, is};
          for (int64_t d = 0; d < 3; ++d) {
            if (t.size(d) != 1) t = t.narrow(d, first[d], count[d]);
          }
          return t;
        };
        const SymInt kv = hs / group;
        const Piece piece{matrices(part(q), kv),
                          matrices(kv_part(k), kv),
                          matrices(kv_part(v), kv),
                          options.mask.defined() ? mask_part(options.mask) : options.mask,
                          ns,
                          hs,
                          is,
                          i};
        body(piece, part, kv_part, mask_part);
      }
    }
  }
}

// (N, heads, rows, columns) that lies as (N, rows, heads, columns).
Tensor zeros_with_heads_inside(const Tensor& like, at::ScalarType dtype) {
  return at::zeros({like.size(0), like.size(2), like.size(1), like.size(3)}, like.options().dtype(dtype))
      .transpose(1, 2);
}

AttentionOptions make_options(const std::optional<Tensor>& mask, bool causal, double scale, bool fused_layout) {
  return {mask.value_or(Tensor()), causal, scale, fused_layout};
}

void check_all_data(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask) {
  check_data("q", q);
  check_data("k", k);
  check_data("v", v);
  if (mask.has_value() && mask->defined()) check_data("mask", *mask);
}

Tensor attention_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, bool causal,
                     double scale, bool fused_layout) {
  check_attention(q, k, v, mask);
  check_all_data(q, k, v, mask);
  const AttentionOptions options = make_options(mask, causal, scale, fused_layout);
  const at::AutoDispatchBelowADInplaceOrView guard;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);  // it has cast before
  Tensor result =
      fused_layout ? at::empty_like(q) : at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
  each_piece(q, k, v, options, [&](const Piece& piece, const auto& part, const auto&, const auto&) {
    const Tensor here = part(result);
    here.copy_(matrix_product(shares(piece, options), piece.v).view(here.sizes()));
  });
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_grad_cpu(const Tensor& grad_output, const Tensor& q,
                                                              const Tensor& k, const Tensor& v,
                                                              const std::optional<Tensor>& mask, bool causal,
                                                              double scale, bool fused_layout, AttentionWanted wanted) {
  check_attention_grad(grad_output, q, k, v, mask, wanted);
  check_data("grad_output", grad_output);
  check_all_data(q, k, v, mask);
  const AttentionOptions options = make_options(mask, causal, scale, fused_layout);
  const at::AutoDispatchBelowADInplaceOrView guard;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);  // it has cast before
  // Those of queries are written once; the others are sums over blocks of queries, which are rounded at the end.
  const auto wide = compute_type(q.scalar_type());
  const auto zeros = [&](const Tensor& like) {
    return fused_layout ? zeros_with_heads_inside(like, wide) : at::zeros(like.sizes(), like.options().dtype(wide));
  };
  const auto none = [&] { return at::empty({0}, q.options()); };
  Tensor gq = !wanted[0]     ? none()
              : fused_layout ? zeros_with_heads_inside(q, q.scalar_type())
                             : at::empty(q.sizes(), q.options());
  Tensor gk = !wanted[1] ? none()
              : fused_layout
                  ? zeros(k)
                  : at::zeros({k.size(0), k.size(1), k.size(3), k.size(2)}, k.options().dtype(wide)).transpose(2, 3);
  Tensor gv = wanted[2] ? zeros(v) : none();
  Tensor gm = wanted[3] ? at::zeros(mask->sizes(), mask->options().dtype(wide)) : none();
  each_piece(q, k, v, options, [&](const Piece& piece, const auto& part, const auto& kv_part, const auto& mask_part) {
    const Tensor gy = matrices(part(grad_output), piece.k.sym_size(0) / piece.images);
    const AttentionGrads some = grads_of(piece, gy, options, wanted);
    if (wanted[0]) part(gq).copy_(some[0].view(part(gq).sizes()));
    if (wanted[1]) kv_part(gk).add_(some[1].view(kv_part(gk).sizes()));
    if (wanted[2]) kv_part(gv).add_(some[2].view(kv_part(gv).sizes()));
    if (wanted[3]) mask_part(gm).add_(some[3]);
  });
  return {gq, wanted[1] ? gk.to(k.scalar_type()) : gk, wanted[2] ? gv.to(v.scalar_type()) : gv,
          wanted[3] ? gm.to(mask->scalar_type()) : gm};
}

TORCH_LIBRARY_IMPL(conv2d_ext, CPU, m) {
  m.impl("attention", attention_cpu);
  m.impl("attention_grad", attention_grad_cpu);
}

}  // namespace

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  const std::optional<Tensor> mask = options.mask.defined() ? std::optional<Tensor>(options.mask) : std::nullopt;
  return attention_op().call(q, k, v, mask, options.causal, options.scale, options.fused_layout);
}

Tensor attention_by_calls(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  const Piece piece = whole(q, k, v, options);
  return matrix_product(shares(piece, options), piece.v)
      .view_symint({piece.images, piece.heads, piece.queries, v.sym_size(3)})
      .to(q.scalar_type());
}

AttentionGrads attention_grads_by_calls(const Tensor& grad_output, const Tensor& q, const Tensor& k, const Tensor& v,
                                        const AttentionOptions& options, const AttentionWanted& wanted) {
  const Tensor gy = matrices(grad_output, k.sym_size(1));
  AttentionGrads grads = grads_of(whole(q, k, v, options), gy, options, wanted);
  const Tensor* const of[] = {&q, &k, &v, &options.mask};
  for (size_t i = 0; i < grads.size(); ++i) {
    if (wanted[i]) grads[i] = grads[i].reshape_symint(of[i]->sym_sizes()).to(of[i]->scalar_type());
  }
  return grads;
}

}  // namespace conv2d_ext
