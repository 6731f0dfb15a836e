// 1x1 convolutions from many planes to few, where reading the source takes the time (is_few_planes, few_planes.h).
//
// Panels of pixels (pixel_driver.h) read a few lines of every plane and then go on to the next few. Planes of a power
// of two of bytes have those lines in one set of each cache, and far planes in a page each: what is asked for ahead is
// gone before it is used. So a work item, a run of pixels, goes plane by plane, a few at a time, and keeps its chains
// of multiply-adds and their sums in scratch, at most a quarter of L2. Nothing of the source is copied.
//
// The sums are the GEMM drivers', chain for chain and bit for bit: a chain that is put aside and taken up again has
// lost nothing.
#pragma once

namespace conv2d_ext::cpu::CONV2D_ISA {

// plane_ukernel_<dtype>_<MR>x<NK>__<isa>
//
//   chain[r][x]  =  (first ? start[r] : chain[r][x]) + sum over s < NK of weights[s][r] * planes[s * plane_pitch + x]
//
// for 0 <= r < MR, 0 <= x < pixels, by fused multiply-adds, ascending. At a chain's end it is added to sums[r][x], or
// becomes it where nothing was summed before.
//
// The same pixels of the planes `next` elements further are asked for meanwhile, next_pixels of them.
//
// Registers: MR * NU accumulators, NU vectors of a plane; weights are broadcast from L1. Bound: the way of the planes
// from L3 or memory, beside which a vector that a compiler puts aside is no matter (tests/test_machine_code.py leaves
// this family out).
template <class S, class T>
struct PlaneOperands {
  int64_t pixels;
  const S* planes;
  int64_t plane_pitch, next, next_pixels;
  const T* weights;  // [NK][MR]
  const T* start;
  T* chains;
  T* sums;
  int64_t row_pitch;
  bool first, chain_ends, adds;
};

template <class S, class T, int MR, int NK>
void plane_ukernel(const PlaneOperands<S, T>& o) {
  using V = Vec<T>;
  using reg = typename V::reg;
  constexpr int L = V::kLanes, kLineVectors = int(64 / sizeof(S)) / L;
  // A cache line of the plane, as far as accumulators have registers.
  constexpr int NU = kLineVectors < 1 ? 1 : kLineVectors > 8 / MR ? 8 / MR : kLineVectors;

  // NU vectors, or (kPartial) one of `lanes` pixels.
  const auto sum_pixels = [&](int64_t x, auto vectors, auto partial, int lanes) CONV2D_INLINE_LAMBDA {
    constexpr int N = decltype(vectors)::value;
    constexpr bool kPartial = decltype(partial)::value;
    reg acc[MR][N];
#pragma GCC unroll 4
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
      for (int u = 0; u < N; ++u) {
        acc[r][u] = o.first ? V::broadcast(o.start + r) : V::load(o.chains + r * o.row_pitch + x + u * L);
      }
    }
#pragma GCC unroll 8
    for (int s = 0; s < NK; ++s) {
      const S* const plane = o.planes + s * o.plane_pitch + x;
      reg v[N];
#pragma GCC unroll 8
      for (int u = 0; u < N; ++u) v[u] = kPartial ? load_as_partial(plane, lanes) : load_as(plane + u * L);
#pragma GCC unroll 4
      for (int r = 0; r < MR; ++r) {
        const reg w = V::broadcast(o.weights + s * MR + r);
#pragma GCC unroll 8
        for (int u = 0; u < N; ++u) acc[r][u] = V::fma(w, v[u], acc[r][u]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
      for (int u = 0; u < N; ++u) {
        const int64_t at = r * o.row_pitch + x + u * L;
        if (!o.chain_ends) {
          V::store(o.chains + at, acc[r][u]);
          continue;
        }
        V::store(o.sums + at, o.adds ? V::add(V::load(o.sums + at), acc[r][u]) : acc[r][u]);
      }
    }
  };

  int64_t x = 0;
  for (; x + NU * L <= o.pixels; x += NU * L) {
    if (x < o.next_pixels) {
#pragma GCC unroll 8
      for (int s = 0; s < NK; ++s) __builtin_prefetch(o.planes + s * o.plane_pitch + o.next + x);
    }
    sum_pixels(x, std::integral_constant<int, NU>{}, std::false_type{}, L);
  }
  for (; x + L <= o.pixels; x += L) sum_pixels(x, std::integral_constant<int, 1>{}, std::false_type{}, L);
  if (x < o.pixels) sum_pixels(x, std::integral_constant<int, 1>{}, std::true_type{}, int(o.pixels - x));
}

template <class S, class T>
struct FewPlanesCall {
  const ConvGemm& gemm;
  const KBlocking k;
  const FewPlanesTiling tiling;

  FewPlanesCall(const ConvGemm& g, int num_threads)
      : gemm(g),
        k(block_k(g, vector_shape<T>().limits)),
        tiling(tile_few_planes(g, vector_shape<T>(), sizeof(S), num_threads)) {}

  int64_t items() const { return tiling.items(gemm); }

  static void run(void* context, int64_t item) { static_cast<const FewPlanesCall*>(context)->work(item); }

  void work(int64_t item) const {
    switch (gemm.m) {
      case 1:
        return sum<1>(item);
      case 2:
        return sum<2>(item);
      case 3:
        return sum<3>(item);
      default:
        return sum<4>(item);
    }
  }

  template <int MR>
  void sum(int64_t item) const {
    const int64_t run = item % tiling.runs, image = item / tiling.runs % gemm.batch;
    const int64_t group = item / tiling.runs / gemm.batch, x0 = run * tiling.run;
    const S* const source = static_cast<const S*>(gemm.source) + image * gemm.source_n + group * gemm.source_g() + x0;
    const S* const weight = static_cast<const S*>(gemm.weight) + group * gemm.weight_g;

    const VectorShape shape = vector_shape<T>();
    T weights[kMostPlanesAtOnce * MR], zeros[MR] = {}, bias[MR] = {};
    if (gemm.bias != nullptr) {
      const S* const from = static_cast<const S*>(gemm.bias) + group * gemm.m * gemm.bias_stride;
      for (int r = 0; r < MR; ++r) bias[r] = widen_scalar(from[r * gemm.bias_stride]);
    }
    const bool bias_first = gemm.channels <= kBiasFirstProducts;

    PlaneOperands<S, T> o{};
    o.pixels = min64(tiling.run, gemm.cols - x0);
    o.plane_pitch = gemm.source_c;
    o.weights = weights;
    o.start = bias_first ? bias : zeros;
    const T* const added = bias_first ? zeros : bias;
    o.row_pitch = padded_run(tiling, shape);
    o.chains = static_cast<T*>(thread_scratch(scratch_bytes(gemm, tiling, shape)));
    o.sums = o.chains + MR * o.row_pitch;
    T* const totals = o.sums + MR * o.row_pitch;
    T* const lost = totals + MR * o.row_pitch;
    S* const result =
        static_cast<S*>(gemm.destination) + image * gemm.destination_n + group * gemm.m * gemm.destination_m + x0;
    // After the last planes come the first ones of the next run.
    const int64_t next_run = max64(0, min64(o.pixels, gemm.cols - x0 - tiling.run));

    for (int64_t c0 = 0; c0 < gemm.channels; c0 += k.segment_channels) {
      const int64_t segment = min64(c0 + k.segment_channels, gemm.channels);
      for (int64_t chain = c0; chain < segment; chain += k.chain) {
        const int64_t chain_end = min64(chain + k.chain, segment);
        const int64_t number = k.segment_at(c0, 0, 0);
        const bool begins_chunk = chain == c0 && number % kSegmentsPerChunk == 0;
        if (begins_chunk && number > 0) {
          add_chunk(totals, lost, o.sums, MR * o.row_pitch, number == kSegmentsPerChunk);
        }
        o.adds = !begins_chunk;
        for (int64_t c = chain; c < chain_end;) {
          const int64_t planes = planes_at_once(chain_end - c);
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
          switch (planes) {
            case kMostPlanesAtOnce:
              plane_ukernel<S, T, MR, kMostPlanesAtOnce>(o);
              break;
            case kFewerPlanesAtOnce:
              plane_ukernel<S, T, MR, kFewerPlanesAtOnce>(o);
              break;
            default:
              plane_ukernel<S, T, MR, 1>(o);
              break;
          }
          c += planes;
        }
      }
    }
    if (k.has_chunks()) {
      add_chunk(totals, lost, o.sums, MR * o.row_pitch, false);
      finish_chunks(o.sums, totals, lost, MR * o.row_pitch);
    }
    for (int r = 0; r < MR; ++r) {
      store_row(o.sums + r * o.row_pitch, Vec<T>::broadcast(added + r), o.pixels, result + r * gemm.destination_m);
    }
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
