"""Several Python threads or worker processes call at once: results are those of calls in a row."""

from __future__ import annotations

import concurrent.futures
import pathlib
import threading

import pytest
import torch
from child import run_python
from isa_bits import bits

from conv2d_ext import testing
from conv2d_ext.testing import Results, library_results, make_tensors, real_layer

PROBLEMS = (
    *testing.ASYMMETRIC,
    *testing.GROUPED,
    *testing.DEPTHWISE,
    real_layer("resnet50 64@56-64/k3p1").shrunk(20),
    real_layer("resnet50 512@7-512/k3p1").shrunk(7),
)
CALLERS = 8


def test_concurrent_calls():
    subjects = [
        (problem, make_tensors(problem, dtype))
        for problem in PROBLEMS
        for dtype in (torch.float32, torch.bfloat16)
    ]
    alone = [library_results(*subject) for subject in subjects]
    start = threading.Barrier(CALLERS)

    def caller(number: int) -> list[tuple[int, Results]]:
        torch.set_num_threads(1 + number % 3)  # of this caller
        order = torch.randperm(len(subjects), generator=torch.Generator().manual_seed(number))
        start.wait(timeout=60)
        return [(i, library_results(*subjects[i])) for i in order.tolist()]

    with concurrent.futures.ThreadPoolExecutor(CALLERS) as pool:
        for found in pool.map(caller, range(CALLERS)):
            for i, results in found:
                for name, ours, theirs in zip(Results._fields, results, alone[i], strict=True):
                    if theirs is not None:
                        assert torch.equal(bits(ours), bits(theirs)), (subjects[i][0], name)


class _Filtered(torch.utils.data.Dataset):
    """Images that the loader's worker processes filter, beside their gradients."""

    problem = real_layer("resnet50 64@56-64/k3p1").shrunk(20)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        results = library_results(self.problem, make_tensors(self.problem, seed=index))
        return torch.cat([results.output.flatten(), results.grad_input.flatten()])


def load_in_workers(start: str) -> None:
    """A loader gives each worker one thread. Forked ones inherit the library from a process whose
    threads have already run, spawned ones load it anew."""
    torch.set_num_threads(2)
    dataset = _Filtered()
    here = torch.stack([dataset[i] for i in range(len(dataset))])
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=2, num_workers=2, multiprocessing_context=start, timeout=100
    )
    assert torch.equal(bits(torch.cat(list(loader))), bits(here))


_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[2])
import test_concurrency
if __name__ == "__main__":
    test_concurrency.load_in_workers(sys.argv[1])
"""


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_data_loader_workers(start):
    """In a fresh process: autograd refuses to run in the fork of one that gave it threads, which
    any test before this one may have done."""
    finished = run_python("-c", _PROGRAM, start, str(pathlib.Path(__file__).parent))
    assert finished.returncode == 0, finished.stderr
