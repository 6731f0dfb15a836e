"""The demonstration: the post's workload, measured on each device and explained."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import conv2d_ext
from conv2d_ext._demo_files import draw, write_json
from conv2d_ext._demo_measure import Measurement, Setting, results_are_right, tf32_set_to
from conv2d_ext._demo_report import print_introduction, print_measurement


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 1 where this library's results are wrong, 2 for bad arguments."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    # A terminal that lacks a character shows "?" instead of ending the program.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")
    console = Console()
    settings, skipped = _settings()
    print_introduction(console)
    for device, reason in skipped.items():
        console.print(f"Not on {device}: {reason}\n", highlight=False, markup=False)

    measurements = []
    for setting in settings:
        measurement = Measurement(setting, arguments.quick)
        _measure(measurement)
        print_measurement(console, measurement)
        measurements.append(measurement)

    if arguments.json:
        write_json(arguments.json, measurements, skipped, arguments.quick)
        console.print(f"Figures saved as {arguments.json}", highlight=False, markup=False)
    if arguments.plot:
        draw(arguments.plot, measurements)
        console.print(f"Plot saved as {arguments.plot}", highlight=False, markup=False)
    return 0 if all(map(results_are_right, measurements)) else 1


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m conv2d_ext",
        description="Runs the workload of the post on each device of this machine: checks the "
        "results against F.conv2d in float64, times four ways to compute them as the post did and "
        "correctly, and says what the figures mean. Takes under a minute on a quiet machine.",
        epilog="'python -m conv2d_ext certify --help': whether a model's bits depend on its batch. "
        "'python -m conv2d_ext run script.py': a program whose models' bits don't.",
    )
    parser.add_argument("--threads", type=_threads, metavar="N", help="CPU threads to compute with")
    parser.add_argument(
        "--quick", action="store_true", help="fewer calls and rounds, rougher figures"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="save all figures as JSON")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the figures (.png, .pdf, .svg; needs matplotlib)",
    )
    arguments = parser.parse_args(argv)
    # Whatever can be refused is refused before the measuring starts.
    if arguments.plot:
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("--plot needs matplotlib, which is not installed: pip install matplotlib")
        from matplotlib.backend_bases import FigureCanvasBase

        kinds = FigureCanvasBase.get_supported_filetypes()
        if arguments.plot.suffix.lower().lstrip(".") not in kinds:
            parser.error(
                f"--plot {arguments.plot}: the name must end in one of .{', .'.join(kinds)}"
            )
    files = {"--json": arguments.json, "--plot": arguments.plot}
    for option, path in files.items():
        if path and (problem := _writing_problem(path)):
            parser.error(f"{option} {path}: cannot write there: {problem}")
    if arguments.json and arguments.plot and arguments.json.resolve() == arguments.plot.resolve():
        parser.error(f"--json and --plot name the same file, {arguments.json}")
    return arguments


def _threads(text: str) -> int:
    most = os.cpu_count() or 1
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"wanted a number from 1 to {most}, got {text!r}")
    return int(text)


def _writing_problem(path: Path) -> str | None:
    """Why `path` cannot be written, or None; leaves no file behind that was not there before."""
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        return error.strerror
    if not existed:
        path.unlink()
    return None


def _settings() -> tuple[list[Setting], dict[str, str]]:
    """What to measure, and for each device that is left out, why."""
    settings = [Setting("cpu")]
    if reason := _why_not_cuda():
        return settings, {"CUDA": reason}
    for index in range(torch.cuda.device_count()):
        settings += [Setting(f"cuda:{index}", tf32) for tf32 in (False, True)]
    return settings, {}


def _why_not_cuda() -> str | None:
    if torch.version.cuda is None:
        return f"this PyTorch ({torch.__version__}) is built without CUDA."
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device on this machine."
    config = conv2d_ext.build_config()
    if not config["cuda_architectures"]:
        return " ".join(["this build of conv2d_ext has no CUDA code.", *config["warnings"]])
    return None


def _measure(measurement: Measurement) -> None:
    # On the error stream, and only on a terminal: what goes into a pipe or a file is the report.
    columns = (
        TextColumn("{task.description}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with progress, tf32_set_to(measurement.setting.tf32):
        jobs = measurement.jobs()
        task = progress.add_task("", total=len(jobs))
        for description, job in jobs:
            progress.update(task, description=description)
            job()
            progress.advance(task)
