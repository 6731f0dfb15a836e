"""What a reader on another machine needs to know of the GPU, and what it does at best."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.cuda import device
from benchmarks.cuda.journal import revision
from benchmarks.cuda.measure import ceilings


def describe_gpu() -> dict[str, object]:
    """{"machine": ..., "ceilings": ...}; wakes the GPU."""
    host = machine.describe(freed_memory_is_kept=False)
    found: dict[str, object] = {
        **_properties(),
        "driver": _driver(),
        "host": {key: host[key] for key in ("cpu", "logical_cpus", "system")},
        "versions": {
            **host["versions"],
            "revision": revision(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        },
        "build": host["build"],
        "started": host["started"],
    }
    return {"machine": found, "ceilings": ceilings(device.current()) if device.IS_GPU else {}}


def command() -> list[str]:
    return ["python", "-m", "benchmarks.cuda", *sys.argv[1:]]


def _properties() -> dict[str, object]:
    if not device.IS_GPU:
        return {"gpu": "none: the CPU in its place", "sm_count": 0}
    properties = torch.cuda.get_device_properties(device.current())
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
    }


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"(\d+\.\d+\.\d+)", text)
    return found[1] if found else None
