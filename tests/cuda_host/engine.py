"""The CUDA engine on the host: csrc/cuda, compiled and called with torch's CPU tensors."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import pathlib
from collections.abc import Collection
from typing import NamedTuple

import torch

from conv2d_ext.testing import Problem

from .build import HERE, ROOT, build
from .selftest import Order

# Of csrc/tensor_view.h.
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
)
_DIRECTIONS = ("forward", "grad_input", "grad_weight", "grad_bias", "matmul")


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the mapping may depend on; an H200's by default."""

    sm_count: int = 132
    shared_bytes: int = 227 << 10
    # Wanted instead of the planner's choice; -1: nothing.
    variant: int = -1
    split: int = -1
    packed: int = -1


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a call is run; nothing of it may change a bit of the result."""

    order: Order = Order.FORWARD
    seed: int = 0
    machine: Machine = Machine()
    holds: bool = False  # its first large launch waits until another thread has launched something
    counts_banks: bool = False  # for Answer.traffic


@dataclasses.dataclass(frozen=True)
class Answer:
    result: torch.Tensor
    plan: dict[str, object] | None  # None of grad_bias
    # Shared memory accesses: a kernel's source line with accesses, wavefronts and the ideal number.
    # Empty unless they were counted.
    traffic: list[dict[str, object]]
    launches: int
    workspace_bytes: int


class KernelError(AssertionError):
    """A call that was refused, or a kernel that did something wrong."""


_EXECUTION_FIELDS = (
    "order", "seed", "holds", "counts_banks",
    "sm_count", "shared_bytes", "variant", "split", "packed",
)  # fmt: skip


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("direction", "dtype", "math", "plan_only")),
        *((name, ctypes.c_int64) for name in _EXECUTION_FIELDS),
        ("problem", ctypes.c_int64 * 18),
        *((name, _Tensor) for name in ("first", "second", "bias", "result")),
    )


class Flipped(NamedTuple):
    """``tensor.flip(dims)`` in the tensor's own memory, by negative strides, which torch lacks."""

    tensor: torch.Tensor
    dims: tuple[int, ...]


Operand = torch.Tensor | Flipped


def _described(operand: Operand | None) -> _Tensor:
    if operand is None:
        return _Tensor(None, (0,) * 4, (0,) * 4)
    tensor, flipped = operand if isinstance(operand, Flipped) else (operand, ())
    strides = list(tensor.stride())
    first = 0
    for dim in flipped:
        first += max(tensor.shape[dim] - 1, 0) * strides[dim]
        strides[dim] *= -1
    missing = 4 - tensor.dim()
    return _Tensor(
        tensor.data_ptr() + first * tensor.element_size(),
        (*tensor.shape, *(1,) * missing),
        (*strides, *(0,) * missing),
    )


