"""Pointwise ops: an element's bits follow from its value alone, and are as good as PyTorch's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pointwise_bits
import pytest
import torch
import torch.nn.functional as F
from child import run_forked
from pointwise_bits import DTYPES, FUNCTIONS, bits, special_values
from torch import Tensor
from torch_versions import not_in_older

import conv2d_ext
from conv2d_ext.ops import pointwise, pointwise_grad, pointwise_pair

CALLS = [(name, parameters) for name, sets in FUNCTIONS.items() for parameters in sets]
IDS = [f"{name}{list(parameters) or ''}" for name, parameters in CALLS]
each_call = pytest.mark.parametrize(("name", "parameters"), CALLS, ids=IDS)


@dataclasses.dataclass(frozen=True)
class Like:
    """PyTorch's function, and how far float32 results may be from it in float64."""

    torch: Callable[..., Tensor]
    ulps: float | None = None  # in the last place, where no factor of the result is subnormal
    error: float = 2e-7  # of values and derivatives, absolute up to 1, relative above


LIKE = {
    "sigmoid": Like(torch.sigmoid, 2.5),
    "silu": Like(F.silu, 3),
    "gelu": Like(F.gelu, error=3e-7),
    "gelu_tanh": Like(lambda x: F.gelu(x, approximate="tanh"), error=5e-7),
    "tanh": Like(torch.tanh, 1.5),
    "exp": Like(torch.exp, 1),
    "erf": Like(torch.erf, 1.5),
    "softplus": Like(lambda x, beta, threshold: F.softplus(x, beta, threshold), 3),
    "mish": Like(F.mish, 3.5, error=3e-7),
    "elu": Like(torch.ops.aten.elu, 2.5),
    "softshrink": Like(F.softshrink, 0.51),
    "sqrt": Like(torch.sqrt, 0.51),
    "rsqrt": Like(torch.rsqrt, 1.5),
    "exp_base": Like(lambda x, base: torch.pow(base, x), 0.51),
    "pow": Like(torch.pow, 0.51),
    "sinh": Like(torch.sinh, 0.51),
    "cosh": Like(torch.cosh, 0.51),
    "atanh": Like(torch.atanh, 0.51),
    "logit": Like(lambda x, eps: torch.logit(x, None if eps < 0 else eps), 0.51),
}
PAIRS = {
    "pow": torch.pow,
    "atan2": torch.atan2,
    "logaddexp": torch.logaddexp,
    "logaddexp2": torch.logaddexp2,
}
over_pairs = pytest.mark.parametrize("name", PAIRS)
# PyTorch's formulas for pow with these have a result of their own at -0.
_INSIDE = ("atanh", "logit")
_SAMPLES_ABOVE_ZERO = ("sqrt", "rsqrt", "pow", "logit")


def _samples(name: str) -> Tensor:
    """Dense where functions bend, and over all exponents of float32."""
    steps = torch.arange(0x00800000, 0x7F800000, 4999, dtype=torch.int32).view(torch.float32)
    x = torch.cat([torch.linspace(-110, 110, 100001), torch.linspace(-2, 2, 100001), steps, -steps])
    return x.abs() if name in _SAMPLES_ABOVE_ZERO else x


def _derivative(function: Callable[..., Tensor], x: Tensor, parameters: tuple) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x, *parameters).sum(), x)[0]


def _error(actual: Tensor, exact: Tensor) -> float:
    """The largest, absolute up to 1 and relative above, of results that float32 can hold."""
    fits = exact.abs() < torch.finfo(torch.float32).max
    return ((actual.double() - exact).abs() / exact.abs().clamp(min=1))[fits].max().item()


@each_call
def test_values_are_close_to_float64(name, parameters):
    x = _samples(name)
    actual = pointwise(x, name, parameters)
    exact = LIKE[name].torch(x.double(), *parameters)
    assert _error(actual, exact) <= LIKE[name].error
    finfo = torch.finfo(torch.float32)
    overflows = exact.abs() >= finfo.max * (1 + finfo.eps)
    assert torch.equal(actual[overflows].double(), exact[overflows].float().double())
    if LIKE[name].ulps is not None:
        normal = (exact.abs() >= 2**10 * finfo.tiny) & (exact.abs() < finfo.max)
        size = torch.exp2(torch.floor(torch.log2(exact[normal].abs()))) * finfo.eps
        ulps = (actual[normal].double() - exact[normal]).abs() / size
        assert ulps.max().item() <= LIKE[name].ulps


