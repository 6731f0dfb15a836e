"""What setup.py builds: sources, flags, CUDA or not, and the record of it in _build_info.py; and
the metadata that follows from it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import setuptools
from conv2d_ext_toolchain import (
    LINK_FLAGS,
    BuildError,
    compiler_problem,
    compiler_version,
    find_compiler,
    headers_problem,
)
from setuptools import Extension
from setuptools.command.build_ext import build_ext

MODULE = "conv2d_ext._C"
# All but the bindings: a library without Python symbols, which the module and C++ programs link.
LIBRARY = "libconv2d_ext.so"
BINDINGS = "csrc/bindings.cpp"
# Where no GPU is visible: A100, H100, and PTX that newer GPUs translate when they load it.
DEFAULT_CUDA_ARCHS = "8.0;9.0+PTX"
_OLD_ARCHITECTURES = ("Kepler", "Maxwell", "Pascal", "Volta", "Turing")  # torch's names of others
OLDEST_SETUPTOOLS = (77, 0)  # that reads pyproject.toml
OLDEST_CAPABILITY = (8, 0)  # cp.async, and the tensor cores' TF32 and bfloat16

CXX_FLAGS = [
    # -O3 compiles for half as long again and gains nothing: loops that matter name their vectors.
    "-O2",
    # Else the speed of a micro-kernel follows from what is compiled before it: up to 5 % on Zen 5.
    "-falign-functions=64",
    # at::parallel_for is a header template: without OpenMP it compiles to a serial loop, silently.
    "-fopenmp",
    # Fusing a * b + c changes the last bit, and which ones a compiler fuses depends on its version
    # and on inlining. The engines name their fused operations, so every compiler gives their bits.
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    # Debug information on torch's headers is most of the module's size and costs compile time;
    # CXXFLAGS=-g brings it back.
    "-g0",
]
NVCC_FLAGS = [
    "-O3",
    # As -ffp-contract=off: the kernels name their fused operations.
    "-fmad=false",
    # The architectures side by side: a file of kernels compiles for longer than all others.
    "--threads=2",
    "-Xcompiler=-ffp-contract=off,-fvisibility=hidden,-Wall,-Wextra",
]


OLDEST_TORCH = (2, 8)
# Whether a wheel is being made: conv2d_ext_backend.py sets it. Editable installs and sdists name no
# torch, since another one may be put under the first, and any can build the second.
building_a_wheel = False


class CudaDecision(NamedTuple):
    """Whether the CUDA sources are compiled, and what build_config() must say about it."""

    build: bool
    warning: str | None = None


def decide_cuda(
    requested: str | None,
    torch_cuda: str | None,
    toolkit: str | None,
    *,
    has_sources: bool,
    gpu_visible: bool,
) -> CudaDecision:
    """Decides by versions, never by the presence of a GPU: machines without one build for others.

    requested: CONV2D_EXT_CUDA: None or '' (where possible), '0' (never), '1' (or fail).
    torch_cuda: the CUDA version of torch, None where torch was built without.
    toolkit: the version of nvcc, None where there is none.
    has_sources: whether csrc/cuda holds any.
    gpu_visible: whether it is worth a warning that no toolkit was found.
    Raises BuildError.
    """
    if requested not in (None, "", "0", "1"):
        raise BuildError(f"CONV2D_EXT_CUDA must be 0, 1 or unset, not {requested!r}.")
    if requested == "0":
        return CudaDecision(False)
    warn = False
    if not has_sources:
        refusal = "this version of conv2d_ext has no CUDA sources"
    elif torch_cuda is None:
        refusal = "the torch in this environment was built without CUDA"
    elif toolkit is None:
        refusal = (
            f"no CUDA toolkit was found for torch's CUDA {torch_cuda} (CUDA_HOME must name a "
            "folder with bin/nvcc)"
        )
        warn = gpu_visible
    elif toolkit.split(".")[0] != torch_cuda.split(".")[0]:
        refusal = f"the CUDA toolkit is {toolkit} and torch was built with CUDA {torch_cuda}"
        warn = True
    else:
        return CudaDecision(True)
    if requested == "1":
        raise BuildError(f"CONV2D_EXT_CUDA=1 asks for CUDA, but {refusal}.")
    return CudaDecision(False, f"built for the CPU only: {refusal}" if warn else None)


class Toolkit(NamedTuple):
    """A CUDA toolkit: its version, such as '13.0', and what its nvcc makes code for; nothing where
    it doesn't say."""

    version: str
    capabilities: frozenset[tuple[int, int]] = frozenset()


