"""The CUDA kernels, run on the host: right, the same to the bit where they must be, and clean.

The same sources that nvcc compiles, with every shared access checked for races (cuda_host/). What
is promised here: results within the error bounds for every branch, dtype and layout, also under
AddressSanitizer and UBSan; no bit that depends on batch, formats, alignment, machine or the order
of threads; few bank conflicts, by number; and that the checks would notice a bug: seeded ones, in
cuda_host/mutations.py, of which each state of csrc/cuda and cuda_host takes four or five
(CONV2D_EXT_TEST_MUTANTS=all takes all). IEEE float32 takes every case; of the other maths each
state takes every sixth, and of those whose kernels are another type's templates, and complex128,
one type under the sanitizers.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import os
import signal
from collections.abc import Iterator, Sequence

import pytest
import torch
from child import run_python
from cuda_host.build import HERE, run_sanitized
from cuda_host.cases import (
    ARRANGEMENTS,
    BRANCHES,
    DIRECTIONS,
    MACHINES,
    MATHS,
    PROBLEMS,
    SEGMENTS,
    WALKS,
    Math,
    Variation,
    empty_result,
    operands,
    rounded_to_tf32,
    variations,
)
from cuda_host.checks import assert_close, check_accuracy
from cuda_host.engine import Answer, Engine, Execution, Flipped, Machine, build_engine, engine
from cuda_host.mutations import (
    MUTATIONS,
    build_altered,
    build_mutant,
    replaced,
    run_call,
    run_mutant,
    wavefront_ratio,
)
from cuda_host.selftest import Order
from rotation import turn

from conv2d_ext import testing
from conv2d_ext.testing import Oracle, Problem, float64_oracle, make_tensors, unit_roundoff

over_maths = pytest.mark.parametrize("math", MATHS, ids=str)
# One for each template of kernels; the others are compiled from these for other types.
FAMILIES = [m for m in MATHS if m.dtype in (torch.float32, torch.bfloat16, torch.complex64)]
TAKE_ALL = os.environ.get("CONV2D_EXT_TEST_MUTANTS") == "all"
# The others. Each state compiles and runs one of them with sanitizers.
OTHERS = [m for m in MATHS if m not in FAMILIES]
NUMBER = turn("csrc/cuda", "tests/cuda_host")
UNSANITIZED = [] if TAKE_ALL else [m for i, m in enumerate(OTHERS) if i != NUMBER % len(OTHERS)]
# Of the bugs put into the kernels: compiling each takes seconds.
TAKEN = MUTATIONS if TAKE_ALL else MUTATIONS[NUMBER % 16 :: 16]


def with_maths(cases: Sequence, maths: Sequence = MATHS) -> list[tuple]:
    """Every case in IEEE float32; of the other maths' every sixth, which ones with the state of the
    sources."""
    return [
        (case, math)
        for i, case in enumerate(cases)
        for j, math in enumerate(maths)
        if TAKE_ALL or math == MATHS[0] or (NUMBER + i + j) % 6 == 0
    ]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@functools.cache
def _background() -> tuple[concurrent.futures.Future, list[concurrent.futures.Future]]:
    """The run with sanitizers and the mutants' compilation, while other tests run."""
    pool = concurrent.futures.ThreadPoolExecutor(2)

    def sanitized():
        library = build_engine(sanitize=True, without={math.unit for math in UNSANITIZED})
        names = [str(math) for math in MATHS if math not in UNSANITIZED]
        return run_sanitized(str(HERE / "sanitized.py"), str(library), *names)

    sanitized_run = pool.submit(sanitized)
    mutants = [pool.submit(build_mutant, mutation) for mutation in TAKEN]
    pool.shutdown(wait=False)
    return sanitized_run, mutants


@pytest.fixture(scope="module", autouse=True)
def _start_background():
    engine()
    _background()


# ---- matrix products


