// What a recorded call of the mode returns (invariance_compiled.cpp): its strides and dtypes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>

#include <optional>
#include <string>
#include <vector>

#include "export.h"

namespace conv2d_ext {

// PyTorch's kernels and its meta kernels, which describe results to a compiler, disagree about some strides, and about
// dtypes where a norm's weights have another one than its input. Here both are made to follow one rule, of the
// arguments that are tensors: a result is channels_last where the first argument's channels lie side by side, else row
// by row. (Ops of one tensor with one result are left alone: there both agree.)
class RecordedResults {
 public:
  using Tensors = std::vector<std::optional<at::Tensor>>;

  // aten_name: with its namespace, without its overload. arguments: all, of which those that are no tensors are empty;
  // the first is a tensor.
  RecordedResults(const std::string& aten_name, const Tensors& arguments);

  // The result of this number, as it is to lie.
  at::Tensor settle(size_t number, at::Tensor result) const;

  // Whether the rule holds for an op.
  static bool settles(const c10::FunctionSchema& schema);

 private:
  int64_t dims_ = 0;
  at::MemoryFormat format_ = at::MemoryFormat::Contiguous;
  std::vector<at::ScalarType> dtypes_;  // of the first results, where they are known
};

// The results of conv2d_ext::eager_<name> from aten's.
CONV2D_EXT_EXPORT RecordedResults::Tensors settle_recorded_results(const std::string& name,
                                                                   const RecordedResults::Tensors& arguments,
                                                                   RecordedResults::Tensors results);

}  // namespace conv2d_ext
