"""Guarantee 7: results have the strides of F.conv2d's, and fake tensors those of real ones."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_versions import IS_OLDER

import conv2d_ext
from conv2d_ext import testing
from conv2d_ext.testing import Problem

PROBLEMS = (
    Problem("plain", 2, 3, (5, 6), 4, (3, 2)),
    Problem("1x1", 2, 3, (5, 6), 4, (1, 1)),
    Problem("one input channel", 2, 1, (5, 6), 4, (3, 2)),
    Problem("one output channel", 2, 3, (5, 6), 1, (3, 2)),
    Problem("one channel each", 2, 1, (5, 6), 1, (3, 2)),
    Problem("one channel each, 1x1", 2, 1, (5, 6), 1, (1, 1)),
    Problem("batch of one", 1, 3, (5, 6), 4, (3, 2)),
    Problem("one pixel in", 2, 3, (1, 1), 4, (1, 1)),
    Problem("one pixel out", 2, 3, (3, 2), 4, (3, 2)),
    Problem("one row out", 2, 3, (3, 6), 4, (3, 2)),
    Problem("one column out", 2, 3, (5, 2), 4, (3, 2)),
    Problem("one of everything", 1, 1, (1, 1), 1, (1, 1)),
    Problem("depthwise", 2, 4, (5, 6), 4, (3, 2), groups=4),
    Problem("depthwise, one pixel out", 2, 4, (3, 2), 4, (3, 2), groups=4),
    Problem("depthwise, one pixel in", 2, 4, (1, 1), 4, (3, 2), padding=(1, 1), groups=4),
    Problem("groups", 2, 4, (5, 6), 6, (3, 2), groups=2),
    Problem("groups, one pixel out", 2, 4, (3, 2), 6, (3, 2), groups=2),
    Problem("groups of one output channel, one pixel out", 1, 8, (3, 2), 4, (3, 2), groups=4),
    Problem("1x3 kernel", 2, 3, (5, 6), 4, (1, 3)),
    Problem("empty batch", 0, 3, (5, 6), 4, (3, 2)),
)

LAYOUTS = {"contiguous": lambda tensor: tensor.contiguous(), **testing.VIEWS}


def _layout_pairs(dtype: torch.dtype) -> list[tuple[str, str]]:
    """Every pair of layouts of input and weight; for dtypes but float32 the two main ones'."""
    names = LAYOUTS if dtype == torch.float32 else ("contiguous", "channels_last")
    return list(itertools.product(names, repeat=2))


over_problems = pytest.mark.parametrize("problem", PROBLEMS, ids=str)
over_dtypes = pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.complex64,
        torch.complex128,
    ],
    ids=str,
)


def _operands(problem, layouts, dtype, device="cpu"):
    input = torch.randn(problem.input_shape, device=device).to(dtype)
    weight = torch.randn(problem.weight_shape, device=device).to(dtype)
    return LAYOUTS[layouts[0]](input), LAYOUTS[layouts[1]](weight)


def test_output_of_integers():
    # F.conv2d has no integers on CUDA.
    for problem, dtype in itertools.product(PROBLEMS, (torch.int8, torch.int64)):
        for layouts in _layout_pairs(dtype):
            operands = _operands(problem, layouts, dtype)
            expected = F.conv2d(*operands, **problem.call_args())
            actual = conv2d_ext.conv2d(*operands, **problem.call_args())
            assert actual.stride() == expected.stride(), (problem, dtype, layouts)


@over_dtypes
@over_problems
def test_output(problem, dtype, device):
    for layouts in _layout_pairs(dtype):
        operands = _operands(problem, layouts, dtype, device)
        expected = F.conv2d(*operands, **problem.call_args())
        actual = conv2d_ext.conv2d(*operands, **problem.call_args())
        assert actual.stride() == expected.stride(), layouts
        if problem.batch:
            expected = F.conv2d(operands[0][0], operands[1], **problem.call_args())
            actual = conv2d_ext.conv2d(operands[0][0], operands[1], **problem.call_args())
            assert actual.stride() == expected.stride(), (layouts, "unbatched")


def _gradients(function, problem, operands, grad_output):
    leaves = [t.detach().requires_grad_() for t in operands]
    return torch.autograd.grad(function(*leaves, **problem.call_args()), leaves, grad_output)


def _fits_both_formats(tensor: torch.Tensor) -> bool:
    return all(
        tensor.is_contiguous(memory_format=f)
        for f in (torch.contiguous_format, torch.channels_last)
    )


