"""What PyTorch wraps around a call, as layers of a composition.

A layer turns a function of tensors, with a tuple of results, into another one. Each is described by
plain data: {"kind": "vmap", "size": 3, ...}; LAYERS has what each kind does with its description.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from . import peer

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., Tensors]
Layer = dict[str, Any]


# ---- modes and subclasses


class Tagged(torch.Tensor):
    """Passes by the default __torch_function__."""


class Wrapped(torch.Tensor):
    """Holds its data in another tensor, by __torch_dispatch__."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=inner.device,
        )  # fmt: skip

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def unwrap(value):
            return value.inner if isinstance(value, Wrapped) else value

        def wrap(value):
            return Wrapped(value) if isinstance(value, torch.Tensor) else value

        result = function(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        return tree_map(wrap, result)


class _Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class _Seeing(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def _default_dtype(name: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _saved_tensors_hooks() -> Any:
    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        with peer.calls():  # as in _on_operands
            return tensor.detach().clone(), tensor.dtype

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0])


CONTEXTS: dict[str, Callable[[Layer], Any]] = {
    "autocast": lambda layer: torch.autocast(
        "cpu",
        dtype=getattr(torch, layer["dtype"]),
        enabled=layer["enabled"],
        cache_enabled=layer["cache"],
    ),
    "no_grad": lambda _: torch.no_grad(),
    "enable_grad": lambda _: torch.enable_grad(),
    "inference_mode": lambda _: torch.inference_mode(),
    "saved_tensors_hooks": lambda _: _saved_tensors_hooks(),
    "save_on_cpu": lambda _: torch.autograd.graph.save_on_cpu(),
    "dispatch_mode": lambda _: _Passing(),
    "function_mode": lambda _: _Seeing(),
    "disabled_torch_function": lambda _: torch._C.DisableTorchFunctionSubclass(),
    "default_dtype": lambda layer: _default_dtype(layer["dtype"]),
    "deterministic": lambda _: _deterministic(),
    "detect_anomaly": lambda _: torch.autograd.detect_anomaly(check_nan=False),
    "mkldnn_off": lambda _: torch.backends.mkldnn.flags(enabled=False),
}


# ---- layers


def _scalar(results: Tensors) -> torch.Tensor:
    """A real number that depends on every element unevenly."""
    total = 0.0
    for result in results:
        if result is not None:
            total = total + result.abs().square().sum() + 0.5 * result.real.sum()
    return total


def _some(layer: Layer, tensors: Tensors, change: Callable) -> Tensors:
    return tuple(change(t) if i in layer["which"] else t for i, t in enumerate(tensors))


def _vmap(layer: Layer, f: Function) -> Function:
    def run(*tensors):
        in_dims = tuple(layer["in_dims"])
        return torch.vmap(f, in_dims, layer.get("out_dims", 0), chunk_size=layer.get("chunk"))(
            *tensors
        )

    return run


def _one_by_one(layer: Layer, f: Function) -> Function:
    """What vmap means. Its own convolution is none of those that autocast knows."""

    def run(*tensors):
        size = layer["size"]

        def example(i: int) -> list[torch.Tensor]:
            return [
                t if dim is None else t.select(dim, i) if size else t.new_zeros(_without(t, dim))
                for t, dim in zip(tensors, layer["in_dims"], strict=True)
            ]

        found = [f(*example(i)) for i in range(max(1, size))]
        dim = layer.get("out_dims", 0)
        stacked = (torch.stack(results, dim) for results in zip(*found, strict=True))
        return tuple(r.narrow(dim, 0, 0) if size == 0 else r for r in stacked)

    return run


def _without(tensor: torch.Tensor, dim: int) -> list[int]:
    dim %= tensor.dim()
    return [size for i, size in enumerate(tensor.shape) if i != dim]


def _grad(layer: Layer, f: Function) -> Function:
    return lambda *t: torch.func.grad(lambda *u: _scalar(f(*u)), tuple(layer["which"]))(*t)


def _jacobian(transform: Callable) -> Callable[[Layer, Function], Function]:
    def make(layer: Layer, f: Function) -> Function:
        def run(*tensors):
            nested = transform(f, tuple(layer["which"]))(*tensors)
            return tuple(torch.utils._pytree.tree_leaves(nested))

        return run

    return make


def _hessian(layer: Layer, f: Function) -> Function:
    def run(*tensors):
        nested = torch.func.hessian(lambda *u: _scalar(f(*u)), tuple(layer["which"]))(*tensors)
        return tuple(torch.utils._pytree.tree_leaves(nested))

    return run


def _vjp(_: Layer, f: Function) -> Function:
    def run(*tensors):
        results, pullback = torch.func.vjp(f, *tensors)
        return (*results, *pullback(tuple(r * 0.25 + 1 for r in results)))

    return run


def _tangent(tensor: torch.Tensor) -> torch.Tensor:
    """PyTorch's arithmetic crashes on freed data, also where a transform hides that it is freed:
    there is nothing to make a tangent of."""
    if _is_freed(tensor):
        return torch.ones_like(tensor)
    with peer.calls():
        return tensor * 0.5 + 0.25


def _is_freed(tensor: torch.Tensor) -> bool:
    try:
        held = tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return False  # a transform's tensor, a sparse one
    return tensor.device.type == "cpu" and tensor.numel() > 0 and held == 0


def _tangents(tensors: Tensors) -> Tensors:
    return tuple(map(_tangent, tensors))


def _jvp(_: Layer, f: Function) -> Function:
    def run(*tensors):
        results, tangents = torch.func.jvp(f, tensors, _tangents(tensors))
        return (*results, *tangents)

    return run


def _linearize(_: Layer, f: Function) -> Function:
    def run(*tensors):
        results, push = torch.func.linearize(f, *tensors)
        return (*results, *push(*_tangents(tensors)))

    return run


def _dual(layer: Layer, f: Function) -> Function:
    def run(*tensors):
        with fwAD.dual_level():
            duals = _some(layer, tensors, lambda t: fwAD.make_dual(t, _tangent(t)))
            results = f(*duals)
            unpacked = [(None, None) if r is None else fwAD.unpack_dual(r) for r in results]
            return tuple(part for pair in unpacked for part in pair)

    return run


def _tape(layer: Layer, f: Function) -> Function:
    """autograd.grad or backward(), and the gradient of a gradient penalty."""

    def run(*tensors):
        leaves = [t.detach().requires_grad_(i in layer["which"]) for i, t in enumerate(tensors)]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if layer.get("hooks"):
            for leaf in wanted:
                leaf.register_hook(lambda g: None if g is None else g * 2)
        results = f(*leaves)
        loss = _scalar(results)
        if "freed" in layer:
            leaves[layer["freed"]].untyped_storage().resize_(0)
        if layer.get("backward"):
            loss.backward()
            return (*results, *(leaf.grad for leaf in leaves))
        second = layer.get("second", False)
        gradients = torch.autograd.grad(loss, wanted, create_graph=second, allow_unused=True)
        if not second:
            return (*results, *gradients)
        with contextlib.ExitStack() as stack:
            if layer.get("autocast"):
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            penalty = _scalar(gradients)
            some = [t for i, t in enumerate(leaves) if i in layer.get("penalty", layer["which"])]
            some = [t for t in some if t.requires_grad] or wanted
            seconds = torch.autograd.grad(penalty, some, allow_unused=True)
        return (*results, *gradients, *seconds)

    return run


def _checkpoint(layer: Layer, f: Function) -> Function:
    return lambda *t: checkpoint(f, *t, use_reentrant=layer.get("reentrant", False))


def _compile(layer: Layer, f: Function) -> Function:
    def run(*tensors):
        torch._dynamo.reset()
        try:
            compiled = torch.compile(f, backend=layer["backend"], dynamic=layer["dynamic"])
            return compiled(*tensors)
        finally:
            torch._dynamo.reset()

    return run


def _make_fx(layer: Layer, f: Function) -> Function:
    return lambda *t: make_fx(f, tracing_mode=layer["tracing"])(*t)(*t)


def _trace(_: Layer, f: Function) -> Function:
    return lambda *t: torch.jit.trace(f, t, check_trace=False)(*t)


def _functionalize(_: Layer, f: Function) -> Function:
    return lambda *t: torch.func.functionalize(f)(*t)


def _fake(_: Layer, f: Function) -> Function:
    def run(*tensors):
        with FakeTensorMode() as mode:
            results = f(*(mode.from_tensor(t) for t in tensors))
        return tuple(
            r if r is None else torch.empty_strided(r.shape, r.stride(), dtype=r.dtype).zero_()
            for r in results
        )

    return run


def _meta(_: Layer, f: Function) -> Function:
    def run(*tensors):
        results = f(*(t.to("meta") for t in tensors))
        return tuple(
            r if r is None else torch.empty_strided(r.shape, r.stride(), dtype=r.dtype).zero_()
            for r in results
        )

    return run


def _on_operands(change: Callable) -> Callable[[Layer, Function], Function]:
    def by_pytorch(tensor):
        # It crashes where it copies what another layer has freed.
        with peer.calls():
            return change(tensor)

    return lambda layer, f: lambda *t: f(*_some(layer, t, by_pytorch))


def _tagged(layer: Layer, f: Function) -> Function:
    return lambda *t: f(*_some(layer, t, lambda u: u.as_subclass(Tagged)))


def _wrapped(layer: Layer, f: Function) -> Function:
    def run(*tensors):
        results = f(*_some(layer, tensors, Wrapped))
        return tuple(r.inner if isinstance(r, Wrapped) else r for r in results)

    return run


def _in_context(layer: Layer, f: Function) -> Function:
    def run(*tensors):
        with CONTEXTS[layer["kind"]](layer):
            return f(*tensors)

    return run


def _inference_operand(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


def _resized(tensor: torch.Tensor) -> torch.Tensor:
    """Storage given back and taken again, as FSDP's resharding does."""
    if tensor.untyped_storage().nbytes() == 0:
        return tensor  # PyTorch itself crashes where it clones what another layer has freed
    tensor = tensor.clone()
    values, size = tensor.clone(), tensor.untyped_storage().nbytes()
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(size)
    return tensor.copy_(values)


def _freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


LAYERS: dict[str, Callable[[Layer, Function], Function]] = {
    "vmap": _vmap,
    "one_by_one": _one_by_one,
    "grad": _grad,
    "jacrev": _jacobian(torch.func.jacrev),
    "jacfwd": _jacobian(torch.func.jacfwd),
    "hessian": _hessian,
    "vjp": _vjp,
    "jvp": _jvp,
    "linearize": _linearize,
    "dual": _dual,
    "tape": _tape,
    "checkpoint": _checkpoint,
    "compile": _compile,
    "make_fx": _make_fx,
    "trace": _trace,
    "functionalize": _functionalize,
    "fake": _fake,
    "meta": _meta,
    "conj": _on_operands(torch.conj),
    "neg": _on_operands(torch._neg_view),
    "zero_tensor": _on_operands(
        lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device)
    ),
    "parameter": _on_operands(lambda t: torch.nn.Parameter(t, requires_grad=False)),
    "inference_operand": _on_operands(_inference_operand),
    "resized": _on_operands(_resized),
    "freed": _on_operands(_freed),
    "sparse": _on_operands(lambda t: t.to_sparse()),
    "mkldnn": _on_operands(lambda t: t.to_mkldnn()),
    "tagged": _tagged,
    "wrapped": _wrapped,
    **dict.fromkeys(CONTEXTS, _in_context),
}

# These change neither values nor bits.
IDENTITIES = {
    "no_grad", "enable_grad", "inference_mode", "saved_tensors_hooks", "save_on_cpu",
    "dispatch_mode", "function_mode", "disabled_torch_function", "default_dtype", "deterministic",
    "detect_anomaly", "mkldnn_off", "conj", "neg", "parameter", "inference_operand", "resized",
    "tagged", "wrapped", "checkpoint", "functionalize", "make_fx", "trace", "compile",
}  # fmt: skip
# And these leave the strides alone, too.
STRIDES_KEPT = IDENTITIES - {"make_fx", "compile"}
DATALESS = {"fake", "meta"}
DERIVATIVES = {
    "grad", "jacrev", "jacfwd", "hessian", "vjp", "jvp", "linearize", "dual", "tape",
}  # fmt: skip
