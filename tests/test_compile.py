"""Tracing: opcheck of every op, torch.compile without graph breaks, compiled autograd."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs
from torch_versions import not_in_older

import conv2d_ext
from conv2d_ext.testing import Problem, make_tensors

OPS = torch.ops.conv2d_ext

PROBLEMS = (
    Problem("plain", 2, 2, (4, 5), 3, (2, 3)),
    Problem("everything", 2, 4, (5, 6), 2, (3, 2), (2, 1), (1, 0), (1, 2), groups=2, bias=False),
    Problem("four paddings", 1, 2, (4, 5), 3, (2, 3), padding=(0, 1, 2, 1)),
)
over_formats = pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last], ids=str
)


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@over_formats
@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_opcheck(problem, requires_grad, memory_format):
    """Schema, fake kernels, autograd registration and AOT dispatch with dynamic shapes."""
    input, weight, bias, grad_output = (
        t if t is None else t.requires_grad_(requires_grad)
        for t in make_tensors(problem, memory_format=memory_format)
    )
    args = problem.op_args()
    channels_last = memory_format is torch.channels_last
    torch.library.opcheck(OPS.conv2d, (input, weight, bias, *args))
    torch.library.opcheck(
        OPS.conv2d_grad_input,
        (grad_output, weight, list(problem.input_shape), *args, channels_last),
    )
    torch.library.opcheck(
        OPS.conv2d_grad_weight,
        (grad_output, input, list(problem.weight_shape), list(weight.stride()), *args),
    )
    torch.library.opcheck(OPS.conv2d_grad_bias, (grad_output,))


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        conv2d_ext.Conv2d(3, 8, 3, padding="same"),
        torch.nn.ReLU(),
        conv2d_ext.Conv2d(8, 8, (3, 2), stride=(2, 1), padding=(1, 0), groups=2),
        conv2d_ext.Conv2d(8, 4, 1),
    )


def _step(model, input) -> list[torch.Tensor]:
    model.zero_grad()
    input = input.detach().requires_grad_()
    output = model(input)
    output.pow(2).mean().backward()
    return [output.detach(), input.grad, *(p.grad for p in model.parameters())]


@over_formats
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_is_one_graph_with_the_same_results(dynamic, memory_format):
    model = _model().to(memory_format=memory_format)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, dynamic=dynamic, backend=counter)
    for batch, height, width in ((2, 9, 8), (3, 12, 7), (5, 6, 11)):
        input = torch.randn(batch, 3, height, width).to(memory_format=memory_format)
        for actual, expected in zip(_step(compiled, input), _step(model, input), strict=True):
            assert torch.equal(actual, expected)
            assert actual.stride() == expected.stride()
    if dynamic:
        assert counter.frame_count == 1, "recompiled for another size"


@pytest.mark.parametrize(
    ("function", "weight_size"),
    [
        ("conv1d", (3, 4, 2)),
        ("conv2d", (3, 4, 2, 2)),
        ("conv_transpose1d", (4, 3, 2)),
        ("conv_transpose2d", (4, 3, 2, 2)),
        ("linear", (3, 4)),
    ],
)
def test_a_compiled_call_copies_nothing(function, weight_size):
    """The graph has the op and nothing else, whatever the strides. (The functions of the layers:
    test_layers.py says what becomes of the op.)

    Seen to fail: with a clone and with a contiguous() of the input or the weight before the op.
    """
    weight = torch.randn(*weight_size, 2)[..., 0]
    input = torch.randn(2, *[4] * (len(weight_size) - 1), 2)[..., 0]
    bias = torch.randn(3, 2)[:, 0]
    backend = EagerAndRecordGraphs()
    call = getattr(conv2d_ext, function)
    torch.compile(call, fullgraph=True, backend=backend)(input, weight, bias)
    [graph] = backend.graphs
    called = [node.target for node in graph.graph.nodes if node.op.startswith("call")]
    assert called == [getattr(OPS, function)]


def test_dynamic_sizes_without_a_guard_on_them():
    """The batch, height and width of an exported program stay free.

    From 8 on: where an output may have a size of one, torch specialises its strides.
    """
    model = _model().eval()
    batch, height, width = (
        torch.export.Dim(name, min=8, max=64) for name in ("batch", "height", "width")
    )
    program = torch.export.export(
        model, (torch.randn(8, 3, 9, 11),), dynamic_shapes=({0: batch, 2: height, 3: width},)
    )
    input = torch.randn(9, 3, 17, 21)
    assert torch.equal(program.module()(input), model(input))


def test_compiled_autograd():
    model = _model()
    input = torch.randn(2, 3, 9, 8)
    expected = _step(model, input)
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        actual = _step(model, input)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_compiled_autograd_of_second_derivatives():
    input = torch.randn(2, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, 2, 3, dtype=torch.float64, requires_grad=True)

    def second():
        input.grad = weight.grad = None
        output = conv2d_ext.conv2d(input, weight).pow(3).sum()
        gradients = torch.autograd.grad(output, (input, weight), create_graph=True)
        sum(g.pow(2).sum() for g in gradients).backward()
        return [input.grad, weight.grad]

    expected = second()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        actual = second()
    torch.testing.assert_close(actual, expected)


def test_make_fx_records_the_ops():
    problem = PROBLEMS[0]
    input, weight, _, _ = make_tensors(problem)

    def gradients(input, weight):
        loss = conv2d_ext.conv2d(input, weight).sum()
        return torch.autograd.grad(loss, (input, weight))

    graph = torch.fx.experimental.proxy_tensor.make_fx(gradients)(
        input.requires_grad_(), weight.requires_grad_()
    )
    targets = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert {
        "conv2d_ext.conv2d.default",
        "conv2d_ext.conv2d_grad_input.default",
        "conv2d_ext.conv2d_grad_weight.default",
    } <= targets


@pytest.mark.parametrize(
    "arguments",
    [
        {"stride": True},
        {"stride": (True, 1)},
        {"padding": True},
        {"dilation": [True, 1]},
        {"groups": True},
        {"stride": 1.0},
        {"padding": (0.0, 1)},
        {"stride": "1"},
        {"stride": None},
        {"groups": None},
    ],
    ids=str,
)
def test_compiled_calls_refuse_what_eager_ones_refuse(arguments):
    input, weight = torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3)

    def call(input, weight):
        return conv2d_ext.conv2d(input, weight, **arguments)

    for function in (call, torch.compile(call, backend="eager")):
        with pytest.raises(TypeError, match="invalid combination of arguments"):
            function(input, weight)


@pytest.mark.parametrize("integer", [
    2, np.int64(2), [np.int64(2), 1], (2,), pytest.param(torch.tensor(2), marks=not_in_older),
])  # fmt: skip
def test_compiled_calls_take_the_integers_that_eager_ones_take(integer):
    input, weight = torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3)
    compiled = torch.compile(
        lambda x, w: conv2d_ext.conv2d(x, w, stride=integer), backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(input, weight), conv2d_ext.conv2d(input, weight, stride=integer))


def test_convert_after_compilation(caplog):
    """torch.compile's guards don't see a layer's class. convert and revert say so, and what makes
    them seen."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    backend = EagerAndRecordGraphs()
    compiled = torch.compile(model, backend=backend)
    input = torch.randn(2, 3, 5, 5)
    for change, is_ours in ((None, False), (conv2d_ext.convert, True), (conv2d_ext.revert, False)):
        if change is not None:
            caplog.clear()
            change(model)
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            assert "torch.compiler.reset()" in caplog.text
            torch.compiler.reset()
        compiled(input)
        called = {node.target for node in backend.graphs[-1].graph.nodes}
        assert (OPS.conv2d in called) == is_ours
