// The kernels of an instruction set as a table.
#pragma once

#include "softmax.h"
#include "sum.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

constexpr reduce::Kernels make_kernels() {
  reduce::Kernels kernels{};
  // In the order of reduce.cpp's index_of.
  kernels.sum[0] = sum_of<float>;
  kernels.sum[1] = sum_of<double>;
  kernels.sum[2] = sum_of<BFloat16>;
  kernels.sum[3] = sum_of<Float16>;
  kernels.softmax[0][0] = softmax_of<float, false>;
  kernels.softmax[0][1] = softmax_of<double, false>;
  kernels.softmax[0][2] = softmax_of<BFloat16, false>;
  kernels.softmax[0][3] = softmax_of<Float16, false>;
  kernels.softmax[1][0] = softmax_of<float, true>;
  kernels.softmax[1][1] = softmax_of<double, true>;
  kernels.softmax[1][2] = softmax_of<BFloat16, true>;
  kernels.softmax[1][3] = softmax_of<Float16, true>;
  kernels.softmax_grad[0][0] = softmax_grad_of<float, false>;
  kernels.softmax_grad[0][1] = softmax_grad_of<double, false>;
  kernels.softmax_grad[0][2] = softmax_grad_of<BFloat16, false>;
  kernels.softmax_grad[0][3] = softmax_grad_of<Float16, false>;
  kernels.softmax_grad[1][0] = softmax_grad_of<float, true>;
  kernels.softmax_grad[1][1] = softmax_grad_of<double, true>;
  kernels.softmax_grad[1][2] = softmax_grad_of<BFloat16, true>;
  kernels.softmax_grad[1][3] = softmax_grad_of<Float16, true>;
  return kernels;
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
