"""python -m benchmarks: measures, refuses what was disturbed, prints, saves, draws, compares."""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import machine, problems
from benchmarks.layers import (
    BOTH,
    DIRECTIONS,
    FORMATS,
    FORWARD,
    TOLERANCES,
    LayerBlock,
    choose_contestants,
)
from benchmarks.measure import Plan
from benchmarks.models import MODELS, ModelBlock
from benchmarks.quiet import Monitor
from benchmarks.report import print_document, print_files
from benchmarks.results import PYTHON, Document
from benchmarks.roofline import Roofline
from benchmarks.runner import Block, Limits, run_blocks

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCES}
# Exit statuses beside 0, and argparse's 2.
WRONG, DISTURBED, SLOWER = 1, 3, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 where this library's results are wrong, or became slower (compare);
    2 for bad arguments; 3 where the machine was disturbed."""
    arguments = parse(argv)
    return arguments.command(arguments)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="How fast conv2d_ext is beside F.conv2d and Python unfold + matmul, on this "
        "machine's CPU. See benchmarks/README.md for what the figures mean.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_layers(commands.add_parser("layers", help="the layers of real networks, one by one"))
    _add_models(
        commands.add_parser(
            "models", help="whole networks: as they are, converted, in batch_invariant"
        )
    )
    _add_growth(commands.add_parser("growth", help="one layer on ever larger inputs"))

    show = commands.add_parser("show", help="print and draw a saved run again")
    show.set_defaults(command=_show)
    show.add_argument("file", type=_document)
    show.add_argument("--details", action="store_true", help="every case, the slowest first")
    show.add_argument("--plots", type=Path, metavar="FOLDER", help="write the pictures there")

    compare = commands.add_parser("compare", help="two saved runs, case by case")
    compare.set_defaults(command=_compare)
    compare.add_argument("before", type=_document)
    compare.add_argument("after", type=_document)
    compare.add_argument(
        "--threshold",
        type=float,
        default=0.03,
        help="smaller differences don't count (%(default)s)",
    )
    compare.add_argument(
        "--relative-to", metavar="CONTESTANT",
        help="divide by this contestant's time in the same round, such as 'F.conv2d NCHW'",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    if getattr(arguments, "output", None) and not _is_writable(arguments.output):
        parser.error(f"--output {arguments.output}: cannot write there")
    return arguments


def _add_common(parser: argparse.ArgumentParser) -> None:
    most = os.cpu_count() or 1
    parser.add_argument(
        "--threads", type=int, nargs="+", metavar="N", choices=range(1, most + 1),
        default=sorted({1, min(2, most)}), help="numbers of threads (default: 1 2)",
    )  # fmt: skip
    parser.add_argument(
        "--layouts", nargs="+", choices=FORMATS, default=list(FORMATS),
        help="memory formats (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--isa", choices=machine.ISA_ENVIRONMENT, help="instruction set for all contestants alike"
    )
    parser.add_argument(
        "--seconds", type=_positive, metavar="S", help="time for everything, kept roughly"
    )
    parser.add_argument(
        "--case-seconds", type=_positive, metavar="S", default=1.0,
        help="time for the rounds of one case (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--attempts", type=int, default=3, choices=range(1, 11), metavar="N",
        help="at measuring a case undisturbed (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--allow-disturbed", action="store_true",
        help="measure on a busy machine too, and end with status 0; the marks stay",
    )  # fmt: skip
    parser.add_argument(
        "--malloc-defaults", action="store_true",
        help="return freed memory to the system, as programs do, so that large results cost faults",
    )  # fmt: skip
    parser.add_argument(
        "--foreign-cpus", type=float, metavar="N",
        help="CPUs that other processes may use (default: a twentieth of the machine's)",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", default=Path("build/benchmarks"),
        help="for the figures as JSON and the pictures (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--details", action="store_true", help="print every case")


def _add_layers(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_layers, kind="layers")
    parser.add_argument(
        "--quick", action="store_true",
        help="a few problems of every class, batch 1, forward and forward+backward, under a minute",
    )  # fmt: skip
    parser.add_argument(
        "--lists", nargs="+", choices=problems.LISTS, metavar="LIST",
        help=f"of {', '.join(problems.LISTS)} (default: the networks and the post)",
    )  # fmt: skip
    parser.add_argument(
        "--filter", type=problems.regex, default="", metavar="REGEX", help="of the problems' names"
    )
    parser.add_argument(
        "--batch", type=_count, nargs="+", metavar="N", help="batch sizes (default: 1 8)"
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=["float32"], help="(default: float32)"
    )
    parser.add_argument(
        "--directions", nargs="+", choices=DIRECTIONS, metavar="DIRECTION",
        help=f"of {', '.join(DIRECTIONS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--no-reference", action="store_true", help="leave Python unfold + matmul out"
    )
    _add_common(parser)


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_models, kind="models")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch", type=_count, nargs="+", metavar="N", default=[1, 8])
    _add_common(parser)


def _add_growth(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_growth, kind="growth")
    series = list(problems.GROWTH)
    parser.add_argument("--series", nargs="+", choices=series, default=series)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"])
    _add_common(parser)


def _layers(arguments: argparse.Namespace) -> int:
    lists, batches, directions = arguments.lists, arguments.batch, arguments.directions
    if arguments.quick:
        lists, batches = lists or ["quick"], batches or [1]
        directions = directions or [FORWARD, BOTH]
        arguments.seconds = arguments.seconds or 40.0
    lists, batches = lists or problems.DEFAULT_LISTS, batches or [1, 8]
    contestants = choose_contestants(arguments.layouts, not arguments.no_reference)
    blocks = [
        LayerBlock(
            problem, names, DTYPES[dtype], directions or DIRECTIONS, arguments.threads, contestants
        )
        for problem, names in problems.select(lists, batches, arguments.filter)
        for dtype in arguments.dtypes
    ]
    return _run(_sampled(blocks), arguments)


def _sampled(blocks: Sequence[LayerBlock], first: int = 3) -> list[LayerBlock]:
    """Some problems of each class, then the others, shuffled.

    So what time allows has every class in it, and no drift meets one list alone.
    """
    shuffled = random.Random(0).sample(blocks, len(blocks))
    ranks: Counter[str] = Counter()
    early, later = [], []
    for block in shuffled:
        name = problems.layer_class(block.problem)
        ranks[name] += 1
        (early if ranks[name] <= first else later).append(block)
    return early + later


def _models(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("torchvision") is None:
        print("python -m benchmarks models: needs torchvision", file=sys.stderr)
        return 2
    return _run(
        [
            ModelBlock(model, batch, arguments.threads, arguments.layouts)
            for model in arguments.models
            for batch in arguments.batch
        ],
        arguments,
    )


def _growth(arguments: argparse.Namespace) -> int:
    contestants = choose_contestants(arguments.layouts, with_reference=False)
    return _run(
        [
            LayerBlock(problem, [name], DTYPES[dtype], [FORWARD], arguments.threads, contestants)
            for name in arguments.series
            for problem in problems.GROWTH[name]
            for dtype in arguments.dtypes
        ],
        arguments,
    )


def _run(blocks: Sequence[Block], arguments: argparse.Namespace) -> int:
    if not blocks:
        print("python -m benchmarks: no problem was selected", file=sys.stderr)
        return 2
    if arguments.isa:
        machine.force_isa(arguments.isa)
    console = _console()
    kept = not arguments.malloc_defaults and machine.keep_freed_memory()
    try:
        description = machine.describe(kept)
    except RuntimeError as error:  # an instruction set that this CPU lacks
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 2
    monitor = Monitor(arguments.threads, foreign_cpus=arguments.foreign_cpus)
    quiet: dict[str, object] = {"load_average_at_start": os.getloadavg()}
    quiet["at_start"] = monitor.calibrate()
    if quiet["at_start"] and not arguments.allow_disturbed:
        load = quiet["load_average_at_start"][0]
        console.print(
            f"Refused: the machine is not quiet: {quiet['at_start']} (load average {load:.1f}). "
            "--allow-disturbed measures all the same.",
            style="red", markup=False, highlight=False,
        )  # fmt: skip
        return DISTURBED
    dtypes = [DTYPES[name] for name in getattr(arguments, "dtypes", ["float32"])]
    roofline = Roofline(arguments.threads, dtypes)
    plan = Plan(0.0, references=frozenset({PYTHON}))
    limits = Limits(arguments.case_seconds, arguments.seconds, arguments.attempts, plan)

    results, left_out = _with_progress(
        blocks, lambda advance: run_blocks(blocks, limits, monitor, roofline, advance)
    )
    quiet |= {"load_average_at_end": os.getloadavg(), **monitor.describe()}
    # Sorted, since the blocks may have been shuffled.
    document = Document(
        kind=arguments.kind,
        machine=description,
        settings={
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(arguments).items()
            if name != "command"
        },
        roofline=roofline.describe(),
        quiet=quiet,
        results=results if arguments.kind == "growth" else sorted(results, key=lambda r: r.key),
        left_out=left_out,
    )
    print_document(console, document, arguments.details)
    path = arguments.output / f"{arguments.kind}.json"
    document.write(path)
    print_files(console, [path, *_draw(document, arguments.output)])
    if document.wrong:
        return WRONG
    if document.disturbed and not arguments.allow_disturbed:
        return DISTURBED
    return 0


def _with_progress(blocks: Sequence[Block], run: Callable) -> tuple:
    """Shows what is measured, on the error stream and only on a terminal."""
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        # Its thread would take time from what is measured; `advance` draws between cases instead.
        auto_refresh=False,
    )
    with progress:
        task = progress.add_task("", total=sum(block.case_count for block in blocks))

        def advance(title: str, cases: int) -> None:
            progress.update(task, description=title, advance=cases, refresh=True)

        return run(advance)


def _show(arguments: argparse.Namespace) -> int:
    console = _console()
    print_document(console, arguments.file, arguments.details)
    if arguments.plots:
        if not _is_writable(arguments.plots):
            print(f"--plots {arguments.plots}: cannot write there", file=sys.stderr)
            return 2
        print_files(console, _draw(arguments.file, arguments.plots))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("scipy") is None:
        print("python -m benchmarks compare: needs scipy", file=sys.stderr)
        return 2
    from benchmarks.compare import compare, print_comparison

    documents = arguments.before, arguments.after
    differences = compare(*documents, relative_to=arguments.relative_to)
    if not differences:
        beside = f" beside {arguments.relative_to}" if arguments.relative_to else ""
        print(
            f"python -m benchmarks compare: no case was measured undisturbed{beside} in both runs",
            file=sys.stderr,
        )
        return 2
    print_comparison(_console(), *documents, differences, arguments.threshold)
    verdicts = {difference.verdict(arguments.threshold) for difference in differences}
    return SLOWER if "slower" in verdicts else 0


def _console() -> Console:
    # A pipe or a file has no width of its own; the tables are made for this one.
    return Console(width=None if sys.stdout.isatty() else 140)


def _draw(document: Document, folder: Path) -> list[Path]:
    if importlib.util.find_spec("matplotlib") is None:
        print("No pictures: matplotlib is not installed", file=sys.stderr)
        return []
    from benchmarks import plots

    return plots.draw(document, folder)


def _document(text: str) -> Document:
    try:
        return Document.read(Path(text))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: not a number from 1 on")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"wanted a positive number, got {text!r}")
    return value


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
