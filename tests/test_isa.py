"""The instruction sets compiled in: each one this CPU can run is run, by name, and they agree."""

from __future__ import annotations

import os
import pathlib
import platform
import shlex
import subprocess
from collections.abc import Callable

import isa_bits
import isa_check
import pytest
import torch
from child import run_forked

import conv2d_ext
from conv2d_ext import testing

COMPILED = conv2d_ext.build_config()["compiled_isas"]


def _run(isa: str, *command: str) -> subprocess.CompletedProcess:
    return run_forked(*command, env={"CONV2D_EXT_CPU_ISA": isa})


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


@pytest.fixture(scope="module")
def digests() -> Callable[[str], dict[str, str]]:
    """What isa_bits.py prints for an instruction set, run once: problem and dtype to digest."""
    cache = {}

    def run(isa: str) -> dict[str, str]:
        if isa not in cache:
            finished = _run(isa, isa_bits.__file__)
            if finished.returncode and "this CPU" in finished.stderr:
                pytest.skip(f"this CPU has no {isa}")
            assert finished.returncode == 0, finished.stderr
            first, *lines = finished.stdout.splitlines()
            assert first == isa
            cache[isa] = {what: hexes for hexes, what in (line.split(" ", 1) for line in lines)}
        return cache[isa]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("isa", COMPILED)
def test_no_batch_changes_the_bits_of_one_pixel(isa, digests):
    """Dot products, rows times factors, GEMMs and bfloat16 pairs: isa_bits.py compares them."""
    assert digests(isa)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        ("avx2", "avx512"), ("avx512", "avx512_bf16"), ("avx512", "amx"),
        ("avx512", "amx_emulated"), ("amx", "amx_emulated"),
    ],
)  # fmt: skip
def test_vector_instruction_sets_agree(narrow, wide, digests):
    """To the bit, in all directions, but for bfloat16 where one of them has instructions for it.
    AMX's tiles and their emulation agree on bfloat16, too."""
    if narrow not in COMPILED or wide not in COMPILED:
        pytest.skip("not compiled in")
    ours, theirs = digests(narrow), digests(wide)
    assert len(ours) == len(theirs) == len(isa_bits.DTYPES) * len(testing.SMALL_PROBLEMS)
    excepted = "bfloat16" if narrow == "avx512" else "nothing"
    assert [what for what in ours if ours[what] != theirs[what] and excepted not in what] == []


_DENORMALS = """
import torch, conv2d_ext
input = torch.full((1, 16, 4, 4), 2.0**-130, dtype=torch.bfloat16)
weight = torch.full((16, 16, 3, 3), 2.0**100, dtype=torch.bfloat16)
print(conv2d_ext.conv2d(input, weight).unique().tolist() == [144 * 2.0**-30])
print(conv2d_ext.conv2d(input.float(), weight.float()).unique().tolist() == [144 * 2.0**-30])
"""
# Whose instructions for bfloat16 take denormal numbers as zeros.
FLUSHING = ("avx512_bf16", "amx", "amx_emulated")


@pytest.mark.slow
@pytest.mark.parametrize("isa", COMPILED)
def test_denormal_numbers_count(isa):
    """Except where the CPU's bfloat16 instructions take them as zeros."""
    finished = _run(isa, "-c", _DENORMALS)
    if finished.returncode and "this CPU" in finished.stderr:
        pytest.skip(f"this CPU has no {isa}")
    assert finished.stdout.split() == [str(isa not in FLUSHING), "True"]


_INFINITE_WEIGHTS = """
import torch, conv2d_ext, hashlib
from conv2d_ext import testing

def nans(result):
    return hashlib.sha256(result.isnan().numpy().tobytes()).hexdigest()

w = torch.ones(81, 9, 4, 4)
w[:, :, 0, 0] = torch.inf
op = torch.ops.conv2d_ext.conv2d_grad_input
geometry = ([4, 4], [0, 0, 0, 0], [1, 1], 9, False)
print("named:", op(torch.ones(1, 81, 2, 2), w, [1, 81, 9, 9], *geometry).isnan().sum().item())
for problem in testing.SMALL_PROBLEMS:
    if problem.batch and problem not in testing.LONG_SUMS:
        tensors = testing.make_tensors(problem)
        tensors.weight[:, :, 0, 0] = torch.inf
        tensors.weight[-1, :, -1, -1] = -torch.inf
        input = tensors.input.detach().requires_grad_()
        output = testing.library_forward(problem, tensors._replace(input=input))
        grad_input, = torch.autograd.grad(output, input, tensors.grad_output)
        print(f"{problem}: {nans(output)} {nans(grad_input)}")
"""


