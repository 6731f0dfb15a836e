"""Guarantee 1: results are reproducible to the bit.

Seen to fail: with F.conv2d in the library's place, test_threads failed for 64 of the 221 cases of
that time, test_place_in_the_batch for 58, test_views for 314 of 1105, and TestFlushDenormal where
denormals are flushed; with bfloat16 pairs for images of one pixel, test_one_pixel_in_any_batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import platform
import types

import pytest
import torch
import torch.utils.deterministic
from isa_bits import ONE_PIXEL, assert_batch_changes_no_bit, assert_same_bits, bits

import conv2d_ext
from conv2d_ext import testing
from conv2d_ext.testing import (
    VIEWS,
    Problem,
    Results,
    Tensors,
    library_results,
    make_tensors,
    real_layer,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# Beside the small problems, layers with work for several threads in every direction.
LAYERS = (
    real_layer("resnet50 3@224-64/k7s2p3").shrunk(96),
    real_layer("resnet50 64@56-64/k3p1").shrunk(28),
    real_layer("resnet50 1024@14-256"),
    real_layer("resnet50 512@7-512/k3p1"),
    real_layer("resnet50 512@28-1024/s2").shrunk(14),
    real_layer("mobilenet_v3_large 72@56-72/k5s2p2g72").shrunk(28),
    real_layer("convnext_tiny 96@56-96/k7p3g96").shrunk(28),
    real_layer("deeplabv3 2048@65-256/k3p36d36").shrunk(5),
)
SMALL = tuple(problem for problem in testing.SMALL_PROBLEMS if problem.batch)

# float16 goes the way of bfloat16 through the engines.
CASES = [
    pytest.param(problem, dtype, id=f"{problem}-{str(dtype).removeprefix('torch.')}")
    for dtype, problems in (
        (torch.float32, SMALL + LAYERS),
        (torch.float64, SMALL + LAYERS[:3]),
        (torch.bfloat16, SMALL + LAYERS[:3]),
        (torch.float16, (*testing.ASYMMETRIC[:3], *testing.LONG_SUMS, LAYERS[1])),
    )
    for problem in problems
]
over_cases = pytest.mark.parametrize(("problem", "dtype"), CASES)


@contextlib.contextmanager
def tensors_begin_as_nans():
    """What an op allocates and doesn't write holds NaNs, as PyTorch's setting has it."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_nobody_has_written_is_seen(device):
    with tensors_begin_as_nans():
        assert torch.empty(99, device=device).isnan().all()


@over_cases
def test_runs(problem, dtype, device):
    """At other addresses, with results in memory that isn't zero, nor what a run before has left
    there. (Of the engine's own memory the fuzzer says so.)"""
    tensors = make_tensors(problem, dtype, device=device)
    results = [library_results(problem, tensors)]
    for run in range(2):
        with tensors_begin_as_nans():
            results.append(library_results(problem, tensors))
        assert_same_bits(results[-1], results[0], f"run {run}")


@over_cases
def test_threads(problem, dtype):
    tensors = make_tensors(problem, dtype)
    torch.set_num_threads(1)
    alone = library_results(problem, tensors)
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        assert_same_bits(library_results(problem, tensors), alone, f"{threads} threads")


@pytest.mark.parametrize("threads", [64, 65, 97, 200])
def test_many_threads(threads):
    """From 65 threads on they share ranges of work items."""
    problem = Problem("many items", 256, 16, (9, 9), 16, (3, 3), padding=(1, 1), groups=16)
    tensors = make_tensors(problem, torch.float32)
    torch.set_num_threads(1)
    alone = library_results(problem, tensors)
    torch.set_num_threads(threads)
    assert_same_bits(library_results(problem, tensors), alone, f"{threads} threads")


@over_cases
def test_place_in_the_batch(problem, dtype, device):
    """Each image's output and input gradient: in a batch of 8, alone, and unbatched."""
    batch = dataclasses.replace(problem, batch=8)
    tensors = make_tensors(batch, dtype, device=device)
    together = library_results(batch, tensors)
    single = dataclasses.replace(problem, batch=1)
    for n in range(8):
        alone = tensors._replace(
            input=tensors.input[n : n + 1], grad_output=tensors.grad_output[n : n + 1]
        )
        results = library_results(single, alone)
        for name in ("output", "grad_input"):
            ours, theirs = getattr(together, name)[n], getattr(results, name)[0]
            assert torch.equal(bits(ours), bits(theirs)), f"{name} of image {n} of 8"
    unbatched = tensors._replace(input=tensors.input[7], grad_output=tensors.grad_output[7])
    results = library_results(batch, unbatched)
    for name in ("output", "grad_input"):
        ours, theirs = getattr(together, name)[7], getattr(results, name)
        assert torch.equal(bits(ours), bits(theirs)), f"{name} of the unbatched image"


