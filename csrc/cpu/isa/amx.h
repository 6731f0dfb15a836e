// Tiles of AMX (palette 1): eight registers of 16 rows of 64 bytes, by number; and their emulation, bit for bit.
//
//   AmxScope                      configures a thread's tiles, all of them whole, and releases them at its end
//   tile_zero<N>()
//   tile_load<N>(data, pitch)     16 rows of 64 bytes, `pitch` bytes apart; any alignment, 64 is the fastest
//   tile_store<N>(data, pitch)
//   tile_multiply<D, A, B>()      D += A * B: row i of A holds 32 bfloat16, row k of B 16 pairs of them, D is float32:
//
//       even = odd = +0
//       for k in [0, 16):   even = fma(A[i][2k], B[k][2j], even),   odd = fma(A[i][2k + 1], B[k][2j + 1], odd)
//       D[i][j] = D[i][j] + (even + odd)
//
// Each operation rounds to nearest even and takes denormal numbers, operands and results, as zeros, whatever the
// thread's setting; none raises a flag. That is Intel's definition of TDPBF16PS; a Sapphire Rapids followed it to the
// bit in 512,000 random sums of normal numbers.
#pragma once

#include "convert.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

constexpr int64_t kTileRows = kAmxTileRows, kTileBytes = 64;
constexpr int64_t kTileColumns = kTileBytes / int64_t(sizeof(float));

#if defined(CONV2D_AMX_EMULATED)

// A thread's tiles.
struct EmulatedTiles {
  alignas(64) unsigned char bytes[8][kTileRows * kTileBytes];
  bool configured;
};
inline thread_local EmulatedTiles emulated_tiles;

// As the hardware, which stops a program that has not configured its tiles.
template <int N>
CONV2D_INLINE unsigned char* emulated_tile() {
  static_assert(N >= 0 && N < 8);
  if (!emulated_tiles.configured) __builtin_trap();
  return emulated_tiles.bytes[N];
}

class AmxScope {
 public:
  AmxScope() {
    __builtin_memset(emulated_tiles.bytes, 0, sizeof emulated_tiles.bytes);
    emulated_tiles.configured = true;
  }
  ~AmxScope() { emulated_tiles.configured = false; }
  AmxScope(const AmxScope&) = delete;
  AmxScope& operator=(const AmxScope&) = delete;
};

template <int N>
CONV2D_INLINE void tile_zero() {
  __builtin_memset(emulated_tile<N>(), 0, kTileRows * kTileBytes);
}
template <int N>
CONV2D_INLINE void tile_load(const void* data, int64_t pitch) {
  unsigned char* const tile = emulated_tile<N>();
  for (int64_t row = 0; row < kTileRows; ++row) {
    __builtin_memcpy(tile + row * kTileBytes, static_cast<const char*>(data) + row * pitch, kTileBytes);
  }
}
template <int N>
CONV2D_INLINE void tile_store(void* data, int64_t pitch) {
  const unsigned char* const tile = emulated_tile<N>();
  for (int64_t row = 0; row < kTileRows; ++row) {
    __builtin_memcpy(static_cast<char*>(data) + row * pitch, tile + row * kTileBytes, kTileBytes);
  }
}

// Denormal numbers flushed, rounded to nearest, and no exception flag left behind. Memory is read and written inside,
// so that no operation moves out.
class AmxArithmetic {
 public:
  AmxArithmetic() : before_(_mm_getcsr()) {
    constexpr unsigned kMasked = 0x1f80, kFlush = 0x8000, kDenormalsAreZeros = 0x0040;
    _mm_setcsr(kMasked | kFlush | kDenormalsAreZeros);
    __asm__ volatile("" ::: "memory");
  }
  ~AmxArithmetic() {
    __asm__ volatile("" ::: "memory");
    _mm_setcsr(before_);
  }
  AmxArithmetic(const AmxArithmetic&) = delete;
  AmxArithmetic& operator=(const AmxArithmetic&) = delete;

 private:
  const unsigned before_;
};

inline void emulate_multiply(unsigned char* d, const unsigned char* a, const unsigned char* b) {
  const AmxArithmetic arithmetic;
  for (int64_t row = 0; row < kTileRows; ++row) {
    uint32_t left[kTileColumns], right[kTileColumns];
    float sum[kTileColumns], even[kTileColumns] = {}, odd[kTileColumns] = {};
    __builtin_memcpy(left, a + row * kTileBytes, sizeof left);
    __builtin_memcpy(sum, d + row * kTileBytes, sizeof sum);
    for (int64_t k = 0; k < kTileColumns; ++k) {
      const float first = bits_to_float(left[k] << 16), second = bits_to_float(left[k] & 0xffff0000u);
      __builtin_memcpy(right, b + k * kTileBytes, sizeof right);
#pragma omp simd
      for (int64_t j = 0; j < kTileColumns; ++j) {
        even[j] = __builtin_fmaf(first, bits_to_float(right[j] << 16), even[j]);
        odd[j] = __builtin_fmaf(second, bits_to_float(right[j] & 0xffff0000u), odd[j]);
      }
    }
#pragma omp simd
    for (int64_t j = 0; j < kTileColumns; ++j) sum[j] = sum[j] + (even[j] + odd[j]);
    __builtin_memcpy(d + row * kTileBytes, sum, sizeof sum);
  }
}
template <int D, int A, int B>
CONV2D_INLINE void tile_multiply() {
  emulate_multiply(emulated_tile<D>(), emulated_tile<A>(), emulated_tile<B>());
}

#else

// The compiler's own intrinsics take no number from a template, and GCC's loads don't say that they read memory.
class AmxScope {
 public:
  AmxScope() {
    Configuration configuration{};
    configuration.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      configuration.row_bytes[tile] = uint16_t(kTileBytes);
      configuration.rows[tile] = uint8_t(kTileRows);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(configuration));
  }
  // Else the system would save and restore them whenever another thread runs.
  ~AmxScope() { __asm__ volatile("tilerelease" ::: "memory"); }
  AmxScope(const AmxScope&) = delete;
  AmxScope& operator=(const AmxScope&) = delete;

 private:
  struct Configuration {
    uint8_t palette, first_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  static_assert(sizeof(Configuration) == 64);
};

template <int N>
CONV2D_INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(N));
}
template <int N>
CONV2D_INLINE void tile_load(const void* data, int64_t pitch) {
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(N), "r"(data), "r"(pitch) : "memory");
}
template <int N>
CONV2D_INLINE void tile_store(void* data, int64_t pitch) {
  __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(N), "r"(data), "r"(pitch) : "memory");
}
template <int D, int A, int B>
CONV2D_INLINE void tile_multiply() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(D), "i"(A), "i"(B));
}

#endif

}  // namespace conv2d_ext::cpu::CONV2D_ISA
