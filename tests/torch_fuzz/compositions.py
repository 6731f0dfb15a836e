"""Compositions of what PyTorch wraps around a call, held against the same around F.conv2d."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

import conv2d_ext
from conv2d_ext.testing import num_threads

from . import peer
from .bits import require_same_bits
from .calls import needs_padded_copy
from .cases import Case, Operand, Violation, draw, lay_out, shape_of
from .layers import (
    DATALESS,
    DERIVATIVES,
    IDENTITIES,
    LAYERS,
    STRIDES_KEPT,
    Function,
    Layer,
)

OPERANDS_OF = {
    "conv": ("input", "weight", "bias"),
    "two": ("input", "weight", "bias", "second"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
    "grad_bias": ("grad_output",),
}


# ---- the two libraries: what a body calls


class Library:
    """conv2d_ext."""

    @staticmethod
    def conv(case: Case) -> Function:
        arguments = case.problem.call_args()
        return lambda input, weight, bias=None: (
            conv2d_ext.conv2d(input, weight, bias, **arguments),
        )

    @staticmethod
    def grad_input(case: Case) -> Function:
        arguments, size = case.problem.op_args(), list(case.problem.input_shape)
        op = torch.ops.conv2d_ext.conv2d_grad_input
        return lambda grad_output, weight: (op(grad_output, weight, size, *arguments, False),)

    @staticmethod
    def grad_weight(case: Case) -> Function:
        arguments, size = case.problem.op_args(), list(case.problem.weight_shape)
        strides = [math.prod(size[i + 1 :]) for i in range(4)]
        op = torch.ops.conv2d_ext.conv2d_grad_weight
        return lambda grad_output, input: (op(grad_output, input, size, strides, *arguments),)

    @staticmethod
    def grad_bias(_: Case) -> Function:
        return lambda grad_output: (torch.ops.conv2d_ext.conv2d_grad_bias(grad_output),)

    @staticmethod
    def second(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return conv2d_ext.conv2d(input, weight)


class Peer(Library):
    """torch.nn.functional."""

    @staticmethod
    def conv(case: Case) -> Function:
        arguments = case.problem.call_args()
        return lambda input, weight, bias=None: (F.conv2d(input, weight, bias, **arguments),)

    @staticmethod
    def _backward(case: Case, mask: list[bool]) -> Function:
        p = case.problem

        def run(grad_output, input, weight):
            return torch.ops.aten.convolution_backward(
                grad_output, input, weight, None, p.stride, p.padding, p.dilation, False, [0, 0],
                p.groups, mask,
            )  # fmt: skip

        return run

    @staticmethod
    def grad_input(case: Case) -> Function:
        run, size = Peer._backward(case, [True, False, False]), case.problem.input_shape
        return lambda gy, weight: (run(gy, weight.new_empty(1).expand(size), weight)[0],)

    @staticmethod
    def grad_weight(case: Case) -> Function:
        run, size = Peer._backward(case, [False, True, False]), case.problem.weight_shape
        return lambda gy, input: (run(gy, input, input.new_empty(1).expand(size))[1],)

    @staticmethod
    def grad_bias(_: Case) -> Function:
        return lambda grad_output: (grad_output.sum((-1, -2)).sum(0),)

    @staticmethod
    def second(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(input, weight)


class PaddedPeer(Peer):
    """F.conv2d on a padded copy, of the sizes of which it computes something wrong."""

    @staticmethod
    def conv(case: Case) -> Function:
        top, bottom, left, right = case.problem.padding4
        arguments = {**case.problem.call_args(), "padding": 0}
        return lambda input, weight, bias=None: (
            F.conv2d(F.pad(input, (left, right, top, bottom)), weight, bias, **arguments),
        )


def _body(case: Case, library: type[Library]) -> Function:
    name = case.options["body"]
    if name != "two":
        return getattr(library, name)(case)
    conv = library.conv(case)

    def two(input, weight, *rest):
        (between,) = conv(input, weight, *rest[:-1])
        return (library.second(between, rest[-1]),)

    return two


def _composed(case: Case, library: type[Library], layers: list[Layer]) -> Function:
    f = _body(case, library)
    for layer in layers:
        f = LAYERS[layer["kind"]](layer, f)
    return f


def _vmap_is_no_measure(case: Case) -> bool:
    """vmap of F.conv2d is a convolution that autocast does not know, and of an empty dimension it
    may have another shape: there the examples one by one say what is right."""
    layers = case.options.get("layers", ())
    maps = any(layer["kind"] == "vmap" for layer in layers)
    return maps and (any(map(_casts, layers)) or _maps_nothing(case))


def _unrolled(layers: list[Layer]) -> list[Layer]:
    return [
        {**layer, "kind": "one_by_one"} if layer["kind"] == "vmap" else layer for layer in layers
    ]


# ---- operands


def operand_names(case: Case) -> list[str]:
    names = OPERANDS_OF[case.options["body"]]
    return [n for n in names if n != "bias" or case.problem.bias]


def _shapes(case: Case) -> list[tuple[int, ...]]:
    shapes = []
    for name in operand_names(case):
        if name == "second":
            shape: tuple[int, ...] = (3, case.problem.out_channels, 1, 1)
        else:
            shape = shape_of(case.problem, name)
        if case.options.get("unbatched") and name in ("input", "grad_output"):
            shape = shape[1:]
        shapes.append(shape)
    for layer in case.options["layers"]:
        if layer["kind"] != "vmap":
            continue
        for i, dim in enumerate(layer["in_dims"]):
            if dim is not None:
                at = dim % (len(shapes[i]) + 1)
                shapes[i] = (*shapes[i][:at], layer["size"], *shapes[i][at:])
    return shapes


def operands(case: Case) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(case.seed)
    found = []
    dtypes = case.options.get("dtypes", {})
    for name, shape in zip(operand_names(case), _shapes(case), strict=True):
        described = case.weight if name == "second" else getattr(case, name)
        layout = described.layout
        if layout is not None and len(shape) != (1 if name == "bias" else 4):
            layout = None
        dtype = getattr(torch, dtypes.get(name, case.dtype))
        plain = draw(Operand(described.values, layout), shape, dtype, generator)
        found.append(lay_out(plain, layout))
    return found


# ---- the check


@dataclasses.dataclass
class _Outcome:
    results: list[torch.Tensor | None] | None
    error: BaseException | None

    def __str__(self) -> str:
        if self.error is not None:
            return f"{type(self.error).__name__}: {str(self.error)[:300]}"
        return ", ".join(
            "None" if r is None else f"{r.dtype} {tuple(r.shape)}" for r in self.results
        )


def forget_frames(error: BaseException) -> BaseException:
    """What they hold, like a checkpoint's generator, must not end in the middle of another case."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _run(function: Function, tensors: list[torch.Tensor]) -> _Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            results = function(*tensors)
            results = [results] if isinstance(results, torch.Tensor) else list(results)
            return _Outcome(results, None)
        except Exception as error:
            return _Outcome(None, forget_frames(error))