def choose_cuda_archs(
    requested: str | None, capabilities: list[tuple[int, int]], toolkit: Toolkit
) -> str:
    """requested: TORCH_CUDA_ARCH_LIST. capabilities: those of the visible GPUs.

    Visible GPUs that are too old are left out. One that the toolkit doesn't know gets the newest
    code that it does, and PTX, which the driver translates: as torch's extensions do. Raises
    BuildError where `requested` names either, or where no code fits a GPU.
    """
    if requested:
        for name in _arch_names(requested):
            numbers = re.match(r"(\d+)\.(\d)", name)
            pair = tuple(map(int, numbers.groups())) if numbers else None
            is_old = pair and pair < OLDEST_CAPABILITY
            if is_old or re.split(r"\W", name)[0] in _OLD_ARCHITECTURES:
                raise BuildError(
                    f"TORCH_CUDA_ARCH_LIST={requested}: wanted compute capability "
                    f"{_dotted(OLDEST_CAPABILITY)} or newer, got {name}."
                )
            if pair and toolkit.capabilities and pair not in toolkit.capabilities:
                raise BuildError(
                    f"TORCH_CUDA_ARCH_LIST={requested}: {_what_it_makes(pair, toolkit)}."
                )
        return requested
    usable = {pair for pair in capabilities if pair >= OLDEST_CAPABILITY}
    if not usable:
        return DEFAULT_CUDA_ARCHS
    known = sorted({_nearest_known(pair, toolkit) for pair in usable})
    return ";".join(map(_dotted, known)) + "+PTX"


def _nearest_known(gpu: tuple[int, int], toolkit: Toolkit) -> tuple[int, int]:
    if not toolkit.capabilities or gpu in toolkit.capabilities:
        return gpu
    older = [pair for pair in toolkit.capabilities if OLDEST_CAPABILITY <= pair < gpu]
    if not older:
        raise BuildError(
            f"a GPU of compute capability {_dotted(gpu)} is visible, and "
            f"{_what_it_makes(gpu, toolkit)}: set CUDA_HOME to another one."
        )
    return max(older)


def _what_it_makes(wanted: tuple[int, int], toolkit: Toolkit) -> str:
    made = sorted(pair for pair in toolkit.capabilities if pair >= OLDEST_CAPABILITY)
    return (
        f"the CUDA toolkit {toolkit.version} makes no code for compute capability "
        f"{_dotted(wanted)}, only for {', '.join(map(_dotted, made))}"
    )


def unknown_gpus(capabilities: list[tuple[int, int]], toolkit: Toolkit) -> str | None:
    """One sentence where visible GPUs get PTX because the toolkit doesn't know them."""
    usable = {pair for pair in capabilities if pair >= OLDEST_CAPABILITY}
    unknown = sorted(usable - toolkit.capabilities) if toolkit.capabilities else []
    if not unknown:
        return None
    return (
        f"the CUDA toolkit {toolkit.version} doesn't know the visible GPUs of compute capability "
        f"{', '.join(map(_dotted, unknown))}: they run code for older GPUs, or PTX that their "
        "driver translates when the module is loaded"
    )


def _dotted(capability: tuple[int, int]) -> str:
    return "{}.{}".format(*capability)


def _arch_names(archs: str) -> list[str]:
    return [name for name in re.split(r"[;\s]+", archs) if name]


