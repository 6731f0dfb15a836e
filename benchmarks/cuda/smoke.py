"""python -m benchmarks.cuda.smoke: does each kind of call compute anything, and the right thing?

A process of its own for each dtype, direction and format, several at a time, so that one fault
costs one case. Results are compared with F.conv2d's in float64 on the CPU, and made twice, for
their bits.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cuda import device
from benchmarks.cuda.cases import DIRECTIONS, FORMATS
from benchmarks.cuda.children import START_S, WORKER, Child, Lost, Refused
from benchmarks.cuda.journal import Journal
from benchmarks.cuda.text import Table
from conv2d_ext import testing
from conv2d_ext.testing import Oracle, Problem, Tensors, float64_oracle, make_tensors, real_layer

GRAD_BIAS = "grad_bias"
MATMUL = "matmul"  # the GEMM of each problem, as matrices
# The largest error allowed, over the sum of the absolute values of an element's products.
BOUNDS = {
    "float32": 4e-6,
    "TF32": 2e-3,
    "float64": 1e-14,
    "bfloat16": 2.0**-7,
    "float16": 2.0**-10,
    "complex64": 8e-6,
    "complex128": 2e-14,
}
# Every hyper-parameter; tails; rows of 16 bytes; sums that are cut; depthwise; few channels; pixels
# in segments.
PROBLEMS = (
    testing.ASYMMETRIC[0],
    Problem("tails", 2, 19, (7, 9), 35, (3, 3), padding=(1, 1)),
    Problem("vectors", 2, 32, (8, 8), 40, (3, 3), (2, 2), (1, 1)),
    real_layer("resnet50 512@7-512/k3p1"),
    testing.DEPTHWISE[1],
    Problem("few channels", 1, 3, (9, 11), 2, (3, 2), padding=(1, 0)),
    Problem("many pixels", 1, 3, (70, 70), 33, (3, 3), padding=(1, 1)),
    Problem("many tiles", 4, 64, (40, 40), 130, (3, 3), padding=(1, 1)),
)


@dataclasses.dataclass(frozen=True)
class Case:
    math: str  # a key of BOUNDS
    direction: str
    layout: str

    def __str__(self) -> str:
        return f"{self.math}, {self.direction}, {self.layout}"


def cases() -> Iterator[Case]:
    """The most telling first."""
    for layout in FORMATS:
        for direction in (*DIRECTIONS, GRAD_BIAS, MATMUL):
            for math in BOUNDS:
                if (direction, math) != (GRAD_BIAS, "TF32"):  # which is float32's
                    yield Case(math, direction, layout)


# ---- in the child


def check(math: str, direction: str, layout: str) -> list[dict]:
    """For each problem its error, or what is wrong with it. A CUDA error is raised."""
    dtype = torch.float32 if math == "TF32" else getattr(torch, math)
    found = []
    torch.set_num_threads(2)  # other cases run beside this one
    with _allowing_tf32(math == "TF32"):
        for problem in PROBLEMS:
            if direction != GRAD_BIAS or problem.bias:
                found.append(_check_problem(problem, dtype, direction, layout, BOUNDS[math]))
    return found


@contextlib.contextmanager
def _allowing_tf32(allow: bool) -> Iterator[None]:
    """In convolutions and matrix products."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = allow
    try:
        with torch.backends.cudnn.flags(allow_tf32=allow):
            yield
    finally:
        matmul.allow_tf32 = before


def _check_problem(
    problem: Problem, dtype: torch.dtype, direction: str, layout: str, bound: float
) -> dict:
    start = time.monotonic()
    if direction == MATMUL:
        tensors, oracle = _product(problem, dtype, layout)
    else:
        tensors = make_tensors(problem, dtype)
        oracle = getattr(
            float64_oracle(problem, tensors), "output" if direction == "forward" else direction
        )
    there = Tensors(*(t if t is None else _laid_out(t.to(device.NAME), layout) for t in tensors))
    call = _call(problem, there, direction, layout)
    results = [call() for _ in range(2)]
    device.synchronize()
    first, second = (result.cpu() for result in results)
    error = oracle.max_scaled_error(first)
    wrong = ""
    if not error <= bound:  # which is also true of NaN
        wrong = f"error {error:.2g} where {bound:.2g} is allowed"
    elif not torch.equal(_bytes(first), _bytes(second)):
        wrong = "other bits the second time"
    seconds = time.monotonic() - start
    return {"problem": str(problem), "error": error, "wrong": wrong, "seconds": seconds}


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    return tensor.contiguous(memory_format=FORMATS[layout]) if tensor.dim() == 4 else tensor


