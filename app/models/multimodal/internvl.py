"""InternVL 3 and 3.5, in transformers' layout: tiles of InternViT, four patches to a token."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.layers.layer_norm import LayerNorm
from app.models.multimodal.base import MediaEncoder
from app.models.multimodal.over_text import MediaOverText
from app.models.multimodal.tile_vision import TOWER, TileEncoder, TileSettings, TileVision, merged
from app.models.multimodal.vision_config import Normalization, VisionConfig
from app.models.multimodal.vision_layers import PlainBlock

INTERN_VIT = {
    **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    **{"image_size": 448, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "norm_type": "layer_norm"},
    **{"use_mean_pooling": True, "attention_bias": False, "use_absolute_position_embeddings": True},
}
MODEL = {
    **{"downsample_ratio": 0.5, "projector_hidden_act": "gelu"},
    **{"vision_feature_layer": -1, "vision_feature_select_strategy": "default"},
}
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class InternEncoder(TileEncoder):
    """The tower, its patches merged, a norm and two linear layers."""

    rules = (
        *TOWER,
        (r"^multi_modal_projector\.layer_norm\.", "projector_norm."),
        (r"^multi_modal_projector\.linear_(\d)\.", r"projector.fc\1."),
    )

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, Normalization.of(info, *IMAGENET))
        v, model = VisionConfig(info, INTERN_VIT), VisionConfig.of_model(info, MODEL)
        if model.whole("vision_feature_layer") != -1 or not v.flag("use_absolute_position_embeddings"):
            raise UnsupportedError("vision_feature_layer other than -1, or a tower without positions", param="model")
        self.merge = round(1 / model.number("downsample_ratio"))
        settings = TileSettings(
            v.whole("num_hidden_layers"),
            has_class=True,
            post_norm=not v.flag("use_mean_pooling"),
            scales=True,
            rms=v.text("norm_type") == "rms_norm",
            attention_bias=v.flag("attention_bias"),
            norms_queries=v.flag("use_qk_norm"),
        )
        self.tower = TileVision(ctx, v, settings)
        size, out = self.tower.size * self.merge**2, info.hidden_size
        self.projector_norm = LayerNorm(ctx, size, 1e-5)
        self.projector = PlainBlock(ctx, size, out, model.text("projector_hidden_act"), out=out)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """See TileEncoder."""
        return self.projector(self.projector_norm(merged(hidden, self.merge)))  # type: ignore[no-any-return]

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """The token before the patches and positions are stored as if for a batch."""
        for own, stored in super().own_tensors(name, tensor):
            flat = {"tower.class_token": (-1,), "tower.positions": (-1, self.tower.size)}.get(own)
            yield own, stored if flat is None else stored.reshaped(*flat)


class InternVLForConditionalGeneration(MediaOverText):
    """InternVL over Qwen 2.5 or 3."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return InternEncoder(ctx, info)
