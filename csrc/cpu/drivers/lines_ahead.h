// What a thread's next item, segment or row of pixels reads or writes, asked for while this one multiplies.
#pragma once

#include "../isa/vec.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// The coordinates that positions meet, from the first to the last one.
inline Interval met(const GatheredAxis& a, int64_t position, int64_t positions) {
  const int64_t last = a.axis.tap > 0 ? a.taps - 1 : 0;
  return {max64(a.axis.source(position, a.taps - 1 - last), 0),
          min64(a.axis.source(position + positions - 1, last) + 1, a.size)};
}

// A source whose channels lie side by side: its first pixel's first channel, so many channels, steps between pixels.
template <class S>
struct SourceOfTile {
  const S* data;
  int64_t channels, row_step, col_step;
};

// Caches, as __builtin_prefetch numbers them.
enum class Cache { kL2 = 2, kL1 = 3 };

// Where a source of channels side by side does not fit the caches, copying an item's patch waits for memory: its rows
// or pixels are short runs that jump, of which hardware prefetchers see little. So each few pixels of an item (rows of
// C of a segment) ask for some lines of what the next one reads: all of them at once would fill the core's miss
// buffers, and wait like the copy.
class LinesAhead {
 public:
  // None.
  LinesAhead() = default;

  // What a tile of one image meets of a source, while so many shares of other work are done. Of taps side by side:
  // between others lies what nobody reads. Of a part of the channels of several rows only where these are met whole
  // and continue one another.
  template <class S>
  static LinesAhead of(const SourceOfTile<S>& source, const GatheredAxis& h, const GatheredAxis& w, const Tile& next,
                       int64_t shares) {
    if (next.images != 1 || !lie_together(h) || !lie_together(w)) return {};
    return of_rectangle(source, met(h, next.row, next.rows), met(w, next.col, next.cols), w.size, shares);
  }

  // So many channels of some rows and columns of a source of so many columns.
  template <class S>
  static LinesAhead of_rectangle(const SourceOfTile<S>& source, const Interval& rows, const Interval& cols,
                                 int64_t source_cols, int64_t shares) {
    if (rows.count() <= 0 || cols.count() <= 0) return {};
    const S* const first = source.data + rows.begin * source.row_step + cols.begin * source.col_step;
    if (source.channels == source.col_step) {
      return of_rows(first, rows.count(), cols.count() * source.col_step, source.row_step, shares);
    }
    const bool together = cols.count() == source_cols && source.row_step == source_cols * source.col_step;
    if (rows.count() > 1 && !together) return {};
    return of_pixels(first, rows.count() * cols.count(), source.channels, source.col_step, shares);
  }

  // So many channels of each of some pixels.
  template <class S>
  static LinesAhead of_pixels(const S* first, int64_t pixels, int64_t channels, int64_t step, int64_t shares) {
    return channels == step ? of_rows(first, 1, pixels * channels, 0, shares)
                            : of_rows(first, pixels, channels, step, shares);
  }

  bool any() const { return left_ > 0; }

  // Asks a cache for what belongs to so many shares, which are about to be done.
  template <Cache CACHE = Cache::kL2>
  CONV2D_INLINE void ask(int64_t shares) {
    if (!any()) return;  // sooner than by the division
    int64_t count = min64(div_up(lines_ * shares, shares_), left_);
    left_ -= count;
    for (; count > 0; --count) {
      const auto* const line = reinterpret_cast<const char*>(row_ + at_);  // NOLINT(performance-no-int-to-ptr)
      __builtin_prefetch(line, 0, int(CACHE));
      at_ += kLine;
      if (at_ >= row_bytes_) {
        at_ = 0;
        row_ += row_step_;
      }
    }
  }

 private:
  static constexpr int64_t kLine = 64;

  // So many elements of each of some rows.
  template <class S>
  static LinesAhead of_rows(const S* first, int64_t rows, int64_t elements, int64_t row_step, int64_t shares) {
    LinesAhead ahead;
    ahead.row_ = reinterpret_cast<uintptr_t>(first);
    ahead.row_step_ = row_step * int64_t(sizeof(S));
    ahead.row_bytes_ = elements * int64_t(sizeof(S));
    ahead.left_ = ahead.lines_ = rows * div_up(ahead.row_bytes_, kLine);
    ahead.shares_ = shares;
    return ahead;
  }

  // Taps; a single one's step may be any.
  static bool lie_together(const GatheredAxis& a) { return a.taps == 1 || a.axis.tap == 1 || a.axis.tap == -1; }

  uintptr_t row_ = 0;  // where a row begins: behind the last one there may be no memory to point at
  int64_t row_step_ = 0, row_bytes_ = 0;
  int64_t at_ = 0;  // the next line's first byte
  int64_t lines_ = 0, left_ = 0;
  int64_t shares_ = 1;
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
