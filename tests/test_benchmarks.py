"""benchmarks/: its statistics, its refusal of disturbed runs, its files, and one run of it."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console

import conv2d_ext
from conv2d_ext.testing import POST, REAL_LAYERS, Problem, aten_results, real_layer

ROOT = Path(__file__).resolve().parent.parent
# Last, so that conv2d_ext stays the one that the other tests import.
sys.path.append(str(ROOT))

from benchmarks import __main__ as program  # noqa: E402
from benchmarks import (  # noqa: E402
    bits,
    figures,
    layers,
    machine,
    memory,
    plots,
    problems,
    roofline,
)
from benchmarks.compare import compare, differing_conditions  # noqa: E402
from benchmarks.layers import (  # noqa: E402
    BOTH,
    CONTESTANTS,
    DIRECTIONS,
    FORWARD,
    GRAD_INPUT,
    GRAD_WEIGHT,
    LayerBlock,
)
from benchmarks.measure import Plan, measure, plan_rounds  # noqa: E402
from benchmarks.models import ModelBlock  # noqa: E402
from benchmarks.quiet import CpuTimes, Monitor, Probe, measure_undisturbed, read_cpu_times  # noqa: E402
from benchmarks.report import growth_tables, print_document  # noqa: E402
from benchmarks.results import (  # noqa: E402
    ATEN,
    ATEN_LAST,
    MODE,
    OURS,
    OURS_LAST,
    PYTHON,
    Document,
    Result,
    Timing,
    geomean,
)
from benchmarks.roofline import FmaLoop, Roofline, fma_loop_code, tile_loop_code  # noqa: E402
from benchmarks.runner import Limits, run_blocks  # noqa: E402

SMALL = Problem("small", 2, 6, (9, 8), 4, (3, 2), (2, 1), (1, 0), groups=2)
QUIET_TIMES = CpuTimes(0.0, 0.0, 0.0)


class FakeTime:
    """A clock that only calls advance."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def call(self, name: str, seconds: float):
        def run() -> None:
            self.now += seconds
            self.log.append(name)

        return run


def fake_roofline() -> Roofline:
    """Peak 100 FLOP/s, bandwidth from 50 bytes/s in the smallest footprint to 5 in the largest."""
    fake = Roofline.__new__(Roofline)
    count = len(roofline._FOOTPRINTS)
    fake.methods = {"float32": "made up", "float64": "made up"}
    peaks = {"float32": 100.0, "float64": 50.0, "bfloat16": 100.0}
    fake.peaks = dict.fromkeys((1, 2), peaks)
    fake.bandwidths = {n: [50.0] * (count - 1) + [5.0] for n in (1, 2)}
    return fake


def made_up_result(name: str, ours: float, aten: float = 1.0, **fields) -> Result:
    def around(seconds: float) -> Timing:
        spread = random.Random(f"{name} {seconds}")
        return Timing(3, [seconds * spread.uniform(0.99, 1.01) for _ in range(9)], 0.5)

    timings = {OURS: around(ours), OURS_LAST: around(ours), ATEN: around(aten)}
    timings |= {ATEN_LAST: around(aten), PYTHON: around(5 * aten)}
    known = {
        "name": name,
        "layer_class": "3x3",
        "dtype": "float32",
        "direction": FORWARD,
        "threads": 1,
        "timings": timings,
        "lists": ["quick"],
        "geometry": {"name": name},
        "pixels": 100,
        "flops": 40,
        "bytes": 10,
        "roof": 80.0,
        "errors": {OURS: 1e-7},
    }
    return Result(**{**known, **fields})


def made_up_document(results: list[Result], kind: str = "layers") -> Document:
    return Document(
        kind=kind,
        machine={"cpu": "some CPU", "isa": "avx2", "torch_isa": "AVX2", "versions": {"torch": "1"}},
        settings={"allow_disturbed": False},
        roofline=fake_roofline().describe(),
        quiet={"at_start": None},
        results=results,
        left_out={},
    )


# ---- statistics and rounds


def test_timing_statistics():
    timing = Timing(1, [5.0, 1.0, 2.0, 4.0, 3.0], 0.0)
    assert (timing.median_s, timing.min_s, timing.quartiles_s) == (3.0, 1.0, (2.0, 4.0))
    assert Timing(1, [2.0], 0.0).quartiles_s == (2.0, 2.0)
    assert geomean([0.5, 2.0, 8.0]) == pytest.approx(2.0)


def test_result_ratios():
    result = made_up_result("a", ours=0.5)
    assert result.speedup(OURS, ATEN) == pytest.approx(2.0, rel=0.05)
    assert result.flops_per_s(OURS) == pytest.approx(80.0, rel=0.02)
    assert result.roofline_share(OURS) == pytest.approx(1.0, rel=0.02)
    del result.timings[ATEN]
    assert result.speedup(OURS, ATEN) is None
    result.roof = 0.0
    assert result.roofline_share(OURS) is None


def test_rounds_are_interleaved():
    time = FakeTime()
    calls = {name: time.call(name, 0.1) for name in "abc"}
    timings = measure(calls, Plan(budget_s=1.8, round_s=0.2), clock=time)
    # Two calls a turn, eight rounds; the warm-up comes before, contestant by contestant.
    assert [len(t.rounds_s) for t in timings.values()] == [8, 8, 8]
    turns = time.log[-8 * 3 * 2 :: 2]
    orders = [tuple(turns[3 * number : 3 * number + 3]) for number in range(8)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) >= 4  # of six
    assert all(t.rounds_s == pytest.approx([0.1] * 8) for t in timings.values())
    assert {t.calls for t in timings.values()} == {2}


