"""The GPU's benchmark without a GPU: its order, budget, figures and words, on made-up times."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json

import pytest
import torch

from benchmarks.cuda import __main__ as program
from benchmarks.cuda import cases, device, measure, plots, report, run
from benchmarks.cuda.cases import ATEN, COMPOSITION, OURS, PYTHON, TUNED, Case, Contestant
from benchmarks.cuda.measure import Figures
from benchmarks.cuda.run import Document
from conv2d_ext.testing import POST, Problem

SMALL = Problem("small", 2, 3, (6, 7), 4, (3, 3), padding=(1, 1))
CPU = torch.device("cpu")


SECONDS = {OURS: 2e-6, ATEN: 4e-6, TUNED: 3e-6, PYTHON: 20e-6, COMPOSITION: 16e-6}


class MadeUpGpu:
    """Calls each contestant once and invents its times: SECONDS, and multiples of them."""

    def synchronize(self):
        pass

    def measure(self, calls, settings, figures, plan, eager):
        for name, call in calls.items():
            with settings[name]():
                call()
            seconds = SECONDS[name]
            figures[name].graph_s = [seconds * 1.1, seconds, seconds * 0.9]
            figures[name].kernels = [{"name": f"{name} kernel", "count": 1.0, "seconds": seconds}]
            if eager:
                figures[name].eager_s = [seconds * 3]
                figures[name].host_s = [seconds * 2]


def _case(problem=SMALL, precision=cases.FLOAT32, layout="NCHW", direction="forward",
          contestants=(OURS, ATEN, TUNED, PYTHON, COMPOSITION)):  # fmt: skip
    return Case("tier", problem, precision, layout, direction, contestants, True)


def _run(chosen, budget=1e9, free=2**40, gpu=None, **kwargs):
    def measure(case):
        return run.measure_here(case, gpu or MadeUpGpu(), CPU, lambda: free)

    return run.run_cases(chosen, measure, budget, lambda *a: None, **kwargs)


def _document(chosen):
    results, left_out = _run(chosen)
    machine = {
        "gpu": "Some GPU", "sm_count": 100, "driver": "1.2.3",
        "versions": {"torch": "2", "cudnn": 9, "revision": "abc"},
    }  # fmt: skip
    return Document(machine, {}, {"copy_bytes_per_s": 4e12}, results, left_out, 1.0)


def _printed(print_something, document, **kwargs):
    text = io.StringIO()
    print_something(document, stream=text, **kwargs)
    return text.getvalue()


# ---- which cases, and in which order


def test_the_plan_begins_with_the_post_and_has_each_case_once():
    planned = cases.plan()
    assert len({case.key for case in planned}) == len(planned)
    tiers = list(dict.fromkeys(case.tier for case in planned))
    assert tiers[0] == "the post"
    assert [case.tier for case in planned] == sorted(
        (case.tier for case in planned), key=tiers.index
    )
    first = [case for case in planned if case.tier == "the post" and case.problem == POST]
    assert {(c.precision.name, c.layout) for c in first} >= {
        ("float32", "NCHW"), ("TF32", "NCHW"), ("float16", "channels_last"),
        ("bfloat16", "channels_last"),
    }  # fmt: skip
    assert {case.direction for case in first} == set(cases.DIRECTIONS)
    for batch in (1, 8, 64):
        assert any(c.problem.batch == batch for c in planned if c.tier == "every class")
    assert cases.plan() == planned


@pytest.mark.parametrize("direction", cases.DIRECTIONS)
@pytest.mark.parametrize("layout", cases.FORMATS)
@pytest.mark.parametrize("problem", [SMALL, Problem("post", 1, 3, (8, 9), 4, (3, 3), bias=False),
                                     Problem("groups", 2, 4, (9, 8), 6, (3, 2), (2, 1), (1, 0),
                                             (1, 2), 2)], ids=str)  # fmt: skip
def test_all_contestants_compute_the_same(problem, layout, direction):
    case = _case(problem, layout=layout, direction=direction)
    tensors = cases.draw(case, CPU)
    found = dict(run._calls(case, tensors))
    wanted = {OURS, ATEN, TUNED}
    if direction == "forward":
        wanted |= {PYTHON, COMPOSITION} if problem.name == "post" else {PYTHON}
    assert set(found) == wanted
    for name, call in found.items():
        assert cases.error(case, tensors, call()) < 1e-6, name


def test_settings_hold_inside_and_are_taken_back():
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    for name, tuned in ((ATEN, False), (TUNED, True), (OURS, False)):
        for precision in (cases.TF32, cases.FLOAT32):
            with cases.CONTESTANTS[name].settings(precision):
                assert (cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32) == (
                    tuned, precision.tf32, precision.tf32,
                )  # fmt: skip
    assert (cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32) == before


# ---- the budget


def test_no_case_is_begun_that_would_not_fit():
    times = iter(range(0, 10_000, 5))  # each look at the clock is 5 s later
    chosen = [_case(dataclasses.replace(SMALL, name=f"number {n}")) for n in range(40)]
    results, left_out = _run(chosen, budget=100, clock=lambda: next(times))
    assert 2 <= len(results) <= 10
    assert len(results) + len(left_out) == 40
    assert set(left_out.values()) == {"no time left of 100 s"}
    assert [r.name for r in results] == [f"number {n}" for n in range(len(results))]


def test_what_does_not_fit_the_gpu_is_named():
    results, left_out = _run([_case(), _case(POST)], free=2**30 + 200_000)
    assert [result.name for result in results] == ["small"]
    assert "GiB of GPU memory" in left_out["post, float32, NCHW, forward"]


def test_failures_are_kept_and_eight_on_end_stop():
    class BrokenGpu(MadeUpGpu):
        def measure(self, calls, settings, figures, plan, eager):
            if self.number in (1, *range(3, 11)):
                self.number += 1
                raise RuntimeError("CUDA error: misaligned address\nmore")
            self.number += 1
            super().measure(calls, settings, figures, plan, eager)

        number = 0

    chosen = [_case(dataclasses.replace(SMALL, name=f"number {n}")) for n in range(14)]
    results, left_out = _run(chosen, gpu=BrokenGpu())
    assert [result.name for result in results] == ["number 0", "number 2"]
    reasons = list(left_out.values())
    assert reasons[:9] == ["failed: CUDA error: misaligned address"] * 9
    assert reasons[9:] == ["not begun after 8 failures on end"] * 3
    assert len(Document({}, {}, {}, results, left_out, 0.0).failed) == 9


# ---- results


def test_figures_and_ratios():
    (result,), _ = _run([_case()])
    assert set(result.figures) == {OURS, ATEN, TUNED, PYTHON}
    assert result.median(OURS, "graph") == 2e-6
    assert result.median(OURS, "kernel") == 2e-6
    assert result.speedup(TUNED, "kernel") == pytest.approx(1.5)
    assert result.speedup(ATEN, "host") == pytest.approx(2)
    assert result.speedup(COMPOSITION, "graph") is None
    assert not result.wrong
    assert all(figures.error < 1e-6 for figures in result.figures.values())


@pytest.mark.parametrize("fault", ["wrong", "refused"])
def test_a_contestant_that_is_wrong_is_not_timed(fault, monkeypatch):
    def make_call(problem, tensors, direction):
        def call():
            if fault == "refused":
                raise RuntimeError("no engine\nfor this")
            return torch.full(problem.output_shape, torch.nan)

        return call

    for name in (OURS, ATEN):
        monkeypatch.setitem(cases.CONTESTANTS, name, Contestant(name, make_call))
        (result,), _ = _run([_case()])
        assert name not in result.figures
        assert result.left_out[name].startswith(fault)
        assert bool(result.wrong) == (name == OURS)
        monkeypatch.undo()


def test_documents_come_back_from_their_files(tmp_path):
    document = _document([_case(), _case(POST, cases.TF32)])
    path = tmp_path / "run.json"
    document.write(path)
    assert Document.read(path) == document
    record = json.loads(path.read_text())["results"][0]["figures"][OURS]
    assert record["graph_median_s"] == record["kernel_median_s"] == 2e-6
    path.write_text('{"schema": 1}')
    with pytest.raises(ValueError, match="not a result"):
        Document.read(path)


# ---- words and pictures


@pytest.fixture(scope="module")
def document():
    resnet = [c for c in cases.plan([1]) if c.tier == "every class"][:12]
    small = [
        dataclasses.replace(c, problem=c.problem.shrunk(7), contestants=(OURS, ATEN, TUNED))
        for c in resnet
    ]
    post = dataclasses.replace(POST, in_size=(16, 16))
    return _document([
        *(_case(post, precision) for precision in cases.PRECISIONS.values()),
        _case(cases.TINY, cases.TF32),
        *small,
    ])  # fmt: skip


def test_tables(document):
    text = _printed(report.print_document, document, details=True)
    for words in ("Some GPU", "copy 4.00 TB/s", "post, forward: microseconds", "tiny, forward",
                  PYTHON, COMPOSITION, "over tuned", "1.50 (1.50)"):  # fmt: skip
        assert words in text
    assert "WRONG" not in text


def test_targets(document):
    rows = {what: (found, wanted) for what, found, wanted in report.targets(document)}
    assert rows["the post's problem, float32: kernel time, µs"] == (pytest.approx(2), "<= 16")
    assert rows["the post's problem, TF32: over Python"] == (pytest.approx(10), ">= 4.0")
    assert rows["layers, TF32 NCHW: over F.conv2d, cudnn.benchmark, kernel time"][0] == (
        pytest.approx(1.5)
    )
    text = _printed(report.print_targets, document)
    assert "MISSED" not in text
    slow = dataclasses.replace(document, results=[])
    assert "not measured" in _printed(report.print_targets, slow)


def test_a_missed_target_is_said_to_be(monkeypatch):
    monkeypatch.setitem(SECONDS, OURS, 50e-6)
    text = _printed(report.print_targets, _document([_case(POST, cases.TF32)]))
    assert "MISSED" in text


def test_wrong_results_and_what_was_left_out_are_named(document):
    document = dataclasses.replace(
        document,
        results=[dataclasses.replace(document.results[0], wrong="wrong: relative error 1")],
        left_out={"a": "no time left of 9 s", "b": "no time left of 9 s"},
    )
    text = _printed(report.print_document, document)
    assert "WRONG: post, float32" in text
    assert "2 cases: no time left of 9 s (the first: a)" in text


def test_pictures(document, tmp_path):
    from PIL import Image

    paths = plots.draw(document, tmp_path)
    assert [path.name for path in paths] == ["cuda-post.png", "cuda-layers.png"]
    for path in paths:
        with Image.open(path) as image:
            assert len(image.convert("RGB").getcolors(maxcolors=2**20)) > 20


# ---- the profiler's events


def test_kernels_between_markers():
    events = [
        (0, "memset before", 1.0), (1, "spin_kernel(long)", 9.0), (2, "a", 2.0), (3, "b", 1.0),
        (4, "a", 2.0), (5, "spin_kernel(long)", 9.0), (6, "Memset (Device)", 4.0),
    ]  # fmt: skip
    sections = measure.split_at_markers(events, "spin_kernel")
    assert sections == [[("a", 2.0), ("b", 1.0), ("a", 2.0)], [("Memset (Device)", 4.0)]]
    assert measure.sum_by_kernel(sections[0], 2) == [
        {"name": "a", "count": 1.0, "seconds": 2.0},
        {"name": "b", "count": 0.5, "seconds": 0.5},
    ]
    assert Figures(kernels=measure.sum_by_kernel(sections[0], 2)).kernel_s == 2.5
    assert Figures().kernel_s is None


@pytest.mark.parametrize(
    ("names", "method"),
    [
        (["sm80_xmma_fprop_implicit_gemm_tf32f32"], None),
        (["nchwToNhwc", "winograd_nonfused::winogradForwardData4x4"], "Winograd"),
        (["fft2d_r2c_32x32"], "FFT"),
    ],
)
def test_methods_that_multiply_less(names, method):
    assert measure.transforms([{"name": n, "count": 1, "seconds": 1} for n in names]) == method


# ---- the program


def test_without_a_gpu_it_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "IS_GPU", True)
    assert program.main(["--output", str(tmp_path)]) == 0
    assert "Nothing was measured: PyTorch finds no GPU" in capsys.readouterr().out
    document = Document.read(tmp_path / "benchmark.json")
    assert "no GPU" in document.skipped


def test_bad_budget(capsys):
    with pytest.raises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        program.main(["--budget", "0"])
