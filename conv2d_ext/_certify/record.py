"""What one run of a model calls, forward and backward, with the bits of all that goes in and out.

The recording sits below autograd (TorchDispatchMode): it sees calls made in C++ and the backward,
and the run takes the paths that it takes without it. A mode at the level of torch's functions would
be seen by torch.nn.MultiheadAttention and others, which then call something else; so the names of
functions come from a run of their own, `NamesOfCalls`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conv2d_ext._certify.bits import is_comparable
from conv2d_ext._certify.calls import (
    Calls,
    Key,
    Modules,
    is_random,
    is_skipped,
    overwritten_by,
    trains_batch_norm,
    written_by,
)
from conv2d_ext._certify.leaves import Print, example_print, print_of
from conv2d_ext._certify.result import Call

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
        self._calls = Calls(self._modules)
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
        if is_skipped(func):
            self._calls.skip()
            output = func(*args, **kwargs)
            self._pass_on(args, output)
            return output
        key, module_class, node = self._calls.next(func)
        leaves = tree_leaves((args, kwargs))
        given = [t for t in leaves if isinstance(t, Tensor)]
        overwritten = overwritten_by(func, args, kwargs)
        read = [t for t in given if id(t) not in overwritten]
        expected = self._alone.records.get(key) if self._alone else None
        sources = frozenset(self._producers[m] for m in map(_memory, given) if m in self._producers)
        inputs = self._prints(read, expected.inputs if expected else None)
        output = func(*args, **kwargs)
        results = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        results += written_by(func, args, kwargs, results)
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
            is_random(func, args, kwargs),
            trains_batch_norm(func, args, kwargs),
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
