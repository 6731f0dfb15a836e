// The body of every tables_<isa>.cpp: kernels that need no planning.
#pragma once

#include "../pointwise/rows.h"
#include "../reduce/softmax.h"
#include "../reduce/sum.h"
#include "tables_in_use.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class... S>
constexpr reduce::Kernels make_kernels(Types<S...>) {
  return {{sum_of<S>...},
          {{softmax_of<S, false>...}, {softmax_of<S, true>...}},
          {{softmax_grad_of<S, false>...}, {softmax_grad_of<S, true>...}}};
}
constexpr Tables make_tables() { return {make_rows(FloatingTypes()), make_kernels(FloatingTypes())}; }

}  // namespace conv2d_ext::cpu::CONV2D_ISA
