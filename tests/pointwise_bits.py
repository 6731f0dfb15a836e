"""A program: the bits of the pointwise ops in the instruction set that CONV2D_EXT_CPU_ISA names.

Checks that no place changes a bit, then prints the instruction set and a digest of each function's
results. test_pointwise.py runs it and compares what it prints.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

import conv2d_ext
from conv2d_ext.ops import pointwise, pointwise_grad, pointwise_pair

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SELU = (1.6732632423543772, 1.0507009873554805, 1.0)
# Each function with the sets of parameters that are tested.
FUNCTIONS: dict[str, list[tuple[float, ...]]] = {
    "sigmoid": [()],
    "silu": [()],
    "gelu": [()],
    "gelu_tanh": [()],
    "tanh": [()],
    "exp": [()],
    "erf": [()],
    "softplus": [(1.0, 20.0), (2.0, 20.0)],
    "mish": [()],
    "elu": [(1.0, 1.0, 1.0), SELU, (1.5, 1.0, 1 / 1.5)],
    "softshrink": [(0.5,)],
    "sqrt": [()],
    "rsqrt": [()],
    "exp_base": [(2.0,), (0.3,)],
    "pow": [(1.7,), (5.0,), (-2.0,), (-0.5,), (0.0,)],
    "sinh": [()],
    "cosh": [()],
    "atanh": [()],
    "logit": [(-1.0,), (2**-10,)],
}
# Functions of two numbers.
PAIRS = ("pow", "atan2", "logaddexp", "logaddexp2")


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns in logical order, all NaNs alike."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    dense = tensor.detach().clone(memory_format=torch.contiguous_format)
    dense[dense.isnan()] = math.nan
    return dense.view(-1).view(kinds[tensor.element_size()])


def special_values(dtype: torch.dtype) -> Tensor:
    """Of every exponent and both signs, with zeros, subnormals, infinities and NaN."""
    info = torch.finfo(dtype)
    sizes = torch.tensor([2.0**e for e in range(-150, 128)], dtype=torch.float64)
    sizes = torch.cat([sizes, sizes * 1.37, torch.linspace(0, 12, 997, dtype=torch.float64)])
    edges = [0.0, 0.5, 1.0, 20.0, info.tiny, info.max, math.inf, math.nan]
    sizes = torch.cat([sizes, torch.tensor(edges, dtype=torch.float64)])
    return torch.cat([sizes, -sizes]).to(dtype)


def assert_place_changes_no_bit(
    name: str, parameters: tuple[float, ...], dtype: torch.dtype
) -> None:
    """Every offset and length of a run, and strided ones, against each element by itself."""
    x = special_values(dtype)
    x = x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))][:140].clone()
    g = torch.linspace(-2, 2, 140).to(dtype)
    alone = [
        torch.cat([pointwise(one, name, parameters) for one in x.split(1)]),
        torch.cat(
            [
                pointwise_grad(v, one, name, parameters)
                for v, one in zip(g.split(1), x.split(1), strict=True)
            ]
        ),
    ]
    value, slope = map(bits, alone)
    for first in range(70):
        part = slice(first, 2 * first + 1)
        assert torch.equal(bits(pointwise(x[part], name, parameters)), value[part])
        assert torch.equal(bits(pointwise_grad(g[part], x[part], name, parameters)), slope[part])
    for step in (2, 3):
        part = slice(None, None, step)
        assert torch.equal(bits(pointwise(x[part], name, parameters)), value[part])
        assert torch.equal(bits(pointwise_grad(g[part], x[part], name, parameters)), slope[part])
        mixed = pointwise_grad(g[part].clone(), x[part], name, parameters)
        assert torch.equal(bits(mixed), slope[part])


def digest(name: str, parameters: tuple[float, ...], dtype: torch.dtype) -> str:
    x = special_values(dtype)
    g = torch.linspace(-2, 2, x.numel()).to(dtype)
    found = hashlib.sha256()
    for result in (pointwise(x, name, parameters), pointwise_grad(g, x, name, parameters)):
        found.update(bits(result).numpy().tobytes())
    return found.hexdigest()


def pair_values(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = special_values(dtype)
    order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))
    edges = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, 3.0, 0.5, math.inf, -math.inf, math.nan])
    some = torch.cartesian_prod(edges, edges).to(dtype)
    return torch.cat([x, some[:, 0]]), torch.cat([x[order], some[:, 1]])


def assert_place_changes_no_bit_of_pairs(name: str, dtype: torch.dtype) -> None:
    x, y = (t[-140:].clone() for t in pair_values(dtype))
    ones = zip(x.split(1), y.split(1), strict=True)
    alone = bits(torch.cat([pointwise_pair(a, b, name) for a, b in ones]))
    for first in range(70):
        part = slice(first, 2 * first + 1)
        assert torch.equal(bits(pointwise_pair(x[part], y[part], name)), alone[part])
    for step in (2, 3):
        part = slice(None, None, step)
        assert torch.equal(bits(pointwise_pair(x[part], y[part], name)), alone[part])


def digest_of_pairs(name: str, dtype: torch.dtype) -> str:
    result = bits(pointwise_pair(*pair_values(dtype), name))
    return hashlib.sha256(result.numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(conv2d_ext.build_config()["isa"])
    for name, sets in FUNCTIONS.items():
        for parameters in sets:
            for dtype in DTYPES:
                assert_place_changes_no_bit(name, parameters, dtype)
                print(name, parameters, dtype, digest(name, parameters, dtype))
    for name in PAIRS:
        for dtype in DTYPES:
            assert_place_changes_no_bit_of_pairs(name, dtype)
            print(name, dtype, digest_of_pairs(name, dtype))
