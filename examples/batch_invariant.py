"""Serves a model in batches and shows whose answers depend on who else is in the batch.

A server puts the requests that wait into a batch, and its size follows the load. Here the same
image is sent among others, in batches of 1 to 32, at random places. Each answer is compared with
the one that the image gets alone: bit by bit, and as a probability. Under
conv2d_ext.batch_invariant() no bit may differ, which this program checks.

The model is torchvision's MobileNetV3-Small with random weights, on a photograph from scikit-learn;
--model names another of torchvision's classifiers. The picture shows how far the logits move from
batch to batch. Exit status: 0, 1 where a bit differs under the mode, 2 for bad arguments. Needs
matplotlib, torchvision and scikit-learn. --help shows the options.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import torchvision
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

import conv2d_ext

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def photograph(size: int) -> Tensor:
    """(3, size, size), as classifiers want it: about zero, with a deviation of about one."""
    pixels = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)
    image = F.interpolate(pixels[None] / 255.0, (size, size), mode="area")[0]
    return (image - image.mean()) / image.std()


def answers(model: nn.Module, image: Tensor, invariant: bool, seed: int) -> dict[int, Tensor]:
    """The image's logits, by the size of the batch that it was in."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    mode = conv2d_ext.batch_invariant() if invariant else contextlib.nullcontext()
    with torch.inference_mode(), mode:
        for batch in BATCHES:
            requests = torch.randn(batch, *image.shape, generator=generator)
            place = int(torch.randint(batch, (1,), generator=generator))
            requests[place] = image
            found[batch] = model(requests)[place]
    return found


def differing(found: dict[int, Tensor]) -> dict[int, float]:
    """Of each batch: the largest difference of a logit from the image's alone."""
    return {batch: (y - found[1]).abs().max().item() for batch, y in found.items()}


def print_table(console: Console, plain: dict[int, Tensor], mode: dict[int, Tensor]) -> None:
    table = Table(title="The same image in batches of other images")
    for column in ("batch", "PyTorch", "largest difference", "batch_invariant"):
        table.add_column(column, justify="right")
    for batch, difference in differing(plain).items():
        table.add_row(
            str(batch),
            "same bits" if torch.equal(plain[batch], plain[1]) else "other bits",
            f"{difference:.2g}",
            "same bits" if torch.equal(mode[batch], mode[1]) else "OTHER BITS",
        )
    console.print(table)


def draw(path: Path, plain: dict[int, Tensor], mode: dict[int, Tensor], name: str) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for found, label, marker in ((plain, "PyTorch", "o"), (mode, "batch_invariant", "s")):
        axes.plot(list(found), list(differing(found).values()), marker=marker, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
    axes.set_xlabel("images in the batch")
    axes.set_ylabel("largest difference of a logit\nfrom the image alone")
    axes.set_title(f"One image's answer, {name}")
    axes.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="mobilenet_v3_small", help="a classifier of torchvision")
    parser.add_argument("--size", type=int, default=96, help="pixels a side (default: 96)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and other images")
    parser.add_argument(
        "--output", type=Path, help="the picture (default: outputs/batch_invariant.png)"
    )
    arguments = parser.parse_args()
    if arguments.model not in torchvision.models.list_models(module=torchvision.models):
        parser.error(f"--model: torchvision has no classifier '{arguments.model}'")
    if not 32 <= arguments.size <= 1024:
        parser.error(f"--size: wanted 32 to 1024 pixels, got {arguments.size}")
    if arguments.output is None:
        arguments.output = Path("outputs/batch_invariant.png")
    elif not arguments.output.resolve().parent.is_dir():
        parser.error(f"--output: there is no folder '{arguments.output.parent}'")
    return arguments


def main() -> int:
    arguments = parse()
    console = Console()
    torch.manual_seed(arguments.seed)
    model = torchvision.models.get_model(arguments.model, weights=None).eval()
    image = photograph(arguments.size)
    try:
        with torch.inference_mode():
            model(image[None])
    except (AssertionError, RuntimeError) as error:
        print(
            f"--model {arguments.model}: not at --size {arguments.size}: {error}", file=sys.stderr
        )
        return 2
    plain = answers(model, image, invariant=False, seed=arguments.seed)
    mode = answers(model, image, invariant=True, seed=arguments.seed)
    print_table(console, plain, mode)
    draw(arguments.output, plain, mode, arguments.model)
    console.print(f"Picture saved as {arguments.output}", highlight=False, markup=False)
    held = all(torch.equal(y, mode[1]) for y in mode.values())
    if not held:
        console.print("Under batch_invariant an answer depends on its batch.")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
