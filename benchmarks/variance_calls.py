"""The calls of PyTorch that `python -m benchmarks.variance` measures, at sizes of one example."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]
Sizes = tuple[Shape, ...]  # one shape for each tensor that has a batch

POINTWISE = ((3,), (7, 3, 3), (67,), (5, 13, 17), (40009,), (64, 28, 28))
IMAGES = ((3, 5, 7), (16, 7, 7), (5, 33, 31), (3, 80, 96), (64, 28, 28), (20, 112, 96))
ROWS = ((3,), (10,), (67,), (197, 192), (1000,), (40009,))
TOKENS = ((1, 7), (10, 33), (50, 96), (197, 192))
SIGNALS = ((2, 7), (16, 65), (5, 4001))
VIDEOS = ((3, 4, 7, 7), (16, 5, 9, 8), (5, 8, 24, 22))


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of PyTorch's."""

    name: str
    group: str
    run: Callable[..., Tensor]  # of the batched tensors, then the shared ones
    sizes: tuple[Sizes, ...]
    # The sizes of the tensors without a batch (weights), from those of one example.
    shared: Callable[..., Sizes] | None = None
    values: Callable[[Tensor], Tensor] | None = None  # of standard normal numbers
    # Also measured where images are channels_last, and where examples are a slice of wider ones.
    formats: bool = False
    backward: bool = True
    gradients: int | None = None  # how many of the batched tensors have one; None: all


def _one(shapes: tuple[Shape, ...]) -> tuple[Sizes, ...]:
    return tuple((shape,) for shape in shapes)


def _positive(x: Tensor) -> Tensor:
    return x.abs() + 0.01


def _wide(x: Tensor) -> Tensor:
    return x * 3


def _inside(x: Tensor) -> Tensor:
    return x.clamp(-3, 3) * 0.3


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "softplus": F.softplus,
    "softplus, beta 2": lambda x: F.softplus(x, beta=2),
    "mish": F.mish,
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 1.5),
    "logsigmoid": F.logsigmoid,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "threshold": lambda x: F.threshold(x, 0.1, 0.3),
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "tanhshrink": F.tanhshrink,
    "softsign": F.softsign,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "atan": torch.atan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "asinh": torch.asinh,
    "sinc": torch.sinc,
    "square": torch.square,
    "abs": torch.abs,
    "neg": torch.neg,
    "floor": torch.floor,
    "round": torch.round,
    "sign": torch.sign,
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "pow, exponent 2": lambda x: x.pow(2),
    "pow, exponent 3": lambda x: x.pow(3),
    "pow, exponent 5": lambda x: x.pow(5),
    "pow, base 2.5": lambda x: torch.pow(2.5, x),
    "mul and add of a number": lambda x: x * 1.7 + 0.3,
    "div by a number": lambda x: x / 1.7,
    "nan_to_num": torch.nan_to_num,
}
UNARY_POSITIVE: dict[str, Callable[[Tensor], Tensor]] = {
    "log": torch.log,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "log10": torch.log10,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "pow, exponent 0.5": lambda x: x.pow(0.5),
    "pow, exponent -0.5": lambda x: x.pow(-0.5),
    "pow, exponent -1": lambda x: x.pow(-1),
    "pow, exponent -2": lambda x: x.pow(-2),
    "pow, exponent 1.7": lambda x: x.pow(1.7),
    "lgamma": torch.lgamma,
    "digamma": torch.digamma,
    "xlogy": lambda x: torch.xlogy(x, x),
}
UNARY_INSIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "erfinv": torch.erfinv,
    "asin": torch.asin,
    "acos": torch.acos,
    "atanh": torch.atanh,
    "logit": lambda x: torch.logit(x, eps=1e-3),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "add, alpha 0.3": lambda x, y: torch.add(x, y, alpha=0.3),
    "sub, alpha 0.3": lambda x, y: torch.sub(x, y, alpha=0.3),
    "add of a number, alpha 0.3": lambda x, y: torch.add(x * y, 2.7, alpha=0.3),
    "mul": torch.mul,
    "div": torch.div,
    "div, rounding_mode trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "div, rounding_mode floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "atan2": torch.atan2,
    "logaddexp": torch.logaddexp,
    "hypot": torch.hypot,
    "maximum": torch.maximum,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "lerp, weight 0.3": lambda x, y: torch.lerp(x, y, 0.3),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "binary_cross_entropy_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(
        x, y, reduction="none"
    ),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    "huber_loss": lambda x, y: F.huber_loss(x, y, reduction="none"),
    "smooth_l1_loss, beta 0.3": lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.3),
    "huber_loss, delta 0.3": lambda x, y: F.huber_loss(x, y, reduction="none", delta=0.3),
}
TERNARY: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "lerp, tensors": torch.lerp,
    "addcmul": lambda x, y, z: torch.addcmul(x, y, z, value=0.7),
    "addcdiv": lambda x, y, z: torch.addcdiv(x, y, z.abs() + 0.5, value=0.7),
}


