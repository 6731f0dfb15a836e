"""Plans of the CPU engines, for problems that nobody could compute as well as for ordinary ones.

cpu_host/planning.cpp draws them, plans every direction for every shape of vectors under UBSan, and
holds scratch and partial sums against their bounds and bands against a search position by position.
Seen to fail: without the narrower tiles of far dilated depthwise rows (6 MiB of scratch), with room
for all taps of a strided kernel instead of one phase's, with totals that don't count as workspace.
"""

from __future__ import annotations

import os
import pathlib
import shlex
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
UNITS = sorted((ROOT / "csrc" / "cpu" / "plan").glob("*.cpp"))
# Each has to come up among the problems, or else the check checks nothing.
DRIVERS = (
    "amx", "amx, shared weights", "bands", "columns", "conv", "conv, groups", "conv, pairs",
    "conv, pairs of groups",
    "depthwise", "dots", "few planes",
    "grad_weight", "partials", "phases", "pixels", "pixels, by columns", "rows", "strided",
    "winograd",
)  # fmt: skip


@pytest.fixture(scope="module")
def planning(tmp_path_factory) -> pathlib.Path:
    program = tmp_path_factory.mktemp("planning") / "planning"
    subprocess.run(
        [
            *(shlex.split(os.environ.get("CXX", "")) or ["g++"]), "-std=c++17", "-O1", "-g1",
            "-fsanitize=undefined", "-fno-sanitize-recover=all", "-DCONV2D_EXT_DEBUG",
            str(ROOT / "tests" / "cpu_host" / "planning.cpp"),
            *map(str, UNITS), "-o", str(program),
        ],
        check=True,
    )  # fmt: skip
    return program


@pytest.mark.parametrize("seed", [1, 2])
def test_random_plans(planning, seed):
    finished = subprocess.run(
        [planning, str(seed), "20000"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert [line.rpartition(":")[0] for line in finished.stdout.splitlines()] == sorted(DRIVERS)
