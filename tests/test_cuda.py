"""What only a GPU can show: streams, graphs, devices, workspace, TF32, PyTorch's machinery on it.

Values, bits, formats, errors and large tensors on CUDA are in the files of those subjects, whose
tests take a device. Like these, they are skipped where there is none. DEVICE=cpu runs what is not
CUDA's own here on the CPU, so that a mistake in a test shows without a GPU.
"""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import itertools
import os

import peak_memory
import pytest
import torch
import torch.nn.functional as F
from accuracy import assert_as_accurate, on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from isa_bits import assert_same_bits, bits
from test_autograd import PROBLEMS as DIFFERENTIATED
from test_properties import LAYOUTS, problems
from torch.autograd import gradcheck, gradgradcheck

import conv2d_ext
from conv2d_ext import testing
from conv2d_ext.testing import (
    VIEWS,
    Problem,
    Results,
    Tensors,
    aten_results,
    float64_oracle,
    library_results,
    make_tensors,
    real_layer,
)

DEVICE = os.environ.get("DEVICE", "cuda")
pytestmark = [] if DEVICE == "cpu" else [pytest.mark.needs_cuda]
cuda_alone = pytest.mark.needs_cuda

MIB = 2**20
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
# A dense layer, one whose sums are cut, one strided and grouped, one depthwise, one of one pixel.
LAYERS = (
    real_layer("resnet50 64@56-64/k3p1").shrunk(28),
    real_layer("resnet50 512@7-512/k3p1"),
    testing.ASYMMETRIC[0],
    testing.DEPTHWISE[1],
    testing.ONE_PIXEL[0],
)
over_layers = pytest.mark.parametrize("problem", LAYERS, ids=str)
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def tf32():
    """TF32 as PyTorch's default allows it, which conftest.py takes back after each test."""
    torch._C._set_cudnn_allow_tf32(True)


class TestTF32:
    def test_it_is_used_where_it_is_allowed_and_nowhere_else(self):
        """Its products have 11 bits, so its error lies between those of float32 and bfloat16."""
        problem = real_layer("resnet50 64@56-64/k3p1").shrunk(28)
        tensors = make_tensors(problem, device=DEVICE)
        exact = float64_oracle(problem, on_cpu(tensors))
        errors = {}
        for allow in (False, True):
            torch._C._set_cudnn_allow_tf32(allow)
            results = library_results(problem, tensors)
            errors[allow] = [
                oracle.relative_l2(result.cpu())
                for result, oracle in zip(results[:3], exact[:3], strict=True)
            ]
        assert max(errors[False]) < 1e-6
        if DEVICE == "cuda":
            assert min(errors[True]) > 1e-5
            assert max(errors[True]) < 1e-3

    @over_layers
    def test_its_error_is_that_of_two_rounded_operands(self, problem, tf32):
        tensors = make_tensors(problem, device=DEVICE)
        exact = float64_oracle(problem, on_cpu(tensors))
        for name, result, oracle in zip(
            Results._fields, library_results(problem, tensors), exact, strict=True
        ):
            if oracle is not None:
                assert oracle.max_scaled_error(result.cpu()) <= 2 * 2**-11 + 1e-6, name

    @pytest.mark.parametrize("problem", [p for p in testing.SMALL_PROBLEMS if p.batch], ids=str)
    def test_bits(self, problem, tf32):
        """Runs, places in the batch, formats."""
        batch = dataclasses.replace(problem, batch=5)
        tensors = make_tensors(batch, device=DEVICE)
        together = library_results(batch, tensors)
        assert_same_bits(library_results(batch, tensors), together, "again")
        alone = tensors._replace(input=tensors.input[3:4], grad_output=tensors.grad_output[3:4])
        results = library_results(dataclasses.replace(problem, batch=1), alone)
        for name in ("output", "grad_input"):
            ours, theirs = getattr(together, name)[3], getattr(results, name)[0]
            assert torch.equal(bits(ours), bits(theirs)), name
        for name, view in VIEWS.items():
            viewed = Tensors(*(t if t is None or t.dim() != 4 else view(t) for t in tensors))
            assert_same_bits(library_results(batch, viewed), together, name)

    def test_other_types_do_not_heed_it(self):
        problem = LAYERS[0]
        for dtype in DTYPES[1:]:
            tensors = make_tensors(problem, dtype, device=DEVICE)
            results = []
            for allow in (False, True):
                torch._C._set_cudnn_allow_tf32(allow)
                results.append(library_results(problem, tensors))
            assert_same_bits(*results, str(dtype))

    def test_explain_tells(self):
        input, weight, bias, _ = make_tensors(LAYERS[0], device=DEVICE)
        for allow, math in ((False, "ieee"), (True, "tf32")):
            torch._C._set_cudnn_allow_tf32(allow)
            plan = conv2d_ext.explain(input, weight, bias, padding=1)
            if DEVICE == "cuda":
                for direction in (plan.forward, plan.grad_input, plan.grad_weight):
                    assert direction.math == math
                    assert direction.kernel in str(plan)


