"""The figures of a run as pictures: speed ratios, the roofline, models, growth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from benchmarks.problems import LAYER_CLASSES
from benchmarks.report import MODEL_PAIRS, PAIRS, per_pixel
from benchmarks.results import ATEN, OURS, Document, Result, directions_of, distinct, geomean

_COLORS = dict(
    zip(
        LAYER_CLASSES,
        ("#4c78a8", "#e07b28", "#54a24b", "#b279a2", "#9d755d", "#bab0ac", "#e45756", "#72b7b2"),
        strict=True,
    )
)
_RATIO_TICKS = (0.12, 0.25, 0.5, 0.7, 0.85, 1, 1.2, 1.4, 1.7, 2, 3, 4, 6, 8, 16, 32, 64, 128)
_CROWDED = (0.85, 1.2, 1.4, 1.7)  # of these, where they lie side by side
_DISTURBED = {"fill": False, "hatch": "////", "linewidth": 0.5}  # a bar that others disturbed
_DISTURBED_NOTE = "hatched: others used the machine"


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
        for dtype in distinct(results, "dtype"):
            cases = [result for result in results if result.dtype == dtype]
            for ours, peer, layout in PAIRS:
                if any(result.speedup(ours, peer) is not None for result in cases):
                    title = f"{dtype}, {layout}: speed over {peer}"
                    figures[f"ratios-{dtype}-{layout}"] = _ratios(cases, ours, peer, title)
            figures[f"roofline-{dtype}"] = _roofline(cases, document.roofline, dtype)
    return [save(figure, folder / f"{name}.png") for name, figure in figures.items()]


def save(figure: Figure, path: Path) -> Path:
    # Without the version of matplotlib: the same figures give the same file.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path


def speed_by_class(document: Document) -> Figure:
    """The README's picture: every layer as a dot, class by class, on one thread and on two."""
    results = [r for r in document.usable if r.speedup(OURS, ATEN) is not None]
    directions, threads = directions_of(results), distinct(results, "threads")
    present = [name for name in LAYER_CLASSES if any(r.layer_class == name for r in results)]
    figure = Figure(figsize=(5.2 * len(directions), 4.6), layout="constrained")
    row = figure.subplots(1, len(directions), squeeze=False, sharey=True)[0]
    for axes, direction in zip(row, directions, strict=True):
        for place, layer_class in enumerate(present):
            cases = [r for r in results if (r.layer_class, r.direction) == (layer_class, direction)]
            for shift, count in zip((-0.18, 0.18), threads, strict=False):
                _class_column(axes, place + shift, [c for c in cases if c.threads == count])
            if cases:
                slowest = min(cases, key=lambda case: case.speedup(OURS, ATEN))
                axes.annotate(
                    slowest.name.removesuffix(" batch 1").replace(" ", "\n", 1),
                    (place, slowest.speedup(OURS, ATEN)),
                    textcoords="offset points", xytext=(0, -8), fontsize=5, rotation=90,
                    ha="center", va="top",
                )  # fmt: skip
        axes.axhline(1, color="black", linewidth=0.8)
        _ratio_axis(axes)
        axes.set_title(direction, fontsize=10)
        axes.set_xticks(range(len(present)), present, rotation=30, ha="right")
        axes.spines[["top", "right"]].set_visible(False)
    low, high = row[0].get_ylim()
    row[0].set_ylim(min(low, 0.3), max(high, 4))  # room for the names
    row[0].set_ylabel("speedup over F.conv2d, NCHW, float32")
    named = "1 thread left, 2 threads right" if len(threads) > 1 else f"{threads[0]} thread"
    figure.suptitle(
        f"dots: layers ({named}); bars: geometric means; named: the slowest", fontsize=9
    )
    if any(case.disturbed for case in results):
        figure.text(0.99, 0.01, "hollow: others used the machine", ha="right", fontsize=7)
    return figure


def _class_column(axes: Axes, place: float, cases: Sequence[Result]) -> None:
    if not cases:
        return
    ratios = [case.speedup(OURS, ATEN) for case in cases]
    color = _COLORS[cases[0].layer_class]
    for case, ratio in zip(cases, ratios, strict=True):
        face = "none" if case.disturbed else color
        axes.plot(place, ratio, "o", ms=3.5, mfc=face, mec=color, mew=0.7, alpha=0.8)
    axes.plot([place - 0.15, place + 0.15], [geomean(ratios)] * 2, color="black", linewidth=2)


