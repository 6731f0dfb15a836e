"""Checks of the CUDA engine's results that both pytest and the run with sanitizers make."""

from __future__ import annotations

import torch

from conv2d_ext.testing import Oracle, Problem, unit_roundoff

from .cases import ARRANGEMENTS, DIRECTIONS, Math, Variation, empty_result, operands, oracles
from .engine import Engine

MOST_WORKSPACE_BYTES = 32 << 20

# Of a sum's rounding error over the sum of its products' absolute values, in units of roundoff of
# the type that sums have: chains of a few hundred products, a few chains added. (The tensor cores'
# own rounding, which the host execution doesn't have, is bounded on a GPU.)
MOST_ERROR = 8


def assert_close(actual: torch.Tensor, exact: Oracle, what: str) -> None:
    """Each element within MOST_ERROR; elements without products exact."""
    sum_dtype = torch.float32 if actual.dtype in (torch.float16, torch.bfloat16) else actual.dtype
    bound = MOST_ERROR * unit_roundoff(sum_dtype) * exact.magnitude
    if actual.dtype != sum_dtype:
        # The rounding of the result: to the nearest, also among numbers too small to be normal.
        info = torch.finfo(actual.dtype)
        bound += exact.value.abs() * unit_roundoff(actual.dtype) * 1.001
        bound += info.smallest_normal * info.eps / 2
    if actual.dtype in (torch.float64, torch.complex128):
        bound *= 2  # the oracle is no better
    error = (actual.to(exact.value.dtype) - exact.value).abs()
    assert actual.shape == exact.value.shape, what
    wrong = ~(error <= bound)  # NaN is wrong
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, the first at "
            f"{index}: {actual[index].item()} for {exact.value[index].item()}"
        )


def check_accuracy(engine: Engine, problem: Problem, math: Math, variation: Variation) -> None:
    """All directions of a problem."""
    tensors, exact, exact_tf32 = oracles(problem, math)
    for direction in DIRECTIONS:
        first, second = operands(direction, tensors)
        answer = engine.run(
            direction,
            problem,
            ARRANGEMENTS[variation.first](first),
            ARRANGEMENTS[variation.second](second),
            tensors.bias if direction == "forward" else None,
            result=empty_result(direction, problem, math.dtype, variation.channels_last),
            tf32=math.tf32,
            execution=variation.execution,
        )
        rounds = "tf32" in answer.plan["kernel"]
        oracle = getattr(exact_tf32 if rounds else exact, direction.replace("forward", "output"))
        assert_close(answer.result, oracle, f"{problem}, {math}, {direction}, {variation}")
        assert answer.workspace_bytes <= MOST_WORKSPACE_BYTES
    if problem.bias:
        answer = engine.run(
            "grad_bias",
            problem,
            ARRANGEMENTS[variation.first](tensors.grad_output),
            execution=variation.execution,
        )
        assert_close(answer.result, exact.grad_bias, f"{problem}, {math}, grad_bias, {variation}")
        assert answer.workspace_bytes <= MOST_WORKSPACE_BYTES
