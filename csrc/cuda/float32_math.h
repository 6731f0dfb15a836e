// PyTorch's settings for how convolutions and matrix products multiply float32 on CUDA.
#pragma once

#include "../export.h"
#include "conv2d_cuda.h"

namespace conv2d_ext::cuda {

// kTF32 where torch.backends.cudnn.allow_tf32 or its successors (torch.backends.cudnn.conv.fp32_precision, and where
// that says "none", torch.backends.cudnn.fp32_precision, then torch.backends.fp32_precision) allow it. As F.conv2d
// reads it: it raises only where that does.
CONV2D_EXT_EXPORT Float32Math float32_math();

// The same for matrix products: torch.backends.cuda.matmul.allow_tf32, its successor fp32_precision, or
// torch.set_float32_matmul_precision, as torch.mm reads them.
CONV2D_EXT_EXPORT Float32Math float32_matmul_math();

}  // namespace conv2d_ext::cuda
