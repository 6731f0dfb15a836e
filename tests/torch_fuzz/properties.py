"""What holds for every call: accuracy, bits, strides, the sign of zeros, the workspace."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import mmap
from collections.abc import Iterator

import torch
import torch.nn.functional as F

import conv2d_ext
from conv2d_ext.testing import (
    Oracle,
    Problem,
    Results,
    Tensors,
    aten_forward,
    aten_results,
    library_forward,
    library_results,
    unit_roundoff,
)
from tests.loop_oracle import loop_oracle

from . import peer
from .cases import TAME, Case, Violation, case_tensors, lay_out, shape_of

WORKSPACE_BYTES = 4 * 2**20
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.13 and newer name it
DIRECTIONS = Results._fields


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, in logical order; every NaN as the same one."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg().contiguous()
    if not tensor.is_floating_point():
        return tensor
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.masked_fill(tensor.isnan(), torch.nan).view(kinds[tensor.element_size()])


def require_same_bits(name: str, ours: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        raise Violation(name, f"{what}: {_describe(ours)} against {_describe(expected)}")
    ours_bits, expected_bits = bits(ours), bits(expected)
    if torch.equal(ours_bits, expected_bits):
        return
    differ = ours_bits != expected_bits
    if ours.is_complex():
        differ = differ.any(-1)
    where = differ.nonzero()
    first = tuple(where[0].tolist())
    raise Violation(
        name,
        f"{what}: {len(where)} of {ours.numel()} elements differ, the first {first}: "
        f"{ours[first].item()!r} against {expected[first].item()!r}",
    )


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"


# ---- calling the library


def _op_results(problem: Problem, tensors: Tensors, grad_input_last: bool = False) -> Results:
    """By the four ops; what F.conv2d's autograd would compute."""
    ops, arguments = torch.ops.conv2d_ext, problem.op_args()
    input, weight, bias, grad_output = tensors
    output = ops.conv2d(input, weight, bias, *arguments)
    if not (input.is_floating_point() or input.is_complex()):
        return Results(output, None, None, None)
    shape, strides = list(weight.shape), list(weight.stride())
    if torch.empty_like(weight).stride() != weight.stride():
        strides = list(torch.empty(weight.shape, device="meta").stride())
    return Results(
        output,
        ops.conv2d_grad_input(grad_output, weight, list(input.shape), *arguments, grad_input_last),
        ops.conv2d_grad_weight(grad_output, input, shape, strides, *arguments),
        None if bias is None else ops.conv2d_grad_bias(grad_output),
    )


def _results(case: Case, problem: Problem, tensors: Tensors) -> Results:
    if not tensors.input.is_floating_point() and not tensors.input.is_complex():
        return Results(library_forward(problem, tensors), None, None, None)
    if case.options.get("autograd"):
        return library_results(problem, tensors)
    return _op_results(problem, tensors)


# ---- calling F.conv2d


def _needs_padded_copy(problem: Problem) -> Iterator[bool]:
    """PyTorch 2.11 reads or writes past its memory, or crashes, where a kernel is larger than the
    image without its padding."""
    for size, kernel, dilation in zip(
        problem.in_size, problem.kernel, problem.dilation, strict=True
    ):
        yield dilation * (kernel - 1) + 1 > size


def _unpadded(problem: Problem, input: torch.Tensor) -> tuple[Problem, torch.Tensor]:
    top, bottom, left, right = problem.padding4
    input = F.pad(input, (left, right, top, bottom))
    return dataclasses.replace(problem, in_size=tuple(input.shape[2:]), padding=(0, 0)), input


def peer_forward(problem: Problem, tensors: Tensors) -> torch.Tensor:
    """F.conv2d's output."""
    if any(_needs_padded_copy(problem)):
        problem, input = _unpadded(problem, tensors.input)
        tensors = tensors._replace(input=input)
    with peer.calls():
        return aten_forward(problem, tensors)


def peer_results(problem: Problem, tensors: Tensors, padded: bool = False) -> Results:
    """F.conv2d's output and gradients; padded: the padding's products are counted for certain."""
    top, bottom, left, right = problem.padding4
    padded = padded or any(_needs_padded_copy(problem))
    if padded:
        problem, input = _unpadded(problem, tensors.input)
        tensors = tensors._replace(input=input)
    with peer.calls():
        results = aten_results(problem, tensors)
    if not padded:
        return results
    height, width = problem.in_size
    inside = results.grad_input[..., top : height - bottom, left : width - right]
    return results._replace(grad_input=inside)