def test_a_budget_sets_the_number_of_rounds():
    plan = Plan(budget_s=10.0, fewest_rounds=5, most_rounds=30, slow=4.0, slow_rounds=3)
    assert plan_rounds({"a": 0.5, "b": 0.5}, plan) == {"a": 10, "b": 10}
    assert plan_rounds({"a": 5.0, "b": 5.0}, plan) == {"a": 5, "b": 5}
    assert plan_rounds({"a": 1e-3, "b": 1e-3}, plan) == {"a": 30, "b": 30}
    # A slow reference's three rounds are paid for first; a slow peer has as many as the others.
    turns = {"a": 0.25, "b": 0.25, "c": 2.0}
    with_reference = dataclasses.replace(plan, references=frozenset({"c"}))
    assert plan_rounds(turns, with_reference) == {"a": 8, "b": 8, "c": 3}
    assert plan_rounds(turns, plan) == {"a": 5, "b": 5, "c": 5}


# ---- disturbances


def quiet_monitor(probe_seconds, cpu_times=lambda: QUIET_TIMES, **options) -> Monitor:
    probes = [Probe("probe", 0.1, lambda threads: next(probe_seconds))]
    return Monitor([1], probes, cpu_times=cpu_times, **options)


def test_a_quiet_machine_is_not_refused():
    monitor = quiet_monitor(itertools.cycle([1.0, 1.05]))
    assert monitor.calibrate() is None
    monitor.begin()
    assert monitor.disturbance(1) is None


def test_a_slower_probe_is_a_disturbance():
    monitor = quiet_monitor(itertools.chain([1.0] * 20, [1.2]))
    assert monitor.calibrate(samples=20) is None
    monitor.begin()
    assert monitor.disturbance(1) == "probe took 1.20 times as long as when quiet"


def test_an_unsteady_machine_is_refused_at_the_start():
    monitor = quiet_monitor(itertools.cycle([1.0, 1.5, 1.5]))
    assert monitor.calibrate() == "probe took 1.50 times as long as when quiet"


@pytest.mark.parametrize(
    ("all_busy", "own", "reason"),
    [
        (2.0, 2.0, None),  # two threads of ours
        (2.2, 2.0, None),  # a tenth of a CPU is tolerated here
        (3.0, 2.0, "other processes used 0.50 CPUs"),
        (2.0, 1.0, "other processes used 0.50 CPUs"),  # also what a hypervisor takes away
        (None, 1.0, None),  # the system doesn't tell
    ],
)
def test_others_use_of_the_cpus_is_a_disturbance(all_busy, own, reason):
    times = iter([QUIET_TIMES, QUIET_TIMES, QUIET_TIMES, QUIET_TIMES, CpuTimes(2.0, all_busy, own)])
    monitor = quiet_monitor(itertools.repeat(1.0), lambda: next(times), foreign_cpus=0.1)
    assert monitor.calibrate() is None
    monitor.begin()
    assert monitor.disturbance(1) == reason


def test_a_busy_process_is_noticed_for_real():
    """The kernel's own figures, with a process that works beside this one."""
    if not read_cpu_times().all_busy:
        pytest.skip("this system does not count the CPU time of all processes")
    monitor = Monitor([1], [Probe("none", math.inf, lambda threads: 1.0)], foreign_cpus=0.1)
    monitor.calibrate()
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        monitor.begin()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1.0)
        assert "other processes used" in monitor.disturbance(1)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("slow_attempts", "attempts", "stays_disturbed"),
    [(0, 1, False), (1, 2, False), (2, 3, False), (9, 3, True)],
)
def test_disturbed_measurements_are_repeated(slow_attempts, attempts, stays_disturbed):
    seconds = itertools.chain([1.0] * 20, [2.0] * slow_attempts, itertools.repeat(1.0))
    monitor = quiet_monitor(seconds)
    monitor.calibrate(samples=20)
    timings, reason, made = measure_undisturbed(
        {"a": lambda: None}, Plan(0.0, fewest_rounds=1, round_s=1e-6), monitor, 1, attempts=3
    )
    assert made == attempts
    assert (reason is not None) == stays_disturbed
    assert len(timings["a"].rounds_s) == 1, "a disturbed attempt's rounds are thrown away"


@pytest.fixture
def _no_measuring(monkeypatch):
    """The program without its slow parts; what a case takes and whether it is disturbed are set."""
    monkeypatch.setattr(program, "Roofline", lambda threads, dtypes: fake_roofline())
    monkeypatch.setattr(machine, "keep_freed_memory", lambda: True)
    monkeypatch.setattr(Monitor, "__init__", lambda self, *args, **options: None)
    monkeypatch.setattr(Monitor, "calibrate", lambda self: None)
    monkeypatch.setattr(Monitor, "begin", lambda self: None)
    monkeypatch.setattr(Monitor, "disturbance", lambda self, threads: None)
    monkeypatch.setattr(Monitor, "describe", lambda self: {})


@pytest.fixture
def small_run(tmp_path, _no_measuring):
    """Arguments of a run of one case that takes a fraction of a second, and its JSON file."""
    arguments = ["layers", "--quick", "--filter", "resnet50 512@7", "--directions", FORWARD]
    arguments += ["--threads", "1", "--case-seconds", "0.01", "--output", str(tmp_path)]
    return arguments, tmp_path / "layers.json"


def test_a_busy_machine_is_refused(small_run, monkeypatch, capsys):
    arguments, file = small_run
    monkeypatch.setattr(Monitor, "calibrate", lambda self: "others were busy")
    assert program.main(arguments) == program.DISTURBED
    assert "the machine is not quiet: others were busy" in " ".join(capsys.readouterr().out.split())
    assert not file.exists()
    assert program.main([*arguments, "--allow-disturbed"]) == 0
    assert Document.read(file).quiet["at_start"] == "others were busy"


