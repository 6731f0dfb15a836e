"""The built module's inner loops: accumulators in registers, nothing else in the way.

Compilers spill accumulator arrays silently, at a third of the speed and with the same results, so
only the machine code shows it. Read are the micro-kernels of each instruction set in the build, on
any x86-64 machine: nothing is run. The share of FMAs among each loop's instructions is printed at
the end.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess

import pytest
from child import LIBRARY

import conv2d_ext

OBJDUMP = shutil.which("objdump")
COMPILED = conv2d_ext.build_config()["compiled_isas"]

# 'address size name' of a function in the symbol table; a hidden function is local there.
_SYMBOL = re.compile(r"^([0-9a-f]+) .* F \.text\s+([0-9a-f]+)\s+(?:\.hidden )?(.*)$")
_UKERNEL = re.compile(
    r"cpu::(?P<isa>\w+)::(?P<family>gemm_ukernel|pixel_ukernel|whole_plane_ukernel)"
    r"<(?P<dtype>\w+), (?P<rows>\d+), (?P<vectors>\d+)"
    r"(?:, (?P<lanes_are_groups>true|false), (?P<half>true|false), (?P<listed>true|false)"
    r", (?P<result>[\w:]+))?>\("
)
# Of depthwise problems: 'rows' pixels by 'columns' taps, and 'rows' by 'columns' taps.
_DEPTHWISE = re.compile(
    r"cpu::(?P<isa>\w+)::depthwise_(?P<weight>weight_)?ukernel<(?P<dtype>[\w:]+)"
    r"(?:, (?P<result>[A-Za-z][\w:]*))?, (?P<rows>\d+), (?P<columns>\d+)(?:, (?P<step>\d+))?"
    r"(?:, (?P<at_edges>true|false))?>\("
)
# Of depthwise input gradients with a stride of 2: 'rows' by 'vectors' in each of two phases.
_STRIDED = re.compile(
    r"cpu::(?P<isa>\w+)::strided_ukernel<(?P<storage>[\w:]+), \w+, (?P<rows>\d+), "
    r"(?P<vectors>\d+)>\("
)
# Of images of one result pixel: 'rows' weights' rows by 'columns' images; 'rows' results by vectors
# of lanes. The latter's are inlined into the function that calls all widths.
_DOT = re.compile(
    r"cpu::(?P<isa>\w+)::dot_ukernel<(?P<storage>[\w:]+), \w+, (?P<rows>\d+), (?P<columns>\d+)>\("
)
_ROWS = re.compile(
    r"cpu::(?P<isa>\w+)::(?:row_chain|widest_row_ukernel)"
    r"<(?P<storage>[\w:]+), \w+, (?P<rows>\d+)(?:, \d+)?>\("
)
# Of sums that are rounded as they are stored.
_ROUNDS = re.compile(
    r"cpu::(?P<isa>\w+)::ConvCall<(?P<storage>[\w:]+), float, false>::round_in_result\("
)
_INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*?)\s*(?:[#<].*)?$")
# A dot product of pairs does two of them for each element.
_FMA = re.compile(r"vfmadd\d+[ps][sd]$|vdpbf16ps$")
# Instructions whose last operand is read, or is no memory that is accessed.
_NO_STORE = re.compile(r"(cmp|test|prefetch|nop|j|lea|vucomi|vcomi|call)")


# What a vector of the micro-kernel holds.
FORMS = {
    ("gemm_ukernel", "false", "false", "false"): "result channels",
    ("gemm_ukernel", "false", "false", "true"): "result channels, listed steps",
    ("gemm_ukernel", "false", "true", "false"): "result channels, half of the last vector",
    ("gemm_ukernel", "true", "false", "false"): "groups",
    ("pixel_ukernel", None, None, None): "pixels",
    ("whole_plane_ukernel", None, None, None): "pixels of whole planes",
}
_PLANES = FORMS["whole_plane_ukernel", None, None, None]
_LISTED = FORMS["gemm_ukernel", "false", "false", "true"]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """As objdump prints it: the destination is the last operand."""

    address: int
    mnemonic: str
    operands: str

    @property
    def is_fma(self) -> bool:
        return bool(_FMA.match(self.mnemonic))

    @property
    def destination(self) -> str:
        # Commas also stand within an address.
        return re.split(r",(?![^(]*\))", self.operands)[-1].strip()

    @property
    def jumps_back_to(self) -> int | None:
        target = self.operands.split()[0] if self.operands else ""
        if not self.mnemonic.startswith("j") or not re.fullmatch(r"[0-9a-f]+", target):
            return None
        return int(target, 16) if int(target, 16) <= self.address else None


@dataclasses.dataclass(frozen=True)
class Kernel:
    isa: str
    dtype: str
    rows: int
    vectors: int
    form: str
    address: int
    size: int

    @property
    def name(self) -> str:
        return f"{self.dtype} {self.rows} x {self.vectors} vectors, {self.form}, {self.isa}"

    @property
    def fmas(self) -> int:
        """Of one step along k: the accumulators."""
        return self.rows * self.vectors

    @property
    def least_fma_share(self) -> float:
        """What the formula takes: the FMAs, a load for each row and vector, and to step along k
        the offset's load, the two pointers' sums, comparison and jump, one more to spare; for
        pixels another pointer of rows, and a prefetch for each vector where rows are few or planes
        are taken whole, which load no offset and spare nothing; for listed steps the second
        number, and its multiple for the panel's vectors, instead of a pointer's sum."""
        more = 0
        if self.form in ("pixels", _PLANES):
            more = 1 + (self.vectors if self.rows <= 2 or self.form == _PLANES else 0)
            more -= 2 if self.form == _PLANES else 0
        elif self.form == _LISTED:
            more = 1
        return self.fmas / (self.fmas + self.rows + self.vectors + 6 + more)


def parse(disassembly: str) -> list[Instruction]:
    matches = map(_INSTRUCTION.match, disassembly.splitlines())
    return [Instruction(int(m[1], 16), m[2], m[3]) for m in matches if m]


def innermost_fma_loops(instructions: list[Instruction]) -> list[list[Instruction]]:
    """The bodies of the loops that do FMAs and hold no smaller loop that does."""
    loops = []
    for position, last in enumerate(instructions):
        start = last.jumps_back_to
        if start is not None:
            body = [i for i in instructions[: position + 1] if i.address >= start]
            if any(i.is_fma for i in body):
                loops.append(body)
    return [
        loop
        for loop in loops
        if not any(
            other is not loop
            and loop[0].address <= other[0].address
            and other[-1].address <= loop[-1].address
            for other in loops
        )
    ]


def vector_loads(loop: list[Instruction]) -> int:
    """The instructions of a loop that read a vector from memory: inner loops store none."""
    return sum("(" in i.operands and bool(re.search(r"%[xyz]mm", i.operands)) for i in loop)


def stack_addresses(function: list[Instruction]) -> re.Pattern:
    """What an operand on the stack looks like."""
    # Only where the function makes it one; otherwise it is a register like others.
    frame_pointer = any(i.mnemonic == "mov" and i.operands == "%rsp,%rbp" for i in function)
    return re.compile(r"\((%rsp|%rbp)" if frame_pointer else r"\(%rsp")


def memory_faults(loop: list[Instruction], stack: re.Pattern) -> list[str]:
    """What a loop does in memory beside loading operands."""
    found = []
    for i in loop:
        text = f"{i.mnemonic} {i.operands}"
        if stack.search(i.operands) or i.mnemonic in ("push", "pop"):
            found.append(f"uses the stack: {text}")
        elif "(" in i.destination and not _NO_STORE.match(i.mnemonic):
            found.append(f"stores: {text}")
    return found


def faults(instructions: list[Instruction], kernel: Kernel) -> list[str]:
    """What keeps the kernel from the speed of its FMAs; empty where nothing does."""
    loops = innermost_fma_loops(instructions)
    if not loops:
        return ["no loop with FMAs"]
    stack = stack_addresses(instructions)
    found = []
    for loop in loops:
        fmas = [i for i in loop if i.is_fma]
        if len(fmas) % kernel.fmas:
            found.append(f"{len(fmas)} FMAs, which is no multiple of {kernel.fmas}")
        accumulators = {i.destination for i in fmas}
        if len(accumulators) != kernel.fmas:
            found.append(f"{len(accumulators)} accumulators instead of {kernel.fmas}")
        found += memory_faults(loop, stack)
        if fma_share(loop) < kernel.least_fma_share:
            found.append(f"FMAs are {fma_share(loop):.0%} of {len(loop)} instructions")
    return found


def fma_share(loop: list[Instruction]) -> float:
    return sum(i.is_fma for i in loop) / len(loop)


def objdump(*arguments: str) -> str:
    command = [OBJDUMP, *arguments, LIBRARY]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def disassemble(address: int, size: int) -> list[Instruction]:
    return parse(
        objdump(
            "--disassemble",
            "--no-show-raw-insn",
            f"--start-address={address}",
            f"--stop-address={address + size}",
        )
    )


_HALF = FORMS["gemm_ukernel", "false", "true", "false"]
_ROUNDED = ", rounded to bfloat16"


def form_of(ukernel: re.Match) -> str:
    form = FORMS[tuple(ukernel[k] for k in ("family", "lanes_are_groups", "half", "listed"))]
    return form if ukernel["result"] in (None, ukernel["dtype"]) else form + _ROUNDED


_WHOLE = [form for form in FORMS.values() if form not in (_HALF, _PLANES)]
# The sums of bfloat16 pairs are float32.
FAMILIES = [
    (isa, dtype, form)
    for isa, dtypes, forms in (
        ("avx2", ("float", "double"), _WHOLE),
        ("avx512", ("float", "double"), [*_WHOLE, _PLANES]),
        ("avx512", ("float",), [_HALF]),
        (
            "avx512_bf16",
            ("float",),
            [kind + end for kind in ("result channels", _HALF) for end in ("", _ROUNDED)],
        ),
    )
    if isa in COMPILED
    for dtype in dtypes
    for form in forms
]


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    """Every vector micro-kernel in the module."""
    found = []
    for line in objdump("--syms", "--demangle").splitlines():
        symbol = _SYMBOL.match(line)
        ukernel = symbol and _UKERNEL.search(symbol[3])
        if ukernel and ukernel["dtype"] in ("float", "double"):
            found.append(
                Kernel(
                    ukernel["isa"],
                    ukernel["dtype"],
                    int(ukernel["rows"]),
                    int(ukernel["vectors"]),
                    form_of(ukernel),
                    int(symbol[1], 16),
                    int(symbol[2], 16),
                )
            )
    assert found, "the module has no symbols of micro-kernels: was it stripped, were they renamed?"
    return found


@pytest.fixture(scope="module")
def report(request):
    """Lines that are printed after the module's tests, whether they passed or not."""
    lines: list[str] = []
    yield lines
    plugins = request.config.pluginmanager
    reporter, capture = plugins.get_plugin("terminalreporter"), plugins.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled():
        for line in ["", "Share of FMAs in the inner loops of the micro-kernels:", *lines]:
            reporter.write_line(line)


