"""The built module's CUDA kernels: all of them there, nothing spilled, fast instructions in loops.

A compiler that runs out of registers spills silently, a cast too many turns an asynchronous copy
into loads and stores: the results stay the same and the time doubles. Only the machine code shows
it, and reading it needs no GPU. The share of multiplications among each main loop's instructions is
printed at the end and written to build/reports/cuda_machine_code.txt.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
from pathlib import Path

import pytest
import sass
from cuda_tables import TableEntry, tables
from sass import HotLoop, Instruction, Resources

import conv2d_ext
from conv2d_ext import _C

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "build" / "reports" / "cuda_machine_code.txt"

ARCHS = ("sm_80", "sm_90")
REGISTERS = 65536  # of an SM
WARPS = 64  # of an SM
OTHER_THREADS = 256  # of kernels other than GEMMs
# Shared memory that a CTA may ask for.
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10}
# Measured 12.4 and 12.8 MB.
MOST_CODE_BYTES = 14_500_000

# The values of enum Load in csrc/cuda/gemm_loader.cuh.
OVER_X, OVER_K, EITHER, VECTOR, GATHER = range(5)
LOAD_NAMES = ("over x", "over k", "either", "vector", "gather")
ELEMENT_BYTES = {"float": 4, "double": 8, "Complex<float>": 8, "Complex<double>": 16}

# The least share of multiplications among the instructions that a main loop executes, a little below
# what was measured. Of float32 for each geometry and tile, where im2col is loaded over x and over k:
LEAST_FLOAT_SHARE = {
    ("ConvGeometry<8, 1>", "128x128"): (0.77, 0.75),
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
    ("Mma16Policy", "copies"): 0.125,
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
        return elements // 8 if load == VECTOR else elements

    @property
    def copies(self) -> tuple[int, int]:
        """Asynchronous copies of a thread in a step: of A, of B."""
        a, b = map(self.per_thread, self.tile, self.loads)
        return (0 if self.load_a == GATHER else a), (0 if self.load_b == GATHER else b)

    @property
    def copy_bytes(self) -> int:
        return 16 if VECTOR in self.loads else self.policy.element_bytes


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
    source = (ROOT / "csrc" / "cuda" / "direct_kernel.cuh").read_text()
    return {name: int(n) for name, n in re.findall(r"constexpr int (\w+) = (\d+);", source)}


def multiplies(instruction: Instruction) -> bool:
    return instruction.opcode.startswith(("FFMA", "DFMA", "HMMA", "DMMA"))


def read_kernel(arch: str, name: str, code: list[Instruction], resources: Resources) -> Kernel:
    opcodes = collections.Counter(i.opcode for i in code)
    return Kernel(arch, name, resources, opcodes, sass.hot_loop(code, multiplies))


def executed(loop: HotLoop, gemm: Gemm) -> float | None:
    """Instructions of a step: those of a loop inside it count as often as it runs. None where the
    copies in the code don't make up those of a step."""

    def copies(body: list[Instruction]) -> int:
        return sum(i.opcode.startswith("LDGSTS") for i in body)

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
            f"{resources.registers} registers: fewer than {ctas} CTAs of {threads} on an SM"
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

    copies = {opcode for opcode in count if opcode.startswith("LDGSTS")}
    if bool(copies) != any(gemm.copies):
        found.append("asynchronous copies: " + (", ".join(sorted(copies)) or "none"))
    bits = {8: ".64", 16: ".128"}.get(gemm.copy_bytes, "")
    for opcode in sorted(copies):
        if not re.fullmatch(r"LDGSTS\.E(\.BYPASS)?(\.LTC128B)?" + re.escape(bits), opcode):
            found.append(f"copies by {opcode} instead of {gemm.copy_bytes} bytes")
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


# ---- the module


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    if conv2d_ext.build_config()["cuda_architectures"] is None:
        pytest.skip("the module was built without CUDA")
    for tool in ("cuobjdump", "nvdisasm"):
        if sass.find_tool(tool) is None:
            pytest.skip(f"needs {tool}, of the CUDA toolkit or of triton")
    resources = sass.resources(_C.__file__)
    found: list[Kernel] = []

    def read(arch: str, name: str, code: list[Instruction]) -> None:
        found.append(read_kernel(arch, sass.demangle(name), code, resources[arch, name]))

    sass.each_function(_C.__file__, read)
    assert found, "the module has no CUDA code"
    return found


@pytest.fixture(scope="module")
def entries(kernels) -> list[TableEntry]:
    return tables(_C.__file__)


