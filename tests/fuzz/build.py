"""Compiles the engine and the fuzz harness, without torch, under a sanitizer.

Objects land in build/fuzz/, each in a folder named after a hash of all that goes into it, so that
what has not changed is not compiled again.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "fuzz"
BUILD = ROOT / "build" / "fuzz"

ISAS = ("portable", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated")
# Of which any may be left out; integers stand for all of their kinds.
DTYPES = ("float32", "float64", "bfloat16", "float16", "complex64", "complex128", "integers")
# What the harness puts others in the place of, and what knows torch.
_REPLACED = {
    "select.cpp",
    "scratch.cpp",
    "conv2d_cpu_ops.cpp",
    "reduce_ops.cpp",
    "tables_in_use.cpp",
    "caches.cpp",
}
# Threads and scratch are watched by the sanitizers; oracle and tensors would only be slower.
_WATCHED = {"harness.cpp", "seams.cpp", "threads.cpp"}

SANITIZERS = {
    "address": (
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        # The address sanitizer sees such accesses. Of pointers that wrap around, which compile a
        # quarter longer, it sees the use.
        "-fno-sanitize=null,object-size,pointer-overflow",
    ),
    "thread": ("-fsanitize=thread",),
    "coverage": ("-fprofile-instr-generate", "-fcoverage-mapping"),
    "none": (),
}
_FLAGS = (
    "-std=c++17",
    "-ffp-contract=off",  # as the product
    "-fopenmp-simd",  # its pragmas; threads are the harness's own
    "-fno-omit-frame-pointer",
    "-DCONV2D_ADJUSTABLE_LIMITS",
    "-DCONV2D_WATCHED_RUNS",
    "-DCONV2D_EXT_DEBUG",  # assertions
    "-Wall",
    "-Wextra",
)


class BuildError(Exception):
    """What the compiler said."""


def machine_isas() -> tuple[str, ...]:
    """The instruction sets that this machine may have; the harness asks the CPU itself."""
    return ISAS if platform.machine() in ("x86_64", "AMD64") else ISAS[:1]


def find_clang() -> list[str] | None:
    """A clang++ that has libFuzzer, or None."""
    for name in ("clang++", *(f"clang++-{version}" for version in range(21, 13, -1))):
        path = shutil.which(name)
        if path is not None and _links(path, "-fsanitize=fuzzer"):
            return [path]
    return None


@functools.cache
def _links(compiler: str, flag: str) -> bool:
    program = 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }'
    done = subprocess.run(
        [compiler, flag, "-x", "c++", "-", "-o", os.devnull],
        input=program,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode == 0


def default_compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


@functools.cache
def _version(compiler: tuple[str, ...]) -> bytes:
    return subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\nfailed:\n{done.stderr}")


# A file's name in quotes: an include, or (isa/engine_<isa>.cpp) the macro that an include takes.
_INCLUDED = re.compile(rb'^[ \t]*#[ \t]*(?:include|define[ \t]+\w+)[ \t]+"([^"]+)"', re.MULTILINE)


def _contents(file: pathlib.Path, found: dict[pathlib.Path, bytes]) -> dict[pathlib.Path, bytes]:
    """What a file and the project's headers that it includes hold, whatever conditions they are
    under."""
    if file not in found:
        found[file] = file.read_bytes()
        for name in _INCLUDED.findall(found[file]):
            included = pathlib.Path(os.path.normpath(file.parent / name.decode()))
            if included.is_file():
                _contents(included, found)
    return found


def _sources(root: pathlib.Path, isas: tuple[str, ...], libfuzzer: bool) -> list[pathlib.Path]:
    engine = [file for file in (root / "csrc/cpu").rglob("*.cpp") if file.name not in _REPLACED]
    kinds = ("engine", "tables")
    left_out = {f"{kind}_{isa}.cpp" for kind in kinds for isa in ISAS if isa not in isas}
    harness = [
        file
        for file in (root / "tests/fuzz").glob("*.cpp")
        if not (libfuzzer and file.name == "generator.cpp")
    ]
    # The slowest to compile first.
    return sorted(
        [*(file for file in engine if file.name not in left_out), *harness],
        key=lambda file: not file.name.startswith("engine_"),
    )


def _object(
    root: pathlib.Path,
    compiler: list[str],
    source: pathlib.Path,
    sanitizer: str,
    dtypes: tuple[str, ...],
    libfuzzer: bool,
    engine_level: str | None,
) -> pathlib.Path:
    is_engine = root / "csrc/cpu" in source.parents
    instrumented = is_engine or source.name in _WATCHED
    flags = [*_FLAGS, *(SANITIZERS[sanitizer] if instrumented else ())]
    if instrumented and libfuzzer:
        flags.append("-fsanitize=fuzzer-no-link")
    # What runs without a sanitizer is optimized as the product is. With one, -Og compiles in half
    # the time of -O1 and runs nine tenths of the cases.
    level = "-Og" if instrumented and sanitizer != "none" else "-O2"
    if engine_level is not None and source.name.startswith("engine_"):
        level = engine_level
    flags.append(level)
    flags.append("-g0" if source.name.startswith("engine_") and not libfuzzer else "-g1")
    knows_dtypes = source.name.startswith("engine_") or source.name == "seams.cpp"
    if knows_dtypes and set(dtypes) != set(DTYPES):
        mask = sum(1 << DTYPES.index(dtype) for dtype in set(dtypes))
        flags.append(f"-DCONV2D_COMPILED_DTYPES={mask}")
    digest = hashlib.sha256(_version(tuple(compiler)) + repr((compiler, flags)).encode())
    for file, contents in sorted(_contents(source, {}).items()):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + contents)
    result = BUILD / "objects" / f"{source.stem}-{digest.hexdigest()[:20]}.o"
    if not result.exists():
        result.parent.mkdir(parents=True, exist_ok=True)
        partial = result.with_suffix(f".{os.getpid()}.o")
        _run([*compiler, *flags, "-c", str(source), "-o", str(partial)])
        partial.replace(result)
    return result


def build(
    sanitizer: str = "address",
    isas: tuple[str, ...] = ISAS,
    compiler: list[str] | None = None,
    dtypes: tuple[str, ...] = DTYPES,
    libfuzzer: bool = False,
    root: pathlib.Path = ROOT,
    engine_level: str | None = None,
) -> pathlib.Path:
    """The harness as a program: with the seeded generator's main, or libFuzzer's. ``root``: where
    csrc and tests/fuzz are, these or altered copies. ``engine_level``: how far the kernels are
    optimized; by default as the product's are where there is no sanitizer, which takes twice as
    long as -Og."""
    compiler = compiler or default_compiler()
    # Those that others are made of.
    if {"avx512_bf16", "amx", "amx_emulated"}.intersection(isas):
        isas = (*isas, "avx512")
    if "avx512" in isas and "integers" in dtypes:
        isas = (*isas, "avx2")
    jobs = int(os.environ.get("MAX_JOBS", "") or os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        objects = list(
            pool.map(
                lambda source: _object(
                    root, compiler, source, sanitizer, dtypes, libfuzzer, engine_level
                ),
                _sources(root, isas, libfuzzer),
            )
        )
    digest = hashlib.sha256("".join(sorted(map(str, objects))).encode()).hexdigest()[:20]
    program = BUILD / f"{'libfuzzer' if libfuzzer else 'generator'}-{sanitizer}-{digest}"
    if not program.exists():
        partial = program.with_suffix(f".{os.getpid()}")
        link = [*compiler, *SANITIZERS[sanitizer], *(["-fsanitize=fuzzer"] if libfuzzer else [])]
        # Exported names: how the harness knows a driver by its address.
        _run([*link, "-rdynamic", "-o", str(partial), *map(str, objects), "-lpthread", "-ldl"])
        partial.replace(program)
    return program


def build_of_tests(seconds: float) -> dict[str, pathlib.Path]:
    """The programs that test_fuzz.py runs where it has so much time, by sanitizer.

    One instruction set, the widest of most machines, and few types: what takes longest is
    compiling. With time the types that have kernels of their own. `python tests/fuzz` has all."""
    native = "avx2" if "avx2" in machine_isas() else "portable"
    if seconds < 30:
        return {"address": build("address", (native,), dtypes=("float32",))}
    return {
        "address": build("address", (native,), dtypes=("float32", "bfloat16", "complex64")),
        "thread": build("thread", (native,), dtypes=("float32",)),
        "none": build("none", ("portable",), dtypes=("float32", "complex64")),
    }
