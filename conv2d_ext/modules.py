"""Drop-in layers of torch.nn, `convert`, which puts them into a model, and `revert`."""

# Without `from __future__ import annotations`: torch.fx copies the annotations of a module that it
# traces, and can't pickle strings.
import collections
import logging
import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy, Tracer
from torch.fx.proxy import TracerBase
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from conv2d_ext.functional import (
    conv1d,
    conv2d,
    conv_transpose1d,
    conv_transpose2d,
    height_and_width,
    linear,
    named_padding,
    one_dimension,
)

_logger = logging.getLogger("conv2d_ext")


# ---- the layers


class _Layer(nn.Module):
    """What makes a layer stand in for PyTorch's: derived from this and from `_pytorch_class`, it
    computes in `_compute`."""

    _pytorch_class = nn.Module

    def forward(self, input: Tensor) -> Tensor:
        return self._compute(input)

    def _call_impl(self, *args: object, **kwargs: object) -> object:
        """A call with its hooks: what torch.nn.Module.__call__ is made of, whatever torch.fx has
        put in its place."""
        # Every call of a layer comes by: mostly a single argument.
        for argument in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(argument, Proxy):
                return self._traced(argument.tracer, args, kwargs)
        return super()._call_impl(*args, **kwargs)

    def _traced(self, tracer: TracerBase, args: tuple, kwargs: dict[str, object]) -> object:
        """A leaf of torch.fx where PyTorch's layer would be one and gets something traced.

        Tracers know leaves by the module of their class, torch.nn: they are asked about the same
        layer as one of torch.nn. The root, whose path is empty, and subclasses are no leaves, and
        graph passes have no modules (a `GraphAppendingTracer`). What surrounds a leaf's forward,
        hooks or a function in its place, is the leaf's, not the graph's.
        """
        if type(self).__module__ == __name__ and isinstance(tracer, Tracer):
            plain = self._pytorch_class.__new__(self._pytorch_class)
            plain.__dict__.update(self.__dict__)
            path = tracer.path_of_module(self)
            if path and tracer.is_leaf_module(plain, path):
                return tracer.create_proxy("call_module", path, args, kwargs)
        return super()._call_impl(*args, **kwargs)

    def __setattr__(self, name: str, value: object) -> None:
        # torch.ao.quantization marks what it will quantize, looks for torch.nn's layers by their
        # exact class, and would leave this one in floating point without a word.
        if name == "qconfig" and value is not None:
            raise NotImplementedError(
                f"conv2d_ext.{self._pytorch_class.__name__} can't be quantized: quantize a model "
                "before conv2d_ext.convert, or set qconfig = None on this layer to leave it in "
                "floating point"
            )
        super().__setattr__(name, value)


class Conv1d(_Layer, nn.Conv1d):
    """`torch.nn.Conv1d` computed by `conv2d_ext.conv1d`.

    Constructor, parameters, state_dict, repr and every padding_mode are those of `torch.nn.Conv1d`.
    Takes (N, C, L) or (C, L) of the weight's dtype and device; raises as `conv2d_ext.conv1d`.
    """

    _pytorch_class = nn.Conv1d

    def _compute(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.weight, self.bias)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padded = self.padding_mode != "zeros"
        if padded:
            # Reflected, replicated and circular borders hold input values: that takes a copy.
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
        if torch.jit.is_scripting():
            # TorchScript knows the op alone, whose padding is (left, right).
            stride = one_dimension("stride", self.stride)
            dilation = one_dimension("dilation", self.dilation)
            border = [0, 0]
            if not padded:
                if isinstance(self.padding, str):
                    border = named_padding(self.padding, weight, stride, dilation)
                else:
                    pad = one_dimension("padding", self.padding)
                    border = [pad[0], pad[0]]
            return torch.ops.conv2d_ext.conv1d(
                input, weight, bias, stride, border, dilation, self.groups
            )
        padding = 0 if padded else self.padding
        return conv1d(input, weight, bias, self.stride, padding, self.dilation, self.groups)


class Conv2d(_Layer, nn.Conv2d):
    """`torch.nn.Conv2d` computed by `conv2d_ext.conv2d`.

    Constructor, parameters, state_dict, repr and every padding_mode are those of `torch.nn.Conv2d`.
    Takes (N, C, H, W) or (C, H, W) of the weight's dtype and device; raises as `conv2d_ext.conv2d`.
    """

    _pytorch_class = nn.Conv2d

    def _compute(self, input: Tensor) -> Tensor:
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


class _TransposedLayer(_Layer):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if self.padding_mode != "zeros":
            raise ValueError("Only `zeros` padding mode is supported for transposed convolutions")
        return self._compute(input, output_size)

    def _call(
        self, function: Callable[..., Tensor], input: Tensor, output_size: list[int] | None
    ) -> Tensor:
        """The attributes as they are: an integer each, or a tuple."""
        dims = 2 if isinstance(self, nn.ConvTranspose2d) else 1
        output_padding = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, dims, self.dilation
        )
        return function(
            input, self.weight, self.bias, self.stride, self.padding, output_padding, self.groups,
            self.dilation,
        )  # fmt: skip


