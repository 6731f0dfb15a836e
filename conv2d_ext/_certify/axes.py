"""Which runs are held against each other, and what was found along each axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import Tensor

from conv2d_ext._certify import locate
from conv2d_ext._certify.bits import difference, digest
from conv2d_ext._certify.leaves import Print, print_of
from conv2d_ext._certify.record import Key, Recording
from conv2d_ext._certify.result import AXES, Axis, Difference, Finding, Location, Mode
from conv2d_ext._certify.runs import ModelRaised, Run, Runner, Setting, example_of

Tensors = dict[str, "Tensor | None"]
"""By name; None where the example's part can't be told."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run. Batch sizes and places are of batches with the example, beside the example
    alone."""

    batch_sizes: tuple[int, ...]
    places: tuple[int, ...]
    """In the largest batch; the reference is place 0."""
    threads: tuple[int, ...]
    runs: int
    formats: bool
    """Whether an input has a channels_last format."""
    gradients: bool

    @property
    def largest(self) -> int:
        return max(self.batch_sizes)

    def pairs(self, axis: str) -> list[tuple[Setting, Setting]]:
        """(reference, what is held against it), in order."""
        alone = Setting(threads=self.threads[0])
        largest = dataclasses.replace(alone, batch=self.largest)
        both = (alone, largest)
        change = dataclasses.replace
        if axis == "batch":
            return [(alone, change(alone, batch=b)) for b in self.batch_sizes if b > 1]
        if axis == "place":
            return [(largest, change(largest, place=p)) for p in self.places if p]
        if axis == "threads":
            return [(s, change(s, threads=t)) for s in both for t in self.threads[1:]]
        if axis == "runs":
            # Where most threads take part, most can change from run to run.
            busy = [change(s, threads=max(self.threads)) for s in both]
            return [(s, change(s, repeat=r)) for s in busy for r in range(2, self.runs + 1)]
        return [(s, change(s, channels_last=True)) for s in both] if self.formats else []

    def why_not(self, axis: str) -> str:
        """Why an axis has no runs."""
        if axis == "format":
            return "no input has four dimensions"
        return {"place": "one place only", "threads": "one number of threads only"}.get(
            axis, "one run only"
        )


class Examination:
    """One mode's runs."""

    def __init__(self, runner: Runner, plan: Plan, mode: str, notes: dict[str, None]) -> None:
        self._runner, self._plan, self._mode, self._notes = runner, plan, mode, notes
        self._alone = Setting(threads=plan.threads[0])
        self._kept: dict[tuple[Setting, bool], Run] = {}
        self._prints: dict[str, Print] = {}
        self._recordings: dict[tuple[Setting, bool, bool], Recording] = {}
        self._names: dict[bool, dict[Key, tuple[str, int, str]]] = {}
        self._comparisons: list[list[locate.Compared]] = []
        self._digests: dict[str, dict[str, str]] = {}
        self._no_gradients = "not asked for"
        self._shows_nothing = ""

    def examine(self) -> Mode:
        """Raises ModelRaised, and TypeError where there is nothing to compare."""
        self._runner.mode = self._mode
        self._look_alone()
        if self._plan.gradients:
            self._no_gradients = self._why_no_gradients()
        axes = {}
        for axis in AXES:
            findings = [self._find(axis, False)]
            if self._no_gradients:
                findings.append(Finding("skipped", self._no_gradients))
            else:
                findings.append(self._find(axis, True))
            axes[axis] = Axis(*findings)
        self._record_largest()
        return Mode(
            axes,
            locate.coupled_calls(self._comparisons),
            locate.op_table(self._comparisons),
            self._digests,
        )

    # ---- references

    def _look_alone(self) -> None:
        """The example alone, and which of its leaves have no batch."""
        alone = self._reference(self._alone, False)
        self._prints = {
            leaf.name: print_of(leaf.value) for leaf in alone.leaves if leaf.value is not None
        }
        for leaf in alone.leaves:
            if leaf.value is None:
                self._note(f"output{leaf.name} is {leaf.kind}: not compared")
        if not self._prints:
            raise TypeError(
                "certify: model: wanted an output that holds tensors, got "
                f"{type(alone.output).__name__}"
            )
        probe = self._runner.run(dataclasses.replace(self._alone, batch=2))
        self._find_leaves_without_batch(probe)
        # Row 1 is another example.
        other = example_of(probe, alone, self._prints, Setting(batch=2, place=1))
        held = {
            name: value is not None and digest(value) == self._prints[name].digest
            for name, value in other.items()
            if name in self._prints and self._prints[name].is_floating
        }
        held = {n: h for n, h in held.items() if n not in self._runner.without_batch}
        if not held or not all(held.values()):
            return
        same = "the outputs are the same for another example"
        if any(e.is_floating_point() for e in self._runner.examples):
            self._shows_nothing = f"{same}: nothing is shown"
        else:
            # Its integers are the same in another order, of which a sum knows nothing.
            self._note(f"{same}, which has the same integers in another order")

    def _find_leaves_without_batch(self, probe: Run) -> None:
        shapes = {leaf.name: leaf.value.shape for leaf in probe.leaves if leaf.value is not None}
        # Where there are more, a list grows with the batch, as those of detection models do: its
        # entries have no batch dimension, and still are an example's each.
        if len(shapes) <= len(self._prints):
            self._runner.without_batch = {
                name for name, p in self._prints.items() if shapes.get(name) == p.shape
            }
        for name in sorted(self._runner.without_batch):
            self._note(f"output{name} has no batch dimension: compared whole, no gradient of it")

    def _why_no_gradients(self) -> str:
        """ "" where gradients can be compared."""
        examples = self._runner.examples
        if not any(e.is_floating_point() or e.is_complex() for e in examples):
            return "no input is of a floating-point type"
        try:
            run = self._reference(self._alone, True)
        except ModelRaised as error:
            return f"the backward raised {type(error.__cause__).__name__}: {error.__cause__}"
        if all(g is None for g in run.gradients):
            return "no output is differentiable with respect to an input"
        for index, gradient in enumerate(run.gradients):
            if gradient is None and examples[index].is_floating_point():
                self._note(f"input {index} has no gradient")
            elif gradient is not None and not gradient.any():
                self._note(f"the gradient of input {index} is zero everywhere: it shows little")
        return ""

    def _reference(self, setting: Setting, gradients: bool) -> Run:
        key = (setting, gradients)
        if key not in self._kept:
            self._kept[key] = self._runner.run(setting, gradients)
        return self._kept[key]

    # ---- one axis

    def _find(self, axis: str, gradients: bool) -> Finding:
        pairs = self._plan.pairs(axis)
        if not pairs:
            return Finding("skipped", self._plan.why_not(axis))
        examples_only = axis in ("batch", "place")
        differing, largest, compared = [], None, 0
        for reference, setting in pairs:
            expected = self._tensors(reference, gradients, examples_only)
            actual = self._tensors(setting, gradients, examples_only)
            missing = [n for n, t in actual.items() if t is None or expected.get(n) is None]
            for name in missing:
                self._note(f"{name}: no part of it could be told to be the example's: not compared")
            pairwise = {n: t for n, t in actual.items() if n not in missing}
            compared += len(pairwise)
            equal, found = _held_against(expected, pairwise)
            if not equal:
                differing.append((reference, setting))
                largest = found.merged(largest) if found else largest
        if not compared:
            return Finding("not comparable", "the example's part of the outputs can't be told")
        if not differing and self._shows_nothing and not gradients:
            return Finding("not comparable", self._shows_nothing)
        if not differing:
            return Finding("equal", runs=len(pairs))
        return Finding(
            "differs",
            runs=len(pairs),
            differing=tuple(_short(axis, setting) for _, setting in differing),
            difference=largest,
            first=self._locate(*differing[0], gradients, examples_only),
        )

    def _tensors(self, setting: Setting, gradients: bool, examples_only: bool) -> Tensors:
        """What is compared of a run, by name. Its digests are kept."""
        references = {p[0] for axis in AXES for p in self._plan.pairs(axis)}
        run = (
            self._reference(setting, gradients)
            if setting in references
            else self._runner.run(setting, gradients)
        )
        found: Tensors
        if gradients:
            rows = slice(setting.place, setting.place + 1) if examples_only else slice(None)
            found = {
                f"gradient of input {i}": g[rows]
                for i, g in enumerate(run.gradients)
                if g is not None
            }
        elif examples_only:
            alone = self._reference(self._alone, False)
            leaves = example_of(run, alone, self._prints, setting)
            found = {f"output{name}": value for name, value in leaves.items()}
        else:
            found = {f"output{leaf.name}": leaf.value for leaf in run.leaves}
            found = {n: t for n, t in found.items() if t is not None}
        whole = "" if examples_only or setting.batch == 1 else ", whole batch"
        kept = self._digests.setdefault(f"{setting}{whole}", {})
        kept.update({name: digest(t) for name, t in found.items() if t is not None})
        return found

    # ---- the first call

    def _locate(
        self, reference: Setting, setting: Setting, gradients: bool, examples_only: bool
    ) -> Location:
        try:
            compared = self._compare(reference, setting, gradients, examples_only)
            if gradients not in self._names:
                self._names[gradients] = self._runner.names(self._alone, gradients)
        except ModelRaised as error:
            return Location(None, False, note=f"the recorded run raised: {error.__cause__}")
        return locate.first_variation(compared, self._names[gradients])

    def _compare(
        self, reference: Setting, setting: Setting, gradients: bool, examples_only: bool
    ) -> list[locate.Compared]:
        expected, actual = (
            self._recording(s, gradients, examples_only) for s in (reference, setting)
        )
        compared = locate.compare(expected, actual)
        # The table is about what is promised; formats aren't.
        if not setting.channels_last:
            self._comparisons.append(compared)
        return compared

    def _recording(self, setting: Setting, gradients: bool, examples_only: bool) -> Recording:
        narrowed = examples_only and setting.batch > 1
        key = (setting, gradients, narrowed)
        if key not in self._recordings:
            alone = self._recording(self._alone, gradients, False) if narrowed else None
            self._recordings[key] = self._runner.record(setting, gradients, alone)
        return self._recordings[key]

    def _record_largest(self) -> None:
        """So that the table of calls stands on some runs where nothing differed, too."""
        last = dataclasses.replace(
            self._alone, batch=self._plan.largest, place=self._plan.largest - 1
        )
        busy = dataclasses.replace(self._alone, batch=2, threads=max(self._plan.threads))
        single = dataclasses.replace(busy, threads=self._alone.threads)
        for gradients in (False,) if self._no_gradients else (False, True):
            try:
                self._compare(self._alone, last, gradients, True)
                if busy != single:
                    self._compare(single, busy, gradients, False)
            except ModelRaised as error:
                self._note(f"a recorded run raised: {error.__cause__}")

    def _note(self, text: str) -> None:
        self._notes[text] = None


def _short(axis: str, setting: Setting) -> str:
    """A setting by what matters along an axis."""
    of_batch = f"batch {setting.batch}"
    return {
        "batch": of_batch,
        "place": f"place {setting.place} of {setting.batch}",
        "threads": f"{setting.threads} threads at {of_batch}",
        "runs": f"run {setting.repeat} at {of_batch}",
        "format": f"channels_last at {of_batch}",
    }[axis]


def _held_against(expected: Tensors, actual: Tensors) -> tuple[bool, Difference | None]:
    """(all bits equal, the largest difference; None where shapes or dtypes differ)"""
    equal, largest = True, None
    for name, value in actual.items():
        reference = expected[name]
        if reference is None or value is None:
            continue
        if digest(reference) == digest(value):
            continue
        equal = False
        if (reference.shape, reference.dtype) == (value.shape, value.dtype):
            largest = difference(reference, value).merged(largest)
    return equal and expected.keys() >= actual.keys(), largest


def count_runs(plan: Plan, modes: Iterable[str]) -> int:
    """How many runs there are at least, for the progress."""
    each = sum(len(plan.pairs(axis)) for axis in AXES)
    return len(list(modes)) * (each + 4) * (2 if plan.gradients else 1)
