"""Reductions, attention and norms under batch_invariant: bits, values, derivatives, transforms.

Seen to fail: each call of VARIES differs with the mode off (test_what_varies_without_the_mode).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from observing import assert_as_pytorch, same_bits
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import conv2d_ext
from conv2d_ext.testing import num_threads

ops = torch.ops.conv2d_ext
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@dataclasses.dataclass(frozen=True)
class Call:
    name: str
    run: Callable[..., Tensor]  # of batched tensors
    sizes: tuple[tuple[int, ...], ...]  # of an example
    formats: tuple[str, ...] = ("contiguous",)

    def __str__(self) -> str:
        return self.name


IMAGE = ("contiguous", "channels_last", "sliced")


def _mask(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.rand(rows, columns, generator=generator) > 0.3


def _modules() -> dict[str, nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(32, 4, batch_first=True).eval().requires_grad_(False)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
        lstm = nn.LSTM(32, 24, num_layers=2, batch_first=True, bidirectional=True)
        lstm.requires_grad_(False)
        return {"attention": attention, "layer": layer.requires_grad_(False), "lstm": lstm}


MODULES = _modules()
SHAPES = {"33": (3, 33, 33, 16), "one query": (2, 1, 63, 64), "three": (2, 3, 700, 64)}


def _attention_calls() -> Iterator[Call]:
    attend = F.scaled_dot_product_attention
    for name, (heads, queries, keys, width) in SHAPES.items():
        sizes = ((heads, queries, width), (heads, keys, width), (heads, keys, width))
        mask = _mask(queries, keys)
        yield Call(f"attention, {name}", attend, sizes)
        yield Call(
            f"attention, {name}, mask",
            lambda q, k, v, mask=mask: attend(q, k, v, attn_mask=mask),
            sizes,
        )
        yield Call(
            f"attention, {name}, causal", lambda q, k, v: attend(q, k, v, is_causal=True), sizes
        )
    yield Call(
        "attention, grouped",
        lambda q, k, v: attend(q, k, v, enable_gqa=True, scale=0.3),
        ((4, 37, 16), (2, 41, 16), (2, 41, 16)),
    )


def _factors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.randn(size, generator=generator) for size in ((40, 60), (60, 5)))
    return first / 8, second / 8


FACTORS = _factors()


def _with_factors(x: Tensor) -> list[Tensor]:
    return [x, FACTORS[0].to(x.dtype), FACTORS[1].to(x.dtype)]


CALLS = (
    Call("softmax of rows", lambda x: x.softmax(-1), ((50, 177),)),
    Call("softmax over channels", lambda x: x.softmax(1), ((19, 57, 43),), IMAGE),
    Call("log_softmax", lambda x: x.log_softmax(-1), ((50, 177),)),
    Call("softmin", lambda x: F.softmin(x, 1), ((197, 197),)),
    Call("logsumexp", lambda x: x.logsumexp((1, 2)), ((300, 177),)),
    Call("sum of all", lambda x: x.sum((1, 2, 3)), ((19, 57, 43),), IMAGE),
    Call("mean of all", lambda x: x.mean((1, 2, 3), keepdim=True), ((19, 57, 43),), IMAGE),
    Call("mean over channels", lambda x: x.mean(1), ((64, 56, 56),), IMAGE),
    Call("mean over pixels", lambda x: x.mean((2, 3)), ((96, 23, 21),), IMAGE),
    Call("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 1), ((96, 23, 21),), IMAGE),
    Call("sum over tokens", lambda x: x.sum(1, dtype=torch.float32), ((197, 96),)),
    Call("group_norm", lambda x: F.group_norm(x, 2), ((20, 57, 43),), IMAGE),
    Call("instance_norm", lambda x: F.instance_norm(x), ((5, 17, 23),), IMAGE),
    Call(
        "batch_norm, evaluated",
        lambda x: F.batch_norm(
            x, torch.linspace(0, 1, 20, dtype=x.dtype), torch.linspace(1, 3, 20, dtype=x.dtype)
        ),
        ((20, 17, 23),),
        IMAGE,
    ),
    Call(
        "resizing of three channels",
        lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
        ((3, 65, 70),),
        IMAGE,
    ),
    Call(
        "resizing of three channels by corners",
        lambda x: F.interpolate(x, size=(20, 131), mode="bilinear", align_corners=True),
        ((3, 65, 70),),
        IMAGE,
    ),
    *_attention_calls(),
    Call(
        "MultiheadAttention",
        lambda x: MODULES["attention"].to(x.dtype)(x, x, x, need_weights=False)[0],
        ((50, 32),),
    ),
    Call("var", lambda x: x.var((1, 2, 3)), ((19, 57, 43),), IMAGE),
    Call("std over pixels", lambda x: x.std((2, 3), correction=0), ((19, 57, 43),), IMAGE),
    Call("var_mean", lambda x: torch.var_mean(x, (1, 2))[0], ((300, 177),)),
    Call("norm", lambda x: torch.linalg.vector_norm(x, dim=(1, 2)), ((300, 177),)),
    Call("norm, p = 1", lambda x: torch.linalg.vector_norm(x, 1, dim=1), ((300, 17),)),
    Call("norm, p = 3", lambda x: torch.norm(x, 3, dim=1), ((3000,),)),
    Call("norm, p = 0.9", lambda x: torch.linalg.vector_norm(x / 4, 0.9, dim=1), ((40003,),)),
    Call("norm, p = -1", lambda x: torch.linalg.vector_norm(x, -1, dim=1), ((40003,),)),
    Call("pow", lambda x, y: (x.abs() + 0.1) ** y, ((11, 57), (11, 57))),
    Call("atan2", torch.atan2, ((11, 57), (11, 57))),
    Call("logaddexp", torch.logaddexp, ((11, 57), (11, 57))),
    Call("logit", lambda x: torch.logit(x.sigmoid(), 1e-3), ((11, 57),)),
    Call("prod", lambda x: (1 + x / 300).prod(1), ((40000,),)),
    Call("prod of a few", lambda x: x.prod(2, keepdim=True), ((7, 5),)),
    Call("multi_dot", lambda x: torch.linalg.multi_dot(_with_factors(x)), ((40,),)),
    Call("chain_matmul", lambda x: torch.chain_matmul(*_with_factors(x)), ((40,),)),
    Call("LSTM", lambda x: MODULES["lstm"].to(x.dtype)(x)[0], ((9, 32),)),
    Call("TransformerEncoderLayer", lambda x: MODULES["layer"].to(x.dtype)(x), ((50, 32),)),
)
over_calls = pytest.mark.parametrize("call", CALLS, ids=str)

# What varies without the mode on every machine that runs several threads, and on most of them. (On
# an Intel with AMX MKL's products don't follow the batch here.)
VARIES = {"sum of all"}
MOSTLY_VARIES = {"attention, one query", "attention, three, mask", "MultiheadAttention"}


class Sample:
    BATCH = 8

    def __init__(self, call: Call, dtype: torch.dtype, layout: str):
        generator = torch.Generator().manual_seed(0)
        self.call, self.layout = call, layout
        self.batched = [
            torch.randn(self.BATCH, *size, generator=generator).to(dtype) for size in call.sizes
        ]
        self.grad = None

    def _take(self, tensor: Tensor, examples: list[int]) -> Tensor:
        taken = tensor[examples]
        if self.layout == "sliced":
            return torch.cat((taken, taken[:, :1]), 1)[:, :-1]
        last = self.layout == "channels_last" and taken.dim() == 4
        return taken.contiguous(memory_format=torch.channels_last) if last else taken

    def results(self, examples: list[int], count: int = 1, *, mode: bool = True) -> list[Tensor]:
        """Without and with gradients: outputs, then the gradients, computed outside of the mode."""
        context = conv2d_ext.batch_invariant if mode else contextlib.nullcontext
        with num_threads(count):
            inputs = [self._take(tensor, examples) for tensor in self.batched]
            with torch.no_grad(), context():
                found = [self.call.run(*inputs)]
            for tensor in inputs:
                tensor.requires_grad_()
            with context():
                output = self.call.run(*inputs)
            if self.grad is None:
                generator = torch.Generator().manual_seed(1)
                shape = (self.BATCH, *output.shape[1:])
                self.grad = torch.randn(shape, generator=generator).to(output.dtype)
            grad = self._take(self.grad, examples) if output.dim() == 4 else self.grad[examples]
            return [
                t.detach() for t in (*found, output, *torch.autograd.grad(output, inputs, grad))
            ]

    def differences(self, *, mode: bool) -> Iterator[str]:
        everyone = list(range(self.BATCH))
        whole = self.results(everyone, mode=mode)

        def compare(what: str, examples: list[int], count: int = 1) -> Iterator[str]:
            results = self.results(examples, count, mode=mode)
            for i, (ours, theirs) in enumerate(zip(results, whole, strict=True)):
                if not same_bits(ours, theirs[examples]):
                    yield f"{what}: result {i}"

        for batch in (1, 2, 3):
            yield from compare(f"batch {batch}", everyone[:batch])
        yield from compare("place", everyone[3:] + everyone[:3])
        for count in (2, 3, 4):
            yield from compare(f"{count} threads", everyone, count)
            yield from compare(f"batch 1, {count} threads", [2], count)


@over_calls
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits(call, dtype):
    for layout in call.formats:
        assert not list(Sample(call, dtype, layout).differences(mode=True)), layout


@pytest.mark.parametrize("call", [c for c in CALLS if c.name in VARIES | MOSTLY_VARIES], ids=str)
def test_what_varies_without_the_mode(call):
    varies = bool(list(Sample(call, torch.float32, "contiguous").differences(mode=False)))
    if not varies and call.name in MOSTLY_VARIES:
        pytest.skip("PyTorch's products don't follow the batch on this CPU")
    assert varies


@over_calls
@over_dtypes
def test_values_strides_and_gradients(call, dtype):
    """As PyTorch's in float64, within roundings; strides as PyTorch's."""
    if call.name == "prod":
        pytest.skip("so many factors multiply their roundings")
    for layout in call.formats:
        sample, exact = Sample(call, dtype, layout), Sample(call, torch.float64, layout)
        exact.batched = [tensor.double() for tensor in sample.batched]
        ours = sample.results([0, 1, 2])
        exact.grad = sample.grad.double()
        theirs = exact.results([0, 1, 2], mode=False)
        if theirs[0].dtype != torch.float64:
            theirs = [t.double() for t in theirs]
        for mine, right in zip(ours, theirs, strict=True):
            eps = max(torch.finfo(dtype).eps, torch.finfo(mine.dtype).eps)
            error = (mine.double() - right).norm() / (right.norm() + 1)
            assert error <= (8 if eps > 1e-10 else 64) * eps + 40 * torch.finfo(
                torch.float32
            ).eps * (eps > 1e-10), layout
        inputs = [sample._take(t, [0, 1, 2]) for t in sample.batched]
        with torch.no_grad():
            expected = call.run(*inputs).stride()
            with conv2d_ext.batch_invariant():
                assert call.run(*inputs).stride() == expected
                with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as fake:
                    fakes = [fake.from_tensor(t) for t in inputs]
                    if not any(
                        n in call.name for n in ("Multihead", "Transformer", "batch_norm", "LSTM")
                    ):
                        assert call.run(*fakes).stride() == expected


@pytest.mark.parametrize(
    "call",
    [
        nn.BatchNorm2d(3).eval(),
        nn.GroupNorm(1, 3),
        nn.Softmax(1),
        nn.GELU(),
        nn.Sigmoid(),
        lambda x: x**1.5,
        lambda x: torch.atan2(x, x),
    ],
    ids=lambda call: type(call).__name__,
)
def test_strides_that_sizes_of_1_leave_open(call):
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        sizes = torch.randint(1, 4, (4,), generator=generator)
        sizes[torch.rand(4, generator=generator) < 0.4] = 1
        order = torch.randperm(4, generator=generator)
        # BatchNorm's channels are 3; slices are not dense.
        sizes[order[1]] = 3
        step = 1 if torch.rand((), generator=generator) < 0.8 else 2
        x = torch.rand(*(step * sizes).tolist(), generator=generator)
        x = x[(slice(None, None, step),) * 4].permute(*order.tolist())
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                expected = call(x).stride()
                with conv2d_ext.batch_invariant():
                    assert call(x).stride() == expected, (x.shape, x.stride())


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_strides_of_a_batch_norm_of_no_examples(memory_format, gradients):
    x = torch.randn(4, 3, 5, 6).contiguous(memory_format=memory_format)[:0]
    norm = nn.BatchNorm2d(3).eval()
    with torch.set_grad_enabled(gradients):
        expected = norm(x).stride()
        with conv2d_ext.batch_invariant():
            assert norm(x).stride() == expected


SOFTMAX_SHAPES = (((4, 5), 1), ((4, 5), 0), ((2, 17, 3), -2), ((3,), 0), ((), 0), ((2, 0), 1))
over_softmax = pytest.mark.parametrize(("shape", "dim"), SOFTMAX_SHAPES, ids=str)


class TestSoftmax:
    @over_dtypes
    @pytest.mark.parametrize("log", [False, True])
    @pytest.mark.parametrize("length", [1, 2, 7, 15, 16, 17, 33, 100, 1000, 3000])
    def test_rows_and_columns_agree(self, length, log, dtype):
        rows = (torch.randn(5, length, dtype=torch.float64) * 4).to(dtype)
        columns = rows.t().contiguous()
        output = ops.softmax(rows, 1, log)
        assert same_bits(ops.softmax(columns, 0, log).t(), output)
        grad = torch.randn(5, length).to(dtype)
        ours = ops.softmax_grad(grad, output, 1, log)
        columns = ops.softmax_grad(grad.t().contiguous(), output.t().contiguous(), 0, log)
        assert same_bits(columns.t(), ours)
        exact = torch.log_softmax(rows.double(), 1) if log else torch.softmax(rows.double(), 1)
        eps = torch.finfo(dtype).eps
        allowed = 8 * eps if log else torch.finfo(dtype).smallest_normal * eps
        assert ((output.double() - exact).abs() <= 20 * eps * exact.abs() + allowed).all()

    @pytest.mark.parametrize("log", [False, True])
    def test_special_values(self, log):
        inf, nan = float("inf"), float("nan")
        for row in (
            [-inf] * 3,
            [0, -inf, 1],
            [nan, 0, 0],
            [inf, 0, 0],
            [-200.0, 0, 0],
            [3e38, 0, 0],
        ):
            x = torch.tensor([row])
            expected = torch.log_softmax(x, 1) if log else torch.softmax(x, 1)
            torch.testing.assert_close(ops.softmax(x, 1, log), expected, equal_nan=True)

    @pytest.mark.parametrize("log", [False, True])
    @over_softmax
    def test_derivatives(self, shape, dim, log):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

        def run(x):
            return ops.softmax(x, dim, log)

        torch.autograd.gradcheck(run, (x,), check_forward_ad=True)
        torch.autograd.gradgradcheck(run, (x,), check_fwd_over_rev=True)
        torch.library.opcheck(ops.softmax.default, (x, dim, log))
        grad = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        torch.library.opcheck(ops.softmax_grad.default, (grad, run(x).detach(), dim, log))

    @pytest.mark.parametrize("log", [False, True])
    @over_softmax
    def test_transforms(self, shape, dim, log):
        function = torch.log_softmax if log else torch.softmax
        x = torch.randn((6, *shape), dtype=torch.float64)

        def loss(x):
            return function(x, dim).pow(2).sum()

        with conv2d_ext.batch_invariant():
            found = (
                torch.func.vmap(lambda x: function(x, dim))(x),
                torch.func.vmap(torch.func.grad(loss))(x),
                torch.func.vmap(torch.func.hessian(loss))(x),
            )
        expected = (
            torch.func.vmap(lambda x: function(x, dim))(x),
            torch.func.vmap(torch.func.grad(loss))(x),
            torch.func.vmap(torch.func.hessian(loss))(x),
        )
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)

    def test_no_output_is_kept_alive(self):
        import gc
        import weakref

        gc.disable()
        try:
            output = ops.softmax(torch.randn(3, 4, requires_grad=True), 1, False)
            node = weakref.ref(output)
            del output
            assert node() is None
        finally:
            gc.enable()


SUMS = (
    ((5, 1000), (1,)),
    ((5, 1000), (0,)),
    ((3, 40000), (1,)),
    ((70000, 3), (0,)),
    ((2, 3, 4, 5, 6), (1, 3)),
    ((2, 33, 50, 70), (1, 2, 3)),
    ((100000,), (0,)),
    ((3, 0), (1,)),
    ((0, 3), (0,)),
    ((), ()),
)


class TestSum:
    @over_dtypes
    @pytest.mark.parametrize(("shape", "dims"), SUMS, ids=str)
    def test_values_and_threads(self, shape, dims, dtype):
        x = torch.randn(shape, dtype=torch.float64).to(dtype)
        result = ops.sum(x, dims, False)
        exact = x.double().sum(dims) if dims else x.double()
        scale = x.double().abs().sum(dims) if dims else x.double().abs()
        eps = torch.finfo(dtype).eps
        assert result.shape == exact.shape
        assert ((result.double() - exact).abs() <= 4 * eps * scale).all()
        for count in (2, 3, 4):
            with num_threads(count):
                assert same_bits(ops.sum(x, dims, False), result)
        if len(dims) == 1 and x.numel():
            strided = torch.stack((x, x), -1)[..., 0]
            turned = x.movedim(dims[0], 0).contiguous().movedim(0, dims[0])
            for other in (strided, turned):
                assert same_bits(ops.sum(other, dims, False), result)

    @pytest.mark.parametrize("op", [ops.sum, ops.mean, ops.var], ids=str)
    @pytest.mark.parametrize("keepdim", [False, True])
    @pytest.mark.parametrize(("shape", "dims"), [((4, 5), (1,)), ((2, 3, 4), (0, 2)), ((), ())])
    def test_derivatives(self, shape, dims, keepdim, op):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        divisor = (3.5,) if op is ops.var else ()

        def run(x):
            return op(x, dims, *divisor, keepdim)

        torch.autograd.gradcheck(run, (x,), check_forward_ad=True)
        torch.autograd.gradgradcheck(run, (x,))
        torch.library.opcheck(op.default, (x, dims, *divisor, keepdim))
        batch = torch.randn((6, *shape), dtype=torch.float64)
        torch.testing.assert_close(
            torch.func.vmap(run)(batch), torch.stack([run(one) for one in batch])
        )

    def test_forms_of_the_call(self):
        x, out = torch.randn(3, 5, 7), torch.empty(0)
        whole = torch.arange(12).reshape(3, 4)
        with conv2d_ext.batch_invariant():
            assert torch.equal(torch.sum(x, dim=(0, -1), out=out), x.sum((0, 2)))
            assert torch.equal(torch.mean(x, dim=1, out=out), x.mean(1))
            assert x.sum(dtype=torch.float64).dtype == torch.float64
            assert torch.equal(whole.sum(1), torch.tensor([6, 22, 38]))
            assert whole.sum(1, dtype=torch.float32).tolist() == [6, 22, 38]
            assert x.bfloat16().mean().dtype == torch.bfloat16
            assert x.sum(()).shape == ()
            assert torch.tensor(3.0).sum(-1) == 3
            with pytest.raises(RuntimeError, match="appears multiple times"):
                x.sum((0, 0))
            with pytest.raises(IndexError):
                x.sum(3)
            with pytest.raises(RuntimeError, match="could not infer output dtype"):
                whole.mean()


class TestVarianceAndNorms:
    x = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    @pytest.mark.parametrize(
        "call",
        [
            lambda x: x.var(),
            lambda x: x.var(1, keepdim=True),
            lambda x: x.std((0, 1), correction=2),
            lambda x: torch.std_mean(x, 0)[0] * torch.std_mean(x, 0, keepdim=True)[1],
            lambda x: torch.linalg.vector_norm(x, 3, dim=1),
            lambda x: torch.linalg.vector_norm(x, 1.5),
            lambda x: torch.linalg.vector_norm(x, 2, dim=0, keepdim=True),
            lambda x: torch.norm(x),
            lambda x: F.normalize(x, 4, dim=0),
        ],
    )
    def test_values_and_derivatives(self, call):
        def run(x):
            with conv2d_ext.batch_invariant():
                return call(x)

        x = self.x.clone().requires_grad_()
        torch.testing.assert_close(run(x), call(x))
        torch.autograd.gradcheck(run, x, check_forward_ad=True)
        torch.autograd.gradgradcheck(run, x)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("call", [torch.std, lambda x, dim: torch.std_mean(x, dim)[0]])
    def test_the_deviation_of_a_constant_has_no_gradient(self, call, dtype):
        x = torch.full((2, 3), 5.0, dtype=dtype, requires_grad=True)
        with conv2d_ext.batch_invariant():
            call(x, 1).sum().backward()
        assert torch.equal(x.grad, torch.zeros(2, 3, dtype=dtype))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("scale", [1e25, 1e-25])
    @pytest.mark.parametrize("call", [torch.std, torch.linalg.vector_norm])
    def test_squares_stay_in_range(self, call, scale, dtype):
        """As in PyTorch, which sums them in float64."""
        x = torch.tensor([3.0, 1.0, 0.5], dtype=dtype) * scale
        leaf = x.clone().requires_grad_()
        with conv2d_ext.batch_invariant():
            found = call(leaf)
            found.backward()
        exact = x.double().requires_grad_()
        call(exact).backward()
        torch.testing.assert_close(found, call(exact).to(dtype), rtol=1e-2, atol=0)
        torch.testing.assert_close(leaf.grad, exact.grad.to(dtype), rtol=1e-2, atol=0)

    @pytest.mark.parametrize("p", [1, 2, 3, 1.5])
    def test_of_zeros_the_gradient_is_zeros(self, p):
        x = torch.zeros(3, 4, requires_grad=True)
        with conv2d_ext.batch_invariant():
            torch.linalg.vector_norm(x, p, dim=1).sum().backward()
        assert torch.equal(x.grad, torch.zeros(3, 4))

    @pytest.mark.parametrize(
        "call",
        [
            lambda x: torch.linalg.vector_norm(x, float("inf")),
            lambda x: torch.linalg.vector_norm(x, 0),
            lambda x: torch.linalg.vector_norm(x[:0]),
            lambda x: torch.linalg.vector_norm(x, dtype=torch.float64),
            lambda x: x[:, :0].var(1),
            lambda x: x.to(torch.complex64).var(),
            lambda x: torch.linalg.vector_norm(x.to(torch.complex64), 3),
        ],
    )
    def test_what_is_pytorch_s(self, call):
        expected = call(self.x.float())
        with conv2d_ext.batch_invariant():
            found = call(self.x.float())
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, equal_nan=True)

    @pytest.mark.filterwarnings("ignore:.*degrees of freedom")
    def test_too_few_elements(self):
        for call in (lambda x: x[:, :1].var(1), lambda x: x.var(1, correction=9)):
            expected = call(self.x)
            with conv2d_ext.batch_invariant():
                torch.testing.assert_close(call(self.x), expected, equal_nan=True)


class TestAttention:
    def test_transforms_and_batched_gradients(self):
        """Of several pieces; memory is that of a piece for each example, and no share is kept."""
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(3, 2, 2, n, 8, generator=generator) for n in (70, 1500, 1500))
        mask = torch.randn(2, 1, 70, 1500, generator=generator)

        def loss(q, k, v, mask):
            return F.scaled_dot_product_attention(q, k, v, mask).square().sum()

        every = (0, 1, 2, 3)
        transform = torch.func.vmap(
            torch.func.grad(loss, argnums=every), in_dims=(0, None, 0, None)
        )
        with conv2d_ext.batch_invariant():
            found = transform(q, k[0], v, mask)
            saved = []
            leaf = q[0].clone().requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: saved.append(t.numel()) or t, lambda t: t
            ):
                loss(leaf, k[0], v[0], mask.requires_grad_())
        assert max(saved) <= max(k[0].numel(), mask.numel())
        mask = mask.detach()
        for i in range(3):
            alone = torch.func.grad(loss, argnums=every)(
                q[i].double(), k[0].double(), v[i].double(), mask.double()
            )
            for ours, theirs in zip(found, alone, strict=True):
                torch.testing.assert_close(ours[i].double(), theirs, rtol=1e-3, atol=1e-4)

    def test_compiled_autograd(self):
        q, k = torch.randn(2, 2, 5, 8, requires_grad=True), torch.randn(2, 2, 7, 8)
        mask = torch.randn(5, 7, requires_grad=True)

        def gradients():
            with conv2d_ext.batch_invariant():
                output = F.scaled_dot_product_attention(q, k, k, mask)
            q.grad = mask.grad = None
            output.square().sum().backward()
            return q.grad, mask.grad

        expected = gradients()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            for ours, theirs in zip(gradients(), expected, strict=True):
                assert same_bits(ours, theirs)

    def test_empty_tensors_of_the_op_raise(self):
        """(The mode leaves them to PyTorch.)"""
        q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
        for q_, k_ in ((q, k[:, :, :0]), (q, k[:, :0]), (q[:, :, :0], k), (q[:0], k[:0])):
            with pytest.raises(RuntimeError, match="expected tensors with elements"):
                torch.ops.conv2d_ext.attention(q_, k_, k_, None, False, 1.0, False)

    def test_the_op_computes_in_its_dtype_under_autocast(self):
        q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
        expected = torch.ops.conv2d_ext.attention(q, k, k, None, False, 1.0, False)
        with torch.autocast("cpu", torch.bfloat16):
            found = torch.ops.conv2d_ext.attention(q, k, k, None, False, 1.0, False)
        assert same_bits(found, expected)

    def test_opcheck(self):
        q, k = torch.randn(2, 4, 5, 8, requires_grad=True), torch.randn(2, 2, 7, 8)
        mask = torch.randn(1, 1, 5, 7)
        for options in ((None, True, 0.3, True), (mask, False, 0.3, False)):
            torch.library.opcheck(ops.attention.default, (q, k, k, *options))
            grad = torch.randn(2, 4, 5, 8)
            wanted = [True, False, True, options[0] is not None]
            torch.library.opcheck(
                ops.attention_grad.default, (grad, q.detach(), k, k, *options, wanted)
            )
        with pytest.raises(RuntimeError, match=r"expected q of size \(N, heads"):
            ops.attention(q, k[:, :, :, :3], k, None, False, 1.0, False)

    @pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "heads"])
    @pytest.mark.parametrize("grouped", [False, True])
    def test_derivatives(self, mask, grouped):
        q = torch.randn(2, 4, 5, 3, dtype=torch.float64, requires_grad=True)
        k = torch.randn(2, 2 if grouped else 4, 6, 3, dtype=torch.float64, requires_grad=True)
        v = torch.randn_like(k, requires_grad=True)
        masks = {
            "bool": _mask(5, 6) | torch.eye(5, 6, dtype=torch.bool),
            "float": torch.randn(5, 6, dtype=torch.float64),
            "heads": torch.randn(2, 1, 1, 6, dtype=torch.float64),
        }

        def run(q, k, v):
            with conv2d_ext.batch_invariant():
                return F.scaled_dot_product_attention(
                    q, k, v, masks.get(mask), is_causal=mask == "causal", enable_gqa=grouped
                )

        torch.autograd.gradcheck(run, (q, k, v))
        torch.autograd.gradgradcheck(run, (q, k, v))

    def test_blocks_of_queries(self):
        """Of several blocks, images and heads, as of one; and what has no key is 0."""
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(3, 4, n, 16, generator=generator) for n in (300, 900, 900))
        mask = torch.rand(3, 1, 300, 900, generator=generator) > 0.5
        mask[1, 0, 7] = False
        leaves = [t.requires_grad_() for t in (q, k, v)]
        with conv2d_ext.batch_invariant():
            output = F.scaled_dot_product_attention(q, k, v, mask)
        assert (output[1, :, 7] == 0).all()
        grads = torch.autograd.grad(output.square().sum(), leaves)
        exact = [t.detach().double().requires_grad_() for t in leaves]
        expected = F.scaled_dot_product_attention(*exact, mask)
        torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(
            grads, torch.autograd.grad(expected.square().sum(), exact), strict=True
        ):
            assert not ours.isnan().any()
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("dims", [2, 3, 4])
    def test_dimensions_and_errors(self, dims):
        q, k = (
            torch.randn(2, 3, 5, 8)[(0,) * (4 - dims)],
            torch.randn(2, 3, 6, 8)[(0,) * (4 - dims)],
        )
        expected = F.scaled_dot_product_attention(q, k, k)
        with conv2d_ext.batch_invariant():
            torch.testing.assert_close(F.scaled_dot_product_attention(q, k, k), expected)
            assert F.scaled_dot_product_attention(q, k, k, dropout_p=0.5).shape == expected.shape
            if dims < 4:
                with pytest.raises(RuntimeError, match="is_causal"):
                    F.scaled_dot_product_attention(q, k, k, torch.ones(5, 6), is_causal=True)
                refusal = pytest.raises(RuntimeError)
                if dims == 3 and torch.__version__ >= (2, 15):
                    refusal = contextlib.nullcontext()
                with refusal:
                    F.scaled_dot_product_attention(q, k, k[..., :5, :])

    @pytest.mark.parametrize("kind", ["keys", "queries", "both"])
    @pytest.mark.parametrize("weights", [False, True])
    def test_masks_of_modules(self, kind, weights):
        module = MODULES["attention"].float()
        x = torch.randn(8, 50, 32, generator=torch.Generator().manual_seed(0))
        keys = torch.arange(50).expand(8, 50) >= 40 if kind != "queries" else None
        queries = ~_mask(50, 50) if kind != "keys" else None
        if queries is not None:
            queries.fill_diagonal_(False)

        def run(batch: int) -> tuple[Tensor, ...]:
            some = x[:batch]
            padding = keys[:batch] if keys is not None else None
            found = module(some, some, some, padding, weights, queries)
            return tuple(t for t in found if t is not None)

        with torch.no_grad():
            expected = run(8)
            with conv2d_ext.batch_invariant():
                whole = run(8)
                for batch, count in itertools.product((1, 3, 8), (1, 2, 4)):
                    with num_threads(count):
                        for ours, all_of_them in zip(run(batch), whole, strict=True):
                            assert same_bits(ours, all_of_them[:batch])
        for ours, theirs in zip(whole, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


# A compiled resizing is PyTorch's formula (docs/beyond_one_process.md).
@pytest.mark.parametrize(
    "call",
    [
        c
        for c in CALLS
        if not any(n in c.name for n in ("Multihead", "Transformer", "LSTM", "prod", "resizing"))
    ],
    ids=str,
)
def test_compiles_whole(call):
    sample = Sample(call, torch.float32, call.formats[-1])
    inputs = [sample._take(t, [0, 1]).requires_grad_() for t in sample.batched]

    def run(*inputs):
        with conv2d_ext.batch_invariant():
            return call.run(*inputs)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    ours, expected = compiled(*inputs), run(*inputs)
    assert ours.stride() == expected.stride()
    assert same_bits(ours, expected)
    grad = torch.randn_like(expected)
    for mine, right in zip(
        torch.autograd.grad(ours, inputs, grad),
        torch.autograd.grad(expected, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, right)


def test_attention_of_groups_needs_heads():
    q = torch.randn(3, 4)
    with conv2d_ext.batch_invariant(), pytest.raises(IndexError):
        F.scaled_dot_product_attention(q, q, q, enable_gqa=True)


# ---- PyTorch's own gradients, computed in the mode

GRADIENTS = {
    "group_norm, channels": lambda x: F.group_norm(x, 4, torch.linspace(-1, 2, 20).to(x.dtype)),
    "group_norm, vectors": lambda x: F.group_norm(
        x.repeat(1, 7, 1, 1)[:, :128], 2, torch.linspace(-1, 2, 128).to(x.dtype)
    ),
    "huber_loss": lambda x: F.huber_loss(x, torch.zeros_like(x), "none", delta=0.3),
    "huber_loss, wide": lambda x: F.huber_loss(x, torch.zeros_like(x), "none", delta=3.0),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(
        x, torch.zeros_like(x), reduction="none", beta=0.3
    ),
}


@over_dtypes
@pytest.mark.parametrize("run", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_inside_of_the_context(run, dtype):
    if dtype == torch.float16 and "norm" in run.__code__.co_names:
        pytest.skip("PyTorch's norms of float16 take float16 alone")
    batch = torch.randn(5, 20, 9, 9, generator=torch.Generator().manual_seed(0)).to(dtype)

    def gradient(inputs: Tensor, count: int) -> Tensor:
        with num_threads(count), conv2d_ext.batch_invariant():
            leaf = inputs.clone().requires_grad_()
            output = run(leaf)
            return torch.autograd.grad(output, leaf, output.detach().cos())[0]

    whole = gradient(batch, 1)
    assert same_bits(gradient(batch, 2), whole)
    for first, last in ((0, 1), (2, 3), (1, 4)):
        for count in (1, 2):
            assert same_bits(gradient(batch[first:last], count), whole[first:last])
    exact = batch.double().requires_grad_()
    output = run(exact)
    expected = torch.autograd.grad(output, exact, output.detach().cos())[0]
    error = (whole.double() - expected).norm() / expected.norm()
    assert error <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", [F.huber_loss, F.smooth_l1_loss], ids=["huber", "smooth_l1"])
def test_gradients_of_reduced_losses(loss, reduction):
    edge = {"delta": 0.4} if loss is F.huber_loss else {"beta": 0.4}
    x, target = torch.randn(33, dtype=torch.float64, requires_grad=True), torch.zeros(33).double()

    def run(x):
        return loss(x, target, reduction=reduction, **edge)

    with conv2d_ext.batch_invariant():
        ours = torch.autograd.grad(run(x), x)[0]
        assert torch.autograd.gradgradcheck(run, x)
    torch.testing.assert_close(ours, torch.autograd.grad(run(x), x)[0])


def test_gradients_of_p_norms_at_zero_and_infinity():
    rows = [[1.0, 0, 2, -3], [0, 0, 0, 0], [1, 2, 3, 4], [float("inf"), 1, 2, 3]]
    for p in (0.5, 0.9, -0.5, -1, 1.5):

        def results(p=p):
            x = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
            norms = torch.linalg.vector_norm(x, p, dim=1)
            return norms, torch.autograd.grad(norms.nan_to_num(0, 0, 0).sum(), x)[0]

        with conv2d_ext.batch_invariant():
            ours = results()
        torch.testing.assert_close(ours, results(), equal_nan=True)


ACCUMULATIONS = {
    "index": lambda table, index, values: torch.autograd.grad(table[index], table, values)[0],
    "take": lambda table, index, values: torch.autograd.grad(
        table.take(index), table, values[:, 0].contiguous()
    )[0],
    "index_put": lambda table, index, values: table.detach().index_put((index,), values, True),
    "put": lambda table, index, values: table.detach().put(index, values[:, 0].contiguous(), True),
}


@pytest.mark.parametrize("run", ACCUMULATIONS.values(), ids=ACCUMULATIONS)
def test_what_indices_accumulate_is_the_same_in_every_run(run):
    """PyTorch's threads add atomically, in any order."""
    table, index = torch.randn(50, 4, requires_grad=True), torch.randint(0, 50, (60_000,))
    values = torch.randn(60_000, 4)

    def result(count: int) -> Tensor:
        with num_threads(count), conv2d_ext.batch_invariant():
            found = run(table, index, values)
            assert torch.get_num_threads() == count
            return found

    alone = result(1)
    for _ in range(4):
        assert same_bits(result(2), alone)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_index_put(in_place, accumulate):
    """Recorded where it adds; what stores alone is left to the compiler."""
    table, values = torch.randn(50, 4), torch.randn(60_000, 4)
    index = torch.randint(0, 50, (60_000,)) if accumulate else torch.arange(50)
    values = values if accumulate else values[:50]
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def run(table, index, values):
        with conv2d_ext.batch_invariant():
            put = table.clone().index_put_ if in_place else table.index_put
            return put((index,), values, accumulate)

    torch._dynamo.reset()
    aot = aot_autograd(fw_compiler=backend)
    compiled = torch.compile(run, fullgraph=True, backend=aot)
    with num_threads(2):
        assert same_bits(compiled(table, index, values), run(table, index, values))
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert any("eager_index_put" in target for target in targets) == accumulate


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM], ids=lambda kind: kind.__name__)
def test_packed_sequences(kind, options):
    """Where the batch's other sequences end changes no bit, of gradients inside of the context."""
    model = kind(5, 7, batch_first=True, **options)
    x, grad = torch.randn(5, 4, 5), torch.randn(5, 4, 14)
    lengths = torch.tensor([2, 4, 1, 4, 3])

    def results(examples: list[int]) -> list[Tensor]:
        leaf = x[examples].requires_grad_()
        packed = nn.utils.rnn.pack_padded_sequence(leaf, lengths[examples], True, False)
        output, last = model(packed)
        output = nn.utils.rnn.pad_packed_sequence(output, True, total_length=4)[0]
        last = last[0] if isinstance(last, tuple) else last
        gradient = torch.autograd.grad(output, leaf, grad[examples, :, : output.shape[-1]])[0]
        return [output.detach(), last.detach().transpose(0, 1), gradient]

    expected = results([0, 1, 2, 3, 4])
    with conv2d_ext.batch_invariant():
        whole = results([0, 1, 2, 3, 4])
        for examples in ([0], [2], [1, 4], [4, 2, 0]):
            for ours, theirs in zip(results(examples), whole, strict=True):
                assert torch.equal(ours, theirs[examples])
    for ours, theirs in zip(whole, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("size", [(3,), (2, 3)], ids=str)
def test_second_derivatives_of_norms_at_zero(size):
    """Of the 2-norm at a zero among others: 1 / |x|."""
    rows = torch.tensor([[0.0, 3, 4], [1, 0, -2]], dtype=torch.float64)
    x = (rows if len(size) == 2 else rows[0]).clone().requires_grad_()

    def norm(x):
        return torch.linalg.vector_norm(x, dim=-1)

    with conv2d_ext.batch_invariant():
        assert torch.autograd.gradgradcheck(norm, x)
        ours = torch.func.hessian(norm)(x.detach())
    torch.testing.assert_close(ours, torch.func.hessian(norm)(x.detach()))


def test_additions_at_indices_that_a_thread_begins_with():
    """PyTorch sets a thread's number of threads when it first asks, which may be inside of a call.

    Seen to fail: with the number set before PyTorch has asked.
    """
    index, values = torch.randint(0, 5, (200_000,)), torch.randn(200_000)
    found = []

    def add() -> None:
        with conv2d_ext.batch_invariant():
            found.append(torch.zeros(5).index_put((index,), values, accumulate=True))

    with num_threads(4):
        for _ in range(6):
            thread = threading.Thread(target=add)
            thread.start()
            thread.join()
    assert all(same_bits(result, found[0]) for result in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding_idx", [None, 7])
def test_weights_of_samples(padding_idx, dtype):
    """Wherever the rows lie in memory."""
    table, grad = torch.randn(50, 17).to(dtype), torch.randn(16, 17).to(dtype)
    indices, weights = torch.randint(0, 50, (16, 9)), torch.randn(16, 9).to(dtype)

    def gradient(examples: list[int], table=table) -> Tensor:
        leaf = weights[examples].requires_grad_()
        output = F.embedding_bag(
            indices[examples], table, mode="sum", per_sample_weights=leaf, padding_idx=padding_idx
        )
        return torch.autograd.grad(output, leaf, grad[examples])[0]

    expected = gradient(list(range(16)))
    with conv2d_ext.batch_invariant():
        whole = gradient(list(range(16)))
        for examples in ([0], [9], [3, 9], [4, 9, 0, 15, 11]):
            assert same_bits(gradient(examples), whole[examples])
        shifted = torch.cat((table.flatten()[:1], table.flatten()))[1:].view(50, 17)
        assert same_bits(gradient(list(range(16)), shifted), whole)
    torch.testing.assert_close(whole, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_weight_norm_follows_no_threads(dim, dtype):
    v = torch.randn(64, 32, 3).to(dtype).requires_grad_()
    size = [1, 1, 1]
    size[dim] = v.shape[dim]
    g, grad = torch.randn(size).to(dtype).requires_grad_(), torch.randn(64, 32, 3).to(dtype)

    def results(count: int) -> list[Tensor]:
        with num_threads(count):
            output = torch._weight_norm(v, g, dim)
            return [output.detach(), *torch.autograd.grad(output, (v, g), grad)]

    with conv2d_ext.batch_invariant():
        expected = results(1)
        for count in (2, 3, 8):
            for a, b in zip(results(count), expected, strict=True):
                assert torch.equal(a, b)
    torch.testing.assert_close(results(2), expected)


def test_grid_sample_of_a_grid_that_lies_otherwise_in_a_batch_of_one():
    """As deformable attention makes it."""
    value, places = torch.randn(2, 4, 8, 8, 8), torch.rand(2, 16, 4, 4, 2) * 2 - 1

    def gradient(n: int) -> Tensor:
        leaf = value[:n].clone().requires_grad_()
        grid = places[:n].transpose(1, 2).flatten(0, 1)
        output = F.grid_sample(leaf.flatten(0, 1), grid, align_corners=False)
        return torch.autograd.grad(output.square().sum(), leaf)[0]

    expected = gradient(2)
    with conv2d_ext.batch_invariant():
        assert torch.equal(gradient(1)[0], gradient(2)[0])
        torch.testing.assert_close(gradient(2), expected)


@pytest.mark.parametrize("call", [
    lambda x, out: torch.sigmoid(x, out=out), lambda x, out: torch.pow(x, 1.3, out=out),
    lambda x, out: torch.atan2(x, x, out=out),
], ids=["sigmoid", "pow", "atan2"])  # fmt: skip
def test_outputs_of_pointwise_functions(call):
    """Resized they have the strides of PyTorch's; those that overlap with an input are refused."""
    last = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for size in ((0,), (2, 3, 4, 5)):
        expected, found = torch.empty(size), torch.empty(size)
        call(last, expected)
        with conv2d_ext.batch_invariant():
            call(last, found)
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected)
    x = torch.rand(10)
    assert_as_pytorch(lambda: call(x[:-1], x[1:]))
    assert_as_pytorch(lambda: call(x, torch.empty(1).expand(10)))
    y = x.clone()
    with conv2d_ext.batch_invariant():
        torch.testing.assert_close(call(y, y), call(x, torch.empty(10)))


@pytest.mark.parametrize(("size", "dim"), [((1,), None), ((3, 1), 1)], ids=str)
def test_second_derivatives_of_single_factors(size, dim):
    x = torch.full(size, 2.0, dtype=torch.float64, requires_grad=True)
    with conv2d_ext.batch_invariant():
        product = torch.prod(x) if dim is None else torch.prod(x, dim)
        (gradient,) = torch.autograd.grad(product.sum(), x, create_graph=True)
        assert not torch.autograd.grad(gradient.sum(), x)[0].any()


def test_gradients_of_addbmm_are_contiguous():
    bias, first = torch.randn(5, 10), torch.randn(6, 5, 7, requires_grad=True)
    with conv2d_ext.batch_invariant():
        output = torch.addbmm(bias, first, torch.randn(6, 7, 10))
        assert torch.autograd.grad(output.sum(), first)[0].is_contiguous()