def _pointwise() -> Iterator[Call]:
    group = "pointwise"
    for functions, values in (
        (UNARY, _wide),
        (UNARY_POSITIVE, _positive),
        (UNARY_INSIDE, _inside),
    ):
        for name, function in functions.items():
            yield Call(name, group, function, _one(POINTWISE), values=values, formats=True)
    two = tuple((shape, shape) for shape in POINTWISE)
    for name, function in BINARY.items():
        yield Call(name, group, function, two, formats=True)
    yield Call("pow, tensors", group, torch.pow, two, values=_positive, formats=True)
    three = tuple((shape,) * 3 for shape in POINTWISE)
    for name, function in TERNARY.items():
        yield Call(name, group, function, three, formats=True)
    glu = _one(((4,), (6, 3, 3), (66,), (10, 13, 17), (40010,), (64, 28, 28)))
    yield Call("glu", group, lambda x: F.glu(x, 1), glu, formats=True)
    yield Call("prelu", group, F.prelu, _one(IMAGES), lambda x: ((x[0],),), formats=True)


def _reductions() -> Iterator[Call]:
    group = "reductions"
    rows = {
        "softmax": lambda x: x.softmax(-1),
        "log_softmax": lambda x: x.log_softmax(-1),
        "softmin": lambda x: F.softmin(x, -1),
        "logsumexp": lambda x: x.logsumexp(-1),
        "cumsum": lambda x: x.cumsum(-1),
        "cumprod": lambda x: (1 + 0.001 * x).cumprod(-1),
        "logcumsumexp": lambda x: x.logcumsumexp(-1),
        "prod": lambda x: (1 + 0.001 * x).prod(-1),
        "argmax, gathered": lambda x: x.gather(-1, x.argmax(-1, keepdim=True)),
        "sort": lambda x: x.sort(dim=-1, stable=True).values,
        "norm, p = 3": lambda x: torch.linalg.vector_norm(x, 3, -1),
        "norm, p = 1/2": lambda x: torch.linalg.vector_norm(x, 0.5, -1),
    }
    for name, function in rows.items():
        yield Call(f"{name} of rows", group, function, _one(ROWS))
    for name, function in {
        "softmax": lambda x: x.softmax(1),
        "log_softmax": lambda x: x.log_softmax(1),
        "logsumexp": lambda x: x.logsumexp(1),
        "cumsum": lambda x: x.cumsum(1),
        "normalize": lambda x: F.normalize(x, dim=1),
    }.items():
        yield Call(f"{name} over channels", group, function, _one(IMAGES), formats=True)
    kinds = {
        "mean": torch.mean,
        "sum": torch.sum,
        "var": torch.var,
        "std": torch.std,
        "amax": torch.amax,
        "norm": lambda x, dims: torch.linalg.vector_norm(x, 2, dims),
    }
    dims = {"pixels": (2, 3), "channels": (1,), "width": (3,), "all but the batch": (1, 2, 3)}
    for name, function in kinds.items():
        for where, over in dims.items():
            run = functools.partial(
                lambda x, function, over: function(x, over), function=function, over=over
            )
            yield Call(f"{name} over {where}", group, run, _one(IMAGES), formats=True)
        tokens = functools.partial(lambda x, function: function(x, (1,)), function=function)
        yield Call(f"{name} over tokens", group, tokens, _one(TOKENS[1:]))
    yield Call(
        "cosine_similarity",
        group,
        F.cosine_similarity,
        tuple((s, s) for s in IMAGES),
        formats=True,
    )
    yield Call("pairwise_distance", group, F.pairwise_distance, tuple((s, s) for s in ROWS))


