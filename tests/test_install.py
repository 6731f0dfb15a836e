"""Building and installing: what is required, what is refused and in which words. No network."""

import ast
import email
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import conv2d_ext_backend as backend
import conv2d_ext_build as build
import conv2d_ext_toolchain as toolchain
import pytest
import torch
from child import LIBRARY, run_forked

ROOT = Path(__file__).resolve().parent.parent
BUILD_BACKEND = str(ROOT / "build_backend")


def run_python(code):
    """The finished process of `python -c code`, in which build_backend/ is importable."""
    environ = {**os.environ, "PYTHONPATH": BUILD_BACKEND}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)


def run_with_torch(code, *, environ=None, cwd=ROOT):
    """The same, for code that imports torch: it is imported already."""
    code = f"import sys; sys.path.insert(0, {BUILD_BACKEND!r})\n{code}"
    return run_forked("-c", code, env=environ, cwd=cwd, preload=("torch.utils.cpp_extension",))


def run_setup(command, **environ):
    """setup.py as every frontend runs it."""
    code = f"import runpy, sys; sys.argv = ['setup.py', {command!r}]; runpy.run_path('setup.py')"
    return run_with_torch(code, environ=environ)


def add_distribution(folder, name, version):
    """Makes importlib.metadata (and import) find `name` in `folder`."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / f"{name}.py").write_text("")


def add_program(folder, name, script):
    """An executable shell script; returns its path."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


# ---- the requirements of an isolated build


@pytest.mark.parametrize(
    ("installed", "required"),
    [
        ({}, ["torch>=2.8", "ninja"]),
        ({"torch": "2.11.0+cu130"}, ["ninja"]),
        ({"torch": "2.8.0", "ninja": "1.13.0"}, []),
        # Without its torch the environment stays hidden, and with it its ninja.
        ({"ninja": "1.13.0"}, ["torch>=2.8", "ninja"]),
        ({"torch": "2.7.1", "ninja": "1.13.0"}, ["torch>=2.8", "ninja"]),
        ({"torch": "3.0.0", "ninja": "1.13.0"}, []),
    ],
)
def test_requires_what_the_environment_lacks(tmp_path, monkeypatch, installed, required):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for name, version in installed.items():
        add_distribution(tmp_path, name, version)
    assert backend.build_requirements([str(tmp_path)]) == required


