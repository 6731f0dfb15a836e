"""python -m benchmarks.variance: which of PyTorch's calls give an example other bits elsewhere.

For each call an example's result alone, on one thread, is held against the same example's
  batch    first in larger batches,
  place    at every place of the largest batch, beside its result in the first,
  threads  on 2, 3 and 4 threads, alone and in the largest batch,
for the result and for the gradients of the tensors that have a batch: as PyTorch computes them, and
under conv2d_ext.batch_invariant(). Bits are compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import conv2d_ext
from benchmarks import machine
from benchmarks.variance_calls import Call, Shape, all_calls
from conv2d_ext.testing import num_threads

DTYPES = (torch.float32, torch.bfloat16)
CONTIGUOUS, CHANNELS_LAST, SLICED = FORMATS = ("contiguous", "channels_last", "sliced")
THREADS = (2, 3, 4)
REASONS = ("batch", "place", "threads")
# Which dtypes and layouts, forward, backward, worst difference, under batch_invariant.
Row = tuple[str, str, str, str, str]
_BITS = {4: torch.int32, 2: torch.int16, 8: torch.int64}


@dataclasses.dataclass
class Verdict:
    """What was found of one direction of one call."""

    reasons: set[str] = dataclasses.field(default_factory=set)
    worst: float = 0.0  # the largest difference, as a share of the largest magnitude of an example
    measured: bool = False

    def text(self) -> str:
        if not self.measured:
            return "—"
        if not self.reasons:
            return "holds"
        return "varies: " + ", ".join(reason for reason in REASONS if reason in self.reasons)


@dataclasses.dataclass
class Finding:
    """A call in one dtype and one memory format."""

    forward: Verdict = dataclasses.field(default_factory=Verdict)
    backward: Verdict = dataclasses.field(default_factory=Verdict)
    in_mode: Verdict = dataclasses.field(default_factory=Verdict)  # of both
    error: str = ""

    def texts(self) -> tuple[str, str, str]:
        return self.forward.text(), self.backward.text(), self.in_mode.text()

    def worst(self) -> float:
        return max(self.forward.worst, self.backward.worst)


class Sample:
    """The tensors of one call, at one size, and its results for any examples of the batch."""

    def __init__(self, call: Call, sizes: tuple[Shape, ...], dtype: torch.dtype, layout: str):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.call = call
        elements = max(torch.Size(size).numel() for size in sizes)
        self.batch = 17 if elements < 2000 else 5
        self.layout = layout
        batched = [draw(self.batch, *size) for size in sizes]
        if call.values is not None:
            batched = [call.values(tensor) for tensor in batched]
        self.batched = [tensor.to(dtype) for tensor in batched]
        shapes = call.shared(*sizes) if call.shared is not None else ()
        self.shared = [(draw(*shape) * 0.2).to(dtype) for shape in shapes]
        with torch.no_grad():
            output = call.run(*self.batched, *self.shared)
        self.grad_output = draw(*output.shape).to(output.dtype)

    def _take(self, tensor: Tensor, examples: list[int]) -> Tensor:
        taken = tensor[examples]
        if self.layout == SLICED:
            return torch.cat([taken, taken[:, :1]], 1)[:, :-1]
        last = self.layout == CHANNELS_LAST and taken.dim() == 4
        return taken.contiguous(memory_format=torch.channels_last) if last else taken

    def results(self, examples: list[int], threads: int) -> list[list[Tensor]]:
        """The output's examples, then each gradient's."""
        with num_threads(threads):
            inputs = [self._take(tensor, examples) for tensor in self.batched]
            with torch.no_grad():
                found = [self.call.run(*inputs, *self.shared)]
            if self.call.backward:
                wanted = inputs[: self.call.gradients]
                for tensor in wanted:
                    tensor.requires_grad_()
                output = self.call.run(*inputs, *self.shared)
                grad_output = self.grad_output[examples]
                if self.layout == CHANNELS_LAST and grad_output.dim() == 4:
                    grad_output = grad_output.contiguous(memory_format=torch.channels_last)
                found += torch.autograd.grad(output, wanted, grad_output)
        return [list(tensor.detach()) for tensor in found]


def measure(call: Call, dtype: torch.dtype, layout: str) -> Finding:
    """All sizes of a call; a dtype that it doesn't take leaves an error."""
    finding = Finding()
    for sizes in call.sizes:
        if layout == CHANNELS_LAST and len(sizes[0]) != 3:
            continue
        try:
            sample = Sample(call, sizes, dtype, layout)
            _measure_size(sample, finding.forward, finding.backward)
            with conv2d_ext.batch_invariant():
                _measure_size(sample, finding.in_mode, finding.in_mode)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            finding.error = str(error).splitlines()[0]
    return finding


def _measure_size(sample: Sample, forward: Verdict, backward: Verdict) -> None:
    everyone = list(range(sample.batch))
    alone = sample.results([0], threads=1)
    whole = sample.results(everyone, threads=1)

    def compare(
        reason: str, found: list[list[Tensor]], at: int, expected: list[list[Tensor]], of: int
    ) -> None:
        for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            _compare(backward if i else forward, reason, ours[at], theirs[of])

    for batch in (2, 3, 4, 8, sample.batch):
        if batch <= sample.batch:
            compare("batch", sample.results(everyone[:batch], threads=1), 0, alone, 0)
    for place in range(1, sample.batch):
        moved = sample.results(everyone[-place:] + everyone[:-place], threads=1)
        for example in everyone:
            compare("place", moved, (example + place) % sample.batch, whole, example)
    for threads in THREADS:
        compare("threads", sample.results([0], threads), 0, alone, 0)
        together = sample.results(everyone, threads)
        for example in everyone:
            compare("threads", together, example, whole, example)