def gencode_flags(archs: str) -> list[str]:
    """nvcc's flags for a TORCH_CUDA_ARCH_LIST of numbers; of others none, and torch reads it.

    Machine code and PTX are all made from the PTX of the oldest architecture. The kernels have no
    code for one alone, so that of newer ones reads the same, and making it is most of the time.
    """
    names = _arch_names(archs)
    if not all(re.fullmatch(r"\d+\.\d(\+PTX)?", name) for name in names):
        return []
    numbers = sorted({int(re.sub(r"\D", "", name)) for name in names})
    codes = [f"sm_{number}" for number in numbers]
    if any(name.endswith("+PTX") for name in names):
        codes.append(f"compute_{numbers[0]}")
    return [f"-gencode=arch=compute_{numbers[0]},code={code}" for code in codes]


def find_toolkit(cuda_home: str | None) -> Toolkit | None:
    """What nvcc reports, or None without a working one."""
    match = re.search(r"release (\d+\.\d+)", _ask_nvcc(cuda_home, "--version"))
    if match is None:
        return None
    codes = re.findall(r"^sm_(\d+)(\d)$", _ask_nvcc(cuda_home, "--list-gpu-code"), re.MULTILINE)
    return Toolkit(match[1], frozenset((int(major), int(minor)) for major, minor in codes))


def _ask_nvcc(cuda_home: str | None, question: str) -> str:
    if cuda_home is None:
        return ""
    try:
        return subprocess.check_output(
            [Path(cuda_home, "bin", "nvcc"), question], text=True, stderr=subprocess.DEVNULL
        )
    except (OSError, subprocess.CalledProcessError):
        return ""


def find_sources(root: Path, *, cuda: bool) -> list[str]:
    """Paths relative to `root`, as setuptools wants them, in a fixed order. A file that another one
    includes is a part of it."""
    patterns = ["csrc/*.cpp", "csrc/cpu/**/*.cpp"]
    if cuda:
        patterns += ["csrc/cuda/*.cpp", "csrc/cuda/*.cu"]
    found = {path for pattern in patterns for path in root.glob(pattern)}
    for path in tuple(found):
        included = re.findall(r'^#include "(.+\.cpp)"', path.read_text(encoding="utf-8"), re.M)
        found -= {path.parent / name for name in included}
    return sorted(path.relative_to(root).as_posix() for path in found)


def longest_first(sources: list[str]) -> list[str]:
    """The sources in the order to compile them in, so that no core waits at the end."""
    long = [r"\.cu$", r"/(extension|bindings)\.cpp$", r"/engine_"]

    def rank(name: str) -> int:
        return next((i for i, pattern in enumerate(long) if re.search(pattern, name)), len(long))

    return sorted(sources, key=rank)


def format_build_info(
    version: str,
    torch_version: str,
    compiler: str,
    cuda_archs: str | None,
    warnings: tuple[str, ...],
) -> str:
    """The text of conv2d_ext/_build_info.py."""
    return (
        '"""How conv2d_ext._C was built. Written by setup.py; not to be edited."""\n\n'
        f"VERSION = {version!r}\n"
        f"TORCH_VERSION = {torch_version!r}\n"
        f"COMPILER = {compiler!r}\n"
        f"CUDA_ARCHS = {cuda_archs!r}\n"
        f"WARNINGS = {warnings!r}\n"
    )


def read_version(root: Path) -> str:
    """The version that pyproject.toml names."""
    text = root.joinpath("pyproject.toml").read_text(encoding="utf-8")
    return re.search(r'^version = "(.+)"$', text, re.MULTILINE)[1]


def metadata(
    version: str, torch_version: str | None, cuda: str | None, *, wheel: bool, from_sdist: bool
) -> dict:
    """The version and the requirements.

    An extension works with the torch minor that it was compiled against. A wheel says so, and pip
    refuses what `import conv2d_ext` would refuse later.

    torch_version: the one built with, None where there is none.
    cuda: the CUDA version of the build, None for the CPU only.
    wheel: whether the metadata are a wheel's.
    from_sdist: whether the tree is an unpacked sdist. pip takes the version from an sdist's name
        and refuses a build that says another one, so a wheel made there has no local version.
    """
    if not wheel or torch_version is None:
        return {"version": version, "install_requires": ["torch>={}.{}".format(*OLDEST_TORCH)]}
    minor = ".".join(re.findall(r"\d+", torch_version)[:2])
    device = "cu" + cuda.replace(".", "") if cuda else "cpu"
    local = "" if from_sdist else f"+torch{minor}.{device}"
    return {"version": version + local, "install_requires": [f"torch=={minor}.*"]}


