"""The models of test_invariant_models.py: random weights, small images."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class UNet(nn.Module):
    """Two levels, with transposed convolutions on the way up."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
                nn.Conv2d(outputs, outputs, 3, padding=1),
                nn.ReLU(inplace=True),
            )

        self.first, self.second, self.bottom = (
            block(3, width),
            block(width, 2 * width),
            block(2 * width, 4 * width),
        )
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up2 = nn.ConvTranspose2d(2 * width, width, 3, stride=2, padding=1, output_padding=1)
        self.left, self.right = block(4 * width, 2 * width), block(2 * width, width)
        self.head = nn.Conv2d(width, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        x = self.left(torch.cat((self.up1(self.bottom(F.max_pool2d(second, 2))), second), 1))
        return self.head(self.right(torch.cat((self.up2(x), first), 1)))


class _Residual(nn.Module):
    """GroupNorm, SiLU and a convolution, twice, as in latent diffusion's decoders."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(hidden)))


class _SpatialAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.to_q, self.to_k, self.to_v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.to_q(tokens), self.to_k(tokens), self.to_v(tokens)
        attended = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return x + self.out(attended).transpose(1, 2).reshape(x.shape)


class VaeDecoder(nn.Module):
    """From a latent to an image: residual blocks around an attention, then upsampling."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 2 * width, 3, padding=1)
        self.middle = nn.Sequential(
            _Residual(2 * width, 2 * width),
            _SpatialAttention(2 * width),
            _Residual(2 * width, 2 * width),
        )
        self.up = nn.Sequential(
            _Residual(2 * width, 2 * width),
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            _Residual(2 * width, width),
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.Conv2d(width, width, 3, padding=1),
        )
        self.last = nn.Sequential(
            nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1)
        )

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        return self.last(self.up(self.middle(self.first(latent))))


class WaveNet(nn.Module):
    """Dilated causal 1-D convolutions with gates, residuals and skips."""

    def __init__(self, width: int = 16, layers: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(layers)
        )
        self.mixes = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))
        self.last = nn.Sequential(
            nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 32, 1)
        )

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        x, skips = self.first(wave), 0
        for i, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            filter, switch = gate(F.pad(x, (2**i, 0))).chunk(2, 1)
            residual, skip = mix(torch.tanh(filter) * torch.sigmoid(switch)).chunk(2, 1)
            x, skips = x + residual, skips + skip
        return self.last(skips)


class HifiGan(nn.Module):
    """A vocoder: transposed 1-D convolutions with weight norm, residual stacks of two kernels."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.first = norm(nn.Conv1d(20, width, 7, padding=3))
        self.ups, self.stacks = nn.ModuleList(), nn.ModuleList()
        for kernel, stride in ((16, 8), (4, 2)):
            self.ups.append(
                norm(
                    nn.ConvTranspose1d(
                        width, width // 2, kernel, stride, padding=(kernel - stride) // 2
                    )
                )
            )
            width //= 2
            self.stacks.append(
                nn.ModuleList(
                    norm(nn.Conv1d(width, width, k, dilation=d, padding=(k - 1) * d // 2))
                    for k in (3, 7)
                    for d in (1, 3)
                )
            )
        self.last = norm(nn.Conv1d(width, 1, 7, padding=3))

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        x = self.first(mel)
        for up, stack in zip(self.ups, self.stacks, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            x = sum(x + conv(F.leaky_relu(x, 0.1)) for conv in stack) / len(stack)
        return torch.tanh(self.last(F.leaky_relu(x)))


class LowRankLinear(nn.Module):
    """A wrapper as LoRA's: it reads a layer's weight and calls F.linear itself."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(rank, layer.in_features))
        self.up = nn.Parameter(torch.randn(layer.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.down), self.up)


class TiedAndAdapted(nn.Module):
    """Tied weights, a convolution called by its function, a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 3, 3) / 5)
        self.encode, self.decode = nn.Linear(8, 30, bias=False), nn.Linear(30, 8, bias=False)
        self.adapted = LowRankLinear(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.conv2d(x, self.weight, padding="same").mean((2, 3))
        x = F.gelu(self.encode(x))
        return self.adapted(F.linear(x, self.encode.weight.t()))


@dataclasses.dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of an example


def _torchvision(name: str, size: int = 64, **kwargs: object) -> Case:
    import torchvision

    maker = getattr(torchvision.models, name, None) or getattr(
        torchvision.models.segmentation, name
    )
    return Case(functools.partial(maker, **kwargs), (3, size, size))


def _timm(name: str, size: int = 64, **kwargs: object) -> Case:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, **kwargs)

    return Case(make, (3, size, size))


def _detection_backbone() -> nn.Module:
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    return resnet_fpn_backbone(backbone_name="resnet18", weights=None)


# In every run of the tests.
FEW = {
    "resnet18": _torchvision("resnet18"),
    "regnet_y_400mf": _torchvision("regnet_y_400mf"),
    "swin_t": _torchvision("swin_t"),
}

SEGMENTATION = {"weights": None, "weights_backbone": None}
MODELS = FEW | {
    "mobilenet_v3_small": _torchvision("mobilenet_v3_small"),
    "efficientnet_b0": _torchvision("efficientnet_b0"),
    "convnext_tiny": _torchvision("convnext_tiny"),
    "densenet121": _torchvision("densenet121"),
    "shufflenet_v2_x1_0": _torchvision("shufflenet_v2_x1_0"),
    "mnasnet0_5": _torchvision("mnasnet0_5"),
    "vit_b_16": _torchvision("vit_b_16", 48, image_size=48),
    "deeplabv3_mobilenet": _torchvision("deeplabv3_mobilenet_v3_large", **SEGMENTATION),
    "detection backbone": Case(_detection_backbone, (3, 64, 64)),
    "unet": Case(UNet, (3, 32, 28)),
    "vae decoder": Case(VaeDecoder, (4, 9, 8)),
    "wavenet": Case(WaveNet, (1, 203)),
    "hifi-gan": Case(HifiGan, (20, 23)),
    "tied and adapted": Case(TiedAndAdapted, (3, 13, 12)),
    "mobileone_s0": _timm("mobileone_s0"),
    "tf_efficientnetv2_b0": _timm("tf_efficientnetv2_b0"),  # Conv2dSame
    "resnetv2_50": _timm("resnetv2_50", 32),
    "nf_resnet26": _timm("nf_resnet26", 32),  # standardised weights
    "deit_tiny": _timm("deit_tiny_patch16_224", 64, img_size=64),
    "convnextv2_atto": _timm("convnextv2_atto"),
    "mobilevit_xxs": _timm("mobilevit_xxs"),
    "edgenext_xx_small": _timm("edgenext_xx_small"),
    "repvgg_a0": _timm("repvgg_a0"),
    "poolformer_s12": _timm("poolformer_s12"),
    "xcit_nano": _timm("xcit_nano_12_p16_224", 64, img_size=64),
    "mixer_s32": _timm("mixer_s32_224", 64, img_size=64),
    "hrnet_w18_small": _timm("hrnet_w18_small", 64),
    "ghostnet_100": _timm("ghostnet_100"),
}


def make_model(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Evaluated, with weights and statistics that leave nothing zero; an example's shape."""
    torch.manual_seed(0)
    case = MODELS[name]
    model = case.make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.02)
    return model, case.shape
