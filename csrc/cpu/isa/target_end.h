// Ends what target_begin.h began.
#pragma once

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