@pytest.mark.skipif(OBJDUMP is None, reason="needs objdump, of binutils")
@pytest.mark.parametrize(("isa", "dtype", "form"), FAMILIES)
def test_inner_loops_hold_their_accumulators_in_registers(isa, dtype, form, kernels, report):
    family = [k for k in kernels if (k.isa, k.dtype, k.form) == (isa, dtype, form)]
    assert family, "the module lacks this family of micro-kernels"
    # The full number of rows in each panel width: what is left of an image takes the others.
    by_width = {k.vectors: k for k in sorted(family, key=lambda k: k.rows)}
    tall = [by_width[vectors] for vectors in sorted(by_width)]
    assert [k.vectors for k in tall] == list(range(1, tall[-1].vectors + 1))
    # Fewer chains than latency times units would leave the FMA units waiting.
    assert tall[-1].fmas >= 8
    if form in ("pixels", _PLANES):
        # The rows are channels, of which a problem may have few.
        tall = family

    slow = {}
    for kernel in tall:
        code = disassemble(kernel.address, kernel.size)
        for loop in innermost_fma_loops(code):
            report.append(f"  {fma_share(loop):4.0%} of {len(loop):3} instructions: {kernel.name}")
        if found := faults(code, kernel):
            slow[kernel.name] = found
    assert not slow


