// Storage types that C++17 lacks. Plain bits: the arithmetic lives in isa/convert.h, compiled per instruction set.
#pragma once

#include <cstdint>
#include <type_traits>

namespace conv2d_ext::cpu {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
// Two bfloat16 numbers that one instruction multiplies and adds together; the first is the low half.
struct __attribute__((packed, aligned(2))) BFloat16Pair {  // anywhere in a tensor of bfloat16
  uint32_t bits;
};
// The channels of a pixel, or of a result channel's weight, that a row of an AMX tile holds.
constexpr int64_t kBlockChannels = 32;
struct BFloat16Block {
  BFloat16 channel[kBlockChannels];
};
constexpr int64_t kAmxTileRows = 16;
template <class R>
struct Complex {
  R re, im;
};

// The type that sums of a storage type are kept in.
template <class S>
struct ComputeTypeOf {
  using type = S;
};
template <>
struct ComputeTypeOf<BFloat16> {
  using type = float;
};
template <>
struct ComputeTypeOf<Float16> {
  using type = float;
};
// No CPU multiplies bytes. What wraps around in 16 bits does so in 8.
template <>
struct ComputeTypeOf<uint8_t> {
  using type = uint16_t;
};
template <class S>
using ComputeType = typename ComputeTypeOf<S>::type;

// Real floating-point types of storage.
template <class S>
constexpr bool kIsFloating = std::is_floating_point_v<ComputeType<S>>;

template <class... S>
struct Types {};
// In the order of DType.
using FloatingTypes = Types<float, double, BFloat16, Float16>;

}  // namespace conv2d_ext::cpu
