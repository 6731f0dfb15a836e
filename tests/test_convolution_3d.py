"""Convolutions in three dimensions, which the mode computes by those in two
(csrc/convolution_3d.cpp): values, derivatives and formats beside PyTorch's, an example's bits."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from observing import Recorder, assert_as_pytorch, same_bits
from torch import Tensor, nn

import conv2d_ext
from conv2d_ext.testing import unit_roundoff

over_formats = pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last_3d], ids=str
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    input: tuple[int, ...]
    weight: tuple[int, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    transposed: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def function(self):
        return F.conv_transpose3d if self.transposed else F.conv3d

    def __call__(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors, **self.kwargs)

    def tensors(
        self,
        dtype: torch.dtype = torch.float64,
        layout: torch.memory_format = torch.contiguous_format,
    ) -> list[Tensor]:
        groups = self.kwargs.get("groups", 1)
        channels = self.weight[1] * groups if self.transposed else self.weight[0]
        sizes = (self.input, self.weight, (channels,))
        generator = torch.Generator().manual_seed(0)
        input, *others = (torch.randn(size, dtype=dtype, generator=generator) for size in sizes)
        return [input.to(memory_format=layout), *others]


CASES = (
    Case("conv3d", (3, 4, 5, 6, 7), (6, 4, 3, 3, 3), {"padding": 1}),
    Case("conv3d, no padding", (2, 3, 5, 6, 4), (4, 3, 2, 3, 1)),
    Case("conv3d, strides", (3, 4, 7, 6, 9), (5, 4, 3, 2, 3),
         {"stride": (2, 1, 3), "padding": (1, 0, 2)}),
    Case("conv3d, dilated", (2, 3, 9, 8, 7), (4, 3, 3, 2, 3),
         {"dilation": (3, 2, 1), "padding": (2, 1, 0)}),
    Case("conv3d, groups", (2, 6, 4, 5, 6), (9, 2, 2, 3, 3), {"groups": 3, "padding": (1, 1, 0)}),
    Case("conv3d, depthwise", (2, 6, 4, 5, 6), (6, 1, 3, 3, 3), {"groups": 6, "padding": 1}),
    Case("conv3d, planes", (2, 4, 5, 6, 7), (6, 4, 1, 3, 3), {"padding": (0, 1, 1)}),
    Case("conv3d, planes with a stride", (2, 4, 5, 6, 7), (6, 4, 1, 3, 3), {"stride": (2, 1, 1)}),
    Case("conv3d, along the depth", (3, 4, 7, 5, 6), (6, 4, 3, 1, 1),
         {"stride": (2, 1, 1), "padding": (1, 0, 0)}),
    Case("conv3d, one tap", (3, 4, 5, 6, 7), (6, 4, 1, 1, 1)),
    Case("conv3d, one tap with strides", (3, 4, 5, 6, 7), (6, 4, 1, 1, 1), {"stride": 2}),
    Case("conv3d, the whole depth", (3, 4, 3, 6, 7), (6, 4, 3, 3, 3)),
    Case("conv3d, one result channel", (3, 4, 5, 6, 7), (1, 4, 3, 3, 3)),
    Case("conv3d, patches", (2, 3, 7, 8, 7), (5, 3, 2, 4, 3), {"stride": (2, 4, 3)}),
    Case("conv3d, same", (2, 3, 5, 6, 4), (4, 3, 4, 3, 2), {"padding": "same"}),
    Case("conv3d, unbatched", (3, 5, 6, 4), (4, 3, 2, 3, 3), {"padding": 1}),
    Case("conv_transpose3d", (3, 4, 5, 4, 3), (4, 6, 3, 2, 3), {}, True),
    Case("conv_transpose3d, apart", (3, 4, 3, 4, 5), (4, 3, 2, 2, 2), {"stride": 2}, True),
    Case("conv_transpose3d, apart and cut", (3, 4, 3, 4, 5), (4, 3, 2, 3, 2),
         {"stride": 2, "padding": 1}, True),
    Case("conv_transpose3d, strides", (2, 4, 3, 4, 3), (4, 3, 3, 3, 4),
         {"stride": (2, 1, 3), "padding": (1, 0, 2), "output_padding": (1, 0, 2)}, True),
    Case("conv_transpose3d, gaps", (2, 4, 3, 4, 3), (4, 3, 2, 1, 2),
         {"stride": 3, "output_padding": 2}, True),
    Case("conv_transpose3d, dilated", (2, 4, 3, 4, 3), (4, 3, 3, 2, 2),
         {"dilation": (2, 1, 2), "output_padding": (1, 0, 0), "padding": 1}, True),
    Case("conv_transpose3d, groups", (2, 6, 3, 4, 3), (6, 2, 3, 3, 2),
         {"groups": 3, "stride": 2}, True),
    Case("conv_transpose3d, one tap", (2, 4, 3, 4, 3), (4, 5, 1, 1, 1), {}, True),
    Case("conv_transpose3d, dilated in channels_last", (2, 4, 3, 4, 3), (4, 3, 2, 2, 3),
         {"dilation": 2, "padding": 1}, True),
    Case("conv_transpose3d, of its padding alone", (2, 6, 7, 1, 2), (6, 2, 2, 4, 4),
         {"stride": (3, 2, 1), "padding": (2, 2, 2),
          "output_padding": (2, 1, 0), "groups": 3}, True),
    Case("conv_transpose3d, one result channel", (2, 4, 3, 4, 3), (4, 1, 2, 2, 2),
         {"stride": 2}, True),
    Case("conv_transpose3d, one plane", (2, 4, 1, 4, 3), (4, 5, 2, 2, 2), {"stride": 2}, True),
    Case("conv_transpose3d, one plane, cut", (1, 4, 3, 4, 3), (4, 1, 3, 3, 3),
         {"stride": 2, "padding": 1}, True),
    Case("conv_transpose3d, unbatched", (4, 3, 4, 3), (4, 5, 2, 3, 2), {"stride": 2}, True),
)  # fmt: skip
over_cases = pytest.mark.parametrize("case", CASES, ids=str)


def _results(case: Case, tensors: list[Tensor], grad: Tensor | None = None) -> list[Tensor]:
    """The output and the gradients of all tensors, of the output's sum or with `grad`."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    output = case(*leaves)
    grad = torch.ones_like(output) if grad is None else grad
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


