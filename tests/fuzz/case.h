// One fuzzed call of the CPU engine: a problem, how its tensors lie, what values they hold, and how it is run.
//
// A case comes from bytes (decode.cpp), as libFuzzer and the seeded generator make them, or from text, as the files of
// the corpus hold it and as a failure prints it: `conv2d op=grad_input dtype=float32 batch=2 ...`, what isn't named
// being the default.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "../../csrc/conv2d_problem.h"
#include "../../csrc/tensor_view.h"

namespace conv2d_ext::fuzz {

enum class Op : int { kForward, kGradInput, kGradWeight, kGradBias, kMatmul };

// A product of matrices is described as the forward it is: K channels, a row of pixels for each row of mat1.
constexpr bool is_forward(Op op) { return op == Op::kForward || op == Op::kMatmul; }

// How a tensor of sizes (d0, d1, d2, d3) lies in memory.
struct Layout {
  int64_t order = 0;      // the order of its dimensions: kOrders, outermost first
  int64_t slice[4] = {};  // of each: elements left out at its end (0 to 3), and 4 where every other one is left out
  int64_t expanded = 0;   // bit d: dimension d has stride 0
  int64_t windows = 0;    // 1 to 3: the dimension next to the innermost one steps by a half to a quarter of it
  int64_t offset = 0;     // elements between a border of 64 bytes and the first one
  int64_t single = 0;     // which stride dimensions of one element have: kSingleStrides
  int64_t far = 0;        // the outermost dimension's elements lie more than 2^31 elements apart
};
constexpr int kOrders = 24, kContiguous = 0, kChannelsLast = 3;
extern const int kOrder[kOrders][4];
void clamp(Layout& layout);  // into what layouts are, of a text
constexpr int64_t kSingleStrides[] = {-1, 0, 1, 7, int64_t{1} << 33, int64_t{1} << 62};  // -1: as if it were larger

// Calls number(name, field) for each.
template <class Number>
void visit_layout(const std::string& tensor, Layout& layout, Number number) {
  number(tensor + ".order", layout.order);
  for (int d = 0; d < 4; ++d) number(tensor + ".slice" + std::to_string(d), layout.slice[d]);
  number(tensor + ".expanded", layout.expanded);
  number(tensor + ".windows", layout.windows);
  number(tensor + ".offset", layout.offset);
  number(tensor + ".single", layout.single);
  number(tensor + ".far", layout.far);
}

// What numbers an operand holds.
enum class Values : int {
  kNormal,        // of mean zero
  kPositive,      // of mean 0.5
  kRectified,     // half of them zero, the others positive
  kSmallWhole,    // whole numbers from -4 to 4: sums are exact
  kZeros,         // +0 and -0, and a few ones
  kDenormal,      // denormal numbers of the dtype
  kUnderflowing,  // products underflow
  kOverflowing,   // products overflow
  kWild,          // of all magnitudes
  kInfinite,      // normal ones, some of them infinite
  kNaN,           // normal ones, some of them NaN or infinite
  kLeastNormal,   // around the least normal number
};
constexpr int kValues = 12;
extern const char* const kValueNames[kValues];

struct Case {
  int64_t op = 0, dtype = 0;
  int64_t isa = 0;                                 // of seams.h's list
  int64_t batch = 1, groups = 1, in = 1, out = 1;  // channels of a group
  int64_t in_h = 1, in_w = 1, kernel_h = 1, kernel_w = 1;
  int64_t stride_h = 1, stride_w = 1, top = 0, bottom = 0, left = 0, right = 0, dilation_h = 1, dilation_w = 1;
  int64_t bias = 0, bias_stride = 1;
  Layout layout[3];                   // of input, weight, output, or of their gradients
  int64_t values[3] = {};             // of the operands, in the op's order, and of the bias
  int64_t seed = 0;                   // of the values
  int64_t threads = 1, schedule = 0;  // kSchedules of threads.h
  int64_t rounding = 0;               // to nearest, down, up, towards zero
  int64_t flush = 0;                  // 1: denormal results are flushed, 2: operands too
  int64_t limits = 0;                 // seams.h: the product's, or smaller ones; and caches
  int64_t variants = 127;             // which other ways to run it are compared with the first: check.cpp
  int64_t winograd = 0;               // asked for
  int64_t plan = 0;                   // only explained, not run: sizes may be anything

  Conv2dProblem problem() const;
};

// The rule of conv2d_checks.cpp: whether the engine may be called with it. Fills in the output's size.
bool is_valid(Conv2dProblem& problem, DType dtype);

// Whether a problem is a product of matrices.
bool is_product(const Conv2dProblem& problem);

// Multiply-adds of a valid problem.
double products(const Conv2dProblem& problem);

// A case from bytes of a fuzzer, or from text; false where text can't be read.
Case decode(const uint8_t* data, size_t size);
bool parse(const char* text, size_t size, Case& result);
std::string to_text(const Case& value);

const char* name_of(DType dtype);
const char* name_of(Op op);

}  // namespace conv2d_ext::fuzz
