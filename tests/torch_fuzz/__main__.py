"""Random cases through torch, each held against F.conv2d and against what the README promises."""

from __future__ import annotations

import argparse
import collections
import os
import random
import re
import resource
import sys
import time

# Waiting threads sleep: more threads than cores would spin on each other's time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from .cases import Case
from .kinds import KINDS
from .runner import PEER, Child, Finding, cases, make_small


def _what(finding: Finding) -> str:
    """Findings that look alike are reported once."""
    line = finding.message.strip().splitlines()[-1]
    return f"{finding.case.kind}: {finding.name}: {re.sub(r'[0-9.e+-]+', '#', line)[:90]}"


def _report(finding: Finding, seed: int | None) -> None:
    where = f"case {finding.index} of seed {seed}: " if finding.index is not None else ""
    print(f"\nFOUND {where}{finding.message}")
    print(f"  python -m tests.torch_fuzz --case '{finding.case.to_json()}'", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, help="how many; without end by default")
    parser.add_argument("--first", type=int, default=0, help="index of the first case")
    parser.add_argument("--seed", type=int, help="by default a random one, which is printed")
    parser.add_argument("--seconds", type=float, help="at most")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), help="these alone")
    parser.add_argument("--shrink", type=float, default=10, help="seconds for each finding")
    parser.add_argument("--case", help="one case, as a finding prints it")
    parser.add_argument("--in-process", action="store_true", help="no child: for a debugger")
    parser.add_argument("--verbose", action="store_true", help="what is not found again as well")
    arguments = parser.parse_args()

    if arguments.case is not None:
        case = Case.from_json(arguments.case)
        print(case)
        if arguments.in_process:
            KINDS[case.kind][2](case)
            return 0
        child = Child()
        finding = child.run(case, timeout=600)
        child.close()
        print("nothing found" if finding is None else f"FOUND {finding.message}")
        return finding is not None

    seed = random.SystemRandom().randrange(10**9) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    child, started = Child(), time.monotonic()
    ran: collections.Counter[str] = collections.Counter()
    spent: collections.Counter[str] = collections.Counter()
    crashed: list[int] = []
    unconfirmed: list[int] = []
    found: dict[str, list[Finding]] = {}
    for index, case in cases(seed, arguments.kinds, arguments.first):
        if arguments.cases is not None and sum(ran.values()) >= arguments.cases:
            break
        if arguments.seconds is not None and time.monotonic() - started > arguments.seconds:
            break
        before = time.monotonic()
        finding = child.run(case, timeout=300)
        ran[case.kind] += 1
        spent[case.kind] += time.monotonic() - before
        if finding is None:
            continue
        if finding.name == PEER:
            crashed.append(index)
            continue
        # A failed transform may leave PyTorch in a state that the next case fails in.
        child.restart()
        first, finding = finding, child.run(case, timeout=300)
        if finding is None or finding.name == PEER:
            unconfirmed.append(index)
            if arguments.verbose:
                print(f"\ncase {index}, not by itself: {first.message}", flush=True)
            continue
        finding.index = index
        same = found.setdefault(_what(finding), [])
        same.append(finding)
        if len(same) == 1:
            _report(make_small(finding, child, arguments.shrink), seed)
    child.close()
    seconds = time.monotonic() - started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"\n{sum(ran.values())} cases of seed {seed} in {seconds:.0f} s, "
        f"{used.ru_utime + used.ru_stime:.0f} s of CPU:",
        end="",
    )
    print(", ".join(f" {n} {kind} ({1000 * spent[kind] / n:.0f} ms)" for kind, n in ran.items()))
    for what, findings in sorted(found.items()):
        print(f"{len(findings)} x {what}: cases {[f.index for f in findings[:10]]}")
    if crashed:
        print(f"PyTorch itself crashed in {len(crashed)} cases, not compared: {crashed[:20]}")
    if unconfirmed:
        print(f"after other cases alone, by what PyTorch kept of them: {unconfirmed[:20]}")
    print("nothing found" if not found else f"{sum(map(len, found.values()))} findings")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
