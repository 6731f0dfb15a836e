"""Times on a GPU: by graphs, kernel by kernel, and what an eager call costs the host.

- graph: calls captured one after the other in a CUDA graph, events around its replay. Neither the
  host nor most of the gap between two kernels is in it: what the device takes.
- kernels: the durations of a call's kernels and copies, as the profiler (CUPTI) reports them.
- eager: calls from Python, the clock read after the device has finished. What users wait for.
- host: calls from Python, the clock read as soon as they have returned.

All contestants of a case take turns, so that a disturbance meets each of them alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], object]
Settings = Callable[[], contextlib.AbstractContextManager]


@dataclasses.dataclass
class Figures:
    """One contestant in one case; seconds, for a call."""

    graph_s: list[float] = dataclasses.field(default_factory=list)  # one for each round
    kernels: list[dict] = dataclasses.field(default_factory=list)  # name, count, seconds
    eager_s: list[float] = dataclasses.field(default_factory=list)
    host_s: list[float] = dataclasses.field(default_factory=list)
    error: float | None = None

    @property
    def kernel_s(self) -> float | None:
        """Of all kernels and copies of a call together; None where the profiler saw none."""
        return sum(kernel["seconds"] for kernel in self.kernels) or None

    def median(self, what: str) -> float | None:
        """Of graph, eager or host times; of kernels, their sum."""
        if what == "kernel":
            return self.kernel_s
        rounds = getattr(self, f"{what}_s")
        return statistics.median(rounds) if rounds else None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long to measure one case."""

    replay_s: float = 5e-4  # of a graph
    most_calls: int = 50  # in a graph
    rounds: int = 9
    eager_calls: int = 100  # fewer than a stream queues before the host has to wait
    profiled_calls: int = 5