PRODUCTS = [
    (1, 5, 3, 20), (1, 1, 70, 130), (3, 33, 2, 64), (2, 9, 40, 700), (4, 3, 8, 16), (1, 40, 1, 9)
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "math"), with_maths(PRODUCTS), ids=str)
def test_matrix_products(sizes, math):
    """Values; and a row's bits alone, in a batch, transposed, in every kernel and however split."""
    batch, m, n, k = sizes
    generator = torch.Generator().manual_seed(batch + m + n + k)
    real = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    wide = torch.float64 if math.dtype in real else torch.complex128

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=wide, generator=generator).to(math.dtype)

    mat1, mat2, mats2, bias = draw(batch, m, k), draw(k, n), draw(batch, k, n), draw(n)
    host = engine()
    for second, b in ((mat2, bias), (mat2, None), (mats2, None)):
        whole = host.matmul(mat1, second, b, tf32=math.tf32)
        factors = [mat1, second]
        if "tf32" in whole.plan["kernel"]:
            factors = [rounded_to_tf32(factor) for factor in factors]
        exact = torch.matmul(*(factor.to(wide) for factor in factors))
        magnitude = torch.matmul(*(factor.to(wide).abs() for factor in factors))
        if b is not None:
            exact += b.to(wide)
            magnitude += b.to(wide).abs()
        assert_close(whole.result, Oracle(exact, None, magnitude), f"{sizes}, {math}")
        one = host.matmul(
            mat1[-1:, -1:], second if second.dim() == 2 else second[-1:], b, tf32=math.tf32
        )
        assert torch.equal(bits(one.result), bits(whole.result[-1:, -1:]))
        column = host.matmul(mat1, second[..., -1:], None if b is None else b[-1:], tf32=math.tf32)
        assert torch.equal(bits(column.result), bits(whole.result[..., -1:]))
        strided = host.matmul(mat1.mT.contiguous().mT, second.mT.contiguous().mT, b, tf32=math.tf32)
        assert torch.equal(bits(strided.result), bits(whole.result))
        taken = set()
        for variant, split in ((0, 0), (1, 1), (2, 0)):
            execution = Execution(machine=Machine(variant=variant, split=split))
            other = host.matmul(mat1, second, b, tf32=math.tf32, execution=execution)
            assert torch.equal(bits(other.result), bits(whole.result))
            taken.add(other.plan["kernel"])
        has_one = math.dtype in (torch.float64, torch.complex64, torch.complex128)
        assert len(taken) == (1 if has_one else 3)


# ---- accuracy


@pytest.mark.parametrize(("problem", "math"), with_maths(PROBLEMS), ids=str)
def test_accuracy(problem, math):
    number = PROBLEMS.index(problem) * len(MATHS) + MATHS.index(math)
    variation = next(itertools.islice(variations(), number, None))
    check_accuracy(engine(), problem, math, variation)


@over_maths
def test_chains_of_direct_weight_gradients(math):
    """A thread's sums of more than 256 products take a hundred million multiplications to reach, so
    the kernels are compiled with shorter chains."""
    library = build_altered(
        "kernels.h",
        "constexpr int kDirectChain = 256;",
        "constexpr int kDirectChain = 12;",
        unit="direct.cu",
    )
    problem = next(p for p in SEGMENTS if p.name == "depthwise, pixels in segments")
    check_accuracy(Engine(library), problem, math, next(variations()))


def test_long_sums_that_have_a_mean():
    """Up to 1024 segments of pixels are added one after the other. Seen to fail, without what the
    additions rounded away: 6.6 roundoffs of grad_weight, 2.8 of grad_bias."""
    problem = Problem("many segments", 1, 9, (190, 190), 9, (1, 1), bias=True)
    tensors = make_tensors(problem, torch.float32)
    positive = tensors._replace(
        input=tensors.input.abs() + 1, grad_output=tensors.grad_output.abs() + 1
    )
    exact = float64_oracle(problem, positive)
    for direction in ("grad_weight", "grad_bias"):
        operands_of = (positive.grad_output, positive.input)[: 1 + (direction == "grad_weight")]
        answer = engine().run(direction, problem, *operands_of)
        error = getattr(exact, direction).max_scaled_error(answer.result)
        assert error <= 1.5 * unit_roundoff(torch.float32), direction