@pytest.mark.skipif(OBJDUMP is None, reason="needs objdump, of binutils")
@pytest.mark.parametrize(
    ("dtype", "weight"),
    [
        ("float", False), ("double", False), ("BFloat16", False), ("Float16", False),
        ("float", True), ("double", True),
    ],
    ids=lambda value: value if isinstance(value, str) else "taps" if value else "pixels",
)  # fmt: skip
@pytest.mark.parametrize("isa", [isa for isa in ("avx2", "avx512") if isa in COMPILED])
def test_depthwise_inner_loops_hold_their_accumulators_in_registers(isa, dtype, weight, report):
    """The same for the micro-kernels of depthwise problems: no spills, each operand loaded once."""
    found = {}
    for line in objdump("--syms", "--demangle").splitlines():
        symbol = _SYMBOL.match(line)
        match = symbol and _DEPTHWISE.search(symbol[3])
        if match and (match["isa"], bool(match["weight"])) == (isa, weight):
            # Those that read the source as it lies.
            source, result = match["dtype"], match["result"] or match["dtype"]
            if source != result or source.rpartition("::")[2] != dtype:
                continue
            rows, columns = int(match["rows"]), int(match["columns"])
            at_edges = match["at_edges"] == "true"
            key = rows, columns, int(match["step"] or 1), at_edges
            found[key] = int(symbol[1], 16), int(symbol[2], 16)
    assert found, "the module lacks this family of micro-kernels"
    slow = {}
    for (rows, columns, step, at_edges), (address, size) in found.items():
        code = disassemble(address, size)
        name = f"depthwise {'weight ' if weight else ''}{dtype} {rows} x {columns} / {step}, {isa}"
        name += ", at edges" if at_edges else ""
        accumulators = rows * columns if weight else rows
        loops = innermost_fma_loops(code)
        faults = [] if loops else ["no loop with FMAs"]
        for loop in loops:
            fmas = [i for i in loop if i.is_fma]
            report.append(f"  {fma_share(loop):4.0%} of {len(loop):3} instructions: {name}")
            if len(fmas) % (rows * columns):
                faults.append(f"{len(fmas)} FMAs, which is no multiple of {rows * columns}")
            # A loop of two vectors has as many sums again.
            vectors = 1 if weight else len(fmas) // (rows * columns)
            if len({i.destination for i in fmas}) < vectors * accumulators:
                faults.append(f"fewer than {accumulators} accumulators")
            for i in loop:
                vector = re.search(r"%[yz]mm", i.operands)
                if vector and re.search(r"\(%rsp|\(%rbp\)", i.operands):
                    faults.append(f"uses the stack: {i.mnemonic} {i.operands}")
            # Each column of the source is loaded once, each weight once. A weight's gradient has a
            # loop that does so, and one that loads taps where they are multiplied.
            loads = vector_loads(loop)
            most = rows * columns + 1 if weight else columns + (rows - 1) * step + columns
            if loads > most * (len(fmas) // (rows * columns)):
                faults.append(f"{loads} loads instead of {most}")
        # kDepthwiseVectors: of seven pixels two, but of widened columns only where rows are short;
        # of bfloat16 always.
        has_registers = dtype in ("float", "double") or columns <= 3
        takes_two = isa == "avx512" and (dtype == "BFloat16" or (rows == 7 and has_registers))
        most_fmas = max((sum(i.is_fma for i in loop) for loop in loops), default=0)
        if not weight and takes_two != (most_fmas == 2 * rows * columns):
            faults.append(f"at most {most_fmas} FMAs a loop")
        if weight and step > 0 and min(map(vector_loads, loops), default=0) > rows * step + 1:
            faults.append("no loop loads a column once for all its taps")
        if faults:
            slow[name] = faults
    assert not slow


_AMX = re.compile(
    r"cpu::amx::amx_ukernel<(?P<rows>\d+), (?P<columns>\d+), [\w:]*NothingInterleaved>\("
)


@pytest.mark.skipif(OBJDUMP is None, reason="needs objdump, of binutils")
@pytest.mark.skipif("amx" not in COMPILED, reason="this build has no AMX")
@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (4, 1), (1, 2)])
def test_amx_multiplies_tiles_in_place(rows, columns, report):
    """A step of the loop loads each operand's tile once, and stores nothing: sums stay in tiles."""
    for line in objdump("--syms", "--demangle").splitlines():
        symbol = _SYMBOL.match(line)
        match = symbol and _AMX.search(symbol[3])
        if match and (int(match["rows"]), int(match["columns"])) == (rows, columns):
            code = disassemble(int(symbol[1], 16), int(symbol[2], 16))
            break
    else:
        pytest.fail("the module lacks this micro-kernel")
    starts = {instruction.address: at for at, instruction in enumerate(code)}
    loops = []
    for end, instruction in enumerate(code):
        target = re.match(r"([0-9a-f]+)$", instruction.operands)
        if instruction.mnemonic.startswith("j") and target:
            start = starts.get(int(target[1], 16), end + 1)
            loop = [i.mnemonic for i in code[start : end + 1]]
            if "tdpbf16ps" in loop:
                loops.append((loop, [i.operands for i in code[start : end + 1]]))
    loop, operands = min(loops, key=lambda pair: len(pair[0]))
    multiplies = [at for at, mnemonic in enumerate(loop) if mnemonic == "tdpbf16ps"]
    report.append(
        f"  {len(multiplies)} of {len(loop):3} instructions: {rows} x {columns} AMX tiles"
    )
    assert len(multiplies) == rows * columns
    assert len({operands[at].split(",")[-1] for at in multiplies}) == rows * columns
    assert loop.count("tileloadd") == rows + columns
    assert not {"tilestored", "tilezero", "ldtilecfg"}.intersection(loop)
    # What keeps a unit of the stores from falling asleep.
    assert [operands[at].count("zmm") for at, name in enumerate(loop) if name == "vaddps"] == [3]
    # 16 cycles each are time for so many others.
    assert len(loop) <= 12 * len(multiplies)


