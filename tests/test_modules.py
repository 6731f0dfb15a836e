"""Conv2d and convert: they stand in for torch.nn.Conv2d everywhere, and our op computes."""

import copy
import io
import logging
import pickle

import pytest
import torch
from observing import Recorder
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import conv2d_ext

CONSTRUCTIONS = {
    "defaults": ((4, 6, 3), {}),
    "pairs": (
        (4, 6, (3, 2)),
        {"stride": (2, 1), "padding": (1, 0), "dilation": (2, 1), "groups": 2},
    ),
    "no bias": ((4, 6, 3), {"bias": False}),
    "same": ((4, 6, (4, 3)), {"padding": "same", "dilation": (1, 2)}),
    "valid": ((4, 6, 3), {"padding": "valid"}),
    "depthwise": ((4, 8, 3), {"groups": 4, "padding": 1}),
    **{
        mode: ((4, 6, (3, 2)), {"padding": (2, 1), "padding_mode": mode})
        for mode in ("zeros", "reflect", "replicate", "circular")
    },
    "same, reflect": ((4, 6, (4, 2)), {"padding": "same", "padding_mode": "reflect"}),
}

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


def assert_computed_by_us(module: nn.Module, input: torch.Tensor, times: int = 1) -> None:
    with Recorder() as recorder:
        module(input)
    assert recorder.names.count("conv2d_ext::conv2d") == times
    assert not any("aten::convolution" in name for name in recorder.names)


def make_model() -> nn.Sequential:
    """Convolutions at three depths, one of them registered twice."""
    shared = nn.Conv2d(6, 6, 3, padding=1)
    block = nn.Sequential(shared, nn.ReLU(), shared, nn.BatchNorm2d(6))
    return nn.Sequential(nn.Conv2d(4, 6, 3), nn.ModuleDict({"block": block})["block"], nn.Flatten())


def make_input() -> torch.Tensor:
    return torch.randn(2, 4, 7, 9, generator=torch.Generator().manual_seed(1))


def gradients(module: nn.Module, input: torch.Tensor) -> list[torch.Tensor]:
    input = input.detach().requires_grad_()
    return list(torch.autograd.grad(module(input).square().sum(), [input, *module.parameters()]))


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_conv2d_equals_nn_conv2d(name):
    args, kwargs = CONSTRUCTIONS[name]
    torch.manual_seed(0)
    theirs = nn.Conv2d(*args, **kwargs, dtype=torch.float64)
    torch.manual_seed(0)
    ours = conv2d_ext.Conv2d(*args, **kwargs, dtype=torch.float64)
    assert repr(ours) == repr(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for ours_tensor, theirs_tensor in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours_tensor, theirs_tensor)
    for input in (make_input().double(), make_input()[0].double()):
        torch.testing.assert_close(ours(input), theirs(input))
        torch.testing.assert_close(gradients(ours, input), gradients(theirs, input))
    assert_computed_by_us(ours, make_input().double())


@pytest.mark.parametrize(
    "name", [n for n, (_, kwargs) in CONSTRUCTIONS.items() if "padding_mode" not in kwargs]
)
def test_conv2d_is_one_op(name):
    """No copy, whatever the input's strides. Seen to fail: with a clone before the call."""
    args, kwargs = CONSTRUCTIONS[name]
    conv, input = conv2d_ext.Conv2d(*args, **kwargs), make_input()
    for seen in (input, input[0], input.transpose(2, 3), torch.stack([input, input], -1)[..., 1]):
        with Recorder() as recorder:
            conv(seen)
        assert recorder.names == ["conv2d_ext::conv2d"]


def test_conv2d_refuses_what_nn_conv2d_refuses():
    for args, kwargs in (((4, 6, 3), {"groups": 3}), ((4, 6, 3), {"padding_mode": "wrap"})):
        for kind in (nn.Conv2d, conv2d_ext.Conv2d):
            with pytest.raises(ValueError, match="must be"):
                kind(*args, **kwargs)


def test_state_dicts_are_exchanged():
    ours, theirs = conv2d_ext.Conv2d(4, 6, 3), nn.Conv2d(4, 6, 3)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(make_input()), theirs(make_input()))


# ---- convert


