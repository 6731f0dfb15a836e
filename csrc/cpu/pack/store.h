// The epilogue: a C tile in scratch -> the result tensor, with the bias added and 16-bit results rounded once.
#pragma once

#include "../isa/convert.h"
#include "interleave.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// ---- the sum of chunks ---------------------------------------------------------------------------------------------
//
// A long sum is cut into chunks (plan/summation_order.h), and chunk sums are added in order, with what every addition
// loses kept beside the total: Knuth's two-sum. So the error of a sum whose products have a mean doesn't grow with its
// length. It costs six additions for each 2048 or 4096 products.

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
  const int64_t count = kIsComplex<T> ? 2 * n : n;
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
  const int64_t count = kIsComplex<T> ? 2 * n : n;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) s[i] = R(a[i] + (e[i] == e[i] ? e[i] : R(0)));
}

// The sums of a tile, of segment after segment: beside them the total of the chunks before, and what it lost.
template <class T>
struct ChunkSums {
  T *sums, *total, *lost;
  bool several;  // the sum has more than one chunk

  ChunkSums from(int64_t first) const { return {sums + first, total + first, lost + first, several}; }
  // Call before segment `number` is added to n sums. Where that begins a chunk, the chunk before goes into the total,
  // and the result is true: the sums start from zero. (Chunks of forward and grad_input.)
  bool begin(int64_t number, int64_t n) const {
    if (number % kSegmentsPerChunk != 0) return false;
    if (number > 0) add_chunk(total, lost, sums, n, number == kSegmentsPerChunk);
    return true;
  }
  // After the last segment.
  void finish(int64_t n) const {
    if (!several) return;
    add_chunk(total, lost, sums, n, false);
    finish_chunks(sums, total, lost, n);
  }
};

// dst[i] = sums[i] + bias for i < n: a row of finished sums that share a bias.
template <class S, class T>
void store_row(const T* sums, typename Vec<T>::reg bias, int64_t n, S* dst) {
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  int64_t i = 0;
  for (; i + L <= n; i += L) store_as(dst + i, V::add(V::load(sums + i), bias));
  if (i < n) store_as_partial(dst + i, V::add(V::load(sums + i), bias), int(n - i));
}

// Finished sums of a tile: those of a pixel side by side, pixels `pitch` apart.
template <class T>
struct TileSums {
  using Element = T;
  const T* data;
  int64_t pitch, pixels, channels;
  // Whole vectors, in the panel's form. nullptr stands for zeros, which are added as well: a sum that has underflowed
  // to -0 becomes +0.
  const T* bias;

  CONV2D_INLINE typename Vec<T>::reg bias_from(int64_t m) const {
    return bias ? Vec<T>::load(bias + m) : Vec<T>::zero();
  }
  CONV2D_INLINE const T* pixel(int64_t x) const { return data + x * pitch; }
};

// The same of pixels in any order: the sums of pixel x are number places[x].
template <class T>
struct PlacedSums : TileSums<T> {
  const int64_t* places;
  CONV2D_INLINE const T* pixel(int64_t x) const { return this->data + places[x] * this->pitch; }
};

// L pixels' sums of L channels, with the bias, as L vectors of pixels. Of the pixels n exist.
template <class Sums, class T = typename Sums::Element>
CONV2D_INLINE void load_planes(const Sums& sums, int64_t x, int64_t n, int64_t m,
                               typename Vec<T>::reg (&r)[Vec<T>::kLanes]) {
  constexpr int L = Vec<T>::kLanes;
  const typename Vec<T>::reg b = sums.bias_from(m);
  if (n == L) {
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) r[i] = Vec<T>::add(Vec<T>::load(sums.pixel(x + i) + m), b);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) {
      r[i] = i < n ? Vec<T>::add(Vec<T>::load(sums.pixel(x + i) + m), b) : Vec<T>::zero();
    }
  }
  Vec<T>::transpose(r);
}

// Where they go: channel m of pixel x to data[x * x_step + m * m_step].
template <class S>
struct TileTarget {
  S* data;
  int64_t x_step, m_step;
};

#if defined(CONV2D_NARROWS_BFLOAT16)

// (No lambda: its result would be a vector of an instruction set that GCC 12 does not take it to be compiled for.)
template <bool kAdds>
CONV2D_INLINE __m512 sum_with(const float* sums, [[maybe_unused]] __m512 bias) {
  const __m512 sum = Vec<float>::load(sums);
  return kAdds ? Vec<float>::add(sum, bias) : sum;
}

