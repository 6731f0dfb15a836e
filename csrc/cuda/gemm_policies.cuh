// How a warp multiplies its piece of a tile: the micro-kernels of the implicit GEMM.
//
// A policy says what shared memory holds (kTransposed: [k][x], one element after the other; otherwise [x][k], in
// 16-byte groups of k), and computes, for a warp's piece of kWarpM x kWarpX results,
//     C[m, x] += sum over the kTileK products of a tile of A[m, k] * B[k, x], k ascending
// with the sums in registers. The order in which an element's products are added is the same wherever in a tile it
// lies, so tiles may be of any size.
#pragma once

#include "device.cuh"

namespace conv2d_ext::cuda {

// ---- element types

template <class T>
struct Complex {
  T re, im;
};

template <class T>
__device__ __forceinline__ T zero_of() {
  return T{};
}
__device__ __forceinline__ float add(float a, float b) { return a + b; }
__device__ __forceinline__ double add(double a, double b) { return a + b; }
template <class T>
__device__ __forceinline__ Complex<T> add(Complex<T> a, Complex<T> b) {
  return {a.re + b.re, a.im + b.im};
}
__device__ __forceinline__ float conjugate(float a) { return a; }
__device__ __forceinline__ double conjugate(double a) { return a; }
template <class T>
__device__ __forceinline__ Complex<T> conjugate(Complex<T> a) {
  return {a.re, -a.im};
}
// A sum of many values in order. What each addition rounds away (two-sum) is summed apart and added at the end; after
// an infinity that is NaN, and is left out.
template <class T>
struct CompensatedSum {
  T sum, lost = 0;
  __device__ __forceinline__ void add(T value) {
    const T next = sum + value, taken = next - sum;
    lost += (sum - (next - taken)) + (value - taken);
    sum = next;
  }
  __device__ __forceinline__ T total() const { return sum + (lost == lost ? lost : T(0)); }
};
template <class T>
struct CompensatedSum<Complex<T>> {
  CompensatedSum<T> re, im;
  __device__ __forceinline__ explicit CompensatedSum(Complex<T> first) : re{first.re}, im{first.im} {}
  __device__ __forceinline__ void add(Complex<T> value) {
    re.add(value.re);
    im.add(value.im);
  }
  __device__ __forceinline__ Complex<T> total() const { return {re.total(), im.total()}; }
};

// A sum of values in order, without what its additions round away.
template <class T>
struct PlainSum {
  T sum;
  __device__ __forceinline__ void add(T value) { sum = cuda::add(sum, value); }
  __device__ __forceinline__ T total() const { return sum; }
};

template <class T>
__device__ __forceinline__ Complex<T> multiply_add(Complex<T> a, Complex<T> b, Complex<T> c) {
  return {multiply_add(-a.im, b.im, multiply_add(a.re, b.re, c.re)),
          multiply_add(a.im, b.re, multiply_add(a.re, b.im, c.im))};
}
template <class T>
inline constexpr bool kIsComplex = false;
template <class T>
inline constexpr bool kIsComplex<Complex<T>> = true;

// Between the type of a sum and that of its element in memory.
template <class T>
__device__ __forceinline__ void store_result(T* to, T value) {
  store_global(to, value);
}
template <class T>
__device__ __forceinline__ void store_narrowed(T* to, float value) {
  T narrowed;
  narrow(value, narrowed);
  store_global(to, narrowed);
}
__device__ __forceinline__ void store_result(Float16* to, float value) { store_narrowed(to, value); }
__device__ __forceinline__ void store_result(BFloat16* to, float value) { store_narrowed(to, value); }

template <class T>
__device__ __forceinline__ T load_widened(const T* from) {
  return *from;
}
__device__ __forceinline__ float load_widened(const Float16* from) { return widen(*from); }
__device__ __forceinline__ float load_widened(const BFloat16* from) { return widen(*from); }

template <class T>
using SumOf = decltype(load_widened(static_cast<const T*>(nullptr)));

// The same of memory that nothing writes while the kernel runs.
template <class T>
__device__ __forceinline__ T load_operand(const T* from) {
  return load_global(from);
}
template <class T>
__device__ __forceinline__ Complex<T> load_operand(const Complex<T>* from) {
  using Words = std::conditional_t<sizeof(T) == 4, float2, double2>;
  const Words words = load_global(reinterpret_cast<const Words*>(from));
  return {words.x, words.y};
}
__device__ __forceinline__ float load_operand(const Float16* from) {
  return widen(Float16{load_global(reinterpret_cast<const uint16_t*>(from))});
}
__device__ __forceinline__ float load_operand(const BFloat16* from) {
  return widen(BFloat16{load_global(reinterpret_cast<const uint16_t*>(from))});
}

// Sums of a kernel before this one: `count` of them, `step` elements apart, added in order. An addition waits for the
// one before it; loads don't, so many are in flight.
constexpr int kLoadsAhead = 16;
template <class InOrder, class Sum>
__device__ __forceinline__ Sum add_in_order(const Sum* first, int64_t step, int32_t count) {
  InOrder all{load_operand(first)};
  const Sum* next = first + step;
#pragma unroll 1
  for (int32_t left = count - 1; left > 0; left -= kLoadsAhead) {
    Sum values[kLoadsAhead];
#pragma unroll
    for (int i = 0; i < kLoadsAhead; ++i) {
      if (i < left) values[i] = load_operand(next);
      next += step;
    }
#pragma unroll
    for (int i = 0; i < kLoadsAhead; ++i) {
      if (i >= left) break;
      all.add(values[i]);
    }
  }
  return all.total();
}

// As many elements as fit 16 bytes, loaded and stored at once.
template <class T>
struct alignas(16) Vector16 {
  static constexpr int kCount = 16 / sizeof(T);
  T at[kCount];
};

template <class T>
struct alignas(8) HalfOfVector16 {
  T at[8 / sizeof(T)];
};

// ---- FMA units, one product at a time

// A thread owns VECTORS_M x VECTORS_X blocks of V x V results, V = 16 bytes' worth: each k takes VECTORS_M + VECTORS_X
// loads of 16 bytes for (VECTORS_M * VECTORS_X * V * V) multiply-adds. In float32 that is 64 for 4, with 64
// accumulators. Neighbouring blocks of a thread lie a warp's width apart, so a warp reads 128 neighbouring bytes of B,
// each once, and of A 64, each broadcast to 8 lanes: no bank is met twice.
template <class T, int VECTORS_M, int VECTORS_X>
struct FmaPolicy {
  using Element = T;
  using Sum = T;
  static constexpr bool kTransposed = true;
  static constexpr int kV = Vector16<T>::kCount;
  static constexpr int kTileK = 16;
  // The most products in a chain, if the table of k counts GROUP of them at a time.
  static constexpr int chain_k(int) { return 256; }
  static constexpr int kWarpM = 4 * kV * VECTORS_M;
  static constexpr int kWarpX = 8 * kV * VECTORS_X;
  static constexpr int kThreadM = kV * VECTORS_M;
  static constexpr int kThreadX = kV * VECTORS_X;
  // Rows of k are 16 bytes apart modulo the 128 of all banks: neither reading along them nor writing across them meets
  // a bank twice.
  static constexpr int kRowPadding = kV;
  static constexpr int kResultPadding = kV;
  struct Sums {
    T at[kThreadM][kThreadX];
  };

