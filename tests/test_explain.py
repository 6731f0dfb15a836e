"""explain and build_config: what they say agrees with what happens."""

from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess

import pytest
import torch
from torch_versions import not_in_older

import conv2d_ext
from conv2d_ext import _C, testing
from conv2d_ext.functional import _explanation
from conv2d_ext.testing import Problem, make_tensors, real_layer

DIRECTIONS = ("forward", "grad_input", "grad_weight")
PROBLEMS = [
    problem
    for problem in testing.SMALL_PROBLEMS
    if problem.batch and (len(problem.padding) != 4 or problem.padding == "same")
]


def _operands(problem, dtype):
    """Whose values no plan depends on."""
    shapes = (problem.input_shape, problem.weight_shape, (problem.out_channels,))
    input, weight, bias = (torch.zeros(shape, dtype=dtype) for shape in shapes)
    return input, weight, bias if problem.bias else None


def _explain(problem, dtype=torch.float32, memory_format=torch.contiguous_format):
    input, weight, bias = _operands(problem, dtype)
    input, weight = (t.contiguous(memory_format=memory_format) for t in (input, weight))
    return conv2d_ext.explain(input, weight, bias, **problem.call_args())


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_problem(problem):
    plan = _explain(problem)
    assert plan.input_size == problem.input_shape
    assert plan.weight_size == problem.weight_shape
    assert plan.output_size == problem.output_shape
    assert (plan.stride, plan.padding, plan.dilation, plan.groups) == (
        problem.stride, problem.padding4, problem.dilation, problem.groups
    )  # fmt: skip
    m, n, k = problem.gemm_mnk
    if "in bands" in plan.forward.engine:
        # The band of the most products; there may be a single one, with some of the taps.
        assert plan.forward.gemm_m == m
        assert plan.forward.gemm_n <= n
        assert plan.forward.gemm_k <= k
        assert (plan.forward.gemm_n, plan.forward.gemm_k) != (n, k)
        return
    assert plan.forward.gemm_k == k
    assert {plan.forward.gemm_m, plan.forward.gemm_n} == {m, n}


def test_who_was_asked_before():
    """In order, each with its reason; the one that computes is not among them."""
    plan = _explain(Problem("dense", 1, 8, (9, 9), 16, (3, 3))).forward
    names, reasons = zip(*plan.candidates, strict=True)
    assert names[0].startswith("depthwise")
    assert plan.engine not in names
    assert all(reasons)
    assert all(f"not {name}: {reason}" in str(plan) for name, reason in plan.candidates)
    hash(plan)  # frozen, with all it holds


@pytest.mark.parametrize("dilation", [1, 2, 12], ids=str)
def test_bands(dilation):
    """Only where taps lie in the padding at many positions."""
    problem = Problem(
        "bands", 1, 8, (40, 33), 16, (3, 3), padding=(dilation,) * 2, dilation=(dilation,) * 2
    )
    assert ("in bands" in _explain(problem).forward.engine) == (dilation == 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128], ids=str)
@pytest.mark.parametrize("problem", [*PROBLEMS, testing.POST], ids=str)
def test_each_direction(problem, dtype):
    plan = _explain(problem, dtype)
    assert plan.dtype == dtype
    for name in DIRECTIONS:
        direction = getattr(plan, name)
        assert direction.engine
        assert direction.micro_kernel
        assert direction.isa == conv2d_ext.build_config()["isa"]
        assert 0 <= direction.workspace_bytes_per_thread <= 4 * 2**20
        # The chains cover the sum, and none of them is empty.
        length, pieces = direction.k_segment_length, direction.k_segments
        assert pieces <= direction.gemm_k <= pieces * length


@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 64])
def test_bfloat16_products_in_pairs(channels, groups):
    """Where the CPU has them, and only where a group has pairs of channels that lanes run beside;
    everywhere else it says why not."""
    problem = Problem(
        "pairs", 1, groups * channels, (9, 11), 64 * (1 if groups > 1 else 2), (3, 3), groups=groups
    )
    plan = _explain(problem, torch.bfloat16)
    native = plan.forward.isa == "avx512_bf16" and channels > 1 and groups == 1
    # (AMX takes taps as channels: in grad_weight all, in forward those of a row.)
    tiles = plan.forward.isa.startswith("amx") and groups == 1 and channels > 1
    assert ("pairs" in plan.forward.engine) == native
    assert ("AMX" in plan.forward.engine) == tiles
    assert plan.forward.micro_kernel.startswith(
        "amx_ukernel_bf16_" if tiles else "gemm_ukernel_bf16_" if native else "gemm_ukernel_f32_"
    )
    assert bool(plan.forward.refused) != (native or tiles)
    assert bool(plan.grad_weight.refused) != (native or tiles)


@pytest.mark.parametrize(
    ("channels", "filters", "taken"), [(8, 8, True), (16, 16, True), (8, 24, False), (6, 8, False)]
)
def test_bfloat16_pairs_with_vectors_over_groups(channels, filters, taken):
    """In channels_last, of groups whose words of two channels are transposed in registers."""
    torch.set_num_threads(1)  # several would have less than an item each
    groups = 16
    problem = Problem(
        "pairs", 1, groups * channels, (9, 11), groups * filters, (3, 3), groups=groups
    )
    plans = [
        _explain(problem, torch.bfloat16, memory_format)
        for memory_format in (torch.channels_last, torch.contiguous_format)
    ]
    if plans[0].forward.isa != "avx512_bf16":
        pytest.skip("no pairs in use")
    engines = ["over groups, bfloat16 products in pairs" in plan.forward.engine for plan in plans]
    assert engines == [taken, False]
    if taken:
        assert plans[0].forward.micro_kernel == "gemm_ukernel_bf16_6x64__avx512_bf16"
        assert plans[0].forward.work_items == 1


