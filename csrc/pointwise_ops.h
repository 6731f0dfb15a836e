// The pointwise ops as C++ functions: what the rest of the library calls, so that autograd, tracing and torch.func see
// every call. The schemas are in library.cpp, the functions' names and parameters in cpu/pointwise/pointwise.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "cpu/pointwise/pointwise.h"
#include "find_op.h"

namespace conv2d_ext {

using PointwiseSignature = at::Tensor(const at::Tensor&, std::string_view, c10::ArrayRef<double>);
using PointwiseGradSignature = at::Tensor(const at::Tensor&, const at::Tensor&, std::string_view,
                                          c10::ArrayRef<double>);

using PointwisePairSignature = at::Tensor(const at::Tensor&, const at::Tensor&, std::string_view);

// By their names; none where there is no such function.
std::optional<cpu::pointwise::Function> find_function(std::string_view name);
std::optional<cpu::pointwise::PairFunction> find_pair_function(std::string_view name);

// Handles for call() and redispatch(), looked up once.
namespace op_names {
inline constexpr char pointwise[] = "pointwise", pointwise_grad[] = "pointwise_grad",
                      pointwise_pair[] = "pointwise_pair";
}
inline const auto& pointwise_op() { return op_named<PointwiseSignature, op_names::pointwise>(); }
inline const auto& pointwise_grad_op() { return op_named<PointwiseGradSignature, op_names::pointwise_grad>(); }
inline const auto& pointwise_pair_op() { return op_named<PointwisePairSignature, op_names::pointwise_pair>(); }

// f(input)
inline at::Tensor pointwise(const at::Tensor& input, std::string_view function, c10::ArrayRef<double> parameters = {}) {
  return pointwise_op().call(input, function, parameters);
}

// grad_output * f'(input)
inline at::Tensor pointwise_grad(const at::Tensor& grad_output, const at::Tensor& input, std::string_view function,
                                 c10::ArrayRef<double> parameters = {}) {
  return pointwise_grad_op().call(grad_output, input, function, parameters);
}

// f(first, second)
inline at::Tensor pointwise_pair(const at::Tensor& first, const at::Tensor& second, std::string_view function) {
  return pointwise_pair_op().call(first, second, function);
}

}  // namespace conv2d_ext
