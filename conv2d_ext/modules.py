"""`Conv2d`, a drop-in `torch.nn.Conv2d`, and `convert`, which puts it into a model."""

# Without `from __future__ import annotations`: torch.fx copies the annotations of a module that it
# traces, and can't pickle strings.
import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.utils import parametrize

from conv2d_ext.functional import conv2d, height_and_width, named_padding

_logger = logging.getLogger("conv2d_ext")


class Conv2d(nn.Conv2d):
    """`torch.nn.Conv2d` computed by `conv2d_ext.conv2d`.

    Constructor, parameters, state_dict, repr and every padding_mode are those of `torch.nn.Conv2d`.
    Takes (N, C, H, W) or (C, H, W) of the weight's dtype and device; raises as `conv2d_ext.conv2d`.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript compiles both sides of `and`)
            if isinstance(input, Proxy):
                return self._traced(input)
        return self._conv_forward(input, self.weight, self.bias)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padded = self.padding_mode != "zeros"
        if padded:
            # Reflected, replicated and circular borders hold input values: that takes a copy.
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
        if torch.jit.is_scripting():
            # TorchScript knows the op alone, whose padding is (top, bottom, left, right).
            stride = height_and_width("stride", self.stride)
            dilation = height_and_width("dilation", self.dilation)
            border = [0, 0, 0, 0]
            if not padded:
                if isinstance(self.padding, str):
                    border = named_padding(self.padding, weight, stride, dilation)
                else:
                    pad = height_and_width("padding", self.padding)
                    border = [pad[0], pad[0], pad[1], pad[1]]
            return torch.ops.conv2d_ext.conv2d(
                input, weight, bias, stride, border, dilation, self.groups
            )
        padding = 0 if padded else self.padding
        return conv2d(input, weight, bias, self.stride, padding, self.dilation, self.groups)

    def _traced(self, input: Proxy) -> Proxy:
        """A leaf of torch.fx wherever a torch.nn.Conv2d would be one.

        Tracers know leaves by the module of their class, torch.nn: they are asked about the same
        layer as a torch.nn.Conv2d. The root, whose path is empty, is no leaf.
        """
        plain = nn.Conv2d.__new__(nn.Conv2d)
        plain.__dict__.update(self.__dict__)
        path = input.tracer.path_of_module(self)
        if path and input.tracer.is_leaf_module(plain, path):
            return input.tracer.create_proxy("call_module", path, (input,), {})
        return self._conv_forward(input, self.weight, self.bias)

    def __setattr__(self, name: str, value: object) -> None:
        # torch.ao.quantization marks what it will quantize, looks for torch.nn.Conv2d by its exact
        # class, and would leave this layer in floating point without a word.
        if name == "qconfig" and value is not None:
            raise NotImplementedError(
                "conv2d_ext.Conv2d can't be quantized: quantize a model before conv2d_ext.convert, "
                "or set qconfig = None on this layer to leave it in floating point"
            )
        super().__setattr__(name, value)


def convert(module: nn.Module) -> nn.Module:
    """Turns every `torch.nn.Conv2d` in `module`, itself included, into a `conv2d_ext.Conv2d`.

    In place; returns `module`. Turned are the modules whose class is exactly `torch.nn.Conv2d`, or
    its parametrized form (`torch.nn.utils.parametrizations`). Each remains the same object, with
    its parameters, buffers, hooks, mode and attributes. Other subclasses may compute something
    else: they stay as they are, and so do layers prepared for quantization, which is done to
    torch.nn.Conv2d alone; the logger "conv2d_ext" warns of each. Raises TypeError where `module` is
    not a `torch.nn.Module`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"convert: module must be a torch.nn.Module, got {type(module).__name__}")
    for name, child in module.named_modules():
        # The class is all that differs, so the class is all that changes. A new object, even with
        # the old one's __dict__, would leave behind whatever refers to the old one: bound methods
        # in hooks and wrapped forwards, a second registration, the caller's own variables.
        if not isinstance(child, nn.Conv2d) or isinstance(child, Conv2d):
            continue
        kept = ""
        if getattr(child, "qconfig", None) is not None:
            kept = "it is prepared for quantization"
        elif type(child) is nn.Conv2d:
            child.__class__ = Conv2d
        elif parametrize.is_parametrized(child) and type(child).__bases__ == (nn.Conv2d,):
            child.__class__ = _parametrized_class(type(child))
        else:
            class_name = f"{type(child).__module__}.{type(child).__qualname__}"
            kept = f"its class {class_name} is a subclass of torch.nn.Conv2d"
        if kept:
            where = f"'{name}'" if name else "the root module"
            _logger.warning("convert: left %s as it is: %s", where, kept)
    return module


def _parametrized_class(cls: type) -> type:
    """`cls`, which torch made for one module by deriving from nn.Conv2d, derived from Conv2d.

    A new class, since deep copies of the module share `cls`; with Conv2d as its only base, since
    that is what the module becomes when its last parametrization is removed.
    """
    return type(cls.__name__, (Conv2d,), dict(vars(cls)))