@over_formats
@over_cases
def test_values_gradients_and_formats(case, layout):
    if len(case.input) == 4 and layout is torch.channels_last_3d:
        pytest.skip("an unbatched input has no such format")
    tensors = case.tensors(torch.float64, layout)
    expected = _results(case, tensors)
    grad = torch.randn_like(expected[0])
    expected = _results(case, tensors, grad)
    with conv2d_ext.batch_invariant(), Recorder() as calls:
        found = _results(case, tensors, grad)
    assert calls.ours
    torch.testing.assert_close(found, expected)
    single = case.tensors(torch.float32, layout)
    with conv2d_ext.batch_invariant():
        output = case(*single)
    theirs = case(*single)
    for size, ours, stride in zip(output.shape, output.stride(), theirs.stride(), strict=True):
        assert size == 1 or ours == stride
    assert output._is_view() == theirs._is_view()
    with conv2d_ext.batch_invariant():
        output = case(*single[:2])
    assert output._is_view() == case(*single[:2])._is_view()
    assert output._is_view() or output.untyped_storage().nbytes() == output.nbytes


@pytest.mark.parametrize("case", [c for c in CASES if len(c.input) == 5], ids=str)
def test_gradients_of_contiguous_inputs_are_contiguous(case):
    tensors = case.tensors(torch.float32)
    with conv2d_ext.batch_invariant():
        output, grad_input, *others = _results(case, tensors)
        gradient = _results(case, tensors, torch.randn_like(output))[1]
    assert output.is_contiguous()
    for grad in (grad_input, gradient, *others):
        assert grad.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@over_cases
def test_accuracy(case, dtype):
    """At most three times PyTorch's error, of this one draw, and a unit roundoff. Gradients in 16
    bits are sums of a rounded term for each tap along the depth."""
    tensors = case.tensors(dtype)
    wide = [t.to(torch.complex128 if dtype.is_complex else torch.float64) for t in tensors]
    oracle = _results(case, wide)
    theirs = _results(case, tensors)
    with conv2d_ext.batch_invariant():
        ours = _results(case, tensors)
    terms = case.weight[2] if dtype.itemsize == 2 else 1
    for found, aten, exact in zip(ours, theirs, oracle, strict=True):
        assert found.dtype == dtype
        errors = [torch.linalg.vector_norm(r.to(exact.dtype) - exact) for r in (found, aten)]
        allowed = 3 * errors[1] + terms * unit_roundoff(dtype) * torch.linalg.vector_norm(exact)
        assert errors[0] <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@over_formats
