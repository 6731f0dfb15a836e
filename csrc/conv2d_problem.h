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

#include "debug_assert.h"

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

  // The GEMM view, per group: C[M, N] = A[M, K] * B[K, N], A the weight, B the (never built) columns. M is
  // out_channels_per_group().
  CONV2D_HOST_DEVICE int64_t gemm_n() const { return batch * out_h * out_w; }
  CONV2D_HOST_DEVICE int64_t gemm_k() const { return in_channels_per_group() * kernel_h * kernel_w; }

  CONV2D_HOST_DEVICE GatherAxis rows() const { return {stride_h, -pad_top, dilation_h}; }
  CONV2D_HOST_DEVICE GatherAxis cols() const { return {stride_w, -pad_left, dilation_w}; }
};

#if defined(CONV2D_EXT_DEBUG) && !defined(__CUDA_ARCH__)
// What with_bounded_strides promises, of one axis.
inline bool is_bounded_axis(int64_t in, int64_t out, int64_t kernel, int64_t stride, int64_t before, int64_t after,
                            int64_t dilation) {
  using Wide = __int128;  // holds every product of two sizes
  const Wide padded = Wide(in) + before + after;
  return padded < Wide(1) << 63 && before >= 0 && after >= 0 && 1 <= stride && stride <= padded && 1 <= dilation &&
         Wide(out - 1) * stride + Wide(kernel - 1) * dilation < padded;
}
#endif

// The same problem, whose steps are no longer than the padded image. Along an axis with one output position any stride
// gives the same output, and with padded size P any from P on the same gradients, term for term: each tap meets the
// input once at most, as the only one of its residue. Along an axis with one tap any dilation does.
//
// The checks (conv2d_checks.cpp) have seen to it that P = in + both paddings fits 64 bits, that the dilated kernel fits
// P, and that the elements of input, weight and output, and so the product of any sizes of one of them, fit, too. Of
// what is returned this holds for each axis:
//   1 <= stride <= P and 1 <= dilation <= P,
//   (out - 1) * stride + (kernel - 1) * dilation < P.
// So rows() and cols() can be asked for the source of every position and tap, which is in [-padding before, in +
// padding after): no partial sum or product overflows. All else that a stride, a dilation or a padding (each may be
// near 2^63) is multiplied by or added to, such as strides of tensors and positions beyond the last, takes
// checked_arithmetic.h or a bound that was checked before.
CONV2D_HOST_DEVICE inline Conv2dProblem with_bounded_strides(Conv2dProblem p) {
  const int64_t rows = p.in_h + p.pad_top + p.pad_bottom;
  const int64_t cols = p.in_w + p.pad_left + p.pad_right;
  if (p.out_h == 1 && p.stride_h > rows) p.stride_h = rows;
  if (p.out_w == 1 && p.stride_w > cols) p.stride_w = cols;
  if (p.kernel_h == 1) p.dilation_h = 1;
  if (p.kernel_w == 1) p.dilation_w = 1;
  CONV2D_EXT_ASSERT(is_bounded_axis(p.in_h, p.out_h, p.kernel_h, p.stride_h, p.pad_top, p.pad_bottom, p.dilation_h) &&
                    is_bounded_axis(p.in_w, p.out_w, p.kernel_w, p.stride_w, p.pad_left, p.pad_right, p.dilation_w));
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

// The phase whose first tap is first_tap < grad_input_tap_step(stride, dilation), of strides that with_bounded_strides
// has seen. Without positions it has no axis.
CONV2D_HOST_DEVICE inline GradInputPhase grad_input_phase(int64_t first_tap, int64_t in_size, int64_t kernel,
                                                          int64_t stride, int64_t pad, int64_t dilation) {
  GradInputPhase result{};
  const int64_t remainder = (first_tap * dilation - pad) % stride;
  result.phase = remainder < 0 ? remainder + stride : remainder;
  result.positions = result.phase < in_size ? (in_size - 1 - result.phase) / stride + 1 : 0;
  result.first_tap = first_tap;
  result.tap_step = grad_input_tap_step(stride, dilation);
  result.taps = (kernel - 1 - first_tap) / result.tap_step + 1;
  if (result.positions == 0) return result;
  // Now phase + pad is a coordinate of the padded input.
  result.axis = {1, (result.phase + pad - first_tap * dilation) / stride, -(dilation / (stride / result.tap_step))};
  return result;
}

}  // namespace conv2d_ext
