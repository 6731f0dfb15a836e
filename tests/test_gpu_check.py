"""benchmarks/gpu_check.sh and the programs it runs: each step to its end, each fault one case's."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import time

import pytest
import torch

from benchmarks import figures
from benchmarks.cuda import __main__ as benchmark
from benchmarks.cuda import build, cases, checks, device, journal, ncu, smoke, sweep
from benchmarks.cuda.children import Child, Children, Lost, Refused
from benchmarks.cuda.run import Document
from conv2d_ext import _C, testing

ROOT = pathlib.Path(__file__).resolve().parent.parent
CALLS = {
    "lease": ("smoke", "benchmark", "sweep of kernels", "test_cuda",
              "test_bits and test_correctness", "other tests with CUDA",
              "compute-sanitizer racecheck"),
    "first": ("smoke", "benchmark"),
    "second": ("sweep of kernels", "ncu", "test_cuda", "test_bits", "test_correctness"),
    "third": ("compute-sanitizer memcheck", "compute-sanitizer racecheck", "benchmark, the rest",
              "other tests with CUDA", "tests without CUDA"),
}  # fmt: skip


def _run(tmp_path, call, **environ):
    """(finished process, its output): without building, into a folder of its own."""
    ours = {"OUT": str(tmp_path / "out"), "BUILD": "0", "PYTHON": sys.executable}
    process = subprocess.run(
        ["bash", ROOT / "benchmarks" / "gpu_check.sh", call],
        env={**os.environ, **ours, **environ},
        timeout=300,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    return process, process.stdout + process.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_a_machine_without_a_gpu(tmp_path):
    process, text = _run(tmp_path, "third")
    assert process.returncode == 0, text
    summary = text.partition("=== summary")[2].splitlines()[1:]
    assert [line.split("  ")[0] for line in summary] == ["skipped"] * 5
    for step in CALLS["third"]:
        assert any(step in line and "no GPU on this machine" in line for line in summary)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"logs.tar.gz"}
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as logs:
        assert logs.extractfile("./third.log").read().decode() == process.stdout


@pytest.mark.parametrize("call", ["", "fourth"])
def test_a_call_must_be_named(tmp_path, call):
    process, text = _run(tmp_path, call)
    assert process.returncode == 2
    assert "gpu_check.sh first " in text
    assert not (tmp_path / "out").exists()


def _budgets(started):
    return [int(line.split("--budget ")[1].split()[0]) for line in started if "--budget" in line]


def test_results_are_written_where_figures_read_them(tmp_path):
    """Into benchmarks/results/cuda; the archives are no part of a commit."""
    script = (ROOT / "benchmarks" / "gpu_check.sh").read_text()
    (default,) = re.findall(r"^OUT=\$\{OUT:-(.+)\}$", script, re.MULTILINE)
    assert ROOT / default == figures.RESULTS / "cuda"
    if not (ROOT / ".git").exists():
        pytest.skip("without git")
    names = ("module.tar.gz", "logs.tar.gz", "benchmark.json", "checks.json", "sweep.jsonl")
    ignored = subprocess.run(
        ["git", "check-ignore", *(f"{default}/{name}" for name in names)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.split()  # fmt: skip
    assert ignored == [f"{default}/{name}" for name in names[:2]]


REAL_CHECKS = f'exec {sys.executable} "$@"'


class TestMadeUpGpu:
    """With a stand-in for Python that finds a GPU and every module, and does as it is told."""

    @pytest.fixture
    def run(self, tmp_path):
        def run(
            call, does="", missing="", sanitizer_does='shift 6; "$@"', checks="exit", **environ
        ):
            """The process, its summary, and what the stand-in was started for. `checks`: what is
            done in the place of benchmarks.cuda.checks, whose imports take two seconds."""
            folder = tmp_path / "bin"
            folder.mkdir(exist_ok=True)
            log = tmp_path / "started"
            log.write_text("")
            programs = {
                "python": f"""
                    case "$*" in
                      *find_spec*) echo "{missing}"; exit ;;
                      *cuda.checks*) {checks} ;;
                      "-m pytest"*) echo "pytest ${{*##*tb=short }}" >> {log} ;;
                      "-m benchmarks"*) shift; echo "$*" >> {log} ;;
                      *cuda_small_set*) echo small set >> {log} ;;
                    esac
                    {does}""",
                "compute-sanitizer": f'echo "sanitizer $2" >> {log}; {sanitizer_does}',
            }
            for name, script in programs.items():
                path = folder / name
                path.write_text(f"#!/bin/sh\n{script}\n")
                path.chmod(0o755)
            path = f"{folder}:{os.environ['PATH']}"
            environ = {"PYTHON": str(folder / "python"), "PATH": path, **environ}
            process, text = _run(tmp_path, call, **environ)
            return process, text.partition("=== summary")[2], log.read_text().splitlines()

        return run

    @pytest.mark.parametrize("call", CALLS)
    def test_all_passes(self, run, call):
        # In one of them, of tests that left no report.
        process, summary, _ = run(call, checks=REAL_CHECKS if call == "third" else "exit")
        assert process.returncode == 0, summary
        for step in CALLS[call]:
            assert f"passed   {step} " in summary

    def test_the_order(self, run):
        started = run("first", BUILD="1")[2]
        assert [line.split(" --")[0] for line in started] == [
            "benchmarks.cuda.build", "benchmarks.cuda.smoke", "benchmarks.cuda",
        ]  # fmt: skip
        assert "--tiers ^(the post|every class)" in started[2]

    def test_every_call_ends_within_nine_minutes(self, run):
        """What the programs are given, and the limits of other steps, never exceed what is left."""
        started = run("first")[2]
        budgets = _budgets(started)
        assert budgets[0] <= 100
        assert 400 < budgets[1] <= 530 - 25

    @pytest.mark.parametrize("budget", [530, 1060])
    def test_limits_grow_with_the_budget(self, run, budget):
        process, _, started = run("lease", BUDGET=str(budget))
        times = budget // 530
        assert _budgets(started) == [60 * times - 15, 130 * times - 15, 40 * times - 15]
        limits = re.findall(r"=== (.+) \(at most (\d+) s\)", process.stdout)
        limits = {name: int(limit) for name, limit in limits}
        assert 170 * times < limits["test_cuda"] <= 520 * times * 0.35 + 6
        assert started[-2:] == ["sanitizer racecheck", "small set"]

    def test_a_lease_without_time_leaves_out_racecheck(self, run):
        # Ten seconds are kept for the summary.
        _, summary, started = run("lease", BUDGET="9")
        assert "skipped  compute-sanitizer racecheck        no time left for it" in summary
        assert "small set" not in started

    @pytest.mark.slow
    @pytest.mark.needs_cuda_build  # the sweep refuses another
    def test_figures_read_what_a_lease_writes(self, run, tmp_path, monkeypatch):
        """The real programs, of no case, and reports of tests and of the sanitizer."""
        report = (
            '<testsuites><testsuite name="pytest tests -m needs_cuda"><testcase classname='
            '"tests.test_cuda.TestA" name="test_b[c]"><failure/></testcase><testcase classname='
            '"tests.test_cuda" name="test_d"/></testsuite></testsuites>'
        )
        does = f"""
            case "$*" in
              benchmarks.cuda.ncu*) echo '{{}}' > "$5/ncu.jsonl" ;;
              benchmarks.cuda*) exec {sys.executable} -m "$@" --filter '^$' ;;
              *--junitxml*)
                  while [ "$1" != --junitxml ]; do shift; done
                  echo '{report}' > "$2" ;;
              *cuda_small_set*) echo 144 calls ;;
            esac"""
        sanitizer = """shift 6; "$@"
            echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" """
        out = tmp_path / "results" / "cuda"
        process, _, _ = run(
            "lease", does=does, sanitizer_does=sanitizer, checks=REAL_CHECKS, OUT=str(out),
            DEVICE="cpu", REVISION="abc", BUDGET="5300",
        )  # fmt: skip
        assert process.returncode == 0, process.stdout
        written = {"benchmark.json", "smoke.jsonl", "sweep.jsonl", "checks.json", "logs.tar.gz"}
        assert {path.name for path in out.iterdir()} == written
        assert len(written) < 8  # with the module: as many come back from a lent machine
        monkeypatch.setattr(figures, "RESULTS", out.parent)
        document, found = figures._cuda_document(), figures._json("cuda/checks")
        text = "\n".join(figures._cuda_section(document, found))
        assert "At the same commit 3 tests of CUDA passed there, 0 were skipped and 3 fa" in text
        assert "racecheck found 0 errors in the 144 calls of tests/cuda_small_set.py." in text
        assert "- tests/test_cuda.py::TestA::test_b[c]\n" in text
        # A call for the same commit adds to what is there.
        process, _, _ = run(
            "second", does=does, checks=REAL_CHECKS, OUT=str(out), DEVICE="cpu", REVISION="abc"
        )
        assert process.returncode == 0, process.stdout
        assert len(figures._json("cuda/checks")["tests"]) == 5
        with tarfile.open(out / "logs.tar.gz") as logs:
            assert {"./lease.log", "./second.log", "./ncu.jsonl"} <= set(logs.getnames())

    def test_without_a_module_nothing_is_measured(self, run):
        """Not even where one of other sources is in place."""
        process, summary, started = run(
            "first", does='case "$*" in *cuda.build*) exit 1 ;; esac', BUILD="1"
        )
        assert process.returncode == 1
        assert "FAILED   build " in summary
        assert len(started) == 1

    @pytest.mark.parametrize("call", CALLS)
    def test_failures_do_not_end_it(self, run, call):
        fails = 'case "$*" in -m*|benchmarks*|*small_set*) exit 1 ;; esac'
        process, summary, started = run(call, does=fails)
        assert process.returncode == 1
        for step in CALLS[call]:
            assert f"FAILED   {step} " in summary
        assert len(started) >= len(CALLS[call])

    def test_what_hangs_is_stopped(self, run):
        hangs = 'case "$*" in benchmarks.cuda.sweep*) exec sleep 600 ;; esac'
        start = time.monotonic()
        process, summary, started = run("second", does=hangs, BUDGET="26")
        assert time.monotonic() - start < 60
        assert process.returncode == 1
        assert "FAILED   sweep of kernels " in summary
        assert "not finished in" in summary
        assert "no time left for it" in summary
        assert started

    def test_without_pytest(self, run):
        process, summary, started = run("second", missing="rich pytest xdist")
        assert process.returncode == 0
        for step in CALLS["second"][2:]:
            assert f"skipped  {step} " in summary
        assert "pytest or hypothesis is missing" in summary
        assert [line.split()[0] for line in started] == [
            "benchmarks.cuda.sweep", "benchmarks.cuda.ncu",
        ]  # fmt: skip


