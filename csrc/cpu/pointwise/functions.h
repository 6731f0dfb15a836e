// Pointwise functions f and their derivatives f', written so that a result's bits follow from its argument alone: out
// of IEEE operations that round once (+ - * /, sqrt), operations on bits, and selections, without branches and without
// fused multiply-adds. So vectors of every instruction set agree, and the lanes of one.
//
// Three kinds of numbers go through the same formulas:
//   Floats    a vector of floats: float32, bfloat16 and float16
//   Doubles   a vector of doubles, for the same types where float would not do (kWide); only to float's accuracy
//   double    float64, by the C library, one element at a time
//
// The polynomials are least-squares fits in 60 digits, close to minimax; tools/pointwise_coefficients.py makes them and
// prints their errors. Largest errors of float32 results, in units in the last place, measured against float64
// (tests/test_pointwise.py holds them):
//   exp 1, tanh 1.5, erf 1.5, rsqrt 1.5, kWide 0.51, sigmoid 2.5, softplus 3, elu 2.5
//   silu 3, mish 3.5, where no factor of the result is subnormal
//   gelu 4 above -1; below, the error of e^(-x^2 / 2) grows as x^2 does. (gelu_tanh loses more: it is the formula.)
#pragma once

#include "../isa/vec.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// The vectors of Vec<T>, by names that can be template arguments.
typedef float Floats __attribute__((vector_size(sizeof(Vec<float>::reg))));
typedef double Doubles __attribute__((vector_size(sizeof(Vec<double>::reg))));

// ---- the numbers

template <class T>
struct NumberOf;
template <>
struct NumberOf<Floats> {
  typedef int32_t Bits __attribute__((vector_size(sizeof(Floats))));
  typedef uint32_t Unsigned __attribute__((vector_size(sizeof(Floats))));
  static constexpr int32_t kSign = INT32_MIN;
};
template <>
struct NumberOf<Doubles> {
  typedef int64_t Bits __attribute__((vector_size(sizeof(Doubles))));
  typedef uint64_t Unsigned __attribute__((vector_size(sizeof(Doubles))));
  static constexpr int64_t kSign = INT64_MIN;
};
// What the elements of a vector are; of a number, the number itself.
template <class T>
using Scalar = std::conditional_t<std::is_same_v<T, Floats> || std::is_same_v<T, float>, float, double>;
template <class T>
using Bits = typename NumberOf<T>::Bits;
// For arithmetic that may wrap around, as that of a NaN's bits does.
template <class T>
using Unsigned = typename NumberOf<T>::Unsigned;

// A constant of T's formulas.
template <class T>
constexpr Scalar<T> c(double value) {
  return Scalar<T>(value);
}
template <class T>
CONV2D_INLINE T all(Scalar<T> value) {
  return T{} + value;
}
template <class T, class Mask>
CONV2D_INLINE T select(Mask mask, T yes, T no) {
  return mask ? yes : no;
}
template <class T>
CONV2D_INLINE T at_most(T x, Scalar<T> limit) {  // a NaN stays
  return select(x > limit, all<T>(limit), x);
}
template <class T>
CONV2D_INLINE T at_least(T x, Scalar<T> limit) {
  return select(x < limit, all<T>(limit), x);
}
template <class T>
CONV2D_INLINE T magnitude(T x) {
  if constexpr (std::is_same_v<T, double>) {
    return __builtin_fabs(x);
  } else {
    return T(Bits<T>(x) & ~NumberOf<T>::kSign);
  }
}
template <class T>
CONV2D_INLINE T minus_magnitude(T x) {
  if constexpr (std::is_same_v<T, double>) {
    return -__builtin_fabs(x);
  } else {
    return T(Bits<T>(x) | NumberOf<T>::kSign);
  }
}
template <class T>
CONV2D_INLINE T with_sign(T x, T of) {
  if constexpr (std::is_same_v<T, double>) {
    return __builtin_copysign(x, of);
  } else {
    return T((Bits<T>(x) & ~NumberOf<T>::kSign) | (Bits<T>(of) & NumberOf<T>::kSign));
  }
}
// coefficients[0] + coefficients[1] x + ..., even and odd powers by themselves: two short chains of operations that
// wait for one another instead of a long one.
template <class T, int n>
CONV2D_INLINE T polynomial(T x, const Scalar<T> (&coefficients)[n]) {
  const T square = x * x;
  T last = all<T>(coefficients[n - 1]), before = all<T>(coefficients[n - 2]);
#pragma GCC unroll 16
  for (int i = n - 3; i >= 0; i -= 2) {
    last = last * square + coefficients[i];
    if (i > 0) before = before * square + coefficients[i - 1];
  }
  return n % 2 != 0 ? last + x * before : before + x * last;
}

