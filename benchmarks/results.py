"""What is measured and kept: timings, one result for each case, the document and its JSON file."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path

SCHEMA = 1

OURS, OURS_LAST = "conv2d_ext NCHW", "conv2d_ext channels_last"
ATEN, ATEN_LAST = "F.conv2d NCHW", "F.conv2d channels_last"
MODE, MODE_LAST = "batch_invariant NCHW", "batch_invariant channels_last"  # of whole models
PYTHON = "Python unfold + matmul"


@dataclasses.dataclass
class Timing:
    """One contestant in one case."""

    calls: int  # in each round
    rounds_s: list[float]  # seconds a call, one figure for each round
    page_faults: float  # a call

    @property
    def median_s(self) -> float:
        return statistics.median(self.rounds_s)

    @property
    def min_s(self) -> float:
        return min(self.rounds_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        if len(self.rounds_s) < 2:
            return self.min_s, self.min_s
        low, _, high = statistics.quantiles(self.rounds_s, n=4, method="inclusive")
        return low, high


@dataclasses.dataclass
class Result:
    """One case: what was computed, and how long each contestant took."""

    name: str
    layer_class: str
    dtype: str
    direction: str
    threads: int
    timings: dict[str, Timing]
    lists: list[str] = dataclasses.field(default_factory=list)
    geometry: dict[str, object] = dataclasses.field(default_factory=dict)
    pixels: int = 0  # of the output, all images
    flops: int = 0  # 0: not known, no roofline
    bytes: int = 0  # operands read once and results written once
    roof: float = 0.0  # FLOP/s that peak and bandwidth allow
    errors: dict[str, float] = dataclasses.field(default_factory=dict)  # relative L2
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)  # contestant: why
    wrong: str | None = None  # what this library computed wrongly
    disturbed: str | None = None  # what disturbed the last attempt
    attempts: int = 1

    @property
    def key(self) -> tuple[str, str, str, int]:
        return (self.name, self.dtype, self.direction, self.threads)

    def speedup(self, name: str, over: str) -> float | None:
        """How many times as fast as `over` contestant `name` is; None where one was left out."""
        if name not in self.timings or over not in self.timings:
            return None
        return self.timings[over].median_s / self.timings[name].median_s

    def flops_per_s(self, name: str) -> float | None:
        return self.flops / self.timings[name].median_s if name in self.timings else None

    def roofline_share(self, name: str) -> float | None:
        if name not in self.timings or not self.roof:
            return None
        return self.flops_per_s(name) / self.roof


@dataclasses.dataclass
class Document:
    """A run of the benchmark: its results, and what a reader on another machine needs to know."""

    kind: str  # layers, models or growth
    machine: dict[str, object]
    settings: dict[str, object]
    roofline: dict[str, object]
    quiet: dict[str, object]
    results: list[Result]
    left_out: dict[str, str]  # problems that were not measured: why

    @property
    def usable(self) -> list[Result]:
        """What tables and pictures show."""
        return [result for result in self.results if self.shows(result)]

    def shows(self, result: Result) -> bool:
        """Not what was disturbed, unless that was allowed."""
        return not result.disturbed or bool(self.settings.get("allow_disturbed"))

    @property
    def disturbed(self) -> list[Result]:
        return [result for result in self.results if result.disturbed]

    @property
    def wrong(self) -> list[Result]:
        return [result for result in self.results if result.wrong]

    def write(self, path: Path) -> None:
        document = {"schema": SCHEMA, **dataclasses.asdict(self)}
        # Figures that follow from the rounds, for readers without this module.
        for record, result in zip(document["results"], self.results, strict=True):
            for name, timing in result.timings.items():
                share = result.roofline_share(name)
                record["timings"][name] |= {
                    "median_s": timing.median_s,
                    "min_s": timing.min_s,
                    "quartiles_s": timing.quartiles_s,
                    **({"flops_per_s": result.flops_per_s(name)} if result.flops else {}),
                    **({"roofline_share": share} if share is not None else {}),
                }
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Document:
        """Raises ValueError where the file is not a result of this benchmark."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document.pop("schema") != SCHEMA:
                raise ValueError(f"{path}: written by another version of this benchmark")
            document["results"] = [_read_result(record) for record in document["results"]]
            return cls(**document)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not a result of this benchmark ({error!r})") from error


def _read_result(record: dict) -> Result:
    fields = [field.name for field in dataclasses.fields(Timing)]
    timings = {
        name: Timing(**{field: timing[field] for field in fields})
        for name, timing in record.pop("timings").items()
    }
    return Result(timings=timings, **record)


def distinct(results: Iterable[Result], field: str) -> list:
    """The values of a field, in the order of their first appearance."""
    return list(dict.fromkeys(getattr(result, field) for result in results))


def directions_of(results: Iterable[Result]) -> list[str]:
    """Forward first, whichever was measured first."""
    return sorted(distinct(results, "direction"))


def geomean(values: Iterable[float]) -> float:
    """Raises statistics.StatisticsError where there are none."""
    return math.exp(statistics.fmean(map(math.log, values)))