def test_convert_keeps_every_value():
    model = make_model().double()
    input = make_input().double()
    before, before_gradients = model(input), gradients(model, input)
    converted = conv2d_ext.convert(model)
    assert converted is model
    assert not [m for m in model.modules() if type(m) is nn.Conv2d]
    torch.testing.assert_close(model(input), before)
    torch.testing.assert_close(gradients(model, input), before_gradients)
    assert_computed_by_us(model, input, times=3)


def test_convert_keeps_objects():
    model = make_model()
    modules, parameters = list(model.modules()), list(model.parameters())
    buffers, keys = list(model.buffers()), list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    conv2d_ext.convert(model)
    for before, after in (
        (modules, model.modules()),
        (parameters, model.parameters()),
        (buffers, model.buffers()),
    ):
        after = list(after)
        assert len(before) == len(after)
        assert all(b is a for b, a in zip(before, after, strict=True))
    assert list(model.state_dict()) == keys
    assert model[1][0] is model[1][2]

    weight = model[0].weight.detach().clone()
    model(make_input()).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, weight)


def test_convert_keeps_state():
    conv = nn.Conv2d(4, 6, 3).eval()
    conv.weight.requires_grad_(False)
    conv.register_buffer("count", torch.zeros(1))
    conv.note = "mine"
    calls = []
    conv.register_forward_pre_hook(lambda module, args: calls.append(("before", module)))
    conv.register_forward_hook(lambda module, args, output: calls.append(("after", module)))
    conv.register_full_backward_hook(lambda module, gi, go: calls.append(("backward", module)))
    model = conv2d_ext.convert(nn.Sequential(conv))
    converted = model[0]
    assert type(converted) is conv2d_ext.Conv2d
    assert not converted.training
    assert not converted.weight.requires_grad
    assert converted.count is conv.count
    assert converted.note == "mine"
    model(make_input().requires_grad_()).sum().backward()
    assert [name for name, _ in calls] == ["before", "after", "backward"]
    assert all(module is converted for _, module in calls)


def test_convert_keeps_a_wrapped_forward():
    """Libraries that move or cache weights put their own forward around the module's bound one."""
    conv = nn.Conv2d(4, 6, 3)
    original = conv.forward
    conv.forward = lambda input: 2 * original(input)
    expected = conv(make_input())
    conv2d_ext.convert(conv)
    torch.testing.assert_close(conv(make_input()), expected)
    assert_computed_by_us(conv, make_input())


def test_convert_a_root():
    conv = nn.Conv2d(4, 6, 3)
    weight = conv.weight
    converted = conv2d_ext.convert(conv)
    assert type(converted) is conv2d_ext.Conv2d
    assert converted.weight is weight


def test_convert_again_changes_nothing(caplog):
    model = conv2d_ext.convert(make_model())
    classes = [type(m) for m in model.modules()]
    conv2d_ext.convert(model)
    assert [type(m) for m in model.modules()] == classes
    assert not caplog.records


def test_convert_wants_a_module():
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got Parameter"):
        conv2d_ext.convert(nn.Conv2d(1, 1, 1).weight)


class Doubled(nn.Conv2d):
    def forward(self, input):
        return 2 * super().forward(input)


def test_convert_leaves_other_subclasses_and_says_so(caplog):
    lazy = nn.LazyConv2d(3, 1)
    model = nn.Sequential(nn.Conv2d(4, 4, 1), Doubled(4, 4, 1), lazy, nn.ConvTranspose2d(3, 3, 1))
    parametrizations.weight_norm(model[1])
    with caplog.at_level(logging.WARNING, logger="conv2d_ext"):
        conv2d_ext.convert(model)
    kinds = [type(m).__name__ for m in model]
    assert kinds == ["Conv2d", "ParametrizedDoubled", "LazyConv2d", "ConvTranspose2d"]
    assert type(model[0]) is conv2d_ext.Conv2d
    messages = [r.getMessage() for r in caplog.records if r.name == "conv2d_ext"]
    assert len(messages) == 2
    assert "'1'" in messages[0]
    assert "ParametrizedDoubled" in messages[0]
    assert "'2'" in messages[1]
    assert "LazyConv2d" in messages[1]
    # Once it has seen an input, the lazy one is an nn.Conv2d like any other.
    model(make_input())
    assert type(lazy) is nn.Conv2d
    assert type(conv2d_ext.convert(model)[2]) is conv2d_ext.Conv2d


def test_convert_names_an_unconverted_root(caplog):
    conv2d_ext.convert(Doubled(1, 1, 1))
    assert "the root module" in caplog.text


