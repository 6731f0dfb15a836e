"""Calls beside conv2d whose bits golden.py keeps: products, sums, softmax, attention, pointwise.

Each is computed from arguments that lie by rows, and from the same with their last two dimensions
swapped in memory, which must agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from exact_values import exact_tensor
from pointwise_bits import FUNCTIONS, PAIRS
from torch import Tensor

from conv2d_ext import ops

# (matrices, rows, K, columns); 0 matrices for two plain ones. K crosses an accumulation chain's
# length, several chains', and a block of K; the rows are those of each driver, with tails.
PRODUCTS = (
    (0, 1, 1, 1),
    (0, 1, 300, 40),
    (0, 1, 5400, 19),
    (0, 2, 65, 130),
    (0, 3, 600, 33),
    (0, 8, 64, 47),
    (0, 9, 129, 16),
    (0, 17, 5000, 9),
    (0, 40, 70, 130),
    (2, 1, 130, 21),
    (3, 5, 67, 18),
    (2, 19, 300, 35),
)
SUMMED = ((1, 1, 1), (3, 7, 5), (2, 300, 3), (1, 17, 5000))


class Call(NamedTuple):
    """``compute(arguments)`` gives a result for each of ``results``."""

    name: str
    kind: str  # of values: exact_values.py
    results: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    compute: Callable[[list[Tensor]], list[Tensor]]
    scale: float = 1.0  # of the arguments, a power of two

    def __str__(self) -> str:
        return self.name + ("" if self.kind == "ordinary" else f", {self.kind} values")

    def arguments(self, dtype: torch.dtype) -> list[Tensor]:
        drawn = (
            exact_tensor(f"{self.name}: {number}", shape, dtype, self.kind)
            for number, shape in enumerate(self.shapes)
        )
        return [tensor if self.scale == 1 else tensor * self.scale for tensor in drawn]

    def run(self, arguments: list[Tensor], *, swapped: bool) -> list[Tensor]:
        if swapped:
            arguments = [
                tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor for tensor in arguments
            ]
        return self.compute(arguments)


def _product(arguments: list[Tensor]) -> list[Tensor]:
    mat1, mat2, bias, grad = arguments
    one = mat2.dim() == 2
    return [
        ops.matmul(mat1, mat2, bias if one else None),
        ops.matmul(grad, mat2.mT.conj(), None),
        ops.matmul(mat1.mT.conj(), grad, None),
        ops.linear(mat1, mat2.mT, bias) if one else ops.matmul(mat1, mat2[0], bias),
    ]


def products(kind: str) -> Iterator[Call]:
    for batch, m, k, n in PRODUCTS:
        lead = (batch,) if batch else ()
        name = f"matmul {batch or 1} x ({m}, {k}) ({k}, {n})"
        shapes = ((*lead, m, k), (*lead, k, n), (n,), (*lead, m, n))
        results = ("matmul", "grad_mat1", "grad_mat2", "linear" if not batch else "one mat2")
        yield Call(name, kind, results, shapes, _product)


def _sums(arguments: list[Tensor]) -> list[Tensor]:
    (x,) = arguments
    found = []
    for dim in ([0], [1], [2], [0, 1, 2]):
        count = math.prod(x.shape[d] for d in dim)
        # Over several dimensions the order is that of the strides.
        values = x if len(dim) == 1 else x.contiguous()
        found += [
            ops.sum_over(values, dim, False),
            ops.mean_over(values, dim, False),
            ops.var_over(values, dim, max(count - 1.0, 1.0), False),
        ]
    return found


_SUMS = tuple(
    f"{name} over {dim}" for dim in ("0", "1", "2", "all") for name in ("sum", "mean", "var")
)


def sums(kind: str) -> Iterator[Call]:
    for shape in SUMMED:
        name = "reductions of " + " x ".join(map(str, shape))
        yield Call(name, kind, _SUMS, (shape,), _sums)


def _softmax(arguments: list[Tensor]) -> list[Tensor]:
    x, grad = arguments
    found = []
    for dim in (1, 2):
        for log in (False, True):
            output = ops.softmax(x, dim, log)
            found += [output, ops.softmax_grad(grad, output, dim, log)]
    return found


_SOFTMAX = tuple(
    f"{name}{of} over {dim}"
    for dim in (1, 2)
    for name in ("softmax", "log_softmax")
    for of in ("", "'s gradient")
)


def softmaxes(kind: str) -> Iterator[Call]:
    for shape in SUMMED:
        name = "softmax of " + " x ".join(map(str, shape))
        yield Call(name, kind, _SOFTMAX, (shape, shape), _softmax, 4.0)


def _attention(arguments: list[Tensor]) -> list[Tensor]:
    q, k, v, mask, grad = arguments
    found = []
    for given, causal in ((None, False), (None, True), (mask, False)):
        rest = (q, k, v, given, causal, 0.25, False)
        wanted = [True, True, True, given is not None]
        found.append(ops.attention(*rest))
        found += ops.attention_grad(grad, *rest, wanted)[: 3 + wanted[3]]
    return found


_ATTENTION = tuple(
    f"{name}{of}"
    for name, tensors in (("plain", "qkv"), ("causal", "qkv"), ("masked", "qkvm"))
    for of in ("", *(f", gradient of {tensor}" for tensor in tensors))
)


def attentions(kind: str) -> Iterator[Call]:
    for heads, kv_heads, length, keys, width, value_width in (
        (2, 2, 5, 5, 8, 8),
        (4, 2, 70, 83, 20, 12),
    ):
        shapes = (
            (1, heads, length, width),
            (1, kv_heads, keys, width),
            (1, kv_heads, keys, value_width),
            (1, heads, length, keys),
            (1, heads, length, value_width),
        )
        name = f"attention of {length} queries, {keys} keys"
        yield Call(name, kind, _ATTENTION, shapes, _attention)


def pointwise(kind: str) -> Iterator[Call]:
    for function, settings in FUNCTIONS.items():
        for parameters in settings:

            def compute(arguments, function=function, parameters=parameters):
                x, grad = arguments
                return [
                    ops.pointwise(x, function, parameters),
                    ops.pointwise_grad(grad, x, function, parameters),
                ]

            given = ", ".join(f"{parameter:.4g}" for parameter in parameters)
            name = f"{function}({given})"
            yield Call(name, kind, ("value", "times derivative"), ((9, 37), (9, 37)), compute, 8.0)
    for function in PAIRS:

        def pair(arguments, function=function):
            return [ops.pointwise_pair(*arguments, function)]

        yield Call(f"{function}(x, y)", kind, ("value",), ((9, 37), (9, 37)), pair, 4.0)


def calls(dtype: torch.dtype) -> Iterator[Call]:
    """Those that keep their bits in the dtype: in float64 e^x and its kin are the C library's."""
    if not dtype.is_floating_point and not dtype.is_complex:
        yield from products("ordinary")
        return
    for kind in ("ordinary", "tiny", "infinite"):
        yield from products(kind)
        if dtype.is_complex:
            continue
        yield from sums(kind)
        if dtype != torch.float64:
            yield from softmaxes(kind)
            yield from attentions(kind)
            yield from pointwise(kind)
