"""Can this machine build the extension? Python, its headers and venv module, the C++ compiler.

Every check returns None, or one sentence that names what is missing and how to get it. `make` runs
this file with whatever `python3` it finds, before anything is installed: hence the syntax of
Python 3.6, no torch and no setuptools.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile

OLDEST_PYTHON = (3, 10)
NEWEST_PYTHON = (3, 14)

# How the module is linked, after its objects. It must share PyTorch's C++ standard library: with a
# copy of its own, the streams that write error messages crash, or leave the numbers out. Named here
# the shared one comes first where the compiler would add the static one (-static-libstdc++, which a
# wrapper around g++ may add).
LINK_FLAGS = ["-fopenmp", "-lstdc++"]

# A usable compiler builds each of these programs into a shared library. With each: the flags it
# needs, and what it means when it fails. The first failure is the one that is reported.
_TRIALS = [
    ("#include <memory>\n", [], "cannot build an empty program"),
    (
        "#if defined(__clang__) ? __clang_major__ < 9 : __GNUC__ < 10\n#error too old\n#endif\n",
        ["-std={standard}"],
        "is too old: torch's headers and the vector code need {standard} from g++ 10, "
        "clang++ 9 or newer",
    ),
    (
        "#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n",
        ["-fopenmp"],
        "cannot build OpenMP programs (-fopenmp), which torch's threads need: install libgomp "
        "for g++, libomp-dev for clang++",
    ),
    (
        "#include <sstream>\n"
        "std::string text(double x) { std::ostringstream s; s << x; return s.str(); }\n",
        LINK_FLAGS,
        "cannot link the shared libstdc++ (-lstdc++), which torch uses",
    ),
]
_SHARED_LIBRARY = b"libstdc++.so"  # as the last of them must name it


class BuildError(SystemExit):
    """Ends the build with one plain sentence on stderr instead of a traceback."""

    def __init__(self, sentence):
        super().__init__("conv2d_ext: " + sentence)


def python_problem(version=sys.version_info):
    """What is wrong with a Python of this version, or None."""
    if OLDEST_PYTHON <= tuple(version[:2]) <= NEWEST_PYTHON:
        return None
    return (
        "Python {}.{} is not supported, only {}.{} to {}.{}: name another one, "
        "for example make PYTHON=python3.12."
    ).format(*tuple(version[:2]) + OLDEST_PYTHON + NEWEST_PYTHON)


def venv_problem():
    """What is missing for `python -m venv`, or None."""
    try:
        import ensurepip
        import venv
    except ImportError as error:
        return (
            "This Python cannot make virtual environments (it has no module {}): install its venv "
            "package (Debian, Ubuntu: apt install python{}.{}-venv)."
        ).format(error.name, *sys.version_info[:2])
    del ensurepip, venv
    return None


def headers_problem(include=None):
    """What is missing of Python's C headers, or None. include: the folder of Python.h."""
    include = include or sysconfig.get_path("include")
    if os.path.exists(os.path.join(include, "Python.h")):
        return None
    return (
        "Python's C headers are missing (no Python.h in {}): install them (Debian, Ubuntu: "
        "apt install python{}.{}-dev; Fedora: dnf install python3-devel)."
    ).format(include, *sys.version_info[:2])


def find_compiler(environ=os.environ):
    """The command that compiles C++, perhaps with arguments (CXX="ccache g++"), or None."""
    if environ.get("CXX", "").strip():
        return environ["CXX"]
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name, path=environ.get("PATH")):
            return name
    return None


def compiler_problem(compiler, standard="c++17", environ=os.environ):
    """Why `compiler`, as find_compiler returned it, cannot build the extension, or None."""
    if compiler is None:
        return (
            "No C++ compiler was found on PATH: install g++ 10 or newer (Debian, Ubuntu: "
            "apt install g++; Fedora: dnf install gcc-c++), or name one in CXX."
        )
    try:
        command = shlex.split(compiler)
    except ValueError as error:
        return "CXX={} is no command ({}).".format(compiler, error)
    if not shutil.which(command[0], path=environ.get("PATH")):
        return "The C++ compiler that CXX names, {}, was not found.".format(command[0])
    with tempfile.TemporaryDirectory() as folder:
        source, library = os.path.join(folder, "trial.cpp"), os.path.join(folder, "trial.so")
        for program, flags, meaning in _TRIALS:
            with open(source, "w") as file:
                file.write(program)
            flags = [flag.format(standard=standard) for flag in flags]
            trial = subprocess.run(
                command + ["-fPIC", "-shared", source, "-o", library] + flags,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                universal_newlines=True,
                env=dict(environ, LC_ALL="C"),
            )
            if trial.returncode != 0 or not os.path.exists(library):
                errors = [line for line in trial.stdout.splitlines() if "error" in line.lower()]
                said = " (it said: {})".format(errors[0].strip()) if errors else ""
                meaning = meaning.format(standard=standard)
                return "The C++ compiler {} {}{}.".format(compiler, meaning, said)
        with open(library, "rb") as file:
            if _SHARED_LIBRARY not in file.read():
                return (
                    "The C++ compiler {} links its standard library statically, or another one "
                    "than libstdc++: torch needs the shared libstdc++. Name another one in CXX."
                ).format(compiler)
    return None


def compiler_version(compiler):
    """The first line of `compiler --version`."""
    command = shlex.split(compiler) + ["--version"]
    return subprocess.check_output(command, universal_newlines=True).splitlines()[0].strip()


def main():
    """Checks what `make` needs before it can install anything; prints all that is missing."""
    checks = [python_problem(), venv_problem(), headers_problem()]
    checks.append(compiler_problem(find_compiler()))
    problems = [problem for problem in checks if problem]
    for problem in problems:
        sys.stderr.write("conv2d_ext: {}\n".format(problem))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
