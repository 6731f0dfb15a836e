"""Whether the fuzzer would find bugs in the CPU engine: cpu_host/mutations.py puts them in.

Each run takes one of them, or four where CONV2D_EXT_FUZZ_SECONDS is 30 or more: other ones for each
state of csrc/cpu, tests/fuzz and tests/cpu_host. `python tests/cpu_host/mutations.py` takes all.
"""

from __future__ import annotations

import os

import pytest
from cpu_host.mutations import MUTATIONS, chosen, replaced, run_mutant, run_unaltered
from rotation import turn

COUNT = 4 if float(os.environ.get("CONV2D_EXT_FUZZ_SECONDS", "10")) >= 30 else 1
NUMBER = turn("csrc/cpu", "tests/fuzz", "tests/cpu_host")
# Of random inputs at most: more than a minute, since other tests share the cores.
SECONDS = 90


def test_every_mutation_applies():
    """Else the line that it broke is another one now, and the mutation has to follow it."""
    assert len({str(mutation) for mutation in MUTATIONS}) == len(MUTATIONS) >= 60
    for mutation in MUTATIONS:
        assert replaced(mutation)


def test_all_come_around():
    here = {mutation for mutation in MUTATIONS if mutation.runs_here()}
    assert {mutation for number in range(len(here)) for mutation in chosen(number, COUNT)} == here


@pytest.mark.slow
def test_mutants_are_caught():
    mutations = chosen(NUMBER, COUNT)
    if not mutations:
        pytest.skip("the bugs are in code that this CPU does not run")
    # One of them without its bug. (All would take as long again.)
    control = mutations[NUMBER // len(MUTATIONS) % len(mutations)]
    fails = run_unaltered(control)
    assert not fails, f"without a bug, where {control} is put: {fails}"
    survivors = []
    for mutation in mutations:
        how = run_mutant(mutation, SECONDS)
        print(f"{mutation}: {how or 'survived'}")
        if not how:
            survivors.append(mutation)
    assert not survivors, f"no test finds {survivors}"
