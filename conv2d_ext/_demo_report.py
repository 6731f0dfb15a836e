"""What `python -m conv2d_ext` prints: tables, and the figures put into words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from conv2d_ext._demo_measure import (
    ATEN,
    BACKWARD,
    COMPOSITION,
    DIRECTIONS,
    FORWARD,
    GRAD,
    LIBRARY,
    LIBRARY_CONV2D,
    NO_GRAD,
    POST_CALLS,
    REFERENCE,
    Figures,
    Measurement,
    results_are_right,
)
from conv2d_ext.testing import POST

# An interquartile range above this share of the median: something else kept the machine busy.
_DISTURBED = 0.15


def print_introduction(console: Console) -> None:
    _, channels, height, width = POST.input_shape
    kernel_h, kernel_w = POST.kernel
    _say(
        console,
        "A forum post timed one convolution written twice, as unfold, matmul and add: in Python, "
        "and in C++ as an extension. On CUDA it saw 56 µs a call for Python and 83 µs for C++. "
        "This is its workload again.",
        f"Input {channels} × {height} × {width}, integers in [-255, 255), every channel the same; "
        f"kernel {channels} × {POST.out_channels} × {kernel_h} × {kernel_w}, input channels first; "
        f"bias 0.06; float32. {POST.flops / 1e9:.3f} GFLOP forward.",
    )


def print_measurement(console: Console, measurement: Measurement) -> None:
    console.rule(Text(measurement.title), characters="=")
    console.print()
    calls = [row.loop.calls for rows in measurement.figures.values() for row in rows.values()]
    _say(
        console,
        f"The post called each function {POST_CALLS:,} times. Its loop ends here after as many "
        f"calls or {measurement.loop_s} s, which gave {min(calls):,} to {max(calls):,} calls.",
    )
    for direction in DIRECTIONS:
        console.print(_direction_table(measurement, direction))
    console.print(_overhead_table(measurement))
    _list(console, "What the post's timing did wrong", _faults(measurement))
    _list(console, "What the figures mean", _meaning(measurement))


def _say(console: Console, *paragraphs: str) -> None:
    for paragraph in paragraphs:
        console.print(Text(paragraph))
        console.print()


def _list(console: Console, heading: str, paragraphs: Iterable[str]) -> None:
    console.print(Text(heading, style="bold"))
    grid = Table.grid(padding=(0, 1))
    for paragraph in paragraphs:
        grid.add_row("-", Text(paragraph))
    console.print(grid)
    console.print()


def _table(title: str, headings: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _direction_table(measurement: Measurement, direction: str) -> Table:
    figures = measurement.figures[direction]
    rounds = len(figures[REFERENCE.name].rounds_s)
    table = _table(
        f"{direction}: means of the post's loop, medians of {rounds} rounds",
        ("as the\npost did", "timed\ncorrectly", "spread", "speed-\nup", "extra\nmemory", "error"),
    )
    reference = figures[REFERENCE.name].median_s
    for name, row in figures.items():
        table.add_row(
            name,
            format_time(row.loop.mean_s),
            format_time(row.median_s),
            f"{row.spread:.0%}",
            f"{reference / row.median_s:.2f}×",
            "?" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.1f} MiB",
            f"{row.error:.1e}",
            style="bold" if name == LIBRARY.name else "",
        )
    return table


def _overhead_table(measurement: Measurement) -> Table:
    modes = measurement.overhead
    table = _table(
        "a call's own cost: 1 × 1 × 4 × 4 input, 3 × 3 kernel, forward",
        [heading for mode in modes for heading in (mode.replace(" ", "\n", 1), "spread")],
    )
    for name in modes[NO_GRAD]:
        rows = [figures[name] for figures in modes.values()]
        cells = [cell for r in rows for cell in (format_time(r.median_s), f"{r.spread:.0%}")]
        table.add_row(name, *cells, style="bold" if name.startswith(LIBRARY.name) else "")
    return table


def _faults(measurement: Measurement) -> Iterator[str]:
    """The faults of the post, each with what it does to the figures of this run."""
    figures = measurement.figures[FORWARD]
    clock = (
        "It read the clock when the last call had returned, but a CUDA call returns before the "
        "device has done its work. "
    )
    if measurement.setting.device == "cpu":
        yield clock + "On the CPU a call returns with its result, so this fault cannot show here."
    else:
        name, loop = max(
            ((n, f.loop) for n, f in figures.items()), key=lambda item: item[1].unfinished_s
        )
        yield clock + (
            f"Here the device worked for up to {format_time(loop.unfinished_s)} more ({name}), "
            f"{loop.unfinished_s / (loop.mean_s * loop.calls):.1%} of the time its loop reports."
        )
    name, row = max(figures.items(), key=lambda item: item[1].loop.first_call_s / item[1].median_s)
    first = row.loop.first_call_s
    yield (
        "It did not warm up, although a first call may also load libraries, start threads and "
        f"compile. Here the first call cost at most {first / row.median_s:.1f} times the median "
        f"({name}: {format_time(first)} against {format_time(row.median_s)}), "
        f"{first / (row.loop.mean_s * row.loop.calls):.1%} of its loop."
    )
    name, row = max(figures.items(), key=lambda item: _deviation(item[1]))
    yield (
        "It took one mean for each function, one after the other, so that a disturbance looks like "
        f"a difference. Here its way and the medians of interleaved rounds differ by at most "
        f"{_deviation(row):.0%} ({name}: {format_time(row.loop.mean_s)} against "
        f"{format_time(row.median_s)})."
    )
    yield (
        "Nor were its functions the same. The stride was half the kernel's size, which is 1 for "
        "sizes 2 and 3 alone; the reshape dropped the batch and took images and kernels to be "
        "square; a batched call was compared with an unbatched one. Here all get one batched input."
    )


def _meaning(measurement: Measurement) -> Iterator[str]:
    forward, backward = measurement.figures[FORWARD], measurement.figures[BACKWARD]
    plain, recorded = measurement.overhead[NO_GRAD], measurement.overhead[GRAD]

    python, cpp = plain[REFERENCE.name].median_s, plain[COMPOSITION.name].median_s
    yield (
        f"Wrapping alone: the post's C++ {_compare(forward, COMPOSITION.name, REFERENCE.name)}. "
        "Both call the same three PyTorch kernels, so C++ can only save on the calling: on the "
        f"tiny input a call takes {format_time(cpp)} from C++ and {format_time(python)} from "
        f"Python, and the difference is {abs(python - cpp) / forward[REFERENCE.name].median_s:.2%} "
        "of the Python reference's time on the workload."
    )
    for direction, figures in measurement.figures.items():
        # Each gradient that a matrix product gives costs as much as the forward pass.
        work = POST.flops * (3 if direction == BACKWARD else 1)
        library, aten = (work / figures[c.name].median_s / 1e9 for c in (LIBRARY, ATEN))
        yield (
            f"This library, {direction}: it {_compare(figures, LIBRARY.name, REFERENCE.name)}, and "
            f"it {_compare(figures, LIBRARY.name, ATEN.name)}. It does {library:.0f} GFLOP/s, "
            f"F.conv2d {aten:.0f}."
        )

    extra = [[row.extra_bytes for row in rows.values()] for rows in (forward, backward)]
    if None in extra[0] + extra[1]:
        yield "Memory: this system does not tell a process's peak, hence the question marks."
    else:
        columns = 4 * POST.gemm_mnk[1] * POST.gemm_mnk[2]
        peaks = (
            f"{name} {max(sizes) / 2**20:.1f}" for name, *sizes in zip(forward, *extra, strict=True)
        )
        yield (
            f"Memory: the unfolded columns of this input are {columns / 2**20:.1f} MiB. Beyond "
            f"arguments and results the larger peak of the two tables was, in MiB: "
            f"{', '.join(peaks)}."
        )

    ours, theirs = LIBRARY_CONV2D.name, ATEN.name
    yield (
        "A call's own cost: on the tiny input conv2d_ext.conv2d takes "
        f"{plain[ours].median_s / plain[theirs].median_s:.3g} times as long as F.conv2d, and "
        f"{recorded[ours].median_s / recorded[theirs].median_s:.3g} times where a gradient is "
        "recorded."
    )
    verdict = "stays within" if results_are_right(measurement) else "IS OUTSIDE ITS BOUND, which is"
    yield (
        "Error is the relative L2 error against F.conv2d in float64, with backward that of the "
        f"worst gradient. This library {verdict} twice F.conv2d's error plus one rounding."
    )
    tables = (*measurement.figures.values(), *measurement.overhead.values())
    spread = max(row.spread for rows in tables for row in rows.values())
    if spread > _DISTURBED:
        yield (
            f"Spread, the middle half of the rounds over their median, reaches {spread:.0%}: "
            "something else kept the machine busy. Run it again on a quiet one before believing "
            "small differences."
        )


def _deviation(figures: Figures) -> float:
    return abs(figures.loop.mean_s - figures.median_s) / figures.median_s


def _compare(figures: dict[str, Figures], name: str, other: str) -> str:
    """'is 2.10 times as fast as X', or that no difference can be claimed."""
    (low, high), (other_low, other_high) = figures[name].quartiles_s, figures[other].quartiles_s
    ratio = figures[other].median_s / figures[name].median_s
    rival = "the Python reference" if other == REFERENCE.name else other
    if low <= other_high and other_low <= high:
        return f"cannot be told from {rival} ({ratio:.2f} times its speed, within the spread)"
    if ratio >= 1:
        return f"is {ratio:.2f} times as fast as {rival}"
    return f"is slower than {rival}: it takes {1 / ratio:.2f} times as long"


def format_time(seconds: float) -> str:
    """Three digits and a unit: '1.42 ms'."""
    unit, value = "µs", 1e6 * seconds
    for larger in ("ms", "s"):
        if value >= 999.5:
            unit, value = larger, value / 1000
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"
