"""The four ops are closed under differentiation, and compute and save only what is needed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from observing import Recorder
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks

import conv2d_ext
from conv2d_ext.testing import Problem, make_tensors

OPS = torch.ops.conv2d_ext

PROBLEMS = (
    Problem("plain", 2, 2, (3, 4), 3, (2, 3)),
    Problem("no bias", 2, 2, (4, 5), 3, (2, 3), bias=False),
    Problem("everything", 2, 4, (5, 6), 2, (3, 2), (2, 1), (1, 0), (1, 2), groups=2),
    Problem("same", 1, 2, (4, 5), 2, (2, 4), padding="same"),
    Problem("depthwise", 1, 3, (4, 5), 3, (2, 3), padding=(1, 1), groups=3),
    Problem("unread rim", 1, 2, (6, 3), 2, (2, 2), (3, 2)),
)
over_problems = pytest.mark.parametrize("problem", PROBLEMS, ids=str)
over_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)


def _leaves(problem, dtype):
    return [t.requires_grad_() for t in make_tensors(problem, dtype, seed=1)[:3] if t is not None]


def _function(problem):
    return lambda *tensors: conv2d_ext.conv2d(*tensors, **problem.call_args())


class TestGradcheck:
    @over_dtypes
    @over_problems
    def test_first_derivatives(self, problem, dtype):
        """Backward and forward mode, and vmap over both."""
        assert gradcheck(
            _function(problem),
            _leaves(problem, dtype),
            check_forward_ad=True,
            check_batched_grad=True,
            check_batched_forward_grad=True,
            fast_mode=dtype.is_complex,
        )

    @over_dtypes
    @over_problems
    def test_second_derivatives(self, problem, dtype):
        """Reverse over reverse, and forward over reverse."""
        assert gradgradcheck(
            _function(problem), _leaves(problem, dtype), check_fwd_over_rev=True, fast_mode=True
        )

    @over_dtypes
    @over_problems
    def test_third_derivatives(self, problem, dtype):
        """The second derivatives' function, checked to its second derivatives."""
        leaves = _leaves(problem, dtype)
        output = _function(problem)(*leaves)
        grad_output = torch.randn_like(output, requires_grad=True)

        def first_gradients(grad_output, *leaves):
            output = _function(problem)(*leaves)
            return torch.autograd.grad(output, leaves, grad_output, create_graph=True)

        assert gradgradcheck(first_gradients, (grad_output, *leaves), fast_mode=True, atol=1e-4)

    @over_dtypes
    @over_problems
    def test_each_op(self, problem, dtype):
        input, weight, _, grad_output = (
            None if t is None else t.requires_grad_() for t in make_tensors(problem, dtype)
        )
        args = problem.op_args()
        weight_stride = list(weight.stride())
        functions = {
            "conv2d": (lambda x, w: OPS.conv2d(x, w, None, *args), (input, weight)),
            "conv2d_grad_input": (
                lambda g, w: OPS.conv2d_grad_input(g, w, problem.input_shape, *args, False),
                (grad_output, weight),
            ),
            "conv2d_grad_weight": (
                lambda g, x: OPS.conv2d_grad_weight(
                    g, x, problem.weight_shape, weight_stride, *args
                ),
                (grad_output, input),
            ),
            "conv2d_grad_bias": (OPS.conv2d_grad_bias, (grad_output,)),
        }
        for function, operands in functions.values():
            assert gradcheck(function, operands, check_forward_ad=True, fast_mode=True)
            assert gradgradcheck(function, operands, fast_mode=True)

    @over_dtypes
    def test_unbatched(self, dtype):
        problem = Problem("unbatched", 1, 2, (4, 5), 3, (2, 3))
        input, *rest = _leaves(problem, dtype)
        input = input.detach()[0].requires_grad_()
        assert gradcheck(_function(problem), (input, *rest), check_forward_ad=True)
        assert gradgradcheck(_function(problem), (input, *rest), fast_mode=True)


