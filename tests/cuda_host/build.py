"""Compiles the CUDA sources and what runs them on the host, once for each state of the sources.

Everything lands in build/cuda_host/, in folders named after a hash of all that went in, so that a
second run finds what the first one built, and two states never mix.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import functools
import hashlib
import os
import pathlib
import shlex
import shutil
import subprocess
from collections.abc import Sequence

from child import run_python

import conv2d_ext

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "cuda_host"
SHIM = tuple(
    HERE / name
    for name in ("execution.cpp", "fiber.cpp", "shared_memory.cpp", "warp_operations.cpp")
)

_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fno-semantic-interposition",  # inline what is exported
    "-g1",
    # As nvcc is told: one rounding where the source says multiply_add, two elsewhere.
    "-ffp-contract=off",
    "-DCONV2D_CUDA_ON_HOST",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
)
_SANITIZERS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
)


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


@functools.cache
def _machine_flags() -> tuple[str, ...]:
    """Fused multiplications by an instruction, where there is one, and not by a call; same bits."""
    try:
        has_fma = " fma " in pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        has_fma = False
    return ("-mfma",) if has_fma else ()


@functools.cache
def _compiler_version() -> bytes:
    return subprocess.run([*compiler(), "--version"], capture_output=True, check=True).stdout


def _run(command: Sequence[str | os.PathLike]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        line = shlex.join(map(str, command))
        raise RuntimeError(f"{line}\nfailed with exit status {done.returncode}:\n{done.stderr}")


def _sources_below(csrc: pathlib.Path) -> list[pathlib.Path]:
    """Whatever a unit may include."""
    return sorted(
        file
        for pattern in ("*.h", "cuda/*.h", "cuda/*.cuh", "cuda/*.cu")
        for file in csrc.glob(pattern)
    ) + sorted(HERE.glob("*.h"))


def build(
    name: str,
    units: Sequence[pathlib.Path],
    *,
    csrc: pathlib.Path = ROOT / "csrc",
    sanitize: bool = False,
    optimize: str = "-O1",
) -> pathlib.Path:
    """A shared library of the units and the shim; units named *.cu are compiled as C++.

    Units that lie in csrc/cuda are taken from ``csrc`` (mutations.py gives an altered copy).
    """
    flags = [*_FLAGS, *_machine_flags(), optimize, *(_SANITIZERS if sanitize else ())]
    flags += [f"-I{HERE}", f"-I{csrc}"]
    headers = _sources_below(csrc)

    def folder_of(unit: pathlib.Path) -> pathlib.Path:
        own_csrc = csrc.resolve() in unit.resolve().parents or unit.name == "host_api.cpp"
        read = [
            unit,
            *(headers if own_csrc or unit.name == "shim_selftest.cpp" else HERE.glob("*.h")),
        ]
        digest = hashlib.sha256(_compiler_version())
        # Not the place of an altered copy: two copies with the same content are the same.
        digest.update(repr([flag for flag in flags if not flag.startswith("-I")]).encode())
        for file in sorted(set(read), key=lambda file: file.name):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
        return ROOT / "build" / "cuda_host" / digest.hexdigest()[:20]

    def compile_unit(unit: pathlib.Path) -> pathlib.Path:
        folder = folder_of(unit)
        result = folder / (unit.name + ".o")
        with _locked(folder):
            if not result.exists():
                partial = folder / (unit.name + ".partial.o")
                faster = ["-O2"] if unit in SHIM else []  # where most of the time goes
                _run([*compiler(), *flags, *faster, "-x", "c++", "-c", unit, "-o", partial])
                partial.rename(result)
        return result

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_unit, [*units, *SHIM]))
    digest = hashlib.sha256("".join(map(str, objects)).encode())
    folder = ROOT / "build" / "cuda_host" / digest.hexdigest()[:20]
    result = folder / f"{name}.so"
    with _locked(folder):
        if not result.exists():
            partial = folder / f"{name}.partial.so"
            sanitizers = _SANITIZERS if sanitize else ()
            if sanitize and "clang" in compiler()[0]:
                sanitizers += ("-shared-libasan",)
            _run([*compiler(), "-shared", *sanitizers, *objects, "-ldl", "-o", partial])
            partial.rename(result)
    return result


class _locked:
    """One process at a time builds in a folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / ".lock"

    def __enter__(self) -> None:
        self._handle = self._file.open("w")
        fcntl.flock(self._handle, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self._handle.close()


def remove_old_builds(keep: int = 400) -> None:
    """Leaves the folders that were used last."""
    folder = ROOT / "build" / "cuda_host"
    found = sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in found[keep:]:
        shutil.rmtree(old, ignore_errors=True)


def run_sanitized(*arguments: str) -> subprocess.CompletedProcess:
    """A Python of its own that can load libraries with sanitizers, and import from tests/."""

    def path_of(library: str) -> str:
        found = subprocess.run(
            [*compiler(), f"-print-file-name={library}"], capture_output=True, text=True, check=True
        )
        return found.stdout.strip()

    package = pathlib.Path(conv2d_ext.__file__).parents[1]
    asan = "libclang_rt.asan-x86_64.so" if "clang" in compiler()[0] else "libasan.so"
    return run_python(
        *arguments,
        env={
            "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{package}",
            # libstdc++ as well: AddressSanitizer looks for what throws exceptions when it starts.
            "LD_PRELOAD": f"{path_of(asan)} {path_of('libstdc++.so.6')}",
            # Python never frees all it has. Pointers into frames that have returned don't occur in
            # device code, and following them would take another stack for every fiber.
            "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
    )
