// The micro-kernel family gemm_ukernel_<dtype>_<MR>x<NR>__<isa>, from one template.
//
//   C[j][0:NR]  =  (C[j][0:NR] if accumulate) + (start[0:NR] + sum over k of A[k][0:NR] * B[j_offset[j] + k_offset[k]])
//
// for 0 <= j < MR.
//
// A: `depth` rows of NR elements, `a_pitch` apart: packed weights (forward, grad_input) or grad_output's pixels
//    (grad_weight), packed or as they lie. NR = vectors * lanes of the instruction set.
// B: a source patch, or the source itself. The two offset tables are im2col itself: j_offset places an output pixel (a
//    weight element in grad_weight), k_offset a tap of a channel (an output pixel). The column matrix exists only as
//    these sums.
// C: rows of NR elements, `c_pitch` apart, in scratch or (channels_last) in the result.
//
// start: NR elements, zeros or (where K is a single chain) a bias. bias: NR elements, added to C after the last chain,
// or nullptr where a store adds them, or further segments follow.
//
// Order of summation: k is cut into chains of `chain` products; for each element a chain is summed by fused
// multiply-adds, ascending, from `start`; chains are added to C in order. That is the whole order inside a segment, the
// same for every MR, NR and instruction set with fused operations. The additions to C cost little because the next
// chain's multiply-adds don't wait for them.
//
// With kListed the k are those of a list, ascending, of which each chain may lack some, and rows of C lie at offsets of
// their own.
//
// With kLanesAreGroups the vector's lanes are not NR result channels of one group but the same channel of as many
// groups (depthwise and grouped problems): B then holds a vector for each element, and is loaded instead of broadcast.
//
// Registers: MR * vectors accumulators, `vectors` weights, one broadcast. AVX2 float 6x16: 12 + 2 + 1 of 16; AVX-512
// float 6x64: 24 + 4 + 1 of 32. Bound: each k issues MR * vectors FMAs (2 a cycle) against vectors + MR loads (2 a
// cycle) and one offset load, so the FMA units are the limit from MR * vectors >= 8 (latency 4 x 2 units) on.
#pragma once

#include "../isa/convert.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

constexpr int kMR = 6;

// Rows of a micro-kernel. A panel of one vector takes more of them, to have more than eight accumulators, up to where
// their pointers fill the general registers. The dot products of pairs have a latency of 6 cycles (Zen 5), not 4: two
// units want 12 chains.
template <class T, int NV>
constexpr int kRows = NV == 1 && Vec<T>::kMaxVectors > 1 ? 9
                      : !kTakesPairs<T> || NV >= 4       ? kMR
                      : NV == 3                          ? 8
                                                         : 9;

// Whether a micro-kernel's loop takes four steps of k a round. Rounds spare instructions beside the multiply-adds, and
// branch prediction sees the end of a chain of few rounds coming: most where the core's other hardware thread is busy.
template <class T>
constexpr bool kInRounds = kLoopsInRounds && (std::is_same_v<T, float> || std::is_same_v<T, double>);

// acc += a * b, fused. In rounds by a fixed instruction: else GCC lets accumulators wander from step to step, and
// spills.
template <class T, bool kRounds = kInRounds<T>>
CONV2D_INLINE void multiply_add(typename Vec<T>::reg& acc, typename Vec<T>::reg a, typename Vec<T>::reg b) {
  if constexpr (kRounds) {
    Vec<T>::multiply_into(acc, a, b);
  } else {
    acc = Vec<T>::fma(a, b, acc);
  }
}

// Ends a step of a round: no load of one step moves into another, where it would not find a register, and `pointer`
// stays one that advances.
template <class T, bool kRounds = kInRounds<T>, class P>
CONV2D_INLINE void end_step(const P*& pointer) {
  if constexpr (kRounds) __asm__ volatile("" : "+r"(pointer) : : "memory");
}

template <int ROWS, int NR, class T>
CONV2D_INLINE void prefetch_rows(const T* row, int64_t pitch) {
#pragma GCC unroll 16
  for (int j = 0; j < ROWS; ++j, row += pitch) {
#pragma GCC unroll 4
    for (int i = 0; i < NR; i += 64 / int(sizeof(T))) __builtin_prefetch(row + i, 1);
  }
}

