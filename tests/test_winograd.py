"""Winograd's F(2x2, 3x3), asked for by conv2d_ext.allow_winograd: accuracy, bits, infinities,
what takes it and what does not, and the setting itself in threads, backward, torch.func and
torch.compile.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import pathlib
import re
import subprocess
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from child import run_forked
from isa_bits import assert_same_bits, bits

import conv2d_ext
from conv2d_ext._winograd import is_allowed
from conv2d_ext.testing import (
    VIEWS,
    Problem,
    Tensors,
    aten_results,
    float64_oracle,
    library_results,
    make_tensors,
    unit_roundoff,
)

WINOGRAD = "Winograd F(2x2, 3x3)"

# Odd and even sizes, tails of vectors and of chains, groups, paddings, rows of several tiles.
PROBLEMS = (
    Problem("the least", 1, 16, (9, 9), 16, (3, 3)),
    Problem("odd everything", 2, 17, (9, 12), 19, (3, 3), padding=(1, 0)),
    Problem("even", 3, 32, (10, 8), 48, (3, 3), padding=(1, 1)),
    Problem("33 channels, 65 result channels", 1, 33, (14, 14), 65, (3, 3), padding=(1, 1)),
    Problem("two groups", 2, 40, (11, 13), 34, (3, 3), padding=(1, 1), groups=2),
    Problem("wide rows", 1, 18, (7, 411), 20, (3, 3), padding=(1, 1)),
    Problem("high columns", 1, 18, (411, 8), 20, (3, 3), padding=(2, 1)),
    Problem("far padding", 1, 20, (15, 16), 24, (3, 3), padding=(2, 2)),
    Problem("same", 1, 20, (15, 16), 24, (3, 3), padding="same", bias=False),
    Problem("many channels", 1, 600, (8, 7), 70, (3, 3), padding=(1, 1)),
    Problem("many result channels", 2, 20, (8, 7), 600, (3, 3), padding=(1, 1)),
    Problem("small images, a large batch", 37, 24, (7, 7), 40, (3, 3), padding=(1, 1)),
)
LAYERS = (
    Problem("64 at 28", 1, 64, (28, 28), 64, (3, 3), padding=(1, 1)),
    Problem("128 at 28", 1, 128, (28, 28), 128, (3, 3), padding=(1, 1)),
    Problem("256 at 14", 2, 256, (14, 14), 256, (3, 3), padding=(1, 1)),
    Problem("512 at 14", 1, 512, (14, 14), 512, (3, 3), padding=(1, 1)),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
over_problems = pytest.mark.parametrize("problem", PROBLEMS, ids=str)
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


@pytest.fixture(autouse=True)
def _off():
    """Each test begins, and leaves the thread, without it."""
    with conv2d_ext.allow_winograd(False):
        yield


def winograd_results(problem, tensors):
    with conv2d_ext.allow_winograd(True):
        return library_results(problem, tensors)


def explained(problem, dtype=torch.float32, allow=True):
    input, weight, bias, _ = make_tensors(problem, dtype)
    with conv2d_ext.allow_winograd(allow):
        return conv2d_ext.explain(input, weight, bias, **problem.call_args())


def is_winograd(direction) -> bool:
    return direction.engine.startswith(WINOGRAD)


def takes_bfloat16(dtype) -> bool:
    """Whether the CPU multiplies the dtype as it is, in pairs or in AMX tiles."""
    isa = conv2d_ext.build_config()["isa"]
    return dtype == torch.bfloat16 and isa.startswith(("avx512_bf16", "amx"))


# ---- accuracy


@over_dtypes
@pytest.mark.parametrize("problem", PROBLEMS + LAYERS, ids=str)
def test_accuracy(problem, dtype):
    """At most 1.3 of F.conv2d's relative error and 2 of its largest one; of few sums, where luck
    decides, and of 16-bit results twice of both. And 16-bit results as if rounded once."""
    tensors = make_tensors(problem, dtype)
    actual, aten = winograd_results(problem, tensors), aten_results(problem, tensors)
    exact = float64_oracle(problem, tensors)
    many = problem in LAYERS and dtype == torch.float32
    slack = 0.0 if many else unit_roundoff(dtype)
    for name in ("output", "grad_input"):
        ours, theirs, oracle = (getattr(results, name) for results in (actual, aten, exact))
        assert oracle.relative_l2(ours) <= (1.3 if many else 2) * oracle.relative_l2(theirs) + slack
        assert oracle.max_scaled_error(ours) <= 2 * oracle.max_scaled_error(theirs) + slack


def test_other_gradients_are_direct():
    """grad_weight and grad_bias have the bits that they have without it."""
    problem = PROBLEMS[1]
    tensors = make_tensors(problem)
    with_it, without = winograd_results(problem, tensors), library_results(problem, tensors)
    for name in ("grad_weight", "grad_bias"):
        assert torch.equal(getattr(with_it, name), getattr(without, name)), name
    for name in ("output", "grad_input"):
        assert not torch.equal(getattr(with_it, name), getattr(without, name)), name


def test_whole_numbers():
    """Small whole numbers are exact: weights' transforms are quarters."""
    for problem in PROBLEMS:
        tensors = Tensors(
            *(
                None if t is None else torch.randint(-8, 9, t.shape).float()
                for t in make_tensors(problem)
            )
        )
        exact = aten_results(
            problem, Tensors(*(None if t is None else t.double() for t in tensors))
        )
        actual = winograd_results(problem, tensors)
        for name in ("output", "grad_input"):
            assert torch.equal(getattr(actual, name).double(), getattr(exact, name)), (
                problem,
                name,
            )


