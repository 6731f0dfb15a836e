"""Reductions, attention and norms under batch_invariant: bits, values, derivatives, transforms.

Seen to fail: each call of VARIES differs with the mode off (test_what_varies_without_the_mode).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from isa_bits import bits
from torch import Tensor, nn

import conv2d_ext

ops = torch.ops.conv2d_ext
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def same_bits(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(bits(first), bits(second))


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    *_attention_calls(),
    Call(
        "MultiheadAttention",
        lambda x: MODULES["attention"].to(x.dtype)(x, x, x, need_weights=False)[0],
        ((50, 32),),
    ),
    Call("prod", lambda x: (1 + x / 300).prod(1), ((40000,),)),
    Call("prod of a few", lambda x: x.prod(2, keepdim=True), ((7, 5),)),
    Call("LSTM", lambda x: MODULES["lstm"].to(x.dtype)(x)[0], ((9, 32),)),
    Call("TransformerEncoderLayer", lambda x: MODULES["layer"].to(x.dtype)(x), ((50, 32),)),
)
over_calls = pytest.mark.parametrize("call", CALLS, ids=str)

# What varies without the mode on every machine that runs several threads.
VARIES = {
    "sum of all",
    "attention, one query",
    "attention, three, mask",
    "MultiheadAttention",
}


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
        with threads(count):
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


@pytest.mark.parametrize("call", [c for c in CALLS if c.name in VARIES], ids=str)
def test_what_varies_without_the_mode(call):
    assert list(Sample(call, torch.float32, "contiguous").differences(mode=False))


@over_calls
@over_dtypes
def test_values_strides_and_gradients(call, dtype):
    """As PyTorch's in float64, within roundings; strides as PyTorch's."""
    if call.name == "prod":
        pytest.skip("so many factors multiply their roundings")
    for layout in call.formats:
        sample, exact = Sample(call, dtype, layout), Sample(call, torch.float64, layout)
        exact.batched = [tensor.double() for tensor in sample.batched]
        if dtype == torch.float16 and "batch_norm" in call.name:
            return
        ours = sample.results([0, 1, 2])
        exact.grad = sample.grad.double()
        theirs = exact.results([0, 1, 2], mode=False)
        if isinstance(theirs[0], Tensor) and theirs[0].dtype != torch.float64:
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
            with threads(count):
                assert same_bits(ops.sum(x, dims, False), result)
        if len(dims) == 1 and x.numel():
            strided = torch.stack((x, x), -1)[..., 0]
            turned = x.movedim(dims[0], 0).contiguous().movedim(0, dims[0])
            for other in (strided, turned):
                assert same_bits(ops.sum(other, dims, False), result)

    @pytest.mark.parametrize("keepdim", [False, True])
    @pytest.mark.parametrize(("shape", "dims"), [((4, 5), (1,)), ((2, 3, 4), (0, 2)), ((), ())])
    def test_derivatives(self, shape, dims, keepdim):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

        def run(x):
            return ops.sum(x, dims, keepdim)

        torch.autograd.gradcheck(run, (x,), check_forward_ad=True)
        torch.autograd.gradgradcheck(run, (x,))
        torch.library.opcheck(ops.sum.default, (x, dims, keepdim))
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


class TestAttention:
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
                with pytest.raises(RuntimeError):
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
                    with threads(count):
                        for ours, all_of_them in zip(run(batch), whole, strict=True):
                            assert same_bits(ours, all_of_them[:batch])
        for ours, theirs in zip(whole, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "call",
    [
        c
        for c in CALLS
        if not any(n in c.name for n in ("Multihead", "Transformer", "LSTM", "prod"))
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
