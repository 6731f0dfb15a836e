"""A program: the bits of the library's results against the digests of tests/golden.json.

    python tests/golden.py            compares, on every instruction set that this CPU has
    python tests/golden.py --write    writes the digests of this build

Writing refuses to change a digest that is there, unless the number of csrc/numerics.h has risen
above the file's: bits change on purpose or not at all. New problems are added under any number.
test_golden.py compares as well.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import platform
import sys
from collections.abc import Iterator
from typing import NamedTuple

import golden_calls
import torch
from child import run_forked
from exact_values import exact_tensor
from golden_calls import Call

import conv2d_ext
from conv2d_ext import testing
from conv2d_ext.testing import Problem, Results, Tensors, real_layer

FILE = pathlib.Path(__file__).with_suffix(".json")
DIRECTIONS = ("forward", "grad_input", "grad_weight", "grad_bias")  # a convolution's results

# Beside the small problems: sums of more chunks than one, stems and other layers of real networks.
LARGER = (
    Problem("K = 5400", 1, 600, (4, 5), 9, (3, 3), padding=(1, 1)),
    Problem("K = 5000, 1x1", 2, 5000, (3, 4), 9, (1, 1)),
    Problem("K = 5202, 17x17", 1, 18, (6, 7), 5, (17, 17), padding=(8, 8)),
    Problem("grad_input's K = 5400", 1, 9, (4, 5), 600, (3, 3), padding=(1, 1)),
    Problem("grad_input's K = 5000, 1x1", 2, 9, (3, 4), 5000, (1, 1)),
    Problem("one pixel, K = 5400", 2, 600, (3, 3), 11, (3, 3)),
    Problem("one pixel, 600 channels", 2, 17, (1, 1), 600, (1, 1)),
    Problem("depthwise 17x17", 1, 3, (19, 18), 3, (17, 17), padding=(8, 8), groups=3),
    Problem("depthwise 3x3, stride 2, 40 channels", 2, 40, (18, 35), 40, (3, 3), (2, 2), (1, 1),
            groups=40),
    Problem("depthwise 5x5, 70 channels", 1, 70, (12, 17), 70, (5, 5), padding=(2, 2), groups=70),
    Problem("depthwise 7x7, 34 channels", 1, 34, (9, 16), 34, (7, 7), padding=(3, 3), groups=34),
    Problem("40 groups of 2", 1, 80, (9, 11), 80, (3, 3), padding=(1, 1), groups=40),
    Problem("9 images of 300 pixels", 9, 4, (15, 20), 6, (3, 3), padding=(1, 1)),
    real_layer("resnet50 3@224-64/k7s2p3").shrunk(60),
    real_layer("resnet50 64@56-64/k3p1").shrunk(14),
    real_layer("resnet50 512@28-1024/s2").shrunk(8),
    real_layer("mobilenet_v3_large 72@56-72/k5s2p2g72").shrunk(20),
    real_layer("mobilenet_v3_large 3@224-16/k3s2p1").shrunk(56),
    Problem("dilated 12, 200 channels to 30", 1, 200, (15, 17), 30, (3, 3), padding=(12, 12),
            dilation=(12, 12)),
)  # fmt: skip

PROBLEMS = tuple(p for p in testing.SMALL_PROBLEMS if p.batch) + LARGER
# One or two for each driver; what a kernel does with values like these does not follow the size.
UNUSUAL = (
    *testing.ASYMMETRIC[:2],
    *testing.GROUPED[:3],
    *testing.DEPTHWISE[:2],
    testing.DILATED[2],
    testing.DILATED[4],
    testing.FEW_PLANES[4],
    testing.STRIDED[3],
    testing.ONE_PIXEL[1],
    *testing.PATCH_LAYERS[:2],
    *(p for p in testing.EDGE if p.name in ("1x1 with padding", "four paddings", "no bias")),
    *(p for p in testing.TAILS if p.name in ("17 output channels", "31 pixels wide")),
)
# With allow_winograd, which 16-bit types and float32 take.
WINOGRAD = (
    Problem("Winograd, 17 to 19 channels", 2, 17, (9, 12), 19, (3, 3), padding=(1, 1)),
    Problem("Winograd, 70 to 40 channels, two groups", 1, 140, (11, 9), 80, (3, 3), groups=2),
    Problem("Winograd, 600 to 18 channels", 1, 600, (7, 9), 18, (3, 3), padding=(2, 1)),
)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


class Case(NamedTuple):
    problem: Problem
    kind: str  # of values: exact_values.py

    def __str__(self) -> str:
        return str(self.problem) + ("" if self.kind == "ordinary" else f", {self.kind} values")

    @property
    def results(self) -> tuple[str, ...]:
        return DIRECTIONS


def cases(dtype: torch.dtype) -> Iterator[Case]:
    problems = PROBLEMS
    if dtype in INTEGERS:
        problems = UNUSUAL + testing.LONG_SUMS
    elif dtype.is_complex:
        problems = UNUSUAL + testing.LONG_SUMS + LARGER[:9]
    for problem in problems:
        yield Case(problem, "ordinary")
    if dtype not in INTEGERS:
        for kind in ("tiny", "infinite"):
            for problem in UNUSUAL:
                yield Case(problem, kind)
    if dtype in (torch.float32, torch.bfloat16, torch.float16):
        for kind in ("ordinary", "tiny", "infinite"):
            for problem in WINOGRAD:
                yield Case(problem, kind)


DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
    *INTEGERS,
)


def family(isa: str, dtype: torch.dtype) -> str | None:
    """Which instruction sets share the bits of a dtype; None where nobody has promised any."""
    if dtype in INTEGERS:
        return "exact"
    if isa == "portable":
        # Elsewhere the portable code may fuse multiplications and additions.
        return "unfused" if platform.machine() == "x86_64" else None
    of_bfloat16 = {"avx512_bf16": "pairs", "amx": "tiles", "amx_emulated": "tiles"}
    return of_bfloat16.get(isa, "fused") if dtype == torch.bfloat16 else "fused"


# ---- results and their digests


def make_tensors(case: Case, dtype: torch.dtype) -> Tensors:
    problem, kind = case

    def draw(name: str, shape: tuple[int, ...], kind: str = kind) -> torch.Tensor:
        return exact_tensor(f"{problem}: {name}", shape, dtype, kind)

    return Tensors(
        draw("input", problem.input_shape),
        draw("weight", problem.weight_shape),
        # A large bias would hide a sum.
        draw("bias", (problem.out_channels,), "small" if kind == "ordinary" else kind)
        if problem.bias
        else None,
        draw("grad_output", problem.output_shape),
    )


def run(problem: Problem, tensors: Tensors, memory_format: torch.memory_format) -> Results:
    """The four operators, their arguments and results in one format."""
    input, weight, grad_output = (
        tensor.contiguous(memory_format=memory_format)
        for tensor in (tensors.input, tensors.weight, tensors.grad_output)
    )
    args, allow_winograd = problem.op_args(), problem in WINOGRAD
    channels_last = memory_format == torch.channels_last
    ops = torch.ops.conv2d_ext
    return Results(
        ops.conv2d(input, weight, tensors.bias, *args, allow_winograd),
        ops.conv2d_grad_input(
            grad_output, weight, list(input.shape), *args, channels_last, allow_winograd
        ),
        ops.conv2d_grad_weight(
            grad_output, input, list(weight.shape), list(weight.stride()), *args
        ),
        ops.conv2d_grad_bias(grad_output),
    )


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: torch.Tensor) -> str:
    """Of the shape and the bits, in logical order; every NaN counts as the same, -0 is not +0."""
    values = tensor.clone(memory_format=torch.contiguous_format)
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.is_floating_point():
        bits = values.view(_BITS[values.element_size()])
        values = bits.masked_fill(values.isnan(), -1)
    content = repr(tuple(tensor.shape)).encode() + values.numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:10]


def both_ways(case: Case | Call, dtype: torch.dtype) -> Iterator[list[torch.Tensor]]:
    """The results of arguments that lie in one way, and in another."""
    if isinstance(case, Case):
        tensors = make_tensors(case, dtype)
        for memory_format in (torch.contiguous_format, torch.channels_last):
            yield list(run(case.problem, tensors, memory_format))
    else:
        arguments = case.arguments(dtype)
        for swapped in (False, True):
            yield case.run(arguments, swapped=swapped)


DISAGREEMENT = " in NCHW or by rows, otherwise "


def digests(dtypes: tuple[torch.dtype, ...] = DTYPES) -> dict[str, dict[str, list[str]]]:
    """Of the instruction set in use: dtype, case, and one digest for each of the case's results.

    Where the memory formats disagree it is two, and equal to none that the file can hold.
    """
    found = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # no bit follows it, and problems are small
    for dtype in dtypes:
        of_dtype = found[str(dtype).removeprefix("torch.")] = {}
        for case in (*cases(dtype), *golden_calls.calls(dtype)):
            assert str(case) not in of_dtype
            one, other = (
                [digest(result) for result in results] for results in both_ways(case, dtype)
            )
            of_dtype[str(case)] = [
                ours if ours == theirs else f"{ours}{DISAGREEMENT}{theirs}"
                for ours, theirs in zip(one, other, strict=True)
            ]
    torch.set_num_threads(threads)
    return found


# ---- the file


class Golden(NamedTuple):
    """tests/golden.json: ``digests[dtype][case][family]`` is a digest for each of its results."""

    numerics: int
    digests: dict[str, dict[str, dict[str, list[str]]]]


def read() -> Golden:
    content = json.loads(FILE.read_text())
    return Golden(
        content["numerics"],
        {
            dtype: {
                case: {name: text.split() for name, text in families.items()}
                for case, families in of_dtype.items()
            }
            for dtype, of_dtype in content["digests"].items()
        },
    )


def write(golden: Golden) -> None:
    """One case a line, so that a change shows as what it is."""
    blocks = []
    for dtype, of_dtype in golden.digests.items():
        lines = (
            f"  {json.dumps(case)}: "
            + json.dumps({name: " ".join(hexes) for name, hexes in families.items()})
            for case, families in of_dtype.items()
        )
        blocks.append(f" {json.dumps(dtype)}: {{\n" + ",\n".join(lines) + "\n }")
    FILE.write_text(
        f'{{"numerics": {golden.numerics}, "digests": {{\n' + ",\n".join(blocks) + "\n}}\n"
    )


def differences(golden: Golden, isa: str, found: dict[str, dict[str, list[str]]]) -> list[str]:
    """What an instruction set's results and the file disagree on, one line each."""
    lines = []
    for dtype, of_dtype in found.items():
        name = family(isa, getattr(torch, dtype))
        wanted_of_dtype = golden.digests.get(dtype, {})
        named = (*cases(getattr(torch, dtype)), *golden_calls.calls(getattr(torch, dtype)))
        results = {str(case): case.results for case in named}
        stale = wanted_of_dtype.keys() - of_dtype.keys()
        lines += [f"{dtype}, {case}: no such problem" for case in sorted(stale)]
        for case, ours in of_dtype.items():
            wanted = wanted_of_dtype.get(case, {}).get(name)
            if wanted is None:
                lines.append(f"{dtype}, {case}: no digest of family {name}")
                continue
            lines += [
                f"{dtype}, {case}, {result}: {mine} instead of {theirs} ({name})"
                for result, mine, theirs in zip(results[case], ours, wanted, strict=True)
                if mine != theirs
            ]
    return lines


