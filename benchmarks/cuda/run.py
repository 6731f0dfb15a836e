"""Goes through the cases while there is time, and keeps what was found."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

import conv2d_ext
from benchmarks.cuda import cases as cases_
from benchmarks.cuda import device
from benchmarks.cuda.cases import CONTESTANTS, OURS, Case, draw, error, operand_bytes
from benchmarks.cuda.measure import CpuInItsPlace, Figures, Gpu, Plan, transforms
from benchmarks.problems import layer_class

SCHEMA = 1
FAILED = "failed"  # how the reason of a case that broke off begins
MOST_FAILURES = 8


@dataclasses.dataclass
class Result:
    """One case: what was computed, and how long each contestant took."""

    tier: str
    name: str
    layer_class: str
    batch: int
    precision: str
    layout: str
    direction: str
    flops: int
    figures: dict[str, Figures]
    left_out: dict[str, str]  # contestant: why
    wrong: str | None  # what this library computed wrongly
    explained: str  # the kernel that explain names

    @classmethod
    def of(cls, record: dict) -> Result:
        """From dataclasses.asdict, as JSON has it."""
        fields = [field.name for field in dataclasses.fields(Figures)]
        figures = {
            name: Figures(**{field: found[field] for field in fields})
            for name, found in record["figures"].items()
        }
        return cls(**{**record, "figures": figures})

    def median(self, contestant: str, what: str) -> float | None:
        figures = self.figures.get(contestant)
        return None if figures is None else figures.median(what)

    def speedup(self, over: str, what: str, of: str = OURS) -> float | None:
        """How many times as fast as `over` contestant `of` is; None where one has no figure."""
        own, other = self.median(of, what), self.median(over, what)
        return other / own if own and other else None

    def transforms(self, contestant: str) -> str | None:
        figures = self.figures.get(contestant)
        return transforms(figures.kernels) if figures else None


@dataclasses.dataclass
class Document:
    """A run, as its JSON file has it."""

    machine: dict[str, object]
    settings: dict[str, object]
    ceilings: dict[str, float]
    results: list[Result]
    left_out: dict[str, str]  # case: why
    seconds: float
    skipped: str | None = None  # why nothing was measured

    @property
    def wrong(self) -> list[Result]:
        return [result for result in self.results if result.wrong]

    @property
    def failed(self) -> list[str]:
        return [case for case, reason in self.left_out.items() if reason.startswith(FAILED)]

    def write(self, path: Path) -> None:
        document = {"schema": SCHEMA, **dataclasses.asdict(self)}
        # Figures that follow from the rounds, for readers without this module.
        for record, result in zip(document["results"], self.results, strict=True):
            for name in result.figures:
                record["figures"][name] |= {
                    f"{what}_median_s": result.median(name, what)
                    for what in ("graph", "kernel", "eager", "host")
                }
        # In one step: whoever is interrupted leaves the file before or the one after.
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)

    @classmethod
    def read(cls, path: Path) -> Document:
        """Raises ValueError where the file is not a result of this benchmark."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document.pop("schema") != SCHEMA:
                raise ValueError(f"{path}: written by another version of this benchmark")
            document["results"] = [Result.of(record) for record in document["results"]]
            return cls(**document)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as problem:
            raise ValueError(f"{path}: not a result of this benchmark ({problem!r})") from problem


class TooLarge(Exception):
    """Of a case that the GPU's memory does not hold; says what it needs."""


