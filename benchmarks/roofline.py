"""What the machine can do at most: its FMA peak and its memory bandwidth, both measured.

The bound of a case is the lower of the peak and of bandwidth times arithmetic intensity, the FLOPs
for each byte that has to move at least once. What the two words mean here:

* The peak is the rate of a loop of independent fused multiply-adds on registers, in vectors of the
  instruction set this library uses, on as many threads as the case. No kernel that computes its
  products one by one in that instruction set is faster. Where the library multiplies bfloat16 in
  AMX tiles its peak is that of a loop of such multiplications. Else bfloat16 and float16 are held
  against float32's, in which they are computed unless the CPU has instructions of their own.
* The bandwidth is that of c = a + b on arrays which together have the case's size, so a case that
  fits a cache is held against that cache: its operands stay there from one call to the next.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import math
import mmap
import os
import platform
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.machine import cpu_flags
from conv2d_ext import build_config

_CHAINS = 12  # enough to fill two FMA units of latency 4; with 2 operands they fit 16 registers
_UNROLLED = 4
_ITERATIONS = 200_000  # about a millisecond
_TILES_UNROLLED = 4
_TILE_ITERATIONS = 12_500  # as long
_FOOTPRINTS = [2**exponent for exponent in range(18, 29, 2)]


def fma_loop_code(vector_bytes: int, element_bytes: int) -> bytes:
    """x86-64 code of void loop(int64 iterations, const T operands[2]), T float or double.

    Each iteration does _UNROLLED * _CHAINS FMAs on whole vectors: acc[i] += operand0 * operand1.
    """
    double = element_bytes == 8
    wide = vector_bytes == 64
    operand0, operand1 = 14, 15

    def vector_instruction(
        opcode: int, register: int, source: int, modrm: int, rm_high: int
    ) -> bytes:
        """66.0F38 `opcode` register, source, r/m."""
        inverted = ~(register >> 3) & 1, ~rm_high & 1
        if wide:  # EVEX.512; its W bit is 1 for doubles
            bits = inverted[0] << 7 | 1 << 6 | inverted[1] << 5 | 1 << 4 | 0b010
            return bytes(
                [0x62, bits, double << 7 | (~source & 15) << 3 | 0b101, 0x48, opcode, modrm]
            )
        bits = inverted[0] << 7 | 1 << 6 | inverted[1] << 5 | 0b00010
        # The broadcasts are W0 for either type.
        w = double and opcode == 0xB8
        return bytes([0xC4, bits, w << 7 | (~source & 15) << 3 | 0b101, opcode, modrm])

    def broadcast(register: int) -> bytes:  # vbroadcastss or vbroadcastsd register, [rsi]
        opcode = 0x19 if double else 0x18
        return vector_instruction(opcode, register, 0, (register & 7) << 3 | 0b110, 0)

    def multiply_add(register: int) -> bytes:  # vfmadd231ps or pd register, operand0, operand1
        modrm = 0b11 << 6 | (register & 7) << 3 | operand1 & 7
        return vector_instruction(0xB8, register, operand0, modrm, operand1 >> 3)

    def zero(register: int) -> bytes:  # vxorps register, register, register; clears the upper part
        inverted = ~(register >> 3) & 1
        modrm = 0b11 << 6 | (register & 7) << 3 | register & 7
        bits = inverted << 7 | 1 << 6 | inverted << 5 | 0b00001
        return bytes([0xC4, bits, (~register & 15) << 3, 0x57, modrm])

    code = broadcast(operand0)
    code += b"\x48\x83\xc6" + bytes([element_bytes])  # add rsi, element_bytes
    code += broadcast(operand1)
    code += b"".join(zero(register) for register in range(_CHAINS))
    loop = b"".join(multiply_add(register) for register in range(_CHAINS)) * _UNROLLED
    loop += b"\x48\xff\xcf"  # dec rdi
    code += loop + b"\x0f\x85" + struct.pack("<i", -len(loop) - 6)  # jnz, back to its first byte
    return code + b"\xc5\xf8\x77\xc3"  # vzeroupper, ret


def tile_loop_code() -> bytes:
    """x86-64 code of void loop(int64 iterations, const Configuration* tiles).

    Each iteration multiplies _TILES_UNROLLED times four pairs of AMX tiles of bfloat16: tiles 0 to
    3 += (4 or 5) * (6 or 7), as a kernel of 32 x 32 sums does.
    """

    def tile_instruction(prefix: int, opcode: int, modrm: int, second: int = 0) -> bytes:
        """VEX.128.`prefix`.0F38.W0 `opcode`; second: the register that VEX.vvvv names."""
        return bytes([0xC4, 0xE2, (~second & 15) << 3 | prefix, opcode, modrm])

    none, f3, f2 = 0b00, 0b10, 0b11
    code = tile_instruction(none, 0x49, 0x06)  # ldtilecfg [rsi]
    code += b"".join(tile_instruction(f2, 0x49, 0xC0 | tile << 3) for tile in range(8))  # tilezero
    loop = _TILES_UNROLLED * b"".join(
        tile_instruction(f3, 0x5C, 0xC0 | d << 3 | 4 + d // 2, 6 + d % 2)
        for d in range(4)  # tdpbf16ps
    )
    loop += b"\x48\xff\xcf"  # dec rdi
    code += loop + b"\x0f\x85" + struct.pack("<i", -len(loop) - 6)  # jnz, back to its first byte
    return code + tile_instruction(none, 0x49, 0xC0) + b"\xc3"  # tilerelease, ret


class FmaLoop:
    """Runs of a fixed number of FMAs on one thread, as long as nothing disturbs it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.method, self.flops, self.run = (
            _tile_code() if dtype is torch.bfloat16 else _machine_code(dtype)
        ) or _matrix_product(dtype)

    def seconds(self, threads: int, runs: int = 1) -> float:
        """The shortest of `runs` runs on each of so many threads at once."""
        return min(_at_once(self.run, threads) for _ in range(runs))

    def peak(self, threads: int) -> float:
        """FLOP/s: the best of a quarter of a second."""
        best, end = math.inf, time.perf_counter() + 0.25
        while time.perf_counter() < end:
            best = min(best, self.seconds(threads))
        return threads * self.flops / best


