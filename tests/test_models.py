"""convert() on a real model: as accurate as torch.nn.Conv2d."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision
from accuracy import times_pytorchs

import conv2d_ext


def _run(model: torch.nn.Module, input: torch.Tensor) -> dict[str, torch.Tensor]:
    """The logits and the gradients of a loss that every logit enters."""
    input = input.detach().clone().requires_grad_()
    logits = model(input)
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype, device=logits.device)
    weights = weights.view_as(logits)
    (logits * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"logits": logits.detach(), "input": input.grad, **gradients}


def _relative_l2(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return ((actual.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_resnet18_is_as_accurate_as_with_nn_conv2d(memory_format, device):
    """Relative L2 error of the logits and of each gradient at most twice nn.Conv2d's own; on CUDA
    as a layer's."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None)
    # Statistics of a batch, so that eval mode keeps activations of order one through all layers.
    model.train()(torch.randn(8, 3, 64, 64))
    model.eval().to(device, memory_format=memory_format)
    input = torch.randn(2, 3, 64, 64).to(device, memory_format=memory_format)

    exact = _run(copy.deepcopy(model).double(), input.double())
    theirs = _run(copy.deepcopy(model), input)
    converted = conv2d_ext.convert(copy.deepcopy(model))
    assert sum(isinstance(m, conv2d_ext.Conv2d) for m in converted.modules()) == 20
    ours = _run(converted, input)

    assert ours.keys() == theirs.keys() == exact.keys()
    for name in exact:
        error, bound = (
            _relative_l2(ours[name], exact[name]),
            _relative_l2(theirs[name], exact[name]),
        )
        allowed = times_pytorchs(device) * bound
        assert error <= allowed, f"{name}: {error:.3g}, nn.Conv2d's {bound:.3g}"
