"""PyTorch's own samples and error inputs for nn.functional.conv2d, which ship with torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import conv2d_ext
from conv2d_ext.testing import unit_roundoff

pytest.importorskip("expecttest", reason="PyTorch's samples need it")
from torch.testing._internal.common_methods_invocations import op_db

(OPINFO,) = (op for op in op_db if op.name == "nn.functional.conv2d")


@pytest.mark.parametrize("number", range(len(list(OPINFO.error_inputs("cpu")))))
def test_error_inputs(number, device):
    error_input = list(OPINFO.error_inputs(device))[number]
    sample = error_input.sample_input
    with pytest.raises(error_input.error_type, match=error_input.error_regex):
        conv2d_ext.conv2d(sample.input, *sample.args, **sample.kwargs)


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


@pytest.mark.parametrize("dtype", sorted(OPINFO.supported_dtypes("cpu"), key=str), ids=str)
def test_samples(dtype, device):
    """Integers equal; the others' relative L2 error at most twice F.conv2d's plus a roundoff."""
    if dtype not in OPINFO.supported_dtypes(device):
        pytest.skip(f"F.conv2d takes no {dtype} on {device}")
    samples = list(OPINFO.sample_inputs(device, dtype))
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