def _compare(verdict: Verdict, reason: str, ours: Tensor, theirs: Tensor) -> None:
    verdict.measured = True
    if ours.isnan().any() or theirs.isnan().any():
        raise ValueError("a NaN, whose bits mean nothing: the values of this call are badly chosen")
    if torch.equal(_bits(ours), _bits(theirs)):
        return
    verdict.reasons.add(reason)
    largest = theirs.double().abs().max().clamp(min=1e-300)
    verdict.worst = max(
        verdict.worst, ((ours.double() - theirs.double()).abs().max() / largest).item()
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def rows_of(findings: dict[tuple[torch.dtype, str], Finding]) -> list[Row]:
    """Dtypes and layouts with the same verdict share a row."""
    measured = {key: finding for key, finding in findings.items() if finding.forward.measured}
    together: dict[tuple[str, ...], list[tuple[torch.dtype, str]]] = {}
    for key, finding in measured.items():
        together.setdefault(finding.texts(), []).append(key)
    rows = []
    for texts, keys in together.items():
        worst = max(findings[key].worst() for key in keys)
        which = "all" if len(keys) == len(findings) else _which(keys, findings)
        forward, backward, in_mode = texts
        rows.append((which, forward, backward, f"{worst:.0e}" if worst else "", in_mode))
    return rows


def _which(
    keys: list[tuple[torch.dtype, str]], findings: dict[tuple[torch.dtype, str], Finding]
) -> str:
    layouts = [layout for dtype, layout in findings if dtype == DTYPES[0]]
    names = []
    for dtype in DTYPES:
        have = [layout for other, layout in keys if other == dtype]
        if have:
            name = str(dtype).removeprefix("torch.")
            names.append(name if have == layouts else f"{name} {' and '.join(have)}")
    return ", ".join(names)


_INTRODUCTION = """\
# Which of PyTorch's calls follow the batch

Measured with torch {torch} on {cpu} ({machine}, ATen's loops: {isa}), commit {commit}, by
`python -m benchmarks.variance --markdown docs/variance.md`.

A call *varies* where an example's bits depend on the **batch** size, on the example's **place** in
the batch or on the number of **threads** (1 to 4). Sizes: 3 to 200,000 elements an example; one
that varies is enough. *Backward* is the gradient with respect to the tensors that have a batch.
*sliced*: examples with a channel fewer than lie in memory. *Worst* is the largest difference
between two results of one example, as a share of its largest magnitude; where it is empty beside
"varies", zeros differ in their sign. *In the mode*: both directions under
`conv2d_ext.batch_invariant()`. A dash: not measured. That a call of PyTorch's holds is an
observation and no promise: another version, CPU or size may differ. [Make a model
reproducible](models.md) says what the mode promises.
"""


def _write_markdown(path: Path, groups: dict[str, dict[str, list[Row]]]) -> None:
    lines = _INTRODUCTION.format(
        torch=torch.__version__,
        commit=(machine.revision() or "?")[:9],
        cpu=machine.cpu_name(),
        machine=platform.machine(),
        isa=torch.backends.cpu.get_cpu_capability(),
    ).splitlines()
    for group, calls in groups.items():
        lines += ["", f"## {group[0].upper()}{group[1:]}", ""]
        lines += [
            "| call | which | forward | backward | worst | in the mode |",
            "|---|---|---|---|---|---|",
        ]
        for name, rows in calls.items():
            lines += [f"| {name} | " + " | ".join(row) + " |" for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.variance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="*", metavar="PATTERN", help="calls, such as 'mean*'")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    arguments = parser.parse_args(argv)
    console = Console()
    calls = [call for call in all_calls() if fnmatch.fnmatch(call.name, arguments.only)]
    groups: dict[str, dict[str, list[Row]]] = {}
    for call in track(calls, console=console, description="measuring", transient=True):
        findings = {
            (dtype, layout): measure(call, dtype, layout)
            for dtype in DTYPES
            for layout in (FORMATS if call.formats else (CONTIGUOUS,))
        }
        groups.setdefault(call.group, {})[call.name] = rows_of(findings)
        for (dtype, _), finding in findings.items():
            if finding.error:
                console.print(f"{call.name}, {dtype}: {finding.error}", style="dim")
    for group, rows in groups.items():
        table = Table(title=group, box=box.SIMPLE_HEAD)
        for column in ("call", "which", "forward", "backward", "worst", "in the mode"):
            table.add_column(column, overflow="fold")
        for name, found in rows.items():
            for row in found:
                table.add_row(name, *row, style="" if "varies" in "".join(row) else "dim")
        console.print(table)
    if arguments.markdown is not None:
        _write_markdown(arguments.markdown, groups)
    return 0


if __name__ == "__main__":
    sys.exit(main())