def test_requires_no_ninja_that_is_on_path(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert backend.build_requirements([str(tmp_path)]) == ["torch>=2.8"]


# What build isolation does: the environment's site-packages leave sys.path.
ISOLATED = """
import importlib.util, sys
import conv2d_ext_backend as backend
sys.path[:] = [folder for folder in sys.path if not folder.endswith("-packages")]
assert importlib.util.find_spec("torch") is None
"""


@pytest.mark.parametrize(("version", "visible"), [("2.11.0", True), ("2.7.1", False)])
def test_isolated_build_sees_the_torch_of_the_environment(tmp_path, version, visible):
    add_distribution(tmp_path, "torch", version)
    code = f"""{ISOLATED}
backend.environment_sites = lambda: [{str(tmp_path)!r}]
backend.expose_torch()
assert (importlib.util.find_spec("torch") is not None) is {visible}
"""
    process = run_python(code)
    assert process.returncode == 0, process.stderr


def test_environment_sites_hold_this_torch():
    assert Path(torch.__file__).parent.parent in map(Path, backend.environment_sites())


def test_isolated_build_fetches_no_second_torch():
    """This environment has one, and each kind of build sees that one."""
    code = f"""{ISOLATED}
for kind in ("wheel", "editable"):
    required = getattr(backend, f"get_requires_for_build_{{kind}}")()
    assert not [name for name in required if name.startswith("torch")], required
backend.expose_torch()
print(importlib.util.find_spec("torch").origin)
"""
    process = run_python(code)
    assert process.returncode == 0, process.stderr
    assert Path(process.stdout.strip()).samefile(torch.__file__)


def test_old_setuptools_is_named(monkeypatch):
    """By whatever runs setup.py, before setuptools reads a pyproject.toml that it can't read."""
    build.check_setuptools("77.0.3")
    build.check_setuptools("81.0.0")
    with pytest.raises(SystemExit, match=r"needs setuptools 77 or newer.* has 65\.5\.0"):
        build.check_setuptools("65.5.0")
    monkeypatch.setattr(build, "OLDEST_SETUPTOOLS", (1000, 0))
    with pytest.raises(SystemExit, match="needs setuptools 1000"):
        build.setup_arguments(ROOT)


# ---- CUDA or not


@pytest.mark.parametrize(
    ("requested", "torch_cuda", "toolkit", "has_sources", "gpu_visible", "expected"),
    [
        # A toolkit that fits: built unless refused. Minor versions may differ.
        (None, "13.0", "13.0", True, False, True),
        ("", "13.0", "13.2", True, False, True),
        ("1", "13.0", "13.0", True, True, True),
        ("0", "13.0", "13.0", True, True, False),
        # One that doesn't fit: a warning, or an error where CUDA was asked for.
        (None, "12.8", "13.0", True, False, "warns: the CUDA toolkit is 13.0 and torch"),
        ("1", "12.8", "13.0", True, False, "fails: the CUDA toolkit is 13.0 and torch"),
        ("0", "12.8", "13.0", True, True, False),
        # None: worth a warning only where a GPU would lie idle.
        (None, "13.0", None, True, False, False),
        (None, "13.0", None, True, True, "warns: no CUDA toolkit was found for torch's CUDA 13.0"),
        ("1", "13.0", None, True, False, "fails: no CUDA toolkit was found"),
        ("0", "13.0", None, True, True, False),
        # A torch without CUDA.
        (None, None, "13.0", True, False, False),
        ("1", None, "13.0", True, False, "fails: was built without CUDA"),
        # No CUDA sources.
        (None, "13.0", "13.0", False, True, False),
        ("1", "13.0", "13.0", False, True, "fails: has no CUDA sources"),
        (
            "yes",
            "13.0",
            "13.0",
            True,
            False,
            "fails: CONV2D_EXT_CUDA must be 0, 1 or unset, not 'y",
        ),
    ],
)
def test_cuda_decision(requested, torch_cuda, toolkit, has_sources, gpu_visible, expected):
    def decide():
        return build.decide_cuda(
            requested, torch_cuda, toolkit, has_sources=has_sources, gpu_visible=gpu_visible
        )

    outcome, _, words = str(expected).partition(": ")
    if outcome == "fails":
        with pytest.raises(SystemExit) as error:
            decide()
        assert words in str(error.value)
    elif outcome == "warns":
        assert not decide().build
        assert words in decide().warning
    else:
        assert decide() == (expected, None)


TOOLKIT = build.Toolkit("12.4", frozenset({(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0)}))


@pytest.mark.parametrize("toolkit", [TOOLKIT, build.Toolkit("12.4")], ids=["says", "doesn't say"])
def test_cuda_architectures(toolkit):
    def choose(requested, capabilities):
        return build.choose_cuda_archs(requested, capabilities, toolkit)

    assert choose("8.6", [(9, 0)]) == "8.6"
    assert choose("Hopper", []) == "Hopper"
    assert choose("9.0a;8.6+PTX", []) == "9.0a;8.6+PTX"
    assert choose(None, [(9, 0), (8, 6), (9, 0)]) == "8.6;9.0+PTX"
    assert choose(None, []) == "8.0;9.0+PTX"
    # The kernels need 8.0: older GPUs beside newer ones are left out, alone they are no reason.
    assert choose(None, [(7, 5), (8, 9)]) == "8.9+PTX"
    assert choose(None, [(7, 5)]) == "8.0;9.0+PTX"
    assert build.unknown_gpus([(7, 5), (8, 9), (9, 0)], toolkit) is None
    for archs, got in (
        ("7.5", "7.5"), ("9.0;7.0+PTX", "7.0+PTX"), ("9.0 Turing", "Turing"),
        ("Kepler+Tesla", "Kepler+Tesla"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match=f"8.0 or newer, got {re.escape(got)}"):
            choose(archs, [(9, 0)])


def test_gpus_that_the_toolkit_does_not_know():
    """They get PTX of the newest architecture that it does, as torch's extensions do."""
    choose = build.choose_cuda_archs
    assert choose(None, [(12, 0)], TOOLKIT) == "9.0+PTX"
    assert build.gencode_flags("9.0+PTX")[-1] == "-gencode=arch=compute_90,code=compute_90"
    assert choose(None, [(12, 0), (9, 0), (8, 0)], TOOLKIT) == "8.0;9.0+PTX"
    # No newer than the GPU: PTX is only translated for newer ones.
    newer = build.Toolkit("12.8", TOOLKIT.capabilities | {(10, 0), (12, 0)})
    assert choose(None, [(10, 3)], newer) == "10.0+PTX"
    sentence = build.unknown_gpus([(12, 0), (9, 0), (10, 3), (7, 5)], TOOLKIT)
    assert sentence.startswith("the CUDA toolkit 12.4 doesn't know the visible GPUs of compute ")
    assert "capability 10.3, 12.0: they run code for older GPUs, or PTX" in sentence
    only_new = build.Toolkit("20.0", frozenset({(9, 0), (12, 0)}))
    makes = "the CUDA toolkit {} makes no code for compute capability {}, only for {}".format
    with pytest.raises(SystemExit) as error:
        choose(None, [(8, 0)], only_new)
    assert makes("20.0", "8.0", "9.0, 12.0") in str(error.value)
    assert "a GPU of compute capability 8.0 is visible" in str(error.value)
    with pytest.raises(SystemExit) as error:
        choose("9.0;12.0+PTX", [(9, 0)], TOOLKIT)
    known = "8.0, 8.6, 8.7, 8.9, 9.0"
    assert str(error.value) == (
        f"conv2d_ext: TORCH_CUDA_ARCH_LIST=9.0;12.0+PTX: {makes('12.4', '12.0', known)}."
    )


def test_machine_code_of_all_architectures_is_made_from_one_ptx():
    flag = "-gencode=arch=compute_{},code={}".format
    machine_code = [flag(80, "sm_80"), flag(80, "sm_90")]
    assert build.gencode_flags(build.DEFAULT_CUDA_ARCHS) == [*machine_code, flag(80, "compute_80")]
    assert build.gencode_flags("9.0 8.0") == machine_code
    assert build.gencode_flags("10.0;9.0") == [flag(90, "sm_90"), flag(90, "sm_100")]
    # Other lists are left to torch.
    assert build.gencode_flags("Hopper") == build.gencode_flags("8.0;9.0a") == []


def test_the_toolkit_is_asked(tmp_path):
    assert build.find_toolkit(None) is None
    assert build.find_toolkit(str(tmp_path)) is None
    (tmp_path / "bin").mkdir()
    release = "'Cuda compilation tools, release 13.0, V13.0.88'"
    add_program(tmp_path / "bin", "nvcc", f'[ "$1" != --version ] || echo {release}')
    assert build.find_toolkit(str(tmp_path)) == build.Toolkit("13.0", frozenset())
    codes = "printf 'sm_75\\nsm_90\\nsm_90a\\nsm_103\\nsm_121\\n'"
    add_program(
        tmp_path / "bin", "nvcc",
        f'case "$1" in --version) echo {release} ;; --list-gpu-code) {codes} ;; esac',
    )  # fmt: skip
    known = frozenset({(7, 5), (9, 0), (10, 3), (12, 1)})
    assert build.find_toolkit(str(tmp_path)) == build.Toolkit("13.0", known)
    add_program(tmp_path / "bin", "nvcc", "exit 1")
    assert build.find_toolkit(str(tmp_path)) is None


def test_sources(tmp_path):
    for name in (
        "csrc/b.cpp", "csrc/cpu/a.cpp", "csrc/cpu/isa/engine_x.cpp", "csrc/cuda/k.cu",
        "csrc/cuda/o.cpp", "csrc/b.h", "csrc/part.cpp", "csrc/cpu/part.cpp",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "csrc/b.cpp").write_text('#include "part.cpp"\n#include "cpu/part.cpp"\n')
    cpu = ["csrc/b.cpp", "csrc/cpu/a.cpp", "csrc/cpu/isa/engine_x.cpp"]
    assert build.find_sources(tmp_path, cuda=False) == cpu
    assert build.find_sources(tmp_path, cuda=True) == [*cpu, "csrc/cuda/k.cu", "csrc/cuda/o.cpp"]


def test_what_compiles_for_long_comes_first():
    sources = [
        "csrc/cpu/a.cpp",
        "csrc/cpu/isa/engine_x.cpp",
        "csrc/cuda/k.cu",
        "csrc/extension.cpp",
    ]
    assert build.longest_first(sources) == [
        "csrc/cuda/k.cu", "csrc/extension.cpp", "csrc/cpu/isa/engine_x.cpp", "csrc/cpu/a.cpp",
    ]  # fmt: skip
    # The names of the patterns are those of real files.
    real = build.longest_first(build.find_sources(ROOT, cuda=True))
    assert real[0].endswith(".cu")
    assert real.index("csrc/extension.cpp") < real.index("csrc/cpu/isa/engine_avx2.cpp")
    assert real.index("csrc/cpu/isa/engine_avx2.cpp") < real.index("csrc/cpu/conv2d_cpu.cpp")


TORCH_CUDA = torch.version.cuda or "13.0"


@pytest.fixture
def toolkit(tmp_path):
    """Makes a CUDA toolkit of some version; returns its CUDA_HOME."""

    def toolkit(version):
        home = tmp_path / f"cuda-{version}"
        (home / "bin").mkdir(parents=True)
        add_program(home / "bin", "nvcc", f"echo 'Cuda compilation tools, release {version}'")
        return str(home)

    return toolkit


def planned_extension(**environ):
    """(process, {sources, flags, ...}) of what setup.py would build under these variables."""
    code = f"""
import importlib, json, os
from pathlib import Path
from torch.utils import cpp_extension
import conv2d_ext_build as build
importlib.reload(cpp_extension)  # it looks for a toolkit when it is imported
arguments = build.setup_arguments(Path({str(ROOT)!r}))
extension, command = arguments["ext_modules"][0], arguments["cmdclass"]["build_ext"]
print("PLAN" + json.dumps({{
    "sources": extension.sources, "libraries": extension.libraries,
    "flags": extension.extra_compile_args, "archs": os.environ.get("TORCH_CUDA_ARCH_LIST"),
}}))
"""
    unset = {"CONV2D_EXT_CUDA": "", "TORCH_CUDA_ARCH_LIST": "", "CUDA_VISIBLE_DEVICES": ""}
    process = run_with_torch(code, environ={**unset, **environ})
    plan = process.stdout.partition("PLAN")[2]
    return process, json.loads(plan) if plan else None


def is_cuda_plan(plan):
    kinds = {Path(source).suffix for source in plan["sources"]}
    found = {
        ".cu" in kinds,
        "-DCONV2D_EXT_WITH_CUDA" in plan["flags"]["cxx"],
        "c10_cuda" in plan["libraries"],
        any(source.startswith("csrc/cuda/") for source in plan["sources"]),
    }
    assert len(found) == 1, plan
    return found.pop()


needs_torch_with_cuda = pytest.mark.skipif(
    torch.version.cuda is None, reason="this torch was built without CUDA"
)


@needs_torch_with_cuda
@pytest.mark.parametrize("requested", ["", "1"])
def test_a_toolkit_that_fits_builds_cuda_without_a_gpu(toolkit, requested):
    environ = {"CUDA_HOME": toolkit(TORCH_CUDA), "CONV2D_EXT_CUDA": requested}
    process, plan = planned_extension(**environ)
    assert plan, process.stderr
    assert is_cuda_plan(plan)
    assert plan["archs"] == "8.0;9.0+PTX"
    codes = [flag for flag in plan["flags"]["nvcc"] if flag.startswith("-gencode")]
    assert codes == build.gencode_flags(plan["archs"])
    # No driver is needed to link or to import.
    assert "cuda" not in plan["libraries"]
    assert not any("fast" in flag for flag in plan["flags"]["nvcc"])
    _, plan = planned_extension(**environ, TORCH_CUDA_ARCH_LIST="8.6")
    assert plan["archs"] == "8.6"


def test_cuda_is_left_out_where_it_is_not_wanted(toolkit):
    process, plan = planned_extension(CUDA_HOME=toolkit(TORCH_CUDA), CONV2D_EXT_CUDA="0")
    assert plan, process.stderr
    assert not is_cuda_plan(plan)


@needs_torch_with_cuda
def test_a_toolkit_of_another_version_is_an_error_only_where_cuda_was_asked_for(toolkit):
    home = toolkit("9.2")
    process, plan = planned_extension(CUDA_HOME=home)
    assert plan, process.stderr
    assert not is_cuda_plan(plan)
    process, plan = planned_extension(CUDA_HOME=home, CONV2D_EXT_CUDA="1")
    assert plan is None
    assert process.stderr.splitlines()[-1] == (
        "conv2d_ext: CONV2D_EXT_CUDA=1 asks for CUDA, but the CUDA toolkit is 9.2 and torch was "
        f"built with CUDA {TORCH_CUDA}."
    )


@needs_torch_with_cuda
def test_no_toolkit(tmp_path):
    process, plan = planned_extension(CUDA_HOME=str(tmp_path))
    assert plan, process.stderr
    assert not is_cuda_plan(plan)
    process, plan = planned_extension(CUDA_HOME=str(tmp_path), CONV2D_EXT_CUDA="1")
    assert plan is None
    assert "but no CUDA toolkit was found" in process.stderr.splitlines()[-1]


# ---- an unusable machine, in one sentence


@pytest.mark.parametrize(
    ("version", "supported"), [((3, 9), False), ((3, 10), True), ((3, 14), True), ((3, 15), False)]
)
def test_python_versions(version, supported):
    problem = toolchain.python_problem((*version, 0, "final", 0))
    assert (problem is None) is supported
    assert supported or f"Python {version[0]}.{version[1]} is not supported" in problem


def test_missing_headers(tmp_path):
    assert toolchain.headers_problem() is None
    assert f"no Python.h in {tmp_path}" in toolchain.headers_problem(str(tmp_path))


def test_toolchain_checks_run_on_an_old_python():
    source = (ROOT / "build_backend" / "conv2d_ext_toolchain.py").read_text()
    ast.parse(source, feature_version=(3, 6))


def test_a_working_compiler_passes():
    assert toolchain.compiler_problem(toolchain.find_compiler()) is None


def test_no_compiler(tmp_path):
    environ = {"PATH": str(tmp_path)}
    assert toolchain.find_compiler(environ) is None
    assert "No C++ compiler was found on PATH" in toolchain.compiler_problem(None)
    add_program(tmp_path, "g++", "exit 1")
    assert toolchain.find_compiler(environ) == "g++"
    assert toolchain.find_compiler({**environ, "CXX": "ccache g++"}) == "ccache g++"
    assert toolchain.find_compiler({**environ, "CXX": " "}) == "g++"
    problem = toolchain.compiler_problem('"g++')
    assert problem == 'CXX="g++ is no command (No closing quotation).'


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'trial.cpp:1: error: no such header'; exit 1", "error: no such header"),
        ("exit 1", "cannot build an empty program"),
        ("exit 0", "cannot build an empty program"),
        (
            'case "$*" in *-std=*) exit 1;; esac',
            "is too old: torch's headers and the vector code need c++20",
        ),
        ('case "$*" in *-fopenmp*) exit 1;; esac', "cannot build OpenMP programs"),
        ('case "$*" in *-lstdc++*) exit 1;; esac', "cannot link the shared libstdc++"),
    ],
)
def test_unusable_compiler(tmp_path, script, words):
    writes = ': > "${3%.cpp}.so"'  # the third argument is the source
    compiler = add_program(tmp_path, "c++", f"{script}\n{writes}")
    problem = toolchain.compiler_problem(compiler, "c++20")
    assert problem.startswith(f"The C++ compiler {compiler} ")
    assert words in problem
    assert "\n" not in problem


