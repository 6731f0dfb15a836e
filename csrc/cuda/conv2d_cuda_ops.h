// What the bindings need of the CUDA engine's PyTorch side.
#pragma once

#include <c10/core/Device.h>

#include "../export.h"
#include "conv2d_cuda.h"

namespace conv2d_ext::cuda {

// What the engine may know about a GPU of this machine, looked up once for each; and what is wanted of plans.
CONV2D_EXT_EXPORT Machine machine_of(c10::DeviceIndex device);

}  // namespace conv2d_ext::cuda