def check_composition(case: Case) -> None:
    layers = case.options["layers"]
    kinds = {layer["kind"] for layer in layers}
    if kinds & {"freed", "wrapped"} and kinds & {"conj", "neg"}:
        return  # PyTorch's own copy of such a view crashes, and a wrapper loses its sign
    if _linearizes_within(layers):
        return
    if "freed" in kinds and any(map(_casts, layers)):
        return  # autocast's own copy of freed data may crash, before either library
    with num_threads(case.threads):
        ours = _run(_composed(case, Library, layers), operands(case))
    with peer.calls():
        theirs = _run(_composed(case, Peer, layers), operands(case))
        computed = ours.error is None or theirs.error is None
        if computed and _vmap_is_no_measure(case):
            theirs = _run(_composed(case, Peer, _unrolled(layers)), operands(case))
    if not compare_outcomes(case, ours, theirs):
        return
    if any(isinstance(r, FakeTensor) for r in (*ours.results, *theirs.results)):
        return  # left over by a tracer
    with peer.calls():
        values, library = theirs.results, Peer
        if any(needs_padded_copy(case.problem)):
            padded = _run(_composed(case, PaddedPeer, layers), operands(case))
            if padded.error is None and len(padded.results) == len(values):
                values, library = padded.results, PaddedPeer
        exact = _exact(case, values, library)
    require_close(case, ours.results, values, exact)
    if kinds <= STRIDES_KEPT and case.options["body"] == "conv":
        _require_strides(ours.results, theirs.results, "F.conv2d's")
    dense = all(torch.empty_like(t).stride() == t.stride() for t in operands(case))
    # No gradient passes from a tensor without data to one with data: outside, derivatives are zero.
    first = min((i for i, layer in enumerate(layers) if layer["kind"] in DATALESS), default=0)
    cut = any(layer["kind"] in DERIVATIVES for layer in layers[first:])
    if dense and kinds & DATALESS and not cut and not kinds & {"vmap", "freed", "zero_tensor"}:
        # PyTorch's own are not always those of its real results.
        rest = [layer for layer in layers if layer["kind"] not in DATALESS]
        real = _run(_composed(case, Library, rest), operands(case))
        if real.error is None:
            # A sum of terms is PyTorch's, whose own `add` gives dimensions of size 1 other strides
            # on the CPU than on the meta device.
            sums = bool(kinds & DERIVATIVES)
            _require_strides(ours.results, real.results, "with data", but_of_ones=sums)
    # torch.compile may lose the sign of a negative view, of F.conv2d's operands too.
    if kinds <= IDENTITIES and not {"compile", "neg"} <= kinds:
        _require_plain_bits(case, ours.results)
    _require_bits_of_examples(case, ours.results)


