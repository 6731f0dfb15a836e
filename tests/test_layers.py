"""Conv1d, ConvTranspose1d, ConvTranspose2d and Linear as drop-in layers; convert and revert of all.

What Conv2d alone shows, and convert of it, is in test_modules.py.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle

import pytest
import torch
from observing import Recorder
from torch import fx, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.ao import quantization
from torch.nn.utils import parametrizations, parametrize

import conv2d_ext

CLASSES = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.Linear)
CONSTRUCTIONS = {
    "conv1d": (nn.Conv1d, (4, 6, 3), {}),
    "conv1d, everything": (
        nn.Conv1d,
        (4, 6, 3),
        {"stride": 2, "padding": 3, "dilation": 2, "groups": 2, "bias": False},
    ),
    "conv1d, same": (nn.Conv1d, (4, 6, 4), {"padding": "same", "dilation": 3}),
    "conv1d, valid": (nn.Conv1d, (4, 6, 3), {"padding": "valid"}),
    "conv1d, reflect": (nn.Conv1d, (4, 6, 3), {"padding": 2, "padding_mode": "reflect"}),
    "conv1d, same, circular": (
        nn.Conv1d,
        (4, 6, 4),
        {"padding": "same", "padding_mode": "circular"},
    ),
    "conv_transpose1d": (nn.ConvTranspose1d, (4, 6, 3), {}),
    "conv_transpose1d, everything": (
        nn.ConvTranspose1d,
        (4, 6, 3),
        {"stride": 3, "padding": 1, "output_padding": 2, "groups": 2, "dilation": 2},
    ),
    "conv_transpose2d": (nn.ConvTranspose2d, (4, 6, (3, 2)), {}),
    "conv_transpose2d, no bias": (nn.ConvTranspose2d, (4, 6, (3, 2)), {"bias": False}),
    "conv_transpose2d, everything": (
        nn.ConvTranspose2d,
        (4, 6, (3, 2)),
        {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2), "groups": 2,
         "dilation": (1, 2)},
    ),
    "conv2d": (nn.Conv2d, (4, 6, (3, 2)), {"padding": (1, 0)}),
    "linear": (nn.Linear, (4, 6), {}),
    "linear, no bias": (nn.Linear, (4, 6), {"bias": False}),
}  # fmt: skip
over_constructions = pytest.mark.parametrize("name", CONSTRUCTIONS)
over_classes = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same'"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is"),
]


def make(name: str, module=nn, **changes) -> nn.Module:
    cls, args, kwargs = CONSTRUCTIONS[name]
    torch.manual_seed(0)
    kwargs = {"dtype": torch.float64, **kwargs, **changes}
    return getattr(module, cls.__name__)(*args, **kwargs)


def input_of(layer: nn.Module) -> torch.Tensor:
    """A batch of 2, whatever the layer."""
    generator = torch.Generator().manual_seed(1)
    shape = {"1": (2, 4, 9), "2": (2, 4, 7, 9)}.get(layer._get_name()[-2:-1], (2, 5, 4))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def layer_of(cls: type[nn.Module]) -> nn.Module:
    """A layer of the class, of torch.nn's."""
    return make(next(name for name, (kind, *_) in CONSTRUCTIONS.items() if kind is cls))


def assert_computed_by_us(layer: nn.Module) -> None:
    with Recorder() as recorder:
        layer(input_of(layer))
    assert [name for name in recorder.names if name.startswith("conv2d_ext::")]
    theirs = ("aten::conv", "aten::addmm", "aten::mm", "aten::linear")
    assert not [name for name in recorder.names if name.startswith(theirs)]


