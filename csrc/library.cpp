// Every schema of the library, and the typed handles of conv2d_ops.h.
//
// Activations are batched (N, C, H, W) or unbatched (C, H, W). padding is (top, bottom, left, right), so that
// padding='same' needs no padded copy. Without bias the first three ops are linear in each tensor, and the
// derivatives of each are the other two; for complex types the gradients conjugate their second factor:
//
//   conv2d              sum of input * weight
//   conv2d_grad_input   sum of grad_output * conj(weight)
//   conv2d_grad_weight  sum of grad_output * conj(input)
//   conv2d_grad_bias    sum of grad_output
//
// channels_last is the memory format of the result; weight_stride its strides.
#include <torch/library.h>

#include "conv2d_ops.h"

TORCH_LIBRARY(conv2d_ext, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "conv2d(Tensor input, Tensor weight, Tensor? bias, SymInt[2] stride, SymInt[4] padding, SymInt[2] dilation, "
      "SymInt groups) -> Tensor",
      tags);
  m.def(
      "conv2d_grad_input(Tensor grad_output, Tensor weight, SymInt[] input_size, SymInt[2] stride, "
      "SymInt[4] padding, SymInt[2] dilation, SymInt groups, bool channels_last) -> Tensor",
      tags);
  m.def(
      "conv2d_grad_weight(Tensor grad_output, Tensor input, SymInt[] weight_size, SymInt[] weight_stride, "
      "SymInt[2] stride, SymInt[4] padding, SymInt[2] dilation, SymInt groups) -> Tensor",
      tags);
  m.def("conv2d_grad_bias(Tensor grad_output) -> Tensor", tags);
}

namespace conv2d_ext {
namespace {

template <class Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

const c10::TypedOperatorHandle<Conv2dSignature>& conv2d_op() {
  static const auto op = find_op<Conv2dSignature>("conv2d_ext::conv2d");
  return op;
}

const c10::TypedOperatorHandle<Conv2dGradInputSignature>& conv2d_grad_input_op() {
  static const auto op = find_op<Conv2dGradInputSignature>("conv2d_ext::conv2d_grad_input");
  return op;
}

const c10::TypedOperatorHandle<Conv2dGradWeightSignature>& conv2d_grad_weight_op() {
  static const auto op = find_op<Conv2dGradWeightSignature>("conv2d_ext::conv2d_grad_weight");
  return op;
}

const c10::TypedOperatorHandle<Conv2dGradBiasSignature>& conv2d_grad_bias_op() {
  static const auto op = find_op<Conv2dGradBiasSignature>("conv2d_ext::conv2d_grad_bias");
  return op;
}

}  // namespace conv2d_ext
