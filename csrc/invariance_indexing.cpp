// The mode's kernels of additions at indices. PyTorch's threads add in whatever order they come to it; here one thread
// takes the elements one after the other. (put, the gradient of take, is in invariance_eager.cpp.)
#include "invariance_kernels.h"

namespace conv2d_ext {
namespace {

using namespace invariance;

struct IndexPut {  // index_put, index_put_, and the backward of indexing
  using Op = at::_ops::_index_put_impl_;
  static Tensor& call(DispatchKeySet keys, Tensor& self, const c10::List<std::optional<Tensor>>& indices,
                      const Tensor& values, bool accumulate, bool unsafe) {
    const OneThread alone(accumulate && !leaves<Op>(keys) && self.device().is_cpu());
    return Op::redispatch(keys & kBelow, self, indices, values, accumulate, unsafe);
  }
};

// The gradient of embedding_bag's weights of samples: dot products of rows, which PyTorch's library sums by where a row
// begins in memory.
struct SampleWeights {
  using Op = at::_ops::_embedding_bag_per_sample_weights_backward;
  static Tensor call(DispatchKeySet keys, const Tensor& grad, const Tensor& weight, const Tensor& indices,
                     const Tensor& offsets, const Tensor& offset2bag, int64_t mode, int64_t padding_idx) {
    constexpr int64_t kSum = 0;
    if (leaves<Op>(keys) || mode != kSum || !takes_on_cpu(grad, weight) || grad.dim() != 2 || weight.dim() != 2 ||
        indices.dim() != 1 || offsets.dim() != 1 || indices.sym_numel() == 0) {
      return Op::redispatch(keys & kBelow, grad, weight, indices, offsets, offset2bag, mode, padding_idx);
    }
    const Tensor bags =
        offset2bag.sym_numel() != 0
            ? offset2bag
            : at::searchsorted(offsets, at::arange(indices.size(0), offsets.options()), /*out_int32=*/false,
                               /*right=*/true)
                  .sub(1);
    const auto dtype = compute_type(grad.scalar_type());
    const Tensor products = grad.index_select(0, bags).to(dtype).mul(weight.index_select(0, indices).to(dtype));
    return products.sum(1).masked_fill(indices.eq(padding_idx), 0).to(grad.scalar_type());
  }
};

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) { cover_all<IndexPut, SampleWeights>(m); }

}  // namespace
}  // namespace conv2d_ext
