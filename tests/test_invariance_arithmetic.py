"""Arithmetic under batch_invariant whose bits PyTorch lets follow the batch: sums with a factor,
products and quotients of 16 bits, functions of integers.

Seen to fail: those of bits, with the mode's kernels left out (csrc/invariance_pointwise.cpp), but
for operands of one shape in float32 and float64, which hold in PyTorch, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from observing import same_bits
from torch import Tensor

import conv2d_ext

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


# What is added, times 0.3, to rows of x.
ADDENDS: dict[str, Callable[[Tensor], Tensor | float]] = {
    "as many": lambda x: x.flip(1),
    "one an example": lambda x: x[:, :1] + 1,
    "one for all": lambda x: x.new_tensor([1.7]),
    "a tensor without dimensions": lambda x: x.new_tensor(1.7),
    "a number": lambda x: 1.7,
    "integers": lambda x: (100 * x).int(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("addend", ADDENDS)
def test_sums_with_a_factor(dtype, addend):
    """PyTorch's vector code rounds self + alpha * other otherwise than its scalar code."""
    x = torch.randn(7, 133).to(dtype)

    def results(x: Tensor, in_float64: bool = False) -> list[Tensor]:
        other = ADDENDS[addend](x)
        if in_float64:
            x, other = x.double(), other.double() if isinstance(other, Tensor) else other
        found = [torch.add(x, other, alpha=0.3), torch.sub(x, other, alpha=0.3)]
        found += [torch.rsub(x, other, alpha=0.3)]
        found += [x.clone().add_(other, alpha=0.3), x.clone().sub_(other, alpha=0.3)]
        if isinstance(other, Tensor):
            found += [torch._foreach_add([x], [other], alpha=0.3)[0]]
            for function in (torch.add, torch.sub):
                found += [function(x, other, alpha=0.3, out=torch.empty_like(x))]
                # Rounded to its own type first.
                wider = torch.empty(x.shape, dtype=torch.float64)
                found += [function(x, other, alpha=0.3, out=wider)]
        return found

    with conv2d_ext.batch_invariant():
        whole = results(x)
        layout = results(x.t().contiguous().t())
        rows = [results(x[i : i + 1]) for i in range(7)]
        columns = [results(x[:, i : i + 1].contiguous()) for i in range(133)]
    exact = results(x, in_float64=True)
    for i, result in enumerate(whole):
        assert same_bits(result, torch.cat([row[i] for row in rows]))
        assert same_bits(result, layout[i])
        if addend not in ("as many", "one an example"):
            assert same_bits(result, torch.cat([column[i] for column in columns], 1))
        torch.testing.assert_close(result.to(dtype), exact[i].to(dtype))
        assert torch.equal(result.to(dtype).to(result.dtype), result)
    assert whole[0].dtype == dtype
    if dtype.itemsize == 2:  # what is in float32 is rounded once
        assert (whole[0] == exact[0].to(dtype)).float().mean() > 0.99


@pytest.mark.parametrize("function", [torch.add, torch.sub, torch.rsub], ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(3, 4), (4,), (3, 1), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_sums_with_a_factor(function, shape, dtype):
    x, other = torch.randn(3, 4).to(dtype), torch.randn(shape).to(dtype)
    leaves, grad = (x.requires_grad_(), other.requires_grad_()), torch.randn(3, 4).to(dtype)
    expected = torch.autograd.grad(function(*leaves, alpha=0.3), leaves, grad)
    with conv2d_ext.batch_invariant():
        found = torch.autograd.grad(function(*leaves, alpha=0.3), leaves, grad)
    for ours, theirs in zip(found, expected, strict=True):
        atol, rtol = (1e-6, 1e-5) if dtype == torch.float32 else (1e-2, 2e-2)
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.ones(3), torch.ones(3), 1j),
        (torch.ones(3), torch.ones(3), True),
        (torch.ones(3), torch.ones(4), 0.3),
        (torch.ones(3, dtype=torch.int32), torch.ones(3, dtype=torch.int32), 0.3),
        (torch.ones(3), torch.ones(3, dtype=torch.bool), 0.3),
        (torch.ones(3, dtype=torch.int32), torch.ones(3, dtype=torch.bfloat16), 0.3),
        (torch.ones(3), torch.ones(2, 3), 0.3),
        (torch.ones(3), torch.ones(3), 1e39),
        (torch.ones(3, dtype=torch.float16), torch.ones(3, dtype=torch.float16), 1e5),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["sub", "sub_"])
def test_sums_with_a_factor_that_pytorch_refuses(name, arguments):
    """With the same words."""
    x, other, alpha = arguments
    outcomes = []
    for mode in (contextlib.nullcontext(), conv2d_ext.batch_invariant()):
        with mode:
            try:
                outcomes.append(str(getattr(x.clone(), name)(other, alpha=alpha).dtype))
            except RuntimeError as error:
                outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


OVERLAPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x[:8].add_(x[4:12], alpha=0.3),
    "quotient": lambda x: x[:8].div_(x[4:12], rounding_mode="trunc"),
    "atan2": lambda x: x[:8].atan2_(x[4:12]),
    "out": lambda x: torch.sub(x[:8], x[8:16], alpha=0.3, out=x[4:12]),
    "out, an input": lambda x: (lambda y: torch.add(x.view(3, 8), y, alpha=0.3, out=y))(x[:8] + 1),
    "out, one element": lambda x: torch.add(x, x, alpha=0.3, out=x[:1].expand(24)),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_results_that_overlap_operands_are_refused(name):
    messages = []
    for mode in (contextlib.nullcontext(), conv2d_ext.batch_invariant()):
        dtype = torch.bfloat16 if name == "quotient" else torch.float32
        with mode, pytest.raises(RuntimeError) as refused:
            OVERLAPPING[name](torch.rand(24).to(dtype))
        messages.append(str(refused.value))
    assert messages[0] == messages[1]