def _machine_code(dtype: torch.dtype) -> tuple[str, int, Callable[[], None]] | None:
    if platform.machine() not in ("x86_64", "AMD64") or not {"avx2", "fma"} <= cpu_flags():
        return None
    # What the library may use is what it is held against.
    wide = build_config()["isa"].startswith(("avx512", "amx"))
    vector_bytes, element_bytes = (64 if wide else 32), dtype.itemsize
    operands = struct.pack("2d" if element_bytes == 8 else "2f", 0.5, 0.25)
    run = _loaded(fma_loop_code(vector_bytes, element_bytes), _ITERATIONS, operands)
    if run is None:
        return None
    lanes = vector_bytes // element_bytes
    flops = 2 * _ITERATIONS * _UNROLLED * _CHAINS * lanes
    return f"FMA loop on registers, {8 * vector_bytes}-bit vectors", flops, run


def _tile_code() -> tuple[str, int, Callable[[], None]] | None:
    # The library has asked the system for the tiles.
    if build_config()["isa"] != "amx":
        return None
    # Palette 1; eight tiles of 16 rows of 64 bytes.
    tiles = struct.pack("<2B14x16H16B", 1, 0, *[64] * 8, *[0] * 8, *[16] * 8, *[0] * 8)
    run = _loaded(tile_loop_code(), _TILE_ITERATIONS, tiles)
    if run is None:
        return None
    flops = 2 * _TILE_ITERATIONS * _TILES_UNROLLED * 4 * 16 * 16 * 32
    return "TDPBF16PS loop on AMX tiles", flops, run


def _loaded(code: bytes, iterations: int, operands: bytes) -> Callable[[], None] | None:
    """Machine code as a function, or None where the system allows none."""
    try:
        memory = mmap.mmap(-1, len(code), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # a hardened system
        return None
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_char_p)(address)

    def run() -> None:  # without the GIL: ctypes releases it
        function(iterations, operands)

    run.memory = memory  # must live as long as the function
    return run