@pytest.fixture(scope="module")
def report(request):
    """Lines that are printed and written after the module's tests, whether they passed or not."""
    lines: list[str] = []
    yield lines
    if not lines:
        return
    lines.insert(0, "Share of multiplications in the CUDA kernels' main loops, as executed:")
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text("\n".join(lines) + "\n")
    plugins = request.config.pluginmanager
    reporter, capture = plugins.get_plugin("terminalreporter"), plugins.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled():
        for line in ["", *lines]:
            reporter.write_line(line)


def instantiations(entry: TableEntry) -> tuple[str, str, list[tuple[int, int]]]:
    """Of a table's entry: the policy without its arguments, but the element type's, the geometry, the
    pairs of loads."""
    struct, arguments = split_template(entry.launch)
    (geometry,) = (a for a in arguments if "Geometry" in a)
    math = arguments[0]
    if struct == "ElementGemm":
        return math, geometry, [(a, b) for a in (OVER_X, OVER_K) for b in (OVER_X, OVER_K)]
    assert struct == "Gemm16", f"a kind of entry that this test doesn't know: {struct}"
    vectors = [(VECTOR, VECTOR), (GATHER, VECTOR)] if geometry.startswith("ConvGeometry<8") else []
    return math, geometry, [*vectors, (GATHER, GATHER)]


def family(policy_name: str) -> str:
    """The policy but for the size of a warp's piece: kernels of one entry may differ in it."""
    return re.sub(r",? ?\d+>$", ">", policy_name) if "Mma" in policy_name else policy_name


def test_every_kernel_is_compiled_for_every_architecture(kernels, entries):
    have = collections.defaultdict(list)
    for kernel in kernels:
        if gemm := Gemm.named(kernel.name):
            key = (kernel.arch, family(gemm.policy_name), gemm.geometry, gemm.tile, gemm.loads)
            have[key].append(gemm)
    assert len(entries) >= 7  # a table for each dtype and way of multiplying
    missing, wrong = [], []
    used = set()
    for arch, entry in itertools.product(ARCHS, entries):
        math, geometry, loads = instantiations(entry)
        for pair in loads:
            key = (arch, family(math), geometry, (entry["tile_m"], entry["tile_x"]), pair)
            used.add(key)
            if len(have[key]) != 1:
                missing.append((entry.name, arch, pair))
                continue
            (gemm,) = have[key]
            is_vector = pair == (VECTOR, VECTOR)
            threads = entry.numbers.get("vector_threads" if is_vector else "threads")
            if gemm.threads != (threads or entry["threads"]):
                wrong.append((entry.name, arch, f"{gemm.threads} threads instead of {threads}"))
            if gemm.min_ctas < entry["ctas_per_sm"]:
                wrong.append((entry.name, arch, f"{gemm.min_ctas} CTAs per SM"))
    assert not missing
    assert not wrong
    # None that no table names.
    assert {key for key, found in have.items() if found} == used


@pytest.mark.parametrize("arch", ARCHS)
def test_other_kernels_are_compiled(arch, kernels):
    have = collections.Counter(split_template(k.name)[0] for k in kernels if k.arch == arch)
    elements = ("float", "double", "Float16", "BFloat16", "Complex<float>", "Complex<double>")
    names = {split_template(k.name)[0] for k in kernels}
    assert names == {
        "gemm_kernel", "reduce_partials", "direct_conv", "direct_weight", "sum_pixels", "add_pixel_sums",
    }  # fmt: skip
    for name in sorted(names - {"gemm_kernel", "reduce_partials"}):
        of = {split_template(k.name)[1][0] for k in kernels if split_template(k.name)[0] == name}
        assert of == set(elements), name
        assert have[name] >= len(elements)


@pytest.mark.parametrize("arch", ARCHS)
def test_nothing_is_spilled_and_registers_allow_the_planned_ctas(arch, kernels):
    found = {}
    for kernel in kernels:
        if kernel.arch == arch:
            gemm = Gemm.named(kernel.name)
            threads, ctas = (gemm.threads, gemm.min_ctas) if gemm else (OTHER_THREADS, 1)
            if faults := register_faults(kernel.resources, threads, ctas):
                found[kernel.label] = faults
            elif local := [o for o in kernel.opcodes if o.startswith(("LDL", "STL"))]:
                found[kernel.label] = [f"local memory: {local}"]
    assert not found


@pytest.mark.parametrize("arch", ARCHS)
def test_shared_memory_is_there(arch, kernels, entries):
    for entry in entries:
        assert entry["shared_one_chain"] <= entry["shared_several_chains"] <= SHARED_BYTES[arch]
    assert {k.label: k.resources.shared for k in kernels if k.resources.shared} == {}


