"""python -m benchmarks.figures: every figure, table and picture that the documents show, anew.

One command for a quiet machine, half an hour, with AMX fifty minutes:

    make figures                                   # or .venv/bin/python -m benchmarks.figures

It measures what is listed in MEASUREMENTS, one after the other, saves each as JSON in
benchmarks/results/, and then writes docs/results.md, the pictures in docs/images/ and the marked
tables in README.md from those files alone. `--only memory bits` measures some, `--only` with no
name measures nothing and writes all again. A test holds the documents against the files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks import bits
from benchmarks.cuda import cases as gpu
from benchmarks.cuda import run as cuda
from benchmarks.problems import DENSE_CLASSES, LAYER_CLASSES
from benchmarks.report import MODEL_PAIRS, PAIRS, per_pixel, speedups
from benchmarks.results import ATEN, OURS, Document, Result, directions_of, distinct, geomean
from conv2d_ext import build_config
from conv2d_ext.testing import POST

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "results.md"
COMMAND = "python -m benchmarks.figures"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What `python -m` is called with; {seconds}: the share of --seconds."""

    command: tuple[str, ...]
    # Of --seconds. The command then writes <its first argument>.json into --output; else it names
    # a file in benchmarks/results.
    share: float = 0.0
    isa: str = ""  # measured only where this instruction set is in use


_LAYERS = (
    "benchmarks", "layers", "--batch", "1", "--directions", "forward", "forward+backward",
    "--no-reference", "--case-seconds", "0.5", "--seconds", "{seconds}",
)  # fmt: skip
# In this order, by the name of the file in benchmarks/results.
MEASUREMENTS = {
    "layers": Measurement(_LAYERS, 0.6),
    # With bfloat16, whose kernels are others there.
    "amx": Measurement((*_LAYERS, "--dtypes", "float32", "bfloat16"), 0.84, isa="amx"),
    "models": Measurement(
        ("benchmarks", "models", "--case-seconds", "4", "--seconds", "{seconds}"),
        0.25,
    ),
    "growth": Measurement(
        ("benchmarks", "growth", "--case-seconds", "2", "--seconds", "{seconds}"),
        0.15,
    ),
    "memory": Measurement(("benchmarks.memory", "--json", "benchmarks/results/memory.json")),
    "bits": Measurement(
        (
            "benchmarks.bits",
            "--filter",
            "resnet50|mobilenet_v3_large|efficientnet_b0",
            "--json",
            "benchmarks/results/bits.json",
        )
    ),
}
DISTURBED = 3  # the exit status of `python -m benchmarks` where cases were disturbed
SLOWEST = 12  # so many of the slowest cases does the page name
CLASS_TITLES = {
    "3x3": "3 × 3", "1x1": "1 × 1", "stem": "stems", "1 pixel": "one pixel",
}  # fmt: skip
# A class whose median share of its bound is lower is listed with what keeps it there.
FAIR_SHARE = 0.8
REASONS = {
    "3x3": "loads and stores beside the multiply-adds. A chain of at most 64 products, which the "
    "accuracy guarantee asks for, ends with the stores of its sums.",
    "1x1": "on small maps weights and pixels are packed for few products each; large maps with "
    "few channels move memory.",
    "stem": "K is short (27 to 147 products), so packing and stores weigh more.",
    "dilated": "taps lie far apart, so patches are larger than what is used of them.",
    "other": "large kernels and patches on few channels: packing weighs more.",
    "1 pixel": "each weight is used once, so reading it is the work. A call's fixed cost of some "
    "microseconds is as long as that.",
    "grouped": "groups of 4 to 32 channels fill part of a tile.",
    "depthwise": "9 to 49 products an element. The rest is loads, stores and, on small maps, a "
    "call's fixed cost.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 where a measurement found something wrong; 2 for bad arguments; 3 where the
    machine is too busy to begin."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", choices=MEASUREMENTS, default=list(MEASUREMENTS), metavar="NAME",
        help=f"of {', '.join(MEASUREMENTS)} (default: all; without a name: none)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=1500.0, metavar="S",
        help="for what can be shortened (%(default)s); memory and bits take some minutes more",
    )  # fmt: skip
    parser.add_argument(
        "--allow-disturbed", action="store_true",
        help="measure on a busy machine too; such cases are marked wherever they are shown",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        isa = MEASUREMENTS[name].isa
        if isa not in ("", build_config()["isa"]):
            print(f"=== {name} stays as it was: {isa} is not in use on this CPU", flush=True)
            continue
        if status := _measure(name, arguments.seconds, arguments.allow_disturbed):
            print(f"{COMMAND}: {name} ended with status {status}", file=sys.stderr)
            return status
    for path in write_all():
        print(f"Wrote {path.relative_to(ROOT)}")
    return 0


def _measure(name: str, seconds: float, allow_disturbed: bool) -> int:
    measurement = MEASUREMENTS[name]
    share = measurement.share
    command = [part.format(seconds=share * seconds) for part in measurement.command]
    output = Path("build", "benchmarks", name)
    found = ROOT / output / f"{command[1]}.json"
    if share:
        found.unlink(missing_ok=True)
        command += ["--output", str(output)]
        if allow_disturbed:
            command += ["--allow-disturbed", "--attempts", "1"]
    print(f"=== python -m {' '.join(command)}", flush=True)
    # What is not timed may use more threads than there are cores: they must not spin.
    environ = os.environ if share else {**os.environ, "OMP_WAIT_POLICY": "passive"}
    status = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environ).returncode
    if share and found.exists():
        shutil.copy(found, RESULTS / f"{name}.json")
        # Cases that stayed disturbed after all attempts are left out; the documents say how many.
        return 0 if status == DISTURBED else status
    return status