// A vector of floats as two of doubles.
struct Wide {
  Doubles low, high;
};
typedef float HalfFloats __attribute__((vector_size(sizeof(Floats) / 2)));

CONV2D_INLINE Wide widen_floats(Floats x) {
  HalfFloats half[2];
  __builtin_memcpy(half, &x, sizeof x);
  return {Doubles(__builtin_convertvector(half[0], Doubles)), Doubles(__builtin_convertvector(half[1], Doubles))};
}
CONV2D_INLINE Floats narrow_doubles(Wide x) {
  const HalfFloats half[2] = {__builtin_convertvector(x.low, HalfFloats), __builtin_convertvector(x.high, HalfFloats)};
  Floats result;
  __builtin_memcpy(&result, half, sizeof result);
  return result;
}

// ---- powers of e: x = n ln 2 + r with |r| <= ln 2 / 2, and e^x = 2^n (1 + (e^r - 1))

// Adding it rounds to an integer, which is then in the low bits.
template <class T>
constexpr Scalar<T> kRounder = std::is_same_v<T, Floats> ? 12582912.0 : 6755399441055744.0;  // 1.5 * 2^23, * 2^52

template <class T>
CONV2D_INLINE T two_to(Bits<T> n) {
  if constexpr (std::is_same_v<T, Floats>) {
    return T((Unsigned<T>(n) + 127) << 23);
  } else {
    return T((Unsigned<T>(n) + 1023) << 52);
  }
}

template <class T>
struct Exponential {
  Bits<T> n;
  T less_one;  // e^r - 1

  // |x| < 2^15
  explicit CONV2D_INLINE Exponential(T x) {
    const T shifted = x * c<T>(1.4426950408889634) + kRounder<T>;
    n = Bits<T>(shifted) - Bits<T>(all<T>(kRounder<T>));
    const T whole = shifted - kRounder<T>;
    // ln 2 in two parts, of which the first has so few bits that its product with n is exact.
    if constexpr (std::is_same_v<T, Floats>) {
      constexpr float kFit[] = {5.0e-1f, 1.66665092e-1f, 4.16664481e-2f, 8.36993009e-3f, 1.39365997e-3f};
      const T r = (x - whole * 6.93145751953125e-1f) - whole * 1.42860682e-6f;
      less_one = r + (r * r) * polynomial<T>(r, kFit);
    } else {
      constexpr double kFit[] = {5.0000000000000144e-1, 1.6666666666666685e-1, 4.1666666666500651e-2,
                                 8.3333333333156425e-3, 1.3888888951057829e-3, 1.9841269899920785e-4,
                                 2.4801485590978921e-5, 2.7557231273194939e-6, 2.7632887231992739e-7,
                                 2.5113299942207406e-8};
      const T r = (x - whole * 6.9314718056011770e-1) - whole * -1.7239444525614835e-13;
      less_one = r + (r * r) * polynomial<T>(r, kFit);
    }
  }
};

// Of every number of T: underflows gradually and overflows, and a NaN stays.
template <class T>
CONV2D_INLINE T exp_of_any(T x) {
  constexpr bool is_float = std::is_same_v<T, Floats>;
  const Exponential<T> e(at_most(at_least(x, is_float ? -104 : -746), is_float ? 89 : 710));
  const Bits<T> half = e.n >> 1;
  return (e.less_one + c<T>(1)) * two_to<T>(half) * two_to<T>(e.n - half);
}
CONV2D_INLINE Floats exp_of(Floats x) { return exp_of_any<Floats>(x); }
// Where the result is a normal number.
CONV2D_INLINE Floats exp_between(Floats x) {
  const Exponential<Floats> e(x);
  return (e.less_one + 1.0f) * two_to<Floats>(e.n);
}
// Of numbers up to 0.
CONV2D_INLINE Floats exp_of_negative(Floats x) {
  const Exponential<Floats> e(at_least(x, -104.0f));
  return (e.less_one + 1.0f) * two_to<Floats>(e.n + 64) * 0x1p-64f;
}
// What lies outside is no float.
CONV2D_INLINE Doubles exp_of(Doubles x) {
  const Exponential<Doubles> e(at_most(at_least(x, -160.0), 160.0));
  return (e.less_one + 1.0) * two_to<Doubles>(e.n);
}
CONV2D_INLINE double exp_of(double x) { return __builtin_exp(x); }
CONV2D_INLINE double exp_of_negative(double x) { return __builtin_exp(x); }

