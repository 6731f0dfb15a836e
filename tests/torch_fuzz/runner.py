"""Runs cases in a child process, makes what fails small, and says how to run it again."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import random
import select
import signal
import time
import traceback
from collections.abc import Iterator

# Once, before there are children.
import torch._dynamo
import torch.export  # noqa: F401

from . import peer
from .cases import Case, Violation
from .kinds import check, random_case
from .shrinking import simpler

PEER = "PyTorch crashed"  # no finding of ours


@dataclasses.dataclass
class Finding:
    name: str  # of the property, or of the signal
    message: str
    case: Case
    index: int | None = None


def run_case(case: Case) -> Finding | None:
    """In this process; whatever goes wrong is a finding."""
    try:
        check(case)
    except Violation as violation:
        return Finding(violation.name, str(violation), case)
    except Exception as error:
        return Finding(f"{type(error).__name__} while checking", traceback.format_exc(), case)
    return None


class Child:
    """A forked process that answers a case at a time. Forked before this process computes anything,
    so that it makes threads of its own."""

    def __init__(self) -> None:
        self._pid = 0
        self._start()

    def _start(self) -> None:
        peer.was_running()  # a child that was ended in the middle of a call does not say so
        to_child, to_parent = os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(to_child[1])
            os.close(to_parent[0])
            status = 1
            # Tracers write tracebacks of what they then raise.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                _serve(os.fdopen(to_child[0], "rb"), os.fdopen(to_parent[1], "wb"))
                status = 0
            finally:
                os._exit(status)
        os.close(to_child[0])
        os.close(to_parent[1])
        self._send = os.fdopen(to_child[1], "wb")
        self._receive = os.fdopen(to_parent[0], "rb")

    def run(self, case: Case, timeout: float) -> Finding | None:
        pickle.dump(case, self._send)
        self._send.flush()
        ready, _, _ = select.select([self._receive], [], [], timeout)
        if not ready:
            self._end()
            self._start()
            return Finding("no answer", f"no answer for {timeout:.0f} s", case)
        try:
            return pickle.load(self._receive)
        except EOFError:
            status = self._end()
            theirs = peer.was_running()
            self._start()
            if theirs:
                return Finding(PEER, f"PyTorch itself ended the process, status {status}", case)
            if status < 0:
                name = signal.Signals(-status).name
                return Finding(f"crash by {name}", "the process ended", case)
            return Finding("exit", f"the process ended with status {status}", case)

    def _end(self) -> int:
        self._send.close()
        self._receive.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def restart(self) -> None:
        """Without whatever earlier cases left behind."""
        self._end()
        self._start()

    def close(self) -> None:
        self._end()


def _serve(receive, send) -> None:
    while True:
        try:
            case = pickle.load(receive)
        except EOFError:
            return
        pickle.dump(run_case(case), send)
        send.flush()


def make_small(finding: Finding, child: Child, seconds: float) -> Finding:
    """Tries simpler cases for as long as they fail in the same property."""
    until = time.monotonic() + seconds
    improved = True
    while improved and time.monotonic() < until:
        improved = False
        for case in simpler(finding.case):
            if time.monotonic() > until:
                break
            again = child.run(case, timeout=60)
            if again is not None and again.name == finding.name:
                finding = dataclasses.replace(again, index=finding.index)
                improved = True
                break
    return finding


def cases(seed: int, kinds: list[str] | None, first: int) -> Iterator[tuple[int, Case]]:
    """Each follows from the seed and its index alone."""
    for index in itertools.count(first):
        yield index, random_case(random.Random(f"{seed}/{index}"), kinds)
