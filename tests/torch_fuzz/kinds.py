"""The kinds of cases, how often each is drawn, and what checks it."""

from __future__ import annotations

import random

from . import composition_cases, compositions, errors, modules, properties
from .cases import Case, random_explained, random_plain

KINDS = {
    "plain": (10, random_plain, properties.check_plain),
    "composition": (
        10,
        composition_cases.random_composition,
        compositions.check_composition,
    ),
    "wrong": (3, errors.random_wrong, errors.check_wrong),
    "module": (3, modules.random_module, modules.check_module),
    "explained": (1, random_explained, properties.check_explained),
}


def random_case(rng: random.Random, kinds: list[str] | None = None) -> Case:
    names = kinds or list(KINDS)
    kind = rng.choices(names, [KINDS[name][0] for name in names])[0]
    return KINDS[kind][1](rng)


def check(case: Case) -> None:
    """Raises Violation."""
    KINDS[case.kind][2](case)
