// Sums and softmax in an order that the position along the reduced dimensions fixes (cpu/reduce/reduce.h): the ops
// conv2d_ext::sum, mean, var, softmax and softmax_grad, for float32, float64, bfloat16 and float16 on the CPU. Their
// results are contiguous, as PyTorch's are.
//
//   sum, mean     over the dimensions `dim`; a mean is a sum that is divided
//   var           the sum of squared distances from the mean, over `divisor`
//   softmax       y = softmax(x) along dim, or with log log_softmax
//   softmax_grad  its gradient gx for gy and y: y * (gy - sum of gy * y), or with log gy - e^y * (sum of gy)
#pragma once

#include <ATen/core/Tensor.h>

#include "find_op.h"

namespace conv2d_ext {

using SumSignature = at::Tensor(const at::Tensor&, c10::IntArrayRef, bool);
using VarSignature = at::Tensor(const at::Tensor&, c10::IntArrayRef, double, bool);
using SoftmaxSignature = at::Tensor(const at::Tensor&, int64_t, bool);
using SoftmaxGradSignature = at::Tensor(const at::Tensor&, const at::Tensor&, int64_t, bool);

namespace op_names {
inline constexpr char sum[] = "sum", mean[] = "mean", var[] = "var", softmax[] = "softmax",
                      softmax_grad[] = "softmax_grad";
}
inline const auto& sum_op() { return op_named<SumSignature, op_names::sum>(); }
inline const auto& mean_op() { return op_named<SumSignature, op_names::mean>(); }
inline const auto& var_op() { return op_named<VarSignature, op_names::var>(); }
inline const auto& softmax_op() { return op_named<SoftmaxSignature, op_names::softmax>(); }
inline const auto& softmax_grad_op() { return op_named<SoftmaxGradSignature, op_names::softmax_grad>(); }

inline at::Tensor sum_over(const at::Tensor& input, c10::IntArrayRef dim, bool keepdim) {
  return sum_op().call(input, dim, keepdim);
}
inline at::Tensor mean_over(const at::Tensor& input, c10::IntArrayRef dim, bool keepdim) {
  return mean_op().call(input, dim, keepdim);
}
inline at::Tensor var_over(const at::Tensor& input, c10::IntArrayRef dim, double divisor, bool keepdim) {
  return var_op().call(input, dim, divisor, keepdim);
}
inline at::Tensor softmax_over(const at::Tensor& input, int64_t dim, bool log = false) {
  return softmax_op().call(input, dim, log);
}
inline at::Tensor softmax_grad(const at::Tensor& grad_output, const at::Tensor& output, int64_t dim, bool log) {
  return softmax_grad_op().call(grad_output, output, dim, log);
}

// Which dimensions `dim` names, which may be negative; raises for one that is not there, or is named twice, and for
// dtypes that are not summed. op: the name to complain by.
std::vector<bool> reduced_dims(const char* op, const at::Tensor& input, c10::IntArrayRef dim);
// The sizes of a sum over them.
std::vector<c10::SymInt> sum_sizes(const at::Tensor& input, const std::vector<bool>& reduced, bool keepdim);
// Dtypes, sizes and the dimension; raises. For kernels and tracing alike.
void check_softmax(const at::Tensor& input, int64_t dim);
void check_softmax_grad(const at::Tensor& grad_output, const at::Tensor& output, int64_t dim);

}  // namespace conv2d_ext
