// Every schema of the library but those of recorded calls (invariance_compiled.cpp), and what PyTorch must know of the
// operators without computing: shapes and strides (meta), dtypes (autocast).
//
// Activations are batched (N, C, H, W) or unbatched (C, H, W). padding is (top, bottom, left, right), so that
// padding='same' needs no padded copy. Without bias the first three ops are linear in each tensor, and the
// derivatives of each are the other two; for complex types the gradients conjugate their second factor:
//
//   conv2d              sum of input * weight
//   conv2d_grad_input   sum of grad_output * conj(weight)
//   conv2d_grad_weight  sum of grad_output * conj(input)
//   conv2d_grad_bias    sum of grad_output
//   conv2d_add_bias     output + bias, for those that conv2d_grad_input computes; its derivative is conv2d_grad_bias
//
// channels_last is the memory format of the result; weight_stride its strides. allow_winograd: Winograd's F(2 x 2,
// 3 x 3) where the CPU takes it. What a user calls passes the thread's setting on, derivatives what they were given.
//
// Pointwise functions (the table in cpu/pointwise/pointwise.h names them and their parameters), of any sizes and
// strides; grad_output has the input's sizes and dtype, and results have the input's strides where it is dense:
//
//   pointwise       f(input)
//   pointwise_grad  grad_output * f'(input)
//   pointwise_pair  f(first, second), of tensors of the same sizes; strides as an addition's
//
// rounded: a copy (rounded.cpp).
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include "autocast.h"
#include "conv2d_checks.h"
#include "conv2d_format.h"
#include "conv2d_ops.h"
#include "convolution_family.h"
#include "matmul.h"

TORCH_LIBRARY(conv2d_ext, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "conv2d(Tensor input, Tensor weight, Tensor? bias, SymInt[2] stride, SymInt[4] padding, SymInt[2] dilation, "
      "SymInt groups, bool allow_winograd=False) -> Tensor",
      tags);
  m.def(
      "conv2d_grad_input(Tensor grad_output, Tensor weight, SymInt[] input_size, SymInt[2] stride, "
      "SymInt[4] padding, SymInt[2] dilation, SymInt groups, bool channels_last, "
      "bool allow_winograd=False) -> Tensor",
      tags);
  m.def(
      "conv2d_grad_weight(Tensor grad_output, Tensor input, SymInt[] weight_size, SymInt[] weight_stride, "
      "SymInt[2] stride, SymInt[4] padding, SymInt[2] dilation, SymInt groups) -> Tensor",
      tags);
  m.def("conv2d_grad_bias(Tensor grad_output) -> Tensor", tags);
  m.def("matmul(Tensor mat1, Tensor mat2, Tensor? bias) -> Tensor", tags);
  m.def("sum(Tensor input, int[] dim, bool keepdim) -> Tensor", tags);
  m.def("var(Tensor input, int[] dim, float divisor, bool keepdim) -> Tensor", tags);
  m.def("mean(Tensor input, int[] dim, bool keepdim) -> Tensor", tags);
  m.def("softmax(Tensor input, int dim, bool log) -> Tensor", tags);
  m.def("softmax_grad(Tensor grad_output, Tensor output, int dim, bool log) -> Tensor", tags);
  m.def("attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, bool fused_layout) -> Tensor",
        tags);
  m.def(
      "attention_grad(Tensor grad_output, Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, "
      "bool fused_layout, bool[4] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
      tags);
  m.def("pointwise(Tensor input, str function, float[] parameters) -> Tensor", tags);
  m.def("pointwise_pair(Tensor first, Tensor second, str function) -> Tensor", tags);
  m.def("pointwise_grad(Tensor grad_output, Tensor input, str function, float[] parameters) -> Tensor", tags);
  m.def("copy_as(Tensor input, bool channels_last, bool grad_channels_last) -> Tensor", tags);
  m.def("rounded(Tensor input, ScalarType dtype) -> Tensor", tags);
  // The version becomes part of a graph, and so of the key of a compiler's cache: it is to hold no graph that another
  // version has recorded.
  m.def("enter_batch_invariant(str version=\"\") -> ()", tags);
  m.def("leave_batch_invariant() -> ()", tags);
  m.def("conv2d_add_bias(Tensor output, Tensor bias) -> Tensor", tags);

  // These are made of the ops above, for every device, transform and trace (convolution_family.cpp, matmul.cpp).
  // padding of conv1d is (left, right); the order of the transposed ones' arguments is PyTorch's.
  m.def("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor", tags);
  m.def(
      "conv1d(Tensor input, Tensor weight, Tensor? bias, SymInt[1] stride, SymInt[2] padding, SymInt[1] dilation, "
      "SymInt groups) -> Tensor",
      tags);
  m.def(
      "conv_transpose1d(Tensor input, Tensor weight, Tensor? bias, SymInt[1] stride, SymInt[1] padding, "
      "SymInt[1] output_padding, SymInt groups, SymInt[1] dilation) -> Tensor",
      tags);
  m.def(
      "conv_transpose2d(Tensor input, Tensor weight, Tensor? bias, SymInt[2] stride, SymInt[2] padding, "
      "SymInt[2] output_padding, SymInt groups, SymInt[2] dilation) -> Tensor",
      tags);
}

