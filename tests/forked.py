"""Programs in processes of their own, forked from one that has imported torch: child.run_forked.

Reads requests from standard input, a line of JSON each: the arguments that Python would get, the
environment, its folder, and files for what the program prints. Answers with its exit status. Its
own arguments are modules to import before it takes requests.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import traceback
import types

# Only torch, which takes most of a short program's time. It starts no thread before it computes.
import torch  # noqa: F401


def run(arguments: list[str]) -> None:
    """As `python ARGUMENTS`."""
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


def exit_status(arguments: list[str]) -> int:
    try:
        run(arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def child(arguments: list[str], env: dict[str, str], cwd: str, stdout: str, stderr: str) -> None:
    """The program's process; it ends here, without Python's shutdown."""
    for path, descriptor, flags in (
        (os.devnull, 0, os.O_RDONLY),
        (stdout, 1, os.O_WRONLY),
        (stderr, 2, os.O_WRONLY),
    ):
        file = os.open(path, flags)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    status = exit_status(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


def main() -> None:
    sys.path.pop(0)  # this file's folder
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if process == 0:
            child(**request)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
