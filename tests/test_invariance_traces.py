"""The mode in graphs and under transforms: derivatives that are traced, functions in place,
operators that take functions, failed traces."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from observing import Passes
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch_versions import not_in_older

import conv2d_ext

FUNCTIONS = {
    # PyTorch's own, which the mode records under other names
    "exp": torch.exp,
    "sin": torch.sin,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "lgamma": torch.lgamma,
    "logsumexp": lambda x: x.logsumexp(0),
    "log_sigmoid": F.logsigmoid,
    "layer_norm": lambda x: F.layer_norm(x, (4,)).square(),
    # (No x.detach(): make_fx of torch 2.15 records it as an alias, which has a gradient.)
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x) + 0.3),
    # the mode's own
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(0).square(),
    "conv1d": lambda x: F.conv1d(x[None, None], x[None, None, :2]),
    "mv": lambda x: torch.outer(x, x).mv(x),
}
TRANSFORMS = {
    "grad": grad,
    "grad of grad": lambda f: grad(lambda x: grad(f)(x).square().sum()),
    "hessian": hessian,
    "jacobian of grad": lambda f: jacrev(grad(f)),
    "jvp of grad": lambda f: lambda x: jvp(grad(f), (x,), (x.cos(),))[1],
    "grad of each": lambda f: lambda x: vmap(grad(f))(torch.stack((x, -x.cos()))),
    "three": lambda f: grad(lambda x: grad(lambda x: grad(f)(x).square().sum())(x).square().sum()),
}


def _scalar(name):
    return lambda x: FUNCTIONS[name](x).sum()


def _point():
    return torch.tensor([0.3, 1.7, 0.9, 2.2], dtype=torch.float64)


@pytest.fixture(autouse=True)
def _without_old_graphs():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # Named tensors, and what traces say of themselves.
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_traced_derivatives(function, transform):
    """Each level of a transform differentiates PyTorch's op, not the name that it is recorded by:
    that has no derivative, and those of second order were zeros."""
    derivative = TRANSFORMS[transform](_scalar(function))
    expected = derivative(_point())
    with conv2d_ext.batch_invariant():
        graph = make_fx(derivative)(torch.ones_like(_point()))
        torch.testing.assert_close(graph(_point()), expected)
        torch.testing.assert_close(derivative(_point()), expected)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_derivatives_are_recorded_by_their_own_names(transform):
    """For a compiler to leave them alone."""
    with conv2d_ext.batch_invariant():
        graph = make_fx(TRANSFORMS[transform](_scalar("exp")))(_point())
    called = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert "conv2d_ext.eager_exp.default" in called
    assert "aten.exp.default" not in called


@pytest.mark.parametrize("function", FUNCTIONS)
def test_recorded_calls_differentiate(function):
    """As in a program of torch.export that is used in training. Their names had no derivative: a
    second one raised, and torch.func's were zeros."""
    with conv2d_ext.batch_invariant():
        graph = make_fx(_scalar(function))(torch.ones_like(_point()))
    plain, recorded = _point().requires_grad_(), _point().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for order in range(2):
            for x, f in ((plain, _scalar(function)), (recorded, graph)):
                (x.grad,) = torch.autograd.grad(f(x), x, create_graph=True)
                if order == 1:
                    (x.grad,) = torch.autograd.grad(x.grad.square().sum(), x)
            torch.testing.assert_close(recorded.grad, plain.grad)
    for transform in TRANSFORMS.values():
        torch.testing.assert_close(
            transform(graph)(_point()), transform(_scalar(function))(_point())
        )


@pytest.mark.parametrize("transform", ["grad of grad", "hessian"])
def test_compiled_derivatives(transform):
    derivative = TRANSFORMS[transform](_scalar("exp"))
    compiled = torch.compile(derivative, backend="aot_eager")
    with conv2d_ext.batch_invariant():
        compiled(torch.ones_like(_point()))
        torch.testing.assert_close(compiled(_point()), derivative(_point()))


