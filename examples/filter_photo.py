"""Filters a colour photograph with depthwise conv2d_ext.conv2d and saves the results as PNG files.

Every result is checked against torch.nn.functional.conv2d in float64; the table shows the largest
difference in grey levels (255 is white), and one above a hundredth of a grey level fails.

Each of the three colours is filtered by itself (groups = 3). padding="same" keeps the picture's
size and reads what lies outside of it as zero, that is black: a blur darkens towards the border,
and edge filters draw a line along it. Values beyond black and white are saved as black and white.

The photograph is china.jpg, which scikit-learn ships, or a file of yours. Exit status: 0, 1 where a
check fails, 2 for bad arguments. Needs pillow and scikit-learn. --help shows the options.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from torch import Tensor

import conv2d_ext

LARGEST_DIFFERENCE = 0.01  # grey levels
LARGEST_SIGMA = 100.0  # pixels; the kernel has six times as many taps

Conv2d = Callable[..., Tensor]


def depthwise(conv2d: Conv2d, image: Tensor, kernels: Tensor) -> Tensor:
    """(C, H, W) and (M, KH, KW) -> (C, M, H, W): every channel through each of the M kernels."""
    channels = image.size(0)
    # Output channel c * M + m is channel c through kernel m.
    weight = kernels.to(image.dtype).unsqueeze(1).repeat(channels, 1, 1, 1)
    filtered = conv2d(image, weight, padding="same", groups=channels)
    return filtered.unflatten(0, (channels, len(kernels)))


def one_kernel(rows: list[list[float]]) -> Callable[[Conv2d, Tensor, float], Tensor]:
    kernel = torch.tensor(rows, dtype=torch.float64)

    def apply(conv2d: Conv2d, image: Tensor, sigma: float) -> Tensor:
        return depthwise(conv2d, image, kernel[None]).squeeze(1)

    return apply


def gaussian(conv2d: Conv2d, image: Tensor, sigma: float) -> Tensor:
    # A Gaussian is the product of one along rows and one along columns: two narrow passes do.
    radius = math.ceil(3 * sigma)
    distance = torch.arange(-radius, radius + 1, dtype=torch.float64)
    taps = torch.exp(-0.5 * (distance / sigma) ** 2)
    taps /= taps.sum()
    blurred = depthwise(conv2d, image, taps[None, None, :]).squeeze(1)
    return depthwise(conv2d, blurred, taps[None, :, None]).squeeze(1)


def sobel(conv2d: Conv2d, image: Tensor, sigma: float) -> Tensor:
    # A quarter of the usual kernels: a step from black to white gives white.
    across = torch.tensor([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]], dtype=torch.float64) / 4
    gradients = depthwise(conv2d, image, torch.stack([across, across.T]))
    return torch.hypot(gradients[:, 0], gradients[:, 1])


@dataclass
class Filter:
    """apply(conv2d, image, sigma): image and result (C, H, W), 0 black and 1 white."""

    description: str
    apply: Callable[[Conv2d, Tensor, float], Tensor]


LAPLACIAN = [[-1, -1, -1], [-1, 8, -1], [-1, -1, -1]]
RELIEF = [[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]
SHARPEN = [[0, -1, 0], [-1, 5, -1], [0, -1, 0]]
FILTERS = {
    "gaussian": Filter("Gaussian blur of --sigma pixels", gaussian),
    "sobel": Filter("strength of edges, by the Sobel operator", sobel),
    "sharpen": Filter("sharper edges", one_kernel(SHARPEN)),
    "emboss": Filter("relief, lit from the upper left", one_kernel(RELIEF)),
    "outline": Filter("outlines, by the Laplacian", one_kernel(LAPLACIAN)),
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")  # one sentence, without the usage


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.input is None and importlib.util.find_spec("sklearn") is None:
        parser.error("china.jpg comes with scikit-learn: install that, or name another --input")
    console = Console()
    if arguments.list:
        for name, one in FILTERS.items():
            console.print(f"{name:10}{one.description}", highlight=False, markup=False)
        return 0
    unknown = [name for name in arguments.filter or () if name not in FILTERS]
    if unknown:
        parser.error(f"there is no filter {unknown[0]!r}; there are {', '.join(FILTERS)}")
    try:
        image = to_tensor(open_photo(arguments.input))
        arguments.out_dir.mkdir(parents=True, exist_ok=True)
        save(image, arguments.out_dir / "original.png")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        parser.error(explain(error, arguments.input))

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("filter", no_wrap=True)
    table.add_column("difference from float64\nin grey levels", justify="right")
    table.add_column("file", overflow="fold")
    right = True
    terminal = Console(stderr=True)
    names = list(dict.fromkeys(arguments.filter or FILTERS))
    for name in track(names, console=terminal, transient=True, disable=not terminal.is_terminal):
        apply = FILTERS[name].apply
        result = apply(conv2d_ext.conv2d, image, arguments.sigma)
        wanted = apply(F.conv2d, image.double(), arguments.sigma)
        difference = 255 * (result - wanted).abs().max().item()
        passed = difference <= LARGEST_DIFFERENCE
        right = right and passed
        path = arguments.out_dir / f"{name}.png"
        save(result, path)
        figure = f"{difference:.6f}" if passed else f"[red]{difference:.6f} FAILS[/]"
        table.add_row(name, figure, escape(str(path)))
    console.print(table)
    height, width = image.shape[1:]
    console.print(
        f"{width} x {height} pixels; differences up to {LARGEST_DIFFERENCE} grey levels pass",
        highlight=False,
    )
    return 0 if right else 1


def make_parser() -> Parser:
    parser = Parser(description="Filters a photograph with conv2d_ext.conv2d and saves PNG files.")
    option = parser.add_argument
    option("--filter", action="append", metavar="NAME", help="repeatable (default: all)")
    option("--sigma", type=sigma, default=3.0, help="of the blur, in pixels (default: %(default)s)")
    option("--input", type=Path, metavar="FILE", help="a picture (default: china.jpg)")
    folder = Path("outputs/filter_photo")
    option("--out-dir", type=Path, default=folder, metavar="FOLDER", help="default: %(default)s")
    option("--list", action="store_true", help="name the filters and end")
    return parser


def sigma(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LARGEST_SIGMA:
        wanted = f"a number above 0, up to {LARGEST_SIGMA:g}"
        raise argparse.ArgumentTypeError(f"wanted {wanted}, got {text!r}")
    return value


def open_photo(path: Path | None) -> Image.Image:
    """In RGB. Raises OSError, SyntaxError or ValueError where no picture can be read."""
    if path is not None:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    from sklearn.datasets import load_sample_image

    return Image.fromarray(load_sample_image("china.jpg"))


def to_tensor(photo: Image.Image) -> Tensor:
    """(3, H, W) float32, 0 black and 1 white. The strides stay the photo's, colours innermost."""
    return torch.from_numpy(numpy.array(photo)).permute(2, 0, 1).float() / 255


def save(image: Tensor, path: Path) -> None:
    pixels = (255 * image.clamp(0, 1)).round().byte().permute(1, 2, 0)
    Image.fromarray(pixels.contiguous().numpy()).save(path)


def explain(error: Exception, path: Path | None) -> str:
    """One sentence, which names the file: Pillow's own need not."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or path}: {error.strerror}"
    return f"{path} is not a picture that can be read: {error}"


if __name__ == "__main__":
    sys.exit(main())
