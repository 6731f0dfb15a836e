"""What a run prints: summaries by class, models, growth, and what has to be said about the run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.problems import DENSE_CLASSES, LAYER_CLASSES
from benchmarks.results import (
    ATEN,
    ATEN_LAST,
    MODE,
    MODE_LAST,
    OURS,
    OURS_LAST,
    PYTHON,
    Document,
    Result,
    geomean,
)

# Ours, the peer in the same memory format, what the pair is called.
PAIRS = ((OURS, ATEN, "NCHW"), (OURS_LAST, ATEN_LAST, "channels_last"))
# The same of whole models.
MODEL_PAIRS = (
    (OURS, ATEN, "NCHW, converted"),
    (MODE, ATEN, "NCHW, batch_invariant"),
    (OURS_LAST, ATEN_LAST, "channels_last, converted"),
    (MODE_LAST, ATEN_LAST, "channels_last, batch_invariant"),
)


def print_document(console: Console, document: Document, details: bool = False) -> None:
    usable = document.usable
    if document.kind == "growth":
        _print_all(console, growth_tables(usable))
    elif document.kind == "models":
        _print_all(console, [models_table(usable)])
    else:
        _print_all(console, summary_tables(usable))
    if details:
        _print_all(console, [details_table(document.results)])
    _print_remarks(console, document)


def summary_tables(results: Sequence[Result]) -> Iterator[Table]:
    """One table for each dtype, direction and number of threads; a row for each class."""
    for dtype, direction, threads in _distinct((r.dtype, r.direction, r.threads) for r in results):
        cases = [
            r for r in results if (r.dtype, r.direction, r.threads) == (dtype, direction, threads)
        ]
        table = _table(f"{dtype}, {direction}, {_threads(threads)}")
        table.add_column("class")
        table.add_column("cases", justify="right")
        for _, _, layout in PAIRS:
            table.add_column(f"{layout}\n× F.conv2d", justify="right")
            table.add_column("worst", justify="right")
        table.add_column("× Python", justify="right")
        table.add_column("roofline\nmedian", justify="right")
        table.add_column("lowest", justify="right")
        for title, classes in _rows(cases):
            rows = [case for case in cases if case.layer_class in classes]
            cells = [title, str(len(rows))]
            for ours, peer, _ in PAIRS:
                ratios = speedups(rows, ours, peer)
                cells += [f"{geomean(ratios):.2f}", f"{min(ratios):.2f}"] if ratios else ["", ""]
            ratios = speedups(rows, OURS, PYTHON)
            cells.append(f"{geomean(ratios):.2f}" if ratios else "")
            shares = [s for r in rows if (s := r.roofline_share(OURS)) is not None]
            cells += (
                [f"{statistics.median(shares):.0%}", f"{min(shares):.0%}"] if shares else ["", ""]
            )
            table.add_row(*cells, style="bold" if len(classes) > 1 else "")
        yield table


def models_table(results: Sequence[Result]) -> Table:
    table = _table("whole models, eval, forward: times, and their ratios to PyTorch's")
    table.add_column("model")
    table.add_column("threads", justify="right")
    for ours, _, title in MODEL_PAIRS:
        layout, what = title.split(", ")
        if ours in (OURS, OURS_LAST):
            table.add_column(f"{layout}\nPyTorch", justify="right")
        table.add_column(what, justify="right")
        table.add_column("ratio", justify="right")
    for result in results:
        cells = [result.name, str(result.threads)]
        for ours, peer, _ in MODEL_PAIRS:
            if ours in (OURS, OURS_LAST):
                cells.append(_time(result, peer))
            cells += [_time(result, ours), _ratio(result.speedup(ours, peer))]
        table.add_row(*cells)
    for threads in _distinct(r.threads for r in results):
        cells = ["geomean", str(threads)]
        for ours, peer, _ in MODEL_PAIRS:
            ratios = speedups([r for r in results if r.threads == threads], ours, peer)
            cells += [""] * (2 if ours in (OURS, OURS_LAST) else 1)
            cells.append(f"{geomean(ratios):.2f}" if ratios else "")
        table.add_row(*cells, style="bold")
    return table


def growth_tables(results: Sequence[Result]) -> Iterator[Table]:
    for (series,), threads in _distinct((tuple(r.lists), r.threads) for r in results):
        cases = [r for r in results if r.lists == [series] and r.threads == threads]
        names = _distinct(name for case in cases for name in case.timings)
        table = _table(f"growth of the {series}, {_threads(threads)}: time for a pixel, ns")
        table.add_column("input")
        for name in names:
            table.add_column(name.replace(" ", "\n", 1), justify="right")
            table.add_column("× best", justify="right")
        for case in cases:
            cells = [case.name]
            for name in names:
                pixel_s = per_pixel(case, name)
                cells += (
                    ["", ""]
                    if pixel_s is None
                    else [f"{1e9 * pixel_s:.2f}", f"{pixel_s / _best(cases, name):.2f}"]
                )
            table.add_row(*cells)
        yield table


def details_table(results: Iterable[Result]) -> Table:
    """Every case, the slowest beside F.conv2d first."""
    table = _table("every case: speed over F.conv2d's, GFLOP/s, share of the roofline; ! disturbed")
    for heading in ("problem", "dtype", "direction"):
        table.add_column(heading, no_wrap=True)
    table.add_column("thr.", justify="right")
    for _, _, layout in PAIRS:
        table.add_column(f"{layout}\n× F.conv2d", justify="right", no_wrap=True)
        table.add_column("GFLOP/s", justify="right", no_wrap=True)
        table.add_column("roof", justify="right", no_wrap=True)
    table.add_column("")

    def lowest(result: Result) -> float:
        ratios = [result.speedup(ours, peer) for ours, peer, _ in PAIRS]
        return min((ratio for ratio in ratios if ratio is not None), default=float("inf"))

    for result in sorted(results, key=lowest):
        cells = [result.name, result.dtype, result.direction, str(result.threads)]
        for ours, peer, _ in PAIRS:
            rate, share = result.flops_per_s(ours), result.roofline_share(ours)
            cells += [
                _ratio(result.speedup(ours, peer)),
                f"{rate / 1e9:.1f}" if rate else "",
                f"{share:.0%}" if share is not None else "",
            ]
        table.add_row(*cells, "!" if result.disturbed else "")
    return table


def speedups(results: Iterable[Result], ours: str, peer: str) -> list[float]:
    return [ratio for r in results if (ratio := r.speedup(ours, peer)) is not None]


def per_pixel(result: Result, name: str) -> float | None:
    """Seconds for a pixel of the output."""
    return result.timings[name].median_s / result.pixels if name in result.timings else None


def _best(results: Iterable[Result], name: str) -> float:
    return min(s for r in results if (s := per_pixel(r, name)) is not None)


def _rows(cases: Sequence[Result]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The classes that occur, and the dense ones together."""
    present = {case.layer_class for case in cases}
    yield from ((name, (name,)) for name in LAYER_CLASSES if name in present)
    if len(present.intersection(DENSE_CLASSES)) > 1:
        yield "all dense", DENSE_CLASSES


