"""Nothing compiled for an instruction set runs on a CPU that lacks it, wherever the tests run.

Each engine lies in a namespace of its own, and its tables of pointers are all that others see of it
before a CPU was asked whether it has the instruction set. The machine code of the built library
shows both: who has wide instructions, and who calls or jumps to whom. Nothing is run.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator

import pytest
from child import LIBRARY

import conv2d_ext

OBJDUMP = shutil.which("objdump")
COMPILED = conv2d_ext.build_config()["compiled_isas"]

pytestmark = [
    pytest.mark.skipif(OBJDUMP is None, reason="needs objdump, of binutils"),
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "AMD64"), reason="instruction sets of x86-64"
    ),
]

# What each instruction set includes, beside itself.
INCLUDES = {
    "": (),
    "avx2": ("",),
    "avx512": ("", "avx2"),
    "avx512_bf16": ("", "avx2", "avx512"),
    "amx_emulated": ("", "avx2", "avx512"),
    "amx": ("", "avx2", "avx512", "avx512_bf16"),
}
# A mangled name has the namespace's length before it, so that none is the start of another. Before
# that stands the namespace around it, or a reference to it.
_NAMESPACE = re.compile(
    r"(?:3cpu|NS[0-9A-Z]*_)(?:4(avx2)|6(avx512)|11(avx512_bf16)|3(amx)|12(amx_emulated))"
)
_FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
# What an instruction's bytes begin with (but for prefixes of other instructions), and its text.
_INSTRUCTION = re.compile(r"^\s*[0-9a-f]+:\t([0-9a-f]{2}) [0-9a-f ]*\t(\S+)\s*(.*)$")
# A direct call or jump, to the start of a function or into it.
_TARGET = re.compile(r"^[0-9a-f]+ <([^>+]+)(\+0x[0-9a-f]+)?>")
# The encodings of AVX and later and of AVX-512; with the former there also are AVX-512's masks.
_VEX, _EVEX = ("c4", "c5"), "62"
_MASK = re.compile(r"%k[0-7]")
_TILES = re.compile(r"^(?:tile|ldtilecfg|sttilecfg|tdp)")
# Instructions of AVX512_BF16 that kernels of AVX-512 have behind a question to the CPU, which is
# read in the same function (isa/cpu_features.h). A compiler may put what is rare apart.
_GUARDED, _GUARD = ("vcvtneps2bf16", "vcvtne2ps2bf16"), "cpu_narrows_bfloat16"
_GUARDED_IN = ("avx512", "amx_emulated")
_APART = re.compile(r"\.cold(?:\.\d+)?$")


def isa_of_function(name: str) -> str:
    """What a function is compiled for, by its (mangled) name; '' is any CPU."""
    found = {next(filter(None, groups)) for groups in _NAMESPACE.findall(name)}
    if len(found) > 1:
        # A template of one with an argument of another: as wide as the widest.
        return max(found, key=lambda isa: len(INCLUDES[isa]))
    return found.pop() if found else ""


def isa_of_instruction(first_byte: str, mnemonic: str, operands: str) -> str:
    """The least instruction set that has an instruction."""
    if _TILES.match(mnemonic):
        return "amx"
    if mnemonic.startswith(("vdpbf16", "vcvtne")):
        return "avx512_bf16"
    if first_byte == _EVEX or (first_byte in _VEX and _MASK.search(operands)):
        return "avx512"
    return "avx2" if first_byte in _VEX else ""


def faults(disassembly: Iterable[str]) -> Iterator[str]:
    """What would run, or could be reached, on a CPU that lacks it."""
    function, isa = "", ""
    guarded, guards = set(), set()
    for line in disassembly:
        if _GUARD in line:
            guards.add(_APART.sub("", function))
        if begin := _FUNCTION.match(line):
            function = begin[1]
            isa = isa_of_function(function)
            continue
        instruction = _INSTRUCTION.match(line)
        if instruction is None:
            continue
        first_byte, mnemonic, operands = instruction.groups()
        has = (isa, *INCLUDES[isa])
        needed = isa_of_instruction(first_byte, mnemonic, operands)
        if mnemonic in _GUARDED and isa in _GUARDED_IN:
            guarded.add(_APART.sub("", function))
        elif needed not in has:
            yield f"{function} has {mnemonic} {operands}, of {needed}"
        if target := _TARGET.match(operands):
            reached = isa_of_function(target[1])
            if reached not in has:
                yield f"{function} calls {target[1]}, of {reached}"
    for function in sorted(guarded - guards):
        yield f"{function} has what {_GUARD} allows, and does not ask for it"


def test_no_code_is_reached_that_the_cpu_may_lack():
    command = [OBJDUMP, "--disassemble", LIBRARY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = list(process.stdout)
    assert process.returncode == 0
    seen = {isa_of_function(match[1]) for match in map(_FUNCTION.match, lines) if match}
    # Namespaces' names have not changed, and the library is not stripped.
    assert seen == {"", *COMPILED} - {"portable"}
    assert sorted(set(faults(lines))) == []


@pytest.mark.parametrize(
    ("function", "instruction", "fault"),
    [
        ("_ZN3cpu6engineEv", "e8 00\tcall   10 <_ZN3cpu6avx51211make_engineEv>", "calls"),
        ("_ZN3cpu6engineEv", "e9 00\tjmp    10 <_ZN3cpu4avx23runEv+0x8>", "calls"),
        ("_ZN3cpu4avx23runEv", "e8 00\tcall   10 <_ZN3cpu6avx5123runEv>", "calls"),
        ("_ZN3cpu6avx5123runEv", "e8 00\tcall   10 <_ZN3cpu11avx512_bf163runEv>", "calls"),
        ("_ZNSt6vectorIfE4sizeEv", "c5 fc\tvmovups (%rsi),%xmm0", "has vmovups"),
        ("_ZNSt6vectorIfE4sizeEv", "c4 e2\tandn   %eax,%ebx,%ecx", "has andn"),
        ("_ZN3cpu4avx23runEv", "62 f1\tvmovdqu64 (%rsi),%zmm0", "has vmovdqu64"),
        ("_ZN3cpu4avx23runEv", "62 f3\tvpternlogd $0x1,%ymm0,%ymm1,%ymm2", "has vpternlogd"),
        ("_ZN3cpu4avx23runEv", "c5 f8\tkmovw  %k0,%eax", "has kmovw"),
        ("_ZN3cpu6avx5123runEv", "62 f2\tvdpbf16ps %zmm1,%zmm2,%zmm3", "has vdpbf16ps"),
        ("_ZN3cpu6avx5123runEv", "62 f2\tvcvtneps2bf16 %zmm1,%ymm2", "has what"),
        ("_ZN3cpu4avx23runEv", "62 f2\tvcvtneps2bf16 %zmm1,%ymm2", "has vcvtneps2bf16"),
        ("_ZN3cpu6avx5123runEv", "62 f2\tvcvtne2ps2bf16 %zmm1,%zmm2,%zmm0", "has what"),
        ("_ZN3cpu12amx_emulated3runEv", "c4 e2\ttilezero %tmm0", "has tilezero"),
    ],
)
def test_what_a_cpu_may_lack_is_found(function, instruction, fault):
    found = list(faults([f"0000000000000010 <{function}>:", f"  10:\t{instruction}"]))
    assert len(found) == 1
    assert found[0].startswith(f"{function} {fault}")


@pytest.mark.parametrize(
    ("function", "instruction"),
    [
        ("_ZN3cpu6engineEv", "0f 10\tmovups (%rsi),%xmm0"),
        ("_ZN3cpu6engineEv", "e8 00\tcall   10 <_ZN3cpu8portable3runEv>"),
        ("_ZN3cpu4avx23runEv", "c5 fc\tvmovups (%rsi),%ymm0"),
        ("_ZN3cpu6avx5123runEv", "e8 00\tcall   10 <_ZN3cpu4avx23runEv>"),
        ("_ZN3cpu3amx3runEv", "c4 e2\ttdpbf16ps %tmm1,%tmm2,%tmm0"),
        ("_ZN3cpu6avx5123runEv", "e8 00\tcall   10 <_Znwm@plt>"),
    ],
)
def test_what_every_such_cpu_has_is_no_fault(function, instruction):
    assert list(faults([f"0000000000000010 <{function}>:", f"  10:\t{instruction}"])) == []


def test_what_is_asked_for_is_no_fault():
    lines = [
        "0000000000000010 <_ZN3cpu6avx5123runEv>:",
        "  10:\t80 3d\tcmpb   $0x0,0x10(%rip)        # 20 <_ZN3cpu20cpu_narrows_bfloat16E>",
        "  18:\t62 f2\tvcvtneps2bf16 %zmm1,%ymm2",
        "  20:\t62 f2\tvcvtne2ps2bf16 %zmm1,%zmm2,%zmm0",
    ]
    assert list(faults(lines)) == []
