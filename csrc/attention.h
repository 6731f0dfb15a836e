// Attention: y = softmax(scale * q k^T + mask) v, by this library's products and softmax, so that a query's result has
// the same bits whatever the batch, its place there and the threads.
//
// Blocks of queries meet all keys, so that memory beyond the tensors grows with the number of keys alone; a backward
// computes a block's shares once more. A block's length follows from the number of keys, since the gradients of keys
// and values add block after block.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace conv2d_ext {

// q (N, heads, L, E), k (N, kv_heads, S, E), v (N, kv_heads, S, Ev), float32 or float64; kv_heads divides heads.
struct AttentionOptions {
  at::Tensor mask;      // none, or of 4 dimensions that expand to (N, heads, L, S): bool (true: counts) or added
  bool causal = false;  // a query meets the keys up to its own number
  double scale = 1;
  bool heads_inside = false;  // the result lies in memory as (N, L, heads, Ev)
};
// (N, heads, L, Ev)
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionOptions& options);

}  // namespace conv2d_ext
