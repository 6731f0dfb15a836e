"""Whose code runs: a crash while PyTorch computes what results are held against, or makes operands,
is PyTorch's."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

_flag = mmap.mmap(-1, 1)  # shared with the process that forked this one


@contextlib.contextmanager
def calls() -> Iterator[None]:
    outer = _flag[0]
    _flag[0] = 1
    try:
        yield
    finally:
        _flag[0] = outer


def was_running() -> bool:
    """After the child's end."""
    running = _flag[0] == 1
    _flag[0] = 0
    return running