# ---- bits


@over_dtypes
@over_problems
def test_threads(problem, dtype):
    tensors = make_tensors(problem, dtype)
    torch.set_num_threads(1)
    alone = winograd_results(problem, tensors)
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        assert_same_bits(winograd_results(problem, tensors), alone, f"{threads} threads")


@over_problems
def test_place_in_the_batch(problem):
    """Output and input gradient of each image, alone, first, last and among others."""
    whole = dataclasses.replace(problem, batch=11)
    tensors = make_tensors(whole)
    together = winograd_results(whole, tensors)
    for batch, first in ((1, 0), (1, 10), (4, 3), (7, 4)):
        part = slice(first, first + batch)
        few = tensors._replace(input=tensors.input[part], grad_output=tensors.grad_output[part])
        results = winograd_results(dataclasses.replace(problem, batch=batch), few)
        for name in ("output", "grad_input"):
            ours, theirs = getattr(results, name), getattr(together, name)[part]
            assert torch.equal(bits(ours), bits(theirs)), (name, batch, first)


@over_dtypes
@pytest.mark.parametrize("view", VIEWS)
@over_problems
def test_views(problem, view, dtype):
    tensors = make_tensors(problem, dtype)
    expected = winograd_results(problem, tensors)
    seen = tensors._replace(
        input=VIEWS[view](tensors.input),
        weight=VIEWS[view](tensors.weight),
        grad_output=VIEWS[view](tensors.grad_output),
    )
    assert_same_bits(winograd_results(problem, seen), expected, view)


def test_expanded_and_reversed_arguments():
    problem = PROBLEMS[2]
    tensors = make_tensors(problem)
    image = tensors.input[:1]
    weight = tensors.weight[:1].expand(tensors.weight.shape)
    with conv2d_ext.allow_winograd(True):
        actual = conv2d_ext.conv2d(image.expand(3, -1, -1, -1), weight, padding=1)
        expected = conv2d_ext.conv2d(image, weight.contiguous(), padding=1)
    assert torch.equal(actual, expected.expand(3, -1, -1, -1))


def print_bits() -> None:
    """A digest of each problem's output and input gradient, of the types that all sets widen."""
    for dtype in (torch.float32, torch.float16):
        for problem in PROBLEMS:
            found = hashlib.sha256()
            for result in winograd_results(problem, make_tensors(problem, dtype))[:2]:
                found.update(bits(result).numpy().tobytes())
            print(found.hexdigest(), dtype, problem)