IN_PLACE = {
    "sigmoid_": Tensor.sigmoid_,
    "silu": lambda x: F.silu(x, inplace=True),
    "mish": lambda x: F.mish(x, inplace=True),
    "elu": lambda x: F.elu(x, inplace=True),
    "exp2_": Tensor.exp2_,
    "pow_": lambda x: x.pow_(1.5),
    "atan2_": lambda x: x.atan2_(torch.full_like(x, 1.5)),
    "sin_": Tensor.sin_,
    "addmm": lambda x: torch.addmm(x.diag(), x.diag().detach(), x.diag().detach(), beta=0),
}


@pytest.mark.parametrize("function", IN_PLACE)
def test_functions_in_place_under_transforms(function):
    """They keep what they overwrite, whichever level differentiates."""

    def changed(x: Tensor) -> Tensor:
        return IN_PLACE[function](x * 2)

    def backward(function: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.stack((_point(), _point().cos().square())).requires_grad_()
        function(x).sum().backward()
        return x.grad

    def of_tangents(x: Tensor) -> Tensor:
        return jvp(changed, (x,), (torch.ones_like(x),))[1].sum()

    expected = [
        backward(vmap(changed)),
        grad(of_tangents)(_point()),
        jacrev(jacfwd(changed))(_point()),
    ]
    with conv2d_ext.batch_invariant():
        results = [
            backward(vmap(changed)),
            make_fx(grad(of_tangents))(torch.ones_like(_point()))(_point()),
            jacrev(jacfwd(changed))(_point()),
        ]
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result, value)


def test_recorded_functions_in_place_refuse_integers():
    with conv2d_ext.batch_invariant(), pytest.raises(RuntimeError, match="can't be cast"):
        make_fx(lambda x: x.exp_())(torch.arange(3))


def _batch_norm(x: Tensor) -> Tensor:
    mean, variance = torch.full((4,), 0.5).double(), torch.full((4,), 2.0).double()
    return F.batch_norm(x[None], mean, variance).square().sum()


@pytest.mark.parametrize(
    "function",
    [
        vmap(grad(_batch_norm)),
        grad(lambda x: vmap(FUNCTIONS["bce"])(x).sum()),
    ],
    ids=["batch norm", "bce"],
)
def test_compiled_gradients_of_examples(function):
    """What a compiler knows of a recorded call is true of the device that it runs on."""
    x = torch.stack((_point(), -_point().cos()))
    compiled = torch.compile(function, backend="aot_eager")
    with conv2d_ext.batch_invariant():
        torch.testing.assert_close(compiled(x), function(x))


@pytest.mark.parametrize("in_dim", [0, 1])
@pytest.mark.parametrize("size", [(2, 3, 6), (2, 3, 6, 5), (2, 3, 6, 5, 4)], ids=str)
def test_vmap_of_an_evaluated_batch_norm(size, in_dim):
    def function(x):
        return F.batch_norm(x, torch.full((6,), 0.5), torch.full((6,), 2.0))

    x = torch.randn(size)
    expected = vmap(function, in_dim)(x)
    with conv2d_ext.batch_invariant():
        torch.testing.assert_close(vmap(function, in_dim)(x), expected)


@pytest.mark.parametrize("training", [False, True])
def test_vmap_of_batch_norms_gradients(training):
    """Of examples that are batches of one: no example by itself, which PyTorch would warn of."""

    def function(x):
        statistics = (None, None) if training else (torch.zeros(6), torch.ones(6))
        return F.batch_norm(x[None], *statistics, training=training).pow(3).sum()

    x = torch.randn(4, 6, 5, 3)
    expected = vmap(grad(function))(x)
    with conv2d_ext.batch_invariant(), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(vmap(grad(function))(x), expected)


class Square(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad_output):
        return 2 * grad_output * ctx.saved_tensors[0]


def _cond(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.exp() @ x, lambda x: x.sum(), (x,))


def _while_loop(x: Tensor) -> Tensor:
    from torch._higher_order_ops import while_loop

    start = (torch.tensor(0), x)
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin() * (x @ x)), start)[1]


