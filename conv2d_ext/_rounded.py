"""Graphs traced in the mode, in 16 bits: a result is what would be stored.

A compiler computes what it fuses in float32, and rounds to 16 bits what it stores. What it stores
follows from what it fuses, and that from sizes, so that another batch could give an element other
bits. So in such a graph a call of conv2d_ext::rounded follows each result in bfloat16 or float16
that a compiler may compute. Inductor rounds there, in registers. Other compilers store the result
and call this library.

The call names the type, too: in the place of a scatter of a number Inductor puts a tensor of
another one. There it follows results of every type.

Compilers trace graphs without calls in place. What writes in place is left alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import re
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor

from conv2d_ext import _C
from conv2d_ext._on_import import when_imported

# ---- which results

# What moves, converts, compares or selects elements. (What isn't named costs instructions.)
_EXACT = frozenset(
    """
    _low_memory_max_pool_with_offsets _to_copy _unsafe_index _unsafe_index_put _unsafe_view abs
    amax amin aminmax as_strided_scatter broadcast_in_dim cat ceil clamp clamp_max clamp_min clone
    constant_pad_nd convert_element_type copy copysign cummax cummin diagonal_scatter embedding
    empty empty_like empty_permuted empty_strided expand_copy fill flip floor fmax fmin fmod frac
    full full_like gather hardshrink hardtanh hardtanh_backward im2col index index_copy index_fill
    index_put index_select kthvalue lift_fresh_copy masked_fill masked_scatter masked_select max
    max_pool2d_with_indices max_pool3d_with_indices maximum median min minimum nan_to_num neg
    new_empty new_empty_strided new_full new_ones new_zeros ones ones_like permute_copy
    pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d reflection_pad3d relu repeat
    replication_pad1d replication_pad2d replication_pad3d roll round scalar_tensor scatter
    select_scatter sgn sign slice_scatter sort stack threshold threshold_backward topk tril triu
    trunc unfold unfold_copy view_copy where zeros zeros_like
    """.split()  # noqa: SIM905
)
# Overloads of these that compute.
_INEXACT = (("round", "decimals"), ("scatter", "reduce"), ("scatter", "value_reduce"))
# Arguments that say where elements come from or go to.
_PLACES = ("index", "indices")
_DTYPES = (torch.bfloat16, torch.float16)


def _has_16_bits(value: object) -> bool:
    return torch.is_tensor(value) and value.dtype in _DTYPES


def _is_number_of(dtype: torch.dtype, value: object) -> bool:
    """Whether a compiler that keeps a number as it is keeps what the dtype holds."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return False
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        return True
    try:
        if dtype is torch.float16:
            return bool(struct.unpack("e", struct.pack("e", float(value)))[0] == value)
        bits = struct.pack("<f", float(value))
        return bits[:2] == b"\0\0" and bool(struct.unpack("<f", bits)[0] == value)
    except OverflowError:
        return False


