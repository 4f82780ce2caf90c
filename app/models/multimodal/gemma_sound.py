"""The encoders of sounds of Gemma 3n and 4 (after the Universal Speech Model, Zhang et al., 2023): two convolutions,
layers of attention to the last dozen positions and of convolutions (Conformer: Gulati et al., 2020)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from app.checkpoints.fields.kinds import check
from app.checkpoints.fields.sound_json import SOUND_FIELDS
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import CheckpointError, UnsupportedError
from app.layers.activation import activation
from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.layer_norm import LayerNorm
from app.layers.norm import RMSNorm
from app.layers.replicated import ReplicatedLinear
from app.layers.sinusoidal import SinusoidalPositions
from app.layers.weight import REPLICATED, Weight
from app.media.audio.qwen_omni import halved
from app.models.multimodal.base import MediaEncoder, Picture
from app.models.multimodal.clipped_linear import BOUNDS, ClippedLinear

Grid = tuple[int, int, int]
EPS = 1e-6


@dataclass(slots=True, frozen=True)
class EarSettings:
    """Sizes and bounds of a tower."""

    size: int
    num_layers: int
    num_heads: int
    seen: int  # positions that one attends to, its own included
    soft_cap: float
    kernel: int  # positions that a convolution of a layer reads
    channels: tuple[int, int]
    share: float  # of a feed-forward layer's output
    bound: float  # of hidden states
    eps: float
    act: str
    clips: bool
    key_scale: float

    @classmethod
    def of(cls, own: Mapping[str, Any], where: str) -> EarSettings:
        """Read them. CheckpointError names a field that is unusable."""
        check(own, SOUND_FIELDS, where)
        channels = tuple(own.get("subsampling_conv_channels", (128, 32)))
        if own.get("attention_context_right", 0):
            raise UnsupportedError(f"{where}.attention_context_right other than 0 is not supported", param="model")
        return cls(
            int(own.get("hidden_size", 1024)),
            int(own.get("num_hidden_layers", 12)),
            int(own.get("num_attention_heads", 8)),
            int(own.get("attention_context_left", 13)) - 1,
            float(own.get("attention_logit_cap", 50.0)),
            int(own.get("conv_kernel_size", 5)),
            (int(channels[0]), int(channels[1])),
            float(own.get("residual_weight", 0.5)),
            float(own.get("gradient_clipping", 1e10)),
            float(own.get("rms_norm_eps", EPS)),
            str(own.get("hidden_act", "silu")),
            bool(own.get("use_clipped_linears", True)),
            math.log(1 + math.e) / math.log(2),
        ).checked(where)

    def checked(self, where: str) -> EarSettings:
        """The same; CheckpointError where heads do not share the size out."""
        if self.size % self.num_heads or self.size % 2:
            raise CheckpointError(f"{where}: {self.num_heads} heads of {self.size}", param="model")
        return self


class HalvingConvolution(Layer):
    """A convolution that keeps every second frame and mel, and the norm of each place's channels."""

    def __init__(self, ctx: BuildContext, inputs: int, outputs: int, eps: float) -> None:
        super().__init__()
        self.weight = Weight(torch.empty(outputs, inputs, 3, 3, dtype=ctx.dtype), REPLICATED)
        self.norm = LayerNorm(ctx, outputs, eps, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, inputs, frames, mels] -> [1, outputs, frames / 2, mels / 2]."""
        x = F.conv2d(x, self.weight, stride=2, padding=1)
        return F.relu(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


class RecentAttention(Layer):
    """Attention of each position to itself and a few before it, with a learned score for how far they are apart."""

    def __init__(self, ctx: BuildContext, s: EarSettings) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.seen, self.soft_cap = s.num_heads, s.size // s.num_heads, s.seen, s.soft_cap
        self.q_proj, self.k_proj, self.v_proj, self.post = (
            ClippedLinear(ctx, s.size, s.size, s.clips) for _ in range(4)
        )
        self.relative_k_proj = ReplicatedLinear(ctx, s.size, s.size, bias=False)
        self.per_dim_scale = Weight(torch.empty(self.head_dim, dtype=ctx.dtype), REPLICATED)
        self.q_scale, self.k_scale = self.head_dim**-0.5 / math.log(2), s.key_scale
        self._apart = SinusoidalPositions(s.seen, s.size, -1, ctx.dtype, ctx.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, C] -> [n, C]."""
        query, key, value = (
            proj(x).float().view(-1, self.num_heads, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = query * self.q_scale * F.softplus(self.per_dim_scale.float())
        keys, values = self._recent(key * self.k_scale), self._recent(value)
        apart = self.relative_k_proj(self._apart.table).float().view(self.seen, self.num_heads, self.head_dim)
        scores = torch.einsum("nhd,nhds->nhs", query, keys) + torch.einsum("nhd,shd->nhs", query, apart.flip(0))
        scores = torch.tanh(scores / self.soft_cap) * self.soft_cap
        places = torch.arange(len(x), device=x.device)[:, None] - torch.arange(self.seen - 1, -1, -1, device=x.device)
        scores = scores.masked_fill((places < 0)[:, None], -torch.inf)
        out = torch.einsum("nhs,nhds->nhd", scores.softmax(-1), values)
        return self.post(out.flatten(1).to(x.dtype))  # type: ignore[no-any-return]

    def _recent(self, heads: torch.Tensor) -> torch.Tensor:
        """[n, H, D] -> [n, H, D, seen], the position itself last."""
        return F.pad(heads, (0, 0, 0, 0, self.seen - 1, 0)).unfold(0, self.seen, 1)


class HalfFeedForward(Layer):
    """x + share * norm(down(act(up(norm(x)))))."""

    def __init__(self, ctx: BuildContext, s: EarSettings) -> None:
        super().__init__()
        self.ffw_layer_1 = ClippedLinear(ctx, s.size, 4 * s.size, s.clips)
        self.ffw_layer_2 = ClippedLinear(ctx, 4 * s.size, s.size, s.clips)
        self.pre_layer_norm, self.post_layer_norm = (RMSNorm(ctx, s.size, EPS) for _ in range(2))
        self.act, self.share, self.bound = activation(s.act), s.share, s.bound

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, C] -> [n, C]."""
        y = self.ffw_layer_2(self.act(self.ffw_layer_1(self.pre_layer_norm(bounded(x, self.bound)))))
        return x + self.post_layer_norm(bounded(y, self.bound)) * self.share  # type: ignore[no-any-return]


class RecentConvolution(Layer):
    """x + end(act(norm(convolution of each channel(gate(start(norm(x)))))))."""

    def __init__(self, ctx: BuildContext, s: EarSettings) -> None:
        super().__init__()
        self.linear_start = ClippedLinear(ctx, s.size, 2 * s.size, s.clips)
        self.linear_end = ClippedLinear(ctx, s.size, s.size, s.clips)
        self.depthwise_conv1d = Weight(torch.empty(s.size, 1, s.kernel, dtype=ctx.dtype), REPLICATED)
        self.pre_layer_norm, self.conv_norm = (RMSNorm(ctx, s.size, s.eps) for _ in range(2))
        self.act, self.bound = activation(s.act), s.bound

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, C] -> [n, C]."""
        y = F.glu(self.linear_start(self.pre_layer_norm(x)), dim=-1).T
        weight = self.depthwise_conv1d
        y = F.conv1d(F.pad(y, (weight.shape[2] - 1, 0))[None], weight, groups=len(weight))[0].T
        return x + self.linear_end(self.act(self.conv_norm(bounded(y, self.bound))))  # type: ignore[no-any-return]


class ConformerLayer(Layer):
    """Half a feed-forward layer, attention, a convolution, half a feed-forward layer, a norm."""

    def __init__(self, ctx: BuildContext, s: EarSettings) -> None:
        super().__init__()
        self.feed_forward1, self.feed_forward2 = (HalfFeedForward(ctx, s) for _ in range(2))
        self.self_attn, self.lconv1d = RecentAttention(ctx, s), RecentConvolution(ctx, s)
        self.norm_pre_attn, self.norm_post_attn, self.norm_out = (RMSNorm(ctx, s.size, EPS) for _ in range(3))
        self.bound = s.bound

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, C] -> [n, C]."""
        x = self.feed_forward1(x)
        heard = self.self_attn(self.norm_pre_attn(bounded(x, self.bound)))
        x = x + self.norm_post_attn(bounded(heard, self.bound))
        x = self.feed_forward2(self.lconv1d(x))
        return self.norm_out(bounded(x, self.bound))  # type: ignore[no-any-return]


class Gemma4Ears(MediaEncoder):
    """Each sound goes through the tower alone."""

    rules = (
        (r"^audio_tower\.", ""),
        (r"^subsample_conv_projection\.layer(\d)\.conv\.", r"convolutions.\1."),
        (r"^subsample_conv_projection\.layer(\d)\.norm\.", r"convolutions.\1.norm."),
        (r"^subsample_conv_projection\.", ""),
        (r"\.depthwise_conv1d\.weight$", ".depthwise_conv1d"),
        (r"^embed_audio\.embedding_projection\.", "projection."),
    )

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        own = info.hf_config["audio_config"]
        self.settings = s = EarSettings.of(own, f"{info.directory}/config.json: audio_config")
        self.num_mels, self.device, self.dtype = s.channels[0], ctx.device, ctx.dtype
        first, second = s.channels
        self.convolutions = nn.ModuleList(
            (HalvingConvolution(ctx, 1, first, s.eps), HalvingConvolution(ctx, first, second, s.eps))
        )
        self.input_proj_linear = ReplicatedLinear(ctx, first // 4 * second, s.size, bias=False)
        self.layers = nn.ModuleList(ConformerLayer(ctx, s) for _ in range(s.num_layers))
        self.out = int(own.get("output_proj_dims", 1536))
        self.output_proj = ReplicatedLinear(ctx, s.size, self.out)
        self.projection = ReplicatedLinear(ctx, self.out, info.hidden_size, bias=False)

    def forward(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """See MediaEncoder."""
        heard = torch.cat([self._heard(sound.pixels.to(self.dtype)) for sound in pictures])
        normed = F.rms_norm(self.output_proj(heard), (self.out,), None, self.settings.eps)
        return self.projection(normed)[None]  # type: ignore[no-any-return]

    def _heard(self, features: torch.Tensor) -> torch.Tensor:
        """[mels, frames] -> [n, C]."""
        x = features.T[None, None]
        for convolution in self.convolutions:
            x = convolution(x)
        x = self.input_proj_linear(x[0].permute(1, 2, 0).flatten(1))
        for layer in self.layers:
            x = layer(x)
        return x  # type: ignore[no-any-return]

    def num_tokens(self, grid: Grid) -> int:
        """See MediaEncoder."""
        return halved(grid[2], 2)

    def largest(self, num_tokens: int) -> Picture:
        """See MediaEncoder."""
        frames = max(4, min(3_000, 4 * num_tokens))
        return Picture(torch.zeros(self.num_mels, frames, device=self.device), (1, 1, frames))

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See MediaEncoder; bounds are stored as numbers, not as tensors of one."""
        for own, stored in super().own_tensors(name, tensor):
            yield own, stored.reshaped(1) if own.endswith(BOUNDS) else stored


def bounded(x: torch.Tensor, bound: float) -> torch.Tensor:
    """Numbers that stay within a bound, or within their type's."""
    bound = min(bound, torch.finfo(x.dtype).max)
    return x.clamp(-bound, bound)
