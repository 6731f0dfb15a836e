// The rows of the instruction set in use.
#include "pointwise.h"

#include <cstring>

#include "../isa/engine.h"

namespace conv2d_ext::cpu::pointwise {

namespace {

// AVX512_BF16 has nothing to add here.
const Rows& choose_rows() {
  const char* const isa = engine().isa;
  if (std::strncmp(isa, "avx512", 6) == 0) return *avx512_rows();
  if (std::strcmp(isa, "avx2") == 0) return *avx2_rows();
  return *portable_rows();
}

const Rows& rows() {
  static const Rows& chosen = choose_rows();
  return chosen;
}

int index_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 1;
    case DType::kBFloat16:
      return 2;
    case DType::kFloat16:
      return 3;
    default:
      return 0;
  }
}

}  // namespace

ValueRow value_row(Function function, DType dtype) { return rows().value[int(function)][index_of(dtype)]; }
SlopeRow slope_row(Function function, DType dtype) { return rows().slope[int(function)][index_of(dtype)]; }

}  // namespace conv2d_ext::cpu::pointwise
