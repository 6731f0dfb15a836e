"""Whole networks of torchvision in eval mode: as they are, converted, and in `batch_invariant`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

import conv2d_ext
from benchmarks.layers import FORMATS, library_fault, wrong_results
from benchmarks.measure import Call
from benchmarks.results import ATEN, ATEN_LAST, MODE, MODE_LAST, OURS, OURS_LAST, Result
from benchmarks.roofline import Roofline

MODELS = ("resnet18", "resnext50_32x4d", "mobilenet_v3_large", "swin_t", "vit_b_32")
_NAMES = {"NCHW": (ATEN, OURS, MODE), "channels_last": (ATEN_LAST, OURS_LAST, MODE_LAST)}
_DTYPE = torch.float32


class ModelBlock:
    """One model at one batch size: the cases differ in their threads."""

    def __init__(
        self, model: str, batch: int, threads: Sequence[int], formats: Sequence[str]
    ) -> None:
        self.title = f"{model} batch {batch}"
        self._model = model
        self._batch = batch
        self._threads = threads
        self._formats = formats
        self.case_count = len(threads)

    def refusal(self) -> str | None:
        return None

    def cases(self, roofline: Roofline) -> Iterator[tuple[Result, dict[str, Call]]]:
        model = _make_model(self._model)
        image = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
        expected = _run(copy.deepcopy(model).double(), image.double())
        calls: dict[str, Call] = {}
        errors: dict[str, float] = {}
        for layout in self._formats:
            plain = copy.deepcopy(model).to(memory_format=FORMATS[layout])
            converted = conv2d_ext.convert(copy.deepcopy(plain))
            images = image.repeat(self._batch, 1, 1, 1).contiguous(memory_format=FORMATS[layout])
            contestants = ((_run, plain), (_run, converted), (_run_in_mode, plain))
            for name, (run, network) in zip(_NAMES[layout], contestants, strict=True):
                actual = run(network, images[:1]).double()
                errors[name] = ((actual - expected).norm() / expected.norm()).item()
                calls[name] = partial(run, network, images)
        bad = wrong_results(errors, _DTYPE)
        for threads in self._threads:
            result = Result(
                name=self.title,
                layer_class="model",
                dtype=str(_DTYPE).removeprefix("torch."),
                direction="forward",
                threads=threads,
                timings={},
                lists=[self._model],
                errors=errors,
                left_out=bad,
                wrong=library_fault(bad),
            )
            yield result, {name: call for name, call in calls.items() if name not in bad}


@torch.no_grad()
def _make_model(name: str) -> nn.Module:
    import torchvision

    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(weights=None)
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            torch.nn.init.trunc_normal_(parameter, std=0.02)  # vit's head: no result is zero
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        # The statistics of a batch keep the activations of order one through all layers.
        model.train()(torch.randn(8, 3, 64, 64))
    return model.eval()


@torch.no_grad()
def _run(model: nn.Module, images: Tensor) -> Tensor:
    return model(images)


def _run_in_mode(model: nn.Module, images: Tensor) -> Tensor:
    with conv2d_ext.batch_invariant():
        return _run(model, images)