@over_dtypes
@over_problems
def test_gradients(problem, dtype, device):
    """grad_input as F.conv2d's; grad_weight in the weight's own strides, where it is dense."""
    for layouts in _layout_pairs(dtype):
        operands = _operands(problem, layouts, dtype, device)
        for grad_layout in ("contiguous", "channels_last"):
            grad_output = LAYOUTS[grad_layout](
                torch.randn(problem.output_shape, device=device).to(dtype)
            )
            expected = _gradients(F.conv2d, problem, operands, grad_output)
            actual = _gradients(conv2d_ext.conv2d, problem, operands, grad_output)
            # F.conv2d copies an empty input's strides, whatever they are; ours are contiguous.
            wanted = expected[0] if problem.batch else torch.empty(problem.input_shape)
            # cuDNN goes by grad_output's own strides, which say nothing where both formats are one.
            if device == "cpu" or not _fits_both_formats(grad_output):
                assert actual[0].stride() == wanted.stride(), (layouts, grad_layout)
            weight = operands[1]
            dense = torch.empty_like(weight).stride() == weight.stride()
            wanted = weight if dense else weight.new_empty(weight.shape)
            assert actual[1].stride() == wanted.stride(), (layouts, grad_layout)


def test_weight_gradient_keeps_any_dense_order():
    weight = torch.randn(3, 2, 5, 4).permute(3, 1, 0, 2).requires_grad_()
    conv2d_ext.conv2d(torch.randn(1, 2, 8, 8), weight).sum().backward()
    assert weight.grad.stride() == weight.stride()


def test_weight_gradient_of_an_overlapping_weight_is_contiguous():
    weight = torch.randn(1, 2, 3, 4).expand(5, 2, 3, 4)
    output = conv2d_ext.conv2d(torch.randn(1, 2, 8, 8), weight.requires_grad_())
    (gradient,) = torch.autograd.grad(output.sum(), weight)
    assert gradient.is_contiguous()


@over_dtypes
@over_problems
def test_fake_kernels_have_the_real_strides(problem, dtype):
    for layouts in _layout_pairs(dtype):
        real = _operands(problem, layouts, dtype)
        grad_output = torch.randn(problem.output_shape).to(dtype)

        def run(function, operands, grad_output):
            output = function(*operands, **problem.call_args())
            return output.detach(), *_gradients(function, problem, operands, grad_output)

        expected = run(conv2d_ext.conv2d, real, grad_output)
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(tensor) for tensor in real]
            traced = run(conv2d_ext.conv2d, fake, mode.from_tensor(grad_output))
        for ours, real_result in zip(traced, expected, strict=True):
            assert ours.shape == real_result.shape, layouts
            assert ours.stride() == real_result.stride(), layouts
            assert ours.dtype == real_result.dtype


@pytest.mark.skipif(torch.version.cuda is None, reason="F.conv2d has no strides for CUDA here")
@over_dtypes
@over_problems
def test_fake_cuda_tensors_have_the_strides_of_pytorchs(problem, dtype):
    """Without a GPU: what tracing for one would see. float64 is contiguous on CUDA alone."""
    if dtype == torch.bfloat16 and not torch.cuda.is_available():
        pytest.skip("PyTorch asks the GPU whether cuDNN convolves bfloat16 on it")
    if IS_OLDER and not torch.cuda.is_available():
        pytest.skip("older versions of PyTorch ask the GPU for fake CUDA tensors")
    if dtype.is_complex and _fits_both_formats(torch.empty(problem.output_shape)):
        pytest.skip("PyTorch's fake strides differ from its real ones here")
    for layouts in _layout_pairs(dtype):
        with FakeTensorMode() as mode:
            operands = [
                mode.from_tensor(tensor).to("cuda") for tensor in _operands(problem, layouts, dtype)
            ]
            actual = conv2d_ext.conv2d(*operands, **problem.call_args())
            expected = F.conv2d(*operands, **problem.call_args())
        assert actual.device == expected.device == torch.device("cuda", 0)
        assert actual.stride() == expected.stride(), layouts


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool], ids=str)
def test_fake_cuda_tensors_of_integers_are_refused(dtype):
    """As real ones are, though the CPU takes them."""
    with FakeTensorMode():
        operands = [
            torch.empty(s, dtype=dtype, device="cuda") for s in ((1, 2, 4, 5), (3, 2, 2, 2))
        ]
        with pytest.raises(RuntimeError, match="not supported for"):
            conv2d_ext.conv2d(*operands)


def test_meta_tensors_compute_nothing():
    input = torch.empty(2, 3, 10**6, 10**6, device="meta", requires_grad=True)
    weight = torch.empty(4, 3, 3, 3, device="meta", requires_grad=True)
    output = conv2d_ext.conv2d(input, weight, padding=1)
    assert output.shape == (2, 4, 10**6, 10**6)
    grad_input, grad_weight = torch.autograd.grad(output.sum(), (input, weight))
    assert (grad_input.shape, grad_weight.shape) == (input.shape, weight.shape)
    assert {output.device.type, grad_input.device.type, grad_weight.device.type} == {"meta"}