def test_a_compiler_that_links_statically(tmp_path):
    """The shared libstdc++ still comes first; a compiler that lets no one name it is refused."""
    real = shutil.which(toolchain.find_compiler())
    archive = subprocess.check_output([real, "-print-file-name=libstdc++.a"], text=True)
    if "/" not in archive:
        pytest.skip("libstdc++ is not installed as a static library")
    static = f'exec {real} -static-libstdc++ -static-libgcc "$@"'
    assert toolchain.compiler_problem(add_program(tmp_path, "c++", static)) is None
    named = f'for a; do shift; [ "$a" = -lstdc++ ] || set -- "$@" "$a"; done\n{static}'
    problem = toolchain.compiler_problem(add_program(tmp_path, "g++", named))
    assert "links its standard library statically" in problem


def test_setup_without_a_compiler_says_so(tmp_path):
    process = run_setup("build_ext", PATH=str(tmp_path), CXX="")
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith("conv2d_ext: No C++ compiler was found")
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("CONV2D_EXT_CUDA", "maybe", "CONV2D_EXT_CUDA must be"),
        ("CXXFLAGS", '-DX="a', 'CXXFLAGS=-DX="a is no list of flags (No closing quotation).'),
    ],
)
def test_setup_with_a_wrong_setting_says_so(name, value, words):
    process = run_setup("build_ext", **{name: value})
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith(f"conv2d_ext: {words}")
    assert "Traceback" not in process.stderr


