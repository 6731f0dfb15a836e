"""Random compositions."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from conv2d_ext.testing import Problem

from .cases import Case, Operand, random_layout, random_problem
from .compositions import OPERANDS_OF, operand_names
from .layers import Layer

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
        if rng.random() < 0.03:
            layer["freed"] = rng.randrange(count)
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
