"""Several Python threads call at once: results are those of calls one after the other."""

from __future__ import annotations

import concurrent.futures
import threading

import torch

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
        order = torch.randperm(len(subjects), generator=torch.Generator().manual_seed(number))
        start.wait(timeout=60)
        return [(i, library_results(*subjects[i])) for i in order.tolist()]

    with concurrent.futures.ThreadPoolExecutor(CALLERS) as pool:
        for found in pool.map(caller, range(CALLERS)):
            for i, results in found:
                for name, ours, theirs in zip(Results._fields, results, alone[i], strict=True):
                    assert theirs is None or torch.equal(ours, theirs), (subjects[i][0], name)


class _Filtered(torch.utils.data.Dataset):
    """Images that the loader's worker processes filter."""

    problem = real_layer("resnet50 64@56-64/k3p1").shrunk(20)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return testing.library_forward(self.problem, make_tensors(self.problem, seed=index))[0]


def test_data_loader_workers():
    """Forked workers inherit the library from a process whose threads have already run."""
    torch.set_num_threads(2)
    dataset = _Filtered()
    here = torch.stack([dataset[i] for i in range(len(dataset))])
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    assert torch.equal(torch.cat(list(loader)), here)
