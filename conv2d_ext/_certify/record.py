"""What one run of a model calls, forward and backward, with the bits of all that goes in and out.

The recording sits below autograd (TorchDispatchMode): it sees calls made in C++ and the backward,
and the run takes the paths that it takes without it. A mode at the level of torch's functions would
be seen by torch.nn.MultiheadAttention and others, which then call something else; so the names of
functions come from a run of their own, `NamesOfCalls`.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conv2d_ext._certify.bits import is_comparable
from conv2d_ext._certify.leaves import Print, example_print, print_of
from conv2d_ext._certify.result import Call

# Their results are memory as it was found.
_UNINITIALISED = ("empty", "new_empty", "resize", "_resize", "set_", "lift_fresh")
# Copies: they are made or not as the strides ask for it, and change no bit.
_COPIES = ("clone", "contiguous", "_unsafe_view", "_reshape_copy", "as_strided_")
_FILLS = ("fill_", "zero_", "copy_", "eye_")
_OWN_FOLDERS = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parents[1]) + os.sep,
)

# The phase, the module's path, which call of it, the op, which call of the op there.
Key = tuple[bool, str, int, str, int]
# A record's key and which of its outputs.
Source = tuple[Key, int]


@dataclasses.dataclass
class Record:
    """One call of an op."""

    key: Key
    module_class: str
    node: str
    inputs: list[Print | None]
    outputs: list[Print | None]
    numbers: tuple[float, ...]
    """Its floating-point arguments that are not tensors."""
    sources: frozenset[Source]
    """The earlier outputs that it reads."""
    is_random: bool
    trains_batch_norm: bool


@dataclasses.dataclass
class Recording:
    """The calls of one run, in order. In a batch all prints are those of the example's part."""

    records: dict[Key, Record] = dataclasses.field(default_factory=dict)
    results: frozenset[Source] = frozenset()
    """The outputs that are, or hold, the run's results."""

    def used(self) -> set[Source]:
        """The outputs that the results follow from; all of them where this isn't known."""
        found: set[Source] = set()
        open_ends = list(self.results)
        while open_ends:
            source = open_ends.pop()
            if source in found:
                continue
            found.add(source)
            record = self.records.get(source[0])
            open_ends += record.sources if record else ()
        if found:
            return found
        return {(key, i) for key, r in self.records.items() for i in range(len(r.outputs))}


