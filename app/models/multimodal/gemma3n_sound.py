"""Gemma 3n's ears: Gemma 4's layers, over frames normed by all that was heard before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from app.checkpoints.fields.kinds import check
from app.checkpoints.fields.sound_json import SOUND_FIELDS
from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError, UnsupportedError
from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.replicated import ReplicatedLinear
from app.layers.weight import REPLICATED, Weight
from app.media.audio.gemma import SOUND_TOKENS
from app.models.multimodal.base import MediaEncoder, Picture
from app.models.multimodal.gemma3n_embedder import RULES, Embedder
from app.models.multimodal.gemma_sound import EPS, ConformerLayer, EarSettings

Grid = tuple[int, int, int]
Pair = tuple[int, int]


def settings_of(own: Mapping[str, Any], where: str) -> EarSettings:
    """Read sizes and bounds. CheckpointError names a field that is unusable."""
    check(own, SOUND_FIELDS, where)
    if own.get("conf_attention_context_right", 0):
        raise UnsupportedError(f"{where}.conf_attention_context_right other than 0 is not supported", param="model")
    if any(stride != 2 for strides in own.get("sscp_conv_stride_size", ()) for stride in strides):
        raise UnsupportedError(f"{where}.sscp_conv_stride_size other than 2 is not supported", param="model")
    channels = own.get("sscp_conv_channel_size", (128, 32))
    return EarSettings(
        int(own.get("hidden_size", 1536)),
        int(own.get("conf_num_hidden_layers", 12)),
        int(own.get("conf_num_attention_heads", 8)),
        int(own.get("conf_attention_context_left", 13)),
        float(own.get("conf_attention_logit_cap", 50.0)),
        int(own.get("conf_conv_kernel_size", 5)),
        (int(channels[0]), int(channels[1])),
        float(own.get("conf_residual_weight", 0.5)),
        float(own.get("gradient_clipping", 1e10)),
        float(own.get("rms_norm_eps", EPS)),
        "silu",
        clips=False,
        key_scale=1.0,
    ).checked(where)


class HeardNorm(Layer):
    """Norms each frame's numbers by mean and deviation of its own and all frames before it, as far as they are known
    then: squares are of distances from each frame's own mean."""

    def __init__(self, ctx: BuildContext, channels: int, eps: float) -> None:
        super().__init__()
        self.weight = Weight(torch.empty(channels, dtype=ctx.dtype), REPLICATED)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, channels, frames, mels] -> the same."""
        y = x.float()
        counts = torch.arange(1, x.shape[2] + 1, device=x.device)[:, None] * (x.shape[1] * x.shape[3])
        apart = y - y.sum((1, 3), keepdim=True).cumsum(2) / counts
        squares = apart.square().sum((1, 3), keepdim=True).cumsum(2) / counts
        normed = apart * torch.rsqrt(squares + self.eps) * self.weight.float()[:, None, None]
        return normed.to(x.dtype)


class AheadConvolution(Layer):
    """A convolution that keeps every second frame and mel, from the frames behind it, and its norm."""

    def __init__(self, ctx: BuildContext, inputs: int, outputs: int, kernel: Pair, eps: float) -> None:
        super().__init__()
        self.weight = Weight(torch.empty(outputs, inputs, *kernel, dtype=ctx.dtype), REPLICATED)
        self.norm, self.kernel = HeardNorm(ctx, outputs, eps), kernel

    def mels(self, given: int) -> int:
        """Mels that come out."""
        return (given + 2 - self.kernel[1]) // 2 + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, inputs, frames, mels] -> [1, outputs, frames / 2, mels / 2]."""
        padded = F.pad(x, (1, 1, 0, self.kernel[0] - 1))
        return F.relu(self.norm(F.conv2d(padded, self.weight, stride=2)))


