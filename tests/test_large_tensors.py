"""Guarantee 6: offsets beyond 2^31, reached through strides, so that little memory is touched."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import conv2d_ext

OPS = torch.ops.conv2d_ext


# Of the tests on a GPU, those of this group run one after the other: each takes up to 17 GiB there.
pytestmark = pytest.mark.xdist_group("large tensors")


@pytest.fixture
def spread(tmp_path):
    """Copy a tensor to memory where its last slice along ``dim`` begins beyond 2^31 elements.

    On the CPU the memory is a sparse file's, of which only the slices' pages ever exist.
    """

    def spread(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        strides = list(tensor.contiguous().stride())
        strides[dim] = 2**31 // (tensor.shape[dim] - 1) + 64
        size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
        if tensor.is_cuda:
            free, _ = torch.cuda.mem_get_info()
            if free < size * tensor.itemsize + 2**30:
                pytest.skip(f"needs {size * tensor.itemsize / 2**30:.0f} GiB on the GPU")
            memory = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
        else:
            path = str(tmp_path / "memory")
            memory = torch.from_file(path, shared=True, size=size, dtype=tensor.dtype)
        return memory.as_strided(tensor.shape, strides).copy_(tensor)

    yield spread
    (tmp_path / "memory").unlink(missing_ok=True)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


DIMS = pytest.mark.parametrize("dim", range(4))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)


@DTYPES
@DIMS
def test_input(spread, dim, dtype, device):
    small = torch.randn(2, 3, 6, 7, device=device).to(dtype)
    weight = torch.randn(4, 3, 3, 2, device=device).to(dtype)
    large = spread(small, dim)
    expected = conv2d_ext.conv2d(small, weight, padding=1)
    assert torch.equal(conv2d_ext.conv2d(large, weight, padding=1), expected)
    args = ([1, 1], [1, 1, 1, 1], [1, 1], 1)
    results = [
        OPS.conv2d_grad_weight(expected, input, [4, 3, 3, 2], [18, 6, 2, 1], *args)
        for input in (small, large)
    ]
    assert torch.equal(*results)


@DTYPES
@DIMS
def test_weight(spread, dim, dtype, device):
    input = torch.randn(2, 3, 6, 7, device=device).to(dtype)
    small = torch.randn(4, 3, 3, 2, device=device).to(dtype)
    large = spread(small, dim)
    expected = conv2d_ext.conv2d(input, small)
    assert torch.equal(conv2d_ext.conv2d(input, large), expected)
    args = ([1, 1], [0, 0, 0, 0], [1, 1], 1, False)
    results = [
        OPS.conv2d_grad_input(expected, weight, [2, 3, 6, 7], *args) for weight in (small, large)
    ]
    assert torch.equal(*results)


@DTYPES
@DIMS
def test_grad_output(spread, dim, dtype, device):
    input, weight = (
        torch.randn(2, 3, 6, 7, device=device).to(dtype),
        torch.randn(4, 3, 3, 2, device=device).to(dtype),
    )
    small = torch.randn(2, 4, 4, 6, device=device).to(dtype)
    large = spread(small, dim)
    args = ([1, 1], [0, 0, 0, 0], [1, 1], 1)
    for op, rest in (
        (OPS.conv2d_grad_input, (weight, [2, 3, 6, 7], *args, False)),
        (OPS.conv2d_grad_weight, (input, [4, 3, 3, 2], [18, 6, 2, 1], *args)),
        (OPS.conv2d_grad_bias, ()),
    ):
        assert torch.equal(op(large, *rest), op(small, *rest))


def test_bias(spread, device):
    bias = spread(torch.randn(3, device=device), 0)
    input, weight = torch.randn(1, 2, 3, 3, device=device), torch.randn(3, 2, 2, 2, device=device)
    assert torch.equal(
        conv2d_ext.conv2d(input, weight, bias), conv2d_ext.conv2d(input, weight, bias.clone())
    )


def test_sizes_and_products_beyond_2_to_the_31(device):
    """An expanded image of 2^34 elements, read at a large stride."""
    input = torch.tensor(2.0, device=device).expand(1, 1, 2**17, 2**17)
    weight = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]], device=device)
    output = conv2d_ext.conv2d(input, weight, stride=2**14, dilation=2**13)
    assert output.shape == (1, 1, 8, 8)
    assert torch.equal(output.cpu(), torch.full((1, 1, 8, 8), 20.0))


def test_many_channels_through_expansion(device):
    """2^16 channels of 2^16 pixels: 2^32 elements; the exact sums are powers of two."""
    input = torch.tensor(1.0, device=device).expand(1, 2**16, 2**8, 2**8)
    weight = torch.tensor(1.0, device=device).expand(2, 2**16, 1, 1)
    output = conv2d_ext.conv2d(input, weight, stride=2**6)
    assert torch.equal(output.cpu(), torch.full((1, 2, 4, 4), 2.0**16))


def test_grad_weight_over_a_large_expanded_image(device):
    grad_output = torch.tensor(1.0, device=device).expand(1, 1, 8, 8)
    input = torch.tensor(3.0, device=device).expand(1, 1, 2**17, 2**17)
    gradient = OPS.conv2d_grad_weight(
        grad_output, input, [1, 1, 2, 2], [4, 4, 2, 1],
        [2**14, 2**14], [0] * 4, [2**13, 2**13], 1,
    )  # fmt: skip
    assert torch.equal(gradient.cpu(), torch.full((1, 1, 2, 2), 192.0))


def test_huge_hyper_parameters(device):
    """Stride and dilation near 2^62 are legal where one tap or one pixel is all there is."""
    input, weight = torch.randn(1, 2, 4, 5, device=device), torch.randn(3, 2, 3, 2, device=device)
    expected = F.conv2d(input, weight)[..., :1, :1]
    torch.testing.assert_close(conv2d_ext.conv2d(input, weight, stride=2**62), expected)
    point = torch.randn(3, 2, 1, 1, device=device)
    torch.testing.assert_close(
        conv2d_ext.conv2d(input, point, dilation=2**62), F.conv2d(input, point)
    )


LARGEST = 2**63 - 1


def test_tiles_of_far_taps(device):
    """A strided depthwise gradient's patch would have 2^61 elements; no tap meets the input."""
    if device != "cpu":
        pytest.skip("a padded side has at most 2^30 elements on CUDA")
    input = torch.randn(1, 8, 8, 16, requires_grad=True)
    weight = torch.randn(8, 1, 2, 2, requires_grad=True)
    output = conv2d_ext.conv2d(
        input, weight, None, 2, (2**31, 2**30), (2**32 + 1, 2**31 + 1), groups=8
    )
    assert torch.equal(output, torch.zeros(1, 8, 4, 8))
    output.backward(torch.randn_like(output))
    assert torch.equal(input.grad, torch.zeros_like(input))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("padding", [LARGEST - 1, LARGEST - 2, 2**62], ids=str)
