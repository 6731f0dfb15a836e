// 1x1 convolutions from many planes to few, where reading the source takes the time (plan/candidates.cpp).
//
// Panels of pixels (drivers/pixels.h) read a few lines of every plane, then the next few. In planes of a power of two
// of bytes these lines fall into one set of each cache, in far planes into a page each: prefetched lines are evicted
// before they are used. So here a work item, a run of pixels, takes up to eight planes at a time. Its unfinished chains
// and their sums lie in scratch, at most 256 KiB, which L2 holds. Nothing of the source is copied.
//
// The sums are those of the GEMM drivers, chain for chain and bit for bit: storing an unfinished chain rounds nothing.
#pragma once

#include "../kernels/planes.h"
#include "../kernels/vector_shape.h"
#include "../pack/store.h"
#include "parts.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class S, class T>
struct FewPlanesCall {
  const ConvGemm& gemm;
  const int num_threads;
  const KBlocking k = block_k(gemm, vector_shape<T>().limits);
  const FewPlanesTiling tiling = tile_few_planes(gemm, vector_shape<T>(), sizeof(S), num_threads);

  int64_t items() const { return tiling.items(gemm); }

  void work(int64_t item) const {
    with_constant<1, 2, 3, 4>(gemm.m, [&](auto m) { sum<decltype(m)::value>(item); });
  }

  template <int MR>
  void sum(int64_t item) const {
    const int64_t run = item % tiling.runs, image = item / tiling.runs % gemm.batch;
    const int64_t group = item / tiling.runs / gemm.batch, x0 = run * tiling.run;
    const S* const source = static_cast<const S*>(gemm.source) + image * gemm.source_n + group * gemm.source_g() + x0;
    const S* const weight = static_cast<const S*>(gemm.weight) + group * gemm.weight_g;
    S* const result =
        static_cast<S*>(gemm.destination) + image * gemm.destination_n + group * gemm.m * gemm.destination_m + x0;

    const VectorShape shape = vector_shape<T>();
    T weights[kMostPlanesAtOnce * MR], zeros[MR] = {}, bias[MR];
    load_bias<S>(gemm, group, 0, MR, bias);
    const bool bias_first = gemm.starts_from_bias();

    PlaneOperands<S, T> o{};
    o.pixels = min64(tiling.run, gemm.cols - x0);
    o.plane_pitch = gemm.source_c;
    o.weights = weights;
    o.start = bias_first ? bias : zeros;
    o.row_pitch = padded_run(tiling, shape);
    const int64_t sums = MR * o.row_pitch;
    o.chains = static_cast<T*>(thread_scratch(scratch_bytes(gemm, tiling, shape)));
    o.sums = o.chains + sums;
    const ChunkSums<T> chunks{o.sums, o.sums + sums, o.sums + 2 * sums, k.has_chunks()};
    // After the last planes come the first ones of the next run.
    const int64_t next_run = max64(0, min64(o.pixels, gemm.cols - x0 - tiling.run));

    for (int64_t c0 = 0; c0 < gemm.channels; c0 += k.segment_channels) {
      const bool begins = chunks.begin(k.segment_at(c0, 0, 0), sums);
      const int64_t segment_end = min64(c0 + k.segment_channels, gemm.channels);
      for (int64_t chain = c0; chain < segment_end; chain += k.chain) {
        const int64_t chain_end = min64(chain + k.chain, segment_end);
        o.adds = !begins || chain > c0;
        for (int64_t c = chain, planes = 0; c < chain_end; c += planes) {
          planes = planes_at_once(chain_end - c);
          for (int64_t s = 0; s < planes; ++s) {
            for (int r = 0; r < MR; ++r) {
              weights[s * MR + r] = widen_scalar(weight[r * gemm.weight_m + (c + s) * gemm.weight_c]);
            }
          }
          o.planes = source + c * gemm.source_c;
          o.first = c == chain;
          o.chain_ends = c + planes == chain_end;
          // As many planes again, some of these among them where fewer are left.
          const int64_t next = min64(planes, gemm.channels - planes - c);
          o.next = next > 0 ? next * gemm.source_c : tiling.run - c * gemm.source_c;
          o.next_pixels = next > 0 ? o.pixels : next_run;
          with_constant<kMostPlanesAtOnce, kFewerPlanesAtOnce, 1>(
              planes, [&](auto at_once) { plane_ukernel<S, T, MR, decltype(at_once)::value>(o); });
        }
      }
    }
    chunks.finish(sums);
    const T* const added = bias_first ? zeros : bias;
    for (int r = 0; r < MR; ++r) {
      store_row(o.sums + r * o.row_pitch, Vec<T>::broadcast(added + r), o.pixels, result + r * gemm.destination_m);
    }
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