def sliced(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, every second one of memory."""
    return torch.stack([tensor, tensor], -1)[..., 0]


# The ops that make a view, also as they are called in graphs.
VIEWS = {
    f"aten::{name}"
    for name in (
        "alias", "detach", "expand", "permute", "squeeze", "squeeze_", "t", "transpose",
        "unsqueeze", "view",
    )
}  # fmt: skip


def beside_views(names: list[str]) -> list[str]:
    return [name for name in names if name not in VIEWS]


def names_of(graph: fx.GraphModule) -> list[str]:
    """Of what a graph calls, ops as in Recorder."""
    called = [node.target for node in graph.graph.nodes if node.op.startswith("call")]
    called = [getattr(target, "overloadpacket", target) for target in called]
    return [getattr(target, "_qualified_op_name", str(target)) for target in called]


def forward_ops(layer: nn.Module) -> list[str]:
    """What a layer that does not pad first runs, beside views."""
    if isinstance(layer, nn.Linear):
        return ["conv2d_ext::matmul"]
    if not isinstance(layer, (nn.ConvTranspose1d, nn.ConvTranspose2d)):
        return ["conv2d_ext::conv2d"]
    adds_bias = ["conv2d_ext::conv2d_add_bias"] if layer.bias is not None else []
    return ["conv2d_ext::conv2d_grad_input", *adds_bias]


def gradients(module: nn.Module, input: torch.Tensor) -> list[torch.Tensor]:
    input = input.detach().requires_grad_()
    return list(torch.autograd.grad(module(input).square().sum(), [input, *module.parameters()]))


# ---- layers


@over_constructions
def test_a_layer_equals_pytorchs(name):
    ours, theirs = make(name, conv2d_ext), make(name)
    assert isinstance(ours, type(theirs))
    assert repr(ours) == repr(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for ours_tensor, theirs_tensor in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours_tensor, theirs_tensor)
    for input in (input_of(ours), input_of(ours)[0]):
        torch.testing.assert_close(ours(input), theirs(input))
        torch.testing.assert_close(gradients(ours, input), gradients(theirs, input))
    assert_computed_by_us(ours)


@pytest.mark.parametrize(
    "name", [n for n in CONSTRUCTIONS if CONSTRUCTIONS[n][2].get("padding_mode") is None]
)
def test_a_layer_copies_nothing(name):
    """Its forward is the library's ops and views, its backward too, whatever the input's strides.

    Seen to fail: with a clone and with a contiguous() of the input before the function's call.
    """
    layer = make(name, conv2d_ext)
    for input in (input_of(layer), sliced(input_of(layer)), input_of(layer)[0]):
        with Recorder() as recorder:
            output = layer(input.requires_grad_())
        assert beside_views(recorder.names) == forward_ops(layer)
        grad_output = sliced(torch.ones_like(output))
        with Recorder() as recorder:
            torch.autograd.grad(output, [input, *layer.parameters()], grad_output)
        assert {op.partition("::")[0] for op in beside_views(recorder.names)} == {"conv2d_ext"}


@pytest.mark.parametrize("cls", [nn.ConvTranspose1d, nn.ConvTranspose2d], ids=lambda c: c.__name__)
def test_output_size(cls):
    theirs = cls(4, 6, 3, stride=2, padding=1, dtype=torch.float64)
    ours = conv2d_ext.convert(copy.deepcopy(theirs))
    input = input_of(ours)
    scripted = torch.jit.script(ours)
    for extra in (0, 1):
        size = [2 * n - 1 + extra for n in input.shape[2:]]
        expected = theirs(input, output_size=size)
        assert list(expected.shape[2:]) == size
        torch.testing.assert_close(ours(input, output_size=size), expected)
        torch.testing.assert_close(scripted(input, size), expected)
        torch.testing.assert_close(ours(input, [2, 6, *size]), expected)
    for wrong in ([3] * len(size), [4]):
        for layer in (theirs, ours):
            with pytest.raises(ValueError, match=r"output[_ ]size"):
                layer(input, output_size=wrong * (3 if len(wrong) == 1 else 1))


def test_a_transposed_layer_refuses_other_padding_modes():
    for module in (nn, conv2d_ext):
        with pytest.raises(ValueError, match='Only "zeros" padding mode'):
            module.ConvTranspose2d(4, 6, 3, padding_mode="reflect")
        layer = module.ConvTranspose2d(4, 6, 3)
        layer.padding_mode = "reflect"
        with pytest.raises(ValueError, match="Only `zeros` padding mode"):
            layer(torch.randn(1, 4, 5, 5))


@over_constructions
def test_torchscript(name):
    layer = make(name, conv2d_ext)
    scripted, traced = torch.jit.script(layer), torch.jit.trace(layer, (input_of(layer),))
    for compiled in (scripted, traced):
        assert torch.equal(compiled(input_of(layer)), layer(input_of(layer)))
        assert "conv2d_ext::" in str(compiled.inlined_graph)


class NoLeaves(fx.Tracer):
    def is_leaf_module(self, m, module_qualified_name):
        return False


@over_classes
def test_a_layer_is_a_leaf_of_fx_where_pytorchs_is(cls):
    ours = conv2d_ext.convert(nn.Sequential(layer_of(cls), nn.ReLU()))
    for tracer in (fx.Tracer, NoLeaves):
        graph = tracer().trace(ours)
        called = [node.target for node in graph.nodes if node.op == "call_module"]
        assert called == (["0", "1"] if tracer is fx.Tracer else [])
        traced = fx.GraphModule(ours, graph)
        assert torch.equal(traced(input_of(ours[0])), ours(input_of(ours[0])))
        assert torch.equal(pickle.loads(pickle.dumps(traced))(input_of(ours[0])),
                           ours(input_of(ours[0])))  # fmt: skip


def _wrap_forward(layer):
    forward = layer.forward
    layer.forward = lambda *args: forward(*args) * 2


# What runs around a layer's forward.
AROUND = {
    "hook": lambda layer: layer.register_forward_hook(lambda module, args, output: output * 2),
    "pre-hook": lambda layer: layer.register_forward_pre_hook(
        lambda module, args: (args[0] + 1, *args[1:])
    ),
    "wrapped forward": _wrap_forward,
}


@over_classes
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("tracer", [fx.Tracer, NoLeaves])
def test_fx_runs_what_is_around_forward_once(cls, around, tracer):
    ours, theirs = nn.Sequential(layer_of(cls)), nn.Sequential(layer_of(cls))
    ours.load_state_dict(theirs.state_dict())
    for model in (ours, theirs):
        AROUND[around](model[0])
    conv2d_ext.convert(ours)
    input = input_of(ours[0])
    expected = ours(input)
    torch.testing.assert_close(expected, theirs(input))
    graph = tracer().trace(ours)
    assert torch.equal(fx.GraphModule(ours, graph)(input), expected)
    ops = [[n.op == "call_module" for n in g.nodes] for g in (graph, tracer().trace(theirs))]
    assert any(ops[0]) == any(ops[1]) == (tracer is fx.Tracer)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    assert torch.equal(compiled(input), expected)


class _ByName(nn.Module):
    """Calls a transposed layer by its arguments' names, the size first, or with a size alone that
    is traced."""

    def __init__(self, layer, own_input=None):
        super().__init__()
        self.layer, self.own_input = layer, own_input

    def forward(self, input):
        if self.own_input is not None:
            return self.layer(self.own_input, output_size=input.shape[2:])
        return self.layer(output_size=[5, 6], input=input)


@pytest.mark.parametrize("traced_size", [False, True])
def test_fx_records_calls_by_name(traced_size):
    input = torch.randn(1, 3, 4, 5)
    layer = nn.ConvTranspose2d(3, 2, 2)
    models = [
        _ByName(convert(copy.deepcopy(layer)), input if traced_size else None)
        for convert in (lambda layer: layer, conv2d_ext.convert)
    ]
    example = torch.randn(1, 3, 5, 6) if traced_size else input
    traced = [fx.symbolic_trace(model) for model in models]
    assert [n.op for n in traced[0].graph.nodes] == [n.op for n in traced[1].graph.nodes]
    assert torch.equal(traced[1](example), models[1](example))


def test_a_graph_pass_records_a_layers_function():
    """A pass has a graph and no modules: as with torch.nn's layer, weights are arguments."""
    graph, layer = fx.Graph(), conv2d_ext.Linear(5, 6)
    node = layer(fx.Proxy(graph.placeholder("x"))).node
    assert (node.op, node.target) == ("call_function", conv2d_ext.linear)
    assert node.args[1] is layer.weight


@over_classes
@pytest.mark.parametrize("residual", [False, True], ids=["scaled", "residual"])
def test_fx_traces_through_a_subclass_as_through_one_of_pytorchs(cls, residual):
    graphs = []
    for base in (cls, type(conv2d_ext.convert(layer_of(cls)))):

        class Subclass(base):
            def forward(self, input):
                output = super().forward(input) * 2
                return output + input.sum() if residual else output

        layer = layer_of(cls)
        input = input_of(layer)
        layer.__class__ = Subclass
        model = nn.Sequential(layer)
        traced = fx.symbolic_trace(model)
        assert torch.equal(traced(input), model(input))
        graphs.append([node.op for node in traced.graph.nodes])
    assert "call_module" not in graphs[1]
    assert graphs[0] == graphs[1]


@over_classes
def test_a_layer_is_not_quantized_and_says_so(cls):
    layer = conv2d_ext.convert(layer_of(cls))
    with pytest.raises(NotImplementedError, match=f"{cls.__name__} can't be quantized: quantize a"):
        layer.qconfig = quantization.get_default_qconfig("x86")
    layer.qconfig = None


@over_classes
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_compile(cls):
    """A graph of one op, which becomes the ops that the layer runs; none of them copies."""
    torch._dynamo.reset()
    layer = conv2d_ext.convert(layer_of(cls))
    input = sliced(input_of(layer)).requires_grad_()
    backend = AotEagerAndRecordGraphs()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    output = compiled(input)
    assert torch.equal(output, layer(input))
    output.backward(torch.ones_like(output))
    [graph], [forward], [backward] = backend.graphs, backend.fw_graphs, backend.bw_graphs
    function = {
        "Linear": "linear",
        "Conv1d": "conv1d",
        "Conv2d": "conv2d",
        "ConvTranspose1d": "conv_transpose1d",
        "ConvTranspose2d": "conv_transpose2d",
    }
    assert names_of(graph) == [f"conv2d_ext::{function[cls.__name__]}"]
    assert beside_views(names_of(forward)) == forward_ops(layer)
    assert {op.partition("::")[0] for op in beside_views(names_of(backward))} == {"conv2d_ext"}
    torch._dynamo.reset()


# ---- convert and revert


def make_model() -> nn.Sequential:
    """Every class, one layer twice, two with one weight, one parametrized, one with hooks."""
    torch.manual_seed(0)
    shared = nn.Conv1d(6, 6, 3, padding=1)
    tied = nn.Linear(4, 4), nn.Linear(4, 4)
    tied[1].weight = tied[0].weight
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(6, 6, 2, 2)),
        nn.Flatten(2),
        nn.Sequential(shared, shared, parametrizations.weight_norm(nn.ConvTranspose1d(6, 4, 3))),
        nn.AdaptiveAvgPool1d(4),
        nn.Sequential(*tied),
    ).double()