def _linearizes_within(layers: list[Layer]) -> bool:
    """Within these, torch.func.linearize returns memory that nothing was written to, or crashes, of
    a product of two tensors too."""
    names = [layer["kind"] for layer in layers]
    outside = names[names.index("linearize") + 1 :] if "linearize" in names else []
    return bool({"grad", "jacrev", "vjp", "tape", "functionalize", "trace"} & {*outside})


def _require_strides(ours: list, theirs: list, whose: str, but_of_ones: bool = False) -> None:
    for i, (r, t) in enumerate(zip(ours, theirs, strict=True)):
        if r is None or t is None:
            continue
        told = [d for d in range(r.dim()) if r.shape[d] != 1 or not but_of_ones]
        if any(r.stride(d) != t.stride(d) for d in told):
            raise Violation("strides", f"result {i} has {r.stride()}, {whose} {t.stride()}")


# What F.conv2d raises where this library computes.
_ACCEPTED = (
    r"not implemented for '(Half|ComplexDouble|ComplexFloat|BFloat16)'",
    # Only what a wanted gradient needs is saved.
    r"Inference tensors cannot be saved for backward",
    r"backward through the graph a second time",
    r"grad_weight must be contiguous",
    r"Batching rule not implemented",
    r"unsupported argument type in the JIT tracer",
    r"cond must be a bool",
    r"Cannot set version_counter for inference tensor",
    r"Unexpected floating ScalarType in at::autocast::prioritize",
    r"Expected bool, got",
    r"INTERNAL ASSERT FAILED",
    r"automatic differentiation for outputs with complex dtype",
    r"on tensor with symbolic sizes/strides",
    r"SymIntArrayRef expected to contain only concrete integers",
    # A subclass that holds a transform's tensor.
    r"Cannot access storage of",
    r"convolution_overrideable not implemented",
    # Under a dispatch mode the tracer sees custom ops, but not PyTorch's own.
    r"did not have observable data dependence",
    # Tracers within transforms, of the constants that F.conv2d's decompositions make.
    r"Please convert all Tensors to FakeTensors first",
    r"attempted to apply meta conversion to",
    # Nothing there depends on anything: this program has no penalty to differentiate.
    r"'float' object is not iterable",
)