@settings(max_examples=100)
@given(
    problem=problems(),
    dtype=st.sampled_from(DTYPES),
    views=st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * 3),
    seed=st.integers(0, 9),
)
def test_random_problems(problem, dtype, views, seed):
    tensors = make_tensors(problem, dtype, seed=seed, device=DEVICE)
    tensors = Tensors(
        LAYOUTS[views[0]](tensors.input),
        LAYOUTS[views[1]](tensors.weight),
        tensors.bias,
        LAYOUTS[views[2]](tensors.grad_output),
    )
    actual, oracle = library_results(problem, tensors), float64_oracle(problem, on_cpu(tensors))
    aten = aten_results(problem, tensors)
    for name, ours, theirs, exact in zip(Results._fields, actual, aten, oracle, strict=True):
        if exact is None:
            continue
        if dtype == torch.float64:
            assert exact.max_scaled_error(ours.cpu()) <= 1e-14, name
        else:
            assert_as_accurate(ours, theirs, exact, name)


@over_dtypes
@over_layers
def test_every_element_is_written(problem, dtype):
    """PyTorch fills new tensors with NaN here, results among them."""
    tensors = make_tensors(problem, dtype, device=DEVICE)
    torch.use_deterministic_algorithms(True)
    try:
        results = library_results(problem, tensors)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, result in zip(Results._fields, results, strict=True):
        assert result is None or result.isfinite().all(), name


@cuda_alone
@over_layers
def test_nothing_is_read_from_old_memory(problem):
    """Workspaces come from memory in which NaNs were left."""
    tensors = make_tensors(problem, device=DEVICE)
    expected = library_results(problem, tensors)
    for size in (2**12, 2**16, 2**20, 2**23):  # a block of each of the allocator's kinds
        _ = torch.full((size,), torch.nan, device=DEVICE)
    assert_same_bits(library_results(problem, tensors), expected, "after NaNs")


# ---- memory


