// What a thread's next item, or segment, reads, asked for while this one multiplies.
#pragma once

#include "../isa/vec.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// Where a source of few channels side by side does not fit the caches, copying an item's patch waits for memory: its
// rows are short runs that jump, of which hardware prefetchers see little. So each few pixels of an item ask for some
// lines of the next one's rows: all of them at once would fill the core's miss buffers, and wait like the copy.
class LinesAhead {
 public:
  // None.
  LinesAhead() = default;

  // What the pixels of `next` meet, while `pixels` others are computed. Of one image, and of taps side by side: between
  // others lies what nobody reads.
  template <class S>
  static LinesAhead of(const ConvGemm& gemm, const Tile& next, int64_t pixels) {
    if (next.images != 1 || !lie_together(gemm.axis_h, gemm.taps_h) || !lie_together(gemm.axis_w, gemm.taps_w)) {
      return {};
    }
    const Interval rows = met(gemm.axis_h, next.row, next.rows, gemm.taps_h, gemm.source_h);
    const Interval cols = met(gemm.axis_w, next.col, next.cols, gemm.taps_w, gemm.source_w);
    if (rows.count() <= 0 || cols.count() <= 0) return {};
    const S* const first = static_cast<const S*>(gemm.source) + next.image * gemm.source_n +
                           rows.begin * gemm.source_row + cols.begin * gemm.source_col;
    return of(first, rows.count(), cols.count() * gemm.source_col, gemm.source_row, pixels);
  }

  // So many elements of each of some rows, while `pixels` are computed.
  template <class S>
  static LinesAhead of(const S* first, int64_t rows, int64_t elements, int64_t row_step, int64_t pixels) {
    LinesAhead ahead;
    ahead.row_ = reinterpret_cast<uintptr_t>(first);
    ahead.row_step_ = row_step * int64_t(sizeof(S));
    ahead.row_bytes_ = elements * int64_t(sizeof(S));
    ahead.left_ = ahead.lines_ = rows * div_up(ahead.row_bytes_, kLine);
    ahead.pixels_ = pixels;
    return ahead;
  }

  bool any() const { return left_ > 0; }

  // Asks L2 for the share of `pixels` that are about to be computed.
  CONV2D_INLINE void ask(int64_t pixels) {
    int64_t count = min64(div_up(lines_ * pixels, pixels_), left_);
    left_ -= count;
    for (; count > 0; --count) {
      __builtin_prefetch(reinterpret_cast<const char*>(row_ + at_), 0, 2);  // NOLINT(performance-no-int-to-ptr)
      at_ += kLine;
      if (at_ >= row_bytes_) {
        at_ = 0;
        row_ += row_step_;
      }
    }
  }

 private:
  static constexpr int64_t kLine = 64;

  // Taps; a single one's step may be any.
  static bool lie_together(const GatherAxis& axis, int64_t taps) {
    return taps == 1 || axis.tap == 1 || axis.tap == -1;
  }
  // The coordinates of a source that positions meet, from the first to the last one.
  static Interval met(const GatherAxis& axis, int64_t position, int64_t positions, int64_t taps, int64_t size) {
    const int64_t last = axis.tap > 0 ? taps - 1 : 0;
    return {max64(axis.source(position, taps - 1 - last), 0),
            min64(axis.source(position + positions - 1, last) + 1, size)};
  }

  uintptr_t row_ = 0;  // where a row begins: behind the last one there may be no memory to point at
  int64_t row_step_ = 0, row_bytes_ = 0;
  int64_t at_ = 0;  // the next line's first byte
  int64_t lines_ = 0, left_ = 0;
  int64_t pixels_ = 1;
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
