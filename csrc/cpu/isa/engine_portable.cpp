// The engine for any architecture, by the compiler's 128-bit vector extension.
#include "run.h"

namespace conv2d_ext::cpu {
const Engine* portable_engine() {
  static constexpr Engine kEngine{portable::kIsaName,
                                  portable::kIsaName,
                                  portable::run_task,
                                  portable::grad_bias,
                                  portable::shape_of,
                                  portable::rows_of,
                                  nullptr,
                                  nullptr};
  return &kEngine;
}
}  // namespace conv2d_ext::cpu
