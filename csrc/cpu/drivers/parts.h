// What the drivers have in common: how they run, the walk over K, im2col's offset tables, a thread's scratch, the bias.
#pragma once

#include "../base/executor.h"
#include "../base/limits.h"
#include "../base/scratch.h"
#include "../pack/patch.h"
#include "../pack/store.h"
#include "../pack/weights.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// A driver's work items, which the threads share.
template <class Driver>
struct Items {
  static void run(void* call, int64_t item) { static_cast<const Driver*>(call)->work(item); }
};
template <class Driver>
void run_all(Driver&& call, const Executor& executor) {
  run_items(executor, call.items(), &call, &Items<std::remove_reference_t<Driver>>::run);
}

// A part of a thread's scratch, at an offset that lay_out_scratch gave.
template <class P>
CONV2D_INLINE P* part(char* scratch, int64_t offset) {
  return reinterpret_cast<P*>(scratch + offset);
}
template <class T>
ChunkSums<T> chunk_sums(char* scratch, const SumsLayout& at) {
  return {part<T>(scratch, at.sums), part<T>(scratch, at.total), part<T>(scratch, at.lost), at.several};
}

// A piece of K: whole channels, or (of a kernel that has too many taps for one segment) a rectangle of a channel's.
struct KBlock {
  int64_t channel, channels, tap_row, tap_rows, tap_col, tap_cols;
  int64_t taps() const { return tap_rows * tap_cols; }
  int64_t weight_offset(const ConvGemm& gemm) const {
    return channel * gemm.weight_c + tap_row * gemm.weight_i + tap_col * gemm.weight_j;
  }
  // Its weights, of so many lanes that are `step` apart from `data` on.
  template <class S>
  WeightSegment<S> weights(const ConvGemm& gemm, const S* data, int64_t step, int64_t lanes) const {
    return {data + weight_offset(gemm), step, lanes, channels, tap_rows, tap_cols};
  }
  // The part from channel s of the block on, of at most so many channels.
  KBlock part(int64_t s, int64_t most) const {
    return {channel + s, min64(most, channels - s), tap_row, tap_rows, tap_col, tap_cols};
  }
  bool ends(const ConvGemm& gemm) const {
    return channel + channels == gemm.channels && tap_row + tap_rows == gemm.taps_h &&
           tap_col + tap_cols == gemm.taps_w;
  }
};

// visit(block), in the order of summation.
template <class Visit>
CONV2D_INLINE void for_each_block(const ConvGemm& gemm, const KBlocking& k, int64_t channels, const Visit& visit) {
  for (int64_t c = 0; c < gemm.channels; c += channels) {
    for (int64_t i = 0; i < gemm.taps_h; i += k.tap_rows) {
      for (int64_t j = 0; j < gemm.taps_w; j += k.tap_cols) {
        visit(KBlock{c, min64(channels, gemm.channels - c), i, min64(k.tap_rows, gemm.taps_h - i), j,
                     min64(k.tap_cols, gemm.taps_w - j)});
      }
    }
  }
}

template <class T>
bool is_negative_zero(T x) {
  return x == 0 && __builtin_signbit(x);
}

// Whether n elements are finite: only then their products with zero are.
template <class S, class T>
bool are_finite(const S* from, int64_t n) {
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  typename V::reg zeros = V::zero(), others[3] = {zeros, zeros, zeros};  // several, which don't wait for one another
  int64_t i = 0;
  for (; i + 4 * L <= n; i += 4 * L) {
    zeros = V::fma(load_as(from + i), V::zero(), zeros);
    for (int64_t x = 0; x < 3; ++x) others[x] = V::fma(load_as(from + i + (x + 1) * L), V::zero(), others[x]);
  }
  for (; i + L <= n; i += L) zeros = V::fma(load_as(from + i), V::zero(), zeros);
  if (i < n) zeros = V::fma(load_as_partial(from + i, int(n - i)), V::zero(), zeros);
  for (const auto& other : others) zeros = V::add(zeros, other);
  T lanes[L];
  V::store(lanes, zeros);
  T sum = 0;
  for (const T lane : lanes) sum += lane;
  return sum == 0;
}

// The two tables of im2col; each returns where it ends. Steps that are taken often are copied first: as far as a
// compiler knows, writing a table might change the patch, which it would then read again for every entry.
CONV2D_INLINE int64_t* fill_positions(const Patch& patch, int64_t images, int64_t rows, int64_t cols, int64_t* offset) {
  const int64_t step = cols > 1 ? patch.cols.position_pitch * patch.col_pitch : 0;
  for (int64_t n = 0; n < images; ++n) {
    for (int64_t p = 0; p < rows; ++p) {
      const int64_t first = patch.position_offset(n, p, 0);
      for (int64_t q = 0; q < cols; ++q) *offset++ = first + q * step;
    }
  }
  return offset;
}
CONV2D_INLINE int64_t* fill_taps(const Patch& patch, int64_t channels, int64_t rows, int64_t cols, int64_t* offset) {
  const int64_t taps = rows * cols, pitch = channels > 1 ? patch.channel_pitch : 0;
  for (int64_t t = 0, i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) offset[t++] = patch.tap_offset(0, i, j);
  }
  for (int64_t at = taps; at < channels * taps; ++at) offset[at] = offset[at - taps] + pitch;
  return offset + channels * taps;
}

// The patch that a tile and a block of a GEMM meet.
template <class T>
Patch lay_out_patch(PatchOrder order, const ConvGemm& gemm, const Tile& tile, const KBlock& block) {
  return lay_out_patch(order, make_patch_axis(gemm.axis_h, tile.row, tile.rows, block.tap_row, block.tap_rows),
                       make_patch_axis(gemm.axis_w, tile.col, tile.cols, block.tap_col, block.tap_cols), tile.images,
                       block.channels, Vec<T>::kLanes, sizeof(T));
}

// The source of a GEMM whose image 0, group 0, channel 0 of a patch is at `data`.
template <class S>
CONV2D_INLINE Source<S> source_of(const ConvGemm& gemm, const S* data) {
  Source<S> source{data, gemm.source_n, gemm.source_c, gemm.source_row, gemm.source_col, gemm.source_h, gemm.source_w};
  source.group = gemm.source_g();
  source.of_group = gemm.single_channels();
  return source;
}

// The bias of result channel m and the next ones of a group, zeros where the GEMM has none.
template <class S, class T>
CONV2D_INLINE void load_bias(const ConvGemm& gemm, int64_t group, int64_t m, int64_t count, T* bias) {
  if (gemm.bias == nullptr) return fill_zero(bias, count);
  copy_run(static_cast<const S*>(gemm.bias) + (group * gemm.m + m) * gemm.bias_stride, gemm.bias_stride, count, bias,
           false);
}

// The bias of products from lane number `lane` on, in whole vectors up to `pitch`. nullptr where there is none.
template <class S, class T>
CONV2D_INLINE const T* load_bias(const RowProducts& products, int64_t lane, int64_t lanes, int64_t pitch, T* bias) {
  if (products.bias == nullptr) return nullptr;
  fill_zero(bias, pitch);
  const S* const from = static_cast<const S*>(products.bias) + lane * products.bias_step;
  copy_run(from, products.bias_step, lanes, bias, false);
  return bias;
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
