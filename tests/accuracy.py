"""The accuracy that conv2d_ext promises, relative to F.conv2d's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from loop_oracle import loop_oracle

from conv2d_ext.testing import (
    Oracle,
    Problem,
    Results,
    Tensors,
    aten_results,
    float64_oracle,
    library_results,
    make_tensors,
    unit_roundoff,
)


def times_pytorchs(device: torch.device | str) -> int:
    """How many times F.conv2d's error is allowed, beside one unit roundoff. On CUDA cuDNN deals
    short sums out to many threads, whose results are all but rounded once; ours stay one chain."""
    return 4 if torch.device(device).type == "cuda" else 2


# Of factors of one sign partial sums are as large as the sum of sizes. 64 additions in a row (of a
# chain, or of a chunk's chains) then have a rounding error of up to 2.1 unit roundoffs in the root
# mean square; 10^9 results draw one of 6.6 times that.
ONE_SIGN_ROUNDOFFS = 15


def over_draws(check: Callable[[int], None]) -> None:
    """check(8), a number of draws, or where it fails check(64) of others: the promise is of means,
    and of a few draws of short sums chance exceeds it at one seed in some sixty."""
    try:
        check(8)
    except AssertionError:
        check(64)


def assert_as_accurate(
    actual: torch.Tensor,
    aten: torch.Tensor,
    oracle: Oracle,
    what: str = "result",
    one_sign: bool = False,
) -> None:
    """Each error measure is at most so many times F.conv2d's plus one unit roundoff; the largest
    error, of factors of one sign, may be ONE_SIGN_ROUNDOFFS where that is more."""
    times = times_pytorchs(actual.device)
    actual, aten = (t.to(oracle.value.device) for t in (actual, aten))
    assert actual.shape == aten.shape == oracle.value.shape, what
    assert actual.dtype == aten.dtype, what
    # oneDNN's weight gradients of bfloat16, by AVX512_BF16 and of an odd number of pixels, now and
    # then multiply zeros by memory that nobody has written. A NaN of theirs counts as exact.
    if actual.dtype == torch.bfloat16:
        aten = torch.where(aten.isnan(), oracle.value.to(aten.dtype), aten)
    slack = unit_roundoff(actual.dtype)
    for measure in (Oracle.relative_l2, Oracle.max_scaled_error):
        ours, theirs = measure(oracle, actual), measure(oracle, aten)
        bound = times * theirs + slack
        if one_sign and measure is Oracle.max_scaled_error:
            bound = max(bound, ONE_SIGN_ROUNDOFFS * slack)
        assert ours <= bound, (
            f"{what}: {measure.__name__} is {ours:.3g}, F.conv2d's {theirs:.3g}, "
            f"the bound {bound:.3g}"
        )


def on_cpu(tensors: Tensors) -> Tensors:
    """For oracles: their float64 comes from the CPU, whatever device is tested."""
    return Tensors(*(t if t is None else t.cpu() for t in tensors))


def _joined(oracles: Iterable[Oracle]) -> Oracle:
    """One oracle for the results of several draws, laid end to end."""
    fields = zip(*((o.value, o.tail, o.magnitude) for o in oracles), strict=True)
    return Oracle(
        *(None if parts[0] is None else torch.cat([p.flatten() for p in parts]) for parts in fields)
    )


def _draws(problem: Problem) -> int:
    """Enough draws for about 512 elements of each result, so that no lucky rounding of F.conv2d's
    few sums becomes the bound."""
    sizes = map(math.prod, (problem.input_shape, problem.weight_shape, problem.output_shape))
    return max(1, min(8, 512 // max(1, min(sizes))))


def assert_results_as_accurate(
    problem: Problem,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    memory_format: torch.memory_format = torch.contiguous_format,
    one_sign: bool = False,
) -> None:
    """All directions of a floating or complex problem, against the oracle its dtype needs. Normal
    numbers, or (of one sign) their absolute values."""
    find_exact = loop_oracle if dtype in (torch.float64, torch.complex128) else float64_oracle
    found = []
    for seed in range(_draws(problem)):
        tensors = make_tensors(problem, dtype, memory_format, seed, device)
        if one_sign:
            tensors = Tensors(*(t if t is None else t.abs() for t in tensors))
        actual, aten = library_results(problem, tensors), aten_results(problem, tensors)
        found.append((actual, aten, find_exact(problem, on_cpu(tensors))))
    for name in Results._fields:
        ours, theirs, exact = (
            [getattr(results, name) for results in same] for same in zip(*found, strict=True)
        )
        if exact[0] is None:
            assert ours[0] is None, name
            continue
        for our, exact_one in zip(ours, exact, strict=True):
            assert our.shape == exact_one.value.shape, name
        ours, theirs = (torch.cat([t.flatten() for t in tensors]) for tensors in (ours, theirs))
        assert_as_accurate(ours, theirs, _joined(exact), f"{problem}: {name}", one_sign)
