"""vmap of the four ops: every combination of batched arguments, no examples, autocast, traces."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import conv2d_ext
from conv2d_ext.testing import Problem, make_tensors

OPS = torch.ops.conv2d_ext

PROBLEMS = (
    Problem("plain", 2, 2, (3, 4), 3, (2, 3)),
    Problem("everything", 2, 4, (5, 6), 2, (3, 2), (2, 1), (1, 0), (1, 2), groups=2),
)
over_problems = pytest.mark.parametrize("problem", PROBLEMS, ids=str)
over_sizes = pytest.mark.parametrize("size", [0, 1, 3])


def _calls(problem, dtype=torch.float64):
    """Each op as a function of its tensors, and these."""
    input, weight, bias, grad_output = make_tensors(problem, dtype)
    args = problem.op_args()
    weight_size, weight_stride = list(weight.shape), list(weight.stride())
    return {
        "conv2d": (lambda x, w, b: OPS.conv2d(x, w, b, *args), (input, weight, bias)),
        "conv2d without a bias": (lambda x, w: OPS.conv2d(x, w, None, *args), (input, weight)),
        "conv2d of one image": (
            lambda x, w, b: OPS.conv2d(x, w, b, *args),
            (input[0], weight, bias),
        ),
        "conv2d_grad_input": (
            lambda g, w: OPS.conv2d_grad_input(g, w, list(input.shape), *args, False),
            (grad_output, weight),
        ),
        "conv2d_grad_input of one image": (
            lambda g, w: OPS.conv2d_grad_input(g, w, list(input.shape[1:]), *args, True),
            (grad_output[0], weight),
        ),
        "conv2d_grad_weight": (
            lambda g, x: OPS.conv2d_grad_weight(g, x, weight_size, weight_stride, *args),
            (grad_output, input),
        ),
        "conv2d_grad_weight of one image": (
            lambda g, x: OPS.conv2d_grad_weight(g, x, weight_size, weight_stride, *args),
            (grad_output[0], input[0]),
        ),
        "conv2d_grad_bias": (OPS.conv2d_grad_bias, (grad_output,)),
        "conv2d_grad_bias of one image": (OPS.conv2d_grad_bias, (grad_output[0],)),
    }


CALLS = tuple(_calls(PROBLEMS[0]))


def _stacked(tensors, in_dims, size):
    """Examples that differ, along each tensor's dimension of vmap."""
    return [
        t
        if dim is None
        else torch.stack([t * (i + 1) - i for i in range(size)], dim)
        if size
        else t.new_empty((*t.shape[:dim], 0, *t.shape[dim:]))
        for t, dim in zip(tensors, in_dims, strict=True)
    ]


def _one_by_one(function, tensors, in_dims, size):
    outputs = [
        function(
            *(
                t if dim is None else t.select(dim, i)
                for t, dim in zip(tensors, in_dims, strict=True)
            )
        )
        for i in range(size)
    ]
    return torch.stack(outputs)


@over_sizes
@over_problems
@pytest.mark.parametrize("name", CALLS)
def test_every_combination_of_batched_arguments(name, problem, size):
    function, tensors = _calls(problem)[name]
    expected_shape = (size, *function(*tensors).shape)
    for in_dims in itertools.product(*[(None, 0, t.dim()) for t in tensors]):
        if all(dim is None for dim in in_dims):
            continue
        stacked = _stacked(tensors, in_dims, size)
        actual = vmap(function, in_dims)(*stacked)
        assert actual.shape == expected_shape, in_dims
        assert actual.dtype == tensors[0].dtype
        if size:
            expected = _one_by_one(function, stacked, in_dims, size)
            torch.testing.assert_close(actual, expected, msg=lambda m, d=in_dims: f"{d}: {m}")


@over_sizes
@over_problems
def test_nested(problem, size):
    input, weight, bias, _ = make_tensors(problem, torch.float64)
    inputs, weights, biases = (
        torch.stack([t, t + 1]) for t in (input, weight, bias)
    )  # fmt: skip
    inputs = inputs.expand(size, *inputs.shape)

    def over_pairs(x):
        return vmap(lambda x, w, b: conv2d_ext.conv2d(x, w, b, **problem.call_args()))(
            x, weights, biases
        )

    actual = vmap(over_pairs)(inputs)
    one = over_pairs(torch.stack([input, input + 1]))
    torch.testing.assert_close(actual, one.expand(size, *one.shape))


def test_no_examples_have_derivatives():
    """Of no examples, the sum is 0 and so are the gradients of what all of them would share."""
    input, weight, bias = (
        torch.randn(shape, requires_grad=True) for shape in ((0, 2, 3, 6, 5), (4, 3, 3, 2), (0, 4))
    )
    output = vmap(conv2d_ext.conv2d, (0, None, 0))(input, weight, bias)
    assert output.shape == (0, 2, 4, 4, 4)
    output.sum().backward()
    assert input.grad.shape == input.shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert bias.grad.shape == bias.shape
    per_sample = vmap(grad(lambda w, x: conv2d_ext.conv2d(x, w).sum()), (None, 0))(weight, input)
    assert per_sample.shape == (0, *weight.shape)


@pytest.mark.parametrize("size", [0, 3])
def test_no_examples_are_checked_too(size):
    inputs, weight = torch.randn(size, 3, 8, 8), torch.randn(4, 2, 3, 3)
    with pytest.raises(RuntimeError, match=r"Given groups=1, weight of size \[4, 2, 3, 3\]"):
        vmap(lambda x: conv2d_ext.conv2d(x, weight))(inputs)


