// The vectors of the instruction set that is being compiled for. engine_<isa>.cpp says which it is; a header compiled
// by itself has the portable one. isa/convert.h, kernels/, pack/ and drivers/ are all built on this header.
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
