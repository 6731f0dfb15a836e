"""The promise across versions: builds of one number (`build_config()["numerics"]`) give the same
bits, whatever their compiler and torch. tests/golden.json has the digests, golden.py makes them.
"""

from __future__ import annotations

import copy
import math

import exact_values
import golden
import golden_calls
import numpy as np
import pytest
import torch
from observing import Recorder

import conv2d_ext
from conv2d_ext.testing import Problem

COMPILED = conv2d_ext.build_config()["compiled_isas"]


@pytest.fixture(scope="module")
def committed() -> golden.Golden:
    return golden.read()


def test_the_number(committed):
    """If it has risen on purpose, `python tests/golden.py --write` follows."""
    assert conv2d_ext.build_config()["numerics"] == committed.numerics


@pytest.mark.slow
@pytest.mark.parametrize("isa", COMPILED)
def test_bits(isa, committed):
    """Where they change on purpose: csrc/numerics.h, then `python tests/golden.py --write`."""
    found = golden.digests_of(isa)
    if found is None:
        pytest.skip(f"not checked: this CPU has no {isa}")
    unpromised = [name for name in found if golden.family(isa, getattr(torch, name)) is None]
    if unpromised:
        pytest.skip(f"not checked: nobody promises {isa}'s bits on this machine for {unpromised}")
    lines = golden.differences(committed, isa, found)
    assert not lines, f"{len(lines)} differences, among them:\n" + "\n".join(lines[:20])


# What explain calls the ways in which the library computes: each must have a digest.
ENGINES = {
    "forward": {
        "implicit GEMM, vectors over result channels",
        "implicit GEMM, vectors over groups",
        "implicit GEMM, vectors over pixels",
        "in bands without the taps that lie in the padding",
        "1x1 from many planes to few, plane by plane",
        "depthwise, vectors over groups as they lie in memory",
        "one pixel, dot products along the weight's rows",
    },
    "grad_input": {
        "implicit GEMM, vectors over result channels",
        "implicit GEMM, vectors over groups",
        "implicit GEMM, vectors over pixels",
        "implicit GEMM, the phases of the stride together",
        "1x1 from many planes to few, plane by plane",
        "depthwise, vectors over groups as they lie in memory",
        "depthwise, vectors over the pixels of two phases",
        "rows times factors",
    },
    "grad_weight": {
        "implicit GEMM, vectors over result channels",
        "implicit GEMM, vectors over input channels",
        "implicit GEMM, vectors over groups",
        "depthwise, vectors over groups as they lie in memory",
        "rows times factors",
    },
}


def _engines(problem: Problem, dtype: torch.dtype) -> dict[str, set[str]]:
    found = {direction: set() for direction in ENGINES}
    stride, padding, dilation, groups = problem.op_args()
    for memory_format in (torch.contiguous_format, torch.channels_last):
        input, weight = (
            torch.empty(shape, dtype=dtype).contiguous(memory_format=memory_format)
            for shape in (problem.input_shape, problem.weight_shape)
        )
        plan = conv2d_ext._C.explain(input, weight, None, stride, padding, dilation, groups)
        for direction, engines in found.items():
            engines.add(plan[direction]["engine"])
    return found


def test_winograd_has_digests():
    for problem in golden.WINOGRAD:
        assert problem not in golden.PROBLEMS
        with conv2d_ext.allow_winograd(True):
            for direction in ("forward", "grad_input"):
                for engine in _engines(problem, torch.float32)[direction]:
                    assert engine.startswith("Winograd"), (problem, direction)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_driver_has_digests(dtype):
    reached = {direction: set() for direction in ENGINES}
    for problem in golden.PROBLEMS:
        for direction, engines in _engines(problem, dtype).items():
            reached[direction] |= engines
    isa = conv2d_ext.build_config()["isa"]
    pairs = dtype == torch.bfloat16 and isa == "avx512_bf16"
    amx = dtype == torch.bfloat16 and isa.startswith("amx")
    portable = isa == "portable"
    for direction, wanted in ENGINES.items():
        everything = "\n".join(sorted(reached[direction]))
        missing = {engine for engine in wanted if engine not in everything}
        if portable:
            missing.discard("implicit GEMM, vectors over pixels")  # only wider vectors run there
        if isa != "avx2" or dtype == torch.bfloat16:
            # Of operands read in place; wider vectors want more channels than these problems have.
            missing.discard("implicit GEMM, vectors over input channels")
        if pairs:
            # Products in pairs have an order of their own, and their phases run one by one.
            missing.discard("implicit GEMM, the phases of the stride together")
            assert "vectors over result channels, bfloat16 products in pairs" in everything
            # The names of some begin with those of others.
            groups = "implicit GEMM, vectors over groups"
            taken = f"{groups}, bfloat16 products in pairs" in reached[direction]
            assert taken == (direction != "grad_weight")
            assert groups in reached[direction]
        if amx:
            # As in pairs; and problems from four channels on are left to no others.
            missing.discard("implicit GEMM, the phases of the stride together")
            missing.discard("1x1 from many planes to few, plane by plane")
            assert "AMX tiles of bfloat16" in everything
        assert not missing, (direction, everything)


def test_every_op_has_digests():
    """But those that compute nothing, and those that are made of others in every call."""
    with Recorder() as recorder:
        for case in (*list(golden.cases(torch.float32))[:3], *golden_calls.calls(torch.float32)):
            for _ in golden.both_ways(case, torch.float32):
                pass
    prefix = "conv2d_ext::"
    ops = {
        name.removeprefix(prefix).split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(prefix) and not name.startswith(f"{prefix}eager_")  # PyTorch's own
    }
    compute_nothing = {"copy_as", "rounded", "enter_batch_invariant", "leave_batch_invariant"}
    made_of_others = {"linear", "conv1d", "conv_transpose1d", "conv_transpose2d"}
    one_addition = {"conv2d_add_bias"}
    assert ops - set(recorder.ours) == compute_nothing | made_of_others | one_addition


