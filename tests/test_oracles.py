"""The oracles themselves: two independent ones agree, and the error measures measure."""

from __future__ import annotations

import fractions
import itertools

import pytest
import torch
from loop_oracle import loop_oracle

from conv2d_ext import testing
from conv2d_ext.testing import Oracle, Problem, Results, float64_oracle, make_tensors

SUBJECTS = (*testing.EDGE, *testing.ASYMMETRIC, *testing.DEPTHWISE, *testing.DILATED)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("problem", SUBJECTS, ids=str)
def test_the_loop_oracle_agrees_with_the_float64_oracle(problem, dtype):
    tensors = make_tensors(problem, dtype)
    pairs = zip(float64_oracle(problem, tensors), loop_oracle(problem, tensors), strict=True)
    for name, (fast, slow) in zip(Results._fields, pairs, strict=True):
        if slow is None:
            assert fast is None
            continue
        assert slow.max_scaled_error(fast.value) <= 1e-14, name
        torch.testing.assert_close(fast.magnitude, slow.magnitude, rtol=1e-13, atol=0, msg=name)


def test_the_loop_oracle_is_exact_beyond_float64():
    problem = Problem("exact", 1, 3, (4, 5), 2, (2, 3), (1, 2), (1, 0))
    tensors = make_tensors(problem, torch.float64)
    # Cancel the leading digits, so that float64 sums lose most of theirs.
    tensors.weight[:, 1] = -tensors.weight[:, 0]
    tensors.input[:, 1] = tensors.input[:, 0] * (1 + 2.0**-50)
    output = loop_oracle(problem, tensors).output
    for oc, oh, ow in itertools.product(*(range(size) for size in problem.output_shape[1:])):
        exact = fractions.Fraction(tensors.bias[oc].item())
        for ic, kh, kw in itertools.product(range(3), range(2), range(3)):
            ih, iw = oh - 1 + kh, 2 * ow + kw
            if 0 <= ih < 4:
                exact += fractions.Fraction(tensors.input[0, ic, ih, iw].item()) * (
                    fractions.Fraction(tensors.weight[oc, ic, kh, kw].item())
                )
        value, tail = (
            fractions.Fraction(part[0, oc, oh, ow].item()) for part in (output.value, output.tail)
        )
        magnitude = fractions.Fraction(output.magnitude[0, oc, oh, ow].item())
        assert abs(value + tail - exact) <= magnitude * fractions.Fraction(2) ** -95


def test_error_measures():
    exact = torch.tensor([3.0, -4.0, 0.0], dtype=torch.float64)
    oracle = Oracle(exact, None, torch.tensor([3.0, 8.0, 0.0], dtype=torch.float64))
    assert oracle.relative_l2(exact) == oracle.max_scaled_error(exact) == 0
    off = torch.tensor([3.0, -3.0, 0.0])
    assert oracle.relative_l2(off) == 1 / 5
    assert oracle.max_scaled_error(off) == 1 / 8
    # An element without products, such as an input that no output reads, has no room for error.
    assert oracle.max_scaled_error(torch.tensor([3.0, -4.0, 1e-30])) == float("inf")
    # NaN compares false with every bound, and so cannot pass for accurate.
    assert not oracle.max_scaled_error(torch.tensor([float("nan"), -4.0, 0.0])) <= 1
    assert not oracle.relative_l2(torch.tensor([float("nan"), -4.0, 0.0])) <= 1


def test_every_problem_has_its_own_name_and_a_valid_geometry():
    layers = [layer for model in testing.REAL_LAYERS.values() for layer in model]
    problems = [*testing.SMALL_PROBLEMS, testing.POST, *layers]
    assert len({problem.name for problem in problems}) == len(problems)
    for problem in problems:
        assert min(problem.output_shape[1:]) >= 1, problem
        assert problem.in_channels % problem.groups == problem.out_channels % problem.groups == 0


def test_geometry_of_a_real_layer():
    layer = testing.REAL_LAYERS["resnet50"][0]
    assert layer.name == "resnet50 3@224-64/k7s2p3"
    assert layer.input_shape == (1, 3, 224, 224)
    assert layer.weight_shape == (64, 3, 7, 7)
    assert layer.output_shape == (1, 64, 112, 112)
    assert layer.gemm_mnk == (64, 112 * 112, 147)
    assert layer.flops == 2 * 64 * 112 * 112 * 147
    assert layer.shrunk(9).in_size == (10, 10)
    assert layer.with_batch(8).output_shape == (8, 64, 112, 112)


@pytest.mark.parametrize("view", testing.VIEWS)
def test_views_keep_the_values_and_change_the_memory(view):
    tensor = torch.randn(2, 3, 4, 5)
    other = testing.VIEWS[view](tensor)
    assert torch.equal(tensor, other)
    assert other.stride() != tensor.stride() or other.data_ptr() % 64
