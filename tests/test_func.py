"""torch.func over every public function, and over PyTorch's inside the mode, against F.*."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import conv2d_ext


@dataclasses.dataclass(frozen=True)
class Call:
    """A function of tensors: ours (none: PyTorch's in the mode), and PyTorch's."""

    name: str
    sizes: tuple[tuple[int, ...], ...]
    torch: Callable[..., Tensor]
    ours: Callable[..., Tensor] | None = None

    def __str__(self) -> str:
        return self.name

    def inputs(self, *batch: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(len(self.name))
        return tuple(
            torch.randn(*batch, *size, dtype=torch.float64, generator=generator)
            for size in self.sizes
        )


def _pair(name: str, sizes: Sequence[tuple[int, ...]], **arguments: object) -> list[Call]:
    theirs, ours = getattr(F, name), getattr(conv2d_ext, name)

    def with_bias(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *tensors: function(*tensors, **arguments)

    calls = []
    for count, kind in ((2, ""), (3, ", bias")):
        shapes = tuple(sizes[:count])
        calls.append(Call(name + kind, shapes, with_bias(theirs), with_bias(ours)))
        calls.append(Call(f"{name}{kind}, in the mode", shapes, with_bias(theirs)))
    return calls


def _mode(name: str, function: Callable[..., Tensor], *sizes: tuple[int, ...]) -> Call:
    return Call(name, sizes, function)


CALLS = [
    *_pair("conv1d", ((2, 2, 5), (2, 1, 3), (2,)), stride=2, padding=1, groups=2),
    *_pair("conv2d", ((1, 2, 4, 3), (2, 2, 2, 3), (2,)), stride=(2, 1), padding=(1, 1)),
    *_pair("conv_transpose1d", ((2, 2, 3), (2, 2, 3), (2,)), stride=2, output_padding=1),
    *_pair("conv_transpose2d", ((1, 2, 2, 3), (2, 1, 3, 2), (2,)), stride=2, groups=2)[:2],
    *_pair("conv_transpose2d", ((1, 2, 2, 3), (2, 1, 3, 2), (1,)), stride=2, padding=1)[2:],
    *_pair("conv_transpose2d", ((2, 2, 2), (2, 2, 2, 2), (2,)), dilation=2, output_padding=1),
    *_pair("linear", ((3, 4), (2, 4), (2,))),
    *_pair("linear", ((2, 2, 3), (2, 3), (2,))),
    *_pair("linear", ((1, 2, 1, 3), (2, 3), (2,))),
    *_pair("linear", ((4,), (2, 4), (2,))),
    _mode(
        "conv3d",
        lambda x, w, b: F.conv3d(x, w, b, stride=2),
        (1, 2, 4, 2, 2),
        (2, 2, 2, 2, 2),
        (2,),
    ),
    _mode("mm", torch.mm, (2, 3), (3, 2)),
    _mode("bmm", torch.bmm, (2, 2, 3), (2, 3, 2)),
    _mode("mv", torch.mv, (2, 3), (3,)),
    _mode("dot", torch.dot, (3,), (3,)),
    _mode("addmm", lambda a, b, c: torch.addmm(a, b, c, beta=0.5, alpha=2), (2,), (3, 4), (4, 2)),
    _mode("addmm, beta 0", lambda a, b, c: torch.addmm(a, b, c, beta=0), (2,), (3, 4), (4, 2)),
    _mode("baddbmm", torch.baddbmm, (2, 2, 2), (2, 2, 3), (2, 3, 2)),
    _mode("addmv", torch.addmv, (2,), (2, 3), (3,)),
    _mode("addbmm", torch.addbmm, (2, 2), (2, 2, 3), (2, 3, 2)),
    _mode("einsum", lambda a, b: torch.einsum("bij,bkj->bik", a, b), (2, 2, 3), (2, 2, 3)),
    _mode("softmax", lambda x: x.softmax(-1), (2, 3)),
    _mode("log_softmax", lambda x: x.log_softmax(0), (2, 3)),
    _mode("sum", lambda x: x.pow(3).sum(1), (2, 3)),
    _mode("mean", lambda x: x.pow(3).mean(), (2, 3)),
    _mode("prod", lambda x: x.prod(1, keepdim=True), (2, 3)),
    _mode("prod of all", lambda x: x.prod(), (2, 3)),
    _mode("gelu", F.gelu, (2, 3)),
    _mode("gelu, tanh", lambda x: F.gelu(x, approximate="tanh"), (2, 3)),
    _mode("sigmoid", torch.sigmoid, (2, 3)),
    _mode("silu", F.silu, (2, 3)),
    _mode("mish", F.mish, (2, 3)),
    _mode("softplus", lambda x: F.softplus(x, 2, 1), (2, 3)),
    _mode("elu", F.elu, (2, 3)),
    _mode("glu", F.glu, (2, 4)),
    _mode("pow", lambda x: (x * x + 1).pow(1.7), (2, 3)),
    _mode("group_norm", lambda x: F.group_norm(x, 2), (1, 4, 2, 2)),
    _mode("layer_norm", lambda x: F.layer_norm(x, (4,)), (2, 4)),
    _mode("attention", F.scaled_dot_product_attention, (1, 2, 2, 3), (1, 2, 3, 3), (1, 2, 3, 3)),
    _mode(
        "attention, mask",
        F.scaled_dot_product_attention,
        *((1, 2, 2, 3), (1, 2, 3, 3), (1, 2, 3, 3), (2, 3)),
    ),
    _mode(
        "attention, causal",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        *((2, 2, 3), (1, 2, 3), (1, 2, 3)),
    ),
]
over_calls = pytest.mark.parametrize("call", CALLS, ids=str)


def close(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def both(call: Call, transform: Callable[[Callable[..., Tensor]], object]) -> None:
    with sdpa_kernel(SDPBackend.MATH):  # the other kernel has no derivatives of a gradient
        expected = transform(call.torch)
    if call.ours is None:
        with conv2d_ext.batch_invariant():
            found = transform(call.torch)
    else:
        found = transform(call.ours)
    close(found, expected)


def scalar(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *tensors: function(*tensors).cos().sum()


@over_calls
def test_jvp_of_each_argument_and_of_all(call):
    inputs = call.inputs()
    everyone = tuple(range(len(inputs)))
    for moving in (*((i,) for i in everyone), everyone):
        tangents = tuple(inputs[i].sin() for i in moving)

        def run(function, moving=moving, tangents=tangents):
            def of(*some):
                tensors = list(inputs)
                for i, tensor in zip(moving, some, strict=True):
                    tensors[i] = tensor
                return function(*tensors)

            return jvp(of, tuple(inputs[i] for i in moving), tangents)

        both(call, run)


@over_calls
def test_vjp_and_jacobians(call):
    inputs = call.inputs()
    every = tuple(range(len(inputs)))
    grad = call.torch(*inputs).sin()

    def pulled(function):
        output, pull = vjp(function, *inputs)
        return output, pull(grad)

    both(call, pulled)
    both(call, lambda f: jacrev(f, argnums=every)(*inputs))
    both(call, lambda f: jacfwd(f, argnums=every)(*inputs))


@over_calls
def test_hessian(call):
    inputs = call.inputs()
    every = tuple(range(len(inputs)))
    both(call, lambda f: hessian(scalar(f), argnums=every)(*inputs))
    both(call, lambda f: jacrev(jacrev(scalar(f), argnums=every), argnums=every)(*inputs))


@over_calls
def test_vmap_of_each_argument_and_of_all(call):
    single, batched = call.inputs(), call.inputs(3)
    every = tuple(range(len(single)))
    for moving in (*((i,) for i in every), every):
        dims = tuple(0 if i in moving else None for i in every)
        inputs = tuple(batched[i] if i in moving else single[i] for i in every)
        both(call, lambda f, dims=dims, inputs=inputs: vmap(f, in_dims=dims)(*inputs))
        grads = lambda f: torch.func.grad(scalar(f), argnums=every)  # noqa: E731
        both(call, lambda f, d=dims, i=inputs, grads=grads: vmap(grads(f), in_dims=d)(*i))


@over_calls
def test_linearize(call):
    inputs = call.inputs()
    tangents = tuple(tensor.sin() for tensor in inputs)

    def run(function):
        output, push = linearize(function, *inputs)
        return output, push(*tangents)

    both(call, run)


@over_calls
def test_batched_gradients(call):
    inputs = [tensor.requires_grad_() for tensor in call.inputs()]

    def run(function):
        output = function(*inputs)
        grads = torch.stack((output.detach().sin(), output.detach().cos()))
        return torch.autograd.grad(output, inputs, grads, is_grads_batched=True, allow_unused=True)

    both(call, run)


def test_functional_call():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(2, 3, 2, stride=2)
            self.conv = nn.Conv2d(3, 4, 3)
            self.rows = nn.Conv1d(4, 4, 3)
            self.back = nn.ConvTranspose1d(4, 2, 2)
            self.last = nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = F.gelu(self.conv(self.up(x)))
            return self.last(self.back(self.rows(x.flatten(2))).mean(-1))

    torch.manual_seed(0)
    plain = Model().double()
    parameters = {name: p.detach() for name, p in plain.named_parameters()}
    x = torch.randn(5, 1, 2, 3, 3, dtype=torch.float64)

    def results(model: nn.Module) -> object:
        def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(model, parameters, (x,)).square().sum()

        return (
            vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x),
            jacfwd(loss)(parameters, x[0]),
            hessian(loss, argnums=1)(parameters, x[0]),
        )

    expected = results(plain)
    with conv2d_ext.batch_invariant():
        close(results(plain), expected)
    close(results(conv2d_ext.convert(plain)), expected)


@pytest.mark.parametrize("dot", [torch.dot, torch.vdot])
def test_forward_mode_of_products_of_conjugates_under_vmap(dot):
    """PyTorch has no tangents of views of conjugates there."""
    torch.manual_seed(0)
    x, y, tangents = (torch.randn(*size, 5, dtype=torch.complex64) for size in ((), (), (3,)))

    def product(tangent: Tensor) -> Tensor:
        return jvp(lambda y: dot(x.conj(), y), (y.conj(),), (tangent,))[1]

    expected = vmap(product)(tangents)
    with conv2d_ext.batch_invariant():
        torch.testing.assert_close(vmap(product)(tangents), expected)
        torch.testing.assert_close(product(tangents[0]), expected[0])


def test_each_level_of_a_transform_is_in_the_mode():
    """Gradients keep their bits in every batch. (Below torch.func's keys the mode would leave them
    to PyTorch's formulas of convolutions and pointwise functions.)"""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 3, 3, 3, generator=generator)
    x = torch.randn(8, 3, 13, 13, generator=generator)

    def loss(x: Tensor) -> Tensor:
        y = F.gelu(F.conv2d(x, weight)).flatten(2)
        return F.scaled_dot_product_attention(y, y, y[..., :40]).square().sum()

    with conv2d_ext.batch_invariant():
        for transform in (torch.func.grad, lambda f: lambda x: vjp(f, x)[1](torch.ones(()))[0]):
            whole = transform(loss)(x)
            for i in range(8):
                assert torch.equal(transform(loss)(x[i : i + 1])[0], whole[i])
