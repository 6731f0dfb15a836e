#include "padding_products.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>

#include "../base/integers.h"

namespace conv2d_ext::cpu {

namespace {

struct Dimension {
  int64_t size, stride;
};

// A look at every number of a tensor.
template <class Bits>
struct FiniteScan {
  const Bits* data;
  Dimension dimension[4];  // outermost first
  Bits exponent;
  int64_t pieces;  // of a row of the innermost dimension
  std::atomic<bool> finite{true};

  // Numbers that an item looks at.
  static constexpr int64_t kPiece = int64_t{1} << 16;

  static void run(void* context, int64_t item) { static_cast<FiniteScan*>(context)->scan(item); }

  void scan(int64_t item) {
    if (!finite.load(std::memory_order_relaxed)) return;
    const Dimension& inner = dimension[3];
    const int64_t begin = item % pieces * kPiece, count = min64(kPiece, inner.size - begin);
    const Bits* row = data + begin * inner.stride;
    int64_t at = item / pieces;
    for (int d = 2; d >= 0; at /= dimension[d].size, --d) row += at % dimension[d].size * dimension[d].stride;
    Bits found = 0;
    if (inner.stride == 1) {
      for (int64_t i = 0; i < count; ++i) found |= Bits((row[i] & exponent) == exponent);
    } else {
      for (int64_t i = 0; i < count; ++i) found |= Bits((row[i * inner.stride] & exponent) == exponent);
    }
    if (found != 0) finite.store(false, std::memory_order_relaxed);
  }
};

template <class Bits>
bool scan(Bits exponent, const void* data, const Dimension (&dimensions)[4], const Executor& executor) {
  FiniteScan<Bits> scan{static_cast<const Bits*>(data), {}, exponent, 0};
  std::copy(std::begin(dimensions), std::end(dimensions), scan.dimension);
  Dimension* const d = scan.dimension;
  // Repetitions need one look; the smallest step belongs inside, and dimensions that continue one another are one.
  for (Dimension& dimension : scan.dimension) {
    if (dimension.stride == 0) dimension.size = min64(dimension.size, 1);
  }
  std::sort(d, d + 4, [](const Dimension& a, const Dimension& b) {
    if ((a.size <= 1) != (b.size <= 1)) return a.size <= 1;
    return std::abs(a.stride) > std::abs(b.stride);
  });
  for (int outer = 2; outer >= 0 && d[outer].size > 1 && d[outer].stride == d[3].stride * d[3].size; --outer) {
    d[3].size *= d[outer].size;
    d[outer] = {1, 0};
  }
  scan.pieces = div_up(d[3].size, FiniteScan<Bits>::kPiece);
  run_items(executor, d[0].size * d[1].size * d[2].size * scan.pieces, &scan, &FiniteScan<Bits>::run);
  return scan.finite;
}

// Floating-point numbers as bits: those of the exponent, all of them set in Inf and NaN, and a NaN.
template <class B>
struct Format {
  using Bits = B;
  Bits exponent, nan;
  bool is_finite(Bits number) const { return (number & exponent) != exponent; }
};
constexpr Format<uint16_t> kFloat16{0x7c00, 0x7e00}, kBFloat16{0x7f80, 0x7fc0};
constexpr Format<uint32_t> kFloat32{0x7f800000, 0x7fc00000};
constexpr Format<uint64_t> kFloat64{0x7ff0000000000000, 0x7ff8000000000000};

// parts: 2 for complex numbers, real and imaginary side by side.
template <class F>
struct PaddingProducts {
  const Conv2dProblem& p;
  const F& format;
  int64_t parts;
  const typename F::Bits* weight;
  typename F::Bits* output;
  int64_t w[4], y[4];  // strides, in parts

  bool all_finite(const Executor& executor) const {
    const Dimension d[] = {
        {p.out_channels, w[0]}, {p.in_channels_per_group(), w[1]}, {p.kernel_h, w[2]}, {p.kernel_w, w[3]}};
    for (int64_t part = 0; part < parts; ++part) {
      if (!scan(format.exponent, weight + part, d, executor)) return false;
    }
    return true;
  }

  bool tap_is_finite(int64_t oc, int64_t i, int64_t j) const {
    for (int64_t c = 0; c < p.in_channels_per_group(); ++c) {
      for (int64_t part = 0; part < parts; ++part) {
        if (!format.is_finite(weight[oc * w[0] + c * w[1] + i * w[2] + j * w[3] + part])) return false;
      }
    }
    return true;
  }

  // Outputs of channel oc whose tap (i, j) lies in the padding.
  void set_nan(int64_t oc, int64_t i, int64_t j) const {
    for (int64_t oh = 0; oh < p.out_h; ++oh) {
      const int64_t row = p.rows().source(oh, i);
      for (int64_t ow = 0; ow < p.out_w; ++ow) {
        const int64_t col = p.cols().source(ow, j);
        if (row >= 0 && row < p.in_h && col >= 0 && col < p.in_w) continue;
        for (int64_t n = 0; n < p.batch; ++n) {
          for (int64_t part = 0; part < parts; ++part) {
            output[n * y[0] + oc * y[1] + oh * y[2] + ow * y[3] + part] = format.nan;
          }
        }
      }
    }
  }
};

template <class F>
void multiply_padding_of(const Conv2dProblem& p, const F& format, int64_t parts, const ConstTensorView& weight,
                         const TensorView& output, const Executor& executor) {
  using Bits = typename F::Bits;
  PaddingProducts<F> products{p,  format, parts, static_cast<const Bits*>(weight.data), static_cast<Bits*>(output.data),
                              {}, {}};
  for (int d = 0; d < 4; ++d) {
    products.w[d] = weight.stride[d] * parts;
    products.y[d] = output.stride[d] * parts;
  }
  if (products.all_finite(executor)) return;
  for (int64_t oc = 0; oc < p.out_channels; ++oc) {
    for (int64_t i = 0; i < p.kernel_h; ++i) {
      for (int64_t j = 0; j < p.kernel_w; ++j) {
        if (!products.tap_is_finite(oc, i, j)) products.set_nan(oc, i, j);
      }
    }
  }
}

}  // namespace

void multiply_padding(const Conv2dProblem& problem, DType dtype, ConstTensorView weight, TensorView output,
                      const Executor& executor) {
  const auto multiply = [&](const auto& format, int64_t parts) {
    multiply_padding_of(problem, format, parts, weight, output, executor);
  };
  switch (dtype) {
    case DType::kFloat16:
      return multiply(kFloat16, 1);
    case DType::kBFloat16:
      return multiply(kBFloat16, 1);
    case DType::kFloat32:
      return multiply(kFloat32, 1);
    case DType::kFloat64:
      return multiply(kFloat64, 1);
    case DType::kComplex64:
      return multiply(kFloat32, 2);
    case DType::kComplex128:
      return multiply(kFloat64, 2);
    default:
      return;  // integers
  }
}

}  // namespace conv2d_ext::cpu
