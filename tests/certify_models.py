"""Models whose variation is known, for test_certify.py and its command lines."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES = 6


class Steady(nn.Module):
    """Each element of the output comes from elements of its example alone, by one rounding each."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 0.75 + 0.125).relu()


class BatchMean(nn.Module):
    """Couples the examples by the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 1e-3 * x.mean())


class ThreadCount(nn.Module):
    """Varies with the number of threads."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 1e-3 * torch.get_num_threads())


class ByPlace(nn.Module):
    """Its third sum runs over the batch: it varies with the place, and at place 0 with nothing."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cumsum(x, 1)
        x = torch.cumsum(x, 1)
        x = torch.cumsum(x, 0)
        return torch.cumsum(x, 1)


class RowNumber(nn.Module):
    """Adds the row's number: a call without tensors is what varies."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * torch.arange(x.shape[0])[:, None]


class _ScaledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return x * 1.0

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * (1 + 1e-3 * ctx.rows)


class GradientOnly(nn.Module):
    """Its outputs hold; its gradients vary with the batch's size."""

    def forward(self, x: Tensor) -> Tensor:
        return _ScaledBackward.apply(x)


class EveryRun(nn.Module):
    """Other numbers in every run, whatever the seed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


class FormatOnly(nn.Module):
    """Varies with the memory format alone."""

    def forward(self, x: Tensor) -> Tensor:
        is_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        return x * (1.5 if is_last else 1.25)


class Heads(nn.Module):
    """Folds the batch into (batch * heads, ...), and (tokens * batch, ...); `varies` names the call
    that multiplies by another number in larger batches: "heads", "tokens" or ""."""

    def __init__(self, varies: str = "") -> None:
        super().__init__()
        self.varies = varies
        self.inner = Steady()

    def factor(self, name: str, batch: int) -> float:
        return 1 + 1e-4 * (batch > 1) * (self.varies == name)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = x.reshape(batch, tokens, 2, width // 2).transpose(1, 2)
        heads = heads.reshape(batch * 2, tokens, width // 2)
        heads = torch.mul(self.inner(heads), self.factor("heads", batch))
        x = heads.reshape(batch, 2, tokens, width // 2).permute(2, 0, 1, 3)
        x = torch.mul(x.reshape(tokens * batch, width), self.factor("tokens", batch))
        return x.reshape(tokens, batch, width).transpose(0, 1)


class Tokens(nn.Module):
    """Token ids (N, T) and a mask of the same shape -> (N, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        assert int(ids.max()) < 50
        return (self.embedding(ids) * mask[..., None]).amax(1)


@dataclasses.dataclass
class Pair:
    first: Tensor
    size: int


class Nested(nn.Module):
    """A dict of nested containers; "similar" couples the examples, "constant" has no batch."""

    def forward(self, x: Tensor) -> dict:
        return {
            "out": x * 2,
            "list": [x.sum(1), (x > 0, None)],
            "pair": Pair(x + 1, 3),
            "constant": torch.ones(3),
            "similar": x @ x.T,
        }


class Detector(nn.Module):
    """One dict for each image, as torchvision's detection models return them."""

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        return [{"boxes": image[:2] * 2, "score": image.max()} for image in x]


class TwoLayers(nn.Sequential):
    def __init__(self, second: nn.Module) -> None:
        super().__init__(Steady(), second, Steady())


class SmallNet(nn.Sequential):
    """A model as people have them: convolutions, batch norm, linear."""

    def __init__(self, classes: int = 3, fails: bool = False) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(1)
        )
        self.append(nn.Linear(8 * 4 * 4, classes))
        if fails:
            self.append(BatchMean())


class ZeroHead(nn.Linear):
    """Ends in zeros, as torchvision's ViT is made."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 2)
        nn.init.zeros_(self.weight)


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)
