"""python -m benchmarks.cuda.checks LOGS: checks.json, of what tests and compute-sanitizer found.

gpu_check.sh leaves in LOGS, for each run of tests, pytest's tests-*.xml, whose suite is named after
the command, or tests-*.unfinished with the command where it was stopped; and for each tool of
compute-sanitizer sanitizer-*.log.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cuda.journal import surroundings

ROOT = Path(__file__).resolve().parents[2]
_COMMAND = re.compile(r"^=== .* \(at most \d+ s\): (.+)$", re.MULTILINE)
_CALLS = re.compile(r"^(\d+) calls$", re.MULTILINE)
_ERRORS = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (?:.*\()?(\d+) errors?", re.MULTILINE)


def read_tests(report: Path) -> dict:
    """Of a run of pytest, from its JUnit report."""
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    found = {"command": suite.get("name"), "passed": 0, "failed": [], "skipped": 0}
    for case in suite.iter("testcase"):
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            found["failed"].append(_name_of(case))
        elif "skipped" in outcomes:
            found["skipped"] += 1
        else:
            found["passed"] += 1
    # A test that fails and then can't be taken down is reported twice.
    found["failed"] = list(dict.fromkeys(found["failed"]))
    return found


def _name_of(case: ElementTree.Element) -> str:
    """As pytest is given it: "tests/test_a.py::TestB::test_c[d]"."""
    parts = (case.get("classname") or "").split(".")
    for length in range(len(parts), 0, -1):
        path = "/".join(parts[:length]) + ".py"
        if (ROOT / path).is_file():
            return "::".join([path, *parts[length:], case.get("name")])
    return "::".join(filter(None, [".".join(parts), case.get("name")]))


def read_sanitizer(log: Path) -> dict:
    """Of a run under a tool of compute-sanitizer; errors: None where it was not finished."""
    text = log.read_text(encoding="utf-8", errors="replace")
    command, calls, errors = (pattern.findall(text) for pattern in (_COMMAND, _CALLS, _ERRORS))
    return {
        "tool": log.stem.removeprefix("sanitizer-"),
        "command": command[-1] if command else "",
        "calls": int(calls[-1]) if calls else 0,
        "errors": int(errors[-1]) if errors and calls else None,
    }


def gather(logs: Path) -> dict:
    """The document that figures.py reads."""
    names = {path.stem for kind in ("xml", "unfinished") for path in logs.glob(f"tests-*.{kind}")}
    tests = []
    for name in sorted(names):
        report, unfinished = logs / f"{name}.xml", logs / f"{name}.unfinished"
        finished = not unfinished.exists()
        # A run may have been stopped before its report was written, or meanwhile.
        try:
            found = read_tests(report)
        except (FileNotFoundError, ElementTree.ParseError):
            command = name if finished else unfinished.read_text(encoding="utf-8").strip()
            found, finished = {"command": command, "passed": 0, "failed": [], "skipped": 0}, False
        tests.append({**found, "finished": finished})
    sanitizer = [read_sanitizer(log) for log in sorted(logs.glob("sanitizer-*.log"))]
    found = surroundings()
    wanted = ("gpu", "versions", "revision", "started")
    # since: what has changed after these checks, in words; whoever changes it writes it there.
    return {
        **{name: found[name] for name in wanted},
        "tests": tests,
        "sanitizer": sanitizer,
        "since": [],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda.checks", description=__doc__)
    parser.add_argument("logs", type=Path, metavar="LOGS")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), metavar="FOLDER")
    arguments = parser.parse_args(argv)
    path = arguments.output / "checks.json"
    path.write_text(json.dumps(gather(arguments.logs), indent=1) + "\n", encoding="utf-8")
    print(f"Written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
