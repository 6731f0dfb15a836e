"""`Conv2d`, a drop-in `torch.nn.Conv2d`, and `convert`, which puts it into a model."""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from conv2d_ext.functional import conv2d

_logger = logging.getLogger("conv2d_ext")


class Conv2d(nn.Conv2d):
    """`torch.nn.Conv2d` computed by `conv2d_ext.conv2d`.

    Constructor, parameters, state_dict, repr and every padding_mode are those of `torch.nn.Conv2d`.
    Takes (N, C, H, W) or (C, H, W) of the weight's dtype and device; raises as `conv2d_ext.conv2d`.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padded = self.padding_mode != "zeros"
        if padded:
            # Reflected, replicated and circular borders hold input values: that takes a copy.
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
        if torch.jit.is_scripting():
            # TorchScript knows the op alone, whose padding is (top, bottom, left, right).
            border = [0, 0, 0, 0] if padded else self._reversed_padding_repeated_twice
            border = border[2:] + border[:2]
            return torch.ops.conv2d_ext.conv2d(
                input, weight, bias, self.stride, border, self.dilation, self.groups
            )
        padding = 0 if padded else self.padding
        return conv2d(input, weight, bias, self.stride, padding, self.dilation, self.groups)


def convert(module: nn.Module) -> nn.Module:
    """Turns every `torch.nn.Conv2d` in `module`, itself included, into a `conv2d_ext.Conv2d`.

    In place; returns `module`. Turned are the modules whose class is exactly `torch.nn.Conv2d`, or
    its parametrized form (`torch.nn.utils.parametrizations`). Each remains the same object, with
    its parameters, buffers, hooks, mode and attributes. Other subclasses may compute something
    else: they stay as they are, and the logger "conv2d_ext" warns of each. Raises TypeError where
    `module` is not a `torch.nn.Module`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"convert: module must be a torch.nn.Module, got {type(module).__name__}")
    for name, child in module.named_modules():
        # The class is all that differs, so the class is all that changes. A new object, even with
        # the old one's __dict__, would leave behind whatever refers to the old one: bound methods
        # in hooks and wrapped forwards, a second registration, the caller's own variables.
        if type(child) is nn.Conv2d:
            child.__class__ = Conv2d
        elif parametrize.is_parametrized(child) and type(child).__bases__ == (nn.Conv2d,):
            child.__class__ = _parametrized_class(type(child))
        elif isinstance(child, nn.Conv2d) and not isinstance(child, Conv2d):
            _logger.warning(
                "convert: left %s as it is: its class %s.%s is a subclass of torch.nn.Conv2d",
                f"'{name}'" if name else "the root module",
                type(child).__module__,
                type(child).__qualname__,
            )
    return module


def _parametrized_class(cls: type) -> type:
    """`cls`, which torch made for one module by deriving from nn.Conv2d, derived from Conv2d.

    A new class, since deep copies of the module share `cls`; with Conv2d as its only base, since
    that is what the module becomes when its last parametrization is removed.
    """
    return type(cls.__name__, (Conv2d,), dict(vars(cls)))
