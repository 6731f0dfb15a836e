"""Run a function in two processes of a gloo group, for tests of torch.distributed."""

from __future__ import annotations

import datetime
import importlib
import os
import pathlib
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from child import LEAVE, environment

RANKS = 2
TIMEOUT = datetime.timedelta(seconds=100)


def run_ranks(function: str) -> list[object]:
    """What `function`, "module:name" of the tests, returned in each rank.

    Raises RuntimeError with a rank's stderr where one fails or takes longer than TIMEOUT.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, function, folder],
                env=environment(
                    RANK=str(rank),
                    WORLD_SIZE=str(RANKS),
                    LOCAL_RANK=str(rank),
                    OMP_NUM_THREADS="1",
                    # gloo looks for the address of the host's name otherwise
                    GLOO_SOCKET_IFNAME="lo",
                ),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        try:
            errors = [rank.communicate(timeout=TIMEOUT.total_seconds())[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{function}: no end after {TIMEOUT}") from None
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            raise RuntimeError(f"{function} failed:\n" + "\n".join(errors))
        files = [pathlib.Path(folder, f"result{rank}") for rank in range(RANKS)]
        return [torch.load(file, weights_only=False) for file in files]


def main() -> None:
    function, folder = sys.argv[1:]
    rank = int(os.environ["RANK"])
    # A file instead of a port: no other process can take it.
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=TIMEOUT
    )
    torch.manual_seed(0)
    module, name = function.split(":")
    result = getattr(importlib.import_module(module), name)()
    torch.save(result, f"{folder}/result{rank}")
    dist.barrier()
    dist.destroy_process_group()
    exec(LEAVE)


if __name__ == "__main__":
    main()
