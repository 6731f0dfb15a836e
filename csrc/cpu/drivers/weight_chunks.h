// What the drivers of grad_weight share: a work item owns a tile of the weight and walks over all pixels, segment by
// segment (PixelBlocking). Each chain of pixels is added to the sum of its chunk. Chunk sums are added in order,
// whether one item forms them one after the other or several items at once (`slots`).
#pragma once

#include "../kernels/vector_shape.h"
#include "../pack/store.h"
#include "parts.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// What such a driver computes.
struct WeightCall {
  const Call& call;
  const WeightLanes lanes;
  const VectorShape vector;
  const int num_threads;
  const Conv2dProblem& problem = call.problem;
  const ConstTensorView grad_output = call.a, input = call.b;
  const TensorView grad_weight = call.result;
  const PixelBlocking pixels = block_pixels(problem, vector.limits);
  const WeightTiling tiling = tile_grad_weight(call, pixels, vector, lanes, num_threads);
  const WeightScratch layout = lay_out_scratch(tiling, pixels, vector);

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
    return {data, input.stride[0], input.stride[1], input.stride[2], input.stride[3], problem.in_h, problem.in_w};
  }

  // All elements of so many channels and a rectangle of taps, in the lanes of one panel or vector. Rows that continue
  // one another in the result are stored as one run.
  template <class S, class T>
  void store_elements(int64_t channels, int64_t tap_rows, int64_t tap_cols, TileSums<T> sums, TileTarget<S> to) const {
    const int64_t* const gw = grad_weight.stride;
    const bool join_i = gw[2] == gw[3] * tap_cols || tap_rows == 1;
    const bool join_c = join_i && (gw[1] == gw[3] * tap_rows * tap_cols || channels == 1);
    sums.pixels = tap_cols * (join_i ? tap_rows : 1) * (join_c ? channels : 1);
    to.x_step = gw[3];
    S* const first = to.data;
    for (int64_t c = 0; c < (join_c ? 1 : channels); ++c) {
      for (int64_t i = 0; i < (join_i ? 1 : tap_rows); ++i, sums.data += sums.pixels * sums.pitch) {
        to.data = first + c * gw[1] + i * gw[2];
        store_tile(sums, to, Between::kOthers);
      }
    }
  }
};

// Runs a WeightCall that has tile_of(item), sum_chunk(tile, chunk, memory, c_tile), used_size(tile) and
// store(tile, c_tile).
template <class T, class Driver>
struct WeightChunks {
  const Driver& driver;
  T* partials = nullptr;  // [slot][item][tile], when tiling.slots > 1
  T* totals = nullptr;    // [item][tile], and what they lost behind them
  int64_t first_chunk = 0, chunks_in_flight = 0;

  int64_t chunks() const { return driver.pixels.chunks(); }
  int64_t items() const { return driver.tiling.items(); }
  int64_t tile_size() const { return driver.tiling.tile_size(Vec<T>::kLanes); }
  char* scratch() const { return static_cast<char*>(thread_scratch(driver.layout.bytes)); }

  // All chunks one after the other.
  void sum_item(int64_t item) const {
    const auto t = driver.tile_of(item);
    char* const memory = scratch();
    const ChunkSums<T> tile = chunk_sums<T>(memory, driver.layout.tile);
    if (chunks() == 0) fill_zero(tile.sums, driver.used_size(t));
    for (int64_t chunk = 0; chunk < chunks(); ++chunk) {
      driver.sum_chunk(t, chunk, memory, tile.sums);
      if (tile.several) add_chunk(tile.total, tile.lost, tile.sums, driver.used_size(t), chunk == 0);
    }
    if (tile.several) finish_chunks(tile.sums, tile.total, tile.lost, driver.used_size(t));
    driver.store(t, tile.sums);
  }

  // One chunk of one tile, into its slot; then, item by item, the slots in order.
  void sum_slot(int64_t index) const {
    driver.sum_chunk(driver.tile_of(index % items()), first_chunk + index / items(), scratch(),
                     partials + index * tile_size());
  }
  void add_slots(int64_t item) const {
    const auto t = driver.tile_of(item);
    T* const total = totals + item * tile_size();
    T* const lost = total + items() * tile_size();
    for (int64_t slot = 0; slot < chunks_in_flight; ++slot) {
      const T* const partial = partials + (slot * items() + item) * tile_size();
      add_chunk(total, lost, partial, driver.used_size(t), first_chunk + slot == 0);
    }
    if (first_chunk + chunks_in_flight == chunks()) {
      finish_chunks(total, total, lost, driver.used_size(t));
      driver.store(t, total);
    }
  }

  template <void (WeightChunks::*kWork)(int64_t) const>
  static void work(void* run, int64_t item) {
    (static_cast<const WeightChunks*>(run)->*kWork)(item);
  }

  void run(const Executor& executor) {
    const int64_t slots = driver.tiling.slots;
    if (slots == 1) return run_items(executor, items(), this, &work<&WeightChunks::sum_item>);
    const ScratchMemory workspace = allocate_scratch(partial_bytes(driver.tiling, vector_shape<T>()));
    partials = static_cast<T*>(workspace.get());
    totals = partials + slots * items() * tile_size();
    for (first_chunk = 0; first_chunk < chunks(); first_chunk += chunks_in_flight) {
      chunks_in_flight = min64(slots, chunks() - first_chunk);
      run_items(executor, chunks_in_flight * items(), this, &work<&WeightChunks::sum_slot>);
      run_items(executor, items(), this, &work<&WeightChunks::add_slots>);
    }
  }
};

template <class T, class Driver>
void run_chunks(const Driver& driver, const Executor& executor) {
  WeightChunks<T, Driver>{driver}.run(executor);
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
