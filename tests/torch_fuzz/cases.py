"""Cases as plain data, and the tensors that follow from them."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from typing import Any

import torch

from conv2d_ext.testing import Problem

# What a property says when it does not hold: shrinking keeps the name, messages may change.


class Violation(AssertionError):
    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


@dataclasses.dataclass(frozen=True)
class Operand:
    """Values and memory of one tensor; its size is the problem's."""

    values: str = "normal"
    # None: contiguous. Otherwise: "order", the dimensions from outermost to innermost; "step", the
    # distance of neighbours in each dimension; "offset", elements before the first; "expand", the
    # dimensions along which one slice is repeated.
    layout: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str
    seed: int  # of the values
    problem: Problem
    dtype: str = "float32"
    input: Operand = Operand()
    weight: Operand = Operand()
    bias: Operand = Operand()
    grad_output: Operand = Operand()
    threads: int = 1
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # the kind's own

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (self.input, self.weight, self.bias, self.grad_output)

    def to_json(self) -> str:
        """Without what is the default, for short commands."""
        fields = {}
        for name, value, default in _with_defaults(self):
            if dataclasses.is_dataclass(value):
                value = {n: v for n, v, d in _with_defaults(value) if v != d}
            if value != default or name in ("kind", "seed", "problem"):
                fields[name] = value
        fields["problem"].pop("name", None)
        return json.dumps(fields)

    @staticmethod
    def from_json(text: str) -> Case:
        fields = json.loads(text)
        problem = {n: tuple(v) if isinstance(v, list) else v for n, v in fields["problem"].items()}
        fields["problem"] = Problem("fuzzed", **problem)
        for name in OPERANDS:
            fields[name] = Operand(**fields.get(name, {}))
        return Case(**fields)


OPERANDS = ("input", "weight", "bias", "grad_output")


def _with_defaults(instance: Any) -> list[tuple[str, Any, Any]]:
    return [
        (field.name, getattr(instance, field.name), field.default)
        for field in dataclasses.fields(instance)
    ]


def shape_of(problem: Problem, name: str) -> tuple[int, ...]:
    return {
        "input": problem.input_shape,
        "weight": problem.weight_shape,
        "bias": (problem.out_channels,),
        "grad_output": problem.output_shape,
    }[name]


# ---- values

# Results of these are bounded by the accuracy promise.
TAME = ("normal", "shifted", "positive", "rectified", "integers")
FINITE = (*TAME, "zeros", "denormal", "underflowing")
SPECIAL = ("zeros", "denormal", "underflowing", "overflowing", "infinite", "nan", "mixed")


def draw_values(
    shape: tuple[int, ...], dtype: torch.dtype, values: str, generator: torch.Generator
) -> torch.Tensor:
    """Of a class of values; the same numbers for every layout."""
    if dtype.is_complex:
        part = torch.float32 if dtype == torch.complex64 else torch.float64
        real, imag = (_draw_real(shape, part, values, generator) for _ in range(2))
        return torch.complex(real, imag)
    if not dtype.is_floating_point:
        if dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=generator).bool()
        info = torch.iinfo(dtype)
        low, high = (info.min, info.max) if values == "overflowing" else (-9, 9)
        low = max(low, info.min)
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int64).to(dtype)
    return _draw_real(shape, dtype, values, generator)


