// Attention: y = softmax(scale * q k^T + mask) v, by this library's products and softmax, so that a query's result has
// the same bits whatever the batch, its place there and the threads: the ops conv2d_ext::attention and attention_grad,
// on the CPU.
//
// Blocks of queries meet all keys, so that memory beyond the tensors grows with the number of keys alone; a backward
// computes a block's shares once more. A block's length follows from the number of keys, since the gradients of keys
// and values add block after block.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

#include "find_op.h"

namespace conv2d_ext {

// q (N, heads, L, E), k (N, kv_heads, S, E), v (N, kv_heads, S, Ev), of one dtype: float32, float64, bfloat16 or
// float16, of which the last two are rounded once; kv_heads divides heads. No tensor is empty.
struct AttentionOptions {
  at::Tensor mask;      // none, or of 4 dimensions that expand to (N, heads, L, S): bool (true: counts) or added
  bool causal = false;  // a query meets the keys up to its own number
  double scale = 1;
  // As PyTorch's own kernel lays out what it computes: the result as q, each gradient as (N, rows, heads, columns).
  // Else as a sequence of products has it: contiguous but for the gradient of k, whose columns come before its rows.
  bool fused_layout = false;
};
// (N, heads, L, Ev)
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionOptions& options);

// Of q, k, v and the mask.
using AttentionWanted = std::array<bool, 4>;
using AttentionGrads = std::array<at::Tensor, 4>;

using AttentionSignature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                      const std::optional<at::Tensor>&, bool, double, bool);
// Gradients that are not wanted have no elements.
using AttentionGradSignature = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, bool,
    double, bool, AttentionWanted);
namespace op_names {
inline constexpr char attention[] = "attention", attention_grad[] = "attention_grad";
}
inline const auto& attention_op() { return op_named<AttentionSignature, op_names::attention>(); }
inline const auto& attention_grad_op() { return op_named<AttentionGradSignature, op_names::attention_grad>(); }

// Dtypes, devices and sizes; raise. For kernels and tracing alike.
void check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::optional<at::Tensor>& mask);
void check_attention_grad(const at::Tensor& grad_output, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::optional<at::Tensor>& mask, const AttentionWanted& wanted);

// The same as differentiable calls of other ops, in one piece: for derivatives of a gradient, and for tangents. Its
// memory grows with queries times keys.
at::Tensor attention_by_calls(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const AttentionOptions& options);
AttentionGrads attention_grads_by_calls(const at::Tensor& grad_output, const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v, const AttentionOptions& options,
                                        const AttentionWanted& wanted);

}  // namespace conv2d_ext
