"""torch.compile with a batch of any size: compiled once, eager's bits, whatever the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conv2d_ext

SIZES = (4, 7, 16, 33)


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.int32)


def assert_same_bits(ours: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert a.shape == b.shape
        assert torch.equal(bits(a), bits(b))


def warm_up(compiled, inputs, how: str) -> None:
    """Calls after which no other size may compile anything."""
    if how == "mark_dynamic":
        example = inputs(2)
        for tensor in example:
            torch._dynamo.mark_dynamic(tensor, 0)
        compiled(*example)
    else:  # PyTorch takes the first size as it is, and a second one for a sign that it varies
        compiled(*inputs(2))
        compiled(*inputs(3))


over_ways = pytest.mark.parametrize("how", ["mark_dynamic", "automatic"])


class TestFunctions:
    """Each function by itself, so that none hides that another one had to be compiled again."""

    weight = torch.randn(8, 3, 3, 2)
    bias = torch.randn(8)
    calls = (
        (lambda self, x: conv2d_ext.conv2d(x, self.weight, self.bias, padding="same"), (3, 9, 8)),
        (lambda self, x: conv2d_ext.conv2d(x, self.weight, stride=(2, 1)), (3, 9, 8)),
        (lambda self, x: conv2d_ext.conv1d(x, self.weight[..., 0], self.bias, 2, 1), (3, 13)),
        (lambda self, x: conv2d_ext.conv_transpose2d(x, self.weight, stride=2), (8, 5, 4)),
        (lambda self, x: conv2d_ext.conv_transpose1d(x, self.weight[..., 0], stride=2), (8, 5)),
        (lambda self, x: conv2d_ext.linear(x, self.weight[:, :, 0, 0], self.bias), (3,)),
        (lambda self, x: conv2d_ext.linear(x, self.weight[:, :, 0, 0], self.bias), (5, 2, 3)),
        (lambda self, x: conv2d_ext.ops.matmul(x, self.weight[:, :, 0, 0].t(), None), (5, 3)),
        (lambda self, x: conv2d_ext.ops.matmul(x, x.transpose(1, 2), None), (5, 3)),
    )

    @over_ways
    @pytest.mark.parametrize("number", range(len(calls)))
    def test_is_compiled_once(self, number, how):
        call, size = self.calls[number]

        def step(x: Tensor) -> list[Tensor]:
            output = call(self, x)
            return [output, *torch.autograd.grad(output.square().sum(), x)]

        def inputs(batch: int) -> tuple[Tensor]:
            return (torch.randn(batch, *size, requires_grad=True),)

        forward = torch.compile(lambda x: call(self, x), fullgraph=True, backend="aot_eager")

        def compiled(x: Tensor) -> list[Tensor]:
            output = forward(x)
            return [output, *torch.autograd.grad(output.square().sum(), x)]

        warm_up(compiled, inputs, how)
        with torch.compiler.set_stance("fail_on_recompile"):
            for batch in SIZES:
                example = inputs(batch)
                assert_same_bits(compiled(*example), step(*example))

    def test_inductor(self):
        """All of them in one graph, the first with a loop of Inductor's after it."""

        def forward(*inputs: Tensor) -> list[Tensor]:
            outputs = [call(self, x) for (call, _), x in zip(self.calls, inputs, strict=True)]
            return [outputs[0] * 1.5, *outputs[1:]]

        def inputs(batch: int) -> list[Tensor]:
            return [torch.randn(batch, *size) for _, size in self.calls]

        compiled = torch.compile(forward, fullgraph=True)
        warm_up(compiled, inputs, "mark_dynamic")
        with torch.compiler.set_stance("fail_on_recompile"):
            for batch in SIZES:
                example = inputs(batch)
                whole = compiled(*example)
                assert_same_bits(whole, forward(*example))
                assert_same_bits(compiled(*(x[1:3] for x in example)), [y[1:3] for y in whole])


class Net(nn.Module):
    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.sequence = nn.Conv1d(8, 8, 3, stride=2)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True) if attention else None
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(x))
        x = self.norm(self.sequence(self.up(x).flatten(2)).transpose(1, 2))
        if self.attention is not None:
            x = x + self.attention(x, x, x, need_weights=False)[0]
        return torch.softmax(self.head(x.mean(1)), -1)


class TestMode:
    """PyTorch's layers in the mode: also what Inductor writes for them follows no batch."""

    @pytest.mark.parametrize(
        ("backend", "how"),
        [("aot_eager", "mark_dynamic"), ("aot_eager", "automatic"), ("inductor", "mark_dynamic")],
    )
    def test_a_model(self, backend, how):
        torch.manual_seed(0)
        model = Net(attention=backend == "aot_eager").eval()
        training = backend == "aot_eager"  # Inductor compiles a backward for long

        def step(function, x: Tensor) -> list[Tensor]:
            output = function(x)
            return (
                [output, *torch.autograd.grad(output.square().sum(), x)] if training else [output]
            )

        def inputs(batch: int) -> tuple[Tensor]:
            return (torch.randn(batch, 3, 5, 4, requires_grad=training),)

        compiled = torch.compile(model, fullgraph=True, backend=backend)
        (everyone,) = inputs(max(SIZES))
        with torch.set_grad_enabled(training), conv2d_ext.batch_invariant():
            whole = step(model, everyone)
            warm_up(lambda x: step(compiled, x), inputs, how)
            with torch.compiler.set_stance("fail_on_recompile"):
                for batch in SIZES:
                    part = everyone[:batch].detach().requires_grad_(training)
                    assert_same_bits(step(compiled, part), [y[:batch] for y in whole])

    def test_a_batch_of_one(self):
        """PyTorch compiles it by itself, since sizes of one broadcast; its bits are the others'."""
        torch.manual_seed(0)
        model = Net(attention=False).eval()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
        x = torch.randn(3, 3, 5, 4)
        with torch.no_grad(), conv2d_ext.batch_invariant():
            assert_same_bits([compiled(x)[:1]], [compiled(x[:1])])