# The types that one-pixel kernels load, and the instructions that widen a vector of one, its load
# among them.
_STORAGE = {"float": 0, "double": 0, "Float16": 1, "BFloat16": 2}


def _symbols(pattern: re.Pattern, isa: str, storage: str) -> list[tuple[dict, int, int]]:
    """The matches of an instruction set and a storage type, with address and size."""
    found = []
    for line in objdump("--syms", "--demangle").splitlines():
        symbol = _SYMBOL.match(line)
        match = symbol and pattern.search(symbol[3])
        if match:
            # Of two alternatives the one that matched.
            fields = {k.rstrip("2"): v for k, v in match.groupdict().items() if v is not None}
            if (fields["isa"], fields["storage"].rpartition("::")[2]) == (isa, storage):
                found.append((fields, int(symbol[1], 16), int(symbol[2], 16)))
    return found


def _check_loop(
    loops: list[tuple[list[Instruction], re.Pattern]], fmas: int, operands: int, most: int
) -> tuple[list[Instruction], list[str]]:
    """The best loop of so many accumulators and loads, which may take ``most`` instructions, and
    its faults."""
    candidates = [
        (loop, stack)
        for loop, stack in loops
        if len({i.destination for i in loop if i.is_fma}) == fmas
        and sum("(" in i.operands for i in loop) >= operands
    ]
    if not candidates:
        return [], [f"no loop with {fmas} accumulators and {operands} loads"]
    loop, stack = max(candidates, key=lambda pair: fma_share(pair[0]))
    found = memory_faults(loop, stack)
    if sum(i.is_fma for i in loop) % fmas:
        found.append(f"FMAs are no multiple of {fmas}")
    if fma_share(loop) < fmas / most:
        found.append(f"{len(loop)} instructions instead of {most}")
    return loop, found


