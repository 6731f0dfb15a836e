"""Trains one small network twice, with torch.nn.Conv2d and with conv2d_ext.Conv2d, and compares.

The data are the UCI handwritten digits, 1797 images of 8 x 8 pixels, which scikit-learn ships. Both
networks start from the same weights and see the same images in the same order. The claims, on which
the exit status depends (0: all hold, 1: one does not, 2: bad arguments):

- both classify at least 97 % of the held-out digits correctly;
- the two accuracies lie within 1 percentage point of each other;
- the losses of the first 20 steps agree within 1e-3, relative. Later the curves may part: training
  amplifies differences in the last bit, so a wrong gradient shows early or not at all.

Needs matplotlib and scikit-learn. Run it with --help to see the options.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor, nn

import conv2d_ext

LEAST_ACCURACY = 97.0  # percent
LARGEST_GAP = 1.0  # percentage points
COMPARED_STEPS = 20
# Relative. Over 20 steps a maximum that moved to another pixel has made 3e-4, a bias gradient in
# the wrong order 8e-3.
LOSS_TOLERANCE = 1e-3

TEST_IMAGES = 450
BATCH = 64
LAYERS = {"torch.nn.Conv2d": nn.Conv2d, "conv2d_ext.Conv2d": conv2d_ext.Conv2d}


@dataclass
class Digits:
    """images: (count, 1, 8, 8) float32 in [0, 1]; labels: (count,) int64."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass
class History:
    losses: list[float]  # one a step
    accuracies: list[float]  # one an epoch, percent of the test images
    seconds: float


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads)
    # The comparison is between float32 convolutions, which cuDNN would round to TF32.
    torch.backends.cudnn.allow_tf32 = False

    console = Console()
    digits = load_digits(arguments.device)
    histories = {}
    # The bars are for people who watch: they go to the error stream, and only to a terminal.
    terminal = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn())
    hidden = not terminal.is_terminal
    with Progress(*columns, console=terminal, transient=True, disable=hidden) as progress:
        for name, layer in LAYERS.items():
            after_epoch = partial(progress.advance, progress.add_task(name, total=arguments.epochs))
            histories[name] = train(layer, digits, arguments.epochs, arguments.seed, after_epoch)

    console.print(table(histories))
    draw(histories, arguments.out)
    console.print(f"Curves saved as {arguments.out}", highlight=False, markup=False, soft_wrap=True)
    results = claims(histories)
    for sentence, holds in results:
        mark = "[green]holds[/]" if holds else "[red]FAILS[/]"
        console.print(mark, sentence, highlight=False, soft_wrap=True)
    return 0 if all(holds for _, holds in results) else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a small network of torch.nn.Conv2d and of conv2d_ext.Conv2d on "
        "handwritten digits and checks that both learn the same."
    )
    option = parser.add_argument
    option("--epochs", type=positive, default=15, metavar="N", help="default: %(default)s")
    option("--seed", type=int, default=0, metavar="N", help="of the weights and the images' order")
    # One thread is fastest for layers as small as these.
    option("--threads", type=positive, default=1, metavar="N", help="default: %(default)s")
    option("--device", default="cpu", help="cpu (the default), cuda or cuda:1")
    out = Path("outputs/train_digits.png")
    option("--out", type=Path, default=out, metavar="FILE", help="default: %(default)s")
    arguments = parser.parse_args(argv)
    # What can be refused is refused before the training starts.
    for module in ("matplotlib", "sklearn"):
        if importlib.util.find_spec(module) is None:
            parser.error(f"{module} is not installed: pip install matplotlib scikit-learn")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if arguments.out.suffix[1:].lower() not in kinds:
        parser.error(f"--out {arguments.out}: the name must end in one of .{', .'.join(kinds)}")
    try:
        one = torch.ones(1, 1, 1, 1, device=arguments.device)
        conv2d_ext.conv2d(one, one).item()
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {arguments.device}: {str(error).splitlines()[0]}")
    try:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.open("ab").close()
    except OSError as error:
        parser.error(f"--out {arguments.out}: cannot write there: {error.strerror}")
    return arguments


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wanted a whole number from 1 on, got {text!r}")
    return int(text)


def load_digits(device: str) -> Digits:
    from sklearn import datasets, model_selection

    bunch = datasets.load_digits()
    # pixels are 0 to 16
    images = torch.tensor(bunch.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target, device=device)
    # One split for every seed, with each digit's share the same in both parts.
    train, test = model_selection.train_test_split(
        torch.arange(len(labels)), test_size=TEST_IMAGES, random_state=0, stratify=bunch.target
    )
    return Digits(images[train], labels[train], images[test], labels[test])


