"""Idefics 3 and SmolVLM (Marafioti et al., 2025): SigLIP's tiles, squares of patches to a token by one product."""

from __future__ import annotations

import torch

from app.checkpoints.model_info import ModelInfo
from app.layers.context import BuildContext
from app.layers.replicated import ReplicatedLinear
from app.models.multimodal.base import MediaEncoder
from app.models.multimodal.over_text import MediaOverText
from app.models.multimodal.tile_vision import SIGLIP, TOWER, TileEncoder, TileSettings, TileVision, merged
from app.models.multimodal.vision_config import HALF, Normalization, VisionConfig

IDEFICS3 = {**SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}


class Idefics3Encoder(TileEncoder):
    """The tower and the connector."""

    rules = (*TOWER, (r"^connector\.modality_projection\.proj\.", "projector."))

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, Normalization.of(info, HALF, HALF))
        v, model = VisionConfig(info, IDEFICS3), VisionConfig.of_model(info, {"scale_factor": 2})
        self.merge = model.whole("scale_factor")
        self.tower = TileVision(ctx, v, TileSettings(v.whole("num_hidden_layers"), post_norm=True))
        self.projector = ReplicatedLinear(ctx, self.tower.size * self.merge**2, info.hidden_size, bias=False)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """See TileEncoder."""
        return self.projector(merged(hidden, self.merge))  # type: ignore[no-any-return]


class Idefics3ForConditionalGeneration(MediaOverText):
    """Idefics 3 over Llama, and SmolVLM."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return Idefics3Encoder(ctx, info)
