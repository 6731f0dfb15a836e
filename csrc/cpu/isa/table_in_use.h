// Kernels that come as a table for each instruction set: which table is in use.
#pragma once

#include <string_view>

#include "engine.h"

namespace conv2d_ext::cpu {

// AVX512_BF16 and AMX have no table of their own. One that is not compiled is null.
template <class Table>
const Table& table_in_use(const Table* portable, const Table* avx2, const Table* avx512) {
  const std::string_view isa = engine().isa;
  return *(isa.substr(0, 6) == "avx512" || isa.substr(0, 3) == "amx" ? avx512 : isa == "avx2" ? avx2 : portable);
}

}  // namespace conv2d_ext::cpu