def _arguments(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Each argument that a call has, as its schema describes it and as it was given."""
    arguments = func._schema.arguments
    given = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
    return ((a, given[a.name]) for a in arguments if a.name in given)


def _is_converted(dtype: torch.dtype, argument: Any, value: object) -> bool:
    """Whether elements of a result of this dtype may come from an argument that doesn't hold them
    as the dtype does.
    """
    if argument.name in _PLACES:
        return False
    leaves = torch.utils._pytree.tree_leaves(value)
    dtypes = [leaf.dtype for leaf in leaves if torch.is_tensor(leaf)]
    if any(other not in (dtype, torch.bool) for other in dtypes):
        return True
    # Sizes and dimensions become no elements.
    is_number = re.search("number|float", str(argument.type)) is not None
    return is_number and not all(_is_number_of(dtype, leaf) for leaf in leaves)


def _may_be_unrounded(
    func: torch._ops.OpOverload, args: Any, kwargs: Any, dtype: torch.dtype
) -> bool:
    """Whether a compiler may know more of a call's result than its dtype holds."""
    if func.namespace == "conv2d_ext":
        return False
    if any(result.alias_info is not None for result in func._schema.returns):
        return False
    name = func._schema.name.partition("::")[2]
    if name not in _EXACT or (name, func._overloadname) in _INEXACT:
        return True
    return any(
        value if argument.name == "accumulate" else _is_converted(dtype, argument, value)
        for argument, value in _arguments(func, args, kwargs)
    )


def _may_be_retyped(func: torch._ops.OpOverload, dtype: torch.dtype) -> bool:
    """Whether Inductor may make another dtype's tensor of a call's result: it writes a selection
    between two numbers in the place of a scatter, a tensor of int64 or float32.
    """
    is_scatter = func is torch.ops.aten.scatter.value
    return is_scatter and not dtype.is_complex and dtype not in (torch.bool, torch.int64)


# ---- where they are recorded


class _State(threading.local):
    left_out = 0


_state = _State()


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """For functions that are compiled into a kernel that has no place for a call."""
    _state.left_out += 1
    try:
        yield
    finally:
        _state.left_out -= 1


def _is_rounding(mode: Any) -> bool:
    """Whether a graph is traced in the mode. Where a context lies inside of the function its
    backward is traced after that, into the same graph.
    """
    if _C.is_batch_invariant():
        mode.tracer.conv2d_ext_rounds = True
    # Graphs of torch.export from above autograd are traced once more.
    is_last = _state.left_out == 0 and not mode.pre_dispatch
    return is_last and getattr(mode.tracer, "conv2d_ext_rounds", False)


def round_results(results: Any) -> Any:
    """Of a call that does not come to the tracer by itself: an operator that takes functions. On
    the CPU Inductor always stores its results, and refuses what would be fused to it.
    """
    if not _C.is_batch_invariant():
        return results

    def rounded(result: Any) -> Any:
        if not _has_16_bits(result) or result.device.type == "cpu":
            return result
        return torch.ops.conv2d_ext.rounded(result, result.dtype)

    return torch.utils._pytree.tree_map(rounded, results)


def _is_recorded_as(func: torch._ops.OpOverload, result: torch.Tensor, mode: Any) -> bool:
    """Whether the graph has a result as that of this call. The parts of one that was taken apart
    have come here themselves.
    """
    slot = proxy_tensor.get_proxy_slot(result, mode.tracer, None)
    if slot is None:
        return False
    node = slot.proxy.node
    return func is (node.args[0] if node.target is operator.getitem else node).target


def _record_roundings() -> None:
    Mode = getattr(proxy_tensor, "ProxyTorchDispatchMode", None)
    # Private names: without them import goes on, and tests say so.
    if Mode is None or not hasattr(proxy_tensor, "get_proxy_slot"):
        return
    record = Mode.__torch_dispatch__

    @functools.wraps(record)
    def record_and_round(
        self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        op = torch.ops.conv2d_ext.rounded.default
        if func is op and args[0].dtype == args[1] and _is_recorded_as(op, args[0], self):
            return args[0]  # a graph that is traced once more
        results = record(self, func, types, args, kwargs)
        if not _is_rounding(self):
            return results

        def rounded(result: Any) -> Any:
            if not torch.is_tensor(result) or not _is_recorded_as(func, result, self):
                return result
            # Zeros without memory stay such: what is computed with them isn't recorded.
            is_unrounded = (
                _has_16_bits(result)
                and not result._is_zerotensor()
                and _may_be_unrounded(func, args, kwargs or {}, result.dtype)
            )
            if not is_unrounded and not _may_be_retyped(func, result.dtype):
                return result
            with self:
                return op(result, result.dtype)

        return torch.utils._pytree.tree_map(rounded, results)

    Mode.__torch_dispatch__ = record_and_round


# ---- how Inductor computes them


def _round_to_bfloat16(bits: Any, number: Callable[[int], Any], ops: Any) -> Any:
    """The bits of a float32 number that is no NaN, rounded to nearest, ties to even."""
    is_odd = ops.bitwise_and(ops.bitwise_right_shift(bits, number(16)), number(1))
    return ops.bitwise_and(ops.add(bits, ops.add(is_odd, number(0x7FFF))), number(-0x10000))


def _round_to_float16(bits: Any, number: Callable[[int], Any], ops: Any) -> Any:
    """The same. A number too small for float16's normal ones is rounded by an addition to one whose
    last bit counts as much as theirs.
    """
    sign = ops.bitwise_and(bits, number(-0x80000000))
    size = ops.bitwise_xor(bits, sign)
    is_odd = ops.bitwise_and(ops.bitwise_right_shift(size, number(13)), number(1))
    normal = ops.bitwise_and(ops.add(size, ops.add(is_odd, number(0xFFF))), number(-0x2000))
    half = ops.constant(0.5, torch.float32)
    small = ops.sub(ops.add(ops.to_dtype_bitcast(size, torch.float32, torch.int32), half), half)
    small = ops.to_dtype_bitcast(small, torch.int32, torch.float32)
    least_normal, largest, infinity = number(0x38800000), number(0x477FE000), number(0x7F800000)
    rounded = ops.where(ops.lt(size, least_normal), small, normal)
    return ops.bitwise_or(ops.where(ops.gt(rounded, largest), infinity, rounded), sign)


_ROUND = {torch.bfloat16: _round_to_bfloat16, torch.float16: _round_to_float16}


def lower_rounded() -> None:
    """Tells Inductor how to compute the op, by arithmetic that it can't leave out. It would call it
    otherwise.
    """
    lowering = importlib.import_module("torch._inductor.lowering")
    register = getattr(lowering, "register_lowering", None)
    if register is None:  # a private name
        return
    Pointwise = importlib.import_module("torch._inductor.ir").Pointwise
    ops = importlib.import_module("torch._inductor.virtualized").ops

    def number(value: int) -> Any:
        return ops.constant(value, torch.int32)

    @register(torch.ops.conv2d_ext.rounded.default, type_promotion_kind=None)  # type: ignore[misc]
    def rounded(input: Any, dtype: torch.dtype) -> Any:
        given = input.get_dtype()
        load = input.make_loader()
        round_bits = _ROUND.get(dtype)

        def element(index: Any) -> Any:
            if round_bits is None:
                return ops.to_dtype(load(index), dtype, src_dtype=given)
            value = ops.to_dtype(load(index), torch.float32, src_dtype=given)
            bits = ops.to_dtype_bitcast(value, torch.int32, torch.float32)
            stored = ops.to_dtype_bitcast(round_bits(bits, number, ops), torch.float32, torch.int32)
            stored = ops.where(ops.eq(value, value), stored, value)  # NaN
            return ops.to_dtype(stored, dtype, src_dtype=torch.float32)

        return Pointwise.create(
            device=input.get_device(), dtype=dtype, inner_fn=element, ranges=input.get_size()
        )


def allow_recomputation() -> None:
    """Lets a compiled backward compute the op once more, as what surrounds it, where AOTAutograd
    would keep its result.
    """
    partitioners = importlib.import_module("torch._functorch.partitioners")
    default = getattr(partitioners, "get_default_op_list", None)
    if default is None:  # a private name
        return

    @functools.wraps(default)
    def get_default_op_list() -> Any:
        op_types = default()
        for kind in ("recomputable_ops", "fusible_ops"):
            ops = getattr(op_types, kind, None)
            if hasattr(ops, "add"):
                ops.add(torch.ops.conv2d_ext.rounded)
        return op_types

    partitioners.get_default_op_list = get_default_op_list


def install() -> None:
    _record_roundings()
    when_imported("torch._inductor.lowering", lower_rounded)
    when_imported("torch._functorch.partitioners", allow_recomputation)
