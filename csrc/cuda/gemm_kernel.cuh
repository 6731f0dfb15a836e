// The implicit GEMM: one kernel for forward, grad_input and grad_weight, for every dtype and layout.
//
// A CTA owns a tile of kTileM x kTileX results. It walks along K in steps of kTileK: while a tile of A and B in shared
// memory is multiplied (gemm_policies.cuh), the loads of the tiles that follow are in flight (gemm_loader.cuh), in a
// ring of stages. Where elements lie is read from two tables in shared memory, one entry per x, made once, and one per
// k (or group of channels), made for one chain while the loads read the next one's (gemm_geometry.cuh).
//
// Sums are cut into chains of a fixed number of steps, each from zero. A finished chain is added to the tile's sums in
// shared memory, in order. A CTA whose sum is a single chain never touches them before the end, and its tile of sums
// reuses the ring's memory. So the bits are the same whether one CTA takes all segments of K, or each has its own and
// reduce_partials adds them.
#pragma once

#include <type_traits>

#include "gemm_loader.cuh"

namespace conv2d_ext::cuda {

template <class Policy, int GROUP, int WARPS_M, int WARPS_X, int STAGES>
struct GemmTiling {
  using Element = typename Policy::Element;
  using Sum = typename Policy::Sum;
  static constexpr int kTileM = Policy::kWarpM * WARPS_M;
  static constexpr int kTileX = Policy::kWarpX * WARPS_X;
  static constexpr int kTileK = Policy::kTileK;
  static constexpr int kThreads = WARPS_M * WARPS_X * 32;

  // Elements of a stage's halves, and their rows.
  static constexpr int kRowA = Policy::kTransposed ? kTileM + Policy::kRowPadding : kTileK;
  static constexpr int kRowB = Policy::kTransposed ? kTileX + Policy::kRowPadding : kTileK;
  static constexpr int kStageA = Policy::kTransposed ? kRowA * kTileK : kTileM * kTileK;
  static constexpr int kStageB = Policy::kTransposed ? kRowB * kTileK : kTileX * kTileK;
  static constexpr int kResultRow = kTileX + Policy::kResultPadding;