@over_maths
def test_chains_of_weight_gradients(math):
    """With a thousand tiles pixels are not cut, and a CTA adds chains; here for a few tiles."""
    library = Engine(
        build_altered(
            "plan.cpp",
            "constexpr int64_t kWantedWeightTiles = 1024;",
            "constexpr int64_t kWantedWeightTiles = 1;",
            unit="plan.cpp",
        )
    )
    problem = Problem("chains of pixels", 3, 9, (13, 15), 12, (2, 1))
    for variation in itertools.islice(variations(), 4):
        check_accuracy(library, problem, math, variation)
    tensors = make_tensors(problem, math.dtype)
    plan = library.plan("grad_weight", problem, *operands("grad_weight", tensors), tf32=math.tf32)
    assert plan["segments"] == 1
    assert plan["chain_length"] * 2 < plan["gemm_k"]


@functools.cache
def _without_walks() -> Engine:
    unit, rule = "plan.cpp", "if (tiling.kernel == 0) return tiling;"
    altered = rule.replace("if (", "if ((tiling.kernel = 0) == 0 || ")
    return Engine(build_altered(unit, rule, altered, unit=unit))


@pytest.mark.parametrize("math", [MATHS[0], *MATHS[3:5]], ids=str)
@pytest.mark.parametrize("problem", WALKS, ids=str)
def test_walks_have_the_bits_of_the_direct_kernel(problem, math):
    tensors = make_tensors(problem, math.dtype)
    for number, direction in itertools.product(range(6), ("forward", "grad_input")):
        variation = next(itertools.islice(variations(), 7 * number, None))
        answers = [
            run(direction, problem, math, tensors, variation, host)
            for host in (engine(), _without_walks())
        ]
        kernels = [answer.plan["kernel"] for answer in answers]
        assert kernels == ["depthwise_conv", "direct_conv"]
        assert torch.equal(*(bits(answer.result) for answer in answers)), variation


@over_maths
def test_zero_padding_is_multiplied(math):
    """Inf times the zeros of the padding is NaN, as in the reference; nothing is skipped."""
    for channels, groups in ((3, 1), (8, 1), (4, 4)):
        problem = Problem("padded", 1, channels, (3, 4), 8, (3, 3), padding=(1, 1), groups=groups)
        tensors = make_tensors(problem, math.dtype)
        tensors.weight[0, 0, 0, 0] = float("inf")
        found = engine().run("forward", problem, tensors.input, tensors.weight, tf32=math.tf32)
        assert found.result[0, 0, 0].isnan().all()
        assert not found.result[0, 1].isnan().any()


# ---- bits