def _scan(x: Tensor) -> Tensor:
    from torch._higher_order_ops import scan

    return scan(lambda total, x: (total + x.exp(), total * 2), x, torch.outer(x, x))[1]


OPERATORS = {
    "grad of a Function": grad(lambda x: Square.apply(x).sum()),
    "grad of grad of a Function": TRANSFORMS["grad of grad"](lambda x: Square.apply(x.sin()).sum()),
    "vmap of a Function": vmap(Square.apply),
    "jacobian of a Function": jacrev(Square.apply),
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_that_take_functions(operator):
    """Python looks for their kernels at the keys of a thread, and stops at one it does not know."""
    expected = OPERATORS[operator](_point())
    with conv2d_ext.batch_invariant():
        torch.testing.assert_close(OPERATORS[operator](_point()), expected)


def test_operators_that_are_made_later():
    class Twice(torch._ops.HigherOrderOperator):
        def __init__(self):
            super().__init__("conv2d_ext_test_twice")

        def __call__(self, f, x):
            return super().__call__(f, x)

    twice = Twice()
    for key in (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CPU):
        twice.py_impl(key)(lambda f, x: f(f(x)))
    try:
        with conv2d_ext.batch_invariant():
            assert torch.equal(twice(torch.neg, _point()), _point())
    finally:
        del torch._ops._higher_order_ops["conv2d_ext_test_twice"]


def test_a_trace_that_fails_leaves_the_mode():
    calls = []

    @torch.library.custom_op("conv2d_ext_test::fails_when_traced", mutates_args=())
    def fails(x: Tensor) -> Tensor:
        return x.clone()

    @fails.register_fake
    def _(x):
        calls.append(x)
        if len(calls) > 1:  # not in Dynamo, but in AOTAutograd
            raise ValueError("on purpose")
        return torch.empty_like(x)

    @torch.compile(backend="aot_eager")
    def compiled(x):
        with conv2d_ext.batch_invariant():
            return fails(x) @ x

    with pytest.raises(Exception, match="on purpose"):
        compiled(torch.ones(4, 4))
    assert not conv2d_ext._C.is_batch_invariant()
    key = torch._C._dispatch_key_parse("TESTING_ONLY_GenericMode")
    assert not torch._C._dispatch_tls_local_include_set().has(key)


def test_contexts_of_eager_code_inside_of_a_trace():
    """They end, and the trace goes on in the context that it was in."""

    @torch.library.custom_op("conv2d_ext_test::enters", mutates_args=())
    def enters(x: Tensor) -> Tensor:
        with conv2d_ext.batch_invariant():
            return x.exp()

    enters.register_fake(torch.empty_like)

    @torch._dynamo.disable
    def eager(x):
        with conv2d_ext.batch_invariant():
            return x.exp()

    def function(x):
        with conv2d_ext.batch_invariant():
            return enters(x).exp() + 1

    def broken(x):
        with conv2d_ext.batch_invariant():
            return eager(x).exp() + 1

    expected = _point().exp().exp() + 1
    graph = make_fx(function)(_point())
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert "conv2d_ext.eager_exp.default" in called
    for call in (graph, *(torch.compile(f, backend="aot_eager") for f in (function, broken))):
        torch.testing.assert_close(call(_point()), expected)
        assert not conv2d_ext._C.is_batch_invariant()


def test_products_with_vectors_keep_names():
    """torch 2.15 has no named dimensions."""
    if not hasattr(torch.Tensor, "rename"):
        return
    matrix, vector = torch.ones(3, 4, names=("a", "b")), torch.ones(4, names=("b",))
    start = torch.ones(3, names=("a",))
    with conv2d_ext.batch_invariant():
        results = torch.mv(matrix, vector), torch.addmv(start, matrix, vector)
        results += (start.clone().addmv_(matrix, vector),)
    for result in results:
        assert result.names == ("a",)


# ---- traces of torch.jit

_LAYERS = {
    "conv1d": (lambda x: F.conv1d(x, torch.ones(5, 6, 3)), (6, 9)),
    "conv2d": (lambda x: F.conv2d(x, torch.ones(5, 6, 3, 3), padding=1), (6, 9, 9)),
    "conv3d": (lambda x: F.conv3d(x, torch.ones(5, 3, 2, 2, 2), stride=2), (3, 4, 6, 6)),
    "conv_transpose1d": (lambda x: F.conv_transpose1d(x, torch.ones(6, 5, 3)), (6, 9)),
    "conv_transpose2d": (lambda x: F.conv_transpose2d(x, torch.ones(6, 5, 3, 3)), (6, 9, 9)),
    "linear": (lambda x: F.linear(x, torch.ones(3, 8)), (8,)),
    "linear of images": (lambda x: F.linear(x, torch.ones(3, 8)), (5, 4, 8)),
    "linear of volumes": (lambda x: F.linear(x, torch.ones(3, 8)), (2, 5, 4, 8)),
    "tensordot": (lambda x: torch.tensordot(x, torch.ones(8, 3), dims=1), (5, 4, 8)),
    "glu": (lambda x: F.glu(x, 1), (4, 5)),
    "einsum": (lambda x: torch.einsum("bijk,kn->bijn", x, torch.ones(8, 3)), (5, 4, 8)),
    "layer_norm": (lambda x: F.layer_norm(x, (8,)), (5, 8)),
    "softmax": (lambda x: x.softmax(-1), (5, 8)),
    "prod": (lambda x: x.prod(1), (5,)),
    "std": (lambda x: x.std(1), (5,)),
    "var with correction": (lambda x: x.var((1, 2), correction=2), (5, 4)),
    "std_mean": (lambda x: torch.stack(torch.std_mean(x, (1, 2)), 1), (5, 4)),
    "mean": (lambda x: x.mean((1, 2)), (5, 4)),
    "norm": (lambda x: x.norm(dim=1), (5,)),
    "logsumexp": (lambda x: x.logsumexp(1), (5,)),
    "baddbmm": (lambda x: torch.baddbmm(x, x, x.transpose(1, 2)), (5, 5)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), (2, 5, 8)),
    "group_norm": (lambda x: F.group_norm(x, 2), (4, 5, 5)),
    "instance_norm": (lambda x: F.instance_norm(x), (4, 5, 5)),
    "batch_norm": (lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)), (4, 5, 5)),
    "bilinear": (lambda x: F.bilinear(x, x, torch.ones(3, 8, 8)), (5, 8)),
    "cosine_similarity": (lambda x: F.cosine_similarity(x, x.flip(1), dim=2), (5, 8)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (4, 5, 5)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), (4, 5, 5)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), (3, 5, 5)),
    "cdist": (lambda x: torch.cdist(x, x), (5, 8)),
    "multi_dot": (lambda x: torch.linalg.multi_dot([x, torch.ones(8, 3), torch.ones(3, 2)]), (8,)),
}
# Sums over all that they are given, whose batch is a length.
_WHOLE = {
    "std": lambda x: x.std(),
    "var": lambda x: x.var(),
    "prod": lambda x: x.prod(),
    "mean": lambda x: x.mean(),
    "norm": lambda x: x.norm(),
    "addbmm": lambda x: torch.addbmm(torch.ones(4, 4), x, x.transpose(1, 2)),
    "tensordot": lambda x: torch.tensordot(x, x, dims=3),
}


