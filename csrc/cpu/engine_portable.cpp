// The engines for any architecture, by the compiler's 128-bit vector extension.
#include "engine.h"
#include "numeric.h"

#define CONV2D_ISA portable
#include "isa_target.h"

#include "vec_portable.h"
#include "engine_impl.h"

namespace conv2d_ext::cpu {
const Engine* portable_engine() { return &portable::kEngine; }
}  // namespace conv2d_ext::cpu