  __device__ static __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int m = 0; m < kThreadM; ++m)
#pragma unroll
      for (int x = 0; x < kThreadX; ++x) sums.at[m][x] = zero_of<T>();
  }

  // a, b: the first row of the warp's piece, rows a_row and b_row elements apart.
  __device__ static __forceinline__ void multiply(Sums& sums, const T* a, int a_row, const T* b, int b_row, int lane,
                                                  bool conjugate_a, bool conjugate_b) {
    const T* const a_lane = a + lane / 8 * kV;
    const T* const b_lane = b + lane % 8 * kV;
#pragma unroll
    for (int k = 0; k < kTileK; ++k) {
      Vector16<T> a_values[VECTORS_M], b_values[VECTORS_X];
#pragma unroll
      for (int i = 0; i < VECTORS_M; ++i)
        a_values[i] = load_shared(reinterpret_cast<const Vector16<T>*>(a_lane + k * a_row + i * 4 * kV));
#pragma unroll
      for (int i = 0; i < VECTORS_X; ++i)
        b_values[i] = load_shared(reinterpret_cast<const Vector16<T>*>(b_lane + k * b_row + i * 8 * kV));
      if (kIsComplex<T>) {
#pragma unroll
        for (int m = 0; m < kThreadM; ++m) {
          T& value = a_values[m / kV].at[m % kV];
          if (conjugate_a) value = conjugate(value);
        }
#pragma unroll
        for (int x = 0; x < kThreadX; ++x) {
          T& value = b_values[x / kV].at[x % kV];
          if (conjugate_b) value = conjugate(value);
        }
      }
#pragma unroll
      for (int m = 0; m < kThreadM; ++m)
#pragma unroll
        for (int x = 0; x < kThreadX; ++x)
          sums.at[m][x] = multiply_add(a_values[m / kV].at[m % kV], b_values[x / kV].at[x % kV], sums.at[m][x]);
    }
  }

  // Stores the sums to a tile of shared memory, or adds them to what it holds. tile: the warp's piece, [m][x].
  template <bool ADD>
  __device__ static __forceinline__ void store(const Sums& sums, T* tile, int row, int lane) {
#pragma unroll
    for (int m = 0; m < kThreadM; ++m)
#pragma unroll
      for (int i = 0; i < VECTORS_X; ++i) {
        Vector16<T>* const to = reinterpret_cast<Vector16<T>*>(tile + (m / kV * 4 * kV + lane / 8 * kV + m % kV) * row +
                                                               i * 8 * kV + lane % 8 * kV);
        Vector16<T> value;
        if (ADD) value = load_shared(to);
#pragma unroll
        for (int x = 0; x < kV; ++x)
          value.at[x] = ADD ? add(value.at[x], sums.at[m][i * kV + x]) : sums.at[m][i * kV + x];
        store_shared(to, value);
      }
  }
};

