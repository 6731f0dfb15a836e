"""torch.func transforms, forward mode, vmap and autocast around conv2d."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import conv2d_ext

ARGUMENTS = (
    {},
    {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2), "groups": 2},
    {"padding": "same"},
)
over_arguments = pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)


def _operands(arguments, batch=2):
    generator = torch.Generator().manual_seed(3)
    groups = arguments.get("groups", 1)
    shapes = ((batch, 4, 5, 6), (2, 4 // groups, 3, 2), (2,))
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]


def _both(transform, arguments, *operands):
    """A transform of a loss made with each of the two convolutions."""

    def loss(convolution):
        return lambda *tensors: convolution(*tensors, **arguments).pow(2).sum()

    return transform(loss(conv2d_ext.conv2d))(*operands), transform(loss(F.conv2d))(*operands)


@over_arguments
@pytest.mark.parametrize("transform", [grad, jacrev, jacfwd, hessian], ids=lambda t: t.__name__)
@pytest.mark.parametrize("argnum", [0, 1, 2], ids=["input", "weight", "bias"])
def test_func(transform, argnum, arguments):
    ours, theirs = _both(
        lambda loss: transform(loss, argnums=argnum), arguments, *_operands(arguments)
    )
    torch.testing.assert_close(ours, theirs)


@over_arguments
def test_jvp_and_vjp(arguments):
    primals, tangents = tuple(_operands(arguments)), tuple(reversed(_operands(arguments)))
    tangents = tuple(torch.randn_like(p) for p in primals)
    for convolution in (conv2d_ext.conv2d, F.conv2d):
        outputs = jvp(lambda *t, f=convolution: f(*t, **arguments), primals, tangents)
        output, pullback = vjp(lambda *t, f=convolution: f(*t, **arguments), *primals)
        results = (*outputs, *pullback(torch.ones_like(output)))
        if convolution is conv2d_ext.conv2d:
            ours = results
    torch.testing.assert_close(ours, results)


IN_DIMS = ((0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0), (1, 2, None), (-1, 0, 0))


@over_arguments
@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
def test_vmap(in_dims, arguments):
    """With a batching rule: no loop, and so no performance warning."""
    operands = [
        t if dim is None else torch.stack([t, t * 2, t - 1], dim)
        for t, dim in zip(_operands(arguments), in_dims, strict=True)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = vmap(lambda *t: conv2d_ext.conv2d(*t, **arguments), in_dims)(*operands)
    slices = [
        F.conv2d(
            *(
                t if dim is None else t.select(dim, i)
                for t, dim in zip(operands, in_dims, strict=True)
            ),
            **arguments,
        )
        for i in range(3)
    ]
    torch.testing.assert_close(ours, torch.stack(slices))


@over_arguments
def test_vmap_of_unbatched_images(arguments):
    input, weight, bias = _operands(arguments, batch=3)
    ours = vmap(lambda x: conv2d_ext.conv2d(x, weight, bias, **arguments))(input)
    torch.testing.assert_close(ours, F.conv2d(input, weight, bias, **arguments))


@over_arguments
def test_per_sample_gradients(arguments):
    input, weight, bias = _operands(arguments, batch=3)

    def per_sample(convolution):
        def loss(weight, bias, x):
            return convolution(x[None], weight, bias, **arguments).pow(3).sum()

        return vmap(grad(loss, (0, 1)), (None, None, 0))(weight, bias, input)

    torch.testing.assert_close(per_sample(conv2d_ext.conv2d), per_sample(F.conv2d))


@over_arguments
def test_nested_vmap_and_ensembles(arguments):
    """A stack of models over a stack of inputs."""
    input, weight, bias = _operands(arguments)
    inputs = torch.stack([input, input + 1, input - 1])
    weights, biases = torch.stack([weight, weight * 2]), torch.stack([bias, bias + 1])

    def ensemble(convolution):
        def over_inputs(w, b):
            return vmap(lambda x: convolution(x, w, b, **arguments))(inputs)

        return vmap(over_inputs)(weights, biases)

    torch.testing.assert_close(ensemble(conv2d_ext.conv2d), ensemble(F.conv2d))


def test_functional_call_of_the_module():
    layer = conv2d_ext.Conv2d(4, 2, 3, dtype=torch.float64)
    input = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    parameters = {name: p.detach() * 2 for name, p in layer.named_parameters()}
    gradients = grad(lambda p: functional_call(layer, p, (input,)).pow(2).sum())(parameters)
    expected = grad(
        lambda p: F.conv2d(input, p["weight"], p["bias"]).pow(2).sum()
    )(parameters)  # fmt: skip
    torch.testing.assert_close(gradients, expected)


@over_arguments
def test_forward_mode_without_func(arguments):
    operands = _operands(arguments)
    tangents = [torch.randn_like(t) for t in operands]
    results = []
    for convolution in (conv2d_ext.conv2d, F.conv2d):
        with fwAD.dual_level():
            duals = [fwAD.make_dual(*pair) for pair in zip(operands, tangents, strict=True)]
            results.append(fwAD.unpack_dual(convolution(*duals, **arguments)).tangent)
    torch.testing.assert_close(*results)


def test_torch_function():
    """Tensor subclasses and modes see the call, as they see F.conv2d's."""
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Tagged(torch.Tensor):
        pass

    input, weight, bias = _operands({})
    with Watch():
        conv2d_ext.conv2d(input, weight, bias)
    assert conv2d_ext.conv2d in seen
    tagged = conv2d_ext.conv2d(input.as_subclass(Tagged), weight, bias, padding=1)
    assert isinstance(tagged, Tagged)
    torch.testing.assert_close(
        tagged.as_subclass(torch.Tensor), F.conv2d(input, weight, bias, padding=1)
    )


