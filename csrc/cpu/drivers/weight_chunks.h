// What the drivers of grad_weight share: a work item owns a tile of the weight and walks over all pixels, segment by
// segment (PixelBlocking). Each chain of pixels is added to the sum of its chunk. Chunk sums are added in order,
// whether one item forms them one after the other or several items at once (`slots`).
#pragma once

#include "../kernels/vector_shape.h"
#include "../pack/store.h"
#include "parts.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// `Derived` has tile_of(item), sum_chunk(tile, chunk, memory, c_tile), used_size(tile) and store(tile, c_tile).
template <class Derived, class T>
struct WeightChunks {
  static constexpr int L = Vec<T>::kLanes;
  const Conv2dProblem& problem;
  ConstTensorView grad_output, input;
  TensorView grad_weight;
  PixelBlocking pixels;
  WeightTiling tiling;
  WeightScratch layout;
  T* partials = nullptr;  // [slot][item][tile], when tiling.slots > 1
  T* totals = nullptr;    // [item][tile], and what they lost behind them
  int64_t first_chunk = 0, chunks_in_flight = 0;

  int64_t tile_size() const { return tiling.tile_size(L); }
  int64_t items() const { return tiling.items(); }

  // The segments of a chunk, and the pixels of a segment.
  Interval segments_of(int64_t chunk) const {
    const int64_t first = chunk * kPixelSegmentsPerChunk;
    return {first, min64(first + kPixelSegmentsPerChunk, pixels.segments())};
  }
  Tile segment_at(int64_t number) const {
    const int64_t n = number / (pixels.blocks_h * pixels.blocks_w) * pixels.images;
    const int64_t p = number / pixels.blocks_w % pixels.blocks_h * pixels.rows;
    const int64_t q = number % pixels.blocks_w * pixels.cols;
    return {n, min64(pixels.images, problem.batch - n), p, min64(pixels.rows, problem.out_h - p),
            q, min64(pixels.cols, problem.out_w - q)};
  }

  // The input as a packer reads it, from its first image and channel there on.
  template <class S>
  Source<S> source_from(const S* data) const {
    Source<S> source{};
    source.data = data;
    source.image = input.stride[0];
    source.channel = input.stride[1];
    source.row = input.stride[2];
    source.col = input.stride[3];
    source.height = problem.in_h;
    source.width = problem.in_w;
    return source;
  }

  // All chunks one after the other.
  static void whole_item(void* context, int64_t item) {
    const Derived& call = *static_cast<const Derived*>(context);
    const auto t = call.tile_of(item);
    char* const memory = static_cast<char*>(thread_scratch(call.layout.bytes));
    T* const total = reinterpret_cast<T*>(memory + call.layout.total);
    T* const tile = reinterpret_cast<T*>(memory + call.layout.tile);
    T* const lost = reinterpret_cast<T*>(memory + call.layout.lost);
    const int64_t chunks = call.pixels.chunks();
    if (chunks == 0) fill_zero(tile, call.used_size(t));
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      call.sum_chunk(t, chunk, memory, tile);
      if (chunks > 1) add_chunk(total, lost, tile, call.used_size(t), chunk == 0);
    }
    if (chunks > 1) finish_chunks(tile, total, lost, call.used_size(t));
    call.store(t, tile);
  }

  // One chunk of one tile, into its slot; then, item by item, the slots in order.
  static void chunk_item(void* context, int64_t index) {
    const Derived& call = *static_cast<const Derived*>(context);
    call.sum_chunk(call.tile_of(index % call.items()), call.first_chunk + index / call.items(),
                   static_cast<char*>(thread_scratch(call.layout.bytes)), call.partials + index * call.tile_size());
  }
  static void reduce_item(void* context, int64_t item) {
    const Derived& call = *static_cast<const Derived*>(context);
    const auto t = call.tile_of(item);
    T* const total = call.totals + item * call.tile_size();
    T* const lost = total + call.items() * call.tile_size();
    for (int64_t slot = 0; slot < call.chunks_in_flight; ++slot) {
      const T* const partial = call.partials + (slot * call.items() + item) * call.tile_size();
      add_chunk(total, lost, partial, call.used_size(t), call.first_chunk + slot == 0);
    }
    if (call.first_chunk + call.chunks_in_flight == call.pixels.chunks()) {
      finish_chunks(total, total, lost, call.used_size(t));
      call.store(t, total);
    }
  }

  void run(const Executor& executor) {
    auto* const call = static_cast<Derived*>(this);
    if (tiling.slots == 1) {
      run_items(executor, items(), call, &whole_item);
      return;
    }
    const CallWorkspace workspace(partial_bytes(tiling, vector_shape<T>()));
    partials = static_cast<T*>(workspace.data());
    totals = partials + tiling.slots * items() * tile_size();
    for (first_chunk = 0; first_chunk < pixels.chunks(); first_chunk += chunks_in_flight) {
      chunks_in_flight = min64(tiling.slots, pixels.chunks() - first_chunk);
      run_items(executor, chunks_in_flight * items(), call, &chunk_item);
      run_items(executor, items(), call, &reduce_item);
    }
  }

 private:
  friend Derived;
  WeightChunks(const Call& call, WeightLanes lanes, int num_threads)
      : problem(call.problem),
        grad_output(call.a),
        input(call.b),
        grad_weight(call.result),
        pixels(block_pixels(problem.batch, problem.out_h, problem.out_w, vector_shape<T>().limits)),
        tiling(tile_grad_weight(call, pixels, vector_shape<T>(), lanes, num_threads)),
        layout(lay_out_scratch(tiling, pixels, vector_shape<T>())) {}
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
