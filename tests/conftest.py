"""What the whole suite shares: devices, markers, and state that each test leaves as it was."""

from __future__ import annotations

import hypothesis
import pytest
import torch

import conv2d_ext

# The same examples in every run, and no deadline: a shared machine's pauses are no failures.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("suite")

CUDA = torch.cuda.is_available() and bool(conv2d_ext.build_config()["cuda_architectures"])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_cuda: needs a GPU, and a build with CUDA")
    config.addinivalue_line("markers", "slow: takes seconds; left out by -m 'not slow'")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not CUDA:
        for item in items:
            if item.get_closest_marker("needs_cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU, and a build with CUDA"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``device`` runs once for each device of this machine."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", "cuda"] if CUDA else ["cpu"])


@pytest.fixture(autouse=True)
def _restore_process_state():
    """Seed each test alike, and leave the RNG and the number of threads as they were."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)
