"""Kernels, packers, stores and tilings of the CPU engine, each by itself.

cpu_host/parts/ calls each with every tail, on memory that ends where its operands end (the address
sanitizer sees most accesses, a guard page all), and holds each result to the bit
against a scalar loop that follows its header's formula. It is compiled once for each instruction
set (UNSANITIZED without sanitizers, on guard pages all the same), and runs where the machine has
it. cpu_host/plan_rules.cpp holds the order of summation against docs/design.md, and tilings against
what they have to cover.

Compiled without optimization: that halves the time, and these programs run for seconds.

Seen to fail: with one step of a chain's rest left out (kernels/gemm.h), with a tail one lane short
(kernels/dot.h), with Between::kOthers taken for kOwned (pack/store.h), with ties rounded away from
zero (isa/vec_avx2.h), with a product more in a segment (plan/summation_order.cpp).
"""

from __future__ import annotations

import os
import pathlib
import platform
import shlex
import subprocess

import pytest
from fuzz.build import SANITIZERS
from rotation import turn

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "cpu_host"
NOT_CHECKED = 77  # main.cpp's, where the machine lacks the instruction set
FLAGS = (
    "-std=c++17", "-O0", "-g1", "-ffp-contract=off", "-fopenmp-simd", "-DCONV2D_EXT_DEBUG",
)  # fmt: skip
# As the fuzzer, but what GCC compiles sooner: calls in place of inlined checks (Clang has no such
# parameter).
SANITIZED = (
    *SANITIZERS["address"],
    "--param=asan-instrumentation-with-call-threshold=0",
)
# Whose parts are compiled without them, four times as fast: the fuzzer runs AVX2 under sanitizers,
# and the others where it is asked to. Of pairs and tiles, which share nothing but AVX-512's parts,
# each state of the sources takes one with them.
_TURN = turn("csrc/cpu", "tests/cpu_host")
UNSANITIZED = ("avx2", "avx512", ("avx512_bf16", "amx_emulated")[_TURN % 2])
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", *_AVX2)


def _native(isa: str, header: str) -> tuple[str, ...]:
    return (f"-DCONV2D_ISA={isa}", f'-DCONV2D_NATIVE_VEC="{header}"')


