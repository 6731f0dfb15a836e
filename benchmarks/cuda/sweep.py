"""python -m benchmarks.cuda.sweep: every kernel and split that a call could take, timed.

For some twenty layers, in each precision and direction: the planner's own choice, and each other
one, wanted by force; the weight read where it lies, and packed. So the planner can be calibrated,
whose estimate of each stands beside its time; and each must have the bits of the planner's own
choice.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cuda import cases, device
from benchmarks.cuda.cases import BFLOAT16, CHANNELS_LAST, CONTESTANTS, FLOAT32, NCHW, OURS, TF32
from benchmarks.cuda.children import WORKER, Children, Lost, Refused
from benchmarks.cuda.journal import Journal
from benchmarks.cuda.measure import CpuInItsPlace, Figures, Gpu, Plan
from benchmarks.cuda.text import Table
from benchmarks.results import geomean
from conv2d_ext import _C
from conv2d_ext.testing import POST, Problem, real_layer

# Few and many tiles, short and long sums, few channels; those of the direct kernels have no choice.
LAYERS = (
    POST,
    *(
        real_layer(name).with_batch(batch)
        for name, batches in (
            ("resnet50 3@224-64/k7s2p3", (1, 8)),
            ("resnet50 64@56-64/k3p1", (1, 8, 64)),
            ("resnet50 64@56-256", (1, 8)),
            ("resnet50 512@28-1024/s2", (8,)),
            ("resnet50 256@14-256/k3p1", (1, 8, 64)),
            ("resnet50 1024@14-256", (1, 8)),
            ("resnet50 512@7-512/k3p1", (1, 8, 64)),
            ("resnet50 512@7-2048", (8,)),
            ("vgg16 128@112-128/k3p1", (1,)),
            ("mobilenet_v3_large 40@28-240", (8,)),
        )
        for batch in batches
    ),
)
# float16 has bfloat16's kernels.
PRECISIONS = ((TF32, NCHW), (BFLOAT16, CHANNELS_LAST), (FLOAT32, NCHW), (BFLOAT16, NCHW))
TIMES = Plan(replay_s=3e-4, most_calls=20, rounds=5, profiled_calls=0)
# What explain says of a choice and the planner compares it by.
PLANNED = (
    "kernel", "split", "packed", "ctas", "threads", "tile_m", "tile_n", "tile_k", "k_segments",
    "shared_bytes", "workspace_bytes", "gemm_m", "gemm_n", "gemm_k", "estimated_cycles",
)  # fmt: skip


def plan() -> list[cases.Case]:
    """All cases; shuffled, always in the same way, so that what there is time for is a sample."""
    chosen = [
        cases.Case("sweep", layer, precision, layout, direction, (OURS,), False)
        for (precision, layout), layer, direction in itertools.product(
            PRECISIONS, LAYERS, cases.DIRECTIONS
        )
    ]
    random.Random(0).shuffle(chosen)
    return chosen


# ---- in the child


def measure_variants(number: int) -> list[dict]:
    """Of plan()[number], a record for each choice; the planner's own first, wanted by nobody."""
    case = plan()[number]
    tensors = cases.draw(case, device.current())
    with CONTESTANTS[OURS].settings(case.precision):
        kernels = _C.cuda_kernels(tensors.input, case.precision.tf32)
        choices: dict[tuple[int, ...], dict] = {(-1, -1, -1): _planned(case, tensors)}
        for choice in itertools.product(range(len(kernels)), (0, 1), (0, 1)):
            with _wanting(choice):
                planned = _planned(case, tensors)
            if planned["wanted"] == "taken":
                choices[choice] = planned
        call = CONTESTANTS[OURS].make_call(case.problem, tensors, case.direction)
        own = call()
        records = []
        for choice, planned in choices.items():
            with _wanting(choice):
                same = _same_bits(call(), own)
            record = {"wanted": list(choice), **{name: planned[name] for name in PLANNED}}
            records.append({**record, "same_bits": same})
        figures = {str(choice): Figures() for choice in choices}
        settings = {str(choice): functools.partial(_wanting, choice) for choice in choices}
        _timer().measure(dict.fromkeys(figures, call), settings, figures, TIMES, False)
    for record, found in zip(records, figures.values(), strict=True):
        record["graph_s"] = found.graph_s
        record["median_s"] = statistics.median(found.graph_s)
    return records


@functools.cache
def _timer() -> Gpu | CpuInItsPlace:
    return Gpu() if device.IS_GPU else CpuInItsPlace()