def test_a_disturbed_case_is_marked_and_fails_the_run(small_run, monkeypatch, capsys):
    arguments, file = small_run
    monkeypatch.setattr(Monitor, "disturbance", lambda self, threads: "others were busy")
    assert program.main(arguments) == program.DISTURBED
    (result,) = Document.read(file).results
    assert (result.disturbed, result.attempts) == ("others were busy", 3)
    assert result.timings, "what was measured is kept, with its mark"
    assert "Disturbed: 1 of 1 cases" in capsys.readouterr().out
    assert not list(file.parent.glob("*.png")), "no picture shows disturbed figures"
    assert program.main([*arguments, "--allow-disturbed", "--attempts", "1"]) == 0
    assert Document.read(file).results[0].disturbed == "others were busy"


def test_wrong_results_fail_the_run(small_run, monkeypatch, capsys):
    arguments, file = small_run
    wrong = dataclasses.replace(CONTESTANTS[0], function=twice)
    monkeypatch.setattr(layers, "CONTESTANTS", (wrong, *CONTESTANTS[1:]))
    assert program.main(arguments) == program.WRONG
    (result,) = Document.read(file).results
    assert OURS not in result.timings
    assert OURS in result.wrong
    assert "WRONG RESULTS" in capsys.readouterr().out


# ---- blocks, budget


def twice(*args, **kwargs) -> torch.Tensor:
    return 2 * torch.nn.functional.conv2d(*args, **kwargs)


@dataclasses.dataclass
class FakeBlock:
    title: str
    time: FakeTime
    case_s: float
    why_not: str | None = None
    case_count: int = 2

    def refusal(self) -> str | None:
        return self.why_not

    def cases(self, roofline):
        for threads in (1, 2):
            result = Result(self.title, "3x3", "float32", FORWARD, threads, {})
            yield result, {"a": self.time.call(self.title, self.case_s)}


def test_a_run_keeps_its_time(monkeypatch):
    time, budgets, progress = FakeTime(), [], []

    def fake_measure(calls, plan, monitor, threads, attempts):
        budgets.append(plan.budget_s)
        calls["a"]()
        return {"a": Timing(1, [1.0], 0.0)}, None, 1

    monkeypatch.setattr("benchmarks.runner.measure_undisturbed", fake_measure)
    blocks = [
        FakeBlock("first", time, 10.0),
        FakeBlock("refused", time, 1.0, "too large"),
        FakeBlock("second", time, 40.0),
        FakeBlock("late", time, 1.0),
    ]
    results, left_out = run_blocks(
        blocks,
        Limits(case_s=30.0, seconds=80.0, attempts=1, plan=Plan(0.0)),
        monitor=None,
        roofline=None,
        advance=lambda title, cases: progress.append(cases),
        clock=time,
    )
    assert [r.key for r in results] == [
        (name, "float32", FORWARD, threads) for name in ("first", "second") for threads in (1, 2)
    ]
    assert left_out == {"refused": "too large", "late": "no time left of 80 s"}
    # 80 s over 8 cases, 70 over 7; then 60 over the 4 that remain, 20 over 3.
    assert budgets == pytest.approx([10.0, 10.0, 15.0, 20 / 3])
    assert sum(progress) == 8


def test_a_problem_too_large_for_the_machine_is_refused(monkeypatch):
    block = LayerBlock(POST, [], torch.float32, DIRECTIONS, [1], CONTESTANTS)
    assert block.refusal() is None
    monkeypatch.setattr(layers, "available_bytes", lambda: 2**20)
    assert "more than half of the memory available" in block.refusal()


def test_columns_too_large_leave_the_reference_out(monkeypatch):
    monkeypatch.setattr(layers, "_COLUMNS_LIMIT", 100)
    block = LayerBlock(SMALL, [], torch.float32, [FORWARD], [1], CONTESTANTS)
    ((result, calls),) = block.cases(fake_roofline())
    assert PYTHON not in calls
    assert "columns" in result.left_out[PYTHON]


# ---- what is measured


@pytest.mark.parametrize("contestant", CONTESTANTS, ids=lambda c: c.name)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_call_computes_its_direction(contestant, direction):
    tensors = layers.draw(SMALL, torch.float64, contestant.memory_format)
    call = layers.make_call(contestant.function, SMALL, tensors, direction)
    wanted = layers.select_results(aten_results(SMALL, tensors), direction)
    for _ in range(2):  # a kept graph must give its gradient in every call
        actual = call()
        actual = actual if isinstance(actual, tuple) else (actual,)
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("dtype", layers.TOLERANCES, ids=str)
def test_a_block_times_every_contestant(dtype):
    block = LayerBlock(SMALL, ["some"], dtype, DIRECTIONS, [1, 2], CONTESTANTS)
    cases = list(block.cases(fake_roofline()))
    assert len(cases) == block.case_count == 8
    for result, calls in cases:
        assert list(calls) == [c.name for c in CONTESTANTS]
        assert result.wrong is None
        assert set(result.errors) == set(calls)
        assert result.flops == SMALL.flops * (3 if result.direction == BOTH else 1)


def test_some_layers_of_each_class_come_first():
    chosen = problems.select(problems.DEFAULT_LISTS, [1])
    blocks = [LayerBlock(p, n, torch.float32, [FORWARD], [1], CONTESTANTS) for p, n in chosen]
    ordered = program._sampled(blocks, first=2)
    assert sorted(map(id, ordered)) == sorted(map(id, blocks))
    assert [b for b in ordered if b in blocks[:9]] != blocks[:9]  # shuffled
    assert [id(b) for b in ordered] == [id(b) for b in program._sampled(blocks, first=2)]
    every = Counter(problems.layer_class(block.problem) for block in blocks)
    early = sum(min(count, 2) for count in every.values())
    counts = Counter(problems.layer_class(block.problem) for block in ordered[:early])
    assert counts == {name: min(count, 2) for name, count in every.items()}
    assert {"stem", "dilated", "depthwise"} <= set(counts)


