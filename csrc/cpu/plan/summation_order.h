// The order of summation: the rules that fix bits.
//
// A rule reads ImageGemm (the geometry of one image and the weight's shape), the dtype and the instruction set's
// vectors; a rule of grad_weight also the batch, which it sums over. No rule is told strides, threads or a place in the
// batch, so none can depend on them. Drivers take what the rules return and decide nothing.
// grad_bias, which is no GEMM, has its order in drivers/grad_bias.h.
#pragma once

#include <cstdint>

#include "../../conv2d_problem.h"
#include "../../tensor_view.h"
#include "../base/integers.h"

namespace conv2d_ext::cpu {

// What the order of a sum may be read from: of a GEMM (ConvGemm, plan/conv_gemm.h) neither batch nor strides.
struct ImageGemm {
  int64_t groups;
  int64_t m;         // result channels per group
  int64_t channels;  // reduced channels per group
  int64_t taps_h, taps_w;
  int64_t rows, cols;  // result positions
  // More than 1: result channels are (channel, tap) pairs (ConvGemm).
  int64_t result_taps_h = 1, result_taps_w = 1;
  bool is_gradient = false;  // a GEMM of grad_input
  bool is_phase = false;     // of several that the stride has, which all have taps
  // Of matmul, which can't know which of its dimensions is a batch: the rules read `channels` alone.
  bool is_matmul = false;
  int64_t taps() const { return taps_h * taps_w; }
  int64_t pixels() const { return rows * cols; }
  int64_t result_taps() const { return result_taps_h * result_taps_w; }
};

// Products in a segment, the piece of K whose weights are packed at once; of grad_weight, taps of a patch, and output
// pixels that one patch covers.
constexpr int64_t kMaxSegment = 256;

// The longest chains of multiply-adds. A chain is summed from zero, and chains are added in order. Long chains lose
// accuracy; short ones cost the additions of their sums.
struct ChainLimits {
  int64_t products = 0;           // forward, grad_input
  int64_t short_gradient = 0;     // grad_input's sums of up to `products`: F.conv2d, which they must be as accurate
                                  // as, has a chain for each tap there
  int64_t pixels = 0;             // grad_weight
  int64_t few_pixels = 0;         // grad_weight of images of fewer pixels than 3/4 of `pixels`, where F.conv2d has a
                                  // chain for each image, and of groups of one channel, where it has several
  int64_t winograd = 0;           // sums of transformed products, which the last transformation adds up again
  int64_t segment = kMaxSegment;  // forward, grad_input
};
// Products and sums rounded each by itself make more errors a step than fused ones, so their chains are shorter.
constexpr ChainLimits chain_limits(bool fused) {
  const int64_t longest = fused ? 64 : 32;
  return {longest, /*short_gradient=*/longest / 2, /*pixels=*/longest, /*few_pixels=*/longest / 2,
          /*winograd=*/longest / 2};
}
// Pairs of bfloat16 products: what a chain of float32 sums loses is nothing beside the rounding of the result, so that
// a segment is one chain. Its panel of weights and the patch it reads fit L1 (16 pairs of channels of a 3x3 kernel). In
// grad_weight a pair is two pixels of a segment that follow one another, across rows and images.
constexpr ChainLimits pair_limits() {
  return {/*products=*/144,
          /*short_gradient=*/144,
          /*pixels=*/kMaxSegment,
          /*few_pixels=*/kMaxSegment,
          /*winograd=*/0,
          /*segment=*/144};
}
// AMX tiles of bfloat16, of which a step of a sum takes 32 channels at one tap (or columns_per_step). A step is a chain
// of its own for even and for odd channels. The sum goes on in the tile from segment to segment of a chunk, so that
// only chunks show in bits; a segment of up to 72 steps is all of K in most layers. In grad_weight a step is 32 pixels
// of a segment, in their order there, even and odd ones apart.
constexpr ChainLimits amx_limits() {
  return {/*products=*/1,    /*short_gradient=*/1, /*pixels=*/32,
          /*few_pixels=*/32, /*winograd=*/0,       /*segment=*/72};
}

// Segments in a chunk. A chunk is summed from zero, and its sum added to those of the chunks before it, with what that
// addition loses kept beside the total (add_chunk, pack/store.h): one after the other, the chains of a long sum whose
// products have a mean would lose a bit with every fourfold length.
constexpr int64_t kSegmentsPerChunk = 16;
constexpr int64_t kPixelSegmentsPerChunk = 8;  // grad_weight, whose chains may be half as long

// Up to this many products the one chain there is starts from the bias, which saves a rounding. A longer sum is formed
// first and the bias added last, so that a large bias can't swallow the low bits of every product.
constexpr int64_t kBiasFirstProducts = 8;

// What an instruction set's vectors of a type are, and the chains that go with its arithmetic.
struct VectorShape {
  int64_t lanes;         // result channels in a vector
  int64_t max_vectors;   // vectors in the widest panel
  int64_t element_size;  // bytes of the compute type
  bool is_native;        // has kernels that transpose vectors in registers: real floating-point types, not portable
  ChainLimits limits;
  int64_t step = 1;         // products that a step of a sum takes
  bool halves_pay = false;  // half a vector takes half the time; for the choice of a candidate, which changes no bit
  // Bytes of an element of a patch or panel: one of the compute type, or as many of bfloat16 as a step takes.
  constexpr int64_t operand_size() const { return max64(element_size, 2 * step); }
  int64_t bytes() const { return lanes * element_size; }
  bool is_wide() const { return bytes() == 64; }
  // The share of the lanes at work on n elements.
  double filled(int64_t n) const { return double(n) / double(round_up(n, lanes)); }
};

// Why a driver is refused whose kernels need is_native.
inline constexpr const char* kNotCompiled = "these kernels are not compiled for this dtype and instruction set";

// Whether a bfloat16 problem goes to the kernels that take products in pairs, on a CPU that has them.
bool takes_pairs(const ImageGemm& gemm);

// How many columns of the kernel a step of AMX tiles takes. 1: a step is 32 channels at one tap. More, where
// neighbouring columns lie side by side and few channels would leave most of a step empty: 32 / columns_per_step(...)
// words of each.
int64_t columns_per_step(const ImageGemm& gemm, const GatherAxis& axis_w);

// Whether a bfloat16 problem goes to the kernels for AMX tiles, on a CPU that has them.
bool takes_amx(const ImageGemm& gemm, const GatherAxis& axis_w);
bool takes_amx_weight(const Conv2dProblem& problem);

// Whether a bfloat16 weight gradient takes pixels in pairs, on a CPU that has products of pairs.
bool takes_pairs_weight(const Conv2dProblem& problem);

// The canonical cut of K = (c, i, j), c slowest, in products or steps of several. Up to limits.segment taps: segments
// of whole channels. More: each channel's taps are cut into rectangles, one segment each. A segment is summed in chains
// of `chain` products; chains are added in order within a chunk of kSegmentsPerChunk segments, chunk sums in order.
struct KBlocking {
  int64_t segment_channels;    // channels in a full segment
  int64_t tap_rows, tap_cols;  // taps in a full segment's rectangle
  int64_t blocks_c, blocks_h, blocks_w;
  int64_t chain;
  int64_t max_depth() const { return segment_channels * tap_rows * tap_cols; }
  int64_t segments() const { return blocks_c * blocks_h * blocks_w; }
  // Whether segments are whole channels, with all taps.
  bool takes_all_taps() const { return blocks_h * blocks_w == 1; }
  bool has_chunks() const { return segments() > kSegmentsPerChunk; }
  // The number of the segment that begins at channel c and tap (i, j).
  int64_t segment_at(int64_t c, int64_t i, int64_t j) const {
    return (c / segment_channels * blocks_h + i / tap_rows) * blocks_w + j / tap_cols;
  }
};
KBlocking block_k(const ImageGemm& gemm, const ChainLimits& limits);

// Taps, or pixels of an image, cut into near-equal rectangles of at most `limit`: whole rows if they fit.
void cut_rectangle(int64_t height, int64_t width, int64_t limit, int64_t& rows, int64_t& cols);

// The canonical cut of the output pixels that grad_weight sums over: segments are rectangles of at most 256 pixels
// (images of up to 128 pixels several together), taken in chains of `chain` pixels. Chains are added in order within a
// chunk of segments, chunk sums in order.
struct PixelBlocking {
  int64_t images, rows, cols;  // in a full segment
  int64_t chain;
  int64_t blocks_n, blocks_h, blocks_w;
  int64_t segments() const { return blocks_n * blocks_h * blocks_w; }
  int64_t chunks() const { return (segments() + kPixelSegmentsPerChunk - 1) / kPixelSegmentsPerChunk; }
};
PixelBlocking block_pixels(const Conv2dProblem& p, const ChainLimits& limits);

// Whether the forward's sums are dot products along k (DotBlocking) rather than the GEMM driver's chains: one result
// pixel, a floating-point type, and enough weights that reading them is what takes the time.
bool sums_as_dots(const ImageGemm& gemm, DType dtype);

// The canonical order of such a sum. Product k belongs to lane k % width; a lane's products are summed in chains of at
// most `chain`, ascending, chain sums are added in order, lanes in pairs of W/2, W/4, ... 1 apart, and the bias last. K
// is filled up with zeros to a multiple of the width.
template <class T>
constexpr int64_t kDotWidth = 64 / int64_t(sizeof(T));
struct DotBlocking {
  int64_t products, steps, chain;
};
DotBlocking block_dot(const ImageGemm& gemm, int64_t width, const ChainLimits& limits);

// Winograd's F(2 x 2, 3 x 3), where it is asked for: at least 16 result channels and source channels a group, so that
// the transformations pay, and at most as many source channels as are summed in one chunk.
constexpr int64_t kWinogradLeastChannels = 16, kWinogradMostChannels = 2048, kWinogradLeastSide = 7;

// Whether the input gradient is one GEMM with a result channel for every (channel, tap), as in patch layers, whose taps
// meet nowhere; else it has a GEMM for each phase of the stride. Phases multiply infinite weights by the zeros beyond
// grad_output's border, and the one GEMM has no such products.
bool is_patch_layer(const Conv2dProblem& p);

// One axis of a GEMM whose taps may lie outside the source, which has `size` coordinates.
struct GatheredAxis {
  GatherAxis axis;
  int64_t taps, positions, size;
};

// Neighbouring positions whose taps [first_tap, first_tap + taps), and no others, lie inside the source.
struct Band {
  int64_t first, positions, first_tap, taps;
};

// Taps that descend along the source, counted from the last one on.
inline GatherAxis ascending(const GatherAxis& axis, int64_t taps) {
  return axis.tap < 0 ? GatherAxis{axis.step, axis.source(0, taps - 1), -axis.tap} : axis;
}

// The bands of an axis, one after the other. Each costs a few divisions, however many positions and taps there are.
class BandWalk {
 public:
  explicit BandWalk(const GatheredAxis& a)
      : a_{ascending(a.axis, a.taps), a.taps, a.positions, a.size}, descends_(a.axis.tap < 0) {}

