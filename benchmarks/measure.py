"""Interleaved rounds: every contestant once in each, so that a disturbance meets all of them."""

from __future__ import annotations

import dataclasses
import gc
import math
import random
import resource
import statistics
import time
from collections.abc import Callable, Mapping

from benchmarks.results import Timing

Call = Callable[[], object]
Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long to measure one case."""

    budget_s: float  # for all rounds together; the fewest rounds are measured whatever they take
    fewest_rounds: int = 8  # so that two runs can differ by more than chance (compare)
    most_rounds: int = 30
    round_s: float = 2e-3  # calls shorter than this are repeated within a round
    # Those of them that are this much slower than the median contestant are measured in slow_rounds
    # rounds alone: they would take the time of all others, and no mean is made of their figures.
    references: frozenset[str] = frozenset()
    slow: float = 4.0
    slow_rounds: int = 3


def measure(
    calls: Mapping[str, Call], plan: Plan, clock: Clock = time.perf_counter
) -> dict[str, Timing]:
    """Each contestant's seconds a call, round by round.

    The results of a call are freed before the next one, so every call allocates its own. Each round
    has an order of its own, the same in every run: nobody always follows the same one.
    """
    names = list(calls)
    seconds = {name: _warm_up(calls[name], plan.round_s, clock) for name in names}
    repeats = {name: max(1, math.ceil(plan.round_s / seconds[name])) for name in names}
    turn_s = {name: repeats[name] * seconds[name] for name in names}
    rounds = plan_rounds(turn_s, plan)
    timings = {name: Timing(repeats[name], [], 0.0) for name in names}
    gc_was_enabled = gc.isenabled()
    gc.disable()
    try:
        orders = random.Random(0)
        for number in range(max(rounds.values())):
            for name in orders.sample(names, len(names)):
                if number < rounds[name]:
                    _measure_turn(calls[name], timings[name], clock)
    finally:
        if gc_was_enabled:
            gc.enable()
    for name, timing in timings.items():
        timing.page_faults /= timing.calls * rounds[name]
    return timings


def plan_rounds(turn_s: Mapping[str, float], plan: Plan) -> dict[str, int]:
    """The number of rounds of each contestant, whose turn in one takes so many seconds."""
    limit = plan.slow * statistics.median(turn_s.values())
    slow = {name for name in plan.references & turn_s.keys() if turn_s[name] > limit}
    spent = plan.slow_rounds * sum(turn_s[name] for name in slow)
    round_s = sum(seconds for name, seconds in turn_s.items() if name not in slow)
    most = int((plan.budget_s - spent) / round_s)
    rounds = max(plan.fewest_rounds, min(plan.most_rounds, most))
    return {name: plan.slow_rounds if name in slow else rounds for name in turn_s}


def _warm_up(call: Call, round_s: float, clock: Clock) -> float:
    """Seconds a call, roughly, after the calls that load code and prepare memory."""
    call()
    start = clock()
    call()
    elapsed, count = clock() - start, 1
    # A single short call says little about how many of them fill a round.
    while elapsed < round_s:
        start = clock()
        for _ in range(2 * count):
            call()
        elapsed, count = clock() - start, 2 * count
    return elapsed / count


def _measure_turn(call: Call, timing: Timing, clock: Clock) -> None:
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start = clock()
    for _ in range(timing.calls):
        call()
    elapsed = clock() - start
    timing.rounds_s.append(elapsed / timing.calls)
    timing.page_faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
