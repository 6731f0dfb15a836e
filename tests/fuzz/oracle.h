// What a call has to compute, by loops over its products: in float64 for types that are summed in float32, in extended
// precision for float64, modulo 2^64 for integers.
#pragma once

#include <vector>

#include "tensor.h"

namespace conv2d_ext::fuzz {

// Of each result element, or of each part of a complex one.
struct Expected {
  std::vector<long double> value;
  std::vector<double> magnitude;  // the sum of the finite products' sizes
  std::vector<uint64_t> whole;    // of integers, instead
  int64_t products = 0;           // the longest sum's
};

// The operands in the op's order; `bias` may be null, of others than the forward it is.
Expected expect(Op op, const Conv2dProblem& problem, const Numbers& a, const Numbers& b, const Numbers* bias);

// The sizes of input, weight and output.
Sizes tensor_size(const Conv2dProblem& problem, int tensor);
// Which tensors are a call's operands, and which one is its result (that of grad_bias is none of them).
struct Roles {
  int a, b, result;
};
constexpr Roles roles_of(Op op) {
  return is_forward(op)          ? Roles{0, 1, 2}
         : op == Op::kGradInput  ? Roles{2, 1, 0}
         : op == Op::kGradWeight ? Roles{2, 0, 1}
                                 : Roles{2, 2, -1};
}
Sizes result_size(Op op, const Conv2dProblem& problem);

}  // namespace conv2d_ext::fuzz