# ---- the instruction sets of this CPU


def digests_of(isa: str) -> dict[str, dict[str, list[str]]] | None:
    """In this process or in one of its own; None where this CPU lacks the instruction set."""
    if isa == conv2d_ext.build_config()["isa"]:
        return digests()
    finished = run_forked(__file__, "--print", env={"CONV2D_EXT_CPU_ISA": isa})
    if finished.returncode and "this CPU" in finished.stderr:
        return None
    if finished.returncode:
        raise RuntimeError(f"{isa}: {finished.stderr}")
    found_isa, found = json.loads(finished.stdout)
    assert found_isa == isa
    return found


def merged(
    old: Golden | None, numerics: int, found: dict[str, dict[str, dict[str, list[str]]]]
) -> Golden:
    """The file after ``found`` (instruction set, dtype, case). Raises ValueError where that would
    change a digest under a number that has one, or lose those of what this CPU lacks."""
    digests: dict[str, dict[str, dict[str, list[str]]]] = {}
    for isa, of_isa in found.items():
        for dtype, of_dtype in of_isa.items():
            name = family(isa, getattr(torch, dtype))
            for case, hexes in of_dtype.items() if name else ():
                if any(DISAGREEMENT in text for text in hexes):
                    raise ValueError(f"{isa}, {dtype}, {case}: {', '.join(hexes)}")
                families = digests.setdefault(dtype, {}).setdefault(case, {})
                if families.setdefault(name, hexes) != hexes:
                    raise ValueError(f"{dtype}, {case}: {isa} disagrees with others of {name}")
    if old is None:
        return Golden(numerics, digests)
    if numerics < old.numerics:
        raise ValueError(f"this build's number is {numerics}, the file's {old.numerics}")
    changed, missing = [], []
    for dtype, of_dtype in digests.items():
        for case, families in of_dtype.items():
            for name, hexes in old.digests.get(dtype, {}).get(case, {}).items():
                if name not in families:
                    missing.append(f"{dtype}, {case}, {name}")
                    families[name] = hexes
                elif families[name] != hexes:
                    changed.append(f"{dtype}, {case}, {name}")
    if numerics == old.numerics and changed:
        raise ValueError(
            f"{len(changed)} problems have other bits, and the number is still {numerics}: raise "
            "kNumerics in csrc/numerics.h, or mend what changed them: " + "; ".join(changed[:10])
        )
    if numerics > old.numerics and missing:
        raise ValueError(
            f"the number has risen from {old.numerics} to {numerics}, and {len(missing)} digests "
            "can't be computed on this CPU: " + "; ".join(missing[:10])
        )
    return Golden(numerics, digests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the digests of this build")
    parser.add_argument("--print", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    config = conv2d_ext.build_config()
    if options.print:
        print(json.dumps([config["isa"], digests()]))
        return 0
    found = {isa: digests_of(isa) for isa in config["compiled_isas"]}
    lacking = [isa for isa, of_isa in found.items() if of_isa is None]
    found = {isa: of_isa for isa, of_isa in found.items() if of_isa is not None}
    for isa in lacking:
        print(f"{isa}: not checked, this CPU lacks it")
    if options.write:
        try:
            golden = merged(read() if FILE.exists() else None, config["numerics"], found)
        except ValueError as error:
            print(f"nothing written: {error}", file=sys.stderr)
            return 1
        write(golden)
        count = sum(map(len, golden.digests.values()))
        print(f"{FILE.name}: {count} problems, numerics {golden.numerics}, {FILE.stat().st_size} B")
        return 0
    golden = read()
    if golden.numerics != config["numerics"]:
        print(f"the build's number is {config['numerics']}, the file's {golden.numerics}")
    failed = golden.numerics != config["numerics"]
    for isa, of_isa in found.items():
        lines = differences(golden, isa, of_isa)
        failed = failed or bool(lines)
        print(f"{isa}: {len(lines)} differences", *lines[:20], sep="\n  ")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