// ---- tensor cores

// What the two tensor core policies share: a warp owns WARP_M / 16 x 8 blocks of 16 (m) x 8 (x) results. A lane holds
// of each the neighbours (2 * (lane % 4), and the next) of rows lane / 4 and lane / 4 + 8. The larger WARP_M, the more
// products each loaded fragment serves.
template <int WARP_M>
struct MmaSums {
  static constexpr int kWarpM = WARP_M, kWarpX = 64;
  static constexpr int kBlocksM = kWarpM / 16, kBlocksX = kWarpX / 8;
  // A lane stores 8 bytes; the 16 lanes that do so at once meet 4 rows, 32 bytes of each.
  static constexpr int kResultPadding = 8;
  float at[kBlocksM][kBlocksX][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i)
#pragma unroll
      for (int j = 0; j < kBlocksX; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) at[i][j][e] = 0.0f;
  }

  template <bool ADD>
  __device__ __forceinline__ void store(float* tile, int row, int lane) const {
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < kBlocksX; ++j) {
          float2* const to =
              reinterpret_cast<float2*>(tile + (i * 16 + half * 8 + lane / 4) * row + j * 8 + lane % 4 * 2);
          float2 value = make_float2(at[i][j][half * 2], at[i][j][half * 2 + 1]);
          if (ADD) {
            const float2 before = load_shared(to);
            value = make_float2(before.x + value.x, before.y + value.y);
          }
          store_shared(to, value);
        }
  }
};

// float32 rounded to tf32 (to nearest, ties away from zero) as it enters the tensor cores.
template <int WARP_M>
struct Tf32Policy {
  using Element = float;
  using Sum = float;
  static constexpr bool kTransposed = true;
  // The most products in a chain, if the table of k counts GROUP of them at a time.
  static constexpr int chain_k(int) { return 256; }
  static constexpr int kTileK = 16;
  static constexpr int kWarpM = MmaSums<WARP_M>::kWarpM;
  static constexpr int kWarpX = MmaSums<WARP_M>::kWarpX;
  // A fragment reads 4 neighbouring k of 8 neighbouring elements: rows 8 banks apart meet every bank once.
  static constexpr int kRowPadding = 8;
  static constexpr int kResultPadding = MmaSums<WARP_M>::kResultPadding;
  using Sums = MmaSums<WARP_M>;

  __device__ static __forceinline__ void clear(Sums& sums) { sums.clear(); }