def _loops(address: int, size: int) -> list[tuple[list[Instruction], re.Pattern]]:
    code = disassemble(address, size)
    stack = stack_addresses(code)
    return [(loop, stack) for loop in innermost_fma_loops(code)]


over_one_pixel_kernels = pytest.mark.parametrize(
    ("isa", "storage"),
    [(isa, storage) for isa in ("avx2", "avx512") if isa in COMPILED for storage in _STORAGE],
)


@pytest.mark.skipif(OBJDUMP is None, reason="needs objdump, of binutils")
@over_one_pixel_kernels
def test_dot_products_hold_their_accumulators_in_registers(isa, storage, report):
    """Of one image and of several: what a step takes, and three to count, and two to spare."""
    conversions = _STORAGE[storage]
    vectors = 1 if isa == "avx512" else 2  # in a step: a cache line of values
    kernels = _symbols(_DOT, isa, storage)
    columns = sorted(int(fields["columns"]) for fields, _, _ in kernels)
    assert columns == ([1, 2, 4] if isa == "avx512" else [1, 2])
    slow = {}
    for fields, address, size in kernels:
        rows, columns = int(fields["rows"]), int(fields["columns"])
        name = f"dot products {storage} {rows} x {columns}, {isa}"
        fmas = rows * columns * vectors
        # Fewer chains than latency times units would leave the FMA units waiting.
        assert fmas >= 8
        loads = columns + rows * (conversions or (columns > 1))
        most = fmas + vectors * loads + 3 + 2
        loop, found = _check_loop(_loops(address, size), fmas, vectors * (rows + columns), most)
        if found:
            slow[name] = found
        else:
            report.append(f"  {fma_share(loop):4.0%} of {len(loop):3} instructions: {name}")
    assert not slow


