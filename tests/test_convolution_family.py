"""conv1d, conv_transpose1d and conv_transpose2d: PyTorch's functions, with this library's promises.

The problems are asymmetric: height and width differ in everything, so that a swap can't pass.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from accuracy import assert_as_accurate, over_draws
from hypothesis import given, settings
from hypothesis import strategies as st
from observing import Recorder, same_bits

import conv2d_ext
from conv2d_ext import _C
from conv2d_ext.testing import Oracle, unit_roundoff

OPS = torch.ops.conv2d_ext
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64,
          torch.complex128)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    name: str  # of the function, and what is special
    input: tuple[int, ...]
    weight: tuple[int, ...]
    kwargs: dict

    def __str__(self) -> str:
        return self.name

    @property
    def function(self) -> str:
        return self.name.split(",")[0]

    @property
    def ours(self) -> Callable[..., torch.Tensor]:
        return getattr(conv2d_ext, self.function)

    @property
    def theirs(self) -> Callable[..., torch.Tensor]:
        return getattr(F, self.function)

    @property
    def out_channels(self) -> int:
        if "transpose" not in self.function:
            return self.weight[0]
        return self.weight[1] * self.kwargs.get("groups", 1)

    def tensors(self, dtype=torch.float64, device="cpu") -> list[torch.Tensor]:
        """Input, weight and bias. Integers in [-9, 9]."""
        shapes = (self.input, self.weight, (self.out_channels,))
        if not (dtype.is_floating_point or dtype.is_complex):
            return [torch.randint(-9, 10, shape, device=device).to(dtype) for shape in shapes]
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return [torch.randn(shape, dtype=wide, device=device).to(dtype) for shape in shapes]


CASES = (
    Case("conv1d", (3, 4, 11), (6, 4, 3), {}),
    Case("conv1d, everything", (3, 4, 17), (6, 2, 4),
         {"stride": 3, "padding": 2, "dilation": 2, "groups": 2}),
    Case("conv1d, same", (3, 4, 11), (6, 4, 4), {"padding": "same", "dilation": 3}),
    Case("conv1d, valid", (3, 4, 11), (6, 4, 4), {"padding": "valid", "stride": (2,)}),
    Case("conv1d, depthwise", (3, 6, 13), (12, 1, 5), {"padding": 2, "groups": 6}),
    Case("conv1d, pointwise", (3, 8, 9), (5, 8, 1), {}),
    Case("conv_transpose1d", (3, 4, 7), (4, 5, 3), {}),
    Case("conv_transpose1d, everything", (3, 4, 7), (4, 3, 4),
         {"stride": 3, "padding": 2, "output_padding": 1, "groups": 2, "dilation": 2}),
    Case("conv_transpose1d, depthwise", (3, 6, 9), (6, 1, 4),
         {"stride": 2, "padding": 1, "groups": 6}),
    Case("conv_transpose2d", (3, 4, 5, 6), (4, 5, 3, 2), {}),
    Case("conv_transpose2d, everything", (3, 4, 5, 6), (4, 3, 3, 2),
         {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2), "groups": 2,
          "dilation": (1, 2)}),
    Case("conv_transpose2d, patches", (3, 6, 4, 3), (6, 4, 2, 3), {"stride": (2, 3)}),
    Case("conv_transpose2d, output padding by the dilation", (2, 3, 4, 5), (3, 2, 3, 2),
         {"stride": (1, 2), "padding": (1, 0), "output_padding": (2, 4), "dilation": (3, 5)}),
    Case("conv_transpose2d, output padding alone", (2, 3, 1, 2), (3, 2, 1, 1),
         {"padding": (1, 0), "output_padding": (2, 1), "dilation": (3, 2)}),
    Case("conv_transpose2d, depthwise", (3, 6, 5, 4), (6, 1, 3, 2),
         {"stride": (2, 1), "padding": (1, 0), "groups": 6}),
)  # fmt: skip
over_cases = pytest.mark.parametrize("case", CASES, ids=str)
EVERYTHING = tuple(case for case in CASES if "everything" in case.name)
over_functions = pytest.mark.parametrize("case", EVERYTHING, ids=lambda case: case.function)

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


def results(function, case: Case, tensors, grad_output=None) -> list[torch.Tensor]:
    """The output and, for a gradient of it, those of all tensors."""
    if grad_output is None:
        return [function(*tensors, **case.kwargs)]
    tensors = [t.detach().requires_grad_() for t in tensors]
    output = function(*tensors, **case.kwargs)
    return [output.detach(), *torch.autograd.grad(output, tensors, grad_output)]


def assert_accurate(ours, theirs, exact: Oracle, dtype, what="result") -> None:
    """As guarantee 3 has it, by both error measures; where the oracle is of the dtype itself, to a
    bound on both results' roundings."""
    if exact.value.dtype != dtype:
        assert_as_accurate(ours, theirs, exact, what)
        return
    assert exact.relative_l2(ours) <= 8 * unit_roundoff(dtype), what
    assert exact.max_scaled_error(ours) <= 8 * unit_roundoff(dtype), what


# ---- values


def values_and_gradients(case, dtype, device) -> list[tuple[torch.Tensor, ...]]:
    """Of one draw, for each result: ours, PyTorch's, the exact one and the sums of |a*b|."""
    tensors = case.tensors(dtype, device)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    grad_output = torch.randn_like(case.theirs(*(t.to(wide) for t in tensors), **case.kwargs))
    grad_output = grad_output.to(dtype)
    exact, magnitudes = (
        results(case.theirs, case, [f(t.to(wide)) for t in tensors], f(grad_output.to(wide)))
        for f in (torch.clone, torch.abs)
    )
    ours, theirs = (
        results(function, case, tensors, grad_output) for function in (case.ours, case.theirs)
    )
    return list(zip(ours, theirs, exact, magnitudes, strict=True))


