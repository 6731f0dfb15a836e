"""Whether something else used the machine while a case was measured.

Two witnesses. Probes do a fixed piece of work, arithmetic and memory traffic, on as many threads
as the case: when the machine is quiet they take as long after a case as they took at the start. And
the kernel counts the CPU time of all processes: what this one did not use, others did, or the host
of a virtual machine took away ("steal").
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.measure import Call, Plan, measure
from benchmarks.results import Timing
from benchmarks.roofline import FmaLoop, stream

_RUNS = 5  # of a probe; the best counts, so that an interruption of microseconds is none


@dataclasses.dataclass(frozen=True)
class Probe:
    """Work that always takes the same time on a quiet machine."""

    name: str
    tolerance: float  # how much longer than at the start it may take
    seconds: Callable[[int], float]  # with so many threads


@dataclasses.dataclass(frozen=True)
class CpuTimes:
    """Seconds since some start: of the clock, of all CPUs at work for anyone, of this process."""

    clock: float
    all_busy: float | None  # None where the system doesn't tell
    own: float


def read_cpu_times() -> CpuTimes:
    own = os.times()
    try:
        # user nice system idle iowait irq softirq steal (guest time is within user's)
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
        ticks = [int(field) for field in fields]
        busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        busy = None
    return CpuTimes(time.perf_counter(), busy, own.user + own.system)


def default_probes() -> list[Probe]:
    loop = FmaLoop()
    traffic, _ = stream(2**24)

    def memory_seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        best = float("inf")
        for _ in range(_RUNS):
            start = time.perf_counter()
            traffic()
            best = min(best, time.perf_counter() - start)
        return best

    return [
        Probe("arithmetic", 0.10, lambda threads: loop.seconds(threads, _RUNS)),
        # The last cache is shared with whatever else runs on the socket, even outside a virtual
        # machine, and is never as steady as the arithmetic.
        Probe("memory traffic", 0.50, memory_seconds),
    ]


class Monitor:
    """Knows how the machine behaves when quiet, and says what differs."""

    # The kernel counts in ticks of 10 ms a CPU, so short times are not exact.
    _COUNTING_ERROR_S = 0.05

    def __init__(
        self,
        threads: Sequence[int],
        probes: Sequence[Probe] | None = None,
        foreign_cpus: float | None = None,
        cpu_times: Callable[[], CpuTimes] = read_cpu_times,
    ) -> None:
        self._threads = list(threads)
        self._probes = default_probes() if probes is None else list(probes)
        # By default a twentieth of the machine.
        self.foreign_cpus = 0.05 * (os.cpu_count() or 1) if foreign_cpus is None else foreign_cpus
        self._cpu_times = cpu_times
        self._quiet_s: dict[tuple[str, int], float] = {}
        self._since = cpu_times()

    def calibrate(self, samples: int = 20) -> str | None:
        """Learns how long the probes take; returns why the machine is not quiet, or None."""
        self.begin()
        reasons = []
        for threads in self._threads:
            for probe in self._probes:
                seconds = sorted(probe.seconds(threads) for _ in range(samples))
                self._quiet_s[probe.name, threads] = seconds[0]
                reasons.append(_slower(probe, seconds[len(seconds) // 2] / seconds[0]))
        return _first([*reasons, self._foreign_use()])

    def begin(self) -> None:
        """What is measured from now on is what `disturbance` speaks of."""
        self._since = self._cpu_times()

    def disturbance(self, threads: int) -> str | None:
        """What disturbed the machine since `begin`, or disturbs it now; None where nothing did."""
        foreign = self._foreign_use()
        ratios = (
            (probe, probe.seconds(threads) / self._quiet_s[probe.name, threads])
            for probe in self._probes
        )
        return _first([foreign, *(_slower(probe, ratio) for probe, ratio in ratios)])

    def _foreign_use(self) -> str | None:
        now, since = self._cpu_times(), self._since
        if now.all_busy is None or since.all_busy is None:
            return None
        foreign_s = now.all_busy - since.all_busy - (now.own - since.own)
        seconds = now.clock - since.clock
        if foreign_s <= self.foreign_cpus * seconds + self._COUNTING_ERROR_S:
            return None
        return f"other processes used {foreign_s / seconds:.2f} CPUs"

    def describe(self) -> dict[str, object]:
        return {
            "probes_s": {
                f"{name}, {threads} thread{'s' if threads > 1 else ''}": seconds
                for (name, threads), seconds in self._quiet_s.items()
            },
            "tolerances": {probe.name: probe.tolerance for probe in self._probes},
            "tolerated_foreign_cpus": self.foreign_cpus,
        }


def measure_undisturbed(
    calls: Mapping[str, Call], plan: Plan, monitor: Monitor, threads: int, attempts: int
) -> tuple[dict[str, Timing], str | None, int]:
    """Timings, what disturbed them (None: nothing), and the number of attempts it took.

    A disturbed measurement is thrown away and made again, at most `attempts` times in all; the last
    one is returned with its disturbance.
    """
    attempt = 0
    while True:
        attempt += 1
        monitor.begin()
        timings = measure(calls, plan)
        reason = monitor.disturbance(threads)
        if reason is None or attempt == attempts:
            return timings, reason, attempt


def _slower(probe: Probe, ratio: float) -> str | None:
    if ratio <= 1 + probe.tolerance:
        return None
    return f"{probe.name} took {ratio:.2f} times as long as when quiet"


def _first(reasons: Sequence[str | None]) -> str | None:
    return next((reason for reason in reasons if reason), None)