// `count` pixels of up to two vectors, which may be a line: vector after vector, each line would be asked for twice.
// Whether all results differ from zero.
template <bool kAdds>
CONV2D_INLINE bool narrow_line(const float* src, int64_t pitch, __m512 low, __m512 high, int64_t count, int64_t lanes,
                               const TileTarget<BFloat16>& to) {
  using V = Vec<float>;
  constexpr int L = V::kLanes;
  BFloat16* d = to.data;
  if (lanes > L) {
    const __mmask32 stored = mask_of_first(lanes);
    __mmask32 nonzero = stored;
    for (int64_t x = 0; x < count; ++x, src += pitch, d += to.x_step) {
      nonzero = narrow_flushed(d, sum_with<kAdds>(src, low), sum_with<kAdds>(src + L, high), stored, nonzero);
    }
    return nonzero == stored;
  }
  const __mmask16 stored = V::mask(int(lanes));
  __mmask16 nonzero = stored;
  for (int64_t x = 0; x < count; ++x, src += pitch, d += to.x_step) {
    nonzero = narrow_flushed(d, sum_with<kAdds>(src, low), stored, nonzero);
  }
  return nonzero == stored;
}

// Channels side by side, narrowed by an instruction that flushes denormal numbers. Whether all results differ from
// zero: then none was flushed, and zeros for a bias need not be added, which would only change the sign of a zero.
template <bool kAdds>
CONV2D_INLINE bool narrow_lines(const TileSums<float>& sums, const TileTarget<BFloat16>& to) {
  using V = Vec<float>;
  constexpr int L = V::kLanes;
  if (sums.channels == L && sums.pitch == L && to.x_step == L) {
    // Two pixels are a line.
    const V::reg b = sums.bias_from(0);
    const int64_t pairs = sums.pixels / 2, last = 2 * pairs;
    const bool nonzero = narrow_line<kAdds>(sums.data, 2 * L, b, b, pairs, 2 * L, {to.data, 2 * L, 1});
    return narrow_line<kAdds>(sums.data + last * L, L, b, b, sums.pixels - last, L, {to.data + last * L, L, 1}) &&
           nonzero;
  }
  bool nonzero = true;
  for (int64_t m = 0; m < sums.channels; m += 2 * L) {
    const int64_t lanes = min64(sums.channels - m, 2 * L);
    const V::reg low = sums.bias_from(m), high = lanes > L ? sums.bias_from(m + L) : V::zero();
    nonzero &=
        narrow_line<kAdds>(sums.data + m, sums.pitch, low, high, sums.pixels, lanes, {to.data + m, to.x_step, 1});
  }
  return nonzero;
}

inline bool has_denormal(const TileSums<float>& sums) {
  using V = Vec<float>;
  for (int64_t m = 0; m < sums.channels; m += V::kLanes) {
    const V::reg b = sums.bias_from(m);
    const int lanes = int(min64(sums.channels - m, V::kLanes));
    for (int64_t x = 0; x < sums.pixels; ++x) {
      if (has_denormal(V::add(V::load_partial(sums.data + x * sums.pitch + m, lanes), b))) return true;
    }
  }
  return false;
}

// The same where some result is zero: stores them again, unless there are denormal numbers.
inline bool narrow_with_zeros(const TileSums<float>& sums, const TileTarget<BFloat16>& to) {
  if (has_denormal(sums)) return false;
  narrow_lines<true>(sums, to);
  return true;
}

#endif

// Channels side by side (m_step 1).
template <class S, class T>
CONV2D_INLINE void store_pixels(const TileSums<T>& sums, const TileTarget<S>& to) {
  using V = Vec<T>;
  constexpr int L = V::kLanes;
#if defined(CONV2D_NARROWS_BFLOAT16)
  if constexpr (std::is_same_v<S, BFloat16>) {
    const bool nonzero = sums.bias != nullptr ? narrow_lines<true>(sums, to) : narrow_lines<false>(sums, to);
    if (nonzero || narrow_with_zeros(sums, to)) return;
  }
#endif
  // Two vectors at a time, which may share a line: that is asked for once.
  for (int64_t m = 0; m < sums.channels; m += 2 * L) {
    const int64_t n_low = min64(sums.channels - m, L), n_high = min64(sums.channels - m - L, L);
    const T* src = sums.data + m;
    S* d = to.data + m;
    const typename V::reg low = sums.bias_from(m);
    if (n_high <= 0) {
      for (int64_t x = 0; x < sums.pixels; ++x, src += sums.pitch, d += to.x_step) {
        store_first(d, V::add(V::load(src), low), n_low);
      }
      return;
    }
    const typename V::reg high = sums.bias_from(m + L);
    for (int64_t x = 0; x < sums.pixels; ++x, src += sums.pitch, d += to.x_step) {
      store_as(d, V::add(V::load(src), low));
      store_first(d + L, V::add(V::load(src + L), high), n_high);
    }
  }
}

