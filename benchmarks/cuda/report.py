"""A run on a GPU in words: the post's problem, speeds by class, what was left out."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

from benchmarks.cuda.cases import ATEN, DIRECTIONS, OURS, PRECISIONS, PYTHON, TINY, TUNED
from benchmarks.cuda.run import Document, Result
from benchmarks.cuda.text import Table
from benchmarks.problems import LAYER_CLASSES
from benchmarks.results import geomean
from conv2d_ext.testing import POST


def print_document(document: Document, details: bool = False, stream: TextIO | None = None) -> None:
    if document.skipped:
        print(f"Nothing was measured: {document.skipped}", file=stream)
        return
    machine = document.machine
    print(
        f"{machine['gpu']}, {machine['sm_count']} SMs, driver {machine['driver']}, torch "
        f"{machine['versions']['torch']}, cuDNN {machine['versions']['cudnn']}, revision "
        f"{machine['versions']['revision']}",
        file=stream,
    )
    ceilings = ", ".join(
        f"{name.removeprefix('matmul_').removesuffix('_flops_per_s')} {value / 1e12:.0f}"
        for name, value in document.ceilings.items()
        if name.startswith("matmul")
    )
    copied = document.ceilings.get("copy_bytes_per_s", 0) / 1e12
    print(f"Ceilings: copy {copied:.2f} TB/s; matrix products, TFLOP/s: {ceilings}", file=stream)
    tables = [
        _contest(
            [r for r in document.results if (r.name, r.direction) == (problem.name, direction)],
            f"{problem.name}, {direction}: microseconds a call",
        )
        for problem in (POST, TINY)
        for direction in DIRECTIONS
    ]
    tables += [
        _speedups([r for r in document.results if r.direction == direction], direction)
        for direction in DIRECTIONS
    ]
    if details:
        tables.append(_details(document.results))
    for table in filter(None, tables):
        print(table, file=stream)
    for result in document.wrong:
        title = f"{result.name}, {result.precision}, {result.layout}, {result.direction}"
        print(f"WRONG: {title}: {result.wrong}", file=stream)
    _print_left_out(document, stream)


def _contest(results: Sequence[Result], title: str) -> Table | None:
    if not results:
        return None
    figures_of = (">kernels", ">graph", ">eager", ">host", ">TFLOP/s", ">error")
    table = Table(title, "", "contestant", *figures_of)
    for result in results:
        for name, figures in result.figures.items():
            kernel = figures.kernel_s
            table.add(
                f"{result.precision} {result.layout}" if name == OURS else "",
                name,
                *(_microseconds(figures.median(w)) for w in ("kernel", "graph", "eager", "host")),
                f"{result.flops / kernel / 1e12:.1f}" if kernel else "",
                f"{figures.error:.1e}",
            )
    return table


def _speedups(results: Sequence[Result], direction: str) -> Table | None:
    """Geometric means (the slowest layer), by class, batch and precision; graph times."""
    results = [r for r in results if r.name not in (POST.name, TINY.name) and OURS in r.figures]
    if not results:
        return None
    table = Table(
        f"{direction}: speed over F.conv2d with cudnn.benchmark and without it: geometric "
        "mean (slowest) of graph times, layers",
        "", "batch", "layers", ">over tuned", ">over default",
        ">where cuDNN transforms nothing", ">n",
    )  # fmt: skip
    for precision in PRECISIONS:
        for layout in sorted({r.layout for r in results if r.precision == precision}):
            for batch in sorted({r.batch for r in results}):
                chosen = [
                    r
                    for r in results
                    if (r.precision, r.layout, r.batch) == (precision, layout, batch)
                ]
                for layer_class in (*LAYER_CLASSES, "all"):
                    rows = [r for r in chosen if layer_class in (r.layer_class, "all")]
                    if rows:
                        plain = [r for r in rows if not r.transforms(TUNED)]
                        table.add(
                            f"{precision} {layout}", str(batch), layer_class,
                            _mean(r.speedup(TUNED, "graph") for r in rows),
                            _mean(r.speedup(ATEN, "graph") for r in rows),
                            _mean(r.speedup(TUNED, "graph") for r in plain),
                            str(len(rows)),
                        )  # fmt: skip
                        if layer_class == "all":
                            table.add_gap()
    return table


def _details(results: Sequence[Result]) -> Table:
    table = Table(
        "every case, the slowest first",
        "case", "this library's kernel", "F.conv2d's",
        ">graph", ">over tuned", ">over default", ">over Python",
    )  # fmt: skip

    def order(result: Result) -> float:
        return result.speedup(TUNED, "graph") or float("inf")

    for result in sorted(results, key=order):
        theirs = result.figures[TUNED].kernels if TUNED in result.figures else []
        table.add(
            f"{result.name} {result.precision} {result.layout} {result.direction}",
            result.explained,
            (theirs[0]["name"][:40] if theirs else "") + f" {result.transforms(TUNED) or ''}",
            _microseconds(result.median(OURS, "graph")),
            *(_ratio(result.speedup(over, "graph")) for over in (TUNED, ATEN, PYTHON)),
        )
    return table


def _print_left_out(document: Document, stream: TextIO | None) -> None:
    for reason, count in Counter(document.left_out.values()).items():
        first = next(case for case, why in document.left_out.items() if why == reason)
        print(f"Left out: {count} cases: {reason} (the first: {first})", file=stream)
    refused = Counter(
        (name, why) for result in document.results for name, why in result.left_out.items()
    )
    for (name, why), count in refused.items():
        print(f"Not timed in {count} cases: {name}: {why}", file=stream)
    print(f"{len(document.results)} cases in {document.seconds:.0f} s", file=stream)


def targets(document: Document) -> list[tuple[str, float | None, str]]:
    """What is aimed at on an H200, as (what, found, wanted)."""
    post = {
        (r.precision, r.direction): r
        for r in document.results
        if r.name == POST.name and r.layout == "NCHW"
    }
    rows: list[tuple[str, float | None, str]] = []
    for precision, limit, python in (("float32", 16e-6, 2.5), ("TF32", 7e-6, 4.0)):
        result = post.get((precision, "forward"))

        def found(get: Callable, result=result) -> float | None:
            return None if result is None else get(result)

        kernel = found(lambda r: r.median(OURS, "kernel"))
        rows.append((
            f"the post's problem, {precision}: kernel time, µs",
            None if kernel is None else kernel * 1e6, f"<= {limit * 1e6:.0f}",
        ))  # fmt: skip
        for over in (ATEN, TUNED):
            ratio = found(lambda r, over=over: r.speedup(over, "kernel"))
            rows.append((f"the post's problem, {precision}: over {over}", ratio, ">= 1"))
        ratio = found(lambda r: r.speedup(PYTHON, "kernel"))
        rows.append((f"the post's problem, {precision}: over Python", ratio, f">= {python}"))
    tiny = next((r for r in document.results if r.name == TINY.name), None)
    rows.append((
        "host time of an eager call on a tiny input: over F.conv2d",
        None if tiny is None else tiny.speedup(ATEN, "host"), ">= 1",
    ))  # fmt: skip
    for precision, layout, wanted in (
        ("TF32", "NCHW", 0.95),
        ("float32", "NCHW", 0.8),
        ("float16", "channels_last", 0.5),
        ("bfloat16", "channels_last", 0.5),
    ):
        layers = [
            r
            for r in document.results
            if (r.precision, r.layout, r.direction) == (precision, layout, "forward")
            and r.name not in (POST.name, TINY.name)
        ]
        rows.append((
            f"layers, {precision} {layout}: over {TUNED}, kernel time",
            _geomean(r.speedup(TUNED, "kernel") for r in layers), f">= {wanted}",
        ))  # fmt: skip
        if precision == "float32":
            plain = [r for r in layers if not r.transforms(TUNED)]
            rows.append((
                "the same, where cuDNN uses neither Winograd nor FFT",
                _geomean(r.speedup(TUNED, "kernel") for r in plain), ">= 0.95",
            ))  # fmt: skip
    return rows


def print_targets(document: Document, stream: TextIO | None = None) -> None:
    table = Table("what is aimed at on an H200", "", ">found", "wanted", "")
    for what, found, wanted in targets(document):
        relation, limit = wanted.split()
        met = found is not None and (
            found <= float(limit) if relation == "<=" else found >= float(limit)
        )
        verdict = "not measured" if found is None else "met" if met else "MISSED"
        table.add(what, "" if found is None else f"{found:.2f}", wanted, verdict)
    print(table, file=stream)


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.2f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _geomean(values: Iterable[float | None]) -> float | None:
    try:
        return geomean(value for value in values if value is not None)
    except statistics.StatisticsError:
        return None


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{geomean(known):.2f} ({min(known):.2f})" if known else ""
