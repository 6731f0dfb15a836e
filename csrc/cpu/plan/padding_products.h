// The products of weights with padding, for a forward in bands (for_each_band), which leaves these products out.
//
// Weight times padding is zero and changes no sum, unless the weight is infinite or NaN. Then the product is NaN, and
// so is every output that sums it. Such weights are rare; the search for them reads the weight once.
#pragma once

#include "../base/executor.h"
#include "call.h"

namespace conv2d_ext::cpu {

// Sets outputs of a forward to NaN where a tap that is Inf or NaN in any channel lies in the padding.
void multiply_padding(const Call& call, const Executor& executor);

}  // namespace conv2d_ext::cpu