  // Shared memory, in bytes.
  static constexpr int kChainEntries = Policy::chain_k(GROUP) / GROUP;
  static constexpr int kOffsetsAt = 0;
  static constexpr int kPositionsAt = kOffsetsAt + 2 * kChainEntries * static_cast<int>(sizeof(KOffsets));
  static constexpr int kIm2colAt = kPositionsAt + 2 * kChainEntries * static_cast<int>(sizeof(KPosition));
  static constexpr int kDenseAt = kIm2colAt + kTileX * static_cast<int>(sizeof(XEntry));
  static constexpr int kStagesAt = kDenseAt + kTileM * 8;
  static constexpr int kStageBytes = (kStageA + kStageB) * static_cast<int>(sizeof(Element));
  static constexpr int kResultBytes = kTileM * kResultRow * static_cast<int>(sizeof(Sum));
  static_assert(kStagesAt % 16 == 0 && kStageBytes % 16 == 0);
};

// Writes a CTA's tile from shared memory: to the result, or a segment's sums to the workspace. Neighbouring lanes take
// neighbouring x, or m where memory runs along it.
template <class Tiling, bool PARTIAL, class Geometry>
__device__ __forceinline__ void store_elements(const Geometry& geometry, const int64_t* addresses,
                                               const typename Tiling::Sum* tile, unsigned thread) {
  using Sum = typename Tiling::Sum;
  using Element = std::conditional_t<PARTIAL, Sum, typename Tiling::Element>;
  const char* const bias = PARTIAL ? nullptr : geometry.bias();
  const int64_t step = PARTIAL ? geometry.partial_step() : geometry.result_step();
  const int32_t m_left = geometry.m_count() - geometry.tile.m0;
  // Over m: 8 neighbouring results of 4 pixels, so that a sector is written whole.
  const bool over_m = !PARTIAL && geometry.p.tile.result_over_m;
#pragma unroll 2
  for (int i = 0; i < Tiling::kTileM * Tiling::kTileX / Tiling::kThreads; ++i) {
    const unsigned unit = thread + i * Tiling::kThreads;
    const int32_t m = over_m ? unit % 8 + unit / (8 * Tiling::kTileX) * 8 : unit / Tiling::kTileX;
    const unsigned x = over_m ? unit / 8 % Tiling::kTileX : unit % Tiling::kTileX;
    const int64_t address = load_shared(addresses + x);
    if (m >= m_left || address == 0) continue;
    auto value = load_shared(tile + m * Tiling::kResultRow + x);
    // Every sum ends with an addition, of the bias or of +0: one that has underflowed to -0 becomes +0.
    if (!PARTIAL) value = add(value, bias != nullptr ? geometry.template bias_at<Element>(m) : zero_of<Sum>());
    store_result(reinterpret_cast<Element*>(address + (geometry.tile.m0 + m) * step), value);
  }
}

// Results of 16 bits, 8 neighbours at a time, of which memory has all or each half side by side. addresses: of every
// column, or where neighbours are pixels, of every fourth. biases: of the tile's rows, +0 where there are none.
template <class Tiling, class Geometry>
__device__ __forceinline__ void store_vectors(const Geometry& geometry, const int64_t* addresses, const float* biases,
                                              const float* tile, unsigned thread) {
  using Element = typename Tiling::Element;
  constexpr int kCount = Tiling::kTileM * Tiling::kTileX / 8 / Tiling::kThreads;
  const int32_t m_left = geometry.m_count() - geometry.tile.m0;
  const bool whole = geometry.p.tile.result_vector == 8;
  const auto store = [&](int64_t first, int64_t second, const float (&sums)[8]) {
    Vector16<Element> packed;
#pragma unroll
    for (int j = 0; j < 8; ++j) narrow(sums[j], packed.at[j]);
    if (whole) {
      if (first != 0) store_global(reinterpret_cast<Vector16<Element>*>(first), packed);
    } else {
      using Half = HalfOfVector16<Element>;
      if (first != 0)
        store_global(reinterpret_cast<Half*>(first), Half{packed.at[0], packed.at[1], packed.at[2], packed.at[3]});
      if (second != 0)
        store_global(reinterpret_cast<Half*>(second), Half{packed.at[4], packed.at[5], packed.at[6], packed.at[7]});
    }
  };
  if (geometry.p.tile.result_over_m) {
    // A warp takes 16 rows of 16 pixels: whole sectors of 32 bytes.
    const unsigned lane_x = thread % 16;
    const bool upper = thread / 16 % 2 != 0;
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
      const unsigned block = thread / 32 + i * (Tiling::kThreads / 32);
      const unsigned x = block % (Tiling::kTileX / 16) * 16 + lane_x;
      const int32_t m = block / (Tiling::kTileX / 16) * 16 + (upper ? 8 : 0);
      float sums[8];
      // 8 rows apart lies the same bank; so the upper rows are read in another order.
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[j] = load_shared(tile + (m + (upper ? j ^ 2 : j)) * Tiling::kResultRow + x);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if ((j & 2) != 0) continue;
        const float low = upper ? sums[j + 2] : sums[j];
        sums[j + 2] = upper ? sums[j] : sums[j + 2];
        sums[j] = low;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[j] = add(sums[j], load_shared(biases + m + j));
      const int64_t address = load_shared(addresses + x);
      const int64_t first = address + (geometry.tile.m0 + m) * int64_t{sizeof(Element)};
      store(address == 0 || m >= m_left ? 0 : first,
            address == 0 || m + 4 >= m_left ? 0 : first + 4 * int64_t{sizeof(Element)}, sums);
    }
  } else {
    // Neighbouring lanes take neighbouring vectors of a row; every other four read the second half first.
    constexpr unsigned kRowUnits = Tiling::kTileX / 8;
    const bool swaps = thread / 4 % 2 != 0;
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
      const unsigned unit = thread + i * Tiling::kThreads;
      const unsigned x = unit % kRowUnits * 8;
      const int32_t m = unit / kRowUnits;
      const float* const row = tile + m * Tiling::kResultRow + x;
      const auto here = load_shared(reinterpret_cast<const Vector16<float>*>(row + (swaps ? 4 : 0)));
      const auto there = load_shared(reinterpret_cast<const Vector16<float>*>(row + (swaps ? 0 : 4)));
      const float bias = load_shared(biases + m);
      float sums[8];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[j] = add(swaps ? there.at[j] : here.at[j], bias);
        sums[j + 4] = add(swaps ? here.at[j] : there.at[j], bias);
      }
      const int64_t offset = (geometry.tile.m0 + m) * geometry.result_step();
      const auto halves = load_shared(reinterpret_cast<const Vector16<int64_t>*>(addresses + x / 4));
      const bool exists = m < m_left;
      store(exists && halves.at[0] != 0 ? halves.at[0] + offset : 0,
            exists && halves.at[1] != 0 ? halves.at[1] + offset : 0, sums);
    }
  }
}

