"""Models in bfloat16 and float16, compiled in the mode: what a compiler keeps in float32, and for
another batch stores in 16 bits, changes no bit (conv2d_ext/_rounded.py)."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable

import pytest
import torch
import torch._inductor.lowering  # which its decompositions use
import torch.nn.functional as F
from observing import same_bits
from rotation import turn
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch_versions import not_in_older

import conv2d_ext
from conv2d_ext import _rounded

DTYPES = (torch.bfloat16, torch.float16)
ROUNDED = torch.ops.conv2d_ext.rounded.default
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _compiled(function: Callable, *args: Tensor) -> object:
    torch._dynamo.reset()
    with torch.no_grad(), conv2d_ext.batch_invariant():
        return torch.compile(function, dynamic=False, fullgraph=True)(*args)


def _numbers() -> Tensor:
    """float32 numbers of every size, many of them halfway between two of 16 bits, or near it."""
    generator = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (1 << 18,), generator=generator)
    exponents = torch.arange(256)[:, None] << 23
    around = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1FFF, 0x2000, 0x2FFF, 0x3000, 0x7FFF, 0x8000,
                           0xFFFF, 0x10000, 0x17FFF, 0x18000, 0x7F7FFF, 0x7F8000, 0x7FEFFF,
                           0x7FF000, 0x7FFFFF])  # fmt: skip
    around = torch.cat([around, around + 1])[None] & 0x7FFFFF
    # Around float16's least normal number and below it, and its largest one.
    small = (torch.arange(96, 144)[:, None] << 23) + torch.randint(
        0, 2**23, (48, 4096), generator=generator
    )
    bits = torch.cat([(exponents | around).flatten(), small.flatten()])
    return torch.cat([any_bits, bits, bits - 2**31]).to(torch.int32).view(torch.float32)


@over_dtypes
def test_rounds_every_number_as_pytorch(dtype):
    numbers = _numbers()

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.to(dtype)
        return y.float() * 2, y

    (doubled, stored), (code,) = run_and_get_code(_compiled, function, numbers)
    assert "conv2d_ext.rounded" not in code  # no call: it was computed in registers
    expected = numbers.to(dtype)
    assert torch.equal(stored.isnan(), numbers.isnan())
    assert torch.equal(doubled.isnan(), numbers.isnan())
    is_number = ~numbers.isnan()
    assert same_bits(stored[is_number], expected[is_number])
    assert same_bits(doubled[is_number], expected[is_number].float() * 2)


def _queries_and_positions(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    queries, positions = torch.linspace(-3, 2, 7 * 64).view(7, 64).to(dtype), x[0]
    sums = queries + positions
    return x @ sums.mT, x * sums + sums, (x + queries) * positions - x


def _filled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    filled = torch.full((7, 64), 0.1, dtype=dtype)
    masked = x.masked_fill(x > 0, 0.3)
    return x @ filled.mT, filled * x + 3, masked @ x.mT, masked * masked + filled


def _in_place(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    y = x.clone()
    y.mul_(x).add_(filled := torch.full_like(x, 1 / 3))
    z = torch.empty_like(x).copy_(y.float() / 3)
    y[:, 1:4] *= 1.3
    return y @ x.mT, y * z - filled


def _differentiated(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    def function(x: Tensor) -> Tensor:
        y = F.silu(x) * x + F.gelu(x)
        return F.hardswish(y) * y

    output, pull = torch.func.vjp(function, x)
    (grad,) = pull(output)
    return output @ x.mT, grad @ x.mT, grad * output


@over_dtypes
@pytest.mark.parametrize("function", [_queries_and_positions, _filled, _in_place, _differentiated])
def test_code_for_another_batch_gives_the_same_bits(function, dtype):
    """What is summed over is no batch here, so that some of it is stored and some of it is not."""
    torch.manual_seed(0)
    x = torch.randn(1, 7, 64).expand(5, 7, 64) * torch.tensor([1, 1, 2, 3, 4]).view(5, 1, 1)
    x = x.to(dtype).contiguous()
    whole = _compiled(lambda x: function(x, dtype), x)
    for count in (1, 2):
        part = _compiled(lambda x: function(x, dtype), x[:count])
        assert all(same_bits(a[:count], b) for a, b in zip(whole, part, strict=True))


def _chain(a: Tensor, b: Tensor) -> list[Tensor]:
    c = a * b + a
    return [c * c - b, c / 3 + b]


@over_dtypes
def test_fused_arithmetic_is_that_of_separate_calls(dtype):
    """And would not be without the roundings."""
    torch.manual_seed(0)
    a, b = torch.randn(2, 1000).to(dtype)
    expected = _chain(a, b)
    assert all(same_bits(x, y) for x, y in zip(_compiled(_chain, a, b), expected, strict=True))
    with _rounded.left_out():
        unrounded = _compiled(_chain, a, b)
    assert not any(same_bits(x, y) for x, y in zip(unrounded, expected, strict=True))


# ---- every op


class _Widest(torch.fx.Interpreter):
    """Computes a graph as a compiler does that stores in 16 bits nothing that it need not: every
    call of PyTorch's in float32. Notes the calls whose results would not be stored as they are, and
    that the graph doesn't round.
    """

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__(graph)
        self.found: list[str] = []

    @staticmethod
    def _widened(value: object) -> object:
        return value.float() if torch.is_tensor(value) and value.dtype in DTYPES else value

    def _as_stored(self, node: torch.fx.Node) -> object:
        def stored(value: object, described: object) -> object:
            is_tensor = torch.is_tensor(value) and torch.is_tensor(described)
            return value.to(described.dtype) if is_tensor else value

        return pytree.tree_map(stored, self.env[node], node.meta["val"])

    def run_node(self, node: torch.fx.Node) -> object:
        if node.op != "call_function":
            return pytree.tree_map(self._widened, super().run_node(node))
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if node.target is operator.getitem:
            return args[0][args[1]]
        namespace = getattr(node.target, "namespace", "")
        if namespace not in ("aten", "prims"):  # what no compiler computes
            args, kwargs = (torch.fx.map_arg(a, self._as_stored) for a in (node.args, node.kwargs))
            return pytree.tree_map(self._widened, node.target(*args, **kwargs))
        args, kwargs = pytree.tree_map(
            lambda value: torch.float32 if value in DTYPES else value,
            (args, kwargs),
            is_leaf=torch.is_tensor,
        )
        results = node.target(*args, **kwargs)
        if "empty" in str(node.target):
            results.zero_()
        self._check(node, results)
        return results

    def _check(self, node: torch.fx.Node, results: object) -> None:
        uses = {0: list(node.users)}
        if any(user.target is operator.getitem for user in node.users):
            uses = {user.args[1]: list(user.users) for user in node.users}
        described = pytree.tree_leaves(node.meta["val"])
        for number, (value, like) in enumerate(
            zip(pytree.tree_leaves(results), described, strict=True)
        ):
            if not torch.is_tensor(like) or like.dtype not in DTYPES:
                continue
            users = uses.get(number, [])
            if users and all(user.target is ROUNDED for user in users):
                continue
            stored = value.to(like.dtype).float()
            if not torch.equal(value.nan_to_num(0, 1, -1), stored.nan_to_num(0, 1, -1)):
                self.found.append(str(node.target))


# With numbers that a trace can't have or sizes that it can't know, whose samples no trace takes, or
# which PyTorch can't differentiate in 16 bits.
NOT_TRACED = (
    "allclose", "combinations", "corrcoef", "cov", "equal", "item", "masked_select", "narrow",
    "take", "tensor_split", "to_sparse", "unique", "unique_consecutive", "as_strided", "sparse.mm",
    "native_batch_norm", "_native_batch_norm_legit", "nn.functional.instance_norm",
    "nn.functional.batch_norm", "nn.functional.gaussian_nll_loss", "special.i1", "special.i1e",
)  # fmt: skip

THIRDS = 3
LEFT_OUT = ("jiterator", "empty", "new_empty")


def _traced(info, sample, *, differentiated: bool) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    from torch._inductor.decomposition import select_decomp_table

    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if torch.is_tensor(leaf)]
    tensors = [leaves[i] for i in places]

    def function(*tensors: Tensor) -> list[Tensor]:
        given = dict(zip(places, tensors, strict=True))
        all_leaves = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
        input, args, kwargs = pytree.tree_unflatten(all_leaves, spec)
        outputs = [
            t for t in pytree.tree_leaves(info.op(input, *args, **kwargs)) if torch.is_tensor(t)
        ]
        inputs = [t for t in tensors if t.requires_grad]
        differentiable = [t for t in outputs if t.requires_grad]
        if not differentiated or not inputs or not differentiable:
            return outputs
        grads = torch.autograd.grad(
            differentiable, inputs, [0.7 * torch.ones_like(t) for t in differentiable],
            allow_unused=True,
        )  # fmt: skip
        return outputs + [grad for grad in grads if grad is not None]

    context = contextlib.nullcontext() if differentiated else torch.no_grad()
    with context, conv2d_ext.batch_invariant():
        graph = make_fx(
            dispatch_functionalize(function), decomposition_table=select_decomp_table()
        )(*tensors)
    return graph, tensors


@pytest.mark.filterwarnings("ignore")
def test_no_result_keeps_more_than_it_stores():
    """Of the ops of PyTorch's tests and their gradients, and of what Inductor makes of them. Each
    run takes a third of them: another one for each state of the package.
    """
    from torch.testing._internal.common_methods_invocations import op_db

    found: dict[str, str] = {}
    graphs = roundings = 0
    for number, info in enumerate(op_db[turn("conv2d_ext") % THIRDS :: THIRDS]):
        dtype, differentiated = DTYPES[number % 2], info.supports_autograd
        left_out = info.name in NOT_TRACED or info.name.startswith(LEFT_OUT)
        if left_out or dtype not in info.dtypes:
            continue
        torch.manual_seed(0)
        sample = next(iter(info.sample_inputs("cpu", dtype, requires_grad=differentiated)))
        graph, tensors = _traced(info, sample, differentiated=differentiated)
        widest = _Widest(graph)
        widest.run(*tensors)
        graphs += 1
        roundings += sum(node.target is ROUNDED for node in graph.graph.nodes)
        found |= dict.fromkeys(widest.found, info.name)
    assert not found
    assert graphs > 300 / THIRDS
    assert roundings > 300 / THIRDS


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: torch.maximum(x, n),
        lambda x, n: torch.fmax(x, n),
        lambda x, n: torch.clamp_min(x, n),
        lambda x, n: torch.copysign(n, x),
        lambda x, n: torch.fmod(n, x),
        lambda x, n: torch.where(x > 0, x, n),
        lambda x, n: torch.where(x > 0, x, n[0, 0]),
        lambda x, n: torch.cat([x, n]),
        lambda x, n: torch.empty_like(x).copy_(n),
        lambda x, n: torch.empty_like(x).fill_(n[0, 0]),
        lambda x, n: x.masked_fill(x > 0, n[0, 0]),
        lambda x, n: x.clone().index_fill_(0, n[0, :2] % 3, n[0, 0].to(x.dtype) / 3),
        lambda x, n: torch.select_scatter(x, n[0], 0, 1),
        lambda x, n: torch.slice_scatter(x, n[:2], 0, 1, 3),
        lambda x, n: torch._foreach_maximum([x], [n])[0],
        lambda x, n: x.index_put((x > 0,), n[0, 0].to(x.dtype) / 7),
        lambda x, n: x.index_put((x > 0,), n[0, 0].to(x.dtype) / 7, accumulate=True),
    ],
)
@over_dtypes
def test_integers_are_rounded(function, dtype):
    """That become elements."""
    torch.manual_seed(0)
    x, integers = torch.randn(3, 4).to(dtype), torch.arange(12).view(3, 4) * 3 + 4099
    with torch.no_grad(), conv2d_ext.batch_invariant():
        graph = make_fx(dispatch_functionalize(function))(x, integers)
    widest = _Widest(graph)
    widest.run(x, integers)
    assert not widest.found


# ---- the op, and the graphs that have it


def _calls(graph: torch.fx.GraphModule) -> int:
    return sum(node.target is ROUNDED for node in graph.graph.nodes)


def test_graphs_that_have_none():
    x = torch.randn(3, 4)
    with conv2d_ext.batch_invariant():
        assert _calls(make_fx(lambda x: x * x + x)(x)) == 0
        low = x.bfloat16()
        assert _calls(make_fx(lambda x: x.relu().mT.clone().abs()[:2].float())(low)) == 0
        # Numbers that the type holds.
        exact = make_fx(lambda x: x.masked_fill(x > 0, 0.5).clamp(-1, 257.0 - 1))(low)
        assert _calls(exact) == 0
        assert _calls(make_fx(lambda x: x.masked_fill(x > 0, 0.1).clamp(-1, 257.0))(low)) == 2
    assert _calls(make_fx(lambda x: x * x + x)(low)) == 0


def test_a_backward_after_a_context_inside():
    """Is traced after the context, and into the same graph."""

    def function(x: Tensor) -> Tensor:
        with conv2d_ext.batch_invariant():
            y = (x * x + x) * x
        return torch.autograd.grad(y.sum(), x)[0]

    x = torch.randn(4, 5).bfloat16().requires_grad_()
    graph = make_fx(dispatch_functionalize(function))(x)
    last = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    assert last.target is ROUNDED
    assert _calls(graph) > 3


def test_flex_attention():
    """Neither its functions of scores have a call in them, nor is it followed by one."""
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 1, 48, 16).bfloat16()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad(), conv2d_ext.batch_invariant():
        torch.compile(
            lambda q: flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s * 0.3 + i) * q,
            backend=aot_autograd(fw_compiler=keep),
        )(q)
    (graph,) = graphs
    assert _calls(graph) == 1  # the product's: Inductor stores what flex_attention returns (CPU)
    assert not any(_calls(part) for part in graph.children())


@not_in_older  # whose C++ does not compile, in the mode or out of it
@over_dtypes
def test_flex_attention_is_compiled(dtype):
    """Inductor refuses whatever would be fused to its kernel on the CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = torch.randn(3, 2, 2, 48, 16).to(dtype)
    whole = _compiled(flex_attention, q, k, v)
    expected = flex_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(whole.double(), expected, rtol=0.02, atol=0.02)
    for image in range(2):
        part = slice(image, image + 1)
        assert same_bits(_compiled(flex_attention, q[part], k[part], v[part]), whole[part])