# ---- what the documents show, from the files alone


def write_all() -> list[Path]:
    from benchmarks import plots
    from benchmarks.cuda import plots as cuda_plots

    layers = Document.read(RESULTS / "layers.json")
    IMAGES.mkdir(parents=True, exist_ok=True)
    plots.save(plots.speed_by_class(layers), IMAGES / "speed.png")
    plots.save(plots.memory_by_size(_json("memory")), IMAGES / "memory.png")
    paths = [IMAGES / "speed.png", IMAGES / "memory.png"]
    for name in ("layers", "models", "growth"):
        paths += plots.draw(Document.read(RESULTS / f"{name}.json"), IMAGES)
    paths += cuda_plots.draw(_cuda_document(), IMAGES)
    README.write_text(readme_text(README.read_text(encoding="utf-8")), encoding="utf-8")
    PAGE.write_text(page_text(), encoding="utf-8")
    return [*paths, README, PAGE]


def readme_text(text: str) -> str:
    """README.md with its marked parts written anew."""
    layers, amx = (Document.read(RESULTS / f"{name}.json") for name in ("layers", "amx"))
    parts = {
        "bits": [*bits.table(_json("bits")), "", _bits_caption(_json("bits"))],
        "speed": [
            *speed_table(layers, directions=["forward"]), "",
            _speed_caption(layers, f" of {_count_wanted(layers)}", _json("bits")["machine"]), "",
            _backward_line(layers), "", _amx_line(amx), "",
            _cuda_line(_cuda_document(), _json("cuda/checks")),
        ],
    }  # fmt: skip
    for name, lines in parts.items():
        pattern = rf"(<!-- {name}: [^\n]* -->\n).*?(<!-- end of {name} -->)"
        new = "\n".join(lines)
        text, found = re.subn(
            pattern, lambda match, new=new: f"{match[1]}\n{new}\n\n{match[2]}", text, flags=re.S
        )
        if found != 1:
            raise ValueError(f"README.md has {found} parts that are marked as {name}, wanted 1")
    return text