# ---- what the digests see


def test_a_digest_sees_bits():
    values = torch.tensor([1.0, 0.0, math.nan])
    assert golden.digest(values) == golden.digest(values.clone())
    assert golden.digest(values) != golden.digest(torch.tensor([1.0, -0.0, math.nan]))
    next_one = torch.nextafter(values, torch.tensor(2.0))
    assert golden.digest(values) != golden.digest(next_one)
    assert golden.digest(values) != golden.digest(values.view(3, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_digest_takes_every_nan_for_the_same(dtype):
    integer = golden._BITS[dtype.itemsize]
    nan = torch.tensor([math.nan, 1.0], dtype=dtype)
    other = nan.clone()
    other.view(integer)[0] ^= torch.iinfo(integer).min | 1
    assert other.isnan()[0]
    assert not torch.equal(nan.view(integer), other.view(integer))
    assert golden.digest(nan) == golden.digest(other)


def test_a_digest_follows_values_and_not_memory():
    values = torch.arange(24.0).view(1, 2, 3, 4)
    assert golden.digest(values) == golden.digest(
        values.contiguous(memory_format=torch.channels_last)
    )


# ---- the inputs


def test_the_generator():
    """splitmix64's published first outputs from seed 0."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert exact_values.splitmix64(0, 3).tolist() == expected
    assert exact_values.splitmix64(2**64 - 1, 1).dtype == np.uint64


@pytest.mark.parametrize("kind", exact_values.KINDS)
@pytest.mark.parametrize("dtype", golden.DTYPES, ids=str)
def test_values_are_exact(dtype, kind):
    """Drawn on the way to the dtype as a number that it has, so that no conversion rounds."""
    if dtype.is_complex or dtype in golden.INTEGERS:
        values = exact_values.exact_tensor("values", (1000,), dtype, kind)
        if dtype.is_complex:
            values = torch.view_as_real(values).flatten()
        assert values.unique().numel() > (30 if kind == "tiny" else 200)
        return
    words = exact_values.splitmix64(1, 1000)
    wide = torch.from_numpy(exact_values._floats(words, dtype, kind))
    narrow = wide.to(dtype)
    assert torch.equal(narrow.double().nan_to_num(3), wide.nan_to_num(3))
    nan, infinite = wide.isnan().any(), wide.isinf().any()
    assert (nan, infinite) == (kind == "infinite", kind == "infinite")
    if kind != "tiny":
        assert narrow.unique().numel() > 200
    else:
        zeros = wide[wide == 0]
        assert zeros.signbit().any()
        assert not zeros.signbit().all()
        # Denormal numbers are there, and products that underflow.
        smallest = torch.finfo(dtype).smallest_normal
        assert ((wide != 0) & (wide.abs() < smallest)).any()
        assert (narrow[:-1] * narrow[1:] == 0)[(wide[:-1] != 0) & (wide[1:] != 0)].any()


# ---- what may be written


def _file(numerics=3, first="a", portable=None):
    families = {"fused": [first, "b", "c", "d"]}
    if portable:
        families["unfused"] = [portable, "b", "c", "d"]
    return golden.Golden(numerics, {"float32": {"a problem": families}})


def _found(first="a", isa="avx2", case="a problem"):
    return {isa: {"float32": {case: [first, "b", "c", "d"]}}}


def test_changed_bits_need_a_new_number():
    with pytest.raises(ValueError, match=r"numerics\.h"):
        golden.merged(_file(), 3, _found("changed"))
    assert golden.merged(_file(), 4, _found("changed")) == _file(4, "changed")
    with pytest.raises(ValueError, match="the file's 3"):
        golden.merged(_file(), 2, _found())


def test_the_same_bits_may_be_written_again():
    assert golden.merged(_file(), 3, _found()) == _file()
    assert golden.merged(None, 3, _found()) == _file()


def test_new_problems_are_added_and_old_ones_go():
    assert golden.merged(_file(), 3, _found("x", case="another")).digests == {
        "float32": {"another": {"fused": ["x", "b", "c", "d"]}}
    }


def test_what_this_cpu_lacks_is_kept_or_refused():
    old = _file(portable="p")
    assert golden.merged(old, 3, _found()) == old
    with pytest.raises(ValueError, match="can't be computed on this CPU"):
        golden.merged(old, 4, _found("changed"))


def test_one_family_has_one_digest():
    with pytest.raises(ValueError, match="disagrees"):
        golden.merged(None, 3, {**_found(), **_found("other", isa="avx512")})
    with pytest.raises(ValueError, match="by rows, otherwise"):
        golden.merged(None, 3, _found(f"a{golden.DISAGREEMENT}b"))


def test_differences_are_named(committed):
    found = {dtype: {} for dtype in committed.digests}
    for dtype, of_dtype in committed.digests.items():
        name = golden.family("avx2", getattr(torch, dtype))
        found[dtype] = {case: list(families[name]) for case, families in of_dtype.items()}
    assert golden.differences(committed, "avx2", found) == []
    changed = copy.deepcopy(found)
    case = next(iter(changed["float64"]))
    changed["float64"][case][2] = "0"
    (line,) = golden.differences(committed, "avx2", changed)
    assert line.startswith(f"float64, {case}, grad_weight: 0 instead of ")
    del changed["float64"][case]
    assert golden.differences(committed, "avx2", changed) == [f"float64, {case}: no such problem"]
