"""Values: the accuracy promise, integers, and what is not finite or underflows."""

from __future__ import annotations

import dataclasses
import math

import torch

from conv2d_ext.testing import Oracle, Problem, Results, Tensors, unit_roundoff
from tests.loop_oracle import loop_oracle

from .bits import describe, require_same_bits
from .calls import library_results_of, peer_forward, peer_results
from .cases import TAME, Case, Violation, case_tensors


def require_values(case: Case, tensors: Tensors, results: Results) -> None:
    problem = case.problem
    if not (tensors.input.is_floating_point() or tensors.input.is_complex()):
        wide = Tensors(*(t if t is None else t.to(torch.int64) for t in tensors))
        exact = peer_forward(problem, wide).to(case.torch_dtype)
        require_same_bits("integers", results.output, exact, "output")
        return
    used = [operand.values for operand in case.operands]
    if all(values in TAME for values in used):
        _require_accuracy(case, tensors, results)
    elif not tensors.input.is_complex():
        _require_special_values(case, tensors, results)


def _oracles(problem: Problem, tensors: Tensors, double: bool) -> Results:
    products = math.prod(problem.output_shape) * math.prod(problem.weight_shape[1:])
    if double and products <= 100_000 and math.prod(problem.kernel) <= 50:
        return loop_oracle(problem, tensors)
    wide = torch.complex128 if tensors.input.is_complex() else torch.float64
    wider = Tensors(*(t if t is None else t.to(wide) for t in tensors))
    exact = peer_results(problem, wider)
    magnitude = peer_results(problem, Tensors(*(t if t is None else t.abs() for t in wider)))
    return Results(
        *(None if e is None else Oracle(e, None, m) for e, m in zip(exact, magnitude, strict=True))
    )


# From so many elements on F.conv2d's largest and mean errors are no accident. Fewer are held to
# what chains of 64 products may lose, which still finds a product too few or too many.
_MANY = 512
_FEW_ROUNDINGS = 16.0
_DRAWS = 8


def _require_accuracy(case: Case, tensors: Tensors, results: Results) -> None:
    """Beyond the bound, more draws decide: no lucky rounding of F.conv2d's becomes the bound."""
    draws = [_drawn(case, tensors, results)]
    if _accuracy_violation(case, draws) is None:
        return
    for draw in range(1, _DRAWS):
        again = dataclasses.replace(case, seed=case.seed + draw)
        tensors = Tensors(*case_tensors(again).values())
        draws.append(_drawn(again, tensors, library_results_of(again, again.problem, tensors)))
    message = _accuracy_violation(case, draws)
    if message is not None:
        raise Violation("accuracy", message)


def _drawn(case: Case, tensors: Tensors, results: Results) -> tuple[Results, Results, Results]:
    double = case.dtype in ("float64", "complex128")
    oracles = _oracles(case.problem, tensors, double)
    return results, peer_results(case.problem, tensors), oracles


def _joined(oracles: list[Oracle]) -> Oracle:
    parts = [[getattr(o, name) for o in oracles] for name in ("value", "tail", "magnitude")]
    return Oracle(*(None if p[0] is None else torch.cat([t.flatten() for t in p]) for p in parts))


def _accuracy_violation(case: Case, draws: list[tuple[Results, Results, Results]]) -> str | None:
    slack = unit_roundoff(case.torch_dtype)
    repeats = any("expand" in (operand.layout or {}) for operand in case.operands)
    for name in Results._fields:
        ours, theirs, exact = (
            [getattr(r, name) for r in column] for column in zip(*draws, strict=True)
        )
        if exact[0] is None or not ours[0].numel():
            continue
        if ours[0].shape != theirs[0].shape or ours[0].dtype != theirs[0].dtype:
            return f"{name}: {describe(ours[0])}, F.conv2d's {describe(theirs[0])}"
        ours, theirs = (torch.cat([t.flatten() for t in tensors]) for tensors in (ours, theirs))
        exact = _joined(exact)
        norm = torch.linalg.vector_norm(exact.value).item()
        spread = torch.linalg.vector_norm(exact.magnitude).item() / norm if norm else math.inf
        for measure, least in (
            ("max_scaled_error", _FEW_ROUNDINGS * slack),
            ("relative_l2", _FEW_ROUNDINGS * slack * spread),
        ):
            error, allowed = (getattr(exact, measure)(t) for t in (ours, theirs))
            bound = 2 * allowed + slack
            # In float64 the oracle may be no better than its subject.
            uncertain = case.dtype in ("float64", "complex128") and exact.tail is None
            if ours.numel() < _MANY or uncertain or repeats:
                bound = max(bound, least * (8 if uncertain else 1))
            if error > bound:
                return (
                    f"{name}: {measure} is {error / slack:.3g} unit roundoffs, F.conv2d's "
                    f"{allowed / slack:.3g}, the bound {bound / slack:.3g}, of {ours.numel()} "
                    f"elements in {len(draws)} draws"
                )
    return None


