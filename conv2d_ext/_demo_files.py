"""What `python -m conv2d_ext` saves: the figures as JSON, and drawn."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from pathlib import Path

import torch

import conv2d_ext
from conv2d_ext._demo_measure import (
    BACKWARD,
    CONTESTANTS,
    DIRECTIONS,
    FORWARD,
    LIBRARY,
    Figures,
    Measurement,
    results_are_right,
)
from conv2d_ext.testing import POST

JSON_SCHEMA = 1


def write_json(
    path: Path, measurements: list[Measurement], skipped: dict[str, str], quick: bool
) -> None:
    """Every figure, with what a reader on another machine needs to know."""
    document = {
        "schema": JSON_SCHEMA,
        "machine": _machine(),
        "versions": {
            "conv2d_ext": conv2d_ext.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "build": conv2d_ext.build_config(),
        "threads": torch.get_num_threads(),
        "quick": quick,
        "workload": dataclasses.asdict(POST) | {"flops": POST.flops},
        "measurements": [
            {
                "title": m.title,
                "device": m.setting.device,
                "tf32": m.setting.tf32,
                "results_are_right": results_are_right(m),
                "workload": _tables(m.figures),
                "tiny_input": _tables(m.overhead),
            }
            for m in measurements
        ],
        "skipped": skipped,
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _tables(tables: dict[str, dict[str, Figures]]) -> dict[str, dict[str, dict[str, object]]]:
    return {
        title: {
            name: dataclasses.asdict(row) | {"median_s": row.median_s, "spread": row.spread}
            for name, row in rows.items()
        }
        for title, rows in tables.items()
    }


def _machine() -> dict[str, object]:
    return {
        "cpu": _cpu_name(),
        "logical_cpus": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def draw(path: Path, measurements: list[Measurement]) -> None:
    """Times and memory as bars, one row of panels for each setting."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = [c.name for c in CONTESTANTS]
    upper, lower = ([p + shift for p in range(len(names))] for shift in (-0.2, 0.2))
    loop_color, median_color, library_color, memory_colors = (
        "#c8c8c8",
        "#4c78a8",
        "#e07b28",
        ("#a8cfc0", "#3f8f74"),
    )
    figure = Figure(figsize=(13, 1.6 + 2.6 * len(measurements)), layout="constrained")
    figure.suptitle(f"The post's workload: {POST.flops / 1e9:.3f} GFLOP forward, float32")
    rows = figure.subplots(len(measurements), 3, squeeze=False)
    for axes, measurement in zip(rows, measurements, strict=True):
        for axis, direction in zip(axes[:2], DIRECTIONS, strict=True):
            figures = [measurement.figures[direction][n] for n in names]
            loops = axis.barh(upper, [1e3 * f.loop.mean_s for f in figures], 0.38, color=loop_color)
            colors = [library_color if n == LIBRARY.name else median_color for n in names]
            medians = [f.median_s for f in figures]
            whiskers = [
                [1e3 * abs(m - f.quartiles_s[side]) for m, f in zip(medians, figures, strict=True)]
                for side in (0, 1)
            ]
            correct = axis.barh(
                lower, [1e3 * m for m in medians], 0.38, xerr=whiskers, color=colors
            )
            for bars in (loops, correct):
                axis.bar_label(bars, fmt=_three_digits, padding=4, fontsize=8)
            axis.set_title(f"{direction}: ms a call")
        for positions, direction, color in zip(
            (upper, lower), (FORWARD, BACKWARD), memory_colors, strict=True
        ):
            extra = [(measurement.figures[direction][n].extra_bytes or 0) / 2**20 for n in names]
            bars = axes[2].barh(positions, extra, 0.38, color=color)
            axes[2].bar_label(bars, fmt=_three_digits, padding=4, fontsize=8)
        axes[2].set_title("extra memory at the peak: MiB")
        axes[0].set_ylabel(measurement.title)
        for axis in axes:
            axis.set_yticks([])
            axis.invert_yaxis()
            axis.margins(x=0.15)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_yticks(range(len(names)), names)
    legend = {
        "as the post did": loop_color,
        "timed correctly (median and quartiles)": median_color,
        "the same, this library": library_color,
        **{f"memory, {d}": c for d, c in zip(DIRECTIONS, memory_colors, strict=True)},
    }
    handles = [Patch(color=color, label=label) for label, color in legend.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    figure.savefig(path, dpi=150)
