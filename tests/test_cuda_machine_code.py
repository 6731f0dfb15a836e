"""The built module's CUDA kernels: all of them there, nothing spilled, fast instructions in loops.

A compiler that runs out of registers spills silently, a cast too many turns an asynchronous copy
into loads and stores: the results stay the same and the time doubles. Only the machine code shows
it, and reading it needs no GPU. The share of multiplications among each main loop's instructions is
printed at the end and written to build/reports/cuda_machine_code.txt.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import sass
from child import LIBRARY
from cuda_kernels import (
    GATHER,
    OVER_K,
    OVER_X,
    ROW_VECTOR,
    VECTOR,
    VECTORS,
    Gemm,
    Kernel,
    constants,
    executed,
    gemm_faults,
    loop_faults,
    multiplies,
    read_kernel,
    register_faults,
    split_template,
)
from cuda_tables import TableEntry, tables
from sass import Instruction, Resources

import conv2d_ext

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "build" / "reports" / "cuda_machine_code.txt"
ARCHS = ("sm_80", "sm_90")
# Such as '8.0;9.0+PTX'; where a GPU is visible, only it may be in the build.
BUILT_FOR = conv2d_ext.build_config()["cuda_architectures"]
# Shared memory that a CTA may ask for.
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10}
# Measured 7.9 and 8.1 MB.
MOST_CODE_BYTES = 8_200_000
OTHER_THREADS = 256  # of kernels other than GEMMs
ADD_IN_ORDER = ("reduce_partials", "add_pixel_sums")
POLICIES = ROOT / "csrc" / "cuda" / "gemm_policies.cuh"
# What the system keeps of it for each CTA.
RESERVED_SHARED = 1024
# What the system keeps of it, which the compiler counts as a kernel's own.
RESERVED_BYTES = {"sm_80": 0, "sm_90": 1024}


# Reading the module takes half a minute: in one process alone.
pytestmark = pytest.mark.xdist_group("machine code")


# ---- the module


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    if BUILT_FOR is None:
        pytest.skip("the module was built without CUDA")
    for tool in ("cuobjdump", "nvdisasm"):
        if sass.find_tool(tool) is None:
            pytest.skip(f"needs {tool}, of the CUDA toolkit or of triton")
    resources = sass.resources(str(LIBRARY))
    found: list[Kernel] = []

    def read(arch: str, name: str, code: list[Instruction]) -> None:
        found.append(read_kernel(arch, sass.demangle(name), code, resources[arch, name]))

    sass.each_function(str(LIBRARY), read)
    assert found, "the module has no CUDA code"
    return found


@pytest.fixture(params=ARCHS)
def arch(request) -> str:
    if BUILT_FOR is not None:
        compiled = ["sm_" + a.replace(".", "") for a in re.findall(r"\d+\.\d+", BUILT_FOR)]
        if request.param not in compiled:
            pytest.skip(f"the module was built for {BUILT_FOR}")
    return request.param


@pytest.fixture(scope="module")
def entries(kernels) -> list[TableEntry]:
    return tables(str(LIBRARY))


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
    """Of a table's entry: the policy, the geometry, the pairs of loads."""
    struct, arguments = split_template(entry.launch)
    (geometry,) = (a for a in arguments if "Geometry" in a)
    math = arguments[0]
    if struct == "ElementGemm":
        dense_loads = int(arguments[-1].replace("(DenseLoads)", ""))
        loads = {
            0: [(a, b) for a in (OVER_X, OVER_K) for b in (OVER_X, OVER_K)],  # both
            1: [(OVER_K, OVER_X), (OVER_K, OVER_K)],
            2: [(OVER_X, OVER_X), (OVER_K, OVER_K)],  # as the im2col operand
        }
        found = loads[dense_loads]
        if dense_loads == 0 and re.match(r"FmaPolicy<float,|Tf32Policy", math):
            found = [*found, *((ROW_VECTOR, b) for b in (OVER_X, OVER_K, ROW_VECTOR))]
        return math, geometry, found
    assert struct == "Gemm16", f"a kind of entry that this test doesn't know: {struct}"
    loads = [(GATHER, GATHER)]
    if geometry.startswith("ConvGeometry<8"):
        loads += [(GATHER, VECTOR), *itertools.product(VECTORS, VECTORS)]
    elif geometry == "WeightGeometry":
        loads.append((ROW_VECTOR, ROW_VECTOR))
    return math, geometry, loads