@pytest.mark.parametrize(
    ("filters", "groups", "taken"), [(15, 1, False), (16, 1, True), (62, 2, False), (64, 2, True)]
)
def test_weight_gradients_in_pairs_of_pixels(filters, groups, taken):
    problem = Problem("pairs", 2, 4 * groups, (9, 11), filters, (2, 2), groups=groups)
    plan = _explain(problem, torch.bfloat16).grad_weight
    if plan.isa != "avx512_bf16":
        pytest.skip("not compiled, or another instruction set in use")
    assert ("bfloat16 products in pairs" in plan.engine) == taken
    assert plan.micro_kernel.startswith("gemm_ukernel_bf16_" if taken else "gemm_ukernel_f32_")


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("channels", "filters", "size", "taken"),
    [
        (16, 16, 9, "fiw"),
        (4, 64, 9, "fiw"),
        (3, 64, 9, "fiw"),
        (1, 64, 9, "i"),
        (3, 5, 9, "i"),
        (64, 15, 9, "fi"),
        (64, 3, 9, "fi"),
        (64, 1, 9, "f"),
        (64, 64, 3, ""),
        (200, 40, 9, "fiw"),
    ],
)
def test_amx_tiles(channels, filters, size, taken, channels_last):
    """Of images of more than one result pixel, from 4 channels, or columns of fewer; the format
    decides nothing."""
    if not conv2d_ext.build_config()["isa"].startswith("amx"):
        pytest.skip("no AMX in use")
    problem = Problem("tiles", 2, channels, (size, size), filters, (3, 3))
    input, weight, bias, _ = make_tensors(problem, torch.bfloat16)
    if channels_last:
        input = input.to(memory_format=torch.channels_last)
    plan = conv2d_ext.explain(input, weight, bias, **problem.call_args())
    for name, direction in zip("fiw", DIRECTIONS, strict=True):
        explained = getattr(plan, direction)
        assert ("AMX tiles" in explained.engine) == (name in taken), direction
        assert explained.micro_kernel.startswith("amx_ukernel_bf16_") == (name in taken)
        assert bool(explained.refused) != (name in taken)
        if name in taken:
            assert explained.k_segment_length == 16
    assert conv2d_ext.explain(input.float(), weight.float()).forward.engine.find("AMX") < 0


def test_segments_follow_the_geometry_alone():
    """What fixes the bits is not moved by the thread count, nor the forward's by the batch."""
    problem = Problem("segments", 1, 300, (9, 11), 9, (3, 3))
    torch.set_num_threads(1)
    one = _explain(problem)
    torch.set_num_threads(4)
    four = _explain(problem)
    batch = _explain(problem.with_batch(8))
    for name in DIRECTIONS:
        for field in ("k_segments", "k_segment_length", "engine", "isa"):
            assert getattr(getattr(one, name), field) == getattr(getattr(four, name), field)
            if name != "grad_weight":
                assert getattr(getattr(one, name), field) == getattr(getattr(batch, name), field)
    assert one.forward.k_segments > 1


@pytest.mark.parametrize("kernel", [3, 4, 6, 7])
@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_follows_the_memory_format(kernel, stride):
    """Which engine runs may follow the layout, and the text says it; the order of summation not."""
    problem = Problem(
        "depthwise", 2, 72, (20, 41), 72, (kernel, kernel), (stride, stride), groups=72
    )
    input, weight, bias, _ = make_tensors(problem, torch.float32)
    planar = conv2d_ext.explain(input, weight, bias, **problem.call_args())
    input = input.to(memory_format=torch.channels_last)
    inner = conv2d_ext.explain(input, weight, bias, **problem.call_args())
    for name in DIRECTIONS:
        one, other = getattr(planar, name), getattr(inner, name)
        if name == "grad_input" and stride == 2:
            assert one.engine == "depthwise, vectors over the pixels of two phases"
            assert one.micro_kernel.startswith("strided_ukernel_f32_")
            assert one.work_items >= 2 * 72
        else:
            assert one.engine == "implicit GEMM, vectors over groups"
        assert other.engine == "depthwise, vectors over groups as they lie in memory"
        assert (one.k_segments, one.k_segment_length) == (other.k_segments, other.k_segment_length)
        assert other.work_items > 0
        assert 0 < other.workspace_bytes_per_thread <= 4 * 2**20
    assert inner.forward.micro_kernel.startswith("depthwise_ukernel_f32_7x") == (
        (kernel in (3, 7) or (kernel == 4 and stride == 1)) and inner.forward.k_segments == 1
    )
    columns = {4: 2, 6: 3}.get(kernel, kernel)
    shared = stride if columns > stride else 0
    assert inner.grad_weight.micro_kernel.startswith("depthwise_weight_ukernel_f32_")
    assert f"x{columns}s{shared}__" in inner.grad_weight.micro_kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_depthwise_weight_gradients_widen_as_they_load(dtype):
    problem = Problem("depthwise", 1, 64, (9, 11), 64, (3, 3), padding=(1, 1), groups=64)
    plan = _explain(problem, dtype, torch.channels_last).grad_weight
    if plan.isa == "portable":
        pytest.skip("the portable kernels have no vectors over groups as they lie")
    assert plan.engine == "depthwise, vectors over groups as they lie in memory"
    assert "widened to float32 as loaded" in plan.refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_depthwise_taps_that_meet_no_pixel_are_not_in_the_kernel(dtype):
    """They are zeros of one chain, whose length stays."""
    problem = Problem("small", 32, 64, (2, 2), 64, (7, 7), padding=(3, 3), groups=64)
    tensors = make_tensors(problem, dtype, memory_format=torch.channels_last)
    plan = conv2d_ext.explain(*tensors[:3], **problem.call_args())
    for one in (plan.forward, plan.grad_input):
        assert one.micro_kernel.startswith("depthwise_ukernel_f32_7x3s1__")
        assert (one.gemm_k, one.k_segments, one.k_segment_length) == (49, 1, 49)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_depthwise_gradients_of_short_rows_run_over_groups(dtype):
    """In planes of rows that leave vectors half empty; of fewer groups than lanes they do not."""
    for groups, engine in (
        (72, "implicit GEMM, the phases of the stride together"),
        (2, "depthwise, vectors over the pixels of two phases"),
    ):
        problem = Problem("short", 2, groups, (20, 9), groups, (3, 3), (2, 2), groups=groups)
        input, weight, bias, _ = make_tensors(problem, dtype)
        plan = conv2d_ext.explain(input, weight, bias, **problem.call_args())
        assert plan.grad_input.engine == engine
        assert plan.grad_input.k_segments == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("filters", [16, 21, 64])
