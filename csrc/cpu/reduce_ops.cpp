// The CPU kernels of sum and softmax: tensors become pointers, dimensions and strides.
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>

#include "../conv2d_checks.h"
#include "../conv2d_tensors.h"
#include "../reductions.h"
#include "base/huge_pages.h"
#include "reduce/reduce.h"
#include "torch_executor.h"

namespace conv2d_ext::cpu {
namespace {

// Below so many elements threads cost more than they save.
constexpr int64_t kSerialElements = 32768;

Executor executor_for(const Tensor& input) { return input.numel() < kSerialElements ? kSerial : executor(); }

// The reduced dimensions as they follow one another in memory: the largest stride first. (Equal ones
// stay in order, as do those of an expanded tensor.) So a sum over one example's elements has the same order in every
// batch, and none reads a cache line for each element.
reduce::Dims dims_in_memory(const Tensor& input, const std::vector<bool>& reduced) {
  std::vector<int64_t> order;
  for (int64_t d = 0; d < input.dim(); ++d) {
    if (reduced[size_t(d)]) order.push_back(d);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return std::abs(input.stride(a)) > std::abs(input.stride(b)); });
  reduce::Dims dims;
  for (const int64_t d : order) dims.append(input.size(d), input.stride(d));
  return dims;
}

Tensor sum(const Tensor& input, c10::IntArrayRef dim, bool keepdim) {
  const std::vector<bool> reduced = reduced_dims("conv2d_ext::sum", input, dim);
  TORCH_CHECK(input.dim() <= reduce::kMaxDims, "sum: expected at most ", reduce::kMaxDims, " dimensions, but got ",
              input.dim());
  const Tensor result = at::empty_symint(sum_sizes(input, reduced, keepdim), input.options());
  if (input.numel() == 0) {
    return result.zero_();
  }
  check_data("input", input);
  reduce::SumCall call;
  call.reduced = dims_in_memory(input, reduced);
  for (int64_t d = 0; d < input.dim(); ++d) {
    if (!reduced[size_t(d)]) call.kept.append(input.size(d), input.stride(d));
  }
  call.input = input.const_data_ptr();
  call.result = result.mutable_data_ptr();
  with_memory_errors([&] { reduce::sum(to_dtype(input.scalar_type()), call, executor_for(input)); });
  return result;
}

reduce::SoftmaxCall softmax_call(const Tensor& result, int64_t dim) {
  reduce::SoftmaxCall call{nullptr, nullptr, result.mutable_data_ptr(), 1, 1, 1};
  ask_for_huge_pages(call.result, result.nbytes());
  const int64_t along = at::maybe_wrap_dim(dim, result.dim());
  for (int64_t d = 0; d < result.dim(); ++d) {
    (d < along ? call.outer : d == along ? call.length : call.inner) *= result.size(d);
  }
  return call;
}

Tensor softmax(const Tensor& input, int64_t dim, bool log) {
  check_softmax(input, dim);
  const Tensor result = at::empty(input.sizes(), input.options());
  if (result.numel() == 0) {
    return result;
  }
  check_data("input", input);
  const Tensor rows = input.contiguous();
  reduce::SoftmaxCall call = softmax_call(result, dim);
  call.first = rows.const_data_ptr();
  reduce::softmax(to_dtype(input.scalar_type()), log, call, executor_for(result));
  return result;
}

Tensor softmax_grad(const Tensor& grad_output, const Tensor& output, int64_t dim, bool log) {
  check_softmax_grad(grad_output, output, dim);
  const Tensor result = at::empty(output.sizes(), output.options());
  if (result.numel() == 0) {
    return result;
  }
  check_data("grad_output", grad_output);
  check_data("output", output);
  const Tensor grads = grad_output.contiguous(), outputs = output.contiguous();
  reduce::SoftmaxCall call = softmax_call(result, dim);
  call.first = grads.const_data_ptr();
  call.second = outputs.const_data_ptr();
  reduce::softmax_grad(to_dtype(output.scalar_type()), log, call, executor_for(result));
  return result;
}

TORCH_LIBRARY_IMPL(conv2d_ext, CPU, m) {
  m.impl("sum", sum);
  m.impl("softmax", softmax);
  m.impl("softmax_grad", softmax_grad);
}

}  // namespace
}  // namespace conv2d_ext::cpu