// addresses, biases: memory for one of each column, of each row.
template <class Tiling, bool PARTIAL, class Geometry>
__device__ __forceinline__ void store_tile(const Geometry& geometry, int64_t* addresses, float* biases,
                                           const typename Tiling::Sum* tile, unsigned thread) {
  using Element = typename Tiling::Element;
  constexpr bool kHasVectors = !PARTIAL && sizeof(Element) == 2 && Geometry::kStoresVectors;
  const bool vectors = kHasVectors && geometry.p.tile.result_vector != 0;
  const unsigned apart = vectors && !geometry.p.tile.result_over_m ? 4 : 1;
  for (unsigned i = thread; i < Tiling::kTileX / apart; i += Tiling::kThreads) {
    const int64_t x = geometry.tile.x0 + i * apart;
    store_shared(addresses + i, PARTIAL ? geometry.partial_address(x) : geometry.result_address(x));
  }
  if constexpr (kHasVectors) {
    const int32_t m_left = geometry.m_count() - geometry.tile.m0;
    for (int32_t m = thread; m < Tiling::kTileM; m += Tiling::kThreads)
      store_shared(biases + m, geometry.bias() != nullptr && m < m_left ? geometry.template bias_at<Element>(m) : 0.0f);
  }
  sync_threads();
  if constexpr (kHasVectors) {
    if (vectors) return store_vectors<Tiling>(geometry, addresses, biases, tile, thread);
  }
  store_elements<Tiling, PARTIAL>(geometry, addresses, tile, thread);
}