@pytest.mark.skipif(OBJDUMP is None, reason="needs objdump, of binutils")
@over_one_pixel_kernels
def test_rows_times_factors_hold_their_accumulators_in_registers(isa, storage, report):
    """In every number of results and every width of a row."""
    conversions = _STORAGE[storage]
    kernels = {}
    for fields, address, size in _symbols(_ROWS, isa, storage):
        kernels.setdefault(int(fields["rows"]), []).extend(_loops(address, size))
    assert sorted(kernels) == [1, 2, 3, 4, 6]
    slow = {}
    for rows, loops in kernels.items():
        # row_vectors of tile_one_pixel.h, then half as many, and so on.
        widest = vectors = 12 // rows if isa == "avx2" else 16 if rows == 1 else 24 // rows
        while vectors:
            name = f"rows times factors {storage} {rows} x {vectors} vectors, {isa}"
            # The vectors, the factors, four to step and to count, two to spare.
            most = rows * vectors + vectors * max(conversions, 1) + rows + 4 + 2
            loop, found = _check_loop(loops, rows * vectors, rows + vectors, most)
            if found:
                slow[name] = found
            elif vectors == widest:
                report.append(f"  {fma_share(loop):4.0%} of {len(loop):3} instructions: {name}")
            vectors //= 2
    assert not slow


@pytest.mark.skipif(OBJDUMP is None, reason="needs objdump, of binutils")
@pytest.mark.skipif("avx512_bf16" not in COMPILED, reason="this build has no AVX512_BF16")
def test_results_are_prefetched():
    """Compilers leave out calls of a function that does nothing but prefetch, unless it is inlined.

    Into L1, where nothing else in this function does: what the next item reads it asks L2 for.
    """
    functions = _symbols(_ROUNDS, "avx512_bf16", "BFloat16")
    assert functions, "the module lacks the function that stores rounded sums"
    for _, address, size in functions:
        mnemonics = {i.mnemonic for i in disassemble(address, size)}
        assert mnemonics & {"prefetcht0", "prefetchw"}


