// Where the elements of an implicit GEMM lie: from a CTA's number to its tile, from (m, x, k) to addresses.
//
// An element of the im2col operand has the address entry(x).address + entry(k).offset, and lies in the image if the
// sums of the entries' h and w do: so both are computed once per row and column of a tile, kept in shared memory, and
// what is left for an element is two additions and two comparisons. It holds for grad_weight with x and k exchanged.
#pragma once

#include "device.cuh"
#include "gemm_params.h"
#include "gemm_policies.cuh"

namespace conv2d_ext::cuda {

// Of the im2col operand's column x, or row m of the dense one (which reads no h and w).
struct alignas(16) XEntry {
  int64_t address;
  int32_t h, w;
};

// Of one k, or of a group of channels at one tap: byte offsets in the dense and in the im2col operand.
struct alignas(16) KOffsets {
  int64_t dense, im2col;
};
struct alignas(16) KPosition {
  int32_t h, w;
  int32_t count;  // how many channels of the group there are; 0 beyond the end of K
  int32_t unused;
};

// Fails every test for lying in the image, and can't overflow: the planner takes no image with sides of 2^30.
constexpr int32_t kOutside = -(1 << 30);

struct Tile {
  int64_t x0;
  int32_t m0;
  int32_t k_begin, k_end;  // in tiles of k
};

template <class T>
CONV2D_HOST_DEVICE T min_of(T a, T b) {
  return a < b ? a : b;
}

// The fastest of the indices that an item's number is made of. 32 bits are enough for a launch, which has fewer than
// 2^31 items.
template <class Item>
CONV2D_HOST_DEVICE Item take_index(Item& item, int64_t count) {
  const Item of = static_cast<Item>(count);
  const Item index = item % of;
  item /= of;
  return index;
}

// GROUP: k is counted in groups of so many channels, 8 or 1. BLOCK_GROUPS: groups in a block of channels.
template <int GROUP, int BLOCK_GROUPS>
struct ConvGeometry {
  using Params = ConvParams;
  static constexpr int kGroup = GROUP;
  static constexpr bool kStoresVectors = true;
  static constexpr bool kCompensates = false;  // an unsplit CTA adds the same segments plainly

  // item: number of the tile, times `segments` where each has an item of its own.
  __device__ ConvGeometry(const Params& params, uint32_t item, int64_t segments, int tile_m, int tile_x, int tile_k)
      : p(params) {
    tile.m0 = static_cast<int32_t>(take_index(item, p.tile.m_tiles)) * tile_m;
    tile.x0 = int64_t{take_index(item, p.tile.x_tiles)} * tile_x;
    segment = static_cast<int32_t>(take_index(item, segments));
    take_group_and_phase(item);
    cut(tile_k);
  }
  // Of all that a group and phase have.
  __device__ ConvGeometry(const Params& params, uint32_t group_and_phase) : p(params), segment(0) {
    tile.x0 = tile.m0 = 0;
    take_group_and_phase(group_and_phase);
    cut(p.tile.tile_k);
  }
  // How many of them there are.
  static __device__ uint32_t groups_and_phases(const Params& params) {
    return params.groups * params.row_phases * params.col_phases;
  }

  __device__ const AxisPhase& rows() const { return p.rows[row_phase]; }
  __device__ const AxisPhase& cols() const { return p.cols[col_phase]; }
  __device__ int64_t x_count() const { return p.batch * rows().positions * cols().positions; }
  __device__ int32_t m_count() const { return p.m; }
  __device__ bool is_empty() const { return tile.x0 >= x_count() || segment_is_empty; }
  // Of the tile's sum.
  __device__ int32_t segments() const { return segment_count; }
  __device__ int64_t dense_step() const { return p.weight_c; }
  __device__ int64_t im2col_step() const { return p.source_c; }
  __device__ int32_t source_rows() const { return p.source_rows; }
  __device__ int32_t source_cols() const { return p.source_cols; }

  // Rows past the last repeat it, or, where several are copied together, the last so many; they are never stored.
  __device__ int64_t dense_address(int64_t m, int32_t together) const {
    return p.weight + group * p.weight_group + min_of<int64_t>(m, p.tile.dense_rows - together) * p.weight_m +
           rows().weight_offset + cols().weight_offset;
  }

  __device__ XEntry im2col_entry(int64_t x) const {
    if (x >= x_count()) return {p.source, kOutside, 0};
    const Pixel pixel = pixel_of(x);
    const int64_t h = pixel.h * p.step_h + rows().origin;
    const int64_t w = pixel.w * p.step_w + cols().origin;
    return {p.source + group * p.source_group + pixel.n * p.source_n + h * p.source_h + w * p.source_w,
            static_cast<int32_t>(h), static_cast<int32_t>(w)};
  }

