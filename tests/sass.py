"""Reads the CUDA code of a built module: instructions, loops, registers, names.

The disassembler is NVIDIA's, of the CUDA toolkit or of triton, which torch for Linux brings along.
Loops are those of the control flow graph, so it doesn't matter in which order their blocks lie.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:(@\S+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_FUNCTION = re.compile(r"\.text\.([^\s:]+):$")
_FAT_ARCH = re.compile(r"arch = (sm_\w+)")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    guard: str  # such as '@!P0', or ''
    opcode: str
    operands: str
    labels: tuple[str, ...] = ()  # that stand before it

    @property
    def text(self) -> str:
        return f"{self.guard} {self.opcode} {self.operands}".strip()

    @property
    def names(self) -> str | None:
        """The label that a branch or call names."""
        match = _TARGET.search(self.operands) if self.opcode.startswith(("BRA", "CALL")) else None
        return match[1] if match else None

    @property
    def falls_through(self) -> bool:
        if self.guard not in ("", "@PT"):
            return True
        if self.opcode.startswith("BRA"):
            # A predicate may also be the first of two operands, and .DIV, .CONV ask the warp.
            return "," in self.operands or self.opcode not in ("BRA", "BRA.U")
        return self.opcode.partition(".")[0] not in ("EXIT", "RET", "JMP", "BRX", "JMX", "KILL")

    @property
    def is_call(self) -> bool:
        return self.opcode.startswith("CALL")


def parse(disassembly: Iterable[str]) -> Iterator[tuple[str, list[Instruction]]]:
    """The functions in nvdisasm's output, as their mangled names."""
    name, code, labels = None, [], []
    for line in disassembly:
        if match := _INSTRUCTION.match(line):
            code.append(Instruction(match[1] or "", match[2], match[3], tuple(labels)))
            if labels:
                labels = []
        elif match := _FUNCTION.match(line):
            if name is not None:
                yield name, code
            name, code, labels = match[1], [], []
        elif match := _LABEL.match(line):
            labels.append(match[1])
    if name is not None:
        yield name, code


class Function:
    """The control flow graph: blocks by number, sets of them as bit masks."""

    def __init__(self, code: list[Instruction]):
        self.code = code
        first = [0]
        for i, instruction in enumerate(code):
            if i and (instruction.labels or _ends_block(code[i - 1])):
                first.append(i)
        self._ranges = [range(a, b) for a, b in zip(first, [*first[1:], len(code)], strict=True)]
        self._by_label = {
            label: b for b, r in enumerate(self._ranges) for label in code[r[0]].labels
        }
        self._successors = [self._after(b) for b in range(len(self._ranges))]
        self._predecessors: list[list[int]] = [[] for _ in self._ranges]
        for b, after in enumerate(self._successors):
            for s in after:
                self._predecessors[s].append(b)

    def loops(self) -> list[list[Instruction]]:
        """The loops' bodies, each with those of the loops inside it."""
        dominators = self._dominators()
        bodies: dict[int, set[int]] = {}
        for tail, after in enumerate(self._successors):
            for head in after:
                if dominators[tail] >> head & 1:
                    body = bodies.setdefault(head, {head})
                    todo = [tail]
                    while todo:
                        block = todo.pop()
                        if block not in body:
                            body.add(block)
                            todo += self._predecessors[block]
        return [
            [self.code[i] for b in sorted(body) for i in self._ranges[b]]
            for body in bodies.values()
        ]

    def calls_back(self, call: Instruction) -> bool:
        """Whether what is called returns. For sm_80 the compiler also leaves loops by a call, into
        code that ends the kernel."""
        todo, seen = [self._by_label.get(call.names or "")], set()
        while todo:
            block = todo.pop()
            if block is None:  # another function
                return True
            if block in seen:
                continue
            seen.add(block)
            last = self._last(block)
            if last.opcode.startswith("RET"):
                return True
            if last.names is not None and not last.is_call:
                todo.append(self._by_label[last.names])
            if last.falls_through and block + 1 < len(self._ranges):
                todo.append(block + 1)
        return False

    def _last(self, block: int) -> Instruction:
        return self.code[self._ranges[block][-1]]

    def _after(self, block: int) -> list[int]:
        last = self._last(block)
        after = []
        if last.opcode.startswith(("BRX", "JMP", "JMX")):
            raise ValueError(f"a jump that can't be followed: {last.text}")
        if last.names is not None and not (last.is_call and self.calls_back(last)):
            after.append(self._by_label[last.names])
        if last.falls_through and block + 1 < len(self._ranges):
            after.append(block + 1)
        return after

    def _dominators(self) -> list[int]:
        """Of each block, the blocks that every way to it passes; 0 where there is no way."""
        order = self._reverse_postorder()
        found = [0] * len(self._ranges)
        everything = (1 << len(self._ranges)) - 1
        for b in order:
            found[b] = everything
        found[0] = 1
        changed = True
        while changed:
            changed = False
            for b in order[1:]:
                common = everything
                for p in self._predecessors[b]:
                    if found[p]:
                        common &= found[p]
                if common | 1 << b != found[b]:
                    found[b] = common | 1 << b
                    changed = True
        return found

    def _reverse_postorder(self) -> list[int]:
        seen, order = {0}, []
        stack = [(0, iter(self._successors[0]))]
        while stack:
            block, rest = stack[-1]
            following = next((s for s in rest if s not in seen), None)
            if following is None:
                order.append(block)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(self._successors[following])))
        return order[::-1]


