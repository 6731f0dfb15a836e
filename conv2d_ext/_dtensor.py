"""How the ops run on `torch.distributed.tensor.DTensor`: on each rank's part, without a word to the
others.

An op has rules: how its tensors may lie over one dimension of the mesh, and how its result lies
then. Dimensions of the mesh are looked at one by one. A rule fits where every tensor that is
sharded is sharded as the rule has it. Replicated ones are sliced as it needs, which takes no
communication, and those of pending sums (Partial) are summed up. Where no rule fits, ValueError
names those that there are: nothing is gathered silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


@dataclass(frozen=True)
class _Rule:
    name: str
    # None: that tensor has to be absent. Partial: of a replicated one, the first rank takes it.
    inputs: tuple[Placement | None, ...]
    output: Placement


_REPLICATED = Replicate()
# Which argument of conv2d and conv2d_grad_input says the groups; of conv2d_grad_weight the next.
# Arguments that have their defaults may be left out at the end.
_GROUPS = 6


def _replicated(tensors: int) -> _Rule:
    return _Rule("replicated", (_REPLICATED,) * tensors, _REPLICATED)


# ---- the rules, of (placements, shapes and arguments). Tensors come first in each op's arguments.


def _conv2d(tensors: Sequence[Any], args: Sequence[Any]) -> Iterable[_Rule]:
    """input, weight, bias -> output"""
    channels = tensors[0].dim() - 3
    yield _replicated(3)
    if channels:
        yield _Rule("batch", (Shard(0), _REPLICATED, _REPLICATED), Shard(0))
    if args[_GROUPS] == 1:
        yield _Rule("output channels", (_REPLICATED, Shard(0), Shard(0)), Shard(channels))
        yield _Rule("input channels", (Shard(channels), Shard(1), Partial()), Partial())


def _grad_input(tensors: Sequence[Any], args: Sequence[Any]) -> Iterable[_Rule]:
    """grad_output, weight -> grad_input"""
    channels = tensors[0].dim() - 3
    yield _replicated(2)
    if channels:
        yield _Rule("batch", (Shard(0), _REPLICATED), Shard(0))
    if args[_GROUPS] == 1:
        yield _Rule("output channels", (Shard(channels), Shard(0)), Partial())
        yield _Rule("input channels", (_REPLICATED, Shard(1)), Shard(channels))


def _grad_weight(tensors: Sequence[Any], args: Sequence[Any]) -> Iterable[_Rule]:
    """grad_output, input -> grad_weight"""
    channels = tensors[0].dim() - 3
    yield _replicated(2)
    if channels:
        yield _Rule("batch", (Shard(0), Shard(0)), Partial())
    if args[_GROUPS + 1] == 1:
        yield _Rule("output channels", (Shard(channels), _REPLICATED), Shard(0))
        yield _Rule("input channels", (_REPLICATED, Shard(channels)), Shard(1))


def _grad_bias(tensors: Sequence[Any], _args: Sequence[Any]) -> Iterable[_Rule]:
    channels = tensors[0].dim() - 3
    yield _replicated(1)
    if channels:
        yield _Rule("batch", (Shard(0),), Partial())
    yield _Rule("channels", (Shard(channels),), Shard(0))


def _add_bias(tensors: Sequence[Any], _args: Sequence[Any]) -> Iterable[_Rule]:
    channels = tensors[0].dim() - 3
    yield _replicated(2)
    if channels:
        yield _Rule("batch", (Shard(0), _REPLICATED), Shard(0))
    yield _Rule("channels", (Shard(channels), Shard(0)), Shard(channels))


def _matmul(tensors: Sequence[Any], _args: Sequence[Any]) -> Iterable[_Rule]:
    """mat1 (M, K) or (B, M, K), mat2 (K, N) or (B, K, N), bias (N) -> (M, N) or (B, M, N)"""
    dims, dims2 = tensors[0].dim(), tensors[1].dim()
    yield _replicated(3)
    for dim in range(dims - 1):
        if dims2 == 2:
            yield _Rule("batch and rows", (Shard(dim), _REPLICATED, _REPLICATED), Shard(dim))
    if dims2 == 3:
        yield _Rule("batch", (Shard(0), Shard(0), None), Shard(0))
        yield _Rule("rows", (Shard(1), _REPLICATED, None), Shard(1))
    yield _Rule("columns", (_REPLICATED, Shard(dims2 - 1), Shard(0)), Shard(dims - 1))
    yield _Rule("K", (Shard(dims - 1), Shard(dims2 - 2), Partial()), Partial())


def _elementwise(tensors: Sequence[Any], _args: Sequence[Any]) -> Iterable[_Rule]:
    count = len(tensors)
    yield _replicated(count)
    for dim in range(tensors[0].dim()):
        yield _Rule("any dimension", (Shard(dim),) * count, Shard(dim))


def _reduction(tensors: Sequence[Any], args: Sequence[Any], sums: bool = False) -> Iterable[_Rule]:
    """input, the dimensions that are reduced, ..., keepdim -> result. Parts of a sum add up."""
    dims = tensors[0].dim()
    reduced, keepdim = args[1], args[-1]
    reduced = {dim % dims for dim in reduced} if dims else set()
    yield _replicated(1)
    for dim in range(dims):
        left = dim if keepdim else dim - sum(other < dim for other in reduced)
        if dim not in reduced:
            yield _Rule("any dimension that stays", (Shard(dim),), Shard(left))
        elif sums:
            yield _Rule("any dimension", (Shard(dim),), Partial())


def _sum(tensors: Sequence[Any], args: Sequence[Any]) -> Iterable[_Rule]:
    return _reduction(tensors, args, sums=True)


def _softmax(tensors: Sequence[Any], args: Sequence[Any]) -> Iterable[_Rule]:
    dims, count = tensors[0].dim(), len(tensors)
    yield _replicated(count)
    for dim in range(dims):
        if dim != args[count] % dims:
            yield _Rule("any dimension but the softmax's", (Shard(dim),) * count, Shard(dim))


# ---- arguments that say sizes: those of a rank's part


def _unchanged(_tensors: Sequence[Tensor | None], args: list[Any]) -> list[Any]:
    return args


def _local_input_size(tensors: Sequence[Tensor | None], args: list[Any]) -> list[Any]:
    grad_output, weight = tensors
    channels, height, width = weight.size(1) * args[_GROUPS], *args[2][-2:]
    args[2] = [*grad_output.shape[:-3], channels, height, width]
    return args


def _local_weight_size(tensors: Sequence[Tensor | None], args: list[Any]) -> list[Any]:
    grad_output, input = tensors
    size, strides = args[2], args[3]
    args[2] = [grad_output.size(-3), input.size(-3) // args[_GROUPS + 1], *size[2:]]
    # Dense, in the order of dimensions that the whole weight has.
    local, running = list(strides), 1
    for dim in sorted(range(4), key=lambda i: (strides[i], -i)):
        local[dim] = running
        running *= max(args[2][dim], 1)
    args[3] = strides if args[2] == list(size) else local
    return args


@dataclass(frozen=True)
class _Op:
    tensors: int  # the arguments that come first
    rules: Callable[[Sequence[Any], Sequence[Any]], Iterable[_Rule]]
    localize: Callable[[Sequence[Tensor | None], list[Any]], list[Any]] = _unchanged


_OPS = {
    "conv2d": _Op(3, _conv2d),
    "conv2d_grad_input": _Op(2, _grad_input, _local_input_size),
    "conv2d_grad_weight": _Op(2, _grad_weight, _local_weight_size),
    "conv2d_grad_bias": _Op(1, _grad_bias),
    "conv2d_add_bias": _Op(2, _add_bias),
    "matmul": _Op(3, _matmul),
    "pointwise": _Op(1, _elementwise),
    "pointwise_grad": _Op(2, _elementwise),
    "pointwise_pair": _Op(2, _elementwise),
    "sum": _Op(1, _sum),
    "mean": _Op(1, _reduction),
    "var": _Op(1, _reduction),
    "softmax": _Op(1, _softmax),
    "softmax_grad": _Op(2, _softmax),
}


# ---- a call


def _fits(rule: _Rule, placements: Sequence[Placement | None]) -> bool:
    """Whether the tensors can get there without being gathered."""
    for wanted, given in zip(rule.inputs, placements, strict=True):
        movable = given is None or given.is_replicate() or given.is_partial()
        if given is not None and given != wanted and (wanted is None or not movable):
            return False
    return True


def _slices(rule: _Rule, placements: Sequence[Placement | None]) -> int:
    """How many tensors the rule shards that are not yet."""
    pairs = zip(rule.inputs, placements, strict=True)
    return sum(isinstance(rule, Shard) and given not in (None, rule) for rule, given in pairs)


def _choose(name: str, rules: Sequence[_Rule], placements: Sequence[Placement | None]) -> _Rule:
    fitting = [rule for rule in rules if _fits(rule, placements)]
    if not fitting:
        known = "; ".join(
            f"{rule.name}: {_show(rule.inputs)} -> {_show((rule.output,))}" for rule in rules
        )
        raise ValueError(
            f"conv2d_ext.{name} has no sharding rule for DTensors placed as {_show(placements)}. "
            f"Supported, for each dimension of the mesh: {known}. Redistribute the tensors first."
        )
    return min(fitting, key=lambda rule: _slices(rule, placements))


def _show(placements: Sequence[Placement | None]) -> str:
    return ", ".join("none" if p is None else _show_one(p) for p in placements)


def _show_one(placement: Placement) -> str:
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else type(placement).__name__


def _check_parts(name: str, tensor: DTensor, placements: Sequence[Placement]) -> None:
    """A rank that has no channels would raise, and the others wait for it."""
    for mesh_dim, placement in enumerate(placements):
        if not isinstance(placement, Shard):
            continue
        size, parts = tensor.size(placement.dim), tensor.device_mesh.size(mesh_dim)
        if size and -(-size // -(-size // parts)) < parts:
            raise ValueError(
                f"conv2d_ext.{name}: dimension {placement.dim} of a DTensor of size "
                f"{tuple(tensor.shape)} is too small to be sharded over {parts} ranks"
            )


def _part(
    name: str, tensor: DTensor, wanted: Sequence[Placement], chosen: Sequence[_Rule]
) -> Tensor | None:
    """This rank's part of a tensor, as the rules want it."""
    placements = [_REPLICATED if placement.is_partial() else placement for placement in wanted]
    if name.startswith("conv2d"):  # batches may leave a rank without an image
        channels = [
            _REPLICATED if rule.name == "batch" else placement
            for rule, placement in zip(chosen, placements, strict=True)
        ]
        _check_parts(name, tensor, channels)
    if list(tensor.placements) != placements:
        tensor = tensor.detach().redistribute(placements=placements)
    for mesh_dim, placement in enumerate(wanted):
        if placement.is_partial() and tensor.device_mesh.get_local_rank(mesh_dim) != 0:
            return None
    return tensor.to_local()