def _losses(convolution, problem, leaves):
    """Gradients of orders one to three of a loss with powers, so that none of them is zero."""
    output = convolution(*leaves, **problem.call_args())
    gradients = torch.autograd.grad(output.pow(3).sum(), leaves, create_graph=True)
    found = [*gradients]
    for _ in range(2):
        gradients = torch.autograd.grad(
            sum(g.pow(2).sum() for g in gradients), leaves, create_graph=True
        )
        found.extend(gradients)
    return found


@over_problems
def test_three_orders_equal_those_of_pytorch(problem):
    leaves = _leaves(problem, torch.float64)
    ours = _losses(conv2d_ext.conv2d, problem, leaves)
    theirs = _losses(F.conv2d, problem, leaves)
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


# For each argument that requires a gradient: the op that computes it, and what that op uses.
GRADIENT_OP = {name: f"conv2d_grad_{name}" for name in ("input", "weight", "bias")}
GRADIENT_USES = {"input": {"weight"}, "weight": {"input"}, "bias": set()}


class TestOnlyWhatIsNeeded:
    NAMES = ("input", "weight", "bias")
    PROBLEM = Problem("needed", 2, 2, (4, 5), 3, (2, 3))

    def _tensors(self, wanted):
        tensors = dict(zip(self.NAMES, make_tensors(self.PROBLEM)[:3], strict=True))
        for name in wanted:
            tensors[name].requires_grad_()
        return tensors

    subsets = pytest.mark.parametrize(
        "wanted",
        [[n for i, n in enumerate(("input", "weight", "bias")) if k >> i & 1] for k in range(8)],
        ids=lambda wanted: "+".join(wanted) or "none",
    )

    @subsets
    def test_computed(self, wanted):
        tensors = self._tensors(wanted)
        with Recorder() as recorder:
            output = conv2d_ext.conv2d(**tensors)
            assert output.requires_grad == bool(wanted)
            if wanted:
                output.backward(torch.ones_like(output))
        assert sorted(recorder.ours) == sorted(["conv2d", *(GRADIENT_OP[name] for name in wanted)])

    def test_computed_for_part_of_the_leaves(self):
        """backward() towards one leaf computes that one's gradient alone."""
        for name in self.NAMES:
            tensors = self._tensors(self.NAMES)
            output = conv2d_ext.conv2d(**tensors)
            with Recorder() as recorder:
                torch.autograd.grad(output.sum(), tensors[name])
            assert recorder.ours == [GRADIENT_OP[name]]

    @subsets
    def test_saved(self, wanted):
        tensors = self._tensors(wanted)
        names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
        saved = []

        def pack(tensor):
            saved.append(names[tensor.data_ptr()])  # KeyError: a copy was saved
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            conv2d_ext.conv2d(**tensors)
        assert sorted(saved) == sorted(set().union(*(GRADIENT_USES[name] for name in wanted)))

    def test_an_input_nobody_needs_is_freed(self):
        """Training a layer on frozen weights keeps no activation alive."""
        weight = torch.randn(3, 2, 3, 3)
        source = torch.randn(1, 2, 8, 8, requires_grad=True)
        activation = source * 2
        watched = weakref.ref(activation)
        output = conv2d_ext.conv2d(activation, weight)
        del activation
        gc.collect()
        assert watched() is None
        output.sum().backward()
        torch.testing.assert_close(
            source.grad,
            2 * torch.nn.grad.conv2d_input((1, 2, 8, 8), weight, torch.ones(1, 3, 6, 6)),
        )

    def test_backward_twice_needs_retain_graph(self):
        tensors = self._tensors(("input", "weight"))
        output = conv2d_ext.conv2d(**tensors).sum()
        output.backward(retain_graph=True)
        output.backward()
        with pytest.raises(RuntimeError, match="second time"):
            output.backward()

    def test_a_saved_tensor_changed_in_place_is_noticed(self):
        input = torch.randn(1, 2, 4, 5)
        weight = torch.randn(3, 2, 2, 3, requires_grad=True)
        output = conv2d_ext.conv2d(input, weight)
        input.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_double_backward_inside_a_hook():
    """A hook may itself differentiate: no lock is held across the ops a backward calls."""
    input = torch.randn(1, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    seen = []

    def hook(grad):
        with torch.enable_grad():
            inner = conv2d_ext.conv2d(input, weight).pow(2).sum()
            (first,) = torch.autograd.grad(inner, weight, create_graph=True)
            (second,) = torch.autograd.grad(first.pow(2).sum(), weight)
        seen.append(second)
        return grad

    output = conv2d_ext.conv2d(input, weight)
    output.register_hook(hook)
    output.sum().backward(create_graph=True)
    inner = F.conv2d(input, weight).pow(2).sum()
    (first,) = torch.autograd.grad(inner, weight, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), weight)
    torch.testing.assert_close(seen, [second])
    with torch.no_grad():
        torch.testing.assert_close(
            weight.grad, torch.nn.grad.conv2d_weight(input, weight.shape, torch.ones_like(output))
        )


