// The products of weights with padding, for a forward that leaves taps in the padding out (visit_forward_gemms).
//
// Such a product is a zero, which changes no sum, unless the weight is infinite or NaN: then it is NaN, and so is every
// output whose sum it belongs to. Weights like these are rare; looking for them takes one reading of the weight.
#pragma once

#include "../../conv2d_problem.h"
#include "../../tensor_view.h"
#include "../base/executor.h"

namespace conv2d_ext::cpu {

// Sets outputs to NaN where a tap that is Inf or NaN in any channel lies in the padding.
void multiply_padding(const Conv2dProblem& problem, DType dtype, ConstTensorView weight, TensorView output,
                      const Executor& executor);

}  // namespace conv2d_ext::cpu