// e^x - 1
CONV2D_INLINE Floats expm1_of(Floats x) {
  const Exponential<Floats> e(at_most(at_least(x, -20.0f), 89.0f));
  const Floats half = two_to<Floats>(e.n - 1);
  const Floats result = ((half - 0.5f) + half * e.less_one) * 2.0f;
  return select(magnitude(x) < 1e-8f, x, result);
}
CONV2D_INLINE double expm1_of(double x) { return __builtin_expm1(x); }

// ---- logarithms

// ln(1 + x) for x in [0, 1]: 2 atanh(s), s = x / (2 + x)
CONV2D_INLINE Floats log1p_of_fraction(Floats x) {
  constexpr float kFit[] = {6.66666746e-1f, 3.99989516e-1f, 2.86150873e-1f, 2.14455232e-1f, 2.42384598e-1f};
  const Floats s = x / (x + 2.0f), z = s * s;
  return 2.0f * s + s * z * polynomial<Floats>(z, kFit);
}
CONV2D_INLINE double log1p_of_fraction(double x) { return __builtin_log1p(x); }

// x = 2^n m with m in [sqrt(1/2), sqrt(2)): n ln 2 + 2 atanh(s), s = (m - 1) / (m + 1). No subnormal doubles: no float
// is one.
CONV2D_INLINE Doubles log_of(Doubles x) {
  constexpr uint64_t kRootOfHalf = 0x3fe6a09e667f3bcd, kBias = 1023;
  constexpr double kFit[] = {6.6666666666666663e-1, 4.0000000000004893e-1, 2.8571428569423446e-1,
                             2.2222222605088313e-1, 1.8181778498882775e-1, 1.5386983000228274e-1,
                             1.3252270023940899e-1, 1.3233755699612426e-1};
  const Unsigned<Doubles> bits = Unsigned<Doubles>(x);
  // A logical shift, which AVX2 has: of a number that is positive by the bias.
  const Unsigned<Doubles> n = ((bits - kRootOfHalf + (kBias << 52)) >> 52) - kBias;
  const Doubles m = Doubles(bits - (n << 52));
  const Doubles whole = Doubles(n + Unsigned<Doubles>(all<Doubles>(kRounder<Doubles>))) - kRounder<Doubles>;
  const Doubles s = (m - 1.0) / (m + 1.0), z = s * s;
  const Doubles rest = 2.0 * s + s * z * polynomial<Doubles>(z, kFit);
  const Doubles result = whole * 6.9314718056011770e-1 + (whole * -1.7239444525614835e-13 + rest);
  const Doubles infinity = all<Doubles>(__builtin_inf());
  const Doubles above = select(x == infinity, x, result);
  const Doubles not_below = select(x == 0.0, -infinity, above);
  return select(x >= 0.0, not_below, all<Doubles>(__builtin_nan("")));
}

// ---- others, made of these

CONV2D_INLINE Floats tanh_of(Floats x) {
  constexpr float kFit[] = {-3.33333313e-1f, 1.33332416e-1f,  -5.39527461e-2f,
                            2.17411779e-2f,  -8.29700381e-3f, 2.27160356e-3f};
  const Floats a = magnitude(x), z = a * a;
  const Floats small = a + a * z * polynomial<Floats>(z, kFit);
  const Floats large = 1.0f - 2.0f / (exp_between(at_most(a + a, 20.0f)) + 1.0f);
  return with_sign(select(a < 0.55f, small, large), x);
}
CONV2D_INLINE double tanh_of(double x) { return __builtin_tanh(x); }

