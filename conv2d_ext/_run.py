"""`python -m conv2d_ext run`: an unchanged program whose models' bits follow no batch."""

from __future__ import annotations

import argparse
import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import io
import pkgutil
import runpy
import sys
import zipfile
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from conv2d_ext.invariance import enable


def main(argv: list[str]) -> int:
    """Runs the program as `python` would, under `conv2d_ext.enable`.

    Its exit status and its exceptions are this command's. Where there is no such program: 2, and 1
    where there is no such module.
    """
    arguments = _parse(argv)
    target, rest = arguments.target, arguments.arguments
    enable()
    sys.argv = [target, *rest]
    if arguments.module:
        # As `python -m` does: the current folder comes first.
        sys.path[0] = str(Path.cwd())
        return _run_module(target)
    sys.path[0] = str(Path(target).resolve().parent)
    path = Path.cwd() / target
    if path.is_file() and not zipfile.is_zipfile(path):
        loader, code = _read(path)
        _execute(
            code, __file__=str(path), __cached__=None, __loader__=loader, __package__=None,
            __spec__=None,
        )  # fmt: skip
    else:  # a folder, or an archive, with a __main__.py
        runpy.run_path(target, run_name="__main__")
    return 0


def _read(path: Path) -> tuple[Any, CodeType]:
    """A file of source or bytecode."""
    with io.open_code(str(path)) as file:
        code = pkgutil.read_code(file)
    if code is not None:
        return importlib.machinery.SourcelessFileLoader("__main__", str(path)), code
    loader = importlib.machinery.SourceFileLoader("__main__", str(path))
    return loader, loader.source_to_code(path.read_bytes(), str(path))


def _run_module(name: str) -> int:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if not f"{name}.__main__.".startswith(f"{error.name}."):  # another one, which it imports
            raise
        spec = None
    code = None
    if spec is not None and isinstance(spec.loader, importlib.abc.InspectLoader):
        code = spec.loader.get_code(spec.name)
    if spec is None or code is None:
        sys.stderr.write(f"{sys.executable}: no module named {name} that can be executed\n")
        return 1
    sys.argv[0] = spec.origin or name
    _execute(
        code, __file__=spec.origin, __cached__=spec.cached, __loader__=spec.loader,
        __package__=spec.parent, __spec__=spec,
    )  # fmt: skip
    return 0


def _execute(code: CodeType, **attributes: Any) -> None:
    """As the process's main module, which it remains: for threads, and for what runs at exit."""
    module = ModuleType("__main__")
    vars(module).update(__builtins__=builtins, **attributes)
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m conv2d_ext run",
        description="Runs a Python program in a process where conv2d_ext.enable() is on: an "
        "example's results have the same bits in every batch.",
        usage="%(prog)s [-h] [-m] target ...",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="target is a module's name")
    parser.add_argument("target", help="a Python file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own arguments")
    arguments = parser.parse_args(argv)
    if not arguments.module and not Path(arguments.target).exists():
        parser.error(f"can't open file '{arguments.target}'")
    return arguments
