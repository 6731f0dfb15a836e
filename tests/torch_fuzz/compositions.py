"""Random compositions of what PyTorch wraps around a call, held against the same around F.conv2d."""

from __future__ import annotations

import dataclasses
import math
import random
import re
import warnings
from typing import Any

import torch
import torch.nn.functional as F

import conv2d_ext
from conv2d_ext.testing import Problem

from . import peer
from .cases import (
    Case,
    Operand,
    Violation,
    draw,
    lay_out,
    random_layout,
    random_problem,
    shape_of,
)
from .layers import DATALESS, IDENTITIES, LAYERS, STRIDES_KEPT, Function, Layer, Tensors
from .properties import require_same_bits, threads

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


def _vmap_meets_autocast(layers: list[Layer]) -> bool:
    """vmap of F.conv2d is a convolution that autocast does not know: there the examples one by one
    say what is right."""
    return any(map(_casts, layers)) and any(layer["kind"] == "vmap" for layer in layers)


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


def _run(function: Function, tensors: list[torch.Tensor]) -> _Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            results = function(*tensors)
            results = [results] if isinstance(results, torch.Tensor) else list(results)
            return _Outcome(results, None)
        except Exception as error:
            return _Outcome(None, error)


def check_composition(case: Case) -> None:
    layers = case.options["layers"]
    with threads(case.threads):
        ours = _run(_composed(case, Library, layers), operands(case))
    with peer.calls():
        theirs = _run(_composed(case, Peer, layers), operands(case))
        if theirs.error is None and _vmap_meets_autocast(layers):
            theirs = _run(_composed(case, Peer, _unrolled(layers)), operands(case))
    if not compare_outcomes(case, ours, theirs):
        return
    with peer.calls():
        exact = _exact(case, theirs)
    require_close(case, ours.results, theirs.results, exact)
    kinds = {layer["kind"] for layer in layers}
    if kinds <= STRIDES_KEPT and case.options["body"] == "conv":
        _require_strides(ours.results, theirs.results, "F.conv2d's")
    if kinds & DATALESS and not kinds & {"vmap", "freed", "zero_tensor"}:
        # PyTorch's own are not always those of its real results.
        rest = [layer for layer in layers if layer["kind"] not in DATALESS]
        real = _run(_composed(case, Library, rest), operands(case))
        if real.error is None:
            _require_strides(ours.results, real.results, "with data")
    if kinds <= IDENTITIES:
        _require_plain_bits(case, ours.results)
    _require_bits_of_examples(case, ours.results)


def _require_strides(ours: list, theirs: list, whose: str) -> None:
    for i, (r, t) in enumerate(zip(ours, theirs, strict=True)):
        if r is not None and t is not None and r.stride() != t.stride():
            raise Violation("strides", f"result {i} has {r.stride()}, {whose} {t.stride()}")


# What F.conv2d raises where this library computes.
_ACCEPTED = (
    r"not implemented for '(Half|ComplexDouble|ComplexFloat|BFloat16)'",
    # Only what a wanted gradient needs is saved.
    r"Inference tensors cannot be saved for backward",
    r"grad_weight must be contiguous",
    r"Batching rule not implemented",
    r"unsupported argument type in the JIT tracer",
    r"cond must be a bool",
    r"Cannot set version_counter for inference tensor",
    r"Unexpected floating ScalarType in at::autocast::prioritize",
    # A subclass that holds a transform's tensor.
    r"Cannot access storage of",
)


