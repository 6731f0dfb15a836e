// One fuzzed call of what computes element by element or along rows: pointwise functions and their derivatives, sums,
// softmax and its gradient. As convolutions' cases, from bytes or from text: `elements op=sum dtype=float32 ...`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "case.h"

namespace conv2d_ext::fuzz {

enum class ElementOp : int { kValue, kSlope, kPair, kSum, kSoftmax, kSoftmaxGrad, kLogSoftmax, kLogSoftmaxGrad };
constexpr int kElementOps = 8;

struct ElementCase {
  int64_t op = 0, dtype = 0, isa = 0;  // dtype and isa: -1 for all that there are
  int64_t function = 0;                // of the table of functions, or of functions of two numbers
  // Of a function the product of all: elements in a run. Of softmax (outer, length, inner, 1).
  int64_t size[4] = {1, 1, 1, 1};
  int64_t reduced = 0;  // of a sum: bit d where dimension d is summed over
  Layout layout;        // of a sum's input
  int64_t offset[3] = {};
  int64_t values[2] = {};
  int64_t seed = 0, threads = 1, schedule = 0;
  int64_t flush = 0;  // as in a Case
};

// Those that are compiled in and that this machine runs.
std::vector<int> element_isas();

ElementCase decode_elements(const uint8_t* data, size_t size);
bool parse(const char* text, size_t size, ElementCase& result);
std::string to_text(const ElementCase& value);

// Runs a case and compares, as check() does.
void check(const ElementCase& value);

}  // namespace conv2d_ext::fuzz