def _print_remarks(console: Console, document: Document) -> None:
    say = _sayer(console)
    machine = document.machine
    say(
        f"{machine['cpu']}, this library with {machine['isa']}, torch with "
        f"{machine['torch_isa']}; ratios are medians of interleaved rounds, bigger is better."
    )
    for dtype, method in document.roofline["peak_method"].items():
        peaks = ", ".join(
            f"{peaks[dtype] / 1e9:.0f} on {_threads(int(threads))}"
            for threads, peaks in document.roofline["peak_flops_per_s"].items()
        )
        say(f"Peak, {dtype}: {peaks} (GFLOP/s; {method}).")
    faulting = sum(
        max((t.page_faults for name, t in r.timings.items() if name != PYTHON), default=0) > 256
        for r in document.results
    )
    if faulting:
        say(f"In {faulting} cases a contestant met more than 256 page faults a call.")
    left_out: dict[str, list[str]] = {}
    for name, why in document.left_out.items():
        left_out.setdefault(why, []).append(name)
    for why, names in left_out.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        say(f"Left out, {why}: {', '.join(names[:3])}{more}.")
    for result in document.wrong:
        say(f"WRONG RESULTS: {' / '.join(map(str, result.key))}: {result.wrong}", "bold red")
    if document.quiet.get("at_start"):
        say(f"The machine was not quiet at the start: {document.quiet['at_start']}.", "yellow")
    if document.disturbed:
        say(
            f"Disturbed: {len(document.disturbed)} of {len(document.results)} cases, after all "
            "attempts. The tables "
            + ("show them all the same." if document.usable is document.results else "omit them."),
            "yellow",
        )
        for result in document.disturbed[:5]:
            say(f"  {' / '.join(map(str, result.key))}: {result.disturbed}", "yellow")


def print_files(console: Console, paths: Iterable[Path]) -> None:
    say = _sayer(console)
    for path in paths:
        say(f"Saved {path}")


def _sayer(console: Console) -> Callable[..., None]:
    return lambda text, style="": console.print(Text(text, style=style))


def _print_all(console: Console, tables: Iterable[Table]) -> None:
    for table in tables:
        console.print(table)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)


def _distinct(values: Iterable) -> list:
    """In the order of their first appearance."""
    return list(dict.fromkeys(values))


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _time(result: Result, name: str) -> str:
    return f"{1e3 * result.timings[name].median_s:.2f} ms" if name in result.timings else ""