// Whether Vec<T> has halves.
template <class T>
constexpr bool kHasHalves = kHasMasks && std::is_same_v<T, float>;

// Whether the last vector of so many lanes is no more than half full.
template <class T>
CONV2D_INLINE bool ends_in_half(int64_t lanes) {
  constexpr int L = Vec<T>::kLanes;
  return kHasHalves<T> && (lanes - 1) % L < L / 2;
}

template <class T>
struct GemmOperands {
  int64_t depth, chain;
  const Operand<T>* a;
  int64_t a_pitch;  // NR, but for a single vector of groups
  const Operand<T>* b;
  const int64_t* j_offset;
  const int64_t* k_offset;
  const T* start;
  T* c;
  int64_t c_pitch;
  bool accumulate;
  const T* bias = nullptr;  // NR elements that are added after the last chain
  bool half = false;        // the upper half of a panel's last vector is empty: nothing is stored there
  // Of listed steps, instead of `depth` and `chain`: k_offset holds two numbers for each, where B lies and, in units of
  // `vectors` elements, A; chain number i ends before step chain_ends[i]; row j of C lies c_offset[j] * c_pitch
  // further.
  int64_t chains = 0;
  const int64_t* chain_ends = nullptr;
  const int64_t* c_offset = nullptr;
  // Of kernels that round finished sums (R is not T), which add a bias: where the first `lanes` of each row go. C is
  // then scratch.
  BFloat16* result = nullptr;
  int64_t result_pitch = 0, lanes = 0;
};

#if defined(CONV2D_NARROWS_BFLOAT16)
// A row of sums after another, rounded by an instruction that flushes denormal numbers.
template <int NV>
class RoundedRows {
 public:
  CONV2D_INLINE RoundedRows(BFloat16* to, int64_t lanes)
      : to_(to), stored_(mask_of_first(lanes - kBefore)), nonzero_(stored_) {}
  CONV2D_INLINE void next(int64_t pitch) { to_ += pitch; }
  CONV2D_INLINE void store(const __m512 (&sum)[NV]) {
#pragma GCC unroll 2
    for (int v = 0; v < kBefore / L; v += 2) whole_ = narrow_flushed(to_ + v * L, sum[v], sum[v + 1], kAll, whole_);
    if constexpr (NV % 2 == 0) {
      nonzero_ = narrow_flushed(to_ + kBefore, sum[NV - 2], sum[NV - 1], stored_, nonzero_);
    } else {
      nonzero_ = narrow_flushed(to_ + kBefore, sum[NV - 1], __mmask16(stored_), __mmask16(nonzero_));
    }
  }
  // Otherwise some results may have been denormal numbers.
  CONV2D_INLINE bool all_nonzero() const { return whole_ == kAll && nonzero_ == stored_; }

 private:
  static constexpr int L = Vec<float>::kLanes;
  static constexpr int kBefore = (NV - 1) / 2 * 2 * L;  // lanes before the last vector or two
  static constexpr __mmask32 kAll = ~__mmask32{0};
  BFloat16* to_;
  __mmask32 stored_, nonzero_, whole_ = kAll;
};

// So many rows of C, denormal numbers as well.
inline __attribute__((noinline)) void round_exactly(const GemmOperands<float>& operands, int rows) {
  constexpr int L = Vec<float>::kLanes;
  for (int j = 0; j < rows; ++j) {
    const float* const c = operands.c + j * operands.c_pitch;
    BFloat16* const to = operands.result + j * operands.result_pitch;
    for (int64_t m = 0; m < operands.lanes; m += L) {
      narrow_partial(to + m, Vec<float>::load(c + m), int(min64(operands.lanes - m, L)));
    }
  }
}
#endif

// The vector that ends a panel.
template <class T, bool kHalf>
struct LastVector {
  using type = Vec<T>;
};
template <class T>
struct LastVector<T, true> {
  using type = typename Vec<T>::Half;
};

