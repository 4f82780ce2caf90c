"""MobileNet v5, Gemma 3n's eyes: convolutions within inverted bottlenecks (MobileNet v4: Qin et al., 2024), attention
whose heads share their keys and values, and what joins the last two sizes. Modules have the names that timm gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from app.checkpoints.fields.kinds import expect, number
from app.errors import CheckpointError, UnsupportedError
from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.weight import REPLICATED, Weight

NAME = "mobilenetv5_300m_enc"
STEM, SIDE = 64, 16  # channels behind the first convolution; tokens along a side of the picture
EPS = 1e-6
_UNIT = 8  # numbers of channels are multiples of it


@dataclass(slots=True, frozen=True)
class Edge:
    """A convolution to four times as many channels, and back."""

    channels: int
    stride: int = 1


@dataclass(slots=True, frozen=True)
class Inverted:
    """Channels grow and shrink again; convolutions of each alone before (kernel `first`) and between (`middle`)."""

    channels: int
    first: int
    middle: int = 0
    stride: int = 1
    growth: int = 4


@dataclass(slots=True, frozen=True)
class Attending:
    """Attention of all places to all, or to every second one along each side."""

    channels: int
    heads: int
    head_dim: int
    stride: int


STAGES: tuple[tuple[Edge | Inverted | Attending, ...], ...] = (
    (Edge(128, 2), Edge(128), Edge(128)),
    (Inverted(256, 3, 5, 2, 6), *(Inverted(256, kernel) for kernel in (5, 3, 5, 3))),
    (
        *(Inverted(640, 5, 5, 2, 6), *[Inverted(640, 5)] * 7, Inverted(640, 0, growth=1)),
        *(Attending(640, 12, 64, 2), Inverted(640, 0, growth=2)) * 14,
    ),
    (Inverted(1280, 5, 5, 2, 6), *(Attending(1280, 16, 96, 1), Inverted(1280, 0, growth=2)) * 19),
)


def scale_of(vision: Mapping[str, Any]) -> float:
    """The factor of all numbers of channels. UnsupportedError names what is another tower."""
    name = vision.get("architecture", NAME)
    if name != NAME:
        raise UnsupportedError(f"vision_config.architecture={name!r:.80} is not supported: {NAME} is", param="model")
    given = vision.get("model_args") or {}
    if not isinstance(given, Mapping):
        raise CheckpointError("config.json: vision_config.model_args is no object", param="model")
    for own in given:
        if own != "channel_multiplier":
            raise UnsupportedError(f"vision_config.model_args.{own:.80} is not supported", param="model")
    scale = given.get("channel_multiplier", 1.0)
    expect(scale, number(above=0, most=1), "config.json: vision_config.model_args.channel_multiplier")
    return float(scale)


def _whole(channels: float) -> int:
    """The next multiple of the unit, at most a tenth below."""
    found = max(_UNIT, int(channels + _UNIT / 2) // _UNIT * _UNIT)
    return found + _UNIT if found < 0.9 * channels else found


class Convolution(Layer):
    """A convolution whose output has a place for each `stride` of the input's; `groups`: of channels by themselves."""

    def __init__(
        self,
        ctx: BuildContext,
        inputs: int,
        outputs: int,
        kernel: int = 1,
        *,
        stride: int = 1,
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.weight = Weight(torch.empty(outputs, inputs // groups, kernel, kernel, dtype=ctx.dtype), REPLICATED)
        self.bias = Weight(torch.empty(outputs, dtype=ctx.dtype), REPLICATED) if bias else None
        self.kernel, self.stride, self.groups = kernel, stride, groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inputs, H, W] -> [n, outputs, H / stride, W / stride], rounded up."""
        if self.kernel > 1:
            before, behind = zip(*(self._around(size) for size in x.shape[:1:-1]), strict=True)
            x = F.pad(x, (before[0], behind[0], before[1], behind[1]))
        return F.conv2d(x, self.weight, self.bias, self.stride, groups=self.groups)

    def _around(self, size: int) -> tuple[int, int]:
        """Zeros before and behind a side; one more behind where they are odd."""
        lacking = max(0, (-(-size // self.stride) - 1) * self.stride + self.kernel - size)
        return lacking // 2, lacking - lacking // 2


class ChannelNorm(Layer):
    """An RMS norm of each place's channels."""

    def __init__(self, ctx: BuildContext, channels: int) -> None:
        super().__init__()
        self.weight = Weight(torch.empty(channels, dtype=ctx.dtype), REPLICATED)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, channels, H, W] -> the same."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(1, keepdim=True) + EPS)
        return y.to(x.dtype) * self.weight[:, None, None]


class ConvolutionNorm(Layer):
    """A convolution, its norm, and an activation where `acts`."""

    def __init__(self, ctx: BuildContext, inputs: int, outputs: int, *sizes: int, acts: bool, **own: Any) -> None:
        super().__init__()
        self.conv, self.bn = Convolution(ctx, inputs, outputs, *sizes, **own), ChannelNorm(ctx, outputs)
        self.acts = acts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See Convolution."""
        x = self.bn(self.conv(x))
        return F.gelu(x, approximate="tanh") if self.acts else x


class LayerScale(Layer):
    """A factor of each channel."""

    def __init__(self, ctx: BuildContext, channels: int) -> None:
        super().__init__()
        self.gamma = Weight(torch.empty(channels, dtype=ctx.dtype), REPLICATED)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, channels, H, W] -> the same."""
        return x * self.gamma[:, None, None]


class EdgeBlock(Layer):
    """See Edge."""

    def __init__(self, ctx: BuildContext, inputs: int, outputs: int, own: Edge) -> None:
        super().__init__()
        inner = _whole(4 * inputs)
        self.conv_exp, self.bn1 = Convolution(ctx, inputs, inner, 3, stride=own.stride), ChannelNorm(ctx, inner)
        self.conv_pwl, self.bn2 = Convolution(ctx, inner, outputs), ChannelNorm(ctx, outputs)
        self.adds = inputs == outputs and own.stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inputs, H, W] -> [n, outputs, H / stride, W / stride]."""
        y = F.gelu(self.bn1(self.conv_exp(x)), approximate="tanh")
        y = self.bn2(self.conv_pwl(y))
        return x + y if self.adds else y  # type: ignore[no-any-return]


class InvertedBlock(Layer):
    """See Inverted."""

    def __init__(
        self, ctx: BuildContext, inputs: int, outputs: int, own: Inverted, *, is_scaled: bool = True, adds: bool = True
    ) -> None:
        super().__init__()
        inner, outer_stride = _whole(own.growth * inputs), 1 if own.middle else own.stride
        self.dw_start = self.dw_mid = self.layer_scale = None
        if own.first:
            self.dw_start = ConvolutionNorm(
                ctx, inputs, inputs, own.first, stride=outer_stride, groups=inputs, acts=False
            )
        self.pw_exp = ConvolutionNorm(ctx, inputs, inner, acts=True)
        if own.middle:
            self.dw_mid = ConvolutionNorm(ctx, inner, inner, own.middle, stride=own.stride, groups=inner, acts=True)
        self.pw_proj = ConvolutionNorm(ctx, inner, outputs, acts=False)
        if is_scaled:
            self.layer_scale = LayerScale(ctx, outputs)
        self.adds = adds and inputs == outputs and own.stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inputs, H, W] -> [n, outputs, H / stride, W / stride]."""
        y = self.pw_exp(x if self.dw_start is None else self.dw_start(x))
        y = self.pw_proj(y if self.dw_mid is None else self.dw_mid(y))
        y = y if self.layer_scale is None else self.layer_scale(y)
        return x + y if self.adds else y  # type: ignore[no-any-return]


