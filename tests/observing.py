"""What tests of several files observe: a call's ops, its bits, its number of threads, its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from isa_bits import bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import conv2d_ext


class Recorder(TorchDispatchMode):
    """The ops that run within, as in "aten::mm"."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket._qualified_op_name)
        return function(*args, **(kwargs or {}))

    @property
    def ours(self) -> list[str]:
        """This library's, without its name."""
        prefix = "conv2d_ext::"
        return [name.removeprefix(prefix) for name in self.names if name.startswith(prefix)]


def same_bits(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(bits(first), bits(second))


def assert_as_pytorch(call: Callable[[], Any]) -> None:
    """A call has the same result in the mode batch_invariant, or the same error."""

    def outcome() -> Any:
        try:
            return call()
        except (RuntimeError, IndexError) as error:
            return f"{type(error).__name__}: {error}"

    expected = outcome()
    with conv2d_ext.batch_invariant():
        found = outcome()
    if isinstance(expected, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected)


class Passes(TorchDispatchMode):
    """Calls what it is given."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