def test_without_ninja_everything_is_compiled_again():
    """setuptools alone would keep objects of other headers, flags, compilers and torches."""
    code = f"""
from pathlib import Path
from setuptools import Distribution
import conv2d_ext_build as build
command = build.setup_arguments(Path({str(ROOT)!r}))["cmdclass"]["build_ext"]
command = command(Distribution(), use_ninja=False)
command.ensure_finalized()
assert command.force
"""
    process = run_with_torch(code)
    assert process.returncode == 0, process.stderr


def test_setup_without_torch_says_so():
    code = """
import runpy, sys
sys.modules["torch"] = None  # importing it raises ModuleNotFoundError
sys.argv = ["setup.py", "build_ext"]
runpy.run_path("setup.py")
"""
    process = run_python(code)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith("conv2d_ext: building needs torch")
    assert "Traceback" not in process.stderr


# ---- what a build leaves behind


def test_build_info_is_what_was_given():
    given = ("1.2.3", "2.11.0+cu130", 'g++ "12"', "8.0;9.0+PTX", ("built for the CPU only",))
    module = {}
    exec(build.format_build_info(*given), module)
    names = ("VERSION", "TORCH_VERSION", "COMPILER", "CUDA_ARCHS", "WARNINGS")
    assert tuple(module[name] for name in names) == given


