// The epilogue: a C tile in scratch -> the result tensor, with the bias added and 16-bit results rounded once.
#pragma once

#include "../isa/convert.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// ---- the sum of chunks ---------------------------------------------------------------------------------------------
//
// A long sum is cut into chunks (plan/summation_order.h), and chunk sums are added in order, with what every addition
// loses kept beside the total: Knuth's two-sum. So the error of a sum whose products have a mean doesn't grow with its
// length. It costs six additions for each 2048 or 4096 products.

template <class T>
struct RealOf {
  using type = T;
};
template <class R>
struct RealOf<Complex<R>> {
  using type = R;
};

// total[i] + lost[i] becomes the sum so far, chunk[i] included, of n elements.
template <class T>
void add_chunk(T* total, T* lost, const T* chunk, int64_t n, bool first) {
  if (first) {
    __builtin_memcpy(total, chunk, size_t(n) * sizeof(T));
    __builtin_memset(static_cast<void*>(lost), 0, size_t(n) * sizeof(T));
    return;
  }
  using R = typename RealOf<T>::type;
  R* const a = reinterpret_cast<R*>(total);
  R* const e = reinterpret_cast<R*>(lost);
  const R* const b = reinterpret_cast<const R*>(chunk);
  const int64_t count = n * int64_t(sizeof(T) / sizeof(R));
#pragma omp simd  // -O2 would leave it scalar
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (std::is_floating_point_v<R>) {
      const R sum = a[i] + b[i], taken = sum - a[i];
      e[i] += (a[i] - (sum - taken)) + (b[i] - taken);
      a[i] = sum;
    } else {
      a[i] = R(a[i] + b[i]);
    }
  }
}

// sum[i] = total[i] + lost[i]. What an infinite total lost is NaN, and is left out.
template <class T>
void finish_chunks(T* sum, const T* total, const T* lost, int64_t n) {
  using R = typename RealOf<T>::type;
  R* const s = reinterpret_cast<R*>(sum);
  const R* const a = reinterpret_cast<const R*>(total);
  const R* const e = reinterpret_cast<const R*>(lost);
  const int64_t count = n * int64_t(sizeof(T) / sizeof(R));
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) s[i] = R(a[i] + (e[i] == e[i] ? e[i] : R(0)));
}

// dst[i] = sums[i] + bias for i < n: a row of finished sums that share a bias.
template <class S, class T>
void store_row(const T* sums, typename Vec<T>::reg bias, int64_t n, S* dst) {
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  int64_t i = 0;
  for (; i + L <= n; i += L) store_as(dst + i, V::add(V::load(sums + i), bias));
  if (i < n) store_as_partial(dst + i, V::add(V::load(sums + i), bias), int(n - i));
}

// What lies between the elements that store_tile writes.
enum class Between {
  kOthers,  // elements of others, which may be written at the same time: they are not touched
  kOwned,   // elements of this call that nobody else touches meanwhile: they may be read and written back
};