def compare_outcomes(case: Case, ours: _Outcome, theirs: _Outcome) -> bool:
    """Whether there are results to compare."""
    both = f"F.conv2d: {theirs}\nconv2d_ext: {ours}"
    if theirs.error is not None:
        if any(re.search(pattern, str(theirs.error)) for pattern in _ACCEPTED):
            return False
        if ours.error is None:
            # Of an empty batch nothing is read, and gradients are zero by another way.
            if case.problem.batch != 0:
                raise Violation("accepted", both)
        elif not isinstance(ours.error, type(theirs.error)):
            raise Violation("exception type", both)
        return False
    if ours.error is not None:
        if "should be the same" in str(ours.error):
            if case.problem.batch == 0 or case.problem.padding == "same":
                return False  # F.conv2d does not look at the dtypes there
        if "mkldnn" in str(case.options) and "Mkldnn" in str(ours.error):
            return False  # refused, as the README says
        raise Violation("raises", both)
    if len(ours.results) != len(theirs.results):
        raise Violation("results", both)
    for i, (r, t) in enumerate(zip(ours.results, theirs.results, strict=True)):
        if (r is None) != (t is None):
            if case.problem.batch == 0:
                continue  # zero by another way
            raise Violation("None", f"result {i}: {both}")
        if r is None:
            continue
        for name in ("dtype", "shape", "requires_grad", "device", "layout", "__class__"):
            if name == "requires_grad" and case.problem.batch == 0:
                continue
            if getattr(r, name) != getattr(t, name):
                raise Violation(
                    name,
                    f"result {i} has {getattr(r, name)}, F.conv2d's {getattr(t, name)}",
                )
        if r.is_inference() != t.is_inference():
            raise Violation("is_inference", f"result {i}")
    return True


def _exact(case: Case, theirs: _Outcome) -> list[torch.Tensor | None] | None:
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
    outcome = _run(_composed(case, Peer, layers), wide)
    if outcome.error is not None or len(outcome.results) != len(theirs.results):
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
        bound = 4 * allowed + roundoff * (64 * largest + least)
        if not error <= bound and not (math.isnan(allowed) and math.isnan(error)):
            raise Violation(
                "composed values",
                f"result {i} of {len(ours)}: error {error:.3g}, F.conv2d's {allowed:.3g}, the "
                f"largest value {largest:.3g}",
            )


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
    with threads(1):
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


# ---- random compositions

_CONTEXTS = (
    "no_grad", "enable_grad", "inference_mode", "saved_tensors_hooks", "save_on_cpu",
    "dispatch_mode", "function_mode", "disabled_torch_function", "default_dtype", "deterministic",
    "detect_anomaly", "mkldnn_off",
)  # fmt: skip
_DISGUISES = (
    "conj", "neg", "zero_tensor", "parameter", "inference_operand", "resized", "freed", "tagged",
    "wrapped", "sparse", "mkldnn",
)  # fmt: skip
_WEIGHTS = {
    "vmap": 12, "grad": 4, "jacrev": 2, "jacfwd": 2, "hessian": 0.5, "vjp": 4, "jvp": 4,
    "linearize": 0.5, "dual": 3, "tape": 14, "checkpoint": 2, "compile": 0.2, "make_fx": 0.7,
    "trace": 0.5, "functionalize": 1, "fake": 1, "meta": 1, "autocast": 8,
    **dict.fromkeys(_CONTEXTS, 0.7), **dict.fromkeys(_DISGUISES, 1.0),
}  # fmt: skip
_COSTLY = {"jacrev", "jacfwd", "hessian"}


def _random_which(rng: random.Random, count: int) -> list[int]:
    return sorted(rng.sample(range(count), rng.randint(1, count)))


