// What planning is told of a compute type's vectors.
#pragma once

#include "../isa/convert.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

template <class T>
constexpr VectorShape vector_shape() {
  return {Vec<T>::kLanes, Vec<T>::kMaxVectors, int64_t(sizeof(T)), kHasTranspose<T>,
          kTakesPairs<T> ? kPairLimits : chain_limits(kFusedMultiplyAdd)};
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
