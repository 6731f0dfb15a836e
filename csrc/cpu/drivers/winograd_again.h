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
struct WinogradAgain {
  static constexpr int L = Vec<T>::kLanes;
  const ConvGemm& gemm;
  const WinogradScratch& layout;
  const ResultPiece& piece;
  const int64_t m, vectors;           // of a panel: its first result channel, and how many vectors of them it has
  const T *const bias, *const zeros;  // as many
  const KBlocking k = block_k(gemm, vector_shape<T>().limits);
  const PatchOrder order = patch_order(false, k.segment_channels, gemm.source_c, gemm.source_col, gemm.source_w);
  const int64_t lanes = min64(vectors * L, gemm.m - m);
  char* const scratch = static_cast<char*>(thread_scratch(layout.bytes));

  // Its first pixel, of the whole result; how much of it lies in the image; the channels that are computed again.
  struct Square {
    int64_t image, row, col, rows, cols;
    bool again[L * Vec<T>::kMaxVectors];
    bool has(int64_t pixel) const { return pixel / 2 < rows && pixel % 2 < cols; }
  };
  Square squares[kWinogradAgain] = {};
  int64_t count = 0;

  // One more square, by its results, width() of each of its four pixels.
  void add(int64_t image, int64_t row, int64_t col, const T* results) {
    Square& square = squares[count];
    square = {image, row, col, min64(2, gemm.rows - row), min64(2, gemm.cols - col), {}};
    bool any = false;
    for (int64_t l = 0; l < lanes; ++l) {
      for (int64_t pixel = 0; pixel < 4; ++pixel) {
        // 0 for finite numbers.
        const T rest = results[pixel * width() + l] * T(0);
        if (square.has(pixel) && rest != T(0)) square.again[l] = any = true;
      }
    }
    if (any && ++count == kWinogradAgain) flush();
  }

  void flush() {
    if (count == 0) return;
    const ChunkSums<T> sums = chunk_sums<T>(scratch, layout.again);
    for_each_block(gemm, k, k.segment_channels, [&](const KBlock& segment) { add_segment(segment, sums); });
    sums.finish(4 * count * width());
    for (int64_t s = 0; s < count; ++s) store(squares[s], sums.sums + 4 * s * width());
    count = 0;
  }

  int64_t width() const { return vectors * L; }

  void add_segment(const KBlock& segment, const ChunkSums<T>& sums) const {
    T* const panel = part<T>(scratch, layout.again_panel);
    const S* const weight = static_cast<const S*>(gemm.weight) + piece.group * gemm.weight_g + m * gemm.weight_m;
    pack_weight(gemm, segment.weights(gemm, weight, gemm.weight_m, lanes), Panel<T>{panel, width(), width()});
    int64_t* const positions = part<int64_t>(scratch, layout.again_offsets);
    T* const operand = part<T>(scratch, layout.again_patch);
    GemmOperands<T> operands{};
    operands.depth = segment.channels * 9;
    operands.chain = k.chain;
    operands.a = panel;
    operands.a_pitch = width();
    operands.b = operand;
    operands.j_offset = positions;
    operands.k_offset = positions + 4;
    operands.start = zeros;
    operands.c = sums.sums;
    operands.c_pitch = width();
    operands.accumulate = !sums.begin(k.segment_at(segment.channel, 0, 0), 4 * count * width());
    for (int64_t s = 0; s < count; ++s, operands.c += 4 * width()) {
      const Patch patch = lay_out_patch<T>(order, gemm, {0, 1, squares[s].row, 2, squares[s].col, 2}, segment);
      const S* const source = static_cast<const S*>(gemm.source) + squares[s].image * gemm.source_n +
                              piece.group * gemm.source_g() + segment.channel * gemm.source_c;
      pack_patch(patch, source_of(gemm, source), false, operand);
      fill_positions(patch, 1, 2, 2, positions);
      fill_taps(patch, segment.channels, 3, 3, positions + 4);
      gemm_panel<false, T>(4, vectors, operands);
    }
  }

  void store(const Square& square, const T* sums) const {
    const ResultPiece at{piece.group, 1, {square.image, 1, square.row, 1, square.col, 1}};
    S* const first = at.first_pixel<S>(gemm, m);
    for (int64_t pixel = 0; pixel < 4; ++pixel, sums += width()) {
      if (!square.has(pixel)) continue;
      S* const to = first + pixel / 2 * gemm.destination_row + pixel % 2 * gemm.destination_col;
      for (int64_t l = 0; l < lanes; ++l) {
        if (square.again[l]) to[l * gemm.destination_m] = Narrow<S>::from(sums[l] + bias[l]);
      }
    }
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
