"""Bit patterns of tensors: digests, and how far two patterns lie apart.

Two tensors are equal where dtype, shape and every bit are: -0 is not +0. Of a NaN only that it is
one counts. Strides and memory formats don't.
"""

from __future__ import annotations

import ctypes
import hashlib

import torch
from torch import Tensor

from conv2d_ext._certify.result import Difference

_SAMPLE = 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_comparable(tensor: Tensor) -> bool:
    """Whether its values lie in memory one by one: not sparse, quantized, nested or on meta."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.device.type != "meta"
    )


def digest(tensor: Tensor) -> str:
    """SHA-256 of dtype, shape and bit patterns, in hexadecimal. Any strides, any device."""
    tensor = _plain(tensor)
    state = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    size = tensor.numel() * tensor.element_size()
    if size:
        state.update((ctypes.c_ubyte * size).from_address(tensor.data_ptr()))
    return state.hexdigest()


def _plain(tensor: Tensor) -> Tensor:
    """The same values, contiguous on the CPU, every NaN the same one."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    if tensor.is_complex():
        # A complex number is a NaN by parts: each part has its own bits.
        return torch.view_as_complex(_plain(torch.view_as_real(tensor)).contiguous())
    if tensor.is_floating_point():
        is_nan = (tensor.float() if tensor.element_size() == 1 else tensor).isnan()
        if is_nan.any():
            integers = tensor.contiguous().view(_INTEGERS[tensor.element_size()])
            one_nan = torch.full((1,), torch.nan).to(tensor.dtype).view(integers.dtype)
            tensor = torch.where(is_nan, one_nan, integers).view(tensor.dtype)
    return tensor.contiguous()


def sample_positions(numel: int) -> Tensor:
    """At most 64 positions in a flat tensor, spread so that no layout falls in step with them."""
    if numel <= _SAMPLE:
        return torch.arange(numel)
    return (torch.arange(_SAMPLE) * 2654435761 + 12345) % numel


def sample_values(values: Tensor) -> Tensor:
    """(n,) of any dtype -> finite float64 on the CPU, (n,) or (n, 2) for complex ones."""
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.detach().cpu().double().nan_to_num(nan=1e30, posinf=2e30, neginf=-2e30)


def difference(expected: Tensor, actual: Tensor) -> Difference:
    """How far apart two tensors of one shape and dtype are."""
    expected, actual = _plain(expected).flatten(), _plain(actual).flatten()
    if expected.is_complex():
        expected, actual = (torch.view_as_real(t).flatten() for t in (expected, actual))
    if not expected.is_floating_point():
        distances = (expected.double() - actual.double()).abs()
        differing = expected != actual
        largest = float(distances.max()) if differing.any() else 0.0
        return Difference(expected.numel(), int(differing.sum()), largest, None, 0)
    integers = [t.view(_INTEGERS[t.element_size()]) for t in (expected, actual)]
    differing = integers[0] != integers[1]
    finite = expected.double().isfinite() & actual.double().isfinite()
    both = differing & finite
    not_finite = int((differing & ~finite).sum())
    if not both.any():
        return Difference(expected.numel(), int(differing.sum()), 0.0, 0, not_finite)
    largest = float((expected[both].double() - actual[both].double()).abs().max())
    ulp = _largest_ulp(integers[0][both], integers[1][both])
    return Difference(expected.numel(), int(differing.sum()), largest, ulp, not_finite)


def _largest_ulp(expected: Tensor, actual: Tensor) -> int:
    """Of floats given as integers: the most steps from one representable number to the next, -0
    and +0 counted as neighbours."""
    ordered = []
    for integers in (expected, actual):
        largest = torch.iinfo(integers.dtype).max
        bits = integers.to(torch.int64)
        ordered.append(torch.where(bits < 0, ~(bits & largest), bits))
    first, second = ordered
    # Numbers of different signs: their distance may not fit 64 bits, so Python adds it up.
    same_sign = (first < 0) == (second < 0)
    steps = torch.where(same_sign, first - second, 0).abs()
    most = int(steps.max())
    if bool(same_sign.all()):
        return most
    across = ~same_sign
    # The largest pair by floating point, then exactly.
    rough = (first[across].double() - second[across].double()).abs().argmax()
    return max(most, abs(int(first[across][rough]) - int(second[across][rough])))
