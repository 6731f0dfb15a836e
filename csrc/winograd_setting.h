// Whether calls of conv2d may take Winograd's F(2 x 2, 3 x 3): a setting of each thread, as PyTorch's grad mode is.
#pragma once

namespace conv2d_ext {

// In this thread. A thread begins with what the environment variable CONV2D_EXT_ALLOW_WINOGRAD says, off without it.
bool allows_winograd();
void set_allow_winograd(bool allow);

}  // namespace conv2d_ext