# ---- the properties


def check_plain(case: Case) -> None:
    named = case_tensors(case)
    plain = Tensors(*named.values())
    with threads(1):
        base = _results(case, case.problem, plain)
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
    with threads(case.threads):
        other = _results(case, case.problem, laid_out)
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
        results = _results(case, dataclasses.replace(problem, batch=batch), some)
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
    if any(_needs_padded_copy(problem)):
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
    if results.output.stride() != output.stride():
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
    """Addresses that no memory stands behind: for sizes and strides of which nothing is computed."""
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


# ---- values


def require_values(case: Case, tensors: Tensors, results: Results) -> None:
    problem = case.problem
    if not (tensors.input.is_floating_point() or tensors.input.is_complex()):
        wide = Tensors(*(t if t is None else t.to(torch.int64) for t in tensors))
        exact = peer_forward(problem, wide).to(case.torch_dtype)
        require_same_bits("integers", results.output, exact, "output")
        return
    used = [operand.values for operand in case.operands]
    if all(values in TAME for values in used):
        _require_accuracy(case, tensors, results)
    elif not tensors.input.is_complex():
        _require_special_values(case, tensors, results)


def _oracles(problem: Problem, tensors: Tensors, double: bool) -> Results:
    products = math.prod(problem.output_shape) * math.prod(problem.weight_shape[1:])
    if double and products <= 100_000 and math.prod(problem.kernel) <= 50:
        return loop_oracle(problem, tensors)
    wide = torch.complex128 if tensors.input.is_complex() else torch.float64
    wider = Tensors(*(t if t is None else t.to(wide) for t in tensors))
    exact = peer_results(problem, wider)
    magnitude = peer_results(problem, Tensors(*(t if t is None else t.abs() for t in wider)))
    return Results(
        *(None if e is None else Oracle(e, None, m) for e, m in zip(exact, magnitude, strict=True))
    )


# From so many elements on the largest and the mean error of F.conv2d are no accident. Fewer are held
# to what chains of 64 products may lose, which still finds a product too few or too many.
_MANY = 512
_FEW_ROUNDINGS = 16.0
_DRAWS = 8


def _require_accuracy(case: Case, tensors: Tensors, results: Results) -> None:
    """Beyond the bound, more draws decide: no lucky rounding of F.conv2d's becomes the bound."""
    draws = [_drawn(case, tensors, results)]
    if _accuracy_violation(case, draws) is None:
        return
    for draw in range(1, _DRAWS):
        again = dataclasses.replace(case, seed=case.seed + draw)
        tensors = Tensors(*case_tensors(again).values())
        draws.append(_drawn(again, tensors, _results(again, again.problem, tensors)))
    message = _accuracy_violation(case, draws)
    if message is not None:
        raise Violation("accuracy", message)


def _drawn(case: Case, tensors: Tensors, results: Results) -> tuple[Results, Results, Results]:
    double = case.dtype in ("float64", "complex128")
    oracles = _oracles(case.problem, tensors, double)
    return results, peer_results(case.problem, tensors), oracles


def _joined(oracles: list[Oracle]) -> Oracle:
    parts = [[getattr(o, name) for o in oracles] for name in ("value", "tail", "magnitude")]
    return Oracle(*(None if p[0] is None else torch.cat([t.flatten() for t in p]) for p in parts))


