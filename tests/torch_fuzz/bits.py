"""Bit patterns."""

from __future__ import annotations

import torch

from .cases import Violation


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, in logical order; every NaN as the same one."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg().contiguous()
    if not tensor.is_floating_point():
        return tensor
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.masked_fill(tensor.isnan(), torch.nan).view(kinds[tensor.element_size()])


def require_same_bits(name: str, ours: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        raise Violation(name, f"{what}: {describe(ours)} against {describe(expected)}")
    ours_bits, expected_bits = bits(ours), bits(expected)
    if torch.equal(ours_bits, expected_bits):
        return
    differ = ours_bits != expected_bits
    if ours.is_complex():
        differ = differ.any(-1)
    where = differ.nonzero()
    first = tuple(where[0].tolist())
    raise Violation(
        name,
        f"{what}: {len(where)} of {ours.numel()} elements differ, the first {first}: "
        f"{ours[first].item()!r} against {expected[first].item()!r}",
    )


def describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
