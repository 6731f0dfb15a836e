// The geometry of one convolution, and the index of im2col.
//
// Torch-free, usable from host and device code. One Conv2dProblem is built by conv2d_checks.cpp, after
// everything has been validated, and passed everywhere from there on.
//
//   output[n, oc, oh, ow] = bias[oc] + sum over (ic, kh, kw) of
//       weight[oc, ic, kh, kw] * input[n, g * in_channels/groups + ic, rows().source(oh, kh), cols().source(ow, kw)]
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

// One axis of im2col, the only place where its index is written: the source coordinate that result position `position`
// meets at tap number `tap_index`. Outside the source it names a padding zero.
struct GatherAxis {
  int64_t step, origin, tap;
  CONV2D_HOST_DEVICE int64_t source(int64_t position, int64_t tap_index) const {
    return position * step + origin + tap_index * tap;
  }
};

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

  CONV2D_HOST_DEVICE GatherAxis rows() const { return {stride_h, -pad_top, dilation_h}; }
  CONV2D_HOST_DEVICE GatherAxis cols() const { return {stride_w, -pad_left, dilation_w}; }
};

// The same problem with strides no longer than the padded image, so that multiples of them don't overflow: along an
// axis with one output position any stride gives the same output. So does, along one with a single tap, any dilation.
CONV2D_HOST_DEVICE inline Conv2dProblem with_bounded_strides(Conv2dProblem p) {
  const int64_t rows = p.in_h + p.pad_top + p.pad_bottom + 1;
  const int64_t cols = p.in_w + p.pad_left + p.pad_right + 1;
  if (p.out_h == 1 && p.stride_h > rows) p.stride_h = rows;
  if (p.out_w == 1 && p.stride_w > cols) p.stride_w = cols;
  if (p.kernel_h == 1) p.dilation_h = 1;
  if (p.kernel_w == 1) p.dilation_w = 1;
  return p;
}

// One axis of grad_input. Input coordinate i = phase + stride * q meets tap k where some output coordinate o has
//   stride * o - pad + k * dilation = i,
// and all coordinates of one phase meet the same taps: first_tap, first_tap + tap_step, ... (`taps` of them). So a
// phase is itself a gather, with position q, tap index m = (k - first_tap) / tap_step and o = axis.source(q, m). Every
// tap below tap_step is the first of a phase of its own; phases that none belongs to get no contribution at all.
struct GradInputPhase {
  int64_t phase, positions, first_tap, tap_step, taps;
  GatherAxis axis;
};

// How far apart the taps of a phase are: stride / gcd(stride, dilation).
CONV2D_HOST_DEVICE inline int64_t grad_input_tap_step(int64_t stride, int64_t dilation) {
  int64_t divisor = stride;  // Euclid
  for (int64_t rest = dilation; rest != 0;) {
    const int64_t next = divisor % rest;
    divisor = rest;
    rest = next;
  }
  return stride / divisor;
}

// The phase whose first tap is first_tap < grad_input_tap_step(stride, dilation).
CONV2D_HOST_DEVICE inline GradInputPhase grad_input_phase(int64_t first_tap, int64_t in_size, int64_t kernel,
                                                          int64_t stride, int64_t pad, int64_t dilation) {
  GradInputPhase result{};
  const int64_t remainder = (first_tap * dilation - pad) % stride;
  result.phase = remainder < 0 ? remainder + stride : remainder;
  result.positions = result.phase < in_size ? (in_size - 1 - result.phase) / stride + 1 : 0;
  result.first_tap = first_tap;
  result.tap_step = grad_input_tap_step(stride, dilation);
  result.taps = (kernel - 1 - first_tap) / result.tap_step + 1;
  result.axis = {1, (result.phase + pad - first_tap * dilation) / stride, -(dilation / (stride / result.tap_step))};
  return result;
}

}  // namespace conv2d_ext