# The flags of an instruction set, and what __builtin_cpu_supports has to know of the machine.
ISAS = {
    "portable": ((), ()),
    "avx2": ((*_AVX2, *_native("avx2", "vec_avx2.h")), ("avx2", "fma")),
    "avx512": (
        (*_AVX512, *_native("avx512", "vec_avx512.h")),
        ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"),
    ),
    "avx512_bf16": (
        (
            "-mavx512bf16", *_AVX512, "-DCONV2D_BFLOAT16_PAIRS", "-DCONV2D_NARROWS_BFLOAT16",
            *_native("avx512_bf16", "vec_avx512.h"),
        ),
        ("avx512bf16", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"),
    ),
    "amx": (
        (
            "-mamx-tile", "-mamx-bf16", "-mavx512bf16", *_AVX512, "-DCONV2D_AMX",
            "-DCONV2D_NARROWS_BFLOAT16", *_native("amx", "vec_avx512.h"),
        ),
        ("avx512bf16", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"),
    ),
    "amx_emulated": (
        (
            *_AVX512, "-DCONV2D_AMX", "-DCONV2D_AMX_EMULATED",
            *_native("amx_emulated", "vec_avx512.h"),
        ),
        ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"),
    ),
}  # fmt: skip


# What each program has to report on, or else it checks nothing: parts, and the types they take.
def _parts(names: str, types: str) -> set[str]:
    return {f"{name} {kind}" for name in names.split(", ") for kind in types.split(", ")}


_GEMM = "gemm_ukernel, gemm_panel"
_GENERAL = (
    _parts(_GEMM, "float32, float64, complex64")
    | {f"{part}, groups" for part in _parts(_GEMM, "float32, float64, complex64")}
    | _parts("dot_ukernel", "float32, float64, bfloat16")
    | _parts("Vec", "float32, float64")
    | _parts("convert", "bfloat16, float16")
    | _parts("copy_run", "float32, float64, bfloat16, complex64")
    | _parts("pack_lanes, pack_patch, store_tile", "float32, float64, bfloat16, complex64")
    | _parts("pack_weight, pack_weight_of_taps", "float32, bfloat16, complex64")
    | _parts("pack_weight_of_groups", "float32, float64, bfloat16, complex64")
    | _parts("store_lanes", "float32, bfloat16")
    | _parts("add_chunk", "float32, float64")
    | _parts(
        "transform_weight, transform_inner_squares, transform_planar_squares, transform_sums",
        "float32",
    )
)
_INTEGERS = _parts(f"{_GEMM}, pack_patch, store_tile, add_chunk", "int16") | {
    f"{part}, groups" for part in _parts(_GEMM, "int16")
}
_NATIVE = (
    {f"{part}, listed" for part in _parts("gemm_ukernel", "float32, float64")}
    | _parts("ListedSteps, pixel_ukernel, whole_plane_ukernel", "float32, float64")
    | _parts("depthwise_weight_panel", "float32, float64, bfloat16, float16")
    | _parts("depthwise_ukernel", "float32, float64, bfloat16")
    | {"depthwise_ukernel bfloat16, widened"}
    | {f"{part}, in rows" for part in _parts("pack_transposed", "float32, float64, bfloat16")}
    | _parts(
        "plane_ukernel, row_ukernel, column_ukernel, strided_ukernel, pack_transposed, "
        "pack_planes, load_interleaved, store_interleaved, store_row, store_planes of placed sums",
        "float32, float64, bfloat16",
    )
)
_PIXEL_STEPS = {"copy_words", "pixel rows", "pack_pixel_pairs"}
_PAIRS = {
    *_parts(f"{_GEMM}, pack_patch, pack_weight_of_groups", "bfloat16 pairs"),
    *(f"{part}, groups" for part in _parts(_GEMM, "bfloat16 pairs")),
    "gemm_panel bfloat16 pairs, rounded",
    "convert bfloat16", "copy_channels", "ShortRuns", "copy_pairs", "pack_weight_pairs",
    "products of pairs", "column_ukernel bfloat16", *_PIXEL_STEPS,
}  # fmt: skip
_AMX = {
    "products of tiles", "amx_panel", "LineStores", "store_tile bfloat16",
    "store_lanes bfloat16", "pack_patch blocks", "BlockWeightPacker",
    "ColumnPatchPacker", "pack_weight_columns", "convert bfloat16", *_PIXEL_STEPS,
}  # fmt: skip
PARTS = {
    "portable": _GENERAL | _INTEGERS,
    "avx2": _GENERAL | _INTEGERS | _NATIVE,
    "avx512": _GENERAL | _NATIVE,
    "avx512_bf16": _PAIRS,
    "amx": _AMX,
    "amx_emulated": _AMX,
}
RULES = {
    "block_k", "block_pixels", "cut_panels", "make_patch_axis", "one pixel, pairs", "scratch",
    "padding_classes", "filled vectors", "panels in place", "panels of a run", "whole planes",
    "shared weights of AMX", "weights of images",
    *(
        f"tiling: {driver}"
        for driver in (
            "dot", "rows", "columns", "strided", "phases", "amx", "pairs_of_groups", "pairs",
            "winograd", "depthwise", "groups", "planes", "pixels", "gemm", "weight_amx",
            "weight_pairs", "weight_depthwise", "weight_groups", "weight_transposed",
            "weight_gemm", "padding",
        )
    ),
}  # fmt: skip


def _compile(
    output: pathlib.Path, source: pathlib.Path, *flags: str, sanitize: bool = True
) -> pathlib.Path:
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    flags = (*FLAGS, *(SANITIZED if sanitize else ()), *flags)
    subprocess.run([*compiler, *flags, "-c", source, "-o", output], check=True)
    return output


def _link(output: pathlib.Path, *objects: pathlib.Path) -> pathlib.Path:
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    subprocess.run([*compiler, "-fsanitize=address,undefined", *objects, "-o", output], check=True)
    return output


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> list[pathlib.Path]:
    folder = tmp_path_factory.mktemp("plan")
    units = sorted((ROOT / "csrc" / "cpu" / "plan").glob("*.cpp"))
    return [_compile(folder / f"{unit.stem}.o", unit) for unit in units]


def _reported(finished: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """How many values each part has compared."""
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = (line.rpartition(": ") for line in finished.stdout.splitlines())
    return {part: int(count) for part, _, count in lines}


@pytest.mark.parametrize("isa", ISAS)
def test_parts(isa, plan, tmp_path):
    flags, features = ISAS[isa]
    if isa != "portable" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"{isa} is not checked: an instruction set of x86-64")
    here = " && ".join(f'__builtin_cpu_supports("{feature}")' for feature in features)
    if isa == "amx":
        here += " && conv2d_ext::cpu::why_no_amx() == nullptr"
    permission = _compile(
        tmp_path / "permission.o", ROOT / "csrc" / "cpu" / "isa" / "amx_permission.cpp"
    )
    source = FOLDER / "parts" / "main.cpp"
    asks = (f"-DCONV2D_PARTS_HERE={here or 'true'}",)
    alone = _compile(tmp_path / "alone.o", source, *asks, "-DCONV2D_ASKS_ALONE")
    asked = subprocess.run(
        [_link(tmp_path / "alone", alone, permission)], capture_output=True, text=True, check=False
    )
    if asked.returncode == NOT_CHECKED:
        pytest.skip(f"{isa} is not checked: {asked.stdout.strip()}")
    main = _compile(tmp_path / "main.o", source, *asks)
    parts = _compile(
        tmp_path / "parts.o",
        FOLDER / "parts" / "parts.cpp",
        *flags,
        sanitize=isa not in UNSANITIZED,
    )
    program = _link(tmp_path / "parts", main, parts, permission, *plan)
    finished = subprocess.run([program], capture_output=True, text=True, check=False)
    reported = _reported(finished)
    assert set(reported) == PARTS[isa]
    assert all(reported.values()), reported


def test_rules_of_the_plan(plan, tmp_path):
    program = _link(
        tmp_path / "rules", _compile(tmp_path / "rules.o", FOLDER / "plan_rules.cpp"), *plan
    )
    finished = subprocess.run([program], capture_output=True, text=True, check=False)
    assert set(_reported(finished)) == RULES
