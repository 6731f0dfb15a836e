"""Activation checkpointing and gradient accumulation: the bits of a training step without them."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

import conv2d_ext


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.int32)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU()),
        nn.Sequential(nn.ConvTranspose2d(8, 6, 2, stride=2), nn.GroupNorm(2, 6), nn.GELU()),
        nn.Sequential(nn.Flatten(2), nn.Conv1d(6, 4, 3), nn.Softmax(-1), nn.Linear(46, 5)),
    )


def gradients(model: nn.Module, forward, input: Tensor) -> list[Tensor]:
    model.zero_grad()
    input = input.detach().requires_grad_()
    forward(input).square().sum().backward()
    return [input.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("how", ["converted", "mode"])
def test_checkpoints(how, use_reentrant):
    """The recomputed forward has the bits of the first. In the mode the backward is inside it."""
    model = make_model()
    context = contextlib.nullcontext()
    if how == "converted":
        conv2d_ext.convert(model)
    else:
        context = conv2d_ext.batch_invariant()
    input = torch.randn(3, 3, 4, 3)

    def each(x: Tensor) -> Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    def in_segments(x: Tensor) -> Tensor:
        return checkpoint_sequential(model, 2, x, use_reentrant=use_reentrant)

    with context:
        expected = gradients(model, model, input)
        for forward in (each, in_segments):
            for ours, theirs in zip(gradients(model, forward, input), expected, strict=True):
                assert torch.equal(bits(ours), bits(theirs))


def test_a_backward_outside_of_the_mode_recomputes_inside():
    """What is recomputed has the bits of the forward, so its gradients have."""
    model, input = make_model(), torch.randn(2, 3, 4, 3)
    with conv2d_ext.batch_invariant():
        model(input).sum().backward()
        expected = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        output = checkpoint(model, input, use_reentrant=False)
    output.sum().backward()
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert torch.equal(bits(parameter.grad), bits(wanted))


@pytest.mark.parametrize("how", ["converted", "mode"])
def test_selective_checkpoints_save_what_they_name(how):
    """A policy sees this library's ops. What it saves is not computed again."""
    ours = torch.ops.conv2d_ext
    saved = {ours.conv2d.default: 1, ours.matmul.default: 1}
    computed: list[object] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            computed.append(func)
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    model = conv2d_ext.convert(model) if how == "converted" else model
    mode = contextlib.nullcontext() if how == "converted" else conv2d_ext.batch_invariant()
    input = torch.randn(2, 3, 6, 6, requires_grad=True)
    contexts = functools.partial(create_selective_checkpoint_contexts, list(saved))
    with mode, Calls():
        for context_fn, times in ((contexts, 1), (noop_context_fn, 2)):
            computed.clear()
            output = checkpoint(model, input, use_reentrant=False, context_fn=context_fn)
            forward = len(computed)
            output.sum().backward()
            assert {op: computed[:forward].count(op) for op in saved} == saved
            assert computed.count(ours.conv2d.default) == times


@pytest.mark.parametrize("how", ["converted", "mode"])
def test_accumulated_gradients(how):
    """Sums of micro-batches' gradients: PyTorch's additions, in the order of the backwards.

    So they are the same bits in every run, whatever the threads, and those that adding up by hand
    gives. The whole batch's gradient is another sum of the same products: close, not equal.
    """
    model = conv2d_ext.convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(48, 5)))
    context = contextlib.nullcontext()
    if how == "mode":
        conv2d_ext.revert(model)
        context = conv2d_ext.batch_invariant()
    input, target = torch.randn(6, 3, 4, 5), torch.randn(6, 5)
    parts = [slice(0, 2), slice(2, 3), slice(3, 6)]

    def add_gradients(part: slice) -> None:
        F.mse_loss(model(input[part]), target[part], reduction="sum").backward()

    def take_gradients() -> list[Tensor]:
        taken = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return taken

    with context:
        separate = []
        for part in parts:
            add_gradients(part)
            separate.append(take_gradients())
        by_hand = [(a + b) + c for a, b, c in zip(*separate, strict=True)]
        add_gradients(slice(None))
        whole = take_gradients()
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for part in parts:
                add_gradients(part)
            accumulated = take_gradients()
            for ours, sums, once in zip(accumulated, by_hand, whole, strict=True):
                assert torch.equal(bits(ours), bits(sums))
                torch.testing.assert_close(ours, once, rtol=1e-5, atol=1e-5)