TRAINED = [
    [n for i, n in enumerate(("input", "weight", "bias")) if k >> i & 1] for k in range(1, 8)
]


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "square"])
@pytest.mark.parametrize(
    ("trained", "wanted"),
    [(names, name) for names in TRAINED for name in names],
    ids=lambda names: names if isinstance(names, str) else "+".join(names),
)
def test_a_penalty_of_constant_gradients(trained, wanted, linear):
    """A gradient requires one where F.conv2d's does, and has it in the same leaves: frozen weights
    leave the input's gradient constant, and its penalty without a gradient, but not an error."""

    def outcome(convolution):
        torch.manual_seed(0)
        tensors = {"input": torch.randn(2, 3, 6, 5), "weight": torch.randn(4, 3, 3, 2)}
        tensors["bias"] = torch.randn(4)
        for name in trained:
            tensors[name].requires_grad_()
        output = convolution(**tensors)
        loss = output.sum() if linear else output.pow(2).sum()
        (gradient,) = torch.autograd.grad(loss, tensors[wanted], create_graph=True)
        if gradient.requires_grad:
            gradient.pow(2).sum().backward(create_graph=True)
        gradients = [t.grad for t in tensors.values()]
        return gradient.requires_grad, [None if g is None else g.detach() for g in gradients]

    ours, theirs = outcome(conv2d_ext.conv2d), outcome(F.conv2d)
    assert ours[0] == theirs[0]
    assert [g is None for g in ours[1]] == [g is None for g in theirs[1]]
    for actual, expected in zip(ours[1], theirs[1], strict=True):
        if actual is not None:
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_constant_gradients_keep_no_tensor_alive():
    input, weight = torch.randn(1, 2, 5, 5, requires_grad=True), torch.randn(3, 2, 3, 3)
    output = conv2d_ext.conv2d(input, weight)
    (gradient,) = torch.autograd.grad(output.sum(), input, create_graph=True)
    dead = weakref.ref(weight)
    del output, weight
    gc.collect()
    assert dead() is None
    assert gradient.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    input, weight = torch.randn(1, 2, 5, 5, requires_grad=True), torch.randn(2, 2, 3, 3)
    with mode():
        output = conv2d_ext.conv2d(input, weight)
    assert not output.requires_grad
    torch.testing.assert_close(output, F.conv2d(input, weight).detach())


def test_checkpointing_and_saved_tensor_hooks():
    input = torch.randn(1, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    plain = torch.autograd.grad(conv2d_ext.conv2d(input, weight).pow(2).sum(), (input, weight))
    again = torch.utils.checkpoint.checkpoint(conv2d_ext.conv2d, input, weight, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.pow(2).sum(), (input, weight)), plain)
    with torch.autograd.graph.save_on_cpu():
        output = conv2d_ext.conv2d(input, weight)
    torch.testing.assert_close(torch.autograd.grad(output.pow(2).sum(), (input, weight)), plain)


def test_module_hooks_see_the_gradients():
    layer = conv2d_ext.Conv2d(2, 3, 3)
    seen = []
    layer.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_in[0]))
    input = torch.randn(1, 2, 5, 5, requires_grad=True)
    layer(input).sum().backward()
    torch.testing.assert_close(seen, [input.grad])
