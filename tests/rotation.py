"""Which of many slow checks a run takes: others after each change of the sources, the same ones for
the same sources, so that a change passes or fails by itself."""

from __future__ import annotations

import hashlib
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]


def turn(folder: str) -> int:
    """A number that follows from the names and contents of all files of a folder of the project."""
    digest = hashlib.sha256()
    for file in sorted((ROOT / folder).rglob("*")):
        if file.is_file():
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return int.from_bytes(digest.digest()[:4], "big")
