// The vectors of the instruction set that is being compiled for. engine_<isa>.cpp and tables_<isa>.cpp say which it is;
// a header compiled by itself has the portable one. isa/convert.h, kernels/, pack/, drivers/, pointwise/ and reduce/
// are all built on this header.
//
// What they define lives in the namespace CONV2D_ISA. Else the linker could pick an inline function or template that is
// compiled for a newer instruction set for code that must run without it.
#pragma once

#include "shared_headers.h"

#if defined(CONV2D_NATIVE_VEC)
#include CONV2D_NATIVE_VEC
#else
#define CONV2D_ISA portable
#endif
#include "vec_portable.h"

#define CONV2D_TEXT_OF(name) #name
#define CONV2D_TEXT(name) CONV2D_TEXT_OF(name)

namespace conv2d_ext::cpu::CONV2D_ISA {
constexpr const char* kIsaName = CONV2D_TEXT(CONV2D_ISA);
}