def _matrix_product(dtype: torch.dtype) -> tuple[str, int, Callable[[], None]]:
    """A lower bound of the peak, for CPUs the machine code is not for."""
    size = 256
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)

    def run() -> None:
        torch.mm(a, b)

    return f"torch.mm, {size} x {size} (a lower bound of the peak)", 2 * size**3, run


@functools.cache
def one_cpu_of_each_core() -> list[int]:
    """Those that this process may use; none where the system doesn't bind threads to CPUs."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    of_core: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            core = siblings.read_text(encoding="ascii")
        except OSError:
            core = str(cpu)
        of_core.setdefault(core, cpu)
    return list(of_core.values())


def _at_once(run: Callable[[], None], threads: int) -> float:
    """From the first start to the last end, each thread on a core of its own: a new one begins on
    its parent's, and may be done before the system moves it."""
    if threads == 1:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    barrier = threading.Barrier(threads)
    times: list[tuple[float, float]] = []
    cpus = one_cpu_of_each_core()

    def work(number: int) -> None:
        if cpus:
            os.sched_setaffinity(0, {cpus[number % len(cpus)]})  # of this thread
        barrier.wait()
        start = time.perf_counter()
        run()
        times.append((start, time.perf_counter()))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(end for _, end in times) - min(start for start, _ in times)


def stream(footprint: int) -> tuple[Callable[[], object], int]:
    """c = a + b on arrays of so many bytes in all, and the bytes it moves."""
    a, b, c = (torch.ones(footprint // 12) for _ in range(3))
    return lambda: torch.add(a, b, out=c), 12 * c.numel()


def _bandwidth(footprint: int) -> float:
    call, size = stream(footprint)
    call()
    best, end = math.inf, time.perf_counter() + 0.06
    while time.perf_counter() < end or best is math.inf:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return size / best


class Roofline:
    """The peaks and bandwidths of this machine for some numbers of threads."""

    def __init__(self, threads: list[int], dtypes: list[torch.dtype]) -> None:
        loops = {_computed_in(dtype): FmaLoop(_computed_in(dtype)) for dtype in dtypes}
        self.methods = {_name(dtype): loop.method for dtype, loop in loops.items()}
        self.peaks: dict[int, dict[str, float]] = {}
        self.bandwidths: dict[int, list[float]] = {}
        for count in threads:
            torch.set_num_threads(count)
            self.peaks[count] = {_name(dtype): loop.peak(count) for dtype, loop in loops.items()}
            measured = [_bandwidth(footprint) for footprint in _FOOTPRINTS]
            # Small arrays are dominated by the call itself; less data is never slower to move.
            self.bandwidths[count] = [max(measured[i:]) for i in range(len(measured))]

    def bandwidth(self, size: int, threads: int) -> float:
        """Bytes/s for data of so many bytes."""
        rates = self.bandwidths[threads]
        if size <= _FOOTPRINTS[0]:
            return rates[0]
        if size >= _FOOTPRINTS[-1]:
            return rates[-1]
        right = bisect.bisect(_FOOTPRINTS, size)
        low, high = _FOOTPRINTS[right - 1], _FOOTPRINTS[right]
        share = math.log(size / low) / math.log(high / low)
        return rates[right - 1] ** (1 - share) * rates[right] ** share

    def bound(
        self, flops: int, size: int, footprint: int, dtype: torch.dtype, threads: int
    ) -> float:
        """FLOP/s that peak and bandwidth allow; size: bytes to move, footprint: of all operands."""
        peak = self.peaks[threads][_name(_computed_in(dtype))]
        return min(peak, self.bandwidth(footprint, threads) * flops / size)

    def describe(self) -> dict[str, object]:
        return {
            "peak_method": self.methods,
            "peak_flops_per_s": {str(count): peaks for count, peaks in self.peaks.items()},
            "bandwidth_method": "c = a + b, float32, best call",
            "bandwidth_footprint_bytes": _FOOTPRINTS,
            "bandwidth_bytes_per_s": {str(n): rates for n, rates in self.bandwidths.items()},
        }


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    tiles = dtype is torch.bfloat16 and build_config()["isa"] == "amx"
    return dtype if dtype is torch.float64 or tiles else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
