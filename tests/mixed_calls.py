"""A program: what the process's resident memory grows by, in bytes, over calls of every kind.

Prints JSON. The calls are small, so that 10,000 take seconds, and a leak of a KiB in each shows;
the thread count changes between them, and some raise. test_surroundings.py runs it, with threads
that sleep while they wait: on a busy machine they would take each other's time.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import sys
from collections.abc import Callable

import pytest
import torch
from golden import run
from peak_memory import _memory

import conv2d_ext
from conv2d_ext import testing
from conv2d_ext.testing import VIEWS, Problem, library_results, make_tensors

ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
CALLS = 10_000
THREADS = 40
PROBLEMS = (
    *testing.ASYMMETRIC,
    *testing.DEPTHWISE,
    testing.EDGE[1],
    testing.ONE_PIXEL[1],
    testing.PATCH_LAYERS[1],
    Problem("several work items", 2, 16, (20, 21), 16, (3, 3)),
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
WORKSPACE = Problem("workspace", 2, 64, (40, 40), 64, (3, 3), padding=(1, 1))


def calls() -> list[Callable[[], object]]:
    found: list[Callable[[], object]] = []
    for problem, dtype in itertools.product(PROBLEMS, DTYPES):
        tensors = make_tensors(problem, dtype)
        found.append(lambda p=problem, t=tensors: library_results(p, t))
        found.append(lambda p=problem, t=tensors: run(p, t, torch.channels_last))
        sliced = tensors._replace(input=VIEWS["sliced"](tensors.input))
        found.append(lambda p=problem, t=sliced: testing.library_forward(p, t))
    input, weight = torch.randn(2, 3, 8, 9), torch.randn(4, 3, 3, 3)
    leaf = weight.clone().requires_grad_()
    layer = conv2d_ext.Conv2d(3, 4, 3, padding_mode="circular", padding=1)

    def second_derivative() -> None:
        output = conv2d_ext.conv2d(input, leaf, padding="same")
        (gradient,) = torch.autograd.grad(output.square().sum(), leaf, create_graph=True)
        torch.autograd.grad(gradient.sum(), leaf)

    def refused() -> None:
        with pytest.raises(RuntimeError):
            conv2d_ext.conv2d(input, weight, groups=2)
        with pytest.raises(TypeError):
            conv2d_ext.conv2d(input, "weight")

    def failed_backward() -> None:
        output = conv2d_ext.conv2d(input, leaf)
        with pytest.raises(RuntimeError):
            output.backward(torch.ones(1))

    found += [
        second_derivative,
        refused,
        failed_backward,
        lambda: layer(input),
        lambda: conv2d_ext.explain(input, weight),
        lambda: conv2d_ext.forward(input, weight.transpose(0, 1), None),
        lambda: conv2d_ext.conv2d(torch.empty(0, 3, 8, 9), weight),
        lambda: torch.func.jvp(
            lambda w: conv2d_ext.conv2d(input, w), (weight,), (torch.ones_like(weight),)
        ),
        lambda: torch.vmap(lambda image: conv2d_ext.conv2d(image, weight))(input),
        lambda: torch.func.grad(lambda w: conv2d_ext.conv2d(input, w).sum())(weight),
    ]
    return found


def mixed(count: int) -> None:
    for number, call in zip(range(count), itertools.cycle(calls())):
        if number % 50 == 0:
            torch.set_num_threads(1 + number // 50 % 3)
        call()


def short_threads(count: int) -> None:
    """Threads that call once, each with workers and workspaces of its own."""
    tensors = make_tensors(WORKSPACE)
    for _ in range(count):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(testing.library_forward, WORKSPACE, tensors).result()


def growth(function: Callable[[int], None], warm_up: int, count: int) -> int:
    function(warm_up)
    before = _memory("VmRSS")
    function(count)
    return _memory("VmRSS") - before


if __name__ == "__main__":
    found = {"mixed calls": growth(mixed, 1000, CALLS)}
    torch.set_num_threads(2)
    # The C library keeps the blocks of ended threads in some 16 arenas.
    found["short threads"] = growth(short_threads, 2 * THREADS, THREADS)
    json.dump(found, sys.stdout)
