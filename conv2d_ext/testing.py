"""Convolution problems, their tensors, the float64 oracle, error measures, numbers of threads.

The tests and the benchmarks take their problems from here, so that what is measured is what is
checked. A problem's name says its geometry; its tensors follow from a seed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .functional import conv2d

__all__ = [
    "ASYMMETRIC",
    "DEPTHWISE",
    "DILATED",
    "EDGE",
    "FEW_PLANES",
    "GROUPED",
    "LONG_SUMS",
    "MANY_TAPS",
    "ONE_PIXEL",
    "PATCH_LAYERS",
    "POST",
    "REAL_LAYERS",
    "SMALL_PROBLEMS",
    "STRIDED",
    "TAILS",
    "VIEWS",
    "Oracle",
    "Problem",
    "Results",
    "Tensors",
    "aten_forward",
    "aten_results",
    "float64_oracle",
    "library_forward",
    "library_results",
    "make_tensors",
    "num_threads",
    "real_layer",
    "unit_roundoff",
]

_Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Problem:
    """The geometry of one convolution.

    ``padding`` is (height, width), ``"same"``, or (top, bottom, left, right), which only the
    dispatcher op ``torch.ops.conv2d_ext.conv2d`` takes.
    """

    name: str
    batch: int
    in_channels: int
    in_size: _Pair
    out_channels: int
    kernel: _Pair
    stride: _Pair = (1, 1)
    padding: _Pair | tuple[int, int, int, int] | str = (0, 0)
    dilation: _Pair = (1, 1)
    groups: int = 1
    bias: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.in_channels, *self.in_size)

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        top, bottom, left, right = self.padding4
        sizes = (self.in_size[0] + top + bottom, self.in_size[1] + left + right)
        out_h, out_w = (
            (size - d * (k - 1) - 1) // s + 1
            for size, k, s, d in zip(sizes, self.kernel, self.stride, self.dilation, strict=True)
        )
        return (self.batch, self.out_channels, out_h, out_w)

    @property
    def padding4(self) -> tuple[int, int, int, int]:
        """(top, bottom, left, right), as the dispatcher ops take it."""
        if self.padding == "same":
            totals = [d * (k - 1) for k, d in zip(self.kernel, self.dilation, strict=True)]
            (top, bottom), (left, right) = ((t // 2, t - t // 2) for t in totals)
            return (top, bottom, left, right)
        if len(self.padding) == 2:
            pad_h, pad_w = self.padding
            return (pad_h, pad_h, pad_w, pad_w)
        return self.padding

    @property
    def gemm_mnk(self) -> tuple[int, int, int]:
        """The sizes of the matrix product of one group: C[M, N] = A[M, K] * B[K, N]."""
        batch, out_channels, out_h, out_w = self.output_shape
        return (
            out_channels // self.groups,
            batch * out_h * out_w,
            math.prod(self.weight_shape[1:]),
        )

    @property
    def flops(self) -> int:
        """Floating-point operations of one direction, a multiplication and an addition each one."""
        return 2 * self.groups * math.prod(self.gemm_mnk)

    def call_args(self) -> dict[str, object]:
        """The keyword arguments after the tensors, for F.conv2d and for conv2d_ext.conv2d."""
        if len(self.padding) == 4 and self.padding != "same":
            raise ValueError(f"{self.name}: only the dispatcher op takes padding={self.padding}")
        return {
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
        }

    def op_args(self) -> tuple[list[int], list[int], list[int], int]:
        """stride, padding, dilation and groups, for the dispatcher ops."""
        return (list(self.stride), list(self.padding4), list(self.dilation), self.groups)

    def with_batch(self, batch: int) -> Problem:
        return dataclasses.replace(self, name=f"{self.name} batch {batch}", batch=batch)

    def shrunk(self, size: int) -> Problem:
        """The same layer on a map of about ``size`` pixels a side, of the same parity."""
        in_size = tuple(min(old, size + (old - size) % 2) for old in self.in_size)
        if in_size == self.in_size:
            return self
        return dataclasses.replace(
            self, name=f"{self.name} on {in_size[0]}x{in_size[1]}", in_size=in_size
        )


# The named lists. Each problem is there for the branch its name says; heights and widths differ
# wherever they can, so that a swapped pair cannot pass.

EDGE = (
    Problem("one of everything", 1, 1, (1, 1), 1, (1, 1)),
    Problem("one output pixel", 2, 3, (4, 5), 4, (4, 5)),
    Problem("kernel larger than the image", 1, 2, (2, 3), 3, (5, 7), padding=(2, 3)),
    Problem("one row", 2, 3, (1, 19), 5, (1, 3), padding=(0, 1)),
    Problem("one column", 2, 3, (19, 1), 5, (3, 1), padding=(1, 0)),
    Problem("outputs that see padding alone", 1, 2, (3, 4), 3, (2, 3), padding=(4, 5)),
    Problem("stride over unread pixels", 2, 3, (11, 13), 4, (2, 1), stride=(3, 4)),
    Problem("unread rim", 1, 3, (8, 9), 4, (3, 3), stride=(4, 5)),
    Problem("stride larger than the image", 2, 2, (3, 4), 3, (2, 2), stride=(7, 9)),
    Problem("empty batch", 0, 3, (6, 7), 4, (3, 2), padding=(1, 0)),
    Problem("1x1", 2, 5, (6, 7), 4, (1, 1)),
    Problem("1x1 with padding", 2, 5, (6, 7), 4, (1, 1), padding=(1, 2)),
    Problem("1x1 with stride", 2, 5, (7, 9), 4, (1, 1), stride=(2, 3)),
    Problem("no bias", 2, 3, (6, 7), 4, (3, 2), bias=False),
    Problem("same, even kernel", 2, 3, (6, 7), 4, (2, 4), padding="same"),
    Problem("four paddings", 2, 3, (6, 7), 4, (3, 4), padding=(0, 3, 2, 1)),
    Problem("padding on one side alone", 1, 3, (5, 6), 4, (3, 3), (2, 1), padding=(2, 0, 0, 2)),
)

# Sizes around the widths of vectors, register tiles and cache blocks.
TAILS = (
    *(Problem(f"{n} output channels", 1, 4, (5, 7), n, (3, 3)) for n in (1, 7, 8, 15, 16, 17, 33)),
    *(Problem(f"{n} pixels wide", 1, 3, (4, n + 2), 18, (3, 3)) for n in (1, 5, 6, 7, 13, 31)),
    *(Problem(f"K = {k}, 1x1", 1, k, (3, 5), 17, (1, 1)) for k in (127, 128, 129, 257)),
    Problem("K = 261, 3x3", 1, 29, (5, 6), 17, (3, 3), padding=(1, 1)),
    Problem("40 channels to 3", 2, 40, (6, 35), 3, (3, 3), padding=(1, 1)),
    Problem("19 channels to 2, 1x1", 2, 19, (5, 23), 2, (1, 1)),
    Problem("3 channels to 40, stride 2", 1, 3, (9, 37), 40, (3, 3), (2, 2), (1, 1)),
    Problem("387 pixels", 1, 3, (43, 9), 10, (1, 1)),
    Problem("a row wider than a tile", 1, 2, (3, 1031), 9, (2, 3), padding=(0, 1)),
    Problem("a column taller than a tile", 1, 2, (1031, 3), 9, (3, 2), padding=(1, 0)),
    Problem("batch 33 of small maps", 33, 4, (3, 4), 9, (2, 3), padding=(1, 1)),
)

ASYMMETRIC = (
    Problem("asymmetric", 3, 6, (9, 12), 8, (3, 2), (2, 1), (1, 0), (2, 1), groups=2),
    Problem("asymmetric, turned", 3, 6, (12, 9), 8, (2, 3), (1, 2), (0, 1), (1, 2), groups=2),
    Problem("asymmetric, batch 33", 33, 4, (7, 5), 6, (3, 2), (2, 1), (1, 0), (2, 1), groups=2),
    Problem("asymmetric, empty batch", 0, 4, (7, 5), 6, (3, 2), (2, 1), (1, 0), (2, 1), groups=2),
    Problem("asymmetric, four paddings", 2, 6, (9, 12), 9, (2, 5), (3, 2), (0, 1, 4, 2), (2, 1), 3),
)

GROUPED = (
    Problem("2 groups", 2, 8, (7, 9), 6, (3, 3), padding=(1, 1), groups=2),
    Problem("32 groups of 4", 1, 128, (6, 7), 128, (3, 3), padding=(1, 1), groups=32),
    Problem("32 groups of 4, stride 2", 1, 128, (7, 8), 128, (3, 3), (2, 2), (1, 1), groups=32),
    Problem("5 groups, 1 channel to 3", 2, 5, (6, 8), 15, (3, 2), padding=(1, 0), groups=5),
    Problem("3 groups, 4 channels to 1", 2, 12, (6, 8), 3, (2, 3), padding=(0, 1), groups=3),
    Problem("2 groups, 1x1", 2, 18, (5, 6), 34, (1, 1), groups=2),
    Problem("2 groups of 20", 1, 40, (8, 7), 40, (3, 3), padding=(1, 1), groups=2),
    Problem("16 groups of 16", 1, 256, (6, 7), 256, (3, 3), padding=(1, 1), groups=16),
    Problem("16 groups of 16, stride 2", 1, 256, (7, 6), 256, (3, 3), (2, 2), (1, 1), groups=16),
    Problem("15 groups of 16, 7x7", 1, 240, (5, 4), 240, (7, 7), padding=(3, 3), groups=15),
    Problem("17 groups of 8", 2, 136, (5, 6), 136, (3, 3), padding=(1, 1), groups=17),
    Problem("17 groups of 8, stride 2", 2, 136, (9, 8), 136, (3, 3), (2, 2), (1, 1), groups=17),
    Problem("9 groups of 6, stride 2", 1, 54, (10, 7), 54, (3, 3), (2, 2), (1, 1), groups=9),
    Problem("16 groups of 6, stride 2", 1, 96, (8, 7), 96, (3, 3), (2, 2), (1, 1), groups=16),
    Problem(
        "16 groups of 8 to 18, stride 2", 1, 128, (7, 8), 288, (3, 3), (2, 2), (1, 1), groups=16
    ),
    Problem("16 groups of 8, 1x1, stride 2", 1, 128, (7, 8), 128, (1, 1), (2, 2), groups=16),
)

DEPTHWISE = (
    Problem("depthwise 3x3", 2, 19, (9, 14), 19, (3, 3), padding=(1, 1), groups=19),
    Problem("depthwise 3x3, stride 2", 2, 19, (9, 14), 19, (3, 3), (2, 2), (1, 1), groups=19),
    Problem("depthwise 5x5", 1, 8, (7, 7), 8, (5, 5), padding=(2, 2), groups=8),
    Problem("depthwise 7x7", 1, 9, (14, 14), 9, (7, 7), padding=(3, 3), groups=9),
    Problem("depthwise 3x2, dilated", 2, 6, (11, 9), 6, (3, 2), (1, 2), (2, 1), (2, 3), groups=6),
    Problem("depthwise, multiplier 2", 2, 5, (8, 7), 10, (3, 3), padding=(1, 1), groups=5),
    Problem("depthwise 1x1", 2, 7, (5, 6), 7, (1, 1), groups=7),
)

DILATED = (
    Problem("dilated 2", 1, 5, (11, 12), 7, (3, 3), padding=(2, 2), dilation=(2, 2)),
    Problem("dilated (3, 1)", 2, 4, (12, 7), 5, (3, 3), padding=(3, 1), dilation=(3, 1)),
    Problem("dilated past the image", 1, 4, (7, 8), 6, (3, 3), padding=(12, 12), dilation=(12, 12)),
    Problem("dilated, stride 2", 1, 4, (13, 12), 6, (3, 3), (2, 3), (1, 2), (3, 2)),
    Problem("dilated, same", 1, 3, (9, 10), 4, (2, 4), padding="same", dilation=(1, 3)),
    # Far taps that meet no output at many input positions.
    Problem("dilated 12", 2, 6, (33, 29), 5, (3, 3), padding=(12, 12), dilation=(12, 12)),
    Problem("dilated 40, rows that no tap meets", 1, 3, (60, 20), 4, (2, 2), dilation=(40, 5)),
    Problem("dilated 11, stride 2", 1, 4, (61, 57), 5, (3, 3), (2, 2), (11, 11), (11, 11)),
    Problem("one column of taps meets all", 1, 35, (16, 15), 34, (2, 3), (2, 1), (0, 16), (1, 16)),
    Problem("a phase without positions", 1, 35, (1, 130), 34, (2, 2), (2, 1), (1, 0), (1, 65)),
)

# Sums that are cut into many segments: K of the forward, of grad_input, and of grad_weight. Those
# of more than 16 segments have several chunks, in each of the engine's ways to compute them.
LONG_SUMS = (
    Problem("K = 2700", 1, 300, (5, 6), 9, (3, 3), padding=(1, 1)),
    Problem("K = 1500, 1x1", 1, 1500, (4, 5), 9, (1, 1)),
    Problem("grad_input's K = 2700", 1, 9, (5, 6), 300, (3, 3), padding=(1, 1)),
    Problem("33800 pixels", 2, 3, (130, 130), 5, (3, 3), padding=(1, 1)),
    Problem("depthwise, 33800 pixels", 2, 3, (130, 130), 3, (3, 3), padding=(1, 1), groups=3),
    Problem("K = 4680", 1, 520, (3, 4), 17, (3, 3), padding=(1, 1)),
    Problem("K = 2300, 1x1", 1, 2300, (5, 7), 9, (1, 1)),
    Problem("2300 channels to 2, 1x1", 1, 2300, (33, 32), 2, (1, 1)),
    Problem("16 groups of 9, 17x17", 1, 144, (18, 19), 16, (17, 17), groups=16),
    Problem("strided, grad_input's K = 2100", 1, 33, (4, 6), 2100, (2, 2), (2, 2)),
    Problem("one pixel, grad_input's K = 2100", 2, 40, (1, 1), 2100, (1, 1)),
    Problem("patches, grad_input's K = 2100", 1, 2, (4, 8), 2100, (4, 4), (4, 4)),
)

# 1x1 kernels from many planes to few, large enough to run apart from the GEMM drivers.
FEW_PLANES = (
    Problem("130 channels to 3, 1x1", 2, 130, (49, 43), 3, (1, 1)),
    Problem("2 groups of 130 channels to 2, 1x1", 1, 260, (50, 41), 4, (1, 1), groups=2),
    Problem("257 channels to 4, 1x1", 1, 257, (34, 31), 4, (1, 1), bias=False),
    Problem("1 channel to 150, 1x1", 1, 1, (47, 45), 150, (1, 1)),
    Problem("7 channels to 4, 1x1", 2, 7, (16, 21), 4, (1, 1)),
    Problem("150 channels to 1, 1x1", 1, 150, (47, 45), 1, (1, 1)),
)

# Strides whose phases run together in grad_input, on images of so few pixels.
STRIDED = (
    Problem("45 channels to 70, stride 2", 3, 45, (11, 14), 70, (3, 3), (2, 2), (1, 1)),
    Problem("33 channels to 66, stride (3, 2)", 1, 33, (13, 10), 66, (4, 5), (3, 2), (2, 1)),
    Problem("2 groups of 34, stride 2", 2, 68, (9, 12), 40, (3, 2), (2, 2), (1, 0), (3, 1), 2),
    Problem("37 channels to 150, 2x2", 1, 37, (8, 6), 150, (2, 2), (2, 2)),
)

# Convolutions with one result pixel and enough weights to run apart from the GEMM drivers.
ONE_PIXEL = (
    Problem("one pixel, 1x1", 3, 130, (1, 1), 131, (1, 1)),
    Problem("one pixel, kernel over the image", 2, 7, (5, 6), 83, (5, 6)),
    Problem("one pixel, unread rim", 2, 15, (4, 6), 122, (3, 3), stride=(5, 5)),
    Problem("one pixel, padded, dilated", 2, 30, (4, 5), 66, (3, 3), (5, 5), (1, 1), (2, 2)),
    Problem("one pixel, 2 groups", 9, 264, (1, 1), 264, (1, 1), groups=2),
    Problem("one pixel, K = 2070", 1, 230, (3, 3), 9, (3, 3)),
)

# Layers whose patches don't overlap, with rows of taps so long that the input gradient is one GEMM
# with a result channel for every channel and tap.
PATCH_LAYERS = (
    Problem("patches of 4x4", 3, 3, (12, 16), 20, (4, 4), (4, 4)),
    Problem("patches, padding, leftovers", 2, 5, (15, 23), 9, (3, 5), (4, 6), (1, 2)),
    Problem("patches, dilated", 2, 4, (13, 33), 7, (2, 4), (5, 7), (1, 3), (2, 3)),
    Problem("patches, 2 groups", 3, 12, (9, 21), 14, (2, 5), (2, 5), groups=2),
    Problem("patches, K = 130 channels", 1, 2, (21, 17), 130, (7, 8), (7, 8)),
    Problem("patches of 16x16 of an image", 2, 3, (35, 50), 18, (16, 16), (16, 16)),
    Problem("patches of 14x20, two channels", 1, 2, (43, 41), 33, (14, 20), (14, 20)),
)

# Few channels, whose taps together are more than a tile of a weight gradient takes.
MANY_TAPS = (
    Problem("many taps that overlap, three channels", 2, 3, (34, 37), 18, (13, 15), (3, 2), (5, 6)),
    Problem("a row of many taps, three channels", 1, 3, (2, 190), 17, (1, 181), (1, 3)),
)

SMALL_PROBLEMS = (
    EDGE
    + TAILS
    + ASYMMETRIC
    + GROUPED
    + DEPTHWISE
    + DILATED
    + LONG_SUMS
    + MANY_TAPS
    + FEW_PLANES
    + STRIDED
    + ONE_PIXEL
    + PATCH_LAYERS
)

# The convolution of the forum post this project answers, its kernel's channels in PyTorch's order.
POST = Problem("post", 1, 16, (256, 256), 32, (3, 3))


def _parse_layer(model: str, text: str) -> Problem:
    """channels@size-channels, then kernel, stride, padding, dilation, groups where not default."""
    in_channels, size, out_channels, rest = re.fullmatch(r"(\d+)@(\d+)-(\d+)(\S*)", text).groups()
    options = {key: int(number) for key, number in re.findall(r"([kspdg])(\d+)", rest)}
    kernel, stride, padding, dilation = (
        (options.get(key, default),) * 2 for key, default in zip("kspd", (1, 1, 0, 1), strict=True)
    )
    return Problem(
        f"{model} {text}",
        1,
        int(in_channels),
        (int(size), int(size)),
        int(out_channels),
        kernel,
        stride,
        padding,
        dilation,
        options.get("g", 1),
        bias=False,
    )


# Every distinct convolution of the models, batch 1, at their usual resolution: 224, DeepLabV3 (its
# ResNet-50 at output stride 8) 513, and the U-Net (padded, 64 to 1024 channels, 2 classes) 512.
_REAL_LAYERS = {
    "resnet50": """
        3@224-64/k7s2p3 64@56-64 64@56-64/k3p1 64@56-256 256@56-64 256@56-128 128@56-128/k3s2p1
        128@28-512 256@56-512/s2 512@28-128 128@28-128/k3p1 512@28-256 256@28-256/k3s2p1
        256@14-1024 512@28-1024/s2 1024@14-256 256@14-256/k3p1 1024@14-512 512@14-512/k3s2p1
        512@7-2048 1024@14-2048/s2 2048@7-512 512@7-512/k3p1
    """,
    "mobilenet_v3_large": """
        3@224-16/k3s2p1 16@112-16/k3p1g16 16@112-16 16@112-64 64@112-64/k3s2p1g64 64@56-24
        24@56-72 72@56-72/k3p1g72 72@56-24 72@56-72/k5s2p2g72 72@1-24 24@1-72 72@28-40 40@28-120
        120@28-120/k5p2g120 120@1-32 32@1-120 120@28-40 40@28-240 240@28-240/k3s2p1g240 240@14-80
        80@14-200 200@14-200/k3p1g200 200@14-80 80@14-184 184@14-184/k3p1g184 184@14-80 80@14-480
        480@14-480/k3p1g480 480@1-120 120@1-480 480@14-112 112@14-672 672@14-672/k3p1g672
        672@1-168 168@1-672 672@14-112 672@14-672/k5s2p2g672 672@7-160 160@7-960
        960@7-960/k5p2g960 960@1-240 240@1-960 960@7-160
    """,
    "efficientnet_b0": """
        3@224-32/k3s2p1 32@112-32/k3p1g32 32@1-8 8@1-32 32@112-16 16@112-96 96@112-96/k3s2p1g96
        96@1-4 4@1-96 96@56-24 24@56-144 144@56-144/k3p1g144 144@1-6 6@1-144 144@56-24
        144@56-144/k5s2p2g144 144@28-40 40@28-240 240@28-240/k5p2g240 240@1-10 10@1-240 240@28-40
        240@28-240/k3s2p1g240 240@14-80 80@14-480 480@14-480/k3p1g480 480@1-20 20@1-480 480@14-80
        480@14-480/k5p2g480 480@14-112 112@14-672 672@14-672/k5p2g672 672@1-28 28@1-672 672@14-112
        672@14-672/k5s2p2g672 672@7-192 192@7-1152 1152@7-1152/k5p2g1152 1152@1-48 48@1-1152
        1152@7-192 1152@7-1152/k3p1g1152 1152@7-320 320@7-1280
    """,
    "convnext_tiny": """
        3@224-96/k4s4 96@56-96/k7p3g96 96@56-192/k2s2 192@28-192/k7p3g192 192@28-384/k2s2
        384@14-384/k7p3g384 384@14-768/k2s2 768@7-768/k7p3g768
    """,
    "vgg16": """
        3@224-64/k3p1 64@224-64/k3p1 64@112-128/k3p1 128@112-128/k3p1 128@56-256/k3p1
        256@56-256/k3p1 256@28-512/k3p1 512@28-512/k3p1 512@14-512/k3p1
    """,
    "deeplabv3": """
        3@513-64/k7s2p3 64@129-64 64@129-64/k3p1 64@129-256 256@129-64 256@129-128
        128@129-128/k3s2p1 128@65-512 256@129-512/s2 512@65-128 128@65-128/k3p1 512@65-256
        256@65-256/k3p1 256@65-1024 512@65-1024 1024@65-256 256@65-256/k3p2d2 1024@65-512
        512@65-512/k3p2d2 512@65-2048 1024@65-2048 2048@65-512 512@65-512/k3p4d4 2048@65-256
        2048@65-256/k3p12d12 2048@65-256/k3p24d24 2048@65-256/k3p36d36 2048@1-256 1280@65-256
        256@65-21
    """,
    "unet": """
        3@512-64/k3p1 64@512-64/k3p1 64@256-128/k3p1 128@256-128/k3p1 128@128-256/k3p1
        256@128-256/k3p1 256@64-512/k3p1 512@64-512/k3p1 512@32-1024/k3p1 1024@32-1024/k3p1
        1024@64-512/k3p1 512@128-256/k3p1 256@256-128/k3p1 128@512-64/k3p1 64@512-2
    """,
}

REAL_LAYERS: dict[str, tuple[Problem, ...]] = {
    model: tuple(_parse_layer(model, text) for text in layers.split())
    for model, layers in _REAL_LAYERS.items()
}


def real_layer(name: str) -> Problem:
    """The layer of REAL_LAYERS with this name; raises KeyError where there is none."""
    return {layer.name: layer for model in REAL_LAYERS.values() for layer in model}[name]


class Tensors(NamedTuple):
    """The operands of a problem: (N, C, H, W), (OC, C/groups, KH, KW), (OC,) or None, and the
    gradient of the output, (N, OC, OH, OW)."""

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    grad_output: torch.Tensor


class Results(NamedTuple):
    """What the three directions and grad_bias give; grad_bias is None without a bias."""

    output: torch.Tensor
    grad_input: torch.Tensor
    grad_weight: torch.Tensor
    grad_bias: torch.Tensor | None


def make_tensors(
    problem: Problem,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Tensors:
    """Draw a problem's operands; the values depend on the seed, the shapes and the dtype alone.

    Floats are standard normal, integers uniform in [-9, 9] ([0, 18] where unsigned).
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex128 if dtype.is_complex else torch.float64
            values = torch.randn(shape, dtype=wide, generator=generator).to(dtype)
        else:
            values = torch.randint(-9, 10, shape, generator=generator)
            values = (values if dtype.is_signed else values + 9).to(dtype)
        values = values.to(device)
        return values.contiguous(memory_format=memory_format) if len(shape) == 4 else values

    return Tensors(
        draw(problem.input_shape),
        draw(problem.weight_shape),
        draw((problem.out_channels,)) if problem.bias else None,
        draw(problem.output_shape),
    )