// One CTA per tile of results, and per segment of K where there are partials.
template <class Policy, class Geometry, int WARPS_M, int WARPS_X, int STAGES, int MIN_CTAS, Load LOAD_A, Load LOAD_B>
__global__ void __launch_bounds__(WARPS_M* WARPS_X * 32, MIN_CTAS)
    gemm_kernel(const __grid_constant__ typename Geometry::Params params) {
  using Tiling = GemmTiling<Policy, Geometry::kGroup, WARPS_M, WARPS_X, STAGES>;
  using Element = typename Policy::Element;
  using Sum = typename Policy::Sum;
  constexpr int kGroup = Geometry::kGroup;
  constexpr int kEntries = Tiling::kTileK / kGroup;  // of the table of k, in a step
  constexpr int kChainEntries = Tiling::kChainEntries;
  static_assert(STAGES - 1 <= kChainEntries / kEntries / 2,
                "loads run ahead by less than the shortest of several chains");

  const Geometry geometry(params, blockIdx.x, params.tile.segments, Tiling::kTileM, Tiling::kTileX, Tiling::kTileK);
  if (geometry.is_empty()) return;

  char* const shared = dynamic_shared();
  KOffsets* const offsets = reinterpret_cast<KOffsets*>(shared + Tiling::kOffsetsAt);
  KPosition* const positions = reinterpret_cast<KPosition*>(shared + Tiling::kPositionsAt);
  XEntry* const im2col = reinterpret_cast<XEntry*>(shared + Tiling::kIm2colAt);
  int64_t* const dense = reinterpret_cast<int64_t*>(shared + Tiling::kDenseAt);
  Element* const ring = reinterpret_cast<Element*>(shared + Tiling::kStagesAt);

  const unsigned thread = threadIdx.x;
  const int lane = static_cast<int>(thread % 32);
  const int warp = static_cast<int>(thread / 32);
  const int steps = static_cast<int>(geometry.tile.k_end - geometry.tile.k_begin);
  const int chain_steps = static_cast<int>(geometry.chain_tiles);
  const bool one_chain = steps <= chain_steps;
  // Two stages where the third would cost a CTA of the SM's: only loads of 16 bytes have more than two and few enough
  // instructions to count them.
  constexpr bool kCountsStages = LOAD_A != Load::kGather && LOAD_B != Load::kGather && !Policy::kTransposed;
  const int stages = kCountsStages ? params.tile.stages : STAGES;
  Sum* const result =
      reinterpret_cast<Sum*>(shared + Tiling::kStagesAt + (one_chain ? 0 : stages * Tiling::kStageBytes));

  // The entries of k of one chain, in the half of the table that is its turn.
  const auto make_entries = [&](int chain) {
    const unsigned count = chain_steps * kEntries;
    for (unsigned i = thread; i < count; i += Tiling::kThreads) {
      KOffsets offset;
      KPosition position;
      geometry.k_entry(static_cast<int64_t>(geometry.tile.k_begin) * kEntries + static_cast<int64_t>(chain) * count + i,
                       offset, position);
      constexpr bool kGathersSingly = !Policy::kTransposed && kGroup == 1 && LOAD_B == Load::kGather;
      const unsigned place = kGathersSingly ? entry_place<Tiling::kTileK / 8>(i) : i;
      store_shared(offsets + chain % 2 * kChainEntries + place, offset);
      store_shared(positions + chain % 2 * kChainEntries + place, position);
    }
  };
#pragma unroll 1
  for (int chain = 0; chain < (one_chain ? 1 : 2); ++chain) make_entries(chain);
  for (unsigned x = thread; x < Tiling::kTileX; x += Tiling::kThreads)
    store_shared(im2col + x, geometry.im2col_entry(geometry.tile.x0 + x));
  for (unsigned m = thread; m < Tiling::kTileM; m += Tiling::kThreads)
    store_shared(dense + m,
                 geometry.dense_address(geometry.tile.m0 + m, LOAD_A == Load::kRowVector ? 16 / sizeof(Element) : 1));
  sync_threads();

  TileLoader<Policy, Tiling::kTileM, Tiling::kThreads, kGroup, false, LOAD_A> load_a;
  TileLoader<Policy, Tiling::kTileX, Tiling::kThreads, kGroup, true, LOAD_B> load_b;
  const bool a_over_k = params.tile.a_over_k;
  constexpr bool kGathersB = LOAD_B == Load::kGather;
  const bool b_over_k = kGathersB && params.tile.b_over_k;
  int entry = 0;                 // of the table of k, of the next step to load
  int steps_left = chain_steps;  // to load until the table's other half begins
  // Where one operand alone is copied along k, the choice costs more instructions than it saves.
  const bool keeps_l1 = LOAD_A == Load::kVector && LOAD_B == Load::kVector && params.tile.keeps_l1;
  const auto side_a = [&] {
    return Side<false>{{offsets + entry, positions + entry, im2col, dense}, geometry.dense_step(), keeps_l1};
  };
  const auto side_b = [&] {
    return Side<true>{{offsets + entry, positions + entry, im2col, dense},
                      {geometry.source_rows(), geometry.source_cols()},
                      geometry.im2col_step(),
                      keeps_l1};
  };
  load_a.begin(side_a(), thread);
  load_b.begin(side_b(), thread);
  const auto start = [&](int slot) {
    load_a.read(side_a(), thread);
    load_b.read(side_b(), thread);
    Element* const a = ring + slot * (Tiling::kStageA + Tiling::kStageB);
    load_a.start(a, side_a(), a_over_k, thread);
    load_b.start(a + Tiling::kStageA, side_b(), b_over_k, thread);
    entry += kEntries;
    if (--steps_left == 0) {
      entry = entry <= kChainEntries ? kChainEntries : 0;
      steps_left = chain_steps;
    }
  };
  const auto finish = [&](int slot) {
    Element* const a = ring + slot * (Tiling::kStageA + Tiling::kStageB);
    load_a.finish(a, a_over_k, thread);
    load_b.finish(a + Tiling::kStageA, b_over_k, thread);
  };

  const int warp_m = warp / WARPS_X * Policy::kWarpM;
  const int warp_x = warp % WARPS_X * Policy::kWarpX;
  Sum* const result_piece = result + warp_m * Tiling::kResultRow + warp_x;
  typename Policy::Sums sums;
  Policy::clear(sums);

#pragma unroll 1
  for (int step = 0; step < stages - 1; ++step) {
    if (step < steps) {
      start(step);
      finish(step);
    }
    commit_copies();
  }
  int slot = 0;
  int step = 0;
  int chain = 0;
  while (true) {
    // Nothing but loads and multiplications in here; in between no sums are in registers.
    const int chain_end = min_of(step + chain_steps, steps);
    for (; step < chain_end; ++step) {
      if (kCountsStages && stages == 2) {
        wait_copies<0>();
      } else {
        wait_copies<STAGES - 2>();  // this step's tile has landed for this thread ...
      }
      sync_threads();  // ... and for all, and nobody reads the slot before it any more
      const int ahead = step + stages - 1;
      const int ahead_slot = slot == 0 ? stages - 1 : slot - 1;
      const bool loads = ahead < steps;
      if (loads) start(ahead_slot);
      commit_copies();
      const Element* const a = ring + slot * (Tiling::kStageA + Tiling::kStageB);
      const Element* const b = a + Tiling::kStageA;
      if constexpr (Policy::kTransposed) {
        Policy::multiply(sums, a + warp_m, Tiling::kRowA, b + warp_x, Tiling::kRowB, lane, params.tile.conjugate_a,
                         params.tile.conjugate_b);
      } else {
        constexpr int kRowA = LOAD_A == Load::kRowVector ? Tiling::kTileM : 0;
        constexpr int kRowB = LOAD_B == Load::kRowVector ? Tiling::kTileX : 0;
        Policy::template multiply<kRowA, kRowB>(sums, a, warp_m, b, warp_x, lane);
      }
      if (loads) finish(ahead_slot);
      slot = slot + 1 == stages ? 0 : slot + 1;
    }
    // The last chain goes this way too: the code of these stores is as long as the rest of the kernel.
    const bool is_last = step == steps;
    if (is_last) {
      wait_copies<0>();
      sync_threads();  // the ring is free
    }
    if (chain == 0) {
      Policy::template store<false>(sums, result_piece, Tiling::kResultRow, lane);
    } else {
      Policy::template store<true>(sums, result_piece, Tiling::kResultRow, lane);
    }
    if (is_last) break;
    // The loads read entries of the next chain already. All threads have passed a barrier since the last read of this
    // chain's, and will pass one before the first read of those that take their place.
    make_entries(chain + 2);
    ++chain;
    Policy::clear(sums);
  }
  sync_threads();

  // Computed again, so that what it needs takes no registers during the main loop.
  const Geometry again(params, opaque(blockIdx.x), params.tile.segments, Tiling::kTileM, Tiling::kTileX,
                       Tiling::kTileK);
  int64_t* const addresses = reinterpret_cast<int64_t*>(im2col);
  float* const biases = reinterpret_cast<float*>(dense);
  if (params.tile.partials != 0) {
    store_tile<Tiling, true>(again, addresses, biases, result, thread);
  } else {
    store_tile<Tiling, false>(again, addresses, biases, result, thread);
  }
}

