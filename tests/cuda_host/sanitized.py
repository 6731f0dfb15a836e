"""A program: the accuracy of a library built with sanitizers, over every branch.

Arguments: the library. Prints how many calls were checked.
"""

from __future__ import annotations

import pathlib
import sys

import torch

from cuda_host.cases import BRANCHES, MATHS, variations
from cuda_host.checks import check_accuracy
from cuda_host.engine import Engine

if __name__ == "__main__":
    torch.set_num_threads(1)
    engine = Engine(pathlib.Path(sys.argv[1]))
    several = variations()
    count = 0
    for problem in BRANCHES:
        for math in MATHS:
            check_accuracy(engine, problem, math, next(several))
            count += 1
    print(count)
