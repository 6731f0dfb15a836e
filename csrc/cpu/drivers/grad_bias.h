// grad_bias[oc] = sum over (n, oh, ow) of grad_output[n, oc, oh, ow].
//
// Order of summation: the pixels p = oh * out_w + ow of an image are cut into blocks of 128; in a block, pixel p is
// added to partial sum p % 8, and the eight are added pairwise; block sums, image after image, are added pairwise as
// well, in the order of a binary counter. So the error grows with the logarithm of the number of pixels. float32 and
// 16-bit sums are kept in float64 at first (16-bit ones are then rounded to float32 and to their type).
//
// A complex channel is two real ones, of real and of imaginary parts, that lie next to one another. Channels that lie
// next to one another (channels_last) are summed together, a vector of them at a time. One by itself (NCHW) is read a
// vector of pixels at a time, whose lanes are the partial sums. Bound by memory bandwidth.
#pragma once

#include "../isa/convert.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// A vector of the numbers that sums are kept in.
template <class T>
CONV2D_INLINE typename Vec<T>::reg load_wide(const T* p) {
  return Vec<T>::load(p);
}
CONV2D_INLINE Vec<double>::reg load_wide(const float* p) { return widen(p); }

// to[i] = a[i] + to[i]
template <class W>
CONV2D_INLINE void add_to(W* to, const W* a, int64_t n) {
  int64_t i = 0;
  for (; i + Vec<W>::kLanes <= n; i += Vec<W>::kLanes) {
    Vec<W>::store(to + i, Vec<W>::add(Vec<W>::load(a + i), Vec<W>::load(to + i)));
  }
  for (; i < n; ++i) to[i] = W(a[i] + to[i]);
}

// Pairwise sums of up to kWidth series at once: level i holds the sums of 2^i blocks wherever bit i of count is set.
template <class W, int kWidth>
struct PairwiseSums {
  W level[48][kWidth];
  uint64_t count = 0;
  void add(W* block, int64_t columns) {
    int i = 0;
    for (; (count >> i) & 1u; ++i) add_to(block, level[i], columns);
    __builtin_memcpy(level[i], block, size_t(columns) * sizeof(W));
    ++count;
  }
  W total(int64_t c) const {
    W sum{};
    for (int i = 0; (count >> i) != 0; ++i) {
      if ((count >> i) & 1u) sum = W(level[i][c] + sum);
    }
    return sum;
  }
};

template <class S>
struct GradBiasCall {
  using T = typename RealOf<ComputeType<S>>::type;
  using W = std::conditional_t<std::is_same_v<T, float>, double, T>;
  // What storage is read as: the parts of complex numbers.
  using Element = std::conditional_t<kIsComplex<S>, T, S>;
  TensorSizes size;  // of grad_output
  ConstTensorView grad_output;
  S* grad_bias;
  int num_threads;

  static constexpr int kParts = kIsComplex<S> ? 2 : 1, kLanes = Vec<W>::kLanes;
  static constexpr int64_t kBlockPixels = 128;
  // Of a block. Sums of integers are the same in any order, so that vectors of 16-bit ones may have more lanes.
  static constexpr int kPartialSums = kLanes > 8 ? kLanes : 8;
  // Series that are summed together at most.
  static constexpr int kWidth = 64;

  // Channels of a work item: where they lie next to one another they are read together, in fewer columns if threads
  // would idle, but not in less than a cache line of float32.
  int64_t block() const {
    if (grad_output.stride[1] != 1) return 1;
    int64_t columns = kWidth;
    while (columns > 16 && div_up(size.channels * kParts, columns) < num_threads) columns /= 2;
    return columns / kParts;
  }
  int64_t items() const { return div_up(size.channels, block()); }

  // The pixels of an image one after the other. Rows that continue one another are read as one.
  struct Pixels {
    const S* image;
    int64_t row_step, step, width, h = 0, w = 0;

    // Goes on by n pixels: use(i, count, s) is called for pixels i to i + count of them, which start at s, `step`
    // apart. (A step from a single pixel, which may be huge, is never taken.)
    template <class Use>
    CONV2D_INLINE void next(int64_t n, Use use) {
      for (int64_t i = 0; i < n;) {
        const int64_t count = min64(n - i, width - w);
        use(i, count, image + h * row_step + w * step);
        i += count;
        w += count;
        if (w == width) {
          w = 0;
          ++h;
        }
      }
    }
  };

  Pixels pixels_of(int64_t n, int64_t c0) const {
    const int64_t* const go = grad_output.stride;
    const bool joined = go[2] == go[3] * size.width;
    return {static_cast<const S*>(grad_output.data) + n * go[0] + c0 * go[1], go[2], go[3],
            joined ? size.height * size.width : size.width};
  }

