"""The C++ example, built by CMake against the package under test, and run without Python."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import conv2d_ext

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "cpp"


def find_cmake() -> str:
    """That of the extra `test`, or the system's."""
    if importlib.util.find_spec("cmake"):
        import cmake

        return str(Path(cmake.CMAKE_BIN_DIR, "cmake"))
    return shutil.which("cmake") or pytest.fail("needs CMake: pip install cmake")


def configure(build: Path, *options: str) -> subprocess.CompletedProcess:
    command = [find_cmake(), "-S", str(EXAMPLE), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"]
    command += [f"-DPython_EXECUTABLE={sys.executable}", *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_example_is_built_and_runs(tmp_path):
    done = configure(tmp_path, f"-DCMAKE_PREFIX_PATH={conv2d_ext.cmake_prefix_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    command = [find_cmake(), "--build", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    program = tmp_path / "batch_invariant"
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LD_"))}
    done = subprocess.run([program], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("holds ") == 6
    assert f"instruction set: {conv2d_ext.build_config()['isa']}" in done.stdout
    linked = subprocess.check_output(["ldd", program], text=True)
    assert "libconv2d_ext.so" in linked
    assert "not found" not in linked
    assert not any(name in linked for name in ("libpython", "libtorch_python"))


def test_another_torch_is_refused(tmp_path):
    """By find_package, with both versions named, before anything is compiled."""
    package = tmp_path / "conv2d_ext"
    source = Path(conv2d_ext.__file__).parent
    shutil.copytree(source / "share", package / "share")
    (package / "_build_info.py").write_text("TORCH_VERSION = '1.13.1+cpu'\n")
    done = configure(tmp_path / "build", f"-DCMAKE_PREFIX_PATH={package / 'share' / 'cmake'}")
    assert done.returncode != 0
    words = " ".join(done.stderr.split())
    assert "was built with torch 1.13 and can't be linked with torch " + torch.__version__ in words