// Below 1: x + x p(x^2); above: 1 - erfc, whose logarithm is nearly a parabola.
CONV2D_INLINE Floats erf_of(Floats x) {
  constexpr float kFit[] = {1.28379166e-1f, -3.76126289e-1f, 1.12836182e-1f, -2.68551242e-2f,
                            5.1907259e-3f,  -8.03065428e-4f, 7.91990169e-5f};
  constexpr float kLogFit[] = {-1.84960556f,   -2.63896561f,    -8.43126357e-1f, -4.14835066e-2f,
                               9.88651346e-3f, -1.85013958e-3f, 2.10361468e-4f,  -6.91811556e-6f};
  const Floats a = magnitude(x);
  const Floats small = a + a * polynomial<Floats>(at_most(a * a, 1.0f), kFit);
  const Floats large = 1.0f - exp_between(polynomial<Floats>(at_most(a, 4.0f) - 1.0f, kLogFit));
  return with_sign(select(a < 1.0f, small, large), x);
}
CONV2D_INLINE double erf_of(double x) { return __builtin_erf(x); }

CONV2D_INLINE Doubles sinh_of(Doubles x) {
  const Doubles a = magnitude(x), e = exp_of(a);
  return with_sign(select(a < 1e-3, a + a * a * a * (1.0 / 6), 0.5 * (e - 1.0 / e)), x);
}
CONV2D_INLINE double sinh_of(double x) { return __builtin_sinh(x); }
CONV2D_INLINE Doubles cosh_of(Doubles x) {
  const Doubles e = exp_of(magnitude(x));
  return 0.5 * (e + 1.0 / e);
}
CONV2D_INLINE double cosh_of(double x) { return __builtin_cosh(x); }
CONV2D_INLINE Doubles atanh_of(Doubles x) {
  const Doubles a = magnitude(x);
  return with_sign(select(a < 1e-3, a + a * a * a * (1.0 / 3), 0.5 * log_of((1.0 + a) / (1.0 - a))), x);
}
CONV2D_INLINE double atanh_of(double x) { return __builtin_atanh(x); }

CONV2D_INLINE double log_of(double x) { return __builtin_log(x); }

CONV2D_INLINE Bits<Doubles> is_integer(Doubles x) {
  return Bits<Doubles>(((x + kRounder<Doubles>)-kRounder<Doubles> == x) | (magnitude(x) >= 0x1p51));
}
// As the C library's pow has it, for zeros, infinities and negative x too.
CONV2D_INLINE double pow_of(double x, double y) { return __builtin_pow(x, y); }
CONV2D_INLINE Doubles pow_of(Doubles x, Doubles y) {
  const Doubles infinity = all<Doubles>(__builtin_inf()), one = all<Doubles>(1.0),
                nan = all<Doubles>(__builtin_nan(""));
  const auto integer = is_integer(y), odd = integer & ~is_integer(y * 0.5);
  const Doubles size = exp_of(log_of(magnitude(x)) * y);
  const Doubles of_integer = select(odd, with_sign(size, x), size);
  const Doubles result = select((x < 0.0) & (x > -infinity) & ~integer, nan, of_integer);
  // Of 1 whatever the exponent, of -1 with an infinite one, and to the power of 0 all is 1.
  return select((x == 1.0) | (y == 0.0) | ((x == -1.0) & (magnitude(y) == infinity)), one, result);
}

// The angle of the point (x, y), from the smaller over the larger of the two: atan(t) = pi / 4 + atan((t - 1) / (t +
// 1)).
CONV2D_INLINE Doubles atan2_of(Doubles y, Doubles x) {
  constexpr double kPi = 3.141592653589793;
  constexpr double kSeries[] = {-1.0 / 3, 1.0 / 5,   -1.0 / 7, 1.0 / 9,   -1.0 / 11, 1.0 / 13, -1.0 / 15,
                                1.0 / 17, -1.0 / 19, 1.0 / 21, -1.0 / 23, 1.0 / 25,  -1.0 / 27};
  const Doubles a = magnitude(y), b = magnitude(x), infinity = all<Doubles>(__builtin_inf());
  const auto steep = a > b;
  const Doubles less = select(steep, b, a), more = select(steep, a, b);
  Doubles t = less / more;
  t = select(more == 0.0, less, t);
  t = select(less == infinity, all<Doubles>(1.0), t);
  const auto turned = t > 0.41421356237309503;
  const Doubles u = select(turned, (t - 1.0) / (t + 1.0), t), z = u * u;
  Doubles angle = u + u * z * polynomial<Doubles>(z, kSeries);
  angle = select(turned, angle + kPi / 4, angle);
  angle = select(steep, kPi / 2 - angle, angle);
  angle = select(Bits<Doubles>(x) < Bits<Doubles>{}, kPi - angle, angle);
  const Doubles result = with_sign(angle, y);
  return select((x == x) & (y == y), result, x + y);
}
CONV2D_INLINE double atan2_of(double y, double x) { return __builtin_atan2(y, x); }