def test_a_contestant_that_fails_is_left_out():
    def refuses(*args, **kwargs):
        raise RuntimeError("not for me\nand more")

    odd = [
        dataclasses.replace(CONTESTANTS[2], name="twice", function=twice),
        dataclasses.replace(CONTESTANTS[2], name="refuses", function=refuses),
    ]
    block = LayerBlock(SMALL, [], torch.float32, [FORWARD], [1], [*CONTESTANTS, *odd])
    ((result, calls),) = block.cases(fake_roofline())
    assert set(calls) == {c.name for c in CONTESTANTS}
    assert result.left_out == {
        "twice": "wrong: relative error 1",
        "refuses": "refused: not for me",
    }
    assert result.wrong is None, "only this library's faults fail the run"


def test_images_of_a_batch_have_their_format():
    tensors = layers.draw(SMALL, torch.float32, torch.channels_last)
    assert tensors.input.shape == SMALL.input_shape
    assert tensors.grad_output.shape == SMALL.output_shape
    for tensor in (tensors.input, tensors.weight, tensors.grad_output):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
def test_a_model_is_timed_converted_and_not():
    ((result, calls),) = ModelBlock("resnet18", 2, [1], ["NCHW"]).cases(fake_roofline())
    assert list(calls) == [ATEN, OURS, MODE]
    assert result.wrong is None
    assert max(result.errors.values()) < 1e-4
    networks = {name: call.args[0] for name, call in calls.items()}
    for name, kind in ((ATEN, torch.nn.Conv2d), (OURS, conv2d_ext.Conv2d)):
        layers_of_kind = [m for m in networks[name].modules() if type(m) is kind]
        assert len(layers_of_kind) == 20
    assert calls[OURS]().shape == (2, 1000)
    assert not torch.equal(calls[MODE](), calls[ATEN]()), "the mode was not on"


@pytest.mark.slow
def test_a_model_whose_head_is_zero_is_checked_all_the_same():
    ((result, _),) = ModelBlock("vit_b_32", 1, [1], ["NCHW"]).cases(fake_roofline())
    assert result.wrong is None
    assert not result.left_out
    assert 0 < max(result.errors.values()) < 1e-4


# ---- problems


def test_problems_are_there_once():
    selected = problems.select(["resnet50", "deeplabv3", "resnet50"], [1, 8])
    geometries = [dataclasses.replace(p, name="", bias=False) for p, _ in selected]
    assert len(set(geometries)) == len(geometries)
    assert {p.batch for p, _ in selected} == {1, 8}
    distinct = {dataclasses.replace(p, name="") for p in REAL_LAYERS["resnet50"]}
    assert sum(lists == ["resnet50"] for _, lists in selected) == 2 * len(distinct)
    (shared,) = (lists for p, lists in problems.select(["post", "quick"], [1], "^post"))
    assert shared == ["post", "quick"]


def test_every_list_has_problems_with_work():
    for name in problems.LISTS:
        selected = problems.select([name], [1])
        assert selected
        for problem, _ in selected:
            assert problem.flops > 0
            problem.call_args()  # raises where F.conv2d can't express it


@pytest.mark.parametrize(
    ("layer", "wanted"),
    [
        ("resnet50 3@224-64/k7s2p3", "stem"),
        ("resnet50 64@56-64/k3p1", "3x3"),
        ("resnet50 256@56-512/s2", "1x1"),
        ("deeplabv3 512@65-512/k3p4d4", "dilated"),
        ("convnext_tiny 96@56-192/k2s2", "other"),
        ("convnext_tiny 96@56-96/k7p3g96", "depthwise"),
        ("efficientnet_b0 4@1-96", "1 pixel"),
    ],
)
def test_layer_classes(layer, wanted):
    assert problems.layer_class(real_layer(layer)) == wanted


def test_quick_has_every_class():
    present = {problems.layer_class(p) for p in problems.QUICK}
    assert present == set(problems.LAYER_CLASSES) - {"other", "1 pixel"}
    assert {problems.layer_class(p) for p in problems.RESNEXT50} == {"grouped"}


# ---- the roofline


def test_the_bound_is_the_lower_of_peak_and_bandwidth():
    fake = fake_roofline()
    # 30 FLOPs for each byte, then 1, in the fastest memory; then in the slowest.
    assert fake.bound(3000, 100, 100, torch.float32, 1) == 100.0
    assert fake.bound(100, 100, 100, torch.float32, 1) == 50.0
    assert fake.bound(100, 100, 2**40, torch.bfloat16, 2) == 5.0
    assert fake.bound(3000, 100, 100, torch.float64, 1) == 50.0
    between = 2 ** ((math.log2(roofline._FOOTPRINTS[-1]) + math.log2(roofline._FOOTPRINTS[-2])) / 2)
    assert fake.bandwidth(int(between), 1) == pytest.approx(math.sqrt(50.0 * 5.0))


def test_work_counts_what_has_to_move():
    problem = Problem("strided 1x1", 2, 8, (8, 8), 4, (1, 1), (2, 2))
    read, inputs, weights, outputs = 2 * 8 * 4 * 4, 2 * 8 * 8 * 8, 4 * 8, 2 * 4 * 4 * 4
    operands = 4 * (inputs + weights + outputs)
    flops = 2 * outputs * 8
    assert layers.work(problem, torch.float32, FORWARD) == (
        flops, 4 * (read + weights + outputs), operands,
    )  # fmt: skip
    assert layers.work(problem, torch.float32, GRAD_INPUT) == (flops, operands, operands)
    assert layers.work(problem, torch.float32, GRAD_WEIGHT)[1] == 4 * (read + weights + outputs)
    assert layers.work(problem, torch.float64, BOTH)[0] == 3 * flops


