// The limits of tiles, blocks, runs and scratch, and the thresholds between drivers that give the same bits. None of
// them changes a bit of any result, so a test may shrink them: compiled with CONV2D_ADJUSTABLE_LIMITS they are
// variables, else constants. Limits that fix the order of summation are in plan/summation_order.{h,cpp}.
//
// All values are at least 1.
#pragma once

#include <cstdint>

#if defined(CONV2D_ADJUSTABLE_LIMITS)
#define CONV2D_LIMIT inline int64_t
#else
#define CONV2D_LIMIT inline constexpr int64_t
#endif

namespace conv2d_ext::cpu::limits {

// What the README promises, at most 4 MiB a thread, is a thread's scratch and its share of a call's workspace (the
// partials of grad_weight, kPartialBytes below). Tilings see to it that their scratch fits: they take fewer rows, then
// columns, channels or images.
inline constexpr int64_t kMaxScratchBytes = 3 * 1024 * 1024;

namespace tiling {

// Pixels of a tile: enough that packing a weight panel once a tile costs little (a panel element costs about one
// cycle, and pays for pixels / lanes cycles of arithmetic), few enough that patch and C tile stay in L2.
CONV2D_LIMIT kTilePixels = 600;
// The same where vectors run over pixels and weights are not packed, in bytes of a plane: the patch of a segment, which
// all result channels read again, takes a third of L2.
CONV2D_LIMIT kPanelBytes = 1536;
// A tile takes more such panels where all planes of a segment together are no more than so many, up to a limit, and
// while threads keep so many tiles each.
CONV2D_LIMIT kPanelPlanes = 16;
CONV2D_LIMIT kMostPanelsOfTile = 4;
CONV2D_LIMIT kLeastTilesOfThread = 8;
// With at most so much L2 a core, tiles have half the pixels (tile_gemm.cpp).
CONV2D_LIMIT kSmallL2Bytes = 512 * 1024;
// Rows of the weight this many bytes apart lie in pages of their own and in few sets of the caches: from
// kLeastPixelsToCopyRows pixels on, copying a segment's costs less. So does copying a weight gradient's input whose
// pixels lie this far apart.
CONV2D_LIMIT kFarRowsBytes = 2048;
CONV2D_LIMIT kLeastPixelsToCopyRows = 192;
// While some channels of each pixel, or of each row of the weight, are copied, the lines of those that follow are asked
// for where pixels (rows) lie at least so many bytes apart: hardware prefetchers don't see these lines coming, and
// their pages are at hand. Rows: from kLeastPixelsToCopyRows pixels on.
CONV2D_LIMIT kFarPixelBytes = 1024;
CONV2D_LIMIT kFarWeightRowBytes = 4096;
// From this many result channels on, misaligned planes are copied.
CONV2D_LIMIT kLeastChannelsToAlign = 64;
// Panels of planes take all of K at once where L1 has so many ways (since Ice Lake and Zen 5) and result channels are
// this many; weights that have to be copied are no more than so many bytes; of planes that share few sets of the
// caches, up to so many result channels. All lines of a panel stay in L2, and their pages in the TLB (1024 of 4 KiB).
CONV2D_LIMIT kLeastWholeWays = 12;
CONV2D_LIMIT kWholePanelBytes = 448 * 1024;
CONV2D_LIMIT kLeastWholeRows = 3;
CONV2D_LIMIT kWholeWeightBytes = 512 * 1024;
CONV2D_LIMIT kMostRowsOfOneSet = 64;
CONV2D_LIMIT kWholePageBytes = 1024 * 4096;
// A tile then has about so many pixels, and as many panels meet all result channels in turn as together are no more
// than so many bytes, or kPanelsOfRun. Sums of up to so many products ask for their planes' next panel, half as many
// where the source is streamed (kStreamedBytes); longer ones for the planes of so many steps later.
CONV2D_LIMIT kWholeTilePixels = 1440;
CONV2D_LIMIT kWholeRunBytes = 256 * 1024;
CONV2D_LIMIT kPanelsOfRun = 4;
CONV2D_LIMIT kNextPanelDepth = 64;
inline constexpr int64_t kWholeStepsAhead = 4;
// Patch and C tile together stay below a usual L2.
CONV2D_LIMIT kPatchBytes = 300 * 1024;
// Of tiles that take fewer pixels where their patch then holds all channels (tile_gemm.cpp).
CONV2D_LIMIT kLeastWholePixels = 75;
// What a patch may take where one segment needs more than kPatchBytes.
CONV2D_LIMIT kMaxPatchBytes = 1024 * 1024;
CONV2D_LIMIT kTileBytes = 1024 * 1024;
// The same where a stride skips elements of planes: gathering them costs more than sums beyond L2.
CONV2D_LIMIT kGatheredTileBytes = 2000 * 1024;
// Of several chunks of K there are three C tiles: a chunk's sum, and the total and what that lost. The latter two are
// touched once a chunk, so only the first has to stay in L2.
CONV2D_LIMIT kChunkedTileBytes = 512 * 1024;
// From so many bytes on, moved from and to memory, L3 is taken not to hold source and result; a large one from a third
// of its size on. Results of sums of up to so many products are then prefetched.
CONV2D_LIMIT kMovedBytes = 24 * 1024 * 1024;
CONV2D_LIMIT kMovedDepth = 48;
// From so many bytes on a source that a thread reads is taken not to fit L2.
CONV2D_LIMIT kStreamedBytes = 2048 * 1024;
// The same of weight gradients in bfloat16 pairs: below, L3 answers soon enough, and requests cost more than they save.
CONV2D_LIMIT kStreamedPairBytes = 5120 * 1024;
// The same of sources of forward and input gradient in bfloat16 pairs, and the least bytes of a pixel: hardware
// prefetchers follow pixels of one line.
CONV2D_LIMIT kStreamedPairSourceBytes = 16 * 1024 * 1024;
CONV2D_LIMIT kLeastPairPixelBytes = 128;
// Channels of a pixel that tiles of a weight gradient take together, of a kernel with many taps. Images have three.
CONV2D_LIMIT kWholePixelChannels = 4;
// Rows of the weight that lie apart (input gradients in channels_last), in a block of source channels. Each panel reads
// a line of every one: of so few rows the pages stay in the TLB for the next panel, and lines that the hardware fetched
// along with them in L2. They lie apart from kFarWeightBytes on.
CONV2D_LIMIT kWeightRows = 1024;
CONV2D_LIMIT kFarWeightBytes = 1024;
// Packed weights that stay in scratch for the next tiles.
CONV2D_LIMIT kKeptWeightBytes = 3 * 1024 * 1024;
// Products with zeros of the padding are left out where at least so many of a thousand are such: with vectors of 64
// bytes, and with narrower ones. With panels that results fill by half or less, to which the list of steps costs more,
// it takes so many more of a thousand.
CONV2D_LIMIT kPaddingPermille = 21;
CONV2D_LIMIT kNarrowPaddingPermille = 125;
CONV2D_LIMIT kHalfPanelPermille = 60;
// What a listed step costs there, in products of vectors.
CONV2D_LIMIT kListedStepProducts = 32;
// Sums of a work item with vectors over pixels stay in L2 from segment to segment.
CONV2D_LIMIT kSumBytes = 384 * 1024;
// The same for grad_weight, whose C tile is a piece of the weight; columns it should have, so that packing grad_output
// for it pays and the rows of the weight are stored in long runs, and at least has where threads would idle; and a
// thread's share of the partials that are in flight.
CONV2D_LIMIT kWeightTileBytes = 256 * 1024;
CONV2D_LIMIT kWeightTileColumns = 288;
CONV2D_LIMIT kLeastWeightTileColumns = 16;
CONV2D_LIMIT kPartialBytes = 1024 * 1024;
// The C tile of a weight gradient in channels_last with AVX2. The more of the weight it holds, the fewer tiles pack the
// same operands, and a segment's products take far longer than its C tile from L3.
CONV2D_LIMIT kLargeWeightTileBytes = 640 * 1024;
// The columns where products are taken in pairs: fewer, so that more output channels share the copy of the input's
// pixels that each has. And what an item's copies may take.
CONV2D_LIMIT kPairColumns = 144;
CONV2D_LIMIT kPairRowBytes = 128 * 1024;
// The columns where the weight is in channels_last: each tap's channels are a run.
CONV2D_LIMIT kWeightTileColumnsByTap = 1024;
// Of grad_weight of depthwise problems in channels_last, in bytes: neighbouring groups of a work item, those that take
// a segment together, and the patch that segments share.
CONV2D_LIMIT kInnerGroupsBytes = 512;
CONV2D_LIMIT kVectorsInTurnBytes = 128;
CONV2D_LIMIT kInnerPatchBytes = 256 * 1024;
// Pixels a multiple of this apart lie in few sets of the caches: with a stride of 1 they are copied.
CONV2D_LIMIT kFewSetsBytes = 1024;
// With so many chunks of pixels a thread, threads share these and not the groups.
CONV2D_LIMIT kLeastChunksOfThread = 8;

}  // namespace tiling

// GEMMs in AMX tiles, on CPUs with 2 MiB of L2.
namespace amx {

// As above.
CONV2D_LIMIT kTilePixels = 600;
CONV2D_LIMIT kPatchBytes = 896 * 1024;
CONV2D_LIMIT kTileBytes = 512 * 1024;
// Weights that a call packs once and its work items share take up to kPartialBytes a thread. Up to kStreamedWeightBytes
// of a group they come from L2, for every kSumsAtOnce sums anew; larger ones are read once a tile.
CONV2D_LIMIT kStreamedWeightBytes = 512 * 1024;
CONV2D_LIMIT kSumsAtOnce = 64;
// The bias of a work item's result channels.
CONV2D_LIMIT kBiasBytes = 64 * 1024;
// Blocks of a row's pixels that wait in scratch before they are copied to where each tap reads them.
CONV2D_LIMIT kRowBlocks = 512;
// Columns of a tile for each one that its taps reach further, from which on it has no copies for them.
CONV2D_LIMIT kColumnsPerReach = 3;
// Of grad_weight: its C tile, the columns it should at least have, and the input's pixels at each of them.
CONV2D_LIMIT kWeightTileBytes = 640 * 1024;
CONV2D_LIMIT kWeightTileColumns = 512;
CONV2D_LIMIT kRowBytes = 512 * 1024;

}  // namespace amx

namespace winograd {

// Squares of a tile: enough that transforming a block of weights once a tile costs little, few enough that what is
// transformed stays in L2.
CONV2D_LIMIT kSquares = 96;
// The transformed source of a tile, and transformed weights that an item keeps.
CONV2D_LIMIT kSourceBytes = 1792 * 1024;
CONV2D_LIMIT kKeptWeightBytes = 640 * 1024;
CONV2D_LIMIT kItemsPerThread = 4;
// Channels whose weights are transformed together, about, and channels that wait for it: L1 holds those.
CONV2D_LIMIT kBlockChannels = 64;
CONV2D_LIMIT kStagedChannels = 16;

}  // namespace winograd

namespace depthwise {

// 16-bit types are read in place for kernels of up to so many rows, each of which widens them anew.
CONV2D_LIMIT kWidenedRows = 5;
// The same on CPUs that widen in other units than those that multiply: all kernels that are one chain.
CONV2D_LIMIT kRowsWidenedAside = 64;
// Bytes of a pixel's groups that a work item takes: enough for hardware to stream them, and fewer where weights of so
// many would crowd L1.
CONV2D_LIMIT kBlockBytes = 512;
CONV2D_LIMIT kLeastBlockBytes = 256;
CONV2D_LIMIT kBlockWeightBytes = 6400;
// Of what comes from memory. Where a stride skips positions, most of what is moved is the source. Whole pixels, as they
// follow one another in memory, are prefetched best, so that items take more groups; results only of pixels up to this
// size.
CONV2D_LIMIT kStreamedBlockBytes = 4096;
CONV2D_LIMIT kStreamedBlockWeightBytes = 9600;
CONV2D_LIMIT kPrefetchedResultBytes = 512;
// Pixels a multiple of this apart lie in two sets of L1, and from this size of a source on they are read in place all
// the same, not copied.
CONV2D_LIMIT kTwoSetsBytes = 2048;
CONV2D_LIMIT kCopiedBytes = 8 * 1024 * 1024;
// What a tile meets of the source stays in L2; where it is widened into a patch, beside what it is widened from.
CONV2D_LIMIT kTileBytes = 512 * 1024;
CONV2D_LIMIT kPackedBytes = 128 * 1024;
// Small images share a tile of about this many pixels, so that packing its weights pays.
CONV2D_LIMIT kTilePixels = 256;
// Pairs of columns, and pixels, of a tile with strided phases.
CONV2D_LIMIT kStridedPairs = 512;
CONV2D_LIMIT kStridedPixels = 16 * 1024;
// What a patch may take there on one thread. (For the sake of even shares tiles of several may have twice the rounds.)
CONV2D_LIMIT kMaxStridedPatchBytes = 1024 * 1024;
// Products of a weight that take the time of seeing whether it is finite.
CONV2D_LIMIT kFiniteProducts = 3;

}  // namespace depthwise

namespace phases {

// Pixels of one image in the largest phase. With more of them tiles that stay in L2 matter more than reading the weight
// once.
CONV2D_LIMIT kMostPhasePixels = 1024;
// A patch of all channels, and a panel of all channels and taps: both are read again by every phase.
CONV2D_LIMIT kMostPatchBytes = 1024 * 1024;
CONV2D_LIMIT kMostPanelBytes = 640 * 1024;
// All phases' sums of a panel, where whole rows are stored: that is worth more than tiles that stay in L2.
CONV2D_LIMIT kMostSumBytes = 512 * 1024;
// The same where vectors run over groups: a patch, and the sums that are kept of all channels.
CONV2D_LIMIT kMostGroupPatchBytes = 256 * 1024;
CONV2D_LIMIT kMostGroupSumBytes = 256 * 1024;
// Results of so many bytes, for each thread, are computed phase after phase.
CONV2D_LIMIT kResultBytes = 3 * 1024 * 1024;
// Pixels of the largest phase in a tile whose groups are neighbouring items: the pages of more would not stay in the
// TLB.
CONV2D_LIMIT kMostNeighbourPixels = 400;
// Rows of a phase that tiles keep when they are cut for idle threads.
CONV2D_LIMIT kLeastRows = 4;

}  // namespace phases

namespace few_planes {

// Bytes of a plane in a work item. Longer runs start fewer streams of memory, and take more of L2 for the sums.
CONV2D_LIMIT kRunBytes = 8192;
// What a run is cut to at least, for the sake of idle threads.
CONV2D_LIMIT kLeastRunBytes = 1024;
// Smaller sources and planes do as well with panels of pixels, unless a panel's would have to be widened.
CONV2D_LIMIT kLeastSourceBytes = 1024 * 1024;
// Sources of a call that caches don't hold, about.
CONV2D_LIMIT kLeastStreamedBytes = 16 * 1024 * 1024;
CONV2D_LIMIT kLeastPlaneBytes = 4096;
CONV2D_LIMIT kLeastWidenedPlaneBytes = 512;

}  // namespace few_planes

namespace one_pixel {

// Results of a work item, whose lanes (64 bytes each) stay in L2, and images that share a pass over the weights.
CONV2D_LIMIT kDotResults = 3072;
CONV2D_LIMIT kDotImages = 64;
// A block of K: long runs where weights are read once, short ones where their rows should stay in L1.
CONV2D_LIMIT kDotStreamBytes = 64 * 1024;
CONV2D_LIMIT kDotBlockBytes = 4 * 1024;
// The same of rows that are packed: long enough for whole cache lines of each of 49 taps, short enough that the rows of
// a micro-kernel stay in L2; and images whose patches together do.
CONV2D_LIMIT kDotPackedBytes = 32 * 1024;
CONV2D_LIMIT kDotPackedImages = 8;
// Products that are worth a thread.
CONV2D_LIMIT kThreadProducts = 64 * 1024;
// Products of a whole problem that take less time than waking a thread.
CONV2D_LIMIT kSmallProducts = 128 * 1024;
// Lanes of a work item of RowProducts: their sums stay in L1.
CONV2D_LIMIT kRowLanes = 2048;
// Batches beyond which packing pays: for the input gradient sooner where the weight isn't in L2 and every six images
// read it again.
CONV2D_LIMIT kMaxRowImages = 64;
CONV2D_LIMIT kMaxRowImagesFar = 12;
CONV2D_LIMIT kFarWeights = 4 * 1024 * 1024;
// The same where patches are gathered or scattered; lanes that make that worthwhile; and taps, of which each item looks
// at all.
CONV2D_LIMIT kMaxPlacedImages = 8;
CONV2D_LIMIT kLeastPlacedLanes = 64;
CONV2D_LIMIT kMostPlacedTaps = 64;
// Rows of a product of matrices from which on packing the other factor pays: of one whose rows, or columns, are read.
CONV2D_LIMIT kMostProductRows = 2;
CONV2D_LIMIT kMostColumnRows = 8;
// Bytes of columns that are prefetched: they come from memory.
CONV2D_LIMIT kFarColumnsBytes = 8 * 1024 * 1024;

}  // namespace one_pixel

}  // namespace conv2d_ext::cpu::limits

#undef CONV2D_LIMIT
