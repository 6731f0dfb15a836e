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
import subprocess
from collections.abc import Collection, Sequence

from child import run_python
from fuzz.build import SANITIZERS

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
    "-Wno-unknown-pragmas",
)
_SANITIZERS = (*SANITIZERS["address"], "-fno-omit-frame-pointer")
# It checks each address itself; instrumented, the run would take twice as long.
_UNSANITIZED = "shared_memory.cpp"


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


def _is_clang() -> bool:
    return b"clang" in _compiler_version()


@functools.cache
def _compiler_version() -> bytes:
    return subprocess.run([*compiler(), "--version"], capture_output=True, check=True).stdout


def _run(command: Sequence[str | os.PathLike]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        line = shlex.join(map(str, command))
        raise RuntimeError(f"{line}\nfailed with exit status {done.returncode}:\n{done.stderr}")


def _headers(csrc: pathlib.Path) -> list[pathlib.Path]:
    """Whatever a unit may include."""
    return [
        *(file for pattern in ("*.h", "cuda/*.h", "cuda/*.cuh") for file in csrc.glob(pattern)),
        *HERE.glob("*.h"),
    ]


def _folder(digest: hashlib._Hash) -> pathlib.Path:
    return ROOT / "build" / "cuda_host" / digest.hexdigest()[:20]


def compile_unit(
    unit: pathlib.Path,
    *,
    csrc: pathlib.Path = ROOT / "csrc",
    sanitize: bool = False,
    warnings_are_errors: bool = True,
) -> pathlib.Path:
    """The object file of a unit; *.cu is compiled as C++.

    ``csrc`` is where the unit's headers are; mutations.py gives an altered copy.
    """
    # What the shim does takes most of the time. Kernels are compiled for longer than they run: -O1
    # takes two thirds of the time of -O2, less with small functions inlined, which run faster, too.
    # With sanitizers they take a quarter without optimizing, which also leaves out no access that
    # is to be checked.
    if unit.parent == HERE:
        optimize = ("-O2",)
    else:
        optimize = ("-O0",) if sanitize else ("-O1", "-finline-small-functions")
    # Otherwise a process that loads several libraries would have the first one's variables in all.
    own_variables = () if _is_clang() else ("-fno-gnu-unique",)
    flags = [*_FLAGS, *_machine_flags(), *own_variables, *optimize]
    flags += _SANITIZERS if sanitize and unit.name != _UNSANITIZED else ()
    flags += ["-Werror"] if warnings_are_errors else []
    digest = hashlib.sha256(_compiler_version())
    digest.update(repr(flags).encode())
    # By name, not by place: two copies of csrc with the same content are the same.
    for file in sorted({unit, *_headers(csrc)}, key=lambda file: file.name):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    folder = _folder(digest)
    result = folder / (unit.name + ".o")
    with _locked(folder):
        if not result.exists():
            partial = folder / (unit.name + ".partial.o")
            includes = (f"-I{HERE}", f"-I{csrc}")
            _run([*compiler(), *flags, *includes, "-x", "c++", "-c", unit, "-o", partial])
            partial.rename(result)
    return result


def link(name: str, objects: Sequence[pathlib.Path], *, sanitize: bool = False) -> pathlib.Path:
    """A shared library. Of functions that several objects have, the first object's are taken."""
    folder = _folder(hashlib.sha256("".join(map(str, objects)).encode()))
    result = folder / f"{name}.so"
    with _locked(folder):
        if not result.exists():
            partial = folder / f"{name}.partial.so"
            sanitizers = _SANITIZERS if sanitize else ()
            if sanitize and _is_clang():
                sanitizers += ("-shared-libasan",)
            _run([*compiler(), "-shared", *sanitizers, *objects, "-ldl", "-o", partial])
            partial.rename(result)
    return result


def build(
    name: str,
    units: Sequence[pathlib.Path],
    *,
    sanitize: bool = False,
    without: Collection[str] = (),
) -> pathlib.Path:
    """A shared library of the units and the shim. ``without``: names of units that are compiled
    without sanitizers all the same."""
    # Those with sanitizers first: their copies of what several units have are the ones linked.
    units = sorted([*units, *SHIM], key=lambda unit: unit.name in without)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = pool.map(
            lambda unit: compile_unit(unit, sanitize=sanitize and unit.name not in without), units
        )
        return link(name, list(objects), sanitize=sanitize)


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


def run_sanitized(*arguments: str) -> subprocess.CompletedProcess:
    """A Python of its own that can load libraries with sanitizers, and import from tests/."""

    def path_of(library: str) -> str:
        found = subprocess.run(
            [*compiler(), f"-print-file-name={library}"], capture_output=True, text=True, check=True
        )
        return found.stdout.strip()

    package = pathlib.Path(conv2d_ext.__file__).parents[1]
    asan = "libclang_rt.asan-x86_64.so" if _is_clang() else "libasan.so"
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
