"""Problems that touch every branch of the CUDA engine, and the ways in which their tensors lie."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import torch

from conv2d_ext import testing
from conv2d_ext.testing import VIEWS, Problem, Tensors, float64_oracle, make_tensors

from .engine import Execution, Flipped, Machine, Operand
from .selftest import Order


@dataclasses.dataclass(frozen=True)
class Math:
    """A dtype, and how its values are multiplied."""

    dtype: torch.dtype
    tf32: bool = False

    def __str__(self) -> str:
        return "tf32" if self.tf32 else str(self.dtype).removeprefix("torch.")

    @property
    def unit(self) -> str:
        """The file in csrc/cuda that its implicit GEMMs are compiled in."""
        name = str(self).replace("bfloat", "bf").replace("float", "f").replace("complex", "c")
        return f"gemm_{name}.cu"


MATHS = (
    Math(torch.float32),
    Math(torch.float32, tf32=True),
    Math(torch.float64),
    Math(torch.bfloat16),
    Math(torch.float16),
    Math(torch.complex64),
    Math(torch.complex128),
)

# Each for a branch that the general lists of conv2d_ext.testing are too small or too few to reach.
GEMMS = (
    Problem("channels in groups, tails", 3, 13, (9, 7), 37, (3, 2), (2, 1), (1, 0), (2, 1)),
    Problem("2 groups, four paddings", 2, 24, (7, 6), 42, (2, 3), padding=(0, 1, 2, 1), groups=2),
    Problem("whole groups of channels", 2, 16, (6, 7), 24, (3, 3), padding=(1, 1)),
    Problem("whole blocks of channels", 1, 64, (5, 6), 72, (3, 2), (2, 1), (1, 1)),
    Problem("3 channels to 20", 2, 3, (11, 9), 20, (3, 3), (2, 2), (1, 1)),
    Problem("3 channels to 20, many pixels", 1, 3, (23, 31), 20, (2, 3)),
    Problem("20 channels to 20, many pixels", 1, 20, (21, 33), 20, (1, 2)),
    Problem("130 channels", 1, 130, (4, 5), 131, (1, 1)),
    # Their strides along the single row and column are no multiples of 16 bytes.
    Problem("3 x 3 onto one pixel", 2, 16, (3, 3), 24, (3, 3)),
    Problem("3 x 3 on one pixel", 2, 16, (1, 1), 24, (3, 3), padding=(1, 1)),
)
SEGMENTS = (
    Problem("K in segments", 1, 150, (5, 6), 11, (3, 3), padding=(1, 1)),
    Problem("whole groups, K in segments", 1, 160, (5, 6), 16, (3, 3), padding=(1, 1)),
    Problem("K in segments, by element", 2, 5, (9, 8), 13, (9, 8), padding=(4, 4)),
    Problem("grad_input's phases in segments", 2, 11, (6, 7), 280, (3, 3), (2, 2), (1, 1)),
    Problem("pixels in segments", 2, 5, (30, 35), 9, (2, 2)),
    Problem("depthwise, pixels in segments", 2, 3, (41, 35), 3, (2, 2), groups=3),
    Problem("depthwise, K in chains", 1, 3, (18, 19), 3, (17, 17), padding=(8, 8), groups=3),
)
PHASES = (
    Problem("20 phases", 2, 6, (43, 5), 7, (20, 2), (20, 1)),
    Problem("20 phases of 2 channels", 1, 2, (5, 43), 7, (2, 20), (1, 20)),
    Problem("20 phases of 16 channels", 1, 16, (43, 3), 9, (20, 2), (20, 1)),
    Problem("phases without taps", 1, 9, (9, 11), 9, (2, 2), (3, 4)),
)
# Columns longer than the rows that a walk keeps; pairs of groups and none; grad_input's phases.
WALKS = (
    Problem("walk 3 x 3", 2, 6, (23, 9), 6, (3, 3), padding=(1, 1), groups=6),
    Problem("walk 3 x 3, stride 2", 3, 4, (31, 13), 4, (3, 3), (2, 2), (1, 1), groups=4),
    Problem("walk 3 x 3, other steps", 1, 5, (14, 17), 5, (3, 3), (1, 2), (2, 0), (1, 2), groups=5),
    Problem("walk 5 x 5", 2, 4, (19, 8), 4, (5, 5), padding=(2, 2), groups=4),
    Problem("walk 5 x 5, stride 2", 2, 6, (25, 9), 6, (5, 5), (2, 2), (2, 1), groups=6),
    Problem("walk 7 x 7", 1, 4, (24, 8), 4, (7, 7), padding=(3, 3), groups=4),
    Problem("walk 7 x 7, stride 2", 2, 2, (27, 9), 2, (7, 7), (2, 2), (3, 2), groups=2),
    Problem("walk 1 x 1, strided", 2, 3, (9, 7), 3, (1, 1), (1, 2), groups=3),
    Problem("walk 2 x 1", 2, 4, (9, 7), 4, (2, 1), padding=(1, 0), groups=4),
)
# All of these, for accuracy.
PROBLEMS = (
    *GEMMS,
    *SEGMENTS,
    *PHASES,
    *WALKS,
    *testing.EDGE,
    *testing.TAILS,
    *testing.ASYMMETRIC,
    *testing.GROUPED,
    *testing.DEPTHWISE,
    *testing.DILATED,
    *testing.ONE_PIXEL,
    *testing.PATCH_LAYERS,
)
# A few that between them touch every branch: for what is run many times.
BRANCHES = (
    *GEMMS,
    *SEGMENTS,
    *PHASES,
    *WALKS[::2],
    *(p for p in testing.EDGE if p.name in ("outputs that see padding alone", "empty batch")),
    testing.ASYMMETRIC[0],
    testing.DEPTHWISE[0],
    testing.DEPTHWISE[4],
)

# Small and large; the last one's shared memory is an A100's. What the planner is told to take is
# taken where it can be: a kernel's number in its table, and whether segments of K are split.
MACHINES = (
    Machine(),
    Machine(sm_count=1),
    Machine(sm_count=8),
    Machine(sm_count=1000),
    Machine(sm_count=20, shared_bytes=163 << 10),
)
MOST_VARIANTS = 10  # in a table of kernels


def machine(number: int) -> Machine:
    """For numbers in a row, every kernel, split and not, on machines that change."""
    return dataclasses.replace(
        MACHINES[number % len(MACHINES)],
        variant=number % (MOST_VARIANTS + 1) - 1,
        split=number // 2 % 3 - 1,
        packed=number // 3 % 3 - 1,
    )


ORDERS = (Order.FORWARD, Order.REVERSE, Order.SHUFFLED)

ARRANGEMENTS: dict[str, Callable[[torch.Tensor], Operand]] = {
    "contiguous": lambda tensor: tensor,
    **VIEWS,
    "flipped": lambda tensor: Flipped(tensor.flip(1, 3), (1, 3)),
}
DIRECTIONS = ("forward", "grad_input", "grad_weight")


def operands(direction: str, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    return {
        "forward": (tensors.input, tensors.weight),
        "grad_input": (tensors.grad_output, tensors.weight),
        "grad_weight": (tensors.grad_output, tensors.input),
    }[direction]


def result_shape(direction: str, problem: Problem) -> tuple[int, ...]:
    return {
        "forward": problem.output_shape,
        "grad_input": problem.input_shape,
        "grad_weight": problem.weight_shape,
    }[direction]


def empty_result(
    direction: str, problem: Problem, dtype: torch.dtype, channels_last: bool
) -> torch.Tensor:
    """Filled with a number that no test expects, in case that nothing is written."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    shape = result_shape(direction, problem)
    return torch.full(shape, -12345.0, dtype=dtype).contiguous(memory_format=memory_format)


