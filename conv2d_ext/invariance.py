"""The mode `batch_invariant`: a model's results no longer depend on the batch."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from types import AsyncGeneratorType, CoroutineType, GeneratorType, TracebackType
from typing import Any, TypeVar, cast

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from conv2d_ext import _C, _build_info, _checkpoints, _rounded
from conv2d_ext._on_import import when_imported

# What a function returns before it has run.
_RUNS_LATER = (GeneratorType, CoroutineType, AsyncGeneratorType)
_Function = TypeVar("_Function", bound=Callable[..., Any])

_enter = torch.ops.conv2d_ext.enter_batch_invariant.default
_leave = torch.ops.conv2d_ext.leave_batch_invariant.default
# Nothing uses their results, so torch.fx would take them for dead code.
torch.fx.node.has_side_effect(_enter)
torch.fx.node.has_side_effect(_leave)


_KEY = torch._C._dispatch_key_parse("TESTING_ONLY_GenericMode")  # csrc/invariance.h


def _let_higher_order_ops_pass() -> None:
    """Operators of Python that take functions (torch.cond, or what torch.func makes of an
    autograd.Function) look for a kernel at each key of a thread that is not known to have none.
    """
    # Private names: without them import goes on, and tests say what is missing.
    of_later_ones = "_HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS"
    getattr(torch._ops, of_later_ones, []).append(_KEY)
    for op in getattr(torch._ops, "_higher_order_ops", {}).values():
        op.fallthrough(_KEY)


def _trace_flex_attention_outside() -> None:
    """Inductor writes flex_attention's functions of scores into a kernel of its own, which has no
    place for a call: they are traced outside of the mode. Not where they run.
    """
    excluded = torch._C.DispatchKeySet(_KEY)
    for name in ("flex_attention", "flex_attention_backward"):
        op = getattr(torch._ops, "_higher_order_ops", {}).get(name)
        if op is None:
            continue
        call = type(op).__call__

        def traced_outside(self: Any, *args: Any, _call: Any = call, **kwargs: Any) -> Any:
            if get_proxy_mode() is None:
                return _call(self, *args, **kwargs)
            with torch._C._ExcludeDispatchKeyGuard(excluded), _rounded.left_out():
                results = _call(self, *args, **kwargs)
            return _rounded.round_results(results)

        type(op).__call__ = traced_outside


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
            if name in ("multi_margin_loss_backward", "multilabel_margin_loss_backward"):
                # PyTorch has no function of shapes for these.
                return torch.empty_like(args[1], memory_format=torch.contiguous_format)
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
_trace_flex_attention_outside()
_describe_recorded_calls()
_rounded.install()


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


def _is_outside(_: object = None) -> bool:
    return not torch._C._dispatch_tls_is_dispatch_key_included(_KEY)


def _is_inside(_: object = None) -> bool:
    return torch._C._dispatch_tls_is_dispatch_key_included(_KEY)


def _add_guard(builder: Any, check: Callable[[object], bool]) -> None:
    add = builder.guard_manager.root.add_lambda_guard
    arguments = (check, [f"conv2d_ext.invariance.{check.__name__}()"])
    try:
        add(*arguments, None)
    except TypeError:  # older versions of PyTorch keep no stack with it
        add(*arguments)


def CONV2D_EXT_OUTSIDE_OF_THE_MODE(builder: Any, _: Any) -> None:
    """A guard of torch.compile's, named as PyTorch's are."""
    _add_guard(builder, _is_outside)


def CONV2D_EXT_INSIDE_OF_THE_MODE(builder: Any, _: Any) -> None:
    _add_guard(builder, _is_inside)


def _guard_compiled_functions() -> None:
    """A function is compiled anew where it is called in the mode and was not, or the other way
    round. The guards of its tensor arguments see that by themselves; it may have none.
    """
    OutputGraph = importlib.import_module("torch._dynamo.output_graph").OutputGraph
    GlobalStateSource = importlib.import_module("torch._dynamo.source").GlobalStateSource
    add_others = getattr(OutputGraph, "init_ambient_guards", None)
    if add_others is None:  # a private name: without it import goes on, and tests say so
        return

    def init_ambient_guards(self: Any) -> None:
        add_others(self)
        kind = CONV2D_EXT_INSIDE_OF_THE_MODE if _is_inside() else CONV2D_EXT_OUTSIDE_OF_THE_MODE
        self.guards.add(GlobalStateSource().make_guard(kind))

    OutputGraph.init_ambient_guards = init_ambient_guards


when_imported("torch._dynamo.output_graph", _guard_compiled_functions)


class _CompilerSettings:
    """Settings of AOTAutograd that are off while any thread is in the mode.

    enable_autograd_cache: functions are compiled anew where the mode has changed (their guards see
    it), but the cache's key knows no mode, so that it would have what was compiled outside.
    check_custom_op_aliasing: it runs a graph's first call in a TorchDispatchMode, which PyTorch's
    kernels call others in without the mode.
    """

    _NAMES = ("enable_autograd_cache", "check_custom_op_aliasing")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: dict[str, bool] = {}

    def enter(self) -> None:
        with self._lock:
            config = importlib.import_module("torch._functorch.config")
            if self._users == 0:  # older versions of PyTorch have not all of them
                self._before = {n: getattr(config, n) for n in self._NAMES if hasattr(config, n)}
            self._users += 1
            for name in self._before:
                setattr(config, name, False)

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                config = importlib.import_module("torch._functorch.config")
                for name, value in self._before.items():
                    setattr(config, name, value)


_compiler_settings = _CompilerSettings()
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

    As a decorator, `@conv2d_ext.batch_invariant()`, it lies around each call of a function. Raises
    TypeError for what is no function, and for generators and coroutines, which run later.
    """

    def __call__(self, function: _Function) -> _Function:
        runs_later = (
            inspect.isgeneratorfunction,
            inspect.iscoroutinefunction,
            inspect.isasyncgenfunction,
        )
        is_function = inspect.isroutine(function) or isinstance(function, functools.partial)
        is_unbound = isinstance(function, (staticmethod, classmethod))
        if not is_function or is_unbound or any(kind(function) for kind in runs_later):
            raise TypeError(
                "batch_invariant: expected a function that has run when it returns, but got "
                f"{function!r}"
            )

        @functools.wraps(function)
        def in_context(*args: Any, **kwargs: Any) -> Any:
            with batch_invariant():
                result = function(*args, **kwargs)
            if isinstance(result, _RUNS_LATER):
                raise TypeError(
                    "batch_invariant: expected a function that has run when it returns, but "
                    f"{function!r} returned a {type(result).__name__}"
                )
            return result

        # TorchScript would compile what is wrapped, without the context.
        with contextlib.suppress(ValueError):  # of a builtin without a signature
            in_context.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        del in_context.__wrapped__
        return cast(_Function, in_context)

    def __enter__(self) -> batch_invariant:
        if torch.compiler.is_compiling():
            _enter(_build_info.VERSION)
            return self
        _checkpoints.install()
        _compiler_settings.enter()
        try:
            _enter()
        except BaseException:
            _compiler_settings.leave()
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
            _compiler_settings.leave()


def enable() -> None:
    """`batch_invariant` for the whole process, every thread of it, until `disable`.

    A thread that is running already joins with its first call of a covered function, which is
    computed in the mode as well. Call it before functions under torch.compile run in other threads:
    what those have compiled stays in use for one more call. The process's first call registers
    kernels with PyTorch, which does not guard that against calls of the same functions in other
    threads. Make it while they make none. Processes that are spawned begin without it.
    """
    with _enabled_lock:
        if not _C.is_enabled_in_process():
            _checkpoints.install()
            _compiler_settings.enter()
        _C.enable_batch_invariant()


def disable() -> None:
    """Ends what `enable` began; does nothing otherwise. Contexts of `batch_invariant` remain."""
    with _enabled_lock:
        if _C.is_enabled_in_process():
            _C.disable_batch_invariant()
            _compiler_settings.leave()
