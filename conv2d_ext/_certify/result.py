"""What `certify` returns: plain data that goes to JSON and comes back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

JSON_SCHEMA = 1

TORCH = "F.*"
LIBRARY = "batch_invariant"
"""The two modes: the model as it is, and under `conv2d_ext.batch_invariant()`."""

AXES = ("batch", "place", "threads", "runs", "format")
DECIDING = AXES[:4]
"""The axes that `passed` asks for; the format only on request."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far apart two tensors are, or several pairs at most."""

    elements: int
    """How many were compared."""
    differing: int
    """Of them, how many have other bits."""
    largest: float
    """The largest absolute difference, among those where both are finite."""
    largest_ulp: int | None
    """The same in steps from one number of the dtype to the next; None for integers."""
    not_finite: int
    """How many differ where one of the two is infinite or a NaN."""

    def merged(self, other: Difference | None) -> Difference:
        if other is None:
            return self
        ulps = [u for u in (self.largest_ulp, other.largest_ulp) if u is not None]
        return Difference(
            self.elements + other.elements,
            self.differing + other.differing,
            max(self.largest, other.largest),
            max(ulps) if ulps else None,
            self.not_finite + other.not_finite,
        )


@dataclasses.dataclass(frozen=True)
class Call:
    """One call that a model makes, as its user knows it."""

    module: str
    """The module's path, such as "layer1.0.conv2"; "" for the model itself."""
    module_class: str
    """The name of the module's class."""
    module_call: int
    """Which call of this module in a run of the model, from 1."""
    op: str
    """What PyTorch's dispatcher ran, such as "aten::addmm"."""
    op_call: int
    """Which call of `op` in this call of the module, from 1."""
    function: str = ""
    """The function that was called, such as "torch.nn.functional.linear"; "" where it isn't known.
    Of a backward it is the function whose backward this is."""
    function_call: int = 0
    """Which call of `function` in this call of the module, from 1; 0 where it isn't known."""
    where: str = ""
    """File and line of the call outside of PyTorch; "" where they aren't known."""
    backward: bool = False
    """Whether a backward made the call."""
    node: str = ""
    """Of a backward, the autograd node, such as "AddmmBackward0"."""


@dataclasses.dataclass(frozen=True)
class Location:
    """The first call whose bits differ."""

    call: Call | None
    """None where none could be told; `note` says why."""
    inputs_equal: bool
    """True: everything the call was given has equal bits."""
    couples: str = ""
    """Why examples are coupled here by definition; "" where they are not."""
    note: str = ""
    not_comparable: int = 0
    """How many calls before it could not be compared."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Outputs or gradients along one axis."""

    status: str
    """One of "equal", "differs", "not comparable" and "skipped"."""
    reason: str = ""
    """Why it was skipped, or can't be compared."""
    runs: int = 0
    """How many runs were held against a reference."""
    differing: tuple[str, ...] = ()
    """The runs whose bits differ."""
    difference: Difference | None = None
    """The largest over these runs."""
    first: Location | None = None

    @property
    def is_coupled(self) -> bool:
        """It differs from a call on that couples examples by definition."""
        return self.status == "differs" and self.first is not None and bool(self.first.couples)


@dataclasses.dataclass(frozen=True)
class Axis:
    """What was found along one axis."""

    outputs: Finding
    """Of the model's outputs."""
    gradients: Finding
    """Of the gradients of its inputs."""

    @property
    def passed(self) -> bool:
        """Outputs and gradients are equal. What was skipped with a reason doesn't count, nor does
        what differs from a call on that couples examples by definition."""
        findings = (self.outputs, self.gradients)
        return all(f.status in ("equal", "skipped") or f.is_coupled for f in findings)

    @property
    def is_coupled(self) -> bool:
        """Outputs or gradients differ from a call on that couples examples by definition."""
        return self.outputs.is_coupled or self.gradients.is_coupled


@dataclasses.dataclass(frozen=True)
class OpCalls:
    """All calls of one op, in the runs that were recorded."""

    op: str
    """Such as "aten::addmm"."""
    covered: bool
    """Whether it is one of this library's."""
    calls: int
    """How many of them there were."""
    varied: int
    """Calls that gave other bits for equal inputs."""
    unknown: int
    """Calls of which this isn't known: their inputs differed, or no example could be told in
    them."""
    modules: tuple[str, ...] = ()
    """Where it varied: the paths of the first few modules."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """What was found in one mode."""

    axes: dict[str, Axis]
    """By name: "batch", "place", "threads", "runs" and "format"."""
    couples: tuple[str, ...] = ()
    """Calls that couple examples by definition, or draw random numbers."""
    calls: tuple[OpCalls, ...] = ()
    """The ops that the recorded runs called."""
    digests: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    """Of each run: SHA-256 of each output and input gradient, of the example or the batch."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """This certificate held against another machine's."""

    file: str
    """Where the other certificate was read from."""
    same: bool
    """Whether all digests are equal."""
    compared: int
    """How many digests were held against each other."""
    differing: tuple[str, ...] = ()
    """The first few that differ, or what kept them from being compared."""
    notes: tuple[str, ...] = ()
    """What is different about the machines."""


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Whether a model's bits depend on batch, place, threads, runs and memory format.

    `print` shows it as text; `to_json()` and `to_markdown()` give it to programs and to pages.
    """

    model: str
    """The model's class."""
    passed: bool
    """Under the last of `modes`, no axis in `require` failed: its bits are equal, or it was left
    out, or they first differ after a call that computes its examples together, such as batch norm
    in training."""
    require: tuple[str, ...]
    """The axes that have to pass."""
    modes: dict[str, Mode]
    """By name: "F.*", PyTorch alone, and "batch_invariant"."""
    inputs: tuple[dict[str, Any], ...]
    """Of each input: the shape and dtype of one example, and the SHA-256 of its bits."""
    parameters: str
    """SHA-256 over the names and bits of all parameters and buffers."""
    settings: dict[str, Any]
    """Batch sizes, places, threads, formats, number of runs, seed, and whether the model trains."""
    machine: dict[str, Any]
    """CPU, instruction sets of PyTorch and of this library, `numerics` and versions."""
    notes: tuple[str, ...] = ()
    """What wasn't compared, and why."""
    against: Agreement | None = None
    """This certificate held against another machine's, where that was asked for."""

    @property
    def mode(self) -> str:
        """The mode that `passed` is about."""
        return list(self.modes)[-1]

    def to_json(self) -> str:
        """This certificate as JSON, for `read_certificate` and `--against`."""
        document = {"schema": JSON_SCHEMA, **dataclasses.asdict(self)}
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """This certificate as a page of Markdown."""
        from conv2d_ext._certify.report import markdown

        return markdown(self)

    def __str__(self) -> str:
        from conv2d_ext._certify.report import text

        return text(self)
