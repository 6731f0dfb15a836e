#include "padding_products.h"

#include "conv_gemm.h"

namespace conv2d_ext::cpu {

namespace {

// Of floating-point numbers as bits.
template <class Bits>
struct PaddingProducts {
  const Conv2dProblem& p;
  const Bits exponent_bits, nan;  // those of the exponent, all of them set in Inf and NaN; a NaN
  const int64_t parts;            // 2 for complex numbers, real and imaginary side by side
  const Bits* weight = nullptr;
  Bits* output = nullptr;
  int64_t w[4] = {}, y[4] = {};  // strides, in parts

  // An item is an output channel.
  static void run(void* context, int64_t oc) { static_cast<const PaddingProducts*>(context)->multiply(oc); }

  void multiply(int64_t oc) const {
    const Bits* const first = weight + oc * w[0];
    const SharedDimension channels{p.in_channels_per_group(), w[1], w[1]};
    const SharedDimension rows{p.kernel_h, w[2], w[2]}, cols{p.kernel_w, w[3], w[3]};
    if (are_finite(first, join_dimensions(channels, rows, cols))) return;
    const SharedDimensions tap = join_dimensions(channels, {}, {});
    for (int64_t i = 0; i < p.kernel_h; ++i) {
      for (int64_t j = 0; j < p.kernel_w; ++j) {
        if (!are_finite(first + i * w[2] + j * w[3], tap)) set_nan(oc, i, j);
      }
    }
  }

  bool are_finite(const Bits* first, const SharedDimensions& numbers) const {
    const SharedDimension &inner = numbers.dimension[0], &middle = numbers.dimension[1], &outer = numbers.dimension[2];
    for (int64_t part = 0; part < parts; ++part) {
      for (int64_t x = 0; x < outer.size; ++x) {
        for (int64_t y = 0; y < middle.size; ++y) {
          if (!is_finite_run(first + part + x * outer.stride_a + y * middle.stride_a, inner)) return false;
        }
      }
    }
    return true;
  }

  bool is_finite_run(const Bits* run, const SharedDimension& dimension) const {
    // Copied: GCC 12 left the loop scalar while it read them through pointers.
    const Bits exponent = exponent_bits;
    const int64_t size = dimension.size, step = dimension.stride_a;
    Bits found = 0;
    if (step == 1) {
#pragma omp simd reduction(| : found)  // -O2 would leave it scalar
      for (int64_t i = 0; i < size; ++i) found |= Bits((run[i] & exponent) == exponent);
    } else {
      for (int64_t i = 0; i < size; ++i) found |= Bits((run[i * step] & exponent) == exponent);
    }
    return found == 0;
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
            output[n * y[0] + oc * y[1] + oh * y[2] + ow * y[3] + part] = nan;
          }
        }
      }
    }
  }
};

}  // namespace

void multiply_padding(const Call& call, const Executor& executor) {
  const auto multiply = [&](auto exponent, auto nan, int64_t parts) {
    using Bits = decltype(nan);
    PaddingProducts<Bits> products{call.problem, exponent, nan, parts};
    products.weight = static_cast<const Bits*>(call.b.data);
    products.output = static_cast<Bits*>(call.result.data);
    for (int d = 0; d < 4; ++d) {
      products.w[d] = call.b.stride[d] * parts;
      products.y[d] = call.result.stride[d] * parts;
    }
    run_items(executor, call.problem.out_channels, &products, &PaddingProducts<Bits>::run);
  };
  const int64_t parts = is_floating(call.dtype) ? 1 : 2;
  switch (call.dtype) {
    case DType::kFloat16:
      return multiply(uint16_t{0x7c00}, uint16_t{0x7e00}, parts);
    case DType::kBFloat16:
      return multiply(uint16_t{0x7f80}, uint16_t{0x7fc0}, parts);
    case DType::kFloat32:
    case DType::kComplex64:
      return multiply(uint32_t{0x7f800000}, uint32_t{0x7fc00000}, parts);
    case DType::kFloat64:
    case DType::kComplex128:
      return multiply(uint64_t{0x7ff0000000000000}, uint64_t{0x7ff8000000000000}, parts);
    default:
      return;  // integers
  }
}

}  // namespace conv2d_ext::cpu
