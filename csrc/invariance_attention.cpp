// The mode's kernels of attention.
//
// PyTorch's own kernel multiplies blocks by a library whose bits follow the threads where a block has few queries, as
// the last one of any length may. So every call is taken that it would get, but those with dropout. Its layers
// (_native_multi_head_attention, _transformer_encoder_layer_fwd) are made of calls that the mode takes; of those only
// the masked softmax is theirs alone.
#include <cmath>

#include "attention.h"
#include "invariance_kernels.h"
#include "reductions.h"
#include "result_sizes.h"

namespace conv2d_ext {
namespace {

using namespace invariance;
using SymDims = c10::SmallVector<SymInt, 4>;

bool is_attention_mask(const Tensor& mask, const Tensor& query, const Tensor& key) {
  if (!is_on_cpu(mask) || (mask.scalar_type() != at::kBool && mask.scalar_type() != query.scalar_type() &&
                           mask.scalar_type() != at::kFloat)) {
    return false;
  }
  if (mask.dim() < 2 || mask.dim() > query.dim()) return false;
  for (int64_t i = 1; i <= mask.dim(); ++i) {
    const SymInt size = i == 1 ? key.sym_size(-2) : query.sym_size(-i);
    if (mask.sym_size(-i) != 1 && mask.sym_size(-i) != size) return false;
  }
  return true;
}

bool takes_attention(const Tensor& query, const Tensor& key, const Tensor& value, bool enable_gqa) {
  const int64_t dims = query.dim();
  if (!takes_on_cpu(query, key, value) || dims < (enable_gqa ? 3 : 2) || dims > 4 || key.dim() != dims ||
      value.dim() != dims) {
    return false;
  }
  if (query.sym_size(-1) != key.sym_size(-1) || key.sym_size(-2) != value.sym_size(-2)) return false;
  for (int64_t d = 0; d + 2 < dims; ++d) {
    const bool is_heads = enable_gqa && d + 3 == dims;
    if (key.sym_size(d) != value.sym_size(d)) return false;
    if (is_heads ? key.sym_size(d) == 0 || query.sym_size(d) % key.sym_size(d) != 0
                 : query.sym_size(d) != key.sym_size(d)) {
      return false;
    }
  }
  return query.sym_numel() != 0 && key.sym_numel() != 0 && value.sym_numel() != 0;
}

// (N, heads, rows, columns)
Tensor with_four_dims(Tensor tensor) {
  while (tensor.dim() < 4) tensor = tensor.unsqueeze(0);
  return tensor;
}

struct ScaledDotProductAttention {
  using Op = at::_ops::scaled_dot_product_attention;
  static Tensor call(DispatchKeySet keys, const Tensor& query, const Tensor& key, const Tensor& value,
                     const std::optional<Tensor>& attn_mask, double dropout_p, bool is_causal,
                     std::optional<double> scale, bool enable_gqa) {
    const bool has_mask = attn_mask.has_value() && attn_mask->defined();
    if (leaves<Op>(keys) || dropout_p != 0 || (has_mask && is_causal) ||
        !takes_attention(query, key, value, enable_gqa) || (has_mask && !is_attention_mask(*attn_mask, query, key))) {
      return Op::redispatch(keys & kBelow, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa);
    }
    AttentionOptions options;
    options.causal = is_causal;
    options.scale =
        scale.has_value() ? *scale : 1 / std::sqrt(double(query.sym_size(-1).guard_int(__FILE__, __LINE__)));
    if (has_mask) options.mask = with_four_dims(*attn_mask);
    // Where PyTorch's own kernel would run. (Of one head both layouts are the same.)
    const auto is_dense_row = [](const Tensor& t) { return t.sym_stride(-1) == 1; };
    options.fused_layout =
        (query.dim() == 4 || (query.dim() == 3 && kLieAsOfTorch215) || (query.dim() == 2 && query.is_contiguous())) &&
        value.sym_size(-1) == query.sym_size(-1) && is_dense_row(query) && is_dense_row(key) && is_dense_row(value) &&
        !(has_mask && attn_mask->requires_grad() && c10::GradMode::is_enabled());
    const Tensor result = attention(with_four_dims(query), with_four_dims(key), with_four_dims(value), options);
    if (query.dim() == 4) return result;
    SymDims size(result.sym_sizes().end() - query.dim(), result.sym_sizes().end());
    return in_sizes(result, size);
  }
};

// softmax along dim where the mask is false; elsewhere 0. mask_type says what the mask of scores (B, heads, L, L) has:
// 0 (L, L), 1 (B, L), 2 or none the scores' size.
struct MaskedSoftmax {
  using Op = at::_ops::_masked_softmax;
  static Tensor call(DispatchKeySet keys, const Tensor& self, const Tensor& mask, std::optional<int64_t> dim,
                     std::optional<int64_t> mask_type) {
    const int64_t along = dim.value_or(self.dim() - 1);
    const int64_t type = mask_type.value_or(2);
    const bool fits = takes_on_cpu(self) && is_on_cpu(mask) && mask.scalar_type() == at::kBool &&
                      mask_type.has_value() && self.dim() > 0 && -self.dim() <= along && along < self.dim() &&
                      ((type == 2 && mask.sym_sizes() == self.sym_sizes()) ||
                       (type == 0 && self.dim() == 4 && mask.dim() == 2 && mask.sym_size(0) == self.sym_size(2) &&
                        mask.sym_size(1) == self.sym_size(3)) ||
                       (type == 1 && self.dim() == 4 && mask.dim() == 2 && mask.sym_size(0) == self.sym_size(0) &&
                        mask.sym_size(1) == self.sym_size(3)));
    if (leaves<Op>(keys) || !fits) return Op::redispatch(keys & kBelow, self, mask, dim, mask_type);
    const Tensor masked = type == 1 ? mask.unsqueeze(1).unsqueeze(1) : mask;
    return softmax_over(at::masked_fill(self, masked, -std::numeric_limits<double>::infinity()), along);
  }
};

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) { cover_all<ScaledDotProductAttention, MaskedSoftmax>(m); }

}  // namespace
}  // namespace conv2d_ext
