"""Every header of csrc/cpu compiles by itself: none leans on what others include before it.

And what the bindings call of the CUDA engine is exported, which no build without CUDA notices.
"""

from __future__ import annotations

import os
import pathlib
import platform
import re
import shlex
import subprocess

import pytest
from torch.utils import cpp_extension

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
            "isa/amx.h", "isa/run_steps.h", "kernels/amx.h", "pack/amx.h", "pack/amx_columns.h",
            "pack/line_stores.h", "drivers/amx.h", "drivers/grad_weight_steps.h",
        )
    },
    **{
        header: [
            "-DCONV2D_ISA=avx512_bf16", "-DCONV2D_BFLOAT16_PAIRS", "-DCONV2D_NARROWS_BFLOAT16",
            '-DCONV2D_NATIVE_VEC="vec_avx512.h"', "-mavx512bf16", *_AVX512,
        ]
        for header in ("pack/pairs.h", "pack/pixel_rows.h")
    },
}  # fmt: skip
# The one that knows PyTorch: the engine does not.
_TORCH = {"torch_executor.h"}


@pytest.mark.parametrize("header", HEADERS, ids=lambda file: str(file.relative_to(FOLDER)))
def test_compiles_alone(header, tmp_path):
    name = header.relative_to(FOLDER).as_posix()
    if name in _ISA and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("an instruction set of x86-64")
    unit = tmp_path / "unit.cpp"
    unit.write_text(f'#include "{header}"\n')
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    standard = "c++20" if name in _TORCH else "c++17"  # which newer versions of PyTorch ask for
    flags = [f"-std={standard}", "-Wall", "-Wextra", "-fopenmp", "-fsyntax-only"]
    flags += _ISA.get(name, [])
    if name in _TORCH:
        flags += [flag for folder in cpp_extension.include_paths() for flag in ("-isystem", folder)]
    done = subprocess.run([*compiler, *flags, unit], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_the_bindings_call_of_cuda_is_exported():
    """A build with CUDA that lacks one of them can't be imported."""
    called = set(re.findall(r"cuda::([a-z]\w*)\(", (ROOT / "csrc" / "bindings.cpp").read_text()))
    headers = "".join(file.read_text() for file in sorted((ROOT / "csrc" / "cuda").glob("*.h")))
    exported = set(re.findall(r"CONV2D_EXT_EXPORT \w+ (\w+)\(", headers))
    assert {"plan_forward", "plan_matmul", "float32_matmul_math"} <= called
    assert called <= exported