// kHalf: of the last vector the lower half alone is computed. R: what finished sums are stored as.
template <class T, int MR, int NV, bool kLanesAreGroups, bool kHalf, bool kListed = false, class R = T>
void gemm_ukernel(const GemmOperands<T>& operands) {
  using V = Vec<T>;
  using reg = typename V::reg;
  using H = typename LastVector<T, kHalf>::type;
  constexpr int kWhole = NV - (kHalf ? 1 : 0), kLast = kWhole * V::kLanes;
  const Operand<T>* bj[MR];
#pragma GCC unroll 16
  for (int j = 0; j < MR; ++j) {
    bj[j] = operands.b + operands.j_offset[j];
    // Kept as a pointer: folded back into b + j_offset[j], each broadcast would cost an address computation more.
    __asm__("" : "+r"(bj[j]));
  }
  const Operand<T>* a = operands.a;
  const int64_t* k_offset = operands.k_offset;
  const int64_t* const k_end = k_offset + operands.depth;
  bool accumulate = operands.accumulate;
  // Rows of the panel that follow one another are addressed by constants.
  constexpr bool kDensePanel = !(kLanesAreGroups && NV == 1);
  constexpr bool kRowsInTurn = kDensePanel && !kListed;
  const int64_t a_pitch = kDensePanel ? NV * V::kLanes : operands.a_pitch;

  // The rows of C behind these, which are mostly the next micro-kernel's: from farther away than L1 they hold up the
  // end of each chain. (With AVX-512, on Zen 5, asking gained nothing.)
  if constexpr (kInRounds<T> && !kListed) {
    prefetch_rows<MR, NV * V::kLanes>(operands.c + MR * operands.c_pitch, operands.c_pitch);
  }

  constexpr int kNumbers = kListed ? 2 : 1;           // of a step
  constexpr bool kRounds = kInRounds<T> && !kListed;  // in those of a list accumulators would wander, too
  for (int64_t chain = 0; kListed ? chain < operands.chains : k_offset != k_end; ++chain) {
    const int64_t* const chain_end = kListed ? operands.k_offset + kNumbers * operands.chain_ends[chain]
                                     : k_end - k_offset > operands.chain ? k_offset + operands.chain
                                                                         : k_end;
    reg acc[MR][kWhole > 0 ? kWhole : 1];
    [[maybe_unused]] typename H::reg last[MR];
#pragma GCC unroll 16
    for (int j = 0; j < MR; ++j) {
#pragma GCC unroll 4
      for (int v = 0; v < kWhole; ++v) acc[j][v] = V::load(operands.start + v * V::kLanes);
      if constexpr (kHalf) last[j] = H::load(operands.start + kLast);
    }

    const auto step = [&](int at) CONV2D_INLINE_LAMBDA {
      const int64_t offset = k_offset[kNumbers * at];
      const Operand<T>* const row = a + (kListed ? NV * k_offset[kNumbers * at + 1] : kDensePanel ? at * a_pitch : 0);
      reg av[kWhole > 0 ? kWhole : 1];
      [[maybe_unused]] typename H::reg av_last;
#pragma GCC unroll 4
      for (int v = 0; v < kWhole; ++v) av[v] = V::load(row + v * V::kLanes);
      if constexpr (kHalf) av_last = H::load(row + kLast);
#pragma GCC unroll 16
      for (int j = 0; j < MR; ++j) {
        if constexpr (kWhole == 0) {
          last[j] = H::fma(av_last, H::broadcast(bj[j] + offset), last[j]);
        } else {
          const reg bv = kLanesAreGroups ? V::load(bj[j] + offset) : V::broadcast(bj[j] + offset);
#pragma GCC unroll 4
          for (int v = 0; v < kWhole; ++v) multiply_add<T, kRounds>(acc[j][v], av[v], bv);
          if constexpr (kHalf) last[j] = H::fma(av_last, H::of(bv), last[j]);
        }
      }
      if (!kDensePanel) a += a_pitch;
      end_step<T, kRounds>(a);
    };
    if constexpr (kRounds) {
      for (const int64_t* const end = k_offset + ((chain_end - k_offset) & ~int64_t{3}); k_offset != end;) {
        step(0);
        step(1);
        step(2);
        step(3);
        k_offset += 4;
        if (kRowsInTurn) a += 4 * a_pitch;
      }
    }
    while (k_offset != chain_end) {
      step(0);
      k_offset += kNumbers;
      if (kRowsInTurn) a += a_pitch;
    }

    const bool is_last = kListed ? chain + 1 == operands.chains : k_offset == k_end;
    const T* const bias = is_last ? operands.bias : nullptr;
    // A loop for each case: within one, each row would branch, and the next chain's multiply-adds wait behind them.
    const auto finish = [&](auto accumulates, auto has_bias) CONV2D_INLINE_LAMBDA {
      T* next = operands.c;
#pragma GCC unroll 16
      for (int j = 0; j < MR; ++j, next += operands.c_pitch) {
        T* const c = kListed ? operands.c + operands.c_offset[j] * operands.c_pitch : next;
        if constexpr (accumulates) {
#pragma GCC unroll 4
          for (int v = 0; v < kWhole; ++v) acc[j][v] = V::add(V::load(c + v * V::kLanes), acc[j][v]);
          if constexpr (kHalf) last[j] = H::add(H::load(c + kLast), last[j]);
        }
        if constexpr (has_bias) {
#pragma GCC unroll 4
          for (int v = 0; v < kWhole; ++v) acc[j][v] = V::add(acc[j][v], V::load(bias + v * V::kLanes));
          if constexpr (kHalf) last[j] = H::add(last[j], H::load(bias + kLast));
        }
#pragma GCC unroll 4
        for (int v = 0; v < kWhole; ++v) V::store(c + v * V::kLanes, acc[j][v]);
        if constexpr (kHalf) H::store(c + kLast, last[j]);
      }
    };
#if defined(CONV2D_NARROWS_BFLOAT16)
    [[maybe_unused]] const auto round = [&](auto accumulates) CONV2D_INLINE_LAMBDA {
      RoundedRows<NV> rows(operands.result, operands.lanes);
      const T* c = operands.c;
#pragma GCC unroll 16
      for (int j = 0; j < MR; ++j, c += operands.c_pitch, rows.next(operands.result_pitch)) {
        reg sum[NV];
#pragma GCC unroll 4
        for (int v = 0; v < kWhole; ++v) {
          if constexpr (accumulates) acc[j][v] = V::add(V::load(c + v * V::kLanes), acc[j][v]);
          sum[v] = acc[j][v] = V::add(acc[j][v], V::load(operands.bias + v * V::kLanes));
        }
        if constexpr (kHalf) {
          if constexpr (accumulates) last[j] = H::add(H::load(c + kLast), last[j]);
          last[j] = H::add(last[j], H::load(operands.bias + kLast));
          sum[kWhole] = H::widened(last[j]);
        }
        rows.store(sum);
      }
      if (__builtin_expect(rows.all_nonzero(), 1)) return;
      T* at = operands.c;
#pragma GCC unroll 16
      for (int j = 0; j < MR; ++j, at += operands.c_pitch) {
#pragma GCC unroll 4
        for (int v = 0; v < kWhole; ++v) V::store(at + v * V::kLanes, acc[j][v]);
        if constexpr (kHalf) H::store(at + kLast, last[j]);
      }
      round_exactly(operands, MR);
    };
    if constexpr (!std::is_same_v<R, T>) {
      if (is_last) return accumulate ? round(std::true_type()) : round(std::false_type());
    }
#else
    static_assert(std::is_same_v<R, T>);
#endif
    constexpr std::true_type yes;
    constexpr std::false_type no;
    if (accumulate) {
      bias != nullptr ? finish(yes, yes) : finish(yes, no);
    } else {
      bias != nullptr ? finish(no, yes) : finish(no, no);
    }
    accumulate = true;
  }
}