def check_this_instruction_set() -> None:
    """What is not finite, with bfloat16; of the portable code, which rounds otherwise than the
    others, accuracy and bits too. float16 is widened as bfloat16 is, and left out."""
    test_whole_numbers()
    test_all_of_it_not_finite()
    test_overflow_is_computed_again()
    test_infinities_follow_no_tile()
    dtypes = (torch.float32, torch.bfloat16)
    for dtype, problem in itertools.product(dtypes, PROBLEMS):
        for where, kind in itertools.product(("input", "weight"), KINDS):
            test_infinities(problem, where, kind, dtype)
    if conv2d_ext.build_config()["isa"] == "portable":
        for dtype, problem in itertools.product(dtypes, PROBLEMS + LAYERS[:-1]):
            test_accuracy(problem, dtype)
        for problem in PROBLEMS:
            test_place_in_the_batch(problem)


PROGRAM = """
import sys
import torch, conv2d_ext
sys.path.insert(0, sys.argv[1])
import test_winograd
torch.set_num_threads(1)
torch.manual_seed(0)
isa = conv2d_ext.build_config()["isa"]
print(isa)
if isa in test_winograd.VECTOR_ISAS:
    test_winograd.print_bits()
if sys.argv[2] == "checked":
    test_winograd.check_this_instruction_set()
    print("checked")
"""
VECTOR_ISAS = ("avx2", "avx512", "avx512_bf16")
# The one whose code the other tests run: the instruction sets of bfloat16 take another one's.
IN_USE = conv2d_ext.build_config()["isa"]
IN_USE = IN_USE if IN_USE in ("portable", "avx2") else "avx512"


