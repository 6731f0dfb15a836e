"""python -m conv2d_ext: one quick run as users start it, and its words on made-up figures."""

import io
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import conv2d_ext
from conv2d_ext import _demo as demo
from conv2d_ext import _demo_measure, _demo_report
from conv2d_ext._demo_measure import (
    ATEN,
    BACKWARD,
    COMPOSITION,
    CONTESTANTS,
    DIRECTIONS,
    FORWARD,
    LIBRARY,
    REFERENCE,
    Loop,
    Measurement,
    Setting,
)

NAMES = [c.name for c in CONTESTANTS]


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    """(finished process, JSON document, the plot's path)"""
    folder = tmp_path_factory.mktemp("demo")
    files = folder / "figures.json", folder / "figures.png"
    command = [sys.executable, "-m", "conv2d_ext", "--quick", "--threads", "1"]
    process = subprocess.run(
        [*command, "--json", files[0], "--plot", files[1]],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=Path(conv2d_ext.__file__).parents[1],
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process, json.loads(files[0].read_text(encoding="utf-8")), files[1]


def rows_of(text: str, title: str) -> dict[str, list[str]]:
    """The rows of the table below `title`, by contestant."""
    lines = itertools.dropwhile(lambda line: not line.startswith(title), text.splitlines())
    lines = itertools.dropwhile(lambda line: "──" not in line, lines)
    next(lines)
    rows = {}
    for line in itertools.takewhile(str.strip, lines):
        name = next(n for n in (f"{LIBRARY.name}, conv2d", *NAMES) if line.strip().startswith(n))
        rows[name] = line.strip().removeprefix(name).split()
    return rows


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_table_holds_every_figure(quick_run, direction):
    process, document, _ = quick_run
    rows = rows_of(process.stdout, f"{direction}: means")
    assert list(rows) == NAMES
    figures = document["measurements"][0]["workload"][direction]
    for name, cells in rows.items():
        loop, loop_unit, median, unit, spread, speedup, memory, memory_unit, error = cells
        row = figures[name]
        assert f"{loop} {loop_unit}" == _demo_report.format_time(row["loop"]["mean_s"])
        assert f"{median} {unit}" == _demo_report.format_time(row["median_s"])
        assert spread.endswith("%")
        assert speedup == f"{figures[REFERENCE.name]['median_s'] / row['median_s']:.2f}×"
        assert (memory, memory_unit) == (f"{row['extra_bytes'] / 2**20:.1f}", "MiB")
        assert error == f"{row['error']:.1e}"


def test_overhead_table_holds_both_functions(quick_run):
    process, _, _ = quick_run
    rows = rows_of(process.stdout, "a call's own cost")
    assert set(rows) == {*NAMES, "this library, conv2d"}
    assert all(len(cells) == 6 for cells in rows.values())


def test_measured_figures_make_sense(quick_run):
    """Loose bounds, which a disturbed machine keeps too."""
    _, document, _ = quick_run
    (measurement,) = (m for m in document["measurements"] if m["device"] == "cpu")
    assert measurement["results_are_right"]
    columns_bytes = 4 * 16 * 9 * 254 * 254
    for direction in DIRECTIONS:
        figures = measurement["workload"][direction]
        for row in figures.values():
            assert 0 < row["error"] < 1e-5
            assert row["loop"]["first_call_s"] <= row["loop"]["mean_s"] * row["loop"]["calls"]
            assert row["loop"]["unfinished_s"] == 0
            assert 3 <= len(row["rounds_s"]) <= 5
        # The reference holds the columns; this library at most 4 MiB for its one thread.
        assert figures[REFERENCE.name]["extra_bytes"] >= columns_bytes
        assert figures[COMPOSITION.name]["extra_bytes"] >= columns_bytes
        assert figures[LIBRARY.name]["extra_bytes"] <= 4 * 2**20
    forward = measurement["workload"][FORWARD][LIBRARY.name]["median_s"]
    assert measurement["workload"][BACKWARD][LIBRARY.name]["median_s"] > forward


def test_output_suits_a_pipe(quick_run):
    process, _, _ = quick_run
    assert "\x1b" not in process.stdout
    assert "\r" not in process.stdout
    assert max(map(len, process.stdout.splitlines())) <= 80
    assert process.stderr == ""


def test_says_what_was_wrong_and_where_it_did_not_run(quick_run):
    process, document, _ = quick_run
    text = " ".join(process.stdout.split())
    for phrase in ("read the clock", "did not warm up", "stride was half", "10,000 times"):
        assert phrase in text
    if all(m["device"] == "cpu" for m in document["measurements"]):
        assert document["skipped"]["CUDA"]
        assert f"Not on CUDA: {document['skipped']['CUDA']}" in text


def test_json_describes_its_origin(quick_run):
    _, document, _ = quick_run
    assert document["schema"] == 1
    assert document["threads"] == 1
    assert document["quick"]
    assert document["versions"]["torch"] == torch.__version__
    assert document["versions"]["conv2d_ext"] == conv2d_ext.__version__
    assert document["machine"]["cpu"]
    assert document["machine"]["logical_cpus"] >= 1
    assert document["build"]["version"] == conv2d_ext.__version__
    assert document["workload"]["flops"] == 2 * 16 * 32 * 9 * 254 * 254


def test_plot_is_a_picture(quick_run):
    from PIL import Image

    with Image.open(quick_run[2]) as image:
        assert image.width >= 1000
        assert len(image.convert("RGB").getcolors(maxcolors=2**20)) > 20


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "0"], "argument --threads: wanted a number from 1 to"),
        (["--threads", "many"], "got 'many'"),
        (["--threads", "1000000"], "got '1000000'"),
        (["--json", "{folder}"], "cannot write there: Is a directory"),
        (["--json", "{folder}/none/a.json"], "cannot write there: No such file or directory"),
        (["--plot", "{folder}/none/a.png"], "cannot write there: No such file or directory"),
        (["--plot", "{folder}/a.txt"], "the name must end in one of"),
        (["--json", "{folder}/a.svg", "--plot", "{folder}/a.svg"], "name the same file"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "Measurement", None)  # measuring would fail
    with pytest.raises(SystemExit) as stopped:
        demo.main([a.format(folder=tmp_path) for a in arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_missing_matplotlib_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--plot", str(tmp_path / "a.png")])
    assert stopped.value.code == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cuda", "available", "architectures", "reason"),
    [
        (None, False, None, "built without CUDA"),
        ("13.0", False, None, "no CUDA device"),
        ("13.0", True, None, "this build of conv2d_ext has no CUDA code. toolkit too old"),
        ("13.0", True, "9.0", None),
    ],
)
def test_says_why_there_is_no_cuda(cuda, available, architectures, reason, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = {"cuda_architectures": architectures, "warnings": ("toolkit too old",)}
    monkeypatch.setattr(conv2d_ext, "build_config", lambda: config)
    settings, skipped = demo._settings()
    assert settings[0] == Setting("cpu")
    if reason is None:
        assert skipped == {}
        assert settings[1:] == [Setting("cuda:0", tf32=False), Setting("cuda:0", tf32=True)]
    else:
        assert reason in skipped["CUDA"]
        assert len(settings) == 1


# ---- words on made-up figures


def made_up(setting: Setting, medians: dict[str, float]) -> Measurement:
    """A measurement in which contestant n took medians[n] seconds, give or take 1 %."""
    measurement = Measurement(setting, quick=True)
    tables = (*measurement.figures.values(), *measurement.overhead.values())
    for rows in tables:
        for name, row in rows.items():
            median = medians.get(name, 1.0)
            row.rounds_s = [0.99 * median, median, 1.01 * median]
            row.loop = Loop(100, median, 2 * median, 0.25 * median)
            row.error = 1e-7
            row.extra_bytes = 2**20
    return measurement


def printed(measurement: Measurement) -> str:
    text = io.StringIO()
    _demo_report.print_measurement(Console(width=80, file=text), measurement)
    return " ".join(text.getvalue().split())


@pytest.mark.parametrize(
    ("ours", "phrase"),
    [
        (0.5, "it is 2.00 times as fast as F.conv2d"),
        (1.005, "it cannot be told from F.conv2d (1.00 times its speed, within the spread)"),
        (3.0, "it is slower than F.conv2d: it takes 3.00 times as long"),
    ],
)
def test_words_follow_the_figures(ours, phrase):
    text = printed(made_up(Setting("cpu"), {LIBRARY.name: ours, REFERENCE.name: 4.0}))
    assert phrase in text
    assert f"it is {4 / ours:.2f} times as fast as the Python reference" in text
    assert "kept the machine busy" not in text
    assert "OUTSIDE" not in text


def test_disturbed_figures_are_said_to_be():
    measurement = made_up(Setting("cpu"), {})
    measurement.figures[FORWARD][ATEN.name].rounds_s = [1.0, 2.0, 3.0]
    text = printed(measurement)
    assert "reaches 50%" in text
    assert "kept the machine busy" in text


def test_unmeasurable_memory_is_said_to_be():
    measurement = made_up(Setting("cpu"), {})
    measurement.figures[BACKWARD][LIBRARY.name].extra_bytes = None
    assert "does not tell a process's peak" in printed(measurement)


def test_wrong_results_are_said_to_be_and_end_in_1(monkeypatch, capsys):
    measurement = made_up(Setting("cpu"), {})
    measurement.figures[BACKWARD][LIBRARY.name].error = 3e-7
    assert "THIS LIBRARY IS OUTSIDE ITS BOUND" in printed(measurement).upper()
    monkeypatch.setattr(demo, "_settings", lambda: ([Setting("cpu")], {}))
    monkeypatch.setattr(demo, "Measurement", lambda setting, quick: measurement)
    monkeypatch.setattr(demo, "_measure", lambda measurement: None)
    assert demo.main([]) == 1
    measurement.figures[BACKWARD][LIBRARY.name].error = 1e-7
    assert demo.main([]) == 0


def test_cuda_section_reports_unfinished_work(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    text = printed(made_up(Setting("cuda:0", tf32=False), {REFERENCE.name: 8.0}))
    assert "Some GPU (cuda:0), TF32 off" in text
    assert "the device worked for up to 2.00 s more (Python reference)" in text
    assert "on the CPU" not in text.lower()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.234, "1.23 s"),
        (0.9996, "1.00 s"),
        (0.0123, "12.3 ms"),
        (0.00123, "1.23 ms"),
        (0.0009996, "1.00 ms"),
        (123e-6, "123 µs"),
        (9.996e-6, "10.0 µs"),
        (0.12e-6, "0.12 µs"),
    ],
)
def test_format_time(seconds, text):
    assert _demo_report.format_time(seconds) == text


def test_tf32_is_restored():
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    with _demo_measure.tf32_set_to(not before[0]):
        assert torch.backends.cudnn.allow_tf32 is not before[0]
        assert torch.backends.cuda.matmul.allow_tf32 is not before[0]
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == before
