"""Llama 4 with pictures: tiles whose patches rotate by column and row, four patches to a token by their channels."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from app.checkpoints.fields.kinds import expect, number
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.tensor_view import pairs_to_halves
from app.errors import CheckpointError
from app.layers.context import BuildContext
from app.layers.replicated import ReplicatedLinear
from app.models.families.llama4 import Llama4ForCausalLM
from app.models.multimodal.base import MediaEncoder, MediaModel
from app.models.multimodal.tile_vision import TileEncoder, TileSettings, TileVision, merged
from app.models.multimodal.vision_config import HALF, Normalization, VisionConfig
from app.models.multimodal.vision_layers import Span, patches_of

LLAMA4 = {
    **{"hidden_size": 768, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16},
    **{"image_size": 448, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-5},
    **{"pixel_shuffle_ratio": 0.5, "projector_input_dim": 4096, "projector_output_dim": 4096},
    "vision_output_dim": 7680,
}


class Llama4Tower(TileVision):
    """A token stands behind the patches, and does not rotate."""

    def __init__(self, ctx: BuildContext, v: VisionConfig, theta: float) -> None:
        depth = v.whole("num_hidden_layers")
        super().__init__(ctx, v, TileSettings(depth, has_class=True, patch_bias=False, pre_norm=True, post_norm=True))
        if self.head_dim % 4:
            raise CheckpointError(f"vision_config: heads of {self.head_dim}", param="model")
        self.theta, self.dtype, self._kept = theta, ctx.dtype, list[torch.Tensor]()

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """[n, 3, side, side] -> [n, L, C], the token behind the patches left out."""
        assert self.class_token is not None
        assert self.pre_norm is not None
        assert self.post_norm is not None
        n, width = len(pixels), self.size
        x = self.patch_embed(patches_of(pixels, self.patch)).view(n, -1, width)
        x = torch.cat((x, self.class_token.expand(n, 1, -1)), dim=1) + self.positions
        length = x.shape[1]
        x = self.pre_norm(x.flatten(0, 1))
        cos, sin = (one.repeat(n, 1, 1) for one in self._angles(x.device))
        span = Span(self.plan(n, length, x.device), cos, sin)
        for block in self.blocks:
            x = block(x, span)
        patches: torch.Tensor = self.post_norm(x).view(n, length, width)[:, :-1]
        return patches

    def _angles(self, device: torch.device) -> list[torch.Tensor]:
        """cos and sin [T, 1, D] of the tokens of a tile."""
        if not self._kept:
            self._kept = [one.to(device) for one in self._made_angles()]
        return self._kept

    def _made_angles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, on the host."""
        side, half = self.side // self.patch, self.head_dim // 2
        rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        places = torch.stack((columns.flatten(), rows.flatten()), 1).float() + 1
        inverse = 1.0 / self.theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
        angles = F.pad((places[:, :, None] * inverse).flatten(1), (0, 0, 0, 1))
        cos, sin = angles.cos(), angles.sin()
        both = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)
        return both[0].unsqueeze(1).to(self.dtype), both[1].unsqueeze(1).to(self.dtype)


class Llama4Encoder(TileEncoder):
    """The tower, what makes one token of four patches, and the projector."""

    rules = (
        (r"^vision_model\.vision_adapter\.mlp\.", ""),
        (r"^vision_model\.patch_embedding\.linear\.", "tower.patch_embed."),
        (r"^vision_model\.class_embedding$", "tower.class_token"),
        (r"^vision_model\.positional_embedding_vlm$", "tower.positions"),
        (r"^vision_model\.layernorm_(pre|post)\.", r"tower.\1_norm."),
        (r"^vision_model\.model\.layers\.", "tower.blocks."),
        (r"\.input_layernorm\.", ".norm1."),
        (r"\.post_attention_layernorm\.", ".norm2."),
        (r"\.self_attn\.", ".attn."),
        (r"^multi_modal_projector\.linear_1\.", "projector."),
    )
    tower: Llama4Tower

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, Normalization.of(info, HALF, HALF))
        v = VisionConfig(info, LLAMA4)
        self.tower, self.merge = Llama4Tower(ctx, v, _theta(info)), round(1 / v.number("pixel_shuffle_ratio"))
        inner, out = v.whole("projector_input_dim"), v.whole("projector_output_dim")
        self.fc1 = ReplicatedLinear(ctx, self.tower.size * self.merge**2, inner, bias=False)
        self.fc2 = ReplicatedLinear(ctx, inner, out, bias=False)
        self.projector = ReplicatedLinear(ctx, v.whole("vision_output_dim"), info.hidden_size, bias=False)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """See TileEncoder."""
        return self.projector(F.gelu(self.fc2(F.gelu(self.fc1(merged(hidden, self.merge))))))  # type: ignore[no-any-return]

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See MediaEncoder; dimensions of queries and keys in our order."""
        tower = self.tower
        for own, stored in super().own_tensors(name, tensor):
            if ".q_proj." in own or ".k_proj." in own:
                yield own, pairs_to_halves(stored, tower.head_dim, tower.head_dim)
            elif own == "tower.patch_embed.weight":
                yield own, stored.reshaped(tower.size, 3, tower.patch, tower.patch)
            else:
                yield own, stored


def _theta(info: ModelInfo) -> float:
    """The base of the encoder's frequencies."""
    vision = info.hf_config["vision_config"]
    parameters = vision.get("rope_parameters")
    found = (parameters if isinstance(parameters, dict) else vision).get("rope_theta") or 10_000.0
    expect(found, number(above=0, most=1e9), f"{info.directory}/config.json: vision_config.rope_theta")
    return float(found)


class Llama4ForConditionalGeneration(MediaModel, Llama4ForCausalLM):
    """Scout and Maverick."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return Llama4Encoder(ctx, info)
