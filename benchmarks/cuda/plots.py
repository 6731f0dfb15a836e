"""A run on a GPU as pictures: the post's problem, and the speed over F.conv2d layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from benchmarks.cuda.cases import ATEN, CONTESTANTS, FORWARD, PRECISIONS, TINY, TUNED
from benchmarks.cuda.run import Document, Result
from benchmarks.problems import LAYER_CLASSES
from benchmarks.results import geomean
from conv2d_ext.testing import POST

_COLORS = dict(
    zip(
        LAYER_CLASSES,
        ("#4c78a8", "#e07b28", "#54a24b", "#b279a2", "#9d755d", "#bab0ac", "#e45756", "#72b7b2"),
        strict=True,
    )
)
_TICKS = (0.12, 0.25, 0.5, 0.7, 0.85, 1, 1.2, 1.4, 1.7, 2, 3, 4, 6, 8)


def draw(document: Document, folder: Path) -> list[Path]:
    """Writes the pictures, and returns their paths."""
    title = f"{document.machine['gpu']}, torch {document.machine['versions']['torch']}"
    forward = [r for r in document.results if r.direction == FORWARD and r.figures]
    post = [r for r in forward if r.name == POST.name]
    layers = [r for r in forward if r.name not in (POST.name, TINY.name)]
    paths = []
    for name, results, paint in (("post", post, _post), ("layers", layers, _layers)):
        if results:
            figure = paint(results)
            figure.suptitle(title)
            paths.append(folder / f"cuda-{name}.png")
            figure.savefig(paths[-1], dpi=110)
    return paths


def _post(results: Sequence[Result]) -> Figure:
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    names = [n for n in CONTESTANTS if any(n in r.figures for r in results)]
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        times = [(r.median(name, "kernel") or r.median(name, "graph") or 0) * 1e6 for r in results]
        positions = [place + (number + 0.5) * width - 0.4 for place in range(len(results))]
        bars = axes.bar(positions, times, width, label=name)
        axes.bar_label(bars, fmt="%.1f", fontsize=6)
    axes.set_xticks(range(len(results)), [f"{r.precision}\n{r.layout}" for r in results])
    axes.set_ylabel("microseconds of kernels a call")
    axes.set_title("the post's problem, forward", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7)
    return figure


def _layers(results: Sequence[Result]) -> Figure:
    """A row for each precision and format, a column for each batch size."""
    pairs = [
        (precision, layout)
        for precision in PRECISIONS
        for layout in ("NCHW", "channels_last")
        if any((r.precision, r.layout) == (precision, layout) for r in results)
    ]
    batches = sorted({r.batch for r in results})
    figure = Figure(figsize=(6 * len(batches), 0.6 + 2.8 * len(pairs)), layout="constrained")
    rows = figure.subplots(len(pairs), len(batches), squeeze=False, sharey=True)
    for row, (precision, layout) in zip(rows, pairs, strict=True):
        for axes, batch in zip(row, batches, strict=True):
            cases = [
                r for r in results if (r.precision, r.layout, r.batch) == (precision, layout, batch)
            ]
            axes.set_title(f"{precision} {layout}, batch {batch}: over {TUNED}", fontsize=9)
            _bars(axes, cases)
    return figure


def _bars(axes: Axes, cases: Sequence[Result]) -> None:
    position = 0
    for layer_class in LAYER_CLASSES:
        ratios = sorted(
            ratio
            for case in cases
            if case.layer_class == layer_class
            and (ratio := case.speedup(TUNED, "graph") or case.speedup(ATEN, "graph")) is not None
        )
        if ratios:
            # From 1 up or down: what is below the line is slower.
            axes.bar(
                range(position, position + len(ratios)),
                [ratio - 1 for ratio in ratios],
                0.9,
                bottom=1,
                color=_COLORS[layer_class],
                label=f"{layer_class}: {geomean(ratios):.2f}",
            )
            position += len(ratios) + 1
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(FixedLocator(_TICKS))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.set_xticks([])
    axes.spines[["top", "right"]].set_visible(False)
    if position:
        axes.legend(fontsize=6, title="geometric means", title_fontsize=6)
