"""The fuzzer of the CPU engine (tests/fuzz): its corpus, some seconds of new cases, and its reach.

With CONV2D_EXT_FUZZ_SECONDS the time, 10 seconds by default, for each kind: under AddressSanitizer
with UBSan, and, from 30 seconds on, with more types, under ThreadSanitizer, and the portable code
as the product is optimized, whose bits a compiler has more ways to change. A failure prints the
case, which `python tests/fuzz case "..."` runs again; CONV2D_EXT_FUZZ_SEED repeats a whole run.
What each check finds on code that has the fault is in tests/fuzz/corpus, one file for each.
"""

from __future__ import annotations

import os
import pathlib
import re
import secrets
import subprocess

import pytest
from fuzz import build as fuzz_build
from fuzz.main import command, corpus_files

SECONDS = float(os.environ.get("CONV2D_EXT_FUZZ_SECONDS", "10"))
SEED = int(os.environ.get("CONV2D_EXT_FUZZ_SEED", "0")) or secrets.randbits(48)

SUMMARY = re.compile(r"^(\d+) cases \((\d+) refused, (\d+) too large", re.MULTILINE)

pytestmark = pytest.mark.slow


def run(program: pathlib.Path, *arguments: str, sanitizer: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(program, *arguments, sanitizer=sanitizer),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def programs() -> dict[str, pathlib.Path]:
    return fuzz_build.build_of_tests(SECONDS)


@pytest.fixture(params=["address", "thread", "none"])
def program(request, programs) -> tuple[pathlib.Path, str]:
    if request.param not in programs:
        pytest.skip("from CONV2D_EXT_FUZZ_SECONDS=30 on")
    return programs[request.param], request.param


def test_corpus(program):
    """Every case of the corpus, each a fault that was."""
    finished = run(program[0], "replay", *corpus_files(), sanitizer=program[1])
    assert finished.returncode == 0, finished.stderr[-4000:]


def test_new_cases(program):
    print(f"CONV2D_EXT_FUZZ_SEED={SEED}")
    # Without a sanitizer a third of the time has as many cases; of races the first cases show most.
    seconds = SECONDS if program[1] == "address" else SECONDS / 3
    arguments = ("generate", str(SEED), str(10**9), str(seconds))
    finished = run(program[0], *arguments, sanitizer=program[1])
    print(finished.stdout)
    assert finished.returncode == 0, f"seed {SEED}: {finished.stderr[-4000:]}"
    cases, refused, too_large = map(int, SUMMARY.search(finished.stdout).groups())
    assert cases - refused - too_large > 10 * seconds


def test_every_driver_is_reached(programs):
    """The corpus runs each (driver, dtype, direction, format, instruction set) that explain knows.

    Those that exist are what explain says of thousands of random problems."""
    finished = run(programs["address"], "reach", "0", "3000", *corpus_files(), sanitizer="address")
    assert finished.returncode == 0, finished.stderr[-4000:]
    lines = finished.stdout.splitlines()
    print(*(line for line in lines if line.startswith("not checked")), sep="\n")
    assert len([line for line in lines if line.startswith("reached")]) > 40
    assert not [line for line in lines if line.startswith("not reached")]
