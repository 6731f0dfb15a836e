// Pointwise functions of tensors: checks, fake kernels, and PyTorch's loops around the rows of cpu/pointwise.
#include "pointwise_ops.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/add.h>
#include <ATen/ops/neg.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>

#include "conv2d_checks.h"
#include "conv2d_tensors.h"
#include "cpu/base/huge_pages.h"
#include "cpu/float_environment.h"
#include "op_checks.h"

namespace conv2d_ext {

std::optional<cpu::pointwise::Function> find_function(std::string_view name) {
  using namespace cpu::pointwise;
  for (int i = 0; i < kFunctions; ++i) {
    if (kInfo[i].name == name) return Function(i);
  }
  return std::nullopt;
}

std::optional<cpu::pointwise::PairFunction> find_pair_function(std::string_view name) {
  using namespace cpu::pointwise;
  for (int i = 0; i < kPairFunctions; ++i) {
    if (kPairNames[i] == name) return PairFunction(i);
  }
  return std::nullopt;
}

namespace {

using at::Tensor;
using cpu::pointwise::Function;
using cpu::pointwise::PairFunction;

// ---- checks

template <class Names>
std::string listed(const Names& names, int count) {
  std::string list;
  for (int i = 0; i < count; ++i) list += (i == 0 ? "" : ", ") + std::string(names(i));
  return list;
}

Function check_function(std::string_view name, c10::ArrayRef<double> parameters) {
  using namespace cpu::pointwise;
  const auto found = find_function(name);
  TORCH_CHECK_VALUE(found.has_value(), "pointwise: expected function to be one of ",
                    listed([](int i) { return kInfo[i].name; }, kFunctions), ", but got '", name, "'");
  const auto wanted = size_t(kInfo[int(*found)].parameters);
  TORCH_CHECK_VALUE(parameters.size() == wanted, "pointwise: expected ", wanted, " parameters of ", name, ", but got ",
                    parameters.size());
  return *found;
}

PairFunction check_pair(const Tensor& first, const Tensor& second, std::string_view name) {
  using namespace cpu::pointwise;
  check_real("pointwise_pair", "first", first);
  check_like("pointwise_pair", "second", second, "first", first);
  const auto found = find_pair_function(name);
  TORCH_CHECK_VALUE(found.has_value(), "pointwise_pair: expected function to be one of ",
                    listed([](int i) { return kPairNames[i]; }, kPairFunctions), ", but got '", name, "'");
  return *found;
}

// ---- fake kernels: sizes and strides as of any operation on the same operands

Tensor pointwise_meta(const Tensor& input, std::string_view function, c10::ArrayRef<double> parameters) {
  check_real("pointwise", "input", input);
  check_function(function, parameters);
  return at::neg(input);
}

Tensor pointwise_grad_meta(const Tensor& grad_output, const Tensor& input, std::string_view function,
                           c10::ArrayRef<double> parameters) {
  check_real("pointwise_grad", "input", input);
  check_like("pointwise_grad", "grad_output", grad_output, "input", input);
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
  for (int64_t i = 0; i < n; ++i) std::memcpy(static_cast<Bits*>(to) + i, from + i * stride, sizeof(Bits));
}
template <class Bits>
void scatter(const void* from, int64_t n, char* to, int64_t stride) {
  for (int64_t i = 0; i < n; ++i) std::memcpy(to + i * stride, static_cast<const Bits*>(from) + i, sizeof(Bits));
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
  const cpu::FloatEnvironment environment;
  const auto size = iterator.element_size(0);
  const Tensor& result = iterator.output();
  cpu::ask_for_huge_pages(result.mutable_data_ptr(), result.nbytes());
  iterator.for_each([&](char** data, const int64_t* strides, int64_t n, int64_t rows) {
    const cpu::FloatEnvironmentScope scope(environment);
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
  check_real("pointwise", "input", input);
  const auto row = cpu::pointwise::value_row(check_function(function, parameters), to_dtype(input.scalar_type()));
  check_data("input", input);
  auto iterator = loop_over(input);
  run_rows<1>(iterator,
              [&](const char* const* sources, char* to, int64_t n) { row(sources[0], to, n, parameters.data()); });
  return iterator.output();
}

Tensor pointwise_grad_cpu(const Tensor& grad_output, const Tensor& input, std::string_view function,
                          c10::ArrayRef<double> parameters) {
  check_real("pointwise_grad", "input", input);
  check_like("pointwise_grad", "grad_output", grad_output, "input", input);
  const auto row = cpu::pointwise::slope_row(check_function(function, parameters), to_dtype(input.scalar_type()));
  check_data("grad_output", grad_output);
  check_data("input", input);
  auto iterator = loop_over(grad_output, input);
  run_rows<2>(iterator, [&](const char* const* sources, char* to, int64_t n) {
    row(sources[0], sources[1], to, n, parameters.data());
  });
  return iterator.output();
}

Tensor pointwise_pair_cpu(const Tensor& first, const Tensor& second, std::string_view function) {
  const PairFunction pair = check_pair(first, second, function);  // before its dtype is looked up
  const auto row = cpu::pointwise::pair_row(pair, to_dtype(first.scalar_type()));
  check_data("first", first);
  check_data("second", second);
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
