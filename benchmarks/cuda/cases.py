"""What to measure on a GPU, the most telling first: problems, precisions, formats, directions."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import conv2d_ext
from benchmarks import problems
from conv2d_ext import reference
from conv2d_ext.testing import POST, Problem, Tensors

FORWARD, GRAD_INPUT, GRAD_WEIGHT = DIRECTIONS = ("forward", "grad_input", "grad_weight")
NCHW, CHANNELS_LAST = "NCHW", "channels_last"
FORMATS = {NCHW: torch.contiguous_format, CHANNELS_LAST: torch.channels_last}

OURS = "conv2d_ext"
ATEN = "F.conv2d"
TUNED = "F.conv2d, cudnn.benchmark"
PYTHON = "Python unfold + matmul"
COMPOSITION = "the post's C++"

TINY = Problem("tiny", 1, 1, (4, 4), 1, (3, 3))


@dataclasses.dataclass(frozen=True)
class Precision:
    """A dtype, for float32 with TF32 or without."""

    name: str
    dtype: torch.dtype
    tf32: bool
    tolerance: float  # of the relative L2 error; no correct implementation is beyond


FLOAT32 = Precision("float32", torch.float32, False, 1e-4)
TF32 = Precision("TF32", torch.float32, True, 5e-3)
FLOAT16 = Precision("float16", torch.float16, False, 1e-2)
BFLOAT16 = Precision("bfloat16", torch.bfloat16, False, 3e-2)
PRECISIONS = {p.name: p for p in (FLOAT32, TF32, FLOAT16, BFLOAT16)}


@dataclasses.dataclass(frozen=True)
class Contestant:
    name: str
    make_call: Callable[[Problem, Tensors, str], Callable[[], Tensor] | None]
    tuned: bool = False  # under torch.backends.cudnn.benchmark

    @contextlib.contextmanager
    def settings(self, precision: Precision) -> Iterator[None]:
        """PyTorch's flags while its calls are warmed up, captured and timed."""
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        before = matmul.allow_tf32
        with cudnn.flags(enabled=True, benchmark=self.tuned, allow_tf32=precision.tf32):
            matmul.allow_tf32 = precision.tf32
            try:
                yield
            finally:
                matmul.allow_tf32 = before


def _ours(problem: Problem, tensors: Tensors, direction: str) -> Callable[[], Tensor]:
    input, weight, bias, grad_output = tensors
    arguments = problem.op_args()
    ops = torch.ops.conv2d_ext
    if direction == FORWARD:
        keywords = problem.call_args()
        return lambda: conv2d_ext.conv2d(input, weight, bias, **keywords)
    if direction == GRAD_INPUT:
        channels_last = input.is_contiguous(memory_format=torch.channels_last)
        size = list(input.shape)
        return lambda: ops.conv2d_grad_input(grad_output, weight, size, *arguments, channels_last)
    size, stride = list(weight.shape), list(weight.stride())
    return lambda: ops.conv2d_grad_weight(grad_output, input, size, stride, *arguments)


def _aten(problem: Problem, tensors: Tensors, direction: str) -> Callable[[], Tensor]:
    input, weight, bias, grad_output = tensors
    keywords = problem.call_args()
    if direction == FORWARD:
        return lambda: F.conv2d(input, weight, bias, **keywords)
    top, _, left, _ = problem.padding4
    wanted = [direction == GRAD_INPUT, direction == GRAD_WEIGHT, False]
    # The op that autograd calls, without autograd's own time.
    arguments = (
        None, problem.stride, (top, left), problem.dilation, False, (0, 0), problem.groups, wanted,
    )  # fmt: skip
    index = wanted.index(True)
    backward = torch.ops.aten.convolution_backward
    return lambda: backward(grad_output, input, weight, *arguments)[index]


def _python(problem: Problem, tensors: Tensors, direction: str) -> Callable[[], Tensor] | None:
    if direction != FORWARD:
        return None
    input, weight, bias, _ = tensors
    keywords = problem.call_args()
    return lambda: reference.conv2d(input, weight, bias, **keywords)


def _composition(problem: Problem, tensors: Tensors, direction: str) -> Callable[[], Tensor] | None:
    plain = (problem.stride, problem.padding4, problem.dilation, problem.groups)
    if direction != FORWARD or plain != ((1, 1), (0, 0, 0, 0), (1, 1), 1):
        return None
    input, weight, bias, _ = tensors
    kernel = weight.transpose(0, 1).contiguous()  # as the post has it
    return lambda: conv2d_ext.forward_unfold(input, kernel, bias)


CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant(OURS, _ours),
        Contestant(ATEN, _aten),
        Contestant(TUNED, _aten, tuned=True),
        Contestant(PYTHON, _python),
        Contestant(COMPOSITION, _composition),
    )
}


@dataclasses.dataclass(frozen=True)
class Case:
    tier: str  # what it is measured for, and when: see plan()
    problem: Problem
    precision: Precision
    layout: str
    direction: str
    contestants: tuple[str, ...]
    eager: bool  # whether what a call costs the host is measured as well

    @property
    def key(self) -> tuple:
        geometry = dataclasses.replace(self.problem, name="", bias=False)
        return geometry, self.precision.name, self.layout, self.direction

    def __str__(self) -> str:
        return ", ".join((self.problem.name, self.precision.name, self.layout, self.direction))


# A precision with the format it is used in.
MAIN = ((TF32, NCHW), (FLOAT32, NCHW), (FLOAT16, CHANNELS_LAST), (BFLOAT16, CHANNELS_LAST))
_OTHER = ((TF32, CHANNELS_LAST), (FLOAT16, NCHW), (FLOAT32, CHANNELS_LAST), (BFLOAT16, NCHW))
_PEERS = (OURS, ATEN, TUNED)
_ALL = (*_PEERS, PYTHON, COMPOSITION)


def plan(batches: Sequence[int] = (1, 8, 64)) -> list[Case]:
    """All cases, in the order in which they are measured while there is time.

    Tiers: the post's problem in everything; a few layers of each class; ResNet-50; the layers of
    all networks; gradients; the formats that a precision is rarely used in. Within a tier the
    order is shuffled, always in the same way, so that what there was time for is a sample of it.
    """

    def cases(tier, chosen, pairs, directions=(FORWARD,), contestants=_PEERS, eager=False):
        return [
            Case(tier, problem, precision, layout, direction, contestants, eager)
            for problem in chosen
            for precision, layout in pairs
            for direction in directions
        ]

    def with_batches(names):
        return [problem for problem, _ in problems.select(names, batches)]

    middle = [8] if 8 in batches else batches[:1]
    quick = with_batches(["quick"])
    resnet = with_batches(["resnet50"])
    networks = with_batches(problems.DEFAULT_LISTS)
    gradients = (GRAD_INPUT, GRAD_WEIGHT)
    tiers = [
        cases("the post", [POST], (*MAIN, *_OTHER), contestants=_ALL, eager=True)
        + cases("the post", [POST], MAIN, gradients)
        + cases("the post", [TINY], MAIN[:1], contestants=_ALL, eager=True),
        cases("every class", quick, MAIN, eager=True),
        cases("every class, gradients",
              [p for p, _ in problems.select(["quick"], middle)], MAIN[:3], gradients),
        cases("ResNet-50", resnet, MAIN[:3]),
        cases("all networks", networks, MAIN),
        cases("ResNet-50, gradients",
              [p for p, _ in problems.select(["resnet50"], middle)], MAIN[:3], gradients),
        cases("other formats", resnet, _OTHER),
    ]  # fmt: skip
    ordered: dict[tuple, Case] = {}
    for number, tier in enumerate(tiers):
        if number:
            random.Random(number).shuffle(tier)
        for case in tier:
            ordered.setdefault(case.key, case)
    return list(ordered.values())


def draw(case: Case, device: torch.device) -> Tensors:
    """Standard normal operands, drawn on the device."""
    problem, dtype = case.problem, case.precision.dtype
    generator = torch.Generator(device).manual_seed(0)

    def tensor(shape: tuple[int, ...]) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device).to(dtype)
        if len(shape) != 4:
            return values
        return values.contiguous(memory_format=FORMATS[case.layout])

    return Tensors(
        tensor(problem.input_shape),
        tensor(problem.weight_shape),
        tensor((problem.out_channels,)) if problem.bias else None,
        tensor(problem.output_shape),
    )


def operand_bytes(case: Case) -> int:
    """Of all operands and results, of which every contestant has its own copy at times."""
    shapes = (case.problem.input_shape, case.problem.weight_shape, case.problem.output_shape)
    return sum(torch.Size(shape).numel() for shape in shapes) * case.precision.dtype.itemsize


def error(case: Case, tensors: Tensors, actual: Tensor) -> float:
    """Relative L2, of the first image (for grad_weight, of the sum) against float64."""
    first = (
        tensors
        if case.direction == GRAD_WEIGHT
        else tensors._replace(input=tensors.input[:1], grad_output=tensors.grad_output[:1])
    )
    wide = Tensors(*(t if t is None else t.double() for t in first))
    exact = _aten(case.problem, wide, case.direction)()
    actual = actual[: exact.shape[0]].double()
    return ((actual - exact).norm() / exact.norm()).item()
