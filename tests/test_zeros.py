"""The sign of zero: one rule for sums that underflow, whatever computes them.

The last operation of every sum is an addition: of the bias, or of +0 where there is none or where
the sum began from it. Products of numbers this small round to +0 or -0; without a bias every such
sum ends as +0.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from isa_bits import assert_same_bits, bits

import conv2d_ext
from conv2d_ext import testing
from conv2d_ext.testing import VIEWS, Problem, Results, Tensors, library_results

# Squares of them underflow in the type that sums are kept in.
TINY = {
    torch.float32: 2.0**-100,
    torch.float64: 2.0**-600,
    torch.bfloat16: 2.0**-100,
    torch.complex64: 2.0**-100,
}
PROBLEMS = tuple(
    dataclasses.replace(problem, bias=False) for problem in testing.SMALL_PROBLEMS if problem.batch
)


def _tiny_tensors(problem: Problem, dtype: torch.dtype) -> Tensors:
    generator = torch.Generator().manual_seed(1)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        return (signs * TINY[dtype]).to(dtype)

    return Tensors(
        draw(problem.input_shape),
        draw(problem.weight_shape),
        None,
        draw(problem.output_shape),
    )


def _parts(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _assert_positive_zeros(results: Results) -> None:
    for name in ("output", "grad_input", "grad_weight"):
        result = _parts(getattr(results, name))
        assert (result == 0).all(), f"{name}: the problem was meant to underflow"
        assert not torch.signbit(result).any(), f"{name}: {torch.signbit(result).sum()} are -0"


@pytest.mark.parametrize("dtype", TINY, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_sums_that_underflow_are_positive_zeros(problem, dtype):
    tensors = _tiny_tensors(problem, dtype)
    _assert_positive_zeros(library_results(problem, tensors))
    for view in ("channels_last", "transposed"):
        viewed = Tensors(*(t if t is None else VIEWS[view](t) for t in tensors))
        _assert_positive_zeros(library_results(problem, viewed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_one_pixel_in_any_batch(dtype, transposed):
    """Small batches of one pixel go another way through the engine than large ones."""
    values = torch.tensor([TINY[dtype], -TINY[dtype]], dtype=dtype)
    grad_output = values[torch.arange(256 * 64) % 3 % 2].view(256, 64, 1, 1)
    weight = values[torch.arange(64 * 64) % 5 % 2].view(64, 64, 1, 1)
    if transposed:
        weight = VIEWS["transposed"](weight)

    def grad_input(batch: int) -> torch.Tensor:
        arguments = ([1, 1], [0, 0, 0, 0], [1, 1], 1, False)
        op = torch.ops.conv2d_ext.conv2d_grad_input
        return op(grad_output[:batch], weight, [batch, 64, 1, 1], *arguments)

    whole = grad_input(256)
    assert not torch.signbit(whole).any()
    for batch in (1, 5, 64):
        assert torch.equal(bits(grad_input(batch)), bits(whole[:batch]))


@pytest.mark.parametrize("channels", [2, 8, 9, 300])
def test_a_bias_of_negative_zero(channels):
    """It is added like any other: last, but where a sum of up to 8 products starts from it."""
    problem = Problem("negative bias", 3, channels, (6, 7), 4, (1, 1))
    tensors = _tiny_tensors(problem, torch.float32)._replace(bias=torch.full((4,), -0.0))
    tensors.input.abs_()
    tensors.weight.abs_().neg_()
    results = library_results(problem, tensors)
    assert torch.signbit(results.output).all() == (channels > 8)
    for view in VIEWS:
        viewed = Tensors(*(VIEWS[view](t) if t.dim() == 4 else t for t in tensors))
        assert_same_bits(library_results(problem, viewed), results, view)
    alone = conv2d_ext.conv2d(tensors.input[1:2], tensors.weight, tensors.bias)
    assert torch.equal(bits(alone[0]), bits(results.output[1]))


@pytest.mark.parametrize("batch", [1, 9])
def test_a_bias_of_negative_zero_beside_taps_that_meet_no_pixel(batch):
    """The last tap that meets a pixel underflows to -0. The zeros after it make that +0, which they
    must do where they could be left out."""
    input, weight = torch.zeros(batch, 32, 2, 2), torch.zeros(32, 1, 7, 7)
    input[..., 1, 1] = 2.0**-100
    weight[:, 0, 4, 4] = -(2.0**-100)
    bias = torch.full((32,), -0.0)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x, w = (t.to(memory_format=memory_format) for t in (input, weight))
        assert not torch.signbit(conv2d_ext.conv2d(x, w, bias, padding=3, groups=32)).any()
