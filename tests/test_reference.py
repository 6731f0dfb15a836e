"""The reference against F.conv2d and against a loop that is slow and plain."""

import ast
import itertools

import pytest
import torch
import torch.nn.functional as F

from conv2d_ext import reference

# Heights and widths differ everywhere, so that a swapped pair cannot pass.
ASYMMETRIC = {
    "plain": {"input": (2, 3, 7, 9), "weight": (4, 3, 3, 2)},
    "stride, padding, dilation, groups": {
        "input": (3, 6, 9, 11),
        "weight": (4, 3, 3, 2),
        "stride": (2, 1),
        "padding": (1, 0),
        "dilation": (2, 1),
        "groups": 2,
    },
    "depthwise": {
        "input": (2, 4, 6, 8),
        "weight": (8, 1, 2, 3),
        "stride": (1, 2),
        "padding": (0, 2),
        "groups": 4,
    },
    "same, odd total padding": {
        "input": (2, 2, 6, 7),
        "weight": (3, 2, 2, 4),
        "padding": "same",
        "dilation": (3, 1),
    },
    "valid": {"input": (1, 2, 6, 7), "weight": (3, 2, 2, 4), "padding": "valid", "stride": (3, 2)},
    "one output pixel": {"input": (2, 3, 4, 5), "weight": (2, 3, 4, 5)},
    "empty batch": {"input": (0, 4, 5, 6), "weight": (6, 2, 3, 2), "padding": (1, 0), "groups": 2},
}
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex128, torch.complex64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


def make(problem: dict, dtype: torch.dtype):
    """(input, weight, bias, the other arguments); small integers, so that every dtype is exact."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        values = torch.randint(0, 4, shape, generator=generator)
        if dtype.is_complex:
            return torch.complex(values.double(), values.flip(-1).double()).to(dtype)
        return values.to(dtype)

    others = {k: v for k, v in problem.items() if k not in ("input", "weight")}
    return draw(*problem["input"]), draw(*problem["weight"]), draw(problem["weight"][0]), others


def loop_conv2d(input, weight, bias, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1):
    """Each output element by the definition, in Python's own numbers."""
    if padding == "valid":
        padding = (0, 0)
    if padding == "same":
        padding = [d * (k - 1) // 2 for d, k in zip(dilation, weight.shape[2:], strict=True)]
        in_h, in_w = input.shape[2:]
        out_size = (in_h, in_w)
    else:
        out_size = [
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, p, d, k, s in zip(
                input.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True
            )
        ]
    out_channels, channels_per_group, kernel_h, kernel_w = weight.shape
    output = torch.zeros(input.shape[0], out_channels, *out_size, dtype=input.dtype)
    for n, oc, oh, ow in itertools.product(*map(range, output.shape)):
        total = bias[oc].item()
        first = oc // (out_channels // groups) * channels_per_group
        for ic, kh, kw in itertools.product(
            range(channels_per_group), range(kernel_h), range(kernel_w)
        ):
            ih = oh * stride[0] - padding[0] + kh * dilation[0]
            iw = ow * stride[1] - padding[1] + kw * dilation[1]
            if 0 <= ih < input.shape[2] and 0 <= iw < input.shape[3]:
                total += input[n, first + ic, ih, iw].item() * weight[oc, ic, kh, kw].item()
        output[n, oc, oh, ow] = total
    return output


@pytest.mark.parametrize("name", ASYMMETRIC)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.int64], ids=str)
def test_conv2d_equals_the_loop(name, dtype):
    input, weight, bias, others = make(ASYMMETRIC[name], dtype)
    expected = loop_conv2d(input, weight, bias, **others)
    torch.testing.assert_close(
        reference.conv2d(input, weight, bias, **others), expected, rtol=0, atol=0
    )


@pytest.mark.parametrize("name", ASYMMETRIC)
@pytest.mark.parametrize("with_bias", [True, False])
def test_conv2d_equals_aten(name, with_bias):
    input, weight, bias, others = make(ASYMMETRIC[name], torch.float64)
    input, weight, bias = (t + torch.rand_like(t) for t in (input, weight, bias))
    arguments = (input, weight, bias if with_bias else None)
    torch.testing.assert_close(
        reference.conv2d(*arguments, **others), F.conv2d(*arguments, **others)
    )