def classes_of(model: nn.Module) -> list[type]:
    return [type(m) for m in model.modules()]


@pytest.fixture
def model():
    return make_model()


@pytest.fixture
def images():
    return torch.randn(2, 4, 5, 7, dtype=torch.float64)


def test_convert_turns_every_class(model, images, caplog):
    expected, expected_gradients = model(images), gradients(model, images)
    objects = [*model.modules(), *model.parameters(), *model.buffers()]
    keys = list(model.state_dict())
    assert conv2d_ext.convert(model) is model
    assert not [m for m in model.modules() if type(m) in CLASSES]
    assert {type(m).__name__ for m in model.modules() if isinstance(m, CLASSES)} == {
        "Conv1d", "Conv2d", "ParametrizedConvTranspose1d", "ConvTranspose2d", "Linear",
    }  # fmt: skip
    assert all(
        a is b
        for a, b in zip(
            objects, [*model.modules(), *model.parameters(), *model.buffers()], strict=True
        )
    )
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(model(images), expected)
    torch.testing.assert_close(gradients(model, images), expected_gradients)
    assert not caplog.records


def test_revert_undoes_convert(model, images, caplog):
    classes, keys = classes_of(model), list(model.state_dict())
    expected, expected_gradients = model(images), gradients(model, images)
    calls = []
    model[0][0].register_forward_hook(lambda module, args, output: calls.append(type(module)))
    model[0][2].eval()
    conv2d_ext.convert(model)
    assert classes_of(model) != classes
    model(images)
    assert conv2d_ext.revert(model) is model
    assert classes_of(model) == classes
    assert list(model.state_dict()) == keys
    assert torch.equal(model(images), expected)
    for actual, wanted in zip(gradients(model, images), expected_gradients, strict=True):
        assert torch.equal(actual, wanted)
    assert calls[0] is conv2d_ext.Conv2d
    assert set(calls[1:]) == {nn.Conv2d}
    assert not model[0][2].training
    assert model[2][0] is model[2][1]
    assert model[4][0].weight is model[4][1].weight
    assert not caplog.records