class Gpu:
    """The current CUDA device, and a stream of our own on it."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def measure(
        self,
        calls: Mapping[str, Call],
        settings: Mapping[str, Settings],
        figures: Mapping[str, Figures],
        plan: Plan,
        eager: bool,
    ) -> None:
        """Fills `figures`. settings[name]() is a context in which the calls of `name` are made."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            seconds = {}
            for name, call in calls.items():
                with settings[name]():
                    seconds[name] = self._warm_up(call)
            self._measure_graphs(calls, settings, figures, plan, seconds)
            if plan.profiled_calls:
                self._measure_kernels(calls, settings, figures, plan)
            if eager:
                self._measure_eager(calls, settings, figures, plan)
        torch.cuda.synchronize()

    def _warm_up(self, call: Call) -> float:
        """Seconds a call, roughly; cuDNN has chosen its algorithm, and kernels are loaded."""
        for _ in range(2):
            call()
        return self._between_events(lambda: [call() for _ in range(3)]) / 3

    def _between_events(self, work: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    def _capture(self, call: Call, repeats: int) -> torch.cuda.CUDAGraph:
        """Without what torch.cuda.graph does besides: garbage collection, an empty cache."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            for _ in range(repeats):
                call()
        finally:
            graph.capture_end()
        return graph

    def _measure_graphs(self, calls, settings, figures, plan, seconds) -> None:
        graphs = {}
        for name, call in calls.items():
            repeats = max(1, min(plan.most_calls, math.ceil(plan.replay_s / seconds[name])))
            with settings[name]():
                graph = self._capture(call, repeats)
            graph.replay()
            graphs[name] = graph, repeats
        names, orders = list(graphs), random.Random(0)
        for _ in range(plan.rounds):
            for name in orders.sample(names, len(names)):  # none always follows the same one
                graph, repeats = graphs[name]
                figures[name].graph_s.append(self._between_events(graph.replay) / repeats)
        for graph, _ in graphs.values():
            graph.reset()

    def _measure_kernels(self, calls, settings, figures, plan) -> None:
        """One profiler session; a spin kernel between the contestants tells them apart."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            for name, call in calls.items():
                torch.cuda._sleep(100)
                with settings[name]():
                    for _ in range(plan.profiled_calls):
                        call()
            torch.cuda.synchronize()
        events = [
            (event.start_ns(), event.name(), event.duration_ns() * 1e-9)
            for event in profile.profiler.kineto_results.events()
            if event.device_type() == torch.autograd.DeviceType.CUDA
        ]
        sections = split_at_markers(sorted(events), "spin_kernel")
        if len(sections) != len(calls):  # no CUPTI, or a profiler of another kind
            return
        for name, section in zip(calls, sections, strict=True):
            figures[name].kernels = sum_by_kernel(section, plan.profiled_calls)

    def _measure_eager(self, calls, settings, figures, plan) -> None:
        names = list(calls)
        for number in range(plan.rounds):
            for turn in range(len(names)):
                name = names[(turn + number) % len(names)]
                call = calls[name]
                with settings[name]():
                    call()
                    self.stream.synchronize()
                    start = time.perf_counter()
                    for _ in range(plan.eager_calls):
                        call()
                    returned = time.perf_counter()
                    self.stream.synchronize()
                    finished = time.perf_counter()
                figures[name].host_s.append((returned - start) / plan.eager_calls)
                figures[name].eager_s.append((finished - start) / plan.eager_calls)


class CpuInItsPlace:
    """Goes through the same motions without a GPU; its times mean nothing."""

    def synchronize(self) -> None:
        pass

    def measure(
        self,
        calls: Mapping[str, Call],
        settings: Mapping[str, Settings],
        figures: Mapping[str, Figures],
        plan: Plan,
        eager: bool,
    ) -> None:
        for name, call in calls.items():
            with settings[name]():
                start = time.perf_counter()
                call()
                seconds = time.perf_counter() - start
            figures[name].graph_s = [seconds]
            if plan.profiled_calls:
                figures[name].kernels = [{"name": "none", "count": 1.0, "seconds": seconds}]
            if eager:
                figures[name].eager_s = figures[name].host_s = [seconds]


def split_at_markers(
    events: list[tuple[int, str, float]], marker: str
) -> list[list[tuple[str, float]]]:
    """The (name, seconds) after each marker, up to the next one; annotations are no kernels."""
    sections: list[list[tuple[str, float]]] = []
    for _, name, seconds in events:
        if marker in name:
            sections.append([])
        elif sections and not name.startswith("ProfilerStep"):
            sections[-1].append((name, seconds))
    return sections


def sum_by_kernel(section: list[tuple[str, float]], calls: int) -> list[dict]:
    """What each kernel takes in one call, the longest first."""
    found: dict[str, list[float]] = {}
    for name, seconds in section:
        found.setdefault(name, []).append(seconds)
    return sorted(
        (
            {"name": name, "count": len(times) / calls, "seconds": sum(times) / calls}
            for name, times in found.items()
        ),
        key=lambda kernel: -kernel["seconds"],
    )


def transforms(kernels: list[dict]) -> str | None:
    """Winograd or FFT, where a kernel's name says that it multiplies less than the definition."""
    names = " ".join(kernel["name"].lower() for kernel in kernels)
    if "winograd" in names:
        return "Winograd"
    return "FFT" if "fft" in names else None


def ceilings(device: torch.device) -> dict[str, float]:
    """What this GPU does at best: bytes/s of a large copy, FLOP/s of a large matrix product."""
    found = {}
    pair = torch.ones(2, 2**28, device=device)
    found["copy_bytes_per_s"] = pair.nbytes / _best(lambda: pair[0].copy_(pair[1]))
    size = 8192
    allowed = torch.backends.cuda.matmul.allow_tf32
    for name, dtype, tf32 in (
        ("float32", torch.float32, False),
        ("TF32", torch.float32, True),
        ("float16", torch.float16, False),
        ("bfloat16", torch.bfloat16, False),
    ):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        torch.backends.cuda.matmul.allow_tf32 = tf32
        found[f"matmul_{name}_flops_per_s"] = 2 * size**3 / _best(lambda a=a, b=b: a @ b)
    torch.backends.cuda.matmul.allow_tf32 = allowed
    return found


def _best(call: Call, runs: int = 5) -> float:
    call()
    times = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return min(times)