def family(policy_name: str) -> str:
    """The policy but for the size of a warp's piece: kernels of one entry may differ in it."""
    return re.sub(r",? ?\d+>$", ">", policy_name) if "Mma" in policy_name else policy_name


def test_every_kernel_of_the_tables_is_compiled(arch, kernels, entries):
    have = collections.defaultdict(list)
    for kernel in kernels:
        gemm = Gemm.named(kernel.name)
        if gemm and kernel.arch == arch:
            key = (family(gemm.policy_name), gemm.geometry, gemm.tile, gemm.loads)
            have[key].append(gemm)
    assert len(entries) >= 7  # a table for each dtype and way of multiplying
    missing, wrong = [], []
    used = set()
    for entry in entries:
        math, geometry, loads = instantiations(entry)
        for pair in loads:
            key = (family(math), geometry, (entry["tile_m"], entry["tile_x"]), pair)
            used.add(key)
            if len(have[key]) != 1:
                missing.append((entry.name, pair))
                continue
            (gemm,) = have[key]
            # What the planner counts with is what was compiled.
            which = "vector_" if set(pair) <= set(VECTORS) else ""
            found = (gemm.threads, gemm.min_ctas, gemm.stages)
            stated = tuple(entry[which + field] for field in ("threads", "ctas_per_sm", "stages"))
            if found != stated:
                wrong.append((entry.name, pair, found, stated))
    assert not missing
    assert not wrong
    # None that no table names.
    assert {key for key, found in have.items() if found} == used


def test_other_kernels_are_compiled(arch, kernels):
    mine = [k for k in kernels if k.arch == arch]
    elements = ("float", "double", "Float16", "BFloat16", "Complex<float>", "Complex<double>")
    names = {split_template(k.name)[0] for k in mine}
    sums = {"direct_conv", "direct_weight", "sum_pixels", "add_pixel_sums"}
    of_some = {"depthwise_conv": {"float", "Float16", "BFloat16"}, "pack_weight": {"float"}}
    assert names == {"gemm_kernel", "reduce_partials", *sums, *of_some}
    for name, wanted in {**{name: set(elements) for name in sums}, **of_some}.items():
        of = {split_template(k.name)[1][0] for k in mine if split_template(k.name)[0] == name}
        assert of == wanted, name


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


def test_shared_memory_is_there(arch, kernels, entries):
    for entry in entries:
        assert entry.shared_bytes(entry["stages"], several_chains=True) <= SHARED_BYTES[arch]
    # Kernels that use shared memory take it at the launch.
    assert {k.resources.shared for k in kernels if k.arch == arch} <= {0, RESERVED_BYTES[arch]}


# Warps of an SM while 16-bit vectors are multiplied, as registers and shared memory allow: of sums
# of one chain and of several, on 228 KiB (sm_90) and on 164 KiB (sm_80).
LEAST_RESIDENT_WARPS = {
    ("sm_90", "conv_gemm", "128x128"): (8, 8),
    ("sm_90", "conv_gemm", "64x128"): (12, 12),
    ("sm_90", "conv_gemm", "64x64"): (12, 10),
    ("sm_90", "weight_gemm", "64x128"): (12, 8),
    ("sm_90", "weight_gemm", "64x64"): (12, 8),
    ("sm_80", "conv_gemm", "128x128"): (8, 4),
    ("sm_80", "conv_gemm", "64x128"): (12, 8),
    ("sm_80", "conv_gemm", "64x64"): (12, 8),
    ("sm_80", "weight_gemm", "64x128"): (12, 8),
    ("sm_80", "weight_gemm", "64x64"): (8, 6),
}


