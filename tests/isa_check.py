"""A program: correctness of the instruction set that CONV2D_EXT_CPU_ISA names, all directions.

Prints the instruction set in use. test_isa.py runs it.
"""

from __future__ import annotations

import torch
from accuracy import assert_results_as_accurate

import conv2d_ext
from conv2d_ext import testing
from conv2d_ext.testing import (
    Problem,
    float64_oracle,
    library_results,
    make_tensors,
    real_layer,
)

PROBLEMS = (
    *testing.EDGE,
    *testing.TAILS,
    *testing.ASYMMETRIC,
    *testing.GROUPED,
    *testing.DEPTHWISE,
    real_layer("resnet50 3@224-64/k7s2p3").shrunk(40),
    real_layer("resnet50 64@56-64/k3p1").shrunk(14),
)


def assert_close_to_float64(problem: Problem, dtype: torch.dtype) -> None:
    """For types as wide as the oracle: within a few roundings of each product."""
    tensors = make_tensors(problem, dtype)
    results = zip(library_results(problem, tensors), float64_oracle(problem, tensors), strict=True)
    for actual, exact in results:
        assert exact is None or exact.max_scaled_error(actual) <= 1e-14, problem


if __name__ == "__main__":
    torch.set_num_threads(1)
    for problem in PROBLEMS:
        assert_results_as_accurate(problem, torch.float32)
        assert_close_to_float64(problem, torch.float64)
        if problem in testing.TAILS + testing.ASYMMETRIC:
            assert_results_as_accurate(problem, torch.bfloat16)
            assert_close_to_float64(problem, torch.complex128)
    print(conv2d_ext.build_config()["isa"])
