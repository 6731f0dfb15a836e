// A copy in a memory format, whose gradient is handed on in a format of its own: PyTorch's kernels choose their order
// of sums by the format of what they get, and a gradient can come in any.
#pragma once

#include <ATen/core/Tensor.h>

#include "find_op.h"

namespace conv2d_ext {

using CopyAsSignature = at::Tensor(const at::Tensor&, bool, bool);
namespace op_names {
inline constexpr char copy_as[] = "copy_as";
}
inline const auto& copy_as_op() { return op_named<CopyAsSignature, op_names::copy_as>(); }

// channels_last, of 4 or 5 dimensions, or contiguous.
inline at::Tensor copy_as(const at::Tensor& input, bool channels_last, bool grad_channels_last) {
  return copy_as_op().call(input, channels_last, grad_channels_last);
}

}  // namespace conv2d_ext