@dataclasses.dataclass(frozen=True)
class Variation:
    """Ways in which a call may differ without a bit of the result changing."""

    first: str
    second: str
    channels_last: bool  # the result
    execution: Execution

    def __str__(self) -> str:
        result = "channels_last" if self.channels_last else "contiguous"
        machine = self.execution.machine
        return f"{self.first} x {self.second} -> {result}, {self.execution.order.name}, {machine}"


def variations() -> Iterator[Variation]:
    """Without end: each arrangement, format, order and machine, with companions that change."""
    names = list(ARRANGEMENTS)
    for i in itertools.count():
        order = ORDERS[i % len(ORDERS)]
        yield Variation(
            names[i % len(names)],
            names[(i + i // len(names) + 3) % len(names)],
            (i // 2) % 2 == 1,
            Execution(order, i, machine(i)),
        )


def rounded_to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """To the nearest, ties away from zero, as the kernels round float32."""
    return ((tensor.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def oracles(problem: Problem, math: Math):
    """The tensors, their oracle, and the one for kernels that round them to tf32."""
    tensors = make_tensors(problem, math.dtype)
    exact = float64_oracle(problem, tensors)
    if not math.tf32:
        return tensors, exact, exact
    rounded = Tensors(
        rounded_to_tf32(tensors.input),
        rounded_to_tf32(tensors.weight),
        tensors.bias,
        rounded_to_tf32(tensors.grad_output),
    )
    return tensors, exact, float64_oracle(problem, rounded)