class Engine:
    def __init__(self, library: pathlib.Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.cuda_host_run.restype = ctypes.c_char_p
        self._library.cuda_host_kernels.restype = ctypes.c_char_p
        self._library.cuda_host_held.restype = ctypes.c_int64

    def held(self) -> int:
        """Calls of other threads that wait, as Execution.holds has it."""
        return self._library.cuda_host_held()

    def kernels(self, dtype: torch.dtype, *, tf32: bool = False) -> list[str]:
        """The names of the GEMM kernels that plans choose from."""
        names = self._library.cuda_host_kernels(
            ctypes.c_int64(_DTYPES.index(dtype)), ctypes.c_int64(tf32)
        )
        return names.decode().split("\n")

    def run(
        self,
        direction: str,
        problem: Problem,
        first: Operand,
        second: Operand | None = None,
        bias: Operand | None = None,
        *,
        result: torch.Tensor | None = None,
        tf32: bool = False,
        execution: Execution = Execution(),
    ) -> Answer:
        """``first`` and ``second``: (input, weight), (grad_output, weight), (grad_output, input),
        or grad_output alone, of any strides.

        ``result`` is written to, and says by its strides how the result lies; contiguous when None.
        """
        operands = (first, second, bias)
        result, answer = self._call(direction, problem, operands, result, tf32, execution, False)
        return Answer(
            result,
            answer.get("plan"),
            answer["traffic"],
            answer["launches"],
            answer["workspace_bytes"],
        )

    def plan(
        self,
        direction: str,
        problem: Problem,
        first: Operand,
        second: Operand | None,
        *,
        result: torch.Tensor | None = None,
        tf32: bool = False,
        machine: Machine = Machine(),
    ) -> dict[str, object] | None:
        """What run would do; None of grad_bias, which is taken or refused."""
        execution = Execution(machine=machine)
        operands = (first, second, None)
        return self._call(direction, problem, operands, result, tf32, execution, True)[1].get(
            "plan"
        )

    def matmul(
        self,
        mat1: torch.Tensor,
        mat2: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        tf32: bool = False,
        execution: Execution = Execution(),
    ) -> Answer:
        """(B, M, K) times (K, N) or (B, K, N), of any strides; the result is contiguous."""
        batch, m, _ = mat1.shape
        result = torch.empty((batch, m, mat2.shape[-1]), dtype=mat1.dtype)
        # One mat2 for all has a batch stride of zero.
        operands = (mat1, mat2.expand(batch, *mat2.shape[-2:]), bias, result)
        answer = self._answer("matmul", (0,) * 18, operands, tf32, execution)
        return Answer(
            result,
            answer["plan"],
            answer["traffic"],
            answer["launches"],
            answer["workspace_bytes"],
        )

    def _answer(
        self,
        direction: str,
        sizes: tuple[int, ...],
        operands: tuple[Operand | None, ...],
        tf32: bool,
        execution: Execution,
        *,
        plan_only: bool = False,
    ) -> dict:
        """operands: the first, the second, the bias and the result."""
        call = _Call(
            _DIRECTIONS.index(direction),
            _DTYPES.index(operands[-1].dtype),
            int(tf32),
            int(plan_only),
            int(execution.order),
            execution.seed,
            int(execution.holds),
            int(execution.counts_banks),
            execution.machine.sm_count,
            execution.machine.shared_bytes,
            execution.machine.variant,
            execution.machine.split,
            execution.machine.packed,
            sizes,
            *map(_described, operands),
        )
        answer = json.loads(self._library.cuda_host_run(ctypes.byref(call)).decode())
        if "error" in answer:
            raise KernelError(f"{direction}: {answer['error']}")
        return answer

    def _call(
        self,
        direction: str,
        problem: Problem,
        operands: tuple[Operand | None, ...],
        result: torch.Tensor | None,
        tf32: bool,
        execution: Execution,
        plan_only: bool,
    ) -> tuple[torch.Tensor, dict]:
        shape = {
            "forward": problem.output_shape,
            "grad_input": problem.input_shape,
            "grad_weight": problem.weight_shape,
            "grad_bias": (problem.out_channels,),
        }[direction]
        first = operands[0]
        dtype = (first.tensor if isinstance(first, Flipped) else first).dtype
        if result is None:
            result = torch.empty(shape, dtype=dtype)
        assert result.shape == shape
        n, c, h, w = problem.input_shape
        oc, oh, ow = problem.output_shape[1:]
        top, bottom, left, right = problem.padding4
        sizes = (n, c, h, w, oc, oh, ow, *problem.kernel, *problem.stride)
        sizes += (top, bottom, left, right, *problem.dilation, problem.groups)
        try:
            answer = self._answer(
                direction, sizes, (*operands, result), tf32, execution, plan_only=plan_only
            )
        except KernelError as error:
            raise KernelError(f"{problem}, {error}") from None
        return result, answer


def engine_units() -> list[pathlib.Path]:
    """What the engine consists of: the sources that nvcc compiles and those without torch."""
    csrc = ROOT / "csrc" / "cuda"
    torch_free = [
        file
        for file in sorted(csrc.glob("*.cpp"))
        if not any(f"#include <{torch}" in file.read_text() for torch in ("ATen", "c10", "torch"))
    ]
    return [HERE / "host_api.cpp", *sorted(csrc.glob("*.cu")), *torch_free]


def build_engine(*, sanitize: bool = False, without: Collection[str] = ()) -> pathlib.Path:
    return build("conv2d_cuda_host", engine_units(), sanitize=sanitize, without=without)


@functools.cache
def engine() -> Engine:
    return Engine(build_engine())
