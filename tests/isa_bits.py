"""A program: the bits of the instruction set that CONV2D_EXT_CPU_ISA names.

Checks that neither batch nor bands change bits, then prints the instruction set and a
digest of each small problem's results. test_isa.py runs it and compares what it prints.
"""

from __future__ import annotations

import dataclasses
import hashlib

import torch

import conv2d_ext
from conv2d_ext import testing
from conv2d_ext.testing import (
    Problem,
    Results,
    Tensors,
    library_forward,
    library_results,
    make_tensors,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16)

# The last one's weights are too many for a level 2 cache, and other kernels take it sooner.
ONE_PIXEL = (
    *testing.ONE_PIXEL,
    Problem("one pixel, 4 million weights", 1, 2048, (1, 1), 2048, (1, 1)),
)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the values in logical order, so that -0.0, 0.0 and NaNs are told apart."""
    dense = tensor.clone(memory_format=torch.contiguous_format)
    return dense.view(-1).view(torch.uint8)


def assert_same_bits(actual: Results, expected: Results, what: str) -> None:
    for name, ours, theirs in zip(Results._fields, actual, expected, strict=True):
        if theirs is not None:
            assert ours.shape == theirs.shape, (what, name)
            differing = (bits(ours) != bits(theirs)).sum().item()
            assert differing == 0, f"{what}: {name} differs in {differing} bytes"


def assert_batch_changes_no_bit(
    problem: Problem, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> None:
    """Output and input gradient of many images against those of fewer, from either end."""
    most = 130  # two blocks of images and a rest; other drivers take up to 64
    whole = dataclasses.replace(problem, batch=most)
    tensors = make_tensors(whole, dtype, device=device)
    together = output_and_grad_input(whole, tensors)
    for batch in (1, 3, 64):
        for first in (0, most - batch):
            part = slice(first, first + batch)
            few = tensors._replace(input=tensors.input[part], grad_output=tensors.grad_output[part])
            results = output_and_grad_input(dataclasses.replace(problem, batch=batch), few)
            for name, ours, theirs in zip(Results._fields, results, together, strict=False):
                same = torch.equal(bits(ours), bits(theirs[part]))
                assert same, f"{name}, {batch} from {first}"


def assert_bands_follow_no_batch() -> None:
    """Where AMX multiplies the padding that others leave out in bands: of one image and of four."""
    problem = Problem(
        "in bands, or padded", 4, 32, (40, 40), 32, (3, 3), padding=(8, 8), dilation=(8, 8)
    )
    ordinary = make_tensors(problem, torch.bfloat16)
    ordinary.weight[3, 5, 0, 2] = torch.inf  # NaN wherever that tap meets padding
    # A sum that underflows to -0 before taps that lie in the padding.
    tiny = ordinary._replace(
        input=torch.zeros_like(ordinary.input),
        weight=torch.zeros_like(ordinary.weight),
        bias=torch.full((32,), -0.0, dtype=torch.bfloat16),
    )
    tiny.input[:, 0] = 2.0**-63
    tiny.weight[0, 0, 1, 0], tiny.weight[0, 0, 1, 1] = 2.0**-63, -1.5 * 2.0**-63
    for tensors in (ordinary, tiny):
        together = library_forward(problem, tensors)
        assert together.isnan().any() == (tensors is ordinary)
        for image in range(problem.batch):
            part = slice(image, image + 1)
            alone = library_forward(
                dataclasses.replace(problem, batch=1), tensors._replace(input=tensors.input[part])
            )
            assert torch.equal(bits(alone), bits(together[part])), image
    for batch in (1, 4):
        plan = conv2d_ext.explain(
            ordinary.input[:batch], ordinary.weight, padding=8, dilation=8
        ).forward
        assert ("in bands" in plan.engine) != plan.isa.startswith("amx")
    # Far taps are left out all the same.
    far = conv2d_ext.explain(ordinary.input, ordinary.weight, padding=24, dilation=24)
    assert "in bands" in far.forward.engine


def output_and_grad_input(problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Without the weight's gradient, which takes as long as both."""
    input = tensors.input.detach().requires_grad_()
    output = library_forward(problem, tensors._replace(input=input))
    return output.detach(), torch.autograd.grad(output, input, tensors.grad_output)[0]


def digest(problem: Problem, dtype: torch.dtype) -> str:
    """Of the bits of all results."""
    found = hashlib.sha256()
    for result in library_results(problem, make_tensors(problem, dtype)):
        if result is not None:
            found.update(bits(result).numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    isa = conv2d_ext.build_config()["isa"]
    # Caches decide nothing for the portable code, which takes seconds for so many weights.
    for problem in testing.ONE_PIXEL if isa == "portable" else ONE_PIXEL:
        for dtype in (*DTYPES, torch.float16):
            assert_batch_changes_no_bit(problem, dtype)
    assert_bands_follow_no_batch()
    print(isa)
    for problem in testing.SMALL_PROBLEMS:
        for dtype in DTYPES:
            print(digest(problem, dtype), dtype, problem)