def _require_special_values(case: Case, tensors: Tensors, results: Results) -> None:
    """Infinities, NaNs, zeros and what under- or overflows, against float64 of padded copies."""
    problem, dtype = case.problem, case.torch_dtype
    wide = Tensors(*(t if t is None else t.double() for t in tensors))
    exact = peer_results(problem, wide, padded=True)
    absolute = Tensors(*(t if t is None else t.abs() for t in wide))
    magnitude = peer_results(problem, absolute, padded=True)
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    info, wide_info = torch.finfo(dtype), torch.finfo(computed)
    largest = max(
        (t.abs().nan_to_num(0, 0, 0).max().item() for t in wide if t is not None and t.numel()),
        default=0.0,
    )
    lengths = {
        "output": math.prod(problem.weight_shape[1:]) + 1,
        "grad_input": problem.out_channels // problem.groups * math.prod(problem.kernel),
        "grad_weight": problem.batch * math.prod(problem.output_shape[2:]),
        "grad_bias": problem.batch * math.prod(problem.output_shape[2:]),
    }
    for name, ours, value, scale in zip(Results._fields, results, exact, magnitude, strict=True):
        if value is None or not ours.numel():
            continue
        length = lengths[name]
        # Products and sums below the smallest normal number lose an absolute amount; bfloat16's
        # instructions take denormal operands and results as zeros.
        lost = wide_info.tiny * wide_info.eps * length
        if dtype == torch.bfloat16:
            lost = 2 * wide_info.tiny * length * (1 + largest)
        floor = lost + info.tiny * info.eps
        relative = (length + 2) * unit_roundoff(computed) + 2 * unit_roundoff(dtype)
        actual = ours.double()
        safe = scale.isfinite() & (scale < info.max / 4)
        wrong = safe & ~((actual - value).abs() <= relative * scale + floor)
        extra = torch.zeros_like(wrong)
        if name == "grad_input":
            extra = _infinite_channels(problem, tensors.weight) & actual.isnan()
        if largest < math.sqrt(wide_info.max) / 1e3 and largest < info.max / 1e3:
            # Nothing overflows, so whatever is not finite comes from an operand that isn't.
            agrees = torch.where(value.isnan(), actual.isnan(), actual == value)
            wrong |= ~scale.isfinite() & ~agrees
        wrong &= ~extra
        if dtype == torch.bfloat16 and any(
            o.values in ("denormal", "mixed") for o in case.operands
        ):
            wrong &= ~actual.isnan()  # denormal operands count as zeros: Inf * 0
        if wrong.any():
            where = tuple(wrong.nonzero()[0].tolist())
            raise Violation(
                "special values",
                f"{name}: {int(wrong.sum())} of {wrong.numel()} elements, the first {where}: "
                f"{actual[where].item()!r}, exact {value[where].item()!r}, "
                f"sum of absolutes {scale[where].item():.3g}",
            )


def _infinite_channels(problem: Problem, weight: torch.Tensor) -> torch.Tensor:
    """Channels of the input that a tap meets which is Inf or NaN: there grad_input may count what
    lies beyond grad_output's border."""
    grouped = (~weight.isfinite()).reshape(problem.groups, -1, *weight.shape[1:])
    return grouped.any(1).any(-1).any(-1).reshape(1, -1, 1, 1)