def _second_argument_last(function):
    def call(im, bias, kernel):
        return function(im, kernel, bias)

    return call


def test_torch_function_of_the_posts_functions():
    """fx records forward and forward_unfold, and subclasses come back from them."""
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Tagged(torch.Tensor):
        pass

    im, kernel, bias = torch.randn(2, 3, 6, 5), torch.randn(3, 4, 3, 2), torch.randn(4, 1)
    for function in (conv2d_ext.forward, conv2d_ext.forward_unfold):
        expected = function(im, kernel, bias)
        with Watch():
            function(im, kernel, bias)
        assert function in seen
        for which in range(3):
            tensors = [im, kernel, bias]
            tensors[which] = tensors[which].as_subclass(Tagged)
            tagged = function(*tensors)
            assert isinstance(tagged, Tagged)
            torch.testing.assert_close(tagged.as_subclass(torch.Tensor), expected)
        assert isinstance(function(im.as_subclass(Tagged), kernel, None), Tagged)
        traced = torch.fx.symbolic_trace(_second_argument_last(function))
        assert function in [node.target for node in traced.graph.nodes]
        torch.testing.assert_close(traced(im, bias, kernel), expected)


class TestAutocast:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_lower_precision_on_the_cpu(self, dtype):
        input, weight, bias = torch.randn(2, 4, 5, 6), torch.randn(2, 4, 3, 2), torch.randn(2)
        weight.requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            ours = conv2d_ext.conv2d(input, weight, bias)
            theirs = F.conv2d(input, weight, bias)
        assert ours.dtype == theirs.dtype == dtype
        torch.testing.assert_close(ours, theirs)
        ours.sum().backward()
        assert weight.grad.dtype == torch.float32

    def test_mixed_dtypes_meet(self):
        """Autocast brings a float32 weight and a bfloat16 activation together."""
        input, weight = torch.randn(2, 4, 5, 6).bfloat16(), torch.randn(2, 4, 3, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert conv2d_ext.conv2d(input, weight).dtype == torch.bfloat16

    def test_float64_stays(self):
        operands = [t.double() for t in (torch.randn(2, 4, 5, 6), torch.randn(2, 4, 3, 2))]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert conv2d_ext.conv2d(*operands).dtype == F.conv2d(*operands).dtype

    def test_disabled_inside(self):
        operands = torch.randn(2, 4, 5, 6), torch.randn(2, 4, 3, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
            assert conv2d_ext.conv2d(*operands).dtype == torch.float32

    @pytest.mark.parametrize("weighted", ["input", "weight"])
    def test_derivatives_of_what_was_computed_outside(self, weighted):
        """Autocast casts what is called under it, not what a backward pass calls."""
        problem = {"stride": (2, 1), "padding": (1, 0), "groups": 2}
        input, weight, bias = (t.float().requires_grad_() for t in _operands(problem))
        leaves = [input, weight, bias]

        def derivatives(convolution, first, second):
            output = convolution(*leaves, **problem)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=first):
                wanted = input if weighted == "input" else weight
                (penalized,) = torch.autograd.grad(output.pow(3).sum(), wanted, create_graph=True)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=second):
                twice = torch.autograd.grad(penalized.pow(3).sum(), leaves, create_graph=True)
                thrice = torch.autograd.grad(sum(g.pow(2).sum() for g in twice), leaves)
            return [penalized, *twice, *thrice]

        outside = derivatives(conv2d_ext.conv2d, False, False)
        for where in ((True, False), (False, True), (True, True)):
            for actual, expected in zip(
                derivatives(conv2d_ext.conv2d, *where), outside, strict=True
            ):
                assert torch.equal(actual, expected)
        for actual, theirs in zip(outside, derivatives(F.conv2d, True, True), strict=True):
            torch.testing.assert_close(actual, theirs, rtol=1e-4, atol=1e-4)

    def test_derivatives_by_torch_func_of_what_was_computed_outside(self):
        input, weight, _ = (t.float() for t in _operands({}))

        def penalty(enabled):
            def first(x):
                with torch.autocast("cpu", enabled=False):
                    output, pullback = vjp(lambda x: conv2d_ext.conv2d(x, weight).pow(3), x)
                return pullback(torch.ones_like(output))[0].pow(2).sum()

            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                reverse = vmap(grad(first))(input)
                forward = jvp(grad(first), (input,), (torch.ones_like(input),))
            return [reverse, *forward]

        for actual, expected in zip(penalty(True), penalty(False), strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("convolution", [F.conv2d, conv2d_ext.conv2d], ids=["aten", "ours"])
def test_gradients_outlive_their_transform_without_a_history(convolution):
    """The pullback runs after its level has ended; a history would keep the whole graph alive."""
    input, weight = torch.randn(2, 3, 5, 6), torch.randn(4, 3, 2, 2)
    output, pull = torch.func.vjp(convolution, input, weight)
    assert [t.requires_grad for t in pull(torch.ones_like(output))] == [False, False]
    output, pull = torch.func.vjp(lambda x: convolution(x, weight), input)
    assert [t.requires_grad for t in pull(torch.ones_like(output))] == [False]
