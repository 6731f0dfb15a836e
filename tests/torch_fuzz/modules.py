"""Random `Conv2d` layers, and what is done to a layer before and between calls, held against the
same done to `torch.nn.Conv2d`."""

from __future__ import annotations

import copy
import io
import pickle
import random
import warnings
from typing import Any

import torch
import torch.nn.utils.prune
from torch import nn

import conv2d_ext
from conv2d_ext.testing import num_threads

from . import peer
from .cases import Case, Violation, draw, random_problem
from .compositions import _Outcome, compare_outcomes, forget_frames, require_close

PADDING_MODES = ("zeros", "zeros", "zeros", "reflect", "replicate", "circular")


def _assign(name: str, value: Any) -> Any:
    def change(layer: nn.Module, _: torch.Tensor) -> nn.Module:
        setattr(layer, name, tuple(value) if isinstance(value, list) else value)
        return layer

    return change


def _reload(layer: nn.Module, _: torch.Tensor) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    layer.load_state_dict(torch.load(buffer))
    return layer


def _scripted(layer: nn.Module, _: torch.Tensor) -> nn.Module:
    return torch.jit.script(layer)


def _script_saved(layer: nn.Module, _: torch.Tensor) -> nn.Module:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(layer), buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def _frozen_script(layer: nn.Module, _: torch.Tensor) -> nn.Module:
    return torch.jit.freeze(torch.jit.script(layer.eval()))


def _traced(layer: nn.Module, input: torch.Tensor) -> nn.Module:
    return torch.jit.trace(layer, input, check_trace=False)


def _exported(layer: nn.Module, input: torch.Tensor) -> nn.Module:
    return torch.export.export(layer, (input,)).module()


def _compiled(layer: nn.Module, _: torch.Tensor) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(layer, backend="aot_eager")


def _weight_norm(layer: nn.Module, _: torch.Tensor) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(layer)


def _pruned(layer: nn.Module, _: torch.Tensor) -> nn.Module:
    return nn.utils.prune.l1_unstructured(layer, "weight", amount=0.3)


def _hooked(layer: nn.Module, _: torch.Tensor) -> nn.Module:
    layer.register_forward_hook(lambda module, arguments, output: output * 2)
    layer.register_forward_pre_hook(lambda module, arguments: (arguments[0] + 1,))
    layer.register_full_backward_hook(lambda module, inputs, outputs: None)
    return layer


def _frozen(layer: nn.Module, _: torch.Tensor) -> nn.Module:
    layer.weight.requires_grad_(False)
    return layer


CHANGES = {
    "deepcopy": lambda layer, _: copy.deepcopy(layer),
    "pickle": lambda layer, _: pickle.loads(pickle.dumps(layer)),
    "state_dict": _reload,
    "script": _scripted,
    "script_saved": _script_saved,
    "script_frozen": _frozen_script,
    "trace": _traced,
    "symbolic_trace": lambda layer, _: torch.fx.symbolic_trace(layer),
    "export": _exported,
    "compile": _compiled,
    "double": lambda layer, _: layer.double(),
    "bfloat16": lambda layer, _: layer.bfloat16(),
    "channels_last": lambda layer, _: layer.to(memory_format=torch.channels_last),
    "eval": lambda layer, _: layer.eval(),
    "freeze": _frozen,
    "weight_norm": _weight_norm,
    "prune": _pruned,
    "hooks": _hooked,
    "sequential": lambda layer, _: nn.Sequential(layer, nn.ReLU()),
    "convert": lambda layer, _: conv2d_ext.convert(layer) if _is_ours(layer) else layer,
    "share_memory": lambda layer, _: layer.share_memory(),
    "zero_grad": lambda layer, _: (layer.zero_grad(), layer)[1],
}


def _is_ours(layer: nn.Module) -> bool:
    return any(isinstance(module, conv2d_ext.Conv2d) for module in layer.modules())


def _made(case: Case, cls: type[nn.Conv2d]) -> nn.Conv2d:
    problem = case.problem
    torch.manual_seed(case.seed)
    return cls(
        problem.in_channels, problem.out_channels, problem.kernel, problem.stride,
        problem.padding, problem.dilation, problem.groups, problem.bias,
        case.options["padding_mode"], dtype=case.torch_dtype,
    )  # fmt: skip