class SharedHead(Layer):
    """Keys or values, the same for all heads."""

    def __init__(self, ctx: BuildContext, channels: int, own: Attending) -> None:
        super().__init__()
        self.down_conv = self.norm = None
        if own.stride > 1:
            self.down_conv = Convolution(ctx, channels, channels, 3, stride=own.stride, groups=channels)
            self.norm = ChannelNorm(ctx, channels)
        self.proj = Convolution(ctx, channels, own.head_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, channels, H, W] -> [n, 1, places, D]."""
        if self.down_conv is not None and self.norm is not None:
            x = self.norm(self.down_conv(x))
        return self.proj(x).flatten(2).transpose(1, 2)[:, None]  # type: ignore[no-any-return]


class Projection(Layer):
    """A product of each place's channels, under the name that timm gives it."""

    def __init__(self, ctx: BuildContext, inputs: int, outputs: int) -> None:
        super().__init__()
        self.proj = Convolution(ctx, inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inputs, H, W] -> [n, outputs, H, W]."""
        return self.proj(x)  # type: ignore[no-any-return]


class PlaceAttention(Layer):
    """Attention of all places, whose heads read the same keys and values."""

    def __init__(self, ctx: BuildContext, channels: int, own: Attending) -> None:
        super().__init__()
        size = own.heads * own.head_dim
        self.query, self.output = Projection(ctx, channels, size), Projection(ctx, size, channels)
        self.key, self.value = SharedHead(ctx, channels, own), SharedHead(ctx, channels, own)
        self.heads, self.head_dim = own.heads, own.head_dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, channels, H, W] -> the same."""
        n, _, height, width = x.shape
        query = self.query(x).view(n, self.heads, self.head_dim, -1).transpose(2, 3)
        shared = (one.expand(-1, self.heads, -1, -1) for one in (self.key(x), self.value(x)))
        heads = F.scaled_dot_product_attention(query, *shared)
        return self.output(heads.transpose(2, 3).reshape(n, -1, height, width))  # type: ignore[no-any-return]


