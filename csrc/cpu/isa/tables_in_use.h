// Kernels that come as tables for each instruction set: which are in use.
#pragma once

#include <string_view>

#include "../pointwise/pointwise.h"
#include "../reduce/reduce.h"
#include "engine.h"

namespace conv2d_ext::cpu {

struct Tables {
  pointwise::Rows rows;
  reduce::Kernels kernels;
};
const Tables* portable_tables();
// Null where they are not compiled into this build.
const Tables* avx2_tables();
const Tables* avx512_tables();

// (AVX512_BF16 and AMX have AVX-512's kernels.)
inline const Tables& tables_in_use() {
  static const Tables& chosen = []() -> const Tables& {
    const std::string_view kernels = engine().kernels;
    return *(kernels == "avx512" ? avx512_tables() : kernels == "avx2" ? avx2_tables() : portable_tables());
  }();
  return chosen;
}

}  // namespace conv2d_ext::cpu