@over_cases
def test_bits_of_an_example(case, layout, dtype):
    if len(case.input) == 4:
        pytest.skip("one example")
    input, *others = case.tensors(dtype)
    batch = torch.cat([input, input.flip(0)]).to(memory_format=layout)
    threads = torch.get_num_threads()
    with conv2d_ext.batch_invariant():
        whole = _results(case, [batch, *others])[:2]
        try:
            for number in (1, 3):
                torch.set_num_threads(number)
                for place, example in ((0, batch[:1]), (len(batch) - 2, batch[-2:-1])):
                    alone = _results(case, [example.contiguous(), *others])[:2]
                    for one, of_all in zip(alone, whole, strict=True):
                        assert same_bits(one[0], of_all[place])
        finally:
            torch.set_num_threads(threads)


SMALL = (
    Case("conv3d", (2, 2, 3, 2, 3), (2, 2, 2, 2, 2), {"stride": (1, 2, 1), "padding": (1, 0, 1)}),
    Case("conv3d, along the depth", (2, 2, 4, 1, 2), (2, 2, 2, 1, 1), {"padding": (1, 0, 0)}),
    Case("conv3d, groups", (1, 2, 3, 2, 2), (2, 1, 3, 1, 2), {"groups": 2, "padding": (1, 0, 0)}),
    Case("conv_transpose3d", (2, 2, 2, 2, 1), (2, 2, 3, 2, 2),
         {"stride": (2, 1, 1), "padding": (1, 0, 0)}, True),
    Case("conv_transpose3d, apart", (1, 2, 2, 1, 2), (2, 2, 2, 1, 2), {"stride": 2}, True),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_derivatives(case, dtype):
    tensors = [t.requires_grad_() for t in case.tensors(dtype)]
    with conv2d_ext.batch_invariant():
        torch.autograd.gradcheck(
            case, tensors, check_forward_ad=True, check_batched_grad=True,
            check_batched_forward_grad=True,
        )  # fmt: skip
        torch.autograd.gradgradcheck(case, tensors)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_transforms(case):
    input, weight, bias = case.tensors()
    inputs = torch.stack([input, input * 2, input - 1])

    def gradients(input: Tensor) -> Tensor:
        return torch.func.grad(lambda x: case(x, weight, bias).square().sum())(input)

    with conv2d_ext.batch_invariant():
        for function in (lambda x: case(x, weight, bias), gradients):
            expected = torch.stack([function(x) for x in inputs])
            torch.testing.assert_close(torch.func.vmap(function)(inputs), expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("case", [CASES[2], CASES[8], CASES[19]], ids=str)
def test_compiled_with_a_dynamic_batch(case, backend):
    torch._dynamo.reset()
    input, *others = case.tensors(torch.float32)
    batch = torch.cat([input] * 2)
    torch._dynamo.mark_dynamic(batch, 0)

    def function(*tensors: Tensor) -> Tensor:
        return case(*tensors) * 2

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with conv2d_ext.batch_invariant():
        whole, expected = compiled(batch, *others), function(batch, *others)
        assert same_bits(whole, expected)
        assert same_bits(compiled(input, *others), whole[: len(input)])
        leaves = [t.detach().requires_grad_() for t in (batch, *others)]
        for ours, theirs in zip(
            torch.autograd.grad(compiled(*leaves).sum(), leaves),
            torch.autograd.grad(function(*leaves).sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)


BAD = (
    ((1, 3, 4, 4, 4), (4, 2, 2, 2, 2), {}),
    ((1, 3, 4, 4, 4), (4, 3, 5, 2, 2), {}),
    ((1, 3, 4, 4, 4), (4, 3, 2, 2, 2), {"stride": 0}),
    ((1, 3, 4, 4, 4), (4, 3, 2, 2, 2), {"stride": (1, 1)}),
    ((1, 3, 4, 4, 4), (4, 3, 2, 2, 2), {"padding": -1}),
    ((1, 3, 4, 4, 4), (4, 3, 2, 2, 2), {"dilation": 0}),
    ((1, 3, 4, 4, 4), (4, 3, 2, 2, 2), {"groups": 2}),
    ((1, 3, 4, 4, 4), (4, 3, 2, 2, 2), {"groups": 0}),
    ((1, 3, 4, 4, 4), (4, 3, 2, 2, 2), {"bias": torch.zeros(3)}),
    ((1, 3, 4, 4), (4, 3, 2, 2), {}),
    ((1, 3, 4, 4, 4), (4, 3, 0, 2, 2), {}),
    ((0, 3, 4, 4, 4), (4, 3, 2, 2, 2), {"padding": 1}),
    ((1, 3, 0, 4, 4), (4, 3, 2, 2, 2), {"padding": 1}),
    ((1, 0, 4, 4, 4), (4, 0, 2, 2, 2), {}),
    ((1, 3, 1, 4, 4), (4, 3, 2, 2, 2), {"padding": (2, 0, 0)}),
    ((1, 3, 4, 1, 4), (4, 3, 2, 2, 2), {"padding": (0, 2, 0)}),
)


@pytest.mark.parametrize("index", range(len(BAD)))
@pytest.mark.parametrize("function", [F.conv3d, F.conv_transpose3d])
def test_what_does_not_fit_is_as_in_pytorch(function, index):
    input, weight, kwargs = BAD[index]
    if function is F.conv_transpose3d:
        weight = (*weight[1::-1], *weight[2:])
    assert_as_pytorch(lambda: function(torch.ones(input), torch.ones(weight), **kwargs))


def test_output_padding_beyond_stride_and_dilation():
    input, weight = torch.ones(1, 2, 3, 3, 3), torch.ones(2, 2, 2, 2, 2)
    for mode in (contextlib.nullcontext, conv2d_ext.batch_invariant):
        for padding in ((1, 0, 0), (0, 0, 1)):
            with mode(), pytest.raises(RuntimeError, match="output padding must be smaller than"):
                F.conv_transpose3d(input, weight, output_padding=padding)


@settings(max_examples=150)
@given(st.data())
def test_random_problems(data):
    def three(least: int, most: int) -> tuple[int, ...]:
        return tuple(data.draw(st.integers(least, most)) for _ in range(3))

    transposed, groups = data.draw(st.booleans()), data.draw(st.integers(1, 2))
    kernel, stride, dilation = three(1, 3), three(1, 3), three(1, 2)
    padding = tuple(data.draw(st.integers(0, k)) for k in kernel)
    size = three(1, 6)
    n, c, oc = data.draw(st.integers(1, 3)), *(groups * data.draw(st.integers(1, 3)) for _ in "12")
    kwargs: dict[str, Any] = {
        "stride": stride, "padding": padding, "dilation": dilation, "groups": groups
    }  # fmt: skip
    if transposed:
        most = [max(s, d) - 1 for s, d in zip(stride, dilation, strict=True)]
        kwargs["output_padding"] = tuple(data.draw(st.integers(0, m)) for m in most)
    weight = (c, oc // groups, *kernel) if transposed else (oc, c // groups, *kernel)
    case = Case("random", (n, c, *size), weight, kwargs, transposed)
    layout = data.draw(st.sampled_from([torch.contiguous_format, torch.channels_last_3d]))
    tensors = case.tensors(torch.float64, layout)
    try:
        expected = _results(case, tensors)
    except RuntimeError as error:
        with conv2d_ext.batch_invariant(), pytest.raises(RuntimeError, match=str(error)[:20]):
            case(*tensors)
        return
    with conv2d_ext.batch_invariant():
        torch.testing.assert_close(_results(case, tensors), expected)


class _Video(nn.Module):
    """Blocks as those of R(2+1)D and 3-D U-Nets."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(3, 8, (1, 5, 5), (1, 2, 2), (0, 2, 2))
        self.time = nn.Conv3d(8, 8, (3, 1, 1), padding=(1, 0, 0), bias=False)
        self.norm = nn.BatchNorm3d(8)
        self.down = nn.Conv3d(8, 12, 3, 2, 1)
        self.depthwise = nn.Conv3d(12, 12, 3, padding="same", groups=12)
        self.up = nn.ConvTranspose3d(12, 8, 2, 2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.time(self.stem(x))))
        y = self.up(F.gelu(self.depthwise(self.down(x))))
        return self.head((x + y).mean((2, 3, 4)))


def test_a_model_of_videos_is_certified():
    torch.manual_seed(0)
    certificate = conv2d_ext.certify(_Video().eval(), torch.randn(1, 3, 4, 16, 16))
    assert certificate.passed, str(certificate)
