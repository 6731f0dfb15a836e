// The vectors of the instruction set that is being compiled for. Every header below isa/, kernels/, pack/ and drivers/
// includes this one; engine_<isa>.cpp says which set it is, and a header compiled by itself has the portable one.
//
// All that these headers define lives in the namespace CONV2D_ISA, so that the linker can't pick an inline function or
// template compiled for a newer instruction set for code that must run without it.
#pragma once

#include "shared_headers.h"

#if defined(CONV2D_NATIVE_VEC)
#include CONV2D_NATIVE_VEC
#else
#define CONV2D_ISA portable
#endif
#include "vec_portable.h"
