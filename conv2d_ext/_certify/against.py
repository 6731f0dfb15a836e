"""A certificate held against one that another machine wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conv2d_ext._certify.result import JSON_SCHEMA, Agreement, Certificate


def read_certificate(path: str | Path) -> dict[str, Any]:
    """The JSON document that `Certificate.to_json` wrote to `path`, as far as another certificate
    is held against it. Raises ValueError, naming the file, where it isn't one; OSError where it
    can't be read."""
    path = Path(path)

    def refuse(what: str) -> ValueError:
        return ValueError(f"against: {path} is not a certificate: {what}")

    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise refuse(f"it is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise refuse(f"wanted an object, got {type(document).__name__}")
    schema = document.get("schema")
    if schema != JSON_SCHEMA:
        raise refuse(f"wanted schema {JSON_SCHEMA}, got {schema!r}")
    wanted = {
        "inputs": list,
        "parameters": str,
        "settings": dict,
        "machine": dict,
        "modes": dict,
    }
    for name, kind in wanted.items():
        if not isinstance(document.get(name), kind):
            got = type(document[name]).__name__ if name in document else "nothing"
            raise refuse(f"{name}: wanted {kind.__name__}, got {got}")
    if not all(isinstance(entry, dict) for entry in document["inputs"]):
        raise refuse("inputs: wanted a list of objects")
    for name, mode in document["modes"].items():
        digests = mode.get("digests") if isinstance(mode, dict) else None
        if not isinstance(digests, dict) or not all(
            isinstance(run, dict) and all(isinstance(d, str) for d in run.values())
            for run in digests.values()
        ):
            raise refuse(f"modes: {name}: wanted digests, by run and tensor")
    return document


def agreement(certificate: Certificate, document: dict[str, Any], file: str) -> Agreement:
    """`certificate` held against one that `read_certificate` read, in the last mode."""
    mine = json.loads(certificate.to_json())
    notes = [
        f"{key}: {document['machine'].get(key)} there, {value} here"
        for key, value in mine["machine"].items()
        if document["machine"].get(key) != value
    ]
    problems = []
    if mine["inputs"] != document["inputs"]:
        problems.append("the inputs are not the same: nothing can be compared")
    if mine["parameters"] != document["parameters"]:
        problems.append("the model's parameters are not the same: nothing can be compared")
    for key in ("seed", "training"):
        if mine["settings"].get(key) != document["settings"].get(key):
            problems.append(
                f"{key} is {document['settings'].get(key)} there and "
                f"{mine['settings'].get(key)} here: nothing can be compared"
            )
    theirs = document["modes"].get(certificate.mode)
    if theirs is None:
        problems.append(f"it has no mode {certificate.mode}")
    if problems or theirs is None:
        return Agreement(file, False, 0, tuple(problems), tuple(notes))
    compared, differing = 0, []
    for run, digests in mine["modes"][certificate.mode]["digests"].items():
        for name, digest in digests.items():
            other = theirs["digests"].get(run, {}).get(name)
            compared += other is not None
            if other is not None and other != digest:
                differing.append(f"{run}: {name}")
    if not compared:
        return Agreement(file, False, 0, ("no run is in both",), tuple(notes))
    shown = differing[:5]
    if len(differing) > len(shown):
        shown.append(f"and {len(differing) - len(shown)} more")
    return Agreement(file, not differing, compared, tuple(shown), tuple(notes))
