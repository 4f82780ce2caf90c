"""Command A Vision (Cohere, 2025): SigLIP's tiles, squares of patches to a token by a gated block, over Command A."""

from __future__ import annotations

import torch

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.models.multimodal.aya_vision import AyaVisionForConditionalGeneration, GatedTiles
from app.models.multimodal.base import MediaEncoder
from app.models.multimodal.llava import SIGLIP_TOWER, tower_kind
from app.models.multimodal.tile_vision import SIGLIP, TileSettings, TileVision, merged
from app.models.multimodal.vision_config import CLIP_MEAN, CLIP_STD, Normalization, VisionConfig

MODEL = {"downsample_factor": 2, "alignment_intermediate_size": 36_864}


class Cohere2VisionEncoder(GatedTiles):
    """The tower with its last norm, its patches merged, and a linear layer on both sides of a gate."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, Normalization.of(info, CLIP_MEAN, CLIP_STD))
        if (kind := tower_kind(info, SIGLIP_TOWER)) != SIGLIP_TOWER:
            raise UnsupportedError(f"{info.architecture} with a tower of type {kind!r}", param="model")
        v = VisionConfig(info, SIGLIP)
        self.tower = TileVision(ctx, v, TileSettings(v.whole("num_hidden_layers"), post_norm=True))
        self.add_projector(ctx, info, VisionConfig.of_model(info, MODEL))

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """See TileEncoder."""
        return self.gated(merged(hidden, self.merge))


class Cohere2VisionForConditionalGeneration(AyaVisionForConditionalGeneration):
    """Command A Vision."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return Cohere2VisionEncoder(ctx, info)