def compare_outcomes(case: Case, ours: _Outcome, theirs: _Outcome) -> bool:
    """Whether there are results to compare."""
    both = f"F.conv2d: {theirs}\nconv2d_ext: {ours}"
    if theirs.error is not None:
        if any(re.search(pattern, str(theirs.error)) for pattern in _ACCEPTED):
            return False
        kinds = {layer["kind"] for layer in case.options.get("layers", ())}
        if any("freed" in layer for layer in case.options.get("layers", ())):
            return False  # freed before a backward, which here may not need it
        if {"wrapped", "vmap"} <= kinds and "does not require grad" in str(theirs.error):
            return False  # vmap's own rules lose the graph of a wrapper
        if kinds & {"sparse", "mkldnn"} and isinstance(ours.error, RuntimeError):
            return False  # refused, each in its own words
        if _maps_nothing(case):
            return False  # PyTorch's own rules do not all take an empty dimension
        if ours.error is not None and _is_allowed(case, ours.error):
            return False
        if ours.error is None:
            # Of an empty batch nothing is read, and gradients are zero by another way.
            if case.problem.batch != 0:
                raise Violation("accepted", both)
        elif _is_tagged_while_traced(kinds, ours.error):
            return False
        elif not isinstance(ours.error, (type(theirs.error), torch.jit.Error)):
            raise Violation("exception type", both)
        return False
    if ours.error is not None:
        if _is_allowed(case, ours.error):
            return False
        raise Violation("raises", both)
    if len(ours.results) != len(theirs.results):
        raise Violation("results", both)
    for i, (r, t) in enumerate(zip(ours.results, theirs.results, strict=True)):
        if (r is None) != (t is None):
            if case.problem.batch == 0:
                continue  # zero by another way
            if t is None and _maps_nothing(case) and not r.count_nonzero():
                continue  # no example there depends on anything; here a zero is its derivative
            if t is None and r is not None and _loses_tangents(case):
                continue
            raise Violation("None", f"result {i}: {both}")
        if r is None:
            continue
        for name in ("dtype", "shape", "requires_grad", "device", "layout", "__class__"):
            if name == "requires_grad" and (case.problem.batch == 0 or _maps_nothing(case)):
                continue
            if name == "requires_grad" and t.requires_grad and _has_constant_tangent(case):
                continue
            kinds = {layer["kind"] for layer in case.options.get("layers", ())}
            if name == "__class__" and kinds & {"vmap", "jacrev", "jacfwd", "hessian"}:
                continue  # whether a subclass survives is vmap's affair
            if getattr(r, name) != getattr(t, name):
                raise Violation(
                    name,
                    f"result {i} has {getattr(r, name)}, F.conv2d's {getattr(t, name)}",
                )
        # What stacks the examples is not inside the inference mode that they are computed in.
        if r.is_inference() != t.is_inference() and not _vmap_is_no_measure(case):
            raise Violation("is_inference", f"result {i}")
    return True


def _is_tagged_while_traced(kinds: set[str], error: BaseException) -> bool:
    """make_fx refuses the ops of a subclass, F.conv2d's too, which looks at dtypes before that."""
    return {"tagged", "make_fx"} <= kinds and "Multiple dispatch failed" in str(error)


