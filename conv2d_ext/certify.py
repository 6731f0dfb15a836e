"""`certify`: whether a model's bits depend on batch, place, threads, runs and memory format."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import conv2d_ext
from conv2d_ext._certify.against import agreement, read_certificate
from conv2d_ext._certify.axes import Examination, Plan, count_runs
from conv2d_ext._certify.bits import digest, is_comparable
from conv2d_ext._certify.result import (
    AXES,
    DECIDING,
    LIBRARY,
    TORCH,
    Agreement,
    Axis,
    Call,
    Certificate,
    Difference,
    Finding,
    Location,
    Mode,
    OpCalls,
)
from conv2d_ext._certify.runs import Runner, filler_rows, state_kept
from conv2d_ext.functional import build_config

__all__ = [
    "Agreement",
    "Axis",
    "Call",
    "Certificate",
    "Difference",
    "Finding",
    "Location",
    "Mode",
    "OpCalls",
    "certify",
    "read_certificate",
]


def certify(
    model: Callable[..., Any],
    *inputs: Tensor,
    batch_sizes: Iterable[int] = (1, 2, 3, 5, 8, 16),
    places: Iterable[int] | None = None,
    threads: Iterable[int] = (1, 2, 3, 4),
    runs: int = 3,
    gradients: bool = True,
    modes: Iterable[str] = (TORCH, LIBRARY),
    require: str | Iterable[str] = (),
    seed: int = 0,
    against: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Certificate:
    """Shows whether one example's results have the same bits in every batch.

    The model runs as it is ("F.*", PyTorch alone) and under `conv2d_ext.batch_invariant()`, along
    five axes: the batch's size, the example's place in the largest batch, the number of threads,
    repeated runs, and channels_last inputs where an input has four dimensions. Along each, outputs
    and input gradients (of the sum of all outputs) are compared by bit patterns, and the first call
    that gives other bits for equal inputs is named. The model is called in the mode that it is in,
    training or evaluation, under the caller's autocast.

    model: a `torch.nn.Module`, or a function; it takes the inputs and returns tensors, alone or in
        tuples, lists, dicts or dataclasses. Runs restore its mode, its buffers and its `.grad`s,
        besides generators of random numbers, the number of threads and the default dtype.
    inputs: each (N, ...) of any dtype, N ≥ 1 alike, on the CPU or CUDA: row 0 is the example. Other
        rows of a batch are made from the inputs' values, drawn anew for floating point and put in
        another order for integers.
    batch_sizes: beside the example alone, which is the reference.
    places: in the largest batch, beside the reference 0; by default 1, the middle and the last.
    threads: the first is the reference.
    runs: of the same inputs, in all; 1 leaves repeated runs out.
    gradients: False leaves the input gradients out.
    modes: "F.*", "batch_invariant" or both; the last one decides.
    require: "format" makes the memory format decide, too.
    seed: of the other rows' values, and of the model's own random numbers.
    against: a file that `Certificate.to_json` wrote, on another machine: digests are compared.
    progress: shown on stderr; None: only on a terminal.

    Raises TypeError and ValueError for arguments that don't fit, before anything runs, and where
    the model returns no tensors; OSError where `against` can't be read; RuntimeError, with the
    cause, where the model raises.
    """
    _check_model(model)
    examples = _check_inputs(inputs)
    sizes = _numbers("batch_sizes", batch_sizes, 1)
    if max(sizes) < 2:
        raise ValueError(f"certify: batch_sizes: wanted one that is 2 or more, got {sizes}")
    plan = Plan(
        sizes,
        _check_places(places, max(sizes)),
        _numbers("threads", threads, 1),
        _number("runs", runs, 1),
        any(t.dim() == 4 for t in examples),
        _check_flag("gradients", gradients),
    )
    names = _check_modes(modes)
    required = _check_require(require, plan)
    _number("seed", seed, 0)
    if progress is not None:
        _check_flag("progress", progress, "a bool or None")
    document = None if against is None else read_certificate(Path(against))
    generator = torch.Generator().manual_seed(seed)
    fillers = [filler_rows(t, max(*sizes, 2) - 1, generator) for t in inputs]

    certificate = _certificate(model, examples, fillers, plan, names, required, seed, progress)
    if document is None:
        return certificate
    held = agreement(certificate, document, str(against))
    return dataclasses.replace(certificate, against=held)


def _certificate(
    model: Callable[..., Any],
    examples: list[Tensor],
    fillers: list[Tensor],
    plan: Plan,
    modes: tuple[str, ...],
    require: tuple[str, ...],
    seed: int,
    progress: bool | None,
) -> Certificate:
    notes: dict[str, None] = {}
    found = {}
    inputs, parameters = _inputs_and_parameters(model, examples)
    with state_kept(model), _progress(progress, count_runs(plan, modes)) as step:
        runner = Runner(model, examples, fillers, seed, step)
        for mode in modes:
            found[mode] = Examination(runner, plan, mode, notes).examine()
    if _inputs_and_parameters(model, examples)[1] != parameters:
        notes["the model changes its own parameters as it runs"] = None
    return Certificate(
        model=type(model).__qualname__,
        passed=all(found[modes[-1]].axes[axis].passed for axis in require),
        require=require,
        modes=found,
        inputs=inputs,
        parameters=parameters,
        settings=_settings(plan, seed, model),
        machine=_machine(),
        notes=tuple(notes),
    )


# ---- arguments


def _check_model(model: Any) -> None:
    if isinstance(model, type) or not callable(model):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"certify: model: wanted a module or a function, got {got}")
    if isinstance(model, nn.Module) and any(
        is_lazy(t) for t in (*model.parameters(), *model.buffers())
    ):
        raise ValueError("certify: model: has uninitialized parameters: run it once before")


def _check_inputs(inputs: tuple[Any, ...]) -> list[Tensor]:
    """Each input's row 0, (1, ...)."""
    if not inputs:
        raise TypeError("certify: inputs: wanted at least one tensor, got none")
    for index, tensor in enumerate(inputs):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"certify: inputs[{index}]: wanted a tensor, got {type(tensor).__name__}"
            )
        if not is_comparable(tensor):
            raise TypeError(
                f"certify: inputs[{index}]: wanted a strided tensor with data, got layout "
                f"{tensor.layout} on {tensor.device}"
            )
        if tensor.dim() < 1 or tensor.shape[0] < 1:
            raise ValueError(
                f"certify: inputs[{index}]: wanted (N, ...) with N of at least 1, got shape "
                f"{tuple(tensor.shape)}"
            )
        if tensor.shape[0] != inputs[0].shape[0]:
            raise ValueError(
                f"certify: inputs[{index}]: wanted N = {inputs[0].shape[0]} rows, as inputs[0] "
                f"has, got shape {tuple(tensor.shape)}"
            )
    # Clones: a model that writes to its inputs would spoil the example, or the caller's tensor.
    return [t[:1].detach().clone(memory_format=torch.contiguous_format) for t in inputs]