@cuda_alone
class TestWorkspace:
    """At most 32 MiB beyond the results, and nothing kept; the allocator rounds each block up."""

    BOUND = 32 * MIB + MIB

    @pytest.mark.parametrize("kind", peak_memory.KINDS)
    @pytest.mark.parametrize("size", peak_memory.SIZES)
    def test_training_step(self, size, kind):
        extra = peak_memory.measure_training_step(
            kind, peak_memory.SIZES[size], DEVICE, peak_memory.extra_cuda_memory
        )
        assert extra <= self.BOUND

    @pytest.mark.parametrize("kind", peak_memory.KINDS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("direction", peak_memory.DIRECTIONS)
    def test_each_op(self, direction, dtype, kind):
        before = torch.cuda.memory_allocated()
        extra = peak_memory.measure_op(
            direction, kind, peak_memory.SIZES["image"], dtype, DEVICE,
            peak_memory.extra_cuda_memory,
        )  # fmt: skip
        assert extra <= self.BOUND
        assert torch.cuda.memory_allocated() == before

    @pytest.mark.parametrize("batch", [1, 64])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
    @over_layers
    def test_split_sums(self, problem, dtype, batch):
        """Where a call asks for a workspace at all, it gets what explain says."""
        problem = dataclasses.replace(problem, batch=batch)
        input, weight, bias, grad_output = make_tensors(problem, dtype, device=DEVICE)
        plan = conv2d_ext.explain(input, weight, bias, **problem.call_args())
        args = problem.op_args()
        ops = torch.ops.conv2d_ext
        calls = {
            "forward": lambda: (ops.conv2d(input, weight, bias, *args),),
            "grad_input": lambda: (
                ops.conv2d_grad_input(grad_output, weight, problem.input_shape, *args, False),
            ),
            "grad_weight": lambda: (
                ops.conv2d_grad_weight(
                    grad_output, input, weight.shape, weight.stride(), *args
                ),
            ),
        }  # fmt: skip
        for name, call in calls.items():
            wanted = getattr(plan, name).workspace_bytes
            assert wanted <= 32 * MIB
            extra = peak_memory.extra_cuda_memory(call)
            # The result's block and the workspace's may each be up to 1 MiB too large.
            assert extra <= wanted + 2 * MIB, name
            assert extra >= wanted, name

    def test_the_measure_sees_copies_and_not_results(self):
        source = torch.ones(8 * MIB, device=DEVICE)
        assert 31 * MIB <= peak_memory.extra_cuda_memory(lambda: (source.clone() * 2,)) <= 33 * MIB
        assert peak_memory.extra_cuda_memory(lambda: (source * 2,)) <= MIB


# ---- streams and graphs


def _late(tensors: Tensors) -> Tensors:
    """The tensors on the current stream, filled only after it has been busy for a while."""
    empty = Tensors(*(t if t is None else torch.zeros_like(t) for t in tensors))
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    for target, source in zip(empty, tensors, strict=True):
        if target is not None:
            target.copy_(source)
    return empty


@cuda_alone
@over_dtypes
@over_layers
def test_current_stream(problem, dtype):
    """What was queued before on the stream is seen, though nobody waits for the device."""
    tensors = make_tensors(problem, dtype, device=DEVICE)
    expected = library_results(problem, tensors)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        late = _late(tensors)
        results = library_results(problem, late)
        torch.cuda.current_stream().synchronize()
    assert_same_bits(results, expected, "another stream")


@cuda_alone
def test_nothing_waits_for_the_device():
    problem = LAYERS[1]
    tensors = make_tensors(problem, device=DEVICE)
    library_results(problem, tensors)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(500_000_000)
        results = library_results(problem, tensors)
        assert not torch.cuda.current_stream().query(), "the calls came back after the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert results.output.isfinite().all()


@cuda_alone
def test_streams_side_by_side():
    """Calls on several streams don't share a workspace."""
    subjects = [(problem, make_tensors(problem, device=DEVICE)) for problem in LAYERS]
    alone = [library_results(*subject) for subject in subjects]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    found = []
    for turn in range(8):
        for index, subject in enumerate(subjects):
            with torch.cuda.stream(streams[(turn + index) % len(streams)]):
                found.append((index, library_results(*subject)))
    torch.cuda.synchronize()
    for index, results in found:
        assert_same_bits(results, alone[index], str(subjects[index][0]))


@cuda_alone
@over_dtypes
@over_layers
def test_graph(problem, dtype):
    """Captured and replayed, on new values in the same memory: the bits of eager calls."""
    tensors = make_tensors(problem, dtype, device=DEVICE)
    others = make_tensors(problem, dtype, seed=1, device=DEVICE)
    expected = [library_results(problem, t) for t in (others, tensors)]
    args = problem.op_args()
    ops = torch.ops.conv2d_ext

    def step() -> Results:
        input, weight, bias, grad_output = tensors
        return Results(
            ops.conv2d(input, weight, bias, *args),
            ops.conv2d_grad_input(grad_output, weight, problem.input_shape, *args, False),
            ops.conv2d_grad_weight(grad_output, input, weight.shape, weight.stride(), *args),
            ops.conv2d_grad_bias(grad_output) if problem.bias else None,
        )

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # loads the kernels, as PyTorch asks for before a capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    originals = Tensors(*(t if t is None else t.clone() for t in tensors))
    for values, wanted in zip((others, originals), expected, strict=True):
        for target, source in zip(tensors, values, strict=True):
            if target is not None:
                target.copy_(source)
        for run in range(2):
            for result in captured:
                if result is not None:
                    result.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert_same_bits(captured, wanted, f"replay {run}")


@cuda_alone
def test_graphed_training():
    """make_graphed_callables captures forward and backward of a module."""
    layer = conv2d_ext.Conv2d(16, 24, 3, padding=1).to(DEVICE)
    sample = torch.randn(4, 16, 14, 14, device=DEVICE, requires_grad=True)
    eager = copy.deepcopy(layer)
    graphed = torch.cuda.make_graphed_callables(layer, (sample,))
    for seed in range(3):
        torch.manual_seed(seed)
        input = torch.randn_like(sample)
        found = []
        for module in (graphed, eager):
            module.zero_grad()
            leaf = input.clone().requires_grad_()
            output = module(leaf)
            output.pow(2).sum().backward()
            found.append([output.detach().clone(), leaf.grad.clone(), module.weight.grad.clone()])
        for actual, expected in zip(*found, strict=True):
            assert torch.equal(actual, expected)


# ---- several GPUs


@pytest.mark.needs_two_gpus
class TestTwoDevices:
    @over_layers
    def test_the_tensors_device_computes(self, problem):
        """Whatever the current device is, which stays the current one."""
        first = make_tensors(problem, device="cuda:0")
        second = make_tensors(problem, device="cuda:1")
        with torch.cuda.device(0):
            results = library_results(problem, second)
            assert torch.cuda.current_device() == 0
        assert {t.device for t in results if t is not None} == {torch.device("cuda:1")}
        if torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
            moved = Results(*(t if t is None else t.to("cuda:0") for t in results))
            assert_same_bits(moved, library_results(problem, first), "the other device")

    def test_mixed_devices(self):
        input, weight, bias, _ = make_tensors(LAYERS[0], device="cuda:0")
        for operands in (
            (input.to("cuda:1"), weight, bias),
            (input, weight.to("cuda:1"), bias),
            (input, weight, bias.to("cuda:1")),
        ):
            with pytest.raises(RuntimeError, match=r"same device.*cuda:\d.*cuda:\d"):
                conv2d_ext.conv2d(*operands)


# ---- errors


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
        torch.float8_e4m3fn,
    ],
    ids=str,
)  # fmt: skip
@cuda_alone
def test_other_types_are_refused_as_by_pytorch(dtype):
    operands = [torch.ones(s, device=DEVICE).to(dtype) for s in ((1, 2, 5, 6), (3, 2, 3, 2))]
    with pytest.raises(RuntimeError) as theirs:
        F.conv2d(*operands)
    with pytest.raises(RuntimeError, match="not supported for") as ours:
        conv2d_ext.conv2d(*operands)
    assert ours.type is theirs.type


