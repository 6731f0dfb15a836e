"""python -m benchmarks.memory: temporary memory of one layer on ever larger images.

The layer is 64 -> 64 channels, 3 x 3, padding 1, batch 1, float32. Measured is what a process's
resident memory rises by during a call, less the results. Each figure comes from a process of its
own, in which a tiny call has loaded the code and started the threads, and in which malloc gives
freed blocks back at once. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor

import conv2d_ext
from benchmarks import machine
from benchmarks.results import ATEN, ATEN_LAST, OURS, OURS_LAST, PYTHON
from conv2d_ext import reference

CHANNELS = 64
SIZES = (64, 128, 256, 512, 1024)
TINY = 8
FORWARD, TRAINING = "forward", "forward+backward"
DIRECTIONS = (FORWARD, TRAINING)
THREADS = 2
_LAST = torch.channels_last
CONTESTANTS: dict[str, tuple[Callable[..., Tensor], torch.memory_format]] = {
    PYTHON: (reference.conv2d, torch.contiguous_format),
    ATEN: (F.conv2d, torch.contiguous_format),
    ATEN_LAST: (F.conv2d, _LAST),
    OURS: (conv2d_ext.conv2d, torch.contiguous_format),
    OURS_LAST: (conv2d_ext.conv2d, _LAST),
}
# Of glibc: freed blocks go back to the system, so that no call lives on an earlier one's memory.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


def resident_bytes(field: str) -> int:
    """VmRSS, or VmHWM, the peak."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def make_call(contestant: str, direction: str, size: int) -> Callable[[], tuple[Tensor, ...]]:
    function, memory_format = CONTESTANTS[contestant]
    input, grad_output = (
        torch.ones(1, CHANNELS, size, size).contiguous(memory_format=memory_format)
        for _ in range(2)
    )
    weight = torch.ones(CHANNELS, CHANNELS, 3, 3).contiguous(memory_format=memory_format)
    bias = torch.ones(CHANNELS)
    if direction == FORWARD:
        return lambda: (function(input, weight, bias, padding=1),)
    leaves = [tensor.requires_grad_() for tensor in (input, weight, bias)]

    def step() -> tuple[Tensor, ...]:
        output = function(*leaves, padding=1)
        return (output.detach(), *torch.autograd.grad(output, leaves, grad_output))

    return step


def extra_bytes(contestant: str, direction: str, size: int) -> int:
    """What a call needs beyond its results, in this process."""
    torch.set_num_threads(THREADS)
    make_call(contestant, direction, TINY)()
    call = make_call(contestant, direction, size)
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the present
    before = resident_bytes("VmHWM")
    results = call()
    peak = resident_bytes("VmHWM")
    return peak - before - sum(result.untyped_storage().nbytes() for result in results)


def measure_in_a_process(contestant: str, direction: str, size: int) -> int:
    command = [sys.executable, "-m", "benchmarks.memory"]
    command += ["--case", contestant, direction, str(size)]
    environment = {**os.environ, **_ENVIRONMENT}
    return int(subprocess.check_output(command, env=environment, text=True))


def measure_all(sizes: Sequence[int] = SIZES, console: Console | None = None) -> dict[str, object]:
    """A document for JSON: the machine, and bytes by direction, contestant and size."""
    cases = [(d, c, s) for d in DIRECTIONS for c in CONTESTANTS for s in sizes]
    shown = track(
        cases, description="memory", transient=True, console=console or Console(stderr=True)
    )
    found: dict[str, dict[str, dict[str, int]]] = {}
    for direction, contestant, size in shown:
        figures = found.setdefault(direction, {}).setdefault(contestant, {})
        figures[str(size)] = measure_in_a_process(contestant, direction, size)
    return {
        "machine": {
            **machine.describe(freed_memory_is_kept=False),
            "command": ["python", "-m", "benchmarks.memory", *sys.argv[1:]],
        },
        "layer": f"{CHANNELS} to {CHANNELS} channels, 3 x 3, padding 1, batch 1, float32",
        "threads": THREADS,
        "bytes": found,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the figures")
    # One figure, in this process: what measure_in_a_process starts.
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if not Path("/proc/self/clear_refs").exists():
        parser.error("measures through Linux's /proc")
    if arguments.case:
        contestant, direction, size = arguments.case
        print(extra_bytes(contestant, direction, int(size)))
        return 0
    document = measure_all(arguments.sizes)
    for direction, contestants in document["bytes"].items():
        for contestant, figures in contestants.items():
            text = ", ".join(f"{size}: {bytes / 2**20:.1f}" for size, bytes in figures.items())
            print(f"{direction}, {contestant}, MiB by image size: {text}")
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
