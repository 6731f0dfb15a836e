// The rows of the instruction set in use.
#include "pointwise.h"

#include "../isa/tables_in_use.h"

namespace conv2d_ext::cpu::pointwise {

namespace {

const Rows& rows() { return tables_in_use().rows; }

}  // namespace

ValueRow value_row(Function function, DType dtype) { return rows().value[int(function)][int(dtype)]; }
SlopeRow slope_row(Function function, DType dtype) { return rows().slope[int(function)][int(dtype)]; }
PairRow pair_row(PairFunction function, DType dtype) { return rows().pair[int(function)][int(dtype)]; }

}  // namespace conv2d_ext::cpu::pointwise
