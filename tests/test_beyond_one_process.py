"""docs/beyond_one_process.md: its code runs as it stands there."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
from child import LEAVE, environment

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "beyond_one_process.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def run(folder: pathlib.Path, code: str, *launcher: str) -> str:
    file = folder / "program.py"  # code is a module of Python's
    file.write_text(code)
    done = subprocess.run(
        [sys.executable, *launcher, str(file)],
        cwd=folder,
        env=environment(
            GLOO_SOCKET_IFNAME="lo",
            OMP_NUM_THREADS="1",
            # Of what calls a package's kernels, whose time is no matter here.
            AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL="O0",
        ),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def of(name: str) -> str:
    (block,) = (block for block in BLOCKS if block.startswith(f"# {name}.py"))
    return block


def test_one_process_and_a_fresh_one(tmp_path):
    run(tmp_path, "".join(block for block in BLOCKS if not re.match(r"# \w+\.py", block)))
    run(tmp_path, of("serve"))


@pytest.mark.parametrize("name", ["train", "shard"])
def test_two_processes(name, tmp_path):
    """A launch for each: a second process group of a launch may meet the first one's addresses."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = run(tmp_path, of(name) + LEAVE, *launcher)
    refused = "has no sharding rule for DTensors placed as Shard(2), Replicate"
    assert output.count(refused) == (2 if name == "shard" else 0)
