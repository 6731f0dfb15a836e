"""The tensors of a model's output by name, and one example's part of what a batch gave.

A tensor of the batch holds the example where comparing shapes with those of the example alone says
so: one dimension is `batch` times as large. If that dimension folds others into it, as (batch *
heads, ...) or (pixels * batch, ...) do, its place among them is found by the values: the example's
are nearly those it has alone, to a few roundings, and another example's aren't.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from conv2d_ext._certify.bits import digest, is_comparable, sample_positions, sample_values

# Of the largest value: nearer than this is the same example, rounded otherwise.
_NEAR = 0.05


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the batch is: dimension `dim`, of size outer * batch * inner. dim -1: nowhere, the
    tensor has no batch. `alone_lacks_dim`: alone, the example's tensor has one dimension less."""

    dim: int
    outer: int = 1
    inner: int = 1
    alone_lacks_dim: bool = False


WHOLE = Layout(-1)


@dataclasses.dataclass(frozen=True)
class Print:
    """What is kept of one tensor: its bits' digest, and a few values to recognise it by."""

    shape: tuple[int, ...]
    is_floating: bool
    digest: str
    sample: Tensor | None = None
    layout: Layout = WHOLE


def print_of(tensor: Tensor, layout: Layout = WHOLE) -> Print:
    positions = sample_positions(tensor.numel())
    sample = sample_values(_pick(tensor, positions, WHOLE, 1, 0, tuple(tensor.shape)))
    floating = tensor.is_floating_point() or tensor.is_complex()
    return Print(tuple(tensor.shape), floating, digest(tensor), sample, layout)


def example_print(tensor: Tensor, alone: Print, batch: int, place: int) -> Print | None:
    """The print of the example's part of `tensor`, from a batch that has it at `place`; `alone` is
    that of the example by itself. None where the part can't be told."""
    found = find_example(tensor, alone, batch, place)
    if found is None:
        return None
    layout, part = found
    return print_of(part, layout)


def find_example(
    tensor: Tensor, alone: Print, batch: int, place: int
) -> tuple[Layout, Tensor] | None:
    """(where the batch is, the example's part) or None where it can't be told."""
    layouts = possible_layouts(tuple(tensor.shape), alone.shape, batch)
    if len(layouts) <= 1 or alone.sample is None:
        return (layouts[0], _part(tensor, layouts[0], batch, place)) if layouts else None
    positions = sample_positions(_numel(alone.shape))
    scale = float(alone.sample.abs().max()) if alone.sample.numel() else 0.0
    distances = []
    for layout in layouts:
        values = sample_values(_pick(tensor, positions, layout, batch, place, alone.shape))
        distance = float((values - alone.sample).abs().max()) if values.numel() else 0.0
        distances.append(distance / scale if scale else distance)
    nearest = min(distances)
    if not nearest <= _NEAR:
        return None
    # Of layouts that the sample can't tell apart the one whose bits are equal.
    candidates = [
        layout for layout, d in zip(layouts, distances, strict=True) if d <= 2 * nearest + 1e-12
    ]
    parts = [(layout, _part(tensor, layout, batch, place)) for layout in candidates]
    for found in parts[1:] if len(parts) > 1 else []:
        if digest(found[1]) == alone.digest:
            return found
    return parts[0]