def make_network(layer: type[nn.Conv2d]) -> nn.Sequential:
    """(N, 1, 8, 8) -> (N, 10) logits; every parameter belongs to a convolution.

    GELU is smooth: at the kink of a ReLU a difference in the last bit grows into one that is seen.
    """
    return nn.Sequential(
        layer(1, 32, 3, padding="same"),
        nn.GELU(),
        layer(32, 64, 3, padding="same"),
        nn.GELU(),
        nn.MaxPool2d(2),
        layer(64, 64, 3, padding="same"),
        nn.GELU(),
        nn.MaxPool2d(2),
        layer(64, 10, 2),
        nn.Flatten(),
    )


def train(
    layer: type[nn.Conv2d], digits: Digits, epochs: int, seed: int, after_epoch: Callable[[], None]
) -> History:
    torch.manual_seed(seed)
    network = make_network(layer).to(digits.train_images.device)
    order = torch.Generator().manual_seed(seed)
    count = len(digits.train_images)
    steps = count // BATCH  # without a last, smaller batch: its loss would stand out
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.05)
    # Warms up in a tenth of the steps, from a fifth of the rate: the compared losses have to fall.
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=epochs * steps, pct_start=0.1, div_factor=5
    )

    history = History([], [], 0.0)
    started = time.perf_counter()
    for _ in range(epochs):
        network.train()
        shuffled = torch.randperm(count, generator=order)[: steps * BATCH]
        for batch in shuffled.to(digits.train_labels.device).split(BATCH):
            loss = F.cross_entropy(network(digits.train_images[batch]), digits.train_labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            history.losses.append(loss.item())
        history.accuracies.append(accuracy(network, digits))
        after_epoch()
    history.seconds = time.perf_counter() - started
    return history


@torch.no_grad()
def accuracy(network: nn.Module, digits: Digits) -> float:
    network.eval()
    right = network(digits.test_images).argmax(1) == digits.test_labels
    return 100 * right.double().mean().item()


def loss_differences(histories: dict[str, History]) -> list[float]:
    """Relative, one for each of the first COMPARED_STEPS steps."""
    theirs, ours = (history.losses[:COMPARED_STEPS] for history in histories.values())
    return [abs(a - b) / a for a, b in zip(theirs, ours, strict=True)]


def claims(histories: dict[str, History]) -> list[tuple[str, bool]]:
    """What the program claims, in words, and whether it holds."""
    finals = [history.accuracies[-1] for history in histories.values()]
    gap = abs(finals[0] - finals[1])
    # max() alone would pass over a NaN.
    differences = loss_differences(histories)
    agree = all(difference <= LOSS_TOLERANCE for difference in differences)
    return [
        (
            f"both are right on at least {LEAST_ACCURACY:g} % of the test digits: "
            f"the lower one on {min(finals):.2f} %",
            min(finals) >= LEAST_ACCURACY,
        ),
        (f"they are within {LARGEST_GAP:g} point of each other: {gap:.2f}", gap <= LARGEST_GAP),
        (
            f"the first {COMPARED_STEPS} losses agree within {LOSS_TOLERANCE:g}: "
            f"largest relative difference {max(differences):.1e}",
            agree,
        ),
    ]


def table(histories: dict[str, History]) -> Table:
    result = Table(box=box.SIMPLE_HEAD)
    result.add_column("layers", no_wrap=True)
    for heading in ("loss 1", f"loss {COMPARED_STEPS}", "last loss", "accuracy", "seconds"):
        result.add_column(heading, justify="right", no_wrap=True)
    for name, history in histories.items():
        losses = (history.losses[0], history.losses[COMPARED_STEPS - 1], history.losses[-1])
        others = (f"{history.accuracies[-1]:.2f} %", f"{history.seconds:.1f}")
        result.add_row(name, *(f"{loss:.6f}" for loss in losses), *others)
    return result


def draw(histories: dict[str, History], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # draws without a display
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    loss, accuracy, difference = panels
    # The second curve is dashed and narrower: where the two coincide, both are seen.
    for (name, history), style in zip(histories.items(), ("-", "--"), strict=True):
        width = 3 if style == "-" else 1.5
        for axes, values in ((loss, history.losses), (accuracy, history.accuracies)):
            axes.plot(range(1, len(values) + 1), values, style, linewidth=width, label=name)
    loss.set(title="Loss", xlabel="step", yscale="log")
    accuracy.set(title="Test accuracy", xlabel="epoch", ylabel="%")
    accuracy.axhline(LEAST_ACCURACY, color="grey", linewidth=0.8, label=f"{LEAST_ACCURACY:g} %")
    # The scale is logarithmic and has no place for zero: equal losses are drawn at its lower end.
    smallest = torch.finfo(torch.float32).eps / 10
    differences = [max(value, smallest) for value in loss_differences(histories)]
    difference.plot(range(1, COMPARED_STEPS + 1), differences, "o")
    difference.axhline(LOSS_TOLERANCE, color="grey", linewidth=0.8, label="tolerance")
    difference.set(title="Relative difference of the losses", xlabel="step", yscale="log")
    difference.set_ylim(smallest / 2, 10 * LOSS_TOLERANCE)
    for axes in panels:
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