  // to[i] += from[i], widened
  static CONV2D_INLINE void add_run(W* to, const Element* from, int64_t n) {
    alignas(64) T widened[kPartialSums * kWidth];
    const T* values = widened;
    if constexpr (std::is_same_v<Element, T>) {
      values = from;
    } else {
      copy_run(from, 1, n, widened, false);
    }
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      Vec<W>::store(to + i, Vec<W>::add(Vec<W>::load(to + i), load_wide(values + i)));
    }
    for (; i < n; ++i) to[i] = W(to[i] + W(values[i]));
  }

  // The sums of n pixels, at most a block, of `columns` series that lie next to one another, in sums[0 to columns].
  static void sum_columns(Pixels& pixels, int64_t n, int64_t columns, W* sums) {
    // Partial sum i of series c is in sums[i * columns + c]: where pixels, too, lie next to one another, so many
    // elements are added at a time.
    const int64_t all = kPartialSums * columns;
    fill_zero(sums, all);
    pixels.next(n, [&](int64_t first, int64_t count, const S* s) CONV2D_INLINE_LAMBDA {
      const bool dense = pixels.step == columns / kParts;
      const int64_t run = dense ? count * columns : columns;
      int64_t at = first % kPartialSums * columns;
      for (int64_t i = 0; i < (dense ? 1 : count); ++i) {
        const Element* const from = reinterpret_cast<const Element*>(s + i * pixels.step);
        for (int64_t done = 0, length; done < run; done += length) {
          length = min64(run - done, all - at);
          add_run(sums + at, from + done, length);
          at = at + length == all ? 0 : at + length;
        }
      }
    });
    for (int64_t half = all / 2; half >= columns; half /= 2) add_to(sums, sums + half, half);
  }

  // The sum of n pixels, at most a block, of one series.
  static W sum_series(Pixels& pixels, int64_t n) {
    alignas(64) T gathered[kBlockPixels];
    const T* values = gathered;
    pixels.next(n, [&](int64_t first, int64_t count, const S* s) CONV2D_INLINE_LAMBDA {
      if constexpr (std::is_same_v<S, T>) {
        if (count == n && pixels.step == 1) {
          values = s;
          return;
        }
      }
      copy_run(s, pixels.step, count, gathered + first, false);
    });
    constexpr int kVectors = kPartialSums / kLanes;
    typename Vec<W>::reg partial[kVectors];
    for (auto& v : partial) v = Vec<W>::zero();
    int64_t i = 0;
    for (; i + kPartialSums <= n; i += kPartialSums) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) partial[v] = Vec<W>::add(partial[v], load_wide(values + i + v * kLanes));
    }
    W sums[kPartialSums];
    for (int v = 0; v < kVectors; ++v) Vec<W>::store(sums + v * kLanes, partial[v]);
    for (int lane = 0; i < n; ++i, ++lane) sums[lane] = W(sums[lane] + W(values[i]));
    for (int half = kPartialSums / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) sums[lane] = W(sums[lane] + sums[lane + half]);
    }
    return sums[0];
  }

  template <int kSeries>
  void sum_channels(int64_t c0, int64_t columns) const {
    const int64_t pixels_in_image = size.height * size.width;
    PairwiseSums<W, kSeries> total;
    for (int64_t n = 0; n < size.batch; ++n) {
      Pixels pixels = pixels_of(n, c0);
      for (int64_t start = 0; start < pixels_in_image; start += kBlockPixels) {
        const int64_t block = min64(kBlockPixels, pixels_in_image - start);
        if constexpr (kSeries == 1) {
          W sum = sum_series(pixels, block);
          total.add(&sum, 1);
        } else {
          W sums[kPartialSums * kSeries];
          sum_columns(pixels, block, columns, sums);
          total.add(sums, columns);
        }
      }
    }
    for (int64_t c = 0; c < columns; ++c) {
      // As with every other result an addition comes last: where denormal numbers are flushed, this makes -0 0.
      const T sum = T(T(total.total(c)) + T{});
      reinterpret_cast<Element*>(grad_bias)[c0 * kParts + c] = Narrow<Element>::from(sum);
    }
  }

  void work(int64_t item) const {
    const int64_t c0 = item * block(), columns = min64(block(), size.channels - c0) * kParts;
    if constexpr (kParts == 1) {
      if (columns == 1) return sum_channels<1>(c0, 1);
    }
    sum_channels<kWidth>(c0, columns);
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