template <class T>
using GemmUkernel = void (*)(const GemmOperands<T>&);

// The micro-kernels of one panel width, by rows - 1.
template <class T, int NV, bool G, bool kHalf, bool kListed, class R, class Rows>
struct UkernelRow;
template <class T, int NV, bool G, bool kHalf, bool kListed, class R, int... kRow>
struct UkernelRow<T, NV, G, kHalf, kListed, R, std::integer_sequence<int, kRow...>> {
  static constexpr GemmUkernel<T> by_rows[] = {gemm_ukernel<T, kRow + 1, NV, G, kHalf, kListed, R>...};
};
template <class T>
struct Ukernels {
  const GemmUkernel<T>* by_rows;
  int rows;
};
template <class T, int NV, bool G, bool kListed, class R>
CONV2D_INLINE Ukernels<T> ukernels_of([[maybe_unused]] bool half) {
  constexpr int rows = kRows<T, NV>;
  using Rows = std::make_integer_sequence<int, rows>;
  if constexpr (kHasHalves<T> && !G && !kListed) {
    if (half) return {UkernelRow<T, NV, G, true, false, R, Rows>::by_rows, rows};
  }
  return {UkernelRow<T, NV, G, false, kListed, R, Rows>::by_rows, rows};
}
template <class T, bool G, bool kListed = false, class R = T>
CONV2D_INLINE Ukernels<T> ukernels_for(int64_t vectors, bool half = false) {
  return with_number<Vec<T>::kMaxVectors>(
      vectors, [&](auto nv) CONV2D_INLINE_LAMBDA { return ukernels_of<T, decltype(nv)::value, G, kListed, R>(half); });
}

