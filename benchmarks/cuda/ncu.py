"""python -m benchmarks.cuda.ncu: what Nsight Compute counts in six kernels.

One run of ncu for each, with a limit of its own; every metric of every kernel goes to ncu.jsonl.
Where the tool is missing, or may not read the counters, it says so.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.cuda import cases, device
from benchmarks.cuda.cases import (
    BFLOAT16,
    CHANNELS_LAST,
    CONTESTANTS,
    FLOAT32,
    FORWARD,
    GRAD_INPUT,
    GRAD_WEIGHT,
    NCHW,
    OURS,
    TF32,
)
from benchmarks.cuda.journal import Journal
from benchmarks.cuda.text import Table
from conv2d_ext.testing import POST, real_layer

_DENSE = real_layer("resnet50 64@56-64/k3p1").with_batch(8)
CASES = tuple(
    cases.Case("ncu", problem, precision, layout, direction, (OURS,), False)
    for problem, precision, layout, direction in (
        (POST, FLOAT32, NCHW, FORWARD),
        (POST, TF32, NCHW, FORWARD),
        (_DENSE, BFLOAT16, CHANNELS_LAST, FORWARD),
        (_DENSE, BFLOAT16, CHANNELS_LAST, GRAD_INPUT),
        (_DENSE, BFLOAT16, CHANNELS_LAST, GRAD_WEIGHT),
        (
            real_layer("mobilenet_v3_large 120@28-120/k5p2g120").with_batch(8),
            FLOAT32, NCHW, FORWARD,
        ),
    )
)  # fmt: skip
SHOWN = {
    "us": "gpu__time_duration.sum",
    "SM %": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory %": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "warps %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}


def call(number: int) -> None:
    """In the process that ncu watches."""
    case = CASES[number]
    tensors = cases.draw(case, device.current())
    with CONTESTANTS[OURS].settings(case.precision):
        CONTESTANTS[OURS].make_call(case.problem, tensors, case.direction)()
    torch.cuda.synchronize()


def parse_metrics(text: str) -> list[dict[str, str]]:
    """Of `ncu --csv --page raw`: a row for each kernel; what is printed around the table is not
    read. The line of units becomes a part of the values."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    names, units, *rows = csv.reader(io.StringIO("\n".join(lines[start:])))
    return [
        {
            name: f"{value} {unit}".strip()
            for name, unit, value in zip(names, units, row, strict=True)
            if value
        }
        for row in rows
        if len(row) == len(names)
    ]


def profile(tool: str, number: int, limit_s: float) -> dict:
    """{"kernels": ..., "failed": ""}, or why there are none."""
    command = [
        tool, "--csv", "--page", "raw", "--set", "full", "--clock-control", "none",
        "--kernel-name-base", "mangled", "--kernel-name", "regex:conv2d_ext", "--launch-count", "2",
        sys.executable, "-m", "benchmarks.cuda.ncu", "--call", str(number),
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # ncu and what it watches end together
    )
    try:
        text, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return {"kernels": [], "failed": f"did not finish in {limit_s:g} s"}
    kernels = parse_metrics(text)
    failed = ""
    if not kernels:
        said = [line for line in text.splitlines() if line.startswith(("==ERROR==", "==WARNING=="))]
        failed = f"exit status {process.returncode}: {'; '.join(said[:3]) or text[-300:].strip()}"
    return {"kernels": kernels, "failed": failed}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, also where ncu can't be used; 1 where it failed for some cases alone."""
    arguments = _parse(argv)
    if arguments.call is not None:
        call(arguments.call)
        return 0
    tool = shutil.which("ncu", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    reason = device.why_not() or (None if tool else "ncu is not on this machine")
    if reason:
        print(f"Nothing was profiled: {reason}")
        return 0
    end = time.monotonic() + arguments.budget
    journal = Journal(arguments.output / "ncu.jsonl", "ncu", budget=arguments.budget)
    table = Table("ncu", "case", "kernel", *(f">{name}" for name in SHOWN))
    failures = 0
    for number, case in enumerate(CASES):
        left = end - time.monotonic()
        if left < 5:
            found = {"kernels": [], "failed": "no time left"}
        else:
            found = profile(tool, number, min(arguments.limit, left))
        journal.write({"case": str(case), **found})
        if found["failed"]:
            failures += 1
            print(f"FAILED: {case}: {found['failed']}", flush=True)
        for kernel in found["kernels"]:
            name = kernel.get("Kernel Name", "")[:40]
            table.add(str(case), name, *(kernel.get(metric, "") for metric in SHOWN.values()))
        if number == 0 and found["failed"]:
            print("The others are not tried: the first one says what is wrong here.")
            break
    journal.close()
    print(table)
    print(f"Written: {arguments.output / 'ncu.jsonl'}")
    return int(failures > 0)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda.ncu", description=__doc__)
    parser.add_argument("--budget", type=float, default=110.0, metavar="S", help="(%(default)s)")
    parser.add_argument(
        "--limit", type=float, default=45.0, metavar="S", help="for one kernel (%(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), metavar="FOLDER")
    parser.add_argument("--call", type=int, metavar="NUMBER", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