def _sliced(tensor: torch.Tensor) -> torch.Tensor:
    large = tensor.new_zeros([2 * size + 1 for size in tensor.shape])
    view = large[tuple(slice(1, None, 2) for _ in tensor.shape)]
    return view.copy_(tensor)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def _unaligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


# The same values in other memory: what results must not depend on. All take 4-D tensors.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channels_last": lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
    "unaligned": _unaligned,
    "sliced": _sliced,
    "transposed": _transposed,
    "batch innermost": lambda tensor: tensor.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
}


def library_forward(problem: Problem, tensors: Tensors) -> torch.Tensor:
    """conv2d_ext's output: through the public function where it can express the padding."""
    input, weight, bias, _ = tensors
    if len(problem.padding) == 4 and problem.padding != "same":
        return torch.ops.conv2d_ext.conv2d(input, weight, bias, *problem.op_args())
    return conv2d(input, weight, bias, **problem.call_args())


def aten_forward(problem: Problem, tensors: Tensors) -> torch.Tensor:
    """F.conv2d's output, on a padded copy where F.conv2d cannot express the padding."""
    input, weight, bias, _ = tensors
    top, bottom, left, right = problem.padding4
    if top == bottom and left == right:
        padding = (top, left)
    else:
        input, padding = F.pad(input, (left, right, top, bottom)), (0, 0)
    return F.conv2d(input, weight, bias, problem.stride, padding, problem.dilation, problem.groups)


