"""The tables of GEMM kernels (csrc/cuda/kernels.h), read from the built module itself: they are what
the planner sees."""

from __future__ import annotations

import ctypes
import dataclasses
import re

from sass import demangle, run


class _TableEntry(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        *((name, ctypes.c_int) for name in (
            "kind", "tile_m", "tile_x", "tile_k", "threads", "ctas_per_sm", "chain_tiles",
            "shared_one_chain", "shared_several_chains",
        )),
        ("launch_conv", ctypes.c_void_p),
        ("launch_weight", ctypes.c_void_p),
    )  # fmt: skip


class _Table(ctypes.Structure):
    _fields_ = (("kernels", ctypes.POINTER(_TableEntry)), ("count", ctypes.c_int))


@dataclasses.dataclass(frozen=True)
class TableEntry:
    name: str
    threads: int
    ctas_per_sm: int
    shared_one_chain: int
    shared_several_chains: int
    launch: str  # the demangled name of its function


def tables(module: str) -> list[TableEntry]:
    symbols = {}
    for line in run("nm", "--defined-only", module).splitlines():
        address, _, name = line.split(maxsplit=2)
        symbols[name] = int(address, 16)
    by_address = {address: name for name, address in symbols.items() if name.startswith("_ZN")}
    init = next(name for name in symbols if name.startswith("PyInit_"))
    library = ctypes.CDLL(module)
    base = ctypes.cast(library[init], ctypes.c_void_p).value - symbols[init]
    found = []
    for name, address in sorted(symbols.items()):
        if re.fullmatch(r"conv2d_ext::cuda::gemm_table_\w+\(\)", demangle(name)):
            table = ctypes.CFUNCTYPE(_Table)(base + address)()
            for entry in table.kernels[: table.count]:
                launch = by_address[(entry.launch_conv or entry.launch_weight) - base]
                found.append(
                    TableEntry(
                        entry.name.decode(),
                        entry.threads,
                        entry.ctas_per_sm,
                        entry.shared_one_chain,
                        entry.shared_several_chains,
                        demangle(launch),
                    )
                )
    return found