// Pixels side by side (kStep 1), of 16-bit types also every other pixel (2). Blocks of channels are the outer loop, so
// that each destination plane is written as one stream.
template <int kStep, class S, class Sums>
CONV2D_INLINE void store_planes(const Sums& sums, const TileTarget<S>& to) {
  using T = typename Sums::Element;
  constexpr int L = Vec<T>::kLanes;
  for (int64_t m = 0; m < sums.channels; m += L) {
    const int64_t valid = min64(sums.channels - m, L);
    for (int64_t x = 0; x < sums.pixels; x += L) {
      const int64_t n = min64(sums.pixels - x, L);
      typename Vec<T>::reg r[L];
      load_planes(sums, x, n, m, r);
      S* const d = to.data + m * to.m_step + kStep * x;
      if constexpr (kStep == 2) {
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) {
          if (i < valid) narrow_every_other(d + i * to.m_step, r[i], int(n));
        }
      } else if (n == L && valid == L) {
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) store_as(d + i * to.m_step, r[i]);
      } else {
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) {
          if (i < valid) store_as_partial(d + i * to.m_step, r[i], int(n));
        }
      }
    }
  }
}

// Every other pixel of planes (x_step 2) whose pixels between this call owns: those are read and stored back as they
// were. A phase of grad_input with stride 2; the columns between belong to another phase, which is computed before or
// after this one.
template <class T>
CONV2D_INLINE void store_every_other_pixel(const TileSums<T>& sums, const TileTarget<T>& to) {
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  for (int64_t m = 0; m < sums.channels; m += L) {
    const int64_t valid = min64(sums.channels - m, L);
    for (int64_t x = 0; x < sums.pixels; x += L) {
      const int64_t n = min64(sums.pixels - x, L);
      // Elements of the row from the first to the last pixel, in two vectors.
      const int64_t span = 2 * n - 1, n0 = min64(span, L), n1 = span - n0;
      const bool within = n == L && x + L < sums.pixels;
      typename V::reg r[L];
      load_planes(sums, x, n, m, r);
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) {
        if (i >= valid) continue;
        T* const d = to.data + (m + i) * to.m_step + 2 * x;
        typename V::reg even, between;
        typename V::reg low = within ? V::load(d) : V::load_partial(d, int(n0));
        typename V::reg high = within ? V::load(d + L) : V::load_partial(d + L, int(n1));
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
}

// Any strides, one by one.
template <class S, class T>
void store_scattered(const TileSums<T>& sums, const TileTarget<S>& to) {
  for (int64_t m = 0; m < sums.channels; ++m) {
    const T b = sums.bias ? get_lane(sums.bias, m) : T{};
    for (int64_t x = 0; x < sums.pixels; ++x) {
      const T value = get_lane(sums.data + x * sums.pitch, m);
      to.data[x * to.x_step + m * to.m_step] = Narrow<S>::from(add_scalar(value, b));
    }
  }
}

// What lies between the elements that are stored.
enum class Between {
  kOthers,  // elements of others, which may be written at the same time: they are not touched
  kOwned,   // elements of this call that nobody else touches meanwhile: they may be read and written back
};

template <class S, class T>
void store_tile(const TileSums<T>& sums, const TileTarget<S>& to, [[maybe_unused]] Between between) {
  if constexpr (kHasTranspose<T>) {
    if (to.m_step == 1) return store_pixels(sums, to);
    if constexpr (sizeof(S) == sizeof(T)) {
      if (between == Between::kOwned && to.x_step == 2 && to.m_step >= 2 * sums.pixels) {
        return store_every_other_pixel(sums, to);
      }
    } else {
      if (to.x_step == 2) return store_planes<2>(sums, to);
    }
    if (to.x_step == 1) return store_planes<1>(sums, to);
  }
  store_scattered(sums, to);
}

// The piece of a GEMM's destination that a work item owns: of one group, or of several where lanes are groups.
struct ResultPiece {
  int64_t group, groups;
  Tile tile;

  // Where its first pixel is, of result channel m of the first group.
  template <class S>
  S* first_pixel(const ConvGemm& gemm, int64_t m) const {
    return static_cast<S*>(gemm.destination) + (group * gemm.m + m) * gemm.destination_m +
           tile.image * gemm.destination_n + tile.row * gemm.destination_row + tile.col * gemm.destination_col;
  }
};

// Sums [first, first + count) of a piece, as runs of neighbouring pixels: visit(sum, pixels, where the first one lies).
// Rows that continue one another are one run, unless only the columns between are owned: what lies between the last
// pixel of a row and the first of the next one may be another image's or channel's.
template <class Visit>
CONV2D_INLINE void for_each_run(const ConvGemm& gemm, const Tile& tile, const SumPitches& pitches, int64_t first,
                                int64_t count, const Visit& visit) {
  const bool join_rows = !gemm.owns_columns_between && tile.cols == gemm.cols && pitches.row == tile.cols &&
                         gemm.destination_row == gemm.destination_col * tile.cols;
  const int64_t run = join_rows ? tile.rows * tile.cols : tile.cols, runs = join_rows ? 1 : tile.rows;
  const int64_t run_pitch = join_rows ? pitches.image : pitches.row;
  for (int64_t x = first, next = 0, end = first + count; x < end; x = next) {
    const int64_t image = x / pitches.image, at = x - image * pitches.image, row = at / run_pitch;
    const int64_t col = at - row * run_pitch;
    // What lies behind the last row of an image is no row.
    next = row + 1 < runs ? x - col + run_pitch : (image + 1) * pitches.image;
    if (row >= runs || col >= run) continue;
    visit(x, min64(run - col, end - x),
          image * gemm.destination_n + row * gemm.destination_row + col * gemm.destination_col);
  }
}

// Sums [first, first + sums.pixels) of a piece. Lane l is result channel m + l * channel_step of the first group. (Sums
// are not copied: a copy's loads would be wider than the stores that they wait for, behind all sums that were stored.)
template <class S, class T>
void store_lanes(const ConvGemm& gemm, const ResultPiece& piece, const SumPitches& pitches, int64_t first,
                 const TileSums<T>& sums, int64_t m, int64_t channel_step) {
  S* const destination = piece.first_pixel<S>(gemm, m);
  const Between between = gemm.owns_columns_between ? Between::kOwned : Between::kOthers;
  for_each_run(gemm, piece.tile, pitches, first, sums.pixels, [&](int64_t x, int64_t pixels, int64_t offset) {
    const TileSums<T> run{sums.data + (x - first) * sums.pitch, sums.pitch, pixels, sums.channels, sums.bias};
    store_tile(run, TileTarget<S>{destination + offset, gemm.destination_col, channel_step * gemm.destination_m},
               between);
  });
}
// Of a piece whose sums are those of its pixels, one beside the other.
template <class S, class T>
void store_lanes(const ConvGemm& gemm, const ResultPiece& piece, int64_t first, const TileSums<T>& sums, int64_t m,
                 int64_t channel_step) {
  const Tile& tile = piece.tile;
  store_lanes<S, T>(gemm, piece, {tile.cols, tile.rows * tile.cols}, first, sums, m, channel_step);
}

// All result channels of whole groups that lie side by side: panels of `sums`, each [pixel][channel][group].
template <class S, class T>
void store_groups(const ConvGemm& gemm, const ResultPiece& piece, const T* sums, const Panels& panels, const T* bias) {
  constexpr int L = Vec<T>::kLanes;
  const Tile& tile = piece.tile;
  S* const destination = piece.first_pixel<S>(gemm, 0);
  // Panels have one width (can_interleave).
  const int64_t vectors = panels.size(0), width = vectors * L;
  const T* planes[kMaxInterleaved];
  for (int64_t v = 0; v < gemm.m; ++v) planes[v] = sums + v / vectors * tile.pixels() * width + v % vectors * L;
  for (int64_t n = 0; n < tile.images; ++n) {
    for (int64_t y = 0; y < tile.rows; ++y) {
      S* const row = destination + n * gemm.destination_n + y * gemm.destination_row;
      store_interleaved(gemm.m, planes, width, bias,
                        GroupPixels<S>{row, gemm.destination_col, tile.cols, piece.groups});
      for (int64_t v = 0; v < gemm.m; ++v) planes[v] += tile.cols * width;
    }
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