// ln(1 + x) for x in [0, 1], to a share of the result.
CONV2D_INLINE Doubles log1p_of_fraction(Doubles x) {
  constexpr double kSeries[] = {1.0 / 3, 1.0 / 5, 1.0 / 7, 1.0 / 9, 1.0 / 11, 1.0 / 13, 1.0 / 15};
  const Doubles s = x / (x + 2.0), z = s * s;
  return select(x < 0.25, 2.0 * (s + s * z * polynomial<Doubles>(z, kSeries)), log_of(x + 1.0));
}
template <class T>
CONV2D_INLINE T log_add_exp(T x, T y, double log_base) {
  const T more = select(x > y, x, y), both = x + y;
  const T apart = select(x == y, T{}, magnitude(x - y));  // of equal infinities too
  const T sum = more + log1p_of_fraction(exp_of(-apart * log_base)) / log_base;
  return select(both == both, sum, select(x == -y, more, both));
}

CONV2D_INLINE Floats sqrt_of(Floats x) { return Vec<float>::sqrt(x); }
CONV2D_INLINE double sqrt_of(double x) { return __builtin_sqrt(x); }

// 1 / (1 + e^-x) and 1 - that, each to full accuracy where it is tiny; their product is the derivative.
template <class T>
struct Logistic {
  T value, complement;
  explicit CONV2D_INLINE Logistic(T x) {
    const T e = exp_of_negative(minus_magnitude(x)), both = e + c<T>(1), one = all<T>(1);
    value = select(x < c<T>(0), e, one) / both;
    complement = select(x < c<T>(0), one, e) / both;
  }
};

// ---- the functions: value(x) = f(x), slope(x) = f'(x)

template <class T>
struct Sigmoid {
  explicit CONV2D_INLINE Sigmoid(const double*) {}
  CONV2D_INLINE T value(T x) const { return Logistic<T>(x).value; }
  CONV2D_INLINE T slope(T x) const {
    const Logistic<T> s(x);
    return s.value * s.complement;
  }
};

template <class T>
struct Silu {
  explicit CONV2D_INLINE Silu(const double*) {}
  CONV2D_INLINE T value(T x) const { return x * Logistic<T>(x).value; }
  CONV2D_INLINE T slope(T x) const {
    const Logistic<T> s(x);
    return s.value * (c<T>(1) + x * s.complement);
  }
};

// The normal distribution: its density, and its share below x.
template <class T>
struct Normal {
  T density, below;
  explicit CONV2D_INLINE Normal(T x) {
    const T e = exp_of_negative(c<T>(-0.5) * (x * x));
    density = e * c<T>(0.3989422804014327);
    if constexpr (std::is_same_v<T, double>) {
      below = 0.5 * __builtin_erfc(x * -0.7071067811865476);
    } else {
      // The share below -|x|, over e^(-x^2 / 2), is nearly a polynomial of t.
      constexpr float kFit[] = {1.39619738e-1f, 1.39893487e-1f,  1.19585849e-1f, 1.06549457e-1f, -2.57128775e-2f,
                                1.63142607e-1f, -2.59334981e-1f, 1.45787194e-1f, -2.95304917e-2f};
      const T t = 1.0f / (0.35f * magnitude(x) + 1.0f);
      const T tail = e * (t * polynomial<T>(t, kFit));
      below = select(x < 0.0f, tail, 1.0f - tail);
    }
  }
};

template <class T>
struct Gelu {
  explicit CONV2D_INLINE Gelu(const double*) {}
  CONV2D_INLINE T value(T x) const { return x * Normal<T>(x).below; }
  CONV2D_INLINE T slope(T x) const {
    const Normal<T> normal(x);
    return normal.below + x * normal.density;
  }
};