// dst[x * x_step + m * m_step] = c[x * c_pitch + m] + bias[m] for x < count, m < channels.
// `bias`: whole vectors, in the panel's form; nullptr stands for zeros, which are added as well: a sum that has
// underflowed to -0 becomes +0.
template <class S, class T>
void store_tile(const T* c, int64_t c_pitch, int64_t count, int64_t channels, const T* bias, S* dst, int64_t x_step,
                int64_t m_step, [[maybe_unused]] Between between = Between::kOthers) {
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  if constexpr (kHasTranspose<T>) {
    if (m_step == 1) {
      for (int64_t m = 0; m < channels; m += L) {
        const typename V::reg b = bias ? V::load(bias + m) : V::zero();
        const T* src = c + m;
        S* d = dst + m;
        if (channels - m >= L) {
          for (int64_t x = 0; x < count; ++x, src += c_pitch, d += x_step) store_as(d, V::add(V::load(src), b));
        } else {
          const int n = int(channels - m);
          for (int64_t x = 0; x < count; ++x, src += c_pitch, d += x_step) {
            store_as_partial(d, V::add(V::load(src), b), n);
          }
        }
      }
      return;
    }
    if constexpr (sizeof(S) == sizeof(T)) {
      // A phase of grad_input with stride 2: the columns between belong to another phase, which is computed before or
      // after this one, and are stored back as they were.
      if (between == Between::kOwned && x_step == 2 && m_step >= 2 * count) {
        for (int64_t m = 0; m < channels; m += L) {
          const typename V::reg b = bias ? V::load(bias + m) : V::zero();
          const int64_t valid = min64(channels - m, L);
          for (int64_t x = 0; x < count; x += L) {
            const int64_t n = min64(count - x, L);
            // Elements of the row from the first to the last pixel, in two vectors.
            const int64_t span = 2 * n - 1, n0 = min64(span, L), n1 = span - n0;
            typename V::reg r[L];
#pragma GCC unroll 16
            for (int i = 0; i < L; ++i) r[i] = i < n ? V::add(V::load(c + (x + i) * c_pitch + m), b) : V::zero();
            V::transpose(r);
#pragma GCC unroll 16
            for (int i = 0; i < L; ++i) {
              if (i >= valid) continue;
              S* const d = dst + (m + i) * m_step + 2 * x;
              const bool within = n == L && x + L < count;
              typename V::reg low, high, even, between;
              low = within ? V::load(d) : V::load_partial(d, int(n0));
              high = within ? V::load(d + L) : V::load_partial(d + L, int(n1));
              V::unzip(low, high, even, between);
              V::zip(r[i], between, low, high);
              if (within) {
                V::store(d, low);
                V::store(d + L, high);
              } else {
                V::store_partial(d, low, int(n0));
                V::store_partial(d + L, high, int(n1));
              }
            }
          }
        }
        return;
      }
    }
    if (x_step == 1) {
      // Channel blocks outside, so that each destination plane is written as one stream.
      for (int64_t m = 0; m < channels; m += L) {
        const typename V::reg b = bias ? V::load(bias + m) : V::zero();
        const int64_t valid = min64(channels - m, L);
        for (int64_t x = 0; x < count; x += L) {
          const int64_t n = min64(count - x, L);
          typename V::reg r[L];
          const T* const src = c + x * c_pitch + m;
          if (n == L) {
#pragma GCC unroll 16
            for (int i = 0; i < L; ++i) r[i] = V::add(V::load(src + i * c_pitch), b);
          } else {
#pragma GCC unroll 16
            for (int i = 0; i < L; ++i) r[i] = i < n ? V::add(V::load(src + i * c_pitch), b) : V::zero();
          }
          V::transpose(r);
          S* const d = dst + m * m_step + x;
          if (n == L && valid == L) {
#pragma GCC unroll 16
            for (int i = 0; i < L; ++i) store_as(d + i * m_step, r[i]);
          } else {
#pragma GCC unroll 16
            for (int i = 0; i < L; ++i) {
              if (i < valid) store_as_partial(d + i * m_step, r[i], int(n));
            }
          }
        }
      }
      return;
    }
  }
  for (int64_t m = 0; m < channels; ++m) {
    const int64_t group = m / L * L;
    const T b = bias ? get_lane(bias + group, int(m % L)) : T{};
    for (int64_t x = 0; x < count; ++x) {
      const T value = get_lane(c + x * c_pitch + group, int(m % L));
      dst[x * x_step + m * m_step] = Narrow<S>::from(add_scalar(value, b));
    }
  }
}

// The piece of a GEMM's destination that a work item owns.
struct ResultPiece {
  int64_t group, groups, image0, row0, col0, images, rows, cols;
};

// `count` pixels of the piece, from `first` on; lane l of a panel is result channel `channel` + l * channel_step.
template <class S, class T>
void store_lanes(const ConvGemm& gemm, const ResultPiece& r, int64_t first, int64_t count, const T* c, int64_t width,
                 int64_t channel, int64_t channel_step, int64_t lanes, const T* bias) {
  // Rows that continue one another are stored as one run.
  const bool join_rows = r.cols == gemm.cols && gemm.destination_row == gemm.destination_col * r.cols;
  const int64_t run = join_rows ? r.rows * r.cols : r.cols, runs = join_rows ? 1 : r.rows;
  S* const destination = static_cast<S*>(gemm.destination) + channel * gemm.destination_m +
                         r.image0 * gemm.destination_n + r.row0 * gemm.destination_row + r.col0 * gemm.destination_col;
  for (int64_t x = first, end = first + count; x < end;) {
    const int64_t at = x / run, n = at / runs, y = at % runs, begin = x - at * run, now = min64(run - begin, end - x);
    store_tile<S, T>(c, width, now, lanes, bias,
                     destination + n * gemm.destination_n + y * gemm.destination_row + begin * gemm.destination_col,
                     gemm.destination_col, channel_step * gemm.destination_m,
                     gemm.owns_columns_between ? Between::kOwned : Between::kOthers);
    c += now * width;
    x += now;
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