def bits(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return real.contiguous().view(integers[real.element_size()])


def run(direction, problem, math, tensors, variation=None, host: Engine | None = None) -> Answer:
    host = host or engine()
    first, second = operands(direction, tensors)
    bias = tensors.bias if direction == "forward" else None
    if variation is None:
        return host.run(direction, problem, first, second, bias, tf32=math.tf32)
    return host.run(
        direction,
        problem,
        ARRANGEMENTS[variation.first](first),
        ARRANGEMENTS[variation.second](second),
        bias,
        result=empty_result(direction, problem, math.dtype, variation.channels_last),
        tf32=math.tf32,
        execution=variation.execution,
    )


@pytest.mark.parametrize(("problem", "math"), with_maths(BRANCHES, FAMILIES), ids=str)
def test_bits_depend_on_values_alone(problem, math):
    """Not on formats, alignment, order of threads, or machine (hence tiles, and splitting K)."""
    tensors = make_tensors(problem, math.dtype)
    start = BRANCHES.index(problem) * 5 + MATHS.index(math) * 11
    for direction in DIRECTIONS:
        expected = run(direction, problem, math, tensors)
        for variation in itertools.islice(variations(), start, start + 4):
            found = run(direction, problem, math, tensors, variation)
            same = torch.equal(bits(found.result), bits(expected.result))
            assert same, f"{direction}, {variation}: {found.plan} and {expected.plan}"
    expected = engine().run("grad_bias", problem, tensors.grad_output)
    for variation in itertools.islice(variations(), start, start + 4):
        found = engine().run(
            "grad_bias",
            problem,
            ARRANGEMENTS[variation.first](tensors.grad_output),
            execution=variation.execution,
        )
        assert torch.equal(bits(found.result), bits(expected.result)), variation


@pytest.mark.parametrize("direction", ["forward", "grad_input"])
@pytest.mark.parametrize(("problem", "math"), with_maths(BRANCHES, FAMILIES), ids=str)
def test_bits_of_an_image_do_not_depend_on_the_batch(problem, direction, math):
    batch = problem.with_batch(3)
    tensors = make_tensors(batch, math.dtype)
    together = run(direction, batch, math, tensors)
    for n in range(3):
        alone = tensors._replace(
            input=tensors.input[n : n + 1], grad_output=tensors.grad_output[n : n + 1]
        )
        found = run(direction, problem.with_batch(1), math, alone)
        assert torch.equal(bits(found.result[0]), bits(together.result[n]))


# Segments: fewer than are loaded ahead (16, after the first), as many, more; and rows of results
# that are shorter than a CTA, and that one ends inside of.
SEGMENT_COUNTS = (2, 16, 17, 18, 34)
ROWS_OF_RESULTS = ((5, (1, 1)), (9, (3, 5)), (13, (9, 3)), (6, (9, 13)), (20, (5, 8)))


def _results(direction: str, problem: Problem, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Memory for results: contiguous, channels_last, and both behind an odd number of elements."""
    for last, offset in itertools.product((False, True), (0, 1)):
        dense = empty_result(direction, problem, dtype, last)
        memory = torch.full((dense.numel() + offset,), -12345.0, dtype=dtype)
        yield memory.as_strided(dense.shape, dense.stride(), offset)


@pytest.mark.parametrize(("number", "math"), with_maths(range(len(SEGMENT_COUNTS) + 1)), ids=str)
def test_partial_sums_are_added_in_order(number, math):
    """Where segments of K have CTAs of their own, as in a CTA that takes all of them."""
    direction = "forward"
    if number < len(SEGMENT_COUNTS):
        m, pixels = ROWS_OF_RESULTS[number]
        long = Problem("long", 1, 8192, (1, 1), m, (1, 1))
        tensors = make_tensors(long, math.dtype)
        chain = 8192 // engine().plan("forward", long, *tensors[:2], tf32=math.tf32)["segments"]
        channels = chain * SEGMENT_COUNTS[number]
        problem = Problem("segments", 1, channels, pixels, m, (1, 1))
    else:
        # Groups, and phases with fewer results than others, and with fewer taps and segments.
        direction = "grad_input"
        problem = Problem("phases", 1, 22, (5, 7), 560, (3, 3), (2, 2), (1, 1), groups=2)
    tensors = make_tensors(problem, math.dtype)
    bias = tensors.bias if direction == "forward" else None
    answers = [
        engine().run(
            direction,
            problem,
            *operands(direction, tensors),
            bias,
            result=result,
            tf32=math.tf32,
            execution=Execution(machine=Machine(split=split)),
        )
        for split, result in [
            (0, None),
            *((1, result) for result in _results(direction, problem, math.dtype)),
        ]
    ]
    for answer in answers[1:]:
        assert answer.plan["split"]
        if number < len(SEGMENT_COUNTS):
            assert answer.plan["segments"] == SEGMENT_COUNTS[number]
        assert torch.equal(bits(answer.result), bits(answers[0].result))
    assert not answers[0].plan["split"]


WHOLE_SUMS = [math for math in MATHS if math.dtype.itemsize > 2]


@pytest.mark.parametrize("groups", [1, 10])
@pytest.mark.parametrize("number", range(len(SEGMENT_COUNTS)))
def test_partial_sums_of_weight_gradients_are_added_in_order(number, groups):
    """Each image is a segment here, whose gradient is a call's of its own; they are added below,
    with what an addition rounds away."""
    count = SEGMENT_COUNTS[number]
    m, kernel = [(5, (1, 1)), (9, (3, 1)), (1, (2, 2)), (20, (1, 3)), (33, (1, 1))][number]
    side = 16 if groups == 1 else 32
    image = tuple(side + k - 1 for k in kernel)
    channels = 7 if groups == 1 else 10
    problem = Problem(
        "images", count, channels, image, m if groups == 1 else 10, kernel, groups=groups
    )
    for i, math in enumerate(WHOLE_SUMS):
        if not TAKE_ALL and (NUMBER + number + i) % 3 != 0:
            continue
        tensors = make_tensors(problem, math.dtype)
        sum, lost = None, 0
        for n in range(count):
            alone = (tensors.grad_output[n : n + 1], tensors.input[n : n + 1])
            found = engine().run("grad_weight", problem.with_batch(1), *alone, tf32=math.tf32)
            assert found.plan["segments"] == 1
            value = found.result if sum is None else found.result.clone()
            value = torch.view_as_real(value) if math.dtype.is_complex else value
            if sum is None:
                sum = value
                continue
            following = sum + value
            taken = following - sum
            lost = lost + ((sum - (following - taken)) + (value - taken))
            sum = following
        for result in _results("grad_weight", problem, math.dtype):
            found = engine().run(
                "grad_weight",
                problem,
                *operands("grad_weight", tensors),
                result=result,
                tf32=math.tf32,
            )
            assert found.plan["segments"] == count
            assert found.plan["engine"] == (1 if groups == 1 else 2)
            real = torch.view_as_real(found.result) if math.dtype.is_complex else found.result
            assert torch.equal(bits(real), bits(sum + lost)), math


@over_maths
def test_operands_that_repeat_memory(math):
    """Expanded tensors: strides of zero, as autograd's sum() gives them."""
    problem = Problem("expanded", 3, 9, (6, 7), 10, (3, 2), padding=(1, 0))
    drawn = make_tensors(problem, math.dtype)
    tensors = drawn._replace(
        input=drawn.input[:1].expand(problem.input_shape),
        weight=drawn.weight[:, :1].expand(problem.weight_shape),
        bias=drawn.bias[:1].expand(10),
        grad_output=drawn.grad_output[:1, :1, :1, :1].expand(problem.output_shape),
    )
    dense = type(tensors)(*(tensor.contiguous() for tensor in tensors))
    for direction in DIRECTIONS:
        found, expected = (run(direction, problem, math, them) for them in (tensors, dense))
        assert torch.equal(bits(found.result), bits(expected.result)), direction
    found, expected = (
        engine().run("grad_bias", problem, them.grad_output) for them in (tensors, dense)
    )
    assert torch.equal(bits(found.result), bits(expected.result))


@over_maths
def test_bias_of_any_stride(math):
    problem = Problem("bias", 1, 5, (4, 5), 6, (2, 2))
    for groups in (1, 2, 3):
        problem = Problem("bias", 1, 6, (4, 5), 6, (2, 2), groups=groups)
        tensors = make_tensors(problem, math.dtype)
        expected = run("forward", problem, math, tensors).result
        spread = torch.full((18,), float("nan"), dtype=math.dtype)
        spread[::3] = tensors.bias
        for bias in (spread[::3], Flipped(tensors.bias.flip(0), (0,))):
            found = engine().run(
                "forward", problem, tensors.input, tensors.weight, bias, tf32=math.tf32
            )
            assert torch.equal(bits(found.result), bits(expected))


# K of two segments or more in every dtype, in few tiles; for each kind of kernels. Between them, in
# the formats below, they take every pair of ways in which 16-byte vectors are copied.
POINTWISE = Problem("segments of 1 x 1", 1, 648, (4, 6), 16, (1, 1))
EVERY_KERNEL = {
    "conv": (
        ("forward", Problem("segments of groups", 1, 72, (4, 5), 16, (3, 3), padding=(1, 1))),
        ("grad_input", Problem("segments of groups", 1, 16, (4, 5), 72, (3, 3), padding=(1, 1))),
        ("forward", POINTWISE),
        ("grad_input", Problem("segments of 1 x 1", 1, 16, (4, 6), 648, (1, 1))),
    ),
    "conv by_element": (
        ("forward", Problem("segments of elements", 1, 5, (9, 12), 9, (9, 12), padding=(4, 5))),
    ),
    "weight": (
        ("grad_weight", Problem("segments of pixels", 1, 9, (17, 18), 12, (1, 1))),
        ("grad_weight", Problem("segments of pixels", 1, 16, (17, 18), 24, (2, 1))),
    ),
}
NONE, OVER_K, OVER_X = range(3)  # as a plan says how vectors are copied
EVERY_VECTORS = {
    2: {
        "conv": {(NONE, NONE), (NONE, OVER_K), *itertools.product((OVER_K, OVER_X), repeat=2)},
        "weight": {(NONE, NONE), (OVER_X, OVER_X)},
    },
    4: {"conv": {(NONE, NONE), (OVER_X, NONE), (OVER_X, OVER_X)}},
}
FORMATS = (
    ("contiguous", "contiguous"),
    ("channels_last", "channels_last"),
    ("channels_last", "contiguous"),
    ("contiguous", "channels_last"),
)


@over_maths
def test_bits_of_every_kernel(math):
    """Each that is compiled, by its name, for each way of loading; segments of K in one CTA and in
    several (a weight gradient's always have several); the weight where it lies, and packed."""
    ways = EVERY_VECTORS.get(math.dtype.itemsize, {})
    ways_to_read = [(0, formats) for formats in FORMATS]
    if math.dtype == torch.float32:
        ways_to_read += [(1, formats) for formats in FORMATS[:2]]
    expected = {}
    for number, name in enumerate(engine().kernels(math.dtype, tf32=math.tf32)):
        kind = name.split("_gemm")[0] + (" by_element" if name.endswith("_by_element") else "")
        vectors = set()
        for place, (direction, problem) in enumerate(EVERY_KERNEL[kind]):
            if place and not ways:
                continue
            tensors = make_tensors(problem, math.dtype)
            if (kind, place) not in expected:
                expected[kind, place] = run(direction, problem, math, tensors)
            assert expected[kind, place].plan["segments"] > 1
            for split, (packed, formats) in itertools.product((0, 1), ways_to_read):
                machine = Machine(variant=number, split=split, packed=packed)
                execution = Execution(Order.SHUFFLED, number, machine)
                variation = Variation(*formats, formats[0] == "channels_last", execution)
                found = run(direction, problem, math, tensors, variation)
                assert found.plan["kernel"] == name
                assert found.plan["split"] == split or kind == "weight"
                is_packed = found.plan["packed_row"] != 0
                assert is_packed <= packed
                assert found.launches == 1 + found.plan["split"] + is_packed
                same = torch.equal(bits(found.result), bits(expected[kind, place].result))
                assert same, (name, variation)
                vectors.add((found.plan["vector_a"], found.plan["vector_b"]))
        assert vectors == ways.get(kind, {(NONE, NONE)})


# ---- plans


@over_maths
@pytest.mark.parametrize("problem", [*SEGMENTS, *testing.LONG_SUMS], ids=str)
def test_the_order_of_summation_does_not_depend_on_machine_or_batch(problem, math):
    """Segments and chains, as explain prints them. Weight gradients sum over the batch."""
    batches = {batch: problem.with_batch(batch) for batch in (1, 2)}
    drawn = {batch: make_tensors(whole, math.dtype) for batch, whole in batches.items()}
    for direction in DIRECTIONS:
        found = set()
        for machine, batch in itertools.product(MACHINES, batches):
            if direction == "grad_weight" and batch == 2:
                continue
            plan = engine().plan(
                direction,
                batches[batch],
                *operands(direction, drawn[batch]),
                tf32=math.tf32,
                machine=machine,
            )
            found.add((plan["segments"], plan["segment_length"], plan["chain_length"]))
        assert len(found) == 1, (direction, found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_plans_of_vectors_count_their_own_kernel(dtype):
    """Of many tiles: tall warps, and two CTAs an SM also where sums lie beside the ring."""
    of_sm = Machine().shared_bytes + 1024
    for channels, stages in ((32, 3), (256, 2)):
        problem = Problem("many tiles", 64, channels, (28, 28), 256, (3, 3), padding=(1, 1))
        tensors = make_tensors(problem, dtype)
        gathered = engine().plan("forward", problem, tensors.input, tensors.weight)
        assert gathered["stages"] == 2
        last = (t.contiguous(memory_format=torch.channels_last) for t in tensors[:2])
        plan = engine().plan("forward", problem, *last)
        assert plan["kernel"].endswith("128x128x32"), plan
        assert (plan["threads"], plan["stages"]) == (128, stages)
        assert 2 * (plan["shared_bytes"] + 1024) <= of_sm


def test_sizes_beyond_the_kernels_are_refused():
    image = torch.zeros(1, 1, 1, 1).expand(1, 1, 1 << 30, 1)
    problem = Problem("too high", 1, 1, (1 << 30, 1), 1, (1, 1), stride=(1 << 29, 1), bias=False)
    with pytest.raises(AssertionError, match="fewer than 2\\^30 rows"):
        engine().plan("forward", problem, image, torch.zeros(1, 1, 1, 1))


def test_bias_gradients_of_too_many_channels_are_refused():
    """Whose CTAs no grid has: 8 channels each, and one segment of pixels."""
    one = torch.zeros(())

    def plan(channels: int) -> None:
        problem = Problem("many channels", 1, 1, (1, 1), channels, (1, 1), bias=False)
        grad_output, result = one.expand(problem.output_shape), one.expand(channels)
        engine().plan("grad_bias", problem, grad_output, None, result=result)

    plan(8 * (2**31 - 1))
    for channels in (8 * (2**31 - 1) + 1, 2**40):
        with pytest.raises(AssertionError, match="result is too large for one call"):
            plan(channels)


@pytest.mark.parametrize("math", [MATHS[0], MATHS[3]], ids=str)
def test_weight_gradients_over_too_many_pixels_are_refused(math):
    """Expanded tensors reach them: steps of k are counted in 32 bits, to the last segment's end."""
    tile_k = 32 if math.dtype.itemsize == 2 else 16
    most = tile_k * (2**30 - 1)

    def plan(pixels: int) -> dict[str, object]:
        problem = Problem("many images", pixels, 8, (1, 1), 9, (1, 1), bias=False)
        one = torch.zeros((), dtype=math.dtype)
        operands = one.expand(problem.output_shape), one.expand(problem.input_shape)
        return engine().plan("grad_weight", problem, *operands)

    taken = plan(most)
    steps_to_the_end = taken["segments"] * taken["segment_length"] // tile_k
    assert most // tile_k <= steps_to_the_end < 2**31
    for pixels in (tile_k * (2**30 + 1), 2**36, 2**40, 2**58):
        with pytest.raises(AssertionError, match="too many output pixels"):
            plan(pixels)


# ---- bank conflicts

# The most wavefronts for each that the access's size needs, all accesses of a call together.
# Multiplying, which is most of them, takes none: see the test.
BANK_PROBLEM = Problem("banks", 1, 64, (11, 13), 96, (3, 3), padding=(1, 1))
BANK_PROBLEM_FEW = Problem("banks, few channels", 1, 3, (23, 25), 64, (3, 3), (2, 2), (1, 1))
BANK_PROBLEM_DEPTHWISE = Problem("banks, dw", 2, 40, (11, 9), 40, (3, 3), padding=(1, 1), groups=40)


def banks(math: Math, problem: Problem, direction: str, channels_last: bool) -> Answer:
    arrangement = ARRANGEMENTS["channels_last" if channels_last else "contiguous"]
    tensors = make_tensors(problem, math.dtype)
    first, second = map(arrangement, operands(direction, tensors))
    result = empty_result(direction, problem, math.dtype, channels_last)
    execution = Execution(counts_banks=True)
    return engine().run(
        direction, problem, first, second, result=result, tf32=math.tf32, execution=execution
    )


# The most wavefronts for each that accesses of their sizes need, of all accesses of a call. What is
# above 1 comes from filling tiles and storing results.
MOST_WAVEFRONTS = {
    "float32": 1.01,
    "tf32": 1.16,
    "float64": 1.01,
    "bfloat16": 1.10,
    "float16": 1.10,
    "complex64": 1.05,
    "complex128": 1.03,
}
MOST_WAVEFRONTS_DIRECT = {"complex64": 1.27, "complex128": 1.24}  # others 1.12


@over_maths
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bank_conflicts(direction, last, math):
    """Multiplying meets no bank twice; whole calls take few more wavefronts than they must."""
    for problem in (BANK_PROBLEM, BANK_PROBLEM_FEW, BANK_PROBLEM_DEPTHWISE):
        found = banks(math, problem, direction, last)
        kernel = found.plan["kernel"]
        for at in found.traffic:
            if at["file"] == "gemm_policies.cuh":
                assert at["wavefronts"] == at["ideal"], (kernel, at)
        # These share no operand through shared memory.
        if kernel in ("direct_conv", "depthwise_conv"):
            assert not found.traffic
            continue
        if "gemm" in kernel:
            bound = MOST_WAVEFRONTS[str(math)]
            assert any(at["file"] == "gemm_policies.cuh" for at in found.traffic)
        else:
            bound = MOST_WAVEFRONTS_DIRECT.get(str(math), 1.12)
        assert wavefront_ratio(found) <= bound, (kernel, problem)


# ---- the checks themselves


@functools.cache
def _expected(mutation):
    return run_call(mutation, engine())


def test_a_mutant_that_crashes_is_caught_in_silence():
    """Else the output of tests that pass would look like that of tests that fail."""
    program = (
        "import os; from cuda_host import mutations; mutations._compare = lambda *_: os.abort();"
        "by_bits = next(m for m in mutations.MUTATIONS if m.shows != 'sanitizers');"
        "print(mutations.run_mutant(by_bits, None, None))"
    )
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    done = run_python("-X", "faulthandler", "-c", program, env={"PYTHONPATH": path})
    assert (done.stdout, done.stderr) == (f"signal {int(signal.SIGABRT)}\n", "")


def test_every_mutation_applies():
    """Else the line that it broke is another one now, and the mutation has to follow it."""
    for mutation in MUTATIONS:
        assert replaced(mutation)


@pytest.mark.parametrize("mutation", TAKEN, ids=str)
def test_mutations_are_caught(mutation):
    mutant = _background()[1][TAKEN.index(mutation)].result()
    assert run_mutant(mutation, mutant, _expected(mutation))


def test_the_unaltered_kernels_pass_as_no_mutant_may():
    for mutation in TAKEN:
        library = build_engine(
            sanitize=mutation.shows == "sanitizers",
            without={math.unit for math in UNSANITIZED} - {mutation.unit},
        )
        found = run_mutant(mutation, library, _expected(mutation))
        assert not found, (mutation, found)


def test_sanitizers_find_nothing():
    """Every branch and layout under AddressSanitizer and UBSan, tensors in exact blocks; and every
    dtype but for two, other ones for each state, whose kernels are another's templates."""
    done = _background()[0].result()
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > len(BRANCHES) * (len(MATHS) - len(UNSANITIZED))
    assert not done.stderr, done.stderr