def test_one_channel_is_stored_as_it_is_summed(filters, dtype):
    """From one channel to many, results of channels_last need vectors over channels: vectors over
    pixels would transpose each of them for a few products."""
    if conv2d_ext.build_config()["isa"] == "portable":
        pytest.skip("portable code has no vectors over pixels")
    problem = Problem("one channel", 1, 1, (40, 48), filters, (3, 3), padding=(1, 1))
    turned = Problem("to one channel", 1, filters, (40, 48), 1, (3, 3), padding=(1, 1))
    for name, chosen in (("forward", problem), ("grad_input", turned)):
        input, weight, bias, _ = make_tensors(chosen, dtype)
        planar = conv2d_ext.explain(input, weight, bias, **chosen.call_args())
        input = input.to(memory_format=torch.channels_last)
        weight = weight.to(memory_format=torch.channels_last)
        inner = conv2d_ext.explain(input, weight, bias, **chosen.call_args())
        assert getattr(inner, name).engine == "implicit GEMM, vectors over result channels"
        assert getattr(planar, name).engine == "implicit GEMM, vectors over pixels"


@pytest.mark.parametrize(
    ("groups", "channels", "filters", "width"),
    [(1, 64, 12, 14), (1, 64, 8, 8), (14, 24, 24, 14), (8, 24, 24, 16)],
)
def test_rows_shorter_than_a_vector(groups, channels, filters, width):
    """Over their pixels a panel has one vector, whose sums are too few to keep the FMA units busy.
    Rows of several vectors do better than few channels."""
    isa = conv2d_ext.build_config()["isa"]
    if not isa.startswith(("avx512", "amx")):
        pytest.skip("other vectors have other lengths")
    inputs, outputs = groups * channels, groups * filters
    problem = Problem("", 2, inputs, (14, width), outputs, (3, 3), (1, 1), (1, 1), groups=groups)
    assert _explain(problem).forward.engine != "implicit GEMM, vectors over pixels"
    wide = Problem("", 2, 64, (14, 64), 4, (3, 3), (1, 1), (1, 1))
    assert _explain(wide).forward.engine == "implicit GEMM, vectors over pixels"


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_smaller_operand_of_a_weight_gradient_is_packed(dtype, stride):
    """From few channels to many the weight gradient's transpose is computed, of the same bits."""
    if conv2d_ext.build_config()["isa"] == "portable":
        pytest.skip("portable code reads no operand in place")
    few, many = 48, 160
    size = 17 * stride, 15 * stride
    for channels, filters in ((few, many), (many, few)):
        problem = Problem("1x1", 2, channels, size, filters, (1, 1), stride=(stride, stride))
        planar = make_tensors(problem, dtype)
        results = []
        for memory_format in (torch.contiguous_format, torch.channels_last):
            input, weight = (t.to(memory_format=memory_format) for t in planar[:2])
            plan = conv2d_ext.explain(input, weight, None, **problem.call_args()).grad_weight
            # Planes of few pixels cost more to transpose.
            vectors_over = (
                "input" if memory_format == torch.channels_last and filters == many else "result"
            )
            assert plan.engine == f"implicit GEMM, vectors over {vectors_over} channels"
            assert {plan.gemm_m, plan.gemm_n} == {few, many}
            weight.requires_grad_()
            output = conv2d_ext.conv2d(input, weight, None, **problem.call_args())
            grad_output = planar.grad_output.to(memory_format=memory_format)
            results += torch.autograd.grad(output, weight, grad_output)
        assert torch.equal(*results)


@pytest.mark.parametrize("problem", testing.FEW_PLANES, ids=str)
def test_few_planes(problem):
    """Many planes to few, forward or backward; where 16 bits would be widened, smaller ones too.

    With vectors of 64 bytes only to one, or from sources that caches don't hold."""
    plan, half = _explain(problem), _explain(problem, torch.bfloat16)
    few = "1x1 from many planes to few, plane by plane"
    name = "grad_input" if problem.in_channels == 1 else "forward"
    isa = conv2d_ext.build_config()["isa"]
    tiles = "implicit GEMM, AMX tiles of bfloat16"
    takes_tiles = isa.startswith("amx") and problem.groups == 1
    assert getattr(half, name).engine == (tiles if takes_tiles else few)
    wide = not isa.startswith(("avx2", "portable"))
    small = problem.in_channels == 7 or (wide and getattr(plan, name).gemm_m > 1)
    assert (getattr(plan, name).engine == few) == (not small)
    if wide:
        large = dataclasses.replace(problem, in_size=(700, 703))
        streamed = problem.in_channels * 700 * 703 >= 4 * 2**20
        assert getattr(_explain(large), name).engine == few or not streamed
    for direction in (getattr(plan, name), getattr(half, name)):
        if direction.engine == few:
            columns = 4 if problem.in_channels == 7 else 8
            assert direction.micro_kernel.startswith(
                f"plane_ukernel_f32_{direction.gemm_m}x{columns}__"
            )
            assert direction.tile_pixels > 0
            assert direction.workspace_bytes_per_thread <= 2**18