def _random_layer(rng: random.Random, count: int) -> Layer:
    kind = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    layer: Layer = {"kind": kind}
    if kind == "vmap":
        layer["size"] = rng.choice([0, 1, 1, 2, 2, 3])
        mapped = _random_which(rng, count)
        layer["in_dims"] = [
            rng.choice([0, 0, 0, 1, -1]) if i in mapped else None for i in range(count)
        ]
        if rng.random() < 0.2:
            layer["out_dims"] = rng.choice([1, -1])
        if rng.random() < 0.1:
            layer["chunk"] = rng.choice([1, 2])
    elif kind == "autocast":
        layer["dtype"] = rng.choice(["bfloat16", "bfloat16", "float16"])
        layer["enabled"] = rng.random() < 0.85
        layer["cache"] = rng.random() < 0.8
    elif kind == "tape":
        layer["which"] = _random_which(rng, count)
        layer["second"] = rng.random() < 0.5
        if rng.random() < 0.2:
            layer["hooks"] = True
        if rng.random() < 0.2:
            layer["backward"] = True
        if rng.random() < 0.3:
            layer["autocast"] = True
        if rng.random() < 0.4:
            layer["penalty"] = _random_which(rng, count)
    elif kind in ("grad", "jacrev", "jacfwd", "hessian", "dual", *_DISGUISES):
        layer["which"] = _random_which(rng, count)
    elif kind == "compile":
        layer["backend"] = rng.choice(["eager", "aot_eager", "aot_eager"])
        layer["dynamic"] = rng.choice([True, False])
    elif kind == "make_fx":
        layer["tracing"] = rng.choice(["real", "fake", "symbolic"])
    elif kind == "checkpoint":
        layer["reentrant"] = rng.random() < 0.2
    elif kind == "default_dtype":
        layer["dtype"] = rng.choice(["float64", "bfloat16"])
    return layer


def random_composition(rng: random.Random) -> Case:
    body = rng.choices(list(OPERANDS_OF), [10, 3, 2, 2, 1])[0]
    depth = rng.choice([1, 1, 2, 2, 2, 3, 3, 4])
    while True:
        problem = random_problem(rng, 20_000)
        if len(problem.padding) == 4 and problem.padding != "same":
            continue
        if body not in ("conv", "two"):
            if problem.padding == "same":
                continue
            # What aten.convolution_backward does with these is its own affair.
            if problem.batch == 0:
                continue
        break
    problem = dataclasses.replace(problem, batch=min(problem.batch, 3))
    case = Case("composition", rng.randrange(10**6), problem, options={"body": body, "layers": []})
    count = len(operand_names(case))
    layers = [_random_layer(rng, count) for _ in range(depth)]
    if any(layer["kind"] in _COSTLY for layer in layers):
        problem = _tiny(rng, body)
        count = len(operand_names(dataclasses.replace(case, problem=problem)))
        layers = [_random_layer(rng, count) for _ in range(depth)]
    options: dict[str, Any] = {"body": body, "layers": layers}
    dtype = rng.choices(
        ["float64", "float32", "bfloat16", "complex128", "complex64", "float16"],
        [8, 8, 2, 2, 1, 1],
    )[0]
    if problem.batch == 1 and rng.random() < 0.2 and body in ("conv", "two"):
        options["unbatched"] = True
    if dtype == "float32" and body in ("conv", "two") and rng.random() < 0.2:
        name = rng.choice(operand_names(dataclasses.replace(case, problem=problem)))
        options["dtypes"] = {name: rng.choice(["bfloat16", "float64", "float16"])}
    described = {
        name: Operand("normal", random_layout(rng, 1 if name == "bias" else 4))
        for name in ("input", "weight", "bias", "grad_output")
    }
    return Case(
        "composition", case.seed, problem, dtype, **described, threads=rng.choice([1, 1, 2, 3]),
        options=options,
    )  # fmt: skip


def _tiny(rng: random.Random, body: str) -> Problem:
    """For transforms that compute a gradient for each element."""
    groups = rng.choice([1, 1, 2])
    padding = rng.choice([(0, 0), (1, 0), (1, 1)])
    stride = rng.choice([(1, 1), (2, 1)])
    if body in ("conv", "two") and rng.random() < 0.2:
        padding, stride = "same", (1, 1)
    return Problem(
        "fuzzed", rng.choice([1, 1, 2]), groups * rng.randint(1, 2),
        (rng.randint(2, 4), rng.randint(2, 4)), groups * rng.randint(1, 2),
        (rng.randint(1, 2), rng.randint(1, 2)), stride, padding, (1, 1), groups,
        rng.random() < 0.5,
    )  # fmt: skip
