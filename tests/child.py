"""Run Python in a process of its own, with the conv2d_ext that the tests import."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import conv2d_ext

# Where the engines' machine code is.
LIBRARY = pathlib.Path(conv2d_ext.__file__).parent / "libconv2d_ext.so"


# Ends a program without Python's shutdown, which a thread of Gloo that still holds a tensor aborts
# (PyTorch's issue 190489).
LEAVE = "import os, sys; sys.stdout.flush(); os._exit(0)\n"


def environment(**variables: str) -> dict[str, str]:
    """This process's, in which that conv2d_ext is found, and `variables`."""
    package = str(pathlib.Path(conv2d_ext.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": package, **variables}


def run_python(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """The finished process, whatever its exit status; stdout and stderr as text."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(**(env or {})),
        capture_output=True,
        text=True,
        check=False,
    )
