#include "winograd_setting.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdlib>
#include <string>

namespace conv2d_ext {
namespace {

bool environment_allows() {
  const char* const value = std::getenv("CONV2D_EXT_ALLOW_WINOGRAD");
  const std::string text = value == nullptr ? "" : value;
  TORCH_CHECK_VALUE(text.empty() || text == "0" || text == "1",
                    "CONV2D_EXT_ALLOW_WINOGRAD=", text, ": expected 0 or 1");
  return text == "1";
}

// The environment's word is read once.
bool& setting() {
  static const bool first = environment_allows();
  thread_local bool allowed = first;
  return allowed;
}

}  // namespace

bool allows_winograd() { return setting(); }
void set_allow_winograd(bool allow) { setting() = allow; }

// For graphs, where a function under torch.compile changes the setting. A trace does not.
void set_allow_winograd_in_graph(bool allow) {
  using c10::impl::TorchDispatchModeTLS;
  if (TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::FAKE).has_value()) return;
  set_allow_winograd(allow);
}

TORCH_LIBRARY_IMPL(conv2d_ext, CompositeImplicitAutograd, m) {
  m.impl("set_allow_winograd", set_allow_winograd_in_graph);
}

}  // namespace conv2d_ext