@over_cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(case, dtype, device):
    """Over several draws: of few sums, one lucky rounding of PyTorch's would be the bound."""
    torch.set_num_threads(1)  # many small calls

    def check(count: int) -> None:
        draws = [values_and_gradients(case, dtype, device) for _ in range(count)]
        names = ("output", "grad_input", "grad_weight", "grad_bias")
        for name, *found in zip(names, *draws, strict=True):
            for ours, theirs, _, _ in found:
                assert ours.shape == theirs.shape, name
                assert ours.dtype == dtype, name
            ours, theirs, value, magnitude = (
                torch.cat([tensor.flatten() for tensor in each])
                for each in zip(*found, strict=True)
            )
            assert_accurate(ours, theirs, Oracle(value, None, magnitude), dtype, name)

    over_draws(check)


@over_cases
@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str
)
def test_integers_are_exact(case, dtype):
    tensors = case.tensors(torch.int64)
    (exact,) = results(case.theirs, case, [t.double() for t in tensors])
    (ours,) = results(case.ours, case, [t.to(dtype) for t in tensors])
    assert torch.equal(ours, exact.to(torch.int64).to(dtype))


@over_cases
def test_without_bias_and_without_batch(case):
    input, weight, bias = case.tensors()
    for args in ((input, weight), (input[0], weight, bias), (input[0], weight)):
        actual = case.ours(*args, **case.kwargs)
        torch.testing.assert_close(actual, case.theirs(*args, **case.kwargs))
    assert same_bits(case.ours(input[1], weight, **case.kwargs),
                     case.ours(input, weight, **case.kwargs)[1])  # fmt: skip


@over_cases
def test_empty_batch(case, device):
    input, weight, bias = (t.requires_grad_() for t in case.tensors(device=device))
    output = case.ours(input[:0], weight, bias, **case.kwargs)
    assert output.shape == case.theirs(input[:0], weight, bias, **case.kwargs).shape
    for gradient in torch.autograd.grad(output.sum(), (input, weight, bias)):
        assert not gradient.count_nonzero()


@pytest.mark.parametrize(
    ("input", "kwargs"),
    [
        ((0, 4, 0, 6), {}),
        ((0, 4, 5, 0), {"stride": (1, 2), "output_padding": (0, 1)}),
        ((0, 4, 0, 0), {"output_padding": 2, "dilation": 3}),
        ((0, 4, 4, 6), {"padding": (3, 0)}),
    ],
    ids=str,
)
def test_empty_batch_of_images_without_pixels(input, kwargs):
    tensors = [torch.randn(shape, requires_grad=True) for shape in (input, (4, 3, 3, 2), (3,))]
    output = conv2d_ext.conv_transpose2d(*tensors, **kwargs)
    assert output.shape == F.conv_transpose2d(*tensors, **kwargs).shape
    for gradient, tensor in zip(torch.autograd.grad(output.sum(), tensors), tensors, strict=True):
        assert gradient.shape == tensor.shape
        assert not gradient.count_nonzero()


@st.composite
def problems(draw):
    """A function with random arguments that may not fit: F says whether they do."""
    dims = draw(st.sampled_from([1, 2]))
    transposed = dims == 2 or draw(st.booleans())
    groups = draw(st.sampled_from([1, 1, 2, 3]))

    def sizes(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    channels = tuple(draw(st.integers(1, 6)) for _ in range(2))
    kwargs = {"stride": sizes(1, 4), "padding": sizes(0, 4), "dilation": sizes(1, 3)}
    kwargs["groups"] = groups
    if transposed:
        kwargs["output_padding"] = sizes(0, 3)
        weight = (groups * channels[0], channels[1], *sizes(1, 4))
    else:
        weight = (groups * channels[1], channels[0], *sizes(1, 4))
        if draw(st.booleans()):
            kwargs["padding"], kwargs["stride"] = "same", (1,)
    name = f"conv_transpose{dims}d" if transposed else f"conv{dims}d"
    return Case(name, (draw(st.integers(1, 3)), groups * channels[0], *sizes(1, 9)), weight, kwargs)


@settings(max_examples=100)
@given(case=problems(), channels_last=st.tuples(st.booleans(), st.booleans()))
def test_random_problems(case, channels_last):
    tensors = [
        t.transpose(1, -1).contiguous().transpose(1, -1) if last else t
        for t, last in zip(case.tensors(), (*channels_last, False), strict=True)
    ]
    try:
        expected = case.theirs(*tensors, **case.kwargs)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            case.ours(*tensors, **case.kwargs)
        return
    grad_output = torch.randn_like(expected)
    ours = results(case.ours, case, tensors, grad_output)
    theirs = results(case.theirs, case, tensors, grad_output)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    single = case.ours(*(t.float() for t in tensors), **case.kwargs)
    torch.testing.assert_close(single, expected.float(), rtol=1e-5, atol=1e-5)


# ---- guarantees


def image_bits(case: Case, tensors, images, threads=1) -> list[torch.Tensor]:
    """Outputs and input gradients of a batch made of these images of the tensors."""
    torch.set_num_threads(threads)
    input = tensors[0][images].detach().requires_grad_()
    output = case.ours(input, *tensors[1:], **case.kwargs)
    grad_output = torch.linspace(-1, 1, output[0].numel()).reshape(output[0].shape)
    (gradient,) = torch.autograd.grad(output, input, grad_output.to(output).expand_as(output))
    return [output.detach(), gradient]


LARGE = (
    Case("conv1d", (5, 24, 301), (40, 24, 7), {"stride": 2, "padding": 3}),
    Case("conv1d, pointwise", (5, 64, 100), (48, 64, 1), {}),
    Case("conv_transpose1d", (5, 32, 61), (32, 24, 8), {"stride": 4, "padding": 2}),
    Case("conv_transpose2d", (5, 24, 13, 11), (24, 20, 4, 3),
         {"stride": (2, 1), "padding": (1, 0), "output_padding": (1, 0)}),
    Case("conv_transpose2d, patches", (5, 24, 13, 11), (24, 20, 2, 2), {"stride": 2}),
)  # fmt: skip


over_large = pytest.mark.parametrize("case", LARGE, ids=str)
# complex128 takes complex64's way, of other elements.
over_dtypes = pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)


