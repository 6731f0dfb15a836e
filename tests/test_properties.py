"""Random geometry, dtypes and strides, every direction against the float64 oracle."""

from __future__ import annotations

import torch
from accuracy import assert_as_accurate
from hypothesis import given, note, settings
from hypothesis import strategies as st
from observing import same_bits

from conv2d_ext.testing import (
    VIEWS,
    Problem,
    Results,
    Tensors,
    aten_results,
    float64_oracle,
    library_results,
    make_tensors,
    num_threads,
)

pairs = st.tuples


@st.composite
def problems(draw) -> Problem:
    """Any small valid geometry, with more weight on the unusual."""
    groups = draw(st.sampled_from([1, 1, 1, 2, 3, 5]))
    in_channels = groups * draw(st.integers(1, 9))
    out_channels = groups * draw(st.integers(1, 20))
    kernel = draw(pairs(st.integers(1, 5), st.integers(1, 5)))
    dilation = draw(pairs(st.integers(1, 3), st.integers(1, 3)))
    kind = draw(st.sampled_from(["pair", "pair", "same", "valid", "four"]))
    stride = (1, 1) if kind == "same" else draw(pairs(st.integers(1, 4), st.integers(1, 4)))
    padding = {
        "pair": pairs(st.integers(0, 4), st.integers(0, 4)),
        "same": st.just("same"),
        "valid": st.just((0, 0)),
        "four": pairs(*[st.integers(0, 4)] * 4),
    }[kind]
    padding = draw(padding)
    # The smallest image that leaves one output pixel, and then up to 12 more.
    probe = Problem("probe", 1, 1, (1, 1), 1, kernel, (1, 1), padding, dilation)
    top, bottom, left, right = probe.padding4
    smallest = (
        max(1, dilation[0] * (kernel[0] - 1) + 1 - top - bottom),
        max(1, dilation[1] * (kernel[1] - 1) + 1 - left - right),
    )
    in_size = tuple(size + draw(st.integers(0, 12)) for size in smallest)
    batch = draw(st.integers(0, 3))
    bias = draw(st.booleans())
    return Problem(
        "random", batch, in_channels, in_size, out_channels, kernel, stride, padding, dilation,
        groups, bias,
    )  # fmt: skip


def _every_third(tensor: torch.Tensor) -> torch.Tensor:
    large = torch.repeat_interleave(tensor, 3, dim=-1)
    return large[..., ::3]


LAYOUTS = {"contiguous": lambda tensor: tensor, **VIEWS, "every third": _every_third}
layouts = st.sampled_from(sorted(LAYOUTS))
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16,
                          torch.complex64])  # fmt: skip


def _expand_some(tensors: Tensors, which: str) -> Tensors:
    """One operand made of repeated slices, held once in memory."""
    if which == "none" or 0 in tensors.input.shape:
        return tensors
    tensor = getattr(tensors, which)
    return tensors._replace(**{which: tensor[:, :1].expand_as(tensor)})


@settings(max_examples=250)
@given(
    problem=problems(),
    dtype=dtypes,
    views=st.tuples(layouts, layouts, layouts),
    expanded=st.sampled_from(["none", "none", "input", "weight", "grad_output"]),
    seed=st.integers(0, 9),
)
def test_all_directions(problem, dtype, views, expanded, seed):
    tensors = make_tensors(problem, dtype, seed=seed)
    tensors = Tensors(
        LAYOUTS[views[0]](tensors.input),
        LAYOUTS[views[1]](tensors.weight),
        tensors.bias,
        LAYOUTS[views[2]](tensors.grad_output),
    )
    tensors = _expand_some(tensors, expanded)
    note(f"{problem!r}\n{[tuple(t.stride()) for t in tensors if t is not None]}")
    actual, oracle = library_results(problem, tensors), float64_oracle(problem, tensors)
    aten = aten_results(problem, tensors)
    for name, ours, theirs, exact in zip(Results._fields, actual, aten, oracle, strict=True):
        if exact is None:
            continue
        if dtype == torch.float64:
            # The oracle is no better than the subject here: both within a few roundings a product.
            assert exact.max_scaled_error(ours) <= 1e-14, name
        else:
            assert_as_accurate(ours, theirs, exact, name)


@settings(max_examples=60)
@given(
    problem=problems(),
    dtype=dtypes,
    view=st.sampled_from(sorted(VIEWS)),
    threads=st.integers(1, 4),
)
def test_bits_follow_neither_strides_nor_threads(problem, dtype, view, threads):
    tensors = make_tensors(problem, dtype)
    expected = library_results(problem, tensors)
    with num_threads(threads):
        viewed = Tensors(*(t if t is None or t.dim() != 4 else VIEWS[view](t) for t in tensors))
        actual = library_results(problem, viewed)
    for name, ours, theirs in zip(Results._fields, actual, expected, strict=True):
        assert (ours is None and theirs is None) or same_bits(ours, theirs), name
