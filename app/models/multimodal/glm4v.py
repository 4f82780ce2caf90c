"""GLM-4.1V, 4.5V and 4.6V: GLM-OCR's encoder with learned positions and without norms of heads, over GLM-4's layers or
GLM-4.5's."""

from __future__ import annotations

from dataclasses import replace

import torch

from app.checkpoints.model_info import ModelInfo
from app.layers.context import BuildContext
from app.layers.norm import RMSNorm
from app.layers.weight import REPLICATED, Weight
from app.models.decoder import Ropes
from app.models.decoder_settings import DecoderSettings
from app.models.families.glm4 import Glm4ForCausalLM
from app.models.families.glm4_moe import Glm4MoeForCausalLM
from app.models.multimodal.base import MediaEncoder, MediaModel
from app.models.multimodal.glm_ocr import SECTIONS, GlmOcrVision
from app.models.multimodal.qwen_vision import Grid, GridTables, stretched, with_sections
from app.models.multimodal.vision_config import VisionConfig
from app.models.multimodal.vision_layers import FusedAttention, GatedBlock, PatchEmbedding, VisionBlock

GLM4V = {
    **{"depth": 24, "hidden_size": 1536, "intermediate_size": 13_696, "num_heads": 12, "out_hidden_size": 4096},
    **{"image_size": 336, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2},
    **{"hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False},
}


class NormedPatches(PatchEmbedding):
    """A norm behind the product."""

    def __init__(self, ctx: BuildContext, size: int, patch: tuple[int, ...], eps: float) -> None:
        super().__init__(ctx, size, patch, bias=True)
        self.norm = RMSNorm(ctx, size, eps)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """[T, *patch] -> [T, size]."""
        return self.norm(super().forward(patches))  # type: ignore[no-any-return]


class Glm4vVision(GlmOcrVision):
    """See the head of this file."""

    rules = (
        *GlmOcrVision.rules,
        (r"^post_conv_layernorm\.", "patch_embed.norm."),
        (r"^embeddings\.position_embedding\.weight$", "positions"),
    )
    defaults = GLM4V

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        v = VisionConfig(info, self.defaults)
        self.side = v.side("image_size") // self.patch
        self.positions = Weight(torch.empty(self.side**2, self.size, dtype=ctx.dtype), REPLICATED)

    def patches(self, ctx: BuildContext, v: VisionConfig, patch: tuple[int, ...]) -> PatchEmbedding:
        """See GlmOcrVision."""
        return NormedPatches(ctx, self.size, patch, v.number("rms_norm_eps"))

    def block(self, ctx: BuildContext, v: VisionConfig) -> VisionBlock:
        """See GlmOcrVision."""
        size, eps = self.size, v.number("rms_norm_eps")
        return VisionBlock(
            (RMSNorm(ctx, size, eps), RMSNorm(ctx, size, eps)),
            FusedAttention(ctx, size, v.whole("num_heads"), bias=v.flag("attention_bias"), output_bias=False),
            GatedBlock(ctx, size, v.whole("out_hidden_size"), v.text("hidden_act"), bias=False),
        )

    def merged_inner(self, v: VisionConfig) -> int:
        """See GlmOcrVision."""
        return v.whole("intermediate_size")

    def placed(self, table: GridTables, grid: Grid) -> torch.Tensor:
        """See GridVision."""
        return stretched(self.positions.view(self.side, self.side, self.size), grid, self.merge)


class Glm4vModel(MediaModel):
    """Joins the encoder and positions of three axes to the text of either generation."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return Glm4vVision(ctx, info)

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """See CausalLM."""
        return with_sections(info, super().ropes(info, settings, max_model_len), SECTIONS)


class Glm4vForConditionalGeneration(Glm4vModel, Glm4ForCausalLM):
    """GLM-4.1V and 4.6V-Flash."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """See CausalLM."""
        settings = DecoderSettings.from_info(info, norm_eps=1e-5)
        turned = Glm4vForConditionalGeneration.ropes(info, settings, 1)("").dim
        return replace(settings, rotary_dim=turned, qkv_bias=bool(info.hf_config.get("attention_bias", True)))


class Glm4vMoeForConditionalGeneration(Glm4vModel, Glm4MoeForCausalLM):
    """GLM-4.5V and 4.6V."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """See CausalLM."""
        return replace(Glm4MoeForCausalLM.settings(info), qkv_bias=bool(info.hf_config.get("attention_bias", True)))
