"""LLaVA 1.5 (Liu et al., 2023) and Pixtral: a tower and two linear layers over a language model."""

from __future__ import annotations

import torch

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.models.multimodal.base import MediaEncoder
from app.models.multimodal.over_text import MediaOverText
from app.models.multimodal.pixtral import PixtralEncoder
from app.models.multimodal.tile_vision import CLIP, SIGLIP, TOWER, TileEncoder, TileSettings, TileVision
from app.models.multimodal.vision_config import CLIP_MEAN, CLIP_STD, HALF, Normalization, VisionConfig
from app.models.multimodal.vision_layers import PlainBlock

CLIP_TOWER, SIGLIP_TOWER = "clip_vision_model", "siglip_vision_model"
PROJECTOR = (r"^multi_modal_projector\.linear_(\d)\.", r"projector.fc\1.")


class LlavaEncoder(TileEncoder):
    """CLIP or SigLIP up to a chosen layer, then the projector."""

    rules = (*TOWER, PROJECTOR)

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        mean_std = (CLIP_MEAN, CLIP_STD) if tower_kind(info) == CLIP_TOWER else (HALF, HALF)
        super().__init__(ctx, Normalization.of(info, *mean_std))
        model = VisionConfig.of_model(info, LLAVA)
        self.tower = chosen_tower(ctx, info, model, tower_kind(info))
        self.projector = projector(ctx, self.tower.width, info, model)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """See TileEncoder."""
        return self.projector(hidden)  # type: ignore[no-any-return]


LLAVA = {
    **{"vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
    **{"projector_hidden_act": "gelu", "multimodal_projector_bias": True},
}


def tower_kind(info: ModelInfo, usual: str = CLIP_TOWER) -> str:
    """The model type of the tower; `usual` where config.json does not say it."""
    return str(info.hf_config["vision_config"].get("model_type", usual))


def chosen_tower(ctx: BuildContext, info: ModelInfo, model: VisionConfig, kind: str) -> TileVision:
    """CLIP or SigLIP up to the last of the layers that config.json chooses, whose hidden states stand side by side."""
    if kind not in (CLIP_TOWER, SIGLIP_TOWER):
        raise UnsupportedError(f"{info.architecture} with a tower of type {kind!r}", param="model")
    is_clip = kind == CLIP_TOWER
    if model.text("vision_feature_select_strategy") != ("default" if is_clip else "full"):
        raise UnsupportedError("vision_feature_select_strategy: patches alone are supported", param="model")
    v = VisionConfig(info, CLIP if is_clip else SIGLIP)
    taken = model.depths("vision_feature_layer", v.whole("num_hidden_layers"))
    settings = TileSettings(
        max(taken), has_class=is_clip, patch_bias=not is_clip, pre_norm=is_clip, taken=taken
    )  # fmt: skip
    return TileVision(ctx, v, settings)


def projector(ctx: BuildContext, size: int, info: ModelInfo, model: VisionConfig) -> PlainBlock:
    """Two linear layers up to the text's width."""
    out, bias = info.hidden_size, model.flag("multimodal_projector_bias")
    return PlainBlock(ctx, size, out, model.text("projector_hidden_act"), out=out, bias=bias)


class LlavaForConditionalGeneration(MediaOverText):
    """LLaVA over Llama, Mistral, Qwen; with Pixtral's tower, Pixtral."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return (LlavaPixtralEncoder if tower_kind(info) == "pixtral" else LlavaEncoder)(ctx, info)


class LlavaPixtralEncoder(PixtralEncoder):
    """Every patch of Pixtral's tower is a token."""

    rules = (*PixtralEncoder.rules, PROJECTOR)

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        self.projector = projector(ctx, self.size, info, VisionConfig.of_model(info, LLAVA))

    def project(self, hidden: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
        """See PixtralEncoder."""
        return self.projector(hidden)  # type: ignore[no-any-return]