  __device__ void k_entry(int64_t index, KOffsets& offsets, KPosition& position) const {
    // 32 bits are enough: the planner takes no longer sums.
    const uint32_t taps_w = cols().taps;
    const uint32_t taps = rows().taps * taps_w;
    const uint32_t channels = p.channels;
    const uint32_t k = static_cast<uint32_t>(index);
    uint32_t tap, channel, count;
    if (GROUP == 1) {
      tap = k / channels;
      channel = k - tap * channels;
      count = tap < taps;
    } else {
      const uint32_t per_block = taps * BLOCK_GROUPS;
      const uint32_t blocks = channels / (GROUP * BLOCK_GROUPS);
      const uint32_t block = min_of(k / per_block, blocks);
      const uint32_t rest = k - block * per_block;
      channel = block * (GROUP * BLOCK_GROUPS);
      const uint32_t groups = block < blocks ? BLOCK_GROUPS : (channels - channel + GROUP - 1) / GROUP;
      tap = groups == 0 ? taps : rest / groups;
      channel += (rest - tap * groups) * GROUP;
      count = tap < taps ? min_of<uint32_t>(GROUP, channels - channel) : 0;
    }
    const int64_t kh = count == 0 ? 0 : tap / taps_w;
    const int64_t kw = count == 0 ? 0 : tap - kh * taps_w;
    const int64_t first = count == 0 ? 0 : channel;
    position.h = static_cast<int32_t>(kh * p.tap_h);
    position.w = static_cast<int32_t>(kw * p.tap_w);
    position.count = static_cast<int32_t>(count);
    position.unused = 0;
    offsets.dense = p.tile.packed_row != 0 ? index * GROUP * p.tile.packed_row
                                           : first * p.weight_c + kh * p.weight_h + kw * p.weight_w;
    offsets.im2col = first * p.source_c + position.h * p.source_h + position.w * p.source_w;
  }

  // Address of C[0, x], or 0 where there is none. Index: of 64 or 32 bits, in which x is divided.
  template <class Index>
  __device__ int64_t result_address(Index x) const {
    if (x >= x_count()) return 0;
    const Pixel pixel = pixel_of(x);
    return p.tile.result + group * p.result_group + rows().result_offset + cols().result_offset + pixel.n * p.result_n +
           pixel.h * p.result_h + pixel.w * p.result_w;
  }
  __device__ int64_t result_step() const { return p.result_m; }
  __device__ const char* bias() const { return p.bias; }
  template <class Element>
  __device__ auto bias_at(int32_t m) const {
    return load_widened(reinterpret_cast<const Element*>(p.bias + (group * p.m + tile.m0 + m) * p.bias_stride));
  }

  // Partial sums lie as [phase][group][segment][m][x].
  __device__ int64_t partial_address(int64_t x) const {
    if (x >= x_count()) return 0;
    const int64_t phase = int64_t{row_phase} * p.col_phases + col_phase;
    return p.tile.partials + ((phase * p.groups + group) * p.tile.segments + segment) * partial_segment() +
           x * p.tile.sum_bytes;
  }
  __device__ int64_t partial_step() const { return p.tile.partial_row; }
  __device__ int64_t partial_segment() const { return p.m * p.tile.partial_row; }

  const Params& p;
  Tile tile;

 private:
  struct Pixel {
    int64_t n, h, w;
  };
  template <class Index>
  __device__ Pixel pixel_of(Index x) const {
    const Index width = static_cast<Index>(cols().positions);
    const Index image = static_cast<Index>(rows().positions) * width;
    const Index n = x / image;
    const Index rest = x - n * image;
    const Index h = rest / width;
    return {n, h, rest - h * width};
  }
  __device__ void take_group_and_phase(uint32_t item) {
    group = take_index(item, p.groups);
    col_phase = static_cast<int>(take_index(item, p.col_phases));
    row_phase = static_cast<int>(item);
  }
  __device__ void cut(int tile_k) {
    const int32_t k_tiles = static_cast<int32_t>((k_of_phase() + tile_k - 1) / tile_k);
    const Segments cut = cut_into_segments(k_tiles, p.tile.segment_tiles);
    segment_count = cut.count;
    chain_tiles = cut.tiles;
    const bool split = p.tile.partials != 0;
    segment_is_empty = split && segment >= cut.count;
    tile.k_begin = split ? segment * cut.tiles : 0;
    tile.k_end = split ? min_of(tile.k_begin + cut.tiles, k_tiles) : k_tiles;
  }
  __device__ int32_t k_of_phase() const {
    const int32_t taps = rows().taps * cols().taps;
    return GROUP == 1 ? p.channels * taps : (p.channels + GROUP - 1) / GROUP * GROUP * taps;
  }

 public:
  int32_t chain_tiles;

 private:
  int64_t group;
  int32_t segment, segment_count;
  int row_phase, col_phase;
  bool segment_is_empty;
};

struct WeightGeometry {
  using Params = WeightParams;
  static constexpr int kGroup = 1;
  static constexpr bool kStoresVectors = false;  // a gradient's sums mostly pass through the workspace
  static constexpr bool kCompensates = true;     // up to 1024 segments, whose sums may have one sign

