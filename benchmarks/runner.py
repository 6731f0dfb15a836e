"""Goes through the blocks within the time allowed, and repeats what was disturbed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from benchmarks.measure import Call, Plan
from benchmarks.quiet import Monitor, measure_undisturbed
from benchmarks.results import Result
from benchmarks.roofline import Roofline


class Block(Protocol):
    """Cases that share their tensors, so that these exist only while the block is measured."""

    title: str
    case_count: int

    def refusal(self) -> str | None: ...

    def cases(self, roofline: Roofline) -> Iterator[tuple[Result, dict[str, Call]]]: ...


@dataclasses.dataclass(frozen=True)
class Limits:
    case_s: float  # the rounds of one case
    seconds: float | None  # everything; None: as long as it takes
    attempts: int  # at measuring a case undisturbed
    plan: Plan


def run_blocks(
    blocks: Sequence[Block],
    limits: Limits,
    monitor: Monitor,
    roofline: Roofline,
    advance: Callable[[str, int], None],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Result], dict[str, str]]:
    """The results, and for each block that was left out, why.

    Where `limits.seconds` is set, each case gets its share of the time that is left; what a case
    needs less or more is the later ones' gain or loss, and blocks whose turn comes too late are
    left out. advance(title, cases): called when a block starts (0) and for each case that is done.
    """
    results: list[Result] = []
    left_out: dict[str, str] = {}
    start = clock()
    cases_left = sum(block.case_count for block in blocks)
    for block in blocks:
        advance(block.title, 0)
        late = limits.seconds is not None and clock() - start >= limits.seconds
        reason = f"no time left of {limits.seconds:g} s" if late else block.refusal()
        if reason:
            left_out[block.title] = reason
            cases_left -= block.case_count
            advance(block.title, block.case_count)
            continue
        for result, calls in block.cases(roofline):
            budget = limits.case_s
            if limits.seconds is not None:
                budget = min(budget, (limits.seconds - (clock() - start)) / cases_left)
            torch.set_num_threads(result.threads)
            if calls:
                plan = dataclasses.replace(limits.plan, budget_s=max(0.0, budget))
                result.timings, result.disturbed, result.attempts = measure_undisturbed(
                    calls, plan, monitor, result.threads, limits.attempts
                )
            results.append(result)
            cases_left -= 1
            advance(block.title, 1)
    return results, left_out