class Gemma3nEars(MediaEncoder):
    """Each sound goes through the tower alone; behind what was heard stands one token as often as one of the longest
    sounds would have more."""

    rules = (
        *RULES,
        (r"^audio_tower\.", ""),
        (r"^subsample_conv_projection\.conv_(\d)\.conv\.", r"convolutions.\1."),
        (r"^subsample_conv_projection\.conv_(\d)\.norm\.", r"convolutions.\1.norm."),
        (r"^subsample_conv_projection\.", ""),
        (r"^conformer\.", "layers."),
        (r"\.ffw_layer_start\.", ".feed_forward1."),
        (r"\.ffw_layer_end\.", ".feed_forward2."),
        (r"\.attention\.pre_attn_norm\.", ".norm_pre_attn."),
        (r"\.attention\.post_norm\.", ".norm_post_attn."),
        (r"\.attention\.attn\.relative_position_embedding\.pos_proj\.", ".self_attn.relative_k_proj."),
        (r"\.attention\.(attn\.)?", ".self_attn."),
        (r"^(layers\.\d+)\.norm\.", r"\1.norm_out."),
        (r"\.depthwise_conv1d\.weight$", ".depthwise_conv1d"),
        (r"\.(ffw_layer_[12]|[qkv]_proj|post|linear_start|linear_end)\.weight$", r".\1.linear.weight"),
    )

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        own, where = info.hf_config["audio_config"], f"{info.directory}/config.json: audio_config"
        s = settings_of(own, where)
        self.num_mels, self.device, self.dtype = int(own.get("input_feat_size", 128)), ctx.device, ctx.dtype
        kernels: Sequence[Pair] = [(high, wide) for high, wide in own.get("sscp_conv_kernel_size", ((3, 3), (3, 3)))]
        eps, (first, second) = float(own.get("sscp_conv_group_norm_eps", 1e-3)), s.channels
        before = AheadConvolution(ctx, 1, first, kernels[0], eps)
        behind = AheadConvolution(ctx, first, second, kernels[1], eps)
        mels = behind.mels(before.mels(self.num_mels))
        if mels < 1:
            raise CheckpointError(f"{where}: input_feat_size={self.num_mels} leaves no mels", param="model")
        self.convolutions = nn.ModuleList((before, behind))
        self.input_proj_linear = ReplicatedLinear(ctx, mels * second, s.size, bias=False)
        self.layers = nn.ModuleList(ConformerLayer(ctx, s) for _ in range(s.num_layers))
        self.step = int(own.get("conf_reduction_factor", 4))
        self.embedder = Embedder(ctx, info, own, s.size, where)
        self.filling = self.embedder.place_of(info.vocab_size - 1, where)
        self.each = int(info.hf_config.get("audio_soft_tokens_per_image") or SOUND_TOKENS)

    def forward(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """See MediaEncoder."""
        heard = [self._heard(sound.pixels.to(self.dtype)) for sound in pictures]
        embedded = self.embedder(torch.cat(heard)).split([len(one) for one in heard])
        filling = self.embedder.rows[self.filling : self.filling + 1]
        whole = [torch.cat((one, filling.expand(self.each - len(one), -1))) for one in embedded]
        return torch.cat(whole)[None]

    def _heard(self, features: torch.Tensor) -> torch.Tensor:
        """[mels, frames] -> [n, C]."""
        x = features.T[None, None]
        for convolution in self.convolutions:
            x = convolution(x)
        x = self.input_proj_linear(x[0].permute(1, 2, 0).flatten(1))
        for layer in self.layers:
            x = layer(x)
        return x[:: self.step]  # type: ignore[no-any-return]

    def num_tokens(self, grid: Grid) -> int:
        """See MediaEncoder."""
        return self.each

    def largest(self, num_tokens: int) -> Picture:
        """See MediaEncoder."""
        frames = min(3_000, 4 * self.step * self.each)
        return Picture(torch.zeros(self.num_mels, frames, device=self.device), (1, 1, frames))
