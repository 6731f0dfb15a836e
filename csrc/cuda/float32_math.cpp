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

// What cuBLAS's handles are told. From torch 2.9 on allowTF32CuBLAS() raises where the old setting and the new one
// differ, for example after the new one alone was set; torch.mm does not. The reader takes strings in 2.9, then
// enums; 2.8 has none.
template <class Context, class Precision, class Backend, class Operation>
bool reads_tf32(const Context& context, Precision (Context::*reader)(Backend, Operation) const) {
  if constexpr (std::is_enum_v<Backend>) {
    return (context.*reader)(Backend::CUDA, Operation::MATMUL) == Precision::TF32;
  } else {
    return (context.*reader)("cuda", "matmul") == "tf32";
  }
}

template <class Context>
auto matmul_allows_tf32(const Context& context, int) -> decltype(&Context::float32Precision, bool()) {
  return reads_tf32(context, &Context::float32Precision);
}
template <class Context>
bool matmul_allows_tf32(const Context& context, long) {
  return context.allowTF32CuBLAS();
}

}  // namespace

Float32Math float32_math() {
  const at::Context& context = at::globalContext();
  return allows_tf32(context, &at::Context::allowTF32CuDNN) ? Float32Math::kTF32 : Float32Math::kIeee;
}

Float32Math float32_matmul_math() {
  return matmul_allows_tf32(at::globalContext(), 0) ? Float32Math::kTF32 : Float32Math::kIeee;
}

}  // namespace conv2d_ext::cuda