def _pooling() -> Iterator[Call]:
    group = "pooling and resampling"
    images = {
        "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1),
        "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
        "lp_pool2d": lambda x: F.lp_pool2d(x.abs() + 0.1, 2, 3, 2),
        "adaptive_avg_pool2d, 1": lambda x: F.adaptive_avg_pool2d(x, 1),
        "adaptive_avg_pool2d, 3": lambda x: F.adaptive_avg_pool2d(x, 3),
        "adaptive_max_pool2d, 1": lambda x: F.adaptive_max_pool2d(x, 1),
        "interpolate, nearest": lambda x: F.interpolate(x, scale_factor=1.7),
        "interpolate, nearest-exact": lambda x: F.interpolate(
            x, scale_factor=1.7, mode="nearest-exact"
        ),
        "interpolate, area": lambda x: F.interpolate(x, size=(3, 4), mode="area"),
        "interpolate, bilinear": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
        "interpolate, bilinear, corners": lambda x: F.interpolate(
            x, scale_factor=2, mode="bilinear", align_corners=True
        ),
        "interpolate, bicubic": lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"),
        "interpolate, bilinear, antialias": lambda x: F.interpolate(
            x, size=(4, 3), mode="bilinear", antialias=True
        ),
        "interpolate, bicubic, antialias": lambda x: F.interpolate(
            x, size=(4, 3), mode="bicubic", antialias=True
        ),
        "pixel_unshuffle": lambda x: F.pixel_unshuffle(
            F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2)), 2
        ),
        "pad, reflect": lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"),
        "pad, replicate": lambda x: F.pad(x, (1, 2, 2, 1), mode="replicate"),
        "unfold": lambda x: F.unfold(x, 3, padding=1),
        "local_response_norm": lambda x: F.local_response_norm(x, 3),
    }
    for name, function in images.items():
        yield Call(name, group, function, _one(IMAGES), formats=True)
    yield Call(
        "pixel_shuffle",
        group,
        lambda x: F.pixel_shuffle(x, 2),
        _one(((4, 5, 7), (16, 7, 7), (64, 28, 28))),
        formats=True,
    )
    signals = {
        "avg_pool1d": lambda x: F.avg_pool1d(x, 3, 2, 1),
        "max_pool1d": lambda x: F.max_pool1d(x, 3, 2, 1),
        "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x, 3),
        "interpolate, linear": lambda x: F.interpolate(x, scale_factor=1.7, mode="linear"),
    }
    for name, function in signals.items():
        yield Call(name, group, function, _one(SIGNALS))
    volumes = _one(((2, 3, 5, 7), (16, 8, 14, 13)))
    yield Call("avg_pool3d", group, lambda x: F.avg_pool3d(x, 2, 1), volumes)
    yield Call(
        "interpolate, trilinear",
        group,
        lambda x: F.interpolate(x, scale_factor=1.7, mode="trilinear"),
        volumes,
    )
    for mode in ("bilinear", "nearest", "bicubic"):
        run = functools.partial(
            lambda x, grid, mode: F.grid_sample(x, grid.tanh(), mode=mode, align_corners=False),
            mode=mode,
        )
        yield Call(
            f"grid_sample, {mode}",
            group,
            run,
            tuple((s, (9, 11, 2)) for s in IMAGES[:4]),
            gradients=1,
        )