def _check_flag(name: str, value: Any, wanted: str = "a bool") -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"certify: {name}: wanted {wanted}, got {type(value).__name__}")
    return value


def _number(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"certify: {name}: wanted an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"certify: {name}: wanted {least} or more, got {value}")
    return value


def _numbers(name: str, values: Any, least: int) -> tuple[int, ...]:
    """Distinct ones, in the order given."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"certify: {name}: wanted several ints, got {type(values).__name__}")
    found = tuple(dict.fromkeys(_number(name, value, least) for value in values))
    if not found:
        raise ValueError(f"certify: {name}: wanted at least one, got none")
    return found


def _check_places(places: Any, largest: int) -> tuple[int, ...]:
    if places is None:
        return tuple(sorted({1, largest // 2, largest - 1} - {0}))
    found = _numbers("places", places, 0)
    if max(found) >= largest:
        raise ValueError(
            f"certify: places: wanted 0 to {largest - 1}, as the largest batch has {largest} rows, "
            f"got {max(found)}"
        )
    return found


def _check_modes(modes: Any) -> tuple[str, ...]:
    if isinstance(modes, str):
        modes = (modes,)
    names = tuple(dict.fromkeys(modes))
    if not names or any(name not in (TORCH, LIBRARY) for name in names):
        raise ValueError(f'certify: modes: wanted "{TORCH}", "{LIBRARY}" or both, got {names}')
    return names


def _check_require(require: Any, plan: Plan) -> tuple[str, ...]:
    wanted = (require,) if isinstance(require, str) else tuple(require)
    if any(axis not in AXES for axis in wanted):
        raise ValueError(f"certify: require: wanted some of {AXES}, got {wanted}")
    if "format" in wanted and not plan.formats:
        raise ValueError(
            'certify: require="format": wanted an input of shape (N, C, H, W), as only such a one '
            "has memory formats"
        )
    return tuple(axis for axis in AXES if axis in (*DECIDING, *wanted))


# ---- what else a certificate holds


def _inputs_and_parameters(
    model: Callable[..., Any], examples: list[Tensor]
) -> tuple[tuple[dict[str, Any], ...], str]:
    inputs = tuple(
        {
            "shape": list(t.shape[1:]),
            "dtype": str(t.dtype).removeprefix("torch."),
            "sha256": digest(t),
        }
        for t in examples
    )
    state = hashlib.sha256()
    if isinstance(model, nn.Module):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            bits = digest(tensor) if is_comparable(tensor) else "not comparable"
            state.update(f"{name} {bits}\n".encode())
    return inputs, state.hexdigest()


def _settings(plan: Plan, seed: int, model: Callable[..., Any]) -> dict[str, Any]:
    settings = dataclasses.asdict(plan)
    settings |= {"seed": seed, "training": bool(getattr(model, "training", False))}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}


def _machine() -> dict[str, Any]:
    config = build_config()
    return {
        "conv2d_ext": conv2d_ext.__version__,
        "numerics": config["numerics"],
        "isa": config["isa"],
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu": _cpu_name(),
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def _progress(wanted: bool | None, total: int) -> Iterator[Callable[[str], None]]:
    if wanted is False or (wanted is None and not sys.stderr.isatty()):
        yield lambda _: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ModuleNotFoundError:  # the bar is the demonstration's extra, the work goes on without
        yield lambda _: None
        return

    columns = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)

        def step(text: str) -> None:
            bar.update(task, description=text, advance=1)

        yield step