def major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def check_setuptools(version: str = setuptools.__version__) -> None:
    """Without isolation the environment's setuptools is used: is it able to read pyproject.toml?

    Raises BuildError.
    """
    if major_minor(version) < OLDEST_SETUPTOOLS:
        raise BuildError(
            f"building needs setuptools {OLDEST_SETUPTOOLS[0]} or newer, and this environment has "
            f"{version}: pip install 'setuptools>={OLDEST_SETUPTOOLS[0]},<82'."
        )


def split_flags(name: str) -> list[str]:
    """The flags of an environment variable. Raises BuildError."""
    value = os.environ.get(name, "")
    try:
        return shlex.split(value)
    except ValueError as error:
        raise BuildError(f"{name}={value} is no list of flags ({error}).") from None


def setup_arguments(root: Path) -> dict:
    """The arguments of setuptools.setup() that pyproject.toml cannot hold.

    Without torch, which neither an sdist nor reading the metadata needs, they name the extension
    but cannot build it. Raises BuildError.
    """
    check_setuptools()
    version = read_version(root)
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        extension = Extension(MODULE, find_sources(root, cuda=False))
        return {
            "ext_modules": [extension],
            "cmdclass": {"build_ext": _BuildWithoutTorch},
            **metadata(version, None, None, wheel=False, from_sdist=False),
        }
    from torch.utils import cpp_extension

    toolkit = find_toolkit(cpp_extension.CUDA_HOME)
    decision = decide_cuda(
        os.environ.get("CONV2D_EXT_CUDA"),
        torch.version.cuda,
        toolkit.version if toolkit else None,
        has_sources=find_sources(root, cuda=True) != find_sources(root, cuda=False),
        gpu_visible=torch.cuda.is_available(),
    )
    cuda_archs = too_old = too_new = None
    nvcc_flags = NVCC_FLAGS
    if decision.build:
        devices = range(torch.cuda.device_count())
        capabilities = [torch.cuda.get_device_capability(device) for device in devices]
        requested = os.environ.get("TORCH_CUDA_ARCH_LIST")
        cuda_archs = choose_cuda_archs(requested, capabilities, toolkit)
        if not requested:
            too_new = unknown_gpus(capabilities, toolkit)
        if any(pair < OLDEST_CAPABILITY for pair in capabilities):
            too_old = "GPUs below compute capability 8.0 are visible, which the kernels can't use"
        os.environ["TORCH_CUDA_ARCH_LIST"] = cuda_archs
        nvcc_flags = [*NVCC_FLAGS, *gencode_flags(cuda_archs)]
    # Headers in system folders give no warnings: so ours can be compiled with -Wextra beside
    # torch's. (The same folder named by -I, as torch does, is then ignored there.)
    system = cpp_extension.include_paths(device_type="cuda" if decision.build else "cpu")
    system = [*system, sysconfig.get_path("include")]
    cxx_flags = [*CXX_FLAGS, *(flag for folder in system for flag in ("-isystem", folder))]
    if decision.build:
        cxx_flags.append("-DCONV2D_EXT_WITH_CUDA")
    cxx_flags += split_flags("CXXFLAGS")
    make_extension = cpp_extension.CUDAExtension if decision.build else cpp_extension.CppExtension
    extension = make_extension(
        MODULE,
        find_sources(root, cuda=decision.build),
        extra_compile_args={"cxx": cxx_flags, "nvcc": nvcc_flags},
        extra_link_args=LINK_FLAGS,
    )
    warnings = tuple(sentence for sentence in (decision.warning, too_old, too_new) if sentence)
    command = _build_ext_with_torch(cuda_archs, warnings)
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": command},
        **metadata(
            version,
            torch.__version__,
            torch.version.cuda if decision.build else None,
            wheel=building_a_wheel,
            # setuptools writes it into every sdist, and nowhere else into the tree.
            from_sdist=root.joinpath("PKG-INFO").exists(),
        ),
    }


