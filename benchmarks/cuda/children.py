"""Processes that answer requests, each request within its own time.

A kernel that reaches an illegal address spoils its process's whole context, and one that never ends
can't be stopped but with its process. So what touches the GPU runs in a child; whoever starts it
never touches the GPU, and goes on without the case.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

# `python -m benchmarks.cuda.worker N` answers on file descriptor N.
WORKER = (sys.executable, "-m", "benchmarks.cuda.worker")
START_S = 90  # to import torch and wake the GPU; its first process may take long
DYING_S = 10


class Lost(Exception):
    """The child ended, or was ended, before it answered; says how."""


class Refused(Exception):
    """The child could not do it; says why. It goes on."""


class Child:
    """One process of `command`."""

    def __init__(self, command: Sequence[str] = WORKER, start_s: float = START_S) -> None:
        """Raises Lost where it doesn't come up."""
        self._answers, theirs = os.pipe()
        self._unread = b""
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs)], stdin=subprocess.PIPE, pass_fds=[theirs]
            )
        finally:
            os.close(theirs)
        try:
            self._read(start_s)
        except Lost as lost:
            raise Lost(f"its process {lost} when it started") from None

    def ask(self, request: dict, limit_s: float) -> object:
        """The answer. Raises Lost, after which there is nobody to ask, or Refused."""
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise Lost(self._how_it_ended()) from None
        answer = self._read(limit_s)
        if "answer" in answer:
            return answer["answer"]
        if answer.get("ends"):
            self.end()
            raise Lost(answer["error"])
        raise Refused(answer["error"])

    def end(self) -> bool:
        """Whether it is gone: a process can be stuck in its driver."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.kill()
        with contextlib.suppress(OSError):
            os.close(self._answers)
        try:
            self._process.wait(DYING_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read(self, limit_s: float) -> dict:
        end = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                gone = self.end()
                stuck = "" if gone else ", and could not be killed"
                raise Lost(f"did not finish in {limit_s:g} s{stuck}")
            piece = os.read(self._answers, 2**16)
            if not piece:
                raise Lost(self._how_it_ended())
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(DYING_S)
        status = self._process.returncode
        self.end()
        if status is None:
            return "closed its answers"
        if status < 0:
            return f"crashed: {signal.Signals(-status).name}"
        return f"ended with exit status {status}"


class Children:
    """A child at a time; another one after a loss."""

    def __init__(self, command: Sequence[str] = WORKER) -> None:
        self._command = command
        self._child: Child | None = None

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, request: dict, limit_s: float) -> object:
        """As Child.ask; after a loss the next request has a child of its own."""
        if self._child is None:
            self._child = Child(self._command)
        try:
            return self._child.ask(request, limit_s)
        except Lost:
            self._child = None
            raise
        except BaseException as problem:
            if not isinstance(problem, Refused):
                self._end()
            raise

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None
