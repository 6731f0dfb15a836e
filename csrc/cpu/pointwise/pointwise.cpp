// The rows of the instruction set in use.
#include "pointwise.h"

#include "../isa/tables_in_use.h"

namespace conv2d_ext::cpu::pointwise {

namespace {

const Rows& rows() { return tables_in_use().rows; }

// Tables have the real floating-point types in DType's order.
int index_of(DType dtype) { return static_cast<int>(dtype); }

}  // namespace

ValueRow value_row(Function function, DType dtype) { return rows().value[int(function)][index_of(dtype)]; }
SlopeRow slope_row(Function function, DType dtype) { return rows().slope[int(function)][index_of(dtype)]; }
PairRow pair_row(PairFunction function, DType dtype) { return rows().pair[int(function)][index_of(dtype)]; }

}  // namespace conv2d_ext::cpu::pointwise