@pytest.mark.parametrize("dtype", FLOATING + COMPLEX + INTEGERS, ids=str)
def test_conv2d_takes_every_dtype(dtype):
    input, weight, bias, others = make(ASYMMETRIC["stride, padding, dilation, groups"], dtype)
    wide = torch.complex128 if dtype.is_complex else torch.int64
    expected = loop_conv2d(input.to(wide), weight.to(wide), bias.to(wide), **others)
    output = reference.conv2d(input, weight, bias, **others)
    assert output.dtype == dtype
    torch.testing.assert_close(output, expected.to(dtype), rtol=0, atol=0)


def test_conv2d_integers_wrap_around():
    input, weight = torch.full((1, 1, 1, 2), 100, dtype=torch.int8), torch.ones(1, 1, 1, 2)
    output = reference.conv2d(input, weight.to(torch.int8))
    assert output.item() == 200 - 256


@pytest.mark.parametrize("name", [n for n in ASYMMETRIC if n != "empty batch"])
def test_conv2d_unbatched(name):
    input, weight, bias, others = make(ASYMMETRIC[name], torch.float64)
    output = reference.conv2d(input[0], weight, bias, **others)
    assert output.dim() == 3
    torch.testing.assert_close(output, F.conv2d(input[0], weight, bias, **others))


def test_conv2d_takes_single_integers():
    input, weight, bias, _ = make(ASYMMETRIC["plain"], torch.float64)
    output = reference.conv2d(input, weight, bias, 2, 1, 3, 1)
    torch.testing.assert_close(output, F.conv2d(input, weight, bias, 2, 1, 3, 1))


def test_conv2d_without_channels_gives_the_bias():
    output = reference.conv2d(torch.ones(2, 0, 4, 5), torch.ones(3, 0, 2, 2), torch.arange(3.0))
    torch.testing.assert_close(output, torch.arange(3.0)[:, None, None].expand(2, 3, 3, 4))


def test_conv2d_multiplies_the_padding():
    """Inf * 0 is NaN: the border must be NaN and the inside infinite."""
    infinite = torch.full((1, 1, 3, 3), torch.inf)
    output = reference.conv2d(torch.ones(1, 1, 3, 4), infinite, padding=1)
    inside = torch.zeros(1, 1, 3, 4, dtype=torch.bool)
    inside[..., 1:-1, 1:-1] = True
    assert torch.equal(output.isinf(), inside)
    assert torch.equal(output.isnan(), ~inside)


@pytest.mark.parametrize("name", [n for n in ASYMMETRIC if n != "empty batch"])
def test_conv2d_gradients(name):
    input, weight, bias, others = make(ASYMMETRIC[name], torch.float64)
    inputs = tuple((t[:1] if t is input else t).requires_grad_() for t in (input, weight, bias))

    def function(*tensors):
        return reference.conv2d(*tensors, **others)

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        ({"padding": "same", "stride": 2}, "padding='same' is not supported for strided"),
        ({"padding": "full"}, "Invalid padding string"),
        ({"padding": -1}, "negative padding is not supported"),
        ({"padding": (0, -1)}, "negative padding is not supported"),
        ({"groups": 2}, "size"),
    ],
)
def test_conv2d_refuses_what_aten_refuses(arguments, phrase):
    input, weight = torch.ones(1, 3, 6, 7), torch.ones(4, 3, 3, 2)
    for function in (F.conv2d, reference.conv2d):
        with pytest.raises(RuntimeError, match=phrase):
            function(input, weight, **arguments)


@pytest.mark.parametrize("bias_shape", [(4,), (4, 1), None], ids=str)
@pytest.mark.parametrize("batch", [(2,), (0,), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_forward_equals_aten(bias_shape, batch, dtype):
    im = torch.randn(*batch, 3, 6, 8, dtype=dtype)
    kernel = torch.randn(3, 4, 3, 2, dtype=dtype)
    bias = None if bias_shape is None else torch.randn(bias_shape, dtype=dtype)
    expected = F.conv2d(im, kernel.transpose(0, 1), None if bias is None else bias.flatten())
    output = reference.forward(im, kernel, bias)
    assert output.shape == (*batch, 4, 4, 7)
    torch.testing.assert_close(output, expected)


def test_forward_gradients():
    shapes = ((2, 2, 4, 5), (2, 3, 3, 2), (3, 1))
    inputs = tuple(torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    assert torch.autograd.gradcheck(reference.forward, inputs)
    assert torch.autograd.gradgradcheck(reference.forward, inputs)


def test_imports_torch_alone():
    """A specification that called the library could not disagree with it."""
    with open(reference.__file__, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add("." * node.level + (node.module or "").split(".")[0])
    assert imported == {"__future__", "torch"}