@over_dtypes
@over_large
def test_bits_follow_neither_batch_nor_place_nor_threads(case, dtype):
    tensors = case.tensors(dtype)
    whole = image_bits(case, tensors, [0, 1, 2, 3, 4])
    for images, threads in (([2], 1), ([4, 2], 2), ([2, 0, 1], 3), ([1, 1, 1, 2, 0, 3], 4)):
        part = image_bits(case, tensors, images, threads)
        for some, all_images in zip(part, whole, strict=True):
            assert same_bits(some, all_images[images])


@over_dtypes
@over_large
def test_bits_of_weight_and_bias_gradients_follow_no_threads(case, dtype):
    tensors = case.tensors(dtype)
    grad_output = torch.randn_like(case.ours(*tensors, **case.kwargs))
    grad_output = grad_output.repeat(4, *(1,) * (grad_output.dim() - 1))
    tensors[0] = tensors[0].repeat(4, *(1,) * (grad_output.dim() - 1))
    gradients = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        gradients.append(results(case.ours, case, tensors, grad_output)[2:])
    for others in gradients[1:]:
        assert all(same_bits(a, b) for a, b in zip(others, gradients[0], strict=True))


def formats(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensor with the strides that layers and models give to theirs."""
    return {
        "contiguous": tensor.contiguous(),
        "channels last": tensor.transpose(1, -1).contiguous().transpose(1, -1),
        "sliced": tensor.repeat_interleave(2, dim=-1)[..., ::2],
        "transposed": tensor.transpose(0, 1).contiguous().transpose(0, 1),
    }


@over_dtypes
@over_large
def test_bits_follow_neither_strides_nor_format(case, dtype):
    """Of the output and of all gradients: every argument's at once, and for float32 one by one."""
    tensors = case.tensors(dtype)
    plain = [*tensors, torch.randn_like(case.ours(*tensors, **case.kwargs))]
    expected = results(case.ours, case, plain[:3], plain[3])
    for layout in formats(plain[0]):
        laid = [t if t.dim() == 1 else formats(t)[layout] for t in plain]
        calls = [laid]
        if dtype == torch.float32:
            calls += [[*plain[:i], laid[i], *plain[i + 1 :]] for i in (0, 1, 3)]
        for *arguments, grad_output in calls:
            found = results(case.ours, case, arguments, grad_output)
            assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True)), layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("sizes", [(2, 4, 6), (2, 1, 6), (1, 4, 1), (2, 4, 1)], ids=str)
@over_functions
def test_output_strides_are_pytorchs(case, sizes, dtype, device):
    """One image of one channel and pixel is left out: any strides describe its output."""
    batch, channels, width = sizes
    dims = len(case.input) - 2
    transposed = "transpose" in case.function
    for kernel in (1, 2):
        weight_shape = (channels, 3) if transposed else (3, channels)
        kwargs = {} if transposed or kernel == 1 else {"padding": "same"}
        inputs = formats(torch.randn(batch, channels, *(width,) * dims, device=device).to(dtype))
        weights = formats(torch.randn(*weight_shape, *(kernel,) * dims, device=device).to(dtype))
        for input in inputs.values():
            for weight in weights.values():
                for args in ((input, weight), (input[0], weight)):
                    theirs, ours = case.theirs(*args, **kwargs), case.ours(*args, **kwargs)
                    assert ours.stride() == theirs.stride(), (input.stride(), weight.stride())


@over_cases
def test_weight_gradients_have_the_weights_strides(case):
    input, weight, bias = case.tensors(torch.float32)
    for layout in ("contiguous", "channels last", "transposed"):
        view = formats(weight)[layout].detach().requires_grad_()
        (gradient,) = torch.autograd.grad(case.ours(input, view, bias, **case.kwargs).sum(), view)
        assert gradient.stride() == view.stride()


@over_cases
def test_meta_tensors_have_the_real_strides(case):
    for layout in ("contiguous", "channels last"):
        input, weight, bias = case.tensors(torch.float32)
        args = formats(input)[layout], weight, bias
        real = case.ours(*args, **case.kwargs)
        meta = case.ours(*(t.to("meta") for t in args), **case.kwargs)
        assert (meta.device.type, meta.shape) == ("meta", real.shape)
        assert meta.stride() == real.stride()