@over_dtypes
@pytest.mark.parametrize("derivative", ["hessian", "jvp of grad"])
def test_zeros_without_memory(derivative, dtype):
    """PyTorch computes nothing with tangents of them, nor may compiled code: it would read them."""
    x = torch.linspace(-1, 2, 6).to(dtype)

    def function(x: Tensor) -> Tensor:
        def cubes(x: Tensor) -> Tensor:
            return (x * x * x).sum() + (x.tanh() * x).sum()

        if derivative == "hessian":
            return torch.func.hessian(cubes)(x)
        return torch.func.jvp(torch.func.grad(cubes), (x,), (x,))[1]

    with conv2d_ext.batch_invariant():
        expected = function(x)
    torch.testing.assert_close(_compiled(function, x), expected)


LOSSES = {
    "sum": {"reduction": "sum"},
    "mean": {"reduction": "mean"},
    "none": {"reduction": "none"},
    "smoothed": {"reduction": "sum", "label_smoothing": 0.1},
    "weighted": {"reduction": "sum", "weight": torch.linspace(0.1, 1, 10)},
    "ignoring": {"reduction": "sum", "ignore_index": 3},
}


@over_dtypes
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_of_classes(loss, dtype):
    """Inductor makes a float32 tensor of their gradient's scatter."""
    if "weight" in loss:
        loss = loss | {"weight": loss["weight"].to(dtype)}
    scores = torch.randn(5, 10).to(dtype)
    targets = torch.tensor([0, 3, 5, 9, 3])

    def gradients(function: Callable, scores: Tensor, targets: Tensor) -> Tensor:
        leaf = scores.clone().requires_grad_()
        function(leaf, targets).sum().backward()
        return leaf.grad

    def function(scores: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(scores * 1.5, targets, **loss)

    with conv2d_ext.batch_invariant():
        expected = gradients(function, scores, targets)
        compiled = torch.compile(function, dynamic=False, fullgraph=True)
        whole = gradients(compiled, scores, targets)
        assert same_bits(whole + 0, expected + 0)  # zeros of ignored examples have another sign
        if loss["reduction"] != "mean":
            assert same_bits(gradients(compiled, scores[1:2], targets[1:2]), whole[1:2])


@pytest.mark.parametrize("number", [1, 0.25])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32, torch.float64], ids=str)
def test_a_scatter_of_a_number_keeps_its_dtype(dtype, number):
    """Inductor writes a selection between two numbers in its place, which is a tensor of int64 or
    float32."""
    places, x = torch.tensor([[1], [4], [0]]), torch.randn(3, 6).to(dtype)

    def function(places: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.zeros(3, 6, dtype=dtype).scatter(1, places, number)
        results = y * 1, y * x, conv2d_ext.linear(x, y), y.sigmoid(), y.softmax(1), y.sum(0)
        return *results, F.binary_cross_entropy_with_logits(x, y, reduction="none"), x.pow(y)

    with conv2d_ext.batch_invariant():
        expected = function(places, x)
    for result, eager in zip(_compiled(function, places, x), expected, strict=True):
        assert same_bits(result, eager)  # dtypes, too


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
@over_dtypes
def test_opcheck(dtype, requires_grad):
    x = torch.randn(2, 3, 4, 5).to(dtype).requires_grad_(requires_grad)
    for input in (x, x.detach().to(memory_format=torch.channels_last), x[:, :1].expand(2, 3, 4, 5)):
        for other in (dtype, torch.float32):
            torch.library.opcheck(torch.ops.conv2d_ext.rounded, (input, other))


def test_derivatives_of_the_op():
    def op(x: Tensor) -> Tensor:
        return torch.ops.conv2d_ext.rounded(x, torch.float64)

    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(op, (x,), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(op, (x,))
    assert same_bits(torch.func.vmap(op)(x), x)
    assert _calls(make_fx(torch.func.vmap(op))(x)) == 1
    compiled = torch.compile(lambda x: op(x) * 2)  # of another dtype
    assert same_bits(compiled(x.detach()), x.detach() * 2)
    # From another dtype.
    y = torch.randn(3, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(op(y).sum(), y)
    assert op(y).dtype == torch.float64
    assert grad.dtype == torch.float32
    tangent = torch.func.jvp(op, (y.detach(),), (torch.ones(3, 4),))[1]
    assert tangent.dtype == torch.float64


def test_exported_programs_and_trained_models_have_it():
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * x + x

    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 8).bfloat16()
    with conv2d_ext.batch_invariant():
        program = torch.export.export(model, (x,)).run_decompositions()
        assert _calls(program.graph_module) == 2
        assert same_bits(program.module()(x), model(x))
        grads = []
        for function in (model, torch.compile(model)):
            model.zero_grad()
            function(x).square().sum().backward()
            grads.append([p.grad for p in model.parameters()])
    assert all(same_bits(a, b) for a, b in zip(*grads, strict=True))


def test_sizes_that_are_not_known():
    x = torch.tensor([1, -2, 3, 0.1]).bfloat16()
    with (
        conv2d_ext.batch_invariant(),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
    ):
        compiled = torch.compile(lambda x: x[x > 0] * 3 + x[0], fullgraph=True)
        assert same_bits(compiled(x), x[x > 0] * 3 + x[0])
        for mode in ("fake", "symbolic"):
            assert _calls(make_fx(lambda x: x[x > 0] * 3, tracing_mode=mode)(x)) == 1


def test_a_compiled_backward_recomputes():
    """What it would keep without the op, and no more."""

    def function(x: Tensor) -> Tensor:
        y = x
        for i in range(6):
            y = (y * x + y) * (y - i)
        return y

    def kept() -> int:
        torch._dynamo.reset()
        x = torch.ones(8, 16, dtype=torch.bfloat16, requires_grad=True)
        with conv2d_ext.batch_invariant():
            output = torch.compile(function, backend="aot_eager_decomp_partition")(x)
        return len(output.grad_fn.saved_tensors)

    with_roundings = kept()
    with _rounded.left_out():
        assert kept() == with_roundings == 1
