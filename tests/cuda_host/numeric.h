// Number formats and fused multiplication as the device has them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace conv2d_ext::cuda {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

struct Float16 {
  static constexpr bool kIsBFloat16 = false;
  uint16_t bits;
};
struct BFloat16 {
  static constexpr bool kIsBFloat16 = true;
  uint16_t bits;
};

inline float widen(BFloat16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }
inline float widen(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t magnitude = value.bits & 0x7fff;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);  // Inf, NaN
  // As a float32 with the same fields, and then by the difference of the biases: exact for denormals too.
  return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
}

inline void narrow(float value, BFloat16& result) {
  const uint32_t bits = bits_of(value);
  result.bits = std::isnan(value) ? 0x7fff : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void narrow(float value, Float16& result) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t rounded;
  if (magnitude > 0x7f800000u) {
    result.bits = 0x7fff;
    return;
  }
  if (magnitude >= 0x477ff000u) {  // 65520 lies half way between the largest number and the one after it
    rounded = 0x7c00;
  } else if (magnitude >= 0x38800000u) {  // normal, from 2^-14
    rounded = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  } else {  // a multiple of 2^-24, which is what 0.5f rounds its sums to
    rounded = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  }
  result.bits = static_cast<uint16_t>(sign | rounded);
}

// NaN would overflow into the sign: it keeps its upper bits, of which one must be set.
inline uint32_t round_to_tf32(float value) {
  if (std::isnan(value)) return (bits_of(value) & 0xffffe000u) | 0x00400000u;
  return (bits_of(value) + 0x1000) & 0xffffe000u;
}

inline unsigned opaque(unsigned value) { return value; }
inline int64_t opaque(int64_t value) { return value; }

inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline double multiply_add(double a, double b, double c) { return std::fma(a, b, c); }

}  // namespace conv2d_ext::cuda