// 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
template <class T>
struct GeluTanh {
  explicit CONV2D_INLINE GeluTanh(const double*) {}
  static constexpr Scalar<T> kBeta = 0.7978845608028654, kCubic = 0.044715;
  static CONV2D_INLINE T inner(T x) { return kBeta * (x + kCubic * (x * x * x)); }
  CONV2D_INLINE T value(T x) const { return c<T>(0.5) * x * (c<T>(1) + tanh_of(inner(x))); }
  CONV2D_INLINE T slope(T x) const {
    const T t = tanh_of(inner(x));
    const T inner_slope = kBeta * (c<T>(1) + c<T>(3) * kCubic * (x * x));
    return c<T>(0.5) * (c<T>(1) + t) + c<T>(0.5) * x * ((c<T>(1) - t * t) * inner_slope);
  }
};

template <class T>
struct Tanh {
  explicit CONV2D_INLINE Tanh(const double*) {}
  CONV2D_INLINE T value(T x) const { return tanh_of(x); }
  CONV2D_INLINE T slope(T x) const {
    const Logistic<T> s(x + x);
    return c<T>(4) * (s.value * s.complement);
  }
};

template <class T>
struct Exp {
  explicit CONV2D_INLINE Exp(const double*) {}
  CONV2D_INLINE T value(T x) const { return exp_of(x); }
  CONV2D_INLINE T slope(T x) const { return exp_of(x); }
};

template <class T>
struct Erf {
  explicit CONV2D_INLINE Erf(const double*) {}
  CONV2D_INLINE T value(T x) const { return erf_of(x); }
  CONV2D_INLINE T slope(T x) const { return c<T>(1.1283791670955126) * exp_of_negative(-(x * x)); }
};

// x where beta x > threshold, elsewhere ln(1 + e^(beta x)) / beta
template <class T>
struct Softplus {
  Scalar<T> beta, threshold;
  explicit CONV2D_INLINE Softplus(const double* p) : beta(Scalar<T>(p[0])), threshold(Scalar<T>(p[1])) {}
  CONV2D_INLINE T value(T x) const {
    const T z = x * beta;
    const T soft = at_least(z, 0) + log1p_of_fraction(exp_of_negative(minus_magnitude(z)));
    return select(z > threshold, x, soft / beta);
  }
  CONV2D_INLINE T slope(T x) const {
    const T z = x * beta;
    return select(z > threshold, all<T>(1), Logistic<T>(z).value);
  }
};

// x tanh(ln(1 + e^x)) = x n / (n + 2), n = e^x (e^x + 2)
template <class T>
struct Mish {
  explicit CONV2D_INLINE Mish(const double*) {}
  CONV2D_INLINE T value(T x) const {
    const T e = exp_of(at_most(x, 20)), n = e * (e + c<T>(2));
    return x * (n / (n + c<T>(2)));
  }
  CONV2D_INLINE T slope(T x) const {
    const T e = exp_of(at_most(x, 20)), n = e * (e + c<T>(2)), d = n + c<T>(2);
    return select(x > c<T>(20), all<T>(1), n / d + x * (c<T>(4) * e * (e + c<T>(1)) / (d * d)));
  }
};

// scale x above zero, elsewhere scale alpha (e^(input_scale x) - 1)
template <class T>
struct Elu {
  Scalar<T> negative, positive, input_scale;
  explicit CONV2D_INLINE Elu(const double* p)
      : negative(Scalar<T>(p[0]) * Scalar<T>(p[1])), positive(Scalar<T>(p[1])), input_scale(Scalar<T>(p[2])) {}
  CONV2D_INLINE T value(T x) const { return select(x <= c<T>(0), expm1_of(x * input_scale) * negative, x * positive); }
  CONV2D_INLINE T slope(T x) const {
    return select(x <= c<T>(0), exp_of(x * input_scale) * (negative * input_scale), all<T>(positive));
  }
};

// x - lambda above lambda, x + lambda below -lambda, elsewhere +0; a NaN stays
template <class T>
struct Softshrink {
  Scalar<T> lambda;
  explicit CONV2D_INLINE Softshrink(const double* p) : lambda(Scalar<T>(p[0])) {}
  CONV2D_INLINE T value(T x) const {
    const T inside = select(x >= -lambda, all<T>(0), x + lambda);
    return select(x <= lambda, inside, x - lambda);
  }
  CONV2D_INLINE T slope(T x) const { return select((x >= -lambda) & (x <= lambda), all<T>(0), all<T>(1)); }
};