@pytest.mark.parametrize("name", ["input", "weight", "bias"])
@over_functions
def test_freed_storage_is_refused(case, name):
    tensors = dict(zip(("input", "weight", "bias"), case.tensors(torch.float32), strict=True))
    tensors[name].untyped_storage().resize_(0)
    # The second is PyTorch's, of a view.
    message = "its data is not allocated yet|are out of bounds for storage of size 0"
    with pytest.raises(RuntimeError, match=message):
        case.ours(**tensors, **case.kwargs)


# ---- errors


@dataclasses.dataclass(frozen=True)
class BadCall:
    """Shapes and arguments, PyTorch's phrase ('' where its message names none), ours besides."""

    function: str
    phrase: str
    names: tuple[str, ...] = ()
    input: tuple[int, ...] | None = None
    weight: tuple[int, ...] | None = None
    bias: tuple[int, ...] | None = None
    kwargs: dict = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        parts = (self.input, self.weight, self.bias, self.kwargs or None)
        return f"{self.function} {' '.join(str(p) for p in parts if p is not None)}"

    def tensors(self, device="cpu") -> list[torch.Tensor | None]:
        dims = int(self.function[-2])
        input = (2, 4, 8, 9)[: dims + 2] if self.input is None else self.input
        kernel = (3, 2)[:dims]
        weight = ((4, 3) if "transpose" in self.function else (6, 4)) + kernel
        weight = weight if self.weight is None else self.weight
        shapes = (input, weight, self.bias)
        return [None if shape is None else torch.randn(shape, device=device) for shape in shapes]


def bad_calls():
    for function in ("conv1d", "conv_transpose1d", "conv_transpose2d"):
        dims = int(function[-2])
        transposed = "transpose" in function
        names = ("stride", "padding", "dilation", *(("output_padding",) if transposed else ()))
        lists = f"to be a single integer value or a list of {dims} values to match the convolution"
        for name in names:
            for value in ((1,) * (dims + 1), ()):
                yield BadCall(function, f"expected {name} {lists}", (f"{name}={list(value)}",),
                              kwargs={name: value})  # fmt: skip
        yield BadCall(function, "negative padding is not supported", ("-1",),
                      kwargs={"padding": -1})  # fmt: skip
        for stride in (0, -1):
            yield BadCall(function, "non-positive stride is not supported", ("stride=",),
                          kwargs={"stride": stride})  # fmt: skip
            yield BadCall(function, "", ("dilation should be greater than zero",),
                          kwargs={"dilation": stride})  # fmt: skip
            yield BadCall(function, "non-positive groups is not supported",
                          kwargs={"groups": stride})  # fmt: skip
        yield BadCall(function, "", ("padding",), kwargs={"padding": 2**62})
        ranks = f"Expected {dims + 1}D (unbatched) or {dims + 2}D (batched) input to {function}, but got input of size: "  # noqa: E501
        for shape in ((5,) * dims, (1,) * (dims + 3)):
            yield BadCall(function, f"{ranks}{list(shape)}", input=shape)
        yield BadCall(function, "weight should have at least three dimensions", weight=(4, 3))
        names = ("Expected 5-dimensional input for 5-dimensional weight [4, 4, 3, 3, 3], but got",)
        yield BadCall(function, "", names, weight=(4, 4, 3, 3, 3))
        weight = (5, 4, 3, 2)[: dims + 2]
        yield BadCall(function, "Given groups=2, expected weight to be divisible by 2 at dimension",
                      ("5, 4, 3",), weight=weight, kwargs={"groups": 2})  # fmt: skip
        yield BadCall(function, "Given groups=8, expected weight to be at least 8 at dimension 0",
                      kwargs={"groups": 8})  # fmt: skip
        empty = (2, 4, 0, 9) if dims == 2 else (2, 4, 0)
        yield BadCall(function, "Only zero batch or zero channel inputs are supported",
                      (str(list(empty)),), input=empty,
                      kwargs={"padding": 0 if transposed else 2})  # fmt: skip
        wrong = (2, 5, 8, 9)[: dims + 2]
        yield BadCall(function, f"expected input{list(wrong)} to have 4 channels, but got 5 "
                      "channels instead", input=wrong)  # fmt: skip
        for bias in ((5,), (1,), (), (3, 1)):
            yield BadCall(function, "expected bias to be 1-dimensional with",
                          (f"bias of size {list(bias)}",), bias=bias)  # fmt: skip
        yield BadCall(function, "", ("kernel",), weight=(4, 4, 0, 2)[: dims + 2])
        if not transposed:
            continue
        yield BadCall(function, "negative output_padding is not supported",
                      kwargs={"output_padding": -1})  # fmt: skip
        for arguments in (
            {"output_padding": 1},
            {"output_padding": 2, "stride": 2},
            {"output_padding": 3, "stride": 2, "dilation": 3},
        ):
            yield BadCall(function, "output padding must be smaller than either stride or dilation",
                          kwargs=arguments)  # fmt: skip
        yield BadCall(function, "", ("Output size is too small",), kwargs={"padding": 6})
        yield BadCall(function, "", ("non-empty",), weight=(4, 0, 3, 2)[: dims + 2])
    yield BadCall("conv_transpose2d", "output padding must be smaller",
                  kwargs={"output_padding": (0, 1), "stride": (2, 1)})  # fmt: skip
    for padding in ("full", "SAME"):
        yield BadCall("conv1d", f"Invalid padding string: '{padding}'", kwargs={"padding": padding})
    yield BadCall("conv1d", "padding='same' is not supported for strided convolutions",
                  kwargs={"padding": "same", "stride": 2})  # fmt: skip
    yield BadCall("conv1d", "Calculated padded input size per channel: (8). Kernel size: (9). "
                  "Kernel size can't be greater than actual input size",
                  ("[2, 4, 8]", "[6, 4, 9]"), weight=(6, 4, 9))  # fmt: skip


