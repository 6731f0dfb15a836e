"""python -m benchmarks.bits: in how many layers of real networks an image's bits follow what.

Each layer of the benchmark's lists, for images of 224 x 224 and of 64 x 64 pixels, is computed by
F.conv2d, by F.conv2d under torch.use_deterministic_algorithms(True), and by this library. One image
is computed alone on one thread, and then
  batch    first in larger batches, and last in the largest,
  threads  alone on 2, 3 and 4 threads,
  format   alone, with input, weight and grad_output in channels_last,
  run      alone on 4 threads, three times more.
Output, input gradient and (but for batch, over which it sums) weight gradient are compared by their
bits.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor

import conv2d_ext
from benchmarks import machine, problems
from benchmarks.layers import draw
from conv2d_ext.testing import Problem

DETERMINISTIC = "F.conv2d, deterministic"
CONTESTANTS: dict[str, Callable[..., Tensor]] = {
    "F.conv2d": F.conv2d,
    DETERMINISTIC: F.conv2d,
    "conv2d_ext": conv2d_ext.conv2d,
}
AXES = ("batch", "threads", "format", "run")
RESULTS = ("output", "grad_input", "grad_weight")
BATCHES = (2, 5)
THREADS = (2, 3, 4)
REPEATS = 3
SMALL = " of 64x64"  # so end the names of layers for small images
_IMAGES = max(BATCHES)

# For each axis the results that differed.
Finding = dict[str, list[str]]


@contextlib.contextmanager
def setting(contestant: str, threads: int) -> Iterator[None]:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(contestant == DETERMINISTIC)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])


@dataclasses.dataclass
class Layer:
    """The operands of one layer for as many different images as the largest batch has."""

    problem: Problem

    def __post_init__(self) -> None:
        one = dataclasses.replace(self.problem, batch=1)
        first = draw(one, torch.float32, torch.contiguous_format)
        generator = torch.Generator().manual_seed(0)

        def others(tensor: Tensor) -> Tensor:
            shape = (_IMAGES - 1, *tensor.shape[1:])
            return torch.cat([tensor, torch.randn(shape, generator=generator)])

        self.input, self.grad_output = others(first.input), others(first.grad_output)
        self.weight, self.bias = first.weight, first.bias

    def results(
        self,
        contestant: str,
        images: Sequence[int],
        threads: int = 1,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> dict[str, Tensor]:
        def laid_out(tensor: Tensor) -> Tensor:
            return tensor.contiguous(memory_format=memory_format).detach()

        with setting(contestant, threads):
            input = laid_out(self.input[list(images)]).requires_grad_()
            weight = laid_out(self.weight).requires_grad_()
            output = CONTESTANTS[contestant](input, weight, self.bias, **self.problem.call_args())
            grads = torch.autograd.grad(
                output, (input, weight), laid_out(self.grad_output[list(images)])
            )
        return dict(zip(RESULTS, (output.detach(), *grads), strict=True))


def measure(layer: Layer, contestant: str) -> Finding:
    """What differs for image 0, along each axis."""
    found: Finding = {axis: [] for axis in AXES}
    alone = layer.results(contestant, [0])

    def compare(
        axis: str, others: dict[str, Tensor], place: int = 0, first: dict[str, Tensor] = alone
    ) -> None:
        for name in RESULTS:
            if name == "grad_weight":
                if axis == "batch":
                    continue
                same = same_bits(others[name], first[name])
            else:
                same = same_bits(others[name][place], first[name][0])
            if not same and name not in found[axis]:
                found[axis].append(name)

    for batch in BATCHES:
        compare("batch", layer.results(contestant, range(batch)))
    moved = [*range(1, _IMAGES), 0]
    compare("batch", layer.results(contestant, moved), place=_IMAGES - 1)
    for threads in THREADS:
        on_threads = layer.results(contestant, [0], threads)
        compare("threads", on_threads)
    compare("format", layer.results(contestant, [0], memory_format=torch.channels_last))
    for _ in range(REPEATS):  # of the last one, whose threads may take turns otherwise
        compare("run", layer.results(contestant, [0], THREADS[-1]), first=on_threads)
    return found


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """float32 by bit patterns: -0 is not +0."""
    return torch.equal(ours.contiguous().view(torch.int32), theirs.contiguous().view(torch.int32))


def select_layers(pattern: str = "") -> list[Problem]:
    """The layers for large pictures, then those for small ones; a geometry is there once."""
    large = [problem for problem, _ in problems.select(problems.DEFAULT_LISTS, [1], pattern)]
    small = [
        dataclasses.replace(
            problem,
            name=f"{problem.name}{SMALL}",
            in_size=tuple(math.ceil(size * 64 / 224) for size in problem.in_size),
        )
        for problem in large
    ]
    found: dict[Problem, Problem] = {}
    for problem in [*large, *small]:
        found.setdefault(dataclasses.replace(problem, name=""), problem)
    return list(found.values())


def measure_all(pattern: str = "", console: Console | None = None) -> dict[str, object]:
    """A document for JSON: the machine, and for each layer and contestant what differs."""
    layers = select_layers(pattern)
    shown = track(
        layers, description="bits", transient=True, console=console or Console(stderr=True)
    )
    return {
        "machine": {
            **machine.describe(freed_memory_is_kept=False),
            "command": ["python", "-m", "benchmarks.bits", *sys.argv[1:]],
        },
        "axes": {"batch": BATCHES, "threads": THREADS, "run": [REPEATS, THREADS[-1]]},
        "layers": {
            problem.name: {name: measure(Layer(problem), name) for name in CONTESTANTS}
            for problem in shown
        },
    }


def count(document: dict, contestant: str, axis: str, results: Sequence[str]) -> int:
    """In how many layers one of these results differs along this axis."""
    return sum(
        any(name in layer[contestant][axis] for name in results)
        for layer in document["layers"].values()
    )


def table(document: dict) -> list[str]:
    """As Markdown: outputs and gradients that differ, counted in layers."""
    head = ["", "`F.conv2d`", "`F.conv2d`, `use_deterministic_algorithms(True)`", "conv2d_ext"]
    titles = {
        "batch": "Batch size, place in the batch",
        "threads": "Number of threads",
        "format": "Memory format",
        "run": "Run",
    }
    lines = [_line(head), "|---" * len(head) + "|"]
    for axis in AXES:
        cells = [titles[axis]]
        for name in CONTESTANTS:
            outputs = count(document, name, axis, RESULTS[:1])
            gradients = count(document, name, axis, RESULTS[1:])
            both = f"outputs {outputs}, gradients {gradients}"
            cells.append(both if outputs or gradients else "**none**")
        lines.append(_line(cells))
    return lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--filter", type=problems.regex, default="", metavar="REGEX", help="of the layers' names"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="save what was found")
    arguments = parser.parse_args(argv)
    document = measure_all(arguments.filter)
    print("\n".join(table(document)))
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