# With the type of the example's first tensor.
TRACED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], torch.dtype]] = {
    "sum": (lambda x, y: torch.add(x, y, alpha=0.3), torch.float32),
    "quotient": (lambda x, y: x.half() // y.half(), torch.float32),
    "atan2": (torch.atan2, torch.float32),
    "power": (lambda x, y: x.to(torch.int32) ** 0.3, torch.float32),
    "product": (lambda x, y: x * (10007 * y).to(torch.int32), torch.float16),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_trace_takes_other_dtypes(name):
    """Seen to fail: with casts in it that the example's types need."""
    function, dtype = TRACED[name]
    with conv2d_ext.batch_invariant():
        traced = torch.jit.trace(function, (torch.ones(3, dtype=dtype), torch.ones(3)))
    x, y = torch.rand(33, dtype=torch.float64) + 1, torch.rand(33, dtype=torch.float64) + 1
    with conv2d_ext.batch_invariant():
        assert same_bits(traced(x, y), function(x, y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", ["floor", "trunc"])
@pytest.mark.parametrize("integers", [False, True])
def test_rounded_quotients_of_16_bits(dtype, mode, integers):
    """One divisor an example: PyTorch takes the tensor of a batch of one for a number."""
    x, divisor = (100 * torch.randn(40, 4)).to(dtype), 3 * torch.randn(40, 1)
    divisor = torch.randint(2, 40, (40, 1)) if integers else divisor.to(dtype)

    def results(x: Tensor, divisor: Tensor) -> list[Tensor]:
        with conv2d_ext.batch_invariant():
            found = [torch.div(x, divisor, rounding_mode=mode)]
            found += [x.clone().div_(divisor, rounding_mode=mode)]
            found += [torch.div(x, divisor, rounding_mode=mode, out=torch.empty_like(x))]
            if mode == "floor":
                found += [x // divisor, x.clone().floor_divide_(divisor)]
                found += [torch.floor_divide(x, divisor, out=torch.empty_like(x))]
        return found

    whole = results(x, divisor)
    parts = [results(x[i : i + 1], divisor[i : i + 1]) for i in range(40)]
    exact = torch.div(x.double(), divisor.double(), rounding_mode=mode).to(dtype)
    for i, result in enumerate(whole):
        assert same_bits(result, torch.cat([part[i] for part in parts]))
        assert torch.equal(result, exact)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("exponent", [0.37, -0.5, 0.5, 2.0, 1.7], ids=str)
def test_powers_of_integers(dtype, exponent):
    """Integers to a floating-point power are floating-point numbers."""
    x = torch.arange(1, 7 * 19 + 1).reshape(7, 19).to(dtype)
    with conv2d_ext.batch_invariant():
        whole = x**exponent
        rows = torch.cat([x[i : i + 1] ** exponent for i in range(7)])
        elements = torch.stack([element**exponent for element in x.flatten()])
        out = torch.pow(x, exponent, out=torch.empty(7, 19))
    assert same_bits(whole, rows)
    assert same_bits(whole, elements.reshape(7, 19))
    assert same_bits(whole, out)
    torch.testing.assert_close(whole, x**exponent)
    with conv2d_ext.batch_invariant():
        assert torch.equal(x**2, x * x)
        assert (x**2).dtype == dtype
        with pytest.raises(RuntimeError, match="can't be cast"):
            x.clone().pow_(exponent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("integers", [torch.int64, torch.int32, torch.int16], ids=str)
def test_products_of_16_bits_and_integers(dtype, integers):
    """One integer an example: PyTorch takes the tensor of a batch of one for a number."""
    x, lengths = torch.randn(40, 4).to(dtype), torch.randint(2050, 9000, (40, 1)).to(integers)

    def results(x: Tensor, n: Tensor) -> list[Tensor]:
        with conv2d_ext.batch_invariant():
            out = torch.empty_like(x)
            return [
                x * n,
                x / n,
                x.clone().mul_(n),
                x.clone().div_(n),
                torch.mul(x, n, out=out).clone(),
                torch.div(x, n, out=out).clone(),
            ]

    whole = results(x, lengths)
    for i in range(40):
        for ours, theirs in zip(results(x[i : i + 1], lengths[i : i + 1]), whole, strict=True):
            assert same_bits(ours, theirs[i : i + 1])


@pytest.mark.parametrize("integers", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_atan2_of_integers(integers):
    y, x = (torch.arange(41) - 20).to(integers), (torch.arange(41) - 7).to(integers)
    with conv2d_ext.batch_invariant():
        whole = torch.atan2(y, x)
        parts = [torch.atan2(y[i : i + 1], x[i : i + 1]) for i in range(41)]
        out = torch.atan2(y, x, out=torch.empty(41))
    assert same_bits(whole, torch.cat(parts))
    assert same_bits(whole, out)
    torch.testing.assert_close(whole, torch.atan2(y, x))


def test_atan2_of_integers_in_place_is_an_error():
    with conv2d_ext.batch_invariant(), pytest.raises(RuntimeError, match="can't be cast"):
        torch.tensor([3, -2]).atan2_(torch.tensor([1, 1]))
