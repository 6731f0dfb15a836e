// grad_bias[oc] = sum over (n, oh, ow) of grad_output[n, oc, oh, ow].
//
// Order of summation: the pixels p = oh * out_w + ow of an image are cut into blocks of 128; in a block, pixel p is
// added to partial sum p % 8, and the eight are added pairwise; block sums, image after image, are added pairwise as
// well, in the order of a binary counter. So the error grows with the logarithm of the number of pixels. float32 and
// 16-bit sums are kept in float64 at first (16-bit ones are then rounded to float32 and to their type). Bound by memory
// bandwidth.
#pragma once

#include "../isa/convert.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class T>
struct WideSum {
  using type = T;
};
template <>
struct WideSum<float> {
  using type = double;
};
template <>
struct WideSum<Complex<float>> {
  using type = Complex<double>;
};
template <class W, class T>
CONV2D_INLINE W to_wide(T value) {
  return W(value);
}
template <>
CONV2D_INLINE Complex<double> to_wide<Complex<double>, Complex<float>>(Complex<float> value) {
  return {value.re, value.im};
}
template <class T, class W>
CONV2D_INLINE T from_wide(W value) {
  return T(value);
}
template <>
CONV2D_INLINE Complex<float> from_wide<Complex<float>, Complex<double>>(Complex<double> value) {
  return {float(value.re), float(value.im)};
}

template <class S>
struct GradBiasCall {
  using T = ComputeType<S>;
  using W = typename WideSum<T>::type;
  int64_t batch, out_channels, out_h, out_w;
  ConstTensorView grad_output;
  S* grad_bias;
  int num_threads;

  // Channels of a work item: where they lie next to one another they are read together, unless threads would idle.
  static constexpr int kBlock = 16;
  int64_t block() const {
    int64_t channels = grad_output.stride[1] == 1 ? kBlock : 1;
    while (channels > 1 && div_up(out_channels, channels) < num_threads) channels /= 2;
    return channels;
  }
  int64_t items() const { return div_up(out_channels, block()); }

  static W wide(S value) { return to_wide<W>(widen_scalar(value)); }

  // Pairwise sums of `channels` series at once: level i holds the sum of 2^i blocks wherever bit i of count is set.
  struct PairwiseSum {
    W level[48][kBlock];
    uint64_t count = 0;
    void add(W (&block)[kBlock], int64_t channels) {
      int i = 0;
      for (; (count >> i) & 1u; ++i) {
        for (int64_t c = 0; c < channels; ++c) block[c] = add_scalar(level[i][c], block[c]);
      }
      for (int64_t c = 0; c < channels; ++c) level[i][c] = block[c];
      ++count;
    }
    W total(int64_t c) const {
      W sum{};
      for (int i = 0; (count >> i) != 0; ++i) {
        if ((count >> i) & 1u) sum = add_scalar(level[i][c], sum);
      }
      return sum;
    }
  };

  static constexpr int64_t kBlockPixels = 128;

  static void run(void* context, int64_t item) {
    const GradBiasCall& call = *static_cast<const GradBiasCall*>(context);
    const int64_t c0 = item * call.block(), channels = min64(call.block(), call.out_channels - c0);
    const int64_t* const go = call.grad_output.stride;
    // Rows that continue one another are read as one.
    const bool joined = go[2] == go[3] * call.out_w;
    const int64_t pixels = call.out_h * call.out_w, width = joined ? pixels : call.out_w;
    PairwiseSum sum;
    for (int64_t n = 0; n < call.batch; ++n) {
      const S* const image = static_cast<const S*>(call.grad_output.data) + n * go[0] + c0 * go[1];
      int64_t h = 0, w = 0;
      for (int64_t start = 0; start < pixels; start += kBlockPixels) {
        const int64_t block = min64(kBlockPixels, pixels - start);
        W partial[8][kBlock] = {};
        for (int64_t p = 0; p < block;) {
          const int64_t run = min64(block - p, width - w);
          const S* const s = image + h * go[2] + w * go[3];
          if (channels == 1) {
            add_run(s, go[3], p, run, partial);
          } else {
            for (int64_t x = 0; x < run; ++x) {
              W* const lane = partial[(p + x) % 8];
              for (int64_t c = 0; c < channels; ++c) lane[c] = add_scalar(lane[c], wide(s[x * go[3] + c]));
            }
          }
          p += run;
          w += run;
          if (w == width) {
            w = 0;
            ++h;
          }
        }
        for (int half = 4; half > 0; half /= 2) {
          for (int i = 0; i < half; ++i) {
            for (int64_t c = 0; c < channels; ++c) partial[i][c] = add_scalar(partial[i][c], partial[i + half][c]);
          }
        }
        sum.add(partial[0], channels);
      }
    }
    for (int64_t c = 0; c < channels; ++c) {
      // As with every other result an addition comes last: where denormal numbers are flushed, from_wide makes -0.
      call.grad_bias[c0 + c] = Narrow<S>::from(add_scalar(from_wide<T>(sum.total(c)), T{}));
    }
  }

  // Pixels p, p + 1, ... of a block, of one channel, eight partial sums at a time.
  static void add_run(const S* s, int64_t step, int64_t p, int64_t run, W (&partial)[8][kBlock]) {
    W sums[8];
    for (int i = 0; i < 8; ++i) sums[i] = partial[i][0];
    int64_t x = 0;
    for (; x < run && (p + x) % 8 != 0; ++x) sums[(p + x) % 8] = add_scalar(sums[(p + x) % 8], wide(s[x * step]));
    for (; x + 8 <= run; x += 8) {
      for (int i = 0; i < 8; ++i) sums[i] = add_scalar(sums[i], wide(s[(x + i) * step]));
    }
    for (; x < run; ++x) sums[(p + x) % 8] = add_scalar(sums[(p + x) % 8], wide(s[x * step]));
    for (int i = 0; i < 8; ++i) partial[i][0] = sums[i];
  }
};

template <class S>
void run_grad_bias(int64_t batch, int64_t out_channels, int64_t out_h, int64_t out_w, ConstTensorView grad_output,
                   void* grad_bias, const Executor& executor) {
  GradBiasCall<S> call{
      batch, out_channels, out_h, out_w, grad_output, static_cast<S*>(grad_bias), executor.num_threads};
  run_items(executor, call.items(), &call, &GradBiasCall<S>::run);
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
