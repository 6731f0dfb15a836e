// The kernels of an instruction set as a table.
#pragma once

#include "softmax.h"
#include "sum.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// At a type's place in DType's order.
template <class S>
constexpr void set_kernels(reduce::Kernels& kernels, int at) {
  kernels.sum[at] = sum_of<S>;
  kernels.softmax[0][at] = softmax_of<S, false>;
  kernels.softmax[1][at] = softmax_of<S, true>;
  kernels.softmax_grad[0][at] = softmax_grad_of<S, false>;
  kernels.softmax_grad[1][at] = softmax_grad_of<S, true>;
}

constexpr reduce::Kernels make_kernels() {
  reduce::Kernels kernels{};
  set_kernels<float>(kernels, 0);
  set_kernels<double>(kernels, 1);
  set_kernels<BFloat16>(kernels, 2);
  set_kernels<Float16>(kernels, 3);
  return kernels;
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
