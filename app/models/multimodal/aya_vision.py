"""Aya Vision (Cohere Labs, 2025): SigLIP's tiles, squares of patches to a token by a gated block, over Command R7B."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.names import Rule
from app.layers.context import BuildContext
from app.layers.layer_norm import LayerNorm
from app.layers.replicated import ReplicatedLinear
from app.models.decoder_settings import DecoderSettings
from app.models.families.cohere import Cohere2ForCausalLM
from app.models.multimodal.base import MediaEncoder, MediaModel
from app.models.multimodal.llava import SIGLIP_TOWER, chosen_tower, tower_kind
from app.models.multimodal.tile_vision import TOWER, TileEncoder, merged
from app.models.multimodal.vision_config import HALF, Normalization, VisionConfig

MODEL = {
    **{"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    **{"downsample_factor": 2, "adapter_layer_norm_eps": 1e-6},
}


class GatedTiles(TileEncoder):
    """A tower, and a linear layer on both sides of a gate behind its merged patches."""

    rules: ClassVar[Sequence[Rule]] = (
        *TOWER,
        (r"^multi_modal_projector\.linear_1\.", "projector_in."),
        (r"^multi_modal_projector\.linear_2\.", "projector_out."),
    )

    def add_projector(self, ctx: BuildContext, info: ModelInfo, model: VisionConfig) -> None:
        """Make the layers behind the tower, which is there."""
        self.merge, inner = model.whole("downsample_factor"), model.whole("alignment_intermediate_size")
        self.projector_in = ReplicatedLinear(ctx, self.tower.width * self.merge**2, inner, True)
        self.projector_out = ReplicatedLinear(ctx, inner // 2, info.hidden_size, True)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Merged patches [n, L, E] -> tokens [n, L, C]."""
        value, gate = self.projector_in(x).chunk(2, dim=-1)
        return self.projector_out(F.silu(gate) * value)  # type: ignore[no-any-return]


class AyaEncoder(GatedTiles):
    """The tower, its patches merged, a norm, and the gate."""

    rules = (*GatedTiles.rules, (r"^multi_modal_projector\.layernorm\.", "projector_norm."))

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, Normalization.of(info, HALF, HALF))
        model = VisionConfig.of_model(info, {**MODEL, "alignment_intermediate_size": info.hidden_size})
        self.tower = chosen_tower(ctx, info, model, tower_kind(info, SIGLIP_TOWER))
        self.add_projector(ctx, info, model)
        self.projector_norm = LayerNorm(ctx, self.tower.width * self.merge**2, model.number("adapter_layer_norm_eps"))

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """See TileEncoder."""
        return self.gated(self.projector_norm(merged(hidden, self.merge)))


class AyaVisionForConditionalGeneration(MediaModel, Cohere2ForCausalLM):
    """Aya Vision."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """See CausalLM; transformers gives it a head of its own, which does not scale logits."""
        return replace(Cohere2ForCausalLM.settings(info), logit_scale=1.0)

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return AyaEncoder(ctx, info)
