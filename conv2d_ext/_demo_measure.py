"""What `python -m conv2d_ext` measures: the workload, its contestants, each kind of figure."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import conv2d_ext
from conv2d_ext import reference
from conv2d_ext.testing import POST, Problem

# Importing torch.utils.benchmark logs a warning where the CUDA toolkit is present and no GPU.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
from torch.utils import benchmark  # noqa: E402

FORWARD, BACKWARD = DIRECTIONS = ("forward", "forward + backward")
NO_GRAD, GRAD = ("without gradients", "recording gradients")

# How often the post called each function.
POST_CALLS = 10_000
# float32's unit roundoff: what rounding the exact result may cost.
_ROUNDOFF = 2.0**-24
_TINY = Problem("tiny", 1, 1, (4, 4), 1, (3, 3))
_MEMORY_TIMEOUT_S = 120


@dataclasses.dataclass(frozen=True)
class Contestant:
    name: str
    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    torch_layout: bool = False  # weight (out, in, kh, kw) and bias (out,), not the post's kernel


REFERENCE = Contestant("Python reference", reference.forward)
COMPOSITION = Contestant("the post's C++", conv2d_ext.forward_unfold)
LIBRARY = Contestant("this library", conv2d_ext.forward)
LIBRARY_CONV2D = Contestant("this library, conv2d", conv2d_ext.conv2d, torch_layout=True)
ATEN = Contestant("F.conv2d", F.conv2d, torch_layout=True)

CONTESTANTS = (REFERENCE, COMPOSITION, LIBRARY, ATEN)
# The two functions of the library differ in what a call costs, not in how they compute.
TINY_CONTESTANTS = (REFERENCE, COMPOSITION, LIBRARY, LIBRARY_CONV2D, ATEN)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where to measure; tf32 is None where the device has no such mode."""

    device: str
    tf32: bool | None = None

    @property
    def title(self) -> str:
        if self.device == "cpu":
            threads = torch.get_num_threads()
            return f"CPU, {threads} thread{'s' if threads > 1 else ''}"
        name = torch.cuda.get_device_name(self.device)
        return f"{name} ({self.device}), TF32 {'on' if self.tf32 else 'off'}"


@dataclasses.dataclass(frozen=True)
class Loop:
    """The post's timing: a clock around a loop, cold, and the device not waited for."""

    calls: int
    mean_s: float
    first_call_s: float
    unfinished_s: float  # the device went on working for so long after the clock had been read


