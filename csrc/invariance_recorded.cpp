#include "invariance_recorded.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>

#include "invariance_kernels.h"

namespace conv2d_ext {

RecordedResults::RecordedResults(const std::string& aten_name, const Tensors& arguments) {
  TORCH_INTERNAL_ASSERT(!arguments.empty() && arguments[0].has_value());
  const at::Tensor& like = *arguments[0];
  dims_ = like.dim();
  // By strides that no size of 1 changes, such as that of a batch of one, and without asking what a symbolic one is.
  const auto is_one = [&](int64_t dim) { return like.sym_stride(dim).maybe_as_int() == 1; };
  if ((dims_ == 4 || dims_ == 5) && is_one(1) && !is_one(dims_ - 1)) {
    format_ = dims_ == 4 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
  }
  // (On CUDA PyTorch's functions of shapes know the types.)
  if (!like.device().is_cpu()) return;
  const auto type_of = [&](size_t begin, size_t end) {
    for (size_t i = begin; i < std::min(end, arguments.size()); ++i) {
      if (arguments[i].has_value() && arguments[i]->defined()) return arguments[i]->scalar_type();
    }
    return like.scalar_type();
  };
  // Statistics have the type of what is learned; the gradient of an input has the input's.
  if (aten_name == "aten::native_layer_norm") dtypes_ = {like.scalar_type(), type_of(2, 4), type_of(2, 4)};
  if (aten_name == "aten::native_group_norm") dtypes_ = {like.scalar_type(), type_of(1, 3), type_of(1, 3)};
  if (aten_name.find("native_batch_norm") != std::string::npos && aten_name.find("backward") == std::string::npos) {
    dtypes_ = {like.scalar_type(), type_of(1, 5), type_of(1, 5)};
  }
  if (aten_name == "aten::native_group_norm_backward") dtypes_ = {type_of(1, 2)};
}

at::Tensor RecordedResults::settle(size_t number, at::Tensor result) const {
  if (!result.defined()) return result;
  if (number < dtypes_.size()) result = result.to(dtypes_[number]);
  return result.contiguous(result.dim() == dims_ ? format_ : at::MemoryFormat::Contiguous);
}

bool RecordedResults::settles(const c10::FunctionSchema& schema) {
  const auto is_tensor = [](const c10::Argument& argument) {
    return argument.type()->isSubtypeOf(*c10::OptionalType::ofTensor()) ||
           argument.type()->isSubtypeOf(*c10::ListType::ofOptionalTensors());
  };
  const auto& arguments = schema.arguments();
  return schema.returns().size() > 1 || std::count_if(arguments.begin(), arguments.end(), is_tensor) > 1;
}

RecordedResults::Tensors settle_recorded_results(const std::string& name, const RecordedResults::Tensors& arguments,
                                                 RecordedResults::Tensors results) {
  const auto op = invariance::find_overload("aten::" + name);
  TORCH_INTERNAL_ASSERT(op.has_value());
  if (!RecordedResults::settles(op->schema())) return results;
  const RecordedResults settled(op->operator_name().name, arguments);
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].has_value()) results[i] = settled.settle(i, *results[i]);
  }
  return results;
}

}  // namespace conv2d_ext