@pytest.mark.parametrize("name", _WHOLE)
def test_traces_of_sums_over_everything_hold_for_other_sizes(name):
    """Seen to fail: with the example's number of elements in variances and products."""
    with conv2d_ext.batch_invariant():
        trace = torch.jit.trace(_WHOLE[name], (torch.rand(2, 4, 3),))
        x = torch.rand(5, 4, 6)
        assert torch.equal(trace(x), _WHOLE[name](x))
    torch.testing.assert_close(trace(x), _WHOLE[name](x))


@pytest.mark.parametrize("traced_in_the_mode", [True, False])
@pytest.mark.parametrize("name", _LAYERS)
def test_traces_hold_for_other_sizes(name, traced_in_the_mode):
    """Run in the mode, a trace has the mode's bits, whichever sizes and mode it was made with.

    Seen to fail: without a kernel of _convolution; with the sizes of the example in `linear`.
    """
    function, size = _LAYERS[name]
    example = torch.randn(1, *size)
    with conv2d_ext.batch_invariant() if traced_in_the_mode else contextlib.nullcontext():
        trace = torch.jit.trace(function, (example,))
    sizes = [(7, *size)]
    if len(size) == 3 and name not in ("conv3d",):
        sizes.append((4, size[0], size[1] + 3, size[2]))
    for other in sizes:
        x = torch.randn(other)
        with conv2d_ext.batch_invariant():
            expected = function(x)
            assert torch.equal(trace(x), expected)
            assert torch.equal(trace(x[2:4]), expected[2:4])
        torch.testing.assert_close(trace(x), function(x))