def _is_allowed(case: Case, error: BaseException) -> bool:
    """What F.conv2d may compute, or fail in later."""
    kinds = {layer["kind"] for layer in case.options.get("layers", ())}
    unseen = case.problem.batch == 0 or case.problem.padding == "same" or kinds & DATALESS
    if unseen and "should be the same" in str(error):
        return True  # F.conv2d does not look at the dtypes there
    if "Inference tensors cannot be saved" in str(error) and "complex" in case.dtype:
        return True  # F.conv2d takes complex tensors apart, and saves the parts
    if "mkldnn" in str(case.options) and "Mkldnn" in str(error):
        return True  # refused, as the README says
    if any("freed" in layer for layer in case.options.get("layers", ())):
        # F.conv2d reads a bias where it was, for a backward that computes again.
        return "conv2d got bias" in str(error)
    return _is_known_limit(case, error)


def _is_known_limit(case: Case, error: BaseException) -> bool:
    """Compositions that F.conv2d takes and this library doesn't."""
    said = str(error)
    kinds = {layer["kind"] for layer in case.options.get("layers", ())}
    changes = [change[0] for change in case.options.get("changes", ())]
    if "symbolic_trace" in changes and {"script", "script_saved", "script_frozen"} & {*changes}:
        # A layer that is the root of a trace becomes a call of conv2d_ext.conv2d, which is a
        # Python function; TorchScript knows the op alone.
        return "Unknown type constructor Sequence" in said
    if "Inference tensors cannot be saved" in said and "inference_operand" in kinds:
        # The unsqueeze of an unbatched input makes a tensor that F.conv2d can save.
        return bool(case.options.get("unbatched"))
    if "INTERNAL ASSERT FAILED" in said and {"compile", "wrapped"} <= kinds:
        # torch.compile can't trace such a wrapper, and then trips over Python vmap rules.
        return "vmap" in str(case.options) or bool(kinds & {"jacrev", "jacfwd", "hessian"})
    if "does not require grad" in said and "jacfwd" in kinds:
        # A Jacobian that does not depend on what is differentiated: see _has_constant_tangent.
        return "tape" in kinds
    if "_new_zeros_with_same_feature" in said:
        return {"linearize", "make_fx"} <= kinds  # PyTorch's make_dual, of symbolic strides
    if "did not have observable data dependence" in said:
        # The tracer does not see what a wrapper holds: of torch.add it says so as well, F.conv2d's
        # trace returns the result of the first call for every input.
        return {"trace", "wrapped"} <= kinds
    if "sparse" in kinds and case.options["body"] == "grad_bias":
        # A sum there, which takes sparse tensors; vmap's rule folds them first.
        return "a dense (strided) tensor" in said or "not implemented for sparse" in said
    return False


def _loses_tangents(case: Case) -> bool:
    """The views that F.conv2d makes of unbatched inference tensors lose their tangents; the op
    takes such tensors as they are."""
    kinds = {layer["kind"] for layer in case.options.get("layers", ())}
    return {"dual", "inference_operand"} <= kinds and bool(case.options.get("unbatched"))


def _has_constant_tangent(case: Case) -> bool:
    """The tangent of a bias does not depend on the input and the weight; F.conv2d's adds their
    products with zeros, which do."""
    return any(
        layer["kind"] == "dual" and [operand_names(case)[i] for i in layer["which"]] == ["bias"]
        for layer in case.options.get("layers", ())
    )


def _maps_nothing(case: Case) -> bool:
    layers = case.options.get("layers", ())
    return any(layer["kind"] == "vmap" and layer["size"] == 0 for layer in layers)


def _exact(case: Case, values: list, library: type[Library]) -> list[torch.Tensor | None] | None:
    """The same in float64 without autocast; None where that isn't possible."""
    dtypes = {case.dtype, *case.options.get("dtypes", {}).values()}
    cast = any(_casts(layer) for layer in case.options["layers"])
    if dtypes <= {"float64", "complex128"} and not cast:
        return None
    wide = []
    for tensor in operands(case):
        wide.append(tensor.to(torch.complex128 if tensor.is_complex() else torch.float64))
    layers = []
    for layer in case.options["layers"]:
        if layer["kind"] == "autocast":
            layer = {**layer, "enabled": False}
        elif "autocast" in layer:
            layer = {**layer, "autocast": False}
        layers.append(layer)
    outcome = _run(_composed(case, library, layers), wide)
    if outcome.error is not None or len(outcome.results) != len(values):
        return None
    return outcome.results