def _product(problem: Problem, dtype: torch.dtype, layout: str) -> tuple[Tensors, Oracle]:
    """(pixels, K) times (K, channels), and a bias; by columns where images are channels_last."""
    m, n, k = problem.gemm_mnk
    generator = torch.Generator().manual_seed(0)
    wide = torch.complex128 if dtype.is_complex else torch.float64

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=wide, generator=generator).to(dtype)

    first, second, bias = draw(n, k), draw(k, m), draw(m)
    if layout == "channels_last":
        first, second = first.t().contiguous().t(), second.t().contiguous().t()
    a, b, c = first.to(wide), second.to(wide), bias.to(wide)
    return Tensors(first, second, bias, None), Oracle(a @ b + c, None, a.abs() @ b.abs() + c.abs())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _call(problem: Problem, tensors: Tensors, direction: str, layout: str) -> Callable[[], Tensor]:
    input, weight, bias, grad_output = tensors
    arguments = problem.op_args()
    ops = torch.ops.conv2d_ext
    if direction == "forward":
        return lambda: ops.conv2d(input, weight, bias, *arguments)
    if direction == "grad_input":
        last = layout == "channels_last"
        size = list(input.shape)
        return lambda: ops.conv2d_grad_input(grad_output, weight, size, *arguments, last)
    if direction == "grad_weight":
        size, stride = list(weight.shape), list(weight.stride())
        return lambda: ops.conv2d_grad_weight(grad_output, input, size, stride, *arguments)
    if direction == MATMUL:
        return lambda: ops.matmul(input, weight, bias)
    return lambda: ops.conv2d_grad_bias(grad_output)


# ---- in the parent


def run_case(case: Case, limit_s: float, left_s: float, command: Sequence[str]) -> dict:
    """What became of it: passed, wrong, refused (an error that the GPU survived), or lost."""
    start = time.monotonic()
    record = {**dataclasses.asdict(case), "status": "passed", "reason": "", "problems": []}
    try:
        child = Child(command, min(START_S, left_s))
        try:
            left_s -= time.monotonic() - start
            request = {"do": "smoke", **dataclasses.asdict(case)}
            record["problems"] = child.ask(request, min(limit_s, max(1.0, left_s)))
        finally:
            child.end()
    except (Lost, Refused) as problem:
        record |= {"status": type(problem).__name__.lower(), "reason": str(problem)}
    wrong = [f"{p['problem']}: {p['wrong']}" for p in record["problems"] if p["wrong"]]
    if wrong:
        record |= {"status": "wrong", "reason": "; ".join(wrong)}
    return {**record, "seconds": round(time.monotonic() - start, 3)}


def main(argv: Sequence[str] | None = None, command: Sequence[str] = WORKER) -> int:
    """Exit status: 0, or 1 where a case did not pass."""
    arguments = _parse(argv)
    reason = device.why_not()
    if reason:
        print(f"Nothing was checked: {reason}")
        return 0
    deadline = time.monotonic() + arguments.budget
    journal = Journal(arguments.output / "smoke.jsonl", "smoke", budget=arguments.budget)
    chosen = [case for case in cases() if re.search(arguments.filter, str(case))]
    records = []

    def run(case: Case) -> dict:
        left = deadline - time.monotonic()
        if left < 5:
            record = dataclasses.asdict(case)
            return {**record, "status": "not begun", "reason": "no time left", "problems": []}
        return run_case(case, arguments.limit, left, command)

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for record in pool.map(run, chosen):
            journal.write(record)
            records.append(record)
            if record["status"] != "passed":
                case = f"{record['math']}, {record['direction']}, {record['layout']}"
                print(f"{record['status'].upper()}: {case}: {record['reason']}", flush=True)
    journal.close()
    _print_summary(records)
    print(f"Written: {arguments.output / 'smoke.jsonl'}")
    return int(any(record["status"] != "passed" for record in records))


def _print_summary(records: Sequence[dict]) -> None:
    columns = [(d, layout) for d in (*DIRECTIONS, GRAD_BIAS, MATMUL) for layout in FORMATS]
    headings = [f"{direction} {layout}" for direction, layout in columns]
    table = Table("smoke: the largest error, over the sum of absolute products", "", *headings)
    for math in BOUNDS:
        cells = []
        for direction, layout in columns:
            cell = ""
            for record in records:
                if (record["math"], record["direction"], record["layout"]) == (
                    math, direction, layout,
                ):  # fmt: skip
                    errors = [problem["error"] for problem in record["problems"]]
                    passed = record["status"] == "passed"
                    cell = f"{max(errors):.1e}" if passed and errors else record["status"].upper()
            cells.append(cell)
        table.add(math, *cells)
    print(table)
    counts = Counter(record["status"] for record in records)
    print(", ".join(f"{count} {status}" for status, count in counts.items()))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda.smoke", description=__doc__)
    parser.add_argument("--budget", type=float, default=90.0, metavar="S", help="(%(default)s)")
    parser.add_argument(
        "--limit", type=float, default=40.0, metavar="S", help="for one case (%(default)s)"
    )
    jobs = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
    parser.add_argument("--jobs", type=int, default=jobs, help="processes at once (%(default)s)")
    parser.add_argument("--filter", default="", metavar="REGEX", help="of the cases' names")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), metavar="FOLDER")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
