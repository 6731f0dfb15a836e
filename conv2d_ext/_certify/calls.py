"""Which calls a run makes: their numbers, the module each is in, and facts about ops."""

from __future__ import annotations

import bisect
import dataclasses
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._pytree import tree_leaves

# Their results are memory as it was found.
_UNINITIALISED = ("empty", "new_empty", "resize", "_resize", "set_", "lift_fresh")
# Copies: they are made or not as the strides ask for it, and change no bit.
_COPIES = ("clone", "contiguous", "_unsafe_view", "_reshape_copy", "as_strided_")
_FILLS = ("fill_", "zero_", "copy_", "eye_")

# The phase, the module's path, which call of it, the op, which call of the op there.
Key = tuple[bool, str, int, str, int]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a run is: in which module, and which call of it."""

    module: str
    module_class: str
    module_call: int


class Modules:
    """Which module of `model` runs, by hooks on all modules: hooks on each one of them would be
    seen by torch.nn.TransformerEncoderLayer, which then takes another path."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self._names = {}
        if isinstance(model, nn.Module):
            self._names = {id(module): name for name, module in model.named_modules()}
        self._root = Place("", type(model).__name__, 1)
        self._stack: list[tuple[int, Place]] = []
        self._calls: Counter[str] = Counter()
        self._thread = threading.get_ident()
        self._handles: list[Any] = []
        self.on_exit: Callable[[Place], None] | None = None

    def __enter__(self) -> Modules:
        self._handles = [
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def place(self) -> Place:
        return self._stack[-1][1] if self._stack else self._root

    def _entered(self, module: nn.Module, _: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        name = self._names.get(id(module))
        if name is None:
            # Made on the fly, or held by a function.
            name = f"{self.place.module}.({type(module).__name__})".lstrip(".")
        self._calls[name] += 1
        place = Place(name, type(module).__name__, self._calls[name])
        self._stack.append((id(module), place))

    def _left(self, module: nn.Module, _: Any, __: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        while self._stack:
            identity, place = self._stack.pop()
            if identity == id(module):
                if self.on_exit:
                    self.on_exit(place)
                break


class Sequence:
    """Which forward call made an autograd node. Nodes are numbered as they are made, and a call's
    node is made before what it dispatches, or right after it."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._entries: list[Any] = []

    def add(self, entry: Any) -> None:
        number = torch.autograd._get_sequence_nr()
        if not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._entries.append(entry)

    def find(self, node: Any) -> Any | None:
        position = bisect.bisect_right(self._numbers, node._sequence_nr())
        return self._entries[position] if position < len(self._entries) else None


class Calls:
    """Numbers the calls of a run: the same call has the same key in every run."""

    def __init__(self, modules: Modules) -> None:
        self.modules = modules
        self.sequence = Sequence()
        self._counts: Counter[tuple[bool, str, int, str]] = Counter()
        modules.on_exit = self.sequence.add

    def next(self, func: Any) -> tuple[Key, str, str]:
        """(its key, the module's class, the autograd node's name)"""
        node = torch._C._current_autograd_node()
        if node is None:
            place = self.modules.place
            self.sequence.add(place)
        else:
            place = self.sequence.find(node) or Place("", "", 1)
        op = op_name(func)
        group = (node is not None, place.module, place.module_call, op)
        self._counts[group] += 1
        key = (*group, self._counts[group])
        return key, place.module_class, node.name() if node is not None else ""

    def skip(self) -> None:
        if torch._C._current_autograd_node() is None:
            self.sequence.add(self.modules.place)


# ---- ops


def op_name(func: Any) -> str:
    schema = getattr(func, "_schema", None)
    return schema.name if schema is not None else str(func)


def is_skipped(func: Any) -> bool:
    """Views and copies have no bits of their own, and some results none that anyone has written."""
    if getattr(func, "is_view", False):
        return True
    name = op_name(func).rpartition("::")[2]
    return name in _COPIES or name.startswith(_UNINITIALISED)


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return {}
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    named = dict(zip((a.name for a in schema.arguments), args, strict=False))
    return {**defaults, **named, **kwargs}


def written_by(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]
) -> list[Tensor]:
    """The arguments that the call writes and doesn't return."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    returned = {id(t) for t in results}
    given = _arguments(func, args, kwargs)
    written = [
        given.get(a.name)
        for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    ]
    return [t for t in tree_leaves(written) if isinstance(t, Tensor) and id(t) not in returned]


def overwritten_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Which tensors (by id) are written without being read: what they held doesn't matter."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return set()
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    fills = is_random or op_name(func).rpartition("::")[2] in _FILLS
    given = _arguments(func, args, kwargs)
    written = [
        given.get(a.name)
        for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and (fills or a.is_out)
    ]
    return {id(t) for t in tree_leaves(written) if isinstance(t, Tensor)}


def is_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    given = _arguments(func, args, kwargs)
    # Attention and dropout are random only with a dropout.
    probability = given.get("dropout_p", given.get("p") if "dropout" in op_name(func) else None)
    training = given.get("train", given.get("training", True))
    return probability != 0.0 and training is not False


def trains_batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    op = op_name(func)
    if "batch_norm" not in op:
        return False
    given = _arguments(func, args, kwargs)
    # An op without the argument is one of training alone: _native_batch_norm_legit.no_stats has it.
    training = given.get("training", given.get("train"))
    return bool(training) if training is not None else "with_update" in op
