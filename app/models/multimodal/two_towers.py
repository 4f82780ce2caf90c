"""CLIP (Radford et al., 2021) and SigLIP (Zhai et al., 2023): a vector of a text, or of a picture, in one space.

A prompt is either. A picture is one token, whose vector the encoder gives; the text's decoder runs over it for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.errors import UnsupportedError
from app.layers.context import BuildContext, ForwardContext
from app.layers.layer import Layer
from app.layers.layer_norm import LayerNorm
from app.layers.replicated import ReplicatedLinear
from app.layers.rope_scaling import RopeSettings
from app.layers.shown import Shown, without_shown
from app.layers.weight import REPLICATED, Weight
from app.models.blocks import Blocks, both_ways_attention, grouped_query_attention, layer_norm, plain_mlp
from app.models.decoder import Decoder
from app.models.decoder_settings import NO_ROPE, DecoderSettings, readable
from app.models.multimodal.base import SeeingModel
from app.models.multimodal.tile_vision import CLIP, SIGLIP, TOWER, TileEncoder, TileSettings, TileVision
from app.models.multimodal.vision_config import CLIP_MEAN, CLIP_STD, HALF, Normalization, VisionConfig
from app.models.multimodal.vision_layers import PlainBlock
from app.models.pooling_model import PoolingModel
from app.records.pooling_info import PoolingInfo

_NAMES: list[Rule] = [
    (r"^text_model\.embeddings\.token_embedding\.", "model.embed_tokens."),
    (r"^text_model\.embeddings\.position_embedding\.", "model.embed_positions."),
    (r"^text_model\.encoder\.layers\.", "model.layers."),
    (r"^text_model\.final_layer_norm\.", "model.norm."),
    (r"^(text_projection|text_model\.head)\.", "text_head."),
    (r"\.layer_norm1\.", ".input_layernorm."),
    (r"\.layer_norm2\.", ".post_attention_layernorm."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.mlp\.fc1\.", ".mlp.up_proj."),
    (r"\.mlp\.fc2\.", ".mlp.down_proj."),
]


class PictureTower(TileEncoder):
    """One vector of a tile."""

    tokens_each = 1


class ClassTower(TileVision):
    """The token before the patches alone."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """[n, 3, side, side] -> [n, 1, C]."""
        return self.all_tokens(pixels)[:, :1]


class ClipTower(PictureTower):
    """The token before the patches, projected."""

    rules = (*TOWER, (r"^visual_projection\.", "projection."))

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, Normalization.of(info, CLIP_MEAN, CLIP_STD))
        v = VisionConfig(info, CLIP)
        depth = v.whole("num_hidden_layers")
        settings = TileSettings(depth, has_class=True, patch_bias=False, pre_norm=True, post_norm=True)
        self.tower = ClassTower(ctx, v, settings)
        self.projection = ReplicatedLinear(ctx, self.tower.size, PoolingInfo.of(info).embedding_size, bias=False)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """See TileEncoder."""
        return self.projection(hidden)  # type: ignore[no-any-return]


class AttentionPool(Layer):
    """x + mlp(norm(x)) of what one learned query reads of a tile's patches."""

    def __init__(self, ctx: BuildContext, v: VisionConfig) -> None:
        super().__init__()
        size, self.num_heads = v.whole("hidden_size"), v.whole("num_attention_heads")
        self.probe = Weight(torch.empty(1, 1, size, dtype=ctx.dtype), REPLICATED)
        self.in_proj_weight = Weight(torch.empty(3 * size, size, dtype=ctx.dtype), REPLICATED)
        self.in_proj_bias = Weight(torch.empty(3 * size, dtype=ctx.dtype), REPLICATED)
        self.out_proj = ReplicatedLinear(ctx, size, size)
        self.layernorm = LayerNorm(ctx, size, v.number("layer_norm_eps"))
        self.mlp = PlainBlock(ctx, size, v.whole("intermediate_size"), v.text("hidden_act"))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """[n, L, C] -> [n, 1, C]."""
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        inputs = self.probe.expand(len(patches), 1, -1), patches, patches
        query, key, value = (
            F.linear(x, weight, bias).view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
            for x, weight, bias in zip(inputs, weights, biases, strict=True)
        )
        x = self.out_proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + self.mlp(self.layernorm(x))  # type: ignore[no-any-return]


class SiglipTower(PictureTower):
    """All patches, through a query."""

    rules = (
        (r"^vision_model\.head\.attention\.in_proj_", "pool.in_proj_"),
        (r"^vision_model\.head\.attention\.out_proj\.", "pool.out_proj."),
        (r"^vision_model\.head\.", "pool."),
        *TOWER,
    )

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, Normalization.of(info, HALF, HALF))
        v = VisionConfig(info, {**SIGLIP, "vision_use_head": True})
        if not v.flag("vision_use_head") or v.whole("hidden_size") != PoolingInfo.of(info).embedding_size:
            raise UnsupportedError(
                f"{info.architecture}: pictures and texts have vectors of other kinds", param="model"
            )
        self.tower = TileVision(ctx, v, TileSettings(v.whole("num_hidden_layers"), post_norm=True))
        self.pool = AttentionPool(ctx, v)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """See TileEncoder."""
        return self.pool(hidden)  # type: ignore[no-any-return]


class TwoTowers(SeeingModel, PoolingModel):
    """The text's layers, and the encoder beside them."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        is_clip = info.is_causal
        self.decoder_settings = settings = readable(_settings, info)
        attention = grouped_query_attention if is_clip else both_ways_attention
        blocks = Blocks(attention=attention, norm=layer_norm, mlp=plain_mlp)
        self.model = Decoder(ctx, settings, lambda kind: RopeSettings.none(), blocks)
        size = PoolingInfo.of(info).embedding_size
        self._size = size
        self.text_head = ReplicatedLinear(ctx, settings.hidden_size, size, bias=not is_clip)
        self.see(ctx, info, ClipTower if is_clip else SiglipTower)

    @property
    def vector_size(self) -> int:
        """See SeeingModel."""
        return self._size

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> vectors [T, E]: those of texts are their last tokens'."""
        texts = self.text_head(self.model(input_ids, replace(ctx, inputs=without_shown(ctx.inputs))))
        return Shown.of(ctx).put(texts)

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See EngineModel; what compares vectors is left out."""
        is_left_out = name in ("logit_scale", "logit_bias") or name.endswith(".position_ids")
        return [] if is_left_out else super().own_tensors(name, tensor)

    def own_name(self, name: str) -> str | None:
        """See EngineModel."""
        return renamed(name, _NAMES)


def _settings(info: ModelInfo) -> DecoderSettings:
    act, eps = ("quick_gelu", 1e-5) if info.is_causal else ("gelu_pytorch_tanh", 1e-6)
    return replace(
        DecoderSettings.from_info(info, tied=True, hidden_act=act, norm_eps=eps),
        tie_word_embeddings=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        rope_types=(NO_ROPE,) * info.num_layers,
        num_positions=info.max_position_embeddings,
    )
