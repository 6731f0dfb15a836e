"""Run Python in a process of its own, with the conv2d_ext that the tests import."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

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


@functools.cache
def _forking(preload: tuple[str, ...]) -> subprocess.Popen:
    """Where programs are forked from. It ends with this process, whose end of its input closes."""
    program = pathlib.Path(__file__).with_name("forked.py")
    # What it imports may ask for a GPU, of which a process that is forked could use none after it.
    variables = {"CUDA_VISIBLE_DEVICES": ""} if preload else {}
    return subprocess.Popen(
        [sys.executable, program, *preload],
        env=environment(**variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_forked(
    *arguments: str,
    env: dict[str, str] | None = None,
    cwd: str | os.PathLike | None = None,
    preload: tuple[str, ...] = (),
) -> subprocess.CompletedProcess:
    """As run_python, of a file, of `-c` and a program or of `-m` and a module, two seconds sooner:
    torch is imported already, nothing of conv2d_ext is. Not for what starts or ends with the
    interpreter. `preload` names modules of torch that several such programs import, and that start
    no thread; these are forked from a process of their own, and have no GPU."""
    with contextlib.ExitStack() as files:
        output = files.enter_context(tempfile.NamedTemporaryFile("r+", encoding="utf-8"))
        errors = files.enter_context(tempfile.NamedTemporaryFile("r+", encoding="utf-8"))
        request = {
            "arguments": [str(argument) for argument in arguments],
            "env": environment(**(env or {})),
            "cwd": os.fspath(cwd or os.getcwd()),
            "stdout": output.name,
            "stderr": errors.name,
        }
        server = _forking(preload)
        print(json.dumps(request), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, status, output.read(), errors.read())