  __device__ WeightGeometry(const Params& params, uint32_t item, int64_t segments, int tile_m, int tile_x, int tile_k)
      : p(params) {
    tile.m0 = static_cast<int32_t>(take_index(item, p.tile.m_tiles)) * tile_m;
    tile.x0 = int64_t{take_index(item, p.tile.x_tiles)} * tile_x;
    segment = static_cast<int32_t>(take_index(item, segments));
    group = item;
    const int32_t k_tiles = static_cast<int32_t>((p.batch * p.out_pixels + tile_k - 1) / tile_k);
    // Segments are always in CTAs of their own: the planner makes so many that their sums fit the workspace.
    tile.k_begin = segment * p.tile.segment_tiles;
    tile.k_end = min_of(tile.k_begin + p.tile.segment_tiles, k_tiles);
    chain_tiles = p.tile.chain_tiles;
  }
  // Of all that a group has.
  __device__ WeightGeometry(const Params& params, uint32_t group_of) : p(params), group(group_of), segment(0) {
    tile.x0 = tile.m0 = 0;
  }
  static __device__ uint32_t groups_and_phases(const Params& params) { return params.groups; }

  __device__ int64_t x_count() const { return int64_t{p.channels} * p.taps_h * p.taps_w; }
  __device__ int32_t m_count() const { return p.m; }
  __device__ bool is_empty() const { return false; }
  __device__ int32_t segments() const { return static_cast<int32_t>(p.tile.segments); }
  __device__ int64_t dense_step() const { return 0; }
  __device__ int64_t im2col_step() const { return 0; }
  __device__ int32_t source_rows() const { return p.source_rows; }
  __device__ int32_t source_cols() const { return p.source_cols; }

  __device__ int64_t dense_address(int64_t m, int32_t together) const {
    return p.grad_output + group * p.grad_group + min_of<int64_t>(m, p.tile.dense_rows - together) * p.grad_m;
  }

  __device__ XEntry im2col_entry(int64_t x) const {
    if (x >= x_count()) return {p.source, kOutside, 0};
    const Column column = column_of(x);
    const int64_t h = column.kh * p.tap_h;
    const int64_t w = column.kw * p.tap_w;
    return {p.source + group * p.source_group + column.c * p.source_c + h * p.source_h + w * p.source_w,
            static_cast<int32_t>(h), static_cast<int32_t>(w)};
  }

  __device__ void k_entry(int64_t index, KOffsets& offsets, KPosition& position) const {
    const int64_t n = index / p.out_pixels;
    const bool exists = n < p.batch;
    const int64_t rest = exists ? index - n * p.out_pixels : 0;
    const int64_t oh = rest / p.out_w;
    const int64_t ow = rest - oh * p.out_w;
    position.h = static_cast<int32_t>(oh * p.step_h + p.origin_h);
    position.w = static_cast<int32_t>(ow * p.step_w + p.origin_w);
    position.count = exists;
    position.unused = 0;
    const int64_t image = exists ? n : 0;
    offsets.dense = image * p.grad_n + oh * p.grad_h + ow * p.grad_w;
    offsets.im2col = image * p.source_n + position.h * p.source_h + position.w * p.source_w;
  }

  template <class Index>
  __device__ int64_t result_address(Index x) const {
    if (x >= x_count()) return 0;
    const Column column = column_of(x);
    return p.tile.result + group * p.result_group + column.c * p.result_c + column.kh * p.result_h +
           column.kw * p.result_w;
  }
  __device__ int64_t result_step() const { return p.result_m; }
  __device__ const char* bias() const { return nullptr; }
  template <class Element>
  __device__ auto bias_at(int32_t) const {
    return decltype(load_widened(static_cast<const Element*>(nullptr))){};
  }

  // Partial sums lie as [group][segment][m][x].
  __device__ int64_t partial_address(int64_t x) const {
    if (x >= x_count()) return 0;
    return p.tile.partials + (group * p.tile.segments + segment) * partial_segment() + x * p.tile.sum_bytes;
  }
  __device__ int64_t partial_step() const { return p.tile.partial_row; }
  __device__ int64_t partial_segment() const { return p.m * p.tile.partial_row; }

  const Params& p;
  Tile tile;
  int32_t chain_tiles;

 private:
  struct Column {
    int64_t c, kh, kw;
  };
  template <class Index>
  __device__ Column column_of(Index x) const {
    const Index taps_w = static_cast<Index>(p.taps_w), channels = static_cast<Index>(p.channels);
    const Index taps = static_cast<Index>(p.taps_h) * taps_w;
    const Index channel = p.channels_fastest ? x % channels : x / taps;
    const Index tap = p.channels_fastest ? x / channels : x % taps;
    return {channel, tap / taps_w, tap % taps_w};
  }

  int64_t group;
  int32_t segment;
};

}  // namespace conv2d_ext::cuda