namespace conv2d_ext {

namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;

// ---- fake kernels: the results' sizes, dtypes and real strides, for tracing and the meta device

Tensor conv2d_meta(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, SymIntArrayRef stride,
                   SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups, bool /*allow_winograd*/) {
  const auto problem =
      check_conv2d<SymInt>(input, weight, bias, make_params<SymInt>(stride, padding, dilation, groups));
  return empty_output<SymInt>(problem, input, weight);
}

Tensor conv2d_grad_input_meta(const Tensor& grad_output, const Tensor& weight, SymIntArrayRef input_size,
                              SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups,
                              bool channels_last, bool /*allow_winograd*/) {
  const auto problem = check_conv2d_grad_input<SymInt>(grad_output, weight, input_size,
                                                       make_params<SymInt>(stride, padding, dilation, groups));
  return empty_activation<SymInt>(problem.batch, problem.in_channels, problem.in_h, problem.in_w,
                                  input_size.size() == 3, channels_last, grad_output.options());
}

Tensor conv2d_grad_weight_meta(const Tensor& grad_output, const Tensor& input, SymIntArrayRef weight_size,
                               SymIntArrayRef weight_stride, SymIntArrayRef stride, SymIntArrayRef padding,
                               SymIntArrayRef dilation, SymInt groups) {
  check_conv2d_grad_weight<SymInt>(grad_output, input, weight_size,
                                   make_params<SymInt>(stride, padding, dilation, groups));
  return checked_weight_strides(at::empty_strided_symint(weight_size, weight_stride, grad_output.options()));
}

Tensor conv2d_grad_bias_meta(const Tensor& grad_output) {
  check_conv2d_grad_bias(grad_output);
  return at::empty_symint({grad_output.sym_size(-3)}, grad_output.options());
}

TORCH_LIBRARY_IMPL(conv2d_ext, Meta, m) {
  m.impl("conv2d", conv2d_meta);
  m.impl("conv2d_grad_input", conv2d_grad_input_meta);
  m.impl("conv2d_grad_weight", conv2d_grad_weight_meta);
  m.impl("conv2d_grad_bias", conv2d_grad_bias_meta);
}

// ---- the ops made of others: one kernel for every device, which autograd, tracing and vmap look into

void register_made_of_others(torch::Library& m) {
  m.impl("conv1d", conv1d);
  m.impl("conv_transpose1d", conv_transpose1d);
  m.impl("conv_transpose2d", conv_transpose2d);
  m.impl("linear", linear_layer);
}

TORCH_LIBRARY_IMPL(conv2d_ext, CompositeImplicitAutograd, m) { register_made_of_others(m); }
TORCH_LIBRARY_IMPL(conv2d_ext, FuncTorchBatchedDecomposition, m) { register_made_of_others(m); }

// ---- autocast: convolutions and products run in the lower precision, as PyTorch's do. Those made of other ops are
// cast whole: the cache of cast weights keeps a parameter, not its views.

template <c10::DispatchKey key, c10::DeviceType device>
void register_autocast(torch::Library& m) {
  m.impl("conv2d", Autocast<key, device, conv2d_op, Conv2dSignature>::call);
  m.impl("conv1d", Autocast<key, device, conv1d_op, Conv1dSignature>::call);
  m.impl("conv_transpose1d", Autocast<key, device, conv_transpose1d_op, ConvTransposeSignature>::call);
  m.impl("conv_transpose2d", Autocast<key, device, conv_transpose2d_op, ConvTransposeSignature>::call);
  m.impl("matmul", Autocast<key, device, matmul_op, MatmulSignature>::call);
}

TORCH_LIBRARY_IMPL(conv2d_ext, AutocastCPU, m) {
  register_autocast<c10::DispatchKey::AutocastCPU, c10::DeviceType::CPU>(m);
}

TORCH_LIBRARY_IMPL(conv2d_ext, AutocastCUDA, m) {
  register_autocast<c10::DispatchKey::AutocastCUDA, c10::DeviceType::CUDA>(m);
}

}  // namespace
}  // namespace conv2d_ext