// Adds partial sums in the order of their segments, one result a thread. Results are numbered through all rows, groups
// and phases, in the order in which a segment's sums lie, so that no lane is idle where rows are short. 32 bits hold
// the numbers: all sums fit the workspace.
template <class Element, class Geometry>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_partials(const __grid_constant__ typename Geometry::Params params) {
  using Sum = SumOf<Element>;
  using InOrder = std::conditional_t<Geometry::kCompensates, CompensatedSum<Sum>, PlainSum<Sum>>;
  uint32_t number = blockIdx.x * kReduceThreads + threadIdx.x;
  const uint32_t x = take_index(number, params.tile.partial_row / int64_t{sizeof(Sum)});
  const int32_t m = static_cast<int32_t>(take_index(number, params.m));
  if (number >= Geometry::groups_and_phases(params)) return;
  const Geometry geometry(params, number);
  if (x >= geometry.x_count()) return;
  const auto* const first = reinterpret_cast<const Sum*>(geometry.partial_address(x) + m * geometry.partial_step());
  const Sum bias = geometry.bias() != nullptr ? geometry.template bias_at<Element>(m) : zero_of<Sum>();
  const Sum sum = add_in_order<InOrder>(first, geometry.partial_segment() / int64_t{sizeof(Sum)}, geometry.segments());
  store_result(reinterpret_cast<Element*>(geometry.result_address(x) + m * geometry.result_step()), add(sum, bias));
}

}  // namespace conv2d_ext::cuda