  // false: there is none left.
  bool next(Band& band) {
    if (at_ >= a_.positions) return false;
    const Interval inside = inside_at(at_);
    int64_t end = end_of(at_, inside);
    // Positions without a tap are one band, whichever tap comes next.
    while (inside.count() == 0 && end < a_.positions) {
      const Interval following = inside_at(end);
      if (following.count() != 0) break;
      end = end_of(end, following);
    }
    const int64_t first_tap = descends_ ? a_.taps - inside.end : inside.begin;
    band = {at_, end - at_, inside.count() == 0 ? 0 : first_tap, inside.count()};
    at_ = end;
    return true;
  }

 private:
  // Of the ascending taps.
  Interval inside_at(int64_t position) const {
    return indices_inside(a_.axis.source(position, 0), a_.axis.tap, a_.taps, a_.size);
  }
  // The next position with other taps: one more has come in, or one has gone out.
  int64_t end_of(int64_t position, const Interval& inside) const {
    int64_t end = a_.positions;
    if (inside.begin > 0) {
      end = min64(end, position + div_up(-a_.axis.source(position, inside.begin - 1), a_.axis.step));
    }
    if (inside.end > 0) {
      end = min64(end, position + div_up(a_.size - a_.axis.source(position, inside.end - 1), a_.axis.step));
    }
    return end;
  }

  const GatheredAxis a_;  // its taps ascend
  const bool descends_;
  int64_t at_ = 0;
};

// Whether a GEMM is cut into the bands of its one axis times those of the other, so that taps are left out where they
// lie outside: where far taps do so at many positions.
bool cuts_bands(const GatheredAxis& h, const GatheredAxis& w);

// Whether a forward in AMX tiles is not cut all the same: every band packs its taps' weights anew, which takes longer
// than products so fast. A step of zeros changes a sum that has underflowed to -0, so that this is a rule.
bool multiplies_padding(const ImageGemm& whole, const GatheredAxis& h, const GatheredAxis& w);

// How many (position, tap) pairs of an axis meet a coordinate of a size. Where no two taps meet at the same one, this
// is the number of coordinates that are met.
int64_t count_met(const GatherAxis& axis, int64_t taps, int64_t positions, int64_t size);

}  // namespace conv2d_ext::cpu
