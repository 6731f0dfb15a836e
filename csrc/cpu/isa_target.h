// Included by each engine_<isa>.cpp after every header that is shared between instruction sets and before any that is
// compiled for one. Functions defined from here to isa_target_end.h may use the instructions of CONV2D_TARGET; they
// all live in the namespace CONV2D_ISA, so that the linker can't pick an inline function or template compiled for a
// newer instruction set for code that must run without it.
#pragma once

#if defined(CONV2D_TARGET)
#define CONV2D_PRAGMA(text) _Pragma(#text)
#define CONV2D_PRAGMA_EXPAND(text) CONV2D_PRAGMA(text)
#if defined(__clang__)
#define CONV2D_TARGET_ATTRIBUTE __attribute__((target(CONV2D_TARGET)))
CONV2D_PRAGMA_EXPAND(clang attribute push(CONV2D_TARGET_ATTRIBUTE, apply_to = function))
#else
#pragma GCC push_options
CONV2D_PRAGMA_EXPAND(GCC target(CONV2D_TARGET))
#endif
#endif

#define CONV2D_INLINE inline __attribute__((always_inline))
#define CONV2D_INLINE_LAMBDA __attribute__((always_inline))
