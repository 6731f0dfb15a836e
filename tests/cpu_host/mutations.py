"""Bugs put into the CPU engine one at a time, each of which the fuzzer must catch.

    python tests/cpu_host/mutations.py [--list] [--only TEXT] [--seconds N] [--seed N]

A mutation is an exact replacement in one file of csrc/cpu. The fuzzer's harness is built with it
for one instruction set and type; the corpus and then random inputs from a fixed seed must make it
fail. One that survives means that a test is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from fuzz.build import ROOT, build, machine_isas
from fuzz.main import command, corpus_files

SECONDS = 60  # of random inputs, at most
SEED = 1


@functools.cache
def _cpu_flags() -> frozenset[str]:
    with contextlib.suppress(OSError):
        return frozenset(pathlib.Path("/proc/cpuinfo").read_text().split())
    return frozenset()


@dataclasses.dataclass(frozen=True)
class Mutation:
    file: str  # in csrc/cpu
    name: str  # what is broken
    old: str  # occurs once
    new: str
    dtype: str = "float32"
    # "none" where other numbers show it; what reads or writes too far needs "address".
    sanitizer: str = "none"
    # None: avx2 where the machine may have it. Several are held against one another.
    isas: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"

    def instruction_sets(self) -> tuple[str, ...]:
        return self.isas or (("avx2",) if "avx2" in machine_isas() else ("portable",))

    def runs_here(self) -> bool:
        """Whether this machine has the instruction sets. (Those that have no portable code path
        aren't reached without AVX2.)"""
        flags = _cpu_flags()
        needed = {
            "avx2": "avx2",
            "avx512": "avx512bw",
            "avx512_bf16": "avx512_bf16",
            "amx_emulated": "avx512bw",
        }
        return "avx2" in flags and all(
            isa == "portable" or needed[isa] in flags for isa in self.instruction_sets()
        )


def replaced(mutation: Mutation) -> str:
    """The file with the replacement; raises where it does not have the text once."""
    text = (ROOT / "csrc/cpu" / mutation.file).read_text()
    found = text.count(mutation.old)
    if found != 1:
        raise ValueError(f"{mutation.file} has this text {found} times, not once: {mutation.old}")
    return text.replace(mutation.old, mutation.new)


@contextlib.contextmanager
def altered_sources(mutation: Mutation) -> Iterator[pathlib.Path]:
    """A copy of what the harness is built from, with the replacement."""
    text = replaced(mutation)
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        skipped = shutil.ignore_patterns("cuda", "corpus", "__pycache__", "*.py")
        for part in ("csrc", "tests/fuzz"):
            shutil.copytree(ROOT / part, root / part, ignore=skipped)
        (root / "csrc/cpu" / mutation.file).write_text(text)
        yield root


def _no_core() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _run(program: pathlib.Path, *arguments: str, sanitizer: str, most: float) -> str:
    """How a run of the harness failed, in a line; "" where it did not."""
    try:
        done = subprocess.run(
            command(program, *arguments, sanitizer=sanitizer),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=most,
            preexec_fn=_no_core,
        )
    except subprocess.TimeoutExpired:
        return "does not end"
    if done.returncode == 0:
        return ""
    lines = done.stderr.splitlines()
    for mark in ("FAILED: ", "ERROR: ", "WARNING: ThreadSanitizer", "runtime error: "):
        for line in lines:
            if mark in line:
                return line[line.index(mark) :].removeprefix("FAILED: ")[:110]
    return f"ends with {done.returncode}"


def _build(mutation: Mutation, root: pathlib.Path) -> pathlib.Path:
    """The harness for what the mutation is in, of these sources."""
    return build(
        mutation.sanitizer,
        mutation.instruction_sets(),
        dtypes=(mutation.dtype,),
        root=root,
        engine_level="-Og",
    )


def _replay(mutation: Mutation, program: pathlib.Path) -> str:
    # What does not end is stopped long after what does.
    return _run(program, "replay", *corpus_files(), sanitizer=mutation.sanitizer, most=240)


def run_unaltered(mutation: Mutation) -> str:
    """How the corpus fails without the mutation: "", or else nothing shows that it was caught."""
    return _replay(mutation, _build(mutation, ROOT))


def run_mutant(mutation: Mutation, seconds: float = SECONDS, seed: int = SEED) -> str:
    """How the fuzzer caught the mutant; "" where it survived."""
    with altered_sources(mutation) as root:
        program = _build(mutation, root)
    try:
        how = _replay(mutation, program)
        if how:
            return f"corpus: {how}"
        how = _run(
            program,
            "generate",
            str(seed),
            str(10**9),
            str(seconds),
            sanitizer=mutation.sanitizer,
            most=seconds + 60,
        )
        return f"random: {how}" if how else ""
    finally:
        program.unlink(missing_ok=True)


M = Mutation
PAIRS = {"dtype": "bfloat16", "isas": ("avx512_bf16",)}
AMX = {"dtype": "bfloat16", "isas": ("amx_emulated",)}

MUTATIONS = (
    # ---- Winograd
    M(
        "kernels/winograd.h",
        "a transformed row of weights has another sign",
        "t[2] = outer - inner;",
        "t[2] = outer + inner;",
    ),
    M(
        "drivers/winograd.h",
        "a later block of channels overwrites the sums",
        "operands.accumulate = c > 0;",
        "operands.accumulate = false;",
    ),
    M(
        "drivers/winograd.h",
        "chains follow the blocks of channels",
        "operands.chain = tiling.chain;",
        "operands.chain = channels;",
    ),
    M(
        "drivers/winograd.h",
        "taps that descend are read from the first on",
        "const int64_t step = (descends ? -1 : 1) * width;",
        "const int64_t step = width;",
    ),
    M(
        "drivers/winograd.h",
        "both columns of a square are the first",
        "V::store(pixels + width + v, y[0][1]);",
        "V::store(pixels + width + v, y[0][0]);",
    ),
    M(
        "drivers/winograd.h",
        "squares that are not finite stay as they are",
        "if (!finish(item, panel)) compute_again(item, panel);",
        "finish(item, panel);",
    ),
    M(
        "drivers/winograd_again.h",
        "a panel's other channels are computed again, too",
        "if (square.again[l]) to[l * gemm.destination_m]",
        "to[l * gemm.destination_m]",
        isas=("avx2", "avx512"),
    ),
    M(
        "plan/tile_winograd.cpp",
        "tiles begin within squares",
        "t.tile_rows = min64(2 * tile_rows, gemm.rows);",
        "t.tile_rows = min64(max64(2 * tile_rows - 1, 1), gemm.rows);",
    ),
    M(
        "plan/tile_winograd.cpp",
        "channels are staged in parts of vectors",
        "round_up(limit::kStagedChannels, vector.lanes)",
        "limit::kStagedChannels",
    ),
    # ---- AMX
    M(
        "kernels/amx.h",
        "sums of the segment before are dropped",
        "!Interleaved::kAccumulates || !operands.accumulate",
        "operands.depth != 0",
        **AMX,
    ),
    M(
        "kernels/amx.h",
        "pixels at uneven distances are taken as even",
        "uneven != 0 ? 0 : step",
        "count != kTileRows ? 0 : step",
        **AMX,
    ),
    M(
        "kernels/amx.h",
        "rows that a rest lacks are stored",
        "if (count == kTileRows) return tile_store<N>",
        "return tile_store<N>",
        **AMX,
    ),
    M(
        "drivers/amx.h",
        "images continue one another across a border",
        "image * operand.patch.image_pitch + x - image * pitches.image",
        "x",
        **AMX,
    ),
    M(
        "drivers/amx.h",
        "sums of a later run begin at the first row",
        "amx_panel(item.row_tiles + first / kTileRows",
        "amx_panel(item.row_tiles",
        **AMX,
    ),
    M(
        "drivers/amx.h",
        "what waits takes a pixel of the next micro-kernel's sums",
        "run->sum < x + kSums",
        "run->sum <= x + kSums",
        **AMX,
    ),
    M(
        "pack/line_stores.h",
        "the last pixels that wait are not stored",
        "while (left_ > 0) advance();",
        "advance();",
        **AMX,
    ),
    M(
        "plan/tile_amx.h",
        "rows of sums begin without the border between them",
        "(tile.rows - 1) * row + tile.cols;\n  return {row,",
        "tile.rows * tile.cols;\n  return {tile.cols,",
        **AMX,
    ),
    M(
        "pack/store.h",
        "sums of no pixel are stored",
        "visit(x, min64(run - col, end - x),",
        "visit(x, min64(run_pitch - col, end - x),",
        **AMX,
    ),
    M(
        "pack/amx.h",
        "weights of channels that the last block lacks are not cleared",
        "if (present == 0) return;",
        "return;",
        **AMX,
    ),
    M(
        "pack/amx.h",
        "the last block of a patch reads channels beyond the last",
        "kBlockChannels - (last ? source_.missing : 0)",
        "kBlockChannels",
        **AMX,
    ),
    M(
        "plan/conv_gemm.cpp",
        "columns that are taken together run backwards in the source alone",
        "stepped.weight_j = -gemm.weight_j;",
        "",
        **AMX,
    ),
    M(
        "pack/amx_columns.h",
        "the last step of a row takes columns beyond the kernel",
        "min64(gemm.columns, gemm.kernel_columns() - number * gemm.columns)",
        "gemm.columns",
        **AMX,
    ),
    M(
        "pack/amx_columns.h",
        "the source's last columns are not followed by padding",
        "fill_zero(dst + in.end * words_, (count - in.end) * words_);",
        "",
        **AMX,
    ),
    M(
        "pack/amx_columns.h",
        "strips of more rows than there is room for",
        "const int64_t most = limits::amx::kRowBlocks * gemm_.columns / strip;",
        "const int64_t most = limits::amx::kRowBlocks * gemm_.columns;",
        dtype="bfloat16",
        sanitizer="address",
        isas=("amx_emulated",),
    ),
    M(
        "pack/amx_columns.h",
        "weights of far channels are those of the first",
        "load.offset = j * column_step + c * channel_step + first;",
        "load.offset = j * column_step + first;",
        **AMX,
    ),
    M(
        "pack/pixel_rows.h",
        "the last step of a segment's pixels is not filled up",
        "store_words(to + filled, mask_of_first(length - filled), _mm512_setzero_si512());",
        "",
        **AMX,
    ),
    M(
        "pack/pixel_rows.h",
        "the same of a kernel with one tap",
        "fill_zero(rows->channel + c * length + segment.pixels(), length - segment.pixels());",
        "",
        **AMX,
    ),
    M(
        "pack/patch.h",
        "rows with padding between them are one run",
        "cols.run_length == source_.width &&\n           source_.row",
        "source_.row",
        **PAIRS,
    ),
    M(
        "drivers/grad_weight_steps.h",
        "tables are those of the first segment",
        "if (pixels != pixels_of_tables) fill_tables",
        "if (pixels_of_tables < 0) fill_tables",
        **PAIRS,
    ),
    M(
        "drivers/amx.h",
        "shared weights of a kernel in pieces lie one upon the other",
        " + segment.tap_rows * segment.tap_col;",
        ";",
        **AMX,
    ),
    M(
        "drivers/grad_weight_steps.h",
        "tiles are not configured",
        "const AmxScope tiles;",
        "",
        **AMX,
    ),
    # ---- kernels
    M(
        "kernels/gemm.h",
        "a pass leaves the panel's operand where it has moved it",
        "operands_.a -= k_ * operands_.a_pitch;",
        "",
    ),
    M(
        "kernels/gemm.h",
        "a pass leaves the panel's steps where it has moved them",
        "    operands_.k_offset -= k_;\n",
        "",
    ),
    M(
        "kernels/gemm.h",
        "later passes add to the rows behind those of the first",
        "    operands.c -= rows * operands.c_pitch;\n",
        "",
    ),
    M(
        "kernels/gemm.h",
        "a panel ends with its first pass",
        "    operands_.depth = depth_;\n",
        "",
    ),
    M(
        "kernels/gemm.h",
        "each pass goes on behind the rows of the one before",
        "    operands.j_offset -= rows;\n",
        "",
    ),
    M(
        "kernels/gemm.h",
        "chains don't end",
        "k_end - k_offset > operands.chain ? k_offset",
        "false ? k_offset",
    ),
    M(
        "kernels/gemm.h",
        "the bias is added after every pass",
        "if (!ends()) operands.bias = nullptr;",
        "",
    ),
    M(
        "kernels/gemm.h",
        "a later pass overwrites the sums of the first",
        "operands.accumulate = accumulate_ || k > 0;",
        "operands.accumulate = accumulate_;",
    ),
    M(
        "kernels/gemm.h",
        "steps after the rounds of four don't advance in the panel",
        "if (kRowsInTurn) a += a_pitch;",
        "",
    ),
    # ---- sums of pairs that are rounded where they are summed
    M(
        "kernels/gemm.h",
        "denormal results are flushed",
        "if (__builtin_expect(rows.all_nonzero(), 1)) return;",
        "return;",
        **PAIRS,
    ),
    M(
        "kernels/gemm.h",
        "rows are stored as wide as the panel",
        "stored_(mask_of_first(lanes - kBefore))",
        "stored_(kAll)",
        **PAIRS,
    ),
    M(
        "drivers/gemm.h",
        "rows that don't continue one another are taken for one",
        "const int64_t rows = is_one_run(tile) ? 1 : tile.images * tile.rows, run",
        "const int64_t rows = 1, run",
        **PAIRS,
    ),
    # ---- products with the padding that are left out
    M(
        "kernels/gemm.h",
        "the rows of C of listed steps lie one after the other",
        "operands.c_offset[j] * operands.c_pitch",
        "j * operands.c_pitch",
    ),
    M(
        "kernels/gemm.h",
        "the bias of listed steps is added after each chain",
        "kListed ? chain + 1 == operands.chains : k_offset == k_end",
        "kListed || k_offset == k_end",
    ),
    M(
        "drivers/listed_steps.h",
        "an infinite weight is not seen",
        "const bool leaves_out = are_finite",
        "const bool leaves_out = true || are_finite",
    ),
    M(
        "drivers/listed_steps.h",
        "chains take as many steps as with the padding",
        "ends[i] = steps_before(number, min64(k + (i + 1) * chain, end)) - before;",
        "ends[i] = min64((i + 1) * chain, steps_before(number, end) - before);",
    ),
    M(
        "drivers/listed_steps.h",
        "the next channel's weights follow those that are taken",
        "step[1] = step[1 - numbers] + all_steps.size() * L;",
        "step[1] = step[1 - numbers] + of.steps() * L;",
    ),
    M(
        "drivers/listed_steps.h",
        "a later pass overwrites the sums of the first",
        "k += at_once, operands.accumulate = true)",
        "k += at_once)",
    ),
    M(
        "drivers/gemm.h",
        "products with the padding are left out before a bias of -0",
        "!has_negative_zero(item.bias, width)",
        "true",
    ),
    M(
        "plan/tile_gemm.cpp",
        "products with the padding are left out where rounding is downward",
        "if (std::fegetround() == FE_DOWNWARD) return {};",
        "",
    ),
    M(
        "plan/tile_gemm.cpp",
        "products with the padding are left out of sums that start from a bias",
        " && !gemm.starts_from_bias() &&",
        " &&",
    ),
    M(
        "drivers/gemm.h",
        "listed results lie in the first image",
        "places[at] = n * gemm.destination_n + p",
        "places[at] = p",
    ),
    M(
        "drivers/grad_weight.h",
        "listed weight elements lie column by column",
        "scratch.listed_numbers[at] = (c * t.tap_rows + i) * t.tap_cols + j;",
        "scratch.listed_numbers[at] = (c * t.tap_cols + j) * t.tap_rows + i;",
    ),
    M(
        "drivers/grad_weight.h",
        "weights of few channels side by side are stored channel by channel",
        "if (++channel == t.channels) channel = 0, ++tap;",
        "if (++tap == taps) tap = 0, ++channel;",
    ),
    M(
        "plan/conv_gemm.cpp",
        "depthwise taps that some pixels meet are left out",
        "met.count() > kLeastTaps && !meets(met.begin)",
        "met.count() > kLeastTaps",
    ),
    M(
        "plan/conv_gemm.cpp",
        "sums without depthwise taps may start from their bias",
        "return pays_for_looking(gemm, saved) && !met.starts_from_bias() ? met : gemm;",
        "return pays_for_looking(gemm, saved) ? met : gemm;",
    ),
    M(
        "plan/conv_gemm.cpp",
        "depthwise taps are left out of several chains",
        "return one_chain && !gemm.starts_from_bias()",
        "return !gemm.starts_from_bias()",
    ),
    M(
        "drivers/depthwise.h",
        "depthwise taps are left out whatever their weights",
        "task.whole != nullptr && !zeros_checked ? task.whole : task.gemm",
        "task.gemm",
    ),
    M(
        "plan/padding_classes.cpp",
        "a tile where no pixel meets all taps has a whole class",
        "const bool has_whole = rows.whole >= 0 && cols.whole >= 0;",
        "const bool has_whole = true;",
        sanitizer="address",
    ),
    M(
        "plan/padding_classes.cpp",
        "no room for the list of all steps",
        "(has_whole ? 0 : 1) <= kMost",
        "0 <= kMost + 1",
        sanitizer="address",
    ),
    M(
        "drivers/listed_steps.h",
        "the result that takes all steps is summed twice",
        "int64_t first = 0, from = shown;",
        "int64_t first = 0, from = padding.has_whole ? shown : 0;",
    ),
    M(
        "plan/padding_classes.cpp",
        "the list of all steps is the first class's",
        "= {0, 0, 0, 0, 0, h.taps, 0, w.taps};",
        "= crossed.classes.classes[0];",
    ),
    M(
        "plan/padding_classes.cpp",
        "where classes would be too many, rows at edges leave out a column",
        "Band{0, w.positions, 0, w.taps}",
        "Band{0, w.positions, 0, w.taps - 1}",
    ),
    M(
        "plan/padding_classes.cpp",
        "a weight's pixels are as far apart as its taps",
        "{axis.tap, axis.source(position, tap), axis.step}",
        "{axis.tap, axis.source(position, tap), axis.tap}",
    ),
    M(
        "kernels/gemm.h",
        "all blocks of rows read the first one's pixels",
        "operands.j_offset += block_rows;",
        "",
    ),
    M(
        "kernels/gemm.h",
        "the bias of the first vector for all",
        "V::add(acc[j][v], V::load(bias + v * V::kLanes))",
        "V::add(acc[j][v], V::load(bias))",
    ),
    M(
        "kernels/pixels.h",
        "the bias is added after every chain",
        "operands.bias != nullptr && k == depth",
        "operands.bias != nullptr",
    ),
    M(
        "kernels/pixels.h",
        "all rows start from the first one's bias",
        "V::broadcast(operands.start + j)",
        "V::broadcast(operands.start)",
    ),
    M(
        "kernels/pixels.h",
        "all blocks of rows start from the first one's bias",
        "    block.start += MR;\n",
        "",
    ),
    M(
        "kernels/pixels.h",
        "all blocks of rows are the first one's weights",
        "    block.w += MR * block.w_pitch;\n",
        "",
    ),
    M(
        "kernels/pixels.h",
        "the fourth of four rows is the third",
        "j % 4 == 3 ? pitch_of_three :",
        "j % 4 == 3 ? 2 * pitch :",
    ),
    M(
        "drivers/pixels.h",
        "the last panel of whole planes leaves the run",
        "o.last = most - pixel;",
        "o.last = item.run;",
        sanitizer="address",
        isas=("avx512",),
    ),
    M(
        "drivers/pixels.h",
        "narrower panels of whole planes begin with the run",
        "if (larger < end) visit(larger, panels.vectors,",
        "if (larger < end) visit(0, panels.vectors,",
        isas=("avx512",),
    ),
    M(
        "drivers/pixels.h",
        "panels of whole planes that are not among the first few are left out",
        "p < panels.count; p += tiling.panels_at_once",
        "p < panels.count; p += panels.count",
        isas=("avx512",),
    ),
    M(
        "kernels/whole_planes.h",
        "chains of whole planes go on over their segment's end",
        "min64(operands.segment, left), chain",
        "left, chain",
        isas=("avx512",),
    ),
    M(
        "kernels/whole_planes.h",
        "chains of whole planes after the first segment go on over its end",
        "if (segment == 0) segment = min64(operands.segment, left);",
        "if (segment == 0) segment = left;",
        isas=("avx512",),
    ),
    M(
        "kernels/whole_planes.h",
        "chains of whole planes replace the ones before",
        "if (!is_first) {",
        "if (false) {",
        isas=("avx512",),
    ),
    M(
        "kernels/whole_planes.h",
        "all blocks of whole planes get the first one's bias",
        "    block.bias += MR;\n",
        "",
        isas=("avx512",),
    ),
    M(
        "kernels/whole_planes.h",
        "all blocks of whole planes start from the first one's bias",
        "if (block.start != nullptr) block.start += MR;",
        "",
        isas=("avx512",),
    ),
    M(
        "kernels/whole_planes.h",
        "all blocks of whole planes are stored as the first one",
        "    block.c += MR * block.c_pitch;\n",
        "",
        isas=("avx512",),
    ),
    M(
        "drivers/pixels.h",
        "sums of whole planes that start from their bias get it again",
        "o.bias = bias_first ? item.zeros + m : item.bias + m;",
        "o.bias = item.bias + m;",
        isas=("avx512",),
    ),
    M(
        "kernels/whole_planes.h",
        "all blocks of whole planes are the first one's weights",
        "    block.w += MR * block.w_pitch;\n",
        "",
        isas=("avx512",),
    ),
    M(
        "drivers/pixels.h",
        "blocks of the smaller size begin with the first row",
        "const int64_t m = blocks.start(block);",
        "const int64_t m = 0 * block;",
    ),
    M(
        "kernels/pixels.h",
        "chains don't end",
        "min64(k + operands.chain, depth)",
        "depth",
    ),
    M(
        "kernels/dot.h",
        "a lane beyond the tail is multiplied",
        "min64(max64(n - v * L, 0), L)",
        "min64(max64(n - v * L, 1), L)",
    ),
    M(
        "kernels/dot.h",
        "a chain overwrites the one before it",
        "    accumulate = true;\n",
        "",
    ),
    M(
        "kernels/dot.h",
        "the last row's surplus ones are read",
        "min64(r, operands.valid_rows - 1)",
        "r",
        sanitizer="address",
    ),
    M(
        "isa/vec_avx2.h",
        "even and odd columns change places",
        "const reg lo = _mm256_unpacklo_pd(even, odd), hi = _mm256_unpackhi_pd(even, odd);",
        "const reg lo = _mm256_unpacklo_pd(odd, even), hi = _mm256_unpackhi_pd(odd, even);",
        dtype="float64",
    ),
    M(
        "isa/convert.h",
        "halves are rounded up, not to even",
        "(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16",
        "(bits + 0x8000u) >> 16",
        dtype="bfloat16",
    ),
    M(
        "isa/convert.h",
        "every other element ends one too late",
        "span = 2 * left - 1",
        "span = 2 * left",
        isas=("avx512",),
        sanitizer="address",
    ),
    M(
        "isa/convert.h",
        "the last elements of a run are not copied",
        "if (i < n) __builtin_memcpy(dst + n - kBlock, src + n - kBlock, 32);",
        "",
    ),
    M(
        "kernels/rows.h",
        "no +0 is added last",
        "sum = V::add(sum, operands.bias != nullptr ? V::load(operands.bias + v * L) : V::zero());",
        "if (operands.bias != nullptr) sum = V::add(sum, V::load(operands.bias + v * L));",
    ),
    M(
        "kernels/rows.h",
        "results that don't exist are stored",
        "if (r >= operands.valid_results) break;",
        "",
    ),
    M(
        "kernels/rows.h",
        "sums of later panels lie on those of the first",
        "operands.sums += NV * L;",
        "",
    ),
    M(
        "kernels/strided.h",
        "columns beyond the last are stored",
        "store_first(to + L, high, left - L);",
        "store_first(to + L, high, left > L ? L : 0);",
    ),
    M(
        "kernels/strided.h",
        "no +0 is added to even columns",
        "V::zip(V::add(even[r][v], V::zero()), ",
        "V::zip(even[r][v], ",
    ),
    M(
        "kernels/depthwise.h",
        "the last vector goes beyond the groups",
        "v < last ? v * L : operands.last_lane",
        "v * L",
    ),
    M(
        "kernels/depthwise.h",
        "two vectors are taken at once though the second one overlaps the first",
        "return vectors - int64_t(last_lane != (vectors - 1) * L);",
        "return vectors;",
        isas=("avx512",),
    ),
    M(
        "drivers/depthwise.h",
        "only weights are split into even and odd groups",
        "        split(block.bias + v * L, block.bias + (v + 1) * L);\n",
        "",
        dtype="bfloat16",
        isas=("avx512",),
    ),
    M(
        "drivers/depthwise.h",
        "a bias that sums start from is not split into even and odd groups",
        "        split(block.start + v * L, block.start + (v + 1) * L);\n",
        "",
        dtype="bfloat16",
        isas=("avx512",),
    ),
    M(
        "drivers/depthwise.h",
        "the weights of the first taps alone are split into even and odd groups",
        "for (int64_t at = 0; at < depth; at += L) split(",
        "for (int64_t at = 0; at < L; at += L) split(",
        dtype="bfloat16",
        isas=("avx512",),
    ),
    M(
        "isa/vec_avx512.h",
        "denormal numbers of odd places become zeros",
        " | denormal_lanes(odd[i], exponent, fraction);",
        ";",
        dtype="bfloat16",
        isas=("avx512",),
    ),
    M(
        "isa/vec_avx512.h",
        "even places get the odd ones' numbers where some are denormal",
        "const __m512i low = _mm512_srli_epi32(rounded.of(even[i]), 16);",
        "const __m512i low = _mm512_srli_epi32(rounded.of(odd[i]), 16);",
        dtype="bfloat16",
        isas=("avx512",),
    ),
    M(
        "kernels/depthwise.h",
        "the second of two vectors has the first one's weights",
        "w[n][j] = V::load(weights + n * depth + j * L);",
        "w[n][j] = V::load(weights + j * L);",
        isas=("avx512",),
    ),
    M(
        "kernels/depthwise.h",
        "no bias is added last",
        "acc[n][q] = V::add(acc[n][q], bias[n]);",
        "",
    ),
    M(
        "kernels/depthwise.h",
        "columns beside the source are read",
        "EDGES ? if_bit(inside, x, column, kZeros) : column",
        "column",
    ),
    M(
        "kernels/depthwise.h",
        "rows of taps that are left out have the weights of those that follow",
        "operands.weights + v * depth + taken.begin * KW * L;",
        "operands.weights + v * depth;",
    ),
    M(
        "drivers/depthwise.h",
        "rows of taps beside the source are left out whatever their weights",
        "(zeros_checked || zeros_change_nothing<S, T>(gemm));",
        "true;",
    ),
    M(
        "kernels/depthwise.h",
        "rows above and below the source are read",
        "operands.rows_inside.contains(i) ? operands.columns_inside : 0;",
        "operands.columns_inside;",
    ),
    M(
        "kernels/depthwise_weight.h",
        "the oldest pixel's last tap is not taken",
        "for (int q = 1; q < kWindow; ++q) take",
        "for (int q = 1; q + 1 < kWindow; ++q) take",
    ),
    M(
        "kernels/depthwise_weight.h",
        "the first column meets a pixel that hasn't begun",
        "take(0, q);",
        "take(0, kWindow - 1);",
    ),
    M(
        "kernels/depthwise_weight.h",
        "columns are shared whatever the pixels' distance",
        "left >= kWindow && position == STEP * tap_col",
        "left >= kWindow",
    ),
    M(
        "kernels/depthwise_weight.h",
        "rows of taps are stored one upon the other",
        "c += operands.tap_cols * V::kLanes) {",
        "c += TJ * V::kLanes) {",
    ),
    M(
        "kernels/planes.h",
        "a chain's sum overwrites the one before it",
        "o.adds ? V::add(V::load(o.sums + at), acc[r][u]) : acc[r][u]",
        "acc[r][u]",
    ),
    M(
        "kernels/planes.h",
        "a chain that is taken up again starts anew",
        "o.first ? V::broadcast(o.start + r) : V::load(o.chains + r * o.row_pitch + x + u * L)",
        "V::broadcast(o.start + r)",
    ),
    # ---- packers
    M(
        "base/integers.h",
        "a run's last element is clipped",
        "first < size ? div_up(size - first, step) : 0",
        "first < size ? (size - first) / step : 0",
    ),
    M(
        "base/integers.h",
        "a run begins one element early",
        "first < 0 ? div_up(-first, step) : 0",
        "first < 0 ? -first / step : 0",
    ),
    M(
        "pack/patch.h",
        "rows above the image are joined to it",
        "rows.first >= 0 &&\n           rows.first + rows.run_length",
        "rows.first + rows.run_length",
    ),
    M(
        "pack/patch.h",
        "the padding on the right is stale",
        "clear(to + in.end * patch_.col_pitch, (cols.run_length - in.end) * patch_.col_pitch);",
        "",
    ),
    M(
        "pack/patch.h",
        "a row's second vector has the first one's padding",
        "inside_bits_ >> x",
        "inside_bits_",
        isas=("avx512",),
    ),
    M(
        "pack/patch.h",
        "a long border is cleared in the first plane alone",
        "        fill_zero(to, n);",
        "        if (c == 0) fill_zero(to, n);",
    ),
    M(
        "pack/patch.h",
        "all images lie on the first one",
        "rows.size * patch.row_pitch, element_size);\n"
        "    patch.image_pitch = channels * patch.channel_pitch;",
        "rows.size * patch.row_pitch, element_size);\n    patch.image_pitch = 0;",
    ),
    M(
        "pack/lanes.h",
        "the last block of a transposition goes beyond the run",
        "const int64_t k = depth - k0 >= L ? k0 : max64(depth - L, 0);",
        "const int64_t k = k0;",
        sanitizer="address",
    ),
    M(
        "pack/lanes.h",
        "a pixel's channels are read beyond the run",
        "(count - 1 - x) * step + channels;",
        "(count - 1 - x) * step + channels + L;",
        sanitizer="address",
    ),
    M(
        "pack/lanes.h",
        "the last pixels of a block are not moved back",
        "const int64_t x = min64(x0, count - pixels);",
        "const int64_t x = x0;",
    ),
    M(
        "pack/interleave.h",
        "a later panel takes the first channels",
        "V::store(dst + c * to.channel_pitch, r[first + c]);",
        "V::store(dst + c * to.channel_pitch, r[c]);",
    ),
    M(
        "pack/interleave.h",
        "the first channel's bias for all",
        "V::add(r[c], V::load(bias + c * L))",
        "V::add(r[c], V::load(bias))",
    ),
    M(
        "pack/weights.h",
        "the stride of columns for rows",
        "return t / tap_cols * gemm.weight_i + t",
        "return t / tap_cols * gemm.weight_j + t",
    ),
    M(
        "pack/weights.h",
        "weights of patch layers are not conjugated",
        "gemm.is_gradient ? conjugate(value) : value",
        "value",
        dtype="complex64",
    ),
    M(
        "pack/weights.h",
        "taps of patch layers are taken to lie together",
        "if (gemm.weight_result_i == taps_w * gemm.weight_result_j && gemm.weight_m == taps",
        "if (gemm.weight_m == taps",
    ),
    M(
        "pack/pairs.h",
        "pixels some of whose channels are copied are taken to lie side by side",
        "_mm512_mullo_epi16(run, _mm512_set1_epi16(int16_t(step)))",
        "_mm512_mullo_epi16(run, _mm512_set1_epi16(int16_t(n)))",
        **PAIRS,
    ),
    M(
        "pack/pairs.h",
        "the last of every third channels is left out",
        "const uint64_t mask = thirds_mask(int(min64(n - i, 16)));",
        "const uint64_t mask = thirds_mask(int(min64(n - i, 15)));",
        **PAIRS,
    ),
    M(
        "pack/pairs.h",
        "a lone channel takes another for its second",
        "copy_pairs(src, lone ? nullptr : src + source.channel / 2, step, count, dst);",
        "copy_pairs(src, src + source.channel / 2, step, count, dst);",
        **PAIRS,
    ),
    M(
        "pack/pairs.h",
        "a lone channel's weight has a second",
        "copy_pairs(src, alone ? nullptr : src + second, 1, lanes, dst);",
        "copy_pairs(src, src + second, 1, lanes, dst);",
        **PAIRS,
    ),
    M(
        "pack/pairs.h",
        "a band's last pair with one channel takes another for its second",
        "present |= (alone ? 1u : 3u) << (2 * n);",
        "present |= 3u << (2 * n);",
        **PAIRS,
    ),
    M(
        "pack/pairs.h",
        "of a pair's two channels the second one is not looked for beyond the words at hand",
        "if (last >= kWordsAtOnce) break;",
        "if (at >= kWordsAtOnce) break;",
        **PAIRS,
    ),
    M(
        "drivers/grad_weight_steps.h",
        "an odd segment's last pixel has no pair",
        "kTakesBlocks<float> ? blocks : div_up(pixels, 2);",
        "kTakesBlocks<float> ? blocks : pixels / 2;",
        **PAIRS,
    ),
    M(
        "drivers/grad_weight_steps.h",
        "the third vector's channels are the first's",
        "pack_pixel_pairs(call.grad_output_at(segment, channel + v * L)",
        "pack_pixel_pairs(call.grad_output_at(segment, channel)",
        **PAIRS,
    ),
    M(
        "pack/pixel_rows.h",
        "an odd segment's last pixel is paired with the one before",
        "load_words(walk.next(), mask) : _mm512_setzero_si512();",
        "load_words(walk.next(), mask) : a;",
        **PAIRS,
    ),
    M(
        "plan/tile_gemm.cpp",
        "no room for rows of pixels in pairs",
        "if (vector.step == 1) {\n    s.panel = s.take(inner_groups",
        "if (vector.step <= 2) {\n    s.panel = s.take(inner_groups",
        sanitizer="address",
        **PAIRS,
    ),
    # ---- stores
    M(
        "pack/store.h",
        "columns of others are read and written back",
        "gemm.owns_columns_between ? Between::kOwned : Between::kOthers",
        "Between::kOwned",
        sanitizer="thread",
    ),
    M(
        "pack/store.h",
        "infinities of long sums become NaN",
        "e[i] == e[i] ? e[i] : R(0)",
        "e[i]",
    ),
    M(
        "pack/store.h",
        "the last channels are stored as a whole vector",
        "n_low = min64(sums.channels - m, L), n_high = min64(sums.channels - m - L, L);",
        "n_low = L, n_high = sums.channels - m > L ? L : 0;",
    ),
    M(
        "drivers/dot.h",
        "the last images of several are taken as few",
        "block.images - n <= kShape.few_columns",
        "block.images - n <= kShape.columns",
        isas=("avx512",),
    ),
    M(
        "drivers/gemm.h",
        "a whole vector is stored in the result, of which half has no channel",
        "kHasHalves<T> ? L / 2 : L",
        "kHasHalves<T> ? L / 4 : L",
        isas=("avx512",),
    ),
    M(
        "pack/store.h",
        "the last pixels of a plane are stored as a whole vector",
        "if (n == L && valid == L) {",
        "if (valid == L) {",
    ),
    M(
        "pack/store.h",
        "rows with gaps are stored as one run",
        "gemm.destination_row == gemm.destination_col * tile.cols",
        "1 == 1 + 0 * tile.cols",
    ),
    M(
        "pack/store.h",
        "what lies between joined rows is read and written back",
        "!gemm.owns_columns_between && tile.cols == gemm.cols",
        "tile.cols == gemm.cols",
        sanitizer="thread",
    ),
    M(
        "isa/vec_portable.h",
        "complex products are negated wherever the compiler likes",
        "c.re = c.re - a.im * b.im;",
        "c.re = V::fma(-a.im, b.im, c.re);",
        dtype="complex64",
        isas=("portable",),
    ),
    # ---- drivers
    M(
        "plan/candidates.cpp",
        "images that are computed later read the first ones",
        "behind(call.a.data, first * call.a.stride[0], call.dtype)",
        "call.a.data",
    ),
    M(
        "drivers/gemm.h",
        "of groups that come first only the first tile is computed",
        ": 1, tiling.tile(of.tile, gemm)};",
        ": 1, tiling.tile(tiling.groups_first ? 0 : of.tile, gemm)};",
    ),
    M(
        "drivers/phases.h",
        "of groups that come first only the first tile is computed",
        "of.tile / tiling.tiles_h * tiling.tile_images;",
        "(tiling.groups_first ? 0 : of.tile / tiling.tiles_h) * tiling.tile_images;",
    ),
    M(
        "drivers/gemm.h",
        "later segments read the first one's channels",
        "operands.b = source.data + s * source.patch.channel_pitch;",
        "operands.b = source.data;",
    ),
    M(
        "drivers/gemm.h",
        "chunks of result channels find each other's packed weights",
        "first_owner + static_cast<uint64_t>(of.part)",
        "first_owner",
    ),
    M(
        "drivers/gemm.h",
        "the packed weights of all segments are kept in one place",
        " + segment.channel * segment.taps() * vectors * L : item.panel",
        " : item.panel",
    ),
    M(
        "drivers/gemm.h",
        "chunks are summed in the result",
        "return !k.has_chunks() && stores_pixels()",
        "return stores_pixels()",
    ),
    M(
        "drivers/gemm.h",
        "every segment that is summed in the result adds the bias",
        "if (segment.ends(gemm)) operands.bias",
        "operands.bias",
    ),
    M(
        "drivers/gemm.h",
        "what was summed in the result is stored over",
        "if (gemm.channels * gemm.taps() != 0 && sums_in_result(item, m, width)) continue;",
        "",
    ),
    M(
        "plan/tile_gemm.cpp",
        "panels end within a chain",
        " && k.max_depth() % k.chain == 0",
        "",
    ),
    M(
        "drivers/gemm.h",
        "images are stored as rows",
        "S* const to = first + row / tile.rows * gemm.destination_n + ",
        "S* const to = first + row / tile.rows * gemm.destination_row + ",
    ),
    M(
        "drivers/gemm.h",
        "pieces of a row are summed at its first pixels",
        "before(row * run + x, now, to + x * gemm.destination_col);",
        "before(row * run + x, now, to);",
    ),
    M(
        "drivers/gemm.h",
        "a group takes another one's bias",
        "source[(group * gemm.m + c) * gemm.bias_stride]",
        "source[(group + c) * gemm.bias_stride]",
    ),
    M(
        "drivers/gemm.h",
        "rows of taps that are dropped are not skipped",
        "          from += tile.cols * sums.pitch;\n",
        "          if (row >= 0 && row < gemm.destination_h) from += tile.cols * sums.pitch;\n",
    ),
    M(
        "drivers/gemm.h",
        "no +0 is added to gradients of patch layers",
        "Narrow<S>::from(add_scalar(get_lane(from, lane + t), T{}))",
        "Narrow<S>::from(get_lane(from, lane + t))",
    ),
    M(
        "drivers/gemm.h",
        "an empty sum is stored as scratch was",
        "if (gemm.channels * gemm.taps() == 0) fill_zero(c, pixels * width);",
        "",
    ),
    M(
        "pack/store.h",
        "a chunk begins one segment late",
        "if (number % kSegmentsPerChunk != 0) return false;",
        "if (number > 0 && number % kSegmentsPerChunk != 1) return false;",
    ),
    M(
        "plan/conv_gemm.cpp",
        "the source is read in place where it needs padding",
        "gemm.source_c == step && meets_no_padding(gemm) &&",
        "gemm.source_c == step &&",
    ),
    M(
        "drivers/pixels.h",
        "no +0 is added where the sum began from the bias",
        "o.bias = !add_bias ? nullptr : bias_first",
        "o.bias = !add_bias || bias_first ? nullptr : bias_first",
    ),
    M(
        "drivers/pixels.h",
        "the last pixels are stored as a whole vector",
        "channels * L, 1, n - done});",
        "channels * L, 1, L});",
    ),
    M(
        "drivers/pixels.h",
        "a chunk of channels takes the first one's bias",
        "load_bias<S>(gemm, group, m0, item.channels_m, item.bias);",
        "load_bias<S>(gemm, group, 0, item.channels_m, item.bias);",
    ),
    M(
        "drivers/pixels.h",
        "by columns no bias is added",
        "const bool lacks_bias = k.has_chunks() || tiling.by_columns;",
        "const bool lacks_bias = k.has_chunks();",
    ),
    M(
        "drivers/pixels.h",
        "by columns a pixel lies beside the one before, whatever the stride",
        "operands.lane_step = gemm.axis_w.step * gemm.source_col;",
        "operands.lane_step = gemm.source_col;",
    ),
    M(
        "drivers/pixels.h",
        "by columns all channels are one chain",
        "operands.segment = k.segment_channels;",
        "operands.segment = operands.chain = channels;",
    ),
    M(
        "drivers/pixels.h",
        "by columns weights are read beyond the last result's",
        "factors[r] = w.data + min64(r, item.channels_m - 1) * w.pitch;",
        "factors[r] = w.data + r * w.pitch;",
        sanitizer="address",
    ),
    M(
        "isa/vec_avx2.h",
        "of five to seven elements of 16 bits the last ones are left out",
        "_mm_set_epi64x(bits_of_some(p + 4, n - 4), low)",
        "_mm_set_epi64x(0, low)",
        dtype="float16",
        isas=("avx2",),
    ),
    M(
        "isa/vec_avx2.h",
        "of three elements of 16 bits the third is the second",
        "int64_t(p[n - 1].bits)",
        "int64_t(p[n & 2 ? 1 : 0].bits)",
        dtype="bfloat16",
        isas=("avx2",),
    ),
    M(
        "plan/tile_pixels.cpp",
        "by columns weights are read as neighbours whatever their stride",
        "storage_size == vector.element_size && gemm.weight_c == 1 ? 0",
        "storage_size == vector.element_size ? 0",
    ),
    M(
        "drivers/pixels.h",
        "by columns each row of a tile is the image's first",
        "gemm.axis_h.source(item.tile.row + r, 0)",
        "gemm.axis_h.source(r, 0)",
    ),
    M(
        "drivers/pixels.h",
        "by columns a tile begins at the row's begin",
        "item.source + gemm.axis_w.source(item.tile.col, 0) * gemm.source_col",
        "item.source",
    ),
    M(
        "plan/tile_pixels.cpp",
        "by columns no room for the surplus result",
        "t.c_elements = (t.tile_rows * gemm.m + surplus) * run;",
        "t.c_elements = t.tile_rows * gemm.m * run;",
        sanitizer="address",
    ),
    M(
        "plan/tile_pixels.cpp",
        "padding is read as the source by columns",
        "return meets_no_padding(gemm) && !k.has_chunks()",
        "return !k.has_chunks()",
        sanitizer="address",
    ),
    M(
        "drivers/pixels.h",
        "all rows of taps are the first",
        "c * gemm.weight_c + i * gemm.weight_i, gemm.weight_j, segment.tap_cols",
        "c * gemm.weight_c, gemm.weight_j, segment.tap_cols",
    ),
    M(
        "drivers/pixels.h",
        "the patch of the last panel begins with the first",
        "packed.col += item.first_packed();",
        "",
    ),
    M(
        "pack/store.h",
        "the total of chunks is not that of the first",
        "add_chunk(total, lost, sums, n, number == kSegmentsPerChunk);",
        "add_chunk(total, lost, sums, n, false);",
    ),
    M(
        "drivers/planes.h",
        "the last run goes beyond the plane",
        "o.pixels = min64(tiling.run, gemm.cols - x0);",
        "o.pixels = tiling.run;",
    ),
    M(
        "drivers/parts.h",
        "a bias of any stride is read as a dense one",
        "gemm.bias_stride, gemm.bias_stride, count",
        "gemm.bias_stride, 1, count",
    ),
    M(
        "drivers/planes.h",
        "a chunk's sum is not begun anew",
        "o.adds = !begins || chain > c0;",
        "o.adds = chain != 0;",
    ),
    M(
        "drivers/dot.h",
        "every row of a packed weight is the first",
        "gather(row_at(weight + (r + i) * gemm.weight_m)",
        "gather(row_at(weight + r * gemm.weight_m)",
    ),
    M(
        "drivers/dot.h",
        "one column beyond the image counts as inside",
        "indices_inside(w.origin, w.tap, gemm.taps_w, gemm.source_w)",
        "indices_inside(w.origin, w.tap, gemm.taps_w, gemm.source_w + 1)",
    ),
    M(
        "drivers/dot.h",
        "a channel that a block has a part of is transposed in whole",
        "channels = end / taps - first;",
        "channels = div_up(end, taps) - first;",
        sanitizer="address",
    ),
    M(
        "drivers/dot.h",
        "transposed taps begin at the first one, not at the first inside",
        "to + (from.rows.begin + i) * gemm.taps_w + from.cols.begin, taps);",
        "to + i * gemm.taps_w, taps);",
    ),
    M(
        "drivers/dot.h",
        "rows of taps continue one another, whatever lies between them",
        "from.row == gemm.taps_w * from.col);",
        "true);",
    ),
    M(
        "drivers/dot.h",
        "a block of K overwrites the one before it",
        "operands.accumulate = block.k0 != 0;",
        "operands.accumulate = false;",
    ),
    M(
        "drivers/dot.h",
        "results beyond the last are stored",
        "store(sums, int(min64(rows - r, L)), destination",
        "store(sums, L, destination",
    ),
    M(
        "drivers/rows.h",
        "factors of results that don't exist are read",
        "min64(r, rows.operands.valid_results - 1) * products.factor_r",
        "r * products.factor_r",
        sanitizer="address",
    ),
    M(
        "plan/tile_one_pixel.h",
        "chunks are one segment too long",
        "return segments_per_chunk * segment;",
        "return (segments_per_chunk + 1) * segment;",
    ),
    M(
        "drivers/strided.h",
        "phases are not put in order",
        "if (even.phase != 0) std::swap(even, odd);",
        "",
    ),
    M(
        "drivers/strided.h",
        "the last row of a phase is not computed",
        "(tile.rows - 1 - h.phase) / p.stride_h + 1 : 0",
        "(tile.rows - 1 - h.phase) / p.stride_h : 0",
    ),
    M(
        "drivers/strided.h",
        "the patch begins left of the image",
        "(cols.begin + in_w.begin) * go[3], go[3]",
        "cols.begin * go[3], go[3]",
    ),
    M(
        "drivers/phases.h",
        "all phases read the first one's weights",
        "first_row[f] = row;",
        "first_row[f] = 0;",
    ),
    M(
        "drivers/phases.h",
        "every band of rows reads the first one's pixels",
        "    tile.rows.first += item.row0;\n",
        "",
    ),
    M(
        "drivers/phases.h",
        "the last band of rows is as high as the others",
        "max64(min64(tiling.tile_rows, g.rows - row0), 0)",
        "min64(tiling.tile_rows, g.rows)",
        sanitizer="address",
    ),
    M(
        "drivers/phases.h",
        "the table of positions is the first phase's",
        "        before += pixels;\n        if (phases",
        "        if (phases",
    ),
    M(
        "drivers/phases.h",
        "with vectors over groups the table of positions is the first phase's",
        "      before += pixels;\n      if (!phases",
        "      if (!phases",
    ),
    M(
        "drivers/phases.h",
        "all channels of a panel of groups have the last one's weights",
        "{panel + v * L, panels.size(at) * L, L}",
        "{panel, panels.size(at) * L, L}",
    ),
    M(
        "drivers/phases.h",
        "all panels of groups have the last one's weights",
        "item.panel + depth * panels.start(at) * L",
        "item.panel",
    ),
    M(
        "drivers/phases.h",
        "rows of groups are stored from the first panel",
        "item.c_tile.sums + kept * start * L + v * L",
        "item.c_tile.sums + v * L",
    ),
    M(
        "drivers/phases.h",
        "groups of planes lie one channel apart",
        "(G ? any.m : 1) * any.destination_m",
        "any.destination_m",
    ),
    M(
        "drivers/phases.h",
        "the patch has one group",
        "    source.lanes = item.groups;\n",
        "",
    ),
    M(
        "plan/tile_phases.cpp",
        "room for the patch of one group",
        "phases.over_groups ? vector.lanes : 1;",
        "1;",
        sanitizer="address",
    ),
    M(
        "plan/tile_phases.cpp",
        "room for the weights and sums of one panel of groups",
        "phases.over_groups ? tiling.chunk_vectors : min64(tiling.panel_vectors, ",
        "min64(tiling.panel_vectors, ",
        sanitizer="address",
    ),
    M(
        "plan/tile_phases.cpp",
        "the first tap's phase has the first pixels",
        "phased_rows(p).phase(f / p.stride_w).phase * p.in_w + "
        "phased_cols(p).phase(f % p.stride_w).phase;",
        "f / p.stride_w * p.in_w + f % p.stride_w;",
    ),
    M(
        "plan/tile_phases.cpp",
        "room for the sums of one phase",
        "s.take_sums(phases.kept_pixels(tiling.tile_rows)",
        "s.take_sums(phases.most_pixels(tiling.tile_rows)",
        sanitizer="address",
    ),
    M(
        "drivers/phases.h",
        "every image's rows are the first one's",
        "++n, run.places += pixels",
        "++n",
    ),
    M(
        "drivers/phases.h",
        "the last band of whole rows is as high as the others",
        "min64(tiling.tile_rows * problem.stride_h, problem.in_h - item.row0 * problem.stride_h)",
        "tiling.tile_rows * problem.stride_h",
        sanitizer="address",
    ),
    M(
        "drivers/phases.h",
        "every band of whole rows is stored in place of the first one",
        " + item.row0 * problem.stride_h * problem.in_w;",
        ";",
    ),
    M(
        "kernels/gemm.h",
        "a vector of nine lanes is half a vector",
        "(lanes - 1) % L < L / 2",
        "(lanes - 1) % L <= L / 2",
        isas=("avx512",),
    ),
    M(
        "drivers/phases.h",
        "rows of taps with gaps are taken as one",
        "problem.kernel_h == 1 || weight_i == weight_j * problem.kernel_w",
        "true",
    ),
    M(
        "drivers/grad_weight.h",
        "an input of several taps counts as its own patch",
        "    return problem.taps() == 1 && are_inside(problem.rows()",
        "    return are_inside(problem.rows()",
        sanitizer="address",
    ),
    M(
        "plan/patch_axis.h",
        "one position too many counts as inside",
        "axis.step, positions, size).end;",
        "axis.step, positions, size).end + 1;",
    ),
    M(
        "drivers/depthwise.h",
        "the last four pixels go beyond the row",
        "pixels(ukernels.by_four, 4, count - 4, 1);",
        "pixels(ukernels.by_four, 4, count - left, 1);",
    ),
    M(
        "drivers/depthwise.h",
        "pixels against which taps run begin at the first one",
        "at + b * width + (backwards() ? width - 1 : 0);",
        "at + b * width;",
    ),
    M(
        "drivers/depthwise.h",
        "each run begins with the first pixel",
        "moved(moved(view.data, view.position_row, row), view.position_col, first);",
        "moved(view.data, view.position_row, row);",
    ),
    M(
        "drivers/depthwise.h",
        "a block that begins inside counts as inside",
        "max64(run.inside.end - at, 0) / width,",
        "div_up(max64(run.inside.end - at, 0), width),",
    ),
    M(
        "drivers/depthwise.h",
        "rows at the upper and lower edge have pixels inside",
        "inside = operands.rows_inside.count() == gemm.taps_h;",
        "inside = operands.rows_inside.count() > 0;",
    ),
    M(
        "plan/patch_axis.h",
        "descending coordinates end one too late",
        "indices_inside(size - 1 - first, -step, count, size)",
        "indices_inside(size - first, -step, count, size)",
    ),
    M(
        "pack/lanes.h",
        "rows that are transposed as one run lie without padding",
        "at_ += pitch_ + (left_ == 0 ? gap_ : 0);",
        "at_ += pitch_;",
    ),
    M(
        "pack/lanes.h",
        "the last block of a band's taps begins with a channel",
        "element_(k % elements_.size),",
        "element_(0),",
    ),
    M(
        "pack/weights.h",
        "a band's taps are transposed though its columns run backwards",
        "const bool in_order = from.lane_step != 1 && j_step > 0 && i_step",
        "const bool in_order = from.lane_step != 1 && i_step",
    ),
    M(
        "pack/weights.h",
        "a band's taps are transposed beyond the last one",
        "const int64_t depth = (channels - 1) * picked.size +",
        "const int64_t depth = channels * picked.size +",
        sanitizer="address",
    ),
    M(
        "pack/lanes.h",
        "the last block of rows that are transposed as one run begins with a row",
        "left_(run_ - k % run_),",
        "left_(run_),",
    ),
    M(
        "pack/patch.h",
        "rows that don't continue one another are transposed as one run",
        "source.row == source.width && first_run_",
        "first_run_",
    ),
    M(
        "pack/patch.h",
        "rows are transposed whole though the patch begins within them",
        "first_run_.count() == source.width && source.group != 1),",
        "source.group != 1),",
    ),
    M(
        "drivers/depthwise.h",
        "the phases have the items of the first",
        "if (call && item < call->items()) call->work(item);",
        "if (call && item < calls[0]->items()) call->work(item);",
    ),
    M(
        "drivers/depthwise.h",
        "sums start from what scratch held",
        "fill_zero(bias_first ? block.bias : block.start, block.vectors() * L);",
        "if (bias_first) fill_zero(block.bias, block.vectors() * L);",
    ),
    M(
        "drivers/depthwise.h",
        "the table has the stride of columns for rows",
        "*tap_offset++ = i * view.tap_row + j * view.tap_col;",
        "*tap_offset++ = i * view.tap_col + j * view.tap_col;",
    ),
    M(
        "plan/tile_grid.h",
        "images with gaps are one run of pixels",
        "(t.images == 1 || step.image == step.col * t.rows * t.cols);",
        "t.images >= 1;",
    ),
    M(
        "plan/tile_grid.h",
        "rows with gaps are one run of pixels",
        "{ return t.rows == 1 || step.row == step.col * t.cols; }",
        "{ return t.rows >= 1; }",
    ),
    M(
        "drivers/grad_weight.h",
        "some lanes of a pixel are a panel",
        "t.channels_m == width && grad_output.stride[1] == 1 && grad_output.stride[3] == width",
        "t.channels_m <= width && grad_output.stride[1] == 1 && grad_output.stride[3] <= width",
    ),
    M(
        "drivers/grad_weight.h",
        "the panel in place is the first group's",
        "operands.a = reinterpret_cast<const T*>(source);",
        "operands.a = reinterpret_cast<const T*>(grad_output_at(segment, t.m0));",
    ),
    M(
        "drivers/grad_weight.h",
        "each of the groups taken in turn is the first",
        "t.group += turn;",
        "t.group += 0 * turn;",
    ),
    M(
        "drivers/grad_weight.h",
        "groups taken in turn share their sums",
        "number != segments.begin,\n                 c_tile + turn * sums_of_group(t));",
        "number != segments.begin,\n                 c_tile);",
    ),
    M(
        "drivers/grad_weight.h",
        "the chunks' sums are those of one group",
        "return turns_of(t) * sums_of_group(t); }",
        "return sums_of_group(t); }",
    ),
    M(
        "drivers/weight_chunks.h",
        "the first chunk is lost",
        "add_chunk(tile.total, tile.lost, tile.sums, driver.used_size(t), chunk == 0);",
        "add_chunk(tile.total, tile.lost, tile.sums, driver.used_size(t), chunk <= 1);",
    ),
    M(
        "drivers/weight_chunks.h",
        "partials are taken from other items' slots",
        "partials + (slot * items() + item) * tile_size();",
        "partials + (item * chunks_in_flight + slot) * tile_size();",
    ),
    M(
        "drivers/weight_chunks.h",
        "what a total loses lies on the next item's total",
        "T* const lost = total + items() * tile_size();",
        "T* const lost = total + tile_size();",
    ),
    M(
        "drivers/depthwise_weight.h",
        "the last vector of groups goes beyond them",
        "return min64(vector * L, groups - L);",
        "return vector * L;",
        sanitizer="address",
    ),
    M(
        "drivers/depthwise_weight.h",
        "a chain overwrites the one before it",
        "chain.accumulate = accumulate || x > 0;",
        "chain.accumulate = accumulate;",
    ),
    M(
        "drivers/depthwise_weight.h",
        "the last row at the top reads beyond the input",
        "row < rows.begin   ? &above",
        "row + 1 < rows.begin ? &above",
        sanitizer="address",
    ),
    M(
        "drivers/depthwise_weight.h",
        "columns at the right read the next row",
        "return {begin, max64(all.end, begin)};",
        "return {begin, positions.end};",
    ),
    M(
        "drivers/depthwise_weight.h",
        "a run goes on beyond what is read in place",
        "run->count = min64(end - col, room);",
        "run->count = min64(segment.col + segment.cols - col, room);",
    ),
    M(
        "pack/patch.h",
        "every part of a group's channels is the first one",
        "from.data - source_.first,",
        "from.data,",
    ),
    M(
        "pack/lanes.h",
        "four groups take one another's weights",
        "V::of_quads(load(i), load(i + 4), load(i + 8),",
        "V::of_quads(load(i), load(i + 8), load(i + 4),",
        isas=("avx512",),
    ),
    M(
        "pack/pairs.h",
        "the weights of a pair of channels are one channel's",
        "_mm_loadu_si64(four + second)",
        "_mm_loadu_si64(four)",
        **PAIRS,
    ),
    M(
        "plan/candidates.cpp",
        "words of two channels at odd places",
        "g.source_row % 2 == 0 && g.source_col % 2 == 0",
        "g.source_row % 2 == 0",
        **PAIRS,
    ),
    M(
        "drivers/grad_weight.h",
        "the input is not conjugated",
        "pack_patch(patch, source, true, patch_data);",
        "pack_patch(patch, source, false, patch_data);",
        dtype="complex64",
    ),
    M(
        "drivers/depthwise_weight.h",
        "a segment of several images is read in place",
        "if (segment.images == 1) read_in_place(t,",
        "read_in_place(t,",
        dtype="bfloat16",
    ),
    M(
        "drivers/depthwise_weight.h",
        "a patch of several segments begins with each of them",
        "pixel.row - packed->row, pixel.col - packed->col",
        "pixel.row - segment.row, pixel.col - packed->col",
    ),
    M(
        "drivers/grad_weight.h",
        "the stride of rows for columns of taps",
        "first + tap / t.tap_cols * gw[2] + tap % t.tap_cols * gw[3];",
        "first + tap / t.tap_cols * gw[2] + tap % t.tap_cols * gw[2];",
    ),
    M(
        "drivers/grad_bias.h",
        "partial sums begin anew with every row",
        "int64_t at = first % kPartialSums * columns;",
        "int64_t at = 0;",
        dtype="float64",
    ),
    M(
        "drivers/grad_bias.h",
        "a pixel's surplus channels are lost",
        "for (; i < n; ++i) to[i] = W(to[i] + W(values[i]));",
        "",
    ),
    M(
        "drivers/grad_bias.h",
        "a row that ends within a block is read on",
        "if (count == n && pixels.step == 1) {",
        "if (pixels.step == 1) {",
    ),
    M(
        "drivers/grad_bias.h",
        "the last pixels of a block are added to the partial sums of others",
        "sums[lane] = W(sums[lane] + W(values[i]));",
        "sums[kPartialSums - 1 - lane] = W(sums[kPartialSums - 1 - lane] + W(values[i]));",
        dtype="float64",
    ),
    # ---- products of few rows
    M(
        "kernels/columns.h",
        "chains run across the ends of segments",
        "const int64_t end = min64(k + operands.chain, segment_end);",
        "const int64_t end = min64(k + operands.chain, operands.depth);",
    ),
    M(
        "kernels/columns.h",
        "surplus lanes are read beyond the last one",
        "kPartial ? min64(i, operands.valid_lanes - 1) : i;",
        "i;",
    ),
    M(
        "drivers/rows.h",
        "factors of several results in one place",
        "reinterpret_cast<Operand<T>*>(rows.factors) + r * layout.factor_pitch",
        "reinterpret_cast<Operand<T>*>(rows.factors)",
    ),
    M(
        "drivers/rows.h",
        "the second chunk's factors are the first's",
        "const S* const from = factor_of(rows, r, k);\n      Operand<T>* const copy",
        "const S* const from = factor_of(rows, r, 0);\n      Operand<T>* const copy",
    ),
    M(
        "drivers/parts.h",
        "the bias of a block is the first block's",
        "static_cast<const S*>(products.bias) + lane * products.bias_step;",
        "static_cast<const S*>(products.bias);",
    ),
    M(
        "plan/candidates.cpp",
        "few rows, though results don't lie together",
        "(g.batch != 1 && g.cols != 1) || g.destination_m != 1",
        "(g.batch != 1 && g.cols != 1)",
    ),
    M(
        "drivers/grad_bias.h",
        "the last block is lost",
        "for (int i = 0; (count >> i) != 0; ++i) {\n      if",
        "for (int i = 1; (count >> i) != 0; ++i) {\n      if",
    ),
    M(
        "drivers/grad_bias.h",
        "no +0 is added last",
        "T(T(total.total(c)) + T{})",
        "T(total.total(c))",
    ),
    # ---- plans
    M(
        "plan/candidates.cpp",
        "rows times factors, though results don't lie together",
        "g.weight_m != 1 || g.destination_m != 1 || g.channels == 0",
        "g.weight_m != 1 || g.channels == 0",
    ),
    M(
        "plan/candidates.cpp",
        "depthwise, though results don't lie together",
        "g.source_c != 1 || g.destination_m != 1",
        "g.source_c != 1",
    ),
    M(
        "plan/candidates.cpp",
        "plane by plane, though results don't lie together",
        "!reads_whole_planes(g) || g.destination_col != 1 ||",
        "!reads_whole_planes(g) ||",
    ),
    M(
        "plan/candidates.cpp",
        "vectors over pixels that are no neighbours",
        "g.axis_w.step == 1 || g.taps_w == 1;",
        "true;",
    ),
    M(
        "plan/candidates.cpp",
        "two phases, though pixels are no neighbours",
        "p.stride_w != 2 || result[3] != 1 ||",
        "p.stride_w != 2 ||",
    ),
    M(
        "plan/candidates.cpp",
        "two phases of several chains in one",
        "block_k(phase, vector.limits).chain < phase.taps()",
        "false",
    ),
    M(
        "plan/tile_one_pixel.cpp",
        "columns of taps in the padding are read where they would lie",
        " || !are_inside(p.cols(), p.kernel_w, 1, p.in_w)) return false;",
        ") return false;",
    ),
    M(
        "plan/candidates.cpp",
        "depthwise weight gradients, though groups don't lie together",
        "if (!channels_are_neighbours(call)) return",
        "if (call.b.stride[1] != 1) return",
    ),
    M(
        "pack/weights.h",
        "the weight is not conjugated",
        "step * to.pitch, to.width}, gemm.is_gradient);",
        "step * to.pitch, to.width}, false);",
        dtype="complex64",
    ),
    M(
        "plan/conv_gemm.cpp",
        "input that one pixel doesn't meet is not set to zero",
        "if (taps < p.in_h * p.in_w) visit_zeros",
        "if (taps == 0) visit_zeros",
    ),
    M(
        "plan/conv_gemm.cpp",
        "groups with gaps are taken together",
        "g.groups == 1 || group_destination == inner.size * inner.stride_b",
        "true",
    ),
    M(
        "plan/conv_gemm.cpp",
        "rows that no tap meets are not set to zero",
        "if (!meets_all) visit_zeros(call, visit);",
        "if (!cols.meets_all()) visit_zeros(call, visit);",
    ),
    M(
        "plan/conv_gemm.cpp",
        "rows that no patch meets are not set to zero",
        "  if (count_met(p.rows(), p.kernel_h, p.out_h, p.in_h) < p.in_h ||\n      count_met",
        "  if (count_met",
    ),
    M(
        "plan/conv_gemm.cpp",
        "rows with gaps are joined",
        "!whole_planes || g.source_row != g.source_col * g.cols ||",
        "!whole_planes ||",
    ),
    M(
        "plan/conv_gemm.cpp",
        "the last tap inside is left out",
        "taps_inside(p.rows(), p.kernel_h, p.in_h)",
        "taps_inside(p.rows(), p.kernel_h, p.in_h - 1)",
    ),
    M(
        "plan/conv_gemm.cpp",
        "a band's weights begin with the first tap",
        "row.first_tap * g.weight_i + col.first_tap * g.weight_j, dtype",
        "col.first_tap * g.weight_j, dtype",
    ),
    M(
        "plan/conv_gemm.cpp",
        "an odd last channel has a partner",
        "stepped.missing = stepped.channels * channels - gemm.channels;",
        "",
        **PAIRS,
    ),
    M(
        "plan/summation_order.cpp",
        "the images of the last block are lost",
        "b.blocks_n = div_up(p.batch, b.images);",
        "b.blocks_n = max64(p.batch / b.images, 1);",
    ),
    M(
        "plan/summation_order.h",
        "a band's taps that descend are counted from the first",
        "descends_ ? a_.taps - inside.end : inside.begin",
        "inside.begin",
    ),
    M(
        "plan/patch_axis.cpp",
        "taps that descend are not moved into the patch",
        "axis.shift = gather.tap < 0 ? reach : 0;",
        "axis.shift = 0;",
    ),
    M(
        "plan/patch_axis.cpp",
        "runs of taps overlap",
        "axis.tap_pitch = axis.run_length = positions;",
        "axis.tap_pitch = (axis.run_length = positions) - 1;",
    ),
    M(
        "plan/patch_axis.cpp",
        "a phase of the stride ends with its last position",
        "saturating_add(positions, max64(taps - 1, 0) / gather.step)",
        "positions",
        **AMX,
    ),
    M(
        "plan/patch_axis.h",
        "taps of a phase lie one beside the other",
        "number % tap_runs * tap_pitch + number / tap_runs",
        "number % tap_runs * tap_pitch + number",
        **AMX,
    ),
    M(
        "plan/patch_axis.cpp",
        "no room for what pads images",
        "saturating_mul(images, 128 / element_size)",
        "0",
        sanitizer="address",
    ),
    M(
        "plan/tile_gemm.cpp",
        "room for a panel of one vector",
        "s.panel = s.take(tiling.segments_at_once * k.max_depth() * width *",
        "s.panel = s.take(k.max_depth() * vector.lanes *",
    ),
    M(
        "plan/tile_gemm.cpp",
        "groups are interleaved whose results don't lie together",
        "gemm.taps() > 0 && gemm.destination_m == 1 &&",
        "gemm.taps() > 0 &&",
    ),
    M(
        "plan/tile_gemm.cpp",
        "no room in the patch for the vector that overlaps",
        "odd_lines_of_channels((t.group_vectors + 1) * vector.lanes,",
        "odd_lines_of_channels(t.group_vectors * vector.lanes,",
        sanitizer="address",
    ),
    M(
        "plan/tile_gemm.cpp",
        "no room in the workspace for what totals lose",
        "return (t.slots + 2) *",
        "return (t.slots + 1) *",
        sanitizer="address",
    ),
    M(
        "plan/tile_gemm.h",
        "no room in the tile for the vector that overlaps",
        "(group_vectors > 0 ? group_vectors + 1 : groups_in_turn)",
        "(group_vectors > 0 ? group_vectors : groups_in_turn)",
        sanitizer="address",
    ),
    M(
        "plan/tile_gemm.h",
        "no room in the tile for groups taken in turn",
        "(group_vectors > 0 ? group_vectors + 1 : groups_in_turn)",
        "(group_vectors > 0 ? group_vectors + 1 : 1)",
        sanitizer="address",
    ),
    M(
        "plan/tile_pixels.cpp",
        "no room for what the last panel reads beyond its row",
        "vector.element_size) + kMaxPanelVectors * vector.lanes;",
        "vector.element_size) - 128 / vector.element_size;",
        sanitizer="address",
    ),
    M(
        "plan/tile_pixels.cpp",
        "planes with gaps are summed in place",
        "!k.has_chunks() && gemm.destination_col == 1 &&",
        "!k.has_chunks() &&",
    ),
    M(
        "plan/tile_pixels.cpp",
        "channels of a weight with gaps are read in place",
        " && (k.segment_channels == 1 || gemm.weight_c == taps);",
        ";",
    ),
    M(
        "plan/tile_phases.cpp",
        "bands of rows reach as far as those of the first phase",
        "low_row = min64(low_row, g.axis_h.source(0, g.taps_h - 1));\n"
        "    high_row = max64(high_row, g.axis_h.source(0, 0));",
        "if (f == 0) low_row = min64(low_row, g.axis_h.source(0, g.taps_h - 1));\n"
        "    if (f == 0) high_row = max64(high_row, g.axis_h.source(0, 0));",
    ),
    M(
        "plan/tile_phases.cpp",
        "the patch lacks the last column",
        "phases.cols = saturating_add(high_col, saturating_add(-low_col, 1));",
        "phases.cols = max64(high_col - low_col, 1);",
    ),
    M(
        "plan/tile_phases.cpp",
        "room for the positions of one image",
        "pixels += tiling.tile_images * min64(",
        "pixels += min64(",
        sanitizer="address",
    ),
    M(
        "plan/tile_phases.cpp",
        "room for totals where the last phase has chunks",
        "has_chunks = has_chunks || block_k(",
        "has_chunks = block_k(",
        sanitizer="address",
    ),
    M(
        "plan/tile_planes.cpp",
        "no room for what totals lose",
        "has_chunks() ? 4 : 2;",
        "has_chunks() ? 3 : 2;",
        sanitizer="address",
    ),
    M(
        "plan/tile_depthwise.cpp",
        "room for one row of pixels",
        "s.take(tiling.image_pixels() * vector.bytes()",
        "s.take(tiling.tile_cols * vector.bytes()",
    ),
    M(
        "plan/tile_depthwise.cpp",
        "tiles begin within a round of the row phases",
        "t.tile_rows = tile_rounds * p.stride_h;",
        "t.tile_rows = max64(tile_rounds * p.stride_h - 1, 1);",
    ),
    M(
        "plan/tile_one_pixel.cpp",
        "no room for surplus rows",
        "t.padded_rows = t.rows + max64(shape.single_rows, shape.lanes);",
        "t.padded_rows = t.rows;",
        sanitizer="address",
    ),
    M(
        "plan/tile_one_pixel.cpp",
        "no room for a patch's lanes",
        "s.placed = s.take(placed * s.pitch * element_size);",
        "s.placed = s.take(0);",
        sanitizer="address",
    ),
    M(
        "plan/tile_one_pixel.cpp",
        "scattered results of a group lie in another one's",
        "p.result_g = call.problem.in_channels_per_group() * input[1];",
        "p.result_g = p.lanes * input[1];",
        sanitizer="address",
    ),
    M(
        "drivers/rows.h",
        "taps in the padding are not zero",
        "    fill_zero(to, lanes.count());\n    for_each_place",
        "    for_each_place",
    ),
    M(
        "drivers/rows.h",
        "every item scatters the first one's lanes",
        "scatter(placed + i * layout.pitch, {lane0, lane0 + rows.lanes}",
        "scatter(placed + i * layout.pitch, {0, rows.lanes}",
    ),
    M(
        "drivers/rows.h",
        "all images' results are scattered to the first",
        "result + i * products.result_r);",
        "result);",
    ),
    M(
        "plan/candidates.cpp",
        "pixels that no tap meets are not zeroed",
        "return met >= p.in_h * p.in_w && saturating_mul(3, met)",
        "return saturating_mul(3, met)",
    ),
    M(
        "plan/tile_one_pixel.cpp",
        "five results go to a kernel of six",
        "return step == 5 ? kMostRowResults : step;",
        "return step;",
    ),
    M(
        "plan/padding_products.cpp",
        "one column beyond the image counts as inside",
        "col >= 0 && col < p.in_w) continue;",
        "col >= 0 && col <= p.in_w) continue;",
    ),
    M(
        "plan/padding_products.cpp",
        "imaginary parts are not looked at",
        "for (int64_t part = 0; part < parts; ++part) {\n      for (int64_t x",
        "for (int64_t part = 0; part < 1; ++part) {\n      for (int64_t x",
        dtype="complex64",
    ),
    M(
        "plan/padding_products.cpp",
        "the first channel's weights alone are looked at",
        "channels{p.in_channels_per_group(), w[1], w[1]};",
        "channels{1, w[1], w[1]};",
    ),
    # ---- pointwise functions, sums, softmax
    M(
        "pointwise/rows.h",
        "the last elements of a row are stored as a whole vector",
        "store_as_partial(to + i, f(load_as_partial(from + i, rest)...), rest);",
        "store_as(to + i, f(load_as_partial(from + i, rest)...));",
    ),
    M(
        "pointwise/rows.h",
        "the last elements of a row are read as a whole vector",
        "f(load_as_partial(from + i, rest)...)",
        "f(load_as(from + i)...)",
        sanitizer="address",
    ),
    M(
        "pointwise/rows.h",
        "the last elements are computed from the first ones",
        "f(load_as_partial(from + i, rest)...)",
        "f(load_as_partial(from, rest)...)",
    ),
    M(
        "pointwise/rows.h",
        "whole vectors are computed from the first ones",
        "f(load_as(from + i)...)",
        "f(load_as(from)...)",
    ),
    M(
        "reduce/sum.h",
        "positions that are gathered lie side by side",
        "gathered[i + j] = from[j * step];",
        "gathered[i + j] = from[j];",
    ),
    M(
        "reduce/sum.h",
        "the last columns of a row are summed as a whole vector",
        "const int n = int(min64(width(), row() - column));",
        "const int n = int(width());",
    ),
    M(
        "reduce/sum.h",
        "parts of a sum overwrite one another",
        "partial[part * results + result] = sum;",
        "partial[result] = sum;",
    ),
    M(
        "reduce/sum.h",
        "columns are added to lanes by position in a run",
        "Row& lane = lanes[(i + j) % kSumLanes];",
        "Row& lane = lanes[j % kSumLanes];",
    ),
    M(
        "reduce/sum.h",
        "a sum's zero keeps its sign",
        "Narrow<S>::from(sum + T(0))",
        "Narrow<S>::from(sum)",
    ),
    M(
        "reduce/sum.h",
        "a lane of columns begins with its first element as it is",
        "lane = (i + j < kSumLanes ? Row{} : lane) + row;",
        "lane = i + j < kSumLanes ? row : lane + row;",
    ),
    M(
        "reduce/lanes.h",
        "lanes are added one after the other",
        "return (last[0] + last[2]) + (last[1] + last[3]);",
        "return ((last[0] + last[1]) + last[2]) + last[3];",
    ),
    M(
        "reduce/softmax.h",
        "lanes beyond a row count",
        "const Row powers = Row::load(x + i, n, -kInfinity<T>).map(power);",
        "const Row powers = Row::load(x + i, n, T(0)).map(power);",
    ),
    M(
        "reduce/softmax.h",
        "columns have one lane",
        "sums[i % kSumLanes] = sums[i % kSumLanes] + power;",
        "sums[0] = sums[0] + power;",
    ),
    M(
        "reduce/softmax.h",
        "threads share a vector of columns",
        "end = min64(first + pieces_in_item(), pieces());",
        "end = min64(first + pieces_in_item() + 1, pieces());",
        sanitizer="thread",
    ),
    # ---- what all share
    M(
        "base/scratch.h",
        "no room for what totals lose",
        "several ? take(total_bytes) : sums, several};",
        "several ? take(0) : sums, several};",
    ),
    M(
        "base/executor.h",
        "two work items are none",
        "} else if (items > 1) {",
        "} else if (items > 2) {",
    ),
    M(
        "base/executor.h",
        "without threads the last work item is lost",
        "for (int64_t item = 0; item < items; ++item) body(context, item);",
        "for (int64_t item = 0; item + 1 < items; ++item) body(context, item);",
    ),
)


def chosen(number: int, count: int = 4) -> list[Mutation]:
    """The `number`-th choice of so many, each of another part of the list; all come around."""
    here = [mutation for mutation in MUTATIONS if mutation.runs_here()]
    step = -(-len(here) // count)
    return [here[(number + part * step) % len(here)] for part in range(count)] if here else []


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="show them, and run none")
    parser.add_argument("--only", action="append", help="those whose file or name has this text")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of random inputs, at most")
    parser.add_argument("--seed", type=int, default=SEED, help="of the random inputs")
    options = parser.parse_args(arguments)
    wanted = [
        mutation
        for mutation in MUTATIONS
        if not options.only or any(text in str(mutation) for text in options.only)
    ]
    if options.list:
        for mutation in wanted:
            replaced(mutation)
            isas = ", ".join(mutation.instruction_sets())
            print(f"{mutation} ({mutation.dtype}, {isas}, sanitizer {mutation.sanitizer})")
        return 0
    survivors, left_out = [], []
    for number, mutation in enumerate(wanted, 1):
        if not mutation.runs_here():
            left_out.append(mutation)
            continue
        start = time.monotonic()
        how = run_mutant(mutation, options.seconds, options.seed)
        if not how:
            survivors.append(mutation)
        taken = time.monotonic() - start
        print(f"{number}/{len(wanted)} {taken:.0f} s  {mutation}: {how or 'SURVIVED'}", flush=True)
    run = len(wanted) - len(left_out)
    print(f"{run} mutants, {run - len(survivors)} killed, {len(survivors)} survived")
    for mutation in survivors:
        print(f"survived: {mutation}")
    for mutation in left_out:
        print(f"not run, the CPU lacks the instructions: {mutation}")
    return 1 if survivors or not run else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
