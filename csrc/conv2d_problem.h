// The geometry of one convolution, and the index of im2col.
//
// Torch-free, usable from host and device code. One Conv2dProblem is built by conv2d_checks.cpp, after
// everything has been validated, and passed everywhere from there on.
//
//   output[n, oc, oh, ow] = bias[oc] + sum over (ic, kh, kw) of
//       weight[oc, ic, kh, kw] * input[n, g * in_channels/groups + ic, input_h(oh, kh), input_w(ow, kw)]
//
// with g = oc / (out_channels / groups), and zero where the input coordinate lies in the padding.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define CONV2D_HOST_DEVICE __host__ __device__
#else
#define CONV2D_HOST_DEVICE
#endif

namespace conv2d_ext {

struct Conv2dProblem {
  int64_t batch, in_channels, in_h, in_w;
  int64_t out_channels, out_h, out_w;
  int64_t kernel_h, kernel_w;
  int64_t stride_h, stride_w;
  int64_t pad_top, pad_bottom, pad_left, pad_right;
  int64_t dilation_h, dilation_w;
  int64_t groups;

  CONV2D_HOST_DEVICE int64_t in_channels_per_group() const { return in_channels / groups; }
  CONV2D_HOST_DEVICE int64_t out_channels_per_group() const { return out_channels / groups; }
  CONV2D_HOST_DEVICE int64_t taps() const { return kernel_h * kernel_w; }
  CONV2D_HOST_DEVICE int64_t out_pixels() const { return out_h * out_w; }

  // The GEMM view, per group: C[M, N] = A[M, K] * B[K, N], A the weight, B the (never built) columns.
  CONV2D_HOST_DEVICE int64_t gemm_m() const { return out_channels_per_group(); }
  CONV2D_HOST_DEVICE int64_t gemm_n() const { return batch * out_h * out_w; }
  CONV2D_HOST_DEVICE int64_t gemm_k() const { return in_channels_per_group() * kernel_h * kernel_w; }

  // The index of im2col: the input coordinate that output coordinate oh (ow) meets at tap kh (kw).
  // Outside [0, in_h) ([0, in_w)) it names a padding zero.
  CONV2D_HOST_DEVICE int64_t input_h(int64_t oh, int64_t kh) const {
    return oh * stride_h - pad_top + kh * dilation_h;
  }
  CONV2D_HOST_DEVICE int64_t input_w(int64_t ow, int64_t kw) const {
    return ow * stride_w - pad_left + kw * dilation_w;
  }
};

}  // namespace conv2d_ext