@each_call
def test_derivatives_are_close_to_float64(name, parameters):
    x = torch.linspace(-30, 30, 60001)
    x = x.abs() + 1e-3 if name in _SAMPLES_ABOVE_ZERO else x
    x = x / 31 if name in _INSIDE else x
    actual = pointwise_grad(torch.ones_like(x), x, name, parameters)
    exact = _derivative(LIKE[name].torch, x.double(), parameters)
    assert _error(actual, exact) <= 3 * LIKE[name].error


@each_call
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(name, parameters, dtype):
    """float64 to its own accuracy; 16-bit types are float32's results, rounded once."""
    x = torch.linspace(-9, 9, 4001).to(dtype)
    x = x.abs() + 2**-6 if name in _SAMPLES_ABOVE_ZERO else x
    x = x / 10 if name in _INSIDE else x
    g = torch.randn(x.shape).to(dtype)
    value, slope = pointwise(x, name, parameters), pointwise_grad(g, x, name, parameters)
    assert value.dtype == slope.dtype == dtype
    if dtype == torch.float64:
        torch.testing.assert_close(value, LIKE[name].torch(x, *parameters), rtol=1e-13, atol=1e-15)
        expected = g * _derivative(LIKE[name].torch, x, parameters)
        torch.testing.assert_close(slope, expected, rtol=1e-11, atol=1e-13)
    else:
        assert torch.equal(bits(value), bits(pointwise(x.float(), name, parameters).to(dtype)))
        wide = pointwise_grad(g.float(), x.float(), name, parameters)
        assert torch.equal(bits(slope), bits(wide.to(dtype)))


@each_call
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_special_values_are_those_of_torch(name, parameters, dtype):
    """Zeros with their signs, infinities, NaNs; and the derivatives where pieces meet."""
    if name in ("sqrt", "rsqrt") or (name == "pow" and parameters[0] == -0.5):
        x = torch.tensor([0.0, math.inf, -1.0, math.nan], dtype=dtype)
    else:
        x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan], dtype=dtype)
    actual = pointwise(x, name, parameters)
    # In float64: which loop of float32 runs is a matter of layout, and oneDNN's gelu(inf) is a NaN.
    expected = LIKE[name].torch(x.double(), *parameters).to(dtype)
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    if (
        name == "softshrink"
    ):  # PyTorch's zeros have the sign of the vector loop or of the scalar one
        assert torch.equal(actual[~nan], expected[~nan])
    else:
        close = torch.where(expected.abs() > 1e-30, expected, actual)
        torch.testing.assert_close(actual[~nan], close[~nan])
        assert torch.equal(actual[~nan].signbit(), expected[~nan].signbit())
    edges = {"softplus": [20.0, 10.0, 10.001], "elu": [0.0, -0.0], "softshrink": [0.5, -0.5, 0.0]}
    if name in edges:
        x = torch.tensor(edges[name], dtype=dtype)
        ours = pointwise_grad(torch.ones_like(x), x, name, parameters)
        torch.testing.assert_close(ours, _derivative(LIKE[name].torch, x, parameters))


@each_call
@pytest.mark.parametrize("dtype", DTYPES)
def test_place_changes_no_bit(name, parameters, dtype):
    pointwise_bits.assert_place_changes_no_bit(name, parameters, dtype)


@each_call
def test_threads_change_no_bit(name, parameters):
    x = torch.randn(3, 50021)
    x = x.abs() if name in _SAMPLES_ABOVE_ZERO else x
    g = torch.randn(3, 50021)
    torch.set_num_threads(1)
    value, slope = pointwise(x, name, parameters), pointwise_grad(g, x, name, parameters)
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        assert torch.equal(bits(pointwise(x, name, parameters)), bits(value))
        assert torch.equal(bits(pointwise_grad(g, x, name, parameters)), bits(slope))


def test_flushed_denormals_reach_every_thread():
    x = torch.full((100003,), -100.0)  # e^-100 is subnormal
    torch.set_num_threads(4)
    assert pointwise(x, "exp", []).count_nonzero() == x.numel()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU can't flush denormal numbers")
    try:
        assert pointwise(x, "exp", []).count_nonzero() == 0
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.slow
def test_every_instruction_set_gives_the_same_bits():
    digests = {}
    for isa in conv2d_ext.build_config()["compiled_isas"]:
        done = run_forked(pointwise_bits.__file__, env={"CONV2D_EXT_CPU_ISA": isa})
        if done.returncode and "this CPU" in done.stderr:
            continue
        assert done.returncode == 0, done.stderr
        used, digests[isa] = done.stdout.split("\n", 1)
        assert used == isa
    assert "portable" in digests
    assert len(set(digests.values())) == 1


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "sliced": lambda x: x[:, 1:, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 6, -1, -1),
    "one element": lambda x: x[0, 0, 0, 0],
    "empty": lambda x: x[:0],
    "reversed in memory": lambda x: x.permute(3, 2, 1, 0)[1:],
}


