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

// AVX512_BF16 and AMX have none of their own.
inline const Tables& tables_in_use() {
  static const Tables& chosen = []() -> const Tables& {
    const std::string_view isa = engine().isa;
    const bool wide = isa.substr(0, 6) == "avx512" || isa.substr(0, 3) == "amx";
    return *(wide ? avx512_tables() : isa == "avx2" ? avx2_tables() : portable_tables());
  }();
  return chosen;
}

}  // namespace conv2d_ext::cpu
