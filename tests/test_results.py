"""What calls return: tensors of their own, in PyTorch's strides, as their gradients are.

Seen to fail: with `squeeze` in without_dim's place every call of one dimension, mv and dot.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_versions import IS_OLDER

import conv2d_ext


def _in_mode(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*tensors: Tensor) -> Tensor:
        with conv2d_ext.batch_invariant():
            return function(*tensors)

    return run


def _heads_inside(*size: int) -> Tensor:
    n, heads, rows, columns = size
    return torch.randn(n, rows, heads, columns).transpose(1, 2)


def _last(*size: int) -> Tensor:
    last = torch.channels_last if len(size) == 4 else torch.channels_last_3d
    return torch.randn(size).contiguous(memory_format=last)


def _attend(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


r = torch.randn
# name -> PyTorch's function, ours, and the arguments
PUBLIC = {
    "conv1d": (F.conv1d, conv2d_ext.conv1d, (r(2, 3, 10), r(4, 3, 3), r(4))),
    "conv1d, one": (F.conv1d, conv2d_ext.conv1d, (r(1, 1, 1), r(1, 1, 1))),
    "conv1d, unbatched": (F.conv1d, conv2d_ext.conv1d, (r(3, 10), r(4, 3, 3), r(4))),
    "conv1d, turned": (
        F.conv1d,
        conv2d_ext.conv1d,
        (r(2, 10, 3).transpose(1, 2), r(4, 3, 3), r(4)),
    ),
    "conv1d, no images": (F.conv1d, conv2d_ext.conv1d, (r(0, 3, 10), r(4, 3, 3), r(4))),
    "conv_transpose1d": (
        F.conv_transpose1d,
        conv2d_ext.conv_transpose1d,
        (r(2, 3, 10), r(3, 4, 3), r(4)),
    ),
    "conv_transpose2d": (
        F.conv_transpose2d,
        conv2d_ext.conv_transpose2d,
        (r(2, 3, 4, 5), r(3, 4, 3, 2), r(4)),
    ),
    "linear, vector": (F.linear, conv2d_ext.linear, (r(6), r(7, 6), r(7))),
    "linear, rows": (F.linear, conv2d_ext.linear, (r(5, 6), r(7, 6), r(7))),
    "linear, 4 dimensions": (F.linear, conv2d_ext.linear, (r(2, 3, 5, 6), r(7, 6), r(7))),
    "linear, weight of a row": (F.linear, conv2d_ext.linear, (r(5, 6), r(6))),
}
COVERED = {
    "mv": (torch.mv, (r(3, 4), r(4))),
    "addmv": (lambda a, b, c: torch.addmv(a, b, c, beta=0), (r(3), r(3, 4), r(4))),
    "dot": (torch.dot, (r(4), r(4))),
    "vdot": (torch.vdot, (r(4), r(4))),
    "mm": (torch.mm, (r(3, 4), r(4, 5))),
    "matmul, vector": (torch.matmul, (r(2, 3, 4), r(4))),
    "conv3d": (lambda x, w: F.conv3d(x, w, stride=2), (r(2, 3, 4, 4, 4), r(4, 3, 2, 2, 2))),
    "conv3d, as deep": (
        lambda x, w: F.conv3d(x, w, stride=2),
        (r(2, 3, 2, 4, 4), r(4, 3, 2, 2, 2)),
    ),
    "conv3d, one channel": (
        lambda x, w: F.conv3d(x, w, stride=2),
        (r(2, 3, 4, 4, 4), r(1, 3, 2, 2, 2)),
    ),
    "conv3d, channels_last": (
        lambda x, w: F.conv3d(x, w, stride=2),
        (_last(2, 3, 4, 4, 4), r(4, 3, 2, 2, 2)),
    ),
    "attention": (_attend, (r(2, 3, 4, 8), r(2, 3, 5, 8), r(2, 3, 5, 8))),
    "attention, heads inside": (
        _attend,
        (_heads_inside(2, 3, 4, 8), _heads_inside(2, 3, 5, 8), _heads_inside(2, 3, 5, 8)),
    ),
    "attention, a query": (
        _attend,
        (_heads_inside(2, 3, 1, 8), _heads_inside(2, 3, 5, 8), _heads_inside(2, 3, 5, 8)),
    ),
    "attention, other columns": (
        _attend,
        (_heads_inside(2, 3, 4, 8), _heads_inside(2, 3, 5, 8), _heads_inside(2, 3, 5, 7)),
    ),
    "attention, mask": (
        lambda q, k, v, m: _attend(q, k, v, attn_mask=m),
        (r(2, 3, 4, 8), r(2, 3, 5, 8), r(2, 3, 5, 8), r(4, 5)),
    ),
    "attention, 3 dimensions": (_attend, (r(3, 4, 8), r(3, 5, 8), r(3, 5, 8))),
    "attention, 2 dimensions": (_attend, (r(4, 8), r(5, 8), r(5, 8))),
    "attention, grouped": (
        lambda q, k, v: _attend(q, k, v, enable_gqa=True, is_causal=True),
        (r(2, 4, 4, 8), r(2, 2, 5, 8), r(2, 2, 5, 8)),
    ),
    "prod": (lambda x: x.prod(1), (r(2, 4, 3, 5),)),
    "prod, kept": (lambda x: x.prod(1, keepdim=True), (r(2, 4, 3, 5),)),
    "prod of all": (torch.prod, (r(2, 4, 3, 5),)),
    "prod, channels_last": (lambda x: x.prod(2, keepdim=True), (_last(2, 4, 3, 5),)),
    "prod of all, channels_last": (torch.prod, (_last(2, 4, 3, 5),)),
    "softmax": (lambda x: x.softmax(1), (_last(2, 4, 3, 5),)),
    "mean": (lambda x: x.mean((2, 3), keepdim=True), (_last(2, 4, 3, 5),)),
    "glu": (lambda x: F.glu(x, 1), (_last(2, 4, 3, 5),)),
    "group_norm": (lambda x: F.group_norm(x, 2), (_last(2, 4, 3, 5),)),
    "gelu": (F.gelu, (_last(2, 4, 3, 5),)),
}
CALLS = {
    **PUBLIC,
    **{name: (call, _in_mode(call), inputs) for name, (call, inputs) in COVERED.items()},
}
# Of channels_last inputs: a video's copy, which is contiguous, has its gradient alike; and
# PyTorch's gradient of a product follows the strides of what multiplies it.
OTHER_STRIDES = [COVERED[name][0] for name in ("conv3d, channels_last", "prod, channels_last")]
over_calls = pytest.mark.parametrize(("theirs", "ours", "inputs"), CALLS.values(), ids=CALLS)


@over_calls
@pytest.mark.parametrize("grad", [False, True])
def test_a_result_is_no_view(theirs, ours, inputs, grad):
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.set_grad_enabled(grad):
        result, expected = ours(*leaves), theirs(*leaves)
    assert result.stride() == expected.stride()
    assert not result._is_view()
    assert result._base is None
    if grad:
        result.mul_(2)
        return
    result.requires_grad_().mul(2).sum().backward()
    result.detach_().set_(torch.ones(1))


@over_calls
def test_gradients_have_pytorch_s_strides(theirs, ours, inputs):
    found = []
    for function in (ours, theirs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        output = function(*leaves)
        found.append(torch.autograd.grad(output, leaves, output.detach().sin()))
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right)
        if theirs not in OTHER_STRIDES and not IS_OLDER:
            assert mine.stride() == right.stride()


@pytest.mark.parametrize("name", ["addmm", "baddbmm", "addmv", "addbmm"])
def test_a_factor_of_zero_has_gradients_of_zero(name):
    function = getattr(torch, name)
    sizes = {
        "addmm": ((2,), (3, 4), (4, 2)),
        "baddbmm": ((2, 3, 1), (2, 3, 4), (2, 4, 5)),
        "addmv": ((3,), (3, 4), (4,)),
        "addbmm": ((3, 5), (2, 3, 4), (2, 4, 5)),
    }[name]
    leaves = [torch.randn(size, requires_grad=True) for size in sizes]
    with torch.no_grad():
        leaves[0].fill_(torch.nan)
    with conv2d_ext.batch_invariant():
        result = function(*leaves, beta=0, alpha=2)
        kept = leaves[0].expand_as(result).clone()
        in_place = getattr(kept, f"{name}_")(*leaves[1:], beta=0)
    assert not result.isnan().any()
    assert torch.equal(in_place * 2, result)
    (result.sum() + in_place.sum()).backward()
    assert torch.equal(leaves[0].grad, torch.zeros(sizes[0]))


class TestErrors:
    integers = torch.arange(6).reshape(2, 3)

    @pytest.mark.parametrize(
        "call",
        [
            lambda i: torch.mean(i, 1, out=torch.empty(2)),
            lambda i: i.mean(),
            lambda i: torch._addmm_activation(
                torch.ones(3), torch.ones(2, 2), torch.ones(2, 3), alpha=1j
            ),
        ],
    )
    def test_what_pytorch_refuses_is_refused(self, call):
        with pytest.raises(RuntimeError) as alone:
            call(self.integers)
        with conv2d_ext.batch_invariant(), pytest.raises(RuntimeError) as covered:
            call(self.integers)
        assert str(covered.value) == str(alone.value)

    def test_what_pytorch_takes_is_taken(self):
        with conv2d_ext.batch_invariant():
            out = torch.mean(self.integers, 1, dtype=torch.float32, out=torch.empty(2))
            assert out.tolist() == [1, 4]
            assert torch.sum(self.integers, 1, out=torch.empty(2)).tolist() == [3, 12]
            zero = torch.full((2, 2), torch.nan)
            found = torch._addmm_activation(torch.ones(3), zero, torch.ones(2, 3), alpha=0)
        expected = torch._addmm_activation(torch.ones(3), zero, torch.ones(2, 3), alpha=0)
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_modules_give_no_views():
    modules = [
        (conv2d_ext.Conv1d(3, 4, 3), r(2, 3, 9)),
        (conv2d_ext.ConvTranspose1d(3, 4, 3), r(2, 3, 9)),
        (conv2d_ext.Linear(3, 4), r(2, 5, 6, 3)),
    ]
    for module, x in modules:
        with torch.no_grad():
            y = module(x)
        nn.init.zeros_(y.detach_())
        assert not y._is_view()
