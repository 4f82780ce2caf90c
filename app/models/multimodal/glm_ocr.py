"""GLM-OCR: an encoder whose queries and keys are normed, four patches to a token by a convolution, over GLM-4's layers
with sections of positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, is_behind_last_layer
from app.kernels.fused.reference import rotate
from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.layer_norm import LayerNorm
from app.layers.norm import RMSNorm
from app.layers.replicated import ReplicatedLinear
from app.models.decoder import Ropes
from app.models.decoder_settings import DecoderSettings
from app.models.families.glm4 import Glm4ForCausalLM
from app.models.multimodal.base import MediaEncoder, MediaModel
from app.models.multimodal.qwen_vision import GridVision, heads_of, with_sections
from app.models.multimodal.vision_config import CLIP_MEAN, CLIP_STD, Normalization, VisionConfig
from app.models.multimodal.vision_layers import GatedBlock, PatchEmbedding, Span, VisionBlock

GLM_OCR = {
    **{"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 1536},
    **{"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "hidden_act": "silu"},
    **{"rms_norm_eps": 1e-5, "attention_bias": True, "in_channels": 3},
}
SECTIONS = (8, 12, 12)


class GlmAttention(Layer):
    """One product for queries, keys and values; the norms are of each head."""

    def __init__(self, ctx: BuildContext, size: int, num_heads: int, eps: float, *, bias: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, size // num_heads
        self.qkv = ReplicatedLinear(ctx, size, 3 * size, bias)
        self.proj = ReplicatedLinear(ctx, size, size, bias)
        self.q_norm, self.k_norm = (RMSNorm(ctx, self.head_dim, eps) for _ in range(2))

    def forward(self, x: torch.Tensor, span: Span) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        assert span.cos is not None
        assert span.sin is not None
        query, key, value = self.qkv(x).view(len(x), 3, self.num_heads, self.head_dim).unbind(1)
        query, key = (rotate(norm(one), span.cos, span.sin) for norm, one in ((self.q_norm, query), (self.k_norm, key)))
        out = span.plan.attend(query, key, value, self.head_dim**-0.5)
        return self.proj(out.flatten(1))  # type: ignore[no-any-return]


class GlmMerger(GatedBlock):
    """down(act(gate(y)) * up(y)) of y = gelu(norm(proj(x)))."""

    def __init__(self, ctx: BuildContext, size: int, inner: int, act: str) -> None:
        super().__init__(ctx, size, inner, act, bias=False)
        self.proj = ReplicatedLinear(ctx, size, size, bias=False)
        self.post_projection_norm = LayerNorm(ctx, size, 1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        return super().forward(F.gelu(self.post_projection_norm(self.proj(x))))


class GlmOcrVision(GridVision):
    """See the head of this file."""

    rules: ClassVar[Sequence[Rule]] = ((r"^visual\.", ""), (r"^patch_embed\.proj\.", "patch_embed."))
    defaults: ClassVar[Mapping[str, Any]] = GLM_OCR

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        v = VisionConfig(info, self.defaults)
        size, out = v.whole("hidden_size"), v.whole("out_hidden_size")
        self.size, self.head_dim = size, heads_of(size, v.whole("num_heads"), info)
        self.dtype, self.device = ctx.dtype, ctx.device
        self.patch, self.frames = v.side("patch_size"), v.whole("temporal_patch_size")
        self.merge = v.whole("spatial_merge_size")
        self.normalization = Normalization.of(info, CLIP_MEAN, CLIP_STD)
        self.patch_embed = self.patches(ctx, v, (3, self.frames, self.patch, self.patch))
        self.blocks = nn.ModuleList(self.block(ctx, v) for _ in range(v.whole("depth")))
        self.post_layernorm = RMSNorm(ctx, size, v.number("rms_norm_eps"))
        self.downsample = PatchEmbedding(ctx, out, (size, self.merge, self.merge), bias=True)
        self.merger = GlmMerger(ctx, out, self.merged_inner(v), v.text("hidden_act"))

    def patches(self, ctx: BuildContext, v: VisionConfig, patch: tuple[int, ...]) -> PatchEmbedding:
        """Embeds patches."""
        return PatchEmbedding(ctx, self.size, patch, bias=True)

    def block(self, ctx: BuildContext, v: VisionConfig) -> VisionBlock:
        """One of the blocks."""
        eps, bias = v.number("rms_norm_eps"), v.flag("attention_bias")
        return VisionBlock(
            (RMSNorm(ctx, self.size, eps), RMSNorm(ctx, self.size, eps)),
            GlmAttention(ctx, self.size, v.whole("num_heads"), eps, bias=bias),
            GatedBlock(ctx, self.size, v.whole("intermediate_size"), v.text("hidden_act"), bias=bias),
        )

    def merged_inner(self, v: VisionConfig) -> int:
        """The inner width of the merger."""
        return v.whole("out_hidden_size") * v.whole("in_channels")

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """See GridVision."""
        squares = self.post_layernorm(x).view(-1, self.merge**2, self.size).transpose(1, 2)
        return self.merger(self.downsample(squares))  # type: ignore[no-any-return]


class GlmOcrForConditionalGeneration(MediaModel, Glm4ForCausalLM):
    """A layer that predicts further tokens, behind the last, is left out."""

    rope_defaults = MappingProxyType({})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json; whole heads turn where it does not say otherwise."""
        settings = DecoderSettings.from_info(info, norm_eps=1e-5)
        ropes = GlmOcrForConditionalGeneration.ropes(info, settings, 1)
        return replace(settings, rotary_dim=ropes("").dim)

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return GlmOcrVision(ctx, info)

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """See CausalLM."""
        return with_sections(info, super().ropes(info, settings, max_model_len), SECTIONS)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See Glm4ForCausalLM."""
        is_behind = is_behind_last_layer(name, settings.num_layers)
        return [] if is_behind else Glm4ForCausalLM.tensors(settings, name, tensor)