def test_revert_of_a_model_never_converted(model):
    classes = classes_of(model)
    conv2d_ext.revert(model)
    assert classes_of(model) == classes


@over_classes
def test_revert_turns_layers_built_as_ours(cls):
    layer = getattr(conv2d_ext, cls.__name__)(4, 4, *(() if cls is nn.Linear else (1,)))
    assert type(conv2d_ext.revert(layer)) is cls
    assert type(conv2d_ext.revert(nn.Sequential(layer))[0]) is cls


def test_revert_leaves_subclasses_of_ours_and_says_so(caplog):
    class Mine(conv2d_ext.Linear):
        pass

    with caplog.at_level(logging.WARNING, logger="conv2d_ext"):
        model = conv2d_ext.revert(nn.Sequential(Mine(2, 2)))
    assert type(model[0]) is Mine
    assert "left '0'" in caplog.text
    assert "is a subclass of conv2d_ext.Linear" in caplog.text


@over_classes
def test_parametrizations_survive_both_ways(cls):
    layer = parametrizations.weight_norm(layer_of(cls))
    original, expected = type(layer), layer(input_of(layer))
    twin = copy.deepcopy(layer)
    conv2d_ext.convert(layer)
    ours = getattr(conv2d_ext, cls.__name__)
    assert parametrize.type_before_parametrizations(layer) is ours
    torch.testing.assert_close(layer(input_of(layer)), expected)
    assert_computed_by_us(layer)
    assert type(twin) is original
    clone = copy.deepcopy(layer)
    conv2d_ext.revert(layer)
    assert type(layer) is original
    assert torch.equal(layer(input_of(layer)), expected)
    # One that loses its parametrization in between, and one that gets another one.
    parametrize.remove_parametrizations(clone, "weight")
    assert type(clone) is ours
    assert type(conv2d_ext.revert(clone)) is cls
    conv2d_ext.convert(twin)
    parametrize.register_parametrization(twin, "bias", nn.Identity())
    conv2d_ext.revert(twin)
    assert parametrize.type_before_parametrizations(twin) is cls
    assert parametrize.is_parametrized(twin, "bias")
    torch.testing.assert_close(twin(input_of(twin)), expected)
    assert type(layer) is original
    assert not parametrize.is_parametrized(layer, "bias")