def test_whole_planes_name_their_micro_kernel():
    """Where vectors have 64 bytes and L1 has 12 ways of 64 sets (limits.h)."""
    wide = conv2d_ext.build_config()["isa"].startswith(("avx512", "amx"))
    l1_bytes = int(subprocess.check_output(["getconf", "LEVEL1_DCACHE_SIZE"]) or 0)
    whole = wide and l1_bytes >= 12 * 4096
    weight = torch.randn(64, 64, 1, 1)
    plan = conv2d_ext.explain(torch.randn(1, 64, 28, 28), weight).forward
    assert plan.micro_kernel.startswith("whole_plane_ukernel_f32_8x48__") == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("results", range(1, 8))
def test_few_channels_by_columns(results, dtype):
    """Pixels whose channels lie side by side; 3, 5 results are computed as 4, 6."""
    isa = conv2d_ext.build_config()["isa"]
    if isa.startswith("portable"):
        pytest.skip("transposes nothing in registers")
    problem = Problem("1x1", 1, 40, (3, 70), results, (1, 1))
    input, weight = (
        t.to(memory_format=torch.channels_last) for t in make_tensors(problem, dtype)[:2]
    )
    most = 6 if dtype == torch.float32 else 4
    computed = results + (results in (3, 5))
    kernel = f"column_ukernel_{'f64' if dtype == torch.float64 else 'f32'}_{computed}x"

    def takes_columns(**options: int | tuple[int, int]) -> bool:
        plan = conv2d_ext.explain(input, weight, None, **options).forward
        return plan.micro_kernel.startswith(kernel)

    assert takes_columns() == (results <= most)
    assert not takes_columns(padding=1)
    assert not takes_columns(stride=(1, 6))  # rows of 12 pixels: fewer than four vectors


@pytest.mark.parametrize("problem", testing.STRIDED, ids=str)
def test_phases_of_the_stride(problem):
    """Together, in channels_last on small images alone; the order of summation is the same."""
    torch.set_num_threads(1)  # more threads cut tiles finer
    large = dataclasses.replace(problem, in_size=(300, 290))
    together = "implicit GEMM, the phases of the stride together"
    few, bands = _explain(problem).grad_input, _explain(large).grad_input
    input, weight = (t.to(memory_format=torch.channels_last) for t in make_tensors(large)[:2])
    many = conv2d_ext.explain(input, weight, **large.call_args()).grad_input
    assert few.engine == together
    # Planes with two phases along a row are cut into bands.
    assert problem.stride[1] == 2
    assert bands.engine == together
    assert bands.tile_rows < 300 // problem.stride[0]
    assert bands.workspace_bytes_per_thread <= 4 * 2**20
    assert few.micro_kernel.startswith("gemm_ukernel_f32_")
    assert few.tile_pixels == few.gemm_n == problem.batch * few.tile_rows * few.tile_cols
    assert _explain(problem.with_batch(100)).grad_input.engine == few.engine
    assert few.workspace_bytes_per_thread <= 4 * 2**20
    assert many.engine.startswith("implicit GEMM, vectors over ")
    assert (many.k_segments, many.k_segment_length) == (few.k_segments, few.k_segment_length)
    assert _explain(problem, torch.complex64).grad_input.engine.startswith("implicit GEMM, vectors")


def test_phases_of_large_results_run_a_few_images_at_a_time():
    """So that each finds in the caches what the one before has written beside it."""
    problem = Problem("128 groups", 5, 512, (48, 48), 512, (3, 4), (2, 3), (1, 1), groups=128)
    input, weight, *_ = make_tensors(problem)

    def plan(images):
        return conv2d_ext.explain(input[:images], weight, **problem.call_args()).grad_input

    torch.set_num_threads(1)
    one, five = plan(1), plan(5)
    # 4.7 MB an image. Otherwise several would share a tile.
    assert five.tile_images == 1
    assert (five.work_items, five.gemm_n) == (5 * one.work_items, 5 * one.gemm_n)
    torch.set_num_threads(2)
    two, three, five = plan(2), plan(3), plan(5)
    assert five.work_items == three.work_items + two.work_items
    assert five.gemm_n == three.gemm_n + two.gemm_n


def test_products_with_the_padding_are_left_out_where_there_are_enough():
    """At 7 x 7 they are 18 % of a 3 x 3 layer's, at 112 x 112 1 %."""

    def listed(problem):
        plan = _explain(problem)
        if plan.forward.isa == "portable":
            pytest.skip("the portable kernels multiply all padding")
        return ["_listed__" in getattr(plan, name).micro_kernel for name in DIRECTIONS]

    torch.set_num_threads(1)  # of several each may have a panel too narrow for it
    small = Problem("small", 1, 48, (7, 7), 64, (3, 3), padding=(1, 1))
    assert listed(small) == [True, True, True]
    assert listed(dataclasses.replace(small, in_size=(112, 112))) == [False, False, False]
    # Beyond grad_output's border there is padding all the same.
    assert listed(dataclasses.replace(small, padding=(0, 0))) == [False, True, False]


