"""python -m benchmarks.winograd: allow_winograd beside conv2d_ext without it and F.conv2d.

The 3x3 layers of VGG-16 and ResNet with at least 64 channels, on maps of 14x14 and larger, and
ResNet-18 and VGG-16 whole. Prints the ratio of the medians of interleaved rounds (above 1 Winograd
is faster), their geometric means, and both errors against float64 relative to F.conv2d's.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import conv2d_ext
from benchmarks.layers import FORMATS
from benchmarks.machine import cpu_name
from benchmarks.measure import Call, Clock, Plan, measure
from benchmarks.results import geomean
from conv2d_ext.testing import (
    Problem,
    Tensors,
    aten_results,
    float64_oracle,
    library_results,
    make_tensors,
)

# (channels, result channels, side), and of how many images.
SIZES = (
    (64, 64, 224), (64, 128, 112), (128, 128, 112), (128, 256, 56), (256, 256, 56), (256, 512, 28),
    (512, 512, 28), (512, 512, 14), (64, 64, 56), (128, 128, 28), (256, 256, 14),
)  # fmt: skip
SMALLER = ((512, 512, 7),)
PEERS = ("direct", "F.conv2d")


def with_winograd(call: Call) -> Call:
    def run() -> object:
        with conv2d_ext.allow_winograd(True):
            return call()

    return run


def layer_calls(
    problem: Problem, memory_format: torch.memory_format, direction: str
) -> dict[str, Call]:
    input, weight, bias, grad_output = make_tensors(problem, memory_format=memory_format)

    def of(convolution: Call) -> Call:
        if direction == "forward":
            return partial(convolution, input, weight, bias, padding=1)
        leaf = input.detach().requires_grad_()
        output = convolution(leaf, weight, bias, padding=1)
        return lambda: torch.autograd.grad(output, leaf, grad_output, retain_graph=True)

    with conv2d_ext.allow_winograd(True):
        ours = of(conv2d_ext.conv2d)
    return {
        "Winograd": with_winograd(ours) if direction == "forward" else ours,
        "direct": of(conv2d_ext.conv2d),
        "F.conv2d": of(F.conv2d),
    }


def model_calls(name: str, memory_format: torch.memory_format, batch: int) -> dict[str, Call]:
    import torchvision

    torch.manual_seed(0)
    plain = getattr(torchvision.models, name)(weights=None).eval().to(memory_format=memory_format)
    ours = conv2d_ext.convert(copy.deepcopy(plain))
    images = torch.randn(batch, 3, 224, 224).contiguous(memory_format=memory_format)

    def of(model: torch.nn.Module) -> Call:
        return torch.no_grad()(partial(model, images))

    return {"Winograd": with_winograd(of(ours)), "direct": of(ours), "F.conv2d": of(plain)}


def ratios(calls: dict[str, Call], threads: int, seconds: float, clock: Clock) -> dict[str, float]:
    """How many times a peer's time is Winograd's."""
    torch.set_num_threads(threads)
    timings = measure(calls, Plan(budget_s=seconds, fewest_rounds=7, round_s=5e-3), clock)
    median = {name: statistics.median(timing.rounds_s) for name, timing in timings.items()}
    return {peer: median[peer] / median["Winograd"] for peer in PEERS}


def errors(problem: Problem) -> dict[str, float]:
    """Winograd's errors of output and grad_input against float64, as shares of F.conv2d's."""
    tensors: Tensors = make_tensors(problem)
    with conv2d_ext.allow_winograd(True):
        ours = library_results(problem, tensors)
    aten, exact = aten_results(problem, tensors), float64_oracle(problem, tensors)
    found = {}
    for name in ("output", "grad_input"):
        a, b, oracle = (getattr(results, name) for results in (ours, aten, exact))
        found[f"{name} L2"] = oracle.relative_l2(a) / oracle.relative_l2(b)
        found[f"{name} largest"] = oracle.max_scaled_error(a) / oracle.max_scaled_error(b)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.winograd", description=__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    directions = ["forward", "grad_input"]
    parser.add_argument("--directions", nargs="+", choices=directions, default=directions)
    parser.add_argument("--models", nargs="*", default=["resnet18", "vgg16"])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each case")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of the calling thread: on a machine that is shared"
    )
    parser.add_argument("--errors", action="store_true", help="measure errors instead of time")
    parser.add_argument("--output", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    if arguments.cpu_time and set(arguments.threads) != {1}:
        parser.error("--cpu-time is for one thread: --threads 1")
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    print(f"{cpu_name()}, {conv2d_ext.build_config()['isa']}, torch {torch.__version__}")
    rows = []

    def problem_of(channels: int, result_channels: int, side: int) -> Problem:
        name = f"{channels}@{side}-{result_channels}"
        return Problem(
            name, arguments.batch, channels, (side, side), result_channels, (3, 3), padding=(1, 1)
        )

    def add(name: str, kind: str, values: dict[str, float]) -> None:
        rows.append({"case": name, "kind": kind, **values})
        print(
            f"{name:14} {kind:34}",
            *(f"{key} {value:5.2f}  " for key, value in values.items()),
            flush=True,
        )

    for size in SIZES + SMALLER:
        problem = problem_of(*size)
        if arguments.errors:
            add(problem.name, "errors", errors(problem))
            continue
        for layout in arguments.formats:
            for direction in arguments.directions:
                calls = layer_calls(problem, FORMATS[layout], direction)
                for threads in dict.fromkeys(arguments.threads):
                    kind = f"{direction} {layout} {threads} threads"
                    found = ratios(calls, threads, arguments.seconds, clock)
                    add(problem.name, kind + (" (smaller)" if size in SMALLER else ""), found)
    for name in () if arguments.errors else arguments.models:
        for layout in arguments.formats:
            calls = model_calls(name, FORMATS[layout], arguments.batch)
            for threads in dict.fromkeys(arguments.threads):
                add(
                    name,
                    f"model {layout} {threads} threads",
                    ratios(calls, threads, arguments.seconds * 3, clock),
                )
    for kind in dict.fromkeys(row["kind"] for row in rows):
        same = [row for row in rows if row["kind"] == kind]
        keys = [key for key in same[0] if key not in ("case", "kind")]
        add("geometric mean", kind, {key: geomean([row[key] for row in same]) for key in keys})
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