def test_converted_models_are_copied_and_saved(images):
    model = make_model()
    model[2][2] = nn.ConvTranspose1d(6, 4, 3, dtype=torch.float64)  # parametrized, none is pickled
    conv2d_ext.convert(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert classes_of(other) == classes_of(model)
        assert torch.equal(other(images), model(images))
        assert not [m for m in conv2d_ext.revert(other).modules() if type(m) in (
            conv2d_ext.Conv2d, conv2d_ext.Linear)]  # fmt: skip
        torch.testing.assert_close(other(images), model(images))


def test_convert_of_some_classes(model):
    conv2d_ext.convert(model, classes=[nn.Conv2d, nn.Linear])
    turned = {type(m) for m in model.modules() if type(m).__module__.startswith("conv2d_ext")}
    assert turned == {conv2d_ext.Conv2d, conv2d_ext.Linear}
    conv2d_ext.convert(model, classes=(nn.Conv1d,))
    assert type(model[2][0]) is conv2d_ext.Conv1d
    assert type(model[0][2]) is nn.ConvTranspose2d
    conv2d_ext.convert(model, classes=())
    for wrong in ((nn.Conv3d,), (conv2d_ext.Conv2d,), (nn.Module, nn.Linear)):
        with pytest.raises(ValueError, match="classes must be of torch"):
            conv2d_ext.convert(model, classes=wrong)
    for wrong in (nn.Conv2d, "Conv2d", None):
        with pytest.raises(
            TypeError, match=r"expected classes to be a list .*, but got .*(Conv2d|None)"
        ):
            conv2d_ext.convert(model, classes=wrong)


def test_attention_stays_without_a_warning(caplog, capsys):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64).eval()
    input = torch.randn(2, 3, 8, dtype=torch.float64)
    expected, classes = layer(input), classes_of(layer)
    conv2d_ext.convert(layer, report=True)
    assert type(layer.linear1) is conv2d_ext.Linear
    assert type(layer.self_attn.out_proj) is nn.modules.linear.NonDynamicallyQuantizableLinear
    torch.testing.assert_close(layer(input), expected)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "MultiheadAttention reads its weight" in capsys.readouterr().out
    assert classes_of(conv2d_ext.revert(layer)) == classes


