"""The instruction sets compiled in: each one this CPU can run is run, by name."""

from __future__ import annotations

import os
import pathlib
import subprocess

import isa_check
import pytest
from child import run_python

import conv2d_ext

COMPILED = conv2d_ext.build_config()["compiled_isas"]


def _run(isa: str, *command: str) -> subprocess.CompletedProcess:
    return run_python(*command, env={"CONV2D_EXT_CPU_ISA": isa})


def test_portable_is_always_there():
    assert "portable" in COMPILED
    assert len(set(COMPILED)) == len(COMPILED)


@pytest.mark.slow
@pytest.mark.parametrize("isa", COMPILED)
def test_every_instruction_set(isa):
    finished = _run(isa, isa_check.__file__)
    if finished.returncode and "this CPU" in finished.stderr:
        pytest.skip(f"this CPU has no {isa}")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == isa


_DENORMALS = """
import torch, conv2d_ext
input = torch.full((1, 2, 4, 4), 2.0**-130, dtype=torch.bfloat16)
weight = torch.full((16, 2, 3, 3), 2.0**100, dtype=torch.bfloat16)
print(conv2d_ext.conv2d(input, weight).unique().tolist() == [18 * 2.0**-30])
print(conv2d_ext.conv2d(input.float(), weight.float()).unique().tolist() == [18 * 2.0**-30])
"""


@pytest.mark.slow
@pytest.mark.parametrize("isa", COMPILED)
def test_denormal_numbers_count(isa):
    """Except where the CPU's bfloat16 instructions take them as zeros."""
    finished = _run(isa, "-c", _DENORMALS)
    if finished.returncode and "this CPU" in finished.stderr:
        pytest.skip(f"this CPU has no {isa}")
    assert finished.stdout.split() == [str(isa != "avx512_bf16"), "True"]


def test_the_best_is_chosen_by_itself():
    best = conv2d_ext.build_config()["isa"]
    assert best in COMPILED
    if "CONV2D_EXT_CPU_ISA" not in os.environ:
        flags = pathlib.Path("/proc/cpuinfo").read_text()
        if "avx2" in COMPILED and " avx2 " in flags and " fma " in flags:
            assert best != "portable"
        if "avx512_bf16" in COMPILED and " avx512_bf16 " in flags and " avx512bw " in flags:
            assert best == "avx512_bf16"


def test_an_unknown_name_is_refused():
    """In one sentence that says which names there are."""
    finished = _run(
        "sse9",
        "-c",
        "import torch, conv2d_ext;"
        "conv2d_ext.conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3))",
    )
    assert finished.returncode == 1, "an exception, and no crash"
    message = finished.stderr.strip().splitlines()[-1]
    assert "CONV2D_EXT_CPU_ISA" in message
    assert "sse9" in message
    for name in COMPILED:
        assert name in message
