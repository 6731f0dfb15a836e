// isa/convert.h, and what Vec<T> moves within registers.
#pragma once

#include <cmath>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "arithmetic.h"

namespace parts {

// A 16-bit format: exponent and fraction bits, as IEEE 754 defines a binary format.
template <class S>
struct Format;
template <>
struct Format<BFloat16> {
  static constexpr int kFraction = 7, kBias = 127;
};
template <>
struct Format<Float16> {
  static constexpr int kFraction = 10, kBias = 15;
};
template <class S>
double value_of(uint16_t bits) {
  constexpr int kFraction = Format<S>::kFraction;
  const int exponent = (bits & 0x7fff) >> kFraction, fraction = bits & ((1 << kFraction) - 1);
  double magnitude = 0;
  if (exponent == 0x7fff >> kFraction) {
    magnitude = fraction == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else {
    const int implicit = exponent == 0 ? 0 : 1 << kFraction;
    magnitude = std::ldexp(double(implicit + fraction), (exponent == 0 ? 1 : exponent) - Format<S>::kBias - kFraction);
  }
  return bits >> 15 ? -magnitude : magnitude;
}

// Numbers to be rounded, and what they become.
template <class S>
struct Rounded {
  std::vector<float> values;
  std::vector<uint16_t> bits;
  void take(double value, uint16_t rounded) {
    values.push_back(float(value));
    bits.push_back(rounded);
  }
};
template <class S>
Rounded<S> rounding_cases() {
  Rounded<S> cases;
  constexpr uint16_t kInfinity = uint16_t(0x7fff >> Format<S>::kFraction << Format<S>::kFraction);
  const float above_all = std::numeric_limits<float>::infinity();
  for (const uint16_t sign : {uint16_t(0), uint16_t(0x8000)}) {
    const double s = sign ? -1 : 1;
    for (uint16_t low = 0; low < kInfinity; ++low) {
      const double here = value_of<S>(low);
      // Beyond the largest number there would be one more, whose place infinity takes.
      const double next =
          low + 1 < kInfinity ? value_of<S>(uint16_t(low + 1)) : 2 * here - value_of<S>(uint16_t(low - 1));
      const double middle = (here + next) / 2;  // a float32 for either format, but below bfloat16's smallest number
      const float tie = float(middle);
      const uint16_t even = uint16_t(sign | (low % 2 == 0 ? low : low + 1));
      cases.take(s * here, uint16_t(sign | low));
      cases.take(s * tie, even);
      cases.take(s * std::nextafter(tie, 0.0f), uint16_t(sign | low));
      cases.take(s * std::nextafter(tie, above_all), uint16_t(sign | (low + 1)));
    }
    cases.take(s * std::numeric_limits<float>::infinity(), uint16_t(sign | kInfinity));
    cases.take(s * std::numeric_limits<float>::max(), uint16_t(sign | kInfinity));
    cases.take(s * std::numeric_limits<float>::denorm_min(), sign);
  }
  return cases;
}

// Two vectors from `first` on as the even and the odd elements, beside vectors of all.
template <class S>
void check_widening_in_turn([[maybe_unused]] int first) {
  if constexpr (kHasEvenOdd<S>) {
    constexpr int L = Vec<float>::kLanes;
    Buffer<S> from(2 * L), in_turn(2 * L);
    for (int i = 0; i < 2 * L; ++i) {
      from[i].bits = uint16_t(first + i);
      in_turn[i % 2 * L + i / 2] = from[i];
    }
    typename Vec<float>::reg halves[2];
    widen_even_odd(from.data(), halves[0], halves[1]);
    for (int half = 0; half < 2; ++half) {
      float actual[L], expected[L];
      Vec<float>::store(actual, halves[half]);
      Vec<float>::store(expected, load_as(in_turn.data() + half * L));
      expect(std::memcmp(actual, expected, sizeof actual) == 0, "even or odd elements are widened otherwise");
    }
  }
}

template <class S>
void check_widening(const char* environment) {
  constexpr int L = Vec<float>::kLanes;
  for (int first = 0; first < 65536; first += L) {
    Buffer<S> from(L);
    Result<float> scalar(L), whole(L), partial(L);
    for (int i = 0; i < L; ++i) from[i].bits = uint16_t(first + i);
    describe("%s, widened from %04x", environment, unsigned(first));
    for (int i = 0; i < L; ++i) scalar.actual[i] = widen_scalar(from[i]);
    Vec<float>::store(whole.data(), load_as(from.data()));
    // Of a partial vector the other lanes become zero.
    const int n = first / L % (L + 1);
    Buffer<S> some(n);
    for (int i = 0; i < n; ++i) some[i] = from[i];
    Vec<float>::store(partial.data(), load_as_partial(some.data(), n));
    check_widening_in_turn<S>(first);
    for (int i = 0; i < L; ++i) {
      const double exact = value_of<S>(from[i].bits);
      float value = float(exact);
      for (Result<float>* result : {&scalar, &whole, &partial}) {
        if (exact != exact && (result != &partial || i < n)) {  // any NaN of the same sign
          expect(result->actual[i] != result->actual[i], "no NaN");
          expect(std::signbit(result->actual[i]) == (from[i].bits >> 15 != 0), "another sign");
          result->ignore(i);
        } else {
          result->expected[size_t(i)] = result == &partial && i >= n ? 0 : value;
        }
      }
    }
    scalar.compare();
    whole.compare();
    partial.compare();
  }
}
// Another control of floating-point numbers while it lives; 0: the usual one.
class FloatControl {
 public:
#if defined(__x86_64__)
  explicit FloatControl(unsigned control) : usual_(_mm_getcsr()) { _mm_setcsr(control != 0 ? control : usual_); }
  ~FloatControl() { _mm_setcsr(usual_); }

 private:
  const unsigned usual_;
#else
  explicit FloatControl(unsigned) {}
  ~FloatControl() {}
#endif
};
// The same of vectors of even and odd elements: rows of them, each beginning with another case.
template <class S>
void check_narrowing_in_turn([[maybe_unused]] unsigned control) {
  if constexpr (kHasEvenOdd<S>) {
    constexpr int L = Vec<float>::kLanes, kRows = 3, kPitch = 2 * L + 5;
    const Rounded<S> cases = rounding_cases<S>();
    for (size_t first = 0; first < cases.values.size(); first += 5) {
      describe("narrowed from case %d on, even and odd elements", int(first));
      const auto number = [&](int row, int i) { return (first + size_t(row * 2 * L + i)) % cases.values.size(); };
      typename Vec<float>::reg even[kRows], odd[kRows];
      Result<S> rows((kRows - 1) * kPitch + 2 * L);
      for (int row = 0; row < kRows; ++row) {
        float values[2][L];
        for (int i = 0; i < 2 * L; ++i) {
          values[i % 2][i / 2] = cases.values[number(row, i)];
          rows.expected[size_t(row * kPitch + i)] = S{cases.bits[number(row, i)]};
        }
        even[row] = Vec<float>::load(values[0]);
        odd[row] = Vec<float>::load(values[1]);
      }
      {
        const FloatControl set(control);
        narrow_even_odd(rows.data(), kPitch, even, odd);
      }
      rows.compare();
    }
  }
}
template <class S>
void check_narrowing(unsigned control = 0) {
  constexpr int L = Vec<float>::kLanes;
  const Rounded<S> cases = rounding_cases<S>();
  const int64_t count = int64_t(cases.values.size());
  for (int64_t first = 0; first < count; first += L) {
    const int lanes = int(min64(L, count - first)), n = int(first / L % (lanes + 1));
    float values[L] = {};
    for (int i = 0; i < lanes; ++i) values[i] = cases.values[size_t(first + i)];
    describe("narrowed from case %d", int(first));
    Result<S> scalar(lanes), whole(L), partial(n);
    {
      const FloatControl set(control);
      for (int i = 0; i < lanes; ++i) scalar.actual[i] = Narrow<S>::from(values[i]);
      store_as(whole.data(), Vec<float>::load(values));
      store_as_partial(partial.data(), Vec<float>::load(values), n);
    }
    for (int i = 0; i < lanes; ++i) {
      const S expected{cases.bits[size_t(first + i)]};
      scalar.expected[size_t(i)] = whole.expected[size_t(i)] = expected;
      if (i < n) partial.expected[size_t(i)] = expected;
    }
    for (int i = lanes; i < L; ++i) whole.ignore(i);
    scalar.compare();
    whole.compare();
    partial.compare();
  }
  check_narrowing_in_turn<S>(control);
  // NaNs stay NaNs of their sign, also those whose fraction has bits beyond the format's alone.
  for (uint32_t fraction = 1; fraction < 0x800000; fraction = fraction * 2 + fraction % 3) {
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const uint32_t bits = sign | 0x7f800000u | fraction;
      describe("NaN %08x", bits);
      float values[L];
      for (float& value : values) std::memcpy(&value, &bits, sizeof value);
      Buffer<S> whole(L);
      store_as(whole.data(), Vec<float>::load(values));
      for (const uint16_t stored : {whole[0].bits, whole[L - 1].bits, Narrow<S>::from(values[0]).bits}) {
        expect(std::isnan(value_of<S>(stored)) && stored >> 15 == int(sign >> 31), "no NaN, or of another sign");
      }
    }
  }
}
template <class S>
void check_convert() {
  begin_part(std::string("convert ") + kNameOf<S>);
  check_widening<S>("as usual");
#if defined(__x86_64__)
  // Widening is exact, also in a thread that flushes denormal numbers. (bfloat16's denormal numbers are float32's.)
  if constexpr (std::is_same_v<S, Float16>) {
    const unsigned usual = _mm_getcsr();
    _mm_setcsr(usual | 0x8040);
    check_widening<S>("denormal numbers flushed");
    _mm_setcsr(usual);
  }
#endif
  check_narrowing<S>();
#if defined(__x86_64__)
  if constexpr (std::is_same_v<S, BFloat16>) {
    // bfloat16's denormal numbers are float32's, and stay in a thread that takes those as zeros.
    const unsigned usual = _mm_getcsr();
    for (const unsigned flushing : {0x8040u, 0x0040u}) check_narrowing<S>(usual | flushing);
    // Again as a CPU without the instruction does.
    const bool narrows = cpu_narrows_bfloat16;
    cpu_narrows_bfloat16 = false;
    check_narrowing<S>(usual);
    cpu_narrows_bfloat16 = narrows;
  }
#endif
}

template <class T>
void check_vector() {
  begin_part(std::string("Vec ") + kNameOf<T>);
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  Random random(50);
  for (int n = 0; n <= L; ++n) {
    describe("%d of %d lanes", n, L);
    Buffer<T> from(n);
    Result<T> loaded(L), stored(n);
    fill(from, random);
    V::store(loaded.data(), V::load_partial(from.data(), n));
    V::store_partial(stored.data(), V::load(loaded.data()), n);
    for (int i = 0; i < L; ++i) loaded.expected[size_t(i)] = i < n ? from[i] : T{};
    for (int i = 0; i < n; ++i) stored.expected[size_t(i)] = from[i];
    loaded.compare();
    stored.compare();
  }
  if constexpr (kHasTranspose<T>) {
    describe("transpose, unzip, zip");
    Buffer<T> rows(L * L);
    Result<T> turned(L * L), even(L), odd(L), zipped(2 * L);
    fill(rows, random);
    typename V::reg r[L], halves[2], again[2];
    for (int i = 0; i < L; ++i) r[i] = V::load(rows.data() + i * L);
    V::unzip(r[0], r[1], halves[0], halves[1]);
    V::zip(halves[0], halves[1], again[0], again[1]);
    V::transpose(r);
    for (int i = 0; i < L; ++i) {
      V::store(turned.data() + i * L, r[i]);
      for (int j = 0; j < L; ++j) turned.expected[size_t(i * L + j)] = rows[j * L + i];
      even.expected[size_t(i)] = rows[2 * i];
      odd.expected[size_t(i)] = rows[2 * i + 1];
    }
    V::store(even.data(), halves[0]);
    V::store(odd.data(), halves[1]);
    for (int i = 0; i < 2; ++i) V::store(zipped.data() + i * L, again[i]);
    for (int i = 0; i < 2 * L; ++i) zipped.expected[size_t(i)] = rows[i];
    for (Result<T>* result : {&turned, &even, &odd, &zipped}) result->compare();
  }
}

}  // namespace parts
