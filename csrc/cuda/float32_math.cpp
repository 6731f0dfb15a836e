#include "float32_math.h"

#include <ATen/Context.h>

#include <string>
#include <type_traits>

namespace conv2d_ext::cuda {
namespace {

// Context::allowTF32CuDNN() of all operations takes no argument in torch 2.8; later versions have the setting of
// convolutions alone, which they ask for by a string (2.9) or an enum. Asked without it, those raise where the old flag
// and the new ones were mixed; convolutions must not. The parameter's type tells which version this is.
template <class Context>
bool allows_tf32(const Context& context, bool (Context::*reader)() const) {
  return (context.*reader)();
}

template <class Context, class Operation>
bool allows_tf32(const Context& context, bool (Context::*reader)(Operation) const) {
  using Value = std::decay_t<Operation>;
  if constexpr (std::is_same_v<Value, std::string>) {
    return (context.*reader)("conv");
  } else {
    return (context.*reader)(Value::value_type::CONV);
  }
}

}  // namespace

Float32Math float32_math() {
  const at::Context& context = at::globalContext();
  return allows_tf32(context, &at::Context::allowTF32CuDNN) ? Float32Math::kTF32 : Float32Math::kIeee;
}

Float32Math float32_matmul_math() {
  return at::globalContext().allowTF32CuBLAS() ? Float32Math::kTF32 : Float32Math::kIeee;
}

}  // namespace conv2d_ext::cuda
