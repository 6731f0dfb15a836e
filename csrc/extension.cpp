// All that includes torch's headers, but the bindings, as one translation unit: parsing them is most of what these
// files take to compile. The bindings are another library, conv2d_ext._C.
#include "attention.cpp"
#include "conv2d_autograd.cpp"
#include "conv2d_checks.cpp"
#include "conv_transpose_checks.cpp"
#include "convolution_family.cpp"
#include "copy_as.cpp"
#include "cpu/conv2d_cpu_ops.cpp"
#include "cpu/reduce_ops.cpp"
#if defined(CONV2D_EXT_WITH_CUDA)
#include "cuda/conv2d_cuda_ops.cpp"
#endif
#include "invariance.cpp"
#include "invariance_attention.cpp"
#include "invariance_compiled.cpp"
#include "invariance_exported.cpp"
#include "invariance_norms.cpp"
#include "invariance_pointwise.cpp"
#include "invariance_products.cpp"
#include "invariance_recurrent.cpp"
#include "invariance_reductions.cpp"
#include "library.cpp"
#include "matmul.cpp"
#include "pointwise_autograd.cpp"
#include "pointwise_ops.cpp"
#include "softmax.cpp"
#include "sum.cpp"
#include "api.cpp"  // last, since its functions have the names of functions above
