"""Every header of csrc/cpu compiles by itself: none leans on what others include before it."""

from __future__ import annotations

import os
import pathlib
import platform
import shlex
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "csrc" / "cpu"
HEADERS = sorted(
    file
    for file in FOLDER.rglob("*.h")
    # The brackets of an instruction set, which have no contents.
    if file.name not in ("target_begin.h", "target_end.h")
)
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"]
# Headers of one instruction set, as engine_<isa>.cpp names it.
_ISA = {
    "isa/vec_avx2.h": ["-DCONV2D_ISA=avx2", "-mavx2", "-mfma", "-mf16c"],
    "isa/vec_avx512.h": ["-DCONV2D_ISA=avx512", *_AVX512],
    **{
        header: [
            "-DCONV2D_ISA=amx", "-DCONV2D_AMX", '-DCONV2D_NATIVE_VEC="vec_avx512.h"', "-mamx-tile",
            "-mamx-bf16", "-mavx512bf16", *_AVX512,
        ]
        for header in (
            "isa/amx.h", "isa/run_amx.h", "kernels/amx.h", "pack/amx.h", "pack/amx_pixels.h",
            "drivers/grad_weight_amx.h",
        )
    },
    "pack/pairs.h": [
        "-DCONV2D_ISA=avx512_bf16", "-DCONV2D_BFLOAT16_PAIRS", '-DCONV2D_NATIVE_VEC="vec_avx512.h"',
        "-mavx512bf16", *_AVX512,
    ],
}  # fmt: skip


@pytest.mark.parametrize("header", HEADERS, ids=lambda file: str(file.relative_to(FOLDER)))
def test_compiles_alone(header, tmp_path):
    name = header.relative_to(FOLDER).as_posix()
    if name in _ISA and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("an instruction set of x86-64")
    unit = tmp_path / "unit.cpp"
    unit.write_text(f'#include "{header}"\n')
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    flags = ["-std=c++17", "-Wall", "-Wextra", "-fopenmp", "-fsyntax-only", *_ISA.get(name, [])]
    done = subprocess.run([*compiler, *flags, unit], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