@pytest.mark.parametrize("call", list(bad_calls()), ids=str)
def test_bad_calls(call):
    tensors = call.tensors()
    ours, theirs = getattr(conv2d_ext, call.function), getattr(F, call.function)
    with pytest.raises(Exception) as expected:
        theirs(*tensors, **call.kwargs)
    assert call.phrase in str(expected.value), "PyTorch no longer says so"
    for device in ("cpu", "meta"):
        on_device = [t if t is None else t.to(device) for t in tensors]
        with pytest.raises(Exception) as raised:
            ours(*on_device, **call.kwargs)
        assert raised.type is expected.type
        for text in (call.phrase, *call.names):
            assert text in str(raised.value)


@pytest.mark.parametrize(
    ("kwargs"),
    [
        {"stride": 1.5}, {"stride": None}, {"stride": True}, {"dilation": "1"}, {"padding": 0.5},
        {"groups": 1.0}, {"groups": True}, {"unknown": 1}, {"bias": "b"}, {"stride": (True,)},
    ],
    ids=str,
)  # fmt: skip
@over_functions
def test_types_of_arguments(case, kwargs):
    input, weight, _ = case.tensors(torch.float32)
    functions = [case.theirs, case.ours]
    if "unknown" not in kwargs and "bias" not in kwargs:
        functions.append(torch.compile(case.ours, backend="eager"))
    for function in functions:
        with pytest.raises(TypeError):
            function(input, weight, **kwargs)


@over_functions
def test_transposed_take_no_named_padding(case):
    if "transpose" in case.function:
        for function in (case.theirs, case.ours, torch.compile(case.ours, backend="eager")):
            with pytest.raises(TypeError):
                function(*case.tensors(), padding="same")


@over_functions
def test_kinds_that_differ(case):
    input, weight, bias = case.tensors(torch.float32)
    for args in (
        (input, weight.double(), bias),
        (input, weight, bias.double()),
        (input, weight, bias + 0j),
    ):
        for function in (case.theirs, case.ours):
            with pytest.raises(RuntimeError, match=r"Input type .* should be the same"):
                function(*args, **case.kwargs)
    with pytest.raises(RuntimeError, match="same device"):
        case.ours(input, weight, bias.to("meta"), **case.kwargs)
    bools = f"\"{case.function}\" not implemented for 'Bool': input is a"
    with pytest.raises(NotImplementedError, match=bools):
        case.ours(input.bool(), weight.bool(), **case.kwargs)
    sparse = {"input": (input.to_sparse(), weight), "weight": (input, weight.to_sparse())}
    for name, args in sparse.items():
        with pytest.raises(RuntimeError, match=f"{case.function}: expected {name} to be a dense"):
            case.ours(*args, **case.kwargs)


@over_functions
def test_sizes_are_refused_before_dtypes(case):
    """As PyTorch does, of a call that is wrong in both."""
    input, weight, _ = case.tensors(torch.float32)
    wrong = torch.cat((input, input), 1).double()
    for function in (case.theirs, case.ours):
        with pytest.raises(RuntimeError, match=r"to have \d+ channels, but got \d+ channels"):
            function(wrong, weight, **case.kwargs)


# ---- PyTorch's own samples


def opinfo(name: str):
    pytest.importorskip("expecttest", reason="PyTorch's samples need it")
    from torch.testing._internal.common_methods_invocations import op_db

    return next(op for op in op_db if op.name == f"nn.functional.{name}")


def test_error_inputs(device):
    """PyTorch has some of conv1d, and of transposed ones none, at 2.11."""
    found = set()
    for case in EVERYTHING:
        info = opinfo(case.function)
        for error in info.error_inputs(device) if info.error_inputs_func else ():
            found.add(case.function)
            sample = error.sample_input
            with pytest.raises(error.error_type, match=error.error_regex):
                case.ours(sample.input, *sample.args, **sample.kwargs)
    assert "conv1d" in found


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.complex64, torch.int64], ids=str
)
@over_functions
def test_samples(case, dtype, device):
    samples = list(opinfo(case.function).sample_inputs(device, dtype))
    assert samples
    for sample in samples:
        args = (sample.input, *sample.args)
        ours, theirs = case.ours(*args, **sample.kwargs), case.theirs(*args, **sample.kwargs)
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()


# ---- derivatives and transforms


SMALL = (
    Case("conv1d", (2, 4, 6), (6, 2, 3), {"stride": 2, "padding": 1, "groups": 2}),
    Case("conv_transpose1d", (2, 4, 3), (4, 3, 2),
         {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2}),
    Case("conv_transpose2d", (2, 2, 3, 2), (2, 2, 3, 2),
         {"stride": (2, 1), "padding": (1, 0), "output_padding": (1, 0), "groups": 2,
          "dilation": (1, 2)}),
    Case("conv_transpose2d, appended zeros", (2, 2, 3, 2), (2, 2, 2, 2),
         {"output_padding": (1, 2), "dilation": (2, 3)}),
)  # fmt: skip
over_small = pytest.mark.parametrize("case", SMALL, ids=str)


@over_small
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_gradcheck(case, dtype):
    tensors = [t.requires_grad_() for t in case.tensors(dtype)]

    def function(*args):
        return case.ours(*args, **case.kwargs)

    torch.autograd.gradcheck(
        function, tensors, fast_mode=True, check_forward_ad=True, check_batched_grad=True,
        check_batched_forward_grad=True,
    )  # fmt: skip
    torch.autograd.gradgradcheck(function, tensors, fast_mode=True, check_fwd_over_rev=True)