def _ends_block(instruction: Instruction) -> bool:
    return instruction.names is not None or not instruction.falls_through


@dataclasses.dataclass(frozen=True)
class HotLoop:
    body: list[Instruction]
    inner: list[list[Instruction]]  # the loops inside it, in the order of the code
    calls: list[Instruction]  # of functions that return


def hot_loop(code: list[Instruction], counts: Callable[[Instruction], bool]) -> HotLoop | None:
    """The innermost loop with instructions that count, of several the one with most of them."""
    function = Function(code)
    loops = [(body, set(map(id, body))) for body in function.loops()]
    candidates = [(body, mine) for body, mine in loops if any(map(counts, body))]
    innermost = [
        (body, mine)
        for body, mine in candidates
        if not any(other < mine for _, other in candidates)
    ]
    if not innermost:
        return None
    body, mine = max(innermost, key=lambda pair: sum(map(counts, pair[0])))
    place = {id(instruction): i for i, instruction in enumerate(code)}
    inner = sorted((b for b, other in loops if other < mine), key=lambda b: place[id(b[0])])
    calls = [i for i in body if i.is_call and function.calls_back(i)]
    return HotLoop(body, inner, calls)


# ---- of a file


def find_tool(name: str) -> str | None:
    """cuobjdump or nvdisasm: of CUDA_HOME, of PATH, or of triton."""
    candidates = [shutil.which(name) or ""]
    if toolkit := os.environ.get("CUDA_HOME"):
        candidates.insert(0, os.path.join(toolkit, "bin", name))
    triton = importlib.util.find_spec("triton")
    for folder in (triton and triton.submodule_search_locations) or []:
        candidates.append(os.path.join(folder, "backends", "nvidia", "bin", name))
    return next((c for c in candidates if os.access(c, os.X_OK)), None)


def run(tool: str, *arguments: str | Path, cwd: str | Path | None = None) -> str:
    command = [find_tool(tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd).stdout


@dataclasses.dataclass(frozen=True)
class Resources:
    registers: int
    stack: int
    shared: int  # static
    local: int


def parse_resources(text: str) -> dict[tuple[str, str], Resources]:
    """Of cuobjdump --dump-resource-usage: by architecture and mangled name."""
    found = {}
    arch = name = ""
    for line in text.splitlines():
        if match := _FAT_ARCH.match(line):
            arch = match[1]
        elif line.startswith(" Function "):
            name = line.removeprefix(" Function ").rstrip(":")
        elif match := _RESOURCES.search(line):
            found[arch, name] = Resources(*map(int, match.groups()))
    return found


def resources(module: str) -> dict[tuple[str, str], Resources]:
    return parse_resources(run("cuobjdump", "--dump-resource-usage", module))


def each_function(module: str, read: Callable[[str, str, list[Instruction]], None]) -> None:
    """Calls read(architecture, mangled name, code) for every function; keeps none of them."""
    with tempfile.TemporaryDirectory() as folder:
        run("cuobjdump", "--extract-elf", "all", os.path.abspath(module), cwd=folder)
        # The long ones first.
        cubins = sorted(Path(folder).iterdir(), key=lambda path: -path.stat().st_size)

        def disassemble(cubin: Path) -> str:
            return run("nvdisasm", "--print-code", cubin)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for cubin, text in zip(cubins, pool.map(disassemble, cubins), strict=True):
                arch = cubin.suffixes[-2].removeprefix(".")
                for name, code in parse(text.splitlines()):
                    read(arch, name, code)


@functools.cache
def demangle(name: str) -> str:
    function = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"]
    function.restype = ctypes.c_void_p
    status = ctypes.c_int()
    address = function(name.encode(), None, None, ctypes.byref(status))
    if not address:
        return name
    try:
        return ctypes.string_at(address).decode()
    finally:
        libc = ctypes.CDLL(None)
        libc.free.argtypes = [ctypes.c_void_p]
        libc.free(address)
