"""PyTorch's own samples and error inputs for nn.functional.conv2d, which ship with torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import conv2d_ext
from conv2d_ext.testing import unit_roundoff

pytest.importorskip("expecttest", reason="PyTorch's samples need it")

# What PyTorch lists for the CPU. Its list is imported when tests run: each process that collects
# them would take four seconds.
DTYPES = (
    torch.bfloat16, torch.complex128, torch.complex64, torch.float16, torch.float32, torch.float64,
    torch.int64,
)  # fmt: skip


@pytest.fixture(scope="module")
def opinfo():
    from torch.testing._internal.common_methods_invocations import op_db

    (found,) = (op for op in op_db if op.name == "nn.functional.conv2d")
    return found


def test_error_inputs(opinfo, device):
    error_inputs = list(opinfo.error_inputs(device))
    assert error_inputs
    for error_input in error_inputs:
        sample = error_input.sample_input
        with pytest.raises(error_input.error_type, match=error_input.error_regex):
            conv2d_ext.conv2d(sample.input, *sample.args, **sample.kwargs)


def test_no_dtype_is_missing(opinfo):
    assert opinfo.supported_dtypes("cpu") <= set(DTYPES)


def _forward_and_gradients(convolution, sample, dtype, grad_output):
    """With every tensor of the sample converted to dtype."""
    tensors = [
        t.detach().to(dtype).requires_grad_(grad_output is not None)
        for t in (sample.input, *sample.args)
        if t is not None
    ]
    output = convolution(*tensors, **sample.kwargs)
    if grad_output is None:
        return [output]
    return [output.detach(), *torch.autograd.grad(output, tensors, grad_output.to(dtype))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples(opinfo, dtype, device):
    """Integers equal; the others' relative L2 error at most twice F.conv2d's plus a roundoff."""
    if dtype not in opinfo.supported_dtypes(device):
        pytest.skip(f"F.conv2d takes no {dtype} on {device}")
    samples = list(opinfo.sample_inputs(device, dtype))
    assert samples
    for sample in samples:
        arguments = (sample, dtype)
        if not (dtype.is_floating_point or dtype.is_complex):
            (ours,) = _forward_and_gradients(conv2d_ext.conv2d, *arguments, None)
            (theirs,) = _forward_and_gradients(F.conv2d, *arguments, None)
            assert torch.equal(ours, theirs)
            continue
        shape = F.conv2d(sample.input, *sample.args, **sample.kwargs).shape
        grad_output = torch.randn(shape).to(device, dtype)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        ours = _forward_and_gradients(conv2d_ext.conv2d, *arguments, grad_output)
        theirs = _forward_and_gradients(F.conv2d, *arguments, grad_output)
        exact = _forward_and_gradients(F.conv2d, sample, wide, grad_output)
        for actual, expected, reference in zip(ours, theirs, exact, strict=True):
            assert actual.shape == expected.shape
            assert actual.dtype == expected.dtype
            error, bound = ((t.to(wide) - reference).norm() for t in (actual, expected))
            # float64 has no better oracle here: the slack covers the oracle's own roundings.
            slack = (8 if wide == dtype else 1) * unit_roundoff(dtype) * reference.norm()
            assert error <= 2 * bound + slack, sample.kwargs