template <class T>
struct Sqrt {
  explicit CONV2D_INLINE Sqrt(const double*) {}
  CONV2D_INLINE T value(T x) const { return sqrt_of(x); }
  CONV2D_INLINE T slope(T x) const { return c<T>(0.5) / sqrt_of(x); }
};

template <class T>
struct Rsqrt {
  explicit CONV2D_INLINE Rsqrt(const double*) {}
  CONV2D_INLINE T value(T x) const { return c<T>(1) / sqrt_of(x); }
  CONV2D_INLINE T slope(T x) const {
    const T r = c<T>(1) / sqrt_of(x);
    return (c<T>(-0.5) * r) * (r * r);
  }
};

// base^x
template <class T>
struct ExpBase {
  double base, log_base;
  explicit CONV2D_INLINE ExpBase(const double* p) : base(p[0]), log_base(__builtin_log(p[0])) {}
  CONV2D_INLINE T value(T x) const {
    if constexpr (std::is_same_v<T, double>) {
      return __builtin_pow(base, x);
    } else {
      // Base 1 gives 1 of infinities too, and of NaNs.
      return log_base == 0 ? all<T>(1) : exp_of(x * log_base);
    }
  }
  CONV2D_INLINE T slope(T x) const { return value(x) * log_base; }
};

template <class T>
struct Pow {
  double exponent;
  explicit CONV2D_INLINE Pow(const double* p) : exponent(p[0]) {}
  CONV2D_INLINE T value(T x) const { return pow_of(x, all<T>(exponent)); }
  CONV2D_INLINE T slope(T x) const { return exponent == 0 ? T{} : exponent * pow_of(x, all<T>(exponent - 1)); }
};

template <class T>
struct Sinh {
  explicit CONV2D_INLINE Sinh(const double*) {}
  CONV2D_INLINE T value(T x) const { return sinh_of(x); }
  CONV2D_INLINE T slope(T x) const { return cosh_of(x); }
};

template <class T>
struct Cosh {
  explicit CONV2D_INLINE Cosh(const double*) {}
  CONV2D_INLINE T value(T x) const { return cosh_of(x); }
  CONV2D_INLINE T slope(T x) const { return sinh_of(x); }
};

template <class T>
struct Atanh {
  explicit CONV2D_INLINE Atanh(const double*) {}
  CONV2D_INLINE T value(T x) const { return atanh_of(x); }
  CONV2D_INLINE T slope(T x) const { return c<T>(1) / (c<T>(1) - x * x); }
};

// ln(x / (1 - x)) of x between eps and 1 - eps; of x as it is where eps is negative. The limits are float's for a
// float.
template <class T>
struct Logit {
  using Limit = std::conditional_t<std::is_same_v<T, double>, double, float>;
  bool limited;
  double low, high;
  explicit CONV2D_INLINE Logit(const double* p) : limited(p[0] >= 0), low(Limit(p[0])), high(Limit(1) - Limit(p[0])) {}
  CONV2D_INLINE T value(T x) const {
    // In this order also where low is above high.
    const T z = limited ? select(x < low, all<T>(low), at_most(x, high)) : x;
    return log_of(z / (1.0 - z));
  }
  CONV2D_INLINE T slope(T x) const {
    const T inside = 1.0 / (x * (1.0 - x)), outside = limited ? T{} : all<T>(__builtin_nan(""));
    return select((x < (limited ? low : 0.0)) | (x > (limited ? high : 1.0)), outside, inside);
  }
};

// ---- functions of two numbers

struct Power {
  template <class T>
  static CONV2D_INLINE T value(T x, T y) {
    return pow_of(x, y);
  }
};
struct Atan2 {
  template <class T>
  static CONV2D_INLINE T value(T y, T x) {
    return atan2_of(y, x);
  }
};
// ln(e^x + e^y)
struct LogAddExp {
  template <class T>
  static CONV2D_INLINE T value(T x, T y) {
    return log_add_exp(x, y, 1.0);
  }
};
// The logarithm of 2^x + 2^y to the base of 2
struct LogAddExp2 {
  template <class T>
  static CONV2D_INLINE T value(T x, T y) {
    return log_add_exp(x, y, 0.6931471805599453);
  }
};

}  // namespace conv2d_ext::cpu::CONV2D_ISA