def _as_meta(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _dispatch(name: str, func: Any, args: Sequence[Any]) -> DTensor:
    op = _OPS[name]
    tensors = list(args[: op.tensors]) + [None] * (op.tensors - len(args))
    given = [t for t in tensors if t is not None]
    if not all(isinstance(t, DTensor) for t in given):
        raise RuntimeError(
            f"conv2d_ext.{name}: got mixed torch.Tensor and DTensor: all tensors need to be "
            "DTensors"
        )
    mesh = given[0].device_mesh
    if any(t.device_mesh != mesh for t in given):
        raise RuntimeError(f"conv2d_ext.{name}: expected all DTensors on one mesh")
    # The whole result: its size and strides, or the error that the whole call has.
    whole = func(*(_as_meta(t) for t in tensors), *args[op.tensors :])
    rules = list(op.rules(tensors, args))
    chosen = [
        _choose(name, rules, [None if t is None else t.placements[i] for t in tensors])
        for i in range(mesh.ndim)
    ]
    local = [
        None if tensor is None else _part(name, tensor, [rule.inputs[i] for rule in chosen], chosen)
        for i, tensor in enumerate(tensors)
    ]
    result = func(*op.localize(local, [*local, *args[op.tensors :]]))
    return DTensor.from_local(
        result,
        mesh,
        [rule.output for rule in chosen],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def register() -> None:
    """Makes the ops known to DTensor."""
    for name in _OPS:

        def rule(
            _cls: type,
            func: Any,
            _types: Sequence[type],
            args: Sequence[Any] = (),
            kwargs: dict[str, Any] | None = None,
            name: str = name,
        ) -> DTensor:
            return _dispatch(name, func, [*args, *(kwargs or {}).values()])

        torch.library.register_torch_dispatch(f"conv2d_ext::{name}", DTensor, rule)
