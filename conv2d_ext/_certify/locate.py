"""Two recordings of one model compared: which calls vary, and which of them is the first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from conv2d_ext._certify.leaves import Print
from conv2d_ext._certify.record import Key, Record, Recording, call_of
from conv2d_ext._certify.result import Location, OpCalls

HELD = "held"
VARIED = "varied"
INPUTS_DIFFER = "inputs differ"
UNKNOWN = "not comparable"

_BATCH_NORM = "batch norm in training mode"
_RANDOM = "random numbers"


@dataclasses.dataclass(frozen=True)
class Compared:
    """One call in two runs."""

    record: Record
    state: str
    floats_equal: bool
    """Has floating-point inputs, all of them equal."""
    other_numbers: bool
    """It was given other floating-point numbers as arguments."""
    couples: str


def compare(expected: Recording, actual: Recording) -> list[Compared]:
    """The calls of `actual` in order, with what became of each. A call that `expected` lacks is not
    comparable. Outputs from which no result follows don't count."""
    used = actual.used()
    return [
        _compare(record, expected.records.get(key), [(key, i) in used for i in _indices(record)])
        for key, record in actual.records.items()
    ]


def _indices(record: Record) -> range:
    return range(len(record.outputs))


def _compare(actual: Record, expected: Record | None, used: list[bool]) -> Compared:
    couples = _coupling(actual)
    if expected is None or len(expected.outputs) != len(actual.outputs):
        return Compared(actual, UNKNOWN, False, False, couples)
    inputs = _equal_bits(expected.inputs, actual.inputs)
    outputs = [
        equal
        for equal, is_used in zip(_equal_bits(expected.outputs, actual.outputs), used, strict=True)
        if is_used
    ]
    floats = [
        equal
        for equal, p in zip(inputs, expected.inputs, strict=False)
        if p is not None and p.is_floating
    ]
    if len(expected.inputs) != len(actual.inputs):
        state = UNKNOWN
    elif False in outputs:
        state = INPUTS_DIFFER if False in inputs else UNKNOWN if None in inputs else VARIED
    elif None in outputs:
        state = UNKNOWN
    elif False in inputs:
        # Equal outputs from other inputs show nothing of the call.
        state = INPUTS_DIFFER
    else:
        state = UNKNOWN if None in inputs else HELD
    return Compared(
        actual,
        state,
        bool(floats) and all(floats) and False in outputs,
        expected.numbers != actual.numbers,
        couples,
    )


def _equal_bits(expected: list[Print | None], actual: list[Print | None]) -> list[bool | None]:
    """None where one of the two has no print."""
    return [
        None if a is None or b is None else a.digest == b.digest
        for a, b in zip(expected, actual, strict=False)
    ]


def _coupling(record: Record) -> str:
    if record.is_random:
        return _RANDOM
    if record.trains_batch_norm and record.inputs:
        # Of a whole batch, or of a weight, it isn't known whose statistics these are. An instance
        # norm is a batch norm of one image, whose channels are those of all examples.
        image = record.inputs[0]
        if image is None or image.layout.dim not in (-1, 1):
            return _BATCH_NORM
    return ""


def first_variation(compared: list[Compared], names: dict[Key, tuple[str, int, str]]) -> Location:
    """The first call that gave other bits for equal inputs, or what comes nearest to it."""

    def unknown_before(stop: Compared | None) -> int:
        count = 0
        for c in compared:
            if c is stop:
                break
            count += c.state == UNKNOWN
        return count

    # A call without tensors, as arange(batch), makes other values for another batch by right. It
    # is the cause only where there is no other.
    varied = [c for c in compared if c.state == VARIED]
    for choice in (
        [c for c in varied if c.record.inputs or c.couples],
        [c for c in compared if c.floats_equal],
        varied,
    ):
        if choice:
            first = choice[0]
            note = ""
            if first.state != VARIED:
                note = "its inputs that are not floating-point numbers differ"
            elif first.other_numbers:
                note = "it was given other numbers as arguments"
            elif not first.record.inputs:
                note = "it was given no tensors"
            return Location(
                call_of(first.record, names),
                first.state == VARIED,
                first.couples,
                note,
                unknown_before(first),
            )
    for first in compared:
        if first.state == INPUTS_DIFFER:
            return Location(
                call_of(first.record, names),
                False,
                first.couples,
                "its inputs differ already: what made them could not be compared",
                unknown_before(first),
            )
    return Location(None, False, "", "no recorded call varied", unknown_before(None))


def coupled_calls(comparisons: Iterable[list[Compared]]) -> tuple[str, ...]:
    """What couples examples by definition, once for each call, in words."""
    found = {}
    for compared in comparisons:
        for c in compared:
            if c.couples and not c.record.key[0]:
                _, module, call, op, _ = c.record.key
                where = module or "the model itself"
                found[c.record.key] = (
                    f"{where} ({c.record.module_class}), call {call}: {op}: {c.couples}"
                )
    return tuple(found.values())


def op_table(comparisons: Iterable[list[Compared]]) -> tuple[OpCalls, ...]:
    """Every op of these runs. A call varied if it did in one of them, and is unknown if it was in
    all of them; those that varied come first."""
    states: dict[Key, set[str]] = {}
    for compared in comparisons:
        for c in compared:
            states.setdefault(c.record.key, set()).add(c.state)
    by_op: dict[str, list[tuple[Key, set[str]]]] = {}
    for key, found in states.items():
        by_op.setdefault(key[3], []).append((key, found))
    table = []
    for op, calls in by_op.items():
        varied = [key for key, found in calls if VARIED in found]
        unknown = [key for key, found in calls if not found & {VARIED, HELD}]
        modules = list(dict.fromkeys(key[1] or "the model itself" for key in varied))
        covered = op.startswith("conv2d_ext::")
        table.append(
            OpCalls(op, covered, len(calls), len(varied), len(unknown), tuple(modules[:3]))
        )
    return tuple(sorted(table, key=lambda row: (-row.varied, row.covered, row.op)))
