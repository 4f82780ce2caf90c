"""ColPali (Faysse et al., 2024): a vector of each token of a page's picture, by PaliGemma (Beyer et al., 2024).

PaliGemma's own answers are not written here: a picture and the words behind it see each other, which is all of a page.
"""

from __future__ import annotations

import torch

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.layers.replicated import ReplicatedLinear
from app.models.decoder import CausalLM
from app.models.families.gemma import GemmaForCausalLM
from app.models.multimodal.base import MediaEncoder, MediaModel
from app.models.multimodal.page_retrieval import PageRetrieval
from app.models.multimodal.tile_vision import SIGLIP, TOWER, TileEncoder, TileSettings, TileVision
from app.models.multimodal.vision_config import HALF, Normalization, VisionConfig


class PaliGemmaEncoder(TileEncoder):
    """The tower, and a product for each patch."""

    rules = (*TOWER, (r"^multi_modal_projector\.linear\.", "projector."))

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, Normalization.of(info, HALF, HALF))
        v = VisionConfig(info, SIGLIP)
        self.tower = TileVision(ctx, v, TileSettings(v.whole("num_hidden_layers"), post_norm=True))
        self.projector = ReplicatedLinear(ctx, self.tower.size, info.hidden_size)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """See TileEncoder."""
        return self.projector(hidden)  # type: ignore[no-any-return]


class PaliGemma(MediaModel, GemmaForCausalLM):
    """Gemma with pictures."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return PaliGemmaEncoder(ctx, info)


class ColPaliForRetrieval(PageRetrieval):
    """Over the first PaliGemma."""

    @staticmethod
    def family_of(info: ModelInfo) -> type[CausalLM]:
        """See DecoderForPooling."""
        kinds = info.hf_config.get("model_type"), info.hf_config.get("text_model_type")
        if kinds != ("paligemma", "gemma"):
            raise UnsupportedError(f"{info.architecture} over a model of types {kinds!r:.80}", param="model")
        return PaliGemma
