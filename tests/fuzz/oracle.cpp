#include "oracle.h"

#include <cmath>

namespace conv2d_ext::fuzz {

Sizes tensor_size(const Conv2dProblem& p, int tensor) {
  switch (tensor) {
    case 0:
      return {p.batch, p.in_channels, p.in_h, p.in_w};
    case 1:
      return {p.out_channels, p.in_channels_per_group(), p.kernel_h, p.kernel_w};
    default:
      return {p.batch, p.out_channels, p.out_h, p.out_w};
  }
}

Sizes result_size(Op op, const Conv2dProblem& p) {
  return op == Op::kGradBias ? Sizes{1, 1, 1, p.out_channels} : tensor_size(p, roles_of(op).result);
}

namespace {

// Where each (position, tap) of an axis lies, as an index into what is stored; -1 in the padding.
std::vector<int64_t> met_indices(const GatherAxis& axis, int64_t positions, int64_t taps, int64_t size, int64_t step) {
  std::vector<int64_t> met;
  met.reserve(size_t(positions * taps));
  for (int64_t position = 0; position < positions; ++position) {
    for (int64_t tap = 0; tap < taps; ++tap) {
      const __int128 at = __int128(position) * axis.step + axis.origin + __int128(tap) * axis.tap;
      met.push_back(at < 0 || at >= size ? -1 : int64_t(at) * step);
    }
  }
  return met;
}

Sizes dense_steps(const Sizes& size) { return {size[1] * size[2] * size[3], size[2] * size[3], size[3], 1}; }

// Visits every product: visit(index into the input, into the weight, into the output), each with the steps given; the
// input's is -1 in the padding.
template <class Visit>
void for_each_product(const Conv2dProblem& p, const Sizes& input, const Sizes& weight, const Sizes& output,
                      Visit visit) {
  const std::vector<int64_t> rows = met_indices(p.rows(), p.out_h, p.kernel_h, p.in_h, input[2]);
  const std::vector<int64_t> cols = met_indices(p.cols(), p.out_w, p.kernel_w, p.in_w, input[3]);
  const int64_t in_group = p.in_channels_per_group(), out_group = p.out_channels_per_group();
  for (int64_t n = 0; n < p.batch; ++n) {
    for (int64_t oc = 0; oc < p.out_channels; ++oc) {
      const int64_t first_channel = n * input[0] + oc / out_group * in_group * input[1];
      for (int64_t oh = 0; oh < p.out_h; ++oh) {
        for (int64_t ow = 0; ow < p.out_w; ++ow) {
          const int64_t to = n * output[0] + oc * output[1] + oh * output[2] + ow * output[3];
          for (int64_t ic = 0; ic < in_group; ++ic) {
            const int64_t channel = first_channel + ic * input[1];
            for (int64_t kh = 0; kh < p.kernel_h; ++kh) {
              const int64_t row = rows[size_t(oh * p.kernel_h + kh)];
              int64_t w = oc * weight[0] + ic * weight[1] + kh * weight[2];
              const int64_t* col = cols.data() + ow * p.kernel_w;
              for (int64_t kw = 0; kw < p.kernel_w; ++kw, w += weight[3]) {
                visit(row < 0 || col[kw] < 0 ? -1 : channel + row + col[kw], w, to);
              }
            }
          }
        }
      }
    }
  }
}

// Sums of products of the op, by what an element is: Sum has add(result, a, b), a and b being indices into the stored
// numbers of the operands, -1 for a padding zero.
template <class Sum>
void sum_products(Op op, const Conv2dProblem& p, const Numbers& a, const Numbers& b, Sum& sum) {
  const Sizes result = dense_steps(result_size(op, p));
  switch (op) {
    case Op::kForward:
    case Op::kMatmul:
      for_each_product(p, a.step, b.step, result, [&](int64_t i, int64_t w, int64_t o) { sum.add(o, i, w); });
      break;
    case Op::kGradInput:
      for_each_product(p, result, b.step, a.step, [&](int64_t i, int64_t w, int64_t o) {
        if (i >= 0) sum.add(i, o, w);
      });
      break;
    case Op::kGradWeight:
      for_each_product(p, b.step, result, a.step, [&](int64_t i, int64_t w, int64_t o) { sum.add(w, o, i); });
      break;
    default:
      for (int64_t n = 0; n < p.batch; ++n) {
        for (int64_t c = 0; c < p.out_channels; ++c) {
          for (int64_t h = 0; h < p.out_h; ++h) {
            for (int64_t w = 0; w < p.out_w; ++w) {
              sum.add_one(c, n * a.step[0] + c * a.step[1] + h * a.step[2] + w * a.step[3]);
            }
          }
        }
      }
  }
}

struct WholeSum {
  std::vector<uint64_t> a, b;
  std::vector<uint64_t>& result;
  void add(int64_t r, int64_t i, int64_t j) {
    result[size_t(r)] += (i < 0 ? 0 : a[size_t(i)]) * (j < 0 ? 0 : b[size_t(j)]);
  }
  void add_one(int64_t r, int64_t i) { result[size_t(r)] += a[size_t(i)]; }
};

template <class Real>
struct RealSum {
  std::vector<double> a, b;
  std::vector<Real> value;
  std::vector<double>& magnitude;
  std::vector<int32_t> count;
  void add(int64_t r, int64_t i, int64_t j) {
    const double x = i < 0 ? 0.0 : a[size_t(i)], y = j < 0 ? 0.0 : b[size_t(j)];
    const Real product = Real(x) * Real(y);
    value[size_t(r)] += product;
    if (std::isfinite(x) && std::isfinite(y)) magnitude[size_t(r)] += double(std::fabs(product));
    ++count[size_t(r)];
  }
  void add_one(int64_t r, int64_t i) {
    value[size_t(r)] += Real(a[size_t(i)]);
    if (std::isfinite(a[size_t(i)])) magnitude[size_t(r)] += std::fabs(a[size_t(i)]);
    ++count[size_t(r)];
  }
};

template <class Real>
struct ComplexSum {
  std::vector<double> a, b;  // real and imaginary parts side by side
  bool conjugate;            // the second operand's conjugate is multiplied
  std::vector<Real> value;
  std::vector<double>& magnitude;
  std::vector<int32_t> count;
  void add_part(size_t r, bool finite, Real x, Real y) {
    value[r] += x;
    value[r] += y;
    if (finite) magnitude[r] += double(std::fabs(x) + std::fabs(y));
    count[r] += 2;
  }
  void add(int64_t r, int64_t i, int64_t j) {
    const Real ar = i < 0 ? 0 : a[size_t(2 * i)], ai = i < 0 ? 0 : a[size_t(2 * i + 1)];
    const Real br = j < 0 ? 0 : b[size_t(2 * j)], bi = (j < 0 ? 0 : b[size_t(2 * j + 1)]) * (conjugate ? -1 : 1);
    const bool finite = std::isfinite(ar) && std::isfinite(ai) && std::isfinite(br) && std::isfinite(bi);
    add_part(size_t(2 * r), finite, ar * br, -(ai * bi));
    add_part(size_t(2 * r + 1), finite, ar * bi, ai * br);
  }
  void add_one(int64_t r, int64_t i) {
    const double re = a[size_t(2 * i)], im = a[size_t(2 * i + 1)];
    add_part(size_t(2 * r), std::isfinite(re), Real(re), Real(0));
    add_part(size_t(2 * r + 1), std::isfinite(im), Real(im), Real(0));
  }
};

std::vector<uint64_t> whole_numbers(const Numbers& x) {
  const size_t item = size_t(size_of(x.dtype));
  std::vector<uint64_t> whole(x.bytes.size() / item);
  for (size_t i = 0; i < whole.size(); ++i) std::memcpy(&whole[i], x.bytes.data() + i * item, item);
  return whole;
}

std::vector<double> real_numbers(const Numbers& x) {
  const Format& format = storage_format(x.dtype);
  std::vector<double> real(x.bytes.size() / size_t(format.bytes));
  for (size_t i = 0; i < real.size(); ++i) real[i] = decode(format, x.bytes.data() + i * size_t(format.bytes));
  return real;
}

template <class Real, template <class> class Sum>
void finish(Sum<Real>& sum, const Conv2dProblem& p, Op op, const Numbers* bias, int64_t parts, Expected& expected) {
  const Sizes size = result_size(op, p);
  if (bias != nullptr) {
    const std::vector<double> b = real_numbers(*bias);
    const int64_t pixels = size[2] * size[3] * parts;
    for (size_t i = 0; i < sum.value.size(); ++i) {
      const int64_t channel = int64_t(i) / pixels % size[1];
      const double value = b[size_t(channel * bias->step[3] * parts + int64_t(i) % parts)];
      sum.value[i] += Real(value);
      if (std::isfinite(value)) sum.magnitude[i] += std::fabs(value);
      ++sum.count[i];
    }
  }
  for (const int32_t count : sum.count) expected.products = count > expected.products ? count : expected.products;
  expected.value.assign(sum.value.begin(), sum.value.end());
}

template <class Real>
void expect_real(Op op, const Conv2dProblem& p, const Numbers& a, const Numbers& b, const Numbers* bias,
                 Expected& expected) {
  const size_t count = expected.magnitude.size();
  if (is_complex(a.dtype)) {
    ComplexSum<Real> sum{real_numbers(a),          real_numbers(b),    !is_forward(op),
                         std::vector<Real>(count), expected.magnitude, std::vector<int32_t>(count)};
    sum_products(op, p, a, b, sum);
    finish(sum, p, op, bias, 2, expected);
  } else {
    RealSum<Real> sum{real_numbers(a), real_numbers(b), std::vector<Real>(count), expected.magnitude,
                      std::vector<int32_t>(count)};
    sum_products(op, p, a, b, sum);
    finish(sum, p, op, bias, 1, expected);
  }
}

}  // namespace

Expected expect(Op op, const Conv2dProblem& p, const Numbers& a, const Numbers& b, const Numbers* bias) {
  Expected expected;
  const size_t count = size_t(elements_of(result_size(op, p)));
  if (is_integer(a.dtype)) {
    expected.whole.resize(count);
    WholeSum sum{whole_numbers(a), whole_numbers(b), expected.whole};
    sum_products(op, p, a, b, sum);
    if (bias != nullptr) {
      const std::vector<uint64_t> numbers = whole_numbers(*bias);
      const int64_t pixels = p.out_h * p.out_w;
      for (size_t i = 0; i < count; ++i) {
        expected.whole[i] += numbers[size_t(int64_t(i) / pixels % p.out_channels * bias->step[3])];
      }
    }
    return expected;
  }
  expected.magnitude.resize(count * (is_complex(a.dtype) ? 2 : 1));
  if (compute_format(a.dtype).bytes == 8) {
    expect_real<long double>(op, p, a, b, bias, expected);
  } else {
    expect_real<double>(op, p, a, b, bias, expected);
  }
  return expected;
}

}  // namespace conv2d_ext::fuzz
