// Pointwise functions of tensors: checks, fake kernels, and PyTorch's loops around the rows of cpu/pointwise.
#include "pointwise_ops.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/add.h>
#include <ATen/ops/neg.h>
#include <torch/library.h>

#include <algorithm>
#include <cfenv>
#include <optional>
#include <string>
#include <thread>

#include "conv2d_tensors.h"
#include "cpu/base/huge_pages.h"
#include "cpu/float_environment.h"
#include "cpu/pointwise/pointwise.h"

namespace conv2d_ext {

const c10::TypedOperatorHandle<PointwiseSignature>& pointwise_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("conv2d_ext::pointwise", "").typed<PointwiseSignature>();
  return op;
}

const c10::TypedOperatorHandle<PointwiseGradSignature>& pointwise_grad_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("conv2d_ext::pointwise_grad", "").typed<PointwiseGradSignature>();
  return op;
}

const c10::TypedOperatorHandle<PointwisePairSignature>& pointwise_pair_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("conv2d_ext::pointwise_pair", "").typed<PointwisePairSignature>();
  return op;
}

namespace {

using at::Tensor;
using cpu::pointwise::Function;
using cpu::pointwise::PairFunction;

// ---- checks

std::string known_functions() {
  std::string names;
  for (const auto& info : cpu::pointwise::kInfo) {
    names += (names.empty() ? "" : ", ") + std::string(info.name);
  }
  return names;
}

Function check_function(std::string_view name, c10::ArrayRef<double> parameters) {
  int found = 0;
  while (found < cpu::pointwise::kFunctions && cpu::pointwise::kInfo[found].name != name) {
    ++found;
  }
  TORCH_CHECK_VALUE(found < cpu::pointwise::kFunctions, "pointwise: expected function to be one of ", known_functions(),
                    ", but got '", name, "'");
  const auto wanted = size_t(cpu::pointwise::kInfo[found].parameters);
  TORCH_CHECK_VALUE(parameters.size() == wanted, "pointwise: expected ", wanted, " parameters of ", name, ", but got ",
                    parameters.size());
  return Function(found);
}

void check_input(const Tensor& input) {
  const auto dtype = input.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(
      dtype == c10::kFloat || dtype == c10::kDouble || dtype == c10::kBFloat16 || dtype == c10::kHalf,
      "pointwise: expected input to be float32, float64, bfloat16 or float16, but got ", dtype);
}

void check_grad_output(const Tensor& grad_output, const Tensor& input) {
  TORCH_CHECK(grad_output.scalar_type() == input.scalar_type(),
              "pointwise_grad: expected grad_output of input's dtype ", input.scalar_type(), ", but got ",
              grad_output.scalar_type());
  TORCH_CHECK(grad_output.sym_sizes() == input.sym_sizes(), "pointwise_grad: expected grad_output of input's size ",
              input.sym_sizes(), ", but got ", grad_output.sym_sizes());
}

PairFunction check_pair(const Tensor& first, const Tensor& second, std::string_view name) {
  check_input(first);
  TORCH_CHECK(first.scalar_type() == second.scalar_type() && first.sym_sizes() == second.sym_sizes(),
              "pointwise_pair: expected tensors of one size and dtype, but got ", first.sym_sizes(), " ",
              first.scalar_type(), " and ", second.sym_sizes(), " ", second.scalar_type());
  int found = 0;
  while (found < cpu::pointwise::kPairFunctions && cpu::pointwise::kPairNames[found] != name) ++found;
  TORCH_CHECK_VALUE(found < cpu::pointwise::kPairFunctions,
                    "pointwise_pair: expected function to be one of pow, atan2, logaddexp, logaddexp2, but got '", name,
                    "'");
  return PairFunction(found);
}

// ---- fake kernels: sizes and strides as of any operation on the same operands

Tensor pointwise_meta(const Tensor& input, std::string_view function, c10::ArrayRef<double> parameters) {
  check_input(input);
  check_function(function, parameters);
  return at::neg(input);
}

Tensor pointwise_grad_meta(const Tensor& grad_output, const Tensor& input, std::string_view function,
                           c10::ArrayRef<double> parameters) {
  check_input(input);
  check_grad_output(grad_output, input);
  check_function(function, parameters);
  return at::add(grad_output, input);
}

Tensor pointwise_pair_meta(const Tensor& first, const Tensor& second, std::string_view function) {
  check_pair(first, second, function);
  return at::add(first, second);
}

TORCH_LIBRARY_IMPL(conv2d_ext, Meta, m) {
  m.impl("pointwise_pair", pointwise_pair_meta);
  m.impl("pointwise", pointwise_meta);
  m.impl("pointwise_grad", pointwise_grad_meta);
}

// ---- CPU

// Elements that don't lie one after the other pass through buffers of this many.
constexpr int64_t kBuffer = 512;

template <class Bits>
void gather(const char* from, int64_t stride, int64_t n, void* to) {
  for (int64_t i = 0; i < n; ++i) static_cast<Bits*>(to)[i] = *reinterpret_cast<const Bits*>(from + i * stride);
}
template <class Bits>
void scatter(const void* from, int64_t n, char* to, int64_t stride) {
  for (int64_t i = 0; i < n; ++i) *reinterpret_cast<Bits*>(to + i * stride) = static_cast<const Bits*>(from)[i];
}

// One row of a loop: data[0] the result's elements, then each operand's.
template <int operands, class Bits, class Compute>
void run_row(char* const* data, const int64_t* strides, int64_t n, const Compute& compute) {
  bool dense = true;
  for (int k = 0; k <= operands; ++k) dense = dense && strides[k] == int64_t(sizeof(Bits));
  if (dense) {
    const char* sources[2] = {data[1], data[operands]};
    compute(sources, data[0], n);
    return;
  }
  alignas(64) Bits buffers[operands + 1][kBuffer];
  for (int64_t i = 0; i < n; i += kBuffer) {
    const int64_t count = std::min(kBuffer, n - i);
    for (int k = 1; k <= operands; ++k) gather<Bits>(data[k] + i * strides[k], strides[k], count, buffers[k]);
    const char* sources[2] = {reinterpret_cast<char*>(buffers[1]), reinterpret_cast<char*>(buffers[operands])};
    compute(sources, reinterpret_cast<char*>(buffers[0]), count);
    scatter<Bits>(buffers[0], count, data[0] + i * strides[0], strides[0]);
  }
}

// A loop over operands of one size and dtype. The result is allocated as any of PyTorch's, strides included.
template <class... Others>
at::TensorIterator loop_over(const Tensor& first, const Others&... others) {
  at::TensorIteratorConfig config;
  config.add_owned_output(Tensor()).add_const_input(first);
  (config.add_const_input(others), ...);
  config.check_all_same_dtype(false).declare_static_dtype_and_device(first.scalar_type(), first.device());
  return config.build();
}

template <int operands, class Compute>
void run_rows(at::TensorIterator& iterator, const Compute& compute) {
  std::fenv_t environment;
  std::fegetenv(&environment);
  const std::thread::id caller = std::this_thread::get_id();
  const auto size = iterator.element_size(0);
  const Tensor& result = iterator.output();
  cpu::ask_for_huge_pages(result.mutable_data_ptr(), result.nbytes());
  iterator.for_each([&](char** data, const int64_t* strides, int64_t n, int64_t rows) {
    std::optional<cpu::FloatEnvironmentScope> scope;
    if (std::this_thread::get_id() != caller) scope.emplace(environment);
    char* row[operands + 1];
    std::copy_n(data, operands + 1, row);
    for (int64_t i = 0; i < rows; ++i) {
      if (size == 2) {
        run_row<operands, uint16_t>(row, strides, n, compute);
      } else if (size == 4) {
        run_row<operands, uint32_t>(row, strides, n, compute);
      } else {
        run_row<operands, uint64_t>(row, strides, n, compute);
      }
      for (int k = 0; k <= operands; ++k) row[k] += strides[operands + 1 + k];
    }
  });
}

Tensor pointwise_cpu(const Tensor& input, std::string_view function, c10::ArrayRef<double> parameters) {
  check_input(input);
  const auto row = cpu::pointwise::value_row(check_function(function, parameters), to_dtype(input.scalar_type()));
  auto iterator = loop_over(input);
  run_rows<1>(iterator,
              [&](const char* const* sources, char* to, int64_t n) { row(sources[0], to, n, parameters.data()); });
  return iterator.output();
}

Tensor pointwise_grad_cpu(const Tensor& grad_output, const Tensor& input, std::string_view function,
                          c10::ArrayRef<double> parameters) {
  check_input(input);
  check_grad_output(grad_output, input);
  const auto row = cpu::pointwise::slope_row(check_function(function, parameters), to_dtype(input.scalar_type()));
  auto iterator = loop_over(grad_output, input);
  run_rows<2>(iterator, [&](const char* const* sources, char* to, int64_t n) {
    row(sources[0], sources[1], to, n, parameters.data());
  });
  return iterator.output();
}

Tensor pointwise_pair_cpu(const Tensor& first, const Tensor& second, std::string_view function) {
  const PairFunction pair = check_pair(first, second, function);  // before its dtype is looked up
  const auto row = cpu::pointwise::pair_row(pair, to_dtype(first.scalar_type()));
  auto iterator = loop_over(first, second);
  run_rows<2>(iterator, [&](const char* const* sources, char* to, int64_t n) { row(sources[0], sources[1], to, n); });
  return iterator.output();
}

TORCH_LIBRARY_IMPL(conv2d_ext, CPU, m) {
  m.impl("pointwise_pair", pointwise_pair_cpu);
  m.impl("pointwise", pointwise_cpu);
  m.impl("pointwise_grad", pointwise_grad_cpu);
}

}  // namespace
}  // namespace conv2d_ext
