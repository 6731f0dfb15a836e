// The body of every tables_<isa>.cpp: kernels that need no planning.
#pragma once

#include "../pointwise/rows.h"
#include "../reduce/kernels.h"
#include "tables_in_use.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

constexpr Tables make_tables() { return {make_rows(FloatingTypes()), make_kernels(FloatingTypes())}; }

}  // namespace conv2d_ext::cpu::CONV2D_ISA