def _meta(x: Tensor) -> Tensor:
    return x.to("meta").as_strided(x.shape, x.stride())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_and_values_of_layouts(layout):
    """Strides are those of PyTorch's unary functions; meta tensors have the same."""
    x = LAYOUTS[layout](torch.randn(3, 5, 7, 11))
    result = pointwise(x, "sigmoid", [])
    assert result.stride() == torch.sigmoid(x).stride()
    assert torch.equal(bits(result), bits(pointwise(x.contiguous(), "sigmoid", [])))
    assert pointwise(_meta(x), "sigmoid", []).stride() == result.stride()


@pytest.mark.parametrize("dense", ["neither", "grad_output", "input"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_layouts(layout, dense):
    """Two arguments choose the strides together, as in PyTorch's gradients of sigmoid."""
    g, x = (LAYOUTS[layout](torch.randn(3, 5, 7, 11)) for _ in range(2))
    values = pointwise_grad(g.contiguous(), x.contiguous(), "sigmoid", [])
    g = g.contiguous() if dense == "grad_output" else g
    x = x.contiguous() if dense == "input" else x
    slope = pointwise_grad(g, x, "sigmoid", [])
    assert slope.stride() == torch.ops.aten.sigmoid_backward(g, x).stride()
    assert torch.equal(bits(slope), bits(values))
    assert pointwise_grad(_meta(g), _meta(x), "sigmoid", []).stride() == slope.stride()


def _gradcheck_input(name: str) -> Tensor:
    # Away from the points where pieces meet.
    x = torch.tensor([-1.7, -0.9, -0.3, 0.2, 0.45, 0.8, 1.9], dtype=torch.float64)
    if name in _SAMPLES_ABOVE_ZERO:
        x = x.abs()
    return (x / 2.1 if name in _INSIDE else x).requires_grad_()


@each_call
def test_gradients_of_both_orders(name, parameters):
    x = _gradcheck_input(name)
    torch.autograd.gradcheck(lambda x: pointwise(x, name, parameters), x, check_forward_ad=True)
    torch.autograd.gradgradcheck(
        lambda x: pointwise(x, name, parameters), x, check_fwd_over_rev=True
    )
    g = torch.randn(7, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(
        lambda g, x: pointwise_grad(g, x, name, parameters), (g, x), check_forward_ad=True
    )
    torch.autograd.gradgradcheck(lambda g, x: pointwise_grad(g, x, name, parameters), (g, x))


def test_gradient_of_the_input_alone():
    """Of pointwise_grad, whose node then has no use for the other argument's."""
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    g = torch.randn(5, dtype=torch.float64)
    torch.autograd.gradcheck(lambda x: pointwise_grad(g, x, "silu", []), x)


@each_call
def test_opcheck(name, parameters):
    x = _gradcheck_input(name).detach().float().requires_grad_()
    g = torch.randn(7, requires_grad=True)
    torch.library.opcheck(pointwise, (x, name, list(parameters)))
    torch.library.opcheck(pointwise_grad, (g, x, name, list(parameters)))


def test_transforms():
    x, g = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)

    def silu(x):
        return pointwise(x, "silu", [])

    def slope(g, x):
        return pointwise_grad(g, x, "silu", [])

    vmap = torch.func.vmap
    assert torch.equal(vmap(silu, in_dims=1, out_dims=1)(x), silu(x))
    assert torch.equal(vmap(slope, in_dims=(None, 0))(g, x), slope(g.expand(4, 6), x))
    assert torch.equal(vmap(slope, in_dims=(0, None))(x, g), slope(x, g.expand(4, 6)))
    assert torch.equal(vmap(slope, in_dims=(0, 1))(x, x.T), slope(x, x))
    torch.testing.assert_close(
        torch.func.hessian(lambda x: silu(x).sum())(g),
        torch.func.hessian(lambda x: F.silu(x).sum())(g),
    )
    torch.testing.assert_close(
        torch.func.jvp(torch.func.grad(lambda x: silu(x).sum()), (g,), (g,)),
        torch.func.jvp(torch.func.grad(lambda x: F.silu(x).sum()), (g,), (g,)),
    )


@pytest.mark.slow
def test_compiled():
    """By Inductor, which leaves the op alone: the bits of the eager call."""

    def function(x):
        return pointwise(x * 2, "silu", []) + 1

    x = torch.randn(3, 37, requires_grad=True)
    compiled = torch.compile(function, fullgraph=True)
    assert torch.equal(bits(compiled(x)), bits(function(x)))
    g = torch.randn(3, 37)
    ours, theirs = (torch.autograd.grad(f(x), x, g)[0] for f in (compiled, function))
    assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.slow
def test_compiled_autograd():
    x = torch.randn(3, 37, requires_grad=True)

    def gradient():
        x.grad = None
        pointwise(x, "softplus", [2.0, 20.0]).square().sum().backward()
        return x.grad

    expected = gradient()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        assert torch.equal(gradient(), expected)


def test_autocast_leaves_it_alone():
    with torch.autocast("cpu", torch.bfloat16):
        assert pointwise(torch.randn(3), "silu", []).dtype == torch.float32


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_errors(where):
    x = torch.ones(3, device=where)
    with pytest.raises(ValueError, match=r"expected function to be one of sigmoid, .*'relu'"):
        pointwise(x, "relu", [])
    with pytest.raises(ValueError, match="expected 2 parameters of softplus, but got 1"):
        pointwise(x, "softplus", [1.0])
    with pytest.raises(NotImplementedError, match=r"expected input to be float32.*Int"):
        pointwise(x.int(), "exp", [])
    with pytest.raises(RuntimeError, match=r"input's size \[3\], but got \[2\]"):
        pointwise_grad(x[:2], x, "exp", [])
    with pytest.raises(RuntimeError, match="input's dtype Float, but got Double"):
        pointwise_grad(x.double(), x, "exp", [])


class TestPairs:
    @over_pairs
    def test_values_are_close_to_float64(self, name):
        generator = torch.Generator().manual_seed(0)
        x, y = (torch.randn(200001, generator=generator) * 8 for _ in range(2))
        x = x.abs() if name == "pow" else x
        actual, exact = pointwise_pair(x, y, name), PAIRS[name](x.double(), y.double())
        finfo = torch.finfo(torch.float32)
        normal = (exact.abs() >= 2**10 * finfo.tiny) & (exact.abs() < finfo.max)
        size = torch.exp2(torch.floor(torch.log2(exact[normal].abs()))) * finfo.eps
        assert ((actual[normal].double() - exact[normal]).abs() / size).max() <= 0.51
        assert torch.equal(actual[~normal], exact[~normal].float())
        short = pointwise_pair(x.bfloat16(), y.bfloat16(), name)
        wide = pointwise_pair(x.bfloat16().float(), y.bfloat16().float(), name).bfloat16()
        assert torch.equal(bits(short), bits(wide))

    @over_pairs
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_special_values_and_places(self, name, dtype):
        x, y = pointwise_bits.pair_values(dtype)
        actual, expected = pointwise_pair(x, y, name), PAIRS[name](x.double(), y.double()).to(dtype)
        if dtype in (torch.float16, torch.bfloat16):
            expected = PAIRS[name](x.double(), y.double()).float().to(dtype)
        assert torch.equal(actual.isnan(), expected.isnan())
        kept = ~expected.isnan()
        eps = torch.finfo(dtype).eps
        # A logarithm's sum cancels, to the accuracy of float64.
        atol = 4 * torch.finfo(torch.float64).eps if "log" in name else 0
        torch.testing.assert_close(actual[kept], expected[kept], rtol=2 * eps, atol=atol)
        zeros = kept & (expected == 0) & ("log" not in name)
        assert torch.equal(actual[zeros].signbit(), expected[zeros].signbit())
        pointwise_bits.assert_place_changes_no_bit_of_pairs(name, dtype)

    @over_pairs
    def test_derivatives_and_transforms(self, name):
        x = torch.tensor([0.3, 1.7, 2.0, 0.9], dtype=torch.float64, requires_grad=True)
        y = torch.tensor([-1.3, 0.4, 3.0, 0.2], dtype=torch.float64, requires_grad=True)

        def run(x, y):
            return pointwise_pair(x, y, name)

        torch.autograd.gradcheck(run, (x, y), check_forward_ad=True)
        torch.autograd.gradgradcheck(run, (x, y))
        torch.autograd.gradcheck(lambda y: run(x.detach(), y), (y,))
        torch.library.opcheck(pointwise_pair, (x.float(), y.float(), name))
        rows = torch.stack((x, y)).detach()
        for dims in ((0, None), (None, 0), (0, 0)):
            args = [rows if dim == 0 else rows[0] for dim in dims]
            ours = torch.func.vmap(run, in_dims=dims)(*args)
            theirs = torch.func.vmap(PAIRS[name], in_dims=dims)(*args)
            torch.testing.assert_close(ours, theirs, equal_nan=True)

    @over_pairs
    def test_the_mode_takes_what_pytorch_does(self, name):
        function = PAIRS[name]
        x, y = torch.rand(3, 1, 5) + 0.5, torch.rand(4, 1) + 0.5
        pairs = [
            (x, y),
            (x, y.double()),
            (x.bfloat16(), y[:1, 0].squeeze()),
            (torch.arange(1, 4), torch.rand(3)),
            (x.contiguous().transpose(0, 2), y),
            (torch.arange(3), torch.arange(3)),
            (x[:0], y),
        ]
        for a, b in pairs:
            try:
                expected = function(a, b)
            except NotImplementedError:
                with conv2d_ext.batch_invariant(), pytest.raises(NotImplementedError):
                    function(a, b)
                continue
            with conv2d_ext.batch_invariant():
                found = function(a, b)
                if a.is_floating_point():
                    out = function(a, b, out=torch.empty(0, dtype=expected.dtype))
                    assert torch.equal(out, found)
            torch.testing.assert_close(found, expected)
            assert found.stride() == expected.stride()
        leaves = [torch.rand(3, 4).add(0.5).requires_grad_(), torch.rand(4).requires_grad_()]
        for call in (
            function,
            lambda a, b: getattr(a * 1, f"{name}_", lambda b: function(a, b))(b),
        ):
            expected = torch.autograd.grad(call(*leaves).sum(), leaves)
            with conv2d_ext.batch_invariant():
                found = torch.autograd.grad(call(*leaves).sum(), leaves)
            for mine, right in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, right)
        with conv2d_ext.batch_invariant(), pytest.raises(RuntimeError, match="must match the size"):
            function(torch.rand(3), torch.rand(4))

    @not_in_older
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("values", [(0.0, 0.0), (0.0, 1e-30), (-0.0, -0.0)])
    def test_the_angle_of_a_point_at_zero_has_no_gradient(self, values, dtype):
        """As in PyTorch, also where its distance's square underflows."""
        leaves = [torch.tensor([value], dtype=dtype, requires_grad=True) for value in values]
        expected = torch.autograd.grad(torch.atan2(*leaves), leaves)
        found = torch.autograd.grad(pointwise_pair(*leaves, "atan2"), leaves)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)

    def test_errors(self):
        x = torch.rand(3)
        with pytest.raises(ValueError, match=r"one of pow, atan2, .*, but got 'add'"):
            pointwise_pair(x, x, "add")
        with pytest.raises(RuntimeError, match="expected second of first's size"):
            pointwise_pair(x, x[:2], "pow")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [math.inf, -math.inf, math.nan, 0.0, -3.0, 2.0**40 + 1])