@pytest.mark.parametrize("arch", ARCHS)
def test_main_loops_of_gemms(arch, kernels, report):
    slow = {}
    for kernel in sorted(kernels, key=lambda kernel: kernel.label):
        gemm = Gemm.named(kernel.name)
        if kernel.arch != arch or gemm is None:
            continue
        if found := gemm_faults(kernel.loop, gemm, gemm.least_share):
            slow[kernel.label] = found
        if kernel.loop and (length := executed(kernel.loop, gemm)):
            part = sum(map(multiplies, kernel.loop.body)) / length
            registers = f"{kernel.resources.registers:3} registers"
            report.append(f"  {part:6.1%} of {length:4.0f}, {registers}: {kernel.label}")
    assert not slow


@pytest.mark.parametrize("arch", ARCHS)
def test_main_loops_of_direct_kernels(arch, kernels, report):
    """A step's products, whole multiples of them where the compiler unrolls; no calls, no spills."""
    slow = {}
    for kernel in sorted(kernels, key=lambda kernel: kernel.label):
        name, arguments = split_template(kernel.name)
        if kernel.arch != arch or name not in ("direct_conv", "direct_weight"):
            continue
        of, rows = arguments[0], int(arguments[1])
        results = rows * constants()["kDirectPixels" if name == "direct_conv" else "kDirectColumns"]
        products = results * (4 if of.startswith("Complex") else 1)
        if kernel.loop is None:
            slow[kernel.label] = ["no loop that multiplies"]
            continue
        opcode = "DFMA" if "double" in of else "FFMA"
        count = collections.Counter(i.opcode for i in kernel.loop.body if multiplies(i))
        found = loop_faults(kernel.loop)
        if set(count) != {opcode} or count[opcode] % products:
            found.append(f"{dict(count)} instead of {products} {opcode}")
        if found:
            slow[kernel.label] = found
        length = len(kernel.loop.body)
        report.append(f"  {count.total() / length:6.1%} of {length:4}: {kernel.label}")
    assert not slow


@pytest.mark.parametrize("arch", ARCHS)
def test_code_is_no_larger_than_stated(arch, kernels, report):
    size = 16 * sum(kernel.opcodes.total() for kernel in kernels if kernel.arch == arch)
    report.append(f"  {size / 1e6:.1f} MB of code for {arch}")
    assert size <= MOST_CODE_BYTES


# ---- the reading itself, on made-up code: tiles of 16 x 8 results, a k at a time

_GEMM = Gemm("FmaPolicy<Complex<double>, 1, 1>", "ConvGeometry<8, 1>", 1, 1, 3, 1, OVER_X, OVER_X)
_FMAS = "".join(f"        /*{i:04x}*/    DFMA R{i}, R2, R4, R{i} ;\n" for i in range(64))
_GOOD = f"""
.text._Z6kernelv:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   ISETP.GE.AND P0, PT, R0, R3, PT ;
        /*0020*/               @P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0030*/                   LDGSTS.E.128 [R8], desc[UR4][R6.64], P1 ;
        /*0040*/               @P2 BRA `(.L_x_3) ;
.L_x_2:
        /*0050*/                   LDS.128 R4, [R8] ;
        /*0060*/                   HFMA2.MMA R9, -RZ, RZ, 0, 0 ;
{_FMAS}
        /*0500*/               @P3 CALL.REL.NOINC `(.L_x_4) ;
        /*0510*/                   BRA `(.L_x_1) ;
.L_x_4:
        /*0520*/                   STG.E [R2.64], R4 ;
        /*0530*/                   EXIT ;
.L_x_5:
        /*0540*/                   MUFU.RCP R4, R5 ;
        /*0550*/                   RET.REL.NODEC R20 `(_Z6kernelv) ;
"""


def _read(text: str, resources: Resources | None = None) -> Kernel:
    ((name, code),) = sass.parse(text.splitlines())
    return read_kernel("sm_80", name, code, resources or Resources(128, 0, 0, 0))


def _edited(old: str, new: str) -> Kernel:
    assert old in _GOOD
    return _read(_GOOD.replace(old, new, 1))


