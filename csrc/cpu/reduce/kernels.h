// The kernels of an instruction set as a table.
#pragma once

#include "softmax.h"
#include "sum.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class... S>
constexpr reduce::Kernels make_kernels(Types<S...>) {
  return {{sum_of<S>...},
          {{softmax_of<S, false>...}, {softmax_of<S, true>...}},
          {{softmax_grad_of<S, false>...}, {softmax_grad_of<S, true>...}}};
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
