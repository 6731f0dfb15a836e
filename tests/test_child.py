"""child.run_forked: a program that is forked ends, prints and fails as one of its own does."""

from __future__ import annotations

import signal

import pytest
from child import run_forked, run_python


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("import sys; print(sys.argv[1:]); print('told', file=sys.stderr)", 0),
        ("import os; print(os.environ['ASKED'], 'torch' in dir())", 0),
        ("import sys; print('said'); sys.exit(3)", 3),
        ("raise SystemExit('refused')", 1),
        ("raise ValueError('wrong')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("x = 1\nclass A:\n  def f(self): return x\nprint(A().f(), __name__)", 0),
    ],
)
def test_as_a_process_of_its_own(program, status):
    command = ("-c", program, "first", "second")
    forked, fresh = (run(*command, env={"ASKED": "yes"}) for run in (run_forked, run_python))
    assert forked.returncode == fresh.returncode == status
    assert forked.stdout == fresh.stdout
    assert forked.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_nothing_of_the_library_is_imported_before():
    program = "import sys; print('torch' in sys.modules, 'conv2d_ext' in sys.modules)"
    assert run_forked("-c", program).stdout == "True False\n"