@cuda_alone
def test_sparse_tensors_are_refused():
    input, weight = torch.ones(1, 2, 5, 6, device=DEVICE), torch.ones(3, 2, 3, 2, device=DEVICE)
    with pytest.raises(RuntimeError, match="Sparse"):
        conv2d_ext.conv2d(input.to_sparse(), weight)


@cuda_alone
def test_more_memory_than_there_is():
    input, weight = torch.ones(1, 1, 4, 4, device=DEVICE), torch.ones(1, 1, 3, 3, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        conv2d_ext.conv2d(input, weight, padding=2**21)
    torch.cuda.synchronize()  # nothing was launched


# ---- kernels and host threads


@pytest.fixture
def want():
    """conv2d_ext._C.want_on_cuda, taken back afterwards."""
    yield conv2d_ext._C.want_on_cuda
    conv2d_ext._C.want_on_cuda()


@cuda_alone
@pytest.mark.parametrize("view", ["contiguous", "channels_last"])
@pytest.mark.parametrize("math", [*DTYPES, "tf32"], ids=str)
def test_bits_of_every_kernel(math, view, want):
    """Whichever kernel is taken, and whether segments of K are split: the planner's bits."""
    dtype = torch.float32 if math == "tf32" else math
    torch._C._set_cudnn_allow_tf32(math == "tf32")
    kernels = conv2d_ext._C.cuda_kernels(torch.empty(0, dtype=dtype), math == "tf32")
    taken = set()
    for problem in (
        real_layer("resnet50 512@7-512/k3p1"),
        real_layer("resnet50 3@224-64/k7s2p3").shrunk(64),
        Problem("few channels, K in segments", 1, 5, (30, 31), 40, (12, 11)),
    ):
        drawn = make_tensors(problem, dtype, device=DEVICE)
        tensors = Tensors(
            *(
                t if t is None or t.dim() != 4 or view not in VIEWS else VIEWS[view](t)
                for t in drawn
            )
        )
        expected = library_results(problem, tensors)
        for variant, split, packed in itertools.product(range(len(kernels)), (0, 1), (0, 1)):
            want(variant, split, packed)
            plan = conv2d_ext.explain(*tensors[:3], **problem.call_args())
            taken |= {
                (found.kernel, found.split)
                for found in (plan.forward, plan.grad_input, plan.grad_weight)
            }
            assert_same_bits(
                library_results(problem, tensors),
                expected,
                f"{kernels[variant]}, split {split}, packed {packed}",
            )
        want()
    missing = {
        (kernel, split)
        for kernel, split in itertools.product(kernels, (False, True))
        if split or not kernel.startswith("weight")
    }
    assert not missing - taken


@cuda_alone
def test_threads_that_launch_one_kernel_with_unequal_shared_memory(want):
    """A kernel's limit is its device's, of all threads: none may lower it for another."""
    want(0, 0)
    problems = [
        Problem("one chain", 1, 16, (9, 9), 64, (3, 3), padding=(1, 1), bias=False),
        Problem("several chains", 1, 256, (9, 9), 64, (3, 3), padding=(1, 1), bias=False),
    ]
    operands = [make_tensors(p, torch.bfloat16, device=DEVICE)[:2] for p in problems]
    plans = [conv2d_ext.explain(*tensors, padding=1).forward for tensors in operands]
    assert plans[0].kernel == plans[1].kernel
    assert 48 << 10 < plans[0].shared_bytes < plans[1].shared_bytes
    expected = [conv2d_ext.conv2d(*tensors, padding=1) for tensors in operands]

    def run(number):
        for _ in range(2000):
            result = conv2d_ext.conv2d(*operands[number % 2], padding=1)
        return torch.equal(bits(result), bits(expected[number % 2]))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))


