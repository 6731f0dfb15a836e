"""Calls of the library and of F.conv2d on a case's tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from conv2d_ext.testing import (
    Problem,
    Results,
    Tensors,
    aten_forward,
    aten_results,
    library_forward,
    library_results,
)

from . import peer
from .cases import Case

# ---- calling the library


def _op_results(problem: Problem, tensors: Tensors, grad_input_last: bool = False) -> Results:
    """By the four ops; what F.conv2d's autograd would compute."""
    ops, arguments = torch.ops.conv2d_ext, problem.op_args()
    input, weight, bias, grad_output = tensors
    output = ops.conv2d(input, weight, bias, *arguments)
    if not (input.is_floating_point() or input.is_complex()):
        return Results(output, None, None, None)
    shape, strides = list(weight.shape), list(weight.stride())
    if torch.empty_like(weight).stride() != weight.stride():
        strides = list(torch.empty(weight.shape, device="meta").stride())
    return Results(
        output,
        ops.conv2d_grad_input(grad_output, weight, list(input.shape), *arguments, grad_input_last),
        ops.conv2d_grad_weight(grad_output, input, shape, strides, *arguments),
        None if bias is None else ops.conv2d_grad_bias(grad_output),
    )


def library_results_of(case: Case, problem: Problem, tensors: Tensors) -> Results:
    if not tensors.input.is_floating_point() and not tensors.input.is_complex():
        return Results(library_forward(problem, tensors), None, None, None)
    if case.options.get("autograd"):
        return library_results(problem, tensors)
    return _op_results(problem, tensors)


# ---- calling F.conv2d


def needs_padded_copy(problem: Problem) -> Iterator[bool]:
    """PyTorch 2.11 reads or writes past its memory, or crashes, where a kernel is larger than the
    image without its padding."""
    for size, kernel, dilation in zip(
        problem.in_size, problem.kernel, problem.dilation, strict=True
    ):
        yield dilation * (kernel - 1) + 1 > size


def _unpadded(problem: Problem, input: torch.Tensor) -> tuple[Problem, torch.Tensor]:
    top, bottom, left, right = problem.padding4
    input = F.pad(input, (left, right, top, bottom))
    return dataclasses.replace(problem, in_size=tuple(input.shape[2:]), padding=(0, 0)), input


def peer_forward(problem: Problem, tensors: Tensors) -> torch.Tensor:
    """F.conv2d's output."""
    if any(needs_padded_copy(problem)):
        problem, input = _unpadded(problem, tensors.input)
        tensors = tensors._replace(input=input)
    with peer.calls():
        return aten_forward(problem, tensors)


def peer_results(problem: Problem, tensors: Tensors, padded: bool = False) -> Results:
    """F.conv2d's output and gradients; padded: the padding's products are counted for certain."""
    top, bottom, left, right = problem.padding4
    padded = padded or any(needs_padded_copy(problem))
    if padded:
        problem, input = _unpadded(problem, tensors.input)
        tensors = tensors._replace(input=input)
    with peer.calls():
        results = aten_results(problem, tensors)
    if not padded:
        return results
    height, width = problem.in_size
    inside = results.grad_input[..., top : height - bottom, left : width - right]
    return results._replace(grad_input=inside)
