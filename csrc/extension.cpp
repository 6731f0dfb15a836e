// All that includes torch's headers as one translation unit: parsing them is most of what these files take to compile.
#include "bindings.cpp"  // first, since it configures headers of torch
#include "attention.cpp"
#include "conv2d_autograd.cpp"
#include "conv2d_checks.cpp"
#include "copy_as.cpp"
#include "cpu/conv2d_cpu_ops.cpp"
#include "cpu/reduce_ops.cpp"
#if defined(CONV2D_EXT_WITH_CUDA)
#include "cuda/conv2d_cuda_ops.cpp"
#endif
#include "invariance.cpp"
#include "invariance_attention.cpp"
#include "invariance_norms.cpp"
#include "invariance_products.cpp"
#include "invariance_recurrent.cpp"
#include "invariance_reductions.cpp"
#include "library.cpp"
#include "matmul.cpp"
#include "softmax.cpp"
#include "sum.cpp"