def test_resident_warps_of_vector_kernels(arch, entries, report):
    """A kernel may have the registers for two CTAs an SM and the shared memory for one."""
    few, counted = {}, set()
    for entry in entries:
        match = re.fullmatch(r"(\w+)_(?:bf|f)16_(\d+x\d+)x32", entry.name)
        if match is None:
            continue
        name, tile = match.groups()
        counted.add((name, tile))
        of_sm = SHARED_BYTES[arch] + RESERVED_SHARED
        found = []
        for several in (False, True):
            # The deepest ring that doesn't cost a CTA.
            ctas = max(
                min(
                    entry["vector_ctas_per_sm"],
                    of_sm // (entry.shared_bytes(stages, several_chains=several) + RESERVED_SHARED),
                )
                for stages in range(entry["stages"], entry["vector_stages"] + 1)
            )
            found.append(ctas * entry["vector_threads"] // 32)
        report.append(f"  {found[0]}, {found[1]} warps of an SM: vectors of {entry.name}, {arch}")
        least = LEAST_RESIDENT_WARPS[arch, name, tile]
        if any(a < b for a, b in zip(found, least, strict=True)):
            few[entry.name] = (found, least)
    assert len(counted) == len(LEAST_RESIDENT_WARPS) // len(ARCHS)
    assert not few


def test_results_are_stored_to_global_memory(arch, kernels):
    """A generic store asks first which memory an address is of; 16-bit results go 8 at a time."""
    wrong = {}
    for kernel in kernels:
        gemm = Gemm.named(kernel.name)
        if kernel.arch != arch or gemm is None:
            continue
        generic = [o for o in kernel.opcodes if o == "ST" or o.startswith("ST.")]
        vectors = kernel.opcodes["STG.E.128"]
        if gemm.policy.element_bytes == 2 and gemm.geometry != "WeightGeometry" and not vectors:
            generic.append("no stores of 16 bytes")
        if generic:
            wrong[kernel.label] = generic
    assert not wrong


def test_partial_sums_are_loaded_ahead(arch, kernels):
    """What adds a kernel's sums in order waits for each addition, but not for each load; and it
    knows that they lie in global memory. Seen to fail with each load before its addition."""
    slow = {}
    ahead = int(re.search(r"constexpr int kLoadsAhead = (\d+);", POLICIES.read_text())[1])
    for kernel in kernels:
        if kernel.arch != arch or split_template(kernel.name)[0] not in ADD_IN_ORDER:
            continue
        found = [o for o in kernel.opcodes if o == "LD" or o.startswith("LD.")]
        if kernel.loads_ahead < ahead:
            found.append(f"{kernel.loads_ahead} loads before an addition")
        if found:
            slow[kernel.label] = found
    assert not slow


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


def test_main_loops_of_direct_kernels(arch, kernels, report):
    """A step's products, or several steps' where the compiler unrolls; no calls, no spills."""
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


_COPY = "LDGSTS.E.128 [R8], desc[UR4][R6.64], P1"


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
        (_COPY, "LDG.E.128 R8, [R6.64]", "copies by [] instead of"),
        (_COPY, "LDG.E.U16 R8, [R6.64]", "through registers"),
        ("LDGSTS.E.128", "LDGSTS.E.BYPASS.128", "copies by ['LDGSTS.E.BYPASS.128'] instead of"),
        ("LDGSTS.E.128", "LDGSTS.E.64", "copies by ['LDGSTS.E.64'] instead of ['LDGSTS.E.128']"),
        ("@P2 BRA `(.L_x_3)", "@P2 BRA `(.L_x_2)", "don't make up (2, 4) a step"),
        ("LDS.128 R4, [R8]", "LDS.128 R4, [R8]" + " ;\n /*0*/ NOP" * 20, "are 62.7%"),
        ("BRA `(.L_x_1)", "EXIT", "no loop that multiplies"),
    ],
)  # fmt: skip
def test_reading_finds_what_slows_a_loop(old, new, fault):
    kernel = _edited(old, new)
    assert any(fault in found for found in gemm_faults(kernel.loop, _GEMM, 0.75))


def test_loads_ahead_are_counted():
    load, add = "        /*0*/    LDG.E R4, [R2.64] ;\n", "        /*0*/    FADD R4, R4, R5 ;\n"
    code = _GOOD.replace(_FMAS, 3 * load + add + 2 * load + add)
    assert _read(code).loads_ahead == 3


def test_missing_tensor_cores_are_found():
    gemm = dataclasses.replace(_GEMM, policy_name="Tf32Policy")
    assert "0 HMMA.1688.F32.TF32 instead of 32" in gemm_faults(_read(_GOOD).loop, gemm, 0)


def test_copies_along_k_have_a_code_for_either_way():
    gemm = Gemm("Mma16Policy<Float16, 32>", "ConvGeometry<8, 4>", 2, 2, 4, 2, VECTOR, VECTOR)
    loop = _read(_GOOD).loop
    assert gemm.copy_opcodes == {"LDGSTS.E.128", "LDGSTS.E.BYPASS.128"}
    assert gemm.executed_copies(loop.inner[0]) == 0
    assert f"1 copies through the L1 cache, of {gemm.copies}" in gemm_faults(loop, gemm, 0)


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
        (Resources(129, 0, 0, 0), 2, ["129 registers: an SM can't hold 2 x 256 threads"]),
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
