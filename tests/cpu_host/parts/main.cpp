// Compiled without any instruction set's flags, so that a machine that lacks it gets as far as saying so.
#include <cstdio>

#include "../../../csrc/cpu/isa/engine.h"

#if !defined(CONV2D_PARTS_HERE)
#define CONV2D_PARTS_HERE true
#endif

#if defined(CONV2D_ASKS_ALONE)
// Whether the parts would run, before they are compiled.
static int run_parts() { return 0; }
#else
int run_parts();
#endif

int main() {
  constexpr int kNotChecked = 77;
  if (!(CONV2D_PARTS_HERE)) {
    std::printf("this machine lacks the instruction set\n");
    return kNotChecked;
  }
  return run_parts();
}
