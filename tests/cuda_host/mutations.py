"""Bugs put into the CUDA sources one at a time, each of which the checks must catch.

A mutation is an exact replacement in one file and one call that shows it: by a failure of the host
execution, by other bits than the unaltered kernels give, by more bank conflicts, under sanitizers,
or where a second host thread launches the same kernel at the worst moment.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import pathlib
import shutil
import signal
import tempfile
import threading
import time

import torch

from conv2d_ext import testing
from conv2d_ext.testing import Problem, make_tensors

from .build import HERE, ROOT, SHIM, compile_unit, link, run_sanitized
from .cases import ARRANGEMENTS, GEMMS, MATHS, PHASES, SEGMENTS, WALKS, empty_result, operands
from .engine import Answer, Engine, Execution, KernelError, Machine, engine_units

DEFAULT_MACHINE = Machine()


@dataclasses.dataclass(frozen=True)
class Mutation:
    name: str
    file: str  # in csrc/cuda
    old: str  # occurs once
    new: str
    unit: str  # the source file whose kernels the call runs
    direction: str
    math: str
    problem: Problem
    arrangement: str = "contiguous"  # of both operands and the result
    machine: Machine = DEFAULT_MACHINE
    shows: str = "failure or bits"  # or "bank conflicts", "sanitizers", "two threads"

    def __str__(self) -> str:
        return self.name


TAILS, GROUPS, WHOLE_GROUPS, _, FEW = GEMMS[:5]
SEGMENTED = SEGMENTS[0]
WHOLE_SEGMENTED = SEGMENTS[1]
DEPTHWISE_PIXELS = next(p for p in SEGMENTS if p.name == "depthwise, pixels in segments")
DEPTHWISE = testing.DEPTHWISE[0]
NO_TAPS = PHASES[3]
LARGE_TILES = Machine(variant=0)
UNSPLIT = Machine(variant=0, split=0)
# Has several tiles for its SM, on which two fit with rings of two stages.
TWO_CTAS = Machine(sm_count=1, variant=0, split=0)
WHOLE_PIXELS = Problem("24 pixels", 2, 16, (4, 6), 20, (1, 1))
ONTO_ONE_PIXEL = Problem("onto one pixel", 2, 16, (3, 3), 24, (3, 3))
FEW_RESULTS = Problem("few results", 2, 5, (7, 6), 2, (3, 3), padding=(1, 1))
FOUR_STEPS = Problem("4 steps", 1, 8, (5, 7), 33, (2, 4))
PHASES_2 = Problem("2 phases", 1, 9, (7, 6), 10, (3, 3), (2, 2), (1, 1))
# Two chains of the full length.
FULL_CHAINS = Problem("K = 512", 1, 64, (5, 7), 33, (2, 4))
SPLIT = Machine(split=1)
SEGMENTED_GROUPS = Problem("groups of K in segments", 1, 640, (3, 5), 22, (1, 1), groups=2)
SEGMENTED_PHASES = SEGMENTS[3]
MANY_SEGMENTS = Problem("20 segments of pixels", 20, 3, (16, 16), 9, (1, 1))
MANY_PIXELS = Problem("20 segments of 1024 pixels", 20, 3, (32, 32), 9, (1, 1))


def _kernel(name, old, new, direction="forward", problem=TAILS, **rest) -> Mutation:
    arguments = {"unit": "gemm_f32.cu", "math": "float32", **rest}
    return Mutation(
        name, "gemm_kernel.cuh", old, new, direction=direction, problem=problem, **arguments
    )


def _in(file, name, old, new, unit, direction, math, problem, **rest) -> Mutation:
    return Mutation(name, file, old, new, unit, direction, math, problem, **rest)


def _walk(name, old, new, direction="forward", math="float32", **rest) -> Mutation:
    problem = WALKS[0]
    return _in(
        "depthwise_kernel.cuh", name, old, new, "depthwise.cu", direction, math, problem, **rest
    )


def _packed(file, name, old, new, direction="forward", problem=TAILS, **rest) -> Mutation:
    arguments = {"unit": file, "machine": Machine(packed=1), **rest}
    return _in(
        file, name, old, new, direction=direction, math="float32", problem=problem, **arguments
    )


F32 = ("gemm_f32.cu",)
MUTATIONS = (
    # ---- synchronisation
    _kernel("waits for too few copies", "wait_copies<STAGES - 2>();", "wait_copies<STAGES - 1>();"),
    _kernel("no barrier after the wait", "sync_threads();  // ... and for all", "// ... and"),
    _kernel(
        "no barrier after the tables",
        "16 / sizeof(Element) : 1));\n  sync_threads();",
        "16 / sizeof(Element) : 1));",
    ),
    _kernel(
        "no barrier before the ring is reused",
        "sync_threads();  // the ring is free",
        "",
        problem=FOUR_STEPS,
        machine=LARGE_TILES,
    ),
    _kernel(
        "no barrier in store_tile",
        "  sync_threads();\n  if constexpr (kHasVectors) {\n    if (",
        "  if constexpr (kHasVectors) {\n    if (",
        machine=LARGE_TILES,
    ),
    _kernel(
        "copies not committed at the start",
        "    commit_copies();\n  }\n  int slot",
        "  }\n  int slot",
    ),
    _kernel("loads into the slot that is read", "slot == 0 ? stages - 1 : slot - 1", "slot"),
    _kernel(
        "stores into the slot that is read",
        "if (loads) finish(ahead_slot);",
        "if (loads) finish(slot);",
        problem=TAILS,
        unit="gemm_f16.cu",
        math="float16",
    ),
    _kernel(
        "the ring lies on the sums of several chains",
        "(one_chain ? 0 : stages * Tiling::kStageBytes)",
        "0",
        problem=SEGMENTED,
        machine=UNSPLIT,
    ),
    _kernel(
        "the table's halves are mixed up",
        "entry <= kChainEntries ?",
        "entry < kChainEntries ?",
        problem=FULL_CHAINS,
        machine=UNSPLIT,
    ),
    _kernel(
        "the next chain's entries are made too early",
        "make_entries(chain + 2);",
        "make_entries(chain + 1);",
        problem=SEGMENTED,
        machine=UNSPLIT,
    ),
    _in(
        "direct_kernel.cuh",
        "no barrier before residues are added",
        "residue, sums[r][j]);\n  sync_threads();",
        "residue, sums[r][j]);",
        "direct.cu",
        "grad_weight",
        "float32",
        DEPTHWISE,
    ),
    _in(
        "direct_kernel.cuh",
        "no barrier before grad_bias's residues are added",
        "residue, sum);\n  sync_threads();",
        "residue, sum);",
        "direct.cu",
        "grad_bias",
        "float32",
        TAILS,
    ),
    # ---- sums
    _kernel(
        "a chain is not cleared",
        "++chain;\n    Policy::clear(sums);",
        "++chain;",
        problem=SEGMENTED,
        machine=UNSPLIT,
    ),
    _in(
        "gemm_policies.cuh",
        "a segment's partial sum is left out",
        "if (i >= left) break;",
        "if (i + 1 >= left) break;",
        "gemm_f32.cu",
        "forward",
        "float32",
        SEGMENTED,
        machine=SPLIT,
    ),
    _in(
        "gemm_policies.cuh",
        "a partial sum is loaded ahead twice",
        "left > 0; left -= kLoadsAhead",
        "left > 0; left -= kLoadsAhead, next -= step",
        "gemm_f32.cu",
        "grad_weight",
        "float32",
        MANY_SEGMENTS,
    ),
    _in(
        "gemm_policies.cuh",
        "a sum beyond grad_bias's last segment is added",
        "left > 0; left -= kLoadsAhead",
        "left > 0; left -= kLoadsAhead - 1",
        "direct.cu",
        "grad_bias",
        "float32",
        MANY_PIXELS,
    ),
    _kernel(
        "all groups are reduced as the first",
        "const Geometry geometry(params, number);\n  if (x >=",
        "const Geometry geometry(params, 0);\n  if (x >=",
        problem=SEGMENTED_GROUPS,
        machine=SPLIT,
    ),
    _kernel(
        "pixels that a phase hasn't are reduced",
        "if (x >= geometry.x_count()) return;\n  const auto* const first",
        "const auto* const first",
        direction="grad_input",
        problem=SEGMENTED_PHASES,
        machine=SPLIT,
    ),
    _in(
        "conv2d_cuda.cpp",
        "segments are cut otherwise when they are split",
        "tile.segment_tiles = kernel.chain_tiles;",
        "tile.segment_tiles = kernel.chain_tiles / (plan.split ? 2 : 1);",
        "conv2d_cuda.cpp",
        "forward",
        "float32",
        SEGMENTED,
    ),
    _in(
        "conv2d_cuda.cpp",
        "taps outside of a single column have misaligned addresses",
        "if (p.source_cols == 1) p.source_w = 0;",
        "",
        "conv2d_cuda.cpp",
        "grad_input",
        "bfloat16",
        ONTO_ONE_PIXEL,
    ),
    _in(
        "gemm_kernel.cuh",
        "a segment of pixels is left out",
        "int64_t{sizeof(Sum)}, geometry.segments());",
        "int64_t{sizeof(Sum)}, geometry.segments() - 1);",
        "gemm_f32.cu",
        "grad_weight",
        "float32",
        SEGMENTS[4],
    ),
    _in(
        "direct_kernel.cuh",
        "a segment's pixels go beyond the last",
        "min_of(begin + shape.segment_pixels, p.batch * p.out_pixels)",
        "begin + shape.segment_pixels",
        "direct.cu",
        "grad_weight",
        "float32",
        DEPTHWISE_PIXELS,
    ),
    _in(
        "direct_kernel.cuh",
        "a pixel walk stays in its image",
        "h -= height;\n      ++n;",
        "h -= height;",
        "direct.cu",
        "grad_weight",
        "float32",
        DEPTHWISE,
    ),
    _in(
        "calls.cpp",
        "the weight is not conjugated",
        "g.tile.conjugate_a = true;",
        "",
        "calls.cpp",
        "grad_input",
        "complex64",
        TAILS,
    ),
    # ---- tails
    _kernel("rows past the last are stored", "m >= m_left || address == 0", "address == 0"),
    _kernel("columns past the last are stored", "m >= m_left || address == 0", "m >= m_left"),
    _kernel(
        "one bias for all",
        "bias != nullptr ? geometry.template bias_at<Element>(m)",
        "bias != nullptr ? geometry.template bias_at<Element>(0)",
    ),
    _in(
        "gemm_geometry.cuh",
        "a short group of channels counts as whole",
        "tap < taps ? min_of<uint32_t>(GROUP, channels - channel) : 0",
        "tap < taps ? GROUP : 0",
        *F32,
        "forward",
        "float32",
        TAILS,
    ),
    _in(
        "gemm_geometry.cuh",
        "pixels past the batch",
        "const bool exists = n < p.batch;",
        "const bool exists = n <= p.batch;",
        *F32,
        "grad_weight",
        "float32",
        TAILS,
    ),
    _in(
        "gemm_loader.cuh",
        "a test of channels is missing",
        "inside[i] && channel < positions[i].count",
        "inside[i]",
        *F32,
        "forward",
        "float32",
        TAILS,
        shows="sanitizers",
    ),
    _in(
        "gemm_loader.cuh",
        "groups past K are loaded",
        "position.count != 0 && side.contains(entries[i], position);",
        "side.contains(entries[i], position);",
        "gemm_f16.cu",
        "forward",
        "float16",
        WHOLE_GROUPS,
        arrangement="channels_last",
    ),
    _in(
        "gemm_geometry.cuh",
        "rows past the last are read",
        "min_of<int64_t>(m, p.tile.dense_rows - together) * p.weight_m",
        "m * p.weight_m",
        *F32,
        "forward",
        "float32",
        TAILS,
        shows="sanitizers",
    ),
    _in(
        "direct_kernel.cuh",
        "pixels past the last are read",
        "exists ? static_cast<int32_t>(h) : kOutside",
        "static_cast<int32_t>(h)",
        "direct.cu",
        "forward",
        "float32",
        FEW_RESULTS,
        shows="sanitizers",
    ),
    # ---- walks
    _walk(
        "the next row takes a place that is read",
        "(i * STEP + TAPS_H + row) % kRows",
        "(i * STEP + TAPS_H + row - 1) % kRows",
    ),
    _walk("results past a band's last", "if (first + i >= column.results) continue;", ""),
    _walk(
        "grad_input's walk begins at its band's first row",
        "down ? first : first + results - 1",
        "first",
        direction="grad_input",
        machine=Machine(sm_count=1),
    ),
    _walk(
        "columns outside of the image are read",
        "if (in_rows && in_cols[kw])",
        "if (in_rows)",
    ),
    _walk(
        "two groups share a filter",
        "column.weight + v * p.weight_group",
        "column.weight",
        math="bfloat16",
        arrangement="channels_last",
    ),
    # ---- packed weights
    _packed(
        "pack_kernel.cuh",
        "no barrier before the block is turned",
        "m, value);\n  }\n  sync_threads();",
        "m, value);\n  }",
        unit="pack.cu",
    ),
    _packed(
        "pack_kernel.cuh",
        "rows of k past the last are written",
        "k0 + row < shape.rows && ",
        "",
        unit="pack.cu",
        shows="sanitizers",
    ),
    _packed(
        "conv2d_cuda.cpp",
        "the packed weight lies on the partial sums",
        "address(workspace) + plan.packed_at",
        "address(workspace)",
        problem=Problem("K in segments, many pixels", 1, 150, (20, 30), 11, (3, 3)),
        machine=Machine(split=1, packed=1),
    ),
    _packed(
        "conv2d_cuda.cpp",
        "all phases read the first one's packed weight",
        "weight_offset = col * phase;",
        "weight_offset = 0;",
        direction="grad_input",
        problem=PHASES_2,
    ),
    _packed(
        "gemm_loader.cuh",
        "channels past a group's last are copied",
        "inside[i] = channel < position.count &&",
        "inside[i] = position.count != 0 &&",
        problem=Problem("19 channels, 24 pixels", 1, 19, (4, 6), 20, (1, 1)),
        unit="gemm_f32.cu",
        shows="sanitizers",
    ),
    # ---- geometry
    _in(
        "gemm_geometry.cuh",
        "the stride of rows for columns",
        "pixel.w * p.step_w + cols().origin",
        "pixel.w * p.step_h + cols().origin",
        *F32,
        "forward",
        "float32",
        TAILS,
    ),
    _in(
        "gemm_geometry.cuh",
        "the padding of columns for rows",
        "p.step_h + rows().origin",
        "p.step_h + cols().origin",
        *F32,
        "forward",
        "float32",
        TAILS,
    ),
    _in(
        "gemm_geometry.cuh",
        "all phases begin at the weight's first row",
        "rows().weight_offset + cols().weight_offset",
        "cols().weight_offset",
        *F32,
        "grad_input",
        "float32",
        PHASES_2,
    ),
    _in(
        "gemm_loader.cuh",
        "columns left of the image are read",
        "static_cast<uint32_t>(x.w + k.w) < static_cast<uint32_t>(cols)",
        "x.w + k.w < cols",
        *F32,
        "forward",
        "float32",
        GROUPS,
    ),
    _in(
        "conv2d_cuda.cpp",
        "input that meets no tap is not set to zero",
        "if (!call.fills_result || plan.engine",
        "if (plan.engine",
        "conv2d_cuda.cpp",
        "grad_input",
        "float32",
        NO_TAPS,
    ),
    _in(
        "plan.cpp",
        "16-byte copies from unaligned images",
        "if (!is_aligned(source) || ",
        "if (",
        "plan.cpp",
        "forward",
        "float16",
        WHOLE_GROUPS,
        arrangement="channels_last, unaligned",
    ),
    # ---- tensor cores
    _in(
        "gemm_policies.cuh",
        "a fragment's rows and columns change places",
        "(k + e / 2 * 4) * a_row + i * 16 + e % 2 * 8",
        "(k + e % 2 * 4) * a_row + i * 16 + e / 2 * 8",
        "gemm_tf32.cu",
        "forward",
        "tf32",
        TAILS,
    ),
    _in(
        "gemm_policies.cuh",
        "tf32 is cut off instead of rounded",
        "b_values[j][e] = round_to_tf32(load_shared(b_lane + (k + e * 4) * b_row + j * 8))",
        "b_values[j][e] = bits_of(load_shared(b_lane + (k + e * 4) * b_row + j * 8))",
        "gemm_tf32.cu",
        "forward",
        "tf32",
        TAILS,
    ),
    _in(
        "gemm_policies.cuh",
        "matrices of B in another order",
        "b_first + j * 16 + lane / 16 * 8 + row, k + lane / 8 % 2",
        "b_first + j * 16 + lane / 8 % 2 * 8 + row, k + lane / 16",
        "gemm_bf16.cu",
        "forward",
        "bfloat16",
        TAILS,
    ),
    _in(
        "gemm_policies.cuh",
        "transposed matrices of A in another order",
        "(k + lane / 16) * 8 + row, a_first / 8 + i * 2 + lane / 8 % 2",
        "(k + lane / 8 % 2) * 8 + row, a_first / 8 + i * 2 + lane / 16",
        "gemm_bf16.cu",
        "grad_input",
        "bfloat16",
        WHOLE_GROUPS,
        arrangement="channels_last",
    ),
    _in(
        "gemm_policies.cuh",
        "transposed matrices of B in another order",
        "(k + lane / 8 % 2) * 8 + row, b_first / 8 + j * 2 + lane / 16",
        "(k + lane / 16) * 8 + row, b_first / 8 + j * 2 + lane / 8 % 2",
        "gemm_bf16.cu",
        "grad_weight",
        "bfloat16",
        WHOLE_GROUPS,
        arrangement="channels_last",
    ),
    _in(
        "gemm_loader.cuh",
        "a vector's channel is always the first",
        "entry.address += channel(thread) * side.step;",
        "",
        "gemm_bf16.cu",
        "grad_input",
        "bfloat16",
        WHOLE_GROUPS,
        arrangement="channels_last",
    ),
    _in(
        "gemm_loader.cuh",
        "pixels past the last are copied",
        "channel(thread) < positions[i].count && side.contains(entry, positions[i]));",
        "side.contains(entry, positions[i]));",
        "gemm_bf16.cu",
        "grad_weight",
        "bfloat16",
        WHOLE_GROUPS,
        arrangement="channels_last",
    ),
    _kernel(
        "a ring of two stages waits as one of three",
        "if (kCountsStages && stages == 2) {",
        "if (false) {",
        problem=WHOLE_SEGMENTED.with_batch(10),
        unit="gemm_f16.cu",
        math="float16",
        arrangement="channels_last",
        machine=TWO_CTAS,
    ),
    # ---- results of 16 bits, 8 at a time
    _kernel(
        "vectors of rows past the last are stored",
        "address == 0 || m + 4 >= m_left ?",
        "address == 0 || m >= m_left ?",
        problem=FEW,
        unit="gemm_f16.cu",
        math="float16",
        arrangement="channels_last",
        shows="sanitizers",
    ),
    _kernel(
        "the upper rows' order is not undone",
        "const float low = upper ? sums[j + 2] : sums[j];",
        "const float low = sums[j];",
        problem=WHOLE_GROUPS,
        unit="gemm_f16.cu",
        math="float16",
        arrangement="channels_last",
    ),
    _kernel(
        "halves that were read the other way round stay so",
        "sums[j] = add(swaps ? there.at[j] : here.at[j], bias);",
        "sums[j] = add(here.at[j], bias);",
        problem=WHOLE_PIXELS,
        unit="gemm_f16.cu",
        math="float16",
    ),
    # ---- speed
    _in(
        "gemm_policies.cuh",
        "groups of x are not swizzled",
        "((group ^ k) & 7)",
        "(group & 7)",
        "gemm_f16.cu",
        "grad_weight",
        "float16",
        WHOLE_GROUPS,
        arrangement="channels_last",
        shows="bank conflicts",
    ),
    _kernel(
        "all rows of results are read in one order",
        "(upper ? j ^ 2 : j)",
        "j",
        problem=WHOLE_PIXELS,
        unit="gemm_f16.cu",
        math="float16",
        arrangement="channels_last",
        shows="bank conflicts",
    ),
    _in(
        "gemm_policies.cuh",
        "groups are not swizzled",
        "((group ^ (x >> 1)) & 3) * 8",
        "(group & 3) * 8",
        "gemm_f16.cu",
        "forward",
        "float16",
        WHOLE_SEGMENTED,
        shows="bank conflicts",
    ),
    _in(
        "gemm_policies.cuh",
        "tf32's rows are not padded",
        "static constexpr int kRowPadding = 8;",
        "static constexpr int kRowPadding = 0;",
        "gemm_tf32.cu",
        "forward",
        "tf32",
        SEGMENTED,
        shows="bank conflicts",
    ),
    # ---- what host threads share
    _in(
        "gemm_launch.cuh",
        "a launch sets its own size as the kernel's limit",
        "limit.raise(reinterpret_cast<const void*>(kernel), launch_of.most_shared_bytes);",
        "cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),"
        " cudaFuncAttributeMaxDynamicSharedMemorySize, launch_of.shared_bytes);",
        "gemm_bf16.cu",
        "forward",
        "bfloat16",
        WHOLE_SEGMENTED,
        machine=UNSPLIT,
        shows="two threads",
    ),
)


def _replaced(file_name: str, old: str, new: str) -> str:
    text = (ROOT / "csrc" / "cuda" / file_name).read_text()
    found = text.count(old)
    if found != 1:
        raise ValueError(f"{file_name} has this text {found} times, not once: {old}")
    return text.replace(old, new)


def replaced(mutation: Mutation) -> str:
    """The file with the replacement; raises where it does not have the text once."""
    return _replaced(mutation.file, mutation.old, mutation.new)


def build_altered(
    file_name: str, old: str, new: str, *, unit: str, sanitize: bool = False
) -> pathlib.Path:
    """The engine's library with a replacement in one file, which ``unit``, a source file, is or
    includes; raises where the file does not have the text once."""
    with tempfile.TemporaryDirectory() as folder:
        csrc = pathlib.Path(folder) / "csrc"
        shutil.copytree(ROOT / "csrc", csrc, ignore=shutil.ignore_patterns("cpu"))
        (csrc / "cuda" / file_name).write_text(_replaced(file_name, old, new))
        # First, so that its kernels are the ones that are linked.
        altered = compile_unit(
            csrc / "cuda" / unit, csrc=csrc, sanitize=sanitize, warnings_are_errors=False
        )
    rest = [other for other in (*engine_units(), *SHIM) if other.name != unit]
    # Of the engine's other units of csrc/cuda the call runs no kernel.
    objects = [compile_unit(other, sanitize=sanitize and other.parent == HERE) for other in rest]
    return link("altered", [altered, *objects], sanitize=sanitize)


def build_mutant(mutation: Mutation) -> pathlib.Path:
    return build_altered(
        mutation.file,
        mutation.old,
        mutation.new,
        unit=mutation.unit,
        sanitize=mutation.shows == "sanitizers",
    )


def _arranged(name: str, tensor: torch.Tensor):
    if name == "channels_last, unaligned":
        last = tensor.permute(0, 2, 3, 1)
        return (
            last.new_empty(tensor.numel() + 1)[1:].view(last.shape).copy_(last).permute(0, 3, 1, 2)
        )
    return ARRANGEMENTS[name](tensor)


def run_call(mutation: Mutation, library: Engine) -> Answer:
    math = next(math for math in MATHS if str(math) == mutation.math)
    problem = mutation.problem
    tensors = make_tensors(problem, math.dtype)
    counts_banks = mutation.shows == "bank conflicts"
    execution = Execution(machine=mutation.machine, counts_banks=counts_banks)
    if mutation.direction == "grad_bias":
        return library.run("grad_bias", problem, tensors.grad_output, execution=execution)
    first, second = (
        _arranged(mutation.arrangement, tensor) for tensor in operands(mutation.direction, tensors)
    )
    last = mutation.arrangement.startswith("channels_last")
    return library.run(
        mutation.direction,
        problem,
        first,
        second,
        tensors.bias if mutation.direction == "forward" else None,
        result=empty_result(mutation.direction, problem, math.dtype, last),
        tf32=math.tf32,
        execution=execution,
    )


def run_beside_a_smaller_call(mutation: Mutation, library: Engine) -> Answer:
    """The call, in whose launch another thread's of the same kernel comes in between, which takes
    less shared memory."""
    math = next(math for math in MATHS if str(math) == mutation.math)
    answers: list[Answer | KernelError] = []

    def run(problem: Problem, execution: Execution) -> None:
        tensors = make_tensors(problem, math.dtype)
        first, second = operands(mutation.direction, tensors)
        bias = tensors.bias if mutation.direction == "forward" else None
        try:
            answers.append(
                library.run(mutation.direction, problem, first, second, bias, execution=execution)
            )
        except KernelError as error:
            answers.append(error)

    execution = Execution(machine=mutation.machine, holds=True)
    thread = threading.Thread(target=run, args=(mutation.problem, execution))
    thread.start()
    while thread.is_alive() and not library.held():
        time.sleep(0.001)
    run(WHOLE_GROUPS, Execution(machine=mutation.machine))
    thread.join()
    smaller, answer = answers
    for found in answers:
        if isinstance(found, KernelError):
            raise found
    assert smaller.plan["kernel"] == answer.plan["kernel"]
    assert 48 << 10 < smaller.plan["shared_bytes"] < answer.plan["shared_bytes"]
    return answer


def wavefront_ratio(answer: Answer) -> float:
    wavefronts, ideal = (sum(at[key] for at in answer.traffic) for key in ("wavefronts", "ideal"))
    return wavefronts / ideal


def _compare(mutation: Mutation, library: pathlib.Path, expected: Answer) -> str:
    """How the library's answer differs from the expected one; "" where it doesn't."""
    run = run_beside_a_smaller_call if mutation.shows == "two threads" else run_call
    try:
        found = run(mutation, Engine(library))
    except KernelError as error:
        return str(error)
    if mutation.shows == "bank conflicts":
        more = wavefront_ratio(found) / wavefront_ratio(expected)
        return f"{more:.2f} times the wavefronts" if more > 1.1 else ""
    as_bytes = [bytes(answer.result.untyped_storage()) for answer in (found, expected)]
    return "other bits" if as_bytes[0] != as_bytes[1] else ""


def run_mutant(mutation: Mutation, library: pathlib.Path, expected: Answer) -> str:
    """How the mutation shows; "" where it doesn't. In a process of its own, which may crash."""
    if mutation.shows == "sanitizers":
        program = (
            "import pathlib, sys; from cuda_host.engine import Engine;"
            "from cuda_host.mutations import MUTATIONS, run_call;"
            "run_call(MUTATIONS[int(sys.argv[1])], Engine(pathlib.Path(sys.argv[2])))"
        )
        number = MUTATIONS.index(mutation)
        done = run_sanitized("-c", program, str(number), str(library))
        return done.stderr if done.returncode != 0 else ""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        # Some mutants are meant to crash: without pytest's traces of it.
        faulthandler.disable()
        # Nothing of torch that takes threads may run here.
        signal.alarm(60)
        status = 1
        try:
            os.write(write_end, _compare(mutation, library, expected).encode()[:4000])
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    # An exception of the check's own shows nothing about the kernels.
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, mutation
    return text or (f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "")
