"""The shim's own kernels (shim_selftest.cpp), as functions of Python."""

from __future__ import annotations

import ctypes
import enum
import functools
import pathlib

import torch

from .build import HERE, build


class Order(enum.IntEnum):
    """In which order the CTAs of a grid, and the threads of a CTA, run."""

    FORWARD = 0
    REVERSE = 1
    SHUFFLED = 2


class Selftest:
    """Functions return the failure's text, "" for none."""

    def __init__(self, library: pathlib.Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("cases", "run", "banks", "mma", "matrices", "launch"):
            getattr(self._library, f"selftest_{name}").restype = ctypes.c_char_p

    def cases(self) -> list[str]:
        return self._library.selftest_cases().decode().split("\n")

    def run(
        self, name: str, order: Order, seed: int = 1, address: int | None = None
    ) -> tuple[str, list[float]]:
        """The failure and what the 64 threads stored. They read 0 to 63, or ``address``."""
        numbers = torch.arange(64, dtype=torch.float32)
        out = torch.full((64,), -1.0)
        error = self._library.selftest_run(
            name.encode(),
            int(order),
            ctypes.c_uint64(seed),
            ctypes.c_void_p(numbers.data_ptr() if address is None else address),
            ctypes.c_void_p(out.data_ptr()),
        )
        return error.decode(), out.tolist()

    def banks(self, pattern: str, stride: int, order: Order) -> tuple[int, int, int]:
        """(accesses, wavefronts, ideal) of one warp."""
        traffic = (ctypes.c_uint64 * 3)()
        error = self._library.selftest_banks(pattern.encode(), stride, int(order), traffic)
        assert not error, error
        return tuple(traffic)

    def mma(
        self, kind: int, order: Order, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor
    ) -> torch.Tensor:
        """d after the instruction; each [lane][register]. Kinds: tf32, float16, bfloat16."""
        d = d.clone()
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, b, d)]
        error = self._library.selftest_mma(kind, int(order), *pointers)
        assert not error, error
        return d

    def matrices(
        self, rows: torch.Tensor, order: torch.Tensor, *, transposed: bool = False
    ) -> torch.Tensor:
        """[lane][matrix] of load_matrix_x4, lane l naming row order[l] of [32][16 bytes]."""
        out = torch.zeros(32, 4, dtype=torch.int32)
        first, second, third = (ctypes.c_void_p(t.data_ptr()) for t in (rows, order, out))
        error = self._library.selftest_matrices(first, second, int(transposed), third)
        assert not error, error
        return out

    def convert(self, kind: str, bits: torch.Tensor) -> torch.Tensor:
        """int32 bits to int32 bits."""
        kinds = ("to tf32", "to float16", "to bfloat16", "from float16", "from bfloat16")
        out = torch.empty_like(bits)
        self._library.selftest_convert(
            kinds.index(kind),
            ctypes.c_int64(bits.numel()),
            ctypes.c_void_p(bits.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
        )
        return out

    def launch(
        self, ctas: int, grid_y: int, threads: int, shared_bytes: int, shared_limit: int = 0
    ) -> str:
        """shared_limit: the kernel's, set before and kept; 0 leaves it as it is."""
        sizes = (ctas, grid_y, threads, shared_bytes, shared_limit)
        return self._library.selftest_launch(*sizes).decode()


def build_selftest(*, sanitize: bool = False) -> pathlib.Path:
    return build("shim_selftest", [HERE / "shim_selftest.cpp"], sanitize=sanitize)


@functools.cache
def selftest() -> Selftest:
    return Selftest(build_selftest())
