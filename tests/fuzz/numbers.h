// Numbers of every dtype as bits, and as what the oracle computes with.
#pragma once

#include <cstdint>
#include <cstring>

#include "../../csrc/tensor_view.h"

namespace conv2d_ext::fuzz {

inline bool is_complex(DType dtype) { return dtype == DType::kComplex64 || dtype == DType::kComplex128; }
inline bool is_half(DType dtype) { return dtype == DType::kBFloat16 || dtype == DType::kFloat16; }

// A floating-point format: numbers of a dtype, or of a part of a complex one.
struct Format {
  int bytes;
  int fraction;     // bits after the point
  int least, most;  // exponents of normal numbers
  double unit;      // unit roundoff
  double least_normal, least_denormal, largest;
};
const Format& storage_format(DType dtype);
// What sums are kept in.
const Format& compute_format(DType dtype);

// Exact, but that encode() rounds towards zero.
double decode(const Format& format, const uint8_t* bytes);
void encode(const Format& format, double value, uint8_t* bytes);

// Whether results are the same: bit by bit, but that any NaN is like any other.
bool same_bits(DType dtype, const uint8_t* a, const uint8_t* b);

// A sequence of random numbers.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0xd1342543de82ef95u + 0x632be59bd9b4e019u) {}
  uint64_t next() {  // splitmix64
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return int64_t(next() % uint64_t(n)); }
  double unit() { return double(next() >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

}  // namespace conv2d_ext::fuzz
