// PyTorch's setting for how convolutions multiply float32 on CUDA.
#pragma once

#include "conv2d_cuda.h"

namespace conv2d_ext::cuda {

// kTF32 where torch.backends.cudnn.allow_tf32 or its successors (torch.backends.cudnn.conv.fp32_precision, and where
// that says "none", torch.backends.cudnn.fp32_precision, then torch.backends.fp32_precision) allow it. As F.conv2d
// reads it: it raises only where that does.
Float32Math float32_math();

}  // namespace conv2d_ext::cuda