# ---- derivatives, autocast, tracing


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("problem", DIFFERENTIATED, ids=str)
def test_derivatives(problem, dtype):
    leaves = [
        t.requires_grad_()
        for t in make_tensors(problem, dtype, seed=1, device=DEVICE)[:3]
        if t is not None
    ]

    def function(*tensors):
        return conv2d_ext.conv2d(*tensors, **problem.call_args())

    assert gradcheck(function, leaves, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(function, leaves, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    input, weight = torch.randn(2, 4, 5, 6, device=DEVICE), torch.randn(2, 4, 3, 2, device=DEVICE)
    bias = torch.randn(2, device=DEVICE)
    weight.requires_grad_()
    with torch.autocast(DEVICE, dtype=dtype):
        ours, theirs = conv2d_ext.conv2d(input, weight, bias), F.conv2d(input, weight, bias)
        mixed = conv2d_ext.conv2d(input.to(dtype), weight)
        with torch.autocast(DEVICE, enabled=False):
            assert conv2d_ext.conv2d(input, weight, bias).dtype == torch.float32
    assert ours.dtype == theirs.dtype == mixed.dtype == dtype
    # Theirs adds the bias to a rounded sum.
    atol = 2 * torch.finfo(dtype).eps * theirs.abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
    ours.sum().backward()
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_opcheck(memory_format):
    problem = Problem("everything", 2, 4, (5, 6), 2, (3, 2), (2, 1), (1, 0), (1, 2), groups=2)
    input, weight, bias, grad_output = (
        t.requires_grad_()
        for t in make_tensors(problem, memory_format=memory_format, device=DEVICE)
    )
    args = problem.op_args()
    ops = torch.ops.conv2d_ext
    channels_last = memory_format is torch.channels_last
    torch.library.opcheck(ops.conv2d, (input, weight, bias, *args))
    torch.library.opcheck(
        ops.conv2d_grad_input,
        (grad_output, weight, list(problem.input_shape), *args, channels_last),
    )
    torch.library.opcheck(
        ops.conv2d_grad_weight,
        (grad_output, input, list(problem.weight_shape), list(weight.stride()), *args),
    )
    torch.library.opcheck(ops.conv2d_grad_bias, (grad_output,))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_compile(backend, dtype):
    """One graph; float64 channels_last has a format of its own on CUDA."""
    torch._dynamo.reset()
    model = torch.nn.Sequential(
        conv2d_ext.Conv2d(3, 8, 3, padding="same"),
        conv2d_ext.Conv2d(8, 8, (3, 2), stride=(2, 1), padding=(1, 0), groups=2),
        conv2d_ext.Conv2d(8, 4, 1),
    ).to(DEVICE, dtype, memory_format=torch.channels_last)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend=backend)
    input = torch.randn(2, 3, 9, 8, device=DEVICE, dtype=dtype)
    input = input.to(memory_format=torch.channels_last)
    found = []
    for module in (compiled, model):
        leaf = input.detach().requires_grad_()
        output = module(leaf)
        output.backward(torch.ones_like(output))
        found.append([output.detach(), leaf.grad, *(p.grad for p in module.parameters())])
    for actual, expected in zip(*found, strict=True):
        assert torch.equal(actual, expected)
        assert actual.stride() == expected.stride()


# ---- the demo, and explain


@cuda_alone
def test_the_demo_measures_each_gpu(tmp_path):
    from conv2d_ext import _demo as demo

    path = tmp_path / "figures.json"
    assert demo.main(["--quick", "--threads", "1", "--json", str(path)]) == 0
    text = path.read_text()
    assert '"cuda:0"' in text
    assert '"CUDA"' not in text, "a device was skipped"


@cuda_alone
@pytest.mark.parametrize("problem", [p for p in testing.SMALL_PROBLEMS if p.batch], ids=str)
def test_explain(problem):
    if len(problem.padding) == 4 and problem.padding != "same":
        pytest.skip("only the op takes four paddings")
    input, weight, bias, _ = make_tensors(problem, device=DEVICE)
    plan = conv2d_ext.explain(input, weight, bias, **problem.call_args())
    assert plan.device == input.device
    for name in ("forward", "grad_input", "grad_weight"):
        direction = getattr(plan, name)
        assert isinstance(direction, conv2d_ext.CudaDirectionExplanation)
        assert direction.kernel
        assert 0 <= direction.workspace_bytes <= 32 * MIB