class AttentionBlock(Layer):
    """See Attending: x + scale * attention(norm(x))."""

    def __init__(self, ctx: BuildContext, channels: int, own: Attending) -> None:
        super().__init__()
        self.norm, self.attn = ChannelNorm(ctx, channels), PlaceAttention(ctx, channels, own)
        self.layer_scale = LayerScale(ctx, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, channels, H, W] -> the same."""
        return x + self.layer_scale(self.attn(self.norm(x)))  # type: ignore[no-any-return]


class Fusion(Layer):
    """The outputs of the last two stages as one, of `SIDE` places along a side."""

    def __init__(self, ctx: BuildContext, inputs: int, outputs: int) -> None:
        super().__init__()
        self.ffn = InvertedBlock(ctx, inputs, outputs, Inverted(outputs, 0, growth=2), is_scaled=False, adds=False)
        self.norm = ChannelNorm(ctx, outputs)

    def forward(self, large: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
        """[n, C, H, W] and [n, D, H / 2, W / 2] -> [n, outputs, SIDE, SIDE]."""
        size = large.shape[2:]
        x = self.ffn(torch.cat((large, F.interpolate(small, size=size, mode="nearest")), 1))
        if any(side % SIDE for side in size):
            x = F.interpolate(x, size=(SIDE, SIDE), mode="bilinear")
        elif size != (SIDE, SIDE):
            x = F.avg_pool2d(x, (size[0] // SIDE, size[1] // SIDE))
        return self.norm(x)  # type: ignore[no-any-return]


class MobileNetV5(Layer):
    """The tower; `scale` multiplies the channels of its stages."""

    def __init__(self, ctx: BuildContext, scale: float, outputs: int) -> None:
        super().__init__()
        self.conv_stem = ConvolutionNorm(ctx, 3, STEM, 3, stride=2, bias=True, acts=True)
        inputs, ends, stages = STEM, list[int](), list[nn.Module]()
        for stage in STAGES:
            blocks = list[nn.Module]()
            for own in stage:
                channels = _whole(own.channels * scale)
                blocks.append(_block(ctx, inputs, channels, own))
                inputs = channels
            stages.append(nn.Sequential(*blocks))
            ends.append(inputs)
        self.blocks = nn.ModuleList(stages)
        self.msfa = Fusion(ctx, sum(ends[-2:]), outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 3, H, W] -> [n, SIDE * SIDE, outputs], row by row."""
        x = self.conv_stem(x)
        ends: list[torch.Tensor] = []
        for stage in self.blocks:
            x = stage(x)
            ends.append(x)
        return self.msfa(*ends[-2:]).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


def _block(ctx: BuildContext, inputs: int, outputs: int, own: Edge | Inverted | Attending) -> Layer:
    if isinstance(own, Edge):
        return EdgeBlock(ctx, inputs, outputs, own)
    if isinstance(own, Inverted):
        return InvertedBlock(ctx, inputs, outputs, own)
    return AttentionBlock(ctx, inputs, own)