@over_small
@pytest.mark.parametrize(
    "dims", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, None), (0, 0, 0)], ids=str
)
def test_vmap(case, dims):
    tensors = case.tensors()
    stacked = [
        t if dim is None else torch.stack([t, -2 * t, t.flip(0)])
        for t, dim in zip(tensors, dims, strict=True)
    ]
    outputs = torch.func.vmap(lambda *args: case.ours(*args, **case.kwargs), dims)(*stacked)
    for i, output in enumerate(outputs):
        example = [t if dim is None else t[i] for t, dim in zip(stacked, dims, strict=True)]
        torch.testing.assert_close(output, case.ours(*example, **case.kwargs))


@over_small
def test_func_transforms(case):
    tensors = case.tensors()

    def loss(function, *args):
        return function(*args, **case.kwargs).pow(3).sum()

    for argument in range(3):
        for transform in (torch.func.grad, torch.func.jacfwd):
            actual, expected = (
                transform(lambda *args, f=f: loss(f, *args), argument)(*tensors)
                for f in (case.ours, case.theirs)
            )
            torch.testing.assert_close(actual, expected)
    hessian = torch.func.hessian(lambda bias: loss(case.ours, *tensors[:2], bias))(tensors[2])
    expected = torch.func.hessian(lambda bias: loss(case.theirs, *tensors[:2], bias))(tensors[2])
    torch.testing.assert_close(hessian, expected)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
@over_small
def test_opcheck(case, requires_grad):
    tensors = [t.requires_grad_(requires_grad) for t in case.tensors()]
    dims = len(case.input) - 2
    names = ["stride", "padding", "dilation", "groups"]
    if "transpose" in case.function:
        names = ["stride", "padding", "output_padding", "groups", "dilation"]
    arguments = []
    for name in names:
        value = case.kwargs.get(name, 1 if name in ("stride", "dilation", "groups") else 0)
        if name != "groups":
            value = list(value) if isinstance(value, tuple) else [value] * dims
        if name == "padding" and case.function == "conv1d":
            value = value * 2
        arguments.append(value)
    torch.library.opcheck(getattr(OPS, case.function), (*tensors, *arguments))


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
def test_opcheck_of_adding_a_bias(requires_grad):
    for output in (torch.randn(2, 3, 4, 5), torch.randn(3, 4, 5), torch.randn(2, 4, 5, 3).mT):
        bias = torch.randn(output.size(-3), requires_grad=requires_grad)
        output = output.to(memory_format=torch.channels_last) if output.dim() == 4 else output
        output.requires_grad_(requires_grad)
        torch.library.opcheck(OPS.conv2d_add_bias, (output, bias))
    for bias in (torch.randn(4), torch.randn(3, 1), torch.randn(3).double()):
        with pytest.raises(RuntimeError, match="expected bias to be 1-dimensional"):
            OPS.conv2d_add_bias(torch.randn(2, 3, 4, 5), bias)


@pytest.fixture
def _forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_forget_compiled_code")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@over_functions
def test_compile_is_one_graph_with_the_same_results(case, dynamic):
    def step(*args):
        return case.ours(*args, **case.kwargs).relu()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for batch in (3, 2):
        tensors = case.tensors(torch.float32)
        tensors[0] = tensors[0][:batch]
        for layout in ("contiguous", "channels last")[: 1 if dynamic else 2]:
            tensors = [formats(tensors[0])[layout], *tensors[1:]]
            actual = differentiated(compiled, tensors)
            for ours, theirs in zip(actual, differentiated(step, tensors), strict=True):
                assert torch.equal(ours, theirs)
                assert ours.stride() == theirs.stride()


def differentiated(function, tensors) -> list[torch.Tensor]:
    tensors = [t.detach().requires_grad_() for t in tensors]
    output = function(*tensors)
    return [output.detach(), *torch.autograd.grad(output.sum(), tensors)]


@pytest.mark.usefixtures("_forget_compiled_code")
@over_functions
def test_compiled_autograd(case):
    def step(*args):
        return case.ours(*args, **case.kwargs)

    tensors = case.tensors(torch.float32)
    expected = differentiated(step, tensors)
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        actual = differentiated(step, tensors)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)


@over_functions
def test_exported_programs_have_free_sizes(case):
    """From 8 on: where an output may have a size of one, torch specialises its strides."""
    _, weight, bias = case.tensors(torch.float32)

    class Layer(torch.nn.Module):
        def forward(self, input):
            return case.ours(input, weight, bias, **case.kwargs)

    sizes = (9, case.input[1], 11, 13)[: len(case.input)]
    free = {i: torch.export.Dim(f"size{i}", min=8, max=64) for i in (0, 2, 3)[: len(sizes) - 1]}
    program = torch.export.export(Layer(), (torch.randn(sizes),), dynamic_shapes=(free,))
    other = torch.randn(10, case.input[1], *(17, 20)[: len(sizes) - 2])
    assert torch.equal(program.module()(other), Layer()(other))


@over_functions
def test_autocast(case):
    input, weight, bias = case.tensors(torch.float32)
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = [f(input, weight, bias, **case.kwargs) for f in (case.ours, case.theirs)]
        with Recorder() as recorder:  # the weight's cast is cached
            case.ours(input, weight, bias, **case.kwargs)
    assert recorder.names.count("aten::_to_copy") == 2
    lower = case.ours(*(t.bfloat16() for t in (input, weight, bias)), **case.kwargs)
    for output in outputs:
        assert output.dtype == torch.bfloat16
        torch.testing.assert_close(output, lower, rtol=0.02, atol=0.1)
    assert torch.equal(outputs[0], lower)
    outputs[0].sum().backward()
    assert weight.grad.dtype == torch.float32


