// The products of weights with padding, for a forward in bands (visit_forward_gemms), which leaves these products out.
//
// Weight times padding is zero and changes no sum, unless the weight is infinite or NaN. Then the product is NaN, and
// so is every output that sums it. Such weights are rare; the search for them reads the weight once.
#pragma once

#include "../../conv2d_problem.h"
#include "../../tensor_view.h"
#include "../base/executor.h"

namespace conv2d_ext::cpu {

// Sets outputs to NaN where a tap that is Inf or NaN in any channel lies in the padding.
void multiply_padding(const Conv2dProblem& problem, DType dtype, ConstTensorView weight, TensorView output,
                      const Executor& executor);

}  // namespace conv2d_ext::cpu
