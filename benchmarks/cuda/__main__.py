"""python -m benchmarks.cuda: measures on the current GPU within a time budget, prints, saves."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

import conv2d_ext
from benchmarks import machine
from benchmarks.cuda import cases, report
from benchmarks.cuda.measure import Gpu, ceilings
from benchmarks.cuda.run import Document, run_cases

WRONG = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, also without a GPU; 1 where this library's results are wrong or a case
    failed; 2 for bad arguments."""
    arguments = parse(argv)
    started = time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else 140)
    settings = {name: getattr(arguments, name) for name in ("budget", "batch", "filter")}
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "cuda-benchmark.json"
    if arguments.show:
        report.print_document(console, Document.read(arguments.show), arguments.details)
        return 0
    if reason := why_not():
        document = Document({}, settings, {}, [], {}, 0.0, skipped=reason)
        report.print_document(console, document)
        document.write(path)
        return 0

    device = torch.device("cuda", torch.cuda.current_device())
    document = Document(describe(device), settings, ceilings(device), [], {}, 0.0)
    chosen = [
        case for case in cases.plan(arguments.batch) if re.search(arguments.filter, str(case))
    ]
    progress = Console(stderr=True)

    def advance(case: cases.Case, left: int) -> None:
        if progress.is_terminal:
            progress.print(f"{left} cases left: {case}", markup=False, highlight=False)

    def free_bytes() -> int:
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept

    budget = arguments.budget - (time.monotonic() - started)
    kept = {"results": document.results, "left_out": document.left_out}
    try:
        run_cases(chosen, Gpu(), device, budget, free_bytes, advance, **kept)
    except KeyboardInterrupt:
        document.left_out["all others"] = "interrupted"
    document.seconds = time.monotonic() - started
    report.print_document(console, document, arguments.details)
    report.print_targets(console, document)
    document.write(path)
    written = [path]
    if importlib.util.find_spec("matplotlib") is None:
        print("No pictures: matplotlib is not installed", file=sys.stderr)
    else:
        from benchmarks.cuda import plots

        written += plots.draw(document, arguments.output)
    for file in written:
        console.print(f"Written: {file}", markup=False, highlight=False)
    return WRONG if document.wrong or document.failed else 0


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
    parser.add_argument("--details", action="store_true", help="print every case")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", default=Path("build/benchmarks"),
        help="for the figures as JSON and the pictures (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--show", type=Path, metavar="FILE", help="print a saved run, measure none")
    arguments = parser.parse_args(argv)
    if not arguments.budget > 0:
        parser.error("--budget: wanted a positive number of seconds")
    return arguments


def why_not() -> str | None:
    """Why nothing can be measured here, or None."""
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU on this machine"
    if not conv2d_ext.build_config()["cuda_architectures"]:
        return "this build of conv2d_ext has no CUDA code"
    return None


def describe(device: torch.device) -> dict[str, object]:
    """What a reader on another machine needs to know."""
    properties = torch.cuda.get_device_properties(device)
    host = machine.describe(freed_memory_is_kept=False)
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "driver": _driver(),
        "host": {key: host[key] for key in ("cpu", "logical_cpus", "system")},
        "versions": {
            **host["versions"],
            # Where the tree has come without its history.
            "revision": host["versions"]["revision"] or os.environ.get("REVISION"),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        },
        "build": host["build"],
        "started": host["started"],
        "command": ["python", "-m", "benchmarks.cuda", *sys.argv[1:]],
    }


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"(\d+\.\d+\.\d+)", text)
    return found[1] if found else None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
