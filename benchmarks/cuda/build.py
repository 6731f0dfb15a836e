"""python -m benchmarks.cuda.build: the module in place, built or put back; copied to a folder.

Needs torch, its setuptools of any version, a compiler and the CUDA toolkit. ninja is used where it
is there; without it, files are compiled side by side all the same. module.tar.gz, which it writes,
holds the built module: a later run for the same sources, torch, Python, compilers and GPU finds it
in the output folder, in build/, or where --module says, and builds nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "conv2d_ext"
ARCHIVE = "module.tar.gz"
_FLAGS = ("CXXFLAGS", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")  # environment variables
# A line at the end of _build_info.py, which belongs to the module and travels with it.
MARK = "# Built by benchmarks/cuda/build.py from "


def digest_of_sources(archs: str) -> str:
    """Of all that the module follows from."""
    import torch

    digest = hashlib.sha256()
    facts = (archs, torch.__version__, sys.implementation.cache_tag, platform.machine(), *tools())
    for fact in facts:
        digest.update(fact.encode() + b"\0")
    files = [ROOT / "setup.py", ROOT / "pyproject.toml"]
    folders = ("csrc", "build_backend", "conv2d_ext/include")
    files += (path for folder in folders for path in (ROOT / folder).rglob("*"))
    for path in sorted(files):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def tools() -> list[str]:
    """nvcc, the C++ compiler, and the flags that are added to those in build_backend."""
    from torch.utils import cpp_extension

    backend = _backend()
    toolkit, compiler = backend.find_toolkit(cpp_extension.CUDA_HOME), backend.find_compiler()
    return [
        f"nvcc {toolkit.version if toolkit else None}",
        backend.compiler_version(compiler) if compiler else "",
        *(os.environ.get(name, "") for name in _FLAGS),
    ]


def _backend() -> ModuleType:
    folder = str(ROOT / "build_backend")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import conv2d_ext_build

    return conv2d_ext_build


def module_path() -> Path:
    return PACKAGE / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def built_files() -> tuple[Path, ...]:
    """The module, the library that it links, and what setup.py says of them."""
    return module_path(), PACKAGE / "libconv2d_ext.so", PACKAGE / "_build_info.py"


def digest_in(text: str) -> str | None:
    found = re.search(rf"^{re.escape(MARK)}(\w+)$", text, re.MULTILINE)
    return found[1] if found else None


def is_in_place(digest: str) -> bool:
    *_, info = files = built_files()
    return (
        all(path.exists() for path in files)
        and digest_in(info.read_text(encoding="utf-8")) == digest
    )


def read_archive(archive: Path, digest: str) -> dict[str, bytes] | None:
    """Its files, where it holds a module of these sources."""
    names = [path.name for path in built_files()]
    try:
        with tarfile.open(archive) as file:
            found = {name: file.extractfile(name).read() for name in names}
    except (OSError, EOFError, KeyError, AttributeError, zlib.error, tarfile.TarError):
        return None
    return found if digest_in(found["_build_info.py"].decode()) == digest else None


def put_back(archive: Path, digest: str) -> bool:
    """Whether the archive's module is one of these sources; then that is in place."""
    found = read_archive(archive, digest)
    for name, content in (found or {}).items():
        PACKAGE.joinpath(name).unlink(missing_ok=True)  # it may be loaded by a process that runs
        PACKAGE.joinpath(name).write_bytes(content)
    return found is not None


def keep(archive: Path) -> None:
    partial = archive.with_suffix(".partial")
    with tarfile.open(partial, "w:gz", compresslevel=5) as file:
        for path in built_files():
            file.add(path, path.name)
    os.replace(partial, archive)


def build(digest: str) -> None:
    """As `setup.py build_ext --inplace` does, without reading pyproject.toml, whose metadata an
    older setuptools doesn't understand."""
    os.chdir(ROOT)
    backend = _backend()
    from setuptools import Distribution

    backend._put_ninja_on_path()
    arguments = backend.setup_arguments(ROOT)
    distribution = Distribution({"name": "conv2d-ext", **arguments})
    distribution.script_name = "setup.py"
    command = distribution.get_command_obj("build_ext")
    command.inplace = True
    command.ensure_finalized()
    if not command.use_ninja:
        _compile_side_by_side(command)
    command.run()
    with (PACKAGE / "_build_info.py").open("a", encoding="utf-8") as info:
        info.write(f"\n{MARK}{digest}\n")


def _compile_side_by_side(command) -> None:
    """Without ninja torch compiles one file after the other. Here the command lines are collected
    instead, and run several at a time."""
    jobs = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
    plain = command.build_extension

    def build_extension(extension) -> None:
        compiler = command.compiler
        collect, spawn = compiler.compile, compiler.spawn

        def compile(sources, *args, **kwargs):
            lines = []
            compiler.spawn = lambda line, **_: lines.append([str(word) for word in line])
            try:
                objects = collect(sources, *args, **kwargs)
            finally:
                compiler.spawn = spawn
            # The heaviest first: kernels, then engines.
            lines.sort(key=lambda line: ("nvcc" not in line[0], "/engine_" not in " ".join(line)))
            with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
                statuses = list(pool.map(_run_line, lines))
            if any(statuses):
                raise RuntimeError("a file did not compile")
            return objects

        compiler.compile = compile
        plain(extension)

    command.build_extension = build_extension


def _run_line(line: list[str]) -> int:
    done = subprocess.run(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    # In one piece, after its command: others print too.
    print(f"{shlex.join(line)}\n{done.stdout}", end="", flush=True)
    return done.returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 where nothing could be built."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda.build", description=__doc__)
    parser.add_argument("--module", type=Path, metavar="FILE", help=f"an {ARCHIVE} of before")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), metavar="FOLDER")
    arguments = parser.parse_args(argv)
    output = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    digest = digest_of_sources(_architectures())
    start = time.monotonic()
    places = [p for p in (arguments.module, output / ARCHIVE, ROOT / "build" / ARCHIVE) if p]
    if is_in_place(digest):
        print("The module of these sources is in place.")
    elif used := next((place for place in places if put_back(place, digest)), None):
        print(f"The module of these sources was put back from {used}.")
    else:
        build(digest)
        print(f"Built in {time.monotonic() - start:.0f} s.")
    if read_archive(output / ARCHIVE, digest) is None:
        keep(output / ARCHIVE)
        print(f"Written: {output / ARCHIVE}")
    return 0


def _architectures() -> str:
    """As the build will choose them."""
    import torch
    from torch.utils import cpp_extension

    backend = _backend()
    toolkit = backend.find_toolkit(cpp_extension.CUDA_HOME)
    if os.environ.get("CONV2D_EXT_CUDA") == "0" or toolkit is None:
        return "none"
    devices = range(torch.cuda.device_count())
    capabilities = [torch.cuda.get_device_capability(device) for device in devices]
    return backend.choose_cuda_archs(os.environ.get("TORCH_CUDA_ARCH_LIST"), capabilities, toolkit)


if __name__ == "__main__":
    sys.exit(main())