@dataclasses.dataclass
class Figures:
    """One contestant in one direction."""

    loop: Loop | None = None
    error: float | None = None  # relative L2 error against float64; backward: of the worst gradient
    extra_bytes: int | None = None  # peak beyond arguments and results; None: not measurable here
    rounds_s: list[float] = dataclasses.field(default_factory=list)  # per call, one for each round

    @property
    def median_s(self) -> float:
        return statistics.median(self.rounds_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.rounds_s, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """The interquartile range as a share of the median."""
        low, high = self.quartiles_s
        return (high - low) / self.median_s


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long to measure one table."""

    rounds: int
    call_s: float  # what a contestant's calls of one round take together
    limit_s: float  # no round but the first three starts later than this


class Contest:
    """Timings of several calls in rounds, so that a disturbance meets all of them alike."""

    def __init__(
        self, plan: Plan, calls: list[Callable[[], object]], figures: list[Figures]
    ) -> None:
        self._plan = plan
        self._figures = figures
        # Timer synchronises with the device, and warms up before each measurement.
        self._timers = [
            benchmark.Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
            for call in calls
        ]
        self._repeats: list[int] = []
        self._start = math.inf

    def measure_round(self) -> None:
        done = len(self._figures[0].rounds_s)
        if done == 0:
            self._start = time.perf_counter()
            self._repeats = [math.ceil(self._plan.call_s / _shortest(t)) for t in self._timers]
        if done >= 3 and time.perf_counter() - self._start > self._plan.limit_s:
            return
        count = len(self._timers)
        for which in random.Random(done).sample(range(count), count):  # in each round another order
            measured = self._timers[which].timeit(self._repeats[which])
            self._figures[which].rounds_s.append(measured.mean)


class Measurement:
    """All figures under one setting."""

    def __init__(self, setting: Setting, quick: bool) -> None:
        self.setting = setting
        self.title = setting.title
        self.figures = {d: {c.name: Figures() for c in CONTESTANTS} for d in DIRECTIONS}
        self.overhead = {
            mode: {c.name: Figures() for c in TINY_CONTESTANTS} for mode in (NO_GRAD, GRAD)
        }
        self.loop_s = 0.1 if quick else 1.5
        self.plan = Plan(5, 0.01, 2.0) if quick else Plan(11, 0.05, 8.0)

    def jobs(self) -> list[tuple[str, Callable[[], None]]]:
        """The work in order, as (description, function); the post's loops first, to start cold."""
        problem, device = POST, self.setting.device
        jobs: list[tuple[str, Callable[[], None]]] = []
        for direction in DIRECTIONS:
            for contestant in CONTESTANTS:
                loop = partial(self._measure_loop, direction, contestant)
                jobs.append((f"the post's loop: {contestant.name}", loop))
        jobs.append(("results against float64", self._measure_errors))
        for direction in DIRECTIONS:
            calls = [
                make_call(c, problem, device, backward=direction == BACKWARD) for c in CONTESTANTS
            ]
            jobs += self._interleaved(direction, calls, list(self.figures[direction].values()))
        for mode, figures in self.overhead.items():
            calls = [make_call(c, _TINY, device, grad=mode == GRAD) for c in TINY_CONTESTANTS]
            jobs += self._interleaved(f"tiny input, {mode}", calls, list(figures.values()))
        for direction in DIRECTIONS:
            for contestant in CONTESTANTS:
                memory = partial(self._measure_memory, direction, contestant)
                jobs.append((f"peak memory: {contestant.name}", memory))
        return jobs

    def _measure_loop(self, direction: str, contestant: Contestant) -> None:
        device = self.setting.device
        call = make_call(contestant, POST, device, backward=direction == BACKWARD)
        _synchronize(device)
        start = time.perf_counter()
        call()
        first = end = time.perf_counter()
        calls = 1
        # Ten thousand calls of what takes a CPU milliseconds would be minutes.
        while calls < POST_CALLS and end - start < self.loop_s:
            call()
            calls += 1
            end = time.perf_counter()
        _synchronize(device)
        finished = time.perf_counter()
        self.figures[direction][contestant.name].loop = Loop(
            calls, (end - start) / calls, first - start, finished - end if device != "cpu" else 0.0
        )

    def _interleaved(
        self, what: str, calls: list[Callable[[], object]], figures: list[Figures]
    ) -> list[tuple[str, Callable[[], None]]]:
        contest = Contest(self.plan, calls, figures)
        return [(f"{what}, round {n + 1}", contest.measure_round) for n in range(self.plan.rounds)]

    def _measure_errors(self) -> None:
        tensors = make_tensors(POST, self.setting.device)
        expected = _results(ATEN, tuple(t.double() for t in tensors))
        for contestant in CONTESTANTS:
            output, *gradients = (
                float((actual.double() - wanted).norm() / wanted.norm())
                for actual, wanted in zip(_results(contestant, tensors), expected, strict=True)
            )
            self.figures[FORWARD][contestant.name].error = output
            self.figures[BACKWARD][contestant.name].error = max(gradients)

    def _measure_memory(self, direction: str, contestant: Contestant) -> None:
        task = (
            contestant.name,
            direction == BACKWARD,
            self.setting.device,
            torch.get_num_threads(),
        )
        measure = _peak_extra_bytes if self.setting.device != "cpu" else _in_fresh_process
        self.figures[direction][contestant.name].extra_bytes = measure(task)


def results_are_right(measurement: Measurement) -> bool:
    """This library's errors are at most twice F.conv2d's plus one unit roundoff."""
    return all(
        figures[LIBRARY.name].error <= 2 * figures[ATEN.name].error + _ROUNDOFF
        for figures in measurement.figures.values()
    )


def make_tensors(problem: Problem, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The post's data: im (1, di, height, width), all channels the same integers; kernel
    (di, do, kh, kw); bias (do, 1), all 0.06; and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    channel = torch.randint(-255, 255, problem.in_size, generator=generator).float()
    im = channel.repeat(problem.batch, problem.in_channels, 1, 1)
    kernel_shape = (problem.in_channels, problem.out_channels, *problem.kernel)
    kernel = torch.randn(kernel_shape, generator=generator)
    bias = torch.full((problem.out_channels, 1), 0.06)
    grad_output = torch.randn(problem.output_shape, generator=generator)
    return im.to(device), kernel.to(device), bias.to(device), grad_output.to(device)


def make_call(
    contestant: Contestant,
    problem: Problem,
    device: str,
    backward: bool = False,
    grad: bool = False,
) -> Callable[[], object]:
    """One run of the contestant, as a function of no arguments; grad: inputs require gradients."""
    im, kernel, bias, grad_output = make_tensors(problem, device)
    if contestant.torch_layout:
        kernel, bias = kernel.transpose(0, 1).contiguous(), bias.flatten()
    inputs = tuple(t.requires_grad_(backward or grad) for t in (im, kernel, bias))
    if not backward:
        return partial(contestant.function, *inputs)

    def forward_and_backward() -> tuple[Tensor, ...]:
        output = contestant.function(*inputs)
        return (output, *torch.autograd.grad(output, inputs, grad_output))

    return forward_and_backward


def _results(contestant: Contestant, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The output and the gradients of im, kernel and bias, in the post's shapes."""
    im, kernel, bias, grad_output = tensors
    inputs = tuple(t.detach().requires_grad_() for t in (im, kernel, bias))
    arguments = inputs
    if contestant.torch_layout:
        arguments = (inputs[0], inputs[1].transpose(0, 1), inputs[2].flatten())
    output = contestant.function(*arguments)
    return (output.detach(), *torch.autograd.grad(output, inputs, grad_output))


def _peak_extra_bytes(task: tuple[str, bool, str, int]) -> int | None:
    """Peak memory of one call, less its results. task: name, backward, device, threads."""
    name, backward, device, threads = task
    torch.set_num_threads(threads)
    contestant = next(c for c in CONTESTANTS if c.name == name)
    # Starts thread pools and libraries, without preparing memory for the sizes to come.
    make_call(contestant, _TINY, device, backward)()
    call = make_call(contestant, POST, device, backward)
    peak = _peak_of_cpu if device == "cpu" else partial(_peak_of_cuda, device)
    extra, results = peak(call)
    if extra is None:
        return None
    results = results if isinstance(results, tuple) else (results,)
    return max(0, extra - sum(t.nbytes for t in results))


def _peak_of_cuda(device: str, call: Callable[[], object]) -> tuple[int | None, object]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before, results


def _peak_of_cpu(call: Callable[[], object]) -> tuple[int | None, object]:
    """Of the process's physical memory, as Linux counts it; elsewhere None."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at the present size
    before = _memory_status()
    results = call()
    after = _memory_status()
    if not before or not after:
        return None, results
    # Pages of files are code that ran for the first time.
    return after["VmHWM"] - before["VmHWM"] - (after["RssFile"] - before["RssFile"]), results


def _memory_status() -> dict[str, int]:
    """This process's VmHWM (peak) and RssFile (pages of files) in bytes; empty where unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.partition(":") for line in lines)
    sizes = {k: 1024 * int(v.split()[0]) for k, _, v in fields if k in ("VmHWM", "RssFile")}
    return sizes if len(sizes) == 2 else {}


def _in_fresh_process(task: tuple[str, bool, str, int]) -> int | None:
    """One process for each figure: memory that a process has freed hides what it needs next."""
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    context.set_forkserver_preload([__name__])
    with context.Pool(1) as pool:
        try:
            return pool.apply_async(_peak_extra_bytes, (task,)).get(_MEMORY_TIMEOUT_S)
        except multiprocessing.TimeoutError:  # also when the system ended it for want of memory
            return None


def _shortest(timer: benchmark.Timer) -> float:
    """Seconds a call, roughly; the shortest of three, since a disturbance only lengthens."""
    return min(timer.timeit(2).mean for _ in range(3))


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def tf32_set_to(enabled: bool | None) -> Iterator[None]:
    """Allows TF32, or not, in convolutions and matrix products alike; None leaves them alone."""
    if enabled is None:
        yield
        return
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = matmul.allow_tf32
    # flags() sets all of them, and works where plain assignment has been frozen.
    with cudnn.flags(
        enabled=cudnn.enabled,
        benchmark=cudnn.benchmark,
        deterministic=cudnn.deterministic,
        allow_tf32=enabled,
    ):
        try:
            matmul.allow_tf32 = enabled
            yield
        finally:
            matmul.allow_tf32 = before
