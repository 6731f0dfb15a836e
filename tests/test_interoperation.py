"""What users bring along from elsewhere: NumPy's integers, a FLOP counter, vmap's checks, ONNX."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from child import run_python
from torch.func import vmap
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.utils.flop_counter import FlopCounterMode
from torch_versions import IS_OLDER

import conv2d_ext


@pytest.mark.parametrize("name", ["stride", "padding", "dilation", "groups"])
@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
def test_numpy_integers(name, integer):
    input, weight = torch.randn(1, 4, 8, 8), torch.randn(6, 2 if name == "groups" else 4, 3, 3)
    actual = conv2d_ext.conv2d(input, weight, **{name: integer(2)})
    torch.testing.assert_close(actual, F.conv2d(input, weight, **{name: 2}))


def test_numpy_floats_are_no_strides():
    with pytest.raises(TypeError):
        conv2d_ext.conv2d(torch.randn(1, 4, 8, 8), torch.randn(6, 4, 3, 3), stride=np.float32(2))


@pytest.mark.parametrize("groups", [1, 2])
def test_flops_are_counted_as_pytorch_counts_its_own(groups):
    def count(function):
        input = torch.randn(2, 4, 9, 8, requires_grad=True)
        weight = torch.randn(6, 4 // groups, 3, 2, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            function(input, weight, stride=(2, 1), padding=1, groups=groups).sum().backward()
        return counter.get_total_flops()

    forward, outputs = 2 * (4 // groups) * 3 * 2, 2 * 6 * 5 * 9
    assert count(conv2d_ext.conv2d) == 3 * forward * outputs
    if groups == 1:  # of grouped gradients PyTorch's own formula counts more than is computed
        assert count(conv2d_ext.conv2d) == count(F.conv2d)


FLOP_PROGRAMS = {
    "conv2d_ext first": """
import sys, conv2d_ext
assert "torch.utils.flop_counter" not in sys.modules and "triton" not in sys.modules
from torch.utils.flop_counter import flop_registry
""",
    "the counter first": """
from torch.utils.flop_counter import flop_registry
import conv2d_ext
""",
}


@pytest.mark.parametrize("program", FLOP_PROGRAMS.values(), ids=FLOP_PROGRAMS)
def test_flop_formulas_wait_for_the_counter(program):
    """Which imports Triton, as conv2d_ext by itself does not."""
    done = run_python("-c", program + "print(conv2d_ext.ops.conv2d in flop_registry)")
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(
    "bias",
    [torch.randn(3, 6).double(), torch.randn(3, 5), torch.randn(3), torch.randn(3, 6, 1)],
    ids=["dtype", "size", "no dimension", "two dimensions"],
)
@pytest.mark.parametrize("batched_input", [False, True])
def test_vmap_refuses_a_bias_that_a_single_call_refuses(bias, batched_input):
    input, weight = torch.randn(3, 2, 4, 8, 8), torch.randn(6, 4, 3, 3)
    in_dims = (0 if batched_input else None, None, 0)
    with pytest.raises(RuntimeError, match="bias"):
        vmap(conv2d_ext.conv2d, in_dims)(input if batched_input else input[0], weight, bias)


@pytest.mark.parametrize("groups", [0, -1, 4])
def test_vmap_refuses_groups_that_a_single_call_refuses(groups):
    input, weights = torch.randn(2, 4, 8, 8), torch.randn(3, 6, 4, 3, 3)
    with pytest.raises(RuntimeError, match="groups"):
        vmap(lambda w: conv2d_ext.conv2d(input, w, groups=groups))(weights)


@pytest.mark.parametrize("lazy", ["conj", "neg"])
def test_conjugated_and_negated_views_have_the_bits_of_what_they_stand_for(lazy):
    """Views that leave the conjugation or the sign to whoever reads them."""
    tensors = [torch.randn(s, dtype=torch.complex64) for s in ((2, 4, 7, 6), (6, 4, 3, 2), (6,))]
    views = [t.conj() if lazy == "conj" else t.conj().imag for t in tensors]
    assert all(v.is_conj() if lazy == "conj" else v.is_neg() for v in views)
    plain = [v.resolve_conj().resolve_neg() for v in views]
    results = []
    for operands in (views, plain):
        leaves = [t.detach().requires_grad_() for t in operands]
        output = conv2d_ext.conv2d(*leaves, stride=2, padding=1)
        gradients = torch.autograd.grad(output.abs().pow(2).sum(), leaves)
        results.append([t.resolve_conj().resolve_neg() for t in (output, *gradients)])
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)
    torch.testing.assert_close(results[0][0], F.conv2d(*plain, stride=2, padding=1))


@pytest.mark.parametrize("converted", [True, False])
def test_onnx_s_exporter_names_the_op(converted):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3)).eval()
    context = contextlib.nullcontext() if converted else conv2d_ext.batch_invariant()
    if converted:
        conv2d_ext.convert(model)
    arguments = (torch.randn(1, 3, 8, 8),)
    named = "unrecognized namespace" if IS_OLDER else "conv2d_ext::conv2d"
    with context, pytest.raises(Exception, match=named):
        torch.onnx.export(model, arguments, io.BytesIO(), dynamo=False)


def test_masked_tensors_in_the_mode_name_the_op():
    x = torch.masked.masked_tensor(torch.randn(3, 4), torch.ones(3, 4, dtype=torch.bool))
    with conv2d_ext.batch_invariant(), pytest.raises(TypeError, match=r"conv2d_ext\.pointwise"):
        torch.sigmoid(x)


def test_per_sample_gradients_of_nn_utils_are_refused():
    layer = conv2d_ext.convert(torch.nn.Linear(3, 4))
    with pytest.raises(RuntimeError, match="cannot handle function linear"):
        call_for_per_sample_grads(layer)(torch.randn(5, 3))
