"""A file of results that is whole at any moment: a line of JSON for each, on disk as it comes."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.cuda import device


class Journal:
    """Its first line says of what, where and when."""

    def __init__(self, path: Path, program: str, **settings: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self.write({"program": program, "settings": settings, **surroundings()})

    def write(self, record: dict) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> tuple[dict, list[dict]]:
    """The first line and the results; a line that was cut off is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    first, *records = map(json.loads, lines)
    return first, records


def surroundings() -> dict[str, object]:
    """What can be said without waking the GPU."""
    return {
        "device": device.NAME,
        "gpu": gpu_and_driver(),
        "revision": revision(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "command": sys.argv,
    }


def revision() -> str | None:
    """REVISION says it where the tree has come without its history."""
    return machine.revision() or os.environ.get("REVISION")


def gpu_and_driver() -> str | None:
    """Such as 'NVIDIA H200, 580.159.03', for each GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return "; ".join(done.stdout.strip().splitlines())
