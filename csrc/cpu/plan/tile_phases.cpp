#include "tile_phases.h"

#include "../base/limits.h"

namespace conv2d_ext::cpu {

namespace {

namespace limit = limits::phases;

// Result channels of groups that lie side by side, at least: with fewer, stores are too short.
constexpr int64_t kLeastSideBySide = 4;

// Limits' worth of pixels that a tile of a single band of whole rows may have. Of wide images they take more scratch
// than L2 likes.
constexpr int64_t kMostWholeRows = 4;

const char* const kManyPixels = "too many pixels, or a panel or a patch too large, for phases that run together";

int64_t panel_bytes(const JoinedPhases& phases, const VectorShape& vector, int64_t vectors) {
  return phases.gemm[0].channels * phases.problem().taps() * vectors * vector.bytes();
}

int64_t elements_of_patch(const JoinedPhases& phases, int64_t images, int64_t rows, const VectorShape& vector) {
  const int64_t lanes = phases.over_groups ? vector.lanes : 1;
  const int64_t plane = odd_lines((rows + phases.row_reach) * phases.cols * lanes, vector.element_size);
  return patch_elements(plane * images, phases.gemm[0].channels, images, vector.element_size);
}

// How many pixels a tile may have whose sums are kept at once.
int64_t pixel_limit(int64_t m, const JoinedPhases& phases, const VectorShape& vector) {
  if (phases.over_groups) return limit::kMostGroupSumBytes / (m * vector.bytes());
  if (!phases.whole_rows) return limit::kMostPhasePixels;
  return limit::kMostSumBytes / (min64(div_up(m, vector.lanes), vector.max_vectors) * vector.bytes());
}

// How many images a tile with so many of their rows should have; 0: one is too many. times: of pixel_limit's.
int64_t image_limit(const JoinedPhases& phases, int64_t rows, const VectorShape& vector, int64_t times = 1) {
  const int64_t image_bytes = elements_of_patch(phases, 1, rows, vector) * vector.element_size;
  const int64_t pixels = times * pixel_limit(phases.gemm[0].m, phases, vector);
  const int64_t patch_bytes = phases.over_groups ? limit::kMostGroupPatchBytes : limit::kMostPatchBytes;
  return min64(patch_bytes / max64(image_bytes, 1), pixels / max64(phases.kept_pixels(rows), 1));
}

// Rows of a band, at least. Each packs the rows again that it shares with the next one, a vector for each pixel where
// lanes are groups.
int64_t least_band(const JoinedPhases& phases) {
  return phases.over_groups ? min64(max64(phases.row_reach, 1), phases.most_rows()) : 1;
}

// Result channels of a group from which on joining pays.
int64_t least_channels(const JoinedPhases& phases, bool side_by_side, const VectorShape& vector) {
  if (phases.over_groups) return phases.whole_rows ? 1 : 2;
  if (phases.whole_rows) return vector.lanes / 2;
  return side_by_side ? kLeastSideBySide : 2 * vector.lanes;
}

// The same where a group's channels fill vectors, too.
bool groups_do_better(const Conv2dProblem& p, const VectorShape& vector, int num_threads) {
  const int64_t m = p.in_channels_per_group();
  const int64_t panel = saturating_mul(p.out_channels_per_group(), p.taps(), m, vector.bytes());
  return !fills_wide_vectors(p.groups, m, p.taps(), /*side_by_side=*/true, vector) && panel <= limit::kMostPanelBytes &&
         occupies(num_threads, p.groups, saturating_mul(p.batch, p.out_pixels()), vector);
}

}  // namespace

const char* join_phases(const Call& call, const VectorShape& vector, int num_threads, JoinedPhases& phases) {
  const Conv2dProblem& p = call.problem;
  const bool all_met = grad_input_tap_step(p.stride_h, p.dilation_h) == p.stride_h &&
                       grad_input_tap_step(p.stride_w, p.dilation_w) == p.stride_w && p.stride_h <= p.kernel_h &&
                       p.stride_w <= p.kernel_w && p.stride_h <= p.in_h && p.stride_w <= p.in_w;
  if (!all_met) return "a phase of the stride has no tap or no pixel";
  if (p.stride_h > JoinedPhases::kMost || p.stride_w > JoinedPhases::kMost) return "too many phases";
  const int64_t phase_count = p.stride_h * p.stride_w;
  if (phase_count < 2) return "the stride has one phase";
  if (phase_count > JoinedPhases::kMost || p.taps() > JoinedPhases::kMostTaps) return "too many phases or taps";
  if (!vector.is_native) return kNotCompiled;
  const int64_t* const gi = call.result.stride;
  phases.whole_rows = gi[3] == 1 && gi[2] == p.in_w && gi[1] != 1;
  // Groups that lie side by side: pages of grad_output and of the result are read and written once.
  const bool side_by_side = p.groups > 1 && gi[1] == 1;
  const int64_t m = p.in_channels_per_group();
  // A vector of channels is as good as one of groups where whole rows are stored together.
  const bool by_groups = lanes_are_groups(p.groups, m, p.out_channels_per_group(), vector);
  phases.over_groups = by_groups && (m < vector.lanes || (side_by_side && groups_do_better(p, vector, num_threads)));
  const bool fills_lines = side_by_side && (!phases.over_groups || can_interleave(m));
  if (by_groups && !phases.whole_rows && !fills_lines) return "channels of groups are stored one by one";
  if (m < least_channels(phases, side_by_side, vector) || p.out_channels == 0) return "few input channels in a group";
  // Images are cut into bands where stores are what is saved, or a patch of many vectors; else tiles that stay in L2
  // are worth more.
  const bool has_bands = phases.whole_rows || phases.over_groups;
  const int64_t most = pixel_limit(m, phases, vector);
  const int64_t row_pixels = phases.whole_rows ? saturating_mul(p.in_w, p.stride_h) : div_up(p.in_w, p.stride_w);
  const int64_t times = phases.whole_rows ? kMostWholeRows : 1;
  if (row_pixels > times * most || (p.in_h > most * p.stride_h && !has_bands)) return kManyPixels;
  // The gradient of one output pixel, and phases that are cut into bands, are other GEMMs than these.
  if (p.out_pixels() == 1 || grad_input_cuts_bands(p)) return "the phases are cut into bands, or there is one output";
  if (is_patch_layer(p)) return "the kernel's taps never overlap";

  phases.call = &call;
  phases.count = 0;
  int64_t low_row = p.out_h, high_row = 0, low_col = p.out_w, high_col = 0;
  for_each_grad_input_gemm(call, [&](const ConvGemm& g) {
    // One after the other, columns fastest.
    const int f = phases.count++;
    phases.gemm[f] = g;
    phases.gemm[f].weight = call.b.data;
    phases.first_pixel[f] =
        phased_rows(p).phase(f / p.stride_w).phase * p.in_w + phased_cols(p).phase(f % p.stride_w).phase;
    // Along grad_output positions ascend and taps descend.
    low_row = min64(low_row, g.axis_h.source(0, g.taps_h - 1));
    high_row = max64(high_row, g.axis_h.source(0, 0));
    low_col = min64(low_col, g.axis_w.source(0, g.taps_w - 1));
    high_col = max64(high_col, g.axis_w.source(g.cols - 1, 0));
  });
  CONV2D_EXT_ASSERT(phases.count == phase_count);
  phases.first_row = low_row;
  phases.row_reach = saturating_add(high_row, -low_row);
  phases.first_col = low_col;
  phases.cols = saturating_add(high_col, saturating_add(-low_col, 1));
  // Sizes before their products.
  if (phases.gemm[0].channels > limit::kMostPanelBytes) return kManyPixels;
  if (max64(saturating_add(phases.row_reach, phases.most_rows()), phases.cols) > limit::kMostPatchBytes) {
    return kManyPixels;
  }
  const int64_t least_rows = has_bands ? least_band(phases) : phases.most_rows();
  const int64_t panel_vectors = phases.over_groups ? m : 1;
  if (panel_bytes(phases, vector, panel_vectors) > limit::kMostPanelBytes ||
      image_limit(phases, least_rows, vector, times) == 0) {
    return kManyPixels;
  }
  // A smaller tile or chunk, for more threads, takes no more.
  return fits_scratch(lay_out_scratch(tile_phases(phases, vector, 1), phases, vector)) ? nullptr : kManyPixels;
}

PhasesTiling tile_phases(const JoinedPhases& phases, const VectorShape& vector, int num_threads) {
  PhasesTiling t{};
  const int64_t batch = phases.gemm[0].batch;
  const int64_t vectors = phases.over_groups ? phases.gemm[0].m : div_up(phases.gemm[0].m, vector.lanes);
  t.group_blocks = phases.over_groups ? div_up(phases.gemm[0].groups, vector.lanes) : phases.gemm[0].groups;
  t.panel_vectors = vector.max_vectors;
  t.groups_first = phases.gemm[0].groups_are_neighbours(vector.element_size);
  const auto fits = [&](int64_t width) { return panel_bytes(phases, vector, width) <= limit::kMostPanelBytes; };
  while (t.panel_vectors > 1 && !fits(t.panel_vectors)) --t.panel_vectors;
  int64_t rows = phases.most_rows();
  const int64_t least = least_band(phases);
  while (rows > least && image_limit(phases, rows, vector) == 0) rows = max64(div_up(rows, 2), least);
  int64_t images = rows < phases.most_rows() ? 1 : max64(image_limit(phases, rows, vector), 1);
  if (t.groups_first) {
    images = min64(images, max64(limit::kMostNeighbourPixels / max64(phases.most_pixels(rows), 1), 1));
  }
  for (;;) {
    t.tile_images = even_piece(batch, images);
    t.tiles_n = div_up(batch, t.tile_images);
    t.tile_rows = even_piece(phases.most_rows(), rows);
    t.tiles_h = div_up(phases.most_rows(), t.tile_rows);
    t.patch_elements = elements_of_patch(phases, t.tile_images, t.tile_rows, vector);
    // For the sake of idle threads alone: chunks, each of which packs the patch anew; where they don't suffice smaller
    // tiles, each of which packs the weights anew.
    for (int64_t chunks = 1;; ++chunks) {
      t.chunk_vectors = div_up(vectors, chunks);
      t.chunks_m = div_up(vectors, t.chunk_vectors);
      if (phases.over_groups || t.chunk_vectors == 1 || !threads_would_idle(t.items(), num_threads)) break;
    }
    const bool in_scratch = fits_scratch(lay_out_scratch(t, phases, vector));
    if (in_scratch && !threads_would_idle(t.items(), num_threads)) return t;
    const int64_t least_rows = in_scratch && !phases.over_groups ? limit::kLeastRows : 1;
    if (t.tile_images > 1) {
      images = t.tile_images / 2;
    } else if (t.tile_rows > least_rows) {
      rows = max64(div_up(t.tile_rows, 2), least_rows);
    } else {
      return t;
    }
  }
}

PhasesScratch lay_out_scratch(const PhasesTiling& tiling, const JoinedPhases& phases, const VectorShape& vector) {
  // Vectors over groups: the weights and the sums of all channels.
  const int64_t size = vector.element_size;
  const int64_t vectors = phases.over_groups ? tiling.chunk_vectors : min64(tiling.panel_vectors, tiling.chunk_vectors);
  const int64_t width = vectors * vector.lanes, depth = phases.gemm[0].channels * phases.problem().taps();
  int64_t pixels = 0;
  bool has_chunks = false;
  for (int f = 0; f < phases.count; ++f) {
    pixels += tiling.tile_images * min64(tiling.tile_rows, phases.gemm[f].rows) * phases.gemm[f].cols;
    has_chunks = has_chunks || block_k(phases.gemm[f], vector.limits).has_chunks();
  }
  CONV2D_EXT_ASSERT(!has_chunks || !phases.over_groups);  // of few channels
  PhasesScratch s{};
  s.position_offsets = s.take_offsets(pixels);
  s.tap_offsets = s.take_offsets(depth);
  s.places = s.take_offsets(phases.whole_rows ? pixels : 0);
  s.zeros = s.take(width * size);
  s.taps = s.take(phases.problem().taps() * width * size);
  s.panel = s.take(panel_bytes(phases, vector, vectors));
  const int64_t pixel_bytes = tiling.tile_images * width * size;
  s.c_tile = s.take_sums(phases.kept_pixels(tiling.tile_rows) * pixel_bytes,
                         phases.most_pixels(tiling.tile_rows) * pixel_bytes, has_chunks);
  s.patch = s.take(tiling.patch_elements * size);
  return s;
}

}  // namespace conv2d_ext::cpu