def _run(case: Case, cls: type[nn.Conv2d]) -> _Outcome:
    generator = torch.Generator().manual_seed(case.seed)
    shape = case.problem.input_shape
    input = draw(case.input, shape, case.torch_dtype, generator)
    if case.options.get("unbatched") and case.problem.batch:
        input = input[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            layer: nn.Module = _made(case, cls)
            if case.options.get("converted") and cls is conv2d_ext.Conv2d:
                layer = conv2d_ext.convert(_made(case, nn.Conv2d))
            for name, *value in case.options["changes"]:
                change = _assign(value[0], value[1]) if name == "assign" else CHANGES[name]
                layer = change(layer, input)
            x = input.detach().requires_grad_(case.options["input_grad"])
            output = layer(x)
            results = [output]
            if output.requires_grad:
                output.abs().square().sum().backward()
                results.append(x.grad)
                results += [p.grad for _, p in sorted(layer.named_parameters())]
            return _Outcome(results, None)
        except Exception as error:
            return _Outcome(None, forget_frames(error))
        finally:
            torch._dynamo.reset()


def check_module(case: Case) -> None:
    assigned = [change[2] for change in case.options["changes"] if change[1:2] == ["padding_mode"]]
    pads = {case.options["padding_mode"], *assigned} != {"zeros"}
    if pads and ["script_frozen"] in case.options["changes"]:
        return  # PyTorch's own padding crashes in a frozen script
    with num_threads(case.threads):
        ours = _run(case, conv2d_ext.Conv2d)
    with peer.calls():
        theirs = _run(case, nn.Conv2d)
    changes = {change[0] for change in case.options["changes"]}
    scripted = bool(changes & {"script", "script_saved", "script_frozen"})
    refused = ours.error is not None and theirs.error is not None
    if refused and scripted and "compile" in changes:
        return  # TorchScript takes no compiled layer; what it trips over follows from the class
    if not compare_outcomes(case, ours, theirs):
        return
    require_close(case, ours.results, theirs.results, None)
    if ours.results[0].stride() != theirs.results[0].stride():
        both = f"{ours.results[0].stride()}, torch.nn's {theirs.results[0].stride()}"
        raise Violation("strides", f"the output has {both}")


_ASSIGNED = {
    "padding": ([0, 0], [1, 1], [2, 0], "same", "valid", 1),
    "stride": ([1, 1], [2, 1]),
    "dilation": ([1, 1], [1, 2]),
    "groups": (1, 2),
    "padding_mode": ("zeros", "reflect"),
}
_RARE = {"compile": 0.1, "export": 0.1, "script_saved": 0.5, "script": 3, "assign": 4}


def random_module(rng: random.Random) -> Case:
    problem = random_problem(rng, 20_000)
    while len(problem.padding) == 4 and problem.padding != "same":
        problem = random_problem(rng, 20_000)
    names = [*CHANGES, "assign"]
    changes: list[list[Any]] = []
    for name in rng.choices(names, [_RARE.get(n, 1) for n in names], k=rng.choice([0, 1, 1, 2, 3])):
        if name == "assign":
            attribute = rng.choice(list(_ASSIGNED))
            changes.append([name, attribute, rng.choice(_ASSIGNED[attribute])])
        else:
            changes.append([name])
    if rng.random() < 0.25:
        # What a constructor computed, and what is assigned later.
        attribute = rng.choice(list(_ASSIGNED))
        changes = [["assign", attribute, rng.choice(_ASSIGNED[attribute])]]
        changes += rng.choice([[["script"]], [["script_saved"]], [["trace"]], [["deepcopy"]], []])
    options = {
        "padding_mode": rng.choice(PADDING_MODES),
        "changes": changes,
        "input_grad": rng.random() < 0.5,
        "converted": rng.random() < 0.4,
        "unbatched": rng.random() < 0.1,
    }
    dtype = rng.choice(["float32", "float32", "float64", "complex64"])
    return Case("module", rng.randrange(10**6), problem, dtype, threads=rng.choice([1, 2]),
                options=options)  # fmt: skip