def test_reading_accepts_a_good_loop():
    loop = _read(_GOOD).loop
    assert loop is not None
    assert (loop.body[0].opcode, loop.body[-1].opcode) == ("ISETP.GE.AND", "BRA")
    assert len(loop.body) == 72
    assert [[i.opcode for i in inner] for inner in loop.inner] == [["LDGSTS.E.128", "BRA"]]
    # 6 copies a step, of which the code has one: the inner loop's two instructions run 6 times.
    assert _GEMM.copies == (2, 4)
    assert executed(loop, _GEMM) == 72 + 5 * 2
    assert gemm_faults(loop, _GEMM, 0.75) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("DFMA R5, R2, R4, R5", "DADD R5, R2, R5", "63 DFMA instead of 64"),
        ("DFMA R5, R2, R4, R5", "DFMA R5, R2, R4, R5 ;\n /*0*/ DFMA R5, R2, R4, R5", "65 DFMA"),
        ("DFMA R5, R2, R4, R5", "FFMA R5, R2, R4, R5", "multiplies by FFMA instead of DFMA"),
        ("HFMA2.MMA R9, -RZ, RZ, 0, 0", "HFMA2 R9, R8, R7, R9", "multiplies in float16: HFMA2"),
        ("LDS.128 R4, [R8]", "LDL.64 R4, [R1+0x8]", "local memory: LDL.64"),
        ("LDS.128 R4, [R8]", "LD.E R4, [R8.64]", "memory of a kind"),
        ("LDS.128 R4, [R8]", "STG.E [R8.64], R4", "stores: STG.E"),
        ("LDS.128 R4, [R8]", "CALL.REL.NOINC `(.L_x_5)", "calls: CALL.REL.NOINC"),
        ("LDS.128 R4, [R8]", "MUFU.RCP R4, R8", "divides: MUFU.RCP"),
        ("LDS.128 R4, [R8]", "LDSM.16.M88.4 R4, [R8]", "1 LDSM instead of 0"),
        ("LDGSTS.E.128 [R8], desc[UR4][R6.64], P1", "LDG.E.128 R8, [R6.64]", "copies: none"),
        ("LDGSTS.E.128 [R8], desc[UR4][R6.64], P1", "LDG.E.U16 R8, [R6.64]", "through registers"),
        ("LDGSTS.E.128", "LDGSTS.E.64", "copies by LDGSTS.E.64 instead of 16 bytes"),
        ("@P2 BRA `(.L_x_3)", "@P2 BRA `(.L_x_2)", "don't make up (2, 4) a step"),
        ("LDS.128 R4, [R8]", "LDS.128 R4, [R8]" + " ;\n /*0*/ NOP" * 20, "are 62.7%"),
        ("BRA `(.L_x_1)", "EXIT", "no loop that multiplies"),
    ],
)  # fmt: skip
def test_reading_finds_what_slows_a_loop(old, new, fault):
    kernel = _edited(old, new)
    assert any(fault in found for found in gemm_faults(kernel.loop, _GEMM, 0.75))


def test_missing_tensor_cores_are_found():
    gemm = dataclasses.replace(_GEMM, policy_name="Tf32Policy")
    assert "0 HMMA.1688.F32.TF32 instead of 32" in gemm_faults(_read(_GOOD).loop, gemm, 0)


def test_a_loop_is_found_whose_blocks_lie_apart():
    text = """
.text._Z6kernelv:
.L_x_1:
        /*0000*/                   FFMA R1, R2, R3, R1 ;
        /*0010*/               @P0 BRA `(.L_x_3) ;
.L_x_2:
        /*0020*/               @P1 BRA `(.L_x_1) ;
        /*0030*/                   EXIT ;
.L_x_3:
        /*0040*/                   IADD3 R4, R4, 0x1, RZ ;
        /*0050*/                   BRA `(.L_x_2) ;
"""
    loop = _read(text).loop
    assert loop is not None
    assert [i.opcode for i in loop.body] == ["FFMA", "BRA", "BRA", "IADD3", "BRA"]


@pytest.mark.parametrize(
    ("resources", "ctas", "faults"),
    [
        (Resources(128, 0, 0, 0), 2, []),
        (Resources(129, 0, 0, 0), 2, ["129 registers: fewer than 2 CTAs of 256 on an SM"]),
        (Resources(128, 8, 0, 0), 2, ["spills: 8 bytes of stack, 0 of local memory"]),
        (Resources(24, 0, 0, 0), 9, ["more than 64 warps"]),
    ],
)
def test_registers_are_counted_as_they_are_allocated(resources, ctas, faults):
    assert register_faults(resources, 256, ctas) == faults


def test_resource_usage_is_read():
    text = """
Fatbin elf code:
================
arch = sm_90
Resource usage:
 Function _Z6kernelv:
  REG:40 STACK:8 SHARED:16 LOCAL:0 CONSTANT[0]:464 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
    assert sass.parse_resources(text) == {("sm_90", "_Z6kernelv"): Resources(40, 8, 16, 0)}