def _norms() -> Iterator[Call]:
    group = "norms"
    yield Call(
        "layer_norm",
        group,
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        _one(((7,), (10, 33), (50, 96), (197, 192), (4096,))),
        lambda x: (x[-1:], x[-1:]),
    )
    yield Call("layer_norm of images", group, lambda x: F.layer_norm(x, x.shape[1:]), _one(IMAGES))
    yield Call(
        "rms_norm",
        group,
        lambda x, w: F.rms_norm(x, x.shape[-1:], w),
        _one(((7,), (10, 33), (50, 96), (197, 192), (4096,))),
        lambda x: (x[-1:],),
    )
    grouped = _one(((4, 5, 7), (16, 7, 7), (6, 33, 31), (64, 28, 28), (20, 112, 96)))
    yield Call(
        "group_norm, 2 groups",
        group,
        lambda x, w, b: F.group_norm(x, 2, w, b),
        grouped,
        lambda x: (x[:1], x[:1]),
        formats=True,
    )
    yield Call("group_norm, 1 group", group, lambda x: F.group_norm(x, 1), grouped, formats=True)
    yield Call(
        "group_norm, a weight a channel",
        group,
        lambda x: F.group_norm(x, 1, torch.linspace(-1, 2, x.shape[1]).to(x.dtype)),
        grouped,
        formats=True,
    )
    yield Call(
        "instance_norm",
        group,
        lambda x, w, b: F.instance_norm(x, None, None, w, b),
        grouped,
        lambda x: (x[:1], x[:1]),
        formats=True,
    )

    def batch_norm(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return F.batch_norm(x, mean, variance.abs() + 0.5, w, b, training=False)

    yield Call(
        "batch_norm, evaluated", group, batch_norm, grouped, lambda x: (x[:1],) * 4, formats=True
    )
    yield Call(
        "batch_norm, evaluated, rows",
        group,
        batch_norm,
        _one(((3,), (67,), (1000,))),
        lambda x: (x[:1],) * 4,
    )


def _attention() -> Iterator[Call]:
    group = "attention"
    attend = F.scaled_dot_product_attention
    lengths = (
        (2, 1, 8),
        (3, 7, 20),
        (4, 50, 32),
        (3, 197, 64),
        (2, 129, 80),
        (2, 300, 128),
        (1, 900, 64),
    )
    self_attention = tuple((size,) * 3 for size in lengths)
    for name, options in {
        "": {},
        ", causal": {"is_causal": True},
        ", scale": {"scale": 0.3},
    }.items():
        yield Call(
            f"scaled_dot_product_attention{name}",
            group,
            functools.partial(attend, **options),
            self_attention,
        )
    cross = tuple(
        ((h, n, d), (h, s, d), (h, s, d))
        for h, n, s, d in ((2, 1, 33, 8), (3, 7, 65, 20), (4, 50, 513, 32), (2, 300, 77, 64))
    )
    yield Call("scaled_dot_product_attention, other keys", group, attend, cross)

    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, kind: str) -> Tensor:
        if kind == "bool":
            mask = (mask > -1) | torch.eye(*mask.shape, dtype=torch.bool)
        return attend(q, k, v, attn_mask=mask)

    for kind in ("bool", "float"):
        yield Call(
            f"scaled_dot_product_attention, {kind} mask",
            group,
            functools.partial(masked, kind=kind),
            (*self_attention, *cross),
            lambda q, k, v: ((q[1], k[1]),),
        )
    gqa = tuple(((4, n, d), (2, n, d), (2, n, d)) for n, d in ((1, 8), (7, 20), (197, 64)))
    yield Call(
        "scaled_dot_product_attention, GQA", group, functools.partial(attend, enable_gqa=True), gqa
    )
    one_query = tuple(((4, 1, d), (4, s, d), (4, s, d)) for s, d in ((7, 8), (63, 64), (700, 64)))
    yield Call("scaled_dot_product_attention, one query", group, attend, one_query)

    def math_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) * 0.2).softmax(-1) @ v

    yield Call("softmax(q @ k.T) @ v", group, math_attention, self_attention)
    tokens = _one(((1, 32), (7, 32), (50, 32), (197, 32)))
    yield Call(
        "MultiheadAttention, fast path",
        group,
        functools.partial(_attention_module, fast=True),
        tokens,
        backward=False,
    )
    yield Call(
        "MultiheadAttention, slow path",
        group,
        functools.partial(_attention_module, fast=False),
        tokens,
    )
    yield Call(
        "TransformerEncoderLayer, fast path",
        group,
        functools.partial(_encoder, fast=True),
        tokens,
        backward=False,
    )
    yield Call(
        "TransformerEncoderLayer, slow path", group, functools.partial(_encoder, fast=False), tokens
    )


