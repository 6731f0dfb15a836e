#include "warp_operations.h"

#include <cmath>

#include "numeric.h"

namespace conv2d_ext::cuda {
namespace {

using cuda_host::Site;

struct MmaLane {
  float* d;           // [4]
  const uint32_t* a;  // [4]
  const uint32_t* b;  // [2]
};

// The layouts of PTX's mma.m16n8k8 and .m16n8k16: with g = lane / 4 and t = lane % 4, a lane holds
//   of D, in d[2 * i + j], row g + 8 * i and column 2 * t + j;
//   of A, in register i, row g + 8 * (i % 2), and of B, in register i, column g; and along K
//     32 bits: t + 4 * (register), 16 bits: 2 * t + half + 8 * (register),
//     the register of A counted by i / 2.
// K0: how many k a register step spans; VALUES: values in a register.
template <int K, int VALUES, class Unpack>
void multiply(void* const (&lanes)[32], Unpack unpack) {
  double a[16][K], b[K][8];
  for (int lane = 0; lane < 32; ++lane) {
    const MmaLane& it = *static_cast<const MmaLane*>(lanes[lane]);
    const int g = lane / 4;
    for (int half = 0; half < VALUES; ++half) {
      const int k = lane % 4 * VALUES + half;
      for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][k + i / 2 * K / 2] = unpack(it.a[i], half);
      for (int i = 0; i < 2; ++i) b[k + i * K / 2][g] = unpack(it.b[i], half);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const MmaLane& it = *static_cast<const MmaLane*>(lanes[lane]);
    for (int i = 0; i < 4; ++i) {
      double sum = static_cast<double>(it.d[i]);
      for (int k = 0; k < K; ++k) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
      it.d[i] = static_cast<float>(sum);
    }
  }
}

struct MatrixLane {
  uint32_t (*result)[4];
  const void* row;
};

template <bool TRANSPOSED>
void load_matrices(int warp, Site where, void* const (&lanes)[32]) {
  const void* rows[32];
  uint32_t (*results[32])[4];
  for (int lane = 0; lane < 32; ++lane) {
    rows[lane] = static_cast<const MatrixLane*>(lanes[lane])->row;
    results[lane] = static_cast<const MatrixLane*>(lanes[lane])->result;
  }
  cuda_host::shared_memory().load_matrices(warp, where, rows, results, TRANSPOSED);
}

}  // namespace

void load_matrix_x4(uint32_t (&result)[4], const void* row, Site site) {
  MatrixLane mine{&result, row};
  cuda_host::meet_warp("load_matrix_x4", site, &mine, load_matrices<false>);
}

void load_matrix_x4_transposed(uint32_t (&result)[4], const void* row, Site site) {
  MatrixLane mine{&result, row};
  cuda_host::meet_warp("load_matrix_x4_transposed", site, &mine, load_matrices<true>);
}

void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site) {
  MmaLane mine{d, a, b};
  cuda_host::meet_warp("mma_tf32", site, &mine, [](int, Site where, void* const(&lanes)[32]) {
    multiply<8, 1>(lanes, [&](uint32_t bits, int) {
      const float value = float_of(bits);
      // The device drops these bits: a loss of accuracy that nothing else would show.
      if ((bits & 0x1fff) != 0 && !std::isnan(value))
        cuda_host::fail("mma_tf32 (" + where.text() + ") is given a number that was not rounded to tf32");
      return static_cast<double>(value);
    });
  });
}

void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site) {
  MmaLane mine{d, a, b};
  cuda_host::meet_warp("mma_f16", site, &mine, [](int, Site, void* const(&lanes)[32]) {
    multiply<16, 2>(lanes, [](uint32_t bits, int half) {
      return static_cast<double>(widen(Float16{static_cast<uint16_t>(bits >> half * 16)}));
    });
  });
}

void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site) {
  MmaLane mine{d, a, b};
  cuda_host::meet_warp("mma_bf16", site, &mine, [](int, Site, void* const(&lanes)[32]) {
    multiply<16, 2>(lanes, [](uint32_t bits, int half) {
      return static_cast<double>(widen(BFloat16{static_cast<uint16_t>(bits >> half * 16)}));
    });
  });
}

}  // namespace conv2d_ext::cuda
