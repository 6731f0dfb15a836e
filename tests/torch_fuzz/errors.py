"""Calls that are wrong in one or two ways: what F.conv2d raises is what this library raises."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
import torch.nn.functional as F

import conv2d_ext
from conv2d_ext.testing import num_threads

from . import peer
from .bits import require_same_bits
from .cases import Case, Violation, case_tensors, random_problem

# F.conv2d's words, which this library keeps.
PHRASES = (
    "Expected 3D (unbatched) or 4D (batched) input to conv2d",
    "weight should have at least three dimensions",
    "channels, but got",
    "expected weight to be divisible by",
    "expected weight to be at least",
    "non-positive groups is not supported",
    "non-positive stride is not supported",
    "negative padding is not supported",
    "to be a single integer value or a list of 2 values to match the convolution dimensions",
    "Invalid padding string",
    "padding='same' is not supported for strided convolutions",
    "Kernel size can't be greater than actual input size",
    "Only zero batch or zero channel inputs are supported",
    "expected bias to be 1-dimensional with",
    "not implemented for",
    "its data is not allocated yet",
)

# Each changes the arguments of a valid call; described by plain data.
_SHAPES = ("drop", "add", "grow", "shrink", "zero")
_NUMBERS = (
    0, -1, -3, 2**62, 2**63, 2**31, 1.5, "1", None, True, [1], [], [1, 1, 1], [1, -1], [0, 1],
    [2, 2.5], "same", "valid", "SAME", [[1, 1]],
)  # fmt: skip
_DTYPES = ("float64", "bfloat16", "bool", "uint16", "uint32", "int32", "complex64", "float8_e4m3fn",
           "float16")  # fmt: skip
_NO_TENSORS = (None, 1.0, "weight", [1.0], 3)


def random_wrong(rng: random.Random) -> Case:
    problem = random_problem(rng, 20_000)
    while len(problem.padding) == 4 and problem.padding != "same":
        problem = random_problem(rng, 20_000)
    mutations = [_random_mutation(rng) for _ in range(rng.choice([1, 1, 1, 2]))]
    dtype = rng.choice(["float32", "float32", "float64", "bfloat16", "complex64", "int64"])
    options: dict[str, Any] = {"mutations": mutations}
    if rng.random() < 0.2:
        options["unbatched"] = True
    return Case("wrong", rng.randrange(10**6), problem, dtype, options=options)


def _random_mutation(rng: random.Random) -> list[Any]:
    kind = rng.choices(["shape", "number", "dtype", "no tensor", "keyword"], [5, 5, 2, 1, 0.3])[0]
    tensor = rng.choice(["input", "weight", "bias"])
    if kind == "shape":
        return [kind, tensor, rng.choice(_SHAPES), rng.randrange(4)]
    if kind == "number":
        return [kind, rng.choice(["stride", "padding", "dilation", "groups"]), rng.choice(_NUMBERS)]
    if kind == "dtype":
        return [kind, tensor, rng.choice(_DTYPES)]
    if kind == "no tensor":
        return [kind, tensor, rng.choice(_NO_TENSORS)]
    return [kind, rng.choice(["unknown", "in_channels"]), 1]


def _arguments(case: Case) -> dict[str, Any]:
    tensors = case_tensors(case)
    tensors.pop("grad_output")
    if case.options.get("unbatched") and case.problem.batch:
        tensors["input"] = tensors["input"][0]
    arguments: dict[str, Any] = {**tensors, **case.problem.call_args()}
    for kind, name, *how in case.options["mutations"]:
        old = arguments.get(name)
        if kind == "number":
            value = how[0]
            arguments[name] = tuple(value) if isinstance(value, list) and value else value
        elif kind in ("no tensor", "keyword"):
            arguments[name] = how[0]
        elif not isinstance(old, torch.Tensor):
            continue
        elif kind == "dtype":
            old = old.real if old.is_complex() else old
            arguments[name] = old.to(getattr(torch, how[0]))
        else:
            arguments[name] = _reshaped(old, *how)
    return arguments


def _reshaped(tensor: torch.Tensor, how: str, dim: int) -> torch.Tensor:
    if how == "add":
        return tensor.unsqueeze(min(dim, tensor.dim()))
    if tensor.dim() == 0:
        return tensor
    dim %= tensor.dim()
    if how == "drop":
        # Not every dtype has a sum, nor every dimension a first element.
        return tensor.select(dim, 0) if tensor.shape[dim] else tensor
    size = {"grow": tensor.shape[dim] + 1, "shrink": max(0, tensor.shape[dim] - 1), "zero": 0}[how]
    shape = [size if i == dim else s for i, s in enumerate(tensor.shape)]
    return torch.ones(shape).to(tensor.dtype)


def _outcome(function: Any, arguments: dict[str, Any]) -> tuple[Any, BaseException | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(**arguments), None
        except Exception as error:
            return None, error


def _would_crash(arguments: dict[str, Any]) -> bool:
    """F.conv2d, where a kernel is larger than the image without its padding."""
    input, weight, dilation = (arguments[n] for n in ("input", "weight", "dilation"))
    if not (isinstance(input, torch.Tensor) and isinstance(weight, torch.Tensor)):
        return False
    if min(input.dim(), weight.dim()) < 2:
        return False
    pair = dilation if isinstance(dilation, tuple) and len(dilation) == 2 else (dilation, dilation)
    for d, k, size in zip(pair, weight.shape[-2:], input.shape[-2:], strict=True):
        if isinstance(d, int) and d * (k - 1) + 1 > size:
            return True
    return False


def check_wrong(case: Case) -> None:
    arguments = _arguments(case)
    with num_threads(case.threads):
        ours, our_error = _outcome(conv2d_ext.conv2d, arguments)
    if our_error is None and _would_crash(arguments):
        return
    with peer.calls():
        theirs, their_error = _outcome(F.conv2d, arguments)
    both = (
        f"{case.options['mutations']}: F.conv2d: {_said(theirs, their_error)}; "
        f"conv2d_ext: {_said(ours, our_error)}"
    )
    if their_error is None:
        if our_error is not None and not _is_stricter(arguments, our_error):
            raise Violation("refused", both)
        if our_error is None:
            if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
                raise Violation("result of an odd call", both)
            if not ours.is_floating_point() and not ours.is_complex():
                require_same_bits("integers", ours, theirs, "output")
        return
    if our_error is None:
        if not _is_more(arguments, their_error):
            raise Violation("accepted", both)
        return
    # Of two faults either may be named; and F.conv2d computes with overflown sizes.
    if len(case.options["mutations"]) > 1 or "overflows" in str(our_error):
        return
    if _is_peers_own(arguments, their_error) or _is_stricter(arguments, our_error):
        return
    if type(our_error) is not type(their_error):
        raise Violation("exception type", both)
    for phrase in PHRASES:
        if phrase in str(their_error) and phrase not in str(our_error):
            raise Violation("phrase", f"'{phrase}': {both}")


def _said(result: Any, error: BaseException | None) -> str:
    if error is None:
        return f"{result.dtype} {tuple(result.shape)}"
    return f"{type(error).__name__}: {str(error)[:200]}"


def _is_stricter(arguments: dict[str, Any], error: BaseException) -> bool:
    """F.conv2d hardly looks at empty batches, nor at a bias where padding is a word, and computes
    with overflown sizes."""
    input, bias = arguments["input"], arguments["bias"]
    if isinstance(input, torch.Tensor) and input.numel() == 0:
        return True
    if "overflows" in str(error):
        return True
    named = isinstance(arguments["padding"], str)
    return named and bias is not None and "bias type" in str(error)


def _is_peers_own(arguments: dict[str, Any], error: BaseException) -> bool:
    """Errors of F.conv2d that name something else than what is wrong."""
    input, weight = arguments["input"], arguments["weight"]
    if isinstance(input, torch.Tensor) and input.numel() == 0:
        return True
    if isinstance(weight, torch.Tensor) and weight.numel() == 0:
        return True
    if arguments["padding"] == "same" and "negative padding" in str(error):
        return True
    return "slow_conv_dilated" in str(error)


def _is_more(arguments: dict[str, Any], error: BaseException) -> bool:
    """What this library takes and F.conv2d does not: dilated integers."""
    input = arguments["input"]
    integers = isinstance(input, torch.Tensor) and not (
        input.is_floating_point() or input.is_complex()
    )
    return integers and "not implemented for" in str(error)
