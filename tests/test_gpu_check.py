"""benchmarks/gpu_check.sh runs every step to the end, and says what it skipped and what failed."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent


def _run(tmp_path, **environ):
    """(finished process, its output): without building, into a folder of its own."""
    ours = {"OUT": str(tmp_path / "out"), "BUILD": "0", "PYTHON": sys.executable}
    process = subprocess.run(
        ["bash", ROOT / "benchmarks" / "gpu_check.sh"],
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
    process, text = _run(tmp_path)
    assert process.returncode == 0, text
    summary = text.partition("=== summary")[2].splitlines()[1:]
    assert [line.split("  ")[0] for line in summary] == ["skipped"] * 4
    for step in ("tests with CUDA", "all other tests", "compute-sanitizer", "benchmark"):
        assert any(step in line and "no GPU on this machine" in line for line in summary)
    assert (tmp_path / "out" / "gpu-check.log").read_text() == process.stdout
    document = json.loads((tmp_path / "out" / "cuda-benchmark.json").read_text())
    assert "no GPU" in document["skipped"]
    assert document["results"] == []


class TestMadeUpGpu:
    """With a stand-in for Python that finds a GPU and every module, and does as it is told."""

    STEPS = ("tests with CUDA", "compute-sanitizer memcheck", "compute-sanitizer racecheck",
             "all other tests", "benchmark")  # fmt: skip

    @pytest.fixture
    def run(self, tmp_path):
        def run(pytest_does="exit 0", sanitizer_does='shift 6; "$@"', **environ):
            """The process, its output, and what the stand-in was started for."""
            folder = tmp_path / "bin"
            folder.mkdir()
            log = tmp_path / "started"
            programs = {
                "python": f"""
                    case "$*" in
                      "-m pytest"*) echo "pytest ${{*##*-m }}" >> {log}; {pytest_does} ;;
                      *cuda_small_set*) echo small set >> {log} ;;
                      *benchmarks.cuda*) echo "benchmark $*" >> {log} ;;
                    esac""",
                "compute-sanitizer": f'echo "sanitizer $2" >> {log}; {sanitizer_does}',
            }
            for name, script in programs.items():
                path = folder / name
                path.write_text(f"#!/bin/sh\n{script}\n")
                path.chmod(0o755)
            path = f"{folder}:{os.environ['PATH']}"
            process, text = _run(tmp_path, PYTHON=str(folder / "python"), PATH=path, **environ)
            return process, text.partition("=== summary")[2], log.read_text()

        return run

    def test_all_passes(self, run):
        process, summary, started = run()
        assert process.returncode == 0, summary
        for step in self.STEPS:
            assert f"passed   {step} " in summary
        lines = started.splitlines()
        assert lines[0] == "pytest needs_cuda or needs_two_gpus"
        assert lines[1:5] == ["sanitizer memcheck", "small set", "sanitizer racecheck", "small set"]
        assert lines[5] == "pytest not needs_cuda and not needs_two_gpus"
        assert lines[6].startswith("benchmark -m benchmarks.cuda --budget 5")

    def test_failures_do_not_end_it(self, run):
        process, summary, started = run(pytest_does="exit 1", sanitizer_does="exit 9")
        assert process.returncode == 1
        for step in self.STEPS[:-1]:
            assert f"FAILED   {step} " in summary
        assert f"passed   {self.STEPS[-1]} " in summary
        assert "benchmark" in started

    def test_what_hangs_is_stopped_and_the_benchmark_keeps_its_time(self, run):
        process, summary, _ = run(pytest_does="sleep 600", BUDGET="158")
        assert process.returncode == 1
        assert "FAILED   tests with CUDA" in summary
        assert "not finished in" in summary
        assert "no time left for it" in summary
        assert "passed   benchmark " in summary