@pytest.mark.parametrize("problem", testing.ONE_PIXEL, ids=str)
def test_one_result_pixel(problem):
    """The forward's order, hence its kernel, is the same for every batch."""
    plan, large = _explain(problem), _explain(problem.with_batch(300))
    assert plan.forward.micro_kernel.startswith("dot_ukernel_f32")
    assert large.forward.engine == plan.forward.engine
    assert large.forward.k_segments == plan.forward.k_segments
    assert large.forward.workspace_bytes_per_thread <= 4 * 2**20
    assert large.grad_weight.micro_kernel.startswith("gemm_ukernel")
    if problem.input_shape[2:] == problem.weight_shape[2:]:
        assert plan.grad_input.micro_kernel.startswith("row_ukernel_f32")
        assert plan.grad_weight.micro_kernel.startswith("row_ukernel_f32")
    assert _explain(problem, torch.complex64).forward.micro_kernel.startswith("gemm_ukernel_c64")


@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "channels_last"])
def test_gradients_of_one_pixel_beside_the_padding(channels_last):
    """Small batches gather the patch, or scatter it, and read the weight once; its rows have 64
    elements at least. Channels that lie side by side are rows as they lie."""
    if conv2d_ext.build_config()["isa"].startswith("portable"):
        pytest.skip("not compiled")
    memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def engines(batch, channels):
        problem = Problem("one pixel", batch, channels, (2, 2), 24, (3, 3), (2, 2), (1, 1))
        tensors = make_tensors(problem, torch.float32)
        input, weight = (t.to(memory_format=memory_format) for t in tensors[:2])
        plan = conv2d_ext.explain(input, weight, None, **problem.call_args())
        for direction in (plan.grad_input, plan.grad_weight):
            assert direction.engine not in dict(direction.candidates)
        return plan.grad_input.engine, plan.grad_weight.engine

    rows = "rows times factors"
    assert engines(1, 32) == engines(8, 32) == (rows, rows)
    by_taps, packed = engines(9, 32)
    assert (by_taps == rows) == channels_last
    assert packed.startswith("implicit GEMM")
    assert engines(1, 7)[1].startswith("implicit GEMM")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("problem", testing.PATCH_LAYERS, ids=str)
def test_patch_layers(problem, dtype):
    """Every tap of a channel is a result channel of the input gradient's one GEMM; bfloat16, too,
    is multiplied as float32 there."""
    plan = _explain(problem, dtype).grad_input
    _, _, out_h, out_w = problem.output_shape
    taps = math.prod(problem.kernel)
    assert plan.gemm_m == problem.in_channels // problem.groups * taps
    assert plan.gemm_n == problem.batch * out_h * out_w
    assert plan.gemm_k == problem.out_channels // problem.groups
    assert plan.micro_kernel.startswith("gemm_ukernel_f32_")
    assert ("patch layers" in plan.refused) == (
        dtype == torch.bfloat16 and plan.isa in ("avx512_bf16", "amx", "amx_emulated")
    )


@pytest.mark.parametrize(
    ("stride", "dilation", "micro_kernel"),
    [
        (1, 2, "depthwise_ukernel_f32_7x3s1"),
        (1, 3, "depthwise_ukernel_f32_7x3s1"),
        (2, 4, "depthwise_ukernel_f32_7x3s1"),
        (2, 3, "depthwise_ukernel_f32_7x3s2"),
        (3, 2, "gemm_ukernel"),
        (1, 12, "gemm_ukernel"),
    ],
)
def test_dilated_depthwise_rows_have_the_micro_kernels_of_others(stride, dilation, micro_kernel):
    """Unless too few pixels make up a run, or neighbours in it are too many taps apart."""
    input = torch.randn(1, 64, 40, 40).to(memory_format=torch.channels_last)
    weight = torch.randn(64, 1, 3, 3)
    plan = conv2d_ext.explain(
        input, weight, stride=stride, padding=dilation, dilation=dilation, groups=64
    ).forward
    if not plan.engine.startswith("depthwise"):
        pytest.skip("portable code has no such micro-kernels")
    assert plan.micro_kernel.startswith(micro_kernel)


@pytest.mark.parametrize(
    ("size", "kernel"), [((1, 1800), (1, 3)), ((4, 400), (3, 3)), ((56, 56), (1, 1))]
)
def test_threads_share_few_rows_of_depthwise_layers(size, kernel):
    input = torch.randn(1, 64, *size).to(memory_format=torch.channels_last)
    torch.set_num_threads(2)
    plan = conv2d_ext.explain(input, torch.randn(64, 1, *kernel), padding="same", groups=64).forward
    if not plan.engine.startswith("depthwise"):
        pytest.skip("portable code has no such driver")
    assert plan.work_items >= 8