def page_text() -> str:
    """docs/results.md."""
    layers = Document.read(RESULTS / "layers.json")
    sections = [
        [
            "# Results",
            "",
            f"Written by `{COMMAND}` (`make figures`) from the files in benchmarks/results, which "
            "hold every round. "
            "[The benchmarks' README](../benchmarks/README.md) says how figures are taken and when "
            "a case counts as disturbed.",
            "",
            _machine_line(layers.machine),
        ],
        _layers_section(layers),
        share_section(layers),
        _amx_section(Document.read(RESULTS / "amx.json")),
        _models_section(Document.read(RESULTS / "models.json")),
        _growth_section(Document.read(RESULTS / "growth.json")),
        _memory_section(_json("memory")),
        _bits_section(_json("bits")),
        _cuda_section(_cuda_document(), _json("cuda/checks")),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def speed_table(document: Document, directions: Sequence[str] = ()) -> list[str]:
    """Speed over F.conv2d by class of layers: means on one thread and two, the slowest layer."""
    directions = directions or directions_of(document.usable)
    columns = [(direction, pair) for pair in PAIRS for direction in directions]
    head = ["layers", *(f"{pair[2]}, {d.replace('+', ' + ')}" for d, pair in columns)]
    lines = [_line(head), _rule(head)]
    for title, classes in _class_rows(document.usable):
        cases = [result for result in document.results if result.layer_class in classes]
        lines.append(_line([title, *_speeds(document, cases, columns)]))
    return lines


def _speeds(
    document: Document,
    cases: Sequence[Result],
    columns: Sequence[tuple[str, tuple[str, str, str]]],
) -> list[str]:
    """A cell for each direction and pair of contestants."""
    return [
        _means(document, [case for case in cases if case.direction == direction], ours, peer)
        for direction, (ours, peer, _) in columns
    ]


def _means(document: Document, cases: Sequence[Result], ours: str, peer: str) -> str:
    """Of the speed over `peer`, for each number of threads; in brackets the slowest case."""
    means = _of_each_thread_count(document, cases, lambda case: case.speedup(ours, peer), geomean)
    ratios = speedups([case for case in cases if document.shows(case)], ours, peer)
    return f"{_cell(means, '.2f')} ({min(ratios):.2f})" if ratios else _cell(means, ".2f")


def _of_each_thread_count(
    document: Document,
    cases: Sequence[Result],
    value: Callable[[Result], float | None],
    mean: Callable[[list[float]], float],
) -> list[float | None]:
    """The mean of the cases' values on one thread, on two, ...; None where most of them were
    disturbed, so that the rest speaks of other layers."""
    means = []
    for threads in sorted(distinct(cases, "threads")):
        timed = [case for case in cases if case.threads == threads and value(case) is not None]
        shown = [value(case) for case in timed if document.shows(case)]
        if timed:
            means.append(mean(shown) if 2 * len(shown) >= len(timed) else None)
    return means


def _cell(figures: Sequence[float | None], form: str) -> str:
    return ", ".join("–" if figure is None else format(figure, form) for figure in figures)


def share_section(document: Document) -> list[str]:
    """What share of the bound each class reaches, here and in F.conv2d, and why no more."""
    lines = [
        "## Share of what the machine can do",
        "",
        "A layer's bound is the lower of two measured rates: the cores' multiply-adds, and the "
        "memory's or cache's bandwidth on what has to be moved at least once "
        "([how](../benchmarks/README.md#roofline)). Medians of the layers' shares, on 1 thread and "
        "on 2; in brackets F.conv2d's.",
        "",
    ]
    head = ["layers", "direction", "bound by multiply-adds, by bandwidth", *(p[2] for p in PAIRS)]
    lines += [_line(head), _rule(head)]
    low: list[str] = []
    for title, classes in _class_rows(document.usable):
        for direction in directions_of(document.usable):
            timed = [
                r
                for r in document.results
                if r.layer_class in classes and r.direction == direction and r.roof
            ]
            cases = [case for case in timed if document.shows(case)]
            if not cases:
                continue
            by_peak = sum(_is_bound_by_peak(document, case) for case in cases)
            cells = [title, direction.replace("+", " + "), f"{by_peak}, {len(cases) - by_peak}"]
            for ours, peer, _ in PAIRS:
                mine, theirs = (_shares(document, timed, name) for name in (ours, peer))
                cells.append(f"{_cell(mine, '.0%')} ({_cell(theirs, '.0%')})")
                is_low = any(share is not None and share < FAIR_SHARE for share in mine)
                if is_low and len(classes) == 1 and classes[0] not in low:
                    low.append(classes[0])
            lines.append(_line(cells))
    if low:
        lines += ["", f"Below {FAIR_SHARE:.0%} of the bound somewhere, and why:", ""]
        lines += [f"- {CLASS_TITLES.get(name, name)}: {REASONS[name]}" for name in low]
    lines += [
        "",
        "Shares above 100% occur because products with the padding are counted, though kernels "
        "skip them.",
        "",
        "`python -m benchmarks show benchmarks/results/layers.json --details` prints every "
        "layer's share.",
    ]
    return [*lines, "", "![Roofline](images/roofline-float32.png)"]


def _is_bound_by_peak(document: Document, case: Result) -> bool:
    peaks = document.roofline["peak_flops_per_s"][str(case.threads)]
    return case.roof >= min(peaks.values()) * (1 - 1e-9)


def _shares(document: Document, cases: Sequence[Result], contestant: str) -> list[float | None]:
    """The median for each number of threads."""
    return _of_each_thread_count(
        document, cases, lambda case: case.roofline_share(contestant), statistics.median
    )


def _class_rows(results: Sequence[Result]) -> Iterator[tuple[str, tuple[str, ...]]]:
    present = {result.layer_class for result in results}
    for name in LAYER_CLASSES:
        if name in present:
            yield CLASS_TITLES.get(name, name), (name,)
    if len(present.intersection(DENSE_CLASSES)) > 1:
        yield "all but grouped, depthwise", DENSE_CLASSES


def _speed_caption(document: Document, wanted: str = "", above: dict | None = None) -> str:
    """`wanted`: " of N", for pages that don't list the layers that were not measured. `above`: the
    machine that the page has named before."""
    dtypes = " and ".join(distinct(document.usable, "dtype"))
    layers = _layers((r.name for r in document.usable), wanted)
    machine = _machine_line(document.machine)
    if above is not None and machine.rstrip("+.") == _machine_line(above).rstrip("+."):
        machine = "The machine above."
    return (
        f"Speedup over `F.conv2d` in the same format: geometric means, 1 thread and 2 "
        f"(slowest layer; –: most disturbed). {layers}, {dtypes}, batch 1. "
        f"{machine}{_disturbed_line(document)}"
    )


def _bits_caption(document: dict) -> str:
    small = [name for name in document["layers"] if name.endswith(bits.SMALL)]
    large = [name for name in document["layers"] if not name.endswith(bits.SMALL)]
    return (
        f"{_layers(large)} at 224 × 224, {len(small)} again at 64 × 64, float32, batches up to "
        f"{max(bits.BATCHES)}, up to {max(bits.THREADS)} threads. "
        f"{_machine_line(document['machine'])}"
    )


def _count_wanted(document: Document) -> int:
    """Layers of the list, measured or not."""
    return len({r.name for r in document.usable} | {r.name for r in document.disturbed}) + len(
        document.left_out
    )


def _layers(names: Iterable[str], wanted: str = "") -> str:
    """How many, and of which networks: a layer's name begins with its network's."""
    distinct = set(names)
    networks = sorted({name.split()[0] for name in distinct} - {"post"})
    of = ", ".join(networks) if len(networks) < 4 else f"{len(networks)} networks"
    return f"{len(distinct)}{wanted} layers of {of}"


def _machine_line(machine: dict) -> str:
    versions = machine["versions"]
    name = machine["cpu"]
    if machine.get("microarchitecture"):
        name += f" ({machine['microarchitecture']})"
    return (
        f"{name}, {machine['usable_cpus']} cores, {machine['isa']} (ATen: {machine['torch_isa']}), "
        f"torch {versions['torch'].split('+')[0]}, commit {_commit(machine)}."
    )


def _commit(machine: dict) -> str:
    """Its first digits, with + where files differed from it."""
    revision = machine["versions"]["revision"] or "?"
    return revision[:9] + "+" * revision.endswith("+")


def _disturbed_line(document: Document) -> str:
    if not document.disturbed:
        return ""
    shown = "shown and marked" if document.settings.get("allow_disturbed") else "left out"
    return f" Disturbed, {shown}: {len(document.disturbed)} of {len(document.results)} cases."


def _layers_section(document: Document) -> list[str]:
    lines = ["## Layers", "", *speed_table(document), "", _speed_caption(document), ""]
    lines += ["![Speed by class of layers](images/speed.png)", ""]
    lines += _left_out(document)
    lines += _slowest(document)
    for dtype, layout in (("float32", "NCHW"), ("float32", "channels_last")):
        name = f"ratios-{dtype}-{layout}.png"
        lines += ["", f"Every layer, {layout}: [picture](images/{name})."]
    return lines


def _slowest(document: Document) -> list[str]:
    lines = [f"The {SLOWEST} slowest cases beside F.conv2d:", ""]
    head = ["layer", "direction", "threads", "format", "speedup", "quartiles of its rounds"]
    lines += [_line(head), _rule(head)]
    cases = [
        (ratio, result, pair)
        for result in document.usable
        for pair in PAIRS
        if (ratio := result.speedup(pair[0], pair[1])) is not None
    ]
    for ratio, result, (ours, peer, layout) in sorted(cases, key=lambda case: case[0])[:SLOWEST]:
        rounds = [
            theirs / mine
            for mine, theirs in zip(
                result.timings[ours].rounds_s, result.timings[peer].rounds_s, strict=False
            )
        ]
        low, _, high = statistics.quantiles(rounds, n=4) if len(rounds) > 1 else rounds * 3
        mark = " (disturbed)" if result.disturbed else ""
        cells = [result.name + mark, result.direction, str(result.threads), layout]
        lines.append(_line([*cells, f"{ratio:.2f}", f"{low:.2f} to {high:.2f}"]))
    return lines


def _by_dtype(document: Document) -> Iterator[tuple[str, Document]]:
    """float32 first."""
    dtypes = distinct(document.results, "dtype")
    for dtype in sorted(dtypes, key=lambda name: name != "float32"):
        results = [result for result in document.results if result.dtype == dtype]
        names = {result.name for result in results}
        left_out = {name: why for name, why in document.left_out.items() if name not in names}
        yield dtype, dataclasses.replace(document, results=results, left_out=left_out)


def _amx_section(document: Document) -> list[str]:
    lines = ["## Layers on a CPU with AMX", ""]
    lines += ["There bfloat16 is multiplied in AMX tiles, float32 in AVX-512."]
    for dtype, part in _by_dtype(document):
        lines += ["", f"### {dtype}", "", *speed_table(part), "", _speed_caption(part), ""]
        lines += _left_out(part) + _slowest(part)
    show = "python -m benchmarks show benchmarks/results/amx.json --details"
    return [*lines, "", f"`{show}` prints every layer."]


def _last_row(document: Document, direction: str) -> str:
    cases = [result for result in document.results if result.layer_class in DENSE_CLASSES]
    return ", ".join(_speeds(document, cases, [(direction, pair) for pair in PAIRS]))


def _backward_line(document: Document) -> str:
    return f"Forward + backward, the last row: {_last_row(document, 'forward+backward')}."


def _amx_line(document: Document) -> str:
    """What README.md says of it: the last row of the table, for each dtype."""
    found = [f"{dtype} {_last_row(part, 'forward')}" for dtype, part in _by_dtype(document)]
    return f"With AMX (commit {_commit(document.machine)}), the last row: {'; '.join(found)}."


def _left_out(document: Document) -> list[str]:
    if not document.left_out:
        return []
    reasons = ", ".join(dict.fromkeys(document.left_out.values()))
    return [f"Not measured: {len(document.left_out)} layers ({reasons}).", ""]


def _models_section(document: Document) -> list[str]:
    lines = ["## Whole models", "", _machine_line(document.machine) + _disturbed_line(document), ""]
    lines += [
        "The speed over PyTorch's of the same model with its layers converted (`convert`), and as "
        "it is in `batch_invariant`, which also computes attention, softmax, norms and pointwise "
        "functions; evaluation, float32, in the same memory format.",
        "",
    ]
    pairs = [pair for pair in MODEL_PAIRS if speedups(document.usable, *pair[:2])]
    head = ["model", "threads", *(title for _, _, title in pairs)]
    lines += [_line(head), _rule(head)]
    for result in document.usable:
        ratios = [result.speedup(ours, peer) for ours, peer, _ in pairs]
        cells = [f"{ratio:.2f}" if ratio else "" for ratio in ratios]
        mark = " (disturbed)" if result.disturbed else ""
        lines.append(_line([result.name + mark, str(result.threads), *cells]))
    means = []
    for ours, peer, _ in pairs:
        ratios = speedups(document.usable, ours, peer)
        means.append(f"**{geomean(ratios):.2f}**" if ratios else "")
    lines.append(_line(["**geometric mean**", "", *means]))
    lines += ["", "![Whole models](images/models.png)"]
    return lines


def _growth_section(document: Document) -> list[str]:
    lines = ["## Growth", "", "The time for an output pixel, over the best of its series:", ""]
    head = ["series", "threads", "this library, worst", "F.conv2d, worst"]
    lines += [_line(head), _rule(head)]
    for series in dict.fromkeys(tuple(result.lists) for result in document.usable):
        for threads in sorted(distinct(document.usable, "threads")):
            cases = [
                r for r in document.usable if tuple(r.lists) == series and r.threads == threads
            ]
            cells = [series[0], str(threads)]
            for name in (OURS, ATEN):
                found = [s for case in cases if (s := per_pixel(case, name)) is not None]
                cells.append(f"{max(found) / min(found):.2f}" if found else "")
            lines.append(_line(cells))
    lines += ["", _machine_line(document.machine) + _disturbed_line(document), ""]
    return [*lines, "![Growth](images/growth.png)"]


def _memory_section(document: dict) -> list[str]:
    lines = ["## Temporary memory", "", f"A layer of {document['layer']}; MiB beyond the results:"]
    for direction, contestants in document["bytes"].items():
        sizes = list(next(iter(contestants.values())))
        head = [direction.replace("+", " + "), *(f"{size} × {size}" for size in sizes)]
        lines += ["", _line(head), _rule(head)]
        for name, figures in contestants.items():
            lines.append(_line([name, *(f"{figures[size] / 2**20:.1f}" for size in sizes)]))
    lines += ["", "![Temporary memory against image size](images/memory.png)", ""]
    lines += [
        f"{_machine_line(document['machine'])} {document['threads']} threads. The peak of the "
        "process's resident memory during a call, each in a process of its own; it counts code "
        "that a library generates for the call, too."
    ]
    return lines


def _bits_section(document: dict) -> list[str]:
    lines = ["## What bits follow", "", *bits.table(document), "", _bits_caption(document)]
    lines += ["", "Weight gradients sum over the batch: that row leaves them out.", ""]
    lines += ["By size of the picture, an output or a gradient differs in:", ""]
    head = ["", "layers", *(f"{name}: {axis}" for name in ("F.conv2d",) for axis in bits.AXES)]
    lines += [_line(head), _rule(head)]
    for title, wanted in (("224 × 224", False), ("64 × 64", True)):
        layers = {n: f for n, f in document["layers"].items() if n.endswith("of 64x64") == wanted}
        part = {"layers": layers}
        counts = [bits.count(part, "F.conv2d", axis, bits.RESULTS) for axis in bits.AXES]
        lines.append(_line([title, str(len(layers)), *map(str, counts)]))
    return lines


# ---- a GPU's, which gpu_check.sh measures where there is one


def _cuda_document() -> cuda.Document:
    return cuda.Document.read(RESULTS / "cuda" / "benchmark.json")


def _cuda_speeds(results: Sequence[cuda.Result]) -> str:
    """Of graph times, over the faster of F.conv2d's two: the mean, and in brackets the slowest."""
    ratios = [
        min(found)
        for result in results
        if (found := [r for peer in (gpu.ATEN, gpu.TUNED) if (r := result.speedup(peer, "graph"))])
    ]
    return f"{geomean(ratios):.2f} ({min(ratios):.2f})" if ratios else ""


def _cuda_layers(document: cuda.Document, precision: str) -> list[cuda.Result]:
    """Forward, in the format that the precision is mostly used in."""
    layout = {p.name: layout for p, layout in gpu.MAIN}[precision]
    names = (POST.name, gpu.TINY.name)
    return [
        r
        for r in document.results
        if (r.precision, r.layout, r.direction) == (precision, layout, gpu.FORWARD)
        and r.name not in names
    ]


def _cuda_line(document: cuda.Document, checks: dict) -> str:
    means, before = [], ""
    for precision, layout in gpu.MAIN:
        speed = _cuda_speeds(_cuda_layers(document, precision.name))
        means.append(f"{layout} " * (layout != before) + f"{precision.name} {speed}")
        before = layout
    gpu_name = document.machine["gpu"].removeprefix("NVIDIA ")
    changed = "; kernels changed since" if checks["since"] else ""
    commit = _commit(document.machine)
    return f"On an {gpu_name} (commit {commit}{changed}), forward: {', '.join(means)}."


def _cuda_section(document: cuda.Document, checks: dict) -> list[str]:
    machine, versions = document.machine, document.machine["versions"]
    lines = [
        "## CUDA",
        "",
        f"{machine['gpu']}, driver {machine['driver']}, torch {versions['torch']}, cuDNN "
        f"{versions['cudnn']}, commit {_commit(machine)}. Times of a CUDA graph's replay, "
        "so without the host's. F.conv2d runs with cudnn.benchmark and without, and the faster of "
        "the two counts.",
        "",
        "The post's problem, forward, microseconds a call; *host* is what an eager call costs the "
        "host:",
        "",
    ]
    head = ["", gpu.OURS, "F.conv2d", gpu.PYTHON, "host", "F.conv2d's host"]
    lines += [_line(head), _rule(head)]
    for result in document.results:
        if (result.name, result.direction) != (POST.name, gpu.FORWARD):
            continue
        theirs = min(gpu.ATEN, gpu.TUNED, key=lambda name: result.median(name, "graph"))
        times = [(gpu.OURS, "graph"), (theirs, "graph"), (gpu.PYTHON, "graph")]
        times += [(gpu.OURS, "host"), (theirs, "host")]
        cells = [f"{result.median(name, what) * 1e6:.1f}" for name, what in times]
        lines.append(_line([f"{result.precision}, {result.layout}", *cells]))
    lines += ["", "Layers, forward: speedup over F.conv2d, geometric means (slowest layer):", ""]
    columns = [(precision.name, layout) for precision, layout in gpu.MAIN]
    head = ["layers", *(", ".join(column) for column in columns)]
    lines += [_line(head), _rule(head)]
    chosen = {name: _cuda_layers(document, name) for name, _ in columns}
    classes = {r.layer_class for results in chosen.values() for r in results}
    rows = [(CLASS_TITLES.get(name, name), (name,)) for name in LAYER_CLASSES if name in classes]
    for title, wanted in [*rows, ("all", tuple(classes))]:
        cells = [
            _cuda_speeds([r for r in chosen[name] if r.layer_class in wanted])
            for name, _ in columns
        ]
        lines.append(_line([title, *cells]))
    counts = ", ".join(f"{len(results)} in {name}" for name, results in chosen.items())
    late = len(document.left_out) - len(document.failed)
    lines += ["", f"Cases, of batches 1, 8 and 64: {counts}; {late} others had no time.", ""]
    lines += [f"- {case}: {document.left_out[case]}" for case in document.failed]
    lines += [""] * bool(document.failed)
    failed = [test for part in checks["tests"] for test in part["failed"]]
    lines += [_cuda_checks_line(checks, machine), ""]
    lines += [*(f"- {test}" for test in failed), *[""] * bool(failed)]
    if checks["since"]:
        lines += ["Changed since, and in no test or figure here:", ""]
        lines += [*(f"- {change}" for change in checks["since"]), ""]
    lines += [
        "![The post's problem on a GPU](images/cuda-post.png)",
        "",
        "![Layers on a GPU](images/cuda-layers.png)",
    ]
    return lines


def _cuda_checks_line(checks: dict, machine: dict) -> str:
    at = _commit({"versions": checks})
    at = "the same commit" if at == _commit(machine) else f"commit {at}"
    tests = checks["tests"]
    passed, skipped = (sum(part[what] for part in tests) for what in ("passed", "skipped"))
    failed = sum(len(part["failed"]) for part in tests)
    unfinished = sum(not part["finished"] for part in tests)
    found = [
        f"At {at} {passed} tests of CUDA passed there, {skipped} were skipped and {failed} failed"
        + f", and {unfinished} of {len(tests)} runs of tests were not finished" * bool(unfinished)
    ]
    for run in checks["sanitizer"]:
        tool = f"compute-sanitizer's {run['tool']}"
        if run["errors"] is None:
            found.append(f"{tool} was not finished")
        else:
            found.append(
                f"{tool} found {run['errors']} errors in the {run['calls']} calls of "
                "tests/cuda_small_set.py"
            )
    return "; ".join(found) + "."


def _json(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _rule(cells: Sequence[str]) -> str:
    return "|---" * len(cells) + "|"


if __name__ == "__main__":
    sys.exit(main())
