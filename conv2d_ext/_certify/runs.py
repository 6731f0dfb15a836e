"""Runs of a model on batches that hold one example, and all state as it was before."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import conv2d_ext
from conv2d_ext._certify.leaves import Leaf, Print, example_leaves, find_example, leaves_of
from conv2d_ext._certify.names import NamesOfCalls
from conv2d_ext._certify.record import Recorder, Recording
from conv2d_ext._certify.result import LIBRARY


@dataclasses.dataclass(frozen=True)
class Setting:
    """How the model is run."""

    batch: int = 1
    place: int = 0
    threads: int = 1
    channels_last: bool = False
    repeat: int = 1

    def __str__(self) -> str:
        plural = "s" if self.threads > 1 else ""
        memory_format = "channels_last" if self.channels_last else "contiguous"
        return (
            f"batch {self.batch}, place {self.place}, {self.threads} thread{plural}, "
            f"{memory_format}, run {self.repeat}"
        )


@dataclasses.dataclass
class Run:
    """What one run gave: the nested output, its leaves, and each input's gradient (None: it has
    none)."""

    output: Any
    leaves: list[Leaf]
    gradients: list[Tensor | None]

    def tensors(self, with_gradients: bool) -> list[Tensor]:
        """What the run was for: its gradients, or its outputs."""
        if with_gradients:
            return [g for g in self.gradients if g is not None]
        return [leaf.value for leaf in self.leaves if leaf.value is not None]


class ModelRaised(RuntimeError):
    """The model raised; `__cause__` is what it raised."""


class Runner:
    """Runs a model in one mode after another. `examples` and `fillers` are, for each input, the
    example (1, ...) and other rows (n, ...) that share a batch with it."""

    def __init__(
        self,
        model: Callable[..., Any],
        examples: list[Tensor],
        fillers: list[Tensor],
        seed: int,
        step: Callable[[str], None],
    ) -> None:
        self.model, self.examples, self.step = model, examples, step
        self._fillers, self._seed = fillers, seed
        self.mode = ""
        self.without_batch: set[str] = set()
        """Names of the leaves that have no batch: the gradient is not taken of them."""

    def run(
        self,
        setting: Setting,
        gradients: bool = False,
        observer: contextlib.AbstractContextManager[Any] | None = None,
    ) -> Run:
        """Raises ModelRaised where the model does."""
        watched = ", recorded" if observer else ""
        backward = ", backward" if gradients else ""
        self.step(f"{self.mode}: {setting}{backward}{watched}")
        torch.set_num_threads(setting.threads)
        _seed_all(self._seed)
        inputs = [self._batch(i, setting) for i in range(len(self.examples))]
        kept = _Buffers(self.model)
        observer = observer or contextlib.nullcontext()
        # Gradients can't be taken of tensors of inference mode, which the caller may be in.
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(gradients), self._context():
                return self._run(inputs, gradients, observer)
        except Exception as error:
            raise ModelRaised(
                f"certify: the model raised {type(error).__name__} ({setting}{backward}): {error}"
            ) from error
        finally:
            kept.restore()

    def _run(
        self, inputs: list[Tensor], gradients: bool, observer: contextlib.AbstractContextManager
    ) -> Run:
        leaves = inputs
        if gradients:
            leaves = [
                t.requires_grad_() if t.is_floating_point() or t.is_complex() else t for t in inputs
            ]
            # Not a leaf: a model may write to its input.
            inputs = [t.clone() if t.requires_grad else t for t in leaves]
        with observer:
            output = self.model(*inputs)
            found = leaves_of(output)
            if not gradients:
                return Run(output, found, [])
            summed = [
                leaf.value
                for leaf in found
                if leaf.value is not None
                and leaf.value.requires_grad
                and leaf.name not in self.without_batch
            ]
            wanted = [t for t in leaves if t.requires_grad]
            ones = [torch.ones_like(t) for t in summed]
            computed = iter(torch.autograd.grad(summed, wanted, ones, allow_unused=True))
        return Run(output, found, [next(computed) if t.requires_grad else None for t in leaves])

    def record(self, setting: Setting, gradients: bool, alone: Recording | None) -> Recording:
        """The calls of a run; `alone` as in Recorder."""
        recorder = Recorder(self.model, alone, setting.batch, setting.place)
        run = self.run(setting, gradients, recorder)
        return recorder.finish(run.tensors(gradients))

    def names(self, setting: Setting, gradients: bool) -> dict:
        """The names of the calls of a run."""
        observer = NamesOfCalls(self.model)
        self.run(setting, gradients, observer)
        return observer.names

    def _batch(self, index: int, setting: Setting) -> Tensor:
        example, fillers = self.examples[index], self._fillers[index]
        rows = [fillers[: setting.place], example, fillers[setting.place : setting.batch - 1]]
        batch = torch.cat(rows).contiguous()
        if setting.channels_last and batch.dim() == 4:
            batch = batch.contiguous(memory_format=torch.channels_last)
        return batch

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        return conv2d_ext.batch_invariant() if self.mode == LIBRARY else contextlib.nullcontext()


def example_of(
    run: Run, alone: Run, prints: dict[str, Print], setting: Setting
) -> dict[str, Tensor | None]:
    """The example's part of each leaf; None where it can't be told."""
    found: dict[str, Tensor | None] = {}
    for leaf in example_leaves(run.output, alone.output, setting.batch, setting.place):
        alone_print = prints.get(leaf.name)
        part = None
        if leaf.value is not None and alone_print is not None:
            part = find_example(leaf.value, alone_print, setting.batch, setting.place)
        found[leaf.name] = part[1].detach() if part else None
    return found


# ---- inputs


def filler_rows(given: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(count, ...) rows that differ from row 0 of `given` (n, ...), on its device.

    Floating point: each element is drawn from all of `given`'s, which keeps their range; from
    [-1, 1) where these are all the same. Integers and bools: a given row, its elements in another
    order, so that token ids and masks stay valid.
    """
    values = given.detach().cpu()
    rows, size = values.shape[0], values[0].numel()
    if not size:
        return given[:1].expand(count, *given.shape[1:]).clone()
    flat = values.reshape(rows, size)
    if values.is_floating_point() and values.itemsize == 1:  # float8: few functions know it
        flat = flat.float()
    if values.is_floating_point() or values.is_complex():
        pool = flat.flatten()
        pool = pool[pool.isfinite()]
        if not pool.numel() or bool((pool == pool[0]).all()) or size == 1:
            pool = torch.rand(4096, generator=generator).to(flat.dtype) * 2 - 1
        picked = pool[torch.randint(pool.numel(), (count, size), generator=generator)]
    else:
        picked = torch.stack(
            [
                flat[int(torch.randint(rows, (), generator=generator))][
                    torch.randperm(size, generator=generator)
                ]
                for _ in range(count)
            ]
        )
    return picked.reshape(count, *given.shape[1:]).to(given.device, given.dtype)


