"""Gemma 3 with pictures: SigLIP's tile, pooled to 256 tokens that see each other."""

from __future__ import annotations

from dataclasses import replace

import torch

from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError
from app.layers.context import BuildContext
from app.layers.offset_norm import OffsetRMSNorm
from app.layers.weight import REPLICATED, Weight
from app.models.blocks import Blocks, picture_attention
from app.models.families.gemma3 import Gemma3ForCausalLM
from app.models.multimodal.base import MediaEncoder, MediaModel
from app.models.multimodal.tile_vision import SIGLIP, TOWER, TileEncoder, TileSettings, TileVision
from app.models.multimodal.vision_config import HALF, Normalization, VisionConfig


class Gemma3Encoder(TileEncoder):
    """The tower, the mean of each square of patches, a norm and a product."""

    rules = (
        *TOWER,
        (r"^multi_modal_projector\.mm_soft_emb_norm\.", "soft_norm."),
        (r"^multi_modal_projector\.mm_input_projection_weight$", "projection"),
    )

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, Normalization.of(info, HALF, HALF))
        v, model = VisionConfig(info, SIGLIP), VisionConfig.of_model(info, {"mm_tokens_per_image": 256})
        self.tower = TileVision(ctx, v, TileSettings(v.whole("num_hidden_layers"), post_norm=True))
        tokens, side = round(model.whole("mm_tokens_per_image") ** 0.5), self.tower.side // self.tower.patch
        if side % tokens:
            raise CheckpointError(f"{info.directory}: mm_tokens_per_image: {side} patches by {tokens}", param="model")
        self.merge = side // tokens
        self.soft_norm = OffsetRMSNorm(ctx, self.tower.size, v.number("layer_norm_eps"))
        self.projection = Weight(torch.empty(self.tower.size, info.hidden_size, dtype=ctx.dtype), REPLICATED)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """See TileEncoder."""
        n, count, size = hidden.shape
        side = int(count**0.5) // self.merge
        pooled = hidden.reshape(n, side, self.merge, side, self.merge, size).mean((2, 4)).flatten(1, 2)
        tokens: torch.Tensor = self.soft_norm(pooled) @ self.projection
        return tokens


class Gemma3ForConditionalGeneration(MediaModel, Gemma3ForCausalLM):
    """Gemma 3 of 4B and more; of a checkpoint without an encoder, its text."""

    seen_both_ways = True

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """See CausalLM."""
        return replace(super().blocks_of(info), attention=picture_attention)

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return Gemma3Encoder(ctx, info)
