"""The figures of a run as pictures: speed ratios, the roofline, models, growth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from benchmarks.problems import LAYER_CLASSES
from benchmarks.report import PAIRS, per_pixel
from benchmarks.results import OURS, Document, Result, geomean

_COLORS = dict(
    zip(
        LAYER_CLASSES,
        ("#4c78a8", "#e07b28", "#54a24b", "#b279a2", "#9d755d", "#bab0ac", "#e45756", "#72b7b2"),
        strict=True,
    )
)
_RATIO_TICKS = (0.12, 0.25, 0.5, 0.7, 0.85, 1, 1.2, 1.4, 1.7, 2, 3, 4, 6, 8, 16, 32, 64, 128)
_NAMED_BARS = 40  # up to so many bars carry their problems' names


def draw(document: Document, folder: Path) -> list[Path]:
    """Writes the pictures that the document's kind has, and returns their paths."""
    results = [result for result in document.usable if result.timings]
    if not results:
        return []
    if document.kind == "growth":
        figures = {"growth": _growth(results)}
    elif document.kind == "models":
        figures = {"models": _models(results)}
    else:
        figures = {}
        for dtype in _distinct(results, "dtype"):
            cases = [result for result in results if result.dtype == dtype]
            for ours, peer, layout in PAIRS:
                if any(result.speedup(ours, peer) is not None for result in cases):
                    title = f"{dtype}, {layout}: speed over {peer}"
                    figures[f"ratios-{dtype}-{layout}"] = _ratios(cases, ours, peer, title)
            figures[f"roofline-{dtype}"] = _roofline(cases, document.roofline, dtype)
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths


def _grid(results: Sequence[Result], width: float, height: float) -> tuple[Figure, list]:
    """A row of axes for each direction, a column for each number of threads, and their cases."""
    directions, threads = _distinct(results, "direction"), _distinct(results, "threads")
    figure = Figure(
        figsize=(width * len(threads), 0.6 + height * len(directions)), layout="constrained"
    )
    rows = figure.subplots(len(directions), len(threads), squeeze=False, sharey=True)
    panels = []
    for row, direction in zip(rows, directions, strict=True):
        for axes, count in zip(row, threads, strict=True):
            axes.set_title(f"{direction}, {count} thread{'s' if count > 1 else ''}", fontsize=10)
            axes.spines[["top", "right"]].set_visible(False)
            cases = [r for r in results if r.direction == direction and r.threads == count]
            panels.append((axes, cases))
    return figure, panels


def _ratios(results: Sequence[Result], ours: str, peer: str, title: str) -> Figure:
    """A bar for each problem, class by class, from the slowest to the fastest beside the peer."""
    figure, panels = _grid(results, 8, 3)
    figure.suptitle(title)
    for axes, cases in panels:
        position = 0
        names: list[str] = []
        for layer_class in LAYER_CLASSES:
            bars = sorted(
                (ratio, case.name)
                for case in cases
                if case.layer_class == layer_class
                and (ratio := case.speedup(ours, peer)) is not None
            )
            if not bars:
                continue
            ratios = [ratio for ratio, _ in bars]
            mean = geomean(ratios)
            positions = range(position, position + len(bars))
            # From 1 up or down: what is below the line is slower than the peer.
            axes.bar(
                positions,
                [ratio - 1 for ratio in ratios],
                0.9,
                bottom=1,
                color=_COLORS[layer_class],
                label=f"{layer_class}: {mean:.2f}",
            )
            names += [name for _, name in bars]
            position += len(bars) + 1
            names.append("")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_locator(FixedLocator(_RATIO_TICKS))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axes.set_xticks([])
        if position <= _NAMED_BARS:
            axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=6)
        if position:
            axes.legend(
                fontsize=7,
                title="geometric means",
                title_fontsize=7,
                loc="upper left",
                bbox_to_anchor=(1, 1),
            )
    return figure


