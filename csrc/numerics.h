// The number of the bits that results have.
#pragma once

namespace conv2d_ext {

// Rises when a change alters a bit of a result on the CPU: builds of the same number give the same bits, whatever the
// compiler and torch, on the same instruction set. Which NaN a result holds does not count. Raise it by one, then run
// `python tests/golden.py --write`; tests/test_golden.py fails until both are done.
constexpr int kNumerics = 7;

}  // namespace conv2d_ext
