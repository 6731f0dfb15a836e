// Handles of this library's ops.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace conv2d_ext {

// name: without the namespace.
template <class Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  const std::string full_name = std::string("conv2d_ext::") + name;
  return c10::Dispatcher::singleton().findSchemaOrThrow(full_name.c_str(), "").typed<Signature>();
}

// The same, looked up once. The name is a variable of namespace scope, as template arguments are.
template <class Signature, const char* name>
const c10::TypedOperatorHandle<Signature>& op_named() {
  static const auto op = find_op<Signature>(name);
  return op;
}

}  // namespace conv2d_ext