# ---- children

CHILD = """
import json, os, signal, sys, time
answers = os.fdopen(int(sys.argv[1]), "w")
def send(message):
    answers.write(json.dumps(message) + "\\n"); answers.flush()
{before}
send({{"ready": True}})
for line in sys.stdin:
    request = json.loads(line)
    text = json.dumps(request)
    if "hang" in text: time.sleep(600)
    if "crash" in text: os.kill(os.getpid(), signal.SIGSEGV)
    if "exit" in text: os._exit(3)
    if "refuse" in text: send({{"error": "not this"}}); continue
    if "lost context" in text: send({{"error": "illegal address", "ends": True}}); time.sleep(600)
    send({{"answer": [os.getpid(), request]}})
"""


def _child(before=""):
    return (sys.executable, "-c", CHILD.format(before=before))


@pytest.mark.parametrize(
    ("what", "error", "says"),
    [
        ("hang", Lost, "did not finish in 0.5 s"),
        ("crash", Lost, "crashed: SIGSEGV"),
        ("exit", Lost, "ended with exit status 3"),
        ("lost context", Lost, "illegal address"),
        ("refuse", Refused, "not this"),
    ],
)
def test_a_fault_costs_one_request(what, error, says):
    with Children(_child()) as children:
        before, request = children.ask({"do": "x"}, 30)
        assert request == {"do": "x"}
        with pytest.raises(error, match=says):
            children.ask({"do": what}, 0.5 if what == "hang" else 30)
        after, _ = children.ask({"do": "y"}, 30)
    assert (after == before) == (error is Refused)
    for number in (before, after):
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