def _draw_real(
    shape: tuple[int, ...], dtype: torch.dtype, values: str, generator: torch.Generator
) -> torch.Tensor:
    normal = torch.randn(shape, dtype=torch.float64, generator=generator)
    # 16-bit types are computed in float32: what under- and overflows is what does so there.
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    info = torch.finfo(dtype)

    def uniform() -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=generator)

    if values == "normal":
        drawn = normal
    elif values == "shifted":
        drawn = normal * 0.5 + 1
    elif values == "positive":
        drawn = uniform()
    elif values == "rectified":
        drawn = normal.clamp(min=0)
    elif values == "integers":
        drawn = (normal * 3).round()
    elif values == "zeros":
        drawn = torch.copysign((uniform() < 0.1).double(), normal)
    elif values == "denormal":
        drawn = torch.copysign(uniform() * info.tiny, normal)
    elif values == "underflowing":
        smallest = wide.tiny * wide.eps if dtype != torch.float16 else info.smallest_normal
        exponent = math.log2(smallest) / 2 + (uniform() * 8 - 4).round()
        drawn = torch.copysign(torch.exp2(exponent), normal)
    elif values == "overflowing":
        drawn = normal * min(math.sqrt(wide.max) * 2, info.max / 8)
    elif values in ("infinite", "nan"):
        here = uniform() < max(0.02, 1 / max(1, normal.numel()))
        drawn = torch.where(here, torch.nan if values == "nan" else normal * torch.inf, normal)
    elif values == "mixed":
        parts = ("normal", "zeros", "denormal", "underflowing", "integers")
        drawn = normal
        which = (uniform() * len(parts)).floor()
        for i, part in enumerate(parts):
            drawn = torch.where(which == i, _draw_real(shape, dtype, part, generator), drawn)
    else:
        raise ValueError(values)
    return drawn.to(dtype)