def test_traces_of_converted_linear_layers():
    model = torch.nn.Sequential(torch.nn.Linear(5, 3))
    conv2d_ext.convert(model)
    trace = torch.jit.trace(model, (torch.randn(1, 2, 2, 5),))
    x = torch.randn(3, 4, 2, 5)
    assert torch.equal(trace(x), model(x))


_PRODUCTS = (
    ((3, 4, 8), (8, 5)), ((3, 4, 8), (8,)), ((8,), (3, 8, 5)), ((4, 8), (3, 8, 5)),
    ((3, 4, 8), (3, 8, 5)), ((2, 1, 4, 8), (3, 8, 5)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "dtype"),
    [
        *((*sizes, torch.float32) for sizes in _PRODUCTS),
        *((*sizes, torch.complex64) for sizes in _PRODUCTS[2:4]),  # B^T A^T has other bits
    ],
    ids=str,
)
def test_traced_products_of_batches_have_the_bits_of_eager_ones(first, second, dtype):
    """Values, and the gradients of the factors.

    Seen to fail: with a matrix on the left expanded, whose gradient is then a sum over the batch.
    """
    for is_transposed, wanted in (
        (False, (False, False)), (True, (False, False)), (False, (True, False)),
        (False, (True, True)),
    ):  # fmt: skip
        torch._dynamo.reset()
        compiled = torch.compile(torch.matmul, backend="aot_eager", dynamic=True)
        factors = [torch.randn(sizes, dtype=dtype) for sizes in (first, second)]
        if is_transposed:
            factors[1] = factors[1].movedim(-1, 0).contiguous().movedim(0, -1)
        leaves = [f.requires_grad_() for f, wants in zip(factors, wanted, strict=True) if wants]
        with conv2d_ext.batch_invariant():
            ours, theirs = compiled(*factors), torch.matmul(*factors)
            results = [(ours, theirs)]
            if leaves:
                grad = torch.randn_like(theirs)
                grads = (torch.autograd.grad(result, leaves, grad) for result in (ours, theirs))
                results += zip(*grads, strict=True)
        assert all(torch.equal(a, b) for a, b in results), (is_transposed, wanted)


def _of_time(x: Tensor) -> Tensor:
    return torch.conv_tbc(x, _of_time.weight, _of_time.bias, 1)


_of_time.weight, _of_time.bias = torch.linspace(-1, 1, 3 * 9 * 64).view(3, 9, 64), torch.zeros(64)


def _of_groups(x: Tensor) -> Tensor:
    return torch._grouped_mm(x.bfloat16(), _of_groups.weight, offs=_of_groups.ends)


_of_groups.weight = torch.linspace(-1, 1, 2 * 512 * 200).view(2, 512, 200).bfloat16()
_of_groups.ends = torch.tensor([64, 96], dtype=torch.int32)


