// The public C++ header: its functions as calls of the dispatcher ops.
#include "../conv2d_ext/include/conv2d_ext/conv2d_ext.h"

#include <c10/core/SymIntArrayRef.h>

#include <algorithm>
#include <string_view>

#include "conv2d_checks.h"
#include "conv2d_ops.h"
#include "cpu/conv2d_cpu.h"
#include "find_op.h"
#include "matmul.h"
#include "numerics.h"

namespace conv2d_ext {
namespace {

c10::SymIntArrayRef symbolic(at::IntArrayRef values) { return c10::fromIntArrayRefSlow(values); }

}  // namespace

at::Tensor conv2d(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups) {
  const bool has_four_sides = padding.size() == 4;
  auto params = params_from_pairs(symbolic(stride), symbolic(has_four_sides ? at::IntArrayRef(0) : padding),
                                  symbolic(dilation), groups);
  if (has_four_sides) {
    std::copy(padding.begin(), padding.end(), params.padding);
  }
  return conv2d(input, weight, bias, params);
}

at::Tensor conv1d(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups) {
  const int64_t both[] = {padding.empty() ? 0 : padding.front(), padding.empty() ? 0 : padding.back()};
  check_length("padding", symbolic(padding), 2);
  return conv1d_op().call(input, weight, bias, symbolic(stride), symbolic(both), symbolic(dilation), groups);
}

at::Tensor conv_transpose1d(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef output_padding,
                            int64_t groups, at::IntArrayRef dilation) {
  return conv_transpose1d_op().call(input, weight, bias, symbolic(stride), symbolic(padding), symbolic(output_padding),
                                    groups, symbolic(dilation));
}

at::Tensor conv_transpose2d(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef output_padding,
                            int64_t groups, at::IntArrayRef dilation) {
  return conv_transpose2d_op().call(input, weight, bias, symbolic(stride), symbolic(padding), symbolic(output_padding),
                                    groups, symbolic(dilation));
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  return linear_layer(input, weight, bias);
}

BatchInvariant::BatchInvariant() {
  static const auto op = find_op<void(std::string_view)>("enter_batch_invariant");
  op.call("");
}
BatchInvariant::~BatchInvariant() {
  try {
    static const auto op = find_op<void()>("leave_batch_invariant");
    op.call();
  } catch (const c10::Error& error) {  // in another thread than it began in
    TORCH_WARN(error.what_without_backtrace());
  }
}

std::string isa() { return cpu::isa_name(); }
int64_t numerics() { return kNumerics; }

}  // namespace conv2d_ext