def _results(
    forward: Callable[[Problem, Tensors], torch.Tensor], problem: Problem, tensors: Tensors
) -> Results:
    leaves = [t.detach().requires_grad_() for t in tensors[:3] if t is not None]
    bias = leaves[2] if problem.bias else None
    output = forward(problem, Tensors(leaves[0], leaves[1], bias, tensors.grad_output))
    gradients = torch.autograd.grad(output, leaves, tensors.grad_output)
    return Results(output.detach(), *gradients, *([] if problem.bias else [None]))


def library_results(problem: Problem, tensors: Tensors) -> Results:
    """conv2d_ext's output and gradients; the tensors may have any strides."""
    return _results(library_forward, problem, tensors)


def aten_results(problem: Problem, tensors: Tensors) -> Results:
    """F.conv2d's output and gradients."""
    return _results(aten_forward, problem, tensors)


@dataclasses.dataclass(frozen=True)
class Oracle:
    """A result known beyond the precision under test: value + tail, and Σ|a·b|, the sum of the
    absolute values of each element's products, which its rounding error is measured against."""

    value: torch.Tensor
    tail: torch.Tensor | None
    magnitude: torch.Tensor

    def _error(self, actual: torch.Tensor) -> torch.Tensor:
        error = actual.to(self.value.dtype) - self.value
        return error if self.tail is None else error - self.tail

    def relative_l2(self, actual: torch.Tensor) -> float:
        """‖actual - exact‖ / ‖exact‖; 0 for an empty result."""
        norm = torch.linalg.vector_norm(self.value).item()
        return torch.linalg.vector_norm(self._error(actual)).item() / norm if norm else 0.0

    def max_scaled_error(self, actual: torch.Tensor) -> float:
        """max |actual - exact| / Σ|a·b|; elements without products must be exactly right."""
        error = self._error(actual).abs()
        scaled = torch.where(error == 0, 0.0, error / self.magnitude)
        return scaled.max().item() if scaled.numel() else 0.0


def float64_oracle(problem: Problem, tensors: Tensors) -> Results:
    """F.conv2d in float64 (complex128), each field an :class:`Oracle`: for types up to 32 bits."""

    def widened(convert: Callable[[torch.Tensor], torch.Tensor]) -> Results:
        return aten_results(problem, Tensors(*(t if t is None else convert(t) for t in tensors)))

    wide = torch.complex128 if tensors.input.dtype.is_complex else torch.float64
    values = widened(lambda tensor: tensor.to(wide))
    magnitudes = widened(lambda tensor: tensor.to(wide).abs())
    return Results(
        *(
            None if value is None else Oracle(value, None, magnitude)
            for value, magnitude in zip(values, magnitudes, strict=True)
        )
    )


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to a floating or complex dtype."""
    return torch.finfo(dtype).eps / 2


@contextlib.contextmanager
def num_threads(count: int) -> Iterator[None]:
    """`count` threads of PyTorch's within, and then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
