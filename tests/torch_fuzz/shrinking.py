"""Simpler cases, the greatest simplification first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from conv2d_ext.testing import Problem

from .cases import OPERANDS, Case, Operand, shape_of


def simpler(case: Case) -> Iterator[Case]:
    """What is simpler in one respect, and still a problem with a result."""
    for candidate in _candidates(case):
        if candidate != case and _is_valid(candidate.problem):
            yield candidate


def _is_valid(problem: Problem) -> bool:
    try:
        shapes = [shape_of(problem, name) for name in OPERANDS]
    except (ZeroDivisionError, ValueError):
        return False
    return (
        all(size >= (i == 0) for shape in shapes for i, size in enumerate(shape[1:], 1))
        and problem.batch >= 0
        and min(problem.output_shape[2:]) >= 1
    )


def _candidates(case: Case) -> Iterator[Case]:
    for name, options in _simpler_options(case.options):
        del name
        yield dataclasses.replace(case, options=options)
    if case.threads != 1:
        yield dataclasses.replace(case, threads=1)
        yield dataclasses.replace(case, threads=2)
    for name in OPERANDS:
        for operand in _simpler_operands(getattr(case, name)):
            yield dataclasses.replace(case, **{name: operand})
    for problem in _simpler_problems(case.problem):
        options = case.options
        if "images" in options and problem.batch != case.problem.batch:
            first, last = options["images"]
            last = min(last, problem.batch)
            if first >= last:
                continue
            options = {**options, "images": [first, last]}
        yield dataclasses.replace(case, problem=problem, options=options)
    if case.dtype != "float32":
        yield dataclasses.replace(case, dtype="float32")


def _simpler_options(options: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in options.items():
        if isinstance(value, list) and name in ("layers", "changes", "mutations"):
            for i in range(len(value)):
                yield name, {**options, name: value[:i] + value[i + 1 :]}
        elif name in ("images", "copies", "unbatched", "autograd", "dtypes"):
            yield name, {k: v for k, v in options.items() if k != name}


def _simpler_operands(operand: Operand) -> Iterator[Operand]:
    if operand.values != "normal":
        yield dataclasses.replace(operand, values="normal")
    if operand.layout is not None:
        yield dataclasses.replace(operand, layout=None)
        for name in operand.layout:
            rest = {k: v for k, v in operand.layout.items() if k != name}
            yield dataclasses.replace(operand, layout=rest or None)


def _simpler_problems(problem: Problem) -> Iterator[Problem]:
    def changed(**fields: Any) -> Problem:
        return dataclasses.replace(problem, **fields)

    if problem.bias:
        yield changed(bias=False)
    if problem.groups > 1:
        group_in = problem.in_channels // problem.groups
        group_out = problem.out_channels // problem.groups
        for groups in {1, problem.groups // 2, problem.groups - 1}:
            yield changed(
                groups=groups, in_channels=groups * group_in, out_channels=groups * group_out
            )
    for batch in _smaller(problem.batch, 1):
        yield changed(batch=batch)
    for name in ("in_channels", "out_channels"):
        per_group = getattr(problem, name) // problem.groups
        for size in _smaller(per_group, 1):
            yield changed(**{name: size * problem.groups})
    for name, least in (("in_size", 1), ("kernel", 1), ("stride", 1), ("dilation", 1)):
        for i in range(2):
            for size in _smaller(getattr(problem, name)[i], least):
                pair = list(getattr(problem, name))
                pair[i] = size
                yield changed(**{name: tuple(pair)})
    if problem.padding == "same":
        yield changed(padding=(0, 0))
    else:
        for i in range(len(problem.padding)):
            for size in _smaller(problem.padding[i], 0):
                padding = list(problem.padding)
                padding[i] = size
                yield changed(padding=tuple(padding))


def _smaller(value: int, least: int) -> list[int]:
    return sorted({least, (value + least) // 2, value - 1} - {value, least - 1})