@pytest.mark.parametrize("size", [2, 3, 5, 13])
def test_other_batch_sizes(size, device):
    problem = dataclasses.replace(real_layer("resnet50 512@7-512/k3p1"), batch=13)
    tensors = make_tensors(problem, device=device)
    whole = library_results(problem, tensors)
    part = tensors._replace(input=tensors.input[:size], grad_output=tensors.grad_output[:size])
    results = library_results(dataclasses.replace(problem, batch=size), part)
    assert torch.equal(bits(whole.output[:size]), bits(results.output))
    assert torch.equal(bits(whole.grad_input[:size]), bits(results.grad_input))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("problem", testing.STRIDED, ids=str)
def test_phases_of_the_stride(problem, dtype):
    """One channel is too few for phases to run together; what belongs to it is the same."""
    if dtype == torch.bfloat16 and conv2d_ext.build_config()["isa"] == "avx512_bf16":
        pytest.skip(
            "products in pairs, of more than five channels alone, have an order of their own"
        )
    problem = dataclasses.replace(problem, in_channels=problem.weight_shape[1], groups=1)
    tensors = make_tensors(problem, dtype)
    few = tensors._replace(input=tensors.input[:, :1], weight=tensors.weight[:, :1])
    assert torch.equal(
        bits(library_results(problem, few).grad_input),
        bits(library_results(problem, tensors).grad_input[:, :1]),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("problem", ONE_PIXEL, ids=str)
def test_one_pixel_in_any_batch(problem, dtype, device):
    """Which kernels run follows the batch here; test_isa.py has every instruction set's."""
    assert_batch_changes_no_bit(problem, dtype, device)


def _strided_bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else torch.stack((bias, bias + 1), 1)[:, 0]


@pytest.mark.parametrize("view", VIEWS)
@over_cases
def test_views(problem, view, dtype, device):
    """Formats, strides and alignment of every argument: all at once, and for float32 one by one."""
    tensors = make_tensors(problem, dtype, device=device)
    plain = library_results(problem, tensors)
    viewed = Tensors(
        VIEWS[view](tensors.input),
        VIEWS[view](tensors.weight),
        _strided_bias(tensors.bias),
        VIEWS[view](tensors.grad_output),
    )
    assert_same_bits(library_results(problem, viewed), plain, f"{view} everything")
    if dtype != torch.float32:
        return
    for name in ("input", "weight", "grad_output"):
        one = tensors._replace(**{name: getattr(viewed, name)})
        assert_same_bits(library_results(problem, one), plain, f"{view} {name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_expanded_arguments(dtype, device):
    """Arguments with strides of zero against their copies."""
    problem = Problem("expanded", 4, 6, (9, 11), 7, (3, 2), (1, 2), (1, 1))
    tensors = Tensors(
        torch.randn(1, 1, 9, 11, device=device).to(dtype).expand(problem.input_shape),
        torch.randn(7, 6, 1, 1, device=device).to(dtype).expand(problem.weight_shape),
        torch.randn(1, device=device).to(dtype).expand(7),
        torch.randn((), device=device).to(dtype).expand(problem.output_shape),
    )
    copies = Tensors(*(t.contiguous() for t in tensors))
    expected = library_results(problem, copies)
    assert_same_bits(library_results(problem, tensors), expected, "expanded")


@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_windows_that_overlap(dtype, groups, device):
    """Pixels that share channels, as the windows of Tensor.unfold do, against copies: a pixel's
    stride may be a group's channels, and an image's as if there were no other groups."""
    for width in (4, 8, 16, 32):
        channels = groups * width
        problem = Problem(
            "windows", 3, channels, (5, 6), channels, (3, 3), padding=(1, 1), groups=groups
        )
        drawn = make_tensors(problem, dtype, device=device)
        strides = (30 * width, 1, 6 * width, width)
        tensors = drawn._replace(
            input=drawn.input.as_strided(problem.input_shape, strides),
            grad_output=drawn.grad_output.as_strided(problem.output_shape, strides),
        )
        copies = Tensors(*(tensor.contiguous() for tensor in tensors))
        for batch in (3, 1):
            some, them = (
                ts._replace(input=ts.input[:batch], grad_output=ts.grad_output[:batch])
                for ts in (tensors, copies)
            )
            problem = problem.with_batch(batch)
            expected = library_results(problem, them)
            assert_same_bits(library_results(problem, some), expected, f"{width} channels")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_number_of_result_channels(dtype, device):
    """A channel's sum is the same beside few others, where planes are read one by one, and beside
    many; with planes that lie apart, expanded ones, and sums that start from the bias, too. (On
    CUDA tensor cores take many channels of 16 bits, and few are no work for them.)"""
    if device == "cuda" and dtype.itemsize == 2:
        pytest.skip("tensor cores have an order of their own")
    for channels, size in ((137, (46, 51)), (7, (199, 201))):
        input = torch.randn(2, channels, size[0] + 2, size[1], device=device).to(dtype)
        weight = torch.randn(5, channels, 1, 1, device=device).to(dtype)
        bias = torch.randn(5, device=device).to(dtype)
        for planes in (input[:, :, 1:-1], input[:1, :1].expand(2, channels, -1, -1)):
            many = conv2d_ext.conv2d(planes, weight, bias)
            for few in range(1, 5):
                output = conv2d_ext.conv2d(planes, weight[:few], bias[:few])
                assert torch.equal(bits(output), bits(many[:, :few]))


# Weights whose elements lie 2 apart along a row: between them are another item's.
_GAPS = [
    (Problem("rows innermost", 1, 1, (9, 170), 64, (2, 150)), torch.float32, (300, 300, 1, 2)),
    (Problem("2 channels", 1, 2, (24, 24), 64, (13, 13), padding=(26, 26)), torch.float32, None),
    (Problem("16 groups", 1, 32, (20, 20), 32, (13, 13), groups=16), torch.float32, None),
    (
        Problem("33 groups", 3, 66, (7, 7), 66, (13, 13), (4, 4), (12, 12), groups=33),
        torch.float64,
        None,
    ),
]


@pytest.mark.parametrize(("problem", "dtype", "strides"), _GAPS, ids=lambda value: str(value))
def test_weight_gradients_whose_neighbours_belong_to_other_items(problem, dtype, strides):
    """A store that reads and writes back what lies between would race. Seen to fail with such a
    store on an idle machine, in some of the runs; the fuzzer's thread sanitizer sees every one."""
    tensors = make_tensors(problem, dtype)
    if strides is None:
        channels, height, width = problem.weight_shape[1:]
        strides = (channels * height * width, 1, width * channels, channels)
    arguments = (problem.weight_shape, strides, *problem.op_args())

    def grad_weight() -> torch.Tensor:
        op = torch.ops.conv2d_ext.conv2d_grad_weight
        return op(tensors.grad_output, tensors.input, *arguments)

    torch.set_num_threads(1)
    alone = bits(grad_weight())
    torch.set_num_threads(3)
    for run in range(300):
        assert torch.equal(bits(grad_weight()), alone), f"run {run}"


class TestRoundingMode:
    """Worker threads round as the calling thread does."""

    MODES = types.MappingProxyType(  # <fenv.h> on x86
        {"downward": 0x400, "upward": 0x800, "toward zero": 0xC00}
    )

    @pytest.fixture(autouse=True)
    def _restore(self):
        if platform.machine() != "x86_64":
            pytest.skip("the rounding modes' numbers are x86's")
        yield
        ctypes.CDLL(None).fesetround(0)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("problem", [real_layer("resnet50 64@56-64/k3p1").shrunk(28)], ids=str)
    def test_all_threads(self, problem, mode):
        tensors = make_tensors(problem)
        nearest = library_results(problem, tensors)
        torch.set_num_threads(1)
        ctypes.CDLL(None).fesetround(self.MODES[mode])
        alone = library_results(problem, tensors)
        torch.set_num_threads(4)
        for _ in range(5):
            assert_same_bits(library_results(problem, tensors), alone, "4 threads")
        ctypes.CDLL(None).fesetround(0)
        assert not torch.equal(alone.output, nearest.output), "the mode was meant to matter"
        assert_same_bits(library_results(problem, tensors), nearest, "to nearest again")

    @pytest.mark.parametrize("mode", MODES)
    def test_products_with_the_padding(self, mode):
        """Rounding down, +0 and a product of -0 are -0: a product that is left out in one format,
        or on one instruction set, would show."""
        input, weight = torch.zeros(1, 3, 7, 7), torch.ones(72, 3, 3, 3)
        weight[:, :, 0, 0] = -1
        grad_output = torch.zeros(1, 72, 7, 7)
        ctypes.CDLL(None).fesetround(self.MODES[mode])
        results = []
        for format in (torch.contiguous_format, torch.channels_last):
            x = input.to(memory_format=format).requires_grad_()
            w = weight.to(memory_format=format).requires_grad_()
            output = conv2d_ext.conv2d(x, w, padding=1)
            gradients = torch.autograd.grad(output, (x, w), grad_output)
            results.append([result.detach().contiguous() for result in (output, *gradients)])
        ctypes.CDLL(None).fesetround(0)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*results, strict=True))
        assert torch.signbit(results[0][0][0, 0, 0, 0]).item() == (mode == "downward")