# ---- state


@contextlib.contextmanager
def state_kept(model: Callable[..., Any]) -> Iterator[None]:
    """All that a run may change is put back: modes, buffers, .grad of parameters, generators of
    random numbers, the number of threads, the default dtype."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    training = [m.training for m in modules]
    gradients = [p.grad for p in parameters]
    buffers = _Buffers(model)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    for parameter in parameters:
        parameter.grad = None
    try:
        with torch.random.fork_rng(_cuda_devices()):
            yield
    finally:
        for module, mode in zip(modules, training, strict=True):
            module.training = mode
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        buffers.restore()
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)


def _cuda_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


class _Buffers:
    """The buffers of a model, such as running statistics, with their values."""

    def __init__(self, model: Callable[..., Any]) -> None:
        modules = model.modules() if isinstance(model, nn.Module) else ()
        self._kept = [
            (m, name, buffer, None if buffer is None else buffer.detach().clone())
            for m in modules
            for name, buffer in m._buffers.items()
        ]

    def restore(self) -> None:
        for module, name, buffer, values in self._kept:
            module._buffers[name] = buffer
            # Written only where it has changed: autograd counts what is written. (It doesn't count
            # what a batch norm writes, so the count can't be asked.)
            if buffer is None or torch.equal(buffer, values):
                continue
            # Tensors made in inference mode can be written there alone.
            with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                buffer.copy_(values)
