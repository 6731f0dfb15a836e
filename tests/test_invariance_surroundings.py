"""The mode below PyTorch's dispatch modes and among tensors of other classes.

Seen to fail: without the second names of ops that are made of calls (csrc/invariance_compiled.cpp)
`test_calls_below_dispatch_modes`.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from observing import Passes
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import conv2d_ext


def _modules() -> dict[str, nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return {
            "LSTM": nn.LSTM(32, 24, 2, batch_first=True, bidirectional=True),
            "GRU": nn.GRU(32, 24, batch_first=True),
            "MultiheadAttention": nn.MultiheadAttention(32, 4, batch_first=True),
            "TransformerEncoderLayer": nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
            "Bilinear": nn.Bilinear(32, 32, 11),
        }


MODULES = {name: module.eval() for name, module in _modules().items()}


def run_module(name: str, x: Tensor) -> Tensor:
    module = MODULES[name]
    if name == "MultiheadAttention":
        return module(x, x, x, need_weights=False)[0]
    if name == "Bilinear":
        return module(x, x.flip(1))
    result = module(x)
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("surroundings", [
    lambda: FlopCounterMode(display=False), Passes, lambda: _two(Passes(), Passes()),
], ids=["flops", "passes", "two"])  # fmt: skip
@pytest.mark.parametrize("name", MODULES)
def test_calls_below_dispatch_modes(name, surroundings, with_gradients):
    """Such a mode is called without the keys above it, as are the calls that it makes."""
    x = torch.randn(5, 9, 32)

    def results(examples: slice) -> list[Tensor]:
        leaf = x[examples].requires_grad_(with_gradients)
        with contextlib.nullcontext() if with_gradients else torch.no_grad():
            output = run_module(name, leaf)
        if not with_gradients:
            return [output]
        output.square().sum().backward()
        return [output.detach(), leaf.grad]

    with conv2d_ext.batch_invariant():
        expected = results(slice(None))
        with surroundings():
            whole, part = results(slice(None)), results(slice(1, 3))
    for a, b, c in zip(expected, whole, part, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(c, b[1:3])


@contextlib.contextmanager
def _two(first, second):
    with first, second:
        yield


class _Unwraps(torch.Tensor):
    """A tensor of another class that takes itself apart."""

    @staticmethod
    def __new__(cls, inner: Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(t):
            return t.inner if isinstance(t, cls) else t

        args, kwargs = pytree.tree_map(unwrap, (args, kwargs or {}))
        return pytree.tree_map_only(Tensor, cls, func(*args, **kwargs))


@pytest.mark.parametrize("name", ["Bilinear", "TransformerEncoderLayer", "LSTM"])
def test_calls_of_tensors_that_unwrap(name):
    x = torch.randn(5, 9, 32)
    with conv2d_ext.batch_invariant(), torch.no_grad():
        expected = run_module(name, x)
        assert torch.equal(run_module(name, _Unwraps(x)).inner, expected)
        assert torch.equal(run_module(name, _Unwraps(x[1:2])).inner, expected[1:2])


def test_a_recomputed_lstm():
    """Selective activation checkpointing recomputes below a dispatch mode."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    def policy():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    x = torch.randn(5, 9, 32)

    def gradient(examples: slice, recompute: bool) -> list[Tensor]:
        leaf = x[examples].requires_grad_()
        if recompute:
            output = checkpoint(run_module, "LSTM", leaf, use_reentrant=False, context_fn=policy)
        else:
            output = run_module("LSTM", leaf)
        output.square().sum().backward()
        return [output.detach(), leaf.grad]

    with conv2d_ext.batch_invariant():
        expected = gradient(slice(None), recompute=False)
        for a, b in zip(expected, gradient(slice(None), recompute=True), strict=True):
            assert torch.equal(a, b)
        for a, b in zip(expected, gradient(slice(2, 3), recompute=True), strict=True):
            assert torch.equal(a[2:3], b)


def test_certify_names_no_calls_of_its_recorder_alone():
    report = conv2d_ext.certify(MODULES["LSTM"], torch.randn(3, 9, 32))
    assert report.passed
    _, in_the_mode = str(report).split("Under conv2d_ext.batch_invariant()")
    assert "mkldnn" not in in_the_mode


def test_nested_tensors_below_dispatch_modes():
    """Which PyTorch's fast path makes where a mask is given."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x, mask = torch.randn(3, 7, 32), torch.zeros(3, 7, dtype=torch.bool)
    mask[1, 5:] = True
    with torch.no_grad(), conv2d_ext.batch_invariant():
        expected = encoder(x, src_key_padding_mask=mask)
        with FlopCounterMode(display=False):
            found = encoder(x, src_key_padding_mask=mask)
    torch.testing.assert_close(found, expected)