class _BuildWithoutTorch(build_ext):
    def run(self):
        raise BuildError("building needs torch in this environment: pip install 'torch>=2.8'.")


def _build_ext_with_torch(cuda_archs: str | None, warnings: tuple[str, ...]) -> type[build_ext]:
    """The build_ext command, in a function because its base class exists only where torch does."""
    import torch
    from torch.utils import cpp_extension

    class BuildExt(cpp_extension.BuildExtension):
        def finalize_options(self):
            super().finalize_options()
            # setuptools would look at the sources alone: not at headers, flags, compiler and torch.
            # (With ninja, which looks at them all, torch sets it itself.)
            self.force = True
            # One folder for builds of every kind, so that ninja recompiles only what has changed;
            # objects of another Python or torch are never mixed in.
            python = sys.implementation.cache_tag
            tag = f"{sysconfig.get_platform()}-{python}-torch{torch.__version__}"
            self.build_temp = os.path.join("build", f"temp.{tag}")

        def swig_sources(self, sources, extension):
            # The one step after setuptools has sorted the sources by name.
            return longest_first(super().swig_sources(sources, extension))

        def build_extension(self, extension):
            with linking_in_two(self.compiler):
                super().build_extension(extension)

        def copy_extensions_to_source(self):
            super().copy_extensions_to_source()
            self.copy_file(Path(self.build_lib, "conv2d_ext", LIBRARY), f"conv2d_ext/{LIBRARY}")

        def run(self):
            compiler = find_compiler()
            problem = headers_problem() or compiler_problem(compiler, _standard(cpp_extension))
            if problem:
                raise BuildError(problem)
            # One compiler for torch's ninja rules, which compile, and for setuptools, which links.
            os.environ["CXX"] = compiler
            _put_ninja_on_path()
            for warning in warnings:
                print(f"conv2d_ext: warning: {warning}", file=sys.stderr)
            try:
                super().run()
            except RuntimeError as error:
                raise BuildError(f"compiling failed, see the messages above ({error}).") from error
            package = Path("conv2d_ext") if self.inplace else Path(self.build_lib, "conv2d_ext")
            package.joinpath("_build_info.py").write_text(
                format_build_info(
                    self.distribution.get_version(),
                    torch.__version__,
                    compiler_version(compiler),
                    cuda_archs,
                    warnings,
                )
            )

    return BuildExt


@contextlib.contextmanager
def linking_in_two(compiler) -> Iterator[None]:
    """In it, linking a module links the library first: of all objects but the bindings'."""
    link = compiler.link_shared_object

    def link_both(objects, output_filename, *, libraries, library_dirs, extra_postargs, **rest):
        bindings = [name for name in objects if Path(name).stem == Path(BINDINGS).stem]
        folder = str(Path(output_filename).parent)
        link(
            [name for name in objects if name not in bindings],
            str(Path(folder, LIBRARY)),
            libraries=[name for name in libraries if name != "torch_python"],
            library_dirs=library_dirs,
            extra_postargs=[*(extra_postargs or []), f"-Wl,-soname,{LIBRARY}"],
            **rest,
        )
        link(
            bindings,
            output_filename,
            libraries=["conv2d_ext", *libraries],
            library_dirs=[folder, *library_dirs],
            extra_postargs=[*(extra_postargs or []), "-Wl,-rpath,$ORIGIN"],
            **rest,
        )

    compiler.link_shared_object = link_both
    try:
        yield
    finally:
        del compiler.link_shared_object


def _standard(cpp_extension) -> str:
    """The C++ standard that this torch compiles extensions with, from 2.8's C++17 on."""
    source = Path(cpp_extension.__file__).read_text(encoding="utf-8")
    match = re.search(r"cpp_flag_prefix \+ '(c\+\+\d+)'", source)
    return match[1] if match else "c++17"


def _put_ninja_on_path() -> None:
    """torch starts ninja by name; in a venv that isn't activated it is there, but not on PATH."""
    try:
        import ninja
    except ImportError:
        return
    os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")])
