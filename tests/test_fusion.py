"""What looks for torch.nn.Conv2d in a model: torch.fx, fusion with batch norms, quantization."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from torch import fx, nn
from torch.ao import quantization
from torch.ao.quantization import quantize_fx
from torch.fx.experimental.optimization import fuse
from torch.nn.utils.fusion import fuse_conv_bn_eval

import conv2d_ext

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.ao.quantization is deprecated",
    "ignore:.*reduce_range.*",
    "ignore:must run observer",
    "ignore:Using padding='same'",
)


def make_model() -> nn.Sequential:
    """With a batch norm that a fusion can't leave out unnoticed."""
    model = nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 1), nn.ReLU()
    )
    nn.init.uniform_(model[1].running_mean)
    nn.init.uniform_(model[1].running_var, 0.5, 2)
    nn.init.uniform_(model[1].weight, 0.5, 2)
    return model.double().eval()


def make_input() -> torch.Tensor:
    return torch.randn(2, 4, 7, 9, dtype=torch.float64)


def convolutions(model: nn.Module) -> list[nn.Conv2d]:
    return [m for m in model.modules() if isinstance(m, nn.Conv2d)]


# ---- torch.fx


class NoLeaves(fx.Tracer):
    def is_leaf_module(self, m, module_qualified_name):
        return False


@pytest.mark.parametrize(
    "kwargs",
    [{"stride": 2}, {"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}],
    ids=str,
)
def test_a_layer_is_a_leaf_where_pytorchs_is(kwargs):
    theirs = nn.Sequential(nn.Conv2d(4, 6, 3, **kwargs), nn.ReLU()).double()
    ours = conv2d_ext.convert(copy.deepcopy(theirs))
    input = make_input()
    for tracer in (fx.Tracer, NoLeaves):
        graphs = [tracer().trace(model) for model in (theirs, ours)]
        ops = [[(n.op, n.name) for n in graph.nodes if n.op == "call_module"] for graph in graphs]
        assert ops[0] == ops[1]
        traced = fx.GraphModule(ours, graphs[1])
        assert torch.equal(traced(input), ours(input))
        functions = [n.target for n in graphs[1].nodes if n.op == "call_function"]
        assert (conv2d_ext.conv2d in functions) == (tracer is NoLeaves)
    assert type(fx.symbolic_trace(ours).get_submodule("0")) is conv2d_ext.Conv2d


def test_a_root_is_traced_through():
    layer, input = conv2d_ext.Conv2d(4, 6, 3).double(), make_input()
    traced = fx.symbolic_trace(layer)
    assert conv2d_ext.conv2d in [node.target for node in traced.graph.nodes]
    assert torch.equal(traced(input), layer(input))


# ---- fusion


def test_fused_then_converted():
    model, input = make_model(), make_input()
    pairs = [["0", "1", "2"], ["3", "4"]]
    for fused in (fuse(model), quantization.fuse_modules(model, pairs)):
        converted = conv2d_ext.convert(fused)
        assert not [m for m in converted.modules() if isinstance(m, nn.BatchNorm2d)]
        assert [type(m) for m in convolutions(converted)] == [conv2d_ext.Conv2d] * 2
        torch.testing.assert_close(converted(input), model(input))


def test_a_converted_layer_is_fused():
    model, input = conv2d_ext.convert(make_model()), make_input()
    fused = fuse_conv_bn_eval(model[0], model[1])
    assert type(fused) is conv2d_ext.Conv2d
    torch.testing.assert_close(fused(input), model[:2](input))


def test_what_does_not_fuse_a_converted_layer():
    """PyTorch's fusions want torch.nn.Conv2d's own class: one refuses, one changes nothing."""
    model, input = conv2d_ext.convert(make_model()), make_input()
    with pytest.raises(AssertionError, match=r"did not find fuser method.*conv2d_ext"):
        quantization.fuse_modules(model, [["0", "1"]])
    assert torch.equal(fuse(model)(input), model(input))


# ---- quantization


QUANTIZATIONS = {
    "prepare": quantization.prepare,
    "prepare_qat": lambda model: quantization.prepare_qat(model.train()),
    "quantize": lambda model: quantization.quantize(model, lambda m: m(make_input().float()), ()),
    "prepare_fx": lambda model: quantize_fx.prepare_fx(
        model, quantization.get_default_qconfig_mapping("x86"), (make_input().float(),)
    ),
}


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_a_converted_layer_is_not_quantized_and_says_so(name):
    model = conv2d_ext.convert(make_model().float())
    model.qconfig = quantization.get_default_qconfig("x86")
    with pytest.raises(NotImplementedError, match="quantize a model before"):
        QUANTIZATIONS[name](model)


def test_dynamic_quantization_leaves_converted_layers():
    """PyTorch looks for its own class: as it leaves any subclass, so these."""
    model = conv2d_ext.convert(nn.Sequential(nn.Linear(5, 3)).eval())
    assert type(quantization.quantize_dynamic(model)[0]) is conv2d_ext.Linear
    with pytest.raises(NotImplementedError, match="quantize a model before"):
        quantization.quantize_dynamic(model, {conv2d_ext.Linear})


def test_quantization_around_layers_left_in_floating_point():
    model = nn.Sequential(conv2d_ext.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(6 * 5 * 7, 2)).eval()
    input = make_input().float()
    dynamic = quantization.quantize_dynamic(model)
    assert type(dynamic[2]).__module__.startswith("torch.ao.nn.quantized")
    torch.testing.assert_close(dynamic[0](input), model[0](input))
    model.qconfig = quantization.get_default_qconfig("x86")
    model[0].qconfig = None
    prepared = quantization.prepare(model)
    assert prepared[2].qconfig is not None
    assert torch.equal(prepared(input), model(input))


def test_convert_leaves_what_is_prepared_for_quantization(caplog):
    model = make_model().float()
    model.qconfig = quantization.get_default_qconfig("x86")
    prepared = quantization.prepare(model)
    with caplog.at_level(logging.WARNING, logger="conv2d_ext"):
        conv2d_ext.convert(prepared)
    messages = [r.getMessage() for r in caplog.records if r.name == "conv2d_ext"]
    assert len(messages) == 2
    assert "'0'" in messages[0]
    assert "prepared for quantization" in messages[0]
    prepared(make_input().float())
    quantized = quantization.convert(prepared)
    assert type(quantized[0]).__module__.startswith("torch.ao.nn.quantized")


def test_a_traced_layer_pickles():
    """The root of a trace is no leaf: its forward is traced, with its annotations."""
    layer = conv2d_ext.Conv2d(2, 3, 3, padding=1)
    traced = torch.fx.symbolic_trace(layer)
    x = torch.randn(1, 2, 5, 6)
    assert torch.equal(pickle.loads(pickle.dumps(traced))(x), layer(x))
