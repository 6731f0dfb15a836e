"""The specification: convolution as unfold and matmul, in pure PyTorch.

It defines the values of `conv2d` and `forward`. Valid arguments are taken for granted: of the
others, only those are refused that would pass unnoticed. Zero padding takes part in the
multiplication, so Inf * 0 gives NaN. The whole column matrix is built: in_channels * kernel_h *
kernel_w elements for each output pixel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.utils import _pair


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: str | int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> Tensor:
    """`torch.nn.functional.conv2d`, for every dtype that torch.matmul takes.

    input (batch, in_channels, in_h, in_w) or (in_channels, in_h, in_w);
    weight (out_channels, in_channels / groups, kernel_h, kernel_w); bias (out_channels,) or None.
    Returns (batch, out_channels, out_h, out_w) or (out_channels, out_h, out_w), contiguous.

    Raises RuntimeError for negative padding, padding='same' with a stride, and other strings.
    """
    if input.dim() == 3:
        return conv2d(input[None], weight, bias, stride, padding, dilation, groups)[0]
    stride, dilation = _pair(stride), _pair(dilation)
    batch, out_channels = input.shape[0], weight.shape[0]
    span_h, span_w = (d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True))
    top, bottom, left, right = _padding(padding, span_h, span_w, stride)

    # F.unfold takes neither integers nor zero channels; views do, and copying them gives the same
    # columns. windows: (batch, in_channels, out_h, out_w, kernel_h, kernel_w)
    windows = F.pad(input, (left, right, top, bottom))
    windows = windows.unfold(2, span_h, stride[0]).unfold(3, span_w, stride[1])
    windows = windows[..., :: dilation[0], :: dilation[1]]
    out_h, out_w = windows.shape[2:4]

    gemm_m, gemm_k, pixels = out_channels // groups, weight[0].numel(), out_h * out_w
    columns = windows.permute(0, 1, 4, 5, 2, 3).reshape(batch, groups, gemm_k, pixels)
    output = torch.matmul(weight.reshape(groups, gemm_m, gemm_k), columns)
    output = output.reshape(batch, out_channels, out_h, out_w)
    return output if bias is None else output + bias[:, None, None]


def forward(im: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    """Convolution with stride 1 and no padding; the kernel has its input channels first.

    im (batch, di, height, width) or (di, height, width), floating-point or complex;
    kernel (di, do, kh, kw); bias (do,), (do, 1) or None.
    Returns (batch, do, height - kh + 1, width - kw + 1), without the batch where im has none.
    """
    _, do, kh, kw = kernel.shape
    columns = F.unfold(im, (kh, kw))
    output = torch.matmul(kernel.moveaxis(0, 1).flatten(1), columns)
    if bias is not None:
        output = output + bias.reshape(do, 1)
    return output.unflatten(-1, (im.shape[-2] - kh + 1, im.shape[-1] - kw + 1))


def _padding(
    padding: str | int | tuple[int, int], span_h: int, span_w: int, stride: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Rows and columns of zeros to add: (top, bottom, left, right)."""
    if not isinstance(padding, str):
        vertical, horizontal = _pair(padding)
        if vertical < 0 or horizontal < 0:
            raise RuntimeError(f"negative padding is not supported, got padding={padding}")
        return vertical, vertical, horizontal, horizontal
    if padding == "valid":
        return 0, 0, 0, 0
    if padding == "same":
        if stride != (1, 1):
            raise RuntimeError("padding='same' is not supported for strided convolutions")
        # Where the total is odd, the extra row or column goes to the bottom or right.
        return (span_h - 1) // 2, span_h // 2, (span_w - 1) // 2, span_w // 2
    raise RuntimeError(f"Invalid padding string: '{padding}', wanted 'same' or 'valid'")