@over_functions
def test_torch_function_sees_the_call(case):
    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs)

    seen = []
    input, *others = case.tensors()
    output = case.ours(input.as_subclass(Seen), *others, **case.kwargs)
    assert type(output) is Seen
    assert case.ours in seen


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is")
@over_functions
def test_jit_trace(case):
    tensors = case.tensors()
    traced = torch.jit.trace(lambda *args: case.ours(*args, **case.kwargs), tuple(tensors))
    assert torch.equal(traced(*tensors), case.ours(*tensors, **case.kwargs))


# ---- aten::convolution's arguments


def as_aten(case: Case) -> tuple:
    """What follows the tensors."""
    dims = len(case.input) - 2

    def of(name, default):
        value = case.kwargs.get(name, default)
        return list(value) if isinstance(value, tuple) else [value] * dims

    return (
        of("stride", 1), of("padding", 0), of("dilation", 1), "transpose" in case.function,
        of("output_padding", 0), case.kwargs.get("groups", 1),
    )  # fmt: skip


CONV2D = Case("conv2d", (3, 4, 7, 9), (6, 2, 3, 2),
              {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2), "groups": 2})  # fmt: skip


@pytest.mark.parametrize("case", [CONV2D, *EVERYTHING], ids=lambda case: case.function)
def test_one_entry_for_all(case):
    tensors = case.tensors()
    arguments = as_aten(case)
    assert _C.takes_convolution(*tensors, *arguments)
    output = _C.convolution(*tensors, *arguments)
    assert torch.equal(output, case.ours(*tensors, **case.kwargs))
    torch.testing.assert_close(output, torch.ops.aten.convolution(*tensors, *arguments))


PATCHES = {
    "one deep patch": ((3, 3, 2, 8, 6), (10, 3, 2, 4, 3), 1),
    "several deep patches": ((2, 3, 7, 8, 7), (10, 3, 2, 4, 3), 1),
    "the whole input": ((5, 3, 2, 4, 3), (10, 3, 2, 4, 3), 1),
    "groups": ((2, 6, 4, 9, 6), (8, 3, 2, 4, 3), 2),
    "one channel": ((2, 1, 4, 9, 6), (8, 1, 2, 4, 3), 1),
    "no images": ((0, 3, 4, 8, 6), (10, 3, 2, 4, 3), 1),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
@pytest.mark.parametrize("name", PATCHES)
def test_patches_in_three_dimensions(name, layout):
    input_shape, weight_shape, groups = PATCHES[name]
    arguments = (list(weight_shape[2:]), [0] * 3, [1] * 3, False, [0] * 3, groups)
    tensors = [
        torch.randn(input_shape, dtype=torch.float64).to(memory_format=layout),
        torch.randn(weight_shape, dtype=torch.float64),
        torch.randn(weight_shape[0], dtype=torch.float64),
    ]
    assert _C.takes_convolution(*tensors, *arguments)
    ours, theirs = (
        differentiated(lambda *args, f=f: f(*args, *arguments), tensors)
        for f in (_C.convolution, torch.ops.aten.convolution)
    )
    torch.testing.assert_close(ours, theirs)
    if input_shape[0]:
        for memory_format in (torch.contiguous_format, torch.channels_last_3d):
            described = (t[0].is_contiguous(memory_format=memory_format) for t in (ours, theirs))
            assert len(set(described)) == 1
        single = [t.float() for t in tensors]
        whole = _C.convolution(*single, *arguments)
        for i in range(input_shape[0]):
            one = _C.convolution(single[0][i : i + 1], *single[1:], *arguments)
            assert same_bits(one[0], whole[i])


def test_other_convolutions_are_not_taken():
    input, weight = torch.randn(2, 3, 4, 8, 6), torch.randn(10, 3, 2, 4, 3)
    fits = {"stride": [2, 4, 3], "padding": [0] * 3, "dilation": [1] * 3, "transposed": False}

    def arguments(**changed):
        values = {**fits, **changed}
        return (*values.values(), [0] * 3, 1)

    assert _C.takes_convolution(input, weight, None, *arguments())
    for changed in (
        {"stride": [0, 4, 3]},
        {"stride": [1, 4]},
        {"padding": [0, -1, 0]},
        {"dilation": [4, 1, 1]},
        {"dilation": [1 << 62, 1, 1]},
        {"transposed": True},
    ):
        assert not _C.takes_convolution(input, weight, None, *arguments(**changed))
        with pytest.raises(RuntimeError, match=r"conv(_transpose)?3d is supported for"):
            _C.convolution(input, weight, None, *arguments(**changed))
    small = input[:, :, :1]
    assert not _C.takes_convolution(small, weight, None, *arguments())
    assert not _C.takes_convolution(input, weight.double(), None, *arguments())
    image, kernel = torch.randn(2, 3, 8, 6), torch.randn(4, 3, 3, 3)
    plain = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert _C.takes_convolution(image, kernel, None, *plain)
    assert not _C.takes_convolution(image.to_mkldnn(), kernel, None, *plain)
    assert not _C.takes_convolution(image.bool(), kernel.bool(), None, *plain)
    assert not _C.takes_convolution(image, kernel, torch.randn(4).double(), *plain)
    assert not _C.takes_convolution(image, kernel[0], None, *plain)


# ---- arguments that only some of these calls meet


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["conv1d", "conv_transpose1d", "conv_transpose2d"])
def test_nested_tensors_are_refused(name):
    dims = int(name[-2])
    nested = torch.nested.nested_tensor([torch.randn(4, *(n,) * dims) for n in (9, 7)])
    with pytest.raises(NotImplementedError, match=f"{name}: .*got a nested tensor for input"):
        getattr(conv2d_ext, name)(nested, torch.randn(4, 4, *(3,) * dims))