def test_report(capsys, caplog):
    class Mine(nn.Conv1d):
        pass

    model = nn.Sequential(nn.Conv2d(1, 1, 1), Mine(1, 1, 1), nn.Linear(1, 1), nn.ReLU())
    model.register_module("again", model[0])
    conv2d_ext.convert(model, classes=(nn.Conv2d, nn.Conv1d))
    assert capsys.readouterr().out == ""
    conv2d_ext.convert(model, classes=(nn.Conv1d, nn.Linear, nn.Conv2d), report=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["module", "class"], ["0", "Conv2d"], ["1", "Mine"], ["2", "Linear"],
        ["converted:", "1"], ["left:", "1"],
    ]  # fmt: skip
    assert "left: one of conv2d_ext's already" in lines[1]
    assert "Mine is a subclass of torch.nn.Conv1d" in lines[2]
    assert lines[3].endswith("converted")
    assert lines[4] == "converted: 1 Linear"
    assert lines[5] == "left: 1 Conv2d, 1 Mine"
    conv2d_ext.convert(model, classes=(), report=True)
    assert "not asked for" in capsys.readouterr().out
    conv2d_ext.convert(nn.ReLU(), report=True)
    assert capsys.readouterr().out.splitlines()[1:] == ["converted: none", "left: none"]


def test_convert_and_revert_want_a_module():
    for function in (conv2d_ext.convert, conv2d_ext.revert):
        with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got dict"):
            function({})


def test_functional_call_and_vmap_over_weights():
    layer = conv2d_ext.ConvTranspose2d(4, 6, (3, 2), stride=2)
    input = torch.randn(2, 4, 5, 6)
    stacked = {name: torch.stack([p, 2 * p]) for name, p in layer.named_parameters()}
    outputs = torch.func.vmap(lambda p: torch.func.functional_call(layer, p, input))(stacked)
    torch.testing.assert_close(outputs[1], 2 * layer(input))