@functools.cache
def _module(kind: str, dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = {
            "attention": lambda: nn.MultiheadAttention(32, 4, batch_first=True),
            "encoder": lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
            "lstm": lambda: nn.LSTM(32, 24, batch_first=True),
            "gru": lambda: nn.GRU(32, 24, batch_first=True),
            "lstm cell": lambda: nn.LSTMCell(32, 24),
            "gru cell": lambda: nn.GRUCell(32, 24),
        }[kind]()
    return made.to(dtype).eval().requires_grad_(False)


def _attention_module(x: Tensor, fast: bool) -> Tensor:
    module = _module("attention", x.dtype)
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        return module(x, x, x, need_weights=False)[0]
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _encoder(x: Tensor, fast: bool) -> Tensor:
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        return _module("encoder", x.dtype)(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _others() -> Iterator[Call]:
    group = "others"
    yield Call(
        "embedding",
        group,
        lambda x, table: F.embedding((x.detach().abs() * 100).long().clamp(0, 99), table),
        _one(((1,), (33,), (1001,))),
        lambda x: ((100, 33),),
        backward=False,
    )
    for kind in ("lstm", "gru"):
        yield Call(
            kind.upper(),
            group,
            functools.partial(lambda x, kind: _module(kind, x.dtype)(x)[0], kind=kind),
            _one(((1, 32), (17, 32))),
        )
    yield Call("LSTMCell", group, lambda x: _module("lstm cell", x.dtype)(x)[0], _one(((32,),)))
    yield Call("GRUCell", group, lambda x: _module("gru cell", x.dtype)(x), _one(((32,),)))
    yield Call("cdist", group, torch.cdist, (((5, 3), (7, 3)), ((50, 32), (70, 32))))
    yield Call(
        "cross_entropy",
        group,
        lambda x: F.cross_entropy(
            x, (x.detach()[:, 0].abs() * 3).long() % x.shape[1], reduction="none"
        ),
        _one(((3,), (10,), (1000,), (21, 33, 31))),
        formats=True,
    )
    yield Call("ctc_loss", group, _ctc, _one(((20, 11), (50, 29))))
    yield Call(
        "fft",
        group,
        lambda x: torch.view_as_real(torch.fft.rfft(x)),
        _one(((7,), (64,), (3, 1000), (1021,))),
    )
    yield Call("fft2", group, lambda x: torch.view_as_real(torch.fft.rfft2(x)), _one(IMAGES[:4]))
    yield Call(
        "stft",
        group,
        lambda x: torch.view_as_real(
            torch.stft(x, 64, window=torch.hann_window(64), return_complex=True)
        ),
        _one(((1000,), (16000,))),
    )
    matrices = ((7, 5), (33, 65), (196, 192))
    yield Call(
        "linear, rows", group, F.linear, _one(((3,), (65,), (512,))), lambda x: ((33, x[0]), (33,))
    )
    yield Call("linear, tokens", group, F.linear, _one(TOKENS), lambda x: ((100, x[1]), (100,)))
    yield Call(
        "bilinear",
        group,
        F.bilinear,
        (((5,), (7,)), ((33,), (20,))),
        lambda x, y: ((9, x[0], y[0]),),
    )
    yield Call("matmul", group, torch.matmul, tuple((m, m[::-1]) for m in matrices))
    yield Call(
        "einsum, bij,bjk->bik",
        group,
        lambda x, y: torch.einsum("bij,bjk->bik", x, y),
        tuple((m, m[::-1]) for m in matrices),
    )
    yield Call(
        "einsum, bchw,kc->bkhw",
        group,
        lambda x, w: torch.einsum("bchw,kc->bkhw", x, w),
        _one(IMAGES[:4]),
        lambda x: ((9, x[0]),),
        formats=True,
    )
    yield Call(
        "conv2d",
        group,
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        _one(IMAGES[:4]),
        lambda x: ((12, x[0], 3, 3), (12,)),
        formats=True,
    )
    yield Call(
        "conv2d, 1 x 1",
        group,
        F.conv2d,
        _one(IMAGES[:4]),
        lambda x: ((12, x[0], 1, 1),),
        formats=True,
    )
    yield Call(
        "conv2d, depthwise",
        group,
        lambda x, w: F.conv2d(x, w, padding=1, groups=x.shape[1]),
        _one(IMAGES[:4]),
        lambda x: ((x[0], 1, 3, 3),),
        formats=True,
    )
    yield Call(
        "conv_transpose2d",
        group,
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        _one(IMAGES[:4]),
        lambda x: ((x[0], 12, 2, 2),),
        formats=True,
    )
    yield Call(
        "conv1d",
        group,
        lambda x, w: F.conv1d(x, w, padding=1),
        _one(SIGNALS),
        lambda x: ((12, x[0], 3),),
    )
    yield Call(
        "conv_transpose1d",
        group,
        lambda x, w: F.conv_transpose1d(x, w, stride=2),
        _one(SIGNALS),
        lambda x: ((x[0], 12, 4),),
    )
    yield Call(
        "conv3d",
        group,
        lambda x, w: F.conv3d(x, w, padding=1),
        _one(VIDEOS),
        lambda x: ((12, x[0], 3, 3, 3),),
    )
    yield Call(
        "conv_transpose3d",
        group,
        lambda x, w: F.conv_transpose3d(x, w, stride=2),
        _one(VIDEOS),
        lambda x: ((x[0], 12, 2, 2, 2),),
    )


def _ctc(x: Tensor) -> Tensor:
    batch, steps, classes = x.shape
    targets = torch.arange(1, 6).expand(batch, 5) % (classes - 1) + 1
    return F.ctc_loss(
        x.log_softmax(-1).transpose(0, 1),
        targets,
        torch.full((batch,), steps),
        torch.full((batch,), 5),
        reduction="none",
    )


def all_calls() -> list[Call]:
    """Every call, in the order of the table."""
    makers = (_pointwise, _reductions, _pooling, _norms, _attention, _others)
    return [call for make in makers for call in make()]
