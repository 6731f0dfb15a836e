// Kernels that come as tables for each instruction set.
#pragma once

#include "../pointwise/pointwise.h"
#include "../reduce/reduce.h"

namespace conv2d_ext::cpu {

struct Tables {
  pointwise::Rows rows;
  reduce::Kernels kernels;
};
const Tables* portable_tables();
// Null where they are not compiled into this build.
const Tables* avx2_tables();
const Tables* avx512_tables();

}  // namespace conv2d_ext::cpu
