"""The functions of torch that a model calls, and its lines that call them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from conv2d_ext._certify.calls import Calls, Key, Modules, Place, Sequence, is_skipped

# Frames between a call of the model and this file, and the one that calls the model.
_OTHERS = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep)
_RUNNER = str(Path(__file__).with_name("runs.py"))


class _Functions(TorchFunctionMode):
    """Which function of torch runs: the outermost one, which is what the model calls."""

    def __init__(self, modules: Modules) -> None:
        super().__init__()
        self._modules = modules
        self._counts: Counter[tuple[Place, str]] = Counter()
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
    """File and line of the model's innermost frame outside of torch; "" where it has none."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != _RUNNER:
        file = frame.f_code.co_filename
        if not file.startswith(_OTHERS) and not file.startswith("<"):
            return f"{'/'.join(Path(file).parts[-3:]).lstrip('/')}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class _Namer(TorchDispatchMode):
    """Finds the function, and its line, of every key."""

    def __init__(self, modules: Modules, functions: _Functions) -> None:
        super().__init__()
        self.names: dict[Key, tuple[str, int, str]] = {}
        self._functions = functions
        self._calls = Calls(modules)
        self._made_by = Sequence()
        functions.on_exit = lambda: self._made_by.add(functions.current)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        node = torch._C._current_autograd_node()
        if node is None:
            self._made_by.add(self._functions.current)
        if is_skipped(func):
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
