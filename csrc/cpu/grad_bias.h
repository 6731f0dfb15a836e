// grad_bias[oc] = sum over (n, oh, ow) of grad_output[n, oc, oh, ow].
//
// Order of summation: within an image, pixel p = oh * out_w + ow is added to partial sum p % 8; the eight partial sums
// are added pairwise; image sums are added in order. Floating-point sums are kept in float64, rounded once at the end.
// Bound by memory bandwidth.
#pragma once

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

  // Channels of a work item: where they lie next to one another they are read together.
  static constexpr int kBlock = 16;
  int64_t block() const { return grad_output.stride[1] == 1 ? kBlock : 1; }
  int64_t items() const { return div_up(out_channels, block()); }

  static W wide(S value) { return to_wide<W>(widen_scalar(value)); }

  static void run(void* context, int64_t item) {
    const GradBiasCall& call = *static_cast<const GradBiasCall*>(context);
    const int64_t c0 = item * call.block(), channels = min64(call.block(), call.out_channels - c0);
    const int64_t* const go = call.grad_output.stride;
    W total[kBlock] = {};
    for (int64_t n = 0; n < call.batch; ++n) {
      const S* const image = static_cast<const S*>(call.grad_output.data) + n * go[0] + c0 * go[1];
      W partial[8][kBlock] = {};
      if (channels > 1) {
        for (int64_t h = 0, p = 0; h < call.out_h; ++h) {
          for (int64_t w = 0; w < call.out_w; ++w, ++p) {
            const S* const s = image + h * go[2] + w * go[3];
            for (int64_t c = 0; c < channels; ++c) partial[p % 8][c] = add_scalar(partial[p % 8][c], wide(s[c]));
          }
        }
      } else {
        W sums[8] = {};
        const bool joined = go[2] == go[3] * call.out_w;
        const int64_t rows = joined ? 1 : call.out_h, cols = joined ? call.out_h * call.out_w : call.out_w;
        for (int64_t h = 0, p = 0; h < rows; ++h) {
          const S* s = image + h * go[2];
          int64_t w = 0;
          for (; w < cols && p % 8 != 0; ++w, ++p) sums[p % 8] = add_scalar(sums[p % 8], wide(s[w * go[3]]));
          for (; w + 8 <= cols; w += 8, p += 8) {
            for (int i = 0; i < 8; ++i) sums[i] = add_scalar(sums[i], wide(s[(w + i) * go[3]]));
          }
          for (; w < cols; ++w, ++p) sums[p % 8] = add_scalar(sums[p % 8], wide(s[w * go[3]]));
        }
        for (int i = 0; i < 8; ++i) partial[i][0] = sums[i];
      }
      for (int64_t c = 0; c < channels; ++c) {
        for (int stride = 4; stride > 0; stride /= 2) {
          for (int i = 0; i < stride; ++i) partial[i][c] = add_scalar(partial[i][c], partial[i + stride][c]);
        }
        total[c] = add_scalar(total[c], partial[0][c]);
      }
    }
    for (int64_t c = 0; c < channels; ++c) call.grad_bias[c0 + c] = Narrow<S>::from(from_wide<T>(total[c]));
  }
};

template <class S>
void run_grad_bias(int64_t batch, int64_t out_channels, int64_t out_h, int64_t out_w, ConstTensorView grad_output,
                   void* grad_bias, const Executor& executor) {
  GradBiasCall<S> call{batch, out_channels, out_h, out_w, grad_output, static_cast<S*>(grad_bias)};
  run_items(executor, call.items(), &call, &GradBiasCall<S>::run);
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
