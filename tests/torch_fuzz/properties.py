"""What holds for every call: values, bits, strides, the sign of zeros, the workspace."""

from __future__ import annotations

import dataclasses
import functools
import mmap

import torch

import conv2d_ext
from conv2d_ext.testing import Problem, Results, Tensors, num_threads

from .bits import require_same_bits
from .calls import library_results_of, needs_padded_copy, peer_forward, peer_results
from .cases import Case, Violation, case_tensors, lay_out, shape_of
from .values import require_values

WORKSPACE_BYTES = 4 * 2**20
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.13 and newer name it
DIRECTIONS = Results._fields


# ---- the properties


def check_plain(case: Case) -> None:
    named = case_tensors(case)
    plain = Tensors(*named.values())
    with num_threads(1):
        base = library_results_of(case, case.problem, plain)
    for name, result in zip(DIRECTIONS, base, strict=True):
        if result is not None:
            _require_positive_zeros(name, result, case)
    require_values(case, plain, base)
    laid_out = Tensors(
        *(
            None if tensor is None else lay_out(tensor, getattr(case, name).layout)
            for name, tensor in named.items()
        )
    )
    with num_threads(case.threads):
        other = library_results_of(case, case.problem, laid_out)
        for name, ours, expected in zip(DIRECTIONS, other, base, strict=True):
            if expected is not None:
                what = f"{name}, strides and {case.threads} threads"
                require_same_bits("bits follow strides or threads", ours, expected, what)
        _require_batch_independence(case, laid_out, base)
    _require_strides(case, laid_out, other)
    _require_workspace(case.problem, laid_out)


def _require_batch_independence(case: Case, tensors: Tensors, base: Results) -> None:
    problem = case.problem
    expected = {"output": base.output, "grad_input": base.grad_input}
    variations = []
    if "images" in case.options:
        first, last = case.options["images"]
        part = slice(first, last)
        if case.options.get("unbatched"):
            variations.append((f"image {first} unbatched", first, first, 1))
        else:
            variations.append((f"images {first} to {last}", part, part, last - first))
    copies = case.options.get("copies", 1)
    if copies > 1:
        everything = torch.arange(problem.batch).repeat(copies)
        variations.append((f"{copies} copies", everything, None, problem.batch * copies))
    for what, chosen, of_base, batch in variations:
        some = tensors._replace(
            input=tensors.input[chosen], grad_output=tensors.grad_output[chosen]
        )
        results = library_results_of(case, dataclasses.replace(problem, batch=batch), some)
        for name, whole in expected.items():
            if whole is None:
                continue
            ours = getattr(results, name)
            wanted = whole.repeat(copies, 1, 1, 1) if of_base is None else whole[of_base]
            require_same_bits("bits follow the batch", ours, wanted, f"{name}, {what}")


def _require_positive_zeros(name: str, result: torch.Tensor, case: Case) -> None:
    """The last operation of a sum is an addition of +0 where there is no bias; 16-bit results are
    rounded after it, and may round to -0."""
    if case.dtype not in ("float32", "float64", "complex64", "complex128"):
        return
    if name == "output" and case.problem.bias:
        return
    parts = torch.view_as_real(result) if result.is_complex() else result
    negative = (parts == 0) & parts.signbit()
    if negative.any():
        count = int(negative.sum())
        raise Violation("a sum is -0", f"{name}: {count} of {parts.numel()} elements")


def _require_strides(case: Case, tensors: Tensors, results: Results) -> None:
    problem, (input, weight, _, _) = case.problem, tensors
    if problem.padding == "same" or len(problem.padding) == 4:
        return  # F.conv2d may copy its input first
    if not input.is_floating_point() and not input.is_complex() and problem.dilation != (1, 1):
        return  # F.conv2d does not take these
    if not case.options.get("autograd"):
        return
    if any(needs_padded_copy(problem)):
        return
    try:
        if results.grad_input is None:
            theirs, output = None, peer_forward(problem, tensors)
        else:
            theirs = peer_results(problem, tensors)
            output = theirs.output
    except RuntimeError as error:
        if "grad_weight must be contiguous" in str(error):
            return  # F.conv2d has no gradient of such a weight
        raise
    sizes = output.shape
    # PyTorch assembles complex results, and gives dimensions of size 1 a stride by the way.
    told = [i for i in range(4) if sizes[i] > 1 or not output.is_complex()]
    if any(results.output.stride(i) != output.stride(i) for i in told):
        raise Violation(
            "strides", f"output has {results.output.stride()}, F.conv2d's {output.stride()}"
        )
    if theirs is None:
        return
    wanted = theirs.grad_input if problem.batch else torch.empty(problem.input_shape)
    if results.grad_input.stride() != wanted.stride():
        ours = results.grad_input.stride()
        raise Violation("strides", f"grad_input has {ours}, F.conv2d's {wanted.stride()}")
    dense = torch.empty_like(weight).stride() == weight.stride()
    wanted = weight if dense else torch.empty(weight.shape)
    if results.grad_weight.stride() != wanted.stride():
        ours = results.grad_weight.stride()
        raise Violation("strides", f"grad_weight has {ours}, its weight {weight.stride()}")


def _require_workspace(problem: Problem, tensors: Tensors) -> None:
    if len(problem.padding) == 4 and problem.padding != "same":
        return  # explain takes F.conv2d's arguments
    explained = conv2d_ext.explain(*tensors[:3], **problem.call_args())
    for direction in ("forward", "grad_input", "grad_weight"):
        description = getattr(explained, direction)
        if description is not None and description.workspace_bytes_per_thread > WORKSPACE_BYTES:
            raise Violation(
                "workspace",
                f"{direction} takes {description.workspace_bytes_per_thread} bytes a thread: "
                f"{description.engine}",
            )


@functools.cache
def _untouched_memory() -> torch.Tensor:
    """Addresses that no memory stands behind: for sizes and strides that nothing is computed of."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, 2**38, flags=flags), dtype=torch.uint8)


def check_explained(case: Case) -> None:
    """The workspace of sizes that are too large to compute."""
    tensors = []
    for name in ("input", "weight"):
        shape = shape_of(case.problem, name)
        strides, running = [0] * 4, 1
        for d in reversed(getattr(case, name).layout["order"]):
            strides[d], running = running, running * max(1, shape[d])
        memory = _untouched_memory()[: running * case.torch_dtype.itemsize]
        tensors.append(memory.view(case.torch_dtype).as_strided(shape, strides))
    _require_workspace(case.problem, Tensors(*tensors, None, tensors[0]))