class ConvTranspose1d(_TransposedLayer, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` computed by `conv2d_ext.conv_transpose1d`.

    Constructor, parameters, state_dict, repr and `output_size` of a call are those of
    `torch.nn.ConvTranspose1d`. Takes (N, C, L) or (C, L) of the weight's dtype and device; raises
    as `conv2d_ext.conv_transpose1d`, and ValueError for an output_size out of reach.
    """

    _pytorch_class = nn.ConvTranspose1d

    def _compute(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if torch.jit.is_scripting():  # where a list of integers may be one, too
            stride = one_dimension("stride", self.stride)
            padding = one_dimension("padding", self.padding)
            dilation = one_dimension("dilation", self.dilation)
            kernel_size = one_dimension("kernel_size", self.kernel_size)
            output_padding = self._output_padding(
                input, output_size, stride, padding, kernel_size, 1, dilation
            )
            return torch.ops.conv2d_ext.conv_transpose1d(
                input, self.weight, self.bias, stride, padding, output_padding, self.groups,
                dilation,
            )  # fmt: skip
        return self._call(conv_transpose1d, input, output_size)


class ConvTranspose2d(_TransposedLayer, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` computed by `conv2d_ext.conv_transpose2d`.

    Constructor, parameters, state_dict, repr and `output_size` of a call are those of
    `torch.nn.ConvTranspose2d`. Takes (N, C, H, W) or (C, H, W) of the weight's dtype and device;
    raises as `conv2d_ext.conv_transpose2d`, and ValueError for an output_size out of reach.
    """

    _pytorch_class = nn.ConvTranspose2d

    def _compute(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if torch.jit.is_scripting():  # where a list of integers may be one, too
            stride = height_and_width("stride", self.stride)
            padding = height_and_width("padding", self.padding)
            dilation = height_and_width("dilation", self.dilation)
            kernel_size = height_and_width("kernel_size", self.kernel_size)
            output_padding = self._output_padding(
                input, output_size, stride, padding, kernel_size, 2, dilation
            )
            return torch.ops.conv2d_ext.conv_transpose2d(
                input, self.weight, self.bias, stride, padding, output_padding, self.groups,
                dilation,
            )  # fmt: skip
        return self._call(conv_transpose2d, input, output_size)


class Linear(_Layer, nn.Linear):
    """`torch.nn.Linear` computed by `conv2d_ext.linear`.

    Constructor, parameters, state_dict and repr are those of `torch.nn.Linear`. Takes (..., in) of
    the weight's dtype and device; raises as `conv2d_ext.linear`.
    """

    _pytorch_class = nn.Linear

    def _compute(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return torch.ops.conv2d_ext.linear(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias)


# ---- models


_LAYERS = {
    layer._pytorch_class: layer
    for layer in (Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, Linear)
}

_Module = TypeVar("_Module", bound=nn.Module)


def convert(
    module: _Module,
    *,
    classes: Iterable[type[nn.Module]] = tuple(_LAYERS),
    report: bool = False,
) -> _Module:
    """Replaces the class of each layer of `module`, itself included, by this library's of the same
    name.

    In place; returns `module`. A layer is converted where its class is exactly one of `classes`,
    by default torch.nn's Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d and Linear, or its
    parametrized form (`torch.nn.utils.parametrizations`). Each remains the same object, with its
    parameters, buffers, hooks, mode and attributes. `revert` undoes it.

    Other subclasses may compute something else: they stay as they are, and so do layers prepared
    for quantization, which is done to torch.nn's own; the logger "conv2d_ext" warns of each.
    A `torch.nn.MultiheadAttention`'s out_proj, a subclass of Linear that is never called, stays
    without a warning. report=True prints a table of what was converted and what was left, and why.
    torch.compile does not look at a layer's class: what it has compiled computes as before. Convert
    first, or call `torch.compiler.reset()` while no thread runs compiled code; the logger
    "conv2d_ext" warns where this process has compiled anything.

    Raises TypeError where `module` is not a `torch.nn.Module` or `classes` are not several,
    ValueError for other classes.
    """
    _check_module("convert", module)
    if isinstance(classes, (type, str)) or not isinstance(classes, Iterable):
        raise TypeError(f"convert: expected classes to be a list of classes, but got {classes!r}")
    chosen = tuple(classes)
    unknown = [cls for cls in chosen if cls not in _LAYERS]
    if unknown:
        names = ", ".join(cls.__name__ for cls in _LAYERS)
        raise ValueError(f"convert: classes must be of torch.nn's {names}, got {unknown}")
    rows = []
    for name, child in module.named_modules():
        theirs = next((cls for cls in _LAYERS if isinstance(child, cls)), None)
        if theirs is None:
            continue
        before = type(child).__name__
        kept = "not asked for" if theirs not in chosen else _turn(child, theirs, _LAYERS[theirs])
        rows.append((name or "(root)", before, kept))
        if kept not in ("", "not asked for", _ALREADY):
            level = logging.INFO if kept == _NOT_CALLED else logging.WARNING
            _logger.log(level, "convert: left %s as it is: %s", _place(name), kept)
    if any(not kept for _, _, kept in rows):
        _warn_of_compiled_code("convert")
    if report:
        sys.stdout.write(_table(rows))
    return module


def revert(module: _Module) -> _Module:
    """Replaces the class of this library's layers in `module`, itself included, by torch.nn's.

    It undoes `convert`, in place, and returns `module`: each layer remains the same object, with
    its parameters, parametrizations, buffers, hooks, mode and attributes; only its class changes.
    Layers that were built as this library's are reverted too. Subclasses of them stay as they are,
    and the logger "conv2d_ext" warns of each. Where there are none, nothing changes. What
    torch.compile has compiled computes as before, as after `convert`.

    Raises TypeError where `module` is not a `torch.nn.Module`.
    """
    _check_module("revert", module)
    turned = False
    for name, child in module.named_modules():
        if isinstance(child, _Layer):
            kept = _turn(child, _LAYERS[child._pytorch_class], child._pytorch_class)
            turned = turned or not kept
            if kept:
                _logger.warning("revert: left %s as it is: %s", _place(name), kept)
    if turned:
        _warn_of_compiled_code("revert")
    return module


def _warn_of_compiled_code(function: str) -> None:
    """No guard of torch.compile's looks at a layer's class. Which functions a layer's call has been
    compiled into can't be told, and freeing them all would end threads that run one."""
    # A private name: without it nothing is said, and a test says what is missing.
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    if getattr(getattr(compiler, "input_codes", None), "seen", None):
        _logger.warning(
            "%s: torch.compile has compiled functions before, which call these layers as they "
            "were: torch.compiler.reset() has them compiled again",
            function,
        )


_ALREADY = "one of conv2d_ext's already"
_NOT_CALLED = "torch.nn.MultiheadAttention reads its weight and never calls it"


def _turn(child: nn.Module, old: type[nn.Module], new: type[nn.Module]) -> str:
    """Gives a module of the class `old` the class `new`. Returns why not, or nothing.

    The class is all that differs, so the class is all that changes. A new object, even with the old
    one's __dict__, would leave behind whatever refers to the old one: bound methods in hooks and
    wrapped forwards, a second registration, the caller's own variables.
    """
    if isinstance(child, _Layer) and issubclass(new, _Layer):
        return _ALREADY
    if getattr(child, "qconfig", None) is not None:
        return "it is prepared for quantization"
    if type(child) is old:
        child.__class__ = new
    elif parametrize.is_parametrized(child) and type(child).__bases__ == (old,):
        child.__class__ = _parametrized_class(type(child), new)
    elif type(child) is NonDynamicallyQuantizableLinear:
        return _NOT_CALLED
    else:
        module = "conv2d_ext" if issubclass(old, _Layer) else "torch.nn"
        class_name = f"{type(child).__module__}.{type(child).__qualname__}"
        return f"its class {class_name} is a subclass of {module}.{old.__name__}"
    return ""


def _parametrized_class(cls: type, base: type) -> type:
    """`cls`, which torch made for one module by deriving from a layer, derived from `base`.

    A new class, since deep copies of the module share `cls`; with `base` as its only base, since
    that is what the module becomes when its last parametrization is removed. Turned back, it is the
    first class again, unless parametrizations were added or removed in between.
    """
    before = vars(cls).get("_turned_from")
    if before is not None and before.__bases__ == (base,) and _same_properties(before, cls):
        return before
    return type(cls.__name__, (base,), {**vars(cls), "_turned_from": cls})


def _same_properties(a: type, b: type) -> bool:
    """Whether two classes have the same parametrized tensors, which torch makes properties."""
    names = [{n for n, v in vars(cls).items() if isinstance(v, property)} for cls in (a, b)]
    return names[0] == names[1]


def _check_module(function: str, module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{function}: module must be a torch.nn.Module, got {type(module).__name__}"
        )


def _place(name: str) -> str:
    return f"'{name}'" if name else "the root module"


def _table(rows: list[tuple[str, str, str]]) -> str:
    """Of (path, class, why it was left), a line each, and two that count them."""
    outcomes = [f"left: {kept}" if kept else "converted" for _, _, kept in rows]
    lines = [("module", "class", "convert")]
    lines += [(path, cls, text) for (path, cls, _), text in zip(rows, outcomes, strict=True)]
    widths = [max(len(line[i]) for line in lines) for i in range(2)]
    text = [f"{path:{widths[0]}}  {cls:{widths[1]}}  {what}" for path, cls, what in lines]
    for word in ("converted", "left"):
        counts = collections.Counter(cls for _, cls, kept in rows if bool(kept) == (word == "left"))
        classes = ", ".join(f"{count} {cls}" for cls, count in sorted(counts.items()))
        text.append(f"{word}: {classes or 'none'}")
    return "\n".join(text) + "\n"