@dataclasses.dataclass(frozen=True)
class _Place:
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
        self._root = _Place("", type(model).__name__, 1)
        self._stack: list[tuple[int, _Place]] = []
        self._calls: Counter[str] = Counter()
        self._thread = threading.get_ident()
        self._handles: list[Any] = []
        self.on_exit: Callable[[_Place], None] | None = None

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
    def place(self) -> _Place:
        return self._stack[-1][1] if self._stack else self._root

    def _entered(self, module: nn.Module, _: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        name = self._names.get(id(module))
        if name is None:
            # Made on the fly, or held by a function.
            name = f"{self.place.module}.({type(module).__name__})".lstrip(".")
        self._calls[name] += 1
        place = _Place(name, type(module).__name__, self._calls[name])
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


class _Sequence:
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


class _Calls:
    """Numbers the calls of a run: the same call has the same key in every run."""

    def __init__(self, modules: Modules) -> None:
        self.modules = modules
        self.sequence = _Sequence()
        self._counts: Counter[tuple[bool, str, int, str]] = Counter()
        modules.on_exit = self.sequence.add

    def next(self, func: Any) -> tuple[Key, str, str]:
        """(its key, the module's class, the autograd node's name)"""
        node = torch._C._current_autograd_node()
        if node is None:
            place = self.modules.place
            self.sequence.add(place)
        else:
            place = self.sequence.find(node) or _Place("", "", 1)
        op = _op_name(func)
        group = (node is not None, place.module, place.module_call, op)
        self._counts[group] += 1
        key = (*group, self._counts[group])
        return key, place.module_class, node.name() if node is not None else ""

    def skip(self) -> None:
        if torch._C._current_autograd_node() is None:
            self.sequence.add(self.modules.place)


class Recorder(TorchDispatchMode):
    """Records the calls of one run of a model on a batch that has the example at `place`.

    `alone` is a recording of the example by itself, by which its part of each tensor is found; None
    records whole tensors.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        alone: Recording | None = None,
        batch: int = 1,
        place: int = 0,
    ) -> None:
        super().__init__()
        self.recording = Recording()
        self._alone, self._batch, self._place = alone, batch, place
        self._modules = Modules(model)
        self._calls = _Calls(self._modules)
        self._producers: dict[int, Source] = {}
        self._parameters: dict[int, Tensor] = {}
        if isinstance(model, nn.Module):
            for parameter in model.parameters():
                if is_comparable(parameter):
                    self._parameters[parameter.untyped_storage().data_ptr()] = parameter

    def __enter__(self) -> Recorder:
        self._modules.__enter__()
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._modules.__exit__()

    def finish(self, results: list[Tensor]) -> Recording:
        """The recording, of a run that gave `results`."""
        found = (self._producers.get(_memory(t)) for t in results if is_comparable(t))
        self.recording.results = frozenset(f for f in found if f is not None)
        return self.recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_skipped(func):
            self._calls.skip()
            output = func(*args, **kwargs)
            self._pass_on(args, output)
            return output
        key, module_class, node = self._calls.next(func)
        leaves = tree_leaves((args, kwargs))
        given = [t for t in leaves if isinstance(t, Tensor)]
        overwritten = _overwritten(func, args, kwargs)
        read = [t for t in given if id(t) not in overwritten]
        expected = self._alone.records.get(key) if self._alone else None
        sources = frozenset(self._producers[m] for m in map(_memory, given) if m in self._producers)
        inputs = self._prints(read, expected.inputs if expected else None)
        output = func(*args, **kwargs)
        results = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        results += _written(func, args, kwargs, results)
        if not results:
            return output
        outputs = self._prints(results, expected.outputs if expected else None)
        for index, result in enumerate(results):
            if memory := _memory(result):
                self._producers[memory] = (key, index)
        self.recording.records[key] = Record(
            key,
            module_class,
            node,
            inputs,
            outputs,
            tuple(v for v in leaves if isinstance(v, float)),
            sources,
            _is_random(func, args, kwargs),
            _trains_batch_norm(func, args, kwargs),
        )
        return output

    def _pass_on(self, args: tuple[Any, ...], output: Any) -> None:
        """A copy holds what its source's producer made."""
        given = args[0] if args else None
        if isinstance(given, Tensor) and isinstance(output, Tensor):
            source, copy = _memory(given), _memory(output)
            if source != copy and copy:
                self._producers.pop(copy, None)
                if source in self._producers:
                    self._producers[copy] = self._producers[source]

    def _prints(
        self, tensors: list[Tensor], expected: list[Print | None] | None
    ) -> list[Print | None]:
        prints: list[Print | None] = []
        for index, tensor in enumerate(tensors):
            if not is_comparable(tensor):
                prints.append(None)
            elif parameter := self._parameter_print(tensor):
                prints.append(parameter)
            elif self._alone is None:
                prints.append(print_of(tensor))
            else:
                alone = expected[index] if expected and index < len(expected) else None
                example = alone and example_print(tensor, alone, self._batch, self._place)
                prints.append(example or None)
        return prints

    def _parameter_print(self, tensor: Tensor) -> Print | None:
        """Parameters are the same in every run, as long as nothing has written to them: their bits
        need no reading."""
        parameter = self._parameters.get(_memory(tensor))
        if parameter is None or parameter.is_inference():
            return None
        layout = f"{tensor.storage_offset()} {tuple(tensor.shape)} {tensor.stride()}"
        name = f"parameter {_memory(tensor)} version {parameter._version} {layout}"
        return Print(tuple(tensor.shape), tensor.is_floating_point(), name)


def _memory(tensor: Tensor) -> int:
    """Where a tensor's values lie; 0 where it has none."""
    return tensor.untyped_storage().data_ptr() if is_comparable(tensor) else 0


def _op_name(func: Any) -> str:
    schema = getattr(func, "_schema", None)
    return schema.name if schema is not None else str(func)


def _is_skipped(func: Any) -> bool:
    """Views and copies have no bits of their own, and some results none that anyone has written."""
    if getattr(func, "is_view", False):
        return True
    name = _op_name(func).rpartition("::")[2]
    return name in _COPIES or name.startswith(_UNINITIALISED)


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return {}
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    named = dict(zip((a.name for a in schema.arguments), args, strict=False))
    return {**defaults, **named, **kwargs}


def _written(
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


def _overwritten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Which tensors (by id) are written without being read: what they held doesn't matter."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return set()
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    fills = is_random or _op_name(func).rpartition("::")[2] in _FILLS
    given = _arguments(func, args, kwargs)
    written = [
        given.get(a.name)
        for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and (fills or a.is_out)
    ]
    return {id(t) for t in tree_leaves(written) if isinstance(t, Tensor)}


def _is_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    given = _arguments(func, args, kwargs)
    # Attention and dropout are random only with a dropout.
    probability = given.get("dropout_p", given.get("p") if "dropout" in _op_name(func) else None)
    training = given.get("train", given.get("training", True))
    return probability != 0.0 and training is not False


def _trains_batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    op = _op_name(func)
    if "batch_norm" not in op:
        return False
    given = _arguments(func, args, kwargs)
    # An op without the argument is one of training alone: _native_batch_norm_legit.no_stats has it.
    training = given.get("training", given.get("train"))
    return bool(training) if training is not None else "with_update" in op


# ---- names


class _Functions(TorchFunctionMode):
    """Which function of torch runs: the outermost one, which is what the model calls."""

    def __init__(self, modules: Modules) -> None:
        super().__init__()
        self._modules = modules
        self._counts: Counter[tuple[_Place, str]] = Counter()
        self.current = ("", 0, "")
        self.on_exit: Callable[[], None] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        if name.endswith(("__get__", "__set__")):
            return func(*args, **(kwargs or {}))
        place = self._modules.place
        self._counts[place, name] += 1
        self.current = (name, self._counts[place, name], _caller())
        try:
            result = func(*args, **(kwargs or {}))
            if self.on_exit:
                self.on_exit()
            return result
        finally:
            self.current = ("", 0, "")


def _caller() -> str:
    """File and line of the innermost frame outside of torch and this library."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OWN_FOLDERS) and not file.startswith("<"):
            return f"{'/'.join(Path(file).parts[-3:]).lstrip('/')}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class _Namer(TorchDispatchMode):
    """Finds the function, and its line, of every key."""

    def __init__(self, modules: Modules, functions: _Functions) -> None:
        super().__init__()
        self.names: dict[Key, tuple[str, int, str]] = {}
        self._functions = functions
        self._calls = _Calls(modules)
        self._made_by = _Sequence()
        functions.on_exit = lambda: self._made_by.add(functions.current)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        node = torch._C._current_autograd_node()
        if node is None:
            self._made_by.add(self._functions.current)
        if _is_skipped(func):
            self._calls.skip()
        else:
            key, _, _ = self._calls.next(func)
            current = self._functions.current if node is None else self._made_by.find(node)
            self.names[key] = current or ("", 0, "")
        return func(*args, **(kwargs or {}))


class NamesOfCalls:
    """A context that finds, of each call that is made inside, (function, which call of it in its
    module's call, file and line). A run may call other ops in here than it does outside."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self._modules = Modules(model)
        self._functions = _Functions(self._modules)
        self._namer = _Namer(self._modules, self._functions)
        self._stack = contextlib.ExitStack()

    @property
    def names(self) -> dict[Key, tuple[str, int, str]]:
        return self._namer.names

    def __enter__(self) -> NamesOfCalls:
        for context in (self._modules, self._functions, self._namer):
            self._stack.enter_context(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def call_of(record: Record, names: dict[Key, tuple[str, int, str]]) -> Call:
    """A record as its user knows it."""
    backward, module, module_call, op, op_call = record.key
    function, function_call, where = names.get(record.key, ("", 0, ""))
    return Call(
        module,
        record.module_class,
        module_call,
        op,
        op_call,
        function,
        function_call,
        where,
        backward,
        record.node,
    )
