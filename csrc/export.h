// libconv2d_ext.so hides its symbols. Those that conv2d_ext._C calls in it, and the functions of the public C++ header,
// are exported.
#pragma once

#define CONV2D_EXT_EXPORT __attribute__((visibility("default")))
