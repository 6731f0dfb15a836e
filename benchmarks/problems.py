"""What to measure: the named lists, their problems without duplicates, the class of each."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterable, Sequence

from conv2d_ext import testing
from conv2d_ext.testing import POST, REAL_LAYERS, Problem, real_layer


def _grouped(channels: int, size: int, stride: int) -> Problem:
    return Problem(
        f"resnext50 {channels}@{size}-{channels}/k3p1g32{'s2' if stride == 2 else ''}",
        1,
        channels,
        (size, size),
        channels,
        kernel=(3, 3),
        stride=(stride, stride),
        padding=(1, 1),
        groups=32,
        bias=False,
    )


# The grouped layers of ResNeXt-50 32x4d; its others are ResNet-50's but for their widths.
RESNEXT50 = tuple(
    _grouped(*layer)
    for layer in (
        (128, 56, 1), (256, 56, 2), (256, 28, 1), (512, 28, 2), (512, 14, 1), (1024, 14, 2),
        (1024, 7, 1),
    )
)  # fmt: skip

# Of every class a few, for a figure within a minute.
QUICK = (
    POST,
    *map(
        real_layer,
        (
            "resnet50 3@224-64/k7s2p3",
            "resnet50 64@56-64/k3p1",
            "resnet50 256@14-256/k3p1",
            "resnet50 512@7-512/k3p1",
            "resnet50 64@56-256",
            "resnet50 1024@14-256",
            "mobilenet_v3_large 120@28-120/k5p2g120",
            "mobilenet_v3_large 480@14-480/k3p1g480",
            "deeplabv3 256@65-256/k3p2d2",
        ),
    ),
    RESNEXT50[0],
)

# One layer on ever larger inputs: the time for a pixel should not grow.
GROWTH = {
    "batch": tuple(
        Problem(f"batch {batch} at 56x56", batch, 64, (56, 56), 64, (3, 3), padding=(1, 1))
        for batch in (1, 2, 4, 8, 16, 32, 64)
    ),
    "image": tuple(
        Problem(f"image {size}x{size}", 1, 64, (size, size), 64, (3, 3), padding=(1, 1))
        for size in (32, 64, 128, 256, 512, 1024)
    ),
}

# Their batch sizes are the user's choice ...
_LAYERS: dict[str, Sequence[Problem]] = {
    **REAL_LAYERS,
    "resnext50": RESNEXT50,
    "post": (POST,),
    "quick": QUICK,
}
# ... and these have their own.
_FIXED: dict[str, Sequence[Problem]] = {
    "edge": testing.EDGE,
    "tails": testing.TAILS,
}
LISTS = (*_LAYERS, *_FIXED)
DEFAULT_LISTS = tuple(name for name in _LAYERS if name != "quick")


def select(
    lists: Iterable[str], batches: Iterable[int], pattern: str = ""
) -> list[tuple[Problem, list[str]]]:
    """The problems of these lists whose names match the pattern, each with the lists it is in.

    A geometry that is in several lists is there once. Problems without work, and those whose
    padding F.conv2d can't express, are left out.
    """
    selected: dict[Problem, tuple[Problem, list[str]]] = {}
    for name in lists:
        if name in _LAYERS:
            problems = [layer.with_batch(batch) for batch in batches for layer in _LAYERS[name]]
        else:
            problems = [
                p for p in _FIXED[name] if p.flops and (len(p.padding) == 2 or p.padding == "same")
            ]
        for problem in problems:
            if re.search(pattern, problem.name):
                geometry = dataclasses.replace(problem, name="", bias=False)
                found = selected.setdefault(geometry, (problem, []))
                if name not in found[1]:
                    found[1].append(name)
    return list(selected.values())


def regex(text: str) -> str:
    """A pattern for `select`, as an argument of a program."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text}: not a regular expression: {error}") from None
    return text


def layer_class(problem: Problem) -> str:
    """The first that fits: depthwise, grouped, 1 pixel, stem, dilated, 1x1, 3x3, other.

    1 pixel: images of one output pixel, as in squeeze-and-excite; mostly the cost of a call.
    """
    if problem.groups > 1:
        return "depthwise" if problem.groups == problem.in_channels else "grouped"
    if problem.output_shape[2:] == (1, 1):
        return "1 pixel"
    if problem.in_channels <= 4 and problem.kernel != (1, 1):
        return "stem"
    if problem.dilation != (1, 1):
        return "dilated"
    if problem.kernel in ((1, 1), (3, 3)):
        return "x".join(map(str, problem.kernel))
    return "other"


LAYER_CLASSES = ("3x3", "1x1", "stem", "dilated", "other", "1 pixel", "grouped", "depthwise")
# The classes of ordinary convolutions, which the summary also takes together.
DENSE_CLASSES = ("3x3", "1x1", "stem", "dilated", "other", "1 pixel")
