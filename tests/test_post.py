"""The forum post's binding, forward(im, kernel, bias), and its composition, forward_unfold.

im: (bs, di, H, W) or (di, H, W); kernel: (di, do, kh, kw), input channels first; bias: (do,),
(do, 1) or None; output: (bs, do, H', W') or (do, H', W').
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import conv2d_ext

FUNCTIONS = pytest.mark.parametrize(
    "function", [conv2d_ext.forward, conv2d_ext.forward_unfold], ids=["forward", "forward_unfold"]
)


def _operands(dtype=torch.float64):
    return [torch.randn(*shape).to(dtype) for shape in ((3, 4, 7, 9), (4, 5, 3, 2), (5,))]


def test_the_modules_docstring():
    assert conv2d_ext._C.__doc__ == "Implementation of a forward pass of conv2d in C++"


@FUNCTIONS
@pytest.mark.parametrize("bias_kind", ["vector", "column", "none"])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
def test_values_and_gradients(function, bias_kind, batched):
    im, kernel, bias = _operands()
    im = im if batched else im[0]
    bias = {"vector": bias, "column": bias[:, None], "none": None}[bias_kind]
    leaves = [t.requires_grad_() for t in (im, kernel, bias) if t is not None]
    output = function(im, kernel, bias)
    expected = F.conv2d(im, kernel.transpose(0, 1), None if bias is None else bias.flatten())
    torch.testing.assert_close(output, expected)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(output, leaves, grad), torch.autograd.grad(expected, leaves, grad)
    )


@FUNCTIONS
def test_the_posts_workload(function):
    """The same integer channel 16 times, a kernel of 16 x 32 x 3 x 3, a bias of 0.06."""
    im = torch.randint(-255, 255, (256, 256)).float().expand(16, 256, 256)
    kernel = torch.randn(16, 32, 3, 3)
    output = function(im, kernel, torch.full((32, 1), 0.06))
    expected = F.conv2d(
        im.double(), kernel.double().transpose(0, 1), torch.full((32,), 0.06).double()
    )
    assert output.shape == (32, 254, 254)
    error = (output - expected).norm() / expected.norm()
    assert error <= 1e-6


def test_forward_is_conv2d_to_the_bit():
    im, kernel, bias = _operands(torch.float32)
    assert torch.equal(
        conv2d_ext.forward(im, kernel, bias),
        conv2d_ext.conv2d(im, kernel.transpose(0, 1).contiguous(), bias),
    )


@FUNCTIONS
def test_images_and_kernels_need_not_be_square(function):
    im, kernel = torch.randn(2, 3, 5, 11), torch.randn(3, 4, 2, 5)
    assert function(im, kernel, None).shape == (2, 4, 4, 7)


@FUNCTIONS
@pytest.mark.parametrize(
    ("shapes", "names"),
    [
        (((4, 7), (4, 5, 3, 2), (5,)), ("im", "[4, 7]")),
        (((3, 4, 7, 9), (4, 5, 3), (5,)), ("kernel", "[4, 5, 3]")),
        (((3, 6, 7, 9), (4, 5, 3, 2), (5,)), ("[3, 6, 7, 9]", "[4, 5, 3, 2]")),
        (((3, 4, 7, 9), (4, 5, 3, 2), (4,)), ("bias", "[4]")),
        (((3, 4, 7, 9), (4, 5, 3, 2), (5, 2)), ("bias", "[5, 2]")),
        (((3, 4, 2, 9), (4, 5, 3, 2), (5,)), ("[3, 4, 2, 9]",)),
    ],
    ids=["im", "kernel", "channels", "bias length", "bias shape", "kernel too large"],
)
def test_bad_shapes(function, shapes, names):
    with pytest.raises(RuntimeError) as info:
        function(*(torch.randn(shape) for shape in shapes))
    for name in names:
        assert name in str(info.value)


@FUNCTIONS
def test_bad_types(function):
    with pytest.raises(TypeError):
        function([1.0], torch.randn(4, 5, 3, 2), None)


def test_a_bias_of_another_dtype():
    im, kernel, bias = torch.ones(1, 2, 4, 4), torch.ones(2, 3, 3, 3), torch.ones(3).double()
    for function in (conv2d_ext.forward, conv2d_ext.forward_unfold):
        with pytest.raises(RuntimeError, match="type"):
            function(im, kernel, bias)