@pytest.mark.slow
def test_infinite_weights_give_nans_at_the_same_places():
    """Which kernels an instruction set prefers must not show."""
    printed = {}
    for isa in COMPILED:
        finished = _run(isa, "-c", _INFINITE_WEIGHTS)
        if finished.returncode and "this CPU" in finished.stderr:
            continue
        assert finished.returncode == 0, finished.stderr
        printed[isa] = finished.stdout.splitlines()
    assert printed["portable"][0] == "named: 0", "no tap lies beyond grad_output's border"
    for isa, lines in printed.items():
        assert lines == printed["portable"], isa


def test_the_best_is_chosen_by_itself():
    best = conv2d_ext.build_config()["isa"]
    assert best in COMPILED
    if "CONV2D_EXT_CPU_ISA" not in os.environ:
        flags = pathlib.Path("/proc/cpuinfo").read_text()
        if "avx2" in COMPILED and " avx2 " in flags and " fma " in flags:
            assert best != "portable"
        intel = "GenuineIntel" in flags
        if "avx512_bf16" in COMPILED and " avx512_bf16 " in flags and " avx512bw " in flags:
            assert best in (("amx", "avx512") if intel else ("amx", "avx512_bf16"))


@pytest.mark.parametrize(
    ("vendor", "features", "wanted", "chosen"),
    [
        ("amd", "avx2 avx512", "", "avx512"),
        ("amd", "avx2 avx512 avx512bf16", "", "avx512_bf16"),
        ("intel", "avx2 avx512 avx512bf16", "", "avx512"),
        ("intel", "avx2 avx512 avx512bf16 amx", "", "amx"),
        ("intel", "avx2 avx512 avx512bf16 amx", "avx512_bf16", "avx512_bf16"),
        ("intel", "avx2 avx512 avx512bf16", "amx", "the system refuses"),
        ("intel", "avx2 avx512 avx512bf16 amx", "amx_emulated", "amx_emulated"),
        ("amd", "avx2", "amx_emulated", "this CPU lacks"),
        ("intel", "avx2", "", "avx2"),
        ("intel", "", "", "portable"),
    ],
)  # fmt: skip
def test_which_is_chosen(vendor, features, wanted, chosen, chooser):
    """On CPUs that are not here, too: bfloat16 pairs pay on AMD's alone, AMX wherever it is."""
    finished = subprocess.run(
        [chooser, vendor, *features.split()],
        env={**os.environ, "CONV2D_EXT_CPU_ISA": wanted},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert chosen in finished.stdout, finished.stdout + finished.stderr


@pytest.fixture(scope="module")
def chooser(tmp_path_factory) -> pathlib.Path:
    """isa/select.cpp and isa/machine.cpp, with engines and a machine that are made up."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("a choice among x86-64's instruction sets")
    program = tmp_path_factory.mktemp("choice") / "choice"
    source = pathlib.Path(__file__).with_name("cpu_host") / "isa_choice.cpp"
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    subprocess.run([*compiler, "-std=c++17", "-Wall", source, "-o", program], check=True)
    return program


def test_without_amx_explain_says_why():
    """Of bfloat16 alone, which it would have multiplied."""
    if "amx" not in COMPILED or conv2d_ext.build_config()["isa"].startswith("amx"):
        pytest.skip("AMX is in use, or not compiled in")
    input, weight = torch.ones(1, 32, 9, 9), torch.ones(32, 32, 3, 3)
    for dtype in (torch.float32, torch.bfloat16):
        plan = conv2d_ext.explain(input.to(dtype), weight.to(dtype))
        for direction in (plan.forward, plan.grad_input, plan.grad_weight):
            reasons = dict(direction.candidates)
            assert ("implicit GEMM, AMX tiles of bfloat16" in reasons) == (dtype == torch.bfloat16)
            assert all(reasons.values())


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
