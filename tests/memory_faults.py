"""A program: calls that run out of memory, at their result and at each thread's workspace.

The address space is limited to what the process has and some more, step by step, until a call
succeeds. Prints JSON: for each call what it raised, and what it left behind. It must run in a
process of its own with ENVIRONMENT, where the C library takes every block of memory from the system
and gives it back, so that none of an earlier call serves a later one. test_surroundings.py runs it.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import resource
import sys
import time
from collections.abc import Callable

import torch
from isa_bits import bits

import conv2d_ext
from conv2d_ext.testing import Problem, library_results, make_tensors

ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "32768",
    "MALLOC_TRIM_THRESHOLD_": "0",
    # Python's own allocator would take a MiB at a time, whenever it happens to be full.
    "PYTHONMALLOC": "malloc",
}
THREADS = 2
STEP = 32 * 1024

# Work for several threads, with results and workspaces of some hundred KiB.
LARGE = Problem("large", 2, 96, (34, 34), 128, (3, 3), padding=(1, 1))
SMALL = Problem("small", 2, 4, (30, 30), 8, (3, 3))


def address_space() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


class Limited:
    """Within, the address space may grow by ``extra`` bytes."""

    def __init__(self, extra: int):
        self.extra = extra

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + self.extra, self.before[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_AS, self.before)


def outcome(call: Callable[[], torch.Tensor], extra: int) -> torch.Tensor | Exception:
    with Limited(extra):
        try:
            return call()
        except Exception as error:
            return error


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(bits(ours), bits(theirs))


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def starved(call: Callable[[], torch.Tensor], expected: torch.Tensor) -> dict[str, object]:
    """A call with ever more memory until it succeeds, and small calls between, which must be right.

    In a thread that has not called before, whose workers have little workspace yet.
    """
    small = Small()
    room = expected.untyped_storage().nbytes() + 2 * STEP
    before = address_space()
    found = [outcome(call, room) for _ in range(100)]
    failures = sum(isinstance(one, Exception) for one in found)
    del found
    kept = address_space() - before
    raised: list[str] = []
    found = outcome(call, 0)
    while isinstance(found, Exception):
        raised.append(describe(found))
        small.call()
        found = outcome(call, len(raised) * STEP)
    right = same(found, expected) and same(call(), expected)
    return {
        "raised": raised,
        "wrong": small.wrong + (not right),
        "failures": failures,
        "kept": kept,
    }


def starved_worker(call: Callable[[], torch.Tensor], expected: torch.Tensor) -> dict[str, object]:
    """The caller has its workspace and there is room for the result: others' workspace lacks it."""
    small = Small()
    torch.set_num_threads(1)
    call()
    torch.set_num_threads(THREADS)
    room = expected.untyped_storage().nbytes() + 4 * STEP
    raised: list[str] = []
    wrong = 0
    # On a busy machine the caller may compute all items before a worker asks for one.
    for _ in range(200):
        found = outcome(call, room)
        if isinstance(found, Exception):
            raised.append(describe(found))
            break
        wrong += not same(found, expected)
    small.call()
    return {"raised": raised, "wrong": wrong + small.wrong + (not same(call(), expected))}


class Small:
    """Calls that make all threads run, with little workspace."""

    def __init__(self):
        self.tensors = make_tensors(SMALL)
        self.wrong = 0
        self.output = library_results(SMALL, self.tensors).output

    def call(self) -> None:
        self.wrong += not same(library_results(SMALL, self.tensors).output, self.output)


def in_a_thread(function: Callable[..., object], *arguments: object) -> object:
    """Its workspace, and that of its OpenMP workers, ends with it.

    The workers end some time after it: one that gave its memory back during the next call would
    give that call more room than it is meant to have.
    """
    before = threads_alive()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        result = pool.submit(function, *arguments).result()
    deadline = time.monotonic() + 60
    while threads_alive() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    return result


def threads_alive() -> int:
    return len(os.listdir("/proc/self/task"))


def alone(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch.set_num_threads(1)
    result = call()
    torch.set_num_threads(THREADS)
    return result


def calls() -> dict[str, Callable[[], torch.Tensor]]:
    tensors = make_tensors(LARGE)
    input, weight, bias, grad_output = tensors
    args = LARGE.op_args()
    ops = torch.ops.conv2d_ext
    leaf = input.clone().requires_grad_()
    output = conv2d_ext.conv2d(leaf, weight, bias, padding=1)
    layer = conv2d_ext.Conv2d(96, 128, 3, padding=1).requires_grad_(False)
    return {
        "conv2d": lambda: conv2d_ext.conv2d(input, weight, bias, padding=1),
        "forward": lambda: ops.conv2d(input, weight, bias, *args),
        "grad_input": lambda: ops.conv2d_grad_input(
            grad_output, weight, list(input.shape), *args, False
        ),
        "grad_weight": lambda: ops.conv2d_grad_weight(
            grad_output, input, list(weight.shape), list(weight.stride()), *args
        ),
        "backward": lambda: torch.autograd.grad(output, leaf, grad_output, retain_graph=True)[0],
        "Conv2d": lambda: layer(input),
    }


def main() -> None:
    torch.set_num_threads(THREADS)
    found = {}
    for name, call in calls().items():
        expected = in_a_thread(alone, call)
        found[name] = in_a_thread(starved, call, expected)
        found[f"{name}, workers"] = in_a_thread(starved_worker, call, expected)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