def _disassembled(code: bytes, folder) -> tuple[list[str], list[list[str]]]:
    """The addresses of the instructions; each one's mnemonic and operands."""
    file = folder / "loop.bin"
    file.write_bytes(code)
    command = ["objdump", "-D", "-b", "binary", "-m", "i386:x86-64", "--no-show-raw-insn", file]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions = [line.split(":", 1) for line in text.splitlines() if ":\t" in line]
    return [a.strip() for a, _ in instructions], [what.split() for _, what in instructions]


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump, of binutils")
@pytest.mark.parametrize("element_bytes", [4, 8])
@pytest.mark.parametrize("vector_bytes", [32, 64])
def test_the_fma_loop_is_the_code_it_says(vector_bytes, element_bytes, tmp_path):
    addresses, lines = _disassembled(fma_loop_code(vector_bytes, element_bytes), tmp_path)
    mnemonics = [line[0] for line in lines]
    register, suffix = ("ymm", "zmm")[vector_bytes == 64], ("ps", "pd")[element_bytes == 8]
    fma = f"vfmadd231{suffix}"
    assert "(bad)" not in mnemonics
    assert mnemonics.count(fma) == 48
    fmas = [line[1] for line in lines if line[0] == fma]
    assert set(fmas) == {f"%{register}15,%{register}14,%{register}{n}" for n in range(12)}
    assert lines[mnemonics.index("jne")][1] == f"0x{addresses[mnemonics.index(fma)]}"
    assert mnemonics[-2:] == ["vzeroupper", "ret"]


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump, of binutils")
def test_the_loop_of_tiles_is_the_code_it_says(tmp_path):
    addresses, lines = _disassembled(tile_loop_code(), tmp_path)
    mnemonics = [line[0] for line in lines]
    assert mnemonics[:9] == ["ldtilecfg", *["tilezero"] * 8]
    assert [line[1] for line in lines[1:9]] == [f"%tmm{n}" for n in range(8)]
    products = [line[1] for line in lines if line[0] == "tdpbf16ps"]
    assert products == 4 * [
        "%tmm6,%tmm4,%tmm0", "%tmm7,%tmm4,%tmm1", "%tmm6,%tmm5,%tmm2", "%tmm7,%tmm5,%tmm3"
    ]  # fmt: skip
    assert lines[mnemonics.index("jne")][1] == f"0x{addresses[9]}"
    assert mnemonics[-2:] == ["tilerelease", "ret"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_product_is_faster_than_the_peak(dtype):
    loop = FmaLoop(dtype)
    if "loop" not in loop.method:
        pytest.skip(f"on this CPU the peak is {loop.method}")
    torch.set_num_threads(1)
    a = torch.ones(384, 384, dtype=dtype)
    times = measure({"mm": lambda: torch.mm(a, a), "loop": loop.run}, Plan(0.2))
    product = 2 * 384**3 / times["mm"].min_s
    peak = loop.flops / times["loop"].min_s
    # torch may use wider vectors than this library was told to.
    if os.environ.get("CONV2D_EXT_CPU_ISA") in (None, "avx512", "avx512_bf16", "amx"):
        assert 0.02 * peak < product < 1.1 * peak


# ---- files, tables, pictures


def test_json_round_trip(tmp_path):
    document = made_up_document([made_up_result("a", 0.5), made_up_result("b", 2.0, roof=0.0)])
    document.results[1].disturbed = "others were busy"
    document.left_out["c"] = "too large"
    document.write(tmp_path / "a.json")
    assert Document.read(tmp_path / "a.json") == document
    record = json.loads((tmp_path / "a.json").read_text())["results"][0]["timings"][OURS]
    assert record["median_s"] == statistics.median(record["rounds_s"])
    assert record["roofline_share"] == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 1, "results": 3}', '{"schema": 0}']
)
def test_other_files_are_refused(text, tmp_path, capsys):
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"a\.json"):
        Document.read(file)
    with pytest.raises(SystemExit) as stopped:
        program.main(["show", str(file)])
    assert stopped.value.code == 2
    assert "a.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layers", "--threads", "0"], "--threads"),
        (["layers", "--seconds", "-1"], "wanted a positive number, got '-1'"),
        (["layers", "--filter", "("], "not a regular expression"),
        (["layers", "--batch", "0"], "0: not a number from 1 on"),
        (["layers", "--dtypes", "int8"], "invalid choice: 'int8'"),
        (["layers", "--lists", "lenet"], "invalid choice: 'lenet'"),
        (["show", "/none/such.json"], "No such file"),
        (["growth", "--output", "/proc/none"], "cannot write there"),
        ([], "required"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        program.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_an_empty_selection_is_refused(capsys):
    assert program.main(["layers", "--filter", "nothing is called so"]) == 2
    assert "no problem was selected" in capsys.readouterr().err


def test_the_summary_takes_classes_together():
    results = [
        made_up_result("a", 0.5, layer_class="3x3"),
        made_up_result("b", 2.0, layer_class="1x1"),
        made_up_result("c", 0.25, layer_class="grouped"),
        made_up_result("d", 0.01, layer_class="3x3", disturbed="others were busy"),
    ]
    document = made_up_document(results)
    text = io.StringIO()
    print_document(Console(file=text, width=120), document)
    rows = {}
    for line in text.getvalue().splitlines():
        if row := re.match(r" (3x3|1x1|grouped|all dense) +(\d+) +([\d.]+) +([\d.]+) ", line):
            rows[row[1]] = [float(cell) for cell in row.groups()[1:]]
    # Cases, geometric mean, worst.
    assert rows["3x3"] == pytest.approx([1, 2.0, 2.0], rel=0.02)
    assert rows["all dense"] == pytest.approx([2, 1.0, 0.5], rel=0.02)
    assert rows["grouped"] == pytest.approx([1, 4.0, 4.0], rel=0.02)
    assert "Disturbed: 1 of 4 cases" in text.getvalue()


def test_growth_is_relative_to_the_best():
    results = [
        made_up_result(f"batch {n}", seconds, pixels=100 * n, lists=["batch"])
        for n, seconds in ((1, 1.5), (2, 2.0), (4, 4.4))
    ]
    (table,) = growth_tables(results)
    column = list(table.columns[2].cells)
    assert [float(cell) for cell in column] == pytest.approx([1.5, 1.0, 1.1], abs=0.03)


@pytest.mark.parametrize("kind", ["layers", "models", "growth"])
def test_pictures(kind, tmp_path):
    results = [
        made_up_result(f"{name} {threads}", ours, layer_class=name, threads=threads, direction=d)
        for threads in (1, 2)
        for d in (FORWARD, BOTH)
        for name, ours in (("3x3", 0.5), ("depthwise", 1.5))
    ]
    paths = plots.draw(made_up_document(results, kind), tmp_path)
    names = {
        "layers": ["ratios-float32-NCHW", "ratios-float32-channels_last", "roofline-float32"],
        "models": ["models"],
        "growth": ["growth"],
    }
    assert [path.stem for path in paths] == names[kind]
    for path in paths:
        with Image.open(path) as image:
            assert image.width > 500
            assert len(image.convert("RGB").getcolors(maxcolors=2**20)) > 20
    for result in results:
        result.disturbed = "others were busy"
    assert plots.draw(made_up_document(results, kind), tmp_path) == []


def test_pictures_mark_what_was_disturbed(tmp_path):
    """Bars are hatched, dots hollow, points of growth grey: the pictures differ."""
    results = [made_up_result(f"{n}", 0.5, lists=["batch"], pixels=n) for n in (1, 2, 3)]
    for kind in ("layers", "models", "growth"):
        pictures = []
        for disturbed in (None, "others were busy"):
            results[0].disturbed = disturbed
            document = made_up_document(results, kind)
            document.settings["allow_disturbed"] = True
            folder = tmp_path / f"{kind} {disturbed}"
            folder.mkdir()
            pictures.append(plots.draw(document, folder)[0].read_bytes())
            if kind == "layers":
                path = plots.save(plots.speed_by_class(document), folder / "speed.png")
                pictures[-1] += path.read_bytes()
        assert pictures[0] != pictures[1], kind


def test_every_bar_has_its_layers_name():
    results = [made_up_result(f"layer {n}", 0.5 + n / 100) for n in range(200)]
    figure = plots._ratios(results, OURS, ATEN, "title")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert {result.name for result in results} <= set(labels)


# ---- figures of the documents


def test_a_mean_of_a_few_undisturbed_cases_is_not_shown():
    results = [
        made_up_result(name, 0.5, threads=threads, disturbed=disturbed)
        for threads, disturbed in ((1, None), (2, "busy"))
        for name in ("a", "b", "c")
    ]
    results[3].disturbed = None  # one of three on two threads
    *_, row = figures.speed_table(made_up_document(results), directions=[FORWARD])
    assert re.search(r"\| 2\.0\d, – \(", row)
    results[4].disturbed = None
    *_, row = figures.speed_table(made_up_document(results), directions=[FORWARD])
    assert "–" not in row


def test_the_table_of_speeds():
    results = [
        made_up_result(f"{name} {n}", ours, layer_class=name, threads=n, direction=direction)
        for n in (1, 2)
        for direction in (FORWARD, BOTH)
        for name, ours in (("3x3", 0.5), ("depthwise", 2.0))
    ]
    document = made_up_document(results)
    head, *_ = figures.speed_table(document, directions=[FORWARD])
    assert head == "| layers | NCHW, forward | channels_last, forward |"
    head, _, *rows = figures.speed_table(document)
    of = ("NCHW, forward", "NCHW, forward + backward")
    assert head.startswith(f"| layers | {of[0]} | {of[1]} | channels_last, forward |")
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [row[0] for row in cells] == ["3 × 3", "depthwise"]
    for row, ratio in zip(cells, (2.0, 0.5), strict=True):
        for cell in row[1:3]:
            one, two, slowest = map(float, re.fullmatch(r"(.+), (.+) \((.+)\)", cell).groups())
            assert one == pytest.approx(ratio, rel=0.02)
            assert two == pytest.approx(ratio, rel=0.02)
            assert slowest <= max(one, two) + 0.01


def test_marked_parts_of_the_readme_must_be_there(monkeypatch, tmp_path):
    document = made_up_document([made_up_result("a", 0.5)])
    document.machine |= {"usable_cpus": 2, "versions": {"torch": "1", "revision": None}}
    for name in ("layers", "amx"):
        document.write(tmp_path / f"{name}.json")
    found = {"machine": document.machine, "layers": {}}
    (tmp_path / "bits.json").write_text(json.dumps(found))
    (tmp_path / "cuda").mkdir()
    machine = {"gpu": "NVIDIA X1", "versions": {"revision": None}}
    figures.cuda.Document(machine, {}, {}, [], {}, 0.0).write(tmp_path / "cuda" / "benchmark.json")
    (tmp_path / "cuda" / "checks.json").write_text(json.dumps({"since": []}))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    marks = "<!-- {0}: x -->\nold\n<!-- end of {0} -->\n"
    text = figures.readme_text("a\n" + marks.format("bits") + marks.format("speed") + "b\n")
    assert "old" not in text
    assert "| 3 × 3 |" in text
    assert "On an X1 (commit ?), forward:" in text
    assert text.startswith("a\n<!-- bits: x -->\n\n| ")
    assert figures.readme_text(text) == text
    with pytest.raises(ValueError, match="0 parts that are marked as speed"):
        figures.readme_text(marks.format("bits"))


def test_dtypes_of_a_document_have_parts_of_their_own():
    """Seen to fail with all cases in both parts, and with all that was left out in both."""
    results = [
        made_up_result("a", ours, dtype=dtype, threads=threads)
        for dtype, ours in (("bfloat16", 0.25), ("float32", 0.5))
        for threads in (1, 2)
    ]
    document = made_up_document(results)
    document.left_out = {"a": "no time left", "b": "no memory"}
    document.machine |= {"usable_cpus": 2, "versions": {"torch": "1", "revision": None}}
    text = "\n".join(figures._amx_section(document))
    first, second = text.split("### bfloat16")
    rows = [re.search(r"\| 3 × 3 \| ([\d.]+), ([\d.]+) ", part) for part in (first, second)]
    for row, ratio in zip(rows, (2.0, 4.0), strict=True):
        assert [float(mean) for mean in row.groups()] == pytest.approx([ratio, ratio], rel=0.02)
    assert text.count("Not measured: 1 layers (no memory).") == 2
    found = re.search(r"the last row: float32 ([\d.]+), .*; bfloat16 ", figures._amx_line(document))
    assert float(found[1]) == pytest.approx(2.0, rel=0.02)


def test_measurements_for_an_instruction_set_are_kept_where_it_is_not_in_use(monkeypatch, tmp_path):
    """The file that the command writes is kept under the measurement's name."""
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(figures, "write_all", list)

    def run(command, cwd, env):
        file = cwd / command[command.index("--output") + 1] / "layers.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
        return subprocess.CompletedProcess(command, figures.DISTURBED)

    monkeypatch.setattr(figures.subprocess, "run", run)
    for isa, kept in (("avx2", []), ("amx", ["amx.json"])):
        monkeypatch.setattr(figures, "build_config", lambda isa=isa: {"isa": isa})
        assert figures.main(["--only", "amx"]) == 0
        assert [path.name for path in (tmp_path / "results").iterdir()] == kept


def test_bits_tell_what_differs(monkeypatch):
    """Seen to fail with a comparison by values, and without each axis of `measure`."""

    def moody(input, weight, bias, **arguments):
        output = conv2d_ext.conv2d(input, weight, bias, **arguments)
        if len(input) > 1:
            output = output * -1.0
        if torch.get_num_threads() > 1:
            weight.register_hook(lambda grad: grad * 2)
        if input.is_contiguous(memory_format=torch.channels_last):
            input.register_hook(lambda grad: grad * 2)
        if torch.are_deterministic_algorithms_enabled():
            output = output + 1.0
        return output

    monkeypatch.setitem(bits.CONTESTANTS, "F.conv2d", moody)
    monkeypatch.setitem(bits.CONTESTANTS, bits.DETERMINISTIC, moody)
    layer = bits.Layer(dataclasses.replace(SMALL, batch=1))
    found = bits.measure(layer, "F.conv2d")
    assert found == {
        "batch": ["output", "grad_input"],
        "threads": ["grad_weight"],
        "format": ["grad_input"],
        "run": [],
    }
    assert bits.measure(layer, "conv2d_ext") == {axis: [] for axis in bits.AXES}
    plain, moved = (layer.results(name, [0])["output"] for name in ("F.conv2d", bits.DETERMINISTIC))
    assert torch.equal(plain + 1.0, moved), "the setting is on while it is measured"
    assert not torch.are_deterministic_algorithms_enabled()
    assert not bits.same_bits(torch.zeros(1), -torch.zeros(1))

    layers = {"a": dict.fromkeys(bits.CONTESTANTS, found)}
    layers["a"]["conv2d_ext"] = {axis: [] for axis in bits.AXES}
    rows = bits.table({"layers": layers})
    assert rows[2] == (
        "| Batch size, place in the batch | outputs 1, gradients 1 | outputs 1, gradients 1 "
        "| **none** |"
    )
    assert rows[-1].count("**none**") == 3


def test_bits_are_counted_for_large_pictures_and_small():
    chosen = bits.select_layers("resnet50 64@56-64/k3p1")
    assert [layer.in_size for layer in chosen] == [(56, 56), (16, 16)]
    assert len(set(bits.select_layers())) == len(bits.select_layers())


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="measured through Linux's /proc"
)
def test_memory_is_what_a_call_needs_beside_its_results():
    columns = 64 * 9 * 128 * 128 * 4
    assert 0.9 * columns < memory.measure_in_a_process(PYTHON, FORWARD, 128) < 2 * columns
    assert memory.measure_in_a_process(OURS, FORWARD, 128) < 2 * 4 * 2**20