def _roofline(results: Sequence[Result], roofline: dict, dtype: str) -> Figure:
    """GFLOP/s over arithmetic intensity, below the peak and the bandwidths of cache and memory."""
    figure, panels = _grid(results, 6, 4)
    figure.suptitle(f"{dtype}: {OURS} (colours) and its peers (grey)")
    peak_name = dtype if dtype in roofline["peak_method"] else "float32"
    for axes, cases in panels:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("FLOP for each byte that has to move")
        axes.set_ylabel("GFLOP/s")
        intensities = [case.flops / case.bytes for case in cases]
        for case, intensity in zip(cases, intensities, strict=True):
            for name in case.timings:
                rate = case.flops_per_s(name) / 1e9
                if name == OURS:
                    axes.plot(intensity, rate, "o", ms=4, color=_COLORS[case.layer_class], zorder=3)
                else:
                    axes.plot(intensity, rate, ".", ms=3, color="#c0c0c0", zorder=2)
        if not cases:
            continue
        threads = str(cases[0].threads)
        peak = roofline["peak_flops_per_s"][threads][peak_name]
        rates = roofline["bandwidth_bytes_per_s"][threads]
        ends = [min(intensities) / 2, max(intensities) * 2]
        for rate, style, where in ((rates[0], "--", "cache"), (rates[-1], "-", "memory")):
            knee = peak / rate
            points = sorted({*ends, *([knee] if ends[0] < knee < ends[1] else [])})
            axes.plot(
                points,
                [min(peak, rate * point) / 1e9 for point in points],
                style,
                color="black",
                linewidth=1,
                label=f"{rate / 1e9:.0f} GB/s ({where}), peak {peak / 1e9:.0f}",
            )
        for layer_class in LAYER_CLASSES:
            if any(case.layer_class == layer_class for case in cases):
                axes.plot([], [], "o", ms=4, color=_COLORS[layer_class], label=layer_class)
        axes.legend(fontsize=7, loc="lower right")
    return figure


def _models(results: Sequence[Result]) -> Figure:
    figure, panels = _grid(results, 7, 4)
    figure.suptitle("whole models: speed converted over speed with torch.nn.Conv2d")
    for axes, cases in panels:
        for shift, (ours, peer, layout) in zip((-0.2, 0.2), PAIRS, strict=True):
            ratios = [case.speedup(ours, peer) or 0.0 for case in cases]
            positions = [number + shift for number in range(len(cases))]
            bars = axes.bar(positions, ratios, 0.38, label=layout)
            axes.bar_label(bars, fmt="%.2f", fontsize=7)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(cases)), [c.name for c in cases], rotation=30, ha="right")
        axes.legend(fontsize=7)
    return figure


def _growth(results: Sequence[Result]) -> Figure:
    """The time for a pixel relative to the best of its contestant, a panel for each series."""
    series = list(dict.fromkeys(result.lists[0] for result in results))
    threads = _distinct(results, "threads")
    figure = Figure(figsize=(6 * len(series), 0.6 + 3.5 * len(threads)), layout="constrained")
    rows = figure.subplots(len(threads), len(series), squeeze=False)
    for row, count in zip(rows, threads, strict=True):
        for axes, name in zip(row, series, strict=True):
            cases = [r for r in results if r.lists == [name] and r.threads == count]
            _growth_panel(axes, cases)
            axes.set_title(f"growth of the {name}, {count} thread{'s' if count > 1 else ''}")
    return figure


def _growth_panel(axes: Axes, cases: Sequence[Result]) -> None:
    for contestant in dict.fromkeys(name for case in cases for name in case.timings):
        points = [(c.pixels, s) for c in cases if (s := per_pixel(c, contestant)) is not None]
        best = min(seconds for _, seconds in points)
        axes.plot(
            [pixels for pixels, _ in points],
            [seconds / best for _, seconds in points],
            "o-",
            ms=4,
            label=contestant,
        )
    axes.set_xscale("log")
    axes.set_xlabel("output pixels")
    axes.set_ylabel("time for a pixel over the best")
    axes.legend(fontsize=7)


def _distinct(results: Sequence[Result], field: str) -> list:
    return list(dict.fromkeys(getattr(result, field) for result in results))
