"""Which of many slow checks a run takes: others after each change of what they check or of the
checks, the same ones for the same files, so that a change passes or fails by itself."""

from __future__ import annotations

import hashlib
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
SUFFIXES = (".h", ".cuh", ".cpp", ".cu", ".py")


def turn(*folders: str) -> int:
    """A number that follows from the names and contents of the sources in some folders."""
    digest = hashlib.sha256()
    for file in sorted(file for folder in folders for file in (ROOT / folder).rglob("*")):
        if file.suffix in SUFFIXES:
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return int.from_bytes(digest.digest()[:4], "big")