@pytest.mark.parametrize(
    ("function", "size"),
    [
        pytest.param(_of_time, (10, 7, 9), id="conv_tbc"),
        pytest.param(_of_groups, (96, 512), id="grouped_mm", marks=not_in_older),
    ],
)
def test_products_inside_of_pytorch_s_kernels_are_recorded(function, size):
    """Where the graph runs the mode may be over: a context inside of a compiled function, and a
    program that runs outside.

    Seen to fail: recorded as PyTorch's calls.
    """
    x = torch.randn(size)

    def inside(x: Tensor) -> Tensor:
        with conv2d_ext.batch_invariant():
            return function(x)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph)
    with torch.no_grad():
        with conv2d_ext.batch_invariant():
            expected = function(x)
            around = torch.compile(function, backend=backend, dynamic=False)(x)
            program = torch.export.export(Model(), (x,)).run_decompositions()
        within = torch.compile(inside, backend=backend, dynamic=False)(x)
        assert all(torch.equal(y, expected) for y in (around, within, program.module()(x)))
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum(target.startswith("conv2d_ext.eager_") for target in targets) == 1


def test_graphs_name_the_version_that_recorded_them():
    """It is part of the key of AOTAutograd's cache, which would else have another version's graph
    for a context inside of a function."""
    graphs = []

    def inside(x: Tensor) -> Tensor:
        with conv2d_ext.batch_invariant():
            return x.exp()

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compile(inside, backend=backend)(torch.randn(3))
    (entered,) = [n for n in graphs[0].graph.nodes if "enter_batch_invariant" in str(n.target)]
    assert entered.args == (conv2d_ext.__version__,)


_CAST = {
    "mse_loss": lambda x: F.mse_loss(x, x.flip(0), reduction="none"),
    "huber_loss": lambda x: F.huber_loss(x, x.flip(0)),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), x.flip(0).sigmoid()),
    "avg_pool3d": lambda x: F.avg_pool3d(x[None], 2),
    "trace": lambda x: x[0].trace(),
}


@pytest.mark.parametrize("name", _CAST)
@pytest.mark.parametrize("placed", ["around", "inside"])
def test_autocast_casts_before_a_call_is_recorded(name, placed):
    """Seen to fail: recorded first, in bfloat16, which some of PyTorch's kernels do not take."""
    x = torch.randn(4, 6, 6).bfloat16()

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return _CAST[name](x)

    def inside(x: Tensor) -> Tensor:
        with conv2d_ext.batch_invariant():
            return cast(x)

    torch._dynamo.reset()
    with torch.no_grad():
        if placed == "around":
            with conv2d_ext.batch_invariant():
                found = torch.compile(cast, backend="aot_eager")(x)
        else:
            found = torch.compile(inside, backend="aot_eager")(x)
        expected = inside(x)
    assert found.dtype == expected.dtype == torch.float32
    assert torch.equal(found, expected)


_NESTED = {
    "mse_loss": lambda x: F.mse_loss(x, x.flip(0)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.flip(0)),
    "huber_loss": lambda x: F.huber_loss(x, x.flip(0)),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), x.flip(0).sigmoid()),
    "with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x.flip(0).sigmoid()),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, x.flip(0).sign()),
    "mvlgamma": lambda x: torch.mvlgamma(x.abs() + 9, 7),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.5),
    "logsumexp": lambda x: x.logsumexp((0, 2)),
    "norm": lambda x: x.norm(2),
    "conv_tbc": lambda x: torch.conv_tbc(x, x[:3, :4].mT.contiguous(), x[0, 0, :4], 1),
}


@pytest.mark.parametrize("name", _NESTED)
def test_calls_inside_of_pytorch_s_kernels_below_a_dispatch_mode(name):
    """AOTAutograd runs the first call of a graph that has ops of a library in one, too.

    Seen to fail: given to the mode by PyTorch's name, below which sums were PyTorch's.
    """
    torch._dynamo.reset()
    function = _NESTED[name]

    def inside(x: Tensor) -> Tensor:
        with conv2d_ext.batch_invariant():
            return function(x)

    with torch.no_grad():
        compiled = torch.compile(inside, backend="aot_eager")
        for size in ((4, 6, 6), (40, 33, 33)):
            x = torch.randn(size)
            expected = inside(x)
            with Passes():
                assert torch.equal(inside(x), expected)
            assert all(torch.equal(compiled(x), expected) for _ in range(2))