def test_convert_leaves_our_own_subclasses(caplog):
    class Ours(conv2d_ext.Conv2d):
        pass

    conv = conv2d_ext.convert(Ours(1, 1, 1))
    assert type(conv) is Ours
    assert not caplog.records


# ---- parametrizations, old and new


@pytest.mark.parametrize(
    "parametrization",
    [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal],
    ids=lambda p: p.__name__,
)
def test_convert_keeps_parametrizations(parametrization):
    input = make_input().double()
    conv = parametrization(nn.Conv2d(4, 6, 3).double()).eval()
    parameters = list(conv.parameters())
    expected, expected_gradients = conv(input), gradients(conv, input)
    converted = conv2d_ext.convert(nn.Sequential(conv))[0]
    assert converted is conv
    assert isinstance(converted, conv2d_ext.Conv2d)
    assert parametrize.type_before_parametrizations(converted) is conv2d_ext.Conv2d
    assert all(a is b for a, b in zip(converted.parameters(), parameters, strict=True))
    torch.testing.assert_close(converted(input), expected)
    torch.testing.assert_close(gradients(converted, input), expected_gradients)
    assert_computed_by_us(converted, input)

    parametrize.remove_parametrizations(converted, "weight")
    assert type(converted) is conv2d_ext.Conv2d
    torch.testing.assert_close(converted(input), expected)


def test_convert_leaves_copies_of_a_parametrized_module_alone():
    conv = parametrizations.weight_norm(nn.Conv2d(4, 6, 3))
    twin = copy.deepcopy(conv)
    conv2d_ext.convert(conv)
    assert isinstance(conv, conv2d_ext.Conv2d)
    assert not isinstance(twin, conv2d_ext.Conv2d)
    torch.testing.assert_close(conv(make_input()), twin(make_input()))
    clone = copy.deepcopy(conv)
    parametrize.remove_parametrizations(clone, "weight", leave_parametrized=True)
    assert type(clone) is conv2d_ext.Conv2d


def test_parametrize_after_convert():
    conv = parametrizations.weight_norm(conv2d_ext.convert(nn.Conv2d(4, 6, 3)))
    assert isinstance(conv, conv2d_ext.Conv2d)
    assert_computed_by_us(conv, make_input())


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("when", ["before", "after"])
def test_hook_based_weight_norm_and_pruning(when):
    def reparametrize(conv):
        torch.nn.utils.weight_norm(conv)
        prune.l1_unstructured(conv, "bias", amount=0.5)
        return conv

    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3)
    expected = reparametrize(copy.deepcopy(conv))(make_input())
    if when == "before":
        conv = conv2d_ext.convert(reparametrize(conv))
    else:
        conv = reparametrize(conv2d_ext.convert(conv))
    torch.testing.assert_close(conv(make_input()), expected)
    assert_computed_by_us(conv, make_input())
    torch.nn.utils.remove_weight_norm(conv)
    prune.remove(conv, "bias")
    torch.testing.assert_close(conv(make_input()), expected)


# ---- copying, saving, replicating, tracing


def test_deepcopy():
    model = conv2d_ext.convert(make_model())
    clone = copy.deepcopy(model)
    assert type(clone[0]) is conv2d_ext.Conv2d
    assert clone[0].weight is not model[0].weight
    assert clone[1][0] is clone[1][2]
    assert torch.equal(clone(make_input()), model(make_input()))


def test_pickle_and_save():
    model = conv2d_ext.convert(make_model())
    assert torch.equal(pickle.loads(pickle.dumps(model))(make_input()), model(make_input()))
    whole, state = io.BytesIO(), io.BytesIO()
    torch.save(model, whole)
    torch.save(model.state_dict(), state)
    whole.seek(0)
    state.seek(0)
    loaded = torch.load(whole, weights_only=False)
    plain = make_model()
    plain.load_state_dict(torch.load(state, weights_only=True))
    assert type(loaded[0]) is conv2d_ext.Conv2d
    torch.testing.assert_close(loaded(make_input()), model(make_input()))
    torch.testing.assert_close(plain(make_input()), model(make_input()))