def possible_layouts(
    shape: tuple[int, ...], alone: tuple[int, ...], batch: int
) -> tuple[Layout, ...]:
    """Where a tensor of `shape` may hold a batch whose examples alone have the shape `alone`."""
    if shape == alone:
        return (WHOLE,)
    if len(shape) == len(alone) + 1:
        # Alone, a dimension of one was dropped: squeeze().
        dims = [d for d in range(len(shape)) if shape[d] == batch]
        dims = [d for d in dims if shape[:d] + shape[d + 1 :] == alone]
        return tuple(Layout(d, alone_lacks_dim=True) for d in dims[:1])
    if len(shape) != len(alone):
        return ()
    changed = [d for d in range(len(shape)) if shape[d] != alone[d]]
    if len(changed) != 1 or shape[changed[0]] != batch * alone[changed[0]]:
        return ()
    size = alone[changed[0]]
    inner = [n for n in range(1, size + 1) if size % n == 0]
    # The batch outermost first: that is where most models fold it.
    return tuple(Layout(changed[0], size // n, n) for n in sorted(inner, reverse=True))


def _part(tensor: Tensor, layout: Layout, batch: int, place: int) -> Tensor:
    if layout.dim < 0:
        return tensor
    if layout.alone_lacks_dim:
        return tensor.select(layout.dim, place)
    folded = tensor.unflatten(layout.dim, (layout.outer, batch, layout.inner))
    return folded.select(layout.dim + 1, place).flatten(layout.dim, layout.dim + 1)


def _pick(
    tensor: Tensor,
    positions: Tensor,
    layout: Layout,
    batch: int,
    place: int,
    alone: tuple[int, ...],
) -> Tensor:
    """The values at `positions` of the example's part flattened, without forming that part."""
    if not alone:
        return _part(tensor, layout, batch, place).reshape(1)
    if not positions.numel():
        return tensor.new_empty(0)
    indices = list(torch.unravel_index(positions, alone))
    if layout.alone_lacks_dim:
        indices.insert(layout.dim, torch.full_like(positions, place))
    elif layout.dim >= 0:
        index = indices[layout.dim]
        outer = index.div(layout.inner, rounding_mode="floor")
        indices[layout.dim] = (outer * batch + place) * layout.inner + index % layout.inner
    return tensor[tuple(i.to(tensor.device) for i in indices)]


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


# ---- the leaves of nested outputs


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One tensor of an output, with its name in it; `value` is None where it can't be compared, and
    `kind` says what it is. A number counts as a tensor."""

    name: str
    value: Tensor | None
    kind: str = ""


def leaves_of(output: Any) -> list[Leaf]:
    """Every tensor and number in nested tuples, lists, dicts, dataclasses and nodes of pytree."""
    return list(_walk(output, ""))


def example_leaves(output: Any, alone: Any, batch: int, place: int) -> list[Leaf]:
    """Those of the example, where lists that grow with the batch hold its part: torchvision's
    detection models return one dict for each image. Other tensors are as the batch has them.
    `alone` is the output for the example by itself."""
    return list(_walk(output, "", (alone, batch, place)))


def _walk(value: Any, name: str, example: tuple[Any, int, int] | None = None) -> Iterator[Leaf]:
    if isinstance(value, Tensor):
        comparable = is_comparable(value)
        yield Leaf(name, value if comparable else None, "" if comparable else _kind(value))
    elif isinstance(value, (bool, int, float, complex)) and abs(value) < 2**63:
        yield Leaf(name, torch.tensor(value, dtype=_number_dtype(value)))
    elif value is None or isinstance(value, (str, bytes)):
        return
    else:
        children = _children(value)
        if children is None:
            yield Leaf(name, None, type(value).__qualname__)
            return
        alone_children: dict[str, Any] = {}
        if example:
            alone, batch, place = example
            alone_children = dict(_children(alone) or [])
            grown = len(children) == batch * len(alone_children) != len(alone_children)
            if isinstance(value, (list, tuple)) and grown:
                size = len(alone_children)
                part = children[place * size : (place + 1) * size]
                children = [(f"[{i}]", child) for i, (_, child) in enumerate(part)]
        for key, child in children:
            inner = (alone_children.get(key), batch, place) if example else None
            yield from _walk(child, name + key, inner)


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """The entries of a container, each with what it adds to the name; None if it is none."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{key}", getattr(value, key)) for key in value._fields]
    if isinstance(value, (list, tuple)):
        return [(f"[{i}]", child) for i, child in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return [(f".{f.name}", getattr(value, f.name, None)) for f in fields]
    nodes, spec = _pytree.tree_flatten(value)
    if spec.is_leaf():
        return None
    return [(f"[{i}]", child) for i, child in enumerate(nodes)]


def _number_dtype(value: complex) -> torch.dtype:
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int64
    return torch.float64 if isinstance(value, float) else torch.complex128


def _kind(tensor: Tensor) -> str:
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.device.type == "meta":
        return "a tensor without data"
    return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
