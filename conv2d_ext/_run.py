"""`python -m conv2d_ext run`: an unchanged program whose models' bits follow no batch."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from conv2d_ext.invariance import enable


def main(argv: list[str]) -> int:
    """Runs the program as `python` would, under `conv2d_ext.enable`.

    Its exit status and its exceptions are this command's; 2 where there is no such program.
    """
    arguments = _parse(argv)
    target, rest = arguments.target, arguments.arguments
    enable()
    if arguments.module:
        sys.argv = [target, *rest]
        # As `python -m` does: the current folder comes first.
        sys.path[0] = str(Path.cwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [target, *rest]
        sys.path[0] = str(Path(target).resolve().parent)
        runpy.run_path(target, run_name="__main__")
    return 0


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
