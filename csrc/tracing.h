// What traces a call of this thread.
#pragma once

#include <ATen/TracerMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace conv2d_ext {

inline bool has_mode(c10::impl::TorchDispatchModeKey key) {
  return c10::impl::TorchDispatchModeTLS::get_mode(key).has_value();
}

// A compiler or torch.export, which records calls.
inline bool traces_a_graph() {
  using Key = c10::impl::TorchDispatchModeKey;
  return has_mode(Key::PROXY) || has_mode(Key::FUNCTIONAL);
}

// The same, or whoever asks for shapes alone: tensors only have sizes.
inline bool is_tracing() { return has_mode(c10::impl::TorchDispatchModeKey::FAKE) || traces_a_graph(); }

// torch.jit.trace, which computes as well. It would keep the sizes of its example as constants, where code reckons with
// them: such a call is recorded as one op, which runs with the trace.
inline bool is_jit_tracing() { return at::tracer::impl::is_dispatch_enabled(); }

}  // namespace conv2d_ext
