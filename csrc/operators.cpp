// The operators without their engines as one translation unit: most of what these files take to compile is parsing
// torch's headers, once for each unit.
#include "conv2d_autograd.cpp"
#include "conv2d_checks.cpp"
#include "cpu/conv2d_cpu_ops.cpp"
#include "library.cpp"
