// What drivers/winograd.h computes again: squares of result channels with a result that is not finite.
#pragma once

#include "../kernels/gemm.h"
#include "../kernels/vector_shape.h"
#include "../pack/store.h"
#include "../pack/weights.h"
#include "parts.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// Sums squares directly, up to kWinogradAgain at a time, as drivers/gemm.h does: the same order, and so the same bits.
// A square's sums are stored in those channels alone that need it.
template <class S, class T>
class WinogradAgain {
 public:
  static constexpr int L = Vec<T>::kLanes;

  // bias: of the panel's `vectors` vectors of result channels, which begin with number m. zeros: as many.
  WinogradAgain(const ConvGemm& gemm, const WinogradScratch& layout, const ResultPiece& piece, int64_t m,
                int64_t vectors, const T* bias, const T* zeros)
      : gemm_(gemm),
        layout_(layout),
        piece_(piece),
        k_(block_k(gemm, vector_shape<T>().limits)),
        order_(patch_order(false, k_.segment_channels, gemm.source_c, gemm.source_col, gemm.source_w)),
        m_(m),
        vectors_(vectors),
        lanes_(min64(vectors * L, gemm.m - m)),
        bias_(bias),
        zeros_(zeros),
        scratch_(static_cast<char*>(thread_scratch(layout.bytes))) {}

  // One more square, by its results, width() of each of its four pixels.
  void add(int64_t image, int64_t row, int64_t col, const T* results) {
    Square& square = squares_[count_];
    square = {image, row, col, min64(2, gemm_.rows - row), min64(2, gemm_.cols - col), {}};
    bool any = false;
    for (int64_t l = 0; l < lanes_; ++l) {
      for (int64_t pixel = 0; pixel < 4; ++pixel) {
        // 0 for finite numbers.
        const T rest = results[pixel * width() + l] * T(0);
        if (square.has(pixel) && rest != T(0)) square.again[l] = any = true;
      }
    }
    if (any && ++count_ == kWinogradAgain) flush();
  }

  void flush() {
    if (count_ == 0) return;
    const ChunkSums<T> sums = chunk_sums<T>(scratch_, layout_.again);
    for_each_block(gemm_, k_, k_.segment_channels, [&](const KBlock& segment) { add_segment(segment, sums); });
    sums.finish(4 * count_ * width());
    for (int64_t s = 0; s < count_; ++s) store(squares_[s], sums.sums + 4 * s * width());
    count_ = 0;
  }

 private:
  // Its first pixel, of the whole result; how much of it lies in the image; the channels that are computed again.
  struct Square {
    int64_t image, row, col, rows, cols;
    bool again[L * Vec<T>::kMaxVectors];
    bool has(int64_t pixel) const { return pixel / 2 < rows && pixel % 2 < cols; }
  };

  int64_t width() const { return vectors_ * L; }

  void add_segment(const KBlock& segment, const ChunkSums<T>& sums) const {
    T* const panel = part<T>(scratch_, layout_.again_panel);
    const S* const weight = static_cast<const S*>(gemm_.weight) + piece_.group * gemm_.weight_g + m_ * gemm_.weight_m +
                            segment.weight_offset(gemm_);
    pack_weight(gemm_, WeightSegment<S>{weight, gemm_.weight_m, lanes_, segment.channels, 3, 3},
                Panel<T>{panel, width(), width()});
    int64_t* const positions = part<int64_t>(scratch_, layout_.again_offsets);
    T* const operand = part<T>(scratch_, layout_.again_patch);
    GemmOperands<T> operands{};
    operands.depth = segment.channels * 9;
    operands.chain = k_.chain;
    operands.a = panel;
    operands.a_pitch = width();
    operands.b = operand;
    operands.j_offset = positions;
    operands.k_offset = positions + 4;
    operands.start = zeros_;
    operands.c = sums.sums;
    operands.c_pitch = width();
    operands.accumulate = !sums.begin(k_.segment_at(segment.channel, 0, 0), 4 * count_ * width());
    for (int64_t s = 0; s < count_; ++s, operands.c += 4 * width()) {
      const Patch patch = lay_out_patch<T>(order_, gemm_, {0, 1, squares_[s].row, 2, squares_[s].col, 2}, segment);
      const S* const source = static_cast<const S*>(gemm_.source) + squares_[s].image * gemm_.source_n +
                              piece_.group * gemm_.source_g() + segment.channel * gemm_.source_c;
      pack_patch(patch, source_of(gemm_, source), false, operand);
      fill_positions(patch, 1, 2, 2, positions);
      fill_taps(patch, segment.channels, 3, 3, positions + 4);
      gemm_panel<false, T>(4, vectors_, operands);
    }
  }

  void store(const Square& square, const T* sums) const {
    const ResultPiece at{piece_.group, 1, {square.image, 1, square.row, 1, square.col, 1}};
    S* const first = at.first_pixel<S>(gemm_, m_);
    for (int64_t pixel = 0; pixel < 4; ++pixel, sums += width()) {
      if (!square.has(pixel)) continue;
      S* const to = first + pixel / 2 * gemm_.destination_row + pixel % 2 * gemm_.destination_col;
      for (int64_t l = 0; l < lanes_; ++l) {
        if (square.again[l]) to[l * gemm_.destination_m] = Narrow<S>::from(sums[l] + bias_[l]);
      }
    }
  }

  const ConvGemm& gemm_;
  const WinogradScratch& layout_;
  const ResultPiece& piece_;
  const KBlocking k_;
  const PatchOrder order_;
  const int64_t m_, vectors_, lanes_;
  const T *const bias_, *const zeros_;
  char* const scratch_;
  Square squares_[kWinogradAgain];
  int64_t count_ = 0;
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
