#include "numbers.h"

#include <cmath>
#include <limits>

namespace conv2d_ext::fuzz {

namespace {

constexpr Format kFloat32{4, 23, -126, 127, 0x1p-24, 0x1p-126, 0x1p-149, 0x1.fffffep127};
constexpr Format kFloat64{8, 52, -1022, 1023, 0x1p-53, 0x1p-1022, 0x1p-1074, 0x1.fffffffffffffp1023};
constexpr Format kBFloat16{2, 7, -126, 127, 0x1p-8, 0x1p-126, 0x1p-133, 0x1.fep127};
constexpr Format kFloat16{2, 10, -14, 15, 0x1p-11, 0x1p-14, 0x1p-24, 65504.0};

}  // namespace

const Format& storage_format(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return kBFloat16;
    case DType::kFloat16:
      return kFloat16;
    default:
      return compute_format(dtype);
  }
}

const Format& compute_format(DType dtype) {
  return dtype == DType::kFloat64 || dtype == DType::kComplex128 ? kFloat64 : kFloat32;
}

double decode(const Format& format, const uint8_t* bytes) {
  if (format.bytes == 8) {
    double value;
    std::memcpy(&value, bytes, 8);
    return value;
  }
  uint32_t bits = 0;
  std::memcpy(&bits, bytes, size_t(format.bytes));
  if (format.fraction == 10) {
    const int exponent = int(bits >> 10 & 31), fraction = int(bits & 1023);
    const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    if (exponent == 31) {
      return fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
    }
    return sign * (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25));
  }
  if (format.bytes == 2) bits <<= 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return double(value);
}

void encode(const Format& format, double value, uint8_t* bytes) {
  if (format.bytes == 8) {
    std::memcpy(bytes, &value, 8);
    return;
  }
  uint32_t bits;
  if (format.fraction == 10) {
    bits = std::signbit(value) ? 0x8000 : 0;
    const double size = std::fabs(value);
    if (std::isnan(value)) {
      bits |= 0x7e00;
    } else if (std::isinf(value)) {
      bits |= 0x7c00;
    } else if (size > format.largest) {
      bits |= 0x7bff;
    } else if (size < format.least_normal) {
      bits |= uint32_t(std::ldexp(size, 24));
    } else {
      const int exponent = std::ilogb(size);
      bits |= uint32_t((exponent + 15) << 10) | (uint32_t(std::ldexp(size, 10 - exponent)) & 1023);
    }
  } else {
    const float rounded = float(value);
    std::memcpy(&bits, &rounded, 4);
    if (format.bytes == 2) bits >>= 16;
  }
  std::memcpy(bytes, &bits, size_t(format.bytes));
}

bool same_bits(DType dtype, const uint8_t* a, const uint8_t* b) {
  const int64_t size = size_of(dtype);
  if (std::memcmp(a, b, size_t(size)) == 0) return true;
  if (is_integer(dtype)) return false;
  const Format& format = storage_format(dtype);
  for (int64_t at = 0; at < size; at += format.bytes) {
    if (std::memcmp(a + at, b + at, size_t(format.bytes)) == 0) continue;
    if (!std::isnan(decode(format, a + at)) || !std::isnan(decode(format, b + at))) return false;
  }
  return true;
}

}  // namespace conv2d_ext::fuzz
