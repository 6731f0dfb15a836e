"""The tables of GEMM kernels, read from the built library: they are what the planner sees."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from pathlib import Path

from sass import demangle, run

HEADER = Path(__file__).resolve().parent.parent / "csrc" / "cuda" / "kernels.h"


@dataclasses.dataclass(frozen=True)
class TableEntry:
    name: str
    numbers: dict[str, int]  # tile_m, threads, ctas_per_sm, stage_bytes, ...
    launch: str  # the demangled name of its function

    def __getitem__(self, field: str) -> int:
        return self.numbers[field]

    def shared_bytes(self, stages: int, *, several_chains: bool) -> int:
        """As GemmKernel has it."""
        ring, sums = stages * self["stage_bytes"], self["sums_bytes"]
        return self["table_bytes"] + (ring + sums if several_chains else max(ring, sums))


def _entry_type() -> tuple[type[ctypes.Structure], list[str]]:
    """GemmKernel, of whose numbers the header has the names and the order."""
    match = re.search(r"struct GemmKernel \{(.*?)\n\};", HEADER.read_text(), re.DOTALL)
    assert match
    body = re.sub(r"//.*", "", match[1]).partition("constexpr")[0]
    assert body.split(";")[0].strip() == "const char* name"
    numbers = []
    for names in re.findall(r"\b(?:int|GemmKind) ([\w, ]+);", body):
        numbers += [name.strip() for name in names.split(",")]
    assert re.findall(r"\(\*(\w+)\)", body) == ["launch_conv", "launch_weight"]

    class Entry(ctypes.Structure):
        _fields_ = (
            ("name", ctypes.c_char_p),
            *((name, ctypes.c_int) for name in numbers),
            ("launch_conv", ctypes.c_void_p),
            ("launch_weight", ctypes.c_void_p),
        )

    return Entry, numbers


def tables(module: str) -> list[TableEntry]:
    symbols = {}
    for line in run("nm", "--defined-only", module).splitlines():
        address, _, name = line.split(maxsplit=2)
        symbols[name] = int(address, 16)
    names = {address: name for name, address in symbols.items() if name.startswith("_ZN")}
    exported = "_ZN10conv2d_ext8numericsEv"
    library = ctypes.CDLL(module)
    base = (ctypes.cast(library[exported], ctypes.c_void_p).value or 0) - symbols[exported]
    entry_type, numbers = _entry_type()

    class Table(ctypes.Structure):
        _fields_ = (("kernels", ctypes.POINTER(entry_type)), ("count", ctypes.c_int))

    found = []
    for name, address in sorted(symbols.items()):
        if re.fullmatch(r"conv2d_ext::cuda::gemm_table_\w+\(\)", demangle(name)):
            table = ctypes.CFUNCTYPE(Table)(base + address)()
            for entry in table.kernels[: table.count]:
                launch = names[(entry.launch_conv or entry.launch_weight) - base]
                values = {field: getattr(entry, field) for field in numbers}
                found.append(TableEntry(entry.name.decode(), values, demangle(launch)))
    return found