# ---- comparing


def test_compare_tells_differences_from_chance():
    before = [made_up_result(name, 1.0) for name in "abcd"] + [made_up_result("e", 1.0)]
    after = [
        made_up_result("a", 1.0001),  # other rounds of the same
        made_up_result("b", 0.5),
        made_up_result("c", 1.3),
        made_up_result("d", 1.02),  # not chance, and too little to count
        made_up_result("e", 0.1, disturbed="others were busy"),
        made_up_result("f", 1.0),
    ]
    differences = compare(made_up_document(before), made_up_document(after), (OURS,))
    assert [d.key[0] for d in differences] == ["a", "b", "c", "d"]
    assert [d.verdict(0.03) for d in differences] == ["same", "faster", "slower", "same"]
    assert [d.ratio for d in differences] == pytest.approx([1, 2, 1 / 1.3, 1 / 1.02], rel=0.02)
    assert differences[3].p < 0.01 < differences[0].p
    assert differences[3].verdict(0.005) == "slower"


def test_compare_adjusts_for_the_number_of_cases():
    def p_of_first(unchanged: int) -> float:
        names = [f"case {n}" for n in range(unchanged)]
        before, after = ([made_up_result(n, t) for n in names] for t in (1.0, 1.00001))
        first = [[made_up_result("first", t)] for t in (1.0, 0.985)]
        return compare(
            made_up_document(first[0] + before), made_up_document(first[1] + after), (OURS,)
        )[0].p

    assert p_of_first(0) < p_of_first(20) / 5


