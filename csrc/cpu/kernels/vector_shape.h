// What planning is told of a compute type's vectors.
#pragma once

#include "../isa/convert.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// Vectors in the widest panel.
template <class T>
constexpr int kPanelVectors = kTakesBlocks<T> ? 2 : Vec<T>::kMaxVectors;

template <class T>
constexpr VectorShape vector_shape() {
  return {Vec<T>::kLanes,
          kPanelVectors<T>,
          int64_t(sizeof(T)),
          kHasTranspose<T>,
          kTakesBlocks<T>  ? amx_limits()
          : kTakesPairs<T> ? pair_limits()
                           : chain_limits(kFusedMultiplyAdd),
          kTakesBlocks<T>  ? kBlockChannels
          : kTakesPairs<T> ? 2
                           : 1};
}
static_assert(vector_shape<float>().operand_size() == int64_t(sizeof(Operand<float>)));

}  // namespace conv2d_ext::cpu::CONV2D_ISA
