"""LSTM and GRU in the mode, in batches and packed.

Seen to fail: with oneDNN's LSTM `test_lstms_with_dropout`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from observing import assert_as_pytorch
from torch import Tensor, nn

import conv2d_ext


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "proj_size": 5}], ids=str)
def test_lstms_with_dropout(options, packed):
    """Between layers. (One that drops nothing: draws follow an element's place.)"""
    model = nn.LSTM(32, 24, 3, batch_first=True, dropout=1e-30, **options)
    plain = nn.LSTM(32, 24, 3, batch_first=True, **options)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(10, 6, 32)

    def results(examples: slice, model=model) -> list[Tensor]:
        leaf = x[examples].requires_grad_()
        lengths = [6] * leaf.shape[0]
        pack = nn.utils.rnn.pack_padded_sequence
        output, (h, c) = model(pack(leaf, lengths, batch_first=True) if packed else leaf)
        if packed:
            output = nn.utils.rnn.pad_packed_sequence(output, batch_first=True)[0]
        gradient = torch.autograd.grad(output.square().sum(), leaf)[0]
        return [output.detach(), h.detach().transpose(0, 1), c.detach().transpose(0, 1), gradient]

    expected = results(slice(None), plain)
    with conv2d_ext.batch_invariant():
        whole = results(slice(None))
        for examples in (slice(0, 1), slice(3, 5), slice(9, 10)):
            for a, b in zip(results(examples), whole, strict=True):
                assert torch.equal(a, b[examples])
    for a, b in zip(whole, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("packed", [False, True])
def test_dropout_between_layers_draws_as_pytorchs(packed):
    model, x = nn.LSTM(8, 16, 2, dropout=0.5), torch.randn(7, 4, 8)
    given = nn.utils.rnn.pack_padded_sequence(x, [7, 6, 3, 2]) if packed else x
    torch.manual_seed(3)
    expected = model(given)[0]
    with conv2d_ext.batch_invariant():
        torch.manual_seed(3)
        found = model(given)[0]
    torch.testing.assert_close(found[0] if packed else found, expected[0] if packed else expected)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_wrong_numbers_of_parameters_are_pytorchs_errors(kind, count):
    weights = list({"gru": nn.GRU, "lstm": nn.LSTM}[kind](5, 6, 2).parameters())[:count]
    data, sizes, h = torch.randn(9, 5), torch.tensor([3, 3, 2, 1]), torch.zeros(1, 3, 6)
    state = h if kind == "gru" else [h, h]
    function = getattr(torch, kind)

    def call() -> Any:
        return function(data, sizes, state, weights, True, 1, 0.0, False, False)

    with pytest.raises(RuntimeError):
        call()
    assert_as_pytorch(call)


@pytest.mark.parametrize("sizes", [[2, 1, 2], [3, 3], [6, -1]], ids=str)
def test_wrong_sizes_of_steps_are_pytorchs_errors(sizes):
    model = nn.LSTM(5, 6)
    data, h = torch.randn(5, 5), torch.zeros(1, sizes[0], 6)
    weights = list(model.parameters())

    def call() -> Any:
        steps = torch.tensor(sizes)
        return torch.lstm(data, steps, [h, h], weights, True, 1, 0.0, False, False)

    with pytest.raises(RuntimeError):
        call()
    assert_as_pytorch(call)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM], ids=lambda kind: kind.__name__)
def test_traces_of_packed_sequences_hold_for_other_lengths(kind):
    model = kind(5, 6).eval().requires_grad_(False)

    def run(data: Tensor, sizes: Tensor) -> Tensor:
        return model(nn.utils.rnn.PackedSequence(data, sizes))[0].data

    with conv2d_ext.batch_invariant(), torch.no_grad():
        trace = torch.jit.trace(
            run, (torch.randn(6, 5), torch.tensor([3, 2, 1])), check_trace=False
        )
        data, sizes = torch.randn(9, 5), torch.tensor([3, 3, 2, 1])
        assert torch.equal(trace(data, sizes), run(data, sizes))


@pytest.mark.parametrize("options", [{"proj_size": 4}, {"bidirectional": True}], ids=str)
def test_autocast_types_of_packed_sequences(options):
    model, x = nn.LSTM(8, 6, 2, **options), torch.randn(5, 3, 8)
    packed = nn.utils.rnn.pack_padded_sequence(x, [5, 4, 2])
    with torch.autocast("cpu", torch.bfloat16):
        expected, states = model(packed)
        with conv2d_ext.batch_invariant():
            found, found_states = model(packed)
    assert found.data.dtype == expected.data.dtype
    assert [s.dtype for s in found_states] == [s.dtype for s in states]
    torch.testing.assert_close(found.data, expected.data, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("what", ["hx", "weights"])
def test_operands_that_do_not_fit_are_pytorchs_errors(what):
    model = nn.LSTM(5, 6)
    if what == "weights":
        model = model.double()
    data, h = torch.randn(4, 3, 5), torch.zeros(1, 3, 6)
    if what == "hx":
        h = h.double()
    weights = list(model.parameters())

    def call() -> Any:
        return torch.lstm(data, [h, h], weights, True, 1, 0.0, False, False, False)

    with pytest.raises((RuntimeError, ValueError)):
        call()
    assert_as_pytorch(call)
