"""What goes on around a call does it no harm: memory runs out, Ctrl-C, threads that come and go.

Forked and spawned workers and calls at once are in test_concurrency.py.
"""

from __future__ import annotations

import json
import sys

import memory_faults
import mixed_calls
import pytest
from child import run_python

MIB = 2**20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="limits and memory as Linux has them"),
]

# ---- memory runs out

CALLS = ("conv2d", "forward", "grad_input", "grad_weight", "backward", "Conv2d")
AT_THE_WORKSPACE = "OutOfMemoryError: conv2d_ext: not enough memory"


@pytest.fixture(scope="module")
def memory_faults_found() -> dict[str, dict]:
    finished = run_python(memory_faults.__file__, env=memory_faults.ENVIRONMENT)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert set(found) == {*CALLS, *(f"{call}, workers" for call in CALLS)}
    return found


@pytest.mark.parametrize("call", CALLS)
def test_lack_of_memory_raises(memory_faults_found, call):
    """The same exception whichever way the call was made, and PyTorch's own for the result."""
    raised = memory_faults_found[call]["raised"] + memory_faults_found[f"{call}, workers"]["raised"]
    # Python itself may be the one that lacks memory.
    ours = {text for text in raised if text != "MemoryError: "}
    at_the_workspace = {text for text in ours if text.startswith(AT_THE_WORKSPACE)}
    assert at_the_workspace
    for text in ours - at_the_workspace:
        assert text.startswith("RuntimeError: ")
        assert "DefaultCPUAllocator: can't allocate memory" in text


@pytest.mark.parametrize("call", CALLS)
def test_lack_of_memory_does_no_harm(memory_faults_found, call):
    """The next calls, small and large, are right, and nothing of those that failed is kept."""
    found = memory_faults_found[call]
    assert found["wrong"] == 0
    assert memory_faults_found[f"{call}, workers"]["wrong"] == 0
    assert found["failures"] > 50
    assert found["kept"] <= MIB // 4


def test_lack_of_memory_in_a_worker(memory_faults_found):
    """Where the caller has what it needs and another thread doesn't. Which calls give a worker
    something to do before the caller has done it all is the machine's affair."""
    assert any(
        text.startswith(AT_THE_WORKSPACE)
        for call in CALLS
        for text in memory_faults_found[f"{call}, workers"]["raised"]
    )


# ---- memory doesn't grow


@pytest.fixture(scope="module")
def growth() -> dict[str, int]:
    finished = run_python(mixed_calls.__file__, env=mixed_calls.ENVIRONMENT)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_mixed_calls_leave_nothing_behind(growth):
    """10,000 calls: forward, backward, double backward, transforms, errors, views, dtypes."""
    assert growth["mixed calls"] < 8 * MIB


def test_threads_that_end_leave_nothing_behind(growth):
    """Their workspaces and their workers' end with them: 40 threads would leave 20 MiB and more."""
    assert growth["short threads"] < 8 * MIB


# ---- Ctrl-C

_INTERRUPTED = """
import os, signal, sys, threading, time
import torch
import conv2d_ext

# A shell has the commands that it runs in the background ignore Ctrl-C, and so do their children.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(2)
image, weight = torch.rand(1, 64, 150, 150), torch.rand(8, 64, 11, 11)
whole = conv2d_ext.conv2d(image, weight)
start = time.monotonic()
conv2d_ext.conv2d(image, weight)
usual_batch = 5 + int(1 / (time.monotonic() - start))
leaf = weight.clone().requires_grad_()

def forward(batch):
    images = image.expand(batch, -1, -1, -1)
    return lambda: conv2d_ext.conv2d(images, weight)

def backward(batch):
    output = conv2d_ext.conv2d(image.expand(batch, -1, -1, -1), leaf)
    gradient = torch.ones(1).expand(output.shape)
    return lambda: torch.autograd.grad(output, leaf, gradient)

def interrupted(call):
    "Whether Ctrl-C in the middle of the call raised there, after the call had gone on."
    sent = []

    def interrupt():
        time.sleep(0.2)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    returned = False
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        call()
        returned = True
        time.sleep(60)  # for the signal, which came too late
    except KeyboardInterrupt:
        after = time.monotonic() - sent[0]
    thread.join()
    return not returned and after > 0.1

backward(1)()  # the first one imports modules, for seconds
for direction in (forward, backward):
    # How long a call takes is not known before on a busy machine.
    found = (interrupted(direction(usual_batch << doubled)) for doubled in range(5))
    assert any(found), direction
    assert torch.equal(conv2d_ext.conv2d(image, weight), whole)
print("finished")
"""


def test_ctrl_c_raises_when_the_call_returns():
    finished = run_python("-c", _INTERRUPTED)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["finished"]
