"""What a CUDA kernel's name says of its code, and what keeps the code from its speed.

The template arguments give a main loop's products and copies, so the checks follow the source.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from pathlib import Path

import sass
from sass import HotLoop, Instruction, Resources

ROOT = Path(__file__).resolve().parent.parent

REGISTERS = 65536  # of an SM
WARPS = 64  # of an SM

# The values of enum Load in csrc/cuda/gemm_loader.cuh.
OVER_X, OVER_K, VECTOR, GATHER, ROW_VECTOR = range(5)
LOAD_NAMES = ("over x", "over k", "vector", "gather", "row vector")
VECTORS = (VECTOR, ROW_VECTOR)
ELEMENT_BYTES = {"float": 4, "double": 8, "Complex<float>": 8, "Complex<double>": 16}

# The least share of multiplications among the instructions that a main loop executes, a little
# below what was measured. Of float32, by geometry and tile, where im2col is loaded over x, over k:
LEAST_FLOAT_SHARE = {
    ("ConvGeometry<8, 1>", "128x128"): (0.80, 0.75),
    ("ConvGeometry<8, 1>", "64x128"): (0.77, 0.69),
    ("ConvGeometry<8, 1>", "32x256"): (0.74, 0.60),
    ("ConvGeometry<8, 1>", "64x64"): (0.73, 0.65),
    ("ConvGeometry<1, 1>", "64x128"): (0.57, 0.64),
    ("ConvGeometry<1, 1>", "32x256"): (0.48, 0.58),
    ("WeightGeometry", "64x128"): (0.57, 0.64),
    ("WeightGeometry", "64x64"): (0.51, 0.57),
}
# Of the others. An instruction of the tensor cores does the work of 32 FMAs (tf32) or 64 (16 bits).
LEAST_SHARE = {
    ("FmaPolicy<double>", "copies"): 0.51,
    ("FmaPolicy<Complex<float>>", "copies"): 0.73,
    ("FmaPolicy<Complex<double>>", "copies"): 0.41,
    ("Tf32Policy", "copies"): 0.026,
    ("Mma16Policy", "copies"): 0.16,
    ("Mma16Policy", "gathers"): 0.0165,
}


# ---- what a kernel's name says of its code


@dataclasses.dataclass(frozen=True)
class Policy:
    """Of a main loop's step. `multiply`: the instruction; `multiplies`: how many a warp issues."""

    tile_k: int
    warp_m: int
    warp_x: int
    multiply: str
    multiplies: int
    matrix_loads: int  # LDSM
    element_bytes: int

    @staticmethod
    def named(name: str) -> Policy:
        # Tensor cores: blocks of 16 x 8 results, and of 8 (tf32) or 16 k.
        if match := re.fullmatch(r"Tf32Policy(?:<(\d+)>)?", name):
            rows = int(match[1] or 32)
            return Policy(16, rows, 64, "HMMA.1688.F32.TF32", rows // 16 * 8 * 2, 0, 4)
        if match := re.fullmatch(r"Mma16Policy<(Float16|BFloat16)(?:, (\d+))?>", name):
            rows = int(match[2] or 32)
            opcode = "HMMA.16816.F32" + (".BF16" if match[1] == "BFloat16" else "")
            return Policy(32, rows, 64, opcode, rows // 16 * 8 * 2, (rows // 16 + 4) * 2, 2)
        match = re.fullmatch(r"FmaPolicy<(.*?) ?, (\d+), (\d+)>", name)
        assert match, f"a policy that this test doesn't know: {name}"
        size = ELEMENT_BYTES[match[1]]
        v = 16 // size
        thread_m, thread_x = v * int(match[2]), v * int(match[3])
        fmas = 4 if match[1].startswith("Complex") else 1
        opcode = "DFMA" if "double" in match[1] else "FFMA"
        return Policy(
            16, 4 * thread_m, 8 * thread_x, opcode, 16 * thread_m * thread_x * fmas, 0, size
        )


@dataclasses.dataclass(frozen=True)
class Gemm:
    """An instantiation of gemm_kernel."""

    policy_name: str
    geometry: str
    warps_m: int
    warps_x: int
    stages: int
    min_ctas: int
    load_a: int
    load_b: int

    @staticmethod
    def named(name: str) -> Gemm | None:
        kernel, arguments = split_template(name)
        if kernel != "gemm_kernel":
            return None
        numbers = [int(a.replace("(Load)", "")) for a in arguments[2:]]
        return Gemm(arguments[0], arguments[1], *numbers)

    @property
    def policy(self) -> Policy:
        return Policy.named(self.policy_name)

    @property
    def threads(self) -> int:
        return self.warps_m * self.warps_x * 32

    @property
    def tile(self) -> tuple[int, int]:
        return self.warps_m * self.policy.warp_m, self.warps_x * self.policy.warp_x

    @property
    def loads(self) -> tuple[int, int]:
        return self.load_a, self.load_b

    @property
    def least_share(self) -> float:
        if self.policy_name.startswith("FmaPolicy<float,"):
            tile = "{}x{}".format(*self.tile)
            return LEAST_FLOAT_SHARE[self.geometry, tile][self.load_b == OVER_K]
        kind = "gathers" if GATHER in self.loads else "copies"
        math, arguments = split_template(self.policy_name)
        return LEAST_SHARE[f"{math}<{arguments[0]}>" if math == "FmaPolicy" else math, kind]

    def per_thread(self, rows: int, load: int) -> int:
        elements = rows * self.policy.tile_k // self.threads
        return elements * self.policy.element_bytes // 16 if load in VECTORS else elements

    @property
    def copies(self) -> tuple[int, int]:
        """Asynchronous copies of a thread in a step: of A, of B."""
        a, b = map(self.per_thread, self.tile, self.loads)
        return (0 if self.load_a == GATHER else a), (0 if self.load_b == GATHER else b)

    @property
    def most_shared_loads(self) -> int:
        """Of a step whose operands are vectors: an entry of k for all copies along k, in two loads;
        along x for each copy an offset and a position."""
        a, b = self.copies
        return (2 if self.load_a == VECTOR else 2 * a) + (2 if self.load_b == VECTOR else 2 * b)

    @property
    def copy_opcodes(self) -> set[str]:
        """Of the asynchronous copies. 16 bytes pass the L1 cache by; where both operands are copied
        along k, another code lets them through it, and one of the two is executed."""
        element = {2: set(), 4: {"LDGSTS.E"}, 8: {"LDGSTS.E.64"}, 16: {"LDGSTS.E.128"}}
        past_l1 = {"LDGSTS.E.BYPASS.128"}
        of = {VECTOR: past_l1, ROW_VECTOR: past_l1, GATHER: set()}
        found = [of.get(load, element[self.policy.element_bytes]) for load in self.loads]
        return set().union(*found, {"LDGSTS.E.128"} if self.chooses_l1 else set())

    @property
    def chooses_l1(self) -> bool:
        return self.loads == (VECTOR, VECTOR)

    def copies_in(self, body: list[Instruction]) -> collections.Counter[str]:
        """Asynchronous copies by opcode. L2's prefetch size, which the compiler chooses, is left
        out of the names."""
        opcodes = (i.opcode.replace(".LTC128B", "") for i in body)
        return collections.Counter(o for o in opcodes if o.startswith("LDGSTS"))

    def executed_copies(self, body: list[Instruction]) -> int:
        found = self.copies_in(body)
        return found.total() - (found["LDGSTS.E.128"] if self.chooses_l1 else 0)


def split_template(name: str) -> tuple[str, list[str]]:
    """'void conv2d_ext::cuda::f<A, B<C, D> >(...)' as 'f' and ['A', 'B<C, D>']."""
    name = name.replace("conv2d_ext::cuda::", "").removeprefix("void ").replace(" >", ">")
    start = name.find("<")
    if start < 0:
        return name.partition("(")[0], []
    arguments, depth, last = [], 0, start + 1
    for i in range(start, len(name)):
        depth += (name[i] == "<") - (name[i] == ">")
        if (depth == 1 and name[i] == ",") or depth == 0:
            arguments.append(name[last:i].strip())
            last = i + 1
        if depth == 0:
            break
    return name[:start], arguments


# ---- what the code is measured by


@dataclasses.dataclass(frozen=True)
class Kernel:
    arch: str
    name: str  # demangled
    resources: Resources
    opcodes: collections.Counter[str]  # of the whole kernel
    loop: HotLoop | None
    loads_ahead: int  # the most from global memory before an addition of floating point

    @property
    def label(self) -> str:
        kernel, arguments = split_template(self.name)
        gemm = Gemm.named(self.name)
        if gemm is None:
            return f"{kernel}<{', '.join(arguments)}>, {self.arch}"
        tile = "{} x {}".format(*gemm.tile)
        loads = ", ".join(LOAD_NAMES[load] for load in gemm.loads)
        return f"{gemm.policy_name}, {gemm.geometry}, {tile}, {loads}, {self.arch}"


@functools.cache
def constants() -> dict[str, int]:
    """Of the direct kernels' source."""
    source = (ROOT / "csrc" / "cuda" / "kernels.h").read_text()
    return {name: int(n) for name, n in re.findall(r"constexpr int (\w+) = (\d+);", source)}


def multiplies(instruction: Instruction) -> bool:
    return instruction.opcode.startswith(("FFMA", "DFMA", "HMMA", "DMMA"))


def read_kernel(arch: str, name: str, code: list[Instruction], resources: Resources) -> Kernel:
    opcodes = collections.Counter(i.opcode for i in code)
    loop = sass.hot_loop(code, multiplies)
    return Kernel(arch, name, resources, opcodes, loop, loads_ahead(code))


def loads_ahead(code: list[Instruction]) -> int:
    most = found = 0
    for instruction in code:
        if instruction.opcode.startswith("LDG."):
            found += 1
            most = max(most, found)
        elif instruction.opcode.startswith(("FADD", "DADD")):
            found = 0
    return most


def executed(loop: HotLoop, gemm: Gemm) -> float | None:
    """Instructions of a step: those of a loop inside it count as often as it runs. None where the
    copies in the code don't make up those of a step."""
    copies = gemm.executed_copies
    wanted = [n for n in gemm.copies if n]
    missing = sum(wanted) - copies(loop.body)
    rounds = [1.0] * len(loop.inner)
    if missing:
        if len(loop.inner) == 1 and copies(loop.inner[0]):
            rounds = [1 + missing / copies(loop.inner[0])]
        elif len(loop.inner) == len(wanted) == 2 and all(map(copies, loop.inner)):
            rounds = [n / copies(body) for n, body in zip(wanted, loop.inner, strict=True)]
        else:
            return None
    if any(r < 1 or r != int(r) for r in rounds):
        return None
    return len(loop.body) + sum((r - 1) * len(b) for r, b in zip(rounds, loop.inner, strict=True))


def share(loop: HotLoop, gemm: Gemm) -> float | None:
    length = executed(loop, gemm)
    return sum(map(multiplies, loop.body)) / length if length else None


def register_faults(resources: Resources, threads: int, ctas: int) -> list[str]:
    found = []
    if resources.stack or resources.local:
        found.append(f"spills: {resources.stack} bytes of stack, {resources.local} of local memory")
    allocated = -(-resources.registers // 8) * 8 * threads * ctas
    if allocated > REGISTERS:
        found.append(
            f"{resources.registers} registers: an SM can't hold {ctas} x {threads} threads"
        )
    if threads // 32 * ctas > WARPS:
        found.append(f"more than {WARPS} warps")
    return found


def loop_faults(loop: HotLoop) -> list[str]:
    """What no main loop may do, of whatever kernel."""
    found = [f"calls: {i.text}" for i in loop.calls]
    for i in loop.body:
        opcode = i.opcode.split(".")[0]
        if opcode in ("LDL", "STL"):
            found.append(f"local memory: {i.text}")
        elif opcode in ("LD", "ST"):
            found.append(f"memory of a kind that the compiler doesn't know: {i.text}")
        elif opcode in ("STG", "ATOM", "ATOMG", "RED"):
            found.append(f"stores: {i.text}")
        elif opcode in ("MUFU", "I2F", "F2I"):
            found.append(f"divides: {i.text}")
        elif opcode == "HFMA2" and "RZ, RZ" not in i.operands:
            # Of zeros it is a way to load a constant.
            found.append(f"multiplies in float16: {i.text}")
    return found


def gemm_faults(loop: HotLoop | None, gemm: Gemm, least_share: float) -> list[str]:
    if loop is None:
        return ["no loop that multiplies"]
    policy = gemm.policy
    found = loop_faults(loop)
    count = collections.Counter(i.opcode for i in loop.body)
    for opcode in sorted({i.opcode for i in loop.body if multiplies(i)} - {policy.multiply}):
        found.append(f"multiplies by {opcode} instead of {policy.multiply}")
    if count[policy.multiply] != policy.multiplies:
        found.append(f"{count[policy.multiply]} {policy.multiply} instead of {policy.multiplies}")
    matrix_loads = sum(n for opcode, n in count.items() if opcode.startswith("LDSM"))
    if matrix_loads != policy.matrix_loads:
        found.append(f"{matrix_loads} LDSM instead of {policy.matrix_loads}")

    copies = gemm.copies_in(loop.body)
    if set(copies) != gemm.copy_opcodes:
        found.append(f"copies by {sorted(copies)} instead of {sorted(gemm.copy_opcodes)}")
    if gemm.chooses_l1 and copies["LDGSTS.E.128"] != sum(gemm.copies):
        found.append(f"{copies['LDGSTS.E.128']} copies through the L1 cache, of {gemm.copies}")
    shared_loads = sum(n for opcode, n in count.items() if opcode.startswith("LDS."))
    is_16_bit = policy.element_bytes == 2
    if is_16_bit and set(gemm.loads) <= set(VECTORS) and shared_loads > gemm.most_shared_loads:
        found.append(f"{shared_loads} loads from shared memory for {sum(gemm.copies)} copies")
    loads = {opcode for opcode in count if opcode.startswith("LDG.")}
    gathers = GATHER in gemm.loads
    if bool(loads) != gathers or any(not o.startswith("LDG.E.U16") for o in loads):
        found.append("loads through registers: " + (", ".join(sorted(loads)) or "none"))

    part = share(loop, gemm)
    if part is None:
        found.append(f"the code's asynchronous copies don't make up {gemm.copies} a step")
    elif part < least_share:
        found.append(f"multiplications are {part:.1%} of the instructions")
    return found
