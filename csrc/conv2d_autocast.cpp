// Autocast: conv2d runs in the lower precision, as F.conv2d does. DispatchKey::Autocast means CUDA alone, so each
// device has its own registration.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "conv2d_ops.h"

namespace conv2d_ext {
namespace {

using at::Tensor;

template <c10::DispatchKey key, c10::DeviceType device>
Tensor conv2d_autocast(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                       c10::SymInt groups) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
  const auto dtype = at::autocast::get_lower_precision_fp_from_device_type(device);
  const auto cast = [&](const auto& tensor) { return at::autocast::cached_cast(dtype, tensor, device); };
  return conv2d_op().call(cast(input), cast(weight), cast(bias), stride, padding, dilation, std::move(groups));
}

TORCH_LIBRARY_IMPL(conv2d_ext, AutocastCPU, m) {
  m.impl("conv2d", conv2d_autocast<c10::DispatchKey::AutocastCPU, c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(conv2d_ext, AutocastCUDA, m) {
  m.impl("conv2d", conv2d_autocast<c10::DispatchKey::AutocastCUDA, c10::DeviceType::CUDA>);
}

}  // namespace
}  // namespace conv2d_ext
