#include "tile_amx.h"

#include "../base/limits.h"

namespace conv2d_ext::cpu {

namespace {

namespace limit = limits::amx;

constexpr int64_t kRowTileBytes = 32;  // of a description of 16 rows (RowTile, kernels/amx.h)

struct AmxTiler {
  const ConvGemm& gemm;
  const KBlocking& k;
  const VectorShape& vector;
  const int num_threads;

  void cut_source(AmxTiling& t) const {
    const Tile tile{0, t.tile_images, 0, t.tile_rows, 0, t.tile_cols};
    const GatherAxis& axis = gemm.axis_w;
    const int64_t reach = saturating_mul(gemm.taps_w - 1, axis.tap < 0 ? -axis.tap : axis.tap) / axis.step;
    // Taps that make several segments have patches of several sizes.
    t.expands = gemm.columns != 1 || (axis.step != 1 && axis.tap != 1) || !k.takes_all_taps() ||
                saturating_mul(reach, limit::kColumnsPerReach) > t.tile_cols;
    const PatchAxis rows = amx_patch_rows(gemm, tile, 0, k.tap_rows);
    const PatchAxis cols = amx_patch_cols(gemm, t.expands, tile, 0, k.tap_cols);
    t.sums = round_up(t.tile_images * amx_sum_pitches(gemm, tile, cols.run_length).image, kAmxTileRows);
    const int64_t plane = saturating_mul(t.tile_images, rows.size, cols.size);
    if (source_is_patch(gemm)) {
      t.block_channels = gemm.channels;
      t.patch_elements = 0;
    } else {
      t.block_channels = channels_of_block(k, plane, vector.operand_size(), limit::kPatchBytes);
      // The last tile reads 16 rows at every tap, wherever they lie.
      const int64_t pitch = odd_lines(plane, vector.operand_size());
      t.patch_elements = saturating_add(saturating_mul(pitch, t.block_channels), kAmxTileRows);
    }
    t.one_block = t.block_channels >= gemm.channels && k.takes_all_taps();
  }

  int64_t vectors() const { return div_up(gemm.m, vector.lanes); }

  // Result channels in chunks whose C tile of so many sums fits, or their bias where panels are stored one by one.
  ChunkLimits chunk_limits(const AmxTiling& t, int64_t sums) const {
    // Of several chunks of K there are three tiles: a chunk's sum, the total, and what that lost.
    const int64_t tile_bytes = k.has_chunks() ? limit::kTileBytes / 3 : limit::kTileBytes;
    const int64_t most = t.one_block ? limit::kBiasBytes / vector.bytes() : tile_bytes / (sums * vector.bytes());
    return {vectors(), div_up(vectors(), max64(vector.max_vectors, most)), vectors()};
  }

  // Result channels of a work item: all of them while they fit, fewer where threads would idle.
  void cut_result_channels(AmxTiling& t) const {
    const ChunkCut cut = cut_chunks(gemm, t, gemm.groups, chunk_limits(t, t.sums), num_threads);
    t.chunk_vectors = div_up(vectors(), cut.chunks);
    t.chunks_m = div_up(vectors(), t.chunk_vectors);
  }

  // Tiles of fewer pixels, where there are few. (Narrow tiles have copies for each tap: their patch may be larger.)
  void cut_tiles(AmxTiling& t) const {
    const auto limits_of = [&](int64_t pixels) { return chunk_limits(t, pixels); };
    if (!has_few_items(t.items(gemm.groups), num_threads)) return;
    const AmxTiling whole = t;
    if (!cut_tiles_for_threads(gemm, gemm.groups, limits_of, num_threads, t)) return;
    round_columns(t);
    cut_source(t);
    t.sums_at_once = t.sums;
    cut_result_channels(t);
    if (t.patch_elements > whole.patch_elements) t = whole;
  }

  // Of a single row, as joined rows are, nothing is lost with whole tiles of pixels.
  void round_columns(AmxTiling& t) const {
    if (gemm.rows != 1 || t.tile_cols >= gemm.cols) return;
    t.tile_cols = min64(round_up(t.tile_cols, kAmxTileRows), gemm.cols);
    t.count_tiles(gemm);
  }

  // Weights are packed once a call where they fit the threads' share of the workspace.
  void share_weights(AmxTiling& t) const {
    const int64_t of_group = saturating_mul(div_up(gemm.m, vector.lanes), gemm.channels * gemm.taps(),
                                            kBlockChannels / 2, vector.operand_size());
    const int64_t bytes = saturating_mul(gemm.groups, of_group);
    if (t.tiles() < 2 || bytes > num_threads * limits::tiling::kPartialBytes) return;
    t.shared_bytes = bytes;
    const bool streams = t.one_block && of_group <= limit::kStreamedWeightBytes;
    if (streams) t.sums_at_once = min64(t.sums, round_up(limit::kSumsAtOnce, kAmxTileRows));
  }
};

}  // namespace

AmxTiling tile_amx(const ConvGemm& gemm, const KBlocking& k, const VectorShape& vector, int num_threads) {
  const AmxTiler tiler{gemm, k, vector, num_threads};
  AmxTiling t{};
  // A segment of scattered taps can make a patch too large: smaller tiles then. That of 16 pixels fits.
  for (int64_t target = limit::kTilePixels;; target /= 2) {
    cut_pixels(gemm, gemm.groups, target, num_threads, t);
    tiler.round_columns(t);
    tiler.cut_source(t);
    t.sums_at_once = t.sums;
    const bool smallest = target < 16,
               fits = t.patch_elements <= limits::tiling::kMaxPatchBytes / vector.operand_size();
    if (!fits && !smallest) continue;
    tiler.cut_result_channels(t);
    tiler.cut_tiles(t);
    if (fits_scratch(lay_out_scratch(t, k, vector)) || smallest) break;
  }
  tiler.share_weights(t);
  t.stores_between =
      t.one_block && k.segments() == 1 && gemm.destination_m == 1 && t.sums_at_once <= kMostStoredBetween;
  return t;
}

AmxScratch lay_out_scratch(const AmxTiling& tiling, const KBlocking& k, const VectorShape& vector) {
  const int64_t size = vector.element_size, width = min64(tiling.chunk_vectors, vector.max_vectors) * vector.lanes;
  // One panel's C tile where each is finished at once, else the chunk's.
  const int64_t lanes = tiling.chunk_vectors * vector.lanes;
  // A panel may be stored while the next one is multiplied: then there are two of a micro-kernel's.
  const int64_t two_kernels = 2 * kSumsOfKernel * vector.max_vectors * vector.lanes;
  const int64_t sums = tiling.one_block ? max64(tiling.sums_at_once * width, two_kernels) : tiling.sums_at_once * lanes;
  const int64_t tile_bytes = sums * size;
  AmxScratch s{};
  s.row_tiles = s.take(tiling.sums / kAmxTileRows * kRowTileBytes);
  s.position_offsets = s.take_offsets(tiling.sums);
  s.tap_offsets = s.take_offsets(k.max_depth());
  s.bias = s.take(lanes * size);
  s.panel = s.take(k.max_depth() * width * vector.operand_size());
  s.c_tile = s.take_sums(tile_bytes, k.has_chunks());
  s.patch = s.take(tiling.patch_elements * vector.operand_size());
  s.row = s.take(limit::kRowBlocks * vector.operand_size());
  return s;
}

}  // namespace conv2d_ext::cpu