// Rows of the packed panel that all rows of C use before the next ones, as whole chains: so many stay in L1 beside what
// is read of the patch (8 KiB of float32 on AVX2, 32 KiB on AVX-512). C is added to at the end of every chain, so that
// more passes over it cost no more additions.
constexpr int64_t kPassDepth = 128;
CONV2D_INLINE int64_t pass_depth(int64_t chain) { return max64(1, kPassDepth / max64(1, chain)) * max64(1, chain); }

// The pass that begins with row k of the panel. While it lives, the operands are its own; at its end they are put back.
// (They are not copied: stores of single fields don't forward to a load of several, which waits until they are in L1,
// behind all results stored before.)
template <class T>
class GemmPass {
 public:
  CONV2D_INLINE GemmPass(GemmOperands<T>& operands, int64_t k)
      : operands_(operands), k_(k), depth_(operands.depth), bias_(operands.bias), accumulate_(operands.accumulate) {
    operands.depth = min64(pass_depth(operands.chain), depth_ - k);
    operands.a += k * operands.a_pitch;
    operands.k_offset += k;
    operands.accumulate = accumulate_ || k > 0;
    if (!ends()) operands.bias = nullptr;
  }
  GemmPass(const GemmPass&) = delete;
  GemmPass& operator=(const GemmPass&) = delete;
  CONV2D_INLINE ~GemmPass() {
    operands_.depth = depth_;
    operands_.a -= k_ * operands_.a_pitch;
    operands_.k_offset -= k_;
    operands_.accumulate = accumulate_;
    operands_.bias = bias_;
  }
  // With the last row of the panel.
  bool ends() const { return k_ + operands_.depth == depth_; }

 private:
  GemmOperands<T>& operands_;
  const int64_t k_, depth_;
  const T* const bias_;
  const bool accumulate_;
};

// C (rows x NR) for any number of rows, in near-equal blocks of as many as the micro-kernel takes: a rest of one or two
// rows would leave the FMA units waiting for its few chains. Before each block of so many rows, of each pass,
// before(rows) is called. R: what finished sums are stored as. The operands are left as they were.
template <bool G, class T, class R = T, class Before>
CONV2D_INLINE void gemm_panel(int64_t rows, int64_t vectors, GemmOperands<T>& operands, const Before& before) {
  for (int64_t k = 0; k < operands.depth; k += pass_depth(operands.chain)) {
    const GemmPass<T> pass(operands, k);
    const Ukernels<T> ukernels =
        pass.ends() ? ukernels_for<T, G, false, R>(vectors, operands.half) : ukernels_for<T, G>(vectors, operands.half);
    const Panels blocks = cut_panels(rows, ukernels.rows);
    for (int64_t block = 0; block < blocks.count; ++block) {
      const int64_t block_rows = blocks.size(block);
      before(block_rows);
      ukernels.by_rows[block_rows - 1](operands);
      operands.j_offset += block_rows;
      operands.c += block_rows * operands.c_pitch;
      operands.result += block_rows * operands.result_pitch;
    }
    operands.j_offset -= rows;
    operands.c -= rows * operands.c_pitch;
    operands.result -= rows * operands.result_pitch;
  }
}
template <bool G, class T, class R = T>
CONV2D_INLINE void gemm_panel(int64_t rows, int64_t vectors, GemmOperands<T>& operands) {
  gemm_panel<G, T, R>(rows, vectors, operands, [](int64_t) {});
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