class TestFlushDenormal:
    """Worker threads treat denormal numbers as the calling thread does."""

    @pytest.fixture(autouse=True)
    def _restore(self):
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU cannot flush denormal numbers")
        torch.set_flush_denormal(False)
        yield
        torch.set_flush_denormal(False)

    @pytest.mark.parametrize("flush", [True, False], ids=["flushed", "kept"])
    @pytest.mark.parametrize("problem", [real_layer("resnet50 64@56-64/k3p1").shrunk(28)], ids=str)
    def test_all_threads(self, problem, flush):
        # Normal operands, denormal products: what is flushed is what the engine computes.
        operands = Tensors(
            torch.full(problem.input_shape, 1e-20),
            torch.full(problem.weight_shape, 1e-20),
            None,
            torch.full(problem.output_shape, 1e-20),
        )
        torch.set_num_threads(4)
        torch.set_flush_denormal(flush)
        results = library_results(problem, operands)
        torch.set_flush_denormal(False)
        for name, result in zip(Results._fields[:3], results[:3], strict=True):
            zeros = (result == 0).sum().item()
            assert zeros == (result.numel() if flush else 0), name


# Depthwise and grouped problems whose channels are innermost have drivers and packers of their own:
# every row of taps that a micro-kernel is compiled for and one that none is, more than one chain,
# borders wider than the image, groups that are no multiple of a vector.
_INNER = [
    Problem("k3", 2, 72, (15, 23), 72, (3, 3), padding=(1, 1), groups=72),
    Problem("k3s2", 2, 40, (15, 22), 40, (3, 3), (2, 2), (1, 1), groups=40),
    Problem("k5s2", 3, 21, (9, 30), 21, (5, 5), (2, 2), (2, 2), groups=21),
    Problem("k7", 1, 64, (7, 7), 64, (7, 7), padding=(3, 3), groups=64),
    Problem("k7s2", 1, 17, (14, 33), 17, (7, 7), (2, 2), (3, 3), groups=17),
    Problem("k2", 2, 33, (6, 11), 33, (2, 2), groups=33),
    Problem("k4", 2, 33, (8, 11), 33, (4, 4), padding=(1, 2), groups=33),
    Problem("k6", 1, 16, (9, 12), 16, (6, 6), padding=(5, 5), groups=16),
    Problem("1x3", 1, 24, (9, 12), 24, (1, 3), (1, 2), groups=24),
    Problem("3x1", 1, 24, (9, 12), 24, (3, 1), (2, 1), groups=24),
    Problem("dilated", 2, 32, (12, 17), 32, (3, 3), (1, 1), (2, 2), (2, 2), groups=32),
    Problem("dilated and strided", 2, 32, (12, 17), 32, (3, 3), (2, 2), (2, 2), (2, 2), groups=32),
    Problem("two chains", 1, 20, (12, 17), 20, (9, 9), padding=(4, 4), groups=20),
    Problem("one pixel", 2, 48, (3, 3), 48, (3, 3), groups=48),
    Problem("wide rows", 1, 16, (3, 300), 16, (3, 3), padding=(1, 1), groups=16),
    # Pixels of 4 and of 2 KiB (float32) are copied.
    Problem("1024 groups", 2, 1024, (5, 7), 1024, (3, 3), padding=(1, 1), groups=1024),
    Problem("512 groups", 1, 512, (7, 6), 512, (5, 5), (2, 1), (2, 2), groups=512),
    Problem("32 groups of 4", 2, 128, (9, 11), 128, (3, 3), padding=(1, 1), groups=32),
    Problem("32 groups of 8", 1, 256, (7, 9), 256, (3, 3), (2, 2), (1, 1), groups=32),
    Problem("32 groups of 16", 1, 512, (5, 6), 512, (3, 3), padding=(1, 1), groups=32),
    Problem("20 groups of 2 to 4", 2, 40, (9, 11), 80, (2, 2), groups=20),
    Problem("20 groups of 1 to 2", 2, 20, (9, 11), 40, (2, 3), groups=20),
    Problem("20 groups of 3 to 4", 2, 60, (9, 11), 80, (3, 3), groups=20),
    Problem("17 groups of 8 to 2", 1, 136, (6, 7), 34, (1, 1), groups=17),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("problem", _INNER, ids=str)
def test_groups_in_either_format(problem, dtype, device):
    tensors = make_tensors(problem, dtype, device=device)
    expected = library_results(problem, tensors)
    inner = Tensors(
        *(t if t is None else VIEWS["channels_last"](t) if t.dim() == 4 else t for t in tensors)
    )
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert_same_bits(
            library_results(problem, inner), expected, f"channels_last, {threads} threads"
        )
