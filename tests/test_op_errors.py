"""Errors of the ops beside the convolutions, real and fake: what they refuse, and by which words.

Seen to fail: without check_attention_grad and check_data some of these calls ended the process.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import conv2d_ext  # noqa: F401

ops = torch.ops.conv2d_ext
X = (3, 4)
SIZES = {"q": (2, 4, 5, 8), "k": (2, 2, 6, 8), "v": (2, 2, 6, 3), "grad": (2, 4, 5, 3)}


def ones(size: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.ones(size, dtype=dtype, device=device)


def attention(
    *,
    wanted: tuple[bool, ...] | None = None,
    mask: Tensor | None = None,
    **changed: Tensor,
) -> Any:
    """A call, or with `wanted` one of its gradients, of tensors that fit but for what is given."""
    q, k, v, grad = (changed[n] if n in changed else ones(size) for n, size in SIZES.items())
    if wanted is None:
        return ops.attention(q, k, v, mask, False, 1.0, False)
    return ops.attention_grad(grad, q, k, v, mask, False, 1.0, False, list(wanted))


def gradients(**changed: Any) -> Any:
    return attention(wanted=changed.pop("wanted", (True, True, True, False)), **changed)


ATTENTION, GRADIENTS = "conv2d_ext::attention: expected ", "conv2d_ext::attention_grad: expected "
REAL = " to be float32, float64, bfloat16 or float16, but got "
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "attention of integers": (
        lambda: attention(q=ones((2, 4, 5, 8), torch.int32)),
        f"{ATTENTION}q{REAL}Int",
    ),
    "attention of two dtypes": (
        lambda: attention(k=ones((2, 2, 6, 8), torch.bfloat16)),
        f"{ATTENTION}k of q's dtype Float, but got BFloat16",
    ),
    "attention of no elements": (
        lambda: attention(v=ones((2, 2, 6, 0))),
        f"{ATTENTION}tensors with elements, but got q of size [2, 4, 5, 8], k [2, 2, 6, 8] and v",
    ),
    "attention of other numbers of keys": (
        lambda: attention(v=ones((2, 2, 7, 3))),
        f"{ATTENTION}q of size (N, heads, L, E), k (N, kv_heads, S, E) and v (N, kv_heads, S, Ev),",
    ),
    "attention of three dimensions": (
        lambda: attention(q=ones((4, 5, 8))),
        f"{ATTENTION}q of size (N, heads, L, E), k (N, kv_heads, S, E) and v (N, kv_heads, S, Ev),",
    ),
    "mask of more queries": (
        lambda: attention(mask=ones((2, 4, 8, 6))),
        f"{ATTENTION}a mask of 4 dimensions that expand to [2, 4, 5, 6], but got [2, 4, 8, 6]",
    ),
    "mask of more images": (
        lambda: attention(mask=ones((4, 1, 5, 6))),
        f"{ATTENTION}a mask of 4 dimensions that expand to [2, 4, 5, 6], but got [4, 1, 5, 6]",
    ),
    "mask of two dimensions": (
        lambda: attention(mask=ones((5, 6))),
        f"{ATTENTION}a mask of 4 dimensions that expand to [2, 4, 5, 6], but got [5, 6]",
    ),
    "mask of integers": (
        lambda: attention(mask=ones((1, 1, 5, 6), torch.int64)),
        f"{ATTENTION}a mask of dtype bool, float32, float64, bfloat16 or float16, but got Long",
    ),
    "gradients, size": (
        lambda: gradients(grad=ones((3, 3, 9, 4))),
        f"{GRADIENTS}grad_output of size [2, 4, 5, 3], but got [3, 3, 9, 4]",
    ),
    "gradients, dtype": (
        lambda: gradients(grad=ones((2, 4, 5, 3), torch.bfloat16)),
        f"{GRADIENTS}grad_output of q's dtype Float, but got BFloat16",
    ),
    "gradients of a mask that is not there": (
        lambda: gradients(wanted=(True, True, True, True)),
        f"{GRADIENTS}a mask where its gradient is wanted, but got none",
    ),
    "gradients, mask of more heads": (
        lambda: gradients(mask=ones((2, 8, 5, 6))),
        f"{ATTENTION}a mask of 4 dimensions that expand to [2, 4, 5, 6], but got [2, 8, 5, 6]",
    ),
    "sum of integers": (
        lambda: ops.sum(ones(X, torch.int64), [0], False),
        f"conv2d_ext::sum: expected input{REAL}Long",
    ),
    "mean of integers": (
        lambda: ops.mean(ones(X, torch.int64), [0], False),
        f"conv2d_ext::mean: expected input{REAL}Long",
    ),
    "var of integers": (
        lambda: ops.var(ones(X, torch.int64), [0], 1.0, False),
        f"conv2d_ext::var: expected input{REAL}Long",
    ),
    "sum over a dimension twice": (
        lambda: ops.sum(ones(X), [0, -2], False),
        "dim 0 appears multiple times in the list of dims",
    ),
    "softmax of integers": (
        lambda: ops.softmax(ones(X, torch.int64), 0, False),
        f"conv2d_ext::softmax: expected input{REAL}Long",
    ),
    "softmax_grad, dtype": (
        lambda: ops.softmax_grad(ones(X, torch.float64), ones(X), 0, False),
        "conv2d_ext::softmax_grad: expected grad_output of output's dtype Float, but got Double",
    ),
    "softmax_grad, size": (
        lambda: ops.softmax_grad(ones((4, 3)), ones(X), 0, False),
        "conv2d_ext::softmax_grad: expected grad_output of output's size [3, 4], but got [4, 3]",
    ),
    "pointwise of integers": (
        lambda: ops.pointwise(ones(X, torch.int64), "exp", []),
        f"pointwise: expected input{REAL}Long",
    ),
    "pointwise, function": (
        lambda: ops.pointwise(ones(X), "sine", []),
        "pointwise: expected function to be one of sigmoid, silu, ",
    ),
    "pointwise, parameters": (
        lambda: ops.pointwise(ones(X), "elu", [1.0]),
        "pointwise: expected 3 parameters of elu, but got 1",
    ),
    "pointwise_grad, size": (
        lambda: ops.pointwise_grad(ones((4, 3)), ones(X), "exp", []),
        "pointwise_grad: expected grad_output of input's size [3, 4], but got [4, 3]",
    ),
    "pointwise_pair, function": (
        lambda: ops.pointwise_pair(ones(X), ones(X), "hypot"),
        "pointwise_pair: expected function to be one of pow, atan2, logaddexp, logaddexp2, but got",
    ),
    "pointwise_pair, dtype": (
        lambda: ops.pointwise_pair(ones(X), ones(X, torch.float64), "pow"),
        "pointwise_pair: expected second of first's dtype Float, but got Double",
    ),
}


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("name", CASES)
def test_refused(name, fake):
    call, message = CASES[name]
    if fake and REAL in message:
        message = "conv2d_ext."  # fake tensors name the op alone where a dtype is not implemented
    with FakeTensorMode() if fake else contextlib.nullcontext():
        with pytest.raises((RuntimeError, ValueError), match=re.escape(message)):
            call()


@pytest.mark.parametrize("name", SIZES)
def test_devices_of_attention(name):
    with pytest.raises(RuntimeError, match=r"expected .* on q's device"):
        gradients(**{name: ones(SIZES[name], device="meta")})


def test_devices_of_softmax_grad():
    with pytest.raises(RuntimeError, match="grad_output on output's device cpu, but got meta"):
        ops.softmax_grad(ones(X, device="meta"), ones(X), 0, False)


def freed(*size: int) -> Tensor:
    tensor = torch.ones(size)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: ops.pointwise(freed(3, 4), "sigmoid", []), "input"),
        (lambda: ops.pointwise_grad(ones(X), freed(3, 4), "sigmoid", []), "input"),
        (lambda: ops.pointwise_grad(freed(3, 4), ones(X), "sigmoid", []), "grad_output"),
        (lambda: ops.pointwise_pair(ones(X), freed(3, 4), "pow"), "second"),
        (lambda: ops.sum(freed(3, 4), [0], False), "input"),
        (lambda: ops.softmax(freed(3, 4), 0, False), "input"),
        (lambda: ops.conv2d_add_bias(freed(1, 2, 3, 3), torch.ones(2)), "output"),
        (lambda: ops.conv2d_add_bias(ones((1, 2, 3, 3)), freed(2)), "bias"),
        (lambda: attention(q=freed(2, 4, 5, 8)), "q"),
        (lambda: attention(mask=freed(1, 1, 5, 6)), "mask"),
        (lambda: gradients(grad=freed(2, 4, 5, 3)), "grad_output"),
    ],
)
def test_freed_storage(call, name):
    with pytest.raises(RuntimeError, match=f"not allocated yet. Got {name} of size"):
        call()
