// Autocast of an op's tensors to the lower precision, as PyTorch casts those of its own convolutions and products.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

namespace conv2d_ext {

// The kernel of an op of two tensors and a bias, whose handle is op(). (DispatchKey::Autocast means CUDA alone, so each
// device has its own registration.)
template <c10::DispatchKey key, c10::DeviceType device, auto op, class Signature>
struct Autocast;

template <c10::DispatchKey key, c10::DeviceType device, auto op, class... Parameters>
struct Autocast<key, device, op,
                at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, Parameters...)> {
  static at::Tensor call(const at::Tensor& first, const at::Tensor& second, const std::optional<at::Tensor>& bias,
                         Parameters... parameters) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
    const auto dtype = at::autocast::get_lower_precision_fp_from_device_type(device);
    const auto cast = [&](const auto& tensor) { return at::autocast::cached_cast(dtype, tensor, device); };
    return op().call(cast(first), cast(second), cast(bias), std::move(parameters)...);
  }
};

}  // namespace conv2d_ext
