// Included by engine_<isa>.cpp and tables_<isa>.cpp after shared_headers.h. Functions defined from here to target_end.h
// may use the instructions of CONV2D_TARGET.
#pragma once

#define CONV2D_PRAGMA(text) _Pragma(#text)
#define CONV2D_PRAGMA_EXPAND(text) CONV2D_PRAGMA(text)
#if defined(__clang__)
#define CONV2D_TARGET_ATTRIBUTE __attribute__((target(CONV2D_TARGET)))
CONV2D_PRAGMA_EXPAND(clang attribute push(CONV2D_TARGET_ATTRIBUTE, apply_to = function))
#else
#pragma GCC push_options
CONV2D_PRAGMA_EXPAND(GCC target(CONV2D_TARGET))
#endif
