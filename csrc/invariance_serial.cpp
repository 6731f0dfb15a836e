// The mode's kernels of what PyTorch's threads add in whatever order they come to it: index_put and put that
// accumulate, which are the gradients of indexing and take. One thread takes the elements one after the other.
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

struct Put {
  using Op = at::_ops::put_;
  static Tensor& call(DispatchKeySet keys, Tensor& self, const Tensor& index, const Tensor& source, bool accumulate) {
    const OneThread alone(accumulate && !leaves<Op>(keys) && self.device().is_cpu());
    return Op::redispatch(keys & kBelow, self, index, source, accumulate);
  }
};

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) { cover_all<IndexPut, Put>(m); }

}  // namespace
}  // namespace conv2d_ext