def test_compare_relative_to_a_contestant():
    """A machine that has become slower for everyone is no difference."""
    before, after = (
        made_up_document([made_up_result("a", seconds, aten=2 * seconds)]) for seconds in (1.0, 1.4)
    )
    (raw,) = compare(before, after, (OURS,))
    assert raw.verdict(0.03) == "slower"
    (relative,) = compare(before, after, (OURS,), relative_to=ATEN)
    assert relative.verdict(0.03) == "same"
    assert compare(before, after, (OURS,), relative_to="no such contestant") == []


def test_compare_names_other_conditions():
    before, after = made_up_document([]), made_up_document([])
    assert list(differing_conditions(before, after)) == []
    after.machine = {**after.machine, "isa": "avx512", "versions": {"torch": "2"}}
    assert list(differing_conditions(before, after)) == [
        "isa: avx2 and avx512", "torch: 1 and 2",
    ]  # fmt: skip


def test_compare_program(tmp_path, capsys):
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    for file, seconds in zip(files, (1.0, 1.3), strict=True):
        made_up_document([made_up_result("a", seconds)]).write(file)
    assert program.main(["compare", *map(str, files)]) == program.SLOWER
    assert "2 slower" in capsys.readouterr().out
    assert program.main(["compare", *map(str, files), "--threshold", "0.5"]) == 0
    assert program.main(["compare", *map(str, reversed(files))]) == 0
    # What compares nothing has not passed.
    assert program.main(["compare", *map(str, files), "--relative-to", "no contestant"]) == 2
    assert "2 faster" in capsys.readouterr().out


