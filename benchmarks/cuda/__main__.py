"""python -m benchmarks.cuda: measures on the current GPU within a time budget, prints, saves."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cuda import cases, device, report
from benchmarks.cuda.children import WORKER, Children, Lost, Refused
from benchmarks.cuda.describe import command as command_line
from benchmarks.cuda.run import Document, Result, TooLarge, run_cases

WRONG = 1
FILE = "benchmark.json"
DESCRIBE_S = 60


def main(argv: Sequence[str] | None = None, command: Sequence[str] = WORKER) -> int:
    """Exit status: 0, also without a GPU; 1 where this library's results are wrong or a case
    failed; 2 for bad arguments."""
    arguments = parse(argv)
    started = time.monotonic()
    names = ("budget", "batch", "filter", "tiers", "case_limit", "continues")
    settings = {name: getattr(arguments, name) for name in names}
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / FILE
    if arguments.show:
        report.print_document(Document.read(arguments.show), arguments.details)
        return 0
    document = Document({}, settings, {}, [], {}, 0.0, skipped=device.why_not())
    if document.skipped:
        report.print_document(document)
        document.write(path)
        return 0

    planned = cases.plan(arguments.batch)
    chosen = [
        case
        for case in planned
        if re.search(arguments.filter, str(case)) and re.search(arguments.tiers, case.tier)
    ]

    with Children(command) as children:

        def measure(case: cases.Case) -> Result:
            request = {"do": "benchmark", "batch": arguments.batch, "number": planned.index(case)}
            left = started + arguments.budget - time.monotonic()
            found = children.ask(request, min(arguments.case_limit, max(left, 5.0)))
            if "too_large" in found:
                raise TooLarge(found["too_large"])
            return Result.of(found["result"])

        def advance(case: cases.Case, left: int) -> None:
            document.seconds = time.monotonic() - started
            document.write(path)  # with all before it, whatever this one does
            if sys.stderr.isatty():
                print(f"{left} cases left: {case}", file=sys.stderr)

        try:
            described = children.ask({"do": "describe"}, DESCRIBE_S)
            document.machine = {**described["machine"], "command": command_line()}
            document.ceilings = described["ceilings"]
            if arguments.continues:
                chosen = continue_file(document, path, chosen)
            budget = arguments.budget - (time.monotonic() - started)
            kept = {"results": document.results, "left_out": document.left_out}
            run_cases(chosen, measure, budget, advance, **kept)
        except (Lost, Refused) as problem:
            document.skipped = f"the GPU does not answer: {problem}"
        except KeyboardInterrupt:
            document.left_out["all others"] = "interrupted"
    document.seconds = time.monotonic() - started
    if not (document.skipped and arguments.continues):  # which is to keep what is there
        document.write(path)
    report.print_document(document, arguments.details)
    if document.skipped:
        return WRONG
    if device.IS_GPU:
        report.print_targets(document)
    written = [path]
    if arguments.pictures and importlib.util.find_spec("matplotlib") is None:
        print("No pictures: matplotlib is not installed", file=sys.stderr)
    elif arguments.pictures:
        from benchmarks.cuda import plots

        written += plots.draw(document, arguments.output)
    for file in written:
        print(f"Written: {file}")
    return WRONG if document.wrong or document.failed else 0


def continue_file(document: Document, path: Path, chosen: Sequence[cases.Case]) -> list[cases.Case]:
    """Takes over the results of a file of the same commit, GPU and versions; returns the cases that
    it lacks."""
    try:
        before = Document.read(path)
    except (OSError, ValueError):
        return list(chosen)
    same = ("gpu", "driver", "versions", "build")
    if (
        document.machine["versions"]["revision"] is None
        or before.settings["batch"] != document.settings["batch"]
        or any(before.machine.get(fact) != document.machine[fact] for fact in same)
    ):
        print(f"{path} is of another commit, machine or batch: it is measured anew")
        return list(chosen)
    document.results += before.results
    have = {(r.name, r.batch, r.precision, r.layout, r.direction) for r in before.results}
    return [
        case
        for case in chosen
        if (
            case.problem.name, case.problem.batch, case.precision.name, case.layout, case.direction
        ) not in have
    ]  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda",
        description="How fast conv2d_ext is on this machine's GPU beside F.conv2d (with and "
        "without cudnn.benchmark), Python unfold + matmul and the post's C++ composition. The most "
        "telling cases come first; see benchmarks/README.md.",
    )
    parser.add_argument(
        "--budget", type=float, default=300.0, metavar="S",
        help="seconds for everything; what there was no time for is named (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 8, 64], metavar="N",
        help="batch sizes of the layers (default: 1 8 64)",
    )  # fmt: skip
    parser.add_argument(
        "--filter", default="", metavar="REGEX",
        help="of the cases' names, as in 'post, TF32, NCHW, forward'",
    )  # fmt: skip
    parser.add_argument(
        "--tiers", default="", metavar="REGEX",
        help="of what a case is measured for, as in '^(the post|every class)'",
    )  # fmt: skip
    parser.add_argument(
        "--case-limit", type=float, default=30.0, metavar="S",
        help="seconds after which a case counts as hung (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--details", action="store_true", help="print every case")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", default=Path("build/benchmarks"),
        help=f"for {FILE} and the pictures (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--continue", action="store_true", dest="continues",
        help=f"keep what {FILE} there has of the same commit and GPU, and measure the other cases",
    )  # fmt: skip
    parser.add_argument(
        "--no-pictures", action="store_false", dest="pictures", help="write the JSON alone"
    )
    parser.add_argument("--show", type=Path, metavar="FILE", help="print a saved run, measure none")
    arguments = parser.parse_args(argv)
    if not arguments.budget > 0:
        parser.error("--budget: wanted a positive number of seconds")
    return arguments


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