def test_replicas_of_data_parallel():
    conv = conv2d_ext.convert(nn.Conv2d(4, 6, 3))
    replica = conv._replicate_for_data_parallel()
    assert type(replica) is conv2d_ext.Conv2d
    replica.weight, replica.bias = conv.weight, conv.bias  # as torch.nn.parallel.replicate does
    assert torch.equal(replica(make_input()), conv(make_input()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is")
def test_jit_trace():
    model = conv2d_ext.convert(make_model()).eval()
    traced = torch.jit.trace(model, make_input())
    assert "conv2d_ext::conv2d" in str(traced.inlined_graph)
    other = make_input()[:1]
    assert torch.equal(traced(other), model(other))


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is")
@pytest.mark.parametrize("name", ["pairs", "same", "valid", "reflect", "no bias"])
def test_jit_script(name):
    args, kwargs = CONSTRUCTIONS[name]
    conv = conv2d_ext.Conv2d(*args, **kwargs)
    scripted = torch.jit.script(conv)
    assert "conv2d_ext::conv2d" in str(scripted.inlined_graph)
    assert torch.equal(scripted(make_input()), conv(make_input()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is")
@pytest.mark.parametrize("cls", [conv2d_ext.Conv1d, conv2d_ext.Conv2d], ids=lambda c: c.__name__)
@pytest.mark.parametrize("padding", ["same", "valid", 1])
def test_jit_script_of_several_layers(cls, padding):
    layers = nn.Sequential(cls(3, 4, 3, padding=padding), cls(4, 5, 4, padding=padding))
    input = torch.randn(2, 3, *[9, 8][: 1 + (cls is conv2d_ext.Conv2d)])
    scripted = torch.jit.script(layers)
    for _ in range(3):  # TorchScript optimizes after the first calls
        assert torch.equal(scripted(input), layers(input))


CHANGED = {
    "padding, none": {"padding": (0, 0)},
    "padding, an integer": {"padding": 2},
    "padding, a list": {"padding": [0, 1]},
    "padding, one value": {"padding": (2,)},
    "padding, same": {"padding": "same"},
    "padding, valid": {"padding": "valid"},
    "padding, same of a dilated kernel": {"padding": "same", "dilation": (2, 1)},
    "stride, an integer": {"stride": 2, "padding": 0},
    "stride, one value": {"stride": (2,), "padding": 0},
    "stride, a list": {"stride": [2, 1], "padding": 0},
    "dilation, an integer": {"dilation": 2},
    "dilation, one value": {"dilation": (2,)},
    "padding_mode": {"padding_mode": "circular"},
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is")
@pytest.mark.parametrize("before", [1, "same"])
@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize("changed", CHANGED)
def test_torchscript_of_a_changed_layer(changed, how, before):
    """Attributes count as they are when a layer is compiled, not as they were at construction."""
    theirs = nn.Conv2d(4, 6, 3, padding=before)
    for name, value in CHANGED[changed].items():
        setattr(theirs, name, value)
    ours = conv2d_ext.convert(copy.deepcopy(theirs))
    compiled = torch.jit.script(ours) if how == "script" else torch.jit.trace(ours, make_input())
    assert "conv2d_ext::conv2d" in str(compiled.inlined_graph)
    assert torch.equal(compiled(make_input()), ours(make_input()))
    torch.testing.assert_close(compiled(make_input()), theirs(make_input()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"padding": "full"}, "Invalid padding string: 'full'"),
        ({"padding": (1, 1, 1)}, "expected padding to be a single integer value or a list of 2"),
        ({"stride": (1, 1, 1)}, "expected stride to be a single integer value or a list of 2"),
        ({"padding": "same", "stride": (2, 2)}, "not supported for strided convolutions"),
    ],
    ids=str,
)
def test_torchscript_refuses_what_the_layer_refuses(changed, message):
    conv = conv2d_ext.Conv2d(4, 6, 3, padding=1)
    for name, value in changed.items():
        setattr(conv, name, value)
    for layer in (conv, torch.jit.script(conv)):
        with pytest.raises((RuntimeError, torch.jit.Error), match=message):
            layer(make_input())


def test_functional_call_and_vmap_over_weights():
    conv, input = conv2d_ext.Conv2d(4, 6, 3), make_input()
    stacked = {name: torch.stack([p, 2 * p]) for name, p in conv.named_parameters()}
    outputs = torch.func.vmap(
        lambda parameters: torch.func.functional_call(conv, parameters, input)
    )(stacked)
    torch.testing.assert_close(outputs[1], 2 * conv(input))


def test_autocast():
    conv = conv2d_ext.Conv2d(4, 6, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert conv(make_input()).dtype == torch.bfloat16