def test_a_bias_of_autograds_zeros():
    x, w = torch.randn(2, 4, 8, 8), torch.randn(4, 6, 3, 3)
    zeros = torch._efficientzerotensor((6,))
    assert torch.equal(conv2d_ext.conv_transpose2d(x, w, zeros), conv2d_ext.conv_transpose2d(x, w))


@pytest.mark.parametrize("stride", [1, 2])
def test_output_padding_of_an_empty_batch(stride):
    """PyTorch compares it with stride and dilation where it computes something."""
    x, w = torch.randn(0, 4, 8, 7), torch.randn(4, 6, 3, 3)
    wanted = F.conv_transpose2d(x, w, stride=stride, output_padding=2)
    found = conv2d_ext.conv_transpose2d(x, w, stride=stride, output_padding=2)
    assert found.shape == wanted.shape


@pytest.mark.parametrize(("name", "value"), [("stride", 2), ("dilation", 2), ("kernel_size", 3)])
@pytest.mark.parametrize("dims", [1, 2])
def test_attributes_of_transposed_layers_may_be_integers(dims, name, value):
    x = torch.randn(2, 4, *(8,) * dims)
    ours = getattr(conv2d_ext, f"ConvTranspose{dims}d")(4, 6, 3)
    theirs = getattr(torch.nn, f"ConvTranspose{dims}d")(4, 6, 3)
    theirs.load_state_dict(ours.state_dict())
    for layer in (ours, theirs):
        setattr(layer, name, value)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("dims", [1, 2])
def test_transposed_layers_refuse_strings(dims):
    layer = getattr(conv2d_ext, f"ConvTranspose{dims}d")(4, 6, 3, padding="same")
    with pytest.raises(TypeError, match="argument 'padding'"):
        layer(torch.randn(2, 4, *(8,) * dims))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dims", [1, 2])
def test_penalties_of_constant_gradients_of_transposed_ones(dims, with_bias):
    """PyTorch's gradients are one function of input and weight: they require gradients together."""
    name = f"conv_transpose{dims}d"
    sizes = ((1, 2) + (4,) * dims, (2, 3) + (3,) * dims, (3,))
    found = []
    for function in (getattr(conv2d_ext, name), getattr(F, name)):
        torch.manual_seed(0)
        x, weight, bias = (torch.randn(size, requires_grad=True) for size in sizes)
        output = function(x, weight.detach(), bias.detach() if with_bias else None)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        gradient.square().sum().backward()
        leaves = (x, weight, *([bias] if with_bias else []))
        output = function(x, weight, bias if with_bias else None)
        gradients = torch.autograd.grad(output.sum(), leaves, create_graph=True)
        found.append([x.grad, *(g.requires_grad for g in gradients)])
        ones = torch.ones_like(output)
        for _ in range(2):  # with a gradient that is kept
            output = function(x, weight, bias if with_bias else None)
            (gradient,) = torch.autograd.grad(output, x, ones, create_graph=True)
            ((gradient.norm() - 1) ** 2).backward()
        assert ones.is_leaf
        assert not ones.requires_grad
    assert found[0] == found[1]


@pytest.mark.parametrize("formats", list(itertools.product([False, True], repeat=3)), ids=str)
def test_formats_of_gradients_of_transposed_convolutions(formats):
    """The input's gradient has the format that the input and the weight suggest."""

    def tensor(size: tuple[int, ...], channels_last: bool) -> torch.Tensor:
        like = torch.channels_last if channels_last else torch.contiguous_format
        return torch.randn(size).to(memory_format=like)

    x, weight = (tensor(s, f) for s, f in zip(((2, 6, 5, 7), (6, 4, 3, 3)), formats, strict=False))
    grad = tensor((2, 4, 11, 15), formats[2])
    strides = []
    for function in (conv2d_ext.conv_transpose2d, F.conv_transpose2d):
        leaf = x.detach().requires_grad_()
        output = function(leaf, weight, stride=2)
        strides.append((output.stride(), torch.autograd.grad(output, leaf, grad)[0].stride()))
    assert strides[0] == strides[1]


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d"])
@pytest.mark.parametrize("nested", ["input", "weight", "bias"])
def test_a_nested_tensor_is_named(name, nested):
    dims = int(name[-2])
    tensors = {
        "input": torch.ones((1, 2) + (4,) * dims),
        "weight": torch.ones((2, 2) + (3,) * dims),
        "bias": torch.ones(2),
    }
    tensors[nested] = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(NotImplementedError, match=f"{name}: .* nested tensor for {nested}"):
        getattr(conv2d_ext, name)(**tensors)


@pytest.mark.parametrize("layer", [conv2d_ext.ConvTranspose1d, conv2d_ext.ConvTranspose2d])
def test_transposed_layers_without_a_weight(layer):
    module = layer(3, 4, 3)
    module.weight = None
    x = torch.ones((1, 3) + (4,) * len(module.kernel_size))
    with pytest.raises(TypeError, match="argument 'weight'"):
        module(x)
