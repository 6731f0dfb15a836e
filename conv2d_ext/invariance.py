"""The mode `batch_invariant`: a model's results no longer depend on the batch."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from conv2d_ext import _C, _checkpoints
from conv2d_ext._on_import import when_imported

_enter = torch.ops.conv2d_ext.enter_batch_invariant.default
_leave = torch.ops.conv2d_ext.leave_batch_invariant.default
# Nothing uses their results, so torch.fx would take them for dead code.
torch.fx.node.has_side_effect(_enter)
torch.fx.node.has_side_effect(_leave)


def _let_higher_order_ops_pass() -> None:
    """Operators of Python that take functions (torch.cond, or what torch.func makes of an
    autograd.Function) look for a kernel at each key of a thread that is not known to have none.
    """
    key = torch._C._dispatch_key_parse("TESTING_ONLY_GenericMode")
    # Private names: without them import goes on, and tests say what is missing.
    of_later_ones = "_HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS"
    getattr(torch._ops, of_later_ones, []).append(key)
    for op in getattr(torch._ops, "_higher_order_ops", {}).values():
        op.fallthrough(key)


def _index_put_arguments(
    input: torch.Tensor,
    indices: list[torch.Tensor],
    places: list[int],
    values: torch.Tensor,
    accumulate: bool = False,
) -> tuple[Any, ...]:
    """Of PyTorch's op, from those of the recorded one."""
    at = dict(zip(places, indices, strict=True))
    all_indices = [at.get(place) for place in range(max(places, default=-1) + 1)]
    return input, all_indices, values, accumulate


def _describe_recorded_calls() -> None:
    """A compiler that asks what a recorded call returns (csrc/invariance_compiled.cpp) is told what
    PyTorch's does on that device, with the strides and types that the call gives it. On tensors of
    the meta device it might return another.
    """

    def fake_of(op: Any, name: str) -> Callable[..., Any]:
        def fake(*args: Any, **kwargs: Any) -> Any:
            if name == "index_put":
                args = _index_put_arguments(*args)
            result = op(*args, **kwargs)
            tensors = [a if torch.is_tensor(a) else None for a in args]
            results = _C.settle_recorded_results(
                name, tensors, [result] if torch.is_tensor(result) else list(result)
            )
            return results[0] if torch.is_tensor(result) else tuple(results)

        return fake

    prefix = "conv2d_ext::eager_"
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(prefix):
            aten_name = name.removeprefix(prefix)
            function, _, overload = aten_name.partition(".")
            op = getattr(getattr(torch.ops.aten, function), overload or "default")
            torch.library.register_fake(name, fake_of(op, aten_name))


_let_higher_order_ops_pass()
_describe_recorded_calls()


def _leave_contexts_of_failed_compilations() -> None:
    """Where a compiler fails nobody leaves the contexts of the function that it was tracing."""
    handler = importlib.import_module("torch._dynamo.callback").callback_handler
    around_compilation = handler.install_callbacks

    # Not one of the handler's callbacks, which torch._dynamo.reset() forgets.
    @contextlib.contextmanager
    def install_callbacks(*args: Any, **kwargs: Any) -> Iterator[None]:
        with around_compilation(*args, **kwargs):
            try:
                yield
            except BaseException:
                _C.leave_traced_contexts()
                raise

    handler.install_callbacks = install_callbacks


when_imported("torch._dynamo.callback", _leave_contexts_of_failed_compilations)


class _NoAutogradCache:
    """Keeps torch.compile from taking what it compiled outside of the mode.

    Functions are compiled anew where the mode has changed (their guards see a tensor's dispatch
    keys), but AOTAutograd would find the old result in its cache, whose key knows no mode.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = True

    def enter(self) -> None:
        with self._lock:
            config = importlib.import_module("torch._functorch.config")
            if self._users == 0:
                self._before = config.enable_autograd_cache
            self._users += 1
            config.enable_autograd_cache = False

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                config = importlib.import_module("torch._functorch.config")
                config.enable_autograd_cache = self._before


_no_autograd_cache = _NoAutogradCache()
_enabled_lock = threading.Lock()


class batch_invariant:
    """A context in which the calls that conv2d_ext covers give an example the same bits in every
    batch; docs/models.md lists these calls.

    Inside it, in this thread, conv2d_ext computes them, whoever makes them. Their backward keeps
    the bits whenever and in whichever thread it runs. PyTorch's own calls keep theirs only where
    the backward runs inside the context, too. A checkpoint (torch.utils.checkpoint) computes its
    forward once more as it did. Contexts nest, and may lie around or inside of functions under
    torch.compile.

    >>> with conv2d_ext.batch_invariant():
    ...     output = model(input)
    """

    def __enter__(self) -> batch_invariant:
        if torch.compiler.is_compiling():
            _enter()
            return self
        _checkpoints.install()
        _no_autograd_cache.enter()
        try:
            _enter()
        except BaseException:
            _no_autograd_cache.leave()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _leave()
        if not torch.compiler.is_compiling():
            _no_autograd_cache.leave()


def enable() -> None:
    """`batch_invariant` for the whole process, every thread of it, until `disable`.

    A thread that is running already joins with its first call of a covered function, which is
    computed in the mode as well. Call it before functions under torch.compile run in other threads:
    what those have compiled stays in use for one more call. The process's first call registers
    kernels with PyTorch, which does not guard that against calls of the same functions in other
    threads: make it while they make none.
    """
    with _enabled_lock:
        if not _C.is_enabled_in_process():
            _checkpoints.install()
            _no_autograd_cache.enter()
        _C.enable_batch_invariant()


def disable() -> None:
    """Ends what `enable` began; does nothing otherwise. Contexts of `batch_invariant` remain."""
    with _enabled_lock:
        if _C.is_enabled_in_process():
            _C.disable_batch_invariant()
            _no_autograd_cache.leave()