@pytest.mark.skipif(OBJDUMP is None, reason="needs objdump, of binutils")
@over_one_pixel_kernels
def test_strided_depthwise_loops_hold_their_accumulators_in_registers(isa, storage, report):
    """Two loops, one for each phase: a broadcast weight, and a load for each multiply-add."""
    kernels = _symbols(_STRIDED, isa, storage)
    assert {(int(f["rows"]), int(f["vectors"])) for f, _, _ in kernels} == {
        (4, 1), (1, 1), (2, 2), (1, 2), (1, 3), (1, 4)
    }  # fmt: skip
    slow = {}
    for fields, address, size in kernels:
        fmas = int(fields["rows"]) * int(fields["vectors"])
        name = f"strided depthwise {storage} {fields['rows']} x {fields['vectors']} vectors, {isa}"
        loops = [
            (loop, stack)
            for loop, stack in _loops(address, size)
            if len({i.destination for i in loop if i.is_fma}) == fmas
        ]
        found = [] if len(loops) == 2 else [f"{len(loops)} loops with {fmas} accumulators"]
        for loop, stack in loops:
            found += memory_faults(loop, stack)
            # The weight, loads that are no part of a multiply-add, four to step and to count, two
            # to spare.
            if len(loop) > 2 * fmas + 1 + 4 + 2:
                found.append(f"{len(loop)} instructions")
            report.append(f"  {fma_share(loop):4.0%} of {len(loop):3} instructions: {name}")
        if found:
            slow[name] = found
    assert not slow


# ---- the reading itself, on made-up code: two accumulators, one of them in memory when spilled

_MADE_UP = Kernel("avx2", "float", 2, 1, "pixels", 0, 0)
_GOOD = """
  10:	push   %rbp
  20:	mov    (%r9,%rdi,8),%rcx
  24:	vmovups (%rsi),%ymm4
  28:	vbroadcastss (%r15,%rcx,4),%ymm5
  2c:	vfmadd231ps %ymm5,%ymm4,%ymm0
  30:	vbroadcastss (%rbp,%rcx,4),%ymm6
  34:	vfmadd231ps %ymm6,%ymm4,%ymm1
  38:	add    $0x1,%rdi
  3c:	cmp    %rdi,%r10
  40:	jne    20 <conv2d_ext+0x20>
  44:	vmovups %ymm0,(%rax)
  48:	ret
"""
_SIX_NOPS = "".join(f"  {address:x}:\tnop\n" for address in range(0x35, 0x3B))


def _edited(old: str, new: str) -> list[Instruction]:
    assert old in _GOOD
    return parse(_GOOD.replace(old, new))


def test_reading_accepts_a_loop_in_registers():
    (loop,) = innermost_fma_loops(parse(_GOOD))
    assert [loop[0].address, loop[-1].address] == [0x20, 0x40]
    assert fma_share(loop) == 2 / 9
    assert faults(parse(_GOOD), _MADE_UP) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("vfmadd231ps %ymm6,%ymm4,%ymm1", "vaddps %ymm6,%ymm4,%ymm1", "1 FMAs"),
        ("%ymm6,%ymm4,%ymm1", "%ymm6,%ymm4,%ymm0", "1 accumulators instead of 2"),
        ("add    $0x1,%rdi", "vmovaps %ymm1,0x20(%rsp)", "uses the stack: vmovaps"),
        ("vmovups (%rsi),%ymm4", "vmovaps 0x20(%rsp),%ymm4", "uses the stack: vmovaps"),
        ("push   %rbp", "mov    %rsp,%rbp", "uses the stack: vbroadcastss (%rbp,%rcx,4),%ymm6"),
        ("add    $0x1,%rdi", "vmovups %ymm1,(%rax,%rdi,4)", "stores: vmovups %ymm1,(%rax,%rdi,4)"),
        ("add    $0x1,%rdi", "addq   $0x1,(%rdi)", "stores: addq"),
        ("  38:", _SIX_NOPS + "  38:", "FMAs are 13% of 15 instructions"),
        ("jne    20", "jne    44", "no loop with FMAs"),
    ],
)  # fmt: skip
def test_reading_finds_what_slows_a_loop(old, new, fault):
    assert any(fault in found for found in faults(_edited(old, new), _MADE_UP))
