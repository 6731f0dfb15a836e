// The system's headers and those of ours that are shared between instruction sets. They are included before
// target_begin.h, so that nothing in them is compiled for one instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
// GCC 12 warns of variables in its own header that are meant to be undefined.
#pragma GCC diagnostic push
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include "../base/executor.h"
#include "../base/limits.h"
#include "../base/numeric.h"
#include "../base/sanitizers.h"
#include "../base/scratch.h"
#include "../plan/caches.h"
#include "../plan/candidates.h"
#include "../plan/padding_classes.h"
#include "../plan/patch_axis.h"
#include "../plan/tile_depthwise.h"
#include "../plan/tile_amx.h"
#include "../plan/tile_gemm.h"
#include "../plan/tile_one_pixel.h"
#include "../plan/tile_phases.h"
#include "../plan/tile_pixels.h"
#include "../plan/tile_grid.h"
#include "../plan/tile_planes.h"
#include "../plan/tile_winograd.h"
#include "cpu_features.h"
#include "engine.h"

#define CONV2D_INLINE inline __attribute__((always_inline))
#define CONV2D_INLINE_LAMBDA __attribute__((always_inline))