@pytest.fixture
def package_copy(tmp_path):
    """Imports a copy of the package that claims to be built with some torch, with a mock _C."""
    package = tmp_path / "conv2d_ext"
    shutil.copytree(
        ROOT / "conv2d_ext", package, ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    (package / "_C.py").write_text("raise ImportError('reached _C')")

    def claim(torch_version):
        text = build.format_build_info("0.1.0", torch_version, "g++", None, ())
        (package / "_build_info.py").write_text(text)
        return run_with_torch("import conv2d_ext", cwd=tmp_path)

    return claim


def test_import_under_another_torch_minor_says_rebuild(package_copy):
    process = package_copy("1.13.1+cu117")
    message = process.stderr.splitlines()[-1]
    assert message.startswith("ImportError: conv2d_ext was built with torch 1.13.1+cu117")
    assert torch.__version__.split("+")[0] in message
    assert "rebuild" in message.lower()


def test_import_under_another_torch_patch_goes_on(package_copy):
    major, minor, _ = torch.__version__.split(".", 2)
    process = package_copy(f"{major}.{minor}.99")
    assert process.stderr.splitlines()[-1] == "ImportError: reached _C"


@pytest.mark.parametrize("installed", ["nowhere", "in site-packages", "in the tree"])
def test_a_tree_that_was_not_built_says_whether_it_hides_an_installed_package(tmp_path, installed):
    tree, site = tmp_path / "tree", tmp_path / "site"
    (tree / "conv2d_ext").mkdir(parents=True)
    shutil.copy(ROOT / "conv2d_ext" / "__init__.py", tree / "conv2d_ext")
    if installed == "in site-packages":
        add_distribution(site, "conv2d_ext", "0.1.0")
        (site / "conv2d_ext").mkdir()
        (site / "conv2d_ext" / "__init__.py").write_text("")
    if installed == "in the tree":  # as a build leaves an .egg-info
        add_distribution(tree, "conv2d_ext", "0.1.0")
    # An editable installation would find the tree's missing modules in its own.
    code = "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]"
    code += f"\nsys.path.insert(0, '')\nsys.path.append({str(site)!r})\nimport conv2d_ext"
    message = run_with_torch(code, cwd=tree).stderr.splitlines()[-1]
    hides = f"{tree.resolve() / 'conv2d_ext'} has not been built, and hides the conv2d_ext"
    expected = "conv2d_ext has not been built: run 'pip install .' in its tree and leave it"
    if installed == "in site-packages":
        expected = f"{hides} that is installed: run from another folder"
    assert message == f"ImportError: {expected}, or run 'pip install --editable .' there"


def needed_by(library):
    text = subprocess.check_output(["readelf", "--dynamic", "--wide", library], text=True)
    return set(re.findall(r"NEEDED.*\[(.*)\]", text))


needs_binutils = pytest.mark.skipif(
    shutil.which("readelf") is None or shutil.which("nm") is None, reason="needs binutils"
)


@needs_binutils
def test_the_library_knows_no_python():
    """So that C++ programs can link it."""
    assert "libtorch_cpu.so" in needed_by(LIBRARY)
    assert not any("python" in name for name in needed_by(LIBRARY))
    symbols = subprocess.check_output(["nm", "--dynamic", "--undefined-only", LIBRARY], text=True)
    names = [line.split()[-1] for line in symbols.splitlines()]
    assert not [name for name in names if re.match(r"_?Py[A-Z_]|THP", name) or "pybind11" in name]


@needs_binutils
def test_the_module_holds_the_bindings_alone():
    """The operators are registered once, whoever loads the library beside it."""
    module = importlib.util.find_spec("conv2d_ext._C").origin
    assert LIBRARY.name in needed_by(module)
    symbols = subprocess.check_output(["nm", "--dynamic", "--undefined-only", module], text=True)
    assert "10conv2d_ext" in symbols  # the namespace, as compilers write it
    assert "TorchLibraryInit" not in symbols
    assert LIBRARY.stat().st_size > 5 * Path(module).stat().st_size


@pytest.mark.needs_cuda_build
@needs_binutils
def test_the_built_module_asks_for_no_driver():
    """Of the libraries it needs, torch has loaded all when it is imported."""
    module = importlib.util.find_spec("conv2d_ext._C").origin
    needed = needed_by(module) | needed_by(LIBRARY)
    assert "libc10_cuda.so" in needed
    assert not any(name.startswith("libcuda.so") for name in needed)
    loaded = Path("/proc/self/maps").read_text()
    for name in needed:
        assert name in loaded, name


# ---- the metadata


def copied_tree(folder):
    """A copy of the tree, without what was built in it."""
    unwanted = shutil.ignore_patterns(
        ".git", ".venv", ".lint", ".docs", "build", "dist", "*.egg-info", ".*_cache"
    )
    return Path(shutil.copytree(ROOT, folder / "tree", ignore=unwanted))


GENERATED = ("conv2d_ext/_build_info.py", "docs/_inventories/torch.inv")


@pytest.fixture(scope="module")
def tree_and_sdist(tmp_path_factory):
    """A copy of the tree with what builds generate, and the sdist made of it."""
    tree = copied_tree(tmp_path_factory.mktemp("sdist"))
    for name in GENERATED:
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("")
    output = tree.parent
    code = f"import conv2d_ext_backend as b; b.build_sdist({str(output)!r})"
    process = run_with_torch(code, cwd=tree)
    assert process.returncode == 0, process.stderr
    [sdist] = output.glob("conv2d_ext-*.tar.gz")
    return tree, sdist


def read_metadata(text):
    return email.message_from_string(text)


def prepared_metadata(tree, kind, **environ):
    """What pip would read before it builds a `kind` ("wheel", "editable") of the tree."""
    hook = f"prepare_metadata_for_build_{kind}"
    output = tree / f"metadata-{kind}"
    output.mkdir()
    code = f"import conv2d_ext_backend as b; b.{hook}({str(output)!r})"
    process = run_with_torch(code, cwd=tree, environ=environ)
    assert process.returncode == 0, process.stderr
    [file] = output.glob("*.dist-info/METADATA")
    return read_metadata(file.read_text())


def unconditional(metadata):
    """The requirements that no extra asks for."""
    return [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]


@pytest.mark.parametrize(
    ("torch_version", "cuda", "from_sdist", "version", "requirement"),
    [
        ("2.11.0+cu130", "13.0", False, "1.2.3+torch2.11.cu130", "torch==2.11.*"),
        ("2.11.0+cu130", None, False, "1.2.3+torch2.11.cpu", "torch==2.11.*"),
        ("2.8.1", None, False, "1.2.3+torch2.8.cpu", "torch==2.8.*"),
        ("2.15.0.dev20261101+cpu", None, False, "1.2.3+torch2.15.cpu", "torch==2.15.*"),
        ("2.11.0", None, True, "1.2.3", "torch==2.11.*"),
        (None, None, False, "1.2.3", "torch>=2.8"),
    ],
)
def test_a_wheel_requires_the_torch_minor_of_its_build(
    torch_version, cuda, from_sdist, version, requirement
):
    found = build.metadata("1.2.3", torch_version, cuda, wheel=True, from_sdist=from_sdist)
    assert found == {"version": version, "install_requires": [requirement]}
    # Other builds are for any torch.
    found = build.metadata("1.2.3", torch_version, cuda, wheel=False, from_sdist=from_sdist)
    assert found == {"version": "1.2.3", "install_requires": ["torch>=2.8"]}


def test_metadata_of_a_wheel_and_of_an_editable_install(tmp_path):
    tree = copied_tree(tmp_path)
    major, minor = torch.__version__.split(".")[:2]
    version = build.read_version(ROOT)
    wheel = prepared_metadata(tree, "wheel", CONV2D_EXT_CUDA="0")
    assert unconditional(wheel) == [f"torch=={major}.{minor}.*"]
    assert wheel["Version"] == f"{version}+torch{major}.{minor}.cpu"
    editable = prepared_metadata(tree, "editable", CONV2D_EXT_CUDA="0")
    assert unconditional(editable) == ["torch>=2.8"]
    assert editable["Version"] == version


def test_a_wheel_of_an_sdist_has_the_version_of_its_name(tree_and_sdist, tmp_path):
    """pip refuses a build whose version is not the one in the sdist's name."""
    _, sdist = tree_and_sdist
    version = build.read_version(ROOT)
    assert sdist.name == f"conv2d_ext-{version}.tar.gz"
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"conv2d_ext-{version}"
    generic = read_metadata((unpacked / "PKG-INFO").read_text())
    assert unconditional(generic) == ["torch>=2.8"]
    assert prepared_metadata(unpacked, "wheel", CONV2D_EXT_CUDA="0")["Version"] == version


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 2, "python -m conv2d_ext: the demonstration needs rich, which is not installed: pip "),
        (["certify", "--help"], 0, ""),
        (["run", "--help"], 0, ""),
    ],
)
def test_only_the_demonstration_needs_rich(arguments, status, words):
    code = f"""
import sys
sys.modules["rich"] = None  # importing it raises ModuleNotFoundError
from conv2d_ext.__main__ import main
sys.exit(main({arguments!r}))
"""
    process = run_with_torch(code)
    assert process.returncode == status, process.stderr
    assert words in process.stderr
    assert "Traceback" not in process.stderr


def test_sdist_holds_what_building_and_testing_need(tree_and_sdist):
    tree, sdist = tree_and_sdist
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"setup.py", "pyproject.toml", "Makefile", "LICENSE", "requirements-lint.txt"}
    needed |= {"requirements-docs.txt", "CITATION.cff", "SECURITY.md"}
    for folder in ("build_backend", "conv2d_ext", "csrc", "docs", "examples", "tests", "tools"):
        paths = (path for path in (tree / folder).rglob("*.*") if path.is_file())
        needed |= {path.relative_to(tree).as_posix() for path in paths}
    built = {name for name in needed if name.endswith((".so", ".pyc", ".inv"))}
    built |= set(GENERATED)
    assert needed - built <= files
    assert not built & files
