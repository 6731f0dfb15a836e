"""Two runs compared, case by case: which differences are more than chance.

The rounds of a contestant in one run are tested against those in the other by the Mann-Whitney U
test, which asks nothing of their distribution. With hundreds of cases some differ by chance, so the
p-values are adjusted (Benjamini-Hochberg): of the differences that are reported, a share of at most
`ALPHA` is expected to be false. A difference also has to be larger than a threshold to count, since
two runs of the same code differ by a little more than their rounds do.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from scipy import stats

from benchmarks.results import OURS, OURS_LAST, Document, Result, geomean

ALPHA = 0.01
# What should be the same in both runs for the code to be the only difference.
_SAME = ("cpu", "isa", "torch_isa", "caches", "freed_memory", "huge_pages", "openmp")


@dataclasses.dataclass
class Difference:
    """One contestant in one case: how the second run compares with the first."""

    key: tuple[str, str, str, int]
    contestant: str
    ratio: float  # of speeds: above 1, the second run is faster
    p: float  # adjusted

    def verdict(self, threshold: float) -> str:
        if self.p >= ALPHA or abs(self.ratio - 1) <= threshold:
            return "same"
        return "faster" if self.ratio > 1 else "slower"


def compare(
    before: Document,
    after: Document,
    contestants: tuple[str, ...] = (OURS, OURS_LAST),
    relative_to: str | None = None,
) -> list[Difference]:
    """The differences in all cases that both runs have, undisturbed, in `before`'s order.

    relative_to: a contestant whose time in the same round each time is divided by, for runs between
    which the machine itself became faster or slower.
    """
    later = {result.key: result for result in after.results if not result.disturbed}
    differences = []
    for old in before.results:
        new = later.get(old.key)
        if old.disturbed or new is None:
            continue
        for name in contestants:
            samples = [_sample(result, name, relative_to) for result in (old, new)]
            if all(samples):
                ratio = statistics.median(samples[0]) / statistics.median(samples[1])
                p = stats.mannwhitneyu(*samples, alternative="two-sided").pvalue
                differences.append(Difference(old.key, name, ratio, float(p)))
    if differences:
        adjusted = stats.false_discovery_control([d.p for d in differences], method="bh")
        for difference, p in zip(differences, adjusted, strict=True):
            difference.p = float(p)
    return differences


def _sample(result: Result, name: str, relative_to: str | None) -> list[float]:
    """Times of the rounds, empty where they were not measured."""
    if name not in result.timings or (relative_to and relative_to not in result.timings):
        return []
    rounds = result.timings[name].rounds_s
    if relative_to is None:
        return rounds
    # The rounds pair: both were measured within each, but a slow contestant in fewer of them.
    return [
        own / other
        for own, other in zip(rounds, result.timings[relative_to].rounds_s, strict=False)
    ]


def differing_conditions(before: Document, after: Document) -> Iterator[str]:
    """What differs between the runs besides the code that is compared."""
    for name in _SAME:
        pair = before.machine.get(name), after.machine.get(name)
        if pair[0] != pair[1]:
            yield f"{name}: {pair[0]} and {pair[1]}"
    versions = [document.machine.get("versions", {}) for document in (before, after)]
    for name in ("torch", "python", "libc"):
        if versions[0].get(name) != versions[1].get(name):
            yield f"{name}: {versions[0].get(name)} and {versions[1].get(name)}"


def print_comparison(
    console: Console, before: Document, after: Document, differences: list[Difference],
    threshold: float,
) -> None:  # fmt: skip
    for condition in differing_conditions(before, after):
        console.print(Text(f"The runs differ in {condition}", style="yellow"))
    table = Table(
        title="speed of the second run over the first", title_justify="left", box=box.SIMPLE
    )
    table.add_column("case")
    table.add_column("contestant")
    for heading in ("ratio", "p, adjusted", ""):
        table.add_column(heading, justify="right")
    for difference in sorted(differences, key=lambda d: d.ratio):
        verdict = difference.verdict(threshold)
        if verdict != "same":
            table.add_row(
                ", ".join(map(str, difference.key)),
                difference.contestant,
                f"{difference.ratio:.3f}",
                f"{difference.p:.1e}",
                verdict,
                style="red" if verdict == "slower" else "green",
            )
    if table.row_count:
        console.print(table)
    if not differences:
        console.print("No case was measured, undisturbed, in both runs.")
        return
    verdicts = [difference.verdict(threshold) for difference in differences]
    console.print(
        Text(
            f"{len(differences)} comparisons: {verdicts.count('faster')} faster, "
            f"{verdicts.count('slower')} slower, {verdicts.count('same')} without a difference of "
            f"more than {threshold:.0%} that is not chance (p < {ALPHA}). Geometric mean of the "
            f"ratios: {geomean(d.ratio for d in differences):.3f}."
        )
    )
