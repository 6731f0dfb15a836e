"""Every guarantee, on random calls and random compositions of what PyTorch wraps around a call.

The cases follow from the seed, so every run has the same ones; CONV2D_EXT_FUZZ_CASES says how many.
`python -m tests.torch_fuzz` goes on with others.
"""

from __future__ import annotations

import os
import pathlib

import pytest
from child import run_python
from torch_versions import not_in_older

SEED = 0
CASES = int(os.environ.get("CONV2D_EXT_FUZZ_CASES", "600"))
ROOT = str(pathlib.Path(__file__).parents[1])


def _fuzz(*arguments: str):
    return run_python("-m", "tests.torch_fuzz", *arguments, env={"PYTHONPATH": ROOT})


@not_in_older  # whose own composed calls fail
@pytest.mark.slow
def test_random_cases():
    finished = _fuzz("--seed", str(SEED), "--cases", str(CASES))
    print(finished.stdout)
    assert finished.returncode == 0, finished.stdout[-8000:] + finished.stderr[-2000:]
    assert f"{CASES} cases of seed {SEED}" in finished.stdout