  __device__ static __forceinline__ void multiply(Sums& sums, const float* a, int a_row, const float* b, int b_row,
                                                  int lane, bool, bool) {
    const float* const a_lane = a + lane % 4 * a_row + lane / 4;
    const float* const b_lane = b + lane % 4 * b_row + lane / 4;
#pragma unroll
    for (int k = 0; k < kTileK; k += 8) {
      uint32_t a_values[Sums::kBlocksM][4], b_values[Sums::kBlocksX][2];
#pragma unroll
      for (int i = 0; i < Sums::kBlocksM; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          a_values[i][e] = round_to_tf32(load_shared(a_lane + (k + e / 2 * 4) * a_row + i * 16 + e % 2 * 8));
#pragma unroll
      for (int j = 0; j < Sums::kBlocksX; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) b_values[j][e] = round_to_tf32(load_shared(b_lane + (k + e * 4) * b_row + j * 8));
#pragma unroll
      for (int i = 0; i < Sums::kBlocksM; ++i)
#pragma unroll
        for (int j = 0; j < Sums::kBlocksX; ++j) mma_tf32(sums.at[i][j], a_values[i], b_values[j]);
    }
  }

  template <bool ADD>
  __device__ static __forceinline__ void store(const Sums& sums, float* tile, int row, int lane) {
    sums.template store<ADD>(tile, row, lane);
  }
};

// float16 and bfloat16, products and sums in float32. Shared memory holds [x][k] in 16-byte groups of 8 k; group g of
// row x lies at place (g ^ x / 2) % 4 of the row's four, so that the 8 rows that ldmatrix reads at once meet every bank
// once. Where global memory runs along x it holds [k][x] in groups of 8 x, which ldmatrix transposes; of each eight
// groups of row k, the one that is g modulo 8 lies at place (g ^ k) % 8. The fragments are the same.
template <class T, int WARP_M>
struct Mma16Policy {
  using Element = T;
  using Sum = float;
  static constexpr bool kTransposed = false;
  // The most products in a chain, if the table of k counts GROUP of them at a time.
  static constexpr int chain_k(int group) { return group == 1 ? 256 : 512; }
  static constexpr int kTileK = 32;
  static constexpr int kWarpM = MmaSums<WARP_M>::kWarpM;
  static constexpr int kWarpX = MmaSums<WARP_M>::kWarpX;
  static constexpr int kRowPadding = 0;
  static constexpr int kResultPadding = MmaSums<WARP_M>::kResultPadding;
  using Sums = MmaSums<WARP_M>;

  // Of a group of 8 k in a tile, in elements.
  __device__ static __forceinline__ unsigned group_offset(unsigned x, unsigned group) {
    return x * kTileK + ((group ^ (x >> 1)) & 3) * 8;
  }

  __device__ static __forceinline__ void clear(Sums& sums) { sums.clear(); }

  // The same of a group of 8 x, where rows of k have ROW elements.
  template <int ROW>
  __device__ static __forceinline__ unsigned row_offset(unsigned k, unsigned group) {
    return k * ROW + ((group & ~7u) | ((group ^ k) & 7)) * 8;
  }

  // a, b: whole tiles; a_first, b_first: where the warp's piece begins. A_ROW, B_ROW: elements in a row of k, or 0
  // where the tile holds [x][k].
  template <int A_ROW, int B_ROW>
  __device__ static __forceinline__ void multiply(Sums& sums, const T* a, int a_first, const T* b, int b_first,
                                                  int lane) {
    const int row = lane % 8;
#pragma unroll
    for (int k = 0; k < kTileK / 8; k += 2) {
      uint32_t a_values[Sums::kBlocksM][4], b_values[Sums::kBlocksX / 2][4];
      // Of A, matrices are (rows 0-7, k 0-7), (rows 8-15, k 0-7), (rows 0-7, k 8-15), (rows 8-15, k 8-15).
#pragma unroll
      for (int i = 0; i < Sums::kBlocksM; ++i) {
        if constexpr (A_ROW == 0) {
          load_matrix_x4(a_values[i], a + group_offset(a_first + i * 16 + lane % 16, k + lane / 16));
        } else {
          load_matrix_x4_transposed(
              a_values[i], a + row_offset<A_ROW>((k + lane / 16) * 8 + row, a_first / 8 + i * 2 + lane / 8 % 2));
        }
      }
      // Of B (x 0-7, k 0-7), (x 0-7, k 8-15), (x 8-15, k 0-7), (x 8-15, k 8-15): the fragments of two blocks.
#pragma unroll
      for (int j = 0; j < Sums::kBlocksX / 2; ++j) {
        if constexpr (B_ROW == 0) {
          load_matrix_x4(b_values[j], b + group_offset(b_first + j * 16 + lane / 16 * 8 + row, k + lane / 8 % 2));
        } else {
          load_matrix_x4_transposed(
              b_values[j], b + row_offset<B_ROW>((k + lane / 8 % 2) * 8 + row, b_first / 8 + j * 2 + lane / 16));
        }
      }
#pragma unroll
      for (int i = 0; i < Sums::kBlocksM; ++i)
#pragma unroll
        for (int j = 0; j < Sums::kBlocksX; ++j) {
          const uint32_t b_pair[2] = {b_values[j / 2][j % 2 * 2], b_values[j / 2][j % 2 * 2 + 1]};
          multiply_block(sums.at[i][j], a_values[i], b_pair);
        }
    }
  }

  template <bool ADD>
  __device__ static __forceinline__ void store(const Sums& sums, float* tile, int row, int lane) {
    sums.template store<ADD>(tile, row, lane);
  }

 private:
  __device__ static __forceinline__ void multiply_block(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (sizeof(T) == 2 && T::kIsBFloat16) {
      mma_bf16(d, a, b);
    } else {
      mma_f16(d, a, b);
    }
  }
};

}  // namespace conv2d_ext::cuda