def machine_has(isa: str) -> bool:
    """As csrc/cpu/isa/machine.cpp, by what Linux says of the CPU."""
    flags = set(re.findall(r"\w+", pathlib.Path("/proc/cpuinfo").read_text()))
    needed = {"avx2", "fma", "f16c"}
    if isa != "avx2":
        needed |= {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    if isa == "avx512_bf16":
        needed |= {"avx512_bf16"}
    return isa == "portable" or needed <= flags


@pytest.fixture(scope="module")
def finished_of() -> Callable[[str], subprocess.CompletedProcess]:
    """PROGRAM under an instruction set, run once. Skips what is not compiled in or not there."""

    @functools.cache
    def run(isa: str) -> subprocess.CompletedProcess:
        checked = isa in ("portable", "avx2", "avx512") and isa != IN_USE
        here = str(pathlib.Path(__file__).parent)
        return run_forked(
            "-c", PROGRAM, here, "checked" if checked else "", env={"CONV2D_EXT_CPU_ISA": isa}
        )

    def finished(isa: str) -> subprocess.CompletedProcess:
        if isa not in conv2d_ext.build_config()["compiled_isas"]:
            pytest.skip(f"{isa} is not compiled in")
        child = run(isa)
        refusal = f"CONV2D_EXT_CPU_ISA={isa}: this CPU lacks that instruction set"
        if child.returncode and refusal in child.stderr:
            assert not machine_has(isa)
            pytest.skip(f"this CPU has no {isa}")
        return child

    return finished


@pytest.mark.slow
def test_instruction_sets_agree(finished_of):
    """Those with fused operations. Each is checked against the others and against F.conv2d."""
    compiled = conv2d_ext.build_config()["compiled_isas"]
    isas = [isa for isa in VECTOR_ISAS if isa in compiled and machine_has(isa)]
    if len(isas) < 2:
        pytest.skip("fewer than two of them are compiled in, and in this CPU")
    printed = {}
    for isa in isas:
        child = finished_of(isa)
        first, *digests = child.stdout.splitlines()[: 1 + 2 * len(PROBLEMS)] or [""]
        assert first == isa, child.stderr
        assert len(digests) == 2 * len(PROBLEMS), child.stderr
        printed[isa] = digests
    for isa, digests in printed.items():
        assert digests == printed[isas[0]], isa


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_each_instruction_set(isa, finished_of):
    """check_this_instruction_set, with those that the other tests do not run on. The vectors' bits
    are the same (test_instruction_sets_agree), and so is their accuracy."""
    if isa == IN_USE:
        pytest.skip("the one that the other tests run on")
    child = finished_of(isa)
    assert child.returncode == 0, child.stderr[-3000:]
    assert child.stdout.splitlines()[-1] == "checked"


# ---- numbers that are not finite

KINDS = ("inf", "nan", "both")


def same_values(a, b) -> bool:
    """Equal bits, but for which NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        bits(a.nan_to_num(7.0, posinf=torch.inf, neginf=-torch.inf)),
        bits(b.nan_to_num(7.0, posinf=torch.inf, neginf=-torch.inf)),
    )


def squares_of(mask: torch.Tensor) -> torch.Tensor:
    """Every element of a 2x2 square that holds one of the mask."""
    h, w = mask.shape[-2:]
    padded = F.pad(mask.float(), (0, w % 2, 0, h % 2))
    return (
        F.max_pool2d(padded, 2).repeat_interleave(2, -1).repeat_interleave(2, -2)[..., :h, :w] > 0
    )


def poison(tensor, kind, count=5):
    generator = torch.Generator().manual_seed(count)
    flat = tensor.view(-1)
    places = torch.randperm(flat.numel(), generator=generator)[:count]
    values = {"inf": [torch.inf, -torch.inf], "nan": [torch.nan], "both": [torch.inf, torch.nan]}[
        kind
    ]
    flat[places] = torch.tensor([values[i % len(values)] for i in range(count)], dtype=tensor.dtype)


@over_dtypes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["input", "weight"])
@over_problems
def test_infinities(problem, where, kind, dtype):
    """Squares of a channel that meet one have the direct bits, and no other square changes."""
    if takes_bfloat16(dtype):
        pytest.skip("bfloat16 in pairs")
    tensors = make_tensors(problem, dtype)
    finite = winograd_results(problem, tensors)
    poisoned = Tensors(*(None if t is None else t.clone() for t in tensors))
    for tensor in (
        (poisoned.input, poisoned.grad_output) if where == "input" else (poisoned.weight,)
    ):
        poison(tensor, kind, 5 if where == "input" else 2)
    direct, actual = library_results(problem, poisoned), winograd_results(problem, poisoned)
    for name in ("output", "grad_input"):
        ours, theirs, before = (getattr(r, name) for r in (actual, direct, finite))
        again = squares_of(~theirs.isfinite())
        assert again.any()
        assert same_values(ours[again], theirs[again]), name
        assert torch.equal(bits(ours[~again]), bits(before[~again])), name


def test_all_of_it_not_finite():
    problem = PROBLEMS[1]
    tensors = make_tensors(problem)
    poisoned = tensors._replace(input=torch.full_like(tensors.input, torch.inf))
    assert same_values(
        winograd_results(problem, poisoned).output, library_results(problem, poisoned).output
    )


def test_overflow_is_computed_again():
    """Sums of neighbours overflow where products do not."""
    problem = PROBLEMS[2]
    tensors = make_tensors(problem)
    large = tensors._replace(
        input=tensors.input.sign() * 3e38, weight=tensors.weight * 1e-3, bias=tensors.bias
    )
    direct, actual = library_results(problem, large).output, winograd_results(problem, large).output
    assert direct.isfinite().all()
    assert torch.equal(actual, direct)


def test_infinities_follow_no_tile():
    """Which squares are computed again follows from the image, not from threads or formats."""
    problem = dataclasses.replace(PROBLEMS[3], batch=3)
    tensors = make_tensors(problem)
    poison(tensors.input, "both", 9)
    poison(tensors.grad_output, "both", 9)
    expected = winograd_results(problem, tensors)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for view in VIEWS.values():
            seen = tensors._replace(
                input=view(tensors.input), grad_output=view(tensors.grad_output)
            )
            results = winograd_results(problem, seen)
            assert same_values(results.output, expected.output)
            assert same_values(results.grad_input, expected.grad_input)
    alone = tensors._replace(input=tensors.input[1:2], grad_output=tensors.grad_output[1:2])
    results = winograd_results(dataclasses.replace(problem, batch=1), alone)
    assert same_values(results.output, expected.output[1:2])


def test_nan_in_the_bias_stays_there():
    problem = PROBLEMS[3]
    tensors = make_tensors(problem)
    finite = winograd_results(problem, tensors).output
    tensors.bias[3] = torch.nan
    output = winograd_results(problem, tensors).output
    assert output[:, 3].isnan().all()
    others = [c for c in range(problem.out_channels) if c != 3]
    assert torch.equal(output[:, others], finite[:, others])


# ---- what takes it


@over_problems
def test_explain(problem):
    plan = explained(problem)
    assert is_winograd(plan.forward)
    assert is_winograd(plan.grad_input)
    assert not is_winograd(plan.grad_weight)
    off = explained(problem, allow=False)
    for direction in (off.forward, off.grad_input):
        assert not is_winograd(direction)
        reasons = dict(direction.candidates)
        assert "allow_winograd" in reasons[plan.forward.engine]
    assert plan.forward.workspace_bytes_per_thread <= 4 << 20


BASE = Problem("base", 1, 32, (14, 14), 32, (3, 3), padding=(1, 1))
REFUSED = {
    "kernel": dataclasses.replace(BASE, kernel=(5, 5)),
    "1x3": dataclasses.replace(BASE, kernel=(1, 3), padding=(0, 1)),
    "stride": dataclasses.replace(BASE, stride=(2, 2)),
    "stride along the row": dataclasses.replace(BASE, stride=(1, 2)),
    "dilation": dataclasses.replace(BASE, dilation=(2, 2), padding=(2, 2)),
    "channels": dataclasses.replace(BASE, in_channels=15),
    "result channels": dataclasses.replace(BASE, out_channels=15),
    "groups": dataclasses.replace(BASE, groups=4),
    "too many channels": dataclasses.replace(BASE, in_channels=2049),
    "low": dataclasses.replace(BASE, in_size=(6, 14)),
    "narrow": dataclasses.replace(BASE, in_size=(14, 6)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    """Each with its reason, and with the bits that it has without the setting."""
    problem = REFUSED[name]
    plan = explained(problem)
    assert not is_winograd(plan.forward)
    reasons = dict(plan.forward.candidates)
    assert any(key.startswith(WINOGRAD) and value for key, value in reasons.items())
    tensors = make_tensors(problem)
    with_it, without = winograd_results(problem, tensors), library_results(problem, tensors)
    assert torch.equal(bits(with_it.output), bits(without.output))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32])
def test_other_dtypes_are_direct(dtype):
    assert not is_winograd(explained(BASE, dtype).forward)


def test_instructions_for_bfloat16_are_preferred():
    plan = explained(BASE, torch.bfloat16)
    assert is_winograd(plan.forward) != takes_bfloat16(torch.bfloat16)


def test_eligibility_reads_no_batch():
    for batch in (1, 2, 64, 1000):
        assert is_winograd(explained(dataclasses.replace(BASE, batch=batch)).forward)


# ---- the setting


def tensors_of_base():
    input, weight, bias, _ = make_tensors(BASE)
    return input, weight, bias


def conv(input, weight, bias=None):
    return conv2d_ext.conv2d(input, weight, bias, padding=1)


def both_results(call=conv):
    """What a call gives without and with it."""
    arguments = tensors_of_base()
    direct = call(*arguments)
    with conv2d_ext.allow_winograd(True):
        winograd = call(*arguments)
    assert not torch.equal(direct, winograd)
    return arguments, direct, winograd


@pytest.mark.parametrize("channels", [16, 17])
def test_phases_of_a_stride_are_direct(channels):
    """They may run together, as threads, batch and layout have it; so none of them goes this way,
    though its kernel be 3x3 of stride 1."""
    found = set()
    generator = torch.Generator().manual_seed(3)
    sizes = (2, 16 * channels, 14, 14)
    weight = torch.randn(256, channels, 6, 6, generator=generator)
    grad_output = torch.randn(2, 256, 7, 7, generator=generator)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for batch in (1, 2):
                for allowed in (False, True):
                    arguments = (
                        grad_output[:batch].contiguous(memory_format=memory_format),
                        weight.contiguous(memory_format=memory_format),
                        (batch, *sizes[1:]), (2, 2), (2,) * 4, (1, 1), 16,
                        memory_format == torch.channels_last, allowed,
                    )  # fmt: skip
                    result = torch.ops.conv2d_ext.conv2d_grad_input(*arguments)
                    found.add(result[0].contiguous().numpy().tobytes())
    assert len(found) == 1


def test_the_setting():
    arguments, direct, winograd = both_results()
    assert torch.equal(conv(*arguments), direct)
    conv2d_ext.allow_winograd(True)
    assert torch.equal(conv(*arguments), winograd)
    with conv2d_ext.allow_winograd(False):
        assert torch.equal(conv(*arguments), direct)
        with conv2d_ext.allow_winograd(True):
            assert torch.equal(conv(*arguments), winograd)
        assert torch.equal(conv(*arguments), direct)
    assert torch.equal(conv(*arguments), winograd)
    conv2d_ext.allow_winograd(False)
    assert torch.equal(conv(*arguments), direct)


def test_a_context_ends_with_an_error():
    with pytest.raises(KeyError), conv2d_ext.allow_winograd(True):
        raise KeyError
    assert not is_allowed()


@pytest.mark.parametrize("mode", [1, None, "yes"])
def test_the_mode_is_a_bool(mode):
    with pytest.raises(TypeError, match="must be bool"):
        conv2d_ext.allow_winograd(mode)
    assert not is_allowed()


def test_it_belongs_to_the_thread():
    arguments, direct, winograd = both_results()
    found = {}

    def other():
        found["fresh"] = conv(*arguments)
        conv2d_ext.allow_winograd(True)
        found["set"] = conv(*arguments)

    with conv2d_ext.allow_winograd(True):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert torch.equal(found["fresh"], direct)
    assert torch.equal(found["set"], winograd)
    assert torch.equal(conv(*arguments), direct)


def test_threads_at_once():
    """Contexts of many threads, entered and left in any order."""
    arguments, direct, winograd = both_results()
    wrong = []

    def work(number):
        for turn in range(20):
            allow = (number + turn) % 2 == 0
            with conv2d_ext.allow_winograd(allow):
                if not torch.equal(conv(*arguments), winograd if allow else direct):
                    wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("value", ["", "0", "1", "yes"])
def test_environment(value):
    program = (
        "import threading, conv2d_ext; from conv2d_ext._winograd import is_allowed;"
        "found = [is_allowed()];"
        "thread = threading.Thread(target=lambda: found.append(is_allowed()));"
        "thread.start(); thread.join();"
        "print(found)"
    )
    child = run_forked("-c", program, env={"CONV2D_EXT_ALLOW_WINOGRAD": value})
    if value == "yes":
        assert child.returncode != 0
        assert "CONV2D_EXT_ALLOW_WINOGRAD=yes: expected 0 or 1" in child.stderr
    else:
        assert child.returncode == 0, child.stderr
        assert child.stdout.strip() == str([value == "1"] * 2)


@pytest.mark.parametrize("layer", [conv2d_ext.Conv2d, None])
def test_modules(layer):
    module = torch.nn.Conv2d(32, 32, 3, padding=1)
    module = conv2d_ext.convert(module) if layer is None else layer(32, 32, 3, padding=1)
    input = tensors_of_base()[0]
    direct = conv(input, module.weight, module.bias)
    assert torch.equal(module(input), direct)
    with conv2d_ext.allow_winograd(True):
        assert torch.equal(module(input), conv(input, module.weight, module.bias))
        assert not torch.equal(module(input), direct)
    assert torch.equal(module(input), direct)


def test_the_posts_forward():
    input, weight, bias = tensors_of_base()
    kernel = weight.transpose(0, 1).contiguous()
    direct = conv2d_ext.forward(input, kernel, bias)
    with conv2d_ext.allow_winograd(True):
        output = conv2d_ext.forward(input, kernel, bias)
        assert torch.equal(output, conv2d_ext.conv2d(input, weight, bias))
    assert not torch.equal(output, direct)


# ---- backward


def gradients(inside, outside, allow, **options):
    """grad_input of a call under one setting, with backward under another."""
    input, weight, bias = (t.requires_grad_() for t in tensors_of_base())
    with conv2d_ext.allow_winograd(inside):
        output = conv(input, weight, bias)
    cotangent = torch.linspace(-1, 1, output.numel()).view_as(output)
    with conv2d_ext.allow_winograd(outside):
        return allow(output, input, cotangent, **options)


def backward_here(output, input, cotangent):
    return torch.autograd.grad(output, input, cotangent)[0]


def backward_elsewhere(output, input, cotangent):
    found = []
    thread = threading.Thread(target=lambda: found.append(backward_here(output, input, cotangent)))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("run", [backward_here, backward_elsewhere])
def test_backward_takes_what_forward_took(run):
    direct, winograd = gradients(False, False, run), gradients(True, True, run)
    assert not torch.equal(direct, winograd)
    assert torch.equal(gradients(True, False, run), winograd)
    assert torch.equal(gradients(False, True, run), direct)


def test_second_derivatives():
    """Of the input gradient, by the setting of the first call."""
    input, weight, _ = (t.double().requires_grad_() for t in tensors_of_base())
    small_input, small_weight = input[:, :, :8, :8], weight
    with conv2d_ext.allow_winograd(True):

        def energy(x, w):
            return (conv2d_ext.conv2d(x, w, padding=1) ** 2).sum()

        x, w = (
            small_input.float().detach().requires_grad_(),
            small_weight.float().detach().requires_grad_(),
        )
        first = torch.autograd.grad(energy(x, w), x, create_graph=True)[0]
    second = torch.autograd.grad((first**2).sum(), x)[0]
    xd = small_input.detach().requires_grad_()
    first = torch.autograd.grad(
        (F.conv2d(xd, small_weight, padding=1) ** 2).sum(), xd, create_graph=True
    )[0]
    exact = torch.autograd.grad((first**2).sum(), xd)[0]
    assert (second.double() - exact).norm() <= 1e-5 * exact.norm()


def test_checkpoint_recomputes_alike():
    from torch.utils.checkpoint import checkpoint

    input, weight, _ = (t.requires_grad_() for t in tensors_of_base())
    with conv2d_ext.allow_winograd(True):
        plain = torch.autograd.grad(conv(input, weight).sin().sum(), weight)[0]
        again = checkpoint(lambda x, w: conv(x, w).sin(), input, weight, use_reentrant=False)
        assert torch.equal(torch.autograd.grad(again.sum(), weight)[0], plain)


# ---- transforms and compilers


def test_vmap_and_jvp():
    input, weight, _ = tensors_of_base()
    images = torch.stack([input, 2 * input])
    with conv2d_ext.allow_winograd(True):
        expected = conv(images.flatten(0, 1), weight)
        batched = torch.func.vmap(lambda x: conv(x, weight))(images)
        assert torch.equal(batched.flatten(0, 1), expected)
        _, tangent = torch.func.jvp(lambda x: conv(x, weight), (input,), (2 * input,))
        assert torch.equal(tangent, conv(2 * input, weight))
        _, pullback = torch.func.vjp(lambda x: conv(x, weight), input)
    (gradient,) = pullback(torch.ones_like(expected[:1]))
    with conv2d_ext.allow_winograd(True):
        expected = torch.autograd.grad(
            conv(input.requires_grad_(), weight), input, torch.ones_like(expected[:1])
        )[0]
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("allow", [False, True])
def test_opcheck(allow):
    input, weight, bias = (t.requires_grad_() for t in tensors_of_base())
    args = ([1, 1], [1, 1, 1, 1], [1, 1], 1)
    torch.library.opcheck(torch.ops.conv2d_ext.conv2d, (input, weight, bias, *args, allow))
    grad = torch.randn(1, 32, 14, 14, requires_grad=True)
    torch.library.opcheck(
        torch.ops.conv2d_ext.conv2d_grad_input,
        (grad, weight, list(input.shape), *args, False, allow),
    )


def test_the_op_reads_no_setting():
    input, weight, bias = tensors_of_base()
    op = torch.ops.conv2d_ext.conv2d
    args = (input, weight, bias, [1, 1], [1, 1, 1, 1], [1, 1], 1)
    _, direct, winograd = both_results()
    with conv2d_ext.allow_winograd(True):
        assert torch.equal(op(*args), direct)
    assert torch.equal(op(*args, True), winograd)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_functions_follow_the_setting(backend):
    arguments, direct, winograd = both_results()
    compiled = torch.compile(conv, backend=backend, fullgraph=True)
    for allow in (False, True, False, True):
        with conv2d_ext.allow_winograd(allow):
            assert torch.equal(compiled(*arguments), winograd if allow else direct), allow
    found = []
    thread = threading.Thread(target=lambda: found.append(compiled(*arguments)))
    with conv2d_ext.allow_winograd(True):
        thread.start()
        thread.join()
    assert torch.equal(found[0], direct)


def test_compiled_backward():
    """Takes what its forward took, wherever it runs."""
    input, weight, _ = (t.requires_grad_() for t in tensors_of_base())
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)

    def gradient(call, inside, outside):
        with conv2d_ext.allow_winograd(inside):
            output = call(input, weight)
        with conv2d_ext.allow_winograd(outside):
            return torch.autograd.grad(output, input, torch.ones_like(output))[0]

    for inside in (True, False):
        for outside in (True, False):
            expected = gradient(conv, inside, inside)
            assert torch.equal(gradient(compiled, inside, outside), expected), (inside, outside)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_contexts_in_compiled_functions(backend):
    arguments, direct, winograd = both_results()

    def mixed(input, weight, bias):
        with conv2d_ext.allow_winograd(True):
            first = conv(input, weight, bias)
        return first, conv(input, weight, bias)

    compiled = torch.compile(mixed, backend=backend, fullgraph=True)
    for allow in (False, True):
        with conv2d_ext.allow_winograd(allow):
            first, second = compiled(*arguments)
            assert is_allowed() == allow
        assert torch.equal(first, winograd)
        assert torch.equal(second, winograd if allow else direct)
    assert not is_allowed()

    def sets(input, weight, bias):
        conv2d_ext.allow_winograd(True)
        return conv(input, weight, bias)

    assert torch.equal(torch.compile(sets, backend=backend, fullgraph=True)(*arguments), winograd)
    assert is_allowed()
    assert torch.equal(conv(*arguments), winograd)

    def breaks(input, weight, bias):
        conv2d_ext.allow_winograd(False)
        torch._dynamo.graph_break()
        return conv(input, weight, bias)

    assert torch.equal(torch.compile(breaks, backend=backend)(*arguments), direct)
    assert not is_allowed()


def test_export_keeps_it():
    class Layer(torch.nn.Module):
        def forward(self, input, weight):
            return conv(input, weight)

    (input, weight, _), _, _ = both_results()
    with conv2d_ext.allow_winograd(True):
        program = torch.export.export(Layer(), (input, weight))
        winograd = conv(input, weight)
    assert torch.equal(program.module()(input, weight), winograd)


def test_the_mode_batch_invariant_computes_pytorchs_calls_directly():
    """And the library's own as the setting says."""
    arguments, direct, winograd = both_results()
    with conv2d_ext.batch_invariant(), conv2d_ext.allow_winograd(True):
        assert torch.equal(F.conv2d(*arguments, padding=1), direct)
        assert torch.equal(conv(*arguments), winograd)


def test_the_first_call_outside_of_a_graph_recompiles_nothing():
    """In a process of its own, whose first calls these are.

    Seen to fail: where the setting is first stored by a call.
    """
    program = """
import torch, conv2d_ext
x, weight = torch.ones(1, 2, 3, 3), torch.ones(2, 2, 3, 3)
compiled = torch.compile(conv2d_ext.conv2d, backend="eager")
compiled(x, weight)
conv2d_ext.conv2d(x, weight)
with torch.compiler.set_stance("fail_on_recompile"):
    compiled(x, weight)
"""
    done = run_forked("-c", program)
    assert done.returncode == 0, done.stderr
