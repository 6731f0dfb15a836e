"""Tensors whose values depend on no version of anything: integers hashed, then scaled exactly.

torch.randn draws other numbers where torch or the CPU is another; these follow from integer
arithmetic modulo 2^64 and from products with powers of two, which are exact everywhere.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

# Bits in the significand, the smallest exponent of a normal number, that of the smallest denormal
# one. bfloat16 has float32's range and float16's results are rounded from float32.
_FORMATS = {
    torch.float32: (24, -126, -149),
    torch.float64: (53, -1022, -1074),
    torch.bfloat16: (8, -126, -133),
    torch.float16: (11, -14, -24),
}
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}

# Sums of 16-bit types are kept in float32 and rounded at the end, so that ordinary values would
# hide the last 16 bits of every sum. Here a quarter of the values is one large number, of either
# sign, whose products often cancel, and the others are so small that what is left is rounding.
_LARGE_AND_SMALL = {torch.bfloat16: (0, -19), torch.float16: (4, -12)}

# "small": "ordinary" without the large numbers of 16-bit types.
KINDS = ("ordinary", "small", "tiny", "infinite")


def splitmix64(seed: int, count: int) -> np.ndarray:
    """The first ``count`` outputs of the generator of that name, uint64."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state += np.uint64(seed)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _ordinary(words: np.ndarray, dtype: torch.dtype, kind: str) -> np.ndarray:
    """Every bit of the significand drawn, magnitudes in [1/8, 2), half of them negative."""
    precision = _FORMATS[dtype][0]
    significand = (words >> np.uint64(65 - precision)) | np.uint64(1 << (precision - 1))
    exponent = -(words & np.uint64(3)).astype(np.int64) - (precision - 1)
    sign = np.where(words & np.uint64(4), -1.0, 1.0)
    if dtype not in _LARGE_AND_SMALL:
        return sign * np.ldexp(significand.astype(np.float64), exponent)
    large, small = _LARGE_AND_SMALL[dtype]
    values = np.ldexp(significand.astype(np.float64), small - (precision - 1))
    is_large = (words & np.uint64(3) == 0) & (kind != "small")
    return sign * np.where(is_large, 2.0**large, values)


def _floats(words: np.ndarray, dtype: torch.dtype, kind: str) -> np.ndarray:
    values = _ordinary(words, dtype, kind)
    choice = (words >> np.uint64(3)) & np.uint64(0xFF)
    if kind == "tiny":
        # Products underflow to zeros of either sign, to denormal numbers and to small normal ones.
        _, smallest, denormal = _FORMATS[dtype]
        exponent = np.where(choice < 120, smallest // 2 - 12 + (choice % 24).astype(np.int64), 0)
        values = np.sign(values) * np.ldexp(1.0, exponent)
        values = np.where(choice >= 128, np.sign(values) * math.ldexp(1.0, denormal), values)
        return np.where(choice >= 192, np.copysign(0.0, values), values)
    if kind == "infinite":
        values = np.where(choice == 0, np.copysign(np.inf, values), values)
        return np.where(choice == 1, np.nan, values)
    return values


def exact_tensor(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str = "ordinary"
) -> torch.Tensor:
    """Contiguous; the values follow from the name, the shape, the dtype and the kind alone.

    Integers take all values of their type, whatever the kind.
    """
    assert kind in KINDS
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    if dtype.is_complex:
        parts = exact_tensor(name, (*shape, 2), _REAL[dtype], kind)
        return torch.view_as_complex(parts)
    words = splitmix64(seed, math.prod(shape))
    if not dtype.is_floating_point:
        return torch.from_numpy(words.view(np.int64)).to(dtype).reshape(shape)
    values = torch.from_numpy(_floats(words, dtype, kind)).to(dtype)
    return values.reshape(shape)
