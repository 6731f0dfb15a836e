"""One layer as a block of cases: its contestants, their tensors, the check of their results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import conv2d_ext
from benchmarks.machine import available_bytes
from benchmarks.measure import Call
from benchmarks.problems import layer_class
from benchmarks.results import (
    ATEN,
    ATEN_LAST,
    MODE,
    MODE_LAST,
    OURS,
    OURS_LAST,
    PYTHON,
    Result,
)
from benchmarks.roofline import Roofline
from conv2d_ext import reference
from conv2d_ext.testing import Problem, Results, Tensors, aten_results, make_tensors

FORWARD, GRAD_INPUT, GRAD_WEIGHT, BOTH = "forward", "grad_input", "grad_weight", "forward+backward"
DIRECTIONS = (FORWARD, GRAD_INPUT, GRAD_WEIGHT, BOTH)

_NCHW, _LAST = torch.contiguous_format, torch.channels_last
FORMATS = {"NCHW": _NCHW, "channels_last": _LAST}

_LIBRARY = (OURS, OURS_LAST, MODE, MODE_LAST)

# Relative L2 errors that no correct implementation has. The tests hold the library to far tighter
# bounds; this only makes sure that what is timed is the convolution.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}
# The unfolded columns of a batch may take so much; beyond, the reference is left out.
_COLUMNS_LIMIT = 2**30


@dataclasses.dataclass(frozen=True)
class Contestant:
    name: str
    function: Callable[..., Tensor]  # the signature of F.conv2d
    memory_format: torch.memory_format


CONTESTANTS = (
    Contestant(OURS, conv2d_ext.conv2d, _NCHW),
    Contestant(OURS_LAST, conv2d_ext.conv2d, _LAST),
    Contestant(ATEN, F.conv2d, _NCHW),
    Contestant(ATEN_LAST, F.conv2d, _LAST),
    Contestant(PYTHON, reference.conv2d, _NCHW),
)


def choose_contestants(formats: Sequence[str], with_reference: bool = True) -> list[Contestant]:
    """Those that compute in these memory formats, FORMATS' names."""
    chosen = [FORMATS[name] for name in formats]
    return [
        contestant
        for contestant in CONTESTANTS
        if contestant.memory_format in chosen and (with_reference or contestant.name != PYTHON)
    ]


class LayerBlock:
    """All cases of one problem in one dtype, which share their tensors."""

    def __init__(
        self,
        problem: Problem,
        lists: list[str],
        dtype: torch.dtype,
        directions: Sequence[str],
        threads: Sequence[int],
        contestants: Sequence[Contestant],
    ) -> None:
        self.problem = problem
        self.title = problem.name
        self._lists = lists
        self._dtype = dtype
        self._directions = directions
        self._threads = threads
        self._contestants = contestants
        self.case_count = len(directions) * len(threads)

    def refusal(self) -> str | None:
        """Why this block cannot be measured on this machine, or None."""
        activations = math.prod(self.problem.input_shape) + math.prod(self.problem.output_shape)
        formats = len({c.memory_format for c in self._contestants})
        # Operands in each format, and the results of one contestant, with its copies of them.
        wanted = activations * self._dtype.itemsize * (formats + 2)
        if wanted <= available_bytes() / 2:
            return None
        return f"needs {wanted / 2**30:.1f} GiB, more than half of the memory available"

    def cases(self, roofline: Roofline) -> Iterator[tuple[Result, dict[str, Call]]]:
        """Each case with the calls to time; a contestant whose result is wrong has none."""
        left_out = self._left_out()
        contestants = [c for c in self._contestants if c.name not in left_out]
        tensors = {f: draw(self.problem, self._dtype, f) for f in FORMATS.values()}
        expected = _expected(self.problem, tensors[_NCHW])
        for direction in self._directions:
            errors, refused = {}, {}
            for c in contestants:
                try:
                    errors[c.name] = self._error(c, tensors[c.memory_format], direction, expected)
                except RuntimeError as error:  # a dtype or a geometry it doesn't take
                    refused[c.name] = f"refused: {str(error).splitlines()[0]}"
            bad = refused | wrong_results(errors, self._dtype)
            calls = {
                c.name: make_call(c.function, self.problem, tensors[c.memory_format], direction)
                for c in contestants
                if c.name not in bad
            }
            for threads in self._threads:
                result = self._result(direction, threads, roofline)
                result.errors = errors
                result.left_out = left_out | bad
                result.wrong = library_fault(bad)
                yield result, calls

    def _left_out(self) -> dict[str, str]:
        _, pixels, depth = self.problem.gemm_mnk
        columns = self.problem.groups * pixels * depth * self._dtype.itemsize
        if columns <= _COLUMNS_LIMIT:
            return {}
        return {PYTHON: f"its columns take {columns / 2**30:.1f} GiB"}

    def _result(self, direction: str, threads: int, roofline: Roofline) -> Result:
        problem = self.problem
        flops, size, footprint = work(problem, self._dtype, direction)
        return Result(
            name=problem.name,
            layer_class=layer_class(problem),
            dtype=str(self._dtype).removeprefix("torch."),
            direction=direction,
            threads=threads,
            timings={},
            lists=self._lists,
            geometry=dataclasses.asdict(problem),
            pixels=problem.gemm_mnk[1],
            flops=flops,
            bytes=size,
            roof=roofline.bound(flops, size, footprint, self._dtype, threads),
        )

    def _error(
        self, contestant: Contestant, tensors: Tensors, direction: str, expected: Results
    ) -> float:
        """The largest relative L2 error of what the direction computes, over the first image."""
        image = _first_image(tensors)
        problem = dataclasses.replace(self.problem, batch=1)
        actual = make_call(contestant.function, problem, image, direction)()
        actual = actual if isinstance(actual, tuple) else (actual,)
        wanted = [t for t in select_results(expected, direction) if t is not None]
        return max(
            ((a.double() - w).norm() / w.norm()).item() for a, w in zip(actual, wanted, strict=True)
        )