@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_padding_as_large_as_any(axis, padding, device):
    """A single output position, which meets the input, and far more padding behind it."""
    if device != "cpu":
        pytest.skip("a padded side has at most 2^30 elements on CUDA")
    input, weight = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 2)
    stride, paddings = [LARGEST, 1], [0, padding, 0, 0]
    if axis == "columns":
        input, weight = input.mT.contiguous(), weight.mT.contiguous()
        stride, paddings = stride[::-1], paddings[2:] + paddings[:2]
    results = []
    # The same without padding. What was in memory before must not matter.
    for args in ((stride, paddings, [1, 1], 1), ([1, 1], [0, 0, 0, 0], [1, 1], 1)):
        output = OPS.conv2d(input, weight, None, *args)
        torch.full(input.shape, torch.nan)
        grad_input = OPS.conv2d_grad_input(output, weight, input.shape, *args, False)
        grad_weight = OPS.conv2d_grad_weight(output, input, weight.shape, weight.stride(), *args)
        results.append((output, grad_input, grad_weight))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


def test_deciding_on_bands_takes_no_time(device):
    """Position by position, tap by tap, 2^51 pairs would be looked at."""
    input = torch.zeros((), device=device).expand(1, 1, 1, 2**40)
    weight = torch.zeros(1, 1, 1, 2000, device=device)
    plan = conv2d_ext.explain(input, weight, dilation=2**29, padding=(0, 2**39))
    assert plan.output_size == (1, 1, 1, 2**41 - 1999 * 2**29)