def draw(
    operand: Operand, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Contiguous, with the repetition of expanded dimensions."""
    expanded = (operand.layout or {}).get("expand", [])
    held = tuple(min(1, size) if i in expanded else size for i, size in enumerate(shape))
    return draw_values(held, dtype, operand.values, generator).expand(shape).contiguous()


def lay_out(tensor: torch.Tensor, layout: dict[str, Any] | None) -> torch.Tensor:
    """The same values in other memory; what lies between them is NaN or a large number."""
    if layout is None:
        return tensor
    shape = list(tensor.shape)
    expanded = [d for d in layout.get("expand", []) if d < len(shape)]
    for d in expanded:
        tensor = tensor.narrow(d, 0, min(1, shape[d]))
    steps = layout.get("step") or [1] * len(shape)
    order = layout.get("order") or list(range(len(shape)))
    strides, running = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = running * steps[d]
        running *= max(1, tensor.shape[d] * steps[d])
    offset = layout.get("offset", 0)
    poison = math.nan if tensor.is_floating_point() or tensor.is_complex() else 113
    memory = tensor.new_full((running + offset,), poison)
    return memory.as_strided(tensor.shape, strides, offset).copy_(tensor).expand(shape)


def case_tensors(case: Case) -> dict[str, torch.Tensor | None]:
    """The contiguous operands; None for a bias that is not there."""
    generator = torch.Generator().manual_seed(case.seed)
    tensors = {}
    for name in OPERANDS:
        operand = getattr(case, name)
        absent = name == "bias" and not case.problem.bias
        shape = shape_of(case.problem, name)
        tensors[name] = None if absent else draw(operand, shape, case.torch_dtype, generator)
    return tensors


# ---- random cases


def _weighted(rng: random.Random, **weights: float) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def random_layout(rng: random.Random, rank: int = 4) -> dict[str, Any] | None:
    kind = _weighted(rng, contiguous=3, channels_last=2, sliced=2, permuted=2, offset=1, any=3)
    if kind == "contiguous":
        return None
    layout: dict[str, Any] = {}
    if kind == "channels_last" and rank == 4:
        layout["order"] = [0, 2, 3, 1]
    if kind in ("permuted", "any"):
        layout["order"] = rng.sample(range(rank), rank)
    if kind in ("sliced", "any"):
        layout["step"] = [rng.choice([1, 1, 2, 3]) for _ in range(rank)]
    if kind in ("offset", "sliced", "any"):
        layout["offset"] = rng.choice([0, 1, 1, 3, 7])
    if kind == "any" and rng.random() < 0.3:
        layout["expand"] = sorted(rng.sample(range(rank), rng.randint(1, rank)))
    return layout


# Products of one direction, so that 20,000 cases take minutes.
_MOST_PRODUCTS = 1_500_000


def random_problem(rng: random.Random, most_products: int = _MOST_PRODUCTS) -> Problem:
    """Any valid geometry, with more weight on what has a driver or a border of its own."""
    while True:
        problem = _any_problem(rng)
        try:
            output = problem.output_shape
        except ZeroDivisionError:
            continue
        if min(output[2:]) < 1:
            continue
        products = math.prod(output) * math.prod(problem.weight_shape[1:])
        phases = math.prod(problem.input_shape) * problem.out_channels // problem.groups
        memory = max(map(math.prod, (problem.input_shape, problem.weight_shape, output)))
        if products <= most_products and memory <= 400_000 and phases <= 40 * most_products:
            return problem


def _any_problem(rng: random.Random) -> Problem:
    kind = _weighted(
        rng, small=6, depthwise=2, grouped=2, one_pixel=1, patches=1, dilated=1.5, long=1.5,
        planes=1, wide=1, kernels=1.5, strided=2,
    )  # fmt: skip
    ints = rng.randint
    batch = rng.choice([1, 1, 1, 2, 3, 5])
    groups, group_in, group_out = 1, ints(1, 9), ints(1, 20)
    kernel = (ints(1, 5), ints(1, 5))
    stride = (ints(1, 4), ints(1, 4)) if rng.random() < 0.4 else (1, 1)
    dilation = (ints(1, 3), ints(1, 3)) if rng.random() < 0.3 else (1, 1)
    padding: Any = (ints(0, 4), ints(0, 4))
    room = (ints(0, 12), ints(0, 12))
    if kind == "small":
        groups = rng.choice([1, 1, 1, 2, 3, 5])
        batch = rng.choice([0, 1, 1, 2, 3, 33])
    elif kind == "depthwise":
        groups, group_in, group_out = ints(1, 70), 1, rng.choice([1, 1, 1, 2, 3])
        kernel = rng.choice([(3, 3), (5, 5), (7, 7), (1, 3), (3, 1), kernel, (1, ints(6, 256))])
        stride = rng.choice([(1, 1), (2, 2), stride])
        room = (ints(0, 20), ints(0, 40))
    elif kind == "grouped":
        groups = rng.choice([2, 4, 17, 20, 32])
        group_in, group_out = (rng.choice([1, 2, 3, 4, 8, 16]) for _ in range(2))
    elif kind == "one_pixel":
        group_in, group_out = ints(1, 300), ints(1, 140)
        batch, padding, room = rng.choice([1, 2, 9, 40]), (0, 0), (0, 0)
    elif kind == "patches":
        stride = (kernel[0] + ints(0, 2), kernel[1] + ints(0, 2))
        room = (ints(0, 20), ints(0, 30))
    elif kind == "dilated":
        dilation = (ints(1, 40), ints(1, 40))
        padding = (ints(0, dilation[0]), ints(0, dilation[1]))
        kernel = (ints(1, 3), ints(1, 3))
        room = (ints(0, 40), ints(0, 40))
    elif kind == "long":
        if rng.random() < 0.5:
            group_in, room = ints(100, 1200), (ints(0, 3), ints(0, 3))
        else:
            group_out, room = ints(100, 1200), (ints(0, 3), ints(0, 3))
        kernel = (ints(1, 3), ints(1, 3))
    elif kind == "planes":
        kernel, padding, group_in = (1, 1), (0, 0), ints(1, 300)
        group_out, room = ints(1, 5), (ints(0, 50), ints(0, 50))
        if rng.random() < 0.3:
            group_in, group_out = group_out, group_in
    elif kind == "wide":
        room = rng.choice(
            [(0, ints(100, 2000)), (ints(100, 2000), 0), (ints(30, 60), ints(30, 60))]
        )
        group_in = ints(1, 4)
    elif kind == "kernels":
        kernel = rng.choice([(ints(6, 17), ints(6, 17)), (1, ints(6, 256)), (ints(6, 150), 2)])
        group_in, group_out = ints(1, 4), ints(1, 9)
        padding = (ints(0, kernel[0]), ints(0, kernel[1]))
    elif kind == "strided":
        stride = rng.choice([(2, 2), (2, 2), (3, 2), (1, 2), (2, 1)])
        group_in, group_out = ints(1, 70), ints(1, 150)
    how = rng.random()
    if how < 0.1:
        padding, stride = "same", (1, 1)
    elif how < 0.2 and isinstance(padding, tuple):
        padding = tuple(ints(0, 4) for _ in range(4))
    probe = Problem("", 1, 1, (1, 1), 1, kernel, (1, 1), padding, dilation)
    top, bottom, left, right = probe.padding4
    in_size = (
        max(1, dilation[0] * (kernel[0] - 1) + 1 - top - bottom) + room[0],
        max(1, dilation[1] * (kernel[1] - 1) + 1 - left - right) + room[1],
    )
    return Problem(
        "fuzzed", batch, groups * group_in, in_size, groups * group_out, kernel, stride, padding,
        dilation, groups, rng.random() < 0.6,
    )  # fmt: skip


def random_dtype(rng: random.Random) -> str:
    return _weighted(
        rng, float32=10, float64=3, bfloat16=4, float16=2, complex64=2, complex128=1, int8=0.5,
        uint8=0.5, int16=0.5, int32=0.5, int64=0.5,
    )  # fmt: skip


def random_operands(rng: random.Random) -> dict[str, Operand]:
    tame = rng.random() < 0.6
    same = rng.choice(SPECIAL) if rng.random() < 0.6 else None
    operands = {}
    for name in OPERANDS:
        if tame:
            values = rng.choice(TAME)
        else:
            values = same if same and rng.random() < 0.8 else rng.choice((*TAME, *SPECIAL))
        operands[name] = Operand(values, random_layout(rng, 1 if name == "bias" else 4))
    return operands


def random_plain(rng: random.Random) -> Case:
    most = 20_000_000 if rng.random() < 0.02 else _MOST_PRODUCTS
    problem = random_problem(rng, most)
    options: dict[str, Any] = {"autograd": rng.random() < 0.5}
    if problem.batch and rng.random() < 0.6:
        first = rng.randrange(problem.batch)
        options["images"] = [first, rng.randint(first + 1, problem.batch)]
        options["unbatched"] = options["images"][1] == first + 1 and rng.random() < 0.5
    if problem.batch and rng.random() < 0.3:
        options["copies"] = rng.choice([2, 3, 8, 40])
    return Case(
        "plain", rng.randrange(10**6), problem, random_dtype(rng), **random_operands(rng),
        threads=rng.choice([1, 2, 2, 3, 4]), options=options,
    )  # fmt: skip


def random_explained(rng: random.Random) -> Case:
    """Sizes of real layers and beyond, of which nothing is computed."""
    while True:
        problem = _any_problem(rng)
        if rng.random() < 0.2:
            # Rows of taps that reach far: a tile's patch is widest.
            groups, kernel = rng.choice([1, 16, 64, 100]), (1, rng.randint(3, 256))
            problem = Problem(
                "fuzzed", 1, groups, (1, 25_600), groups, kernel, problem.stride,
                groups=groups, bias=False,
            )  # fmt: skip
        scale, wider = rng.choice([1, 4, 16, 64]), rng.choice([1, 1, 1, 8, 64])
        options = {"rows": rng.choice([0, 0, 100, 3000]), "columns": rng.choice([0, 100, 30000])}
        problem = dataclasses.replace(
            problem,
            in_channels=problem.in_channels * scale,
            groups=problem.groups * (1 if problem.groups == 1 else scale),
            dilation=rng.choice([problem.dilation, problem.dilation, (1, 100), (40, 20)]),
            out_channels=problem.out_channels * (wider if problem.groups == 1 else scale),
            in_size=(problem.in_size[0] + options["rows"], problem.in_size[1] + options["columns"]),
        )
        if problem.padding == "same" or min(problem.output_shape[2:]) < 1:
            continue
        if math.prod(problem.input_shape) > 2**32:
            continue
        # Deciding on bands costs a step for each position and tap.
        if math.prod(problem.in_size) * math.prod(problem.kernel) > 20_000_000:
            continue
        operands = {
            name: Operand(layout={"order": rng.choice([[0, 1, 2, 3], [0, 2, 3, 1]])})
            for name in ("input", "weight")
        }
        return Case("explained", 0, problem, random_dtype(rng), **operands)