@pytest.mark.parametrize("threads", [2, 8])
@pytest.mark.parametrize(
    ("channels", "size", "results", "kernel"),
    [
        (192, 28, 48, 3),
        (64, 56, 64, 3),
        (256, 14, 256, 3),
        (64, 48, 256, 1),
        (256, 65, 21, 1),
        (48, 28, 48, 3),
    ],
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_threads_share_a_single_image(channels, size, results, kernel, threads, memory_format):
    """Where result channels don't suffice pixels are cut, too, and in weight gradients columns."""
    input = torch.randn(1, channels, size, size).contiguous(memory_format=memory_format)
    weight = torch.randn(results, channels, kernel, kernel)
    torch.set_num_threads(threads)
    plan = conv2d_ext.explain(input, weight, padding="same")
    for direction in (plan.forward, plan.grad_input, plan.grad_weight):
        assert direction.work_items >= max(2, 3 * threads // 4)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("channels", "results", "size"), [(3, 4, 12), (3, 16, 8), (16, 16, 4)])
def test_tiny_calls_wake_no_threads(channels, results, size, memory_format):
    """Waking a thread takes longer than such a call."""
    input = torch.randn(1, channels, size, size).contiguous(memory_format=memory_format)
    torch.set_num_threads(8)
    plan = conv2d_ext.explain(input, torch.randn(results, channels, 1, 1))
    assert plan.forward.work_items == plan.grad_weight.work_items == 1


def test_depthwise_phases_are_items_of_one_task():
    """A work item takes a tile of each phase, so there are as many as the largest phase has."""
    input = torch.randn(2, 64, 41, 41).to(memory_format=torch.channels_last)
    weight = torch.randn(64, 1, 3, 3)
    plan = conv2d_ext.explain(input, weight, stride=2, padding=1, groups=64).grad_input
    if not plan.engine.startswith("depthwise"):
        pytest.skip("portable code has no such driver")
    phase = conv2d_ext.explain(
        input[..., ::2, ::2].contiguous(memory_format=torch.channels_last),
        weight,
        padding=1,
        groups=64,
    ).grad_input
    assert plan.work_items == phase.work_items


def test_threads_share_the_output_channels_of_a_weight_gradient():
    """Of few pixels, and of input channels that are too few to share."""
    torch.set_num_threads(2)
    plan = conv2d_ext.explain(torch.randn(1, 96, 14, 14), torch.randn(576, 96, 1, 1)).grad_weight
    assert plan.work_items >= 2


def test_far_taps_of_a_depthwise_row():
    """A tile of as many pixels as usual would read a patch of 8 MiB."""
    input = torch.randn(1, 64, 1, 30000).to(memory_format=torch.channels_last)
    weight = torch.randn(64, 1, 1, 256)
    plan = conv2d_ext.explain(input, weight, dilation=(1, 100), groups=64)
    assert plan.forward.engine.startswith("depthwise")
    assert plan.forward.workspace_bytes_per_thread <= 4 * 2**20
    planar = input.contiguous()
    results = [conv2d_ext.conv2d(x, weight, dilation=(1, 100), groups=64) for x in (input, planar)]
    assert torch.equal(*results)


def test_the_weight_gradient_has_strides_of_its_own():
    """Of a weight with gaps: a call computes it as that of any other weight."""
    input = torch.randn(2, 64, 3, 3)
    weight = torch.randn(32, 128, 3, 3)[:, ::2]
    plan = conv2d_ext.explain(input, weight).grad_weight
    assert plan == conv2d_ext.explain(input, weight.contiguous()).grad_weight
    assert plan.engine == "rows times factors"


def test_counting_chains_takes_no_time():
    """One by one, 2^46 chains would take days."""
    input = torch.zeros(()).expand(1, 2**51, 8, 8)
    weight = torch.zeros(()).expand(8, 2**51, 3, 3)
    plan = conv2d_ext.explain(input, weight).forward
    assert plan.gemm_k == 9 * 2**51
    assert plan.gemm_k <= plan.k_segments * plan.k_segment_length < 2 * plan.gemm_k


def test_nothing_is_computed():
    """An explanation of a convolution that would take hours comes at once."""
    input = torch.ones(1).expand(64, 512, 2**12, 2**12)
    weight = torch.ones(1).expand(512, 512, 7, 7)
    assert conv2d_ext.explain(input, weight, padding="same").output_size == input.shape


def test_meta_tensors_and_no_channels_say_why():
    operands = torch.empty(1, 3, 8, 8, device="meta"), torch.empty(4, 3, 3, 3, device="meta")
    meta = conv2d_ext.explain(*operands)
    nothing = conv2d_ext.explain(torch.empty(1, 0, 8, 8), torch.empty(4, 0, 3, 3))
    for plan in (meta, nothing):
        assert plan.forward is plan.grad_input is plan.grad_weight is None
        assert plan.refused
        assert plan.refused in str(plan)


def test_the_text_names_what_runs():
    plan = _explain(PROBLEMS[1])
    for name in DIRECTIONS:
        assert name in str(plan)
        assert getattr(plan, name).micro_kernel in str(plan)


def test_an_empty_batch():
    plan = _explain(Problem("empty", 0, 3, (6, 7), 4, (3, 2)))
    assert plan.output_size == (0, 4, 4, 6)
    assert "empty" in plan.forward.engine
    assert plan.forward.workspace_bytes_per_thread == 0


def test_errors_are_those_of_conv2d():
    with pytest.raises(RuntimeError, match="expected input"):
        conv2d_ext.explain(torch.ones(1, 3, 8, 8), torch.ones(4, 2, 3, 3))


class TestDescribedGpu:
    """Plans for a GPU that need not be there: what the mapping may follow and what not."""

    pytestmark = pytest.mark.needs_cuda_build

    H200, A100, L4 = (132, 232448), (108, 166912), (58, 101376)
    ORDER = ("k_segments", "k_segment_length", "k_chain_length", "gemm_k", "engine")
    over_dtypes = pytest.mark.parametrize(
        "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str
    )

    @staticmethod
    def _plan(problem, dtype=torch.float32, gpu=H200, view=None):
        input, weight, bias = _operands(problem, dtype)
        if view:
            input, weight = view(input), view(weight)
        args = problem.op_args()
        return _explanation(_C.explain(input, weight, bias, *args, gpu=gpu), input)

    @over_dtypes
    @pytest.mark.parametrize("problem", [*PROBLEMS, testing.POST], ids=str)
    def test_each_direction(self, problem, dtype):
        plan = self._plan(problem, dtype)
        for name in DIRECTIONS:
            direction = getattr(plan, name)
            assert isinstance(direction, conv2d_ext.CudaDirectionExplanation)
            assert direction.kernel in str(plan)
            assert 0 <= direction.workspace_bytes <= 32 * 2**20
            assert 0 <= direction.shared_bytes <= self.H200[1]
            assert 0 < direction.threads <= 1024
            assert direction.ctas > 0
            # Without a split a CTA keeps its sums to itself.
            assert direction.split or direction.packed or direction.workspace_bytes == 0
            # The segments cover the sum, and none of them is empty.
            length, pieces = direction.k_segment_length, direction.k_segments
            assert pieces <= direction.gemm_k <= pieces * length
            assert direction.k_chain_length <= length

    @over_dtypes
    @pytest.mark.parametrize("problem", [*PROBLEMS, testing.POST], ids=str)
    def test_the_order_of_summation_follows_the_geometry_alone(self, problem, dtype):
        """Neither the GPU nor the formats move it, nor the batch that of activations."""
        plan = self._plan(problem, dtype)
        others = [
            self._plan(problem, dtype, gpu=(7, self.A100[1])),
            *(self._plan(problem, dtype, view=view) for view in testing.VIEWS.values()),
        ]
        batch = self._plan(dataclasses.replace(problem, batch=9), dtype)
        for name in DIRECTIONS:
            for other in others if name == "grad_weight" else [*others, batch]:
                for field in self.ORDER:
                    assert getattr(getattr(other, name), field) == getattr(
                        getattr(plan, name), field
                    ), (name, field)

    @over_dtypes
    @pytest.mark.parametrize("problem", testing.LONG_SUMS, ids=str)
    def test_gpus_of_little_shared_memory(self, problem, dtype):
        """Of compute capability 8.6, 8.9 and 12.0: 99 KiB."""
        plan = self._plan(problem, dtype, gpu=self.L4)
        for name in DIRECTIONS:
            assert getattr(plan, name).kernel, getattr(plan, name).engine

    @pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
    def test_a_wanted_kernel_is_taken_where_it_can_be(self, tf32):
        """Each that is compiled, split and not; the order of the sums stays, and so does what other
        calls take afterwards."""
        torch._C._set_cudnn_allow_tf32(tf32)
        problem = real_layer("resnet50 512@7-512/k3p1")
        names = _C.cuda_kernels(torch.empty(0), tf32)
        assert len(set(names)) == len(names)
        own = self._plan(problem)
        assert own.forward.wanted == ""
        try:
            for (variant, name), split in itertools.product(enumerate(names), (0, 1)):
                _C.want_on_cuda(variant, split)
                plan = self._plan(problem)
                for direction in DIRECTIONS:
                    found = getattr(plan, direction)
                    fits = (direction == "grad_weight") == name.startswith("weight")
                    fits = fits and not name.endswith("_by_element")
                    assert (found.kernel == name) == fits
                    # Segments of pixels, where there are several, always run side by side.
                    assert found.split == (bool(split) if direction != "grad_weight" else False)
                    if fits and found.split == bool(split):
                        assert found.wanted == "taken"
                    else:
                        assert found.wanted.startswith("not taken: ")
                    assert f"another kernel wanted: {found.wanted}" in str(plan)
                    for field in self.ORDER:
                        assert getattr(found, field) == getattr(getattr(own, direction), field)
        finally:
            _C.want_on_cuda()
        assert self._plan(problem) == own

    def test_only_the_split_is_wanted(self):
        """Then the kernel is the fastest of those that have it, by the planner's estimate."""
        problem = real_layer("resnet50 512@7-512/k3p1")
        try:
            for split in (0, 1):
                _C.want_on_cuda(split=split)
                wanted = self._plan(problem).forward
                estimates = []
                for variant in range(len(_C.cuda_kernels(torch.empty(0)))):
                    _C.want_on_cuda(variant, split)
                    other = self._plan(problem).forward
                    if other.wanted == "taken":
                        estimates.append(other.estimated_cycles)
                assert wanted.split == bool(split)
                assert wanted.estimated_cycles == min(estimates)
        finally:
            _C.want_on_cuda()

    def test_a_weight_is_packed_where_copies_saved_outweigh_it(self):
        """Of float32, where a call has pixels enough; explain says so. It changes no sum."""
        layer = real_layer("resnet50 256@14-256/k3p1")
        few, many = (self._plan(layer.with_batch(batch)).forward for batch in (1, 64))
        assert (few.packed, many.packed) == (False, True)
        assert "the weight packed" in str(many)
        assert "packed" not in str(few)
        assert many.workspace_bytes >= 4 * 256 * 256 * 9
        assert not self._plan(layer.with_batch(64), torch.bfloat16).forward.packed
        try:
            for wanted in (0, 1):
                _C.want_on_cuda(packed=wanted)
                plan = self._plan(layer)
                assert plan.forward.packed == plan.grad_input.packed == bool(wanted)
                assert plan.forward.wanted == "taken"
                for field in self.ORDER:
                    assert getattr(plan.forward, field) == getattr(few, field)
            assert plan.grad_weight.wanted.startswith("not taken: only a weight of float32")
        finally:
            _C.want_on_cuda()

    @pytest.mark.parametrize("gpu", [(0, 232448), (-1, 232448), (132, -1)])
    def test_a_gpu_has_multiprocessors(self, gpu):
        operands = torch.ones(1, 16, 8, 8), torch.ones(16, 16, 3, 3), None
        with pytest.raises(ValueError, match="gpu: expected the number of SMs"):
            _C.explain(*operands, [1, 1], [0, 0, 0, 0], [1, 1], 1, gpu=gpu)

    @pytest.mark.parametrize(
        "wants", [(-2, -1), (100, -1), (0, 2), (0, -2), (2**40, 0), (0, 0, 2), (0, 0, -2)]
    )
    def test_what_no_plan_could_have_is_refused(self, wants):
        with pytest.raises(ValueError, match="want_on_cuda"):
            _C.want_on_cuda(*wants)
        assert self._plan(testing.POST).forward.wanted == ""

    @pytest.mark.parametrize("batch", [1, 64, 512])
    def test_workspace_of_large_layers(self, batch):
        layers = [layer for model in testing.REAL_LAYERS.values() for layer in model]
        for layer in layers:
            input = torch.empty(1).expand(batch, *layer.input_shape[1:])
            weight = torch.empty(layer.weight_shape)
            described = _C.explain(input, weight, None, *layer.op_args(), gpu=self.H200)
            for name in DIRECTIONS:
                assert described[name]["workspace_bytes"] <= 32 * 2**20, (layer, name)

    def test_math_is_pytorchs_setting(self):
        """Of float32 alone; conftest.py takes TF32 back."""
        assert self._plan(testing.POST).forward.math == "ieee"
        torch._C._set_cudnn_allow_tf32(True)
        assert self._plan(testing.POST).forward.math == "tf32"
        assert self._plan(testing.POST, torch.float64).forward.math == ""

    def test_an_empty_batch(self):
        plan = self._plan(Problem("empty", 0, 3, (6, 7), 4, (3, 2)))
        assert "empty" in str(plan.forward)
        assert plan.forward.workspace_bytes == 0


def test_build_config():
    config = conv2d_ext.build_config()
    assert config["version"] == conv2d_ext.__version__
    assert config["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert config["isa"] in config["compiled_isas"]
    assert config["compiler"]
    assert config["numerics"] >= 1
    assert config["cuda_architectures"] is None or torch.version.cuda
    # What explain reports is what runs by default.
    assert _explain(PROBLEMS[0]).forward.isa == config["isa"]


class _Two:
    def __index__(self) -> int:
        return 2

    def __repr__(self) -> str:
        return "_Two()"


@pytest.mark.parametrize(
    "arguments",
    [
        {"stride": torch.tensor(1.7)},
        pytest.param({"stride": torch.tensor(2)}, marks=not_in_older),
        {"stride": (_Two(), 1)},
        pytest.param({"stride": 2**63}, marks=not_in_older),
        {"stride": (1, 2.0)},
        {"stride": (1, True)},
        {"stride": (True, 1)},
        {"padding": (torch.tensor(0.5), 1)},
        {"padding": (1, None)},
        {"groups": torch.tensor(1.9)},
        {"groups": torch.tensor(2)},
    ],
    ids=str,
)
def test_arguments_are_those_of_conv2d(arguments):
    x, w = torch.randn(2, 4, 8, 8), torch.randn(6, 4 // (2 if "groups" in arguments else 1), 3, 3)
    try:
        output = conv2d_ext.conv2d(x, w, **arguments)
    except (TypeError, ValueError) as error:
        with pytest.raises(type(error)):
            conv2d_ext.explain(x, w, **arguments)
    else:
        assert conv2d_ext.explain(x, w, **arguments).output_size == tuple(output.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_weight_gradients_of_few_channels(memory_format, dtype):
    """Vectors over result channels would have most lanes idle; planes are dearer to transpose."""
    isa = conv2d_ext.build_config()["isa"]
    if isa.startswith("portable"):
        pytest.skip("compiles no vectors over input channels")
    lanes = (32 if isa == "avx2" else 64) // (8 if dtype == torch.float64 else 4)
    most = lanes // (2 if memory_format == torch.channels_last else 8)
    for channels in (most, most + 1):
        problem = Problem("1x1", 2, 64, (9, 14), max(channels, 1), (1, 1))
        tensors = make_tensors(problem, dtype)
        input, weight = (t.to(memory_format=memory_format) for t in tensors[:2])
        plan = conv2d_ext.explain(input, weight, None, **problem.call_args()).grad_weight
        over = "input" if 0 < channels <= most else "result"
        assert plan.engine == f"implicit GEMM, vectors over {over} channels", problem


def test_gradients_of_one_pixel_over_groups():
    """In channels_last groups are lanes, where taps would be a few channels of each group."""
    if conv2d_ext.build_config()["isa"].startswith("portable"):
        pytest.skip("not compiled")
    problem = Problem("one pixel", 2, 96, (2, 2), 96, (3, 3), (2, 2), (1, 1), groups=96)
    tensors = make_tensors(problem, torch.float32)
    input, weight = (t.to(memory_format=torch.channels_last) for t in tensors[:2])
    plan = conv2d_ext.explain(input, weight, None, **problem.call_args()).grad_input
    assert plan.engine == "depthwise, vectors over groups as they lie in memory"
    assert (plan.gemm_m, plan.gemm_k) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_of_one_tap_hold_all_channels(dtype):
    """In channels_last: else sums of several blocks of channels wait beyond L2. A map of fewer
    pixels than a tile is one."""
    torch.set_num_threads(1)  # more threads cut tiles finer
    weight = torch.randn(512, 512, 1, 1).to(dtype)

    def tile_pixels(size: int) -> int:
        input = torch.randn(1, 512, size, size, dtype=dtype)
        input = input.to(memory_format=torch.channels_last)
        forward = conv2d_ext.explain(input, weight).forward
        if "AMX" in forward.engine:
            pytest.skip("AMX tiles have limits of their own")
        return forward.tile_pixels

    assert 75 <= tile_pixels(65) <= 300 * 1024 // (512 * dtype.itemsize)
    assert tile_pixels(14) == 14 * 14
