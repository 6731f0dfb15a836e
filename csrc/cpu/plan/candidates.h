// Which driver takes what.
//
// A call becomes a sequence of tasks (for_each_task). A candidate is a driver that could run a task. Candidates are
// asked in a fixed order; the first that accepts takes the task, the others say why not, for explain to print. The
// choice changes no bit, and may read strides and threads; except for kDot, kWinograd and those of pairs and AMX, whose
// sums have an order of their own, so that the geometry alone decides (summation_order.h).
#pragma once

#include <vector>

#include "../base/visitor.h"
#include "call.h"
#include "conv_gemm.h"
#include "summation_order.h"
#include "tile_one_pixel.h"
#include "tile_phases.h"

namespace conv2d_ext::cpu {

enum class Driver : int {
  kDot,               // drivers/dot.h: forward of one pixel
  kRows,              // drivers/rows.h: gradients of one pixel, products of few rows
  kColumns,           // drivers/rows.h: products of few rows, the other factor's elements along k
  kStrided,           // drivers/strided.h: depthwise grad_input, the phases of a stride of 2 together
  kPhases,            // drivers/phases.h: grad_input, the phases of a stride together
  kAmx,               // drivers/amx.h, tiles of bfloat16
  kPairsOfGroups,     // drivers/gemm.h with products of bfloat16 pairs, vectors over groups
  kPairs,             // the same, vectors over result channels
  kWinograd,          // drivers/winograd.h, where it is asked for
  kDepthwise,         // drivers/depthwise.h
  kGroups,            // drivers/gemm.h, vectors over groups
  kPlanes,            // drivers/planes.h: 1x1 from many planes to few
  kPixels,            // drivers/pixels.h: vectors over pixels
  kGemm,              // drivers/gemm.h, vectors over result channels
  kWeightAmx,         // drivers/grad_weight_steps.h with AMX tiles of bfloat16
  kWeightPairs,       // the same with products of bfloat16 pairs
  kWeightDepthwise,   // drivers/depthwise_weight.h
  kWeightGroups,      // drivers/grad_weight.h, vectors over groups
  kWeightTransposed,  // the same for the transposed product of a 1x1 kernel: vectors over input channels
  kWeightGemm,        // vectors over output channels
  kPadding,           // plan/padding_products.h: after a forward that leaves out taps in the padding
};

// What planning knows of an instruction set, for one dtype.
struct IsaShape {
  VectorShape vector;
  DotKernelShape dot{};          // of real floating-point types
  bool has_pairs = false;        // kernels for products of bfloat16 pairs, and this is bfloat16
  VectorShape pairs{};           // theirs
  bool has_amx = false;          // kernels for AMX tiles of bfloat16, and this is bfloat16
  VectorShape amx{};             // theirs
  const char* no_amx = nullptr;  // why there are none, where explain should say so
};

// One run of a driver. What it points to lives as long as the visit.
struct Task {
  Driver driver;
  const Call* call;
  const ConvGemm* gemm = nullptr;        // kDot, kRows but of grad_weight, kColumns, and from kAmx to kGemm
  int gemms = 1;                         // so many, one behind the other: kDepthwise, which runs them in turn
  const ConvGemm* whole = nullptr;       // kDepthwise: `gemm` lacks taps of it, whose zeros may count after all
  const RowProducts* rows = nullptr;     // kRows, kColumns
  const JoinedPhases* phases = nullptr;  // kPhases
};

// Products that a step of a task's sums takes: several of bfloat16, by the kernels of pairs or of AMX tiles, else one.
inline int64_t step_of(const Task& task) {
  if (task.driver == Driver::kWeightAmx) return kBlockChannels;
  if (task.driver == Driver::kWeightPairs) return 2;
  return task.gemm != nullptr ? task.gemm->per_step : 1;
}

struct Refusal {
  Driver driver;
  const char* reason;
};
// The candidates before the one that takes a task, and why they don't.
using Refusals = std::vector<Refusal>;

// What explain prints; not of kPadding.
const char* name_of(Driver driver);

// Whether the tasks of kDepthwise are phases that run in turn, up to kMostDepthwiseGemms of them.
bool has_phases_in_turn(const Call& call);

// A call's images are computed so many at a time, task after task: phases of an input gradient that each write every
// other pixel of a result find it in the caches. 0: the whole batch, where that is not worth it.
int64_t images_in_turn(const Call& call, const IsaShape& isa, int num_threads);
// `count` images of a call, from `first` on.
Call images_of(const Call& call, int64_t first, int64_t count);

using TaskVisitor = Visitor<Task>;

// Visits the tasks of a call that is not empty, in the order that they have to run in. `refusals`: where those of the
// whole call's candidates, and of each task's before it is visited, are left; or nullptr.
void for_each_task(const Call& call, const IsaShape& isa, int num_threads, const TaskVisitor& visit,
                   Refusals* refusals = nullptr);

}  // namespace conv2d_ext::cpu