def run_cases(
    cases: Sequence[Case],
    measure: Callable[[Case], Result],
    budget_s: float,
    advance: Callable[[Case, int], None],
    clock: Callable[[], float] = time.monotonic,
    results: list[Result] | None = None,
    left_out: dict[str, str] | None = None,
) -> tuple[list[Result], dict[str, str]]:
    """The results, and for each case that was left out, why; added to what is given.

    A case is begun only if the longest of the last ones would still fit; advance(case, left) is
    called before each. What measure raises costs the case; after eight failures on end the GPU is
    taken to be out of order.
    """
    results = [] if results is None else results
    left_out = {} if left_out is None else left_out
    start = clock()
    recent = [0.0]
    failures = 0
    for number, case in enumerate(cases):
        begun = clock()
        if begun - start + max(recent[-5:]) >= budget_s:
            left_out |= {str(other): f"no time left of {budget_s:g} s" for other in cases[number:]}
            break
        advance(case, len(cases) - number)
        try:
            results.append(measure(case))
        except TooLarge as problem:
            left_out[str(case)] = str(problem)
        except Exception as problem:
            text = str(problem).splitlines()
            left_out[str(case)] = f"{FAILED}: {text[0] if text else type(problem).__name__}"
            failures += 1
            if failures == MOST_FAILURES:
                reason = f"not begun after {MOST_FAILURES} failures on end"
                left_out |= {str(other): reason for other in cases[number + 1 :]}
                break
        else:
            failures = 0
            recent.append(clock() - begun)
    return results, left_out


def measure_case(batch: list[int], number: int) -> dict:
    """In a process of its own (worker.py): {"result": ...} of cases.plan(batch)[number], or
    {"too_large": why}."""
    case = _planned(tuple(batch))[number]
    try:
        result = measure_here(case, _timer(), device.current(), device.free_bytes)
    except TooLarge as problem:
        return {"too_large": str(problem)}
    return {"result": dataclasses.asdict(result)}


@functools.cache
def _planned(batch: tuple[int, ...]) -> list[Case]:
    return cases_.plan(batch)


@functools.cache
def _timer() -> Gpu | CpuInItsPlace:
    return Gpu() if device.IS_GPU else CpuInItsPlace()


def measure_here(
    case: Case, gpu, device: torch.device, free_bytes: Callable[[], int], plan: Plan | None = None
) -> Result:
    """In this process. Raises TooLarge, and what a call raises on which nothing was computed."""
    # Operands, their copies in float64 and in cuDNN's formats, results, cuDNN's workspace.
    wanted = 6 * operand_bytes(case) + 2**30
    if wanted > free_bytes():
        raise TooLarge(f"needs about {wanted / 2**30:.0f} GiB of GPU memory")
    return _run_case(case, gpu, device, plan or Plan())


def _run_case(case: Case, gpu, device: torch.device, plan: Plan) -> Result:
    problem = case.problem
    tensors = draw(case, device)
    left_out: dict[str, str] = {}
    figures: dict[str, Figures] = {}
    calls = {}
    for name, call in _calls(case, tensors):
        try:
            with CONTESTANTS[name].settings(case.precision):
                found = error(case, tensors, call())
        except RuntimeError as refusal:
            gpu.synchronize()  # raises again where it was no refusal, but the context is lost
            left_out[name] = f"refused: {str(refusal).splitlines()[0]}"
            continue
        if not found <= case.precision.tolerance:  # which is also true of NaN
            left_out[name] = f"wrong: relative error {found:.2g}"
            continue
        figures[name] = Figures(error=found)
        calls[name] = call
    settings = {
        name: lambda name=name: CONTESTANTS[name].settings(case.precision) for name in calls
    }
    if calls:
        gpu.measure(calls, settings, figures, plan, case.eager)
    with CONTESTANTS[OURS].settings(case.precision):
        plans = conv2d_ext.explain(*tensors[:3], **problem.call_args())
    direction = getattr(plans, case.direction)
    return Result(
        tier=case.tier,
        name=problem.name,
        layer_class=layer_class(problem),
        batch=problem.batch,
        precision=case.precision.name,
        layout=case.layout,
        direction=case.direction,
        flops=problem.flops,
        figures=figures,
        left_out=left_out,
        wrong=left_out.get(OURS),
        explained=getattr(direction, "kernel", ""),
    )


def _calls(case: Case, tensors) -> Iterator[tuple[str, Callable]]:
    for name in case.contestants:
        call = CONTESTANTS[name].make_call(case.problem, tensors, case.direction)
        if call is not None:
            yield name, call