def test_gradients_are_checked_as_single_calls_are():
    """Folded, 2 examples of 3 output channels would be 6, which 2 groups divide."""
    args = ([1, 1], [0] * 4, [1, 1], 2)
    grad_output, input = torch.randn(2, 1, 3, 2, 2), torch.randn(1, 4, 4, 4)
    weight = torch.randn(3, 2, 3, 3)
    functions = (
        lambda g: OPS.conv2d_grad_weight(g, input, weight.shape, weight.stride(), *args),
        lambda g: OPS.conv2d_grad_input(g, weight, input.shape, *args, False),
    )
    for function in functions:
        with pytest.raises(RuntimeError, match="expected weight to be divisible by 2"):
            vmap(function)(grad_output)


class TestAutocast:
    """Under vmap, dtypes are those of a call without it."""

    @pytest.mark.parametrize("in_dims", list(itertools.product((None, 0), repeat=3))[1:], ids=str)
    @over_sizes
    def test_dtypes(self, in_dims, size):
        tensors = [torch.randn(s) for s in ((2, 3, 6, 5), (4, 3, 3, 2), (4,))]
        stacked = _stacked(tensors, in_dims, size)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = vmap(conv2d_ext.conv2d, in_dims)(*stacked)
            single = conv2d_ext.conv2d(*tensors)
            if size:
                expected = _one_by_one(conv2d_ext.conv2d, stacked, in_dims, size)
                # A bias of each example's own is added to a sum that is rounded already.
                torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-4)
        assert actual.dtype == single.dtype == torch.bfloat16
        assert actual.shape == (size, *single.shape)

    def test_layers_after_each_other(self):
        """The second one's input is in the lower precision already, its weight is not."""
        input, first, second = (
            torch.randn(s) for s in ((3, 2, 3, 8, 8), (4, 3, 3, 3), (5, 4, 3, 3))
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = vmap(lambda x: conv2d_ext.conv2d(conv2d_ext.conv2d(x, first), second))(input)
            flat = conv2d_ext.conv2d(conv2d_ext.conv2d(input.flatten(0, 1), first), second)
        assert torch.equal(actual, flat.unflatten(0, (3, 2)))

    @pytest.mark.parametrize("enabled", [False, True])
    def test_a_bias_of_another_dtype_is_refused(self, enabled):
        """Autocast leaves float64 alone, and so it fits nothing else."""
        input, weight, bias = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(5, 4)
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled),
            pytest.raises(RuntimeError, match=r"bias type .* should be the same"),
        ):
            vmap(lambda b: conv2d_ext.conv2d(input, weight, b))(bias.double())

    def test_per_sample_gradients(self):
        input, weight = torch.randn(3, 2, 3, 8, 8), torch.randn(4, 3, 3, 3)

        def gradient(weight, x):
            return grad(lambda w: conv2d_ext.conv2d(x, w).float().pow(2).sum())(weight)

        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = vmap(gradient, (None, 0))(weight, input)
            expected = torch.stack([gradient(weight, x) for x in input])
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=1e-1)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("tracing_mode", ["real", "symbolic"])
def test_traces_have_the_op_once(name, tracing_mode):
    """What checks a call leaves nothing behind in a graph."""
    function, tensors = _calls(PROBLEMS[0])[name]
    in_dims = (0,) * len(tensors)
    stacked = _stacked(tensors, in_dims, 3)
    traced = make_fx(vmap(function), tracing_mode=tracing_mode)(*stacked)
    ours = [node for node in traced.graph.nodes if "conv2d_ext" in str(node.target)]
    assert len(ours) == 1
    dead = [n for n in traced.graph.nodes if n.op == "call_function" and not n.users]
    assert not dead
    assert torch.equal(traced(*stacked), vmap(function)(*stacked))


def test_dtypes_are_those_of_pytorch_without_autocast():
    input, weight = torch.randn(3, 2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x, w = input.to(dtype), weight.to(dtype)
        ours = vmap(lambda x, w=w: conv2d_ext.conv2d(x, w))(x)
        assert ours.dtype == vmap(lambda x, w=w: F.conv2d(x, w))(x).dtype


@pytest.mark.parametrize("call", CALLS)
def test_subclasses_do_not_see_a_rules_own_calls(call):
    seen = []

    class Tagged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs)

    function, tensors = _calls(PROBLEMS[0])[call]
    vmap(function)(*(torch.stack([t, t]).as_subclass(Tagged) for t in tensors))
    assert not [name for name in seen if "conv2d" in name]


def test_no_examples_of_a_bias():
    weight = torch.randn(3, 5)
    call = torch.func.vmap(lambda bias: conv2d_ext.linear(torch.ones(2, 5), weight, bias))
    assert call(torch.randn(0, 3)).shape == (0, 2, 3)


def test_a_compiled_vmap_of_linear_is_one_product():
    """Seen to fail: without a batching rule for the op `linear`, a product for each example."""
    weight, x = torch.randn(3, 8), torch.randn(6, 4, 8)
    graphs = AotEagerAndRecordGraphs()
    call = torch.func.vmap(lambda x: conv2d_ext.linear(x, weight))
    assert torch.equal(torch.compile(call, backend=graphs)(x), conv2d_ext.linear(x, weight))
    (graph,) = graphs.fw_graphs
    targets = [str(node.target) for node in graph.graph.nodes]
    assert targets.count("conv2d_ext.matmul.default") == 1
