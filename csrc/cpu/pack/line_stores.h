// The epilogue of a micro-kernel of AMX tiles as something that the next one does between its tiles, a few pixels at a
// time; where a pixel's result channels lie side by side (pack/store.h has all other epilogues).
//
// The next multiplication of tiles, or store of one, can begin 16 cycles after the one before, and until then the
// processor sees few instructions behind it. An epilogue that follows them therefore takes its whole time, which for a
// short sum is that of its multiplications: 40 ns for 32 x 32 sums, beside 50 for a sum of one step. Between the tiles
// half of it is free.
#pragma once

#include "store.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// Neighbouring pixels of a run of sums: the first one's number there, and where it is stored in the piece.
struct PixelRun {
  int64_t sum, pixels, offset;
};

// Those of up to kMostStoredBetween sums, cut after every `cut` of them.
class PixelRuns {
 public:
  void find(const ConvGemm& gemm, const Tile& tile, const SumPitches& pitches, int64_t first, int64_t sums,
            int64_t cut) {
    count_ = 0;
    for (int64_t x = first, end = first + sums; x < end; x += cut) {
      for_each_run(gemm, tile, pitches, x, min64(cut, end - x), [&](int64_t sum, int64_t pixels, int64_t offset) {
        run_[count_++] = {sum - first, pixels, offset};
      });
    }
  }
  const PixelRun* begin() const { return run_; }
  const PixelRun* end() const { return run_ + count_; }

 private:
  PixelRun run_[kMostStoredBetween];
  int64_t count_ = 0;
};

// Finished sums of C vectors of result channels that wait to be stored. What it points to is read until then.
template <int C>
struct PendingLines {
  static constexpr int64_t kPitch = C * Vec<float>::kLanes;
  const float* sums;           // from the first one, kPitch apart
  int64_t first;               // its number
  const PixelRun *runs, *end;  // what is stored of them
  const float* bias;           // of the channels, or nullptr
  BFloat16* destination;       // of the piece's first pixel
  int64_t x_step, channels;

  const float* sums_of(const PixelRun& run) const { return sums + (run.sum - first) * kPitch; }
};

// Lines with a zero, which may have been a denormal number, or lacks the sign that adding a bias of zero gives it.
template <int C>
__attribute__((noinline)) void store_exactly(const PendingLines<C>& pending) {
  for (const PixelRun* run = pending.runs; run < pending.end; ++run) {
    const TileSums<float> sums{pending.sums_of(*run), pending.kPitch, run->pixels, pending.channels, pending.bias};
    const TileTarget<BFloat16> to{pending.destination + run->offset, pending.x_step, 1};
#if defined(CONV2D_NARROWS_BFLOAT16)
    if (narrow_with_zeros(sums, to)) continue;
#endif
    store_pixels(sums, to);
  }
}

// Loaded by itself, into a register: together with its neighbours in memory it would wait for their stores, which are
// behind all sums that were stored.
template <class N>
CONV2D_INLINE N load_alone(N number) {
  __asm__("" : "+r"(number));
  return number;
}

// Stores pending lines (what a micro-kernel interleaves).
template <int C>
class LineStores {
 public:
  using Pending = PendingLines<C>;
  static constexpr bool kAccumulates = false;  // sums that are stored have not waited in memory

  CONV2D_INLINE explicit LineStores(const Pending& pending)
      : pending_(pending),
        next_(load_alone(pending.runs)),
        end_(load_alone(pending.end)),
        bias_(load_alone(pending.bias)),
        x_step_(load_alone(pending.x_step)),
        stored_(mask_of_first(load_alone(pending.channels))),
        nonzero_(stored_) {
    next_run();
  }

  // Stores a few pixels, if there are any left.
  CONV2D_INLINE void advance() {
    if (left_ == 0) return;
    constexpr int64_t kPixels = 4;
    const int64_t count = left_ < kPixels ? left_ : kPixels;
    bias_ != nullptr ? store<true>(count) : store<false>(count);
    left_ -= count;
    if (left_ == 0) next_run();
  }
  // Stores all that are left.
  CONV2D_INLINE void finish() {
    while (left_ > 0) advance();
    if (__builtin_expect(nonzero_ != stored_, 0)) store_exactly(pending_);
  }

 private:
  using V = Vec<float>;

  CONV2D_INLINE void next_run() {
    if (next_ >= end_) return;
    left_ = next_->pixels;
    src_ = pending_.sums_of(*next_);
    dst_ = pending_.destination + next_->offset;
    ++next_;
  }

  template <bool kAdds>
  CONV2D_INLINE void store(int64_t count) {
    const auto sum = [&](int v) CONV2D_INLINE_LAMBDA {
      const V::reg s = V::load(src_ + v * V::kLanes);
      return kAdds ? V::add(s, V::load(bias_ + v * V::kLanes)) : s;
    };
#pragma GCC unroll 1
    for (int64_t x = 0; x < count; ++x, src_ += Pending::kPitch, dst_ += x_step_) {
      if constexpr (C == 2) {
        nonzero_ = narrow_flushed(dst_, sum(0), sum(1), stored_, nonzero_);
      } else {
        nonzero_ = narrow_flushed(dst_, sum(0), __mmask16(stored_), __mmask16(nonzero_));
      }
    }
  }

  const Pending& pending_;
  const PixelRun *next_, *const end_;
  const float* const bias_;
  const int64_t x_step_;
  // The channels' lanes; those of which no result was zero: such a one may have been a denormal number, or have another
  // sign.
  const __mmask32 stored_;
  __mmask32 nonzero_;
  // Of the run that is being stored.
  int64_t left_ = 0;
  const float* src_ = nullptr;
  BFloat16* dst_ = nullptr;
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