# ---- the machine, and a run as users start it


def test_malloc_keeps_large_blocks():
    """In a process of its own: a large tensor costs page faults at first, not in every call."""
    code = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "import resource, torch\n"
        "from benchmarks.machine import keep_freed_memory\n"
        "def faults(calls):\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for _ in range(calls): torch.zeros(2**24)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "plain = faults(5)\n"
        "kept = keep_freed_memory()\n"
        "faults(20)\n"  # until freed blocks are where they will stay: glibc needs about seven calls
        "print(kept, plain, faults(5))\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(Path(conv2d_ext.__file__).parents[1])},
    )  # fmt: skip
    kept, plain, after = process.stdout.split()
    if kept == "False":
        pytest.skip("this malloc is not glibc's")
    assert 10 * int(after) < int(plain)


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    """(finished process, the document, its folder) of one problem, under AVX2 where there is it."""
    folder = tmp_path_factory.mktemp("benchmarks")
    command = [sys.executable, "-m", "benchmarks", "layers", "--quick", "--allow-disturbed"]
    command += ["--filter", "resnet50 512@7", "--seconds", "4", "--attempts", "1", "--details"]
    command += ["--output", folder, "--threads", "1"]
    if {"avx2", "fma"} <= machine.cpu_flags():
        command += ["--isa", "avx2"]
    process = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(Path(conv2d_ext.__file__).parents[1])},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process, Document.read(folder / "layers.json"), folder


def test_quick_run_measures_everyone(quick_run):
    process, document, folder = quick_run
    assert [r.direction for r in document.results] == [FORWARD, BOTH]
    for result in document.results:
        assert list(result.timings) == [c.name for c in CONTESTANTS]
        assert all(t.median_s > 0 for t in result.timings.values())
        assert 0 < result.roofline_share(OURS) < 1.2
        assert max(result.errors.values()) < 1e-5
    assert "float32, forward, 1 thread" in process.stdout
    assert "resnet50 512@7-512/k3p1 batch 1" in process.stdout
    assert "\x1b" not in process.stdout
    assert process.stderr == ""
    for name in ("ratios-float32-NCHW", "ratios-float32-channels_last", "roofline-float32"):
        assert (folder / f"{name}.png").stat().st_size > 10_000


def test_quick_run_describes_its_machine(quick_run):
    _, document, _ = quick_run
    described = document.machine
    assert described["cpu"]
    assert described["caches"]
    assert described["versions"]["torch"] == torch.__version__
    assert described["command"][:4] == ["python", "-m", "benchmarks", "layers"]
    assert len(described["openmp"]) <= 1, "two pools of threads disturb each other"
    if document.settings["isa"]:
        assert described["isa"] == "avx2"
        assert described["torch_isa"] == "AVX2"
        assert described["environment"].items() >= machine.ISA_ENVIRONMENT["avx2"].items()
        assert "256-bit" in document.roofline["peak_method"]["float32"]


def test_show_prints_and_draws_a_saved_run(quick_run, tmp_path, capsys):
    _, _, folder = quick_run
    assert program.main(["show", str(folder / "layers.json"), "--plots", str(tmp_path)]) == 0
    assert "float32, forward, 1 thread" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.png"))) == 3