def test_powers_with_any_exponent_are_the_c_library_s(exponent, dtype):
    """A vector of numbers, and a rest of some."""
    x = torch.tensor([1.0, -1.0, 0.5, -2.0, 0.0, -0.0, math.inf, -math.inf, math.nan] * 3)
    x = x.to(dtype)
    actual, expected = pointwise(x, "pow", [exponent]), x.double().pow(exponent).to(dtype)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    number = ~expected.isnan()
    assert torch.equal(actual[number].signbit(), expected[number].signbit())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("eps", [0.0, 0.3, 0.5, 0.7, 1.0])
def test_logit_s_limits_may_cross(eps, dtype):
    x = torch.tensor([-1.0, 0.0, 0.2, 0.4, 0.6, 0.9, 1.0, 2.0, torch.nan], dtype=dtype)
    torch.testing.assert_close(
        pointwise(x, "logit", [eps]), torch.logit(x.double(), eps).to(dtype), equal_nan=True
    )


def test_special_values_have_every_kind():
    """What the instruction sets are compared over."""
    x = special_values(torch.float32)
    assert x.isnan().any()
    assert x.isinf().any()
    assert ((x != 0) & (x.abs() < torch.finfo(torch.float32).tiny)).any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.int32, torch.complex64], ids=str)
def test_pairs_of_other_dtypes_are_refused(dtype):
    ones = torch.ones(2, 3).to(dtype)
    with pytest.raises(NotImplementedError, match="expected first to be float32"):
        pointwise_pair(ones, ones, "atan2")
