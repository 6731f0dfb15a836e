"""A program: the accuracy of a library built with sanitizers, over every branch.

Arguments: the library, and the maths of which every branch is run. Prints how many problems were
checked.
"""

from __future__ import annotations

import pathlib
import sys

import torch

from conv2d_ext.testing import Problem
from cuda_host.cases import BRANCHES, MATHS, PHASES, WALKS, Variation, variations
from cuda_host.checks import check_accuracy
from cuda_host.engine import Engine, Execution, Machine
from cuda_host.selftest import Order

# What variations seldom meet: pairs of channels; packed weights beside vectors of pixels, and of
# more phases than a launch takes.
FLOAT32, BFLOAT16 = (next(m for m in MATHS if str(m) == name) for name in ("float32", "bfloat16"))
PACKED = Machine(packed=1)
PIXELS = Problem("24 pixels", 2, 19, (4, 6), 21, (1, 1))
MORE = (
    *((problem, BFLOAT16, "channels_last", Machine(sm_count=1)) for problem in WALKS),
    *((problem, FLOAT32, "contiguous", PACKED) for problem in (PIXELS, *PHASES)),
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    library, *names = sys.argv[1:]
    engine = Engine(pathlib.Path(library))
    several = variations()
    count = 0
    for problem in BRANCHES:
        for math in (math for math in MATHS if str(math) in names):
            check_accuracy(engine, problem, math, next(several))
            count += 1
    for problem, math, view, machine in MORE:
        execution = Execution(Order.SHUFFLED, count, machine)
        variation = Variation(view, view, view == "channels_last", execution)
        check_accuracy(engine, problem, math, variation)
        count += 1
    print(count)
