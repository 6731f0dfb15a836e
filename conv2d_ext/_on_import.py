"""Acts when a module is imported that takes long to import, instead of importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds no module but one, and that one as Python does."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        # A spec may be asked for without an import (importlib.util.find_spec).
        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._action()

        spec.loader.exec_module = execute_and_act
        return spec


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Calls `action` after the module `name` has been imported, or now where it has been."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Watcher(name, action))
