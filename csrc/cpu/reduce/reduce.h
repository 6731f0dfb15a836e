// Sums and softmax over dimensions, in an order that an element's position along those dimensions fixes: not the number
// of results, their layout, the threads or the instruction set. Torch-free.
//
// Positions go through several dimensions as these lie in memory, the largest stride first.
//
// The order: position p along the reduced dimensions is added to lane p % 16. Softmax adds the lanes of a whole row
// pairwise (lane i and lane i + 8, then + 4, + 2, + 1). A sum does so for each block of 512 positions; blocks are added
// pairwise in the order of a binary counter, 64 of them at most, and what these make is added in the same way. So a
// sum's error grows with the logarithm of its length, and threads can share out even one sum.
#pragma once

#include <cstdint>

#include "../../tensor_view.h"
#include "../base/executor.h"

namespace conv2d_ext::cpu::reduce {

constexpr int kMaxDims = 64;

// Dimensions in the order of their positions, the last one fastest. Strides are in elements.
struct Dims {
  int count = 0;
  int64_t size[kMaxDims], stride[kMaxDims];

  int64_t numel() const {
    int64_t product = 1;
    for (int i = 0; i < count; ++i) product *= size[i];
    return product;
  }
  // Appends a dimension; one that continues the last one becomes a part of it.
  void append(int64_t new_size, int64_t new_stride) {
    if (new_size == 1) return;
    if (count > 0 && stride[count - 1] == new_size * new_stride) {
      size[count - 1] *= new_size;
      stride[count - 1] = new_stride;
      return;
    }
    size[count] = new_size;
    stride[count++] = new_stride;
  }
};

// result[k] = sum over all positions p of `reduced` of input[k, p]; the result is contiguous over `kept`.
struct SumCall {
  Dims kept, reduced;
  const void* input;
  void* result;
};

// All tensors are contiguous and of (outer, length, inner); softmax is over `length`, which is not empty.
struct SoftmaxCall {
  const void* first;   // the input; of a gradient that of the output
  const void* second;  // of a gradient the output
  void* result;
  int64_t outer, length, inner;
};

using SumFunction = void (*)(const SumCall&, const Executor&);
using SoftmaxFunction = void (*)(const SoftmaxCall&, const Executor&);

// What an instruction set provides. By dtype; softmax by whether it is log_softmax as well.
struct Kernels {
  SumFunction sum[kFloatingDTypes];
  SoftmaxFunction softmax[2][kFloatingDTypes], softmax_grad[2][kFloatingDTypes];
};

// Of the instruction set in use. The dtype is one of the four.
void sum(DType dtype, const SumCall& call, const Executor& executor);
// y = e^(x - m) / s, or with log (x - m) - ln s; m the largest x, s the sum of e^(x - m).
void softmax(DType dtype, bool log, const SoftmaxCall& call, const Executor& executor);
// gx = y * (gy - sum of gy * y), or with log gy - e^y * (sum of gy).
void softmax_grad(DType dtype, bool log, const SoftmaxCall& call, const Executor& executor);

}  // namespace conv2d_ext::cpu::reduce