def wrong_results(errors: Mapping[str, float], dtype: torch.dtype) -> dict[str, str]:
    """The contestants whose relative errors no correct implementation has."""
    limit = TOLERANCES[dtype]
    return {
        name: f"wrong: relative error {error:.2g}"
        for name, error in errors.items()
        if not error <= limit  # which is also true of NaN
    }


def library_fault(faults: Mapping[str, str]) -> str | None:
    """Those faults that are this library's, as one line."""
    return "; ".join(f"{n}: {why}" for n, why in faults.items() if n in _LIBRARY) or None


def draw(problem: Problem, dtype: torch.dtype, memory_format: torch.memory_format) -> Tensors:
    """The operands; the images of a batch are all the same, since drawing each takes long."""
    image = make_tensors(dataclasses.replace(problem, batch=1), dtype)

    def laid_out(tensor: Tensor, batch: int) -> Tensor:
        return tensor.repeat(batch, 1, 1, 1).contiguous(memory_format=memory_format)

    return Tensors(
        laid_out(image.input, problem.batch),
        laid_out(image.weight, 1),
        image.bias,
        laid_out(image.grad_output, problem.batch),
    )


def _first_image(tensors: Tensors) -> Tensors:
    return tensors._replace(input=tensors.input[:1], grad_output=tensors.grad_output[:1])


def _expected(problem: Problem, tensors: Tensors) -> Results:
    """F.conv2d's results for the first image, in float64."""
    image = Tensors(*(t if t is None else t.double() for t in _first_image(tensors)))
    return aten_results(dataclasses.replace(problem, batch=1), image)


def select_results(results: Results, direction: str) -> tuple[Tensor | None, ...]:
    """What a call of the direction returns."""
    return {
        FORWARD: (results.output,),
        GRAD_INPUT: (results.grad_input,),
        GRAD_WEIGHT: (results.grad_weight,),
        BOTH: (results.output, results.grad_input, results.grad_weight, results.grad_bias),
    }[direction]


def make_call(
    function: Callable[..., Tensor], problem: Problem, tensors: Tensors, direction: str
) -> Call:
    """One run of the direction, as users come by it, as a function of no arguments.

    A single gradient is autograd's, of a graph that is built once and kept: its time is the
    backward kernel's and what autograd adds, which is the same for all.
    """
    convolve = partial(function, **problem.call_args())
    input, weight, bias, grad_output = tensors
    if direction == FORWARD:
        return partial(convolve, input, weight, bias)
    if direction == BOTH:
        leaves = [t.detach().requires_grad_() for t in (input, weight, bias) if t is not None]

        def forward_and_backward() -> tuple[Tensor, ...]:
            output = convolve(*leaves)
            return (output.detach(), *torch.autograd.grad(output, leaves, grad_output))

        return forward_and_backward
    leaf = {GRAD_INPUT: input, GRAD_WEIGHT: weight}[direction].detach().requires_grad_()
    operands = (leaf, weight) if direction == GRAD_INPUT else (input, leaf)
    output = convolve(*operands, bias)
    return partial(torch.autograd.grad, output, leaf, grad_output, retain_graph=True)


def work(problem: Problem, dtype: torch.dtype, direction: str) -> tuple[int, int, int]:
    """FLOPs, bytes that have to move, and bytes of all operands and results.

    What has to move: operands read once, results written once; of the input only the pixels that
    some tap reads.
    """
    out_h, out_w = problem.output_shape[2:]
    read_h, read_w = (
        min(size, out * kernel)
        for size, out, kernel in zip(problem.in_size, (out_h, out_w), problem.kernel, strict=True)
    )
    images = problem.batch * problem.in_channels
    read = images * read_h * read_w
    inputs, weights, outputs = (
        math.prod(shape)
        for shape in (problem.input_shape, problem.weight_shape, problem.output_shape)
    )
    moved = {
        FORWARD: read + weights + outputs,
        GRAD_INPUT: inputs + weights + outputs,
        GRAD_WEIGHT: read + weights + outputs,
    }
    operands = inputs + weights + outputs
    if direction == BOTH:
        return (
            3 * problem.flops,
            sum(moved.values()) * dtype.itemsize,
            2 * operands * dtype.itemsize,
        )
    return problem.flops, moved[direction] * dtype.itemsize, operands * dtype.itemsize