def memory_by_size(document: dict) -> Figure:
    """The README's picture: MiB beyond the results over the side of a square image."""
    figure = Figure(figsize=(5.2 * len(document["bytes"]), 3.8), layout="constrained")
    row = figure.subplots(1, len(document["bytes"]), squeeze=False, sharey=True)[0]
    for axes, (direction, contestants) in zip(row, document["bytes"].items(), strict=True):
        for name, figures in contestants.items():
            # A logarithmic axis has no zero; a page is the least that can be seen.
            mebibytes = [max(bytes, 4096) / 2**20 for bytes in figures.values()]
            style = {"linewidth": 2, "color": "#c03030"} if name.startswith("conv2d_ext") else {}
            axes.plot(
                [int(size) for size in figures], mebibytes,
                "o--" if name.endswith("channels_last") else "o-", ms=4, label=name, **style,
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xticks([int(size) for size in figures], figures)
        axes.set_xlabel("image, pixels a side")
        axes.set_title(direction, fontsize=10)
        axes.grid(axis="y", linewidth=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    row[0].set_ylabel("MiB beyond the results")
    row[0].legend(fontsize=7)
    figure.suptitle(f"temporary memory: {document['layer']}", fontsize=9)
    return figure


def _ratio_axis(axes: Axes) -> None:
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(FixedLocator(_RATIO_TICKS))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")


def _grid(
    results: Sequence[Result], width: float, height: float, *, sharey: bool = True
) -> tuple[Figure, list]:
    """A row of axes for each direction, a column for each number of threads, and their cases."""
    directions, threads = directions_of(results), distinct(results, "threads")
    figure = Figure(
        figsize=(width * len(threads), 0.6 + height * len(directions)), layout="constrained"
    )
    rows = figure.subplots(len(directions), len(threads), squeeze=False, sharey=sharey)
    panels = []
    for row, direction in zip(rows, directions, strict=True):
        for axes, count in zip(row, threads, strict=True):
            axes.set_title(f"{direction}, {count} thread{'s' if count > 1 else ''}", fontsize=10)
            axes.spines[["top", "right"]].set_visible(False)
            cases = [r for r in results if r.direction == direction and r.threads == count]
            panels.append((axes, cases))
    return figure, panels


def _ratios(results: Sequence[Result], ours: str, peer: str, title: str) -> Figure:
    """A named bar for each problem, class by class, the slowest beside the peer first."""
    names = {
        layer_class: distinct([r for r in results if r.layer_class == layer_class], "name")
        for layer_class in LAYER_CLASSES
    }
    rows = sum(len(found) + 1 for found in names.values() if found)
    figure, panels = _grid(results, 6, 1.2 + 0.11 * rows, sharey=False)
    figure.suptitle(title)
    for axes, cases in panels:
        labels = _ratio_bars(axes, cases, ours, peer)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator([t for t in _RATIO_TICKS if t not in _CROWDED]))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        # 1 is never at the edge, and all panels have one scale.
        ratios = _all_ratios(results, ours, peer)
        axes.set_xlim(min(0.5, min(ratios) / 1.1), max(2.0, max(ratios) * 1.1))
        axes.tick_params(axis="x", labelsize=7)
        axes.set_yticks(range(len(labels)), labels, fontsize=5)
        axes.set_ylim(len(labels), -1)
        if labels:
            disturbed = any(case.disturbed for case in cases)
            note = f"means; {_DISTURBED_NOTE}" if disturbed else "geometric means"
            axes.legend(fontsize=7, title=note, title_fontsize=7, loc="upper right")
    return figure


def _ratio_bars(axes: Axes, cases: Sequence[Result], ours: str, peer: str) -> list[str]:
    """Draws them, and returns their names from the top to the bottom."""
    labels: list[str] = []
    for layer_class in LAYER_CLASSES:
        found = sorted(
            (ratio, case.name, bool(case.disturbed))
            for case in cases
            if case.layer_class == layer_class and (ratio := case.speedup(ours, peer)) is not None
        )
        if not found:
            continue
        color = _COLORS[layer_class]
        mean = geomean([ratio for ratio, _, _ in found])
        axes.plot([], [], "s", color=color, label=f"{layer_class}: {mean:.2f}")
        for ratio, name, disturbed in found:
            # From 1 up or down: what is left of the line is slower than the peer.
            look = {"edgecolor": color, **_DISTURBED} if disturbed else {"color": color}
            axes.barh(len(labels), ratio - 1, 0.9, left=1, **look)
            labels.append(name)
        labels.append("")
    return labels


def _all_ratios(results: Sequence[Result], ours: str, peer: str) -> list[float]:
    return [ratio for r in results if (ratio := r.speedup(ours, peer)) is not None]


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
    figure, panels = _grid(results, 9, 4)
    figure.suptitle("whole models: speed over PyTorch's")
    for axes, cases in panels:
        for shift, (ours, peer, title) in zip((-0.3, -0.1, 0.1, 0.3), MODEL_PAIRS, strict=True):
            ratios = [case.speedup(ours, peer) or math.nan for case in cases]
            if all(map(math.isnan, ratios)):
                continue
            positions = [number + shift for number in range(len(cases))]
            bars = axes.bar(positions, ratios, 0.19, label=title)
            for bar, case in zip(bars, cases, strict=True):
                if case.disturbed:
                    bar.set(edgecolor=bar.get_facecolor(), **_DISTURBED)
            labels = ["" if math.isnan(ratio) else f"{ratio:.2f}" for ratio in ratios]
            axes.bar_label(bars, labels, fontsize=6, rotation=90, padding=2)
        if any(case.disturbed for case in cases):
            axes.set_xlabel(_DISTURBED_NOTE, fontsize=7)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(cases)), [c.name for c in cases], rotation=30, ha="right")
        axes.legend(fontsize=7)
    return figure


def _growth(results: Sequence[Result]) -> Figure:
    """The time for a pixel relative to the best of its contestant, a panel for each series."""
    series = list(dict.fromkeys(result.lists[0] for result in results))
    threads = distinct(results, "threads")
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
    for case in cases:
        if case.disturbed:
            axes.axvline(case.pixels, color="#c0c0c0", linewidth=4, zorder=0)
    axes.set_xscale("log")
    # From zero, so that a few per cent look like a few per cent.
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    named = ", ".join(case.name.removeprefix("image ").removesuffix(" at 56x56") for case in cases)
    grey = "; grey: disturbed" if any(case.disturbed for case in cases) else ""
    axes.set_xlabel(f"output pixels ({named}{grey})", fontsize=7)
    axes.set_ylabel("time for a pixel over the best")
    axes.legend(fontsize=7)
