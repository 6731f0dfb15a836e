"""What the whole suite shares: devices, markers, and state that each test leaves as it was."""

from __future__ import annotations

import collections
import os
import sys

import hypothesis
import pytest
import torch

import conv2d_ext

# Without it each process that uses Inductor loads six libraries in six processes, for ten seconds,
# to see that what the CPU's flags say is so.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# The same examples in every run, and no deadline: a shared machine's pauses are no failures.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("suite")

CUDA_BUILD = bool(conv2d_ext.build_config()["cuda_architectures"])
CUDA = torch.cuda.is_available() and CUDA_BUILD

# Why tests of a marker are skipped; a marker without an entry here skips nothing.
SKIPPED = {
    "needs_cuda": None if CUDA else "needs a GPU, and a build with CUDA",
    "needs_cuda_build": None if CUDA_BUILD else "needs a build with CUDA; no GPU",
    "needs_two_gpus": (
        None if CUDA and torch.cuda.device_count() > 1 else "needs two GPUs, and a build with CUDA"
    ),
}


def pytest_configure(config: pytest.Config) -> None:
    for marker, reason in SKIPPED.items():
        config.addinivalue_line("markers", f"{marker}: {reason or 'runs here'}")
    config.addinivalue_line("markers", "xdist_group(name): not at once, under pytest-xdist")
    config.addinivalue_line("markers", "slow: takes seconds; left out by -m 'not slow'")
    config.addinivalue_line(
        "markers", "also_on_cuda: its case on CUDA was not made, for want of CUDA"
    )


# Minutes each, on two cores. They begin first, so that no process is left with one at the end.
LONG_FILES = (
    "test_fuzz.py",
    "test_cuda_host.py",
    "test_isa.py",
    "test_winograd.py",
    "test_export.py",
    "test_gpu_check.py",
    "test_beyond_one_process.py",
    "test_documents.py",
    "test_examples.py",
    "test_torch_fuzz.py",
    "test_cpu_mutations.py",
    "test_convolution_family.py",
    "test_distributed.py",
    "test_install.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
    for item in items:
        for marker, reason in SKIPPED.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason to skip, with its number of tests; pytest's has one for each test
    function, thousands of characters that hide what failed. One more counts the cases on CUDA that
    pytest_generate_tests did not make."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = collections.Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in skipped
        if isinstance(report.longrepr, tuple)
    )
    ran = {
        report.nodeid
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and "also_on_cuda" in report.keywords
    }
    if ran:
        reasons[f"{SKIPPED['needs_cuda']}: cases that are not even collected"] = len(ran)
    if reasons:
        terminalreporter.section("skipped tests, by reason")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:6} {reason}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``device`` runs once for each device. Without CUDA there are no cases for
    it, thousands that would be collected to be skipped; the summary counts them."""
    if "device" not in metafunc.fixturenames:
        return
    if CUDA:
        devices = ["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)]
    else:
        devices = [pytest.param("cpu", marks=pytest.mark.also_on_cuda)]
    metafunc.parametrize("device", devices)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """pytest's, as in a process that has compiled nothing: convert warns where one has."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    return caplog


@pytest.fixture(autouse=True)
def _restore_process_state():
    """Seed each test alike, and leave the RNG and the number of threads as they were. Float32 is
    IEEE float32 on every device, unless a test asks for TF32."""
    threads = torch.get_num_threads()
    cudnn = torch.backends.cudnn
    with (
        torch.random.fork_rng(),
        cudnn.flags(
            enabled=cudnn.enabled,
            benchmark=cudnn.benchmark,
            deterministic=cudnn.deterministic,
            allow_tf32=False,
        ),
    ):
        # torch.manual_seed notes a stack for each kind of device that isn't there.
        (torch.manual_seed if CUDA else torch.default_generator.manual_seed)(0)
        yield
    torch.set_num_threads(threads)