@pytest.mark.parametrize(
    ("before", "says"),
    [("time.sleep(600)", "did not finish"), ("sys.exit(4)", "ended with exit status 4")],
)
def test_a_child_that_does_not_come_up(before, says):
    with pytest.raises(Lost, match=f"its process {says} .*when it started"):
        Child(_child(before), start_s=0.5 if "sleep" in before else 30)


# ---- the programs, on the CPU in the GPU's place, with a worker that has faults

FAULTY = """
import os, signal, sys, time
from benchmarks.cuda import worker
plain = worker.answer
def answer(request):
    text = repr(sorted(request.items()))
    if {hangs!r} and {hangs!r} in text: time.sleep(600)
    if {crashes!r} and {crashes!r} in text: os.kill(os.getpid(), signal.SIGSEGV)
    return plain(request)
worker.answer = answer
worker.main()
"""


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setenv("DEVICE", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(device, "NAME", "cpu")
    monkeypatch.setattr(device, "IS_GPU", False)
    monkeypatch.chdir(ROOT)


def _faulty(hangs="", crashes=""):
    return (sys.executable, "-c", FAULTY.format(hangs=hangs, crashes=crashes))


@pytest.mark.slow
def test_smoke(on_cpu, tmp_path, capsys):
    command = _faulty(hangs="('math', 'TF32')", crashes="('math', 'float16')")
    chosen = "^(float32|TF32|float16|complex128), grad_weight, channels_last"
    arguments = ["--output", str(tmp_path), "--filter", chosen, "--limit", "20", "--jobs", "2"]
    assert smoke.main(arguments, command) == 1
    first, records = journal.read(tmp_path / "smoke.jsonl")
    assert first["program"] == "smoke"
    assert first["device"] == "cpu"
    assert first["versions"]["torch"] == torch.__version__
    found = {record["math"]: record for record in records}
    assert {math: record["status"] for math, record in found.items()} == {
        "float32": "passed", "TF32": "lost", "float16": "lost", "complex128": "passed",
    }  # fmt: skip
    assert "did not finish in 20 s" in found["TF32"]["reason"]
    assert "SIGSEGV" in found["float16"]["reason"]
    assert len(found["float32"]["problems"]) == len(smoke.PROBLEMS)
    assert all(p["error"] < 4e-6 for p in found["float32"]["problems"])
    assert "2 passed, 2 lost" in capsys.readouterr().out


def test_smoke_has_a_case_for_each_kind():
    chosen = list(smoke.cases())
    assert len(set(chosen)) == len(chosen) == 7 * 5 * 2 - 2
    assert {case.math for case in chosen} == set(smoke.BOUNDS)


@pytest.mark.parametrize("layout", cases.FORMATS)
@pytest.mark.parametrize("math", smoke.BOUNDS)
def test_smoke_passes_what_is_right(on_cpu, math, layout, monkeypatch):
    monkeypatch.setattr(smoke, "PROBLEMS", smoke.PROBLEMS[:1])
    for direction in (*cases.DIRECTIONS, smoke.GRAD_BIAS, smoke.MATMUL):
        (found,) = smoke.check(math, direction, layout)
        assert not found["wrong"], direction


@pytest.mark.parametrize("direction", [*cases.DIRECTIONS, smoke.GRAD_BIAS, smoke.MATMUL])
def test_smoke_sees_what_is_wrong(on_cpu, direction, monkeypatch):
    problem = testing.ASYMMETRIC[0]
    monkeypatch.setattr(smoke, "PROBLEMS", (problem,))
    assert not smoke.check("float32", direction, "NCHW")[0]["wrong"]
    plain = smoke._call

    def altered(change):
        calls = []

        def call(*args):
            return lambda: change(plain(*args)(), calls.append(0) or len(calls))

        return call

    monkeypatch.setattr(smoke, "_call", altered(lambda result, _: result * 1.001))
    assert "error" in smoke.check("float32", direction, "NCHW")[0]["wrong"]
    monkeypatch.setattr(smoke, "_call", altered(lambda result, _: result * torch.nan))
    assert "error nan" in smoke.check("float32", direction, "NCHW")[0]["wrong"]
    monkeypatch.setattr(smoke, "_call", altered(lambda result, n: result * (1 + (n - 1) * 2**-23)))
    assert smoke.check("float32", direction, "NCHW")[0]["wrong"] == "other bits the second time"


@pytest.mark.slow
def test_benchmark(on_cpu, tmp_path, capsys, monkeypatch):
    """One case hangs and one crashes; the others are in the file, which is written after each."""
    monkeypatch.setenv("REVISION", "abc")  # where the tests have come without history
    planned = cases.plan([1])
    chosen = [c for c in planned if c.problem.name.startswith("resnet50 64@56-64/k3p1 batch 1")]
    chosen = [c for c in chosen if c.tier.startswith("every class")][:4]
    assert len(chosen) == 4
    hang, crash = (planned.index(case) for case in chosen[1:3])
    command = _faulty(hangs=f"('number', {hang})", crashes=f"('number', {crash})")
    pattern = "^(" + "|".join(map(str, chosen)) + ")$"
    arguments = ["--output", str(tmp_path), "--batch", "1", "--filter", pattern,
                 "--case-limit", "15", "--budget", "200"]  # fmt: skip
    assert benchmark.main(arguments, command) == 1
    document = Document.read(tmp_path / "benchmark.json")
    assert len(document.results) == 2
    assert "CPU in its place" in document.machine["gpu"]
    assert document.left_out == {
        str(chosen[1]): "failed: did not finish in 15 s",
        str(chosen[2]): "failed: crashed: SIGSEGV",
    }
    assert "2 cases in" in capsys.readouterr().out
    # Another call measures what this one lacks, and keeps what it has; also where nothing answers.
    gone = (sys.executable, "-c", "raise SystemExit(4)")
    assert benchmark.main([*arguments, "--continue"], gone) == 1
    before = [result.figures for result in document.results]
    assert benchmark.main([*arguments, "--continue", "--no-pictures"], _faulty()) == 0
    document = Document.read(tmp_path / "benchmark.json")
    assert [result.figures for result in document.results[:2]] == before
    assert len(document.results) == 4
    assert document.left_out == {}
    # Of another commit it keeps nothing.
    document.machine["versions"]["revision"] = "another"
    document.write(tmp_path / "benchmark.json")
    again = [*arguments, "--continue", "--filter", f"^{re.escape(str(chosen[0]))}$"]
    assert benchmark.main(again, _faulty()) == 0
    assert len(Document.read(tmp_path / "benchmark.json").results) == 1
    assert "measured anew" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.needs_cuda_build
def test_sweep(on_cpu, tmp_path, capsys):
    planned = sweep.plan()
    chosen = [c for c in planned if c.problem.name.startswith("resnet50 512@7-512/k3p1 batch 1")]
    chosen = [c for c in chosen if c.precision.name in ("TF32", "float32")]
    assert len(chosen) == 6
    command = _faulty(crashes=f"('number', {planned.index(chosen[0])})")
    pattern = "^(" + "|".join(map(str, chosen)) + ")$"
    arguments = ["--output", str(tmp_path), "--filter", pattern, "--case-limit", "60"]
    assert sweep.main([*arguments, "--budget", "250"], command) == 1
    records = journal.read(tmp_path / "sweep.jsonl")[1]
    assert [record["case"] for record in records] == list(map(str, chosen))
    assert records[0]["failed"] == "crashed: SIGSEGV"
    for record in records[1:]:
        own, *others = record["choices"]
        assert own["wanted"] == [-1, -1, -1]
        tf32 = record["precision"] == "TF32"
        weight = record["direction"] == "grad_weight"
        fitting = {
            name
            for name in _C.cuda_kernels(torch.empty(0), tf32)
            if name.startswith("weight") == weight and not name.endswith("_by_element")
        }
        splits = {False} if weight else {False, True}
        assert {(c["kernel"], c["split"]) for c in others} == {
            (kernel, split) for kernel in fitting for split in splits
        }
        assert all(choice["same_bits"] and choice["median_s"] > 0 for choice in others)
        assert (own["kernel"], own["split"]) in {(c["kernel"], c["split"]) for c in others}
    assert "6 cases" in capsys.readouterr().out


def test_the_sweep_covers_what_the_planner_chooses_for():
    planned = sweep.plan()
    assert len({case.key for case in planned}) == len(planned)
    assert 18 <= len({case.problem for case in planned}) <= 22
    assert {case.direction for case in planned} == set(cases.DIRECTIONS)
    assert sweep.plan() == planned


NCU = """==PROF== Connected
"ID","Process ID","Kernel Name","sm__throughput.avg.pct_of_peak_sustained_elapsed"
"","","","%"
"0","7","void gemm_kernel<a, b>(c)","81.5"
"""


def test_metrics_of_ncu(tmp_path):
    (kernel,) = ncu.parse_metrics(NCU)
    assert kernel["Kernel Name"] == "void gemm_kernel<a, b>(c)"
    assert kernel["sm__throughput.avg.pct_of_peak_sustained_elapsed"] == "81.5 %"
    assert ncu.parse_metrics("==ERROR== ERR_NVGPUCTRPERM\n") == []
    tool = tmp_path / "ncu"
    for script, failed in (
        (f"cat <<'END'\n{NCU}END", ""),
        ("echo '==ERROR== no permission'; exit 5", "exit status 5: ==ERROR== no permission"),
        ("sleep 600", "did not finish in 1 s"),
    ):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        found = ncu.profile(str(tool), 0, 1 if "sleep" in script else 30)
        assert found["failed"] == failed
        assert len(found["kernels"]) == (0 if failed else 1)
    assert len(set(map(str, ncu.CASES))) == len(ncu.CASES) == 6


# ---- what tests and the sanitizer found


def test_checks(tmp_path):
    (tmp_path / "tests-a.xml").write_text(
        '<testsuites><testsuite name="pytest tests/test_bits.py">'
        '<testcase classname="tests.test_bits" name="test_a"/>'
        '<testcase classname="tests.test_bits" name="test_b"><skipped/></testcase>'
        '<testcase classname="tests.test_bits.TestC" name="test_c"><failure/></testcase>'
        '<testcase classname="tests.test_bits.TestC" name="test_c"><error/></testcase>'
        '<testcase classname="" name="tests.test_gone"><error/></testcase>'
        "</testsuite></testsuites>"
    )
    (tmp_path / "tests-b.unfinished").write_text("pytest tests/test_cuda.py\n")
    (tmp_path / "tests-c.xml").write_text('<testsuites><testsuite name="pytest tests"><testca')
    (tmp_path / "tests-c.unfinished").write_text("pytest tests\n")
    (tmp_path / "not-of-cuda-c.xml").write_text("")
    heading = "=== compute-sanitizer x (at most 9 s): compute-sanitizer x\n"
    for tool, text in (
        ("memcheck", "1386 calls\n========= ERROR SUMMARY: 1 error\n"),
        ("racecheck", "7 calls\n== RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n"),
        ("stopped", "========= ERROR SUMMARY: 0 errors\n"),
    ):
        (tmp_path / f"sanitizer-{tool}.log").write_text(heading + text)
    assert checks.main([str(tmp_path), "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "checks.json").read_text())
    assert found["versions"]["torch"] == torch.__version__
    first, *others = found["tests"]
    assert first == {
        "command": "pytest tests/test_bits.py", "passed": 1, "skipped": 1, "finished": True,
        "failed": ["tests/test_bits.py::TestC::test_c", "tests.test_gone"],
    }  # fmt: skip
    assert [run["command"] for run in others] == ["pytest tests/test_cuda.py", "pytest tests"]
    assert not any(run["finished"] for run in others)
    of = {run["tool"]: (run["calls"], run["errors"]) for run in found["sanitizer"]}
    assert of == {"memcheck": (1386, 1), "racecheck": (7, 2), "stopped": (0, None)}
    assert {run["command"] for run in found["sanitizer"]} == {"compute-sanitizer x"}
    found["revision"] = "other"
    line = figures._cuda_checks_line(found, {"versions": {"revision": "this"}})
    assert line.startswith("At commit other 1 tests of CUDA passed there, 1 were skipped and 2 fa")
    assert ", and 2 of 3 runs of tests were not finished; compute" in line
    assert "memcheck found 1 errors in the 1386 calls of tests/cuda_small_set.py; " in line
    assert line.endswith("compute-sanitizer's stopped was not finished.")


def test_a_tenth_of_the_small_set_has_every_kind():
    import cuda_small_set as small

    every, tenth = small.chosen(1), small.chosen(10)
    assert len(every) == len(set(every)) == 7 * len(small.PROBLEMS) * len(small.LAYOUTS)
    for kinds in zip(*(map(set, zip(*some, strict=True)) for some in (every, tenth)), strict=True):
        assert kinds[0] == kinds[1]


# ---- the module, kept and put back


class TestModule:
    @pytest.fixture
    def package(self, tmp_path, monkeypatch):
        folder = tmp_path / "conv2d_ext"
        folder.mkdir()
        monkeypatch.setattr(build, "PACKAGE", folder)
        monkeypatch.setattr(build, "ROOT", tmp_path)
        monkeypatch.setattr(build, "_architectures", lambda: "9.0")
        self.tools = ["nvcc 13.0", "g++ 13.3", "-O2"]
        monkeypatch.setattr(build, "tools", lambda: self.tools)
        for name in ("setup.py", "pyproject.toml"):
            (tmp_path / name).write_text(name)
        (tmp_path / "csrc").mkdir()
        (tmp_path / "csrc" / "a.cpp").write_text("1")
        self.built = []

        def made_up(digest):
            self.built.append(digest)
            module, library, _ = build.built_files()
            module.write_bytes(b"module of " + digest.encode())
            library.write_bytes(b"library of " + digest.encode())
            folder.joinpath("_build_info.py").write_text(f"A = 1\n\n{build.MARK}{digest}\n")

        monkeypatch.setattr(build, "build", made_up)
        return folder

    def _run(self, tmp_path, *arguments):
        return build.main(["--output", str(tmp_path / "out"), *arguments])

    def _remove(self, package):
        for path in package.iterdir():
            path.unlink()

    def test_it_is_built_once(self, package, tmp_path, capsys):
        assert self._run(tmp_path) == 0
        self._run(tmp_path)
        assert "in place" in capsys.readouterr().out
        self._remove(package)
        self._run(tmp_path)
        assert "put back from" in capsys.readouterr().out
        assert len(self.built) == 1
        module, library, _ = build.built_files()
        assert module.read_bytes() == b"module of " + self.built[0].encode()
        assert library.read_bytes() == b"library of " + self.built[0].encode()

    def test_from_a_file_that_is_named(self, package, tmp_path):
        self._run(tmp_path)
        moved = tmp_path / "moved.tar.gz"
        (tmp_path / "out" / build.ARCHIVE).rename(moved)
        self._remove(package)
        self._run(tmp_path, "--module", str(moved))
        assert len(self.built) == 1
        assert (tmp_path / "out" / build.ARCHIVE).exists()

    @pytest.mark.parametrize(
        "change", ["sources", "nvcc", "a flag", "a broken archive", "no module"]
    )
    def test_what_does_not_fit_is_built(self, package, tmp_path, change):
        self._run(tmp_path)
        archive = tmp_path / "out" / build.ARCHIVE
        if change == "sources":
            (tmp_path / "csrc" / "a.cpp").write_text("2")
        elif change == "nvcc":
            self.tools[0] = "nvcc 12.9"
        elif change == "a flag":
            self.tools[-1] += " -g"
        else:
            self._remove(package)
            if change == "a broken archive":
                archive.write_bytes(archive.read_bytes()[:60])
            else:
                with tarfile.open(archive, "w:gz"):
                    pass
        self._run(tmp_path)
        assert len(self.built) == 2
        with tarfile.open(archive) as file:
            info = file.extractfile("_build_info.py").read().decode()
        assert build.digest_in(info) == self.built[1]


def test_tools_that_a_module_follows_from(monkeypatch):
    monkeypatch.setenv("CXXFLAGS", "-O0")
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    nvcc, compiler, *flags = build.tools()
    assert re.fullmatch(r"nvcc (\d+\.\d+|None)", nvcc)
    assert compiler
    assert flags == ["-O0", os.environ.get("NVCC_PREPEND_FLAGS", ""), "-lineinfo"]


# ---- nothing beyond PyTorch's environment

HIDE = """
import importlib.machinery, sys
hidden = {"rich", "pytest", "hypothesis", "matplotlib", "PIL", "scipy", "sklearn", "torchvision"}
plain = importlib.machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.split(".")[0] in hidden else plain(name, path, target)
importlib.machinery.PathFinder.find_spec = find_spec
"""


def test_what_pytorch_alone_has_is_enough(tmp_path):
    names = ("__main__", "build", "smoke", "sweep", "ncu", "worker", "run", "describe")
    program = HIDE + "".join(f"import benchmarks.cuda.{name}\n" for name in names)
    program += "import json; json.dumps(benchmarks.cuda.describe.describe_gpu())\n"
    program += "assert not hidden & set(sys.modules)\n"
    environ = {**os.environ, "DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environ, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