@contextlib.contextmanager
def _wanting(choice: tuple[int, ...]) -> Iterator[None]:
    _C.want_on_cuda(*choice)
    try:
        yield
    finally:
        _C.want_on_cuda()


def _planned(case: cases.Case, tensors) -> dict:
    gpu = None if device.IS_GPU else device.STAND_IN
    arguments = case.problem.op_args()
    described = _C.explain(tensors.input, tensors.weight, tensors.bias, *arguments, gpu=gpu)
    return described[case.direction]


def _same_bits(found: Tensor, expected: Tensor) -> bool:
    integers = {2: torch.int16, 4: torch.int32}[found.element_size()]
    return torch.equal(found.view(integers), expected.view(integers))


# ---- in the parent


def main(argv: Sequence[str] | None = None, command: Sequence[str] = WORKER) -> int:
    """Exit status: 0, or 1 where a case failed or a choice had other bits."""
    arguments = _parse(argv)
    reason = device.why_not()
    if reason is None and not hasattr(_C, "cuda_kernels"):
        reason = "this build of conv2d_ext has no CUDA code"
    if reason:
        print(f"Nothing was measured: {reason}")
        return 0
    end = time.monotonic() + arguments.budget
    journal = Journal(arguments.output / "sweep.jsonl", "sweep", budget=arguments.budget)
    records = []
    left_out = 0
    with Children(command) as children:
        for number, case in enumerate(plan()):
            if not re.search(arguments.filter, str(case)):
                continue
            if time.monotonic() + 2 > end:
                left_out += 1
                continue
            record = {
                "case": str(case), "problem": _sizes(case.problem), "layout": case.layout,
                "precision": case.precision.name, "direction": case.direction, "failed": "",
            }  # fmt: skip
            try:
                limit = min(arguments.case_limit, max(2.0, end - time.monotonic()))
                record["choices"] = children.ask({"do": "sweep", "number": number}, limit)
            except (Lost, Refused) as problem:
                record |= {"failed": str(problem), "choices": []}
                print(f"FAILED: {case}: {problem}", flush=True)
            for choice in record["choices"]:
                if not choice["same_bits"]:
                    what = f"{choice['kernel']}, split {choice['split']}, packed {choice['packed']}"
                    print(f"OTHER BITS: {case}: {what}", flush=True)
            journal.write(record)
            records.append(record)
    journal.close()
    _print_summary(records)
    if left_out:
        print(f"Left out: {left_out} cases: no time left of {arguments.budget:g} s")
    print(f"Written: {arguments.output / 'sweep.jsonl'}")
    fine = all(
        not record["failed"] and all(choice["same_bits"] for choice in record["choices"])
        for record in records
    )
    return int(not fine)


def _sizes(problem: Problem) -> dict:
    return {
        "name": problem.name,
        "input": problem.input_shape,
        "weight": problem.weight_shape,
        "stride": problem.stride,
        "padding": problem.padding4,
    }


def _print_summary(records: Sequence[dict]) -> None:
    table = Table(
        "sweep: the planner's choice over the best one (1 is best), graph times",
        "", ">cases", ">geometric mean", ">best chosen", ">worst", "where, and what was better",
    )  # fmt: skip
    groups: dict[str, list[tuple[float, str, str]]] = {}
    for record in records:
        own, *others = record["choices"] or [None]
        if not others:
            continue
        best = min(others, key=lambda choice: choice["median_s"])
        ratio = max(1.0, own["median_s"] / best["median_s"])
        key = f"{record['precision']} {record['layout']} {record['direction']}"
        better = best["kernel"] + "".join(f" {how}" for how in ("split", "packed") if best[how])
        groups.setdefault(key, []).append((ratio, record["problem"]["name"], better))
    for key, found in sorted(groups.items()):
        ratios = [ratio for ratio, _, _ in found]
        worst, where, better = max(found)
        chosen = sum(ratio < 1.02 for ratio in ratios)
        numbers = (str(len(found)), f"{geomean(ratios):.3f}", str(chosen), f"{worst:.2f}")
        table.add(key, *numbers, f"{where}: {better}")
    print(table)
    choices = sum(len(record["choices"]) for record in records)
    print(f"{len(records)} cases, {choices} choices timed, their bits compared")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda.sweep", description=__doc__)
    parser.add_argument("--budget", type=float, default=180.0, metavar="S", help="(%(default)s)")
    parser.add_argument("--case-limit", type=float, default=20.0, metavar="S", help="(%(default)s)")
    parser.add_argument("--filter", default="", metavar="REGEX", help="of the cases' names")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), metavar="FOLDER")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