def _casts(layer: Layer) -> bool:
    return (layer["kind"] == "autocast" and layer["enabled"]) or bool(layer.get("autocast"))


def require_close(case: Case, ours: list, theirs: list, exact: list | None) -> None:
    """Not much further from the exact value than F.conv2d's."""
    # Where nothing but rounding is left, its size follows from that of other results.
    least = max((t.abs().max().item() for t in theirs if t is not None and t.numel()), default=0)
    for i, (r, t) in enumerate(zip(ours, theirs, strict=True)):
        if r is None or t is None or not r.numel():
            continue
        wide = torch.complex128 if r.is_complex() else torch.float64
        r, t = (_plain(u).to(wide) for u in (r, t))
        value = t if exact is None or exact[i] is None else _plain(exact[i]).to(wide)
        if value.shape != t.shape:
            value = t
        largest = value.abs().max().item()
        error, allowed = ((u - value).abs().max().item() for u in (r, t))
        roundoff = torch.finfo(ours[i].dtype).eps
        roundings = 64
        if ours[i].dtype == wide and case.kind == "composition":
            # `error` has F.conv2d's as well, which is a rounding for each of equal products.
            roundings += _longest_sum(case)
        bound = 4 * allowed + roundoff * (roundings * largest + least)
        if not error <= bound and math.isfinite(allowed):
            raise Violation(
                "composed values",
                f"result {i} of {len(ours)}: error {error:.3g}, F.conv2d's {allowed:.3g}, the "
                f"largest value {largest:.3g}",
            )


def _longest_sum(case: Case) -> int:
    output, weight = case.problem.output_shape, case.problem.weight_shape
    per_group = weight[0] // case.problem.groups
    pixels = output[0] * output[2] * output[3]
    return max(math.prod(weight[1:]), per_group * math.prod(weight[2:]), pixels)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    return tensor.resolve_conj().resolve_neg()


def _require_plain_bits(case: Case, results: list) -> None:
    """Where nothing is changed but how the call is made, the bits are those of a plain call."""
    changed = operands(case)
    for layer in reversed(case.options["layers"]):
        for i in layer.get("which", ()):
            if layer["kind"] == "conj":
                changed[i] = changed[i].conj()
            elif layer["kind"] == "neg":
                changed[i] = torch._neg_view(changed[i])
    plain = [t.resolve_conj().resolve_neg().contiguous().clone() for t in changed]
    with num_threads(1):
        expected = _body(case, Library)(*plain)
    for ours, theirs in zip(results, expected, strict=True):
        require_same_bits("bits of a plain call", _plain(ours), theirs, "the composition")


def _require_bits_of_examples(case: Case, results: list) -> None:
    """vmap over images alone is a larger batch."""
    layers = case.options["layers"]
    if len(layers) != 1 or layers[0]["kind"] != "vmap" or not layers[0]["size"]:
        return
    in_dims = layers[0]["in_dims"]
    images = {"conv": "input", "grad_input": "grad_output"}.get(case.options["body"])
    mapped = [n for n, d in zip(operand_names(case), in_dims, strict=True) if d is not None]
    if mapped != [images] or layers[0].get("out_dims", 0) != 0:
        return
    body, tensors = _body(case, Library), operands(case)
    examples = [
        body(*(t if d is None else t.select(d, i) for t, d in zip(tensors, in_dims, strict=True)))
        for i in range(layers[0]["size"])
    ]
    for result, one_by_one in zip(results, zip(*examples, strict=True), strict=True):
        require_same_bits("bits of vmap", result, torch.stack(one_by_one), "vmap over images")