def _accuracy_violation(case: Case, draws: list[tuple[Results, Results, Results]]) -> str | None:
    slack = unit_roundoff(case.torch_dtype)
    repeats = any("expand" in (operand.layout or {}) for operand in case.operands)
    for name in DIRECTIONS:
        ours, theirs, exact = ([getattr(r, name) for r in column] for column in zip(*draws))
        if exact[0] is None or not ours[0].numel():
            continue
        if ours[0].shape != theirs[0].shape or ours[0].dtype != theirs[0].dtype:
            return f"{name}: {_describe(ours[0])}, F.conv2d's {_describe(theirs[0])}"
        ours, theirs = (torch.cat([t.flatten() for t in tensors]) for tensors in (ours, theirs))
        exact = _joined(exact)
        norm = torch.linalg.vector_norm(exact.value).item()
        spread = torch.linalg.vector_norm(exact.magnitude).item() / norm if norm else math.inf
        for measure, least in (
            ("max_scaled_error", _FEW_ROUNDINGS * slack),
            ("relative_l2", _FEW_ROUNDINGS * slack * spread),
        ):
            error, allowed = (getattr(exact, measure)(t) for t in (ours, theirs))
            bound = 2 * allowed + slack
            # In float64 the oracle may be no better than its subject.
            uncertain = case.dtype in ("float64", "complex128") and exact.tail is None
            if ours.numel() < _MANY or uncertain or repeats:
                bound = max(bound, least * (8 if uncertain else 1))
            if error > bound:
                return (
                    f"{name}: {measure} is {error / slack:.3g} unit roundoffs, F.conv2d's "
                    f"{allowed / slack:.3g}, the bound {bound / slack:.3g}, of {ours.numel()} "
                    f"elements in {len(draws)} draws"
                )
    return None


def _require_special_values(case: Case, tensors: Tensors, results: Results) -> None:
    """Infinities, NaNs, zeros and what under- or overflows, against float64 of padded copies."""
    problem, dtype = case.problem, case.torch_dtype
    wide = Tensors(*(t if t is None else t.double() for t in tensors))
    exact = peer_results(problem, wide, padded=True)
    absolute = Tensors(*(t if t is None else t.abs() for t in wide))
    magnitude = peer_results(problem, absolute, padded=True)
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    info, wide_info = torch.finfo(dtype), torch.finfo(computed)
    largest = max(
        (t.abs().nan_to_num(0, 0, 0).max().item() for t in wide if t is not None and t.numel()),
        default=0.0,
    )
    lengths = {
        "output": math.prod(problem.weight_shape[1:]) + 1,
        "grad_input": problem.out_channels // problem.groups * math.prod(problem.kernel),
        "grad_weight": problem.batch * math.prod(problem.output_shape[2:]),
        "grad_bias": problem.batch * math.prod(problem.output_shape[2:]),
    }
    for name, ours, value, scale in zip(DIRECTIONS, results, exact, magnitude, strict=True):
        if value is None or not ours.numel():
            continue
        length = lengths[name]
        # Products and sums below the smallest normal number lose an absolute amount; bfloat16's
        # instructions take denormal operands and results as zeros.
        lost = wide_info.tiny * wide_info.eps * length
        if dtype == torch.bfloat16:
            lost = 2 * wide_info.tiny * length * (1 + largest)
        floor = lost + info.tiny * info.eps
        relative = (length + 2) * unit_roundoff(computed) + 2 * unit_roundoff(dtype)
        actual = ours.double()
        safe = scale.isfinite() & (scale < info.max / 4)
        wrong = safe & ~((actual - value).abs() <= relative * scale + floor)
        extra = torch.zeros_like(wrong)
        if name == "grad_input":
            extra = _infinite_channels(problem, tensors.weight) & actual.isnan()
        if largest < math.sqrt(wide_info.max) / 1e3 and largest < info.max / 1e3:
            # Nothing overflows, so whatever is not finite comes from an operand that isn't.
            agrees = torch.where(value.isnan(), actual.isnan(), actual == value)
            wrong |= ~scale.isfinite() & ~agrees
        wrong &= ~extra
        if dtype == torch.bfloat16 and any(o.values in ("denormal", "mixed") for o in case.operands):
            wrong &= ~actual.isnan()  # denormal operands count as zeros: Inf * 0
        if wrong.any():
            where = tuple(wrong.nonzero()[0].tolist())
            raise Violation(
                "special values",
                f"{name}: {int(wrong.sum())} of {wrong.numel()} elements, the first {where}: "
                f"{actual[where].item()!r}, exact {value[where].item()!r}, "
                f"sum of absolutes {scale[where].item():.3g}",
            )


def _infinite_channels(problem: Problem, weight: torch.Tensor) -> torch.Tensor:
    """Channels of the input that a tap meets which is Inf or NaN: there grad_input may count what
    lies beyond grad_output's border."""
    grouped = (~weight.isfinite()).reshape(problem.groups, -1, *weight.shape[1:])
    return grouped.any(1).any(-1).any(-1).reshape(1, -1, 1, 1)
